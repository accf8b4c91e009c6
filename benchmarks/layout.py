"""The cost of computing the ranks of one rank's groups: closed form against enumeration.

``ParallelLayout.members`` answers for one rank. Megatron-core's ``RankGenerator.get_ranks``, which
``initialize_model_parallel`` calls for each family, lists every group of the whole world.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from benchmarks.table import Options, Table
from megapg import ParallelLayout
from megapg.megatron import parallel_state

WORLD_SIZES = (8_192, 65_536, 131_072)
TP, PP, CP, EP = 8, 8, 2, 8
TARGET = 1 / 1000
"""Most that members() may cost of get_ranks() at the largest world."""

Families: TypeAlias = list[list[int]]

# field -> (grid, token): the calls of initialize_model_parallel to its two generators. Fields that
# alias another one in Megatron (intra_dp_cp, intra_expt_dp) have no enumeration.
_TOKENS = {
    "tp": ("dense", "tp"),
    "pp": ("dense", "pp"),
    "mp": ("dense", "tp-pp"),
    "cp": ("dense", "cp"),
    "tp_cp": ("dense", "tp-cp"),
    "dp": ("dense", "dp"),
    "dp_cp": ("dense", "dp-cp"),
    "tp_dp": ("dense", "tp-dp"),
    "tp_dp_cp": ("dense", "tp-dp-cp"),
    "embd": ("dense", "pp"),
    "pos_embd": ("dense", "pp"),
    "ep": ("expert", "ep"),
    "expt_tp": ("expert", "tp"),
    "tp_ep": ("expert", "tp-ep"),
    "tp_ep_pp": ("expert", "tp-ep-pp"),
    "expt_dp": ("expert", "dp"),
    "intra_dist_opt": ("expert", "tp-ep-pp"),
}


def tables(given: Options) -> list[Table]:
    """Return the table."""
    rows = []
    for world_size in WORLD_SIZES[:1] if given.quick else WORLD_SIZES:
        seconds = run(world_size)
        ours, theirs = map(sum, zip(*seconds.values(), strict=True))
        ratios = {field: ours / theirs for field, (ours, theirs) in seconds.items()}
        worst = max(ratios, key=lambda field: ratios[field])
        rows.append(
            (
                f"{world_size:,} ranks",
                _one_in(ours / theirs),
                f"{_one_in(ratios[worst])} ({worst})",
                f"{sum(each <= TARGET for each in ratios.values())} of {len(ratios)}",
                f"{ours * 1e3:.2f} ms / {theirs:.2f} s",
            )
        )
    columns = ("", "all families", "dearest family", f"families at most {_one_in(TARGET)}")
    return [
        Table(
            "ParallelLayout.members for one rank against RankGenerator.get_ranks, "
            f"tp={TP} pp={PP} cp={CP} ep={EP}",
            (*columns, "ours / theirs (noise)"),
            tuple(rows),
            ("Both gave the same ranks for every family. `get_ranks` was timed once a family.",),
        )
    ]


def _one_in(ratio: float) -> str:
    return f"1/{1 / ratio:,.0f}"


def run(world_size: int) -> dict[str, tuple[float, float]]:
    """Return the seconds of ``members()`` and of ``get_ranks()``, by family.

    Raises:
        ArithmeticError: the two disagree on the ranks.
    """
    layout = ParallelLayout(world_size=world_size, tp=TP, pp=PP, cp=CP, ep=EP)
    generators = _generators(world_size)
    found = {}
    rank = world_size // 3  # in the middle of every grid
    for field, (grid, token) in _TOKENS.items():
        started = time.perf_counter()
        groups = _shape_as_megatron(field, generators[grid].get_ranks(token))
        theirs = time.perf_counter() - started
        members = layout.members(field, rank)
        expected = next((tuple(sorted(group)) for group in groups if rank in group), ())
        if members != expected:
            raise ArithmeticError(f"{field} of rank {rank}: {members} is not {expected}")
        # Most ranks are outside the embedding groups: time a rank that is inside.
        rank_asked = rank if members else groups[0][0]
        del groups, expected
        found[field] = _seconds(partial(layout.members, field, rank_asked)), theirs
    return found


def _generators(world_size: int) -> dict[str, Any]:
    make, order = parallel_state.RankGenerator, "tp-cp-ep-dp-pp"
    return {
        "dense": make(tp=TP, ep=1, dp=world_size // (TP * PP * CP), pp=PP, cp=CP, order=order),
        "expert": make(tp=TP, ep=EP, dp=world_size // (TP * PP * EP), pp=PP, cp=1, order=order),
    }


def _shape_as_megatron(field: str, groups: Families) -> Families:
    """Turn the generator's groups into the groups of the field, as Megatron does."""
    if field == "embd":
        return [[group[0], group[-1]] for group in groups]
    if field == "pos_embd":
        return [group[:1] for group in groups]
    if field == "intra_dist_opt":
        return [[rank for group in groups for rank in group]]
    return groups


def _seconds(ask: Callable[[], object]) -> float:
    """Return the median of five timings, each long enough for the clock."""
    calls, taken = 1, 0.0
    while True:
        taken = _timed(ask, calls)
        if taken > 0.005:
            return statistics.median([taken, *(_timed(ask, calls) for _ in range(4))]) / calls
        calls *= 4


def _timed(ask: Callable[[], object], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        ask()
    return time.perf_counter() - started
