"""The cost of reading a value: from a collection or the shim, against parallel_state's getters."""

from __future__ import annotations

import timeit
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from benchmarks.table import Cost, Options, Table, table_of_costs
from megapg import ProcessGroupCollection, session
from megapg.megatron import globals_policy, parallel_state, resolve, resolves
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


def tables(_: Options) -> list[Table]:
    """Return the table."""
    pairs = (*PAIRS, *SHIM)
    taken = measured([(ours, theirs) for _, ours, theirs in pairs])
    costs = [Cost(*pair, *ns, "ns") for pair, ns in zip(pairs, taken, strict=True)]
    note = (
        "Best of many rounds, in a world of one rank. The shim is `resolve(None)`: each read looks "
        "the getter up and calls it."
    )
    return [table_of_costs("Reading one value", costs, note)]


def measured(statements: Sequence[Sequence[str]]) -> list[list[float]]:
    """Return the nanoseconds of each statement, timed in a process with a world of one rank.

    The statements may use the collection ``pg`` and the ``shim``.
    """
    work = partial(_measured, statements)
    return run_distributed(work, 1, env={"PYTHONWARNINGS": "ignore"})[0]


def _measured(statements: Sequence[Sequence[str]]) -> list[list[float]]:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    with session() as opened, globals_policy("silent"):
        names = {
            "pg": opened.groups,
            "shim": resolve(None),
            "parallel_state": parallel_state,
            "resolve": resolve,
            "decorated": _decorated,
        }
        return [_nanoseconds(each, names) for each in statements]


@resolves(needs=("tp", "pp"))
def _decorated(*, pg_collection: ProcessGroupCollection) -> ProcessGroupCollection:
    return pg_collection


def _nanoseconds(statements: Sequence[str], names: dict[str, object]) -> list[float]:
    """Return the time of each statement: the best of many rounds in turns.

    The best and not the median, as disturbances only make such short loops slower.
    """
    timers = [timeit.Timer(statement, globals=names) for statement in statements]
    rounds = [[timer.timeit(_CALLS) for timer in timers] for _ in range(_ROUNDS)]
    return [min(seconds) / _CALLS * 1e9 for seconds in zip(*rounds, strict=True)]
