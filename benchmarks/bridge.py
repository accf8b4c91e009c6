"""The cost of the bridge to Megatron's globals: resolve(), traces, and the guard."""

from __future__ import annotations

from benchmarks import guard, tracing
from benchmarks.access import measured
from benchmarks.table import Cost, Options, Table, table_of_costs

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


def tables(_: Options) -> list[Table]:
    """Return the table."""
    [[getter, *calls]] = measured([(GETTER, *(written for _, written, _ in CALLS))])
    costs = [
        Cost(what, written, GETTER, ns, getter, "ns", target)
        for (what, written, target), ns in zip(CALLS, calls, strict=True)
    ]
    note = (
        "A function calls `resolve()` once, and then reads attributes. `resolve()` checks the "
        "fields, the session, the process and torch's own list of groups."
    )
    costs += [*tracing.run(), *guard.run()]
    return [table_of_costs("The bridge to the globals", costs, note)]
