"""The owner of the process groups of one layout.

:func:`~megapg.ownership.opening.session` opens one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial

from typing_extensions import override

from megapg.collection import (
    OPTIONAL_FIELDS,
    Lease,
    LeaseState,
    Membership,
    ProcessGroup,
    ProcessGroupCollection,
)
from megapg.communicators import create as communicators_of_torch
from megapg.communicators.addresses import AddressBook
from megapg.communicators.backends import backend_for
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import (
    Communicator,
    Recipe,
    communicators,
    created_fields,
    families,
)
from megapg.communicators.world import World
from megapg.errors import SessionError
from megapg.launch.signals import NoSignals
from megapg.layout import FIELDS, ParallelLayout
from megapg.ownership import suspension
from megapg.ownership.owner import Owner
from megapg.ownership.steps import Steps
from megapg.ownership.suspension import How, OffloadReport
from megapg.ownership.validate import settings
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.joint_work import OthersFailedError
from megapg.rendezvous.rendezvous import Rendezvous

logger = logging.getLogger(__name__)


class Session(Owner):
    """The groups of one layout, made by :func:`~megapg.ownership.opening.session`.

    Attributes:
        name: the name of the session.
        layout: the layout whose groups these are.
        generation: how often this name was opened in this job, the same number on every rank.
            :meth:`resume` increments it if it creates the groups again.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        world: World,
        recipe: Recipe,
        *,
        name: str,
        timeout: float,
        collective_timeout: timedelta,
        make_world: Callable[[], World] | None = None,
        signals: NoSignals | None = None,
        title: str = "",
    ) -> None:
        super().__init__(title or f"session {name!r}", world, timeout, signals or NoSignals())
        self.name, self.layout = name, layout
        self._make_world, self._recipe = make_world, recipe
        self._collective_timeout = collective_timeout
        try:
            self._open()
            self._opened()
            self._log()
        except BaseException as error:  # the caller has nothing to close yet
            self._close(error)
            raise

    def _log(self) -> None:
        logger.info("%s", self)
        if self._world.rank == self.layout.ranks[0]:
            logger.info(
                "collectives time out after %s on this session's groups%s and after %s on WORLD; "
                "start-up and close after megapg's own %g s",
                self._collective_timeout,
                "".join(f" ({field}: {each})" for field, each in self._recipe.timeouts.items()),
                self._world.timeout,
                self._timeout,
            )

    def _open(self) -> None:
        """Meet the other ranks, and create the groups of a new generation with them."""
        world, timeout, store = self._world, self._timeout, self._world.store
        # Share one thread for all these calls; otherwise each call starts its own.
        with store.until(time.monotonic() + timeout, self._title):
            coordinator: Coordinator | None = None
            generation = max(world.generation, self.generation + 1)
            if not backend_for(self._recipe.backend).alone:
                coordinator = Coordinator(
                    store, self.name, world.rank, self.layout.ranks, hosts=world.hosts
                )
                said = settings(self.layout, self._recipe, self._collective_timeout)
                agreement = coordinator.meet(said, timeout=timeout, at_least=generation)
                store, generation = agreement.store, agreement.generation
            made: dict[Communicator, ProcessGroup] = {}
            book = AddressBook(
                store, max((self._collective_timeout, *self._recipe.timeouts.values()))
            )
            try:
                made = communicators_of_torch.make(
                    world,
                    communicators(self.layout, self._recipe, world.rank),
                    of_all=partial(families, self.layout, self._recipe),
                    store_for=book.store_for,
                    prefix=communicators_of_torch.prefix_of(self.name, generation),
                    timeout=self._collective_timeout,
                    within=timeout,
                )
                lease = Lease(owner=self._title, generation=generation, timeout=timeout)
                groups = _assembled(self.layout, self._recipe, made, world, lease)
                if coordinator is not None:
                    coordinator.confirm(None, timeout=timeout, telling=book.mine(world.rank))
                with store.until(time.monotonic() + timeout, self._title):
                    book.fill_in(world.rank)
            except BaseException as error:
                try:
                    communicators_of_torch.end(made.items(), abort=True)
                finally:
                    if coordinator is not None:
                        coordinator.give_up(error, timeout=timeout)
                raise
        self.generation, self._coordinator, self._lease = generation, coordinator, lease
        self._made, self._state = list(made.items()), LeaseState.LIVE
        self._groups = groups
        self._given.add(self._made, groups, world.group)

    # -- use ---------------------------------------------------------------------------------

    @property
    def owns_world(self) -> bool:
        """True if this session made torch's WORLD and will destroy it when it closes."""
        return self._world.ours

    def describe(
        self,
    ) -> dict[str, str | int | float | bool | dict[str, list[int]] | dict[str, float]]:
        """Return plain data for logs and JSON: state, timeouts, and each communicator's ranks.

        Timeouts are in seconds.
        """
        return {
            "name": self.name,
            "generation": self.generation,
            "layout": self.layout.fingerprint(),
            "state": self._state.value,
            "world_size": self._world.size,
            "owns_world": self.owns_world,
            "backend": self._world.backend,
            "start_up_timeout": self._timeout,
            "world_timeout": self._world.timeout.total_seconds(),
            "collective_timeouts": {
                "+".join(c.fields): (c.timeout or self._collective_timeout).total_seconds()
                for c, _ in self._made
            },
            "communicators": {"+".join(c.fields): list(c.ranks) for c, _ in self._made},
        }

    @override
    def __repr__(self) -> str:
        name = f"Session {self.name!r} generation {self.generation} {self._state.value}"
        if self._state is not LeaseState.LIVE:
            way = f" by {self._way!r}" if self._way is not None else ""
            return f"<{name}{way} {self._lease.since}>"
        world = "its own WORLD" if self.owns_world else "the caller's WORLD"
        fields = sum(len(communicator.fields) for communicator, _ in self._made)
        return (
            f"<{name}: {len(self._made)} communicators for {fields} fields, "
            f"rank {self._world.rank} of {self._world.size} on {world} "
            f"({self._world.backend})>"
        )

    # -- suspend and resume ------------------------------------------------------------------

    def suspend(self, how: How | None = None) -> OffloadReport:
        """Release the memory of the communicators until :meth:`resume`. Every rank calls it.

        No collective may be running. The ranks first agree on one way:

        * ``"suspend"``: NCCL releases its device memory. Every handle stays valid, and
          :meth:`resume` keeps the collection and generation. A WORLD that the session made is
          suspended as well.
        * ``"recreate"``: the groups are destroyed. :meth:`resume` creates them again, in a new
          collection and generation; :meth:`rebind` puts them into models.
        * ``"recreate world"``: as ``"recreate"``, and WORLD as well. The session must have made
          WORLD, and no other group may be on it.

        Then the callbacks of :meth:`before_release` run, the device finishes its work, and the
        memory is released. With ``"recreate"``, memory is released once no object holds the old
        groups.

        Args:
            how: the way. Default: ``"suspend"`` if every rank can, else ``"recreate"``.

        Returns:
            The effect on this rank.

        Raises:
            SessionError: the session is not live.
            UnsupportedOffloadError: a rank can't take this way, or the ranks asked for different
                ways, or a CUDA graph is being captured. Every rank gets the error, and the session
                stays live.
            OffloadError: a step failed, here or on another rank, or a rank did not arrive within
                ``timeout``. The session has failed on every rank: its groups were aborted, and only
                :meth:`close` works.
            CheckpointSaveError: a background save failed, and its error was not yet raised.
                Suspending waits for saves before it destroys groups. The session is suspended all
                the same.
        """
        return self._suspend(how, self._cannot)

    def resume(self) -> OffloadReport:
        """Make the groups work again after :meth:`suspend`. Every rank calls it.

        Then the callbacks of :meth:`on_resume` run. After *recreate*, the new collection is in
        ``parallel_state`` by then, if the old one was published there.

        Returns:
            The effect on this rank.

        Raises:
            SessionError: the session is not suspended.
            OffloadError: as in :meth:`suspend`.
        """
        return self._resume()

    @property
    @override
    def _ranks(self) -> Sequence[int]:
        return self.layout.ranks

    @override
    def _in_the_way(self) -> str:
        if self._way == "recreate" and not self._world.current:
            return "WORLD, on which its groups were, is no more"
        return ""

    @override
    def _cannot(self) -> dict[How, str]:
        if reason := suspension.capturing():
            return dict.fromkeys(suspension.WAYS, reason)
        return {
            "suspend": suspension.refusal(self._concerned("suspend")),
            "recreate": "",
            "recreate world": self._why_world_stays(),
        }

    def _why_world_stays(self) -> str:
        if self._make_world is None or not self._world.ours:
            return "WORLD is not the session's to destroy"
        if len(self.layout.ranks) < self._world.size:
            return "WORLD has ranks that are not in this session"
        bystanders = communicators_of_torch.bystanders(group for _, group in self._made)
        bystanders += [
            f"{each._title}, which is suspended" for each in self._dependents() if not each._made
        ]
        return f"others have groups on WORLD: {', '.join(bystanders[:8])}" if bystanders else ""

    @override
    def _concerned(self, way: How) -> list[tuple[Communicator, ProcessGroup]]:
        world = self._world.group
        if way == "recreate" or world is None or len(self.layout.ranks) < self._world.size:
            return self._made
        ranks, backend = tuple(range(self._world.size)), self._world.backend
        return [
            *self._made,
            (Communicator(("WORLD",), ranks, CommunicatorOptions(), backend), world),
        ]

    @override
    def _sends_without_batching(self) -> bool:
        return self.layout.vpp is not None

    @override
    def _world_of_ours(self) -> ProcessGroup | None:
        return self._world.group

    @override
    def _let_go(self, way: How, steps: Steps) -> None:
        with steps.attempted("destroy"):
            self._destroy(abort=False)
        self._compare(steps, "suspend(), after the release")
        with steps.timed("part"):
            if problems := self._part(None):
                raise OthersFailedError(problems)
        if way == "recreate world":
            with steps.timed("destroy WORLD"):
                self._world.close(abort=None, timeout=self._timeout)

    @override
    def _agree_to_resume(self, way: How) -> None:
        if way == "suspend":  # otherwise the ranks have disconnected
            self._exchange("resume()", "")

    @override
    def _make_anew(self, way: How, steps: Steps) -> None:
        if way == "recreate world":
            assert self._make_world is not None  # checked before the ranks agreed on this way
            with steps.timed("make WORLD"):
                before, self._world = self._world, self._make_world()
                if (self._world.rank, self._world.size) != (before.rank, before.size):
                    raise SessionError(
                        f"this was rank {before.rank} of {before.size} before suspend(), and is "
                        f"rank {self._world.rank} of {self._world.size} now. Leave the launcher's "
                        "environment variables as they are."
                    )
        with steps.timed("make groups"):
            self._world.check()
            self._open()

    @override
    def _expect(self, state: LeaseState, doing: str) -> None:
        if self._state is state:
            return
        how_it_is, what_now = {
            LeaseState.LIVE: ("is live", "Call suspend() first"),
            LeaseState.SUSPENDED: ("was suspended", "Call resume() first"),
            LeaseState.CLOSED: ("was closed", "Open a new one"),
            LeaseState.FAILED: ("has failed", "Close it, and open a new one"),
        }[self._state]
        since = "" if self._state is LeaseState.LIVE else f" {self._lease.since}"
        raise SessionError(
            f"{doing}: {self._title} (generation {self.generation}) {how_it_is}{since}. {what_now}."
        )

    # -- the end -----------------------------------------------------------------------------

    @override
    def close(self, error: BaseException | None = None) -> None:
        """Close the groups, and WORLD if this session made it. Closing twice does nothing.

        The ranks exchange their errors, and wait up to ``timeout`` seconds for late ranks. If no
        rank has an error, the groups are closed in order, otherwise aborted. Either way the
        collection's lease ends, and the session drops every reference to a group. gloo's threads
        and sockets close with the last reference anywhere (a model, an optimizer).

        If this session made WORLD, other owners on that WORLD are closed first, newest first. A
        warning in the log names them.

        Args:
            error: why the ranks can't close in order, such as a lost rank. Then this rank aborts
                its groups and waits for no other rank, as after an exception in a ``with`` block.

        Raises:
            RendezvousError: ranks did not arrive, or had an error; ``missing`` names them. The
                groups here were aborted all the same.
            TeardownError: some groups could not be closed; every one was attempted.
            CheckpointSaveError: a background save failed, and its error was not yet raised. Closing
                waits for saves. The groups are closed all the same.
            Exception: the error of a callback of :meth:`before_release`. The groups are closed all
                the same.
        """
        super().close(error)

    @override
    def _take_leave(self, error: BaseException | None) -> None:
        if self._state is LeaseState.SUSPENDED and self._way == "recreate":
            # The other ranks may be waiting in resume(). If they are not, each rank must count this
            # as an attempt, or late ranks would confuse the next attempt with this one.
            gone = error or SessionError("it has closed the session")
            Rendezvous(self._world.store, self.name, self.rank, self.layout.ranks).decline(gone)

    @override
    def _release(
        self, steps: Steps, news: Callable[[], None], abort: BaseException | None, alone: bool
    ) -> dict[int, str]:
        with steps.attempted("groups"):
            # NCCL's destroy waits for the other ranks of the node, its abort does not.
            self._destroy(abort=abort is not None or alone)
        news()
        problems: dict[int, str] = {}
        with steps.attempted("WORLD"):
            problems |= self._world.close(abort=abort, timeout=self._timeout, alone=alone)
        return problems


def _assembled(
    layout: ParallelLayout,
    recipe: Recipe,
    made: Mapping[Communicator, ProcessGroup],
    world: World,
    lease: Lease,
) -> ProcessGroupCollection:
    """Return the collection of a session. A field is None where Megatron expects None."""
    values: dict[str, ProcessGroup | Sequence[ProcessGroup] | None] = dict.fromkeys(OPTIONAL_FIELDS)
    members: dict[str, Membership] = {}
    serving = {field: each for each in made for field in each.fields}
    levels: list[ProcessGroup] = []
    extras: dict[str, ProcessGroup] = {}
    for field in created_fields(layout, recipe):
        communicator = serving.get(field)
        if communicator is None:
            continue
        members[field] = Membership(communicator.ranks.index(world.rank), communicator.ranks)
        if field.startswith("hcp."):
            levels.append(made[communicator])
        elif field not in FIELDS:
            extras[field] = made[communicator]
        else:
            values[field] = made[communicator]
    values["hcp"] = levels or None
    return ProcessGroupCollection(values, members, lease, layout, extras)
