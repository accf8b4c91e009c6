"""Close process groups: in order, after an error, when their owner is dropped, or at exit.

A failure on any rank closes the groups on all ranks, in bounded time. Every step is attempted.
"""

from __future__ import annotations

import _thread
import abc
import atexit
import contextlib
import itertools
import logging
import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

from megapg import torch_private
from megapg.collection import Lease, LeaseState, ProcessGroup, ProcessGroupCollection
from megapg.communicators import create as communicators_of_torch
from megapg.communicators.needed import Communicator
from megapg.communicators.world import World
from megapg.errors import RendezvousError, SessionError, TeardownError
from megapg.launch.signals import NoSignals, SignalExit
from megapg.ownership import dead_ranks, hints, suspension
from megapg.ownership.steps import Steps
from megapg.ownership.suspension import How
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.error_texts import ALONE, brief, culprits, of_a_communicator, told

logger = logging.getLogger(__name__)

# Seconds for which a rank whose collective failed waits for the error of the rank that caused it.
_NEWS_WAIT = 2.0
# Seconds for which a finaliser blocks the thread that dropped the last reference. After that,
# closing continues in the background.
_FINALISER_WAIT = 10.0


_BeforeRelease = TypeVar("_BeforeRelease", bound=Callable[[], object])


class Closing(abc.ABC):
    """Base class of :class:`~megapg.ownership.owner.Owner`: closes its process groups."""

    generation = 0
    _state = LeaseState.CLOSED  # until groups are open

    def __init__(self, title: str, world: World, timeout: float, signals: NoSignals) -> None:
        self._title, self._world, self._timeout, self._signals = title, world, timeout, signals
        self._coordinator: Coordinator | None = None  # set while the ranks are connected
        self._made: list[tuple[Communicator, ProcessGroup]] = []
        self._lease = Lease(owner=title, timeout=timeout)
        self._groups: ProcessGroupCollection | None = None
        self._world_owner: Closing | None = None  # keeps the owner of WORLD alive
        self._way: How | None = None  # set while the groups are suspended
        self._before_release: list[Callable[[], object]] = []
        # Field -> ranks of this rank's groups. Stays set while the groups are suspended.
        self.ranks_by_field: Mapping[str, tuple[int, ...]] = {}

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._world.rank

    @property
    def closed(self) -> bool:
        """True if the groups have been closed."""
        # Read the state from the class: at exit, Python may have cleared this module's globals.
        return self._state is type(self)._state

    @abc.abstractmethod
    def _release(
        self, steps: Steps, news: Callable[[], None], abort: BaseException | None, alone: bool
    ) -> dict[int, str]:
        """Close the groups, and WORLD if it is this owner's. Every step is attempted.

        Args:
            steps: collects times and errors.
            news: called after the groups are closed and before WORLD is. By then ranks that waited
                for this one have failed and posted their errors.
            abort: the error to report to the other ranks, or None. With an error, this rank aborts
                the groups and waits for no other rank.
            alone: True to wait for no other rank although there is no error.

        Returns:
            rank -> the error that kept this rank from closing in order.
        """

    def _refuse_to_close(self) -> None:  # noqa: B027
        """Raise if closing now, without an error, would harm other users of the groups."""

    def _take_leave(self, error: BaseException | None) -> None:  # noqa: B027
        """Notify the other ranks that this rank has closed, if they are not connected to it."""

    def _opened(self) -> None:
        """Register this owner for :func:`open_owners` once its groups are open."""
        if not self._world.ours:
            self._world_owner = next((o for o in open_owners() if o._world.ours), None)
        self.ranks_by_field = _ranks_by_field(self._groups)
        _OPENED[next(_NUMBERS)] = self
        _call_listeners(opened=True)
        self._signals.when_stuck(_weakly(self._leave_without_the_main_thread))

    def _part(self, error: BaseException | None, alone: bool = False) -> dict[int, str]:
        """Disconnect from the other ranks, if connected. Return rank -> its error."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is None:
            return {}
        if alone and error is None:
            coordinator.leave()
            return {}
        return coordinator.part(error, timeout=self._timeout)

    def _since(self) -> str:
        return f"at {time.strftime('%H:%M:%S')} on rank {self.rank}"

    def before_release(self, callback: _BeforeRelease) -> _BeforeRelease:
        """Have ``suspend()`` and :meth:`close` call ``callback()`` before they release anything.

        Use it for objects that keep communicators or their memory alive: CUDA graphs, buffers
        registered with NCCL, the buffers of expert-parallel libraries. Callbacks run in the order
        of registration. Also works as a decorator.
        """
        self._before_release.append(callback)
        return callback

    def close(self, error: BaseException | None = None) -> None:
        """Close the groups, after an error if one is given. Closing twice does nothing."""
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self.closed:
            return
        if error is None:
            explain(sys.exception())  # in ``finally: session.close()``
            for each in (*self._dependents(), self):
                each._refuse_to_close()
        with self._signals.closing():
            explain(error)
            self._finish(error)

    def _dependents(self) -> list[Closing]:
        """Return the other owners whose groups are on this owner's WORLD, newest first."""
        if not self._world.ours:
            return []
        return [o for o in reversed(open_owners()) if o is not self and o._world.current]

    def _finish(self, error: BaseException | None, why: str = "", *, alone: bool = False) -> None:
        """Close the groups.

        Args:
            error: why the groups are closed, or None. With an error, this rank waits for no other
                rank.
            why: the reason that later use of the groups reports, instead of the error's name.
            alone: see :func:`leave`.
        """
        if error is not None:
            dead_ranks.report(self._title, error, self._made, self._coordinator)
        unfinished: list[BaseException] = []
        cause = self._close_dependents(unfinished, error, alone)
        coordinator, problems, parted = self._coordinator, dict[int, str](), False
        with self._kept(unfinished):
            if self._lease.state in (LeaseState.LIVE, LeaseState.SUSPENDED):
                self._lease.wind_up(cause, unfinished)
        if self._state is LeaseState.LIVE:
            for callback in self._before_release:
                with self._kept(unfinished):
                    callback()
        if alone and cause is None:
            with self._kept(unfinished):
                _wait_for_the_device(self._title, self.rank, self._timeout)
        with self._kept(unfinished):
            problems = self._part(cause or _interruption(unfinished), alone)
            parted = True
        if (interruption := _interruption(unfinished)) is not None and not problems:
            problems = {self.rank: brief(interruption)}
            if coordinator is not None:  # the other ranks must not wait for this one
                coordinator.part(interruption, timeout=self._timeout)
        self._take_leave(cause or interruption)
        abort = cause or interruption
        if abort is None and (problems or not parted or self._state is LeaseState.FAILED):
            abort = RendezvousError("aborted")
        reason = why or (f"after {type(cause).__name__}" if cause is not None else "")
        steps = Steps()
        with steps.attempted("lease"):
            self._end(LeaseState.CLOSED, self._since() + (f", {reason}" if reason else ""))
        news = partial(self._add_news, error, coordinator, problems)
        with steps.attempted("extra groups"):
            _end_extra_groups(self._lease, abort=abort is not None or alone)
        problems |= self._release(steps, news, abort, alone)
        self._world_owner = None
        problems = {rank: said for rank, said in problems.items() if said != ALONE}
        if steps.problems:
            self._state = LeaseState.FAILED  # a second close() tries the rest again
        del interruption, cause, abort
        raise_interruption(unfinished)
        if steps.problems:
            try:
                raise TeardownError(
                    f"{self._title} could not be closed on rank {self.rank}: {steps.report()}",
                    [*steps.take(), *(e for e in unfinished if isinstance(e, Exception))],
                )
            finally:
                unfinished.clear()  # as raise_first() does
        if (
            problems
            and error is None
            and not any(isinstance(e, RendezvousError) for e in unfinished)
        ):
            unfinished.append(self._not_in_order(problems))
        for other in unfinished[1:]:
            unfinished[0].add_note(f"{self._title}: and {other!r}")
        if unfinished:
            raise_first(unfinished)

    def _close_dependents(
        self, unfinished: list[BaseException], error: BaseException | None, alone: bool
    ) -> BaseException | None:
        """Close the other owners on this owner's WORLD. Return the error to abort with, or None."""
        for dependent in self._dependents():
            logger.warning(
                "%s made WORLD and is closed, while %s is open on it, which is closed first",
                self._title,
                dependent._title,
            )
            with self._kept(unfinished):
                leave(dependent) if alone else dependent._close(error)
            if unfinished and error is None:
                lost = isinstance(unfinished[-1], RendezvousError)
                error = unfinished[-1] if lost else _interruption(unfinished)
        return error

    def _not_in_order(self, problems: Mapping[int, str]) -> RendezvousError:
        blamed = culprits(problems)
        return RendezvousError(
            f"{self._title}: the groups were aborted, as not every rank came to close them in "
            f"order: {told(problems)}." + (" Look at the logs of those ranks." if blamed else ""),
            blamed,
        )

    @contextlib.contextmanager
    def _kept(self, errors: list[BaseException]) -> Iterator[None]:
        """Collect the error of one step of closing, Ctrl-C included, so that the next step runs.

        A signal that was delayed until this step is collected before it. The step still runs.
        """
        begun = False
        try:
            with self._signals.heeding():
                begun = True
                yield
        except BaseException as error:
            errors.append(error)
        if not begun:
            try:
                yield
            except BaseException as error:
                errors.append(error)

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

    def __del__(self) -> None:
        if self.closed or self._lease.pid != os.getpid() or sys.is_finalizing():
            return
        self._signals.close()
        self._signals = NoSignals()
        how = "was dropped without close()"
        done = _thread.allocate_lock()
        done.acquire()

        def drop() -> None:
            try:
                self._drop(how)
            finally:
                done.release()

        try:
            warnings.warn(self._warning(how), ResourceWarning, stacklevel=2)
        finally:
            # The garbage collector can run at any point, so this thread may hold a lock that
            # closing needs. ``threading.Thread`` takes a lock as well, so use ``_thread``.
            _thread.start_new_thread(drop, ())
            done.acquire(timeout=_FINALISER_WAIT)

    def _warning(self, how: str) -> str:
        return (
            f"{self._title} (generation {self.generation}) {how}, and is aborted. Open it in a "
            "`with` block, or call close()."
        )

    def _drop(self, how: str) -> None:
        """Abort groups that were never closed. The other ranks are notified, not waited for."""
        said = f"{self._title} (generation {self.generation}) {how}"
        logger.warning("%s, and is aborted", said)
        try:
            with self._signals.closing():
                self._finish(SessionError(said), f"as it {how}")
        except Exception as trouble:
            logger.warning("%s, and could not be closed: %r", said, trouble)

    def _add_news(
        self, error: BaseException | None, coordinator: Coordinator | None, problems: dict[int, str]
    ) -> None:
        """Add the other ranks' errors to ``error`` or ``problems``: torch's errors name no rank."""
        wait = min(self._timeout, _NEWS_WAIT)
        if coordinator is None:
            return
        if isinstance(error, Exception):
            if news := coordinator.news(wait=wait if dead_ranks.of_torch(error) else 0.0):
                error.add_note(f"{self._title}, the other ranks: {told(news)}.")
        elif error is None and any(map(of_a_communicator, problems.values())):
            problems.update(coordinator.news(wait=wait))

    def _leave_without_the_main_thread(self, error: SignalExit) -> None:
        """Abort from another thread if the main thread is stuck: notify ranks, cancel work."""
        dead_ranks.report(self._title, error, self._made, self._coordinator)
        self._part(error)
        self._lease.wind_up(error, [])
        for _, group in self._made:
            torch_private.call_off(group)
        if self._world.group is not None:
            torch_private.call_off(self._world.group)

    def _end(self, state: LeaseState, since: str) -> None:
        """End the lease: any later use of the groups raises."""
        self._state, self._groups, self._way = state, None, None
        try:
            if self._lease.state in (LeaseState.LIVE, LeaseState.SUSPENDED):
                self._lease.end(since, state)
        finally:
            _call_listeners(opened=False)

    def _destroy(self, *, abort: bool) -> None:
        """Destroy the communicators. Keep those that torch still knows, for another attempt."""
        made, self._made = self._made, []
        try:
            communicators_of_torch.end(made, abort=abort)
        finally:
            self._made = [pair for pair in made if torch_private.knows(pair[1])]


