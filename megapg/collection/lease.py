"""The word of whoever owns a collection's groups on whether they may still be used."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megapg.collection.membership import ProcessGroup
from megapg.errors import ForeignGroupError, StaleGroupError

if TYPE_CHECKING:
    from megapg.collection import ProcessGroupCollection


class LeaseState(enum.Enum):
    """What the owner of a collection's groups says about them."""

    LIVE = "live"
    SUSPENDED = "suspended"
    CLOSED = "closed"
    FAILED = "failed"


LIVE = LeaseState.LIVE  # an enum's members cost more to reach than a name
# state -> what has happened, and what to do now.
_WORDS = {
    LeaseState.SUSPENDED: ("were suspended", "Call resume() first."),
    LeaseState.CLOSED: (
        "were closed",
        "Use them inside the session, or take `session.groups` from an open one; "
        "`session.rebind(...)` puts those of a resumed session into a model.",
    ),
    LeaseState.FAILED: ("were lost", "Close the session, and open another one."),
}


@dataclass
class Lease:
    """The owner's word on whether the groups may still be used. Only the owner changes it.

    Attributes:
        owner: the session, for messages.
        generation: how often the owner's name was opened in this job, from 1.
        state: live; suspended, and the same groups will work again; closed, and they never will;
            failed, and they were aborted.
        since: where and when the state last changed, for messages.
        pid: the process that the groups live in.
        timeout: seconds that the owner waits for other ranks; None where it does not say.
        scratch: what users of the groups keep as long as the owner does, by name.
        beside: groups that Megatron's own functions made while its globals showed these. They stay
            when the owner makes its groups anew, and end when it closes.
        before_beside_end: called when the owner closes, to add to ``beside`` the groups that were
            made while the owner had none.
        before_end: called when the owner wants to close the groups, which still work, with the
            error that it closes for, if any; what they raise is raised once the groups are closed.
        at_end: called when the owner is about to close the groups, or has lost them.
        at_succession: called after the end, if the owner makes the groups of the same layout anew,
            with the new collection (under a lease of its own).
    """

    owner: str
    generation: int = 1
    state: LeaseState = LeaseState.LIVE
    since: str = ""
    pid: int = dataclasses.field(default_factory=os.getpid)
    timeout: float | None = None
    scratch: dict[str, object] = dataclasses.field(default_factory=dict, repr=False)
    beside: list[ProcessGroup] = dataclasses.field(default_factory=list, repr=False)
    before_beside_end: list[Callable[[], None]] = dataclasses.field(
        default_factory=list, repr=False
    )
    before_end: list[Callable[[BaseException | None], None]] = dataclasses.field(
        default_factory=list, repr=False
    )
    at_end: list[Callable[[], None]] = dataclasses.field(default_factory=list, repr=False)
    at_succession: list[Callable[[ProcessGroupCollection], None]] = dataclasses.field(
        default_factory=list, repr=False
    )

    def wind_up(self, error: BaseException | None, problems: list[BaseException]) -> None:
        """For the owner, about to close the groups: let their users finish.

        What they raised is added to ``problems`` and kept nowhere else: a traceback holds frames.
        """
        for finish in tuple(self.before_end):
            try:
                finish(error or next(iter(problems), None))
            except BaseException as problem:  # Ctrl-C too: the groups are closed all the same
                problems.append(problem)

    def end(self, since: str, state: LeaseState = LeaseState.CLOSED) -> None:
        """For the owner, about to close the groups: nobody may use them from now on.

        Args:
            since: where and when.
            state: closed; or failed, if the groups are lost.
        """
        self.scratch.clear()
        self.state, self.since = state, since
        if problems := _told(self.at_end):
            raise problems[0]

    def suspend(self, since: str) -> None:
        """For the owner: nobody may use the groups until :meth:`resume`."""
        self.state, self.since = LeaseState.SUSPENDED, since

    def resume(self, since: str) -> None:
        """For the owner: the groups work again."""
        self.state, self.since = LeaseState.LIVE, since

    def succeed(self, successor: ProcessGroupCollection) -> list[Exception]:
        """For the owner, after :meth:`end`: these take the groups' place. What listeners raised."""
        successor.lease.beside, self.beside = self.beside, []
        self.since += f", and generation {successor.lease.generation} has taken their place"
        return _told(self.at_succession, successor)

    def check(self, purpose: str) -> None:
        """Raise unless the groups are live, in this process.

        Raises:
            StaleGroupError: the owner closed or suspended them.
            ForeignGroupError: they live in the process that this one was forked from.
        """
        if self.pid != os.getpid():
            raise ForeignGroupError(
                f"{purpose}: the process groups of {self.owner} live in process {self.pid}, and "
                f"this is process {os.getpid()}, forked from it: sockets and streams don't "
                "survive that. Open a session in this process, or send it plain values "
                "(`pg.describe()`)."
            )
        if self.state is not LIVE:
            happened, what_now = _WORDS[self.state]
            raise StaleGroupError(
                f"{purpose}: the process groups of {self.owner} (generation {self.generation}) "
                f"{happened} {self.since}. {what_now}"
            )


def _told(listeners: Sequence[Callable[..., None]], *news: object) -> list[Exception]:
    """Tell every listener, whatever the others do; what they raised."""
    problems = []
    for tell in tuple(listeners):
        try:
            tell(*news)
        except Exception as problem:
            problems.append(problem)
    return problems
