"""A process group between jobs, outside WORLD: :func:`joint_group`.

Every process belongs to a *side*, such as the trainer or the rollout. The ranks of the group are
the ranks of the sides, one side after the other. The processes agree over a store, within a
deadline, before any of them calls torch. Each agreement is a *generation* of the group, and the
members may change from one to the next.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from typing_extensions import override

from megapg import torch_private
from megapg.collection import LeaseState, ProcessGroup
from megapg.communicators import create as communicators_of_torch
from megapg.communicators.backends import backend_for
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.warm_up import HealthReport
from megapg.errors import RendezvousError, SessionError, UnsupportedOptionError
from megapg.ownership import suspension
from megapg.ownership.closing import explain
from megapg.ownership.dead_ranks import of_torch
from megapg.ownership.validate import check_waits
from megapg.rendezvous.error_texts import culprits, told
from megapg.rendezvous.shared_store import SharedStore, connected
from megapg.rl.foreign import admit, check_foreign
from megapg.rl.joint_meeting import (
    Invitation,
    Meeting,
    Terms,
    confirm,
    meet,
    prefix_of,
    title_of,
)
from megapg.rl.sides import Sides

logger = logging.getLogger(__name__)

# Seconds for which a rank that failed to create the group waits for the other ranks' errors.
_NEWS_WAIT = 5.0
# Seconds for which a finaliser blocks the thread that dropped the last reference.
_FINALISER_WAIT = 10.0


class _Open:
    """The open parts of a group: what must be ended when the group is dropped."""

    def __init__(self, terms: Terms) -> None:
        self.terms, self.pid = terms, os.getpid()
        self.meeting: Meeting | None = None  # set while the ranks are connected
        self.group: ProcessGroup | None = None

    def end(self, error: BaseException | None, *, alone: bool = False) -> dict[int, str]:
        """Disconnect from the other ranks, and end the group. Return rank -> its error."""
        meeting, self.meeting = self.meeting, None
        problems: dict[int, str] = {}
        ended = False
        try:
            if meeting is not None and alone:
                meeting.coordinator.leave()
            elif meeting is not None:
                problems = meeting.coordinator.part(error, timeout=self.terms.timeout)
            ended = True
        finally:
            self.destroy(abort=alone or error is not None or bool(problems) or not ended)
        if isinstance(error, Exception) and meeting is not None:
            wait = min(self.terms.timeout, _NEWS_WAIT) if of_torch(error) else 0.0
            if news := told(meeting.coordinator.news(wait=wait), meeting.sides):
                error.add_note(f"{self.terms.title}, the other ranks: {news}.")
        return problems

    def drop(self, how: str = "was still open when Python ended") -> None:
        """Abort a group that was never closed. The other ranks are notified, not waited for."""
        atexit.unregister(self.drop)
        if self.meeting is None or self.pid != os.getpid():
            return
        said = f"{self.terms.title} {how}, and is aborted"
        try:
            warnings.warn(
                f"{said}. Use a `with` block, or call close().", ResourceWarning, stacklevel=2
            )
        finally:  # also if warnings are errors
            try:
                self.end(SessionError(said))
            except Exception as trouble:
                logger.warning("%s, and could not be closed: %r", said, trouble)

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

    def __init__(self, terms: Terms, sides: Sides, rank: int, hosts: Sequence[str]) -> None:
        self.name, self.side = terms.name, terms.side
        self._terms, self._sides, self._rank = terms, sides, rank
        self._state, self._since = LeaseState.FAILED, ""
        self._open = _Open(terms)
        self._create(meet(terms, sides, rank, hosts))
        self._dropped = weakref.finalize(self, _drop, self._open)
        self._dropped.atexit = False
        atexit.register(self._open.drop)

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
                f"{self._terms.title}: WORLD was destroyed, and torch ends all groups with it. "
                "Call renew() on every rank, or close()."
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

        The ranks meet over the store and do not use the group. After a collective has failed, this
        finds the missing rank.

        Args:
            timeout: seconds to wait for the other ranks. Default: that of the group.
            reason: why you check, for the report and the beginning of an error.

        Raises:
            SessionError: the group is not live.
            RendezvousError: ranks did not arrive; the message names side, rank and host, and
                ``missing`` has their ranks in the group.
        """
        wait = self._terms.timeout if timeout is None else timeout
        check_waits(wait)
        self._expect_live("check()")
        assert self._open.meeting is not None  # set while the state is LIVE
        started = time.perf_counter()
        try:
            heard = self._open.meeting.coordinator.exchange("check()", "", timeout=wait)
        except RendezvousError as error:
            if not reason:
                raise
            raise RendezvousError(f"{reason}: {error}", error.missing) from None
        return HealthReport(self._terms.title, reason, tuple(heard), time.perf_counter() - started)

    def renew(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        rank: int | None = None,
        hosts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Agree on the members anew, and replace the group by one of the next generation.

        Every remaining member calls this with the same sizes, for example after a rank died. New
        members call :func:`joint_group` with these sizes. No collective may be running. A member
        that is not wanted any more calls :meth:`close`, and may have died.

        Args:
            sizes: the new sizes. Default: as before.
            rank: the new rank of this process in its side. Default: as before.
            hosts: as for :func:`joint_group`. Default: the hosts of the last generation, if the
                sizes are as before.

        Raises:
            LayoutError: the sizes do not fit this process.
            SessionError: the group is closed.
            RendezvousError: a rank did not arrive in time, as in :func:`joint_group`. If the ranks
                have not all arrived, the group of the last generation stays as it was. Call it
                again, or close.
        """
        if self._state is LeaseState.CLOSED:
            raise SessionError(
                f"renew(): {self._terms.title} was closed {self._since}. Open a new one."
            )
        sides = self._sides if sizes is None else Sides(sizes)
        number = self._sides.member(self._rank)[1] if rank is None else rank
        known = sides.hosts(hosts) if hosts is not None else ()
        if hosts is None and sizes in (None, self.sizes) and self._open.meeting is not None:
            last = self._open.meeting.coordinator.hosts()
            known = [last.get(each, "") for each in range(self.size)]
        meeting = meet(self._terms, sides, sides.rank(self.side, number), known)
        self._state, self._since = LeaseState.FAILED, f"{_now()} in renew()"
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
            "backend": self._terms.backend,
            "timeout": self._terms.timeout,
            "collective_timeout": self._terms.collective_timeout.total_seconds(),
        }

    @override
    def __repr__(self) -> str:
        me = self._sides.one(self._rank)
        return (
            f"<JointGroup {self.name!r} generation {self.generation} {self._state.value}: {me} "
            f"of {self._sides} ({self._terms.backend})>"
        )

    # -- opening -----------------------------------------------------------------------------

    def _create(self, meeting: Meeting) -> None:
        """Create the group with the ranks of a meeting. End that of the last generation before."""
        terms, opened = self._terms, _Open(self._terms)
        try:
            if self._open.group is not None:
                with contextlib.suppress(TimeoutError):  # work with a rank that died
                    suspension.synchronize(terms.timeout)
            # All remaining members are in the meeting, so none of them uses the old group.
            self._open.end(None, alone=True)
            with terms.store.until(time.monotonic() + terms.timeout, terms.title):
                opened.group = _made(terms, meeting)
                confirm(terms, meeting)
        except BaseException as error:
            opened.destroy(abort=True)
            wait = min(terms.timeout, _NEWS_WAIT)
            problems = meeting.coordinator.give_up(error, timeout=wait)
            problems.pop(meeting.rank, None)
            if isinstance(error, Exception) and problems:
                news = told(problems, meeting.sides)
                error.add_note(f"{terms.title}, the other ranks: {news}.")
            raise
        self._open.group, self._open.meeting = opened.group, meeting
        self._sides, self._rank = meeting.sides, meeting.rank
        self.generation = meeting.generation
        self._state, self._since = LeaseState.LIVE, ""
        logger.info("%s", self)

    # -- the end -----------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Close the group. Closing twice does nothing.

        The ranks exchange their errors, and wait up to ``timeout`` seconds for late ranks. If a
        rank has an error or does not come, the group is aborted. Foreign ranks are not waited for.

        Args:
            error: why the ranks can't close in order, such as a lost rank. Then this rank aborts
                the group and waits for no other rank, as after an exception in a ``with`` block.

        Raises:
            RendezvousError: ranks did not arrive, or had an error; ``missing`` has their ranks in
                the group. The group here was aborted all the same.
            TeardownError: torch could not destroy the group.
        """
        if self._state is LeaseState.CLOSED:
            return
        self._state, self._since = LeaseState.CLOSED, _now()
        self._dropped.detach()
        atexit.unregister(self._open.drop)
        problems = self._open.end(error)
        if problems and error is None:
            blamed = culprits(problems)
            raise RendezvousError(
                f"{self._terms.title}: the group was aborted, as not every rank came to close "
                f"it in order: {told(problems, self._sides)}. Look at the logs of those ranks.",
                blamed,
            )

    def _expect_live(self, doing: str) -> None:
        if self._state is LeaseState.LIVE:
            return
        closed = self._state is LeaseState.CLOSED
        how, now = ("was closed", "Open a new one") if closed else ("failed", "renew() or close it")
        raise SessionError(f"{doing}: {self._terms.title} {how} {self._since}. {now}.")

    def __enter__(self) -> Self:
        self._expect_live("with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        explain(error)
        try:
            self.close(error)
        except Exception as trouble:
            if error is None:
                raise
            # the error of the body matters more
            error.add_note(f"closing {self._terms.title} failed as well: {trouble!r}")


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
    hosts: Mapping[str, Sequence[str]] | None = None,
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
        hosts: side -> the hosts of its ranks, for messages about ranks that never came. The host of
            a rank that has come is known.
        foreign: side -> function, for sides that use SGLang's ``init_custom_process_group``
            instead of megapg. When all other ranks are here, the first of them calls the function
            with an :class:`Invitation`. The function passes it to the foreign processes, for
            example in a remote call, and does not wait for them. The first side must not be
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
    sides, foreign = Sides(sizes), dict(foreign or {})
    number = _rank_in_world() if rank is None else rank
    place = sides.rank(side, number)
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    row = backend_for(chosen)
    if row.alone or row.split == "always":
        raise UnsupportedOptionError(f"backend={chosen!r}: {row.name} has no joint groups.")
    taken = f"{title_of(name)}: "
    if any(each.group_desc.startswith(taken) for each in torch_private.known_groups()):
        raise SessionError(
            f"{title_of(name)} is open in this process. Close it first, or call its renew()."
        )
    check_foreign(sides, side, foreign)
    connection, address = connected(store, timeout)
    if foreign and address is None:
        raise SessionError(
            "foreign= needs a TCP store: give store= the address of a SharedStore, tcp://host:port."
        )
    terms = Terms(
        name,
        side,
        connection,
        chosen,
        timeout,
        collective_timeout or torch_private.default_timeout(chosen),
        foreign,
        address or ("", 0),
    )
    return JointGroup(terms, sides, place, sides.hosts(hosts or {}))


def _made(terms: Terms, meeting: Meeting) -> ProcessGroup:
    """Create the group in torch."""
    name, store = f"{prefix_of(terms.name)}/{meeting.generation}", meeting.store
    if terms.foreign:
        name, store = admit(terms, meeting)
    wanted = torch_private.NewGroup(
        range(meeting.sides.total),
        terms.backend,
        name,
        f"{terms.title}: {meeting.sides}",
        terms.collective_timeout,
        backend_for(terms.backend).options(terms.title, CommunicatorOptions()),
    )
    store.torch.set_timeout(terms.collective_timeout)
    return communicators_of_torch.make_apart(
        wanted, meeting.rank, store, lazily=not terms.foreign, within=terms.timeout
    )


def _now() -> str:
    return f"at {time.strftime('%H:%M:%S')}"


def _rank_in_world() -> int:
    if not dist.is_initialized():
        raise SessionError(
            "there is no WORLD to take the rank from: give rank=, from 0 in each side."
        )
    return dist.get_rank()


def _drop(opened: _Open) -> None:
    """Abort a group whose owner was dropped."""
    done = _thread.allocate_lock()
    done.acquire()

    def end() -> None:
        try:
            opened.drop("was dropped without close()")
        finally:
            done.release()

    # The garbage collector can run at any point, so this thread may hold a lock that closing
    # needs. ``threading.Thread`` takes a lock as well, so use ``_thread``.
    _thread.start_new_thread(end, ())
    done.acquire(timeout=_FINALISER_WAIT)
