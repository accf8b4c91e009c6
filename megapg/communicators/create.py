"""Making and ending communicators in torch.distributed. The only place that does either."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

from megapg import torch_private
from megapg.communicators.backends import backend_for
from megapg.communicators.plan import Communicator, Family
from megapg.communicators.world import World, scoped_environment
from megapg.errors import TeardownError

_OURS = "megapg/"


def make(
    world: World,
    wanted: Iterable[Communicator],
    *,
    of_all: Callable[[], Iterable[Family]] = tuple,
    store_for: Callable[[Communicator], dist.Store],
    prefix: str,
    timeout: timedelta,
    within: float,
) -> dict[Communicator, dist.ProcessGroup]:
    """Make this rank's communicators; only their members take part, or all ranks together.

    torch's ``new_group`` wants every rank of WORLD to call it for every group, because it counts
    groups to name them: hundreds of calls where a rank is in ten. Its way around that
    (``use_local_synchronization``) hashes the same counter and reuses names. Here a name comes
    from the session's own namespace and the ranks, so it depends on nothing else and never repeats.

    Args:
        world: the WORLD the ranks are counted in.
        wanted: the communicators this rank is in.
        of_all: those of all ranks, for the backends of :attr:`World.splits`: a family takes one
            call of every rank.
        store_for: where the members of a communicator find each other.
        prefix: makes the names unique in torch's registry, as :func:`prefix_of` gives it.
        timeout: of collectives on the communicators that have none of their own.
        within: seconds that making them may take.

    Raises:
        RendezvousError: it takes longer.
    """

    def apart(communicator: Communicator) -> dist.ProcessGroup:
        with scoped_environment(backend_for(communicator.backend).creation_environment):
            return torch_private.new_group(
                communicator.ranks,
                world.rank,
                backend=communicator.backend,
                store=store_for(communicator),
                name=f"{prefix}/{communicator.label}",
                description=_description(prefix, communicator),
                timeout=communicator.timeout or timeout,
                options=_options(communicator),
            )

    def split(family: Family) -> dist.ProcessGroup | None:
        communicator = family.of(world.rank) or next(family.members)
        return torch_private.split_world(
            communicator.ranks,
            world.rank,
            backend=communicator.backend,
            name=f"{prefix}/{communicator.label}",
            description=_description(prefix, communicator),
            timeout=communicator.timeout or timeout,
            options=_options(communicator),
        )

    def together(family: Family) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None = None
        for communicator in family.members:
            group = dist.new_group(
                list(communicator.ranks),
                timeout=communicator.timeout or timeout,
                backend=communicator.backend,
                pg_options=_options(communicator),
                group_desc=_description(prefix, communicator),
            )
            mine = group if world.rank in communicator.ranks else mine
        return mine

    def one_by_one() -> Iterator[tuple[Communicator, dist.ProcessGroup]]:
        wanted_here = list(wanted)
        if any(world.splits(each.backend) for each in wanted_here):
            by_all = split if torch_private.can_split() else together
            for family in of_all():
                if world.splits(family.backend):
                    group, mine = by_all(family), family.of(world.rank)
                    if group is not None and mine is not None:
                        yield mine, group
        for communicator in wanted_here:
            if not world.splits(communicator.backend):
                yield communicator, apart(communicator)

    def making() -> dict[Communicator, dist.ProcessGroup]:
        made: dict[Communicator, dist.ProcessGroup] = {}
        try:
            for communicator, group in one_by_one():
                made[communicator] = group
        except BaseException:
            _abort(made)
            raise
        return made

    if backend_for(world.backend).alone:
        return making()
    return world.store.lend(making, within, f"making process groups ({prefix})", undo=_abort)


def _options(communicator: Communicator) -> torch_private.Options | None:
    row = backend_for(communicator.backend)
    return row.options("/".join(communicator.fields), communicator.options)


def _abort(made: Mapping[Communicator, dist.ProcessGroup]) -> None:
    end(made.items(), abort=True)


def end(groups: Iterable[tuple[Communicator, dist.ProcessGroup]], *, abort: bool) -> None:
    """Destroy communicators in the reverse order of creation; every one is attempted.

    One that torch no longer knows (WORLD was destroyed, and all groups with it) is already ended.

    Args:
        groups: in the order they were made.
        abort: do not wait for work under way; its peers fail.

    Raises:
        TeardownError: some could not be destroyed; each error notes the fields and the ranks.
    """
    failures: list[Exception] = []
    for communicator, group in reversed(list(groups)):
        try:
            end_one(group, abort=abort)
        except Exception as error:
            error.add_note(
                f"closing {', '.join(communicator.fields)} of ranks {communicator.ranks}"
            )
            failures.append(error)
    if failures:
        raise TeardownError(f"{len(failures)} communicators could not be closed", failures)


def end_one(group: dist.ProcessGroup, *, abort: bool) -> None:
    """Destroy a group, whoever made it; see :func:`end`."""
    if abort and torch_private.knows(group):
        torch_private.abort(group)
    if torch_private.knows(group):
        torch_private.destroy(group)


def prefix_of(session: str, generation: int) -> str:
    """What the names and descriptions of a session's groups begin with."""
    return f"{_OURS}{session}/{generation}"


def session_of(group: dist.ProcessGroup) -> str:
    """Name and generation of the session that made a group; empty for anybody else's."""
    prefix = group.group_desc.rpartition(": ")[0]
    return prefix.removeprefix(_OURS) if prefix.startswith(_OURS) else ""


def bystanders(ours: Iterable[dist.ProcessGroup]) -> list[str]:
    """Descriptions of the groups that torch knows besides WORLD and ``ours``."""
    known = {id(dist.group.WORLD), *map(id, ours)}
    others = [group for group in torch_private.known_groups() if id(group) not in known]
    return [group.group_desc or group.group_name for group in others]


def _description(prefix: str, communicator: Communicator) -> str:
    return f"{prefix}: {'+'.join(communicator.fields)}"
