"""The owner of process groups: :func:`session` opens them, :class:`Session` closes them.

A session makes every group of one layout, hands them out as a frozen collection, and is the only
thing that suspends and ends them. What it opened it closes; what was open before it (a WORLD that
the caller initialised, groups that others made) is left as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypedDict, Unpack

import torch.distributed as dist

from megapg.collection import (
    Lease,
    LeaseState,
    ProcessGroup,
)
from megapg.comms import groups as communicators_of_torch
from megapg.comms import offload
from megapg.comms.addresses import AddressBook
from megapg.comms.backends import backend_for
from megapg.comms.collect import collect
from megapg.comms.council import Council
from megapg.comms.offload import How, OffloadReport
from megapg.comms.options import CommunicatorOptions
from megapg.comms.plan import (
    Communicator,
    Recipe,
    communicators,
    every_communicator,
)
from megapg.comms.requests import check_kinds, check_recipe, check_waits, settings
from megapg.comms.rollcall import RollCall
from megapg.comms.steps import Steps
from megapg.comms.teamwork import OthersFailedError
from megapg.comms.world import World, adopt, found, imagine
from megapg.errors import (
    RendezvousError,
    SessionError,
)
from megapg.launch import Launch
from megapg.layout import EmbeddingRanks, ParallelLayout
from megapg.ownership import Owner
from megapg.signals import NoSignals, SignalExit, listening

logger = logging.getLogger(__name__)


class LayoutSizes(TypedDict, total=False):
    """The arguments of :class:`~megapg.layout.ParallelLayout`, except for the world's size."""

    tp: int
    pp: int
    cp: int
    ep: int
    expt_tp: int
    order: str
    optimizer_instances: int
    hierarchical_cp: tuple[int, ...]
    embedding_ranks: EmbeddingRanks
    position_embedding_ranks: EmbeddingRanks
    vpp: int | None
    hybrid_cp: bool
    ranks: Sequence[int]


