"""Bringing the ranks together, and letting them part, over a store: bounded, and naming names.

A collective on a communicator can't say which rank is missing, and a rank that gives up leaves the
communicator broken. So megapg's own waits go over the key-value store, under megapg's own deadline:

1. every rank says *hello*: a nonce, its settings, the generation it proposes;
2. the first rank, the *leader*, waits for all of them, compares the settings, and gives each one
   the same *verdict*: a namespace that no other meeting ever had, or what is wrong;
3. every rank answers *ready*, and the leader says *go*.

A stale hello (of a rank that died, or of an earlier session) can't pass: verdicts are addressed to
nonces, and a nonce is never used twice. The leader keeps the work linear in the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from megapg.errors import LayoutMismatchError, RendezvousError, SessionError

# How long beyond its deadline a rank waits for the leader's word: the leader knows more, so its
# error is the better one. Seconds.
GRACE = 2.0
_POLL = 0.005


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
    """What a rank last said about itself: arrived, live, left (it gave up) or closed."""

    state: str
    nonce: str
    generation: int
    host: str
    pid: int
    settings: dict[str, str]
    why: str = ""

    def status(self) -> str:
        match self.state:
            case "left":
                return f"gave up: {self.why}"
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
    problem: str = ""
    missing: tuple[int, ...] = ()
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
    """

    def __init__(self, store: dist.Store, name: str, rank: int, ranks: Sequence[int]) -> None:
        self._store = dist.PrefixStore(f"megapg/{name}", store)
        self._name, self._rank, self._ranks = name, rank, ranks
        self._leading = rank == ranks[0]
        self._mine = _Hello("new", secrets.token_hex(8), 0, socket.gethostname(), os.getpid(), {})
        self._namespace = ""

    # -- meeting -----------------------------------------------------------------------------

    def meet(self, settings: Mapping[str, str], *, timeout: float, at_least: int = 1) -> Agreement:
        """Wait until every rank is here with equal settings.

        Args:
            settings: must be equal on every rank; the error names the one that is not.
            timeout: seconds to wait for the ranks that are missing.
            at_least: lowest generation to propose.

        Raises:
            SessionError: the name is open in this process, or the others are in a later generation.
            LayoutMismatchError: settings differ.
            RendezvousError: a rank did not arrive in time; it is named on every rank that did.
        """
        deadline = time.monotonic() + timeout
        before = self._hello(self._rank)
        if before and before.state == "live" and before.pid == os.getpid():
            raise SessionError(
                f"{self._name!r} is already open in this process (generation "
                f"{before.generation}). Close it first, or give this one another name=."
            )
        proposal = max(at_least, before.generation + 1 if before else 1)
        self._say(state="arrived", generation=proposal, settings=dict(settings))
        try:
            verdict = self._lead(deadline) if self._leading else self._follow(deadline)
            verdict.check()
            self._namespace = verdict.namespace
            self._confirm(deadline)
        except BaseException as error:
            # Best effort: the store may be what failed.
            with contextlib.suppress(RuntimeError):
                self._say(state="left", generation=proposal - 1, why=_brief(error))
            raise
        self._say(state="live", generation=verdict.generation)
        return Agreement(dist.PrefixStore(verdict.namespace, self._store), verdict.generation)

    def _lead(self, deadline: float) -> _Verdict:
        hellos = self._gather(deadline)
        arrived = {r: h for r, h in hellos.items() if h is not None and h.state == "arrived"}
        if len(arrived) < len(self._ranks):
            missing = _missing(hellos)
            verdict = _Verdict(problem=self._absence(missing, hellos), missing=missing)
        elif differences := _differences(arrived):
            verdict = _Verdict(problem=_mismatch(self._name, differences), differences=differences)
        else:
            highest = max(hello.generation for hello in arrived.values())
            verdict = _Verdict(namespace=secrets.token_hex(8), generation=highest)
        for hello in arrived.values():
            self._store.set(f"verdict/{hello.nonce}", json.dumps(asdict(verdict)))
        return self._verdict()

    def _gather(self, deadline: float) -> dict[int, _Hello | None]:
        """Everyone's hello; of a rank that is not here by the deadline, what it last said."""
        hellos: dict[int, _Hello | None] = dict.fromkeys(self._ranks)
        waiting = list(self._ranks)
        while waiting:
            for rank in waiting:
                hellos[rank] = self._hello(rank)
                self._refuse_if_behind(rank, hellos[rank])
            waiting = [r for r in waiting if (h := hellos[r]) is None or h.state != "arrived"]
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL if waiting else 0)
        return hellos

    def _follow(self, deadline: float) -> _Verdict:
        leader = self._ranks[0]
        self._refuse_if_behind(leader, self._hello(leader))
        if not self._wait([f"verdict/{self._mine.nonce}"], deadline + GRACE):
            hellos = {rank: self._hello(rank) for rank in self._ranks}
            missing = _missing(hellos) or (leader,)
            raise RendezvousError(self._absence(missing, hellos), missing)
        return self._verdict()

    def _verdict(self) -> _Verdict:
        key = f"verdict/{self._mine.nonce}"
        verdict = _Verdict(**json.loads(self._store.get(key)))
        self._store.delete_key(key)
        return replace(verdict, missing=tuple(verdict.missing))

    def _confirm(self, deadline: float) -> None:
        self._store.set(f"{self._namespace}/ready/{self._rank}", "")
        go = f"{self._namespace}/go"
        if self._leading:
            absent = self._wait_each(lambda rank: f"{self._namespace}/ready/{rank}", deadline)
            self._store.set(go, ",".join(map(str, absent)))
        elif not self._wait([go], deadline + GRACE):
            absent = [self._ranks[0]]
            raise RendezvousError(self._absence(absent, {}), absent)
        else:
            absent = [int(rank) for rank in self._store.get(go).decode().split(",") if rank]
        if absent:
            raise RendezvousError(
                self._absence(absent, {rank: self._hello(rank) for rank in absent}), absent
            )

    def _refuse_if_behind(self, rank: int, hello: _Hello | None) -> None:
        if rank != self._rank and hello and hello.state == "live":
            ours = self._mine.generation
            if hello.generation >= ours:
                raise SessionError(
                    f"{self._name!r}: rank {self._rank} would open generation {ours}, but rank "
                    f"{rank} on {hello.host} is live in generation {hello.generation}. Close it on "
                    "every rank and open it again together."
                )

    def _absence(self, missing: Sequence[int], hellos: Mapping[int, _Hello | None]) -> str:
        lines = [
            f"rank {rank}" + (f" on {hello.host} {hello.status()}" if hello else " never arrived")
            for rank in missing[:8]
            for hello in [hellos.get(rank)]
        ]
        more = f"; and {len(missing) - 8} more" if len(missing) > 8 else ""
        return (
            f"{self._name!r}: {len(self._ranks) - len(missing)} of {len(self._ranks)} ranks came "
            f"together in time. Missing: {'; '.join(lines)}{more}. Look at the logs of those "
            "ranks, or raise timeout= if they are only slow to start."
        )

    # -- parting -----------------------------------------------------------------------------

    def part(self, problem: str | None, *, timeout: float) -> dict[int, str]:
        """Tell the others how this rank ended, and hear how they did.

        Args:
            problem: what went wrong here; None where all is well.
            timeout: seconds to wait for the others; a rank with a problem does not wait.

        Returns:
            rank -> what went wrong there, a rank that did not answer in time included. Empty
            means that every rank is well and knows that every rank is.
        """
        bye = f"{self._namespace}/bye"
        try:
            self._store.set(f"{bye}/{self._rank}", problem or "")
            if problem is not None:
                if self._leading:
                    self._store.set(f"{bye}/all", json.dumps({self._rank: problem}))
                return {self._rank: problem}
            deadline = time.monotonic() + timeout
            if self._leading:
                return self._dismiss(bye, deadline)
            if not self._wait([f"{bye}/all"], deadline + GRACE):
                return {self._ranks[0]: "did not answer"}
            answer = json.loads(self._store.get(f"{bye}/all"))
            self._say(state="closed")  # before the leader may go, and the store with it
            self._store.set(f"{bye}/heard/{self._rank}", "")
            return {int(rank): text for rank, text in answer.items()}
        except dist.DistError as error:
            return {self._ranks[0]: f"the store is gone: {_brief(error)}"}
        finally:
            if self._mine.state != "closed":
                with contextlib.suppress(RuntimeError):
                    self._say(state="closed")

    def _dismiss(self, bye: str, deadline: float) -> dict[int, str]:
        silent = self._wait_each(lambda rank: f"{bye}/{rank}", deadline)
        problems = dict.fromkeys(silent, "did not answer")
        for rank in self._ranks:
            if rank not in problems and (text := self._store.get(f"{bye}/{rank}").decode()):
                problems[rank] = text
        self._store.set(f"{bye}/all", json.dumps(problems))
        # Whoever hosts the store may exit next: not before the others have heard.
        others = [rank for rank in self._ranks[1:] if rank not in problems]
        self._wait_each(lambda rank: f"{bye}/heard/{rank}", deadline + GRACE, others)
        self._forget()
        return problems

    def _forget(self) -> None:
        """Delete the keys of this meeting, those that communicators left in its store included."""
        inside = f"{self._namespace}/"
        for key in self._store.list_keys():
            _, found, rest = key.partition(inside)
            if found:
                self._store.delete_key(inside + rest)

    # -- the store ---------------------------------------------------------------------------

    def _say(self, **changes: object) -> None:
        self._mine = replace(self._mine, **changes)  # type: ignore[arg-type]
        self._store.set(f"hello/{self._rank}", json.dumps(asdict(self._mine)))

    def _hello(self, rank: int) -> _Hello | None:
        key = f"hello/{rank}"
        return _Hello(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _wait(self, keys: list[str], deadline: float) -> bool:
        """Whether the keys exist by the deadline."""
        left = max(deadline - time.monotonic(), 0.001)
        try:
            self._store.wait(keys, timedelta(seconds=left))
        except dist.DistStoreError:
            return False
        return True

    def _wait_each(
        self, key: Callable[[int], str], deadline: float, ranks: Iterable[int] | None = None
    ) -> list[int]:
        """The ranks whose key does not exist by the deadline."""
        expected = list(self._ranks if ranks is None else ranks)
        if not expected or self._wait([key(rank) for rank in expected], deadline):
            return []
        return [rank for rank in expected if not self._store.check([key(rank)])]


def _missing(hellos: Mapping[int, _Hello | None]) -> tuple[int, ...]:
    """The ranks that are not here; those that only gave up waiting are not to blame."""
    gone = {r: h for r, h in hellos.items() if h is None or h.state != "arrived"}
    never = tuple(rank for rank, hello in gone.items() if hello is None or hello.state != "left")
    return never or tuple(gone)


def _differences(hellos: Mapping[int, _Hello]) -> dict[str, dict[str, str]]:
    """setting -> {rank: value} for every setting that is not the same on all ranks."""
    names = {name for hello in hellos.values() for name in hello.settings}
    found = {}
    for name in sorted(names):
        values = {str(r): hello.settings.get(name, "not set") for r, hello in hellos.items()}
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
    return f"{name!r}: the ranks came with different settings: {'. '.join(lines)}."


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
