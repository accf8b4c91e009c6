"""Let ranks meet and disconnect over a store, with deadlines and errors that name ranks.

A collective can't report which rank is missing, and a rank that gives up breaks the communicator.
So megapg waits over the key-value store, under its own deadline:

1. every rank writes a *hello*: a nonce, its settings, and the generation it proposes;
2. the first rank, the *leader*, waits for all hellos and compares the settings. It gives each rank
   the same *verdict*: a namespace that no other meeting ever had, or an error;
3. after its own work, every rank writes that it is *ready*, or its error. The leader lets all ranks
   go on, or none.

A verdict is addressed to a nonce, and a nonce is never reused, so no rank acts on the verdict of an
earlier meeting. The leader keeps the work linear in the number of ranks. Ranks wait by polling, so
that Ctrl-C works at once and a rank can check several keys.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megapg.errors import LayoutMismatchError, RendezvousError, SessionError
from megapg.rendezvous.different_settings import differences_in, text_of
from megapg.rendezvous.error_texts import BY_NUMBER, RankNames, brief, told
from megapg.rendezvous.gathering import GRACE, LARGE, MANY, PAUSE, Gathering, by_rank, by_word
from megapg.rendezvous.hello import CHANGES, STAY, Hello, Hellos, runs_here
from megapg.rendezvous.store import Store, StoreError, batches
from megapg.rendezvous.waiting import WaitingList

# Seconds between two checks of a waiting rank for a twin or for ranks under another name.
_CHECK_INTERVAL = 0.5
# Seconds between two checks of a waiting follower for the leader's hello.
_LEADER_CHECK_INTERVAL = 0.25


@dataclass(frozen=True)
class Agreement:
    """The result of a meeting.

    Attributes:
        store: a view of the store that only this meeting uses.
        generation: the highest one that any rank proposed, from 1.
    """

    store: Store
    generation: int


@dataclass(frozen=True)
class _Verdict:
    namespace: str = ""
    generation: int = 0
    attempt: int = 0
    problem: str = ""
    missing: Sequence[int] = ()
    differences: dict[str, str] | None = None  # encoded by by_word(), as every rank reads it

    def check(self) -> None:
        if self.differences:
            values = {name: by_rank(said) for name, said in self.differences.items()}
            raise LayoutMismatchError(self.problem, values)
        if self.problem:
            raise RendezvousError(self.problem, self.missing)


class Rendezvous(Gathering):
    """One name under which a set of ranks meets, parts and meets again over a store.

    Args:
        store: shared by all the ranks.
        name: the name of the meeting, for the keys and the messages.
        rank: this rank.
        ranks: all ranks of the meeting, in the same order on each. The first one leads.
        hosts: rank -> the host it runs on, for the messages; empty if unknown.
        names: the names of ranks in messages.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        ranks: Sequence[int],
        hosts: Sequence[str] = (),
        names: RankNames = BY_NUMBER,
    ) -> None:
        super().__init__(store.view(f"megapg/{name}"), name, rank, ranks, hosts, names)
        self._shared = store
        self._waiting = WaitingList(store, rank, name, ranks)
        self._look_again = 0.0

    def meet(self, settings: Mapping[str, str], *, timeout: float, at_least: int = 1) -> Agreement:
        """Wait until every rank is here with equal settings. :meth:`confirm` must follow.

        Args:
            settings: must be equal on every rank; the error names the settings that differ.
            timeout: seconds to wait for the ranks that are missing.
            at_least: lowest generation to propose.

        Raises:
            SessionError: the name is open in this process, or the other ranks are in a later
                generation.
            LayoutMismatchError: settings differ, or the names under which ranks wait.
            RendezvousError: a rank did not arrive in time. The error names it on every rank that
                did. Or two processes came as one rank, or the store is gone.
        """
        deadline = time.monotonic() + timeout
        self._look_again = time.monotonic() + _CHECK_INTERVAL
        with self._until_then(deadline):
            before = self._arrive(dict(settings), at_least)
            try:
                verdict = self._lead(before, deadline) if self._leading else self._follow(deadline)
                # so that the next attempt is equal on all ranks
                attempt = max(self._mine.attempt, verdict.attempt)
                self._hellos.mine = replace(self._mine, attempt=attempt)
                verdict.check()
            except BaseException as error:
                if self._mine.state != "declined":
                    self._hellos.leave("left", error)
                with contextlib.suppress(StoreError):
                    for name, ranks in self._waiting.expecting().items():
                        Rendezvous(self._shared, name, self._rank, ranks).decline(error)
                raise
            finally:
                self._waiting.leave()
        self._hellos.mine = replace(
            self._mine, namespace=verdict.namespace, generation=verdict.generation
        )
        return Agreement(self._store.view(verdict.namespace), verdict.generation)

    def confirm(
        self,
        problem: BaseException | None,
        *,
        timeout: float,
        telling: Mapping[str, bytes] | None = None,
    ) -> dict[int, str]:
        """Report that this rank's work after :meth:`meet` succeeded, or its error.

        Args:
            problem: the error of this rank, or None.
            timeout: seconds to wait for the other ranks.
            telling: key -> value, to write to the agreement's store for every rank to read.

        Returns:
            rank -> error, with ``problem`` and the ranks that did not confirm in time. Empty if
            every rank succeeded.

        Raises:
            RendezvousError: another rank failed or has exited. Every remaining rank gets the error.
        """
        here = self._mine.namespace
        deadline = time.monotonic() + timeout
        with self._until_then(deadline):
            try:
                twin = None if problem is not None else self._hellos.twin()
                problem = problem or twin
                message: dict[str, str | bytes] = {
                    f"{here}/{key}": value for key, value in (telling or {}).items()
                }
                message[f"{here}/ready/{self._rank}"] = "" if problem is None else brief(problem)
                self._said |= message.keys()
                self._store.multi_set(message)
                problems = self._gather(f"{here}/ready", deadline, "did not confirm in time")
                if problems and problem is None:
                    raise RendezvousError(
                        f"{self._name!r}: all ranks came, but not all could open: "
                        f"{told(problems, self._hellos.names)}. Nothing stays open; look at the "
                        "logs of those ranks.",
                        sorted(problems),
                    )
                if twin is not None:
                    raise twin
            except BaseException as error:
                self._hellos.leave("left", error)
                raise
            if problem is None:
                self._hellos.say(state="live")
            else:
                self._hellos.leave("left", problem)
        return problems

    def give_up(self, error: BaseException, *, timeout: float) -> dict[int, str]:
        """Report an error after :meth:`meet`, in whatever state this rank is.

        Args:
            error: the error.
            timeout: seconds to wait for the other ranks, if they wait for this one.

        Returns:
            rank -> error, of this rank and the ranks that reported or did not confirm.
        """
        with contextlib.suppress(RendezvousError):  # the store may be what failed
            if self._mine.state == "arrived":
                return self.confirm(error, timeout=timeout)
            if self._mine.state == "live":
                return self.part(error, timeout=timeout)
        return {}

    def decline(self, error: BaseException) -> None:
        """Report that this rank will not come, and why, so that no rank waits for it."""
        with contextlib.suppress(StoreError), self._until_then(time.monotonic()):
            before = self._hellos.of(self._rank)
            if before is None or before.state != "live":  # an open session's hello stays
                self._hellos.begin("declined", before, why=brief(error))
                self._store.add(CHANGES, 1)
                # This process may host the store and exit next.
                self._store.stay(self._hellos.all_have_given_up, STAY)

    def _arrive(self, settings: dict[str, str], at_least: int) -> Hello | None:
        before = self._hellos.of(self._rank)
        if before and before.state == "live" and before.pid == os.getpid():
            raise SessionError(
                f"{self._name!r} is already open in this process (generation "
                f"{before.generation}). Close it first, or give this one another name=."
            )
        if before and before.state in ("arrived", "live") and runs_here(before):
            raise self._hellos.refuse_twin(before)
        last = before.generation if before else 0
        self._hellos.begin("arrived", before, generation=max(at_least, last + 1), settings=settings)
        # that process died, and the leader may know only its hello
        if before and before.state == "arrived":
            self._store.add(CHANGES, 1)
        return before

    def _lead(self, before: Hello | None, deadline: float) -> _Verdict:
        hellos, elsewhere = self._hear_all_arrive(deadline)
        arrived = {r: h for r, h in hellos.items() if h is not None and h.state == "arrived"}
        if elsewhere:
            verdict = self._two_names({**dict.fromkeys(arrived, self._name), **elsewhere})
            # Late ranks need not wait either.
            self._hellos.leave("declined", RendezvousError(verdict.problem))
        elif len(arrived) < len(self._ranks):
            left = tuple(rank for rank in self._ranks if rank not in arrived)
            missing = self._hellos.missing(hellos) or left
            problem = self._hellos.absence(missing, hellos)
            hopeless = any(self._hellos.has_declined(hellos[rank]) for rank in missing)
            self._hellos.catch_up(hellos.values())
            verdict = _Verdict(attempt=self._mine.attempt, problem=problem, missing=missing)
            if hopeless:
                # Late ranks need not wait either.
                self._hellos.say(missing=missing)
                self._hellos.leave("declined", RendezvousError(verdict.problem))
        elif differences := differences_in(arrived):
            verdict = self._mismatch(differences)
        else:
            highest = max(hello.generation for hello in arrived.values())
            attempt = max(hello.attempt for hello in arrived.values())
            verdict = _Verdict(secrets.token_hex(8), highest, attempt)
            if self._mine.leftover or (before and before.state != "closed"):
                # All ranks have come back, so no rank is in an earlier meeting.
                self._forget([*self._mine.leftover, "verdict"])
                self._hellos.say(leftover=[])
        told = [f"verdict/{hello.nonce}" for rank, hello in arrived.items() if rank != self._rank]
        self._store.multi_set(dict.fromkeys(told, json.dumps(vars(verdict))))
        return verdict

    def _hear_all_arrive(self, deadline: float) -> tuple[dict[int, Hello | None], dict[int, str]]:
        """Wait for all hellos. Return rank -> last hello, and rank -> other name.

        The second has the ranks that wait for this one under another name.
        """
        arrivals = _Arrivals(self._store, self._hellos, self._ranks)
        elsewhere: dict[int, str] = {}

        def all_here_or_hopeless() -> bool:
            nonlocal elsewhere
            waiting = arrivals.look()
            if waiting:
                elsewhere = self._look_around(waiting)
                waiting = arrivals.look_again(waiting)
            return (
                not waiting
                or bool(elsewhere)
                or any(self._hellos.has_declined(arrivals.hellos[rank]) for rank in waiting)
            )

        if not self._until(all_here_or_hopeless, deadline):
            arrivals.look_at_all()
        return arrivals.hellos, elsewhere

    def _follow(self, deadline: float) -> _Verdict:
        leader, key = self._ranks[0], f"verdict/{self._mine.nonce}"
        answer: bytes | None = None
        look_again = time.monotonic() + PAUSE

        def answered_or_hopeless() -> bool:
            nonlocal answer, look_again
            answer = self._store.peek(key)
            if answer is not None:
                return True
            if elsewhere := self._look_around([leader]):
                self._two_names({self._rank: self._name, **elsewhere}).check()
            if time.monotonic() < look_again:  # all ranks read the leader's hello: not too often
                return False
            look_again = time.monotonic() + _LEADER_CHECK_INTERVAL
            hello = self._hellos.of(leader)
            self._hellos.refuse_if_behind(leader, hello)
            return self._hellos.has_declined(hello)

        self._until(answered_or_hopeless, deadline + GRACE)
        answer = answer or self._store.peek(key)
        self._said.add(key)
        if answer is None:
            raise self._unanswered()
        return _Verdict(**json.loads(answer))

    def _unanswered(self) -> RendezvousError:
        """Return the error that the leader has not answered, and the ranks to blame.

        Ranks that have left gave up for the same reason, so they are not blamed. With very many
        ranks, only the leader reads all hellos.
        """
        leader, many = self._ranks[0], len(self._ranks) > MANY
        hellos = self._hellos.of_all([leader] if many else self._ranks)
        missing = self._hellos.missing(hellos) or (() if many else (leader,))
        hellos |= self._hellos.of_all([rank for rank in missing if rank not in hellos])
        self._hellos.catch_up(hellos.values())
        if missing:
            return RendezvousError(self._hellos.absence(missing, hellos), missing)
        return RendezvousError(self._hellos.no_word(leader, hellos[leader]))

    def _look_around(self, awaited: Sequence[int]) -> dict[int, str]:
        """At intervals, return rank -> the other name under which it waits for this rank.

        Raises:
            RendezvousError: another process has taken this rank's number.
        """
        if time.monotonic() < self._look_again:
            return {}
        self._look_again = time.monotonic() + _CHECK_INTERVAL
        if (twin := self._hellos.twin()) is not None:
            raise twin
        return self._waiting.elsewhere(awaited)

    def _two_names(self, names: Mapping[int, str]) -> _Verdict:
        return self._mismatch({"name": dict(sorted(names.items()))})

    def _mismatch(self, differences: Mapping[str, Mapping[int, str]]) -> _Verdict:
        said = {name: by_word(values) for name, values in differences.items()}
        return _Verdict(
            problem=text_of(self._name, differences, self._hellos.names), differences=said
        )


