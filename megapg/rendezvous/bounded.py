"""Calls that may never come back from C++, made so that the caller goes on by a deadline.

While a thread is inside C++, Python's signal handlers wait for it if it is the main thread, and no
deadline holds. So such a call is made in another thread, and the caller waits for it in Python.
Nobody can end a call that is stuck; its thread is left behind, as a daemon.
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

# How long a worker that has been dismissed may take to go: it has nothing left to do. Seconds.
_GOING = 1.0
# Python 3.12 starts no thread while the process is exiting, when others are told of open sessions.
_NONE_AT_EXIT = sys.version_info[:2] == (3, 12)
# Process -> what the thread that is kept for that takes its calls from; a fork has none.
_KEPT: dict[int, SimpleQueue[Call[object] | None]] = {}


class Call(Generic[_T]):
    """A call that one thread makes and another one waits for."""

    def __init__(self, work: Callable[[], _T], undo: Callable[[_T], object] | None = None) -> None:
        self._work, self._undo = work, undo
        self._result: list[_T] = []
        self._error: BaseException | None = None
        self._abandoned = False
        self._ending = threading.Lock()  # whoever gives up, and the call that ends, meet here
        self._running = threading.Lock()  # held until it has ended; cheaper than an Event
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
        """Whether it has ended within so many seconds. Ctrl-C is heard meanwhile."""
        if not self._running.acquire(timeout=max(seconds, 0.0)):
            return False
        self._running.release()
        return True

    def abandon(self) -> None:
        """Nobody will take the outcome: what the call makes is undone, as soon as it has ended."""
        with self._ending:
            self._abandoned = True
            ended = not self._running.locked()
        if ended:
            self._take_back()

    def _take_back(self) -> None:
        if self._undo is not None and self._result:
            with contextlib.suppress(Exception):  # nobody is there to hear of it
                self._undo(self._result.pop())

    def outcome(self) -> _T:
        """What it returned; raises what it raised. Only when it has ended."""
        try:
            if self._error is not None:
                raise self._error
            return self._result[0]
        finally:
            self._error = None  # its traceback would hold this object, and so itself


class Worker:
    """A thread that makes calls for others, one after the other; it starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call[object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Call[object] | None = None

    def begin(self, call: Call[_T]) -> None:
        """Have the call made.

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
                if (kept := _KEPT.get(os.getpid())) is None:
                    raise
                kept.put(call)  # type: ignore[arg-type]  # whatever it returns
                return
        self._last = call  # type: ignore[assignment]  # whatever it returns
        self._calls.put(call)  # type: ignore[arg-type]

    def dismiss(self) -> None:
        """End the thread: at once, or when it comes back from where it is stuck."""
        if self._thread is not None:
            self._calls.put(None)
            if self._last is None or self._last.wait(0.0):
                self._thread.join(_GOING)

    def leave_behind(self) -> None:
        """Leave the thread to what it is stuck in: the next call starts another one."""
        self.dismiss()
        self._thread, self._last, self._calls = None, None, SimpleQueue()


def bounded(
    work: Callable[[], _T],
    deadline: float,
    *,
    name: str,
    at_exit: float = 0.0,
) -> _T:
    """Make a call that may never come back.

    Args:
        work: the call.
        deadline: when to give it up, on the clock of ``time.monotonic``.
        name: of its thread.
        at_exit: seconds for which the exit of the process waits for one that was given up and will
            soon be over: whatever comes back from C++ while the interpreter finalises ends it with
            SIGABRT (Python before 3.14).

    Raises:
        TimeoutError: it is not back by the deadline.
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
    """Have a thread for the calls at the exit of this process, where Python starts none then."""
    if _NONE_AT_EXIT and os.getpid() not in _KEPT:
        calls: SimpleQueue[Call[object] | None] = SimpleQueue()
        with contextlib.suppress(RuntimeError):  # it is exiting
            threading.Thread(
                target=_serve, args=(calls,), name="megapg at exit", daemon=True
            ).start()
            _KEPT[os.getpid()] = calls


def _serve(calls: SimpleQueue[Call[object] | None]) -> None:
    while (call := calls.get()) is not None:
        call.make()
        del call  # while it waits for the next one it holds nothing
