"""Create and destroy communicators in torch.distributed, for sessions, joint groups and adoption.

No other module of the framework does either, but for WORLD: :mod:`megapg.communicators.world`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta

import torch.distributed as dist

from megapg import torch_private
from megapg.communicators.backends import backend_for
from megapg.communicators.needed import Communicator, Family
from megapg.communicators.world import World, scoped_environment
from megapg.errors import TeardownError
from megapg.rendezvous.store import Store

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
    """Create this rank's communicators. Either only members call this, or all ranks together.

    torch's ``new_group`` must be called by every rank of WORLD for every group, because it counts
    groups to name them. A rank in ten groups makes hundreds of calls. The alternative
    (``use_local_synchronization``) hashes the same counter and reuses names. Here a name is made
    from the session's own namespace and the ranks, and never repeats.

    Args:
        world: the WORLD that numbers the ranks.
        wanted: the communicators this rank is in.
        of_all: returns the families of all ranks, for backends for which :meth:`World.splits` is
            true. A family takes one call of every rank.
        store_for: returns the store through which the members of a communicator connect.
        prefix: makes the names unique in torch's registry, as :func:`prefix_of` gives it.
        timeout: timeout of collectives on communicators without a timeout.
        within: time limit in seconds.

    Raises:
        RendezvousError: the time limit has passed.
    """

    def spec(communicator: Communicator) -> torch_private.NewGroup:
        row = backend_for(communicator.backend)
        return torch_private.NewGroup(
            communicator.ranks,
            communicator.backend,
            f"{prefix}/{communicator.label}",
            f"{prefix}: {'+'.join(communicator.fields)}",
            communicator.timeout or timeout,
            row.options("/".join(communicator.fields), communicator.options),
        )

    def apart(communicator: Communicator) -> dist.ProcessGroup:
        with scoped_environment(backend_for(communicator.backend).creation_environment):
            return torch_private.new_group(spec(communicator), world.rank, store_for(communicator))

    def split(family: Family) -> dist.ProcessGroup | None:
        communicator = family.of(world.rank) or next(family.members)
        return torch_private.split_world(spec(communicator), world.rank)

    def together(family: Family) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None = None
        for each in map(spec, family.members):
            group = dist.new_group(
                list(each.ranks),
                timeout=each.timeout,
                backend=each.backend,
                pg_options=each.options,
                group_desc=each.description,
            )
            mine = group if world.rank in each.ranks else mine
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


def make_apart(
    wanted: torch_private.NewGroup, rank: int, store: Store, *, lazily: bool, within: float
) -> dist.ProcessGroup:
    """Create a group whose ranks are not WORLD's. Only its members call this.

    Args:
        wanted: the group. Its ranks count from 0.
        rank: the rank of this process in the group.
        store: shared by the members.
        lazily: True to connect at first use, if the backend can. It must be equal on all members.
        within: time limit in seconds.

    Raises:
        RendezvousError: the time limit has passed.
    """
    row = backend_for(wanted.backend)

    def making() -> dist.ProcessGroup:
        with scoped_environment(row.creation_environment if lazily else {}):
            return torch_private.new_group_apart(wanted, rank, store.torch)

    doing = f"making the group {wanted.name}"
    return store.lend(making, within, doing, undo=lambda group: end([(None, group)], abort=True))


def _abort(made: Mapping[Communicator, dist.ProcessGroup]) -> None:
    end(made.items(), abort=True)


def end(groups: Iterable[tuple[Communicator | None, dist.ProcessGroup]], *, abort: bool) -> None:
    """Destroy groups in reverse order of creation. Every one is attempted.

    If WORLD was destroyed, torch has destroyed all groups as well, and they are skipped.

    Args:
        groups: the groups, in order of creation, each with its communicator if megapg made it.
        abort: True to abort running work, which fails on the peers.

    Raises:
        TeardownError: some could not be destroyed; each error notes the fields and the ranks.
    """
    failures: list[Exception] = []
    for communicator, group in reversed(list(groups)):
        try:
            if abort and torch_private.knows(group):
                torch_private.abort(group)
            if torch_private.knows(group):
                torch_private.destroy(group)
        except Exception as error:
            what = group.group_desc or group.group_name
            if communicator is not None:
                what = f"{', '.join(communicator.fields)} of ranks {communicator.ranks}"
            error.add_note(f"closing {what}")
            failures.append(error)
    if failures:
        raise TeardownError(f"{len(failures)} groups could not be closed", failures)


def prefix_of(session: str, generation: int) -> str:
    """Return the prefix of the names and descriptions of a session's groups."""
    return f"{_OURS}{session}/{generation}"


def session_of(group: dist.ProcessGroup) -> str:
    """Return name and generation of the session that made a group; empty if no session did."""
    prefix = group.group_desc.rpartition(": ")[0]
    return prefix.removeprefix(_OURS) if prefix.startswith(_OURS) else ""


def bystanders(ours: Iterable[dist.ProcessGroup]) -> list[str]:
    """Return descriptions of the groups in torch except WORLD and ``ours``."""
    known = {id(dist.group.WORLD), *map(id, ours)}
    others = [group for group in torch_private.known_groups() if id(group) not in known]
    return [group.group_desc or group.group_name for group in others]
