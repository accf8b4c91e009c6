"""Told to stop: SIGTERM, as before preemption, and Ctrl-C close a session in good order.

The handler only raises, in the main thread, and everything else happens where exceptions are dealt
with: :meth:`Session.__exit__ <megapg.ownership.session.Session>` tells the other ranks, calls off
background saves, aborts the groups. Python runs handlers between two instructions of its own, so a
thread that waits inside a collective hears nothing. Measured with gloo in torch 2.13: the wait ends
with the collective, its timeout or the peer's connection, and by nothing done from another thread,
``abort()`` included, which for NCCL exists to end such waits. So a thread listens too (the C-level
handler writes to a pipe): when the main thread has not heard after a while, it does in its place
what can be done from there, and if that does not free it either, ends the process.
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

from megapg.errors import SessionError

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launchers and clusters kill 30 s after they asked; the three waits below stay within that.
# How long the main thread may be busy before it counts as stuck. Seconds.
_PATIENCE = 10.0
# How long telling the others, calling off saves and aborting may take. Seconds.
_LAST_WORDS = 12.0
# How long after that the main thread has to come free. Seconds.
_FREED = 2.0
# Signals this close together are one request: a terminal signals the launcher and the ranks, and
# the launcher the ranks once more. Seconds.
_SAME = 2.0

_Handler = Callable[[int, FrameType | None], object]


class SignalExit(SystemExit):
    """A signal asked this process to stop. Left alone, it ends with status 128 + the signal.

    Like ``KeyboardInterrupt``, which Ctrl-C raises, it passes by ``except Exception``.

    Attributes:
        signal: which one.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)
        self.code = 128 + number

    def __str__(self) -> str:
        return f"stopped by {self.signal.name}"


class NoSignals:
    """The ear of a session that leaves signals alone."""

    def when_stuck(self, work: Callable[[SignalExit], None]) -> None:
        """Have a thread do this in place of a main thread that does not hear the signal."""

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Around what must not be torn: a signal counts at its end. Then stop listening."""
        yield

    @contextlib.contextmanager
    def heeding(self) -> Iterator[None]:
        """Around a wait within :meth:`closing`, which a signal may end."""
        yield

    def close(self) -> None:
        """Stop listening. Doing it twice does nothing."""


class Signals(NoSignals):
    """One session's ear for signals, from its start-up to its end.

    Handlers that were there before are called first, when the signal comes, and are in force again
    after the last session that listens is closed. A signal that was ignored stays ignored.

    Raises:
        SessionError: this is not the main thread, or a handler is one that Python can't put back.
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

    def when_stuck(self, work: Callable[[SignalExit], None]) -> None:
        """See :meth:`NoSignals.when_stuck`."""
        self.work_when_stuck = work

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """See :meth:`NoSignals.closing`."""
        self._watch.holding += 1
        try:
            yield
        finally:
            self._watch.holding -= 1
            self.close()
            self._watch.deliver()

    @contextlib.contextmanager
    def heeding(self) -> Iterator[None]:
        """See :meth:`NoSignals.heeding`."""
        self._watch.holding -= 1
        try:
            self._watch.deliver()
            yield
        finally:
            self._watch.holding += 1

    def close(self) -> None:
        """See :meth:`NoSignals.close`."""
        self.work_when_stuck = None
        if self in self._watch.ears:
            self._watch.ears.remove(self)
            if not self._watch.ears:
                self._watch.uninstall()


class _Watch:
    """The handlers of this process and the thread behind them, shared by all sessions that listen.

    Found again through the handler that is installed, so there is no other state to keep.
    """

    def __init__(self) -> None:
        self.ears: list[Signals] = []
        self.holding = 0
        self._came: tuple[int, FrameType | None] | None = None  # while holding
        self._heard_at = -math.inf
        self._asked_at = -math.inf  # the same, but for repetitions
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
            signal.signal(caught, self._hear)
        threading.Thread(target=self._listen, name="megapg signals", daemon=True).start()

    @classmethod
    def installed(cls) -> Self | None:
        """The one whose handlers are in force, if there is one."""
        owners = (getattr(signal.getsignal(number), "__self__", None) for number in _SIGNALS)
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    def uninstall(self) -> None:
        """Put back what was there, except where somebody else has put theirs on top of ours."""
        if threading.current_thread() is not threading.main_thread():
            return  # the handler does it, when a signal comes
        for number, handler in self._earlier.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
        current = signal.set_wakeup_fd(-1)
        if current == self._writer and current != -1:
            signal.set_wakeup_fd(self._next_writer, warn_on_full_buffer=False)
            os.close(self._writer)  # the thread reads to the end, and ends
            self._writer = -1  # the number may be somebody else's soon
        else:  # whoever has it now may pass on to ours, which must stay open then
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    # -- in the main thread ------------------------------------------------------------------

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """The handler. No collective, no store, no locks but its own: it may run anywhere."""
        self._heard_at = time.monotonic()
        again = self._heard_at - self._asked_at < _SAME
        if not again:  # or who asks again and again would never be heard
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
        """Act on a signal that came while it was held back, once nothing holds it any more."""
        if self._came is not None and not self.holding:
            came, self._came = self._came, None
            if threading.current_thread() is threading.main_thread():
                self._stop(*came)
            else:  # closed from here, but stopping is for the main thread
                self._asked_at = -math.inf
                os.kill(os.getpid(), came[0])

    def _stop(self, number: int, frame: FrameType | None) -> None:
        earlier = self._earlier[number]
        if callable(earlier):
            earlier(number, frame)
        raise KeyboardInterrupt if number == signal.SIGINT else SignalExit(number)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Nobody of ours listens any more, but the handlers could not be put back at that time."""
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
        until = time.monotonic() + _LAST_WORDS
        for helper in helpers:
            helper.join(max(0.0, until - time.monotonic()))
        if self._main_thread_heard(asked, _FREED):
            return  # and closes the sessions itself
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(128 + number)

    def _main_thread_heard(self, asked: float, patience: float) -> bool:
        until = time.monotonic() + patience
        while self.ears and self._heard_at < asked - _SAME:  # or it has closed everything
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)
        return True


def _unwatch_child() -> None:
    """In a process forked from this one, such as a data loader's worker, signals are its own.

    The pipe would tell the parent's thread of them.
    """
    if (watch := _Watch.installed()) is not None:
        watch.ears.clear()
        watch.uninstall()
        os.close(watch.reader)


if hasattr(os, "register_at_fork"):  # not where there is no fork
    os.register_at_fork(after_in_child=_unwatch_child)
