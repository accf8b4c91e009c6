"""A process group between jobs, outside WORLD: :func:`joint_group`.

Every process belongs to a *side*, such as the trainer or the rollout. The ranks of the group are
the ranks of the sides, one side after the other. The processes agree over a store, within a
deadline, before any of them calls torch. Each agreement is a *generation* of the group, and the
members may change from one to the next.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from typing_extensions import override

from megapg import torch_private
from megapg.collection import LeaseState, ProcessGroup
from megapg.communicators import create as communicators_of_torch
from megapg.communicators.backends import backend_for
from megapg.communicators.options import CommunicatorOptions
from megapg.communicators.warm_up import HealthReport
from megapg.errors import LayoutError, RendezvousError, SessionError, UnsupportedOptionError
from megapg.ownership import offload
from megapg.ownership.validate import check_waits
from megapg.rendezvous.connect import SharedStore, shared_store
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.problems import BY_NUMBER, RankNames, culprits, told
from megapg.rendezvous.rendezvous import Agreement
from megapg.rendezvous.store import Store, host_of

logger = logging.getLogger(__name__)

# Seconds for which a rank that failed to create the group waits for the other ranks' errors.
_NEWS_WAIT = 5.0
# Seconds for which a finaliser blocks the thread that dropped the last reference.
_FINALISER_WAIT = 10.0
# The longest pause between two looks for a foreign rank, in seconds.
_PAUSE = 0.05


@dataclass(frozen=True)
class Invitation:
    """What processes that do not use megapg need to join a group.

    The names are those of SGLang's ``init_weights_update_group``. A rank of the side calls
    ``init_custom_process_group(init_method=f"tcp://{master_address}:{master_port}",
    rank=rank_offset + its rank, ...)`` with the other values as they are.

    Attributes:
        master_address: the host of the store.
        master_port: the port of the store.
        rank_offset: the rank of the first member of the side in the group.
        world_size: the number of ranks of the group, with all sides.
        group_name: the name of the group. Each generation has another one.
        backend: the backend of the group.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class _Sides(RankNames):
    """The sides of a group, and the ranks of each."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
            raise LayoutError(
                f"sizes={dict(sizes)}: give the number of ranks of each side, at least 1, as in "
                "{'trainer': 4, 'rollout': 2}."
            )
        self.sizes = dict(sizes)
        self.total = sum(self.sizes.values())

    def ranks(self, side: str) -> range:
        if side not in self.sizes:
            raise LayoutError(f"there is no side {side!r}; the sides are {', '.join(self.sizes)}.")
        first = 0
        for name, size in self.sizes.items():
            if name == side:
                break
            first += size
        return range(first, first + self.sizes[side])

    def rank(self, side: str, number: int) -> int:
        """Return the rank in the group."""
        ranks = self.ranks(side)
        if not 0 <= number < len(ranks):
            raise LayoutError(
                f"rank={number} is not within the {len(ranks)} ranks of side {side!r}."
            )
        return ranks[number]

    def member(self, rank: int) -> tuple[str, int]:
        """Return the side of a rank, and the rank in the side."""
        for side in self.sizes:
            if rank in self.ranks(side):
                return side, self.ranks(side).index(rank)
        raise LayoutError(f"there is no rank {rank} among {self.total} ranks.")

    @override
    def one(self, rank: int) -> str:
        if rank >= self.total:  # of a process with other sizes
            return super().one(rank)
        side, number = self.member(rank)
        return f"side {side!r} rank {number}"

    @override
    def several(self, ranks: Collection[int]) -> str:
        names = [self.one(rank) for rank in ranks]
        return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")

    @override
    def __str__(self) -> str:
        return ", ".join(f"{side} {size}" for side, size in self.sizes.items())


@dataclass(frozen=True)
class _Meeting:
    """The ranks that agreed on a generation, before the group exists."""

    sides: _Sides
    rank: int
    generation: int
    coordinator: Coordinator
    agreement: Agreement


class _Open:
    """The open parts of a group: what must be ended when the group is dropped."""

    def __init__(self, title: str, timeout: float) -> None:
        self.title, self.timeout, self.pid = title, timeout, os.getpid()
        self.coordinator: Coordinator | None = None  # set while the ranks are connected
        self.names: RankNames = BY_NUMBER
        self.group: ProcessGroup | None = None

    def end(self, error: BaseException | None, *, alone: bool = False) -> dict[int, str]:
        """Disconnect from the other ranks, and end the group. Return rank -> its error."""
        coordinator, self.coordinator = self.coordinator, None
        problems: dict[int, str] = {}
        ended = False
        try:
            if coordinator is not None and alone:
                coordinator.leave()
            elif coordinator is not None:
                problems = coordinator.part(error, timeout=self.timeout)
            ended = True
        finally:
            self.destroy(abort=alone or error is not None or bool(problems) or not ended)
        if isinstance(error, Exception) and coordinator is not None:
            of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
            wait = min(self.timeout, _NEWS_WAIT) if of_torch else 0.0
            if news := coordinator.news(wait=wait):
                error.add_note(f"{self.title}, the other ranks: {told(news, self.names)}.")
        return problems

    def destroy(self, *, abort: bool) -> None:
        group, self.group = self.group, None
        if group is not None:
            communicators_of_torch.end([(None, group)], abort=abort)


class JointGroup:
    """A process group between the processes of several sides, made by :func:`joint_group`.

    Use it as a context manager, or call :meth:`close`. A group that is dropped without is aborted,
    with a ``ResourceWarning``, and the other ranks are notified.

    Attributes:
        name: the name of the group.
        side: the side of this process.
        generation: how often the ranks agreed on this group, the same number on every rank.
    """

    generation = 0

    def __init__(
        self,
        name: str,
        side: str,
        rank: int,
        sides: _Sides,
        store: Store,
        *,
        backend: str,
        timeout: float,
        collective_timeout: timedelta,
        foreign: Mapping[str, Callable[[Invitation], object]],
        address: tuple[str, int] | None,
    ) -> None:
        self.name, self.side = name, side
        self._store, self._backend, self._timeout = store, backend, timeout
        self._collective_timeout, self._foreign, self._address = (
            collective_timeout,
            foreign,
            address,
        )
        self._title = _title_of(name)
        self._sides, self._rank = sides, sides.rank(side, rank)
        self._state, self._since = LeaseState.FAILED, ""
        self._open = _Open(self._title, timeout)
        self._create(self._meet(sides, self._rank))
        self._dropped = weakref.finalize(self, _drop, self._open)

    # -- use ---------------------------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """torch's process group.

        Collectives take ranks of the group: ``dist.broadcast(tensor, group_src=0, group=group)``.
        ``dist.get_rank(group)`` asks WORLD, and may answer wrongly: use :attr:`rank`.

        Raises:
            SessionError: the group is closed, or has failed.
        """
        self._expect_live("group")
        assert self._open.group is not None  # set while the state is LIVE
        if not torch_private.knows(self._open.group):
            raise SessionError(
                f"{self._title}: WORLD was destroyed, and torch ends all groups with it. Call "
                "renew() on every rank, or close()."
            )
        return self._open.group

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return self._sides.total

    @property
    def sizes(self) -> dict[str, int]:
        """Side -> number of its ranks."""
        return dict(self._sides.sizes)

    @property
    def state(self) -> LeaseState:
        """Live, failed or closed. After a failure only :meth:`renew` and :meth:`close` work."""
        return self._state

    def ranks(self, side: str) -> range:
        """Return the ranks of a side in the group.

        Raises:
            LayoutError: there is no such side.
        """
        return self._sides.ranks(side)

    def member(self, rank: int) -> tuple[str, int]:
        """Return the side of a rank of the group, and its rank in that side.

        Raises:
            LayoutError: there is no such rank.
        """
        return self._sides.member(rank)

    def check(self, timeout: float | None = None, reason: str = "") -> HealthReport:
        """Check that every rank responds, except foreign ones. Every rank calls it.

        The ranks meet over the store and do not use the group. So it also works after a collective
        failed, and tells which rank is missing.

        Args:
            timeout: seconds to wait for the other ranks. Default: that of the group.
            reason: why you check, for the report and the beginning of an error.

        Raises:
            SessionError: the group is not live.
            RendezvousError: ranks did not arrive; the message names side, rank and host, and
                ``missing`` has their ranks in the group.
        """
        wait = self._timeout if timeout is None else timeout
        check_waits(wait)
        self._expect_live("check()")
        assert self._open.coordinator is not None  # set while the state is LIVE
        started = time.perf_counter()
        try:
            heard = self._open.coordinator.exchange("check()", "", timeout=wait)
        except RendezvousError as error:
            if not reason:
                raise
            raise RendezvousError(f"{reason}: {error}", error.missing) from None
        return HealthReport(self._title, reason, tuple(heard), time.perf_counter() - started)

    def renew(self, sizes: Mapping[str, int] | None = None, *, rank: int | None = None) -> None:
        """Agree on the members anew, and replace the group by one of the next generation.

        Every remaining member calls this with the same sizes, for example after a rank died. New
        members call :func:`joint_group` with these sizes. No collective may be running. A member
        that is not wanted any more calls :meth:`close`, and may have died.

        Args:
            sizes: the new sizes. Default: as before.
            rank: the new rank of this process in its side. Default: as before.

        Raises:
            LayoutError: the sizes do not fit this process.
            SessionError: the group is closed.
            RendezvousError: a rank did not arrive in time, as in :func:`joint_group`. If the ranks
                have not all arrived, the group of the last generation stays as it was. Call it
                again, or close.
        """
        if self._state is LeaseState.CLOSED:
            raise SessionError(f"renew(): {self._title} was closed {self._since}. Open a new one.")
        sides = self._sides if sizes is None else _Sides(sizes)
        number = self._sides.member(self._rank)[1] if rank is None else rank
        meeting = self._meet(sides, sides.rank(self.side, number))
        self._state, self._since = LeaseState.FAILED, f"{_now()} in renew()"
        with contextlib.suppress(TimeoutError):  # work with a rank that died
            offload.synchronize(self._timeout)
        # All remaining members are in the meeting, so none of them uses the old group.
        self._open.end(None, alone=True)
        self._create(meeting)

    def describe(self) -> dict[str, str | int | float | dict[str, int]]:
        """Return plain data for logs and JSON."""
        return {
            "name": self.name,
            "generation": self.generation,
            "state": self._state.value,
            "side": self.side,
            "rank": self._rank,
            "sizes": self.sizes,
            "backend": self._backend,
            "timeout": self._timeout,
            "collective_timeout": self._collective_timeout.total_seconds(),
        }

    @override
    def __repr__(self) -> str:
        me = self._sides.one(self._rank)
        return (
            f"<JointGroup {self.name!r} generation {self.generation} {self._state.value}: {me} "
            f"of {self._sides} ({self._backend})>"
        )

    # -- opening -----------------------------------------------------------------------------

    def _meet(self, sides: _Sides, rank: int) -> _Meeting:
        """Wait until all ranks that are not foreign have agreed on the next generation."""
        ours = [each for each in range(sides.total) if sides.member(each)[0] not in self._foreign]
        deadline = time.monotonic() + self._timeout
        with self._store.until(deadline, self._title):
            keys = self._store.view(_keys_of(self.name))
            generation = int(keys.peek("generation") or 0) + 1
            coordinator = Coordinator(
                keys.view(str(generation)), f"{self.name} ({sides})", rank, ours, names=sides
            )
            agreement = coordinator.meet(
                {
                    "backend": self._backend,
                    "collective_timeout": str(self._collective_timeout),
                    "foreign": str(sorted(self._foreign)),
                    "connects_lazily": str(backend_for(self._backend).connects_lazily),
                },
                timeout=self._timeout,
            )
        return _Meeting(sides, rank, generation, coordinator, agreement)

    def _create(self, meeting: _Meeting) -> None:
        """Create the group with the ranks of a meeting."""
        sides, coordinator, timeout = meeting.sides, meeting.coordinator, self._timeout
        opened = _Open(self._title, timeout)
        with self._store.until(time.monotonic() + timeout, self._title):
            try:
                if self._foreign:
                    opened.group = self._create_with_foreign(meeting)
                else:
                    name = f"{_keys_of(self.name)}/{meeting.generation}"
                    opened.group = self._make(meeting, name, meeting.agreement.store, lazily=True)
                coordinator.confirm(None, timeout=timeout)
                keys = self._store.view(_keys_of(self.name))
                keys.set("generation", str(meeting.generation))
                if meeting.rank == coordinator.ranks[0]:
                    _forget(keys, meeting.generation)
            except BaseException as error:
                opened.destroy(abort=True)
                problems = coordinator.give_up(error, timeout=min(timeout, _NEWS_WAIT))
                problems.pop(meeting.rank, None)
                if isinstance(error, Exception) and problems:
                    error.add_note(f"{self._title}, the other ranks: {told(problems, sides)}.")
                raise
        self._open.coordinator, self._open.group = coordinator, opened.group
        self._open.names = sides
        self._sides, self._rank, self.generation = sides, meeting.rank, meeting.generation
        self._state, self._since = LeaseState.LIVE, ""
        logger.info("%s", self)

    def _make(self, meeting: _Meeting, name: str, store: Store, *, lazily: bool) -> ProcessGroup:
        wanted = torch_private.NewGroup(
            range(meeting.sides.total),
            self._backend,
            name,
            f"{self._title}: {meeting.sides}",
            self._collective_timeout,
            backend_for(self._backend).options(self._title, CommunicatorOptions()),
        )
        store.torch.set_timeout(self._collective_timeout)
        return communicators_of_torch.make_apart(
            wanted, meeting.rank, store, lazily=lazily, within=self._timeout
        )

    def _create_with_foreign(self, meeting: _Meeting) -> ProcessGroup:
        """Invite the foreign sides, wait for them, and create the group as they do."""
        assert self._address is not None  # checked by joint_group()
        name = f"{self.name}-{meeting.generation}"
        if meeting.rank == meeting.coordinator.ranks[0]:
            for side, invite in self._foreign.items():
                first = meeting.sides.ranks(side)[0]
                invite(Invitation(*self._address, first, meeting.sides.total, name, self._backend))
        store = self._store.view(name)
        if "gloo" in self._backend:  # NCCL shows nothing in the store before its first collective
            self._await_foreign(meeting, store, name)
        return self._make(meeting, name, store, lazily=False)

    def _await_foreign(self, meeting: _Meeting, store: Store, name: str) -> None:
        waiting = [rank for side in self._foreign for rank in meeting.sides.ranks(side)]
        deadline = time.monotonic() + self._timeout
        while True:
            waiting = [r for r in waiting if not store.check([torch_private.key_in_gloo(name, r)])]
            if not waiting:
                return
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"{self._title}: {meeting.sides.several(waiting)} did not come to "
                    f"{self._store.host.name} within {self._timeout:g} s, under the group name "
                    f"{name!r}. See whether the invitation reached that side, and look at its log.",
                    waiting,
                )
            time.sleep(_PAUSE)

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close the group. Closing twice does nothing.

        The ranks exchange their errors, and wait up to ``timeout`` seconds for late ranks. If a
        rank has an error or does not come, the group is aborted. Foreign ranks are not waited for.

        Raises:
            RendezvousError: ranks did not arrive, or had an error; ``missing`` has their ranks in
                the group. The group here was aborted all the same.
            TeardownError: torch could not destroy the group.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self._state is LeaseState.CLOSED:
            return
        self._state, self._since = LeaseState.CLOSED, _now()
        self._dropped.detach()
        problems = self._open.end(error)
        if problems and error is None:
            blamed = culprits(problems)
            raise RendezvousError(
                f"{self._title}: the group was aborted, as not every rank came to close it in "
                f"order: {told(problems, self._sides)}. Look at the logs of those ranks.",
                blamed,
            )

    def _expect_live(self, doing: str) -> None:
        if self._state is LeaseState.LIVE:
            return
        closed = self._state is LeaseState.CLOSED
        how, now = ("was closed", "Open a new one") if closed else ("failed", "renew() or close it")
        raise SessionError(f"{doing}: {self._title} {how} {self._since}. {now}.")

    def __enter__(self) -> Self:
        self._expect_live("with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(error)
        except Exception as trouble:  # the error of the body matters more
            error.add_note(f"closing {self._title} failed as well: {trouble!r}")


def joint_group(
    name: str,
    *,
    side: str,
    sizes: Mapping[str, int],
    store: str | SharedStore | dist.Store,
    rank: int | None = None,
    backend: str | None = None,
    timeout: float = 60.0,
    collective_timeout: timedelta | None = None,
    foreign: Mapping[str, Callable[[Invitation], object]] | None = None,
) -> JointGroup:
    """Open a process group between processes of several jobs, outside WORLD.

    Every process of every side calls this, with equal values but for ``side`` and ``rank``. WORLD
    need not exist, and a process can have several joint groups and sessions. ::

        with megapg.joint_group(
            "weights", side="trainer", sizes={"trainer": 4, "rollout": 2}, store=address
        ) as joint:
            dist.broadcast(weight, group_src=0, group=joint.group)

    Args:
        name: distinguishes joint groups over the same store.
        side: the side of this process.
        sizes: side -> number of its ranks. The ranks of the group are those of the first side, then
            those of the second, and so on.
        store: a store that all processes share: the ``address`` of a :class:`SharedStore` that one
            of them hosts, or torch's store.
        rank: the rank of this process in its side. Default: its rank in WORLD.
        backend: ``"gloo"``, ``"nccl"`` or a device map. Default: NCCL if CUDA is available.
        timeout: seconds that megapg waits for the other ranks, here and in :meth:`JointGroup.renew`
            and :meth:`JointGroup.close`. Does not affect collectives.
        collective_timeout: the timeout of collectives. Default: torch's for the backend.
        foreign: side -> function, for sides whose processes do not use megapg but SGLang's
            ``init_custom_process_group``. As soon as all other ranks are here, the first of them
            calls the function with an :class:`Invitation`. It passes that to the foreign processes,
            for example in a remote call, and does not wait for them. The first side must not be
            foreign.

    Raises:
        LayoutError: the sizes, the side and the rank do not fit together.
        SessionError: the name is open in this process, or an argument is not valid.
        RendezvousError: a rank did not arrive in time. The message names its side, rank and host,
            and ``missing`` has its rank in the group. Or the store can't be reached. If a process
            has other sizes, it is a :class:`~megapg.errors.LayoutMismatchError`.
    """
    torch_private.check_version()
    check_waits(timeout, collective_timeout)
    if not isinstance(name, str) or not name:
        raise SessionError(f"name={name!r}: give the group a name.")
    sides, foreign = _Sides(sizes), dict(foreign or {})
    number = _rank_in_world() if rank is None else rank
    sides.rank(side, number)
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    row = backend_for(chosen)
    if row.alone or row.split == "always":
        raise UnsupportedOptionError(f"backend={chosen!r}: {row.name} has no joint groups.")
    taken = f"{_title_of(name)}: "
    if any(each.group_desc.startswith(taken) for each in torch_private.known_groups()):
        raise SessionError(
            f"{_title_of(name)} is open in this process. Close it first, or call its renew()."
        )
    _check_foreign(sides, side, foreign)
    connection, address = _connected(store, timeout)
    if foreign and address is None:
        raise SessionError(
            "foreign= needs a TCP store: give store= the address of a SharedStore, tcp://host:port."
        )
    return JointGroup(
        name,
        side,
        number,
        sides,
        connection,
        backend=chosen,
        timeout=timeout,
        collective_timeout=collective_timeout or torch_private.default_timeout(chosen),
        foreign=foreign,
        address=address,
    )


def _title_of(name: str) -> str:
    return f"joint group {name!r}"


def _keys_of(name: str) -> str:
    """Return the prefix of a group's keys in the store, and of its names in torch."""
    return f"megapg joint/{name}"