def session(
    layout: ParallelLayout | None = None,
    *,
    name: str = "default",
    timeout: float = 60.0,
    collective_timeout: timedelta | None = None,
    backend: str | None = None,
    options: Mapping[str, CommunicatorOptions] | None = None,
    dedicated: Collection[str] = (),
    all_gather_groups: bool = False,
    gloo: Collection[str] = (),
    handle_signals: bool = False,
    launch: Launch | None = None,
    network: str | Sequence[str] | None = None,
    **sizes: Unpack[LayoutSizes],
) -> Session:
    """Open the process groups of one layout. Every rank of it calls this, with equal values.

    Starts torch.distributed only if nobody has: from what torchrun, SLURM's ``srun`` or Open MPI
    put into the environment (see :func:`megapg.launch.detect`), or alone. Use it as a context
    manager, or call :meth:`Session.close`.

    Args:
        layout: the layout; or give its sizes (``tp=2, pp=2``) and it spans WORLD.
        name: tells apart the sessions that are open at the same time in one process.
        timeout: seconds to wait for the other ranks, at each of the few points where they meet:
            here, in :meth:`Session.close`, and in :meth:`Session.suspend` and
            :meth:`Session.resume`; megapg's own waits only.
        collective_timeout: of collectives on the groups (and on WORLD, if the session makes it);
            WORLD's own unless given.
        backend: ``"gloo"``, ``"nccl"`` or a device map such as ``"cpu:gloo,cuda:nccl"``; WORLD's
            unless given, and for a new WORLD NCCL where CUDA is available.
        options: field -> NCCL settings of its communicator.
        dedicated: fields that share their communicator with no other field.
        all_gather_groups: also make ``dp_cp_ag`` and ``expt_dp_ag``, twins of ``dp_cp`` and
            ``expt_dp`` on communicators of their own, so that all-gathers overlap reductions.
        gloo: fields that also get a companion on gloo, for objects and tensors on the CPU:
            ``gloo=("dp_cp",)`` makes ``groups.extras["gloo.dp_cp"]``.
        handle_signals: SIGTERM and Ctrl-C close the session in good order: they raise
            :class:`~megapg.signals.SignalExit` (left alone, it ends the process with status 143)
            and ``KeyboardInterrupt`` in the main thread, where the session must be opened. Handlers
            that were there before are called first, and are put back at the end. A rank that is
            stuck inside a collective tells the others and ends within half a minute all the same.
        launch: who this process is and where the ranks meet, if the environment is not to say so;
            only where torch.distributed is not initialised.
        network: the interfaces to talk over: ``"auto"`` for InfiniBand or RoCE where there is some,
            or names such as ``"ib0"``; NCCL and gloo choose unless given. Variables that the user
            has set are kept; see :func:`megapg.launch.choose_network`. Only where torch.distributed
            is not initialised.
        **sizes: see :class:`~megapg.layout.ParallelLayout`.

    Raises:
        LaunchError: the environment does not say who this process is, or contradicts itself.
        LayoutError: the sizes do not fit WORLD.
        SessionError: a session of that name is open in this process; or ``handle_signals`` outside
            the main thread.
        RendezvousError: a rank did not come in time (its ``missing`` names it), or came with
            another layout (:class:`~megapg.errors.LayoutMismatchError`). Every rank that did come
            gets the error, and nothing stays open.
    """
    check_waits(timeout, collective_timeout)
    if not dist.is_available():
        raise SessionError(
            "this torch was built without torch.distributed, so there are no process groups."
        )
    if layout is not None and sizes:
        raise SessionError(f"give a layout, or the sizes {', '.join(sizes)}, not both.")
    if launch is not None and dist.is_initialized():
        raise SessionError(
            "launch= says how to make WORLD, but torch.distributed is initialised already. Leave "
            "launch= out to use that WORLD, or open the session first."
        )
    if network is not None and dist.is_initialized():
        raise SessionError(
            "network= says how to make WORLD, but torch.distributed is initialised already. Leave "
            "network= out, open the session first, or initialise torch.distributed inside of "
            "megapg.launch.choose_network(...).applied()."
        )
    make_world = partial(
        found,
        backend=backend,
        timeout=timeout,
        collective_timeout=collective_timeout,
        launch=launch,
        network=network,
    )
    with listening(handle_signals) as signals:
        if dist.is_initialized():
            world = adopt()
            if backend is not None:
                world.backend = backend
        else:
            world = make_world()
        try:
            check_kinds(name, options or {}, dedicated, gloo, sizes, LayoutSizes.__annotations__)
            if layout is None:
                layout = ParallelLayout(
                    world_size=len(sizes.get("ranks") or range(world.size)), **sizes
                )
            recipe = Recipe(
                backend=world.backend,
                lanes=backend_for(world.backend).lanes,
                options=dict(options or {}),
                dedicated=frozenset(dedicated),
                all_gather_groups=all_gather_groups,
                gloo=frozenset(gloo),
            )
            check_recipe(recipe, world, layout)
        except BaseException as error:
            RollCall(world.store, str(name), world.rank, range(world.size)).decline(error)
            world.close(abort=True, timeout=0)
            raise
        try:
            return Session(
                layout,
                world,
                recipe,
                name=name,
                timeout=timeout,
                collective_timeout=collective_timeout or world.timeout,
                make_world=make_world,
                signals=signals,
            )
        except BaseException:
            world.close(abort=True, timeout=0)
            raise


def pretend(layout: ParallelLayout, rank: int, *, gloo: Collection[str] = ()) -> Session:
    """A session on torch's fake backend: one process plays ``rank``, nothing is communicated.

    Raises:
        SessionError: torch.distributed is initialised already.
    """
    world = imagine(rank, max(layout.ranks) + 1)
    recipe = Recipe("fake", {}, {}, frozenset(), all_gather_groups=False, gloo=frozenset(gloo))
    try:
        check_recipe(recipe, world, layout)
        return Session(
            layout, world, recipe, name="pretend", timeout=0, collective_timeout=world.timeout
        )
    except BaseException:
        world.close(abort=True, timeout=0)
        raise


