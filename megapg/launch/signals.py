"""Close a session in order on SIGTERM, as before preemption, and on Ctrl-C.

The handler only raises, in the main thread. Exception handling does the rest:
:meth:`Session.__exit__ <megapg.ownership.session.Session>` notifies the other ranks, cancels
background saves, and aborts the groups.

Python runs handlers between two of its instructions, so a thread inside a collective runs none.
Measured with gloo in torch 2.13: only the collective, its timeout or the peer's connection ends
such a wait. No call from another thread does, not even ``abort()``, which ends such waits for NCCL.
So another thread also receives signals (the C-level handler writes to a pipe). If the main thread
has not reacted after a while, this thread does what it can in its place. If that does not free the
main thread, it ends the process.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

from typing_extensions import override

from megapg.errors import SessionError

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launchers and clusters kill a process 30 s after the signal. The three waits below stay within
# this. Seconds that the main thread may be busy before it counts as stuck.
_PATIENCE = 10.0
# Seconds that notifying the other ranks, cancelling saves and aborting may take.
_ABORT_WAIT = 12.0
# Seconds after that for the main thread to come free.
_FREED = 2.0
# Signals within so many seconds are one request: a terminal signals the launcher and the ranks, and
# the launcher signals the ranks again.
_SAME = 2.0

_Handler = Callable[[int, FrameType | None], object]


class SignalExit(SystemExit):
    """A signal asked this process to stop. Uncaught, it ends the process with 128 + the signal.

    Like ``KeyboardInterrupt``, which Ctrl-C raises, ``except Exception`` does not catch it.

    Attributes:
        signal: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)
        self.code = 128 + number

    @override
    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


class NoSignals:
    """Signal handling of a session that handles no signals."""

    def when_stuck(self, work: Callable[[SignalExit], None]) -> None:
        """Have a thread call ``work`` if the main thread does not react to a signal."""

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Context that delays signals to its end, and then stops handling them."""
        yield

    @contextlib.contextmanager
    def heeding(self) -> Iterator[None]:
        """Context of a wait within :meth:`closing` that a signal may interrupt."""
        yield

    def close(self) -> None:
        """Stop handling signals. A second call does nothing."""


class Signals(NoSignals):
    """Signal handling of one session, from its opening to its closing.

    Earlier handlers are called first when a signal comes, and are restored when the last such
    session is closed. A signal that was ignored stays ignored.

    Raises:
        SessionError: this is not the main thread, or Python can't restore an earlier handler.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SessionError(
                "handle_signals=True: Python handles signals in the main thread, and this is "
                f"{threading.current_thread().name!r}. Open the session in the main thread, or "
                "handle signals there and close the session from there."
            )
        self.work_when_stuck: Callable[[SignalExit], None] | None = None
        self._watch = _Watch.installed() or _Watch()
        self._watch.ears.append(self)

    @override
    def when_stuck(self, work: Callable[[SignalExit], None]) -> None:
        self.work_when_stuck = work

    @contextlib.contextmanager
    @override
    def closing(self) -> Iterator[None]:
        self._watch.holding += 1
        try:
            yield
        finally:
            self._watch.holding -= 1
            self.close()
            self._watch.deliver()

    @contextlib.contextmanager
    @override
    def heeding(self) -> Iterator[None]:
        self._watch.holding -= 1
        try:
            self._watch.deliver()
            yield
        finally:
            self._watch.holding += 1

    @override
    def close(self) -> None:
        self.work_when_stuck = None
        if self in self._watch.ears:
            self._watch.ears.remove(self)
            if not self._watch.ears:
                self._watch.uninstall()


