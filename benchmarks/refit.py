"""The table about refits. :mod:`benchmarks.refit_trials` measures."""

from __future__ import annotations

import importlib.metadata

from benchmarks import refit_trials as trials
from benchmarks.table import Options, Table, verdict

TARGET = 1.05
"""Most bytes that may arrive, of the least possible."""


def tables(given: Options) -> list[Table]:
    """Return the table."""
    rows = []
    for trial in trials.TRIALS[:1] if given.quick else trials.TRIALS:
        found = trials.run(trial, quick=given.quick)
        ours = trials.median(found[trials.MEGAPG])
        for name in (trials.MEGAPG, trials.CORE, trials.BROADCAST):
            if name not in found:
                rows.append((f"{trial.name}: {name}", *["-"] * 7))
                continue
            outcomes = found[name]
            seconds = trials.median(outcomes)
            moved = sum(each.received for each in outcomes) / sum(each.least for each in outcomes)
            rows.append(
                (
                    f"{trial.name}: {name}",
                    f"{moved:.2f}",
                    *verdict(moved, TARGET if name == trials.MEGAPG else None),
                    f"{ours / seconds:.2f}",
                    f"{max(each.memory for each in outcomes) / 2**20:.0f}",
                    f"{seconds:.2f}",
                    f"{max(each.first for each in outcomes):.2f}",
                )
            )
    core = importlib.metadata.version("megatron-core")
    return [
        Table(
            "Weights into another layout: megapg.Refit against its peers",
            (
                *("", "bytes moved, of the least", "wanted", "", "megapg's time / its time"),
                *("peak, MiB", "s (noise)", "first call, s"),
            ),
            tuple(rows),
            (
                f"Megatron-core {core}. Bytes moved: the bytes that arrive from other ranks, over "
                "the bytes of the targets that their ranks do not hold as sources. Peak: the "
                "growth of a rank's resident memory in a run; megapg's buffers may take "
                f"{trials.BUCKET >> 20} MiB. The first call makes the plan. All contestants leave "
                "the same weights.",
            ),
        )
    ]
