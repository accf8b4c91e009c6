"""Work that all ranks of a layout do at the same time, in steps agreed on over the store.

Between two steps a rank may be busy for minutes, for example to write files. So there is no fixed
deadline: a busy rank sends heartbeats (:meth:`JointWork.progress`), and fails only after
``timeout`` seconds without one. If a rank fails, all ranks get its error within moments, whatever
they wait for. No collective is used, so the work can run in a background thread during training.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from megapg.errors import MegapgError, RendezvousError
from megapg.rendezvous.error_texts import brief, culprits, told
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.rendezvous.store import Store, StoreError, batches

# Shortest time between two heartbeats, and between two checks of the other ranks. Seconds.
_BEAT_INTERVAL = 1.0
_CHECK_INTERVAL = 0.25
# Seconds that the leader waits at the end before it deletes the keys.
_END_WAIT = 10.0
# TCPStore refuses values of 8 MiB and more. Bytes.
_PIECE_SIZE = 4 * 2**20
# Larger messages are split. Smaller ones are single values, so that many are read with one call.
_LARGEST_WHOLE = 2**16


class OthersFailedError(RendezvousError):
    """Other ranks failed, or fell silent, but not this rank.

    Attributes:
        problems: global rank -> its error.
    """

    def __init__(self, problems: Mapping[int, str]) -> None:
        super().__init__(told(problems), culprits(problems))
        self.problems = dict(problems)


class CancelledError(MegapgError):
    """The work was cancelled on this rank."""


class JointWork(Rendezvous):
    """One piece of work, from :meth:`begin` to the end of its ``with`` block.

    The first rank of ``ranks`` *leads*: the other ranks report to it, and it tells them how to go
    on. The name is used only to meet: another work of the same name may begin while this one runs.
    Arguments are those of :class:`~megapg.rendezvous.rendezvous.Rendezvous`, and:

    Args:
        timeout: seconds without a heartbeat after which another rank counts as failed.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        *,
        timeout: float,
    ) -> None:
        super().__init__(store, name, rank, ranks)
        self._timeout = timeout
        self._space = ""
        self._cancelled = threading.Event()
        self._bound = False
        self._unsettled: list[str] = []  # on the leader: topics that other ranks may wait for
        self._entered = False
        self._next_beat = 0.0
        self._beats = 0

    @property
    def leading(self) -> bool:
        """True if this rank leads."""
        return self._leading

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._rank

    @property
    def place(self) -> tuple[int, int]:
        """This rank's index in ``ranks``, and the number of ranks."""
        return self._ranks.index(self._rank), len(self._ranks)

    def begin(self, settings: Mapping[str, str]) -> Self:
        """Meet the other ranks; see :meth:`~megapg.rendezvous.rendezvous.Rendezvous.meet`."""
        self.meet(settings, timeout=self._timeout)
        self._space = f"work {self._mine.namespace}"
        problems = self.part(None, timeout=self._timeout)
        if problems:
            raise OthersFailedError(problems)
        with self._asking():
            self._beat()  # does not check the others: this rank may have an error to report first
        return self

    def cancel(self) -> None:
        """Cancel the work, from any thread: the next :meth:`progress` raises."""
        self._cancelled.set()

    def progress(self) -> None:
        """Send a heartbeat. Cheap enough to be called often.

        Raises:
            CancelledError: :meth:`cancel` was called.
            OthersFailedError: another rank failed.
        """
        if self._cancelled.is_set():
            problem = CancelledError(f"{self._name}: called off on rank {self._rank}")
            if not self._bound:
                raise problem
            self._cancelled.clear()
            self._raise_alarm(problem)  # the leader decides; it may still be able to stop
        if time.monotonic() >= self._next_beat:
            with self._asking():
                self._beat()
            if not self._bound:
                self.heed()

    def heed(self) -> None:
        """Raise if another rank has failed, which may be the cause of an error here.

        Raises:
            OthersFailedError: another rank failed.
            RendezvousError: the store is gone.
        """
        with self._asking():
            if self._store.add(self._key("trouble", "count"), 0):
                raise OthersFailedError(self._troubles())

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Context of a long operation that can't call :meth:`progress`, such as ``fsync``.

        A thread sends the heartbeats. It stops after ten times the timeout, so that a dead file
        system does not block the other ranks for ever.
        """
        over = threading.Event()

        def beat() -> None:
            deadline = time.monotonic() + 10 * self._timeout
            while not over.wait(_BEAT_INTERVAL) and time.monotonic() < deadline:
                with contextlib.suppress(StoreError), self._asking():  # progress() will raise
                    self._beat()

        threading.Thread(target=beat, name="megapg busy", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _beat(self) -> None:
        self._next_beat = time.monotonic() + _BEAT_INTERVAL
        self._beats += 1
        self._store.set(self._key("beat", self._rank), str(self._beats))

    # -- steps -------------------------------------------------------------------------------

    def collect(self, topic: str, message: bytes, *, final: bool = False) -> dict[int, bytes]:
        """Send a message to the leader, which gets the messages of all ranks. Use each topic once.

        Args:
            topic: a name for the step.
            message: the message of this rank.
            final: True for the last message. From then on only the leader decides how the work
                ends, so that all ranks agree.

        Returns:
            On the leader rank -> message. On other ranks an empty dict, at once.

        Raises:
            OthersFailedError: on the leader, if another rank failed or is silent.
            RendezvousError: the store is gone.
        """
        with self._asking():
            if not self._leading:
                self._said |= _put(self._store, self._key(topic, self._rank), message)
                self._bound = final
                return {}
            said = _Topic(self._store, self._key(topic), self._ranks[1:])
            self._wait(said.all_here, lambda: said.waiting)
            return {self._rank: message, **{rank: said.arrived[rank] for rank in self._ranks[1:]}}

    def announce(self, topic: str, message: bytes = b"") -> bytes:
        """Send the leader's ``message`` to all ranks, and return it there. Use each topic once.

        Raises:
            OthersFailedError: another rank failed or is silent.
            RendezvousError: the store is gone.
        """
        key = self._key(topic, "all")
        with self._asking():
            if self._leading:
                _put(self._store, key, message)
                return message
            self._wait(lambda: self._store.check([key]), lambda: self._ranks[:1])
            return _whole(self._store, key, self._store.get(key))

    def agree(self, topic: str, *, wait: bool = True) -> None:
        """Wait until every rank has reached this step.

        Args:
            topic: a name for the step. All ranks have the same steps, in the same order.
            wait: False to only report that this rank has reached the step.

        Raises:
            OthersFailedError: another rank failed or is silent.
            RendezvousError: the store is gone.
        """
        if not self._leading:
            self.collect(topic, b"")
            if wait:
                self.announce(f"{topic}, all of us")
                with self._asking():
                    self._take_back()
            return
        self._unsettled.append(topic)
        while wait and self._unsettled:
            earliest = self._unsettled.pop(0)
            self.collect(earliest, b"")
            self.announce(f"{earliest}, all of us")

    # -- the end -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the work. After an error here, report it to the other ranks."""
        if error is not None:
            self._raise_alarm(error)
            return
        with contextlib.suppress(StoreError), self._asking():
            if self._bound and not self._leading:  # the leader has read all messages
                self._said.add(self._key("beat", self._rank))
                self._take_back()
            key, everyone = self._key("end", "count"), b"%d" % len(self._ranks)
            self._store.add(key, 1)
            if self._leading:  # no rank reads the keys any more
                deadline = time.monotonic() + min(self._timeout, _END_WAIT)
                if self._until(lambda: self._store.peek(key) == everyone, deadline):
                    self._forget([self._space])

    def _raise_alarm(self, error: BaseException) -> None:
        problems = {self._rank: brief(error)}
        if isinstance(error, OthersFailedError):
            problems = error.problems
        with contextlib.suppress(StoreError), self._asking():  # the store may be what failed
            self._store.set(self._key("trouble", self._rank), json.dumps(problems))
            self._store.add(self._key("trouble", "count"), 1)

    # -- after a failure ---------------------------------------------------------------------

    def verdict(self, decide: Callable[[Mapping[int, str]], bool]) -> bool:
        """Return the leader's decision after a failure. Call it after the ``with`` block.

        The leader must call it too, otherwise the others wait until they count it as silent.

        Args:
            decide: called on the leader with rank -> error.

        Returns:
            The decision, the same on all ranks. False also if the leader can't be reached.
        """
        if not self._entered:
            return False
        key = self._key("verdict", "all")
        with contextlib.suppress(RendezvousError), self._asking():
            if self._leading:
                decided = decide(self._troubles())
                self._store.set(key, str(int(decided)))
                return decided
            leader = _Pulse(self)
            while not self._store.check([key]):
                if leader.silent(self._ranks[:1]):
                    return False
                time.sleep(_CHECK_INTERVAL / 10)
            return self._store.get(key) == b"1"
        return False

    # -- waiting -----------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], for_whom: Callable[[], Sequence[int]]) -> None:
        pulse = _Pulse(self)
        look_again = time.monotonic() + _CHECK_INTERVAL

        def done_or_given_up() -> bool:
            nonlocal look_again
            if done():
                return True
            self.progress()
            if time.monotonic() >= look_again:
                look_again = time.monotonic() + _CHECK_INTERVAL
                self._look(for_whom(), pulse)
            return False

        self._until(done_or_given_up, math.inf, longest=_CHECK_INTERVAL)

    def _look(self, others: Sequence[int], pulse: _Pulse) -> None:
        """Raise if a rank reported an error, or one of ``others`` has been silent for too long."""
        if not self._bound:
            self.heed()
        elif self._store.peek(self._key("trouble", self._ranks[0])) is not None:
            raise OthersFailedError(self._troubles())
        if silent := pulse.silent(others):
            text = f"no sign of life for {self._timeout:g} s; it died or hangs: look at its log"
            raise OthersFailedError(dict.fromkeys(silent, text))

    def _troubles(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for rank in self._ranks:
            if (said := self._store.peek(self._key("trouble", rank))) is not None:
                found |= {int(whose): text for whose, text in json.loads(said).items()}
        return dict(sorted(found.items()))

    # -- the store ---------------------------------------------------------------------------

    def in_one_thread(self) -> contextlib.AbstractContextManager[None]:
        """Context of many steps: one thread makes all calls to the store, not one per step."""
        return self._store.until(time.monotonic(), self._name)

    def _asking(self) -> contextlib.AbstractContextManager[None]:
        """Context of calls to the store. They fail if the store is silent for ``timeout`` s."""
        return self._store.until(time.monotonic(), self._name, least=self._timeout)

    def _key(self, topic: str, *whose: int | str) -> str:
        return "/".join([self._space, topic, *map(str, whose)])


class _Pulse:
    """Tracks heartbeats, from the first check on."""

    def __init__(self, work: JointWork) -> None:
        self._work = work
        self._heard: dict[int, tuple[bytes, float]] = {}

    def silent(self, others: Sequence[int]) -> Sequence[int]:
        """Return those of the ranks whose last heartbeat is too long ago."""
        store, now = self._work._store, time.monotonic()
        keys = [self._work._key("beat", rank) for rank in others]
        if keys and store.check(keys):
            beats = store.multi_get(keys)
        else:
            beats = [store.peek(key) or b"" for key in keys]
        for rank, beat in zip(others, beats, strict=True):
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = beat, now
        return [rank for rank in others if now - self._heard[rank][1] > self._work._timeout]


class _Topic:
    """The messages of some ranks on one topic, as far as they have arrived. They may be long.

    Attributes:
        arrived: rank -> its message.
        waiting: ranks without a message.
    """

    def __init__(self, store: Store, folder: str, ranks: Sequence[int]) -> None:
        self._store, self._folder = store, folder
        self.arrived: dict[int, bytes] = {}
        self.waiting = list(ranks)

    def all_here(self) -> bool:
        """True if all messages have arrived."""
        for some in batches(self.waiting):
            found = _first_of(self._store, [f"{self._folder}/{rank}" for rank in some])
            self.arrived.update(zip(some, found, strict=False))
            if len(found) < len(some):
                break  # polled again soon, and the next batch can wait
        self.waiting = [rank for rank in self.waiting if rank not in self.arrived]
        return not self.waiting


def _put(store: Store, key: str, message: bytes) -> set[str]:
    """Write a message, large ones in pieces. Return the keys."""
    if len(message) <= _LARGEST_WHOLE:
        store.set(key, b"=" + message)
        return {key}
    pieces = [f"{key}/{number}" for number in range(math.ceil(len(message) / _PIECE_SIZE))]
    for number, piece in enumerate(pieces):
        store.set(piece, message[number * _PIECE_SIZE : (number + 1) * _PIECE_SIZE])
    store.set(key, str(len(pieces)))  # last, so that a reader of this key finds all pieces
    return {key, *pieces}


def _whole(store: Store, key: str, value: bytes) -> bytes:
    """Return the message of a key, given the key's value."""
    if value.startswith(b"="):
        return value[1:]
    return b"".join(store.get(f"{key}/{number}") for number in range(int(value)))


def _first_of(store: Store, keys: Sequence[str]) -> list[bytes]:
    """Return the messages of the first keys that exist, perhaps not of all of them."""
    while keys and not store.check(keys):
        keys = keys[: len(keys) // 2]
    values = store.multi_get(keys)
    return [_whole(store, key, value) for key, value in zip(keys, values, strict=True)]