def _end_extra_groups(lease: Lease, *, abort: bool) -> None:
    """Destroy the extra groups that Megatron's functions made on this lease, newest first."""
    for add in lease.find_extra_groups:
        add()
    try:
        communicators_of_torch.end(((None, each) for each in lease.extra_groups), abort=abort)
    finally:  # keep those that torch still knows, for another attempt
        lease.extra_groups = list(filter(torch_private.knows, lease.extra_groups))


def _ranks_by_field(pg: ProcessGroupCollection | None) -> Mapping[str, tuple[int, ...]]:
    """Return field -> ranks: empty for None. ``hcp`` lists the ranks of all its levels in a row."""

    def flat(ranks: Sequence[int | list[int]] | None) -> Iterator[int]:
        for each in ranks or ():
            yield from [each] if isinstance(each, int) else each

    plain = {} if pg is None else pg.describe()
    return {field: tuple(flat(ranks)) for field, ranks in plain.items()}


def _interruption(errors: Iterable[BaseException]) -> BaseException | None:
    """Return the first error that is no ``Exception``: Ctrl-C, or a request to exit."""
    return next((error for error in errors if not isinstance(error, Exception)), None)


def raise_interruption(errors: list[BaseException]) -> None:
    """Raise the first error that is no ``Exception``, if there is one, and clear the list."""
    if (found := _interruption(errors)) is not None:
        errors[:] = [found]
        del found
        raise_first(errors)


