"""Check that the sizes of a layout fit together, and find the nearest layouts that do."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from megapg.errors import LayoutError
from megapg.layout.grid import Grid

EmbeddingRanks: TypeAlias = Callable[[list[int]], Sequence[int]]
"""Maps the global ranks of one pipeline, first stage first, to those with the embedding."""

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


def full_order(axes: Sequence[str]) -> str:
    """Return an order with all axes, in which the given axes follow each other, fastest first.

    The others go before pp if pp comes last. Otherwise stages could be different ranks in the two
    grids, as the experts' data parallelism may be larger than that of the dense layers.
    """
    usual = DEFAULT_ORDER.split("-")
    if [*axes] == [axis for axis in usual if axis in axes]:
        return DEFAULT_ORDER
    last = [axis for axis in axes[-1:] if axis == "pp"]
    others = [axis for axis in usual if axis not in axes]
    return "-".join([*axes[: len(axes) - len(last)], *others, *last])


def default_embedding_ranks(pipeline: list[int]) -> list[int]:
    """Return the first and last stage, which hold Megatron's word embeddings by default."""
    return pipeline[:1] if len(pipeline) == 1 else [pipeline[0], pipeline[-1]]


def default_position_embedding_ranks(pipeline: list[int]) -> list[int]:
    """Return the first stage, which holds Megatron's position embeddings by default."""
    return pipeline[:1]


