"""The owner of process groups: :func:`session` opens them, :class:`Session` closes them.

A session makes every group of one layout, hands them out as a frozen collection, and is the only
thing that ends them. What it opened it closes; what was open before it (a WORLD that the caller
initialised, groups that others made) is left as it was.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Self, TypedDict, Unpack

import torch.distributed as dist

from megapg.collection import (
    OPTIONAL_FIELDS,
    Lease,
    Membership,
    ProcessGroup,
    ProcessGroupCollection,
)
from megapg.comms import groups as communicators_of_torch
from megapg.comms.addresses import AddressBook
from megapg.comms.backends import backend_for
from megapg.comms.holders import holders
from megapg.comms.options import CommunicatorOptions
from megapg.comms.plan import (
    ALL_GATHER_FIELDS,
    Communicator,
    Recipe,
    by_field,
    communicators,
    created_fields,
    every_communicator,
)
from megapg.comms.rollcall import RollCall
from megapg.comms.world import World, adopt, found, imagine
from megapg.errors import (
    RendezvousError,
    SessionError,
    UnknownFieldError,
    UnsupportedOptionError,
)
from megapg.layout import FIELDS, EmbeddingRanks, ParallelLayout

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
    **sizes: Unpack[LayoutSizes],
) -> Session:
    """Open the process groups of one layout. Every rank of it calls this, with equal values.

    Starts torch.distributed only if nobody has, from torchrun's environment or alone. Use it as a
    context manager, or call :meth:`Session.close`.

    Args:
        layout: the layout; or give its sizes (``tp=2, pp=2``) and it spans WORLD.
        name: tells apart the sessions that are open at the same time in one process.
        timeout: seconds to wait for the other ranks, at each of the few points where they meet,
            here and in :meth:`Session.close`; megapg's own waits only.
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
        **sizes: see :class:`~megapg.layout.ParallelLayout`.

    Raises:
        LayoutError: the sizes do not fit WORLD.
        SessionError: a session of that name is open in this process.
        RendezvousError: a rank did not come in time (its ``missing`` names it), or came with
            another layout (:class:`~megapg.errors.LayoutMismatchError`). Every rank that did come
            gets the error, and nothing stays open.
    """
    _check_waits(timeout, collective_timeout)
    if not dist.is_available():
        raise SessionError(
            "this torch was built without torch.distributed, so there are no process groups."
        )
    if layout is not None and sizes:
        raise SessionError(f"give a layout, or the sizes {', '.join(sizes)}, not both.")
    if dist.is_initialized():
        world = adopt()
        if backend is not None:
            world.backend = backend
    else:
        world = found(backend=backend, timeout=timeout, collective_timeout=collective_timeout)
    try:
        _check_kinds(name, options or {}, dedicated, gloo, sizes)
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
        _check_recipe(recipe, world, layout)
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
        _check_recipe(recipe, world, layout)
        return Session(
            layout, world, recipe, name="pretend", timeout=0, collective_timeout=world.timeout
        )
    except BaseException:
        world.close(abort=True, timeout=0)
        raise


class Session:
    """Open process groups and the duty to close them. Made by :func:`session`.

    Attributes:
        name: as given.
        layout: the layout whose groups these are.
        generation: how often this name was opened in this job, the same number on every rank.
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
    ) -> None:
        self.name, self.layout = name, layout
        self._world, self._timeout = world, timeout
        self._roll_call: RollCall | None = None
        store: dist.Store = world.store
        self.generation = max(world.generation, 1)
        if not backend_for(recipe.backend).alone:
            roll_call = RollCall(world.store, name, world.rank, layout.ranks)
            settings = _settings(layout, recipe, collective_timeout)
            agreement = roll_call.meet(settings, timeout=timeout, at_least=self.generation)
            store, self.generation, self._roll_call = (
                agreement.store,
                agreement.generation,
                roll_call,
            )
        made: dict[Communicator, ProcessGroup] = {}
        book = AddressBook(store, collective_timeout)
        try:
            made = self._make(recipe, book, collective_timeout)
            self._made = list(made.items())
            self._given = [(c.fields, weakref.ref(group)) for c, group in self._made]
            self._lease = Lease(owner=f"session {name!r}", generation=self.generation)
            self._groups: ProcessGroupCollection | None = _collect(
                layout, recipe, made, world, self._lease
            )
            self._collection = weakref.ref(self._groups)
            if self._roll_call is not None:
                self._roll_call.confirm(None, timeout=timeout, telling=book.mine(world.rank))
            book.fill_in(world.rank)
        except BaseException as error:
            communicators_of_torch.end(made.items(), abort=True)
            if self._roll_call is not None and not isinstance(error, RendezvousError):
                self._roll_call.confirm(error, timeout=timeout)
            raise
        logger.info("%s", self)
        if world.rank == layout.ranks[0]:
            logger.info(
                "collectives time out after %s on this session's groups and after %s on WORLD; "
                "start-up and close after megapg's own %g s",
                collective_timeout,
                world.timeout,
                timeout,
            )

    def _make(
        self, recipe: Recipe, book: AddressBook, timeout: timedelta
    ) -> dict[Communicator, ProcessGroup]:
        prefix = communicators_of_torch.prefix_of(self.name, self.generation)
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
    def groups(self) -> ProcessGroupCollection:
        """The frozen collection to hand to models, optimizers, schedules and checkpoints.

        Raises:
            SessionError: the session is closed.
        """
        if self._groups is None:
            raise SessionError(
                f"session {self.name!r} (generation {self.generation}) was closed "
                f"{self._lease.since}. Open a new one."
            )
        return self._groups

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._world.rank

    @property
    def owns_world(self) -> bool:
        """Whether this session made torch's WORLD, and will destroy it at its end."""
        return self._world.ours

    @property
    def closed(self) -> bool:
        """Whether the groups have been closed."""
        return self._groups is None

    def describe(self) -> dict[str, str | int | float | bool | dict[str, list[int]]]:
        """Plain data for logs and JSON: who owns what, the timeouts, each communicator's ranks.

        Timeouts are in seconds.
        """
        return {
            "name": self.name,
            "generation": self.generation,
            "layout": self.layout.fingerprint(),
            "state": self._lease.state.value,
            "world_size": self._world.size,
            "owns_world": self.owns_world,
            "backend": self._world.backend,
            "start_up_timeout": self._timeout,
            "world_timeout": self._world.timeout.total_seconds(),
            "communicators": {"+".join(c.fields): list(c.ranks) for c, _ in self._made},
        }

    def __repr__(self) -> str:
        if self.closed:
            since = self._lease.since
            return f"<Session {self.name!r} generation {self.generation} closed {since}>"
        world = "its own WORLD" if self.owns_world else "the caller's WORLD"
        return (
            f"<Session {self.name!r} generation {self.generation} {self._lease.state.value}: "
            f"{len(self._made)} communicators for {sum(len(c.fields) for c, _ in self._made)} "
            f"fields, rank {self._world.rank} of {self._world.size} on {world} "
            f"({self._world.backend})>"
        )

    # -- the end -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        _ = self.groups  # a closed session says so here already
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(error)
        except Exception as trouble:  # what the body raised matters more
            error.add_note(f"closing session {self.name!r} failed as well: {trouble!r}")

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
                heard of it yet. The groups are closed all the same.
        """
        self._close(None)

    def live_references(self) -> list[str]:
        """Who still holds this session's groups or its collection, and so keeps sockets open.

        One line per holder, such as ``tp+tp_cp: a mymodel.Block, as tp_group``, as far as Python's
        garbage collector sees them. After :meth:`close` it should be empty. Slow.
        """
        own = {id(self), id(self._made), id(vars(self)), *(id(pair) for pair in self._made)}
        groups = self._collection()
        if groups is not None:
            own |= {id(groups), id(vars(groups)), id(groups._extras)}
        found = []
        for fields, reference in self._given:
            group = reference()
            if group is not None:
                name = "+".join(fields[:3]) + ("+..." if len(fields) > 3 else "")
                found += [f"{name}: {line}" for line in holders(group, own)]
        if groups is not None:
            found += [f"the collection: {line}" for line in holders(groups, own)]
        return found

    def _close(self, error: BaseException | None) -> None:
        if self._groups is None:
            return
        others = sorted({*communicators_of_torch.sessions_in_torch()} - {self.name})
        if error is None and others and self._world.ours:
            raise SessionError(
                f"session {self.name!r} made WORLD, and {', '.join(map(repr, others))} on this "
                "rank would lose it. Close the others first."
            )
        unfinished = self._lease.wind_up(error)
        interrupted = [e for e in unfinished if not isinstance(e, Exception)]
        problems = self._part(error or next(iter(interrupted), None))
        made, self._made, self._groups = self._made, [], None
        self._lease.end(
            f"at {time.strftime('%H:%M:%S')} on rank {self._world.rank}"
            + (f", after {type(error).__name__}" if error is not None else "")
        )
        abort = bool(problems)
        if abort and error is None:
            logger.warning(
                "session %r: other ranks are late or not well: %s; aborting", self.name, problems
            )
        try:
            communicators_of_torch.end(made, abort=abort)
        finally:
            del made
            self._world.close(abort=abort, timeout=self._timeout)
        if unfinished:
            raise unfinished[0]

    def _part(self, error: BaseException | None) -> dict[int, str]:
        if self._roll_call is None:
            return {}
        return self._roll_call.part(error, timeout=self._timeout)


def _check_waits(timeout: float, collective_timeout: timedelta | None) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout <= 0:
        raise SessionError(f"timeout={timeout!r}: give the seconds to wait, more than 0.")
    if collective_timeout is not None and not isinstance(collective_timeout, timedelta):
        raise SessionError(
            f"collective_timeout={collective_timeout!r}: give a datetime.timedelta, such as "
            "timedelta(minutes=10)."
        )


def _check_kinds(
    name: str,
    options: Mapping[str, CommunicatorOptions],
    dedicated: Collection[str],
    gloo: Collection[str],
    sizes: LayoutSizes,
) -> None:
    if not isinstance(name, str) or not name:
        raise SessionError(f"name={name!r}: give the session a name, or leave it out.")
    for argument, fields in (("dedicated", dedicated), ("gloo", gloo)):
        if isinstance(fields, str):
            raise SessionError(f"{argument}={fields!r}: give the fields in a tuple, ({fields!r},).")
    for field, value in options.items():
        if not isinstance(value, CommunicatorOptions):
            raise UnsupportedOptionError(
                f"options: {field} is {value!r}; give megapg.CommunicatorOptions(max_ctas=8)."
            )
    if unknown := set(sizes) - set(LayoutSizes.__annotations__):
        raise SessionError(
            f"session() has no {', '.join(sorted(unknown))}; the sizes are "
            f"{', '.join(LayoutSizes.__annotations__)}. The names of initialize_model_parallel go "
            "through megapg.session(**megapg.megatron.session_arguments(...))."
        )


def _check_recipe(recipe: Recipe, world: World, layout: ParallelLayout) -> None:
    made = {field.partition(".")[0] for field in created_fields(layout, recipe)}
    for field in (*recipe.options, *recipe.dedicated, *recipe.gloo):
        if field not in FIELDS:
            raise UnknownFieldError(f"{field!r} is no field; the fields are {', '.join(FIELDS)}.")
        if field not in made:
            needs = "all_gather_groups=True" if field in ALL_GATHER_FIELDS else "another layout"
            raise UnsupportedOptionError(f"{field} is not made here; that takes {needs}.")
    if "hcp" in recipe.gloo:
        raise UnsupportedOptionError("gloo: hcp is several groups, which have no companions.")
    for field, options in recipe.options.items():  # refused before anyone waits for anyone
        backend_for(recipe.backend).options(field, options)
    outside = [rank for rank in layout.ranks if rank >= world.size]
    if outside:
        raise SessionError(
            f"the layout has the ranks {outside}, but WORLD has {world.size} ranks, from 0."
        )
    if world.rank not in layout.ranks:
        raise SessionError(
            f"rank {world.rank} is not in the layout's ranks {list(layout.ranks)}; only those "
            "ranks open this session."
        )
    if world.device_bound and len(layout.ranks) != world.size:
        raise UnsupportedOptionError(
            "ranks=: WORLD is bound to a device (init_process_group(device_id=...)), so torch "
            "splits groups from it with all of its ranks. Initialise WORLD without device_id to "
            "open a session on some of them."
        )


def _settings(
    layout: ParallelLayout, recipe: Recipe, collective_timeout: timedelta
) -> dict[str, str]:
    """Everything that must be equal on every rank, as text, for the roll call."""
    return {
        **layout.describe(),
        "backend": recipe.backend,
        "options": str({field: o.given() for field, o in sorted(recipe.options.items())}),
        "dedicated": str(sorted(recipe.dedicated)),
        "all_gather_groups": str(recipe.all_gather_groups),
        "gloo": str(sorted(recipe.gloo)),
        "connects_lazily": str(backend_for(recipe.backend).connects_lazily),
        "collective_timeout": str(collective_timeout),
    }


def _collect(
    layout: ParallelLayout,
    recipe: Recipe,
    made: Mapping[Communicator, ProcessGroup],
    world: World,
    lease: Lease,
) -> ProcessGroupCollection:
    """The collection of a session: every field, None where that is what Megatron means."""
    values: dict[str, ProcessGroup | Sequence[ProcessGroup] | None] = dict.fromkeys(OPTIONAL_FIELDS)
    members = {}
    serving = by_field(made)
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
