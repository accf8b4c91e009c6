"""Client of a store: each call has a deadline, and errors name the host.

torch's stores have no deadlines. If the store's host is frozen or cut off, a call blocks in C++ for
as long as TCP keeps the connection. :mod:`~megapg.rendezvous.call_in_thread` says what follows.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

import torch
import torch.distributed as dist

from megapg import torch_private
from megapg.errors import RendezvousError
from megapg.rendezvous import sockets
from megapg.rendezvous.call_in_thread import Call, Worker, keep_a_thread

_T = TypeVar("_T")

# Seconds that a call has in any case, however late it begins.
LEAST = 2.0
# Deadline in seconds of a call outside :meth:`Store.until`.
_ALONE = 10.0
# After Ctrl-C interrupted a call, the next call waits so many seconds for it.
_INTERRUPTED_WAIT = 1.0
# Seconds in which stuck calls fail at exit. Each prints a stack, which can take seconds.
_STACKS = 5.0
# Returned for a missing key. No key ever holds this value.
_ABSENT = "nothing"


def batches(all_of_them: Sequence[_T]) -> list[list[_T]]:
    """Split a list into batches for one call each: 512 items, or the square root if larger."""
    size = max(512, math.isqrt(len(all_of_them)))
    return [list(all_of_them[at : at + size]) for at in range(0, len(all_of_them), size)]


class StoreError(RendezvousError):
    """The store does not answer, or is gone.

    Attributes:
        reason: the store, and what is wrong with it.
        gone: True if this connection is lost for good. Otherwise the store may still answer.
    """

    def __init__(
        self, doing: str, reason: str, missing: Sequence[int] = (), *, gone: bool = False
    ) -> None:
        super().__init__(f"{doing}: {reason}" if doing else reason, missing)
        self.reason, self.gone = reason, gone


@dataclass(frozen=True)
class Host:
    """The host of a store.

    Attributes:
        name: for messages, as in "the store that rank 0 hosts".
        rank: the rank that hosts it; None if no rank does, or the rank is unknown.
        here: True if this process hosts it, so that a call can't get stuck.
    """

    name: str
    rank: int | None = None
    here: bool = False


@dataclass(frozen=True)
class _Phase:
    """The calls of one thread between :meth:`Store.until` and its end."""

    deadline: float
    doing: str
    least: float
    worker: Worker


class _Connection:
    """The state that all views of a store share. torch allows one call at a time."""

    def __init__(self, torch_store: dist.Store, host: Host) -> None:
        self.host, self.torch = host, torch_store
        self.missing = () if host.rank is None else (host.rank,)
        self.of_thread = threading.local()
        self.left_behind: list[Call[object]] = []
        self.stuck: Call[object] | None = None
        self.patience = -math.inf  # until when the next call waits for the stuck one
        self.stays: list[tuple[Callable[[], bool], float]] = []
        self.lost = ""  # why the connection is lost for good

    @property
    def phase(self) -> _Phase | None:
        """The phase of this thread."""
        found: _Phase | None = getattr(self.of_thread, "phase", None)
        return found

    def hang_up(self) -> None:
        """End stuck calls at exit.

        A call that returns from C++ while the interpreter finalises would end the process with
        SIGABRT (Python before 3.14). Calls first get a moment to end, as they may notify ranks that
        wait.
        """
        until = time.monotonic() + LEAST
        stuck = [call for call in self.left_behind if not call.wait(until - time.monotonic())]
        inner = _innermost(self.torch)
        with torch_private.without_store_warnings() if stuck else contextlib.nullcontext():
            if stuck and isinstance(inner, dist.TCPStore):
                self.lost = f"{self.host.name} did not answer, and this process is exiting."
                sockets.hang_up(inner.port)  # no other call needs the connection now
            until = time.monotonic() + _STACKS
            for call in stuck:
                call.wait(until - time.monotonic())


class Store:
    """A connection to a store that ranks share, or a view of a part of its keys.

    Args:
        torch_store: torch's store object.
        host: the host of the store.
    """

    def __init__(self, torch_store: dist.Store, host: Host) -> None:
        self._torch, self._connection = torch_store, _Connection(torch_store, host)

    @property
    def host(self) -> Host:
        """The host of the store."""
        return self._connection.host

    @property
    def torch(self) -> dist.Store:
        """torch's store object, for communicators, which use it directly."""
        return self._torch

    def view(self, prefix: str) -> Self:
        """Return a view of the keys with a prefix, on the same connection."""
        return self.beside(dist.PrefixStore(prefix, self._torch))

    def beside(self, torch_store: dist.Store) -> Self:
        """Return a store for another view that torch made, on the same connection."""
        made = object.__new__(type(self))
        made._torch, made._connection = torch_store, self._connection
        return made

    def clone(self) -> Self:
        """Open another connection to the same store. It has the same view."""
        return type(self)(self._call(torch_private.another_connection, self._torch), self.host)

    @contextlib.contextmanager
    def until(self, deadline: float, doing: str = "", *, least: float = LEAST) -> Iterator[None]:
        """Set the deadline of this thread's calls on this connection.

        Args:
            deadline: on the clock of ``time.monotonic``.
            doing: the purpose of the calls, for messages.
            least: seconds that a call has in any case, however late it begins.
        """
        shared, outer = self._connection, self._connection.phase
        worker = Worker("megapg store") if outer is None else outer.worker
        shared.of_thread.phase = _Phase(deadline, doing, least, worker)
        try:
            yield
        finally:
            shared.of_thread.phase = outer
            if outer is None:
                worker.dismiss()

    def lend(
        self, work: Callable[[], _T], seconds: float, doing: str, *, undo: Callable[[_T], object]
    ) -> _T:
        """Run torch code that uses this store, or talks to peers, directly.

        Args:
            work: the code. It runs in another thread, on the accelerator of this thread.
            seconds: the time limit.
            doing: the purpose, for the message.
            undo: called with the return value if ``work`` returns too late.

        Raises:
            RendezvousError: ``work`` did not return in time. Other errors are torch's.
        """
        shared, deadline = self._connection, time.monotonic() + seconds
        if (phase := shared.phase) is None:
            with self.until(deadline):
                return self.lend(work, seconds, doing, undo=undo)
        used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if used else None

        def on_device() -> _T:
            if device is not None:
                torch.cuda.set_device(device)
            return work()

        call = Call(on_device, undo)
        try:
            phase.worker.begin(call)
            if not call.wait(deadline - time.monotonic()):
                raise RendezvousError(
                    f"{doing} did not end within {seconds:g} s on {socket.gethostname()}. torch "
                    f"talks to {self.host.name} for it, and to the other ranks: whoever hosts it, "
                    "or one of them, is stopped or stuck, or can't be reached over the network.",
                    shared.missing,
                )
            return call.outcome()
        except BaseException:  # Ctrl-C as well: undo the work
            call.abandon()
            self._leave_behind(call)
            phase.worker.leave_behind()  # calls that notify the other ranks must not wait for it
            raise

    def post(self, values: Mapping[str, str]) -> None:
        """Write without waiting, as soon as the store answers again."""
        several = self._torch.multi_set  # type: ignore[attr-defined]
        call = Call(partial(several, list(values), list(values.values())))
        worker = Worker("megapg store")
        with contextlib.suppress(RuntimeError):  # no more threads
            worker.begin(call)
            self._give_up(call, -math.inf)
        worker.dismiss()

    def come_back(self, deadline: float) -> None:
        """Wait for a stuck call until the deadline, so that the next call has its full time."""
        if self._connection.stuck is not None:
            self._connection.stuck.wait(deadline - time.monotonic())

    def stay(self, done: Callable[[], bool], seconds: float) -> None:
        """If this process hosts the store, keep the store up at exit until ``done()``.

        At most for so many seconds from now.
        """
        if self.host.here:
            if not self._connection.stays:
                atexit.register(self.linger)
            self._connection.stays.append((done, time.monotonic() + seconds))

    def linger(self) -> None:
        """Keep the store up now, as set by :meth:`stay`. Also called at exit."""
        for done, deadline in self._connection.stays:
            with contextlib.suppress(RendezvousError):
                while time.monotonic() < deadline and not done():
                    time.sleep(0.05)

    # -- calls -------------------------------------------------------------------------------
    # Each raises StoreError.

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._call(self._torch.set, key, value)

    def multi_set(self, values: Mapping[str, str | bytes]) -> None:
        """Write several keys in one round trip, or a few for very many keys."""
        several = self._torch.multi_set  # type: ignore[attr-defined]
        for keys in batches(list(values)):
            self._call(several, keys, [values[key] for key in keys])

    def peek(self, key: str) -> bytes | None:
        """Return the value of a key, or None, in one round trip. check() and get() take three."""
        found = self.compare_set(key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else found

    def peeks(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys, or None. Needs one round trip per key if some are missing."""
        found: list[bytes | None] = []
        for each in batches(keys):
            found += self.multi_get(each) if self.check(each) else map(self.peek, each)
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write if the key holds ``expected``, or if ``expected`` is empty and there is no key.

        Returns the value that the key then holds.
        """
        return self._call(self._torch.compare_set, key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys exist."""
        return all(self._call(self._torch.check, each) for each in batches(keys))

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""
        return self._call(self._torch.get, key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that all exist."""
        parts = (self._call(self._torch.multi_get, each) for each in batches(keys))
        return [value for part in parts for value in part]

    def add(self, key: str, amount: int) -> int:
        """Add to the counter of a key, and return its value."""
        return self._call(self._torch.add, key, amount)

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return True if it existed."""
        return self._call(self._torch.delete_key, key)

    def list_keys(self) -> list[str]:
        """Return all keys; empty for a store that can't list them."""
        if not torch_private.lists_keys(self._torch):
            return []
        try:
            return self._call(self._torch.list_keys)
        except NotImplementedError:
            return []

    def _call(self, function: Callable[..., _T], *arguments: object) -> _T:
        if (phase := self._connection.phase) is None:
            with self.until(time.monotonic() + _ALONE):
                return self._call(function, *arguments)
        work = partial(function, *arguments)
        if self._connection.lost:  # torch would print a C++ stack for each further call
            raise self._error(phase, self._connection.lost, gone=True)
        try:
            return work() if self.host.here else self._in_another_thread(work, phase)
        except NotImplementedError:
            raise
        except RuntimeError as error:  # lost connections too
            if isinstance(error, StoreError):
                raise
            reason = (
                f"{self.host.name} is gone ({type(error).__name__}: {_line(error)}). Whoever "
                "hosts it died or was stopped; look at its log."
            )
            if isinstance(error, dist.DistNetworkError):
                self._connection.lost = reason
            # without torch's text, which may hold a C++ stack
            raise self._error(phase, reason, gone=True) from None

    def _in_another_thread(self, work: Callable[[], _T], phase: _Phase) -> _T:
        started = time.monotonic()
        stuck = self._connection.stuck
        if stuck is not None and not stuck.wait(self._connection.patience - started):
            raise self._error(phase, f"{self.host.name} has not answered an earlier call yet.")
        self._connection.stuck = None
        keep_a_thread()
        call = Call(work)
        try:
            phase.worker.begin(call)
        except RuntimeError as error:  # no more threads
            gone = "can't be asked any more, as this process is exiting"
            raise self._error(phase, f"{self.host.name} {gone} ({error}).") from error
        try:
            ended = call.wait(max(phase.deadline - started, phase.least))
        except Exception:
            raise
        except BaseException:  # Ctrl-C: the next call, which notifies the others, must not hang
            self._give_up(call, time.monotonic() + _INTERRUPTED_WAIT)
            raise
        if not ended:
            self._give_up(call, -math.inf)
            raise self._error(
                phase,
                f"{self.host.name} did not answer within {time.monotonic() - started:.0f} s. "
                "Whoever hosts it is stopped or stuck, or can't be reached over the network.",
            )
        return call.outcome()

    def _give_up(self, call: Call[_T], patience: float) -> None:
        self._connection.stuck = call  # type: ignore[assignment]  # whatever it returns
        self._connection.patience = patience
        self._leave_behind(call)

    def _leave_behind(self, call: Call[_T]) -> None:
        shared = self._connection
        if not shared.left_behind:
            atexit.register(shared.hang_up)
        shared.left_behind = [each for each in shared.left_behind if not each.wait(0.0)]
        shared.left_behind.append(call)  # type: ignore[arg-type]  # whatever it returns

    def _error(self, phase: _Phase, reason: str, *, gone: bool = False) -> StoreError:
        return StoreError(phase.doing, reason, self._connection.missing, gone=gone)


def host_of(torch_store: dist.Store, name: str) -> Host:
    """Return the host of a store that other code opened, as far as it can be known.

    Args:
        torch_store: the store.
        name: the name of the store, for messages.
    """
    inner = _innermost(torch_store)
    if isinstance(inner, dist.HashStore):
        return Host(name, here=True)
    if isinstance(inner, dist.TCPStore):
        where = f"{name}, at {inner.host}:{inner.port}"
        if socket.getdefaulttimeout() is None:
            return Host(where, here=sockets.hosts(inner.port))
        return Host(where, here="server=TCPServer(" in repr(inner))
    return Host(name)


def _innermost(torch_store: dist.Store) -> dist.Store:
    while isinstance(torch_store, dist.PrefixStore):
        torch_store = torch_store.underlying_store
    return torch_store


def _line(error: BaseException) -> str:
    said = str(error).strip().splitlines() or [""]
    return said[0][:300]
