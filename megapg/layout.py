"""Which ranks form which groups. Pure arithmetic: no torch, no processes, no state.

A *layout* factors the ranks of a job twice. The **dense grid** has the axes tp, cp, dp and pp; the
**expert grid** has expt_tp, ep, expt_dp and pp over the same ranks. ``order`` says which axis
varies fastest (the first one) and holds for both grids. A *family* is all groups of one field over
the whole layout, and is a partition of the ranks (for the two embedding fields, of some of them).

Everything is answered in closed form for one rank: ``members(field, rank)`` costs the size of the
group, not of the world, so a layout of 131,072 ranks is as cheap to ask as one of 8.

The rank order equals what ``megatron.core.parallel_state.initialize_model_parallel`` makes; the
tests hold it to that, family by family. Within a group the ranks ascend, as torch sorts them.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeAlias

from megapg.errors import LayoutError, UnknownFieldError

EmbeddingRanks: TypeAlias = Callable[[list[int]], Sequence[int]]
"""Given the global ranks of one pipeline, first stage first: those that hold the embedding."""

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"

# field -> (grid, the axes its groups span). "instance" is the slow part of the expert grid's dp:
# which replica of the distributed optimizer; the dense grid is sliced differently (intra_dp_cp).
# The singleton families (no axes) and the twins of dp_cp, expt_dp and tp_ep_pp are Megatron-core
# 0.19's GTP fields with weight rematerialisation off.
_DENSE, _EXPERT = "dense", "expert"
_SPANS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp": (_DENSE, ("tp",)),
    "pp": (_DENSE, ("pp",)),
    "mp": (_DENSE, ("tp", "pp")),
    "cp": (_DENSE, ("cp",)),
    "tp_cp": (_DENSE, ("tp", "cp")),
    "dp": (_DENSE, ("dp",)),
    "dp_cp": (_DENSE, ("dp", "cp")),
    "dp_cp_ag": (_DENSE, ("dp", "cp")),
    "dp_cp_gtp_remat": (_DENSE, ("dp", "cp")),
    "tp_dp": (_DENSE, ("tp", "dp")),
    "tp_dp_cp": (_DENSE, ("tp", "dp", "cp")),
    "gtp_remat": (_DENSE, ()),
    "ep": (_EXPERT, ("ep",)),
    "expt_tp": (_EXPERT, ("tp",)),
    "tp_ep": (_EXPERT, ("tp", "ep")),
    "tp_ep_pp": (_EXPERT, ("tp", "ep", "pp")),
    "tp_ep_pp_with_egtp_remat": (_EXPERT, ("tp", "ep", "pp")),
    "expt_dp": (_EXPERT, ("dp", "instance")),
    "expt_dp_ag": (_EXPERT, ("dp", "instance")),
    "expt_dp_gtp_remat": (_EXPERT, ("dp", "instance")),
    "expt_gtp_remat": (_EXPERT, ()),
    "intra_expt_dp": (_EXPERT, ("dp",)),
    "inter_dist_opt": (_EXPERT, ("instance",)),
    "intra_dist_opt": (_EXPERT, ("tp", "ep", "dp", "pp")),
}
_DERIVED = ("embd", "pos_embd", "intra_dp_cp")

FIELDS: tuple[str, ...] = (*_SPANS, *_DERIVED, "hcp")
"""Every field a collection can hold. ``hcp`` is a list of groups: its levels are ``hcp.0``, ..."""


def default_embedding_ranks(pipeline: list[int]) -> list[int]:
    """First and last stage, as Megatron's default: where the word embeddings live."""
    return pipeline[:1] if len(pipeline) == 1 else [pipeline[0], pipeline[-1]]


def default_position_embedding_ranks(pipeline: list[int]) -> list[int]:
    """First stage only, as Megatron's default: where the position embeddings live."""
    return pipeline[:1]


_DEFAULT_CHOICES = (default_embedding_ranks, default_position_embedding_ranks)


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


