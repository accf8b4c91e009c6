"""The *hello* that each rank writes about itself in a rendezvous, and how other ranks judge it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from megapg.errors import RendezvousError, SessionError
from megapg.rendezvous.error_texts import BY_NUMBER, RankNames, brief, listed
from megapg.rendezvous.store import Store, StoreError

# Seconds for which the host of the store keeps it up at exit after a failure.
STAY = 6.0
# The fate of a process that has ended.
DIED = "has died"
# Counts ranks that left after arriving and processes that replaced a rank. If it changes, the
# leader reads all hellos again.
CHANGES = "changes"


@dataclass(frozen=True)
class Hello:
    """The last message of a rank about itself.

    ``state`` is *arrived*, *live* or *closed*; *declined* if the rank could not even try; *left* if
    it tried and gave up. ``attempt`` counts its tries. It is the same on all ranks that try
    together, because after a meeting all ranks continue from the highest number.
    """

    state: str
    nonce: str
    generation: int = 0
    attempt: int = 0
    host: str = ""
    party: str = ""  # the ranks of the meeting: later ones under a name may have others
    pid: int = 0
    started: float = 0.0  # start time of the process: process ids are reused
    settings: dict[str, str] | None = None
    why: str = ""
    namespace: str = ""
    missing: Sequence[int] = ()  # set by a leader that declined: the ranks to blame
    leftover: Sequence[str] = ()  # namespaces of earlier meetings whose keys still exist

    def status(self) -> str:
        """Return why the rank is missing."""
        match self.state:
            case "left" | "declined":
                if not self.why:  # no news since; it may be stuck
                    return "has not come back from an earlier attempt"
                return f"gave up: {self.why.rstrip('.')}"
            case "live":
                return f"is still in generation {self.generation}"
            case "closed":
                return f"has not come back since it closed generation {self.generation}"
            case _:
                return "did not confirm in time"


class Hellos:
    """The last hello of every rank. Arguments are those of a rendezvous.

    Attributes:
        mine: the hello of this rank.
        names: the names of ranks in messages.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        hosts: Sequence[str],
        names: RankNames = BY_NUMBER,
    ) -> None:
        self._store, self._name, self._rank = store, name, rank
        self._ranks, self._hosts, self.names = ranks, hosts, names
        self.mine = Hello(
            "new",
            secrets.token_hex(8),
            host=socket.gethostname(),
            party=f"{len(ranks)} from {ranks[0]} to {ranks[-1]}",
            pid=os.getpid(),
            started=psutil.Process().create_time(),
        )

    def say(self, **changes: object) -> None:
        """Change this rank's hello."""
        self.mine = replace(self.mine, **changes)  # type: ignore[arg-type]
        self._store.set(f"hello/{self._rank}", json.dumps(vars(self.mine)))

    def of(self, rank: int) -> Hello | None:
        """Return a rank's last hello, or None."""
        said = self._store.peek(f"hello/{rank}")
        return None if said is None else Hello(**json.loads(said))

    def of_all(self, ranks: Sequence[int]) -> dict[int, Hello | None]:
        """Return rank -> its last hello, or None."""
        said = self._store.peeks([f"hello/{rank}" for rank in ranks])
        hellos = (None if text is None else Hello(**json.loads(text)) for text in said)
        return dict(zip(ranks, hellos, strict=True))

    def begin(self, state: str, before: Hello | None, **changes: object) -> None:
        """Begin another attempt, given this rank's previous hello."""
        leftover: list[str] = []
        if before is not None:
            leftover = [*before.leftover, *filter(None, [before.namespace])]
            changes = {"generation": before.generation, **changes}
        attempt = before.attempt + 1 if before else 1
        self.say(state=state, attempt=attempt, leftover=leftover, **changes)

    def leave(self, state: str, error: BaseException) -> None:
        """Give up this attempt."""
        with contextlib.suppress(StoreError):  # the store may be what failed
            self.say(state=state, generation=self.mine.generation - 1, why=brief(error))
            self._store.add(CHANGES, 1)
            # This process may host the store and exit before the other ranks have read this.
            self._store.stay(self._nobody_waits, STAY)

    def _nobody_waits(self) -> bool:
        hellos = self.of_all(self._ranks).values()
        return all(hello is None or hello.state != "arrived" for hello in hellos)

    def all_have_given_up(self) -> bool:
        """True if every rank has left or declined."""
        hellos = self.of_all(self._ranks).values()
        return all(hello is not None and hello.state in ("left", "declined") for hello in hellos)

    def twin(self) -> RendezvousError | None:
        """Return an error if another process took this rank's number, and tell all ranks."""
        hello = self.of(self._rank)
        if hello is None or hello.nonce == self.mine.nonce or hello.pid == os.getpid():
            return None
        return self.refuse_twin(hello)

    def refuse_twin(self, other: Hello) -> RendezvousError:
        """Report to all ranks that another process took this rank's number. Return the error."""
        error = RendezvousError(
            f"{self._name!r}: two processes came as {self.names.one(self._rank)}: process "
            f"{other.pid} on {other.host}, and process {self.mine.pid} on {self.mine.host}. Give "
            "each process a rank of its own (RANK, or rank= of its launch=).",
            (self._rank,),
        )
        if other.state != "live":  # otherwise no rank waits
            # The other ranks' attempt: the second process counted the attempt of the first as well.
            attempt = min(self.mine.attempt or other.attempt, other.attempt)
            self.say(state="declined", attempt=attempt, why=brief(error))
            self._store.add(CHANGES, 1)
        return error

    def has_declined(self, hello: Hello | None) -> bool:
        """True if the rank will not come to this attempt. It may have failed an earlier one.

        A rank that has tried alone counts more attempts than this rank. Its hello counts too,
        unless that rank counted its attempts in meetings of other ranks under this name.
        """
        if hello is None or hello.state != "declined":
            return False
        ahead = hello.attempt > self.mine.attempt and hello.party == self.mine.party
        return ahead or hello.attempt == self.mine.attempt

    def catch_up(self, hellos: Iterable[Hello | None]) -> None:
        """Count the attempts of declined ranks, so that their hellos do not end the next one."""
        attempts = [hello.attempt for hello in hellos if hello and hello.state == "declined"]
        self.mine = replace(self.mine, attempt=max([self.mine.attempt, *attempts]))

    def refuse_if_behind(self, rank: int, hello: Hello | None) -> None:
        """Raise if a rank is live in a generation that this one would open."""
        ours = self.mine.generation
        if rank != self._rank and hello and hello.state == "live" and hello.generation >= ours:
            raise SessionError(
                f"{self._name!r}: {self.names.one(self._rank)} would open generation {ours}, but "
                f"{self.names.one(rank)} on {hello.host} is live in generation "
                f"{hello.generation}. Close it on every rank and open it again together."
            )

    def missing(self, hellos: Mapping[int, Hello | None]) -> tuple[int, ...]:
        """Return the ranks to blame: those that declined, else those that never came."""
        gone = {r: h for r, h in hellos.items() if h is None or h.state != "arrived"}
        leader = gone.get(self._ranks[0])
        if leader is not None and leader.missing and self.has_declined(leader):
            return tuple(leader.missing)  # the leader came, and named the ranks to blame
        declined = tuple(rank for rank, hello in gone.items() if self.has_declined(hello))
        never = tuple(r for r, h in gone.items() if h is None or h.state in ("live", "closed"))
        return declined or never

    def absence(self, missing: Sequence[int], hellos: Mapping[int, Hello | None]) -> str:
        """Describe the missing ranks and their last hellos."""
        lines = listed(
            f"{self.names.one(rank)}{self._where(rank, hello)} "
            f"{hello.status() if hello else 'never arrived'}"
            for rank in missing
            for hello in [hellos.get(rank)]
        )
        hopeless = any(self.has_declined(hellos.get(rank)) for rank in missing)
        advice = "" if hopeless else ", or raise timeout= if they are only slow to start"
        return (
            f"{self._name!r}: {len(self._ranks) - len(missing)} of {len(self._ranks)} ranks came "
            f"together{'' if hopeless else ' in time'}. Missing: {lines}. Look at "
            f"the logs of those ranks{advice}."
        )

    def no_word(self, leader: int, hello: Hello | None) -> str:
        """Describe that the leader came and did not answer."""
        return (
            f"{self._name!r}: {self.names.one(leader)}{self._where(leader, hello)}, which leads, "
            "came and did not answer in time. It may have come late, or wait for other ranks, "
            "which its error names. Look at its log, or raise timeout= if it is only slow to start."
        )

    def where(self, rank: int) -> str:
        """Return where a rank runs, as in " on node3"; empty if unknown."""
        hello = None
        with contextlib.suppress(StoreError):
            hello = self.of(rank)
        return self._where(rank, hello)

    def _where(self, rank: int, hello: Hello | None) -> str:
        host = hello.host if hello else self._hosts[rank] if self._hosts else ""
        return f" on {host}" if host else ""


def fate(hello: Hello | None) -> str:
    """Return what this host knows of a silent process: has died, is stopped, or runs."""
    if hello is None or hello.host != socket.gethostname() or hello.pid == os.getpid():
        return ""
    if not runs_here(hello):
        return DIED
    with contextlib.suppress(psutil.Error):
        if psutil.Process(hello.pid).status() == psutil.STATUS_STOPPED:
            return "is stopped (SIGSTOP) and can't say where it stands"
    return f"still runs: it is stuck, or at work (py-spy dump --pid {hello.pid} shows where)"


def runs_here(hello: Hello) -> bool:
    """True if the hello is of another process on this host that still runs."""
    if hello.host != socket.gethostname() or hello.pid == os.getpid():
        return False
    try:
        process = psutil.Process(hello.pid)
        # Process ids are reused.
        return (
            abs(process.create_time() - hello.started) < 1.0
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False
