"""The lease of a collection: its owner states whether the groups may be used."""

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
    """The state of the groups, as their owner sets it."""

    LIVE = "live"
    SUSPENDED = "suspended"
    CLOSED = "closed"
    FAILED = "failed"


LIVE = LeaseState.LIVE  # a global is faster than an enum's attribute
# state -> (what happened, what to do).
_STATES = {
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
    """States whether the groups may be used. Only the owner changes it.

    Attributes:
        owner: title of the owner, for messages: a session, adopted groups, or a function.
        generation: how often the owner's name was opened in this job, from 1.
        state: live; suspended, and the same groups will work again; closed, and they never will;
            failed, and they were aborted.
        since: where and when the state last changed, for messages.
        pid: the process in which the groups live.
        timeout: seconds that the owner waits for other ranks; None if it has no such timeout.
        scratch: name -> data that users of the groups keep until the lease ends.
        extra_groups: groups that Megatron's own functions made while its globals showed this
            collection. They stay when the owner re-creates its groups, and end when it closes.
        find_extra_groups: called when the owner closes, after the other two, to add groups to
            ``extra_groups`` that were made while the owner's groups were suspended.
        before_end: called before the owner closes the groups, while they still work, with the error
            that it closes for, if any. Their exceptions are raised after the groups are closed.
        collections: called at the end, after ``at_end``; each makes the fields of one collection
            raise.
        at_end: called before the owner closes the groups, or after it has lost them.
        at_succession: called after the end with the new collection (which has its own lease), if
            the owner re-creates the groups of the same layout.
    """

    owner: str
    generation: int = 1
    state: LeaseState = LeaseState.LIVE
    since: str = ""
    pid: int = dataclasses.field(default_factory=os.getpid)
    timeout: float | None = None
    scratch: dict[str, object] = dataclasses.field(default_factory=dict, repr=False)
    collections: list[Callable[[], None]] = dataclasses.field(default_factory=list, repr=False)
    extra_groups: list[ProcessGroup] = dataclasses.field(default_factory=list, repr=False)
    find_extra_groups: list[Callable[[], None]] = dataclasses.field(
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
        """Call ``before_end``, so that users of the groups can finish. For the owner.

        Exceptions are added to ``problems`` and kept nowhere else, because a traceback holds
        frames.
        """
        for finish in tuple(self.before_end):
            try:
                finish(error or next(iter(problems), None))
            except BaseException as problem:  # Ctrl-C too: the groups must still be closed
                problems.append(problem)

    def end(self, since: str, state: LeaseState = LeaseState.CLOSED) -> None:
        """End the lease: the groups may no longer be used. For the owner, before it closes them.

        Args:
            since: where and when, for messages.
            state: closed; or failed, if the groups are lost.
        """
        self.scratch.clear()
        self.state, self.since = state, since
        if problems := [*_call_all(self.at_end), *_call_all(self.collections)]:
            raise problems[0]

    def suspend(self, since: str) -> None:
        """Forbid use of the groups until :meth:`resume`. For the owner."""
        self.state, self.since = LeaseState.SUSPENDED, since

    def resume(self, since: str) -> None:
        """Allow use of the groups again. For the owner."""
        self.state, self.since = LeaseState.LIVE, since

    def succeed(self, successor: ProcessGroupCollection) -> list[Exception]:
        """Call ``at_succession`` with the new collection, after :meth:`end`. Return exceptions."""
        successor.lease.extra_groups, self.extra_groups = self.extra_groups, []
        self.since += f", and generation {successor.lease.generation} has taken their place"
        return _call_all(self.at_succession, successor)

    def check(self, purpose: str) -> None:
        """Raise unless the groups are live, in this process.

        Raises:
            StaleGroupError: the owner closed or suspended the groups.
            ForeignGroupError: the groups live in the process from which this one was forked.
        """
        if self.pid != os.getpid():
            raise ForeignGroupError(
                f"{purpose}: the process groups of {self.owner} live in process {self.pid}, and "
                f"this is process {os.getpid()}, forked from it: sockets and streams don't "
                "survive that. Open a session in this process, or send it plain values "
                "(`pg.describe()`)."
            )
        if self.state is not LIVE:
            happened, what_now = _STATES[self.state]
            raise StaleGroupError(
                f"{purpose}: the process groups of {self.owner} (generation {self.generation}) "
                f"{happened} {self.since}. {what_now}"
            )


def _call_all(listeners: Sequence[Callable[..., None]], *news: object) -> list[Exception]:
    """Call every listener, also after exceptions. Return the exceptions."""
    problems = []
    for tell in tuple(listeners):
        try:
            tell(*news)
        except Exception as problem:
            problems.append(problem)
    return problems
