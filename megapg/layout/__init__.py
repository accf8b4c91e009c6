"""Compute which ranks form which groups. Pure arithmetic: no torch, no processes, no state.

A *layout* factors the ranks of a job twice. The **dense grid** has the axes tp, cp, dp and pp. The
**expert grid** has expt_tp, ep, expt_dp and pp over the same ranks. ``order`` lists the axes of
both grids, the fastest varying first. A *family* is all groups of one field over the whole layout.
It is a partition of the ranks (for the two embedding fields, of some of them).

All results for one rank are in closed form: ``members(field, rank)`` costs the size of the group,
not of the world. A layout of 131,072 ranks costs no more per call than one of 8.

The order of ranks equals that of ``megatron.core.parallel_state.initialize_model_parallel``, and
the tests compare every family. Within a group the ranks are in the order of ``ranks``, which ascend
unless given otherwise.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import cached_property
from typing import cast

from megapg.errors import LayoutError, UnknownFieldError
from megapg.layout.fields import DENSE, TABLE
from megapg.layout.fit import AXES as AXES
from megapg.layout.fit import DEFAULT_CHOICES, Sizes, text_of
from megapg.layout.fit import DEFAULT_ORDER as DEFAULT_ORDER
from megapg.layout.fit import EmbeddingRanks as EmbeddingRanks
from megapg.layout.fit import default_embedding_ranks as default_embedding_ranks
from megapg.layout.fit import default_position_embedding_ranks as default_position_embedding_ranks
from megapg.layout.fit import full_order as full_order
from megapg.layout.names import FIELDS as FIELDS
from megapg.layout.names import Field as Field
from megapg.layout.names import Fields as Fields
from megapg.layout.names import GroupName as GroupName

# field -> (grid, the axes its groups span)
_SPANS: dict[GroupName, tuple[str, tuple[str, ...]]] = {
    field: (row.grid, row.axes) for field, row in TABLE.items() if row.grid
}
_DERIVED: tuple[Field, ...] = ("embd", "pos_embd", "intra_dp_cp")


@dataclass(frozen=True)
class Coordinates:
    """The coordinates of a rank in both grids; every value is an index, from 0."""

    tp: int
    cp: int
    dp: int
    pp: int
    expt_tp: int
    ep: int
    expt_dp: int
    gtp_remat: int = 0
    expt_gtp_remat: int = 0


@dataclass(frozen=True, kw_only=True)
class ParallelLayout(Sizes):
    """The sizes and the order of a parallel job, which define the ranks of every group.

    Args:
        world_size: number of ranks in the layout.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        cp: context parallel size.
        ep: expert parallel size. Experts spread over the ranks of tp, cp and dp.
        expt_tp: tensor parallel size inside an expert. Default: ``tp``.
        gtp_remat: number of ranks over which each weight of the dense layers is sharded. Weights
            are gathered for use (Megatron-core 0.19's generalised tensor parallelism, which trains
            with Transformer Engine on GPUs). These ranks are next to those of ``tp``, and have
            different batches. ``dp`` counts the ranks with the same weights.
        expt_gtp_remat: the same for the experts' weights, next to the ranks of ``ep``.
        order: axes from fastest to slowest varying rank, for example ``"tp-cp-ep-dp-pp"``.
        optimizer_instances: replicas of the distributed optimizer across data parallelism.
        hierarchical_cp: sizes of the levels of context parallelism, innermost first; their
            product is ``cp``.
        embedding_ranks: returns the ranks of a pipeline that hold the word embeddings.
        position_embedding_ranks: the same for the position embeddings.
        vpp: virtual pipeline size: the number of model chunks per rank. Needs ``pp`` > 1.
        hybrid_cp: also form the groups of hybrid context parallelism, ``hybrid.2``, ``hybrid.4``,
            ...: neighbours within data x context parallelism.
        ranks: the global ranks of the layout, for a model on a part of the job, for example
            ``range(4, 8)``. Any order is allowed, for machines whose ranks are not numbered by
            their wiring. With ``[3, 1, 0, 2]`` rank 3 is first, and every group lists its members
            in this order. Default: all ranks from 0.

    Raises:
        LayoutError: the values do not fit together. The message shows the arithmetic and the
            nearest layouts that fit.
    """

    # -- questions ---------------------------------------------------------------------------

    @cached_property
    def families(self) -> tuple[GroupName, ...]:
        """Every name that ``members`` and ``partition`` accept in this layout."""
        spanned = [f for f in _SPANS if f != "inter_dist_opt" or self.optimizer_instances > 1]
        levels = (f"hcp.{level}" for level in range(len(self.hierarchical_cp)))
        hybrids = (f"hybrid.{size}" for size in self.hybrid_cp_sizes)
        return cast("tuple[GroupName, ...]", (*spanned, *_DERIVED, *levels, *hybrids))

    @property
    def hybrid_cp_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups of hybrid context parallelism; empty without ``hybrid_cp``.

        As in Megatron: the powers of two from 2 to half of dp x cp.
        """
        if not self.hybrid_cp:
            return ()
        return tuple(2**n for n in range(1, (self.dp * self.cp).bit_length() - 1))

    def members(self, field: GroupName, rank: int) -> tuple[int, ...]:
        """Return the global ranks of the group of ``field`` with ``rank``, in the layout's order.

        Costs O(group size). Empty if the rank is in no group of the family, which is possible only
        for the two embedding fields.

        Raises:
            UnknownFieldError: no such field, or this layout does not have it.
            LayoutError: ``rank`` is not in the layout.
        """
        position = self._position(rank)
        return self._to_ranks(self._positions(self._known(field), position))

    def partition(self, field: GroupName) -> Iterator[tuple[int, ...]]:
        """Yield every group of ``field``, in the layout's order of their first ranks.

        Raises:
            UnknownFieldError: see ``members``.
        """
        self._known(field)
        return self._groups(field)

    def first_ranks(self, field: GroupName) -> Sequence[int]:
        """Return the first rank of every group of ``field``, in the order of ``partition``.

        Costs O(number of groups) for most fields, and less if these ranks are a range.

        Raises:
            UnknownFieldError: see ``members``.
        """
        field = self._alike(self._known(field))
        if field not in _SPANS:
            return [group[0] for group in self._groups(field)]
        grid, spanned = _SPANS[field]
        origins = (self._dense if grid == DENSE else self._expert).origins(spanned)
        ranks = self.ranks
        return origins if ranks == range(self.world_size) else [ranks[at] for at in origins]

    def group_number(self, field: GroupName, rank: int) -> int | None:
        """Return the place of the rank's group in ``partition(field)``, from 0.

        Costs no more in a large layout, for most fields. None if the rank is in no group.

        Raises:
            UnknownFieldError: see ``members``.
            LayoutError: ``rank`` is not in the layout.
        """
        at = self._position(rank)
        alike = self._alike(self._known(field))
        if alike in _SPANS:
            if alike == "pp" and not self._positions(field, at):
                return None
            grid, spanned = _SPANS[alike]
            return (self._dense if grid == DENSE else self._expert).number(at, spanned)
        return next((n for n, each in enumerate(self._groups(field)) if rank in each), None)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of ``rank`` in both grids.

        Raises:
            LayoutError: ``rank`` is not in the layout.
        """
        at = self._position(rank)
        dense, expert = self._dense, self._expert
        return Coordinates(
            tp=dense.coordinate("tp", at),
            cp=dense.coordinate("cp", at),
            dp=dense.coordinate("dp", at),
            pp=dense.coordinate("pp", at),
            expt_tp=expert.coordinate("tp", at),
            ep=expert.coordinate("ep", at),
            expt_dp=expert.coordinate("dp", at)
            + expert.coordinate("instance", at) * (self.expt_dp // self.optimizer_instances),
            gtp_remat=dense.coordinate("gtp", at),
            expt_gtp_remat=expert.coordinate("gtp", at),
        )

    def is_regular(self, field: GroupName) -> bool:
        """True if every group of ``field`` is another one moved along the ranks of the layout."""
        return self._alike(self._known(field)) in _SPANS

    @cached_property
    def block_sizes(self) -> tuple[int, ...]:
        """The strides of the axes of both grids, ascending, and the world size.

        If each one divides the next, the groups repeat from block to block.
        """
        strides = (g.stride(axis) for g in (self._dense, self._expert) for axis in g.axes)
        return tuple(sorted({self.world_size, *strides}))

    def describe(self) -> dict[str, str]:
        """Return every setting as text. The texts are equal exactly if the layouts are."""
        values = {f.name: getattr(self, f.name) for f in fields_of(self)}
        values["embedding_ranks"] = self._describe_embedding("embd")
        values["position_embedding_ranks"] = self._describe_embedding("pos_embd")
        return {name: text_of(value) for name, value in values.items()}

    def fingerprint(self) -> str:
        """Return a digest of the layout, equal on every rank and process: 64 hex digits."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    def _repr_html_(self) -> str:
        """Return a table of the groups, for notebooks: equal ones of several fields in one row."""
        rows: dict[tuple[int, str], list[GroupName]] = {}
        for field in self.families:
            first = self.members(field, self.ranks[0])
            if len(first) > 1:
                rows.setdefault((len(self.first_ranks(field)), _shortened(first)), []).append(field)
        cells = "".join(
            f"<tr><td>{', '.join(fields)}</td><td>{groups}</td><td>{ranks}</td></tr>"
            for (groups, ranks), fields in rows.items()
        )
        head = "<th>fields</th><th>groups</th><th>ranks of the first</th>"
        return f"<table><caption>{self.world_size} ranks</caption><tr>{head}</tr>{cells}</table>"

    # -- how the groups come about -----------------------------------------------------------

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(self.ranks)

    def _alike(self, field: GroupName) -> GroupName:
        """Return a field of a grid whose groups start at the same ranks as those of ``field``."""
        if field in ("embd", "pos_embd") and self._chooser(field) in DEFAULT_CHOICES:
            return "pp"
        return "dp_cp" if field == "intra_dp_cp" and self.optimizer_instances == 1 else field

    def _positions(self, field: GroupName, at: int) -> Sequence[int]:
        if field in _SPANS:
            grid, spanned = _SPANS[field]
            return (self._dense if grid == DENSE else self._expert).through(at, spanned)
        if field in ("embd", "pos_embd"):
            return self._embedding(field, at)
        if field == "intra_dp_cp":
            whole, instances = self._positions("dp_cp", at), self.optimizer_instances
            return _level(whole, at, (len(whole) // instances, instances), 0)
        if field.startswith("hybrid."):
            size, whole = int(field[7:]), self._positions("dp_cp", at)
            first = whole.index(at) // size * size
            return whole[first : first + size]
        return _level(self._positions("cp", at), at, self.hierarchical_cp, int(field[4:]))

    def _embedding(self, field: GroupName, at: int) -> list[int]:
        pipeline = self._positions("pp", at)
        chosen = self._chosen(field, self._to_ranks(pipeline))
        positions = [self._position(rank) for rank in chosen]
        return positions if at in positions else []

    def _chooser(self, field: str) -> EmbeddingRanks:
        return self.embedding_ranks if field == "embd" else self.position_embedding_ranks

    def _chosen(self, field: str, pipeline: tuple[int, ...]) -> list[int]:
        chosen = [operator.index(rank) for rank in self._chooser(field)(list(pipeline))]
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(pipeline):
            raise LayoutError(
                f"{field}: the callable chose the ranks {chosen} for the pipeline "
                f"{list(pipeline)}; choose distinct ranks of that pipeline."
            )
        return [rank for rank in pipeline if rank in chosen]

    def _groups(self, field: GroupName) -> Iterator[tuple[int, ...]]:
        if field in ("embd", "pos_embd"):
            chosen = (tuple(self._chosen(field, each)) for each in self._groups("pp"))
            groups: Iterable[tuple[int, ...]] = (group for group in chosen if group)
            if self._chooser(field) not in DEFAULT_CHOICES:
                # The callable may choose stages whose ranks are in another order than the
                # pipelines.
                groups = sorted(groups, key=lambda group: self._position(group[0]))
            yield from groups
            return
        if field in _SPANS:
            grid, spanned = _SPANS[field]
            for at in (self._dense if grid == DENSE else self._expert).origins(spanned):
                yield self._to_ranks(self._positions(field, at))
            return
        seen: set[int] = set()
        for at in range(self.world_size):
            if at not in seen:
                group = self._positions(field, at)
                seen.update(group)
                yield self._to_ranks(group)

    def _to_ranks(self, positions: Sequence[int]) -> tuple[int, ...]:
        if len(positions) == self.world_size:
            return self._everyone
        if self.ranks == range(self.world_size):
            return tuple(positions)  # the groups of a large job are large
        return tuple(self.ranks[p] for p in positions)

    def _position(self, rank: int) -> int:
        at = bisect.bisect_left(self.ranks, rank)  # works if the ranks ascend
        if at < self.world_size and self.ranks[at] == rank:
            return at
        if rank not in self._places:
            raise LayoutError(
                f"rank {rank} is not in this layout, which has the ranks {text_of(self.ranks)}."
            )
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def _known(self, field: GroupName) -> GroupName:
        if field in self.families:
            return field
        if field == "inter_dist_opt":
            raise UnknownFieldError("inter_dist_opt exists only with optimizer_instances > 1.")
        if field.partition(".")[0] == "hcp":
            levels = " or ".join(f"hcp.{level}" for level in range(len(self.hierarchical_cp)))
            raise UnknownFieldError(
                f"{field}: hierarchical context parallelism has levels; ask for {levels}."
                if levels
                else f"{field} exists only with hierarchical_cp=(...)."
            )
        if field.partition(".")[0] == "hybrid":
            sizes = ", ".join(map(str, self.hybrid_cp_sizes)) or "none; they take hybrid_cp=True"
            raise UnknownFieldError(f"{field}: the sizes of hybrid groups here are {sizes}.")
        raise UnknownFieldError.of(field, FIELDS)

    def _describe_embedding(self, field: Field) -> str:
        choose = self._chooser(field)
        if choose in DEFAULT_CHOICES:
            return choose.__name__
        # Describe a callable by its results: equal functions may differ in name and source.
        answers = list(self._groups(field))
        return "custom:" + hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]


def _shortened(ranks: Sequence[int]) -> str:
    """Return ranks for people, such as ``0, 8, ... 56``."""
    if len(ranks) > 8:
        return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _level(group: Sequence[int], at: int, sizes: Sequence[int], level: int) -> list[int]:
    """Return the sub-group of ``group`` with ``at`` on one level of a hierarchy, innermost first.

    Example: a group of 16 with sizes (2, 2, 4). Level 0 has pairs of neighbours, level 1 pairs with
    stride 2, and level 2 groups of four with stride 4.
    """
    index = bisect.bisect_left(group, at)
    stride, size = math.prod(sizes[:level]), sizes[level]
    first = index - index // stride % size * stride
    return [group[first + stride * step] for step in range(size)]
