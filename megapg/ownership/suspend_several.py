"""Suspend and resume several sessions at once: all of them or none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from megapg.collection import LeaseState
from megapg.communicators.backends import backend_for
from megapg.errors import SessionError, UnsupportedOffloadError
from megapg.launch.process import ranks_said
from megapg.ownership import suspension
from megapg.ownership.owner import Owner, raise_aside
from megapg.ownership.steps import Steps, together
from megapg.ownership.suspension import How, OffloadReport, Usage
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.rendezvous import Rendezvous

# The title alone is not unique: sessions on different ranks may share a name.
_Key: TypeAlias = tuple[str, tuple[int, ...]]


def suspend(*owners: Owner, how: How | None = None) -> tuple[OffloadReport, ...]:
    """Suspend several sessions, or leave all of them as they are. ::

        megapg.suspend(actor, critic)

    Every rank calls it with all of these sessions that it is in, in any order. A rank that is in
    only one session still calls this function, and not :meth:`~megapg.Session.suspend`. One of the
    sessions must have all the ranks of the others, for example a session over the whole WORLD. Each
    session is suspended as by :meth:`~megapg.Session.suspend`. Adopted groups can be among them.

    Args:
        owners: the sessions.
        how: ``"suspend"`` or ``"recreate"``, for all. Default, per session: ``"suspend"`` if every
            one of its ranks can, else ``"recreate"``.

    Returns:
        A report for each session, in the order of the arguments. Its ``seconds`` count all sessions
        together.

    Raises:
        SessionError: no session was given, or one twice; or no session has all the ranks.
        UnsupportedOffloadError: a session can't be suspended on some rank, or a rank left out one
            of its sessions. Every rank gets the error, and nothing was touched.
        RendezvousError: a rank did not arrive in time; or it left out the only session with all the
            ranks, and so waited for other ranks. Nothing was touched.
        OffloadError: a step failed for one session, here or on another rank. All sessions have
            failed on every rank, and can only be closed.
        CheckpointSaveError: as from :meth:`~megapg.Session.suspend`; all are suspended by then.
    """
    order = _in_order(owners, "suspend()")
    with _together(order, "suspend()") as (steps, assembly):
        with steps.timed("agree"):
            heard = assembly.hear(
                {
                    _key(o): suspension.wish(how, _unless(o, LeaseState.LIVE) or o._cannot())
                    for o in order
                }
            )
            ways = {key: suspension.agreed(key[0], said) for key, said in heard.items()}
        before = [Usage.of(o._concerned(ways[_key(o)])) for o in order]
        for owner in order:
            owner._make_ready(ways[_key(owner)], steps)
        with steps.attempted("finish"):
            suspension.synchronize()
        assembly.compare(steps, "suspend(), before the release")
        for owner in order:
            owner._give_back(ways[_key(owner)], steps)
        assembly.compare(steps, "suspend(), after the release")
    reports = {
        id(o): o._report("suspended", ways[_key(o)], usage, steps)
        for o, usage in zip(order, before, strict=True)
    }
    raise_aside(_titles(order), steps)
    return tuple(reports[id(o)] for o in owners)


def resume(*owners: Owner) -> tuple[OffloadReport, ...]:
    """Resume several sessions, or leave all of them suspended.

    Pass the sessions as for :func:`suspend`, in any order. They need not have been suspended by the
    same call.

    Returns:
        A report for each session, in the order of the arguments.

    Raises:
        SessionError: as from :func:`suspend`.
        UnsupportedOffloadError: a session can't be resumed on some rank, or is not suspended there,
            or a rank left out one of its sessions. Every rank gets the error, and all stay
            suspended.
        RendezvousError, OffloadError: as from :func:`suspend`.
    """
    order = _in_order(owners, "resume()")
    with _together(order, "resume()") as (steps, assembly):
        with steps.timed("agree"):
            obstacles = {_key(o): _obstacle(o) for o in order}
            for (title, _), said in assembly.hear(obstacles).items():
                if reasons := [f"rank {rank}: {text}" for rank, text in said.items() if text]:
                    raise UnsupportedOffloadError(
                        f"{title} can't be resumed. {'; '.join(reasons[:8])}. Nothing was touched."
                    )
        ways = [o._way or "suspend" for o in order]
        before = [Usage.of(o._concerned(way)) for o, way in zip(order, ways, strict=True)]
        for owner, way in zip(order, ways, strict=True):
            owner._take_back(way, steps)
        assembly.compare(steps, "resume(), the callbacks")
    reports = {
        id(o): o._report("resumed", way, usage, steps)
        for o, way, usage in zip(order, ways, before, strict=True)
    }
    return tuple(reports[id(o)] for o in owners)


def _in_order(owners: Sequence[Owner], doing: str) -> list[Owner]:
    """Sort the owners: most ranks first, then by title. The order is the same on all ranks."""
    if not owners:
        raise SessionError(
            f"{doing}: give the sessions, such as megapg.{doing[:-1]}actor, critic)."
        )
    if wrong := [each for each in owners if not isinstance(each, Owner)]:
        raise SessionError(f"{doing}: {wrong[0]!r} is no session.")
    if len({id(each) for each in owners}) < len(owners):
        raise SessionError(f"{doing}: give each session once.")
    if closed := [each for each in owners if each.closed]:
        raise SessionError(f"{doing}: {closed[0]!r}. Open a new one.")
    return sorted(owners, key=lambda each: (-len(each._ranks), each._title))


def _unless(owner: Owner, state: LeaseState) -> dict[How, str]:
    """Return way -> why it can't be taken; empty if the owner is in that state."""
    if owner.state is not state:
        return dict.fromkeys(suspension.WAYS, f"it is {owner.state.value}")
    if not owner._world.current:
        return dict.fromkeys(suspension.WAYS, "its WORLD was destroyed")
    return {}


