"""Measure the guard: a training step, and one read, in a process with two layouts."""

from __future__ import annotations

import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from unittest import mock

import megapg
from benchmarks.table import Cost
from benchmarks.tracing import nanoseconds, on_the_slower_rank, step
from megapg.megatron import parallel_state
from megapg.megatron.watching.contradiction import Contradiction
from megapg.megatron.watching.hook import active
from megapg.testing import megatron_on_cpu

STEP_TARGET = 1.02
"""Most that a guarded training step may cost of one that is not."""

READ_TARGET_US = 5.0
"""Most that the guard may add to one read at a stack depth of 40, in microseconds."""

_ROUNDS = 7
_CALLS = 4_000
_DEPTH = 40
_GETTER = parallel_state.get_tensor_model_parallel_group


def run() -> list[Cost]:
    """Train on two ranks of this host, in turns with the guard and without."""
    return on_the_slower_rank(_measure)


def _measure() -> list[Cost]:
    warnings.simplefilter("ignore")
    alone = nanoseconds(parallel_state.is_unitialized)
    with megatron_on_cpu(), megapg.session(tp=2) as actor, megapg.published(actor.groups):
        assert active() is None
        one_layout = nanoseconds(parallel_state.is_unitialized)
        with megapg.session(pp=2, name="critic"):
            assert active() is not None
            plain, guarded = [], []
            for _ in range(_ROUNDS):
                with megapg.guard("off"):
                    plain.append(step(actor.groups))
                guarded.append(step(actor.groups))
            within = _within_a_step(actor.groups)
            in_the_first = _deep(_DEPTH, lambda: _added(_reads_beside(actor.groups), _CALLS))
            in_none = _deep(_DEPTH, lambda: _added(_GETTER))
    what, getter = "a training step of the demo beside a second layout", "one getter"
    deep = f"{_DEPTH} frames of user code, the group"
    return [
        Cost(what, "the guard", 'guard("off")', min(guarded), min(plain), "ms", STEP_TARGET),
        Cost("one read, one layout", getter, "no session", one_layout, alone, "ns", 1.1),
        *(
            Cost(f"added to one read: {where}", getter, "5 us", added, READ_TARGET_US, "us", target)
            for where, added, target in (
                (*within, 1.0),
                (f"{deep} in the first", in_the_first, None),
                (f"{deep} in none", in_none, None),
            )
        ),
    ]


def _within_a_step(pg: megapg.ProcessGroupCollection) -> tuple[str, float]:
    """Time the judge inside a training step, on the stacks of the step."""
    judge = vars(parallel_state)["__megapg_guard__"].judge
    own, spent, depths = judge.judge, list[float](), list[int]()

    def timed(
        name: str, arguments: Mapping[str, object], reader: FrameType
    ) -> Contradiction | None:
        started = time.perf_counter()
        found = own(name, arguments, reader)
        spent.append(time.perf_counter() - started)
        depths.append(len(list(traceback.walk_stack(reader))))
        return found

    with mock.patch.object(judge, "judge", timed):
        step(pg)
    middle = statistics.median
    text = f"median of {len(spent)} in such steps, at a depth of {middle(depths):.0f}"
    return text, middle(spent) * 1e6


def _deep(depth: int, measure: Callable[[], float]) -> float:
    return measure() if depth == 0 else _deep(depth - 1, measure)


def _added(read: Callable[[], object], reads: int = 1) -> float:
    """Return the microseconds that the guard adds to a function, by its number of reads."""
    guarded = nanoseconds(read, _CALLS // reads)
    with megapg.guard("off"):
        return (guarded - nanoseconds(read, _CALLS // reads)) / reads / 1e3


def _reads_beside(pg: megapg.ProcessGroupCollection) -> Callable[[], None]:
    """Return many reads in a function that was given the collection."""

    def reads(pg_collection: megapg.ProcessGroupCollection) -> None:
        for _ in range(_CALLS):
            _GETTER()

    return lambda: reads(pg)