def _now() -> str:
    return f"at {time.strftime('%H:%M:%S')}"


def _rank_in_world() -> int:
    if not dist.is_initialized():
        raise SessionError(
            "there is no WORLD to take the rank from: give rank=, from 0 in each side."
        )
    return dist.get_rank()


def _check_foreign(sides: _Sides, side: str, foreign: Collection[str]) -> None:
    for each in foreign:
        sides.ranks(each)
    if side in foreign:
        raise SessionError(f"foreign= has {side!r}, the side of this process.")
    if (first := next(iter(sides.sizes))) in foreign:
        raise SessionError(
            f"side {first!r} comes first and is foreign; its rank 0 would host a store of its own. "
            "List another side first in sizes=."
        )


def _connected(
    store: str | SharedStore | dist.Store, timeout: float
) -> tuple[Store, tuple[str, int] | None]:
    """Return a connection to a store, and its host and port if it is a TCP store."""
    if isinstance(store, SharedStore):
        store = store.address
    if isinstance(store, str):
        parts = urlsplit(store)
        connection = shared_store(store, timeout)
        return connection, (parts.hostname or "", parts.port or 0)
    if not isinstance(store, dist.Store):
        raise SessionError(
            f"store={store!r}: give an address, 'tcp://host:port', or torch's store."
        )
    # A connection of its own, as torch makes one call at a time on each.
    connection = Store(store, host_of(store, "the store given with store=")).clone()
    return connection, (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _forget(keys: Store, generation: int) -> None:
    """Delete the keys of earlier generations."""
    for key in keys.list_keys():
        first = key.partition("/")[0]
        if first.isdecimal() and int(first) < generation:
            keys.delete_key(key)


def _drop(opened: _Open) -> None:
    """Abort a group that was never closed. The other ranks are notified, not waited for."""
    if opened.coordinator is None or opened.pid != os.getpid():
        return
    said = f"{opened.title} was dropped without close(), and is aborted"
    done = _thread.allocate_lock()
    done.acquire()

    def end() -> None:
        try:
            opened.end(SessionError(said))
        except Exception as trouble:
            logger.warning("%s, and could not be closed: %r", said, trouble)
        finally:
            done.release()

    try:
        warnings.warn(said, ResourceWarning, stacklevel=2)
    finally:
        # The garbage collector can run at any point, so this thread may hold a lock that closing
        # needs. ``threading.Thread`` takes a lock as well, so use ``_thread``.
        try:
            _thread.start_new_thread(end, ())
        except RuntimeError:  # Python is exiting
            end()
        done.acquire(timeout=_FINALISER_WAIT)