class _Watch:
    """The handlers of this process and their thread, shared by all sessions that handle signals.

    Found through the installed handler, so there is no other global state.
    """

    def __init__(self) -> None:
        self.ears: list[Signals] = []
        self.holding = 0
        self._came: tuple[int, FrameType | None] | None = None  # a delayed signal
        self._heard_at = -math.inf
        self._asked_at = -math.inf  # the same, without repetitions
        self._earlier: dict[int, _Handler | int] = {}
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler is None:
                raise SessionError(
                    f"handle_signals=True: {signal.Signals(number).name} has a handler that was "
                    "not installed from Python, so it could not be put back. Open the session "
                    "without handle_signals, or before what installs that handler."
                )
            if handler != signal.SIG_IGN:
                self._earlier[number] = handler
        self.reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._next_writer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for caught in self._earlier:
            signal.signal(caught, self._handle)
        threading.Thread(target=self._listen, name="megapg signals", daemon=True).start()

    @classmethod
    def installed(cls) -> Self | None:
        """Return the instance whose handlers are installed, or None."""
        owners = (getattr(signal.getsignal(number), "__self__", None) for number in _SIGNALS)
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    def uninstall(self) -> None:
        """Restore the earlier handlers, unless other code has replaced ours."""
        if threading.current_thread() is not threading.main_thread():
            return  # _pass_on() uninstalls when a signal comes
        for number, handler in self._earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        current = signal.set_wakeup_fd(-1)
        if current == self._writer and current != -1:
            signal.set_wakeup_fd(self._next_writer, warn_on_full_buffer=False)
            os.close(self._writer)  # the thread sees the end of the pipe, and ends
            self._writer = -1  # the descriptor may be reused
        else:  # other code may forward to our descriptor, so it stays open
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    # -- in the main thread ------------------------------------------------------------------

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Uses no collective, store or shared lock, as it may run anywhere."""
        self._heard_at = time.monotonic()
        again = self._heard_at - self._asked_at < _SAME
        if not again:  # otherwise repeated signals would never count
            self._asked_at = self._heard_at
        if not self.ears:
            self._pass_on(number, frame)
        elif again:
            return
        elif self.holding:
            self._came = number, frame
        else:
            self._stop(number, frame)

    def deliver(self) -> None:
        """Act on a delayed signal once nothing delays it."""
        if self._came is not None and not self.holding:
            came, self._came = self._came, None
            if threading.current_thread() is threading.main_thread():
                self._stop(*came)
            else:  # another thread closed the session, but the main thread must stop
                self._asked_at = -math.inf
                os.kill(os.getpid(), came[0])

    def _stop(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier[number]
        if callable(earlier):
            earlier(number, frame)
        raise KeyboardInterrupt if number == signal.SIGINT else SignalExit(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """No session handles signals any more, but the handlers could not be restored before."""
        self.uninstall()
        earlier = self._earlier[number]
        if callable(earlier):
            earlier(number, frame)
        elif signal.getsignal(number) == earlier:
            signal.raise_signal(number)

    # -- in the thread -----------------------------------------------------------------------

    def _listen(self) -> None:
        with open(self.reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                asked = time.monotonic()
                if self._next_writer != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._next_writer, numbers)
                for number in dict.fromkeys(numbers):
                    if number in self._earlier and self.ears:
                        self._see_that_it_ends(number, asked)

    def _see_that_it_ends(self, number: int, asked: float) -> None:
        if self._main_thread_heard(asked, _PATIENCE):
            return
        error = SignalExit(number)
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        logger.critical(
            "%s, but for %g s the main thread has been inside a call that does not return to "
            "Python; this rank is stopped without it. It is here:\n%s",
            error.signal.name,
            _PATIENCE,
            "".join(traceback.format_stack(main)).rstrip(),
        )
        work = [ear.work_when_stuck for ear in reversed(self.ears)]
        helpers = [
            threading.Thread(target=each, args=(error,), daemon=True)
            for each in work
            if each is not None
        ]
        for helper in helpers:
            helper.start()
        until = time.monotonic() + _ABORT_WAIT
        for helper in helpers:
            helper.join(max(0.0, until - time.monotonic()))
        if self._main_thread_heard(asked, _FREED):
            return  # the main thread closes the sessions
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(128 + number)

    def _main_thread_heard(self, asked: float, patience: float) -> bool:
        until = time.monotonic() + patience
        # no sessions are left if it has closed them
        while self.ears and self._heard_at < asked - _SAME:
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        return True


def _unwatch_child() -> None:
    """Stop handling signals in a forked process, such as a data loader's worker.

    Otherwise the pipe would pass its signals to the parent's thread.
    """
    if (watch := _Watch.installed()) is not None:
        watch.ears.clear()
        watch.uninstall()
        os.close(watch.reader)


if hasattr(os, "register_at_fork"):  # not on platforms without fork
    os.register_at_fork(after_in_child=_unwatch_child)