@dataclass(frozen=True)
class _Grid:
    """A mixed-radix factorisation of the positions 0..world-1; the first axis varies fastest."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @cached_property
    def _digits(self) -> dict[str, tuple[int, int]]:
        strides = [math.prod(self.sizes[:i]) for i in range(len(self.sizes))]
        return {axis: (strides[i], self.sizes[i]) for i, axis in enumerate(self.axes)}

    def stride(self, axis: str) -> int:
        return self._digits[axis][0]

    def coordinate(self, axis: str, position: int) -> int:
        stride, size = self._digits[axis]
        return position // stride % size

    def through(self, position: int, spanned: Sequence[str]) -> Sequence[int]:
        """Positions that share every coordinate with ``position`` but those of ``spanned``."""
        first = position - sum(self._offset(axis, position) for axis in spanned)
        runs = self._runs(spanned)
        if len(runs) == 1:
            stride, size = runs[0]
            return range(first, first + stride * size, stride)
        # The longest run goes in as whole ranges: element by element, a large group is slow.
        longest = max(range(len(runs)), key=lambda index: runs[index][1])
        stride, size = runs[longest]
        inner, outer = _sums(runs[:longest]), _sums(runs[longest + 1 :])
        block = len(inner) * size
        found = [0] * (block * len(outer))
        for n, far in enumerate(outer):
            for i, near in enumerate(inner):
                start = first + near + far
                slots = slice(n * block + i, (n + 1) * block, len(inner))
                found[slots] = range(start, start + stride * size, stride)
        return found

    def _runs(self, spanned: Sequence[str]) -> list[tuple[int, int]]:
        """(stride, size) of the spanned axes, neighbouring ones merged: a group of the whole world
        is then one range, whatever it is factored into.
        """
        runs = [(1, 1)]
        for axis in (axis for axis in self.axes if axis in spanned):
            stride, size = self._digits[axis]
            last_stride, last_size = runs[-1]
            if last_size == 1:
                runs[-1] = (stride, size)
            elif last_stride * last_size == stride:
                runs[-1] = (last_stride, last_size * size)
            elif size > 1:
                runs.append((stride, size))
        return runs

    def origins(self, spanned: Sequence[str]) -> Sequence[int]:
        """The lowest position of every group over ``spanned``, ascending."""
        return self.through(0, [axis for axis in self.axes if axis not in spanned])

    def _offset(self, axis: str, position: int) -> int:
        return self.coordinate(axis, position) * self.stride(axis)


def _sums(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Every multiple of each run's stride added up, the first run varying fastest."""
    sums = [0]
    for stride, size in runs:
        sums = [total + stride * n for n in range(size) for total in sums]
    return sums


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The sizes and the order of a parallel job, and from them the ranks of every group.

    Args:
        world_size: number of ranks in the layout.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        cp: context parallel size.
        ep: expert parallel size; experts spread over the ranks of tp, cp and dp.
        expt_tp: tensor parallel size inside an expert; ``tp`` unless given.
        order: axes from fastest to slowest varying rank, for example ``"tp-cp-ep-dp-pp"``.
        optimizer_instances: replicas of the distributed optimizer across data parallelism.
        hierarchical_cp: sizes of the levels of context parallelism, innermost first; their
            product is ``cp``.
        embedding_ranks: which ranks of a pipeline hold the word embeddings.
        position_embedding_ranks: the same for the position embeddings.
        vpp: virtual pipeline size, the model chunks a rank holds; needs ``pp`` > 1.
        hybrid_cp: also form the groups by size of hybrid context parallelism, ``hybrid.2``,
            ``hybrid.4``, ...: neighbours within data x context parallelism.
        ranks: the global ranks the layout lives on, ascending, for a model that has only part of
            the job, for example ``range(4, 8)``. All ranks from 0 unless given.

    Raises:
        LayoutError: the values do not fit together; the message does the arithmetic and names
            the nearest layouts that would fit.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expt_tp: int = 0
    order: str = DEFAULT_ORDER
    optimizer_instances: int = 1
    hierarchical_cp: tuple[int, ...] = ()
    embedding_ranks: EmbeddingRanks = default_embedding_ranks
    position_embedding_ranks: EmbeddingRanks = default_position_embedding_ranks
    vpp: int | None = None
    hybrid_cp: bool = False
    ranks: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._normalise("expt_tp", self.expt_tp or self.tp)
        self._normalise("order", self.order.lower())
        self._normalise("hierarchical_cp", tuple(self.hierarchical_cp or ()))
        self._check_sizes()
        self._normalise("ranks", _one_form(self.ranks or range(self.world_size)))
        self._check_order()
        self._check_ranks()

    # -- questions ---------------------------------------------------------------------------

    @property
    def dp(self) -> int:
        """Data parallel size of the dense grid."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expt_dp(self) -> int:
        """Data parallel size of the expert grid."""
        return self.world_size // (self.expt_tp * self.ep * self.pp)

    @cached_property
    def families(self) -> tuple[str, ...]:
        """Every name ``members`` and ``partition`` answer for in this layout."""
        spanned = [f for f in _SPANS if f != "inter_dist_opt" or self.optimizer_instances > 1]
        levels = range(len(self.hierarchical_cp))
        sizes = self.hybrid_cp_sizes
        return (
            *spanned,
            *_DERIVED,
            *(f"hcp.{level}" for level in levels),
            *(f"hybrid.{size}" for size in sizes),
        )

    @property
    def hybrid_cp_sizes(self) -> tuple[int, ...]:
        """Sizes of the groups that hybrid context parallelism picks from: the powers of two from
        2 to half of dp x cp, as Megatron's; none unless ``hybrid_cp``.
        """
        if not self.hybrid_cp:
            return ()
        return tuple(2**n for n in range(1, (self.dp * self.cp).bit_length() - 1))

    def members(self, field: str, rank: int) -> tuple[int, ...]:
        """Global ranks of the group of ``field`` that ``rank`` is in, ascending.

        Costs O(group size). Empty where the rank is outside the family, which only the two
        embedding fields allow.

        Raises:
            UnknownFieldError: no such field, or one this layout does not configure.
            LayoutError: ``rank`` is not in the layout.
        """
        position = self._position(rank)
        return self._to_ranks(self._positions(self._known(field), position))

    def partition(self, field: str) -> Iterator[tuple[int, ...]]:
        """Every group of ``field``, lazily, ordered by its lowest rank.

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
        )

    def describe(self) -> dict[str, str]:
        """Every setting as text: equal on two ranks exactly when their layouts are equal."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["embedding_ranks"] = self._describe_embedding("embd")
        values["position_embedding_ranks"] = self._describe_embedding("pos_embd")
        return {name: _text(value) for name, value in values.items()}

    def fingerprint(self) -> str:
        """A digest of the layout, the same on every rank and in every process: 64 hex digits."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()

    # -- how the groups come about -----------------------------------------------------------

    @cached_property
    def _everyone(self) -> tuple[int, ...]:
        return tuple(self.ranks)

    @cached_property
    def _dense(self) -> _Grid:
        return self._grid(tp=self.tp, cp=self.cp, ep=1, dp=self.dp, instance=1, pp=self.pp)

    @cached_property
    def _expert(self) -> _Grid:
        instances = self.optimizer_instances
        slice_ = self.expt_dp // instances
        return self._grid(
            tp=self.expt_tp, cp=1, ep=self.ep, dp=slice_, instance=instances, pp=self.pp
        )

    def _grid(self, **sizes: int) -> _Grid:
        axes = tuple(self.order.split("-"))
        axes += tuple(axis for axis in AXES if axis not in axes)  # only size 1 may be left out
        at = axes.index("dp") + 1
        axes = (*axes[:at], "instance", *axes[at:])
        return _Grid(axes, tuple(sizes[axis] for axis in axes))

    def _positions(self, field: str, at: int) -> Sequence[int]:
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

    def _embedding(self, field: str, at: int) -> list[int]:
        pipeline = self._positions("pp", at)
        chosen = self._chosen(field, self._to_ranks(pipeline))
        positions = sorted(self._position(rank) for rank in chosen)
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
        return chosen

    def _groups(self, field: str) -> Iterator[tuple[int, ...]]:
        if field in ("embd", "pos_embd"):
            chosen = (tuple(sorted(self._chosen(field, each))) for each in self._groups("pp"))
            groups = (group for group in chosen if group)
            # A callable may choose stages whose ranks come in another order than the pipelines.
            yield from groups if self._chooser(field) in _DEFAULT_CHOICES else sorted(groups)
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
        at = bisect.bisect_left(self.ranks, rank)
        if at == self.world_size or self.ranks[at] != rank:
            raise LayoutError(
                f"rank {rank} is not in this layout, which has the ranks {_text(self.ranks)}."
            )
        return at

    def _known(self, field: str) -> str:
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
        raise UnknownFieldError(f"{field!r} is no field; the fields are {', '.join(FIELDS)}.")

    # -- checks ------------------------------------------------------------------------------

    def _normalise(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_sizes(self) -> None:
        sizes = {
            name: getattr(self, name)
            for name in ("world_size", "tp", "pp", "cp", "ep", "expt_tp", "optimizer_instances")
        }
        sizes |= {f"hierarchical_cp[{i}]": level for i, level in enumerate(self.hierarchical_cp)}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"{name}={size!r}: sizes are whole numbers from 1.")
        if problem := self._misfit():
            raise LayoutError(f"{problem} {self._suggest()}".rstrip())
        whole = isinstance(self.vpp, int)
        if self.vpp is not None and (not whole or self.vpp < 1 or self.pp < 2):
            raise LayoutError(
                f"vpp={self.vpp} with pp={self.pp}: a virtual pipeline is a whole number of model "
                "chunks per rank and needs pp > 1."
            )
        if self.hybrid_cp and self.dp * self.cp % 2:
            raise LayoutError(
                f"hybrid_cp with dp x cp = {self.dp} x {self.cp}: hybrid context parallelism "
                "takes an even number of ranks."
            )
        levels = self.hierarchical_cp
        if levels and math.prod(levels) != self.cp:
            arithmetic = " x ".join(map(str, levels))
            raise LayoutError(
                f"hierarchical_cp: {arithmetic} = {math.prod(levels)}, but cp={self.cp}."
            )

    def _misfit(self) -> str | None:
        """The first division that leaves a remainder, spelled out; None where all fit."""
        dense = self.tp * self.pp * self.cp
        expert = self.expt_tp * self.ep * self.pp
        divisions = (
            ("world_size", self.world_size, f"tp={self.tp} x pp={self.pp} x cp={self.cp}", dense),
            (
                "world_size",
                self.world_size,
                f"expt_tp={self.expt_tp} x ep={self.ep} x pp={self.pp}",
                expert,
            ),
            (
                "dp x cp",
                self.world_size // (self.tp * self.pp) if self.world_size >= dense else 0,
                "optimizer_instances",
                self.optimizer_instances,
            ),
            ("expt_dp", self.world_size // expert, "optimizer_instances", self.optimizer_instances),
        )
        for whole_name, whole, part_name, part in divisions:
            if whole < 1 or whole % part:
                return (
                    f"{whole_name}={whole} does not divide by {part_name} = {part} "
                    f"({whole} = {whole // part} x {part} + {whole % part})."
                )
        return None

    def _suggest(self) -> str:
        """The nearest layouts that fit: other world sizes first, then one other size each."""
        changes: list[dict[str, int]] = []
        unit = math.lcm(
            self.tp
            * self.pp
            * self.cp
            * self.optimizer_instances
            // math.gcd(self.cp, self.optimizer_instances),
            self.expt_tp * self.ep * self.pp * self.optimizer_instances,
        )
        below = self.world_size // unit * unit
        changes += [{"world_size": size} for size in (below, below + unit) if size]
        changes = [change for change in changes if self._fits(change)]
        for name in ("tp", "pp", "cp", "ep", "expt_tp", "optimizer_instances"):
            size = getattr(self, name)
            nearest = sorted(_divisors(self.world_size), key=lambda n: (abs(n - size), n))
            for other in nearest[:4]:
                change = {name: other}
                if name == "tp" and self.expt_tp == self.tp:
                    change["expt_tp"] = other
                if other != size and self._fits(change):
                    changes.append(change)
                    break
        options = [", ".join(f"{k}={v}" for k, v in change.items()) for change in changes]
        return f"Nearest that fit: {'; or '.join(options)}." if options else ""

    def _fits(self, change: dict[str, int]) -> bool:
        """Whether the changed layout can be made: its order, levels, chunks and ranks included."""
        changed = self._with(**change)
        if changed._misfit() is not None:
            return False  # and the checks would ask for suggestions in turn
        try:
            changed.__post_init__()
        except LayoutError:
            return False
        return True

    def _with(self, **sizes: int) -> ParallelLayout:
        """A copy with other sizes that was not checked: only for asking whether it would fit."""
        other = object.__new__(ParallelLayout)
        for f in fields(self):
            object.__setattr__(other, f.name, sizes.get(f.name, getattr(self, f.name)))
        return other

    def _check_order(self) -> None:
        axes = self.order.split("-")
        for axis in axes:
            if axis not in AXES:
                raise LayoutError(
                    f"order={self.order!r}: {axis!r} is no axis; use {', '.join(AXES)} joined by -."
                )
            if axes.count(axis) > 1:
                raise LayoutError(f"order={self.order!r} has the axis {axis!r} more than once.")
        sizes = {axis: getattr(self, axis) for axis in AXES}
        sizes["tp"] = max(self.tp, self.expt_tp)
        sizes["dp"] = max(self.dp, self.expt_dp)
        for axis, size in sizes.items():
            if axis not in axes and size != 1:
                raise LayoutError(
                    f"order={self.order!r} lacks the axis {axis!r}, whose size is {size}; only an "
                    "axis of size 1 may be left out."
                )
        if self.pp == 1:
            return
        # The two rules that Megatron asserts: pipelines must be the same ranks in both grids.
        strides = self._dense.stride("pp"), self._expert.stride("pp")
        if strides[0] != strides[1]:
            raise LayoutError(
                f"order={self.order!r}: neighbouring pipeline stages would be {strides[0]} ranks "
                f"apart in the dense grid and {strides[1]} in the expert grid. Put pp last."
            )
        if axes[-1] != "pp" and self.dp != self.expt_dp:
            raise LayoutError(
                f"order={self.order!r} does not end in pp, so dp={self.dp} and "
                f"expt_dp={self.expt_dp} would have to be equal. Put pp last."
            )

    def _check_ranks(self) -> None:
        ascending = isinstance(self.ranks, range) and self.ranks.step > 0
        if len(self.ranks) != self.world_size or (len(self.ranks) and self.ranks[0] < 0):
            raise LayoutError(
                f"ranks={_text(self.ranks)} are {len(self.ranks)} ranks, but "
                f"world_size={self.world_size}; give one global rank (from 0) for each."
            )
        if not ascending and any(a >= b for a, b in zip(self.ranks, self.ranks[1:], strict=False)):
            raise LayoutError(
                f"ranks={_text(self.ranks)}: give them in ascending order without repetition; "
                "torch sorts the ranks of a group, so another order could not be kept."
            )

    def _describe_embedding(self, field: str) -> str:
        choose = self._chooser(field)
        if choose in _DEFAULT_CHOICES:
            return choose.__name__
        # A callable is what it answers: names and source differ between equal functions.
        answers = list(self._groups(field))
        return "custom:" + hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16]


