"""What each rank says about itself in a rendezvous, and what follows from it for the others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from megapg.errors import RendezvousError, SessionError
from megapg.rendezvous.problems import brief, listed
from megapg.rendezvous.store import Store, StoreError

# How long the store stays up after a failure, at the exit of the process that hosts it. Seconds.
STAY = 6.0
# How often a rank that had come has gone, or another process has come as that rank: when that
# changes the leader looks at all of them.
CHANGES = "changes"


@dataclass(frozen=True)
class Hello:
    """What a rank last said about itself.

    Its state is *arrived*, *live* or *closed*; *declined* if it could not even try; *left* if it
    tried and gave up. ``attempt`` counts its tries: the same number on all ranks that try
    together, as all that have met go on from the highest of theirs.
    """

    state: str
    nonce: str
    generation: int = 0
    attempt: int = 0
    host: str = ""
    party: str = ""  # of which ranks the meeting is: a name may serve for some, and then for more
    pid: int = 0
    started: float = 0.0  # when the process was: pids come again
    settings: dict[str, str] | None = None
    why: str = ""
    namespace: str = ""
    missing: Sequence[int] = ()  # of a leader that declined: whose fault it was
    leftover: Sequence[str] = ()  # namespaces of earlier meetings whose keys still exist

    def likeness(self) -> str:
        """The same for ranks that can meet without further questions, and only for those."""
        said = [self.state, self.party, self.generation, self.attempt, self.settings]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def status(self) -> str:
        """Why it is not here."""
        match self.state:
            case "left" | "declined":
                if not self.why:  # nobody has heard of it since; it may be stuck
                    return "has not come back from an earlier attempt"
                return f"gave up: {self.why.rstrip('.')}"
            case "live":
                return f"is still in generation {self.generation}"
            case "closed":
                return f"has not come back since it closed generation {self.generation}"
            case _:
                return "did not confirm in time"


class Hellos:
    """What every rank last said. Arguments are those of a rendezvous.

    Attributes:
        mine: what this rank says.
    """

    def __init__(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], hosts: Sequence[str]
    ) -> None:
        self._store, self._name, self._rank = store, name, rank
        self._ranks, self._hosts = ranks, hosts
        self.mine = Hello(
            "new",
            secrets.token_hex(8),
            host=socket.gethostname(),
            party=f"{len(ranks)} from {ranks[0]} to {ranks[-1]}",
            pid=os.getpid(),
            started=psutil.Process().create_time(),
        )

    def say(self, **changes: object) -> None:
        """Change what this rank says."""
        self.mine = replace(self.mine, **changes)  # type: ignore[arg-type]
        self._store.set(f"hello/{self._rank}", json.dumps(vars(self.mine)))

    def of(self, rank: int) -> Hello | None:
        """What a rank last said."""
        said = self._store.peek(f"hello/{rank}")
        return None if said is None else Hello(**json.loads(said))

    def of_all(self, ranks: Sequence[int]) -> dict[int, Hello | None]:
        """What these ranks last said."""
        said = self._store.peeks([f"hello/{rank}" for rank in ranks])
        hellos = (None if text is None else Hello(**json.loads(text)) for text in said)
        return dict(zip(ranks, hellos, strict=True))

    def begin(self, state: str, before: Hello | None, **changes: object) -> None:
        """Begin another attempt, after what this rank had said before."""
        leftover: list[str] = []
        if before is not None:
            leftover = [*before.leftover, *filter(None, [before.namespace])]
            changes = {"generation": before.generation, **changes}
        attempt = before.attempt + 1 if before else 1
        self.say(state=state, attempt=attempt, leftover=leftover, **changes)

    def leave(self, state: str, error: BaseException) -> None:
        """Give this attempt up."""
        with contextlib.suppress(StoreError):  # the store may be what failed
            self.say(state=state, generation=self.mine.generation - 1, why=brief(error))
            self._store.add(CHANGES, 1)
            # This process may exit next, and the store with it, before the others have heard.
            self._store.stay(self._nobody_waits, STAY)

    def _nobody_waits(self) -> bool:
        hellos = self.of_all(self._ranks).values()
        return all(hello is None or hello.state != "arrived" for hello in hellos)

    def all_have_given_up(self) -> bool:
        """Whether nobody can come together any more."""
        hellos = self.of_all(self._ranks).values()
        return all(hello is not None and hello.state in ("left", "declined") for hello in hellos)

    def twin(self) -> RendezvousError | None:
        """What is wrong if another process has come as this rank since; the others hear of it."""
        hello = self.of(self._rank)
        if hello is None or hello.nonce == self.mine.nonce or hello.pid == os.getpid():
            return None
        return self.refuse_twin(hello)

    def refuse_twin(self, other: Hello) -> RendezvousError:
        """What is wrong, of which the others hear: another process came as this rank."""
        error = RendezvousError(
            f"{self._name!r}: two processes came as rank {self._rank}: process {other.pid} on "
            f"{other.host}, and process {self.mine.pid} on {self.mine.host}. Give each process "
            "a rank of its own (RANK, or rank= of its launch=).",
            (self._rank,),
        )
        if other.state != "live":  # else nobody waits
            # The attempt that the others are in: whoever came second counted the first one's.
            attempt = min(self.mine.attempt or other.attempt, other.attempt)
            self.say(state="declined", attempt=attempt, why=brief(error))
            self._store.add(CHANGES, 1)
        return error

    def has_declined(self, hello: Hello | None) -> bool:
        """Whether the rank won't come to this attempt; it may have failed an earlier one.

        A rank that has tried alone counts more attempts than this one: its last word stands. It
        does not stand if that rank counted them in meetings of other ranks under this name.
        """
        if hello is None or hello.state != "declined":
            return False
        ahead = hello.attempt > self.mine.attempt and hello.party == self.mine.party
        return ahead or hello.attempt == self.mine.attempt

    def catch_up(self, hellos: Iterable[Hello | None]) -> None:
        """Count the attempts of those that declined: their word does not end the next attempt."""
        attempts = [hello.attempt for hello in hellos if hello and hello.state == "declined"]
        self.mine = replace(self.mine, attempt=max([self.mine.attempt, *attempts]))

    def refuse_if_behind(self, rank: int, hello: Hello | None) -> None:
        """Raise if a rank is live in a generation that this one would open."""
        ours = self.mine.generation
        if rank != self._rank and hello and hello.state == "live" and hello.generation >= ours:
            raise SessionError(
                f"{self._name!r}: rank {self._rank} would open generation {ours}, but rank "
                f"{rank} on {hello.host} is live in generation {hello.generation}. Close it on "
                "every rank and open it again together."
            )

    def missing(
        self, hellos: Mapping[int, Hello | None], *, with_those_that_left: bool = True
    ) -> tuple[int, ...]:
        """The ranks to blame: those that declined, else those that never came, else that left."""
        gone = {r: h for r, h in hellos.items() if h is None or h.state != "arrived"}
        leader = gone.get(self._ranks[0])
        if leader is not None and leader.missing and self.has_declined(leader):
            return tuple(leader.missing)  # it came, and passed on whose fault it was
        declined = tuple(rank for rank, hello in gone.items() if self.has_declined(hello))
        never = tuple(r for r, h in gone.items() if h is None or h.state in ("live", "closed"))
        return declined or never or (tuple(gone) if with_those_that_left else ())

    def absence(self, missing: Sequence[int], hellos: Mapping[int, Hello | None]) -> str:
        """Who is missing, and what each of them last said."""
        lines = listed(
            f"rank {rank}{self._where(rank, hello)} {hello.status() if hello else 'never arrived'}"
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
        """That the leader did not answer, where nobody else is known to be missing."""
        return (
            f"{self._name!r}: rank {leader}{self._where(leader, hello)}, which leads, had not "
            "answered in time, though it came, and so did all whom this rank asked for. It may "
            "have come late, or wait for others: its error names them. Look at its log, or raise "
            "timeout= if it is only slow to start."
        )

    def where(self, rank: int) -> str:
        """Where a rank runs, as in " on node3"; empty if nobody knows."""
        hello = None
        with contextlib.suppress(StoreError):
            hello = self.of(rank)
        return self._where(rank, hello)

    def _where(self, rank: int, hello: Hello | None) -> str:
        host = hello.host if hello else self._hosts[rank] if self._hosts else ""
        return f" on {host}" if host else ""


def runs_here(hello: Hello) -> bool:
    """Whether another process on this host said it, and still runs."""
    if hello.host != socket.gethostname() or hello.pid == os.getpid():
        return False
    try:
        process = psutil.Process(hello.pid)
        # Process numbers come again.
        return (
            abs(process.create_time() - hello.started) < 1.0
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False
