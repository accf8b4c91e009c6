"""The agreement of processes on the next generation of a joint group."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from megapg.communicators.backends import backend_for
from megapg.errors import LayoutMismatchError, RendezvousError
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.store import Store, StoreError
from megapg.rl.sides import Sides


@dataclass(frozen=True)
class Invitation:
    """The arguments with which processes that do not use megapg join a group.

    The names are those of SGLang's ``init_weights_update_group``. Each rank calls
    ``init_custom_process_group`` with ``init_method=f"tcp://{master_address}:{master_port}"``, and
    ``rank_offset`` plus its rank in the side as ``rank``.

    Attributes:
        master_address: the host of the store.
        master_port: the port of the store.
        rank_offset: the rank of the first member of the side in the group.
        world_size: the number of ranks of the group, with all sides.
        group_name: the name of the group. Each generation and each attempt has another one.
        backend: the backend of the group.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


@dataclass(frozen=True)
class Terms:
    """The arguments of a joint group that hold for all generations.

    Attributes:
        name: the name of the group.
        side: the side of this process.
        store: the connection to the store.
        backend: as torch names it.
        timeout: seconds to wait for other ranks.
        collective_timeout: the timeout of collectives.
        foreign: side -> the function that invites it.
        address: the host and port of the store, for foreign sides.
    """

    name: str
    side: str
    store: Store
    backend: str
    timeout: float
    collective_timeout: timedelta
    foreign: Mapping[str, Callable[[Invitation], object]]
    address: tuple[str, int]

    @property
    def title(self) -> str:
        """The group, for messages."""
        return title_of(self.name)

    @property
    def keys(self) -> Store:
        """The keys of the group in the store."""
        return self.store.view(prefix_of(self.name))


@dataclass(frozen=True)
class Meeting:
    """The ranks that agreed on a generation, before the group exists.

    Attributes:
        store: a view of the store that only this meeting uses.
    """

    sides: Sides
    rank: int
    generation: int
    coordinator: Coordinator
    store: Store

    @property
    def leads(self) -> bool:
        """True if this rank is the first that is not foreign."""
        return self.rank == self.coordinator.ranks[0]


def title_of(name: str) -> str:
    """Return how messages, and torch's descriptions, call a joint group."""
    return f"joint group {name!r}"


def prefix_of(name: str) -> str:
    """Return the prefix of a group's keys in the store, and of its names in torch."""
    return f"megapg joint/{name}"


def meet(terms: Terms, sides: Sides, rank: int, hosts: Sequence[str]) -> Meeting:
    """Wait until all ranks that are not foreign have agreed on the next generation.

    Args:
        terms: the group.
        sides: the sides of the next generation.
        rank: the rank of this process in the group.
        hosts: rank -> host; empty if unknown.

    Raises:
        RendezvousError: a rank did not arrive in time, or came with other arguments.
    """
    ours = [each for each in range(sides.total) if sides.member(each)[0] not in terms.foreign]
    deadline = time.monotonic() + terms.timeout
    with terms.store.until(deadline, terms.title):
        keys = terms.keys
        generation = int(keys.peek("generation") or 0) + 1
        # Each generation has its own keys, so that a dropped rank is not confused with the rank
        # that has its number now.
        coordinator = Coordinator(
            keys.view(str(generation)), f"{terms.name} ({sides})", rank, ours, hosts, sides
        )
        board, mine = keys.view(f"{generation}/sizes"), _member(sides, rank)
        board.set(mine, str(sides))
        settings = {
            "backend": terms.backend,
            "collective_timeout": str(terms.collective_timeout),
            "foreign": str(sorted(terms.foreign)),
            "connects_lazily": str(backend_for(terms.backend).connects_lazily),
        }
        try:
            agreement = coordinator.meet(settings, timeout=terms.timeout)
        except RendezvousError as error:
            with contextlib.suppress(StoreError):
                _compare_sizes(terms, sides, board, coordinator.elsewhere(), error)
                board.delete_key(mine)  # the next attempt may have other sizes
            raise
    return Meeting(sides, rank, generation, coordinator, agreement.store)


def confirm(terms: Terms, meeting: Meeting) -> None:
    """Report that this rank has created the group, and wait for the others.

    Raises:
        RendezvousError: another rank failed, or did not confirm in time.
    """
    meeting.coordinator.confirm(None, timeout=terms.timeout)
    if int(terms.keys.peek("generation") or 0) < meeting.generation:  # else this rank is late
        terms.keys.set("generation", str(meeting.generation))
    if meeting.leads:
        for key in terms.keys.list_keys():
            first = key.partition("/")[0]
            if first.isdecimal() and int(first) < meeting.generation:
                terms.keys.delete_key(key)


def _member(sides: Sides, rank: int) -> str:
    """Return the key of a rank under which every process finds it, whatever its sizes."""
    return "/".join(map(str, sides.member(rank)))


def _compare_sizes(
    terms: Terms, sides: Sides, board: Store, absent: Collection[int], error: RendezvousError
) -> None:
    """Raise if absent ranks came with other sizes, so that they could not meet this one."""
    said = board.peeks([_member(sides, rank) for rank in range(sides.total)])
    sizes = {rank: text.decode() for rank, text in enumerate(said) if text is not None}
    if any(sizes.get(rank, str(sides)) != str(sides) for rank in absent):
        ranks_by = {text: [r for r in sizes if sizes[r] == text] for text in sizes.values()}
        told = [f"{text} on {sides.several(ranks)}" for text, ranks in ranks_by.items()]
        raise LayoutMismatchError(
            f"{terms.title}: the processes came with different sizes: {'; '.join(told)}. Give "
            "all of them the same sizes, in the same order.",
            {"sizes": sizes},
        ) from error
