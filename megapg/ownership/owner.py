"""Base class of the owners of process groups: check, suspend, resume and rebind.

:class:`~megapg.ownership.session.Session` owns groups that it made.
:class:`~megapg.megatron.adopting.adopted.Adopted` owns groups that Megatron-core made. Closing is
in :mod:`~megapg.ownership.closing`.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self, TypeVar

from megapg.collection import LeaseState, ProcessGroup, ProcessGroupCollection
from megapg.communicators.needed import Communicator
from megapg.communicators.warm_up import HealthReport, Opened, WarmUpReport, probe, warm_up
from megapg.communicators.world import World
from megapg.errors import MissingGroupError, RendezvousError, SessionError
from megapg.launch.signals import NoSignals
from megapg.layout import FIELDS
from megapg.ownership import suspension
from megapg.ownership.closing import Closing, raise_first, raise_interruption
from megapg.ownership.holders import References
from megapg.ownership.steps import Steps, together
from megapg.ownership.suspension import How, OffloadReport, Usage
from megapg.ownership.validate import check_waits
from megapg.rendezvous.error_texts import brief

if TYPE_CHECKING:
    from megapg.ownership.rebind import Rebound

logger = logging.getLogger(__name__)

_OnResume = TypeVar("_OnResume", bound=Callable[[ProcessGroupCollection], object])


class _NoCollection:
    """Says what to pass if an owner is used in place of its collection."""

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            if name in FIELDS or hasattr(ProcessGroupCollection, name):
                raise MissingGroupError(
                    f"{type(self).__name__} has no {name!r}: its collection has. Pass "
                    "session.groups instead of the session."
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class Owner(_NoCollection, Closing):
    """Open process groups and the duty to close them.

    An owner that is dropped without :meth:`close`, or is still open when Python exits, is closed as
    after an error: it warns (``ResourceWarning``), notifies the other ranks and aborts its groups.
    The globals that hold adopted groups keep their owner open until Python exits.

    Attributes:
        generation: how often groups were opened under this name in this job, the same number on
            every rank. :meth:`resume` increments it if it creates the groups again.
    """

    def __init__(self, title: str, world: World, timeout: float, signals: NoSignals) -> None:
        super().__init__(title, world, timeout, signals)
        self._given = References()
        self._on_resume: list[Callable[[ProcessGroupCollection], object]] = []

    # -- what differs ------------------------------------------------------------------------

    @abc.abstractmethod
    def _expect(self, state: LeaseState, doing: str) -> None:
        """Raise a SessionError that says what to do, unless the owner is in this state."""

    @abc.abstractmethod
    def _concerned(self, way: How) -> list[tuple[Communicator, ProcessGroup]]:
        """Return the groups that a way to suspend affects."""

    @property
    @abc.abstractmethod
    def _ranks(self) -> Sequence[int]:
        """The global ranks that have these groups, in the layout's order."""

    @abc.abstractmethod
    def _cannot(self) -> dict[How, str]:
        """Return way to suspend -> why this rank can't take it, or empty."""

    @abc.abstractmethod
    def _in_the_way(self) -> str:
        """Return why the groups can't be resumed on this rank; empty if they can."""

    @abc.abstractmethod
    def _agree_to_resume(self, way: How) -> None:
        """Wait for all ranks before resuming, if they are still connected."""

    @abc.abstractmethod
    def _let_go(self, way: How, steps: Steps) -> None:
        """Destroy the groups until :meth:`_make_anew`, and check that every rank has."""

    @abc.abstractmethod
    def _make_anew(self, way: How, steps: Steps) -> None:
        """Create the groups again, with a collection and a lease of a new generation."""

    def _sends_without_batching(self) -> bool:
        """True if pipelines send each tensor separately, as in Megatron's interleaved schedule."""
        return False

    def _world_of_ours(self) -> ProcessGroup | None:
        """Return the WORLD that is re-created with the groups, or None."""
        return None

    # -- use ---------------------------------------------------------------------------------

    @property
    def groups(self) -> ProcessGroupCollection:
        """The frozen collection to hand to models, optimizers, schedules and checkpoints.

        Raises:
            SessionError: the groups are suspended or closed, or have failed.
        """
        self._expect(LeaseState.LIVE, "groups")
        assert self._groups is not None  # set while the state is LIVE
        return self._groups

    @property
    def state(self) -> LeaseState:
        """Live, suspended, closed, or failed. After a failure only :meth:`close` works."""
        return self._state

    def warm_up(self) -> WarmUpReport:
        """Connect every communicator now, in one order that all ranks share. Every rank calls it.

        Otherwise a communicator connects at its first use, perhaps in the middle of a step. A
        missing rank is noticed late then, and memory is taken unplanned. A WORLD that this owner
        made is connected too. No collective may be running.

        Returns:
            Time and, on a GPU, memory of each communicator; ``str()`` of it is a table.

        Raises:
            SessionError: the groups are not live.
            RendezvousError: a communicator did not connect, or a rank did not arrive, and for
                ``timeout`` seconds no rank made progress. Names fields and ranks on every rank. The
                groups were aborted: close the owner, and open a new one.
        """
        self._expect(LeaseState.LIVE, "warm_up()")
        if self._coordinator is None:  # no other ranks
            return WarmUpReport(self._title, (), 0.0)
        try:
            report = warm_up(
                self._title,
                self._concerned("suspend"),
                self._coordinator,
                self.rank,
                timeout=self._timeout,
                unbatched=self._sends_without_batching(),
            )
        except BaseException as error:
            self._lose("warm_up()", brief(error))
            raise
        logger.info("%s", report)
        return report

    def check(
        self, timeout: float | None = None, reason: str = "", *, communicators: bool = False
    ) -> HealthReport:
        """Check that every rank responds. Every rank calls it.

        The ranks meet over the store and no group is used, so this may be called while collectives
        are running. If it fails, all ranks can call it again.

        Args:
            timeout: seconds to wait for the other ranks. Default: the owner's own.
            reason: why you check, for the report and the beginning of an error.
            communicators: also run one small collective on every communicator of more than one
                rank, in one order that all ranks share. No other collective may be running then.

        Raises:
            SessionError: the groups are not live; or the timeout is not valid.
            RendezvousError: ranks did not arrive, or called something else; ``missing`` names them
                on every rank that arrived. Or a communicator did not respond, and for ``timeout``
                seconds no rank made progress; fields and ranks are named. In this case the groups
                were aborted: close the owner, and open a new one.
        """
        wait = self._timeout if timeout is None else timeout
        if timeout is not None:
            check_waits(timeout)
        self._expect(LeaseState.LIVE, "check()")
        coordinator, started = self._coordinator, time.perf_counter()
        if coordinator is None:  # no other ranks
            return HealthReport(self._title, reason, (self.rank,), 0.0)
        topic = "check(communicators=True)" if communicators else "check()"
        answered: tuple[Opened, ...] = ()
        try:
            coordinator.exchange(topic, "", timeout=wait)
            if communicators:
                made = self._concerned("suspend")
                try:
                    answered = probe(self._title, made, coordinator, self.rank, timeout=wait)
                except BaseException as error:
                    self._lose("check()", brief(error))
                    raise
        except RendezvousError as error:
            if not reason:
                raise
            raise RendezvousError(f"{reason}: {error}", error.missing) from None
        seconds = time.perf_counter() - started
        return HealthReport(self._title, reason, tuple(self._ranks), seconds, answered)

    def live_references(self) -> list[str]:
        """List the objects that still hold these groups or their collection and keep sockets open.

        One line per holder, such as ``tp+tp_cp: a mymodel.Block, as tp_group``, as far as Python's
        garbage collector finds them. After :meth:`close` it should be empty; before, it lists the
        globals that hold adopted groups. Slow.
        """
        own = {id(self), id(self._made), id(vars(self)), *(id(pair) for pair in self._made)}
        return self._given.live_references(own)

    # -- for a while -------------------------------------------------------------------------

    def on_resume(self, callback: _OnResume) -> _OnResume:
        """Have every ``resume()`` call ``callback(groups)`` with the current groups.

        After *recreate* these are new groups. Callbacks run in the order of registration. Also
        works as a decorator.
        """
        self._on_resume.append(callback)
        return callback

    def rebind(self, *objects: object, of: Owner | None = None) -> Rebound:
        """Replace this owner's earlier groups in ``objects`` with the current ones.

        Use it after *recreate*. After *suspend* it has nothing to do.

        Args:
            objects: modules, DDP wrappers, optimizers, schedules and others that hold groups.
            of: replace the groups of this owner instead. It may be closed, after it lost a rank.

        Returns:
            Every reference that was replaced, and every one that could not be.

        Raises:
            SessionError: the groups are not live, or ``of`` had groups with other settings.
        """
        from megapg.ownership.rebind import Replacements, rebind

        earlier = (of or self)._given
        pairs = earlier.outdated(self._made, self.groups, self._world_of_ours())
        return rebind(objects, Replacements(pairs))

    def _suspend(self, how: How | None, refusals: Callable[[], dict[How, str]]) -> OffloadReport:
        self._expect(LeaseState.LIVE, "suspend()")
        with self._together("suspend()") as steps:
            with steps.timed("agree"):
                heard = self._exchange("suspend()", suspension.wish(how, refusals()))
                way = suspension.agreed(self._title, heard)
            before = Usage.of(self._concerned(way))
            self._make_ready(way, steps)
            with steps.attempted("finish"):
                suspension.synchronize()
            self._compare(steps, "suspend(), before the release")
            self._give_back(way, steps)
        report = self._report("suspended", way, before, steps)
        raise_aside(self._title, steps)
        return report

    def _make_ready(self, way: How, steps: Steps) -> None:
        """Let the users of the groups finish before the groups are suspended."""
        if way != "suspend":
            self._lease.wind_up(None, steps.aside)
            raise_interruption(steps.aside)
        for callback in self._before_release:
            with steps.attempted("callbacks"):
                callback()

    def _give_back(self, way: How, steps: Steps) -> None:
        """Suspend once all ranks are ready, and check that every rank has."""
        since = f"{self._since()} by suspend()"
        self._state, self._way = LeaseState.SUSPENDED, way
        if way == "suspend":
            self._lease.suspend(since)
            with steps.attempted("suspend"):
                suspension.suspend(self._concerned(way))
            self._compare(steps, "suspend(), after the release")
        else:
            self._lease.end(since)
            self._groups = None
            self._let_go(way, steps)

    def _resume(self) -> OffloadReport:
        self._expect(LeaseState.SUSPENDED, "resume()")
        way = self._way
        assert way is not None  # set while the state is SUSPENDED
        before = Usage.of(self._concerned(way))
        with self._together("resume()") as steps:
            with steps.timed("agree"):
                self._agree_to_resume(way)
            self._take_back(way, steps)
            self._compare(steps, "resume(), the callbacks")
        return self._report("resumed", way, before, steps)

    def _take_back(self, way: How, steps: Steps) -> None:
        """Resume once all ranks have agreed, and notify the users of the groups."""
        former = self._lease
        if way == "suspend":
            with steps.attempted("resume"):
                suspension.resume(self._concerned(way))
            self._compare(steps, "resume(), the groups")
            self._lease.resume(f"{self._since()} by resume()")
        else:
            self._make_anew(way, steps)
        self._state, self._way = LeaseState.LIVE, None
        if former is not self._lease:
            steps.problems += former.succeed(self.groups)
        for callback in self._on_resume:
            with steps.attempted("callbacks"):
                callback(self.groups)

    def _report(self, action: str, way: How, before: Usage, steps: Steps) -> OffloadReport:
        after = Usage.of(self._concerned(way))
        report = suspension.report(self._title, action, way, before, after, steps)
        logger.info("%s", report)
        return report

    # -- together ----------------------------------------------------------------------------

    def _together(self, doing: str) -> contextlib.AbstractContextManager[Steps]:
        return together(self._title, doing, self.rank, partial(self._lose, doing))

    def _lose(self, doing: str, said: str) -> None:
        self._part(SessionError(f"{doing} failed: {said}"))
        try:
            self._end(LeaseState.FAILED, f"{self._since()}, as {doing} failed")
        finally:  # also if a listener raises
            self._destroy(abort=True)

    def _compare(self, steps: Steps, topic: str) -> None:
        """Raise unless every step so far has succeeded on every rank."""
        with steps.timed("agree"):
            heard = self._exchange(topic, steps.report())
        steps.compare(heard, self.rank)

    def _exchange(self, topic: str, said: str) -> Mapping[int, str]:
        if self._coordinator is None:  # no other ranks
            return {self.rank: said}
        return self._coordinator.exchange(topic, said, timeout=self._timeout)

    def __enter__(self) -> Self:
        _ = self.groups  # raises if they are closed
        return self


def raise_aside(owner: str, steps: Steps) -> None:
    """Raise the first error that did not stop suspending, if there is one."""
    if steps.aside:
        steps.aside[0].add_note(f"{owner}: the groups are suspended all the same")
        raise_first(steps.aside)
