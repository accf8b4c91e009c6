"""What every owner of process groups does with them: suspend, resume, rebind, close.

:class:`~megapg.sessions.Session` owns groups that it made, and
:class:`~megapg.megatron.adopt.Adopted` those that Megatron-core made. How each comes by its groups,
and what else goes with them, is theirs to say; that a failure on any rank ends the groups on all of
them, in bounded time and with every step attempted, is said here.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import torch.distributed as dist

from megapg.collection import Lease, LeaseState, ProcessGroup, ProcessGroupCollection
from megapg.comms import groups as communicators_of_torch
from megapg.comms import offload
from megapg.comms.council import Council
from megapg.comms.handles import Handles
from megapg.comms.offload import How, OffloadReport, Usage
from megapg.comms.plan import Communicator
from megapg.comms.rollcall import brief
from megapg.comms.steps import Steps, together
from megapg.comms.world import World
from megapg.errors import SessionError, TeardownError
from megapg.signals import NoSignals

if TYPE_CHECKING:
    from megapg.rebind import Rebound

logger = logging.getLogger(__name__)

# How long a rank whose collective failed waits for a word from the ranks that caused it. Seconds.
_NEWS = 2.0

_BeforeRelease = TypeVar("_BeforeRelease", bound=Callable[[], object])
_OnResume = TypeVar("_OnResume", bound=Callable[[ProcessGroupCollection], object])


class Owner(abc.ABC):
    """Open process groups and the duty to close them.

    Attributes:
        generation: how often groups were opened here in this job, the same number on every rank;
            :meth:`resume` counts where it makes them anew.
    """

    def __init__(self, title: str, world: World, timeout: float, signals: NoSignals) -> None:
        self.generation = 0
        self._title, self._world, self._timeout, self._signals = title, world, timeout, signals
        self._council: Council | None = None  # while the ranks are together
        self._made: list[tuple[Communicator, ProcessGroup]] = []
        self._given = Handles()
        self._lease = Lease(owner=title)
        self._groups: ProcessGroupCollection | None = None
        self._state = LeaseState.LIVE
        self._way: How | None = None  # how the groups were suspended, while they are
        self._before_release: list[Callable[[], object]] = []
        self._on_resume: list[Callable[[ProcessGroupCollection], object]] = []

    # -- what differs ------------------------------------------------------------------------

    @abc.abstractmethod
    def _expect(self, state: LeaseState, doing: str) -> None:
        """Raise SessionError, with what to do, in any other state."""

    @abc.abstractmethod
    def _concerned(self, way: How) -> list[tuple[Communicator, ProcessGroup]]:
        """The groups that a way to suspend is about."""

    @abc.abstractmethod
    def _agree_to_resume(self, way: How) -> None:
        """Come together before anything is resumed, if the ranks are not apart until then."""

    @abc.abstractmethod
    def _let_go(self, way: How, steps: Steps) -> None:
        """End the groups until :meth:`_make_anew`, and see that every rank has."""

    @abc.abstractmethod
    def _make_anew(self, way: How, steps: Steps) -> None:
        """Make what :meth:`_let_go` ended, with a collection and a lease of a new generation."""

    @abc.abstractmethod
    def _release(self, steps: Steps, news: Callable[[], None], *, abort: bool) -> None:
        """End the groups and whatever ends with them, attempting every step.

        ``news`` is to be called when the groups have ended and WORLD has not: other ranks that
        waited for this one have failed by then, and may say of what.
        """

    @abc.abstractmethod
    def _refuse_to_close(self) -> None:
        """Raise where closing now, with nothing wrong, would harm others."""

    def _world_of_ours(self) -> ProcessGroup | None:
        """The WORLD that is re-created with the groups, if it can be."""
        return None

    def _take_leave(self, problems: Mapping[int, str], error: BaseException | None) -> None:
        """Tell of what is wrong elsewhere (rank -> what), before the groups end."""
        if problems and error is None:
            logger.warning(
                "%s: other ranks are late or not well: %s; aborting", self._title, problems
            )

    # -- use ---------------------------------------------------------------------------------

    @property
    def groups(self) -> ProcessGroupCollection:
        """The frozen collection to hand to models, optimizers, schedules and checkpoints.

        Raises:
            SessionError: the groups are suspended or closed, or have failed.
        """
        self._expect(LeaseState.LIVE, "groups")
        assert self._groups is not None  # as long as it is live
        return self._groups

    @property
    def state(self) -> LeaseState:
        """Live; suspended, by ``suspend()``; closed; or failed, and only good for closing."""
        return self._state

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._world.rank

    @property
    def closed(self) -> bool:
        """Whether the groups have been closed."""
        return self._state is LeaseState.CLOSED

    def live_references(self) -> list[str]:
        """Who still holds these groups or their collection, and so keeps sockets open.

        One line per holder, such as ``tp+tp_cp: a mymodel.Block, as tp_group``, as far as Python's
        garbage collector sees them. After :meth:`close` it should be empty; of adopted groups the
        globals are among them until then. Slow.
        """
        own = {id(self), id(self._made), id(vars(self)), *(id(pair) for pair in self._made)}
        return self._given.live_references(own)

    # -- for a while -------------------------------------------------------------------------

    def before_release(self, callback: _BeforeRelease) -> _BeforeRelease:
        """Have ``suspend()`` and :meth:`close` call ``callback()`` before anything is released.

        For what holds on to communicators or their memory beside them: CUDA graphs, buffers
        registered with NCCL, the buffers of expert-parallel libraries. Callbacks run in the order
        in which they were given; this serves as a decorator, too.
        """
        self._before_release.append(callback)
        return callback

    def on_resume(self, callback: _OnResume) -> _OnResume:
        """Have every ``resume()`` call ``callback(groups)`` with the groups that are live then.

        They are new ones after *recreate*. Callbacks run in the order in which they were given;
        this serves as a decorator, too.
        """
        self._on_resume.append(callback)
        return callback

    def rebind(self, *things: object) -> Rebound:
        """Put the current groups wherever ``things`` hold earlier ones of this owner.

        After a resumed *recreate*: modules, DDP wrappers, optimizers, schedules, anything that was
        given groups or a collection. After a *suspend* there is nothing to do.

        Returns:
            Every reference that was replaced, and every one that could not be.

        Raises:
            SessionError: the groups are not live.
        """
        from megapg.rebind import Replacements, rebind

        replacements = Replacements()
        for old, new in self._given.outdated(self._made, self.groups, self._world_of_ours()):
            replacements.add(old, new)
        return rebind(things, replacements)

    def _suspend(self, how: How | None, refusals: Callable[[], dict[How, str]]) -> OffloadReport:
        self._expect(LeaseState.LIVE, "suspend()")
        with self._together("suspend()") as steps:
            with steps.timed("agree"):
                way = offload.agree(self._exchange, self._title, how, refusals(), "suspend()")
            before = Usage.of(self._concerned(way))
            if way != "suspend":
                self._lease.wind_up(None, steps.aside)
                _raise_interruption(steps.aside)
            for callback in self._before_release:
                with steps.attempted("callbacks"):
                    callback()
            with steps.attempted("finish"):
                offload.synchronize()
            self._compare(steps, "suspend(), before the release")
            since = f"{self._since()} by suspend()"
            self._state, self._way = LeaseState.SUSPENDED, way
            if way == "suspend":
                self._lease.suspend(since)
                with steps.attempted("suspend"):
                    offload.suspend(self._concerned(way))
                self._compare(steps, "suspend(), after the release")
            else:
                self._lease.end(since)
                self._groups = None
                self._let_go(way, steps)
        report = self._report("suspended", way, before, steps)
        if steps.aside:
            steps.aside[0].add_note(f"{self._title}: the groups are suspended all the same")
            _raise_first(steps.aside)
        return report

    def _resume(self) -> OffloadReport:
        self._expect(LeaseState.SUSPENDED, "resume()")
        way, former = self._way, self._lease
        assert way is not None  # while it is suspended
        before = Usage.of(self._concerned(way))
        with self._together("resume()") as steps:
            with steps.timed("agree"):
                self._agree_to_resume(way)
            if way == "suspend":
                with steps.attempted("resume"):
                    offload.resume(self._concerned(way))
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
            self._compare(steps, "resume(), the callbacks")
        return self._report("resumed", way, before, steps)

    def _report(self, action: str, way: How, before: Usage, steps: Steps) -> OffloadReport:
        after = Usage.of(self._concerned(way))
        report = offload.report(self._title, action, way, before, after, steps)
        logger.info("%s", report)
        return report

    # -- together ----------------------------------------------------------------------------

    def _together(self, doing: str) -> contextlib.AbstractContextManager[Steps]:
        return together(self._title, doing, self.rank, partial(self._lose, doing))

    def _lose(self, doing: str, said: str) -> None:
        self._part(SessionError(f"{doing} failed: {said}"))
        try:
            self._end(LeaseState.FAILED, f"{self._since()}, as {doing} failed")
        finally:  # whatever a listener raises
            self._destroy(abort=True)

    def _compare(self, steps: Steps, topic: str) -> None:
        """Go on only if all has gone well so far, on every rank."""
        with steps.timed("agree"):
            heard = self._exchange(topic, steps.report())
        steps.compare(heard, self.rank)

    def _exchange(self, topic: str, said: str) -> dict[int, str]:
        if self._council is None:  # nobody else is there
            return {self.rank: said}
        return self._council.exchange(topic, said, timeout=self._timeout)

    def _part(self, error: BaseException | None) -> dict[int, str]:
        """Take leave of the other ranks, if we are together: rank -> what went wrong there."""
        council, self._council = self._council, None
        return {} if council is None else council.part(error, timeout=self._timeout)

    def _since(self) -> str:
        return f"at {time.strftime('%H:%M:%S')} on rank {self.rank}"

    # -- the end -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        _ = self.groups  # closed ones say so here already
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
        except Exception as trouble:  # what the body raised matters more
            error.add_note(f"closing {self._title} failed as well: {trouble!r}")

    def close(self) -> None:
        """End the groups. Closing twice does nothing."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        if self.closed:
            return
        if error is None:
            self._refuse_to_close()
        with self._signals.closing():
            self._finish(error)

    def _finish(self, error: BaseException | None) -> dict[int, str]:
        """Close, and tell rank -> what went wrong there before."""
        council, problems = self._council, dict[int, str]()
        unfinished: list[BaseException] = []
        with self._interruptible(unfinished):
            if self._lease.state in (LeaseState.LIVE, LeaseState.SUSPENDED):
                self._lease.wind_up(error, unfinished)
        if self._state is LeaseState.LIVE:
            for callback in self._before_release:
                with self._interruptible(unfinished):
                    try:
                        callback()
                    except Exception as problem:
                        unfinished.append(problem)
        with self._interruptible(unfinished):
            problems = self._part(error or _interruption(unfinished))
        if (interruption := _interruption(unfinished)) is not None and not problems:
            problems = {self.rank: brief(interruption)}
            if council is not None:  # nobody shall wait for what it was about to say
                council.part(interruption, timeout=self._timeout)
        self._take_leave(problems, error or interruption)
        abort = bool(problems) or self._state is LeaseState.FAILED
        since = self._since() + (f", after {type(error).__name__}" if error is not None else "")
        steps = Steps()
        with steps.attempted("lease"):
            self._end(LeaseState.CLOSED, since)
        self._release(steps, partial(self._add_news, error, council), abort=abort)
        if steps.problems:
            self._state = LeaseState.FAILED  # closing it again tries the rest again
        del interruption
        _raise_interruption(unfinished)
        if steps.problems:
            try:
                raise TeardownError(
                    f"{self._title} could not be closed on rank {self.rank}: {steps.report()}",
                    [*steps.take(), *(e for e in unfinished if isinstance(e, Exception))],
                )
            finally:
                unfinished.clear()  # as _raise_first() does
        for other in unfinished[1:]:
            unfinished[0].add_note(f"{self._title}: and {other!r}")
        if unfinished:
            _raise_first(unfinished)
        return problems

    @contextlib.contextmanager
    def _interruptible(self, interruptions: list[BaseException]) -> Iterator[None]:
        """Around a wait while closing: Ctrl-C ends the wait, and counts when all is closed."""
        try:
            with self._signals.heeding():
                yield
        except Exception:
            raise
        except BaseException as interruption:
            interruptions.append(interruption)

    def _add_news(self, error: BaseException | None, council: Council | None) -> None:
        """Note on the error how the others fare: it may be theirs, and torch's names no rank."""
        if council is None or not isinstance(error, Exception):
            return
        of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
        news = council.news(wait=min(self._timeout, _NEWS) if of_torch else 0.0)
        if news:
            lines = "; ".join(f"rank {rank}: {text}" for rank, text in list(news.items())[:8])
            more = f"; and {len(news) - 8} more" if len(news) > 8 else ""
            error.add_note(f"{self._title}, the other ranks: {lines}{more}.")

    def _end(self, state: LeaseState, since: str) -> None:
        """Nobody may use the groups from now on."""
        self._state, self._groups, self._way = state, None, None
        if self._lease.state in (LeaseState.LIVE, LeaseState.SUSPENDED):
            self._lease.end(since, state)

    def _destroy(self, *, abort: bool) -> None:
        """End the communicators, and keep those that torch still knows for another attempt."""
        made, self._made = self._made, []
        try:
            communicators_of_torch.end(made, abort=abort)
        finally:
            self._made = [pair for pair in made if communicators_of_torch.is_registered(pair[1])]


def _interruption(errors: Iterable[BaseException]) -> BaseException | None:
    """The first that is no ordinary error: Ctrl-C, or a request to exit."""
    return next((error for error in errors if not isinstance(error, Exception)), None)


def _raise_interruption(errors: list[BaseException]) -> None:
    """Raise the first that is no ordinary error, if there is one, and keep none here."""
    if (found := _interruption(errors)) is not None:
        errors[:] = [found]
        del found
        _raise_first(errors)


def _raise_first(errors: list[BaseException]) -> None:
    """Raise one, and keep none here: see :meth:`~megapg.comms.steps.Steps.take`."""
    try:
        raise errors[0]
    finally:
        errors.clear()
