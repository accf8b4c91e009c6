"""The cost of reading a value: from a collection or the shim, against parallel_state's getters."""

from __future__ import annotations

import timeit
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megapg import session
from megapg.megatron import globals_policy, parallel_state, resolve
from megapg.testing.distributed import run_distributed

# (the value, the expression with megapg, the expression with Megatron-core).
PAIRS = (
    ("the group", "pg.tp", "parallel_state.get_tensor_model_parallel_group()"),
    ("rank in it", 'pg.rank("tp")', "parallel_state.get_tensor_model_parallel_rank()"),
    ("its size", 'pg.size("tp")', "parallel_state.get_tensor_model_parallel_world_size()"),
    (
        "rank in data x context parallelism",
        'pg.rank("dp_cp")',
        "parallel_state.get_data_parallel_rank(with_context_parallel=True)",
    ),
)
# The shim calls the getter: compare it with the getter, and with a collection's field.
SHIM = tuple(
    (f"{what}, by the shim", ours.replace("pg.", "shim."), against)
    for what, ours, theirs in PAIRS
    for against in (theirs, ours)
)
_CALLS = 20_000
_ROUNDS = 50


@dataclass(frozen=True)
class Reading:
    """The cost of one value, read both ways, in nanoseconds: the best of many rounds.

    The best and not the median, as disturbances only make such short loops slower.
    """

    what: str
    ours: str
    theirs: str
    our_ns: float
    their_ns: float

    @property
    def ratio(self) -> float:
        return self.our_ns / self.their_ns


def run() -> list[Reading]:
    """Read everything in a separate process, with a world of one rank."""
    return run_distributed(_read_all, 1, env={"PYTHONWARNINGS": "ignore"})[0]


def _read_all() -> list[Reading]:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    with session() as opened, globals_policy("silent"):
        names = {"pg": opened.groups, "shim": resolve(None), "parallel_state": parallel_state}
        return [
            Reading(what, ours, theirs, *nanoseconds((ours, theirs), names))
            for what, ours, theirs in (*PAIRS, *SHIM)
        ]


def nanoseconds(statements: Sequence[str], names: dict[str, object]) -> list[float]:
    """Return the time of each statement: the best of many rounds in turns."""
    timers = [timeit.Timer(statement, globals=names) for statement in statements]
    rounds = [[timer.timeit(_CALLS) for timer in timers] for _ in range(_ROUNDS)]
    return [min(seconds) / _CALLS * 1e9 for seconds in zip(*rounds, strict=True)]