def raise_first(errors: list[BaseException]) -> None:
    """Raise the first error and clear the list: see :meth:`~megapg.ownership.steps.Steps.take`."""
    try:
        raise errors[0]
    finally:
        errors.clear()


def _weakly(method: Callable[[SignalExit], None]) -> Callable[[SignalExit], None]:
    """Wrap a bound method without keeping its object alive."""
    known = weakref.WeakMethod(method)

    def call(error: SignalExit) -> None:
        if (still := known()) is not None:
            still(error)

    return call


# -- alone ----------------------------------------------------------------------------------------


def leave(owner: Closing) -> None:
    """Close an owner's groups on this rank alone, without an error.

    For the end of a script, when the ranks exit at different times or another rank has already
    exited. The other ranks are notified, not waited for. This rank waits for its own work on the
    device, within the owner's timeout. A rank that is in a collective with this one fails there, as
    it would if this process exited.

    Raises:
        RendezvousError: the device did not finish. The groups are closed all the same.
        TeardownError: some groups could not be closed; every one was attempted.
    """
    if not owner.closed:
        with owner._signals.closing():
            owner._finish(None, alone=True)


def _wait_for_the_device(title: str, rank: int, timeout: float) -> None:
    """Wait up to ``timeout`` seconds for this rank's work on the device."""
    try:
        suspension.synchronize(timeout)
    except TimeoutError:
        raise RendezvousError(
            f"{title}: what rank {rank} began on the device did not end within {timeout:g} s, and "
            "was aborted. A rank that left in the middle of a collective is the usual cause: look "
            "at the logs of the others."
        ) from None


