"""The cost of ``trace_global_reads``: on the demo's training step, and on one read."""

from __future__ import annotations

import timeit
import warnings
from dataclasses import dataclass

import megapg
from benchmarks.bridge import Cost
from megapg.demo.job import GPTRun
from megapg.megatron import parallel_state, trace_global_reads
from megapg.testing import megatron_on_cpu
from megapg.testing.distributed import run_distributed

STEP_TARGET = 2.0
"""Most that a traced training step may cost of one that is not."""

_RUN = GPTRun(tp=2, steps=6)  # the demo's model; Megatron-core reads most with tp=2
_TEXT = b"Whoever reads the globals is written down, with the line that does it. " * 8
_ROUNDS = 5
_CALLS = 20_000
_TIMED = "parallel_state.get_tensor_model_parallel_group()"


@dataclass(frozen=True)
class Tracing:
    """Best of several rounds with and without a trace, in turns, on the slower rank.

    Attributes:
        step_ms: one training step of the demo.
        traced_step_ms: the same, traced.
        reads: reads of globals in such a step.
        read_ns: one getter.
        traced_read_ns: the same, traced.
    """

    step_ms: float
    traced_step_ms: float
    reads: float
    read_ns: float
    traced_read_ns: float

    @property
    def ratio(self) -> float:
        """Return the time of a traced training step divided by that of a plain one."""
        return self.traced_step_ms / self.step_ms

    def costs(self) -> list[Cost]:
        """Return the costs for the report."""
        return [
            Cost(
                f"a traced training step of the demo ({self.reads:.0f} reads)",
                "with trace_global_reads()",
                "the same step",
                self.ratio,
                f"{self.traced_step_ms:.1f} / {self.step_ms:.1f} ms",
                STEP_TARGET,
            ),
            Cost(
                "one traced read",
                _TIMED,
                "the same read",
                self.traced_read_ns / self.read_ns,
                f"{self.traced_read_ns:.0f} / {self.read_ns:.0f} ns",
                None,
            ),
        ]


def run() -> Tracing:
    """Train on two ranks of this host, in turns with a trace and without."""
    ranks = run_distributed(
        _measure, 2, deadline=300, preload=("megapg.demo.gpt",), env={"PYTHONWARNINGS": "ignore"}
    )
    return max(ranks, key=lambda tracing: tracing.ratio)


def _measure() -> Tracing:
    warnings.simplefilter("ignore")
    plain, traced, reads = [], [], 0
    with megatron_on_cpu(), megapg.session(tp=2) as session, megapg.published(session.groups):
        for _ in range(_ROUNDS):
            plain.append(_step(session.groups))
            with trace_global_reads(session=session.groups) as trace:
                traced.append(_step(session.groups))
            reads = sum(read.count for read in trace.reads)
        read = _nanoseconds()
        with trace_global_reads(session=session.groups):
            traced_read = _nanoseconds()
    return Tracing(
        step_ms=min(plain),
        traced_step_ms=min(traced),
        reads=reads / _RUN.steps,
        read_ns=read,
        traced_read_ns=traced_read,
    )


def _step(pg: megapg.ProcessGroupCollection) -> float:
    from megapg.demo.gpt import train

    return train(_RUN, _TEXT, pg).seconds / _RUN.steps * 1e3


def _nanoseconds() -> float:
    timer = timeit.Timer(_TIMED, globals={"parallel_state": parallel_state})
    return min(timer.repeat(_ROUNDS, _CALLS)) / _CALLS * 1e9
