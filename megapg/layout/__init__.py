"""Which ranks form which groups. Pure arithmetic: no torch, no processes, no state.

A *layout* factors the ranks of a job twice. The **dense grid** has the axes tp, cp, dp and pp; the
**expert grid** has expt_tp, ep, expt_dp and pp over the same ranks. ``order`` says which axis
varies fastest (the first one) and holds for both grids. A *family* is all groups of one field over
the whole layout, and is a partition of the ranks (for the two embedding fields, of some of them).

Everything is answered in closed form for one rank: ``members(field, rank)`` costs the size of the
group, not of the world, so a layout of 131,072 ranks is as cheap to ask as one of 8.

The rank order equals what ``megatron.core.parallel_state.initialize_model_parallel`` makes; the
tests hold it to that, family by family. Within a group the ranks are in the order of
``ranks``, which ascend unless they were given otherwise.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import cast

from megapg.errors import LayoutError, UnknownFieldError
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

# field -> (grid, the axes its groups span). "instance" is the slow part of the expert grid's dp:
# which replica of the distributed optimizer; the dense grid is sliced differently (intra_dp_cp).
# "gtp" is the axis of either grid over which Megatron-core 0.19 shards weights (GTP): its ranks
# have batches of their own, as those of dp have.
_DENSE, _EXPERT = "dense", "expert"
_SPANS: dict[GroupName, tuple[str, tuple[str, ...]]] = {
    "tp": (_DENSE, ("tp",)),
    "pp": (_DENSE, ("pp",)),
    "mp": (_DENSE, ("tp", "gtp", "pp")),
    "cp": (_DENSE, ("cp",)),
    "tp_cp": (_DENSE, ("tp", "cp")),
    "dp": (_DENSE, ("dp",)),
    "dp_cp": (_DENSE, ("dp", "cp")),
    "dp_cp_ag": (_DENSE, ("dp", "cp")),
    "dp_cp_gtp_remat": (_DENSE, ("gtp", "dp", "cp")),
    "tp_dp": (_DENSE, ("tp", "gtp", "dp")),
    "tp_dp_cp": (_DENSE, ("tp", "gtp", "dp", "cp")),
    "gtp_remat": (_DENSE, ("gtp",)),
    "ep": (_EXPERT, ("ep",)),
    "expt_tp": (_EXPERT, ("tp",)),
    "tp_ep": (_EXPERT, ("tp", "ep")),
    "tp_ep_pp": (_EXPERT, ("tp", "ep", "pp")),
    "tp_ep_pp_with_egtp_remat": (_EXPERT, ("tp", "ep", "gtp", "pp")),
    "expt_dp": (_EXPERT, ("dp", "instance")),
    "expt_dp_ag": (_EXPERT, ("dp", "instance")),
    "expt_dp_gtp_remat": (_EXPERT, ("gtp", "dp", "instance")),
    "expt_gtp_remat": (_EXPERT, ("gtp",)),
    "intra_expt_dp": (_EXPERT, ("dp",)),
    "inter_dist_opt": (_EXPERT, ("instance",)),
    "intra_dist_opt": (_EXPERT, ("tp", "ep", "gtp", "dp", "pp")),
}
_DERIVED: tuple[Field, ...] = ("embd", "pos_embd", "intra_dp_cp")

if {*_SPANS, *_DERIVED, "hcp"} != {*FIELDS}:
    raise RuntimeError("a field has a name and no ranks, or the other way round")  # one vocabulary


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits in both grids; every value is an index, from 0."""

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
    """The sizes and the order of a parallel job, and from them the ranks of every group.

    Args:
        world_size: number of ranks in the layout.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        cp: context parallel size.
        ep: expert parallel size; experts spread over the ranks of tp, cp and dp.
        expt_tp: tensor parallel size inside an expert; ``tp`` unless given.
        gtp_remat: over how many ranks each weight of the dense layers is sharded, to be gathered
            as it is used (Megatron-core 0.19's generalised tensor parallelism, which trains with
            Transformer Engine on GPUs). These ranks are next to those of ``tp``; each has batches
            of its own, and ``dp`` counts the ranks with the same weights.
        expt_gtp_remat: the same for the experts' weights, next to the ranks of ``ep``.
        order: axes from fastest to slowest varying rank, for example ``"tp-cp-ep-dp-pp"``.
        optimizer_instances: replicas of the distributed optimizer across data parallelism.
        hierarchical_cp: sizes of the levels of context parallelism, innermost first; their
            product is ``cp``.
        embedding_ranks: which ranks of a pipeline hold the word embeddings.
        position_embedding_ranks: the same for the position embeddings.
        vpp: virtual pipeline size, the model chunks a rank holds; needs ``pp`` > 1.
        hybrid_cp: also form the groups by size of hybrid context parallelism, ``hybrid.2``,
            ``hybrid.4``, ...: neighbours within data x context parallelism.
        ranks: the global ranks the layout lives on, for a model that has only part of the job, for
            example ``range(4, 8)``. In any order, for machines whose ranks are not numbered as they
            are wired: of ``[3, 1, 0, 2]`` rank 3 has the first place, and every group has its
            members in this order. All ranks from 0 unless given.

    Raises:
        LayoutError: the values do not fit together; the message does the arithmetic and names
            the nearest layouts that would fit.
    """

    # -- questions ---------------------------------------------------------------------------

    @cached_property
    def families(self) -> tuple[GroupName, ...]:
        """Every name ``members`` and ``partition`` answer for in this layout."""
        spanned = [f for f in _SPANS if f != "inter_dist_opt" or self.optimizer_instances > 1]
        levels = range(len(self.hierarchical_cp))
        sizes = self.hybrid_cp_sizes
        return (
            *spanned,
            *_DERIVED,
            *(cast("GroupName", f"hcp.{level}") for level in levels),
            *(cast("GroupName", f"hybrid.{size}") for size in sizes),
        )

    @property
    def hybrid_cp_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups that hybrid context parallelism picks from: the powers of two from
        2 to half of dp x cp, as Megatron's; none unless ``hybrid_cp``.
        """
        if not self.hybrid_cp:
            return ()
        return tuple(2**n for n in range(1, (self.dp * self.cp).bit_length() - 1))

    def members(self, field: GroupName, rank: int) -> tuple[int, ...]:
        """Global ranks of the group of ``field`` that ``rank`` is in, in the layout's order.

        Costs O(group size). Empty where the rank is outside the family, which only the two
        embedding fields allow.

        Raises:
            UnknownFieldError: no such field, or one this layout does not configure.
            LayoutError: ``rank`` is not in the layout.
        """
        position = self._position(rank)
        return self._to_ranks(self._positions(self._known(field), position))

    def partition(self, field: GroupName) -> Iterator[tuple[int, ...]]:
        """Every group of ``field``, lazily, in the layout's order of their first ranks.

        Raises:
            UnknownFieldError: as ``members``.
        """
        self._known(field)
        return self._groups(field)

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` sits in both grids.

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

    def describe(self) -> dict[str, str]:
        """Every setting as text: equal on two ranks exactly when their layouts are equal."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["embedding_ranks"] = self._describe_embedding("embd")
        values["position_embedding_ranks"] = self._describe_embedding("pos_embd")
        return {name: text_of(value) for name, value in values.items()}

    def fingerprint(self) -> str:
        """A digest of the layout, the same on every rank and in every process: 64 hex digits."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    # -- how the groups come about -----------------------------------------------------------

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(self.ranks)

    def _positions(self, field: GroupName, at: int) -> Sequence[int]:
        if field in _SPANS:
            grid, spanned = _SPANS[field]
            return (self._dense if grid == _DENSE else self._expert).through(at, spanned)
        if field in ("embd", "pos_embd"):
            return self._embedding(field, at)
        if field == "intra_dp_cp":
            instances = self.optimizer_instances
            slices = (self.dp * self.cp // instances, instances)
            return _level(self._positions("dp_cp", at), at, slices, 0)
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
                # It may choose stages whose ranks come in another order than the pipelines.
                groups = sorted(groups, key=lambda group: self._position(group[0]))
            yield from groups
            return
        if field in _SPANS:
            grid, spanned = _SPANS[field]
            for at in (self._dense if grid == _DENSE else self._expert).origins(spanned):
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
        at = bisect.bisect_left(self.ranks, rank)  # finds it where they ascend
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
        # A callable is what it answers: names and source differ between equal functions.
        answers = list(self._groups(field))
        return "custom:" + hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]


def _level(group: Sequence[int], at: int, sizes: Sequence[int], level: int) -> list[int]:
    """The sub-group of ``group`` around ``at`` on one level of a hierarchy, innermost level first.

    A group of 16 with sizes (2, 2, 4) has neighbours in pairs on level 0, pairs two apart on level
    1, and fours four apart on level 2.
    """
    index = bisect.bisect_left(group, at)
    stride, size = math.prod(sizes[:level]), sizes[level]
    first = index - index // stride % size * stride
    return [group[first + stride * step] for step in range(size)]
