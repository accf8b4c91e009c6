"""Measure the guard: a training step, and one read, in a process with two layouts."""

from __future__ import annotations

import statistics
import time
import timeit
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from unittest import mock

import megapg
from benchmarks.bridge import Cost
from megapg.demo.job import GPTRun
from megapg.megatron import parallel_state
from megapg.megatron.watching.contradiction import Contradiction
from megapg.megatron.watching.hook import active
from megapg.testing import megatron_on_cpu
from megapg.testing.distributed import run_distributed

STEP_TARGET = 1.02
"""Most that a guarded training step may cost of one that is not."""

READ_TARGET_US = 5.0
"""Most that the guard may add to one read at a stack depth of 40, in microseconds."""

_RUN = GPTRun(tp=2, steps=6)
_TEXT = b"A second layout is alive, so each read of the globals is compared with the stack. " * 8
_ROUNDS = 7
_CALLS = 4_000
_DEPTH = 40


@dataclass(frozen=True)
class Guarding:
    """Best of several rounds with the guard and without, in turns, on the slower rank."""

    step_ms: float
    guarded_step_ms: float
    alone_ns: float  # one getter, without a session
    one_layout_ns: float  # the same getter in a session
    read_us: dict[str, float]  # read -> time that the guard adds

    def costs(self) -> list[Cost]:
        """Return the costs for the report."""
        getter = "get_tensor_model_parallel_group()"
        step = self.guarded_step_ms / self.step_ms
        times = f"{self.guarded_step_ms:.1f} / {self.step_ms:.1f} ms"
        return [
            Cost(
                "a training step of the demo beside a second layout",
                "with the guard",
                'with guard("off")',
                step,
                times,
                STEP_TARGET,
            ),
            Cost(
                "one read in a process with one layout",
                getter,
                "the same read, no session",
                self.one_layout_ns / self.alone_ns,
                f"{self.one_layout_ns:.0f} / {self.alone_ns:.0f} ns",
                1.1,
            ),
            *(
                Cost(
                    f"what the guard adds to one read: {where}",
                    "one getter",
                    f"{READ_TARGET_US:g} microseconds",
                    read / READ_TARGET_US,
                    f"{read:.1f} us",
                    None if "user's code" in where else 1.0,
                )
                for where, read in self.read_us.items()
            ),
        ]


def run() -> Guarding:
    """Train on two ranks of this host, in turns with the guard and without."""
    ranks = run_distributed(
        _measure, 2, deadline=300, preload=("megapg.demo.gpt",), env={"PYTHONWARNINGS": "ignore"}
    )
    return max(ranks, key=lambda each: each.guarded_step_ms / each.step_ms)


def _measure() -> Guarding:
    warnings.simplefilter("ignore")
    alone = _read(parallel_state.is_unitialized)
    with megatron_on_cpu(), megapg.session(tp=2) as actor, megapg.published(actor.groups):
        assert active() is None
        one_layout = _read(parallel_state.is_unitialized)
        with megapg.session(pp=2, name="critic"):
            assert active() is not None
            plain, guarded = [], []
            for _ in range(_ROUNDS):
                with megapg.guard("off"):
                    plain.append(_step(actor.groups))
                guarded.append(_step(actor.groups))
            deep = f"{_DEPTH} frames of the user's code, the group"
            reads = {
                **_within_a_step(actor.groups),
                f"{deep} in the first": _deep(_DEPTH, lambda: _added_beside(actor.groups)),
                f"{deep} in none": _deep(_DEPTH, _added),
            }
    return Guarding(min(plain), min(guarded), alone, one_layout, reads)


def _step(pg: megapg.ProcessGroupCollection) -> float:
    from megapg.demo.gpt import train

    return train(_RUN, _TEXT, pg).seconds / _RUN.steps * 1e3


def _within_a_step(pg: megapg.ProcessGroupCollection) -> dict[str, float]:
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
        _step(pg)
    middle = statistics.median
    text = f"median of {len(spent)} in such steps, at a depth of {middle(depths):.0f}"
    return {text: middle(spent) * 1e6}


def _deep(depth: int, measure: Callable[[], float]) -> float:
    return measure() if depth == 0 else _deep(depth - 1, measure)


def _added() -> float:
    guarded = _read(parallel_state.get_tensor_model_parallel_group)
    with megapg.guard("off"):
        return (guarded - _read(parallel_state.get_tensor_model_parallel_group)) / 1e3


def _added_beside(pg: megapg.ProcessGroupCollection) -> float:
    getter = parallel_state.get_tensor_model_parallel_group

    def reads(pg_collection: megapg.ProcessGroupCollection) -> None:
        for _ in range(_CALLS):
            getter()

    def nanoseconds() -> float:
        return min(timeit.repeat(lambda: reads(pg), number=1, repeat=_ROUNDS)) / _CALLS * 1e9

    guarded = nanoseconds()
    with megapg.guard("off"):
        return (guarded - nanoseconds()) / 1e3


def _read(getter: Callable[[], object]) -> float:
    return min(timeit.repeat(getter, number=_CALLS, repeat=_ROUNDS)) / _CALLS * 1e9
