"""The cost of ``trace_global_reads``: on the demo's training step, and on one read."""

from __future__ import annotations

import timeit
import warnings
from collections.abc import Callable

import megapg
from benchmarks.table import Cost
from megapg.megatron import parallel_state, trace_global_reads
from megapg.testing import megatron_on_cpu
from megapg.testing.distributed import run_distributed
from megapg.tools.demo.job import GPTRun

STEP_TARGET = 2.0
"""Most that a traced training step may cost of one that is not."""

_RUN = GPTRun(tp=2, steps=6)  # the demo's model; Megatron-core reads most with tp=2
_TEXT = b"Each read of the globals is recorded, with the line of code that makes the read. " * 8
_ROUNDS = 7
_CALLS = 4_000


def run() -> list[Cost]:
    """Train on two ranks of this host, in turns with a trace and without."""
    return on_the_slower_rank(_measure)


def on_the_slower_rank(measure: Callable[[], list[Cost]]) -> list[Cost]:
    """Return the costs of the rank whose first cost has the higher ratio."""
    ranks = run_distributed(
        measure,
        2,
        deadline=300,
        preload=("megapg.tools.demo.gpt",),
        env={"PYTHONWARNINGS": "ignore"},
    )
    return max(ranks, key=lambda costs: costs[0].ours_taken / costs[0].theirs_taken)


def _measure() -> list[Cost]:
    warnings.simplefilter("ignore")
    getter = parallel_state.get_tensor_model_parallel_group
    plain, traced, reads = [], [], 0
    with megatron_on_cpu(), megapg.session(tp=2) as session, megapg.published(session.groups):
        for _ in range(_ROUNDS):
            plain.append(step(session.groups))
            with trace_global_reads(session=session.groups) as trace:
                traced.append(step(session.groups))
            reads = sum(read.count for read in trace.reads) // _RUN.steps
        read = nanoseconds(getter)
        with trace_global_reads(session=session.groups):
            traced_read = nanoseconds(getter)
    what = f"a traced training step of the demo ({reads} reads)"
    with_trace, same = "with trace_global_reads()", "the same step"
    written = "parallel_state.get_tensor_model_parallel_group()"
    return [
        Cost(what, with_trace, same, min(traced), min(plain), "ms", STEP_TARGET),
        Cost("one traced read", written, "the same read", traced_read, read, "ns"),
    ]


def step(pg: megapg.ProcessGroupCollection) -> float:
    """Return the milliseconds of one training step of the demo."""
    from megapg.tools.demo.gpt import train

    return train(_RUN, _TEXT, pg).seconds / _RUN.steps * 1e3


def nanoseconds(read: Callable[[], object], calls: int = _CALLS) -> float:
    """Return the time of a call: the best of several rounds."""
    return min(timeit.repeat(read, number=calls, repeat=_ROUNDS)) / calls * 1e9
