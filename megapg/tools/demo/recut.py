"""Chooses another layout of the same ranks, to resume a run under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megapg.errors import LayoutError
from megapg.layout import ParallelLayout
from megapg.tools.demo.job import GPTRun


def recut(layout: ParallelLayout, run: GPTRun) -> GPTRun | None:
    """Return the same job, cut otherwise and with the same global batch; None if there is none."""
    for tp, pp in ((run.tp, 1), (1, run.pp), (1, 1), (run.tp, 2), (2, 1)):
        if (tp, pp) == (run.tp, run.pp) or run.heads % tp or run.layers % pp:
            continue
        other = replace(
            run,
            tp=tp,
            pp=pp,
            vpp=None,
            expt_tp=None,
            sequence_parallel=tp > 1 and (run.sequence_parallel or run.experts is not None),
        )
        try:
            dp = ParallelLayout(world_size=layout.world_size, tp=tp, pp=pp, ep=run.ep).dp
        except LayoutError:
            continue
        microbatches, rest = divmod(run.num_microbatches * layout.dp, dp)
        if microbatches and not rest:
            return replace(other, num_microbatches=microbatches)
    return None


def sizes_for_parity(run: GPTRun, world_size: int) -> Mapping[str, int]:
    """Return the sizes of a run as arguments of ``parity``."""
    sizes = {"tp": run.tp, "pp": run.pp, "vpp": run.vpp or 1, "ep": run.ep}
    more = {"world": world_size}
    if run.expt_tp not in (None, run.tp):
        more["expt_tp"] = run.expt_tp
    return {axis: size for axis, size in sizes.items() if size > 1} | more


def cut(run: GPTRun) -> str:
    """Return the sizes of a run as text: ``tp2 pp2``."""
    sizes = {"tp": run.tp, "pp": run.pp, "ep": run.ep}
    return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "dp alone"
