"""Put the communicators of a rank into a collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megapg.collection import (
    OPTIONAL_FIELDS,
    Lease,
    Membership,
    ProcessGroup,
    ProcessGroupCollection,
)
from megapg.communicators.plan import Communicator, Recipe, by_field, created_fields
from megapg.communicators.world import World
from megapg.layout import FIELDS, ParallelLayout


def assemble(
    layout: ParallelLayout,
    recipe: Recipe,
    made: Mapping[Communicator, ProcessGroup],
    world: World,
    lease: Lease,
) -> ProcessGroupCollection:
    """Return the collection of a session. A field is None where Megatron expects None."""
    values: dict[str, ProcessGroup | Sequence[ProcessGroup] | None] = dict.fromkeys(OPTIONAL_FIELDS)
    members: dict[str, Membership] = {}
    serving = by_field(made)
    levels: list[ProcessGroup] = []
    extras: dict[str, ProcessGroup] = {}
    for field in created_fields(layout, recipe):
        communicator = serving.get(field)
        if communicator is None:
            continue
        members[field] = Membership(communicator.ranks.index(world.rank), communicator.ranks)
        if field.startswith("hcp."):
            levels.append(made[communicator])
        elif field not in FIELDS:
            extras[field] = made[communicator]
        else:
            values[field] = made[communicator]
    values["hcp"] = levels or None
    return ProcessGroupCollection(values, members, lease, layout, extras)