# -- which are open --------------------------------------------------------------------------------

# All owners in this process whose groups were opened, in that order, by weak reference.
_OPENED: weakref.WeakValueDictionary[int, Closing] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def open_owners() -> list[Closing]:
    """Return the owners of this process that have not been closed, in the order of opening."""
    opened = [owner for known in _OPENED.valuerefs() if (owner := known()) is not None]
    return [o for o in opened if not o.closed and o._lease.pid == os.getpid()]


def explain(error: BaseException | None) -> None:
    """Add a note to an error of Megatron-core or torch that a step of megapg's would cure."""
    if error is not None:
        live = [owner for owner in open_owners() if owner._state is LeaseState.LIVE]
        hints.explain(error, [owner._title for owner in live])


# Callbacks: (after an owner opened its groups, after it closed or lost them).
_LISTENERS: list[tuple[Callable[[], None], Callable[[], None]]] = []


def on_open_or_close(*, opened: Callable[[], None], closed: Callable[[], None]) -> None:
    """Register callbacks for every owner: after it opens, and after it closes or fails.

    If ``opened()`` raises, the owner does not open.
    """
    _LISTENERS.append((opened, closed))


def _call_listeners(*, opened: bool) -> None:
    for when_opened, when_closed in _LISTENERS:
        (when_opened if opened else when_closed)()


def close_lost() -> None:
    """Close the owners whose WORLD was destroyed, and with it all groups.

    Otherwise their names, and the name of WORLD, would stay taken. Owners suspended by *recreate*
    have disconnected and hold nothing, so they are left alone.
    """
    for owner in reversed(open_owners()):
        if not owner._world.current and owner._way in (None, "suspend"):
            owner._drop("lost its WORLD, which somebody destroyed")


@atexit.register
def _close_at_exit() -> None:
    with contextlib.ExitStack() as newest_first:
        for owner in open_owners():
            newest_first.callback(_drop_at_exit, owner)


def _drop_at_exit(owner: Closing) -> None:
    how = "was still open when Python ended"
    if (error := getattr(sys, "last_value", None)) is not None:  # Python has printed it already
        explain(error)
        if hints.has_note(error):
            logger.warning("%s: %s", error, error.__notes__[-1])
    try:
        warnings.warn(owner._warning(how), ResourceWarning, stacklevel=1)
    finally:  # also if warnings are errors
        owner._drop(how)