def _one_form(ranks: Sequence[int]) -> Sequence[int]:
    """Evenly spaced ranks as a range, others as a tuple, so that the same ranks are equal."""
    try:
        given = ranks if isinstance(ranks, range) else tuple(map(operator.index, ranks))
    except TypeError:
        raise LayoutError(f"ranks={ranks!r}: ranks are whole numbers from 0.") from None
    step = given[1] - given[0] if len(given) > 1 else 1
    if step < 1:
        return given
    even = range(given[0], given[0] + step * len(given), step)
    return even if given == even or given == tuple(even) else given


def _level(group: Sequence[int], at: int, sizes: Sequence[int], level: int) -> list[int]:
    """The sub-group of ``group`` around ``at`` on one level of a hierarchy, innermost level first.

    A group of 16 with sizes (2, 2, 4) has neighbours in pairs on level 0, pairs two apart on level
    1, and fours four apart on level 2.
    """
    index = bisect.bisect_left(group, at)
    stride, size = math.prod(sizes[:level]), sizes[level]
    first = index - index // stride % size * stride
    return [group[first + stride * step] for step in range(size)]


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _text(value: object) -> str:
    if isinstance(value, range):
        return f"{value.start}-{value[-1]}" + (f":{value.step}" if value.step != 1 else "")
    if isinstance(value, tuple) and value and value == tuple(range(value[0], value[-1] + 1)):
        return f"{value[0]}-{value[-1]}"
    return str(value)
