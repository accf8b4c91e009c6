"""The cost of the bridge to Megatron's globals."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.access import nanoseconds
from megapg import ProcessGroupCollection, session
from megapg.megatron import parallel_state
from megapg.megatron.reading.resolve import globals_policy, resolve, resolves
from megapg.testing.distributed import run_distributed

GETTER = "parallel_state.get_data_parallel_rank()"
RESOLVE_TARGET = 4.0
"""Most that resolve() of an explicit collection may cost of one read of the globals."""

# (description, expression, largest allowed ratio).
CALLS = (
    ("explicit, checked for 2 fields", 'resolve(pg, needs=("tp", "pp"))', RESOLVE_TARGET),
    (
        "for 8",
        f"resolve(pg, needs={('tp', 'pp', 'cp', 'ep', 'dp', 'mp', 'dp_cp', 'expt_dp')})",
        RESOLVE_TARGET,
    ),
    ("the decorator, 2 fields", "decorated(pg_collection=pg)", RESOLVE_TARGET),
    ("nothing passed, policy silent", 'resolve(None, needs=("tp", "pp"))', None),
)


@dataclass(frozen=True)
class Cost:
    """The cost of one thing relative to another, measured in the same run.

    Attributes:
        what: description.
        ours: the expression.
        theirs: the thing to compare with.
        ratio: cost of the first by that of the second.
        times: both times, as text: noise of this machine.
        target: the largest promised ratio, if any.
    """

    what: str
    ours: str
    theirs: str
    ratio: float
    times: str
    target: float | None

    @property
    def met(self) -> bool:
        return self.target is None or self.ratio <= self.target


def run() -> list[Cost]:
    """Measure in a separate process, with a world of one rank."""
    return run_distributed(_resolve, 1, env={"PYTHONWARNINGS": "ignore"})[0]


@resolves(needs=("tp", "pp"))
def _decorated(*, pg_collection: ProcessGroupCollection) -> ProcessGroupCollection:
    return pg_collection


def _resolve() -> list[Cost]:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    with session() as opened, globals_policy("silent"):
        names = {
            "pg": opened.groups,
            "parallel_state": parallel_state,
            "resolve": resolve,
            "decorated": _decorated,
        }
        getter, *calls = nanoseconds((GETTER, *(written for _, written, _ in CALLS)), names)
    return [
        Cost(what, written, GETTER, ns / getter, f"{ns:.0f} / {getter:.0f} ns", target)
        for (what, written, target), ns in zip(CALLS, calls, strict=True)
    ]
