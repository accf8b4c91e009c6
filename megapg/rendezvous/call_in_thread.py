"""Call C++ functions that may never return, with a deadline for the caller.

While a thread is inside C++, no deadline applies, and if it is the main thread, no Python signal
handler runs. So another thread makes the call, and the caller waits for it in Python. A stuck call
can't be ended. Its thread is left behind as a daemon.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

_T = TypeVar("_T")

# Seconds to wait for an idle worker thread to exit.
_JOIN_WAIT = 1.0
# Python 3.12 starts no thread at exit, but open sessions notify the other ranks then.
_NONE_AT_EXIT = sys.version_info[:2] == (3, 12)
# Process id -> queue of the thread kept for calls at exit. A fork has no such thread.
_EXIT_QUEUES: dict[int, SimpleQueue[Call[object] | None]] = {}


class Call(Generic[_T]):
    """A call that one thread makes and another thread waits for."""

    def __init__(self, work: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> None:
        self._work, self._undo = work, undo
        self._result: list[_T] = []
        self._error: BaseException | None = None
        self._abandoned = False
        self._ending = threading.Lock()  # guards _abandoned and the end of the call
        self._running = threading.Lock()  # held until the call has ended; cheaper than an Event
        self._running.acquire()

    def make(self) -> None:
        """Make the call, in this thread."""
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
        with self._ending:
            self._running.release()
            abandoned = self._abandoned
        if abandoned:
            self._take_back()

    def wait(self, seconds: float) -> bool:
        """True if the call ends within so many seconds. Ctrl-C interrupts the wait."""
        if not self._running.acquire(timeout=max(seconds, 0.0)):
            return False
        self._running.release()
        return True

    def abandon(self) -> None:
        """Give up the outcome: the call is undone as soon as it has ended."""
        with self._ending:
            self._abandoned = True
            ended = not self._running.locked()
        if ended:
            self._take_back()

    def _take_back(self) -> None:
        if self._undo is not None and self._result:
            with contextlib.suppress(Exception):  # no caller to raise it to
                self._undo(self._result.pop())

    def outcome(self) -> _T:
        """Return or raise the call's outcome. Only when it has ended."""
        try:
            if self._error is not None:
                raise self._error
            return self._result[0]
        finally:
            self._error = None  # its traceback refers to this object: a cycle


class Worker:
    """A thread that makes calls, one after the other. It starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call[object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Call[object] | None = None

    def begin(self, call: Call[_T]) -> None:
        """Queue a call.

        Raises:
            RuntimeError: no thread can be started, as the process is exiting.
        """
        if self._thread is None:
            thread = threading.Thread(
                target=_serve, args=(self._calls,), name=self._name, daemon=True
            )
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:
                if (kept := _EXIT_QUEUES.get(os.getpid())) is None:
                    raise
                kept.put(call)  # type: ignore[arg-type]  # whatever it returns
                return
        self._last = call  # type: ignore[assignment]  # whatever it returns
        self._calls.put(call)  # type: ignore[arg-type]

    def dismiss(self) -> None:
        """End the thread: at once, or when its stuck call returns."""
        if self._thread is not None:
            self._calls.put(None)
            if self._last is None or self._last.wait(0.0):
                self._thread.join(_JOIN_WAIT)

    def leave_behind(self) -> None:
        """Abandon the thread with its stuck call. The next call starts another thread."""
        self.dismiss()
        self._thread, self._last, self._calls = None, None, SimpleQueue()


def bounded(
    work: Callable[[], _T],
    deadline: float,
    *,
    name: str,
    at_exit: float = 0.0,
) -> _T:
    """Make a call that may never return.

    Args:
        work: the call.
        deadline: when to give up, on the clock of ``time.monotonic``.
        name: the name of the thread.
        at_exit: seconds that the exit of the process waits for an abandoned call that will soon
            return: a thread that returns from C++ while the interpreter finalises ends the process
            with SIGABRT (Python before 3.14).

    Raises:
        TimeoutError: the call has not returned by the deadline.
    """
    call, worker = Call(work), Worker(name)
    worker.begin(call)
    try:
        if not call.wait(deadline - time.monotonic()):
            raise TimeoutError(f"{name} is not over yet")
    except BaseException:  # Ctrl-C as well
        call.abandon()
        if at_exit:
            atexit.register(call.wait, at_exit)
        raise
    finally:
        worker.dismiss()
    return call.outcome()


def keep_a_thread() -> None:
    """Start a thread for calls at the exit of this process, if Python can't start one then."""
    if _NONE_AT_EXIT and os.getpid() not in _EXIT_QUEUES:
        calls: SimpleQueue[Call[object] | None] = SimpleQueue()
        with contextlib.suppress(RuntimeError):  # the process is exiting
            threading.Thread(
                target=_serve, args=(calls,), name="megapg at exit", daemon=True
            ).start()
            _EXIT_QUEUES[os.getpid()] = calls


def _serve(calls: SimpleQueue[Call[object] | None]) -> None:
    while (call := calls.get()) is not None:
        call.make()
        del call  # hold no reference while waiting
