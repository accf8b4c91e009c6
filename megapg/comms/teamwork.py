"""Work that all ranks of a layout do at the same time, each on its own, in steps agreed on over the
store.

Between two steps a rank may be busy for minutes (it writes files) without talking to anyone, so
nobody waits for a fixed time: whoever works says so now and then (:meth:`Teamwork.progress`), and
is given up only when it has been silent for ``timeout`` seconds. A rank that fails says why, and
everyone else hears of it within moments, wherever they wait. No collective is involved, so all this
may go on in a background thread while the model trains.
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

import torch.distributed as dist

from megapg.comms.rollcall import RollCall, brief
from megapg.errors import MegapgError, RendezvousError

# TCPStore refuses values of 8 MiB and more. Bytes.
_PIECE = 4 * 2**20
# How often a rank says that it is getting on, and looks at the others, at most. Seconds.
_BEAT = 1.0
_LOOK = 0.25
# How long the leader stays to tidy up after the others. Seconds.
_TIDY = 10.0


class OthersFailedError(RendezvousError):
    """Other ranks failed, or fell silent, while this one was well.

    Attributes:
        problems: global rank -> what went wrong there.
    """

    def __init__(self, problems: Mapping[int, str]) -> None:
        lines = [f"rank {rank}: {text.rstrip('.')}" for rank, text in list(problems.items())[:8]]
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        super().__init__("; ".join(lines) + more, sorted(problems))
        self.problems = dict(problems)


class CancelledError(MegapgError):
    """The work was called off on this rank."""


class Teamwork(RollCall):
    """One piece of work, from :meth:`begin` to the end of its ``with`` block.

    The first rank of ``ranks`` *leads*: the others report to it, and it tells them how to go on.
    The name serves for the coming together alone; another piece of work of the same name may begin
    while this one goes on. Arguments are those of :class:`~megapg.comms.rollcall.RollCall`, and:

    Args:
        timeout: seconds of silence after which another rank is given up.
    """

    def __init__(
        self, store: dist.Store, name: str, rank: int, ranks: Sequence[int], *, timeout: float
    ) -> None:
        super().__init__(store, name, rank, ranks)
        self._timeout = timeout
        self._space = ""
        self._cancelled = threading.Event()
        self._bound = False
        self._next_beat = 0.0
        self._beats = 0

    @property
    def leading(self) -> bool:
        """Whether this rank leads."""
        return self._leading

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._rank

    def begin(self, settings: Mapping[str, str]) -> Self:
        """Come together; see :meth:`~megapg.comms.rollcall.RollCall.meet` for the errors."""
        self.meet(settings, timeout=self._timeout)
        self._space = f"work {self._mine.namespace}"
        problems = self.part(None, timeout=self._timeout)
        if problems:
            raise OthersFailedError(problems)
        with self._reaching_the_store():
            self._beat()  # without a look at the others: this rank may have news of its own
        return self

    def cancel(self) -> None:
        """Call the work off, from any thread: the next :meth:`progress` raises."""
        self._cancelled.set()

    def progress(self) -> None:
        """Tell the others that this rank is getting on. Cheap enough to be called often.

        Raises:
            CancelledError: :meth:`cancel` was called.
            OthersFailedError: another rank failed.
        """
        if self._cancelled.is_set():
            problem = CancelledError(f"{self._name}: called off on rank {self._rank}")
            if not self._bound:
                raise problem
            self._cancelled.clear()
            self._raise_alarm(problem)  # it is the leader's turn: perhaps it can stop yet
        if time.monotonic() >= self._next_beat:
            with self._reaching_the_store():
                self._beat()
            if not self._bound:
                self.heed()

    def heed(self) -> None:
        """Stop here if another rank has failed: that may be why something went wrong here.

        Raises:
            OthersFailedError: one has.
            RendezvousError: the store is gone.
        """
        with self._reaching_the_store():
            if self._store.add(self._key("trouble", "count"), 0):
                raise OthersFailedError(self._troubles())

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Around what takes long and can't say how it gets on, such as ``fsync``.

        A thread says that this rank lives; for ten times the timeout at most, as a dead file system
        must not hold the others for ever.
        """
        over = threading.Event()

        def beat() -> None:
            deadline = time.monotonic() + 10 * self._timeout
            while not over.wait(_BEAT) and time.monotonic() < deadline:
                with contextlib.suppress(dist.DistError):  # progress() will tell
                    self._beat()

        threading.Thread(target=beat, name="megapg busy", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _beat(self) -> None:
        self._next_beat = time.monotonic() + _BEAT
        self._beats += 1
        self._store.set(self._key("beat", self._rank), str(self._beats))

    # -- steps -------------------------------------------------------------------------------

    def collect(self, topic: str, message: bytes, *, final: bool = False) -> dict[int, bytes]:
        """Report to the leader, which gets what every rank reports. Each topic serves once.

        Args:
            topic: a name for it.
            message: what this rank reports.
            final: it is the last report: from now on the leader alone decides how this ends, so
                that all ranks agree on it.

        Returns:
            On the leader rank -> message; elsewhere nothing, at once.

        Raises:
            OthersFailedError: on the leader, when another rank failed or is silent.
            RendezvousError: the store is gone.
        """
        with self._reaching_the_store():
            if not self._leading:
                self._put(self._key(topic, self._rank), message)
                self._bound = final
                return {}
            waiting = [rank for rank in self._ranks if rank != self._rank]
            arrived = {self._rank: message}

            def all_here() -> bool:
                nonlocal waiting
                for rank in waiting:
                    if not self._store.check([self._key(topic, rank)]):
                        break  # asked again soon; the others meanwhile say nothing new
                    arrived[rank] = self._take(self._key(topic, rank))
                waiting = [rank for rank in waiting if rank not in arrived]
                return not waiting

            self._wait(all_here, lambda: waiting)
            return {rank: arrived[rank] for rank in self._ranks}

    def announce(self, topic: str, message: bytes = b"") -> bytes:
        """Hear what the leader says, which says ``message``. Each topic serves once.

        Raises:
            OthersFailedError: another rank failed or is silent.
            RendezvousError: the store is gone.
        """
        key = self._key(topic, "all")
        with self._reaching_the_store():
            if self._leading:
                self._put(key, message)
                return message
            self._wait(lambda: self._store.check([key]), lambda: self._ranks[:1])
            return self._take(key)

    def agree(self, topic: str) -> None:
        """Go on only when every rank has come this far.

        Raises:
            OthersFailedError: another rank failed or is silent.
            RendezvousError: the store is gone.
        """
        self.collect(topic, b"")
        self.announce(f"{topic}, all of us")

    # -- the end -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End: with an alarm for the others if anything went wrong here."""
        if error is not None:
            self._raise_alarm(error)
            return
        with contextlib.suppress(dist.DistError):
            self._store.set(self._key("end", self._rank), "")
            if self._leading:  # nobody reads the keys any more
                ends = [self._key("end", rank) for rank in self._ranks]
                deadline = time.monotonic() + min(self._timeout, _TIDY)
                if self._until(lambda: self._store.check(ends), deadline):
                    self._forget([self._space])

    def _raise_alarm(self, error: BaseException) -> None:
        problems = {self._rank: brief(error)}
        if isinstance(error, OthersFailedError):
            problems = error.problems
        with contextlib.suppress(dist.DistError):  # the store may be what failed
            self._store.set(self._key("trouble", self._rank), json.dumps(problems))
            self._store.add(self._key("trouble", "count"), 1)

    # -- waiting -----------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], for_whom: Callable[[], Sequence[int]]) -> None:
        started = time.monotonic()
        heard: dict[int, tuple[bytes, float]] = {}
        shortest = 0.001 + len(self._ranks) / 20_000
        look_again = started + _LOOK
        while not done():
            self.progress()
            now = time.monotonic()
            if now >= look_again:
                look_again = now + _LOOK
                self._look(for_whom(), heard)
            time.sleep(min(max((now - started) / 20, shortest), shortest + 0.25))

    def _look(self, others: Sequence[int], heard: dict[int, tuple[bytes, float]]) -> None:
        """Raise if anyone raised the alarm, or one of ``others`` has been silent too long."""
        if not self._bound:
            self.heed()
        elif self._peek(self._key("trouble", self._ranks[0])) is not None:
            raise OthersFailedError(self._troubles())
        now = time.monotonic()
        for rank, beat in zip(others, self._beats_of(others), strict=True):
            if rank not in heard or heard[rank][0] != beat:
                heard[rank] = beat, now
        silent = [rank for rank in others if now - heard[rank][1] > self._timeout]
        if silent:
            text = f"no sign of life for {self._timeout:g} s; it died or hangs: look at its log"
            raise OthersFailedError(dict.fromkeys(silent, text))

    def _troubles(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for rank in self._ranks:
            said = self._peek(self._key("trouble", rank))
            if said is not None:
                found |= {int(whose): text for whose, text in json.loads(said).items()}
        return dict(sorted(found.items()))

    def _beats_of(self, others: Sequence[int]) -> list[bytes]:
        keys = [self._key("beat", rank) for rank in others]
        if keys and self._store.check(keys):
            found: list[bytes] = self._store.multi_get(keys)
            return found
        return [self._peek(key) or b"" for key in keys]

    # -- the store ---------------------------------------------------------------------------

    def _key(self, topic: str, whose: int | str) -> str:
        return f"{self._space}/{topic}/{whose}"

    def _put(self, key: str, message: bytes) -> None:
        pieces = math.ceil(len(message) / _PIECE)
        for number in range(pieces):
            piece = message[number * _PIECE : (number + 1) * _PIECE]
            self._store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # bytes do
        self._store.set(key, str(pieces))  # last: whoever sees it finds the rest

    def _take(self, key: str) -> bytes:
        pieces = range(int(self._store.get(key)))
        return b"".join(self._store.get(f"{key}/{number}") for number in pieces)