class Session(Owner):
    """The groups of one layout, made by :func:`session`.

    Attributes:
        name: as given.
        layout: the layout whose groups these are.
        generation: how often this name was opened in this job, the same number on every rank;
            :meth:`resume` counts where it makes the groups anew.
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
    ) -> None:
        super().__init__(f"session {name!r}", world, timeout, signals or NoSignals())
        self.name, self.layout = name, layout
        self._make_world, self._recipe = make_world, recipe
        self._collective_timeout = collective_timeout
        self._open()
        self._signals.when_stuck(self._leave_without_the_main_thread)
        logger.info("%s", self)
        if world.rank == layout.ranks[0]:
            logger.info(
                "collectives time out after %s on this session's groups and after %s on WORLD; "
                "start-up and close after megapg's own %g s",
                collective_timeout,
                world.timeout,
                timeout,
            )

    def _open(self) -> None:
        """Meet the other ranks, and make the groups of a new generation together with them."""
        world, timeout, store = self._world, self._timeout, self._world.store
        council: Council | None = None
        generation = max(world.generation, self.generation + 1)
        if not backend_for(self._recipe.backend).alone:
            council = Council(store, self.name, world.rank, self.layout.ranks, hosts=world.hosts)
            said = settings(self.layout, self._recipe, self._collective_timeout)
            agreement = council.meet(said, timeout=timeout, at_least=generation)
            store, generation = agreement.store, agreement.generation
        made: dict[Communicator, ProcessGroup] = {}
        book = AddressBook(store, self._collective_timeout)
        try:
            made = self._make(generation, book)
            lease = Lease(owner=self._title, generation=generation)
            groups = collect(self.layout, self._recipe, made, world, lease)
            if council is not None:
                council.confirm(None, timeout=timeout, telling=book.mine(world.rank))
            book.fill_in(world.rank)
        except BaseException as error:
            communicators_of_torch.end(made.items(), abort=True)
            if council is not None and not isinstance(error, RendezvousError):
                council.confirm(error, timeout=timeout)
            raise
        self.generation, self._council, self._lease = generation, council, lease
        self._made, self._state = list(made.items()), LeaseState.LIVE
        self._groups = groups
        self._given.add(self._made, groups, world.group)

    def _make(self, generation: int, book: AddressBook) -> dict[Communicator, ProcessGroup]:
        recipe, timeout = self._recipe, self._collective_timeout
        prefix = communicators_of_torch.prefix_of(self.name, generation)
        if self._world.device_bound:
            everyone = every_communicator(self.layout, recipe)
            return communicators_of_torch.make_together(
                self._world, everyone, prefix=prefix, timeout=timeout
            )
        return communicators_of_torch.make(
            self._world,
            communicators(self.layout, recipe, self._world.rank),
            store_for=book.store_for,
            prefix=prefix,
            timeout=timeout,
        )

    # -- use ---------------------------------------------------------------------------------

    @property
    def owns_world(self) -> bool:
        """Whether this session made torch's WORLD, and will destroy it at its end."""
        return self._world.ours

    def describe(self) -> dict[str, str | int | float | bool | dict[str, list[int]]]:
        """Plain data for logs and JSON: who owns what, the timeouts, each communicator's ranks.

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
            "communicators": {"+".join(c.fields): list(c.ranks) for c, _ in self._made},
        }

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
        """Give back the memory of the communicators until :meth:`resume`. Every rank calls it.

        No collective may be under way. The ranks agree on the way before anything is touched:

        * ``"suspend"``: NCCL lets go of its device memory. Every handle stays valid, and
          :meth:`resume` goes on with the same collection and generation. A WORLD that the session
          made is suspended as well.
        * ``"recreate"``: the groups are destroyed, and :meth:`resume` makes them anew, in a
          collection and a generation of their own; :meth:`rebind` puts them into models.
        * ``"recreate world"``: so is WORLD, if the session made it and nobody has groups on it.

        Then the callbacks of :meth:`before_release` run, the device finishes its work, and the
        memory is released. With ``"recreate"`` it is once nobody holds the old groups any more.

        Args:
            how: the way; by itself ``"suspend"`` where every rank can, else ``"recreate"``.

        Returns:
            What it brought on this rank.

        Raises:
            SessionError: the session is not live.
            UnsupportedOffloadError: a rank can't go this way, or the ranks asked for different
                ones, or a CUDA graph is being captured. Every rank gets it, and all stay live.
            OffloadError: a step failed, here or on another rank, or a rank did not come within
                ``timeout``. The session has failed on every rank: its groups were aborted, and it
                is only good for closing.
            CheckpointSaveError: a background save failed, which this waits for before it destroys
                groups, and nobody has heard of it yet. The session is suspended all the same.
        """
        return self._suspend(how, self._refusals)

    def resume(self) -> OffloadReport:
        """Make the groups work again, after :meth:`suspend`. Every rank calls it.

        Then the callbacks of :meth:`on_resume` run. After *recreate*, whoever published the old
        collection has the new one in ``parallel_state`` by then.

        Returns:
            What it took on this rank.

        Raises:
            SessionError: the session is not suspended.
            OffloadError: as in :meth:`suspend`.
        """
        return self._resume()

    def _refusals(self) -> dict[How, str]:
        """Way -> why this rank can't go it, or empty."""
        if reason := offload.capturing():
            return dict.fromkeys(offload.WAYS, reason)
        return {
            "suspend": offload.refusal(self._concerned("suspend")),
            "recreate": "",
            "recreate world": self._why_world_stays(),
        }

    def _why_world_stays(self) -> str:
        if self._make_world is None or not self._world.ours:
            return "WORLD is not the session's to destroy"
        if len(self.layout.ranks) < self._world.size:
            return "WORLD has ranks that are not in this session"
        bystanders = communicators_of_torch.bystanders(group for _, group in self._made)
        bystanders += [f"session {name!r}, which is suspended" for name in self._world.away()]
        return f"others have groups on WORLD: {', '.join(bystanders[:8])}" if bystanders else ""

    def _concerned(self, way: How) -> list[tuple[Communicator, ProcessGroup]]:
        """The groups that a way is about."""
        world = self._world.group
        if way == "recreate" or world is None or len(self.layout.ranks) < self._world.size:
            return self._made
        everyone = tuple(range(self._world.size))
        described = Communicator(("WORLD",), everyone, CommunicatorOptions(), self._world.backend)
        return [*self._made, (described, world)]

    def _world_of_ours(self) -> ProcessGroup | None:
        return self._world.group

    def _let_go(self, way: How, steps: Steps) -> None:
        with steps.attempted("destroy"):
            self._destroy(abort=False)
        self._compare(steps, "suspend(), after the release")
        with steps.timed("part"):
            if problems := self._part(None):
                raise OthersFailedError(problems)
            if way == "recreate":
                self._world.note(self.name, away=True)
        if way == "recreate world":
            with steps.timed("destroy WORLD"):
                self._world.close(abort=False, timeout=self._timeout)

    def _agree_to_resume(self, way: How) -> None:
        if way == "suspend":  # else they have parted
            self._exchange("resume()", "")

    def _make_anew(self, way: How, steps: Steps) -> None:
        if way == "recreate world":
            with steps.timed("make WORLD"):
                self._make_world_again()
        with steps.timed("make groups"):
            self._world.check()
            self._open()
            self._world.note(self.name, away=False)

    def _make_world_again(self) -> None:
        assert self._make_world is not None  # or the ranks would not have agreed on this way
        before, self._world = self._world, self._make_world()
        if (self._world.rank, self._world.size) != (before.rank, before.size):
            raise SessionError(
                f"this was rank {before.rank} of {before.size} before suspend(), and is rank "
                f"{self._world.rank} of {self._world.size} now. Leave the launcher's environment "
                "variables as they are."
            )

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
            f"{doing}: session {self.name!r} (generation {self.generation}) {how_it_is}{since}. "
            f"{what_now}."
        )

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Close the groups, and WORLD if this session made it. Closing twice does nothing.

        The ranks tell each other how they fared, and wait up to ``timeout`` seconds for those that
        are late: where all are well the groups are closed in order, otherwise aborted. Either way
        the collection's lease ends, and the session drops every reference to a group; gloo's
        threads and sockets go when the last reference anywhere (a model, an optimizer) does.

        Raises:
            SessionError: this session made WORLD, and others are still open on it.
            TeardownError: some groups could not be closed; every one was attempted.
            CheckpointSaveError: a background save failed, which this waits for, and nobody has
                heard of it yet. The groups are closed all the same, as they are when a callback of
                :meth:`before_release` fails, whose error is raised then.
        """
        super().close()

    def _refuse_to_close(self) -> None:
        open_here = {*communicators_of_torch.sessions_in_torch(), *self._world.away()}
        if (others := sorted(open_here - {self.name})) and self._world.ours:
            raise SessionError(
                f"session {self.name!r} made WORLD, and {', '.join(map(repr, others))} on this "
                "rank would lose it. Close the others first."
            )

    def _take_leave(self, problems: Mapping[int, str], error: BaseException | None) -> None:
        if self._state is LeaseState.SUSPENDED and self._way == "recreate":
            # The others may be waiting in resume(). And where none is, each rank shall count this
            # as an attempt, or the next one would be taken for this on those that fall behind.
            gone = error or SessionError("it has closed the session")
            RollCall(self._world.store, self.name, self.rank, self.layout.ranks).decline(gone)
        super()._take_leave(problems, error)

    def _release(self, steps: Steps, news: Callable[[], None], *, abort: bool) -> None:
        with steps.attempted("groups"):
            self._destroy(abort=abort)
        news()
        with steps.attempted("WORLD"):
            self._world.close(abort=abort, timeout=self._timeout)

    def _leave_without_the_main_thread(self, error: SignalExit) -> None:
        """What another thread can do while the main thread is stuck: tell, call off, abort."""
        self._part(error)
        self._lease.wind_up(error, [])
        for _, group in self._made:
            group.abort()
        if self._world.group is not None:
            self._world.group.abort()

    def _end(self, state: LeaseState, since: str) -> None:
        if self._way == "recreate":
            self._world.note(self.name, away=False)
        super()._end(state, since)
