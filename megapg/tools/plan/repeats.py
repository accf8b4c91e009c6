"""Equal layers cost the same: a few of them are run once, and the others are added."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megapg.collection import ProcessGroupCollection
from megapg.layout import GroupName, ParallelLayout
from megapg.testing.traffic import Collective
from megapg.tools.plan.training import Job

_OF_LAYERS: tuple[GroupName, ...] = ("tp", "cp", "tp_cp", "ep", "expt_tp", "tp_ep")
_OF_PIPELINE = re.compile("pipeline|vp_stage")
_PLAIN = (bool, int, float, str)
_FEW = 2  # equal layers that are run, and one more to find the cost of a layer


@dataclass(frozen=True)
class Ran:
    """One microbatch of a chunk.

    Attributes:
        rows: its collectives.
        kept: bytes of activations after the forward pass.
        peak: most bytes of activations in the backward pass.
    """

    rows: tuple[Collective, ...]
    kept: int
    peak: int


class Known:
    """The microbatches that were run. Layouts of one model and job may share them.

    A layer communicates with its groups of tp, cp and ep. Other sizes decide at most whether it
    communicates at all.
    """

    def __init__(self) -> None:
        self._ran: dict[object, Ran] = {}

    def run(
        self, pg: ProcessGroupCollection, job: Job, chunk: torch.nn.Module, run: Callable[[], Ran]
    ) -> Ran:
        """Return the result of ``run``, or that of an equal chunk in groups of equal sizes."""
        layout, plain = pg.layout, unwrap_model(chunk)
        assert layout is not None
        key = (
            _sizes(layout, pg.ranks("pp")[pg.rank("pp")]),
            tuple(
                (name, p.shape, p.dtype, p.requires_grad) for name, p in plain.named_parameters()
            ),
            (plain.pre_process, plain.post_process),
            _settings(plain.config),
            replace(job, microbatches=1),
        )
        ran = self._ran.get(key) or self._ran.get((key, layout))
        if ran is None:
            ran = run()
            others = any(row.size > 1 and row.field not in _OF_LAYERS for row in ran.rows)
            self._ran[(key, layout) if others else key] = ran
        return ran


def _sizes(layout: ParallelLayout, rank: int) -> tuple[int, ...]:
    """Return the sizes of a rank's groups; 2 for larger ones of fields that layers do not use.

    The groups of embeddings communicate after the microbatches.
    """
    fields = (field for field in layout.families if field not in ("embd", "pos_embd"))
    sizes = {field: len(layout.members(field, rank)) for field in fields}
    return tuple(size if field in _OF_LAYERS else min(size, 2) for field, size in sizes.items())


def _settings(config: object) -> frozenset[tuple[str, object]]:
    """Return the plain settings of a model, without those of the pipeline."""
    return frozenset(
        (name, value if isinstance(value, _PLAIN) else str(value))
        for name, value in vars(config).items()
        if isinstance(value, (*_PLAIN, list, tuple)) and not _OF_PIPELINE.search(name)
    )


def run_layers(chunk: torch.nn.Module, run: Callable[[], Ran]) -> Ran:
    """Call ``run`` with few layers in the chunk, and return its result for all layers."""
    plain: Any = unwrap_model(chunk)
    block: Any = getattr(plain, "decoder", None)
    layers = list(getattr(block, "layers", ()))
    of_layers = {each for layer in layers for each in layer.parameters()}
    before = itertools.takewhile(lambda each: each not in of_layers, plain.parameters())
    # A layer keeps less if its input takes no gradient. What a stage receives takes one.
    takes = not getattr(plain, "pre_process", False) or any(each.requires_grad for each in before)
    kinds: dict[object, list[int]] = {}
    for place, layer in enumerate(layers):
        own = dict(layer.named_parameters())
        shapes = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in own.items())
        kinds.setdefault((type(layer), shapes, takes), []).append(place)
        takes = takes or any(each.requires_grad for each in own.values())
    many = [places for places in kinds.values() if len(places) > _FEW + 1]
    if not many or block.config.recompute_num_layers not in (None, 1):
        return run()  # these layers are recomputed together
    few = [place for places in kinds.values() for place in places[:_FEW]]
    with _only(block, few):
        first = total = run()
    for places in many:
        with _only(block, [*few, places[_FEW]]):
            total = _add(total, run(), first, len(places) - _FEW)
    return total


@contextlib.contextmanager
def _only(block: Any, places: Iterable[int]) -> Iterator[None]:
    """Leave only these layers in a block."""
    layers = block.layers
    block.layers = torch.nn.ModuleList(layers[place] for place in sorted(places))
    block.num_layers_per_pipeline_rank = len(block.layers)
    try:
        yield
    finally:
        block.layers, block.num_layers_per_pipeline_rank = layers, len(layers)


def _add(total: Ran, more: Ran, less: Ran, times: int) -> Ran:
    """Add the difference of two microbatches some times."""
    rows = {_key(row): row for row in (*more.rows, *total.rows)}
    for sign, ran in ((times, more), (-times, less)):
        for row in ran.rows:
            old = rows[_key(row)]
            count, size = old.count + sign * row.count, old.bytes + sign * row.bytes
            rows[_key(row)] = replace(old, count=count, bytes=size)
    kept = total.kept + times * (more.kept - less.kept)
    return Ran(tuple(sorted(rows.values())), kept, total.peak + times * (more.peak - less.peak))


def _key(row: Collective) -> tuple[str, str, int]:
    return row.field, row.collective, row.size