_FACTORS = (
    *("tp", "pp", "cp", "ep", "expt_tp"),
    *("gtp_remat", "expt_gtp_remat", "optimizer_instances"),
)
DEFAULT_CHOICES = (default_embedding_ranks, default_position_embedding_ranks)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The checked fields of :class:`megapg.layout.ParallelLayout`."""

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expt_tp: int = 0
    gtp_remat: int = 1
    expt_gtp_remat: int = 1
    order: str = DEFAULT_ORDER
    optimizer_instances: int = 1
    hierarchical_cp: tuple[int, ...] = ()
    embedding_ranks: EmbeddingRanks = default_embedding_ranks
    position_embedding_ranks: EmbeddingRanks = default_position_embedding_ranks
    vpp: int | None = None
    hybrid_cp: bool = False
    ranks: Sequence[int] = ()

    def __post_init__(self) -> None:
        follows = not self.expt_tp  # the caller left it to follow tp
        vars(self)["expt_tp"] = self.expt_tp or self.tp
        vars(self)["order"] = self.order.lower()
        vars(self)["hierarchical_cp"] = tuple(self.hierarchical_cp or ())
        self._check_sizes(follows)
        vars(self)["ranks"] = _one_form(self.ranks or range(self.world_size))
        self._check_order()
        self._check_ranks()

    @property
    def dp(self) -> int:
        """Data parallel size of the dense grid: the number of ranks with the same weights."""
        return self.world_size // (self.tp * self.gtp_remat * self.pp * self.cp)

    @property
    def expt_dp(self) -> int:
        """Data parallel size of the expert grid."""
        return self.world_size // (self.expt_tp * self.ep * self.expt_gtp_remat * self.pp)

    @cached_property
    def _dense(self) -> Grid:
        sizes = {"tp": self.tp, "gtp": self.gtp_remat, "cp": self.cp, "ep": 1, "dp": self.dp}
        return self._grid("tp", instance=1, pp=self.pp, **sizes)

    @cached_property
    def _expert(self) -> Grid:
        instances = self.optimizer_instances
        slice_ = self.expt_dp // instances
        sizes = {"tp": self.expt_tp, "gtp": self.expt_gtp_remat, "cp": 1, "ep": self.ep}
        return self._grid("ep", dp=slice_, instance=instances, pp=self.pp, **sizes)

    def _grid(self, before_gtp: str, **sizes: int) -> Grid:
        """Return a grid. Weights are sharded over an axis "gtp" after the axis ``before_gtp``.

        In Megatron, the user's order never contains gtp.
        """
        named = self.order.split("-")
        anchor = before_gtp if before_gtp in named else "tp"
        at = named.index(anchor) + 1 if anchor in named else 0
        axes = [*named[:at], "gtp", *named[at:]]
        axes += [axis for axis in AXES if axis not in axes]  # only size 1 may be left out
        at = axes.index("dp") + 1
        axes[at:at] = ["instance"]
        return Grid(tuple(axes), tuple(sizes[axis] for axis in axes))

    def _check_sizes(self, follows: bool) -> None:
        sizes = {name: getattr(self, name) for name in ("world_size", *_FACTORS)}
        sizes |= {f"hierarchical_cp[{i}]": level for i, level in enumerate(self.hierarchical_cp)}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"{name}={size!r}: sizes are whole numbers from 1.")
        if problem := self._misfit():
            raise LayoutError(f"{problem} {self._suggest(follows)}".rstrip())
        whole = isinstance(self.vpp, int)
        if self.vpp is not None and (not whole or self.vpp < 1 or self.pp < 2):
            raise LayoutError(
                f"vpp={self.vpp} with pp={self.pp}: a virtual pipeline is a whole number of model "
                "chunks per rank and needs pp > 1."
            )
        if self.optimizer_instances > 1 and self.gtp_remat * self.expt_gtp_remat > 1:
            raise LayoutError(
                f"gtp_remat={self.gtp_remat}, expt_gtp_remat={self.expt_gtp_remat} with "
                f"optimizer_instances={self.optimizer_instances}: Megatron-core shards weights "
                "only where the optimizer has one instance."
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
        """Return the first division that leaves a remainder, as text; None if there is none."""
        world, instances = self.world_size, self.optimizer_instances
        dense = self._product("tp", "gtp_remat", "pp", "cp")
        expert = self._product("expt_tp", "ep", "expt_gtp_remat", "pp")
        dp_cp = world // dense[1] * self.cp if world >= dense[1] else 0
        divisions = (
            ("world_size", world, *dense),
            ("world_size", world, *expert),
            ("dp x cp", dp_cp, "optimizer_instances", instances),
            ("expt_dp", world // expert[1], "optimizer_instances", instances),
        )
        for whole_name, whole, part_name, part in divisions:
            if whole < 1 or whole % part:
                return (
                    f"{whole_name}={whole} does not divide by {part_name} = {part} "
                    f"({whole} = {whole // part} x {part} + {whole % part})."
                )
        return None

    def _product(self, *names: str) -> tuple[str, int]:
        """Return sizes as text (rematerialisation only if above 1), and their product."""
        sizes = {name: getattr(self, name) for name in names}
        shown = [f"{k}={n}" for k, n in sizes.items() if n > 1 or "remat" not in k]
        return " x ".join(shown), math.prod(sizes.values())

    def _suggest(self, follows: bool) -> str:
        """Return the nearest layouts that fit: other world sizes first, then other single sizes."""
        instances = self.optimizer_instances
        dense = self.tp * self.gtp_remat * self.pp * math.lcm(self.cp, instances)
        expert = self.expt_tp * self.ep * self.expt_gtp_remat * self.pp * instances
        unit = math.lcm(dense, expert)
        below = self.world_size // unit * unit
        worlds = [{"world_size": size} for size in (below, below + unit) if size]
        changes = [change for change in worlds if self._fits(change)]
        for name in _FACTORS:
            size = getattr(self, name)
            nearest = sorted(_divisors(self.world_size), key=lambda n: (abs(n - size), n))
            for other in nearest[:4]:
                change = {name: other}
                if name == "tp" and self.expt_tp == self.tp:
                    change["expt_tp"] = other
                if other != size and self._fits(change):
                    changes.append(change)
                    break
        for change in changes:
            if follows and "tp" in change:
                del change["expt_tp"]
        options = [", ".join(f"{k}={v}" for k, v in change.items()) for change in changes]
        return f"Nearest that fit: {'; or '.join(options)}." if options else ""

    def _fits(self, change: dict[str, int]) -> bool:
        """True if the changed layout is valid, with its order, levels, chunks and ranks."""
        changed = copy.copy(self)  # without checks
        vars(changed).update(change)
        if changed._misfit() is not None:
            return False  # avoids recursion: the checks call _suggest()
        try:
            changed.__post_init__()
        except LayoutError:
            return False
        return True

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
        # Megatron asserts these two rules: pipelines must be the same ranks in both grids.
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
        ranks = self.ranks
        ends = (ranks[:1], ranks[-1:]) if isinstance(ranks, range) else (ranks,)
        if len(ranks) != self.world_size or any(rank < 0 for end in ends for rank in end):
            raise LayoutError(
                f"ranks={text_of(self.ranks)} are {len(self.ranks)} ranks, but "
                f"world_size={self.world_size}; give one global rank (from 0) for each."
            )
        if not isinstance(ranks, range) and len(set(ranks)) < len(ranks):
            raise LayoutError(f"ranks={text_of(ranks)}: give each rank once.")


def _one_form(ranks: Sequence[int]) -> Sequence[int]:
    """Return evenly spaced ranks as a range, others as a tuple, so that they can be compared."""
    try:
        given = ranks if isinstance(ranks, range) else tuple(map(operator.index, ranks))
    except TypeError:
        raise LayoutError(f"ranks={ranks!r}: ranks are whole numbers from 0.") from None
    step = given[1] - given[0] if len(given) > 1 else 1
    if step == 0:
        return given
    even = range(given[0], given[0] + step * len(given), step)
    return even if given == even or given == tuple(even) else given


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def text_of(value: object) -> str:
    if isinstance(value, range):
        return f"{value.start}-{value[-1]}" + (f":{value.step}" if value.step != 1 else "")
    if isinstance(value, tuple) and value and value == tuple(range(value[0], value[-1] + 1)):
        return f"{value[0]}-{value[-1]}"
    return str(value)