def _obstacle(owner: Owner) -> str:
    if owner.state is not LeaseState.SUSPENDED:
        return f"it is {owner.state.value}"
    return owner._in_the_way()


def _key(owner: Owner) -> _Key:
    return owner._title, tuple(owner._ranks)


def _titles(owners: Sequence[Owner]) -> str:
    return " and ".join(each._title for each in owners)


def _meeting(widest: Owner) -> str:
    """Return the name under which the ranks meet. It lists ranks, as a rank may omit an owner."""
    return f"sessions of {ranks_said(widest._ranks)}"


class _Assembly:
    """The meeting of all ranks of several owners for one call.

    Args:
        owners: the owners on this rank. The first one has all the ranks.
        doing: the call.
    """

    def __init__(self, owners: Sequence[Owner], doing: str) -> None:
        self._owners, self._doing = owners, doing
        widest = owners[0]
        self._timeout, self._rank = widest._timeout, widest.rank
        self._name = _meeting(widest)
        self._coordinator: Coordinator | None = None
        apart = [each for each in owners if not {*each._ranks} <= {*widest._ranks}]
        if apart:
            error = SessionError(
                f"{doing} of {_titles(owners)}: none of them has all the ranks, since "
                f"{apart[0]._title} is on ranks that {widest._title} is not on. Give one more that "
                f"has, or call {doing} of each. Nothing was touched."
            )
            if not self._alone:  # the other ranks would wait for this one
                for each in owners:
                    name = _meeting(each)
                    Rendezvous(each._world.store, name, each.rank, each._ranks).decline(error)
            raise error

    @property
    def _alone(self) -> bool:
        return backend_for(self._owners[0]._world.backend).alone

    def meet(self) -> None:
        """Meet the other ranks. :meth:`part` must follow.

        Raises:
            RendezvousError: a rank did not arrive, or called something else.
        """
        if self._alone:
            return
        world = self._owners[0]._world
        self._coordinator = Coordinator(
            world.store, self._name, self._rank, self._owners[0]._ranks, hosts=world.hosts
        )
        self._coordinator.meet({"call": f"megapg.{self._doing}"}, timeout=self._timeout)
        self._coordinator.confirm(None, timeout=self._timeout)

    def part(self, error: BaseException | None) -> None:
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.part(error, timeout=self._timeout)

    def hear(self, said: Mapping[_Key, str]) -> dict[_Key, dict[int, str]]:
        """Exchange texts. Return owner -> rank -> text, for every owner that any rank passed.

        Raises:
            UnsupportedOffloadError: a rank left out an owner that it is in.
        """
        mine = [(*_key(o), o._timeout, said[_key(o)]) for o in self._owners]
        heard: dict[_Key, dict[int, str]] = {}
        timeouts: dict[_Key, float] = {}
        for rank, word in self._exchange(self._doing, json.dumps(mine)).items():
            for title, ranks, timeout, text in json.loads(word):
                key = title, tuple(ranks)
                heard.setdefault(key, {})[rank] = text
                timeouts[key] = max(timeout, timeouts.get(key, 0.0))
        lines = [
            f"rank {rank} left out {title}"
            for (title, ranks), by_rank in sorted(heard.items())
            for rank in ranks
            if rank not in by_rank
        ]
        if lines:
            raise UnsupportedOffloadError(
                f"{self._doing}: {'; '.join(lines[:8])}, which it is in. Give every rank all that "
                "it is in. Nothing was touched."
            )
        # A rank that is in one owner only waits while other ranks handle theirs.
        self._timeout = sum(timeouts.values())
        return dict(sorted(heard.items()))

    def compare(self, steps: Steps, topic: str) -> None:
        """Raise unless every step so far has succeeded on every rank."""
        with steps.timed("agree"):
            heard = self._exchange(topic, steps.report())
        steps.compare(heard, self._rank)

    def _exchange(self, topic: str, said: str) -> Mapping[int, str]:
        if self._coordinator is None:  # no other ranks
            return {self._rank: said}
        return self._coordinator.exchange(topic, said, timeout=self._timeout)


@contextlib.contextmanager
def _together(owners: Sequence[Owner], doing: str) -> Iterator[tuple[Steps, _Assembly]]:
    """Context of steps that all ranks of these owners take together: an error ends all owners."""
    assembly = _Assembly(owners, doing)

    def lose(said: str) -> None:
        assembly.part(SessionError(f"{doing} failed: {said}"))
        steps = Steps()
        for owner in owners:
            with steps.attempted("abort"):
                owner._lose(doing, said)
        if steps.problems:
            raise steps.take()[0]

    assembly.meet()
    with together(_titles(owners), doing, owners[0].rank, lose) as steps:
        try:
            yield steps, assembly
        except UnsupportedOffloadError:
            assembly.part(None)
            raise
        assembly.part(None)