class _Arrivals:
    """The ranks that have arrived, as the leader sees them.

    With few ranks, the leader reads each hello. With more than ``LARGE``, it reads them in batches,
    and again when a rank has left.

    Attributes:
        hellos: rank -> its last hello.
    """

    def __init__(self, store: Store, said: Hellos, ranks: Sequence[int]) -> None:
        self.hellos: dict[int, Hello | None] = dict.fromkeys(ranks)
        self._store, self._said, self._ranks = store, said, ranks
        self._large = len(ranks) > LARGE
        self._changes: bytes | None = None
        self._unseen, self._waiting = batches(ranks), list(ranks)

    def look(self) -> list[int]:
        """Check the ranks that have not arrived. Return those still missing."""
        if not self._large:
            # An early rank may have given up by the time that the last one arrives.
            self._waiting = self.look_at(self._waiting) or self.look_at(self._ranks)
            return self._waiting
        if self._has_changed():
            self._unseen = batches(self._ranks)
            return self.look_at(self._ranks)
        while self._unseen and self._all_here(self._unseen[0]):
            self._unseen.pop(0)
        return [rank for batch in self._unseen for rank in batch]

    def look_again(self, waiting: list[int]) -> list[int]:
        """With few ranks, check all again if a rank has left. Return the missing ranks."""
        if not self._large and self._has_changed():
            waiting = self._waiting = self.look_at(self._ranks)
        return waiting

    def look_at_all(self) -> None:
        """In a large job, read every hello, as the deadline has passed."""
        if self._large:
            self.look_at(self._ranks)

    def look_at(self, ranks: Sequence[int]) -> list[int]:
        """Read the hellos of these ranks. Return the ranks that have not arrived."""
        for rank, hello in self._said.of_all(ranks).items():
            self.hellos[rank] = hello
            self._said.refuse_if_behind(rank, hello)
            if hello and self._has_its_verdict(hello):
                self.hellos[rank] = replace(hello, state="left")
        return [r for r in ranks if (h := self.hellos[r]) is None or h.state != "arrived"]

    def _all_here(self, ranks: Sequence[int]) -> bool:
        return self._store.check([f"hello/{rank}" for rank in ranks]) and not self.look_at(ranks)

    def _has_changed(self) -> bool:
        before, self._changes = self._changes, self._store.peek(CHANGES)
        return self._changes != before

    def _has_its_verdict(self, hello: Hello) -> bool:
        """True if the hello is of a failed attempt, whose verdict the rank has yet to read."""
        later = hello.attempt != self._said.mine.attempt
        return later and self._store.check([f"verdict/{hello.nonce}"])
