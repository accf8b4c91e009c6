"""Work that all ranks of a layout do at the same time, each on its own, in steps agreed on over the
store.

Between two steps a rank may be busy for minutes (it writes files) without talking to anyone, so
nobody waits for a fixed time: whoever works says so now and then (:meth:`JointWork.progress`), and
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

from megapg.errors import MegapgError, RendezvousError
from megapg.rendezvous.blocks import FLAT
from megapg.rendezvous.problems import brief, culprits, told
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.rendezvous.store import Store, StoreError
from megapg.rendezvous.topics import BlockTopics, WholeTopic, put, whole

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
        super().__init__(told(problems), culprits(problems))
        self.problems = dict(problems)


class CancelledError(MegapgError):
    """The work was called off on this rank."""


class JointWork(Rendezvous):
    """One piece of work, from :meth:`begin` to the end of its ``with`` block.

    The first rank of ``ranks`` *leads*: the others report to it, and it tells them how to go on.
    The name serves for the coming together alone; another piece of work of the same name may begin
    while this one goes on. Arguments are those of
    :class:`~megapg.rendezvous.rendezvous.Rendezvous`, and:

    Args:
        timeout: seconds of silence after which another rank is given up.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        *,
        timeout: float,
        flat: int = FLAT,
    ) -> None:
        super().__init__(store, name, rank, ranks, flat=flat)
        self._timeout = timeout
        self._space = ""
        self._cancelled = threading.Event()
        self._bound = False
        self._unsettled: list[str] = []  # of the leader: what the others may wait for by now
        self._block = BlockTopics(self._store, self._blocks)
        self._entered = False
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

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number among those that take part, and how many they are."""
        return self._ranks.index(self._rank), len(self._ranks)

    def begin(self, settings: Mapping[str, str]) -> Self:
        """Meet; see :meth:`~megapg.rendezvous.rendezvous.Rendezvous.meet` for the errors."""
        self.meet(settings, timeout=self._timeout)
        self._space = f"work {self._mine.namespace}"
        problems = self.part(None, timeout=self._timeout)
        if problems:
            raise OthersFailedError(problems)
        with self._asking():
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
            with self._asking():
                self._beat()
            if not self._bound:
                self.heed()

    def heed(self) -> None:
        """Stop here if another rank has failed: that may be why something went wrong here.

        Raises:
            OthersFailedError: one has.
            RendezvousError: the store is gone.
        """
        with self._asking():
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
                with contextlib.suppress(StoreError), self._asking():  # progress() will tell
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
        with self._asking():
            if not self._leading:
                mine = put(self._store, self._key(topic, self._rank), message)
                self._said |= self._to_take_back(self._key(topic), mine)
                self._block.add(self._key(topic))  # passed on when this rank waits for something
                self._bound = final
                return {}
            known, deadline = {self._rank: message}, time.monotonic() + self._timeout
            said = WholeTopic(self._store, self._key(topic), self._blocks, known, deadline)
            self._wait(said.all_here, said.awaited)
            return {rank: said.arrived[rank] for rank in self._ranks}

    def announce(self, topic: str, message: bytes = b"") -> bytes:
        """Hear what the leader says, which says ``message``. Each topic serves once.

        Raises:
            OthersFailedError: another rank failed or is silent.
            RendezvousError: the store is gone.
        """
        key = self._key(topic, "all")
        with self._asking():
            if self._leading:
                put(self._store, key, message)
                return message
            self._wait(lambda: self._store.check([key]), lambda: self._ranks[:1])
            return whole(self._store, key, self._store.get(key))

    def agree(self, topic: str, *, wait: bool = True) -> None:
        """Go on only when every rank has come this far.

        Args:
            topic: a name for it. All ranks come to the same ones, in the same order.
            wait: otherwise only say that this rank has come, for those that do wait.

        Raises:
            OthersFailedError: another rank failed or is silent.
            RendezvousError: the store is gone.
        """
        if not self._leading:
            self.collect(topic, b"")
            if wait:
                self.announce(f"{topic}, all of us")
                self._block.settle()
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
        """End: with an alarm for the others if anything went wrong here."""
        if error is not None:
            self._raise_alarm(error)
            return
        with contextlib.suppress(StoreError), self._asking():
            if self._bound and not self._leading:  # the leader has gone on from all that was said
                self._said.add(self._key("beat", self._rank))
                self._take_back()
            key, everyone = self._key("end", "count"), b"%d" % len(self._ranks)
            self._store.add(key, 1)
            if self._leading:  # nobody reads the keys any more
                deadline = time.monotonic() + min(self._timeout, _TIDY)
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
        """What the leader makes of a failure, whatever each rank has heard of it. After the block;
        the leader has to ask, or the others wait for it as long as they would for a silent one.

        Args:
            decide: asked on the leader, with what went wrong on which rank.

        Returns:
            False also where the leader is not to be heard.
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
                time.sleep(_LOOK / 10)
            return self._store.get(key) == b"1"
        return False

    # -- waiting -----------------------------------------------------------------------------

    def _wait(self, done: Callable[[], bool], for_whom: Callable[[], Sequence[int]]) -> None:
        pulse = _Pulse(self)
        look_again = time.monotonic() + _LOOK

        def done_or_given_up() -> bool:
            nonlocal look_again
            self._said |= self._block.report()
            if done():
                return True
            self.progress()
            if time.monotonic() >= look_again:
                look_again = time.monotonic() + _LOOK
                self._look([*for_whom(), *([] if self._bound else self._block.waiting())], pulse)
            return False

        self._until(done_or_given_up, math.inf, longest=_LOOK)

    def _look(self, others: Sequence[int], pulse: _Pulse) -> None:
        """Raise if anyone raised the alarm, or one of ``others`` has been silent too long."""
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
        """Around many steps: one thread makes the calls to the store, not another for each step."""
        return self._store.until(time.monotonic(), self._name)

    def _asking(self) -> contextlib.AbstractContextManager[None]:
        """Around calls to the store: it, too, is given up when it has been silent too long."""
        return self._store.until(time.monotonic(), self._name, least=self._timeout)

    def _key(self, topic: str, *whose: int | str) -> str:
        return "/".join([self._space, topic, *map(str, whose)])


class _Pulse:
    """Who is silent, from the moment on that somebody listens."""

    def __init__(self, work: JointWork) -> None:
        self._work = work
        self._heard: dict[int, tuple[bytes, float]] = {}

    def silent(self, others: Sequence[int]) -> Sequence[int]:
        """Those of the others that have not said for too long that they are getting on."""
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
