"""Bringing the ranks together, and letting them part, over a store: bounded, and naming names.

A collective on a communicator can't say which rank is missing, and a rank that gives up leaves the
communicator broken. So megapg's own waits go over the key-value store, under megapg's own deadline:

1. every rank says *hello*: a nonce, its settings, the generation it proposes;
2. the first rank, the *leader*, waits for all of them, compares the settings, and gives each one
   the same *verdict*: a namespace that no other meeting ever had, or what is wrong;
3. once it has made what it came for, every rank says *ready*, or what went wrong, and the leader
   lets all of them *go*, or none.

Verdicts are addressed to nonces, and a nonce is never used twice, so no rank acts on what was meant
for an earlier meeting. The leader keeps the work linear in the number of ranks. Waiting is polling,
so that Ctrl-C is felt at once and a rank can look at more than one thing.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from megapg.errors import LayoutMismatchError, RendezvousError, SessionError

# How long beyond its deadline a rank waits for the leader's word: the leader knows more, so its
# error is the better one. Seconds.
GRACE = 2.0
# From how many ranks on it is too much for the store if every rank asks about every other.
_LARGE = 64
# The longest pause between two questions to the store, in seconds.
_PAUSE = 0.05
# No key ever holds this: what the store answers when there is nothing.
_NOTHING = "nothing"


@dataclass(frozen=True)
class Agreement:
    """What a meeting agreed on.

    Attributes:
        store: a view of the store that this meeting alone uses.
        generation: the highest one that any rank proposed, from 1.
    """

    store: dist.Store
    generation: int


@dataclass(frozen=True)
class _Hello:
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
    pid: int = 0
    settings: dict[str, str] | None = None
    why: str = ""
    namespace: str = ""
    missing: Sequence[int] = ()  # of a leader that declined: whose fault it was
    leftover: Sequence[str] = ()  # namespaces of earlier meetings whose keys still exist

    def status(self) -> str:
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


@dataclass(frozen=True)
class _Verdict:
    namespace: str = ""
    generation: int = 0
    attempt: int = 0
    problem: str = ""
    missing: Sequence[int] = ()
    differences: dict[str, dict[str, str]] | None = None

    def check(self) -> None:
        if self.differences:
            by_rank = {
                name: {int(rank): value for rank, value in values.items()}
                for name, values in self.differences.items()
            }
            raise LayoutMismatchError(self.problem, by_rank)
        if self.problem:
            raise RendezvousError(self.problem, self.missing)


class RollCall:
    """One name under which a set of ranks meets, parts and meets again over a store.

    Args:
        store: shared by all the ranks.
        name: what the meeting is called, for the keys and the messages.
        rank: this rank.
        ranks: everyone expected, ascending; the first one leads.
        host: who hosts the store, for the message when it is gone.
        hosts: rank -> the host it runs on, for the messages; empty where nobody knows.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        host: str = "the store behind WORLD",
        hosts: Sequence[str] = (),
    ) -> None:
        self._store = dist.PrefixStore(f"megapg/{name}", store)
        self._name, self._rank, self._ranks, self._host = name, rank, ranks, host
        self._hosts = hosts
        self._leading = rank == ranks[0]
        self._mine = _Hello("new", secrets.token_hex(8), host=socket.gethostname(), pid=os.getpid())

    # -- meeting -----------------------------------------------------------------------------

    def meet(self, settings: Mapping[str, str], *, timeout: float, at_least: int = 1) -> Agreement:
        """Wait until every rank is here with equal settings. :meth:`confirm` must follow.

        Args:
            settings: must be equal on every rank; the error names the one that is not.
            timeout: seconds to wait for the ranks that are missing.
            at_least: lowest generation to propose.

        Raises:
            SessionError: the name is open in this process, or the others are in a later generation.
            LayoutMismatchError: settings differ.
            RendezvousError: a rank did not arrive in time; it is named on every rank that did. Or
                the store is gone.
        """
        deadline = time.monotonic() + timeout
        with self._reaching_the_store():
            before = self._arrive(dict(settings), at_least)
            try:
                verdict = self._lead(before, deadline) if self._leading else self._follow(deadline)
                verdict.check()
            except BaseException as error:
                if self._mine.state != "declined":
                    self._leave("left", error)
                raise
        self._mine = replace(
            self._mine,
            namespace=verdict.namespace,
            generation=verdict.generation,
            attempt=verdict.attempt,
        )
        return Agreement(dist.PrefixStore(verdict.namespace, self._store), verdict.generation)

    def confirm(
        self,
        problem: BaseException | None,
        *,
        timeout: float,
        telling: Mapping[str, bytes] | None = None,
    ) -> None:
        """Tell the others that this rank has made what it came for, or why not.

        Args:
            problem: what went wrong here, if anything did.
            timeout: seconds to wait for the others.
            telling: key -> value, to be in the agreement's store of every rank afterwards.

        Raises:
            RendezvousError: another rank failed or is gone; every rank that is there hears of it.
        """
        here = self._mine.namespace
        deadline = time.monotonic() + timeout
        with self._reaching_the_store():
            try:
                message: dict[str, str | bytes] = {
                    f"{here}/{key}": value for key, value in (telling or {}).items()
                }
                message[f"{here}/ready/{self._rank}"] = "" if problem is None else brief(problem)
                self._set(message)
                problems: dict[int, str] | None = None
                if self._leading:
                    ready = [f"{here}/ready/{rank}" for rank in self._ranks]
                    self._until(lambda: self._store.check(ready), deadline)
                elif self._until(lambda: self._store.check([f"{here}/go"]), deadline + GRACE):
                    problems = self._read_problems(f"{here}/go")
                if self._leading or problems is None:
                    late = self._answers(f"{here}/ready", "did not confirm in time")
                    if not self._leading:
                        late = late or {self._ranks[0]: "did not answer in time"}
                    problems = self._settle(f"{here}/go", late)
                if problems and problem is None:
                    raise RendezvousError(self._failure(problems), sorted(problems))
            except BaseException as error:
                self._leave("left", error)
                raise
            if problem is None:
                self._say(state="live")
            else:
                self._leave("left", problem)

    def decline(self, error: BaseException) -> None:
        """Say that this rank can't even come, and why, so that nobody waits for it."""
        with contextlib.suppress(dist.DistError):
            before = self._hello(self._rank)
            if before is None or before.state != "live":  # an open session's hello stays
                self._begin("declined", before, why=brief(error))

    def _arrive(self, settings: dict[str, str], at_least: int) -> _Hello | None:
        before = self._hello(self._rank)
        if before and before.state == "live" and before.pid == os.getpid():
            raise SessionError(
                f"{self._name!r} is already open in this process (generation "
                f"{before.generation}). Close it first, or give this one another name=."
            )
        last = before.generation if before else 0
        self._begin("arrived", before, generation=max(at_least, last + 1), settings=settings)
        return before

    def _begin(self, state: str, before: _Hello | None, **changes: object) -> None:
        leftover: list[str] = []
        if before is not None:
            leftover = [*before.leftover, *filter(None, [before.namespace])]
            changes = {"generation": before.generation, **changes}
        attempt = before.attempt + 1 if before else 1
        self._say(state=state, attempt=attempt, leftover=leftover, **changes)

    def _leave(self, state: str, error: BaseException) -> None:
        with contextlib.suppress(dist.DistError):  # the store may be what failed
            self._say(state=state, generation=self._mine.generation - 1, why=brief(error))

    def _lead(self, before: _Hello | None, deadline: float) -> _Verdict:
        hellos = self._gather(deadline)
        arrived = {r: h for r, h in hellos.items() if h is not None and h.state == "arrived"}
        if len(arrived) < len(self._ranks):
            missing = self._missing(hellos)
            verdict = _Verdict(problem=self._absence(missing, hellos), missing=missing)
            if any(self._has_declined(hellos[rank]) for rank in missing):
                # Whoever arrives from now on need not wait either.
                self._say(missing=missing)
                self._leave("declined", RendezvousError(verdict.problem))
        elif differences := _differences(arrived):
            verdict = _Verdict(problem=_mismatch(self._name, differences), differences=differences)
        else:
            highest = max(hello.generation for hello in arrived.values())
            attempt = max(hello.attempt for hello in arrived.values())
            verdict = _Verdict(secrets.token_hex(8), highest, attempt)
            if self._mine.leftover or (before and before.state != "closed"):
                # Everyone has come back, so nobody can be in an earlier meeting any more.
                self._forget([*self._mine.leftover, "verdict"])
                self._say(leftover=[])
        told = [f"verdict/{hello.nonce}" for rank, hello in arrived.items() if rank != self._rank]
        self._set(dict.fromkeys(told, json.dumps(vars(verdict))))
        return verdict

    def _gather(self, deadline: float) -> dict[int, _Hello | None]:
        """Everyone's hello; of a rank that is not here by the deadline, what it last said."""
        hellos: dict[int, _Hello | None] = dict.fromkeys(self._ranks)
        waiting = list(self._ranks)

        def look(ranks: Sequence[int]) -> list[int]:
            for rank, hello in self._hellos(ranks).items():
                hellos[rank] = hello
                self._refuse_if_behind(rank, hello)
                if hello and self._has_its_verdict(hello):
                    hellos[rank] = replace(hello, state="left")
            return [r for r in ranks if (h := hellos[r]) is None or h.state != "arrived"]

        def all_here_or_hopeless() -> bool:
            nonlocal waiting
            # Whoever came first may have given up by the time that the last one comes.
            waiting = look(waiting) or look(self._ranks)
            return not waiting or any(self._has_declined(hellos[rank]) for rank in waiting)

        self._until(all_here_or_hopeless, deadline)
        return hellos

    def _follow(self, deadline: float) -> _Verdict:
        leader, key = self._ranks[0], f"verdict/{self._mine.nonce}"
        answer: bytes | None = None
        look_again = time.monotonic() + _PAUSE

        def answered_or_hopeless() -> bool:
            nonlocal answer, look_again
            answer = self._peek(key)
            if answer is not None:
                return True
            if time.monotonic() < look_again:  # every rank asks for the leader: not too often
                return False
            look_again = time.monotonic() + 0.25
            hello = self._hello(leader)
            self._refuse_if_behind(leader, hello)
            return self._has_declined(hello)

        self._until(answered_or_hopeless, deadline + GRACE)
        answer = answer or self._peek(key)
        if answer is None:
            hellos = self._hellos(self._ranks)
            missing = self._missing(hellos) or (leader,)
            raise RendezvousError(self._absence(missing, hellos), missing)
        return _Verdict(**json.loads(answer))

    def _has_declined(self, hello: _Hello | None) -> bool:
        """Whether the rank won't come to this very attempt; it may have failed an earlier one."""
        return (
            hello is not None and hello.state == "declined" and hello.attempt == self._mine.attempt
        )

    def _has_its_verdict(self, hello: _Hello) -> bool:
        """Whether the rank is still here from an earlier attempt that failed: it will know soon."""
        return hello.attempt != self._mine.attempt and self._store.check([f"verdict/{hello.nonce}"])

    def _refuse_if_behind(self, rank: int, hello: _Hello | None) -> None:
        ours = self._mine.generation
        if rank != self._rank and hello and hello.state == "live" and hello.generation >= ours:
            raise SessionError(
                f"{self._name!r}: rank {self._rank} would open generation {ours}, but rank "
                f"{rank} on {hello.host} is live in generation {hello.generation}. Close it on "
                "every rank and open it again together."
            )

    def _missing(self, hellos: Mapping[int, _Hello | None]) -> tuple[int, ...]:
        """The ranks to blame: those that declined, else those that never came, else that left."""
        gone = {r: h for r, h in hellos.items() if h is None or h.state != "arrived"}
        leader = gone.get(self._ranks[0])
        if leader is not None and leader.missing and self._has_declined(leader):
            return tuple(leader.missing)  # it came, and passed on whose fault it was
        declined = tuple(rank for rank, hello in gone.items() if self._has_declined(hello))
        never = tuple(r for r, h in gone.items() if h is None or h.state in ("live", "closed"))
        return declined or never or tuple(gone)

    def _absence(self, missing: Sequence[int], hellos: Mapping[int, _Hello | None]) -> str:
        lines = [
            f"rank {rank}{self._where(rank, hello)} {hello.status() if hello else 'never arrived'}"
            for rank in missing[:8]
            for hello in [hellos.get(rank)]
        ]
        more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
        hopeless = any(self._has_declined(hellos.get(rank)) for rank in missing)
        advice = "" if hopeless else ", or raise timeout= if they are only slow to start"
        return (
            f"{self._name!r}: {len(self._ranks) - len(missing)} of {len(self._ranks)} ranks came "
            f"together{'' if hopeless else ' in time'}. Missing: {'; '.join(lines)}{more}. Look at "
            f"the logs of those ranks{advice}."
        )

    def _where(self, rank: int, hello: _Hello | None) -> str:
        host = hello.host if hello else self._hosts[rank] if self._hosts else ""
        return f" on {host}" if host else ""

    def _failure(self, problems: Mapping[int, str]) -> str:
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in list(problems.items())[:8])
        return (
            f"{self._name!r}: all ranks came, but not all could open: {lines}. Nothing stays open; "
            "look at the logs of those ranks."
        )

    # -- parting -----------------------------------------------------------------------------

    def part(self, problem: BaseException | None, *, timeout: float) -> dict[int, str]:
        """Tell the others how this rank ended, and hear how they did.

        Args:
            problem: what went wrong here; None where all is well.
            timeout: seconds to wait for the others; a rank with a problem does not wait.

        Returns:
            rank -> what went wrong there, a rank that did not answer in time included. Empty
            means that every rank is well and knows that every rank is.
        """
        bye = f"{self._mine.namespace}/bye"
        deadline = time.monotonic() + timeout
        try:
            self._store.set(f"{bye}/{self._rank}", "" if problem is None else brief(problem))
            if problem is not None:
                problems = {self._rank: brief(problem)}
                if self._leading:  # with what it has heard so far, which may be the cause
                    problems |= self._answers(bye, "")
                    self._settle(f"{bye}/all", problems)
            elif self._leading:
                problems = self._dismiss(bye, deadline)
            else:
                if self._until(lambda: self._store.check([f"{bye}/all"]), deadline + GRACE):
                    problems = self._read_problems(f"{bye}/all")
                else:
                    problems = self._settle(f"{bye}/all", {self._ranks[0]: "did not answer"})
                # Before the leader may go, and the store with it. The leader tidies up.
                self._say(state="closed", **({} if problems else {"namespace": "", "leftover": []}))
                self._store.set(f"{bye}/heard/{self._rank}", "")
                return problems
            self._say(state="closed")
        except dist.DistError as error:
            return {self._ranks[0]: f"{self._host} is gone: {brief(error)}"}
        return problems

    def news(self, *, wait: float) -> dict[int, str]:
        """After :meth:`part` with a problem: what the others have said, and which are silent.

        In a large job the leader alone asks all ranks, and the others ask the leader.

        Args:
            wait: seconds to wait for those that have said nothing yet; with 0 they are left out.

        Returns:
            rank -> what went wrong there; nothing for ranks that are well.
        """
        bye = f"{self._mine.namespace}/bye"
        deadline = time.monotonic() + wait
        large = len(self._ranks) > _LARGE
        try:
            if self._leading or not large:
                found = self._hear_all(bye, deadline, silent_too=wait > 0)
                if large:
                    self._store.set(f"{bye}/news", json.dumps(found))
            elif self._until(lambda: self._store.check([f"{bye}/news"]), deadline + wait):
                found = self._read_problems(f"{bye}/news")
            else:
                found = self._silence(self._ranks[:1]) if wait else {}
        except dist.DistError as error:
            return {self._ranks[0]: f"{self._host} is gone: {brief(error)}"}
        return {rank: found[rank] for rank in sorted(found) if rank != self._rank}

    def _hear_all(self, bye: str, deadline: float, *, silent_too: bool) -> dict[int, str]:
        everyone = [f"{bye}/{rank}" for rank in self._ranks]
        if self._until(lambda: self._store.check(everyone), deadline) or not silent_too:
            return self._answers(bye, "")
        said = {rank: self._peek(f"{bye}/{rank}") for rank in self._ranks}
        silent = self._silence([rank for rank, word in said.items() if word is None])
        return {rank: word.decode() for rank, word in said.items() if word} | silent

    def _silence(self, ranks: Sequence[int]) -> dict[int, str]:
        return {
            rank: "not a word"
            + (f" (process {hello.pid} on {hello.host})" if hello else "")
            + ": killed, stuck, or still at work"
            for rank, hello in self._hellos(ranks).items()
        }

    def _dismiss(self, bye: str, deadline: float) -> dict[int, str]:
        everyone = [f"{bye}/{rank}" for rank in self._ranks]
        self._until(lambda: self._store.check(everyone), deadline)
        problems = self._settle(f"{bye}/all", self._answers(bye, "did not answer"))
        if problems:
            return problems  # some may still be at work: their keys are left to the next meeting
        # Whoever hosts the store may exit next: not before the others have heard.
        heard = [f"{bye}/heard/{rank}" for rank in self._ranks[1:]]
        if not heard or self._until(lambda: self._store.check(heard), deadline + GRACE):
            self._forget([self._mine.namespace, "verdict"])
            self._say(namespace="")
        return problems

    # -- the store ---------------------------------------------------------------------------

    def _say(self, **changes: object) -> None:
        self._mine = replace(self._mine, **changes)  # type: ignore[arg-type]
        self._store.set(f"hello/{self._rank}", json.dumps(vars(self._mine)))

    def _set(self, message: Mapping[str, str | bytes]) -> None:
        if message:
            self._store.multi_set(list(message), list(message.values()))  # type: ignore[attr-defined]

    def _peek(self, key: str) -> bytes | None:
        """What the key holds, None if nothing: one round trip, where check and get are three."""
        found: bytes = self._store.compare_set(key, _NOTHING, _NOTHING)
        return None if found == _NOTHING.encode() else found

    def _hello(self, rank: int) -> _Hello | None:
        said = self._peek(f"hello/{rank}")
        return None if said is None else _Hello(**json.loads(said))

    def _hellos(self, ranks: Sequence[int]) -> dict[int, _Hello | None]:
        keys = [f"hello/{rank}" for rank in ranks]
        if not self._store.check(keys):  # some were never here
            return {rank: self._hello(rank) for rank in ranks}
        said = self._store.multi_get(keys)
        return {rank: _Hello(**json.loads(text)) for rank, text in zip(ranks, said, strict=True)}

    def _answers(self, prefix: str, silence: str) -> dict[int, str]:
        """rank -> what it said went wrong, or ``silence`` where it said nothing at all."""
        keys = [f"{prefix}/{rank}" for rank in self._ranks]
        if self._store.check(keys):
            said = [text.decode() for text in self._store.multi_get(keys)]
        else:
            found = [self._peek(key) for key in keys]
            said = [silence if text is None else text.decode() for text in found]
        return {rank: text for rank, text in zip(self._ranks, said, strict=True) if text}

    def _read_problems(self, key: str) -> dict[int, str]:
        return {int(rank): text for rank, text in json.loads(self._store.get(key)).items()}

    def _settle(self, key: str, word: Mapping[int, str]) -> dict[int, str]:
        """Say it for everyone, unless somebody has already; what was said, the same on all ranks.

        The leader says how things stand, and a follower that gives up waiting for it says so in the
        same place: either all go on, or none does.
        """
        said = self._store.compare_set(key, "", json.dumps(word))
        return {int(rank): text for rank, text in json.loads(said).items()}

    def _forget(self, folders: Collection[str]) -> None:
        """Delete the keys inside these folders, those that communicators left there included."""
        try:
            keys = self._store.list_keys()
        except RuntimeError:  # a store that can't list, such as a file
            return
        for key in keys:
            if key.partition("/")[0] in folders:
                self._store.delete_key(key)

    def _until(self, done: Callable[[], bool], deadline: float) -> bool:
        """Whether it was done by the deadline.

        Asks often at first and ever less, so that it is late by a twentieth of the wait at most;
        and less in large jobs, to spare the store.
        """
        started = time.monotonic()
        shortest = 0.001 + len(self._ranks) / 20_000
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            pause = min(max((now - started) / 20, shortest), shortest + _PAUSE)
            time.sleep(min(pause, deadline - now))
        return True

    @contextlib.contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            raise RendezvousError(
                f"{self._name!r}: {self._host} is gone ({brief(error)}). Whoever hosts it died or "
                "was stopped; look at its log."
            ) from error


def _differences(hellos: Mapping[int, _Hello]) -> dict[str, dict[str, str]]:
    """setting -> {rank: value} for every setting that is not the same on all ranks."""
    # In the order in which they were given, so that what follows from another comes after it.
    names = dict.fromkeys(name for hello in hellos.values() for name in hello.settings or {})
    found = {}
    for name in names:
        values = {str(r): (h.settings or {}).get(name, "not set") for r, h in hellos.items()}
        if len(set(values.values())) > 1:
            found[name] = values
    return found


def _mismatch(name: str, differences: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for setting, values in differences.items():
        by_value: dict[str, list[str]] = {}
        for rank, value in values.items():
            by_value.setdefault(value, []).append(rank)
        said = [
            f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks[:8])}"
            + (" and more" if len(ranks) > 8 else "")
            for value, ranks in by_value.items()
        ]
        lines.append(f"{setting} is {'; '.join(said)}")
    return (
        f"{name!r}: the ranks came with different settings: {'. '.join(lines)}. Give every rank "
        "the same arguments."
    )


def brief(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}"
    return said if len(said) <= 500 else f"{said[:500]} ..."
