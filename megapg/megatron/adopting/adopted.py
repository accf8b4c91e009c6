"""An owner for the groups that old code made with ``initialize_model_parallel``.

Megatron-core's ``destroy_model_parallel`` forgets its groups and destroys only the gloo companions.
So 17 to 20 groups stay open after every cycle, and some of its globals keep their values.
:func:`adopt` gives the groups in ``parallel_state`` the same owner that a
:class:`~megapg.ownership.session.Session` is for its groups: it closes them in order, suspends and
recreates them. Only groups that the globals hold at that moment are touched.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType

import torch.distributed as dist
from typing_extensions import override

from megapg import torch_private
from megapg.collection import Lease, LeaseState, ProcessGroup
from megapg.communicators import create as communicators_of_torch
from megapg.communicators.addresses import AddressBook
from megapg.communicators.backends import backend_for
from megapg.communicators.needed import Communicator
from megapg.communicators.world import World, current_world
from megapg.errors import MissingGroupError, PublishedError, SessionError, UnsupportedOffloadError
from megapg.launch.signals import NoSignals
from megapg.megatron.adopting.creations import Recording, creations, unknown_of, why_not_anew
from megapg.megatron.adopting.variables import NAME, Globals, collection, groups_held
from megapg.megatron.core import installed_version, parallel_state_module
from megapg.megatron.marks import ADOPTED
from megapg.ownership import suspension
from megapg.ownership.closing import close_lost
from megapg.ownership.owner import Owner
from megapg.ownership.steps import Steps
from megapg.ownership.suspension import How, OffloadReport
from megapg.ownership.validate import check_waits
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.joint_work import OthersFailedError
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.rendezvous.store import Store

logger = logging.getLogger(__name__)

_OWNER = f"{NAME}, adopted"


@dataclass(frozen=True)
class AdoptedReport(OffloadReport):
    """The result of suspending or resuming adopted groups on this rank.

    Attributes:
        unknown: name of a group -> the unknown parameters of its creation.
    """

    unknown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @override
    def __str__(self) -> str:
        lines = [f"  unknown of {name}: {', '.join(what)}" for name, what in self.unknown.items()]
        return "\n".join([super().__str__(), *lines])


@dataclass(frozen=True)
class Leftover:
    """A group in torch's registry without an owner: not WORLD, a session's, or adopted.

    Most were forgotten by ``destroy_model_parallel`` in earlier cycles. But a group that the caller
    made is among them too, so they are reported and never destroyed.

    Attributes:
        name: torch's name of it.
        description: torch's description of its purpose.
        ranks: its global ranks.
        backend: device by device, as torch spells it.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    backend: str

    @override
    def __str__(self) -> str:
        return f"{self.description} ({self.name!r}, {self.backend}) of ranks {list(self.ranks)}"


def adopt(record: Recording | None = None, *, timeout: float = 60.0) -> Adopted:
    """Take over the groups that ``parallel_state`` holds now. Every rank of WORLD calls this. ::

        parallel_state.initialize_model_parallel(2, 2)
        with adopt():
            ...  # old code, unchanged
        # Replaces destroy_model_parallel(): nothing is left, in torch or in the globals.

    Every live group in one of the globals is taken over, in lists and dicts too, but never WORLD.
    Groups made later belong to their makers. Groups of earlier cycles are not touched either, even
    if a global still holds one: see :attr:`Adopted.leftovers`.

    Args:
        record: the record of their creation by :func:`record_initialize`. Without it, some
            parameters needed to recreate groups are unknown for some backends.
        timeout: seconds to wait for the other ranks, here and whenever they meet again.

    Raises:
        UnsupportedVersionError: torch is older than 2.6, or Megatron-core is not installed.
        MissingGroupError: ``parallel_state`` holds no live group.
        SessionError: the groups have an owner: an earlier adoption, or a session.
        PublishedError: inside ``published()``, where the globals show the groups of a collection.
        RendezvousError: a rank did not come, or could not adopt. Every rank that came gets its
            name.
    """
    torch_private.check_version()
    module = parallel_state_module()
    close_lost()
    world = current_world() if dist.is_initialized() else None
    try:
        check_waits(timeout, None)
        if world is None:
            raise _nothing_to_adopt()
        owner = Adopted(module, world, record or Recording(), timeout)
    except BaseException as error:
        if world is not None and not backend_for(world.backend).alone:
            Rendezvous(world.store, NAME, world.rank, range(world.size)).decline(error)
        raise
    owner._take_over()
    return owner


class Adopted(Owner):
    """Megatron's own groups, taken over by :func:`adopt`.

    Attributes:
        arguments: those of ``initialize_model_parallel``, if they were recorded.
        generation: how often groups were adopted or recreated in this job.
    """

    def __init__(self, module: ModuleType, world: World, record: Recording, timeout: float) -> None:
        self._globals = Globals(module)
        if published := self._globals.published():
            raise PublishedError(f"adopt() {published}.")
        held = groups_held(module)
        _refuse_owned(module, held)
        if not held:
            raise _nothing_to_adopt()
        super().__init__(_OWNER, world, timeout, NoSignals())
        self.arguments = record.arguments
        self._module = module
        found = creations(module, held, record)
        self._made = [(creation.communicator, group) for group, creation in found.items()]
        self._creations = {creation.communicator: creation for creation in found.values()}
        self._groups = collection(module, self._made, self._lease)

    def _take_over(self) -> None:
        coordinator, _ = self._meet()
        if coordinator is not None:
            coordinator.confirm(None, timeout=self._timeout)
        self._coordinator, self._lease.generation = coordinator, self.generation
        self._state = LeaseState.LIVE
        self._given.add(self._made, self.groups, None)
        vars(self._module)[ADOPTED] = self
        self._opened()
        logger.info("%s", self)
        if (leftovers := self.leftovers) and self._world.rank == 0:
            logger.warning(
                "%d groups in torch's registry have no owner, and stay: %s%s",
                len(leftovers),
                "; ".join(map(str, leftovers[:4])),
                "; and more" if len(leftovers) > 4 else "",
            )

    def _meet(self) -> tuple[Coordinator | None, Store]:
        """Meet all ranks, in a new generation; :meth:`Coordinator.confirm` must follow.

        Return the coordinator, and a store that all ranks share.
        """
        world = self._world
        if backend_for(world.backend).alone:
            self.generation += 1
            return None, world.store
        coordinator = Coordinator(world.store, NAME, world.rank, range(world.size))
        version = ".".join(map(str, installed_version()))
        agreement = coordinator.meet(
            {"megatron-core": version}, timeout=self._timeout, at_least=self.generation + 1
        )
        self.generation = agreement.generation
        return coordinator, agreement.store

    # -- use ---------------------------------------------------------------------------------

    @property
    def leftovers(self) -> tuple[Leftover, ...]:
        """Groups in torch's registry without an owner, oldest first. Never touched."""
        return _leftovers({group for _, group in self._made})

    @property
    def unknown(self) -> dict[str, tuple[str, ...]]:
        """Name of a group -> the unknown parameters of its creation."""
        return unknown_of(self._creations.values())

    def describe(self) -> dict[str, object]:
        """Return plain data for logs and JSON: the state, how each group was made, the leftovers.

        Timeouts are in seconds; None if unknown.
        """
        return {
            "state": self._state.value,
            "generation": self.generation,
            "world_size": self._world.size,
            "backend": self._world.backend,
            "start_up_timeout": self._timeout,
            "communicators": {known.served: known.describe() for known in self._creations.values()},
            "leftovers": [str(leftover) for leftover in self.leftovers],
        }

    @override
    def __repr__(self) -> str:
        since = f" {self._lease.since}" if self._state is not LeaseState.LIVE else ""
        return (
            f"<Adopted groups of {NAME}, generation {self.generation} {self._state.value}{since}: "
            f"{len(self._creations)} communicators, rank {self._world.rank} of {self._world.size} "
            f"({self._world.backend})>"
        )

    def suspend(self, how: How | None = None, *, allow_unknown: bool = False) -> AdoptedReport:
        """Release the resources of the groups until :meth:`resume`. Every rank calls it.

        As :meth:`megapg.ownership.session.Session.suspend`. With ``"recreate"`` the groups also
        leave the globals, whose getters then raise "not initialized".

        Args:
            how: ``"suspend"`` or ``"recreate"``. Default: the former if every rank can.
            allow_unknown: allow ``"recreate"`` also if parameters are :attr:`unknown`; the new
                groups have the backend's defaults for them.

        Raises:
            SessionError: the groups are not live.
            UnsupportedOffloadError: a rank can't do it this way, for example since parameters are
                unknown, or the ranks asked for different ways. Every rank gets it, and all stay
                live.
            OffloadError: a step failed, here or on another rank, or a rank did not come within
                ``timeout``. The groups are lost on every rank, and can only be closed.
            CheckpointSaveError: a background save failed, and its error was not raised yet. Saves
                are awaited before groups are destroyed. The groups are suspended all the same.
        """
        report = self._suspend(how, partial(self._cannot, allow_unknown))
        return AdoptedReport(**vars(report), unknown=self.unknown)

    def resume(self) -> AdoptedReport:
        """Make the groups work again, after :meth:`suspend`. Every rank calls it.

        New groups replace the old ones in the globals. Models still refer to the old ones:
        :meth:`rebind` them.

        Raises:
            SessionError: the groups are not suspended.
            UnsupportedOffloadError: on some rank ``parallel_state`` is published, or was
                initialised since, so that its groups would be lost. Every rank gets it, and all
                stay suspended.
            OffloadError: as in :meth:`suspend`.
        """
        return AdoptedReport(**vars(self._resume()), unknown=self.unknown)

    @property
    @override
    def _ranks(self) -> Sequence[int]:
        return range(self._world.size)

    @override
    def _cannot(self, allow_unknown: bool = False) -> dict[How, str]:
        if reason := self._globals.published() or suspension.capturing():
            return dict.fromkeys(suspension.WAYS, reason)
        return {
            "suspend": suspension.refusal(self._made),
            "recreate": why_not_anew(self._world, self._creations.values(), allow_unknown),
            "recreate world": "WORLD is not theirs",
        }

    @override
    def _agree_to_resume(self, way: How) -> None:
        heard = self._exchange("resume()", self._in_the_way())
        if reasons := [f"rank {rank}: {text}" for rank, text in heard.items() if text]:
            raise UnsupportedOffloadError(
                f"{_OWNER} can't be resumed. {'; '.join(reasons[:8])}. Nothing was touched."
            )

    @override
    def _in_the_way(self) -> str:
        return self._globals.in_the_way()

    @override
    def _concerned(self, way: How) -> list[tuple[Communicator, ProcessGroup]]:
        return self._made

    @override
    def _sends_without_batching(self) -> bool:
        return self._module.get_virtual_pipeline_model_parallel_world_size() is not None

    @override
    def _let_go(self, way: How, steps: Steps) -> None:
        with steps.attempted("destroy"):
            self._take_apart()
        self._compare(steps, "suspend(), after the release")

    def _take_apart(self) -> None:
        """Destroy the groups. Keep their parameters, to make them again."""
        for communicator, group in self._made:
            known = self._creations[communicator]
            current = torch_private.timeout_of(group)  # may have changed since the creation
            self._creations[communicator] = replace(known, timeout=current or known.timeout)
        self._globals.lift({group: communicator for communicator, group in self._made})
        del group
        self._destroy(abort=False)

    @override
    def _make_anew(self, way: How, steps: Steps) -> None:
        with steps.timed("make groups"):
            self._make_and_place()

    def _make_and_place(self) -> None:
        """Recreate the groups together with all ranks, and put them into the globals."""
        if problems := self._part(None):
            raise OthersFailedError(problems)
        coordinator, store = self._meet()
        timeouts = {c: known.timeout or self._world.timeout for c, known in self._creations.items()}
        book = AddressBook(store, max(timeouts.values()))
        prefix = communicators_of_torch.prefix_of(NAME, self.generation)
        try:
            for communicator, timeout in timeouts.items():
                made = communicators_of_torch.make(
                    self._world,
                    [communicator],
                    store_for=book.store_for,
                    prefix=prefix,
                    timeout=timeout,
                    within=self._timeout,
                )
                self._made += made.items()
                # Logs and flight recorders identify groups by it.
                torch_private.describe(
                    made[communicator], self._creations[communicator].description
                )
            if coordinator is not None:
                telling = book.mine(self._world.rank)
                coordinator.confirm(None, timeout=self._timeout, telling=telling)
            with store.until(time.monotonic() + self._timeout, _OWNER):
                book.fill_in(self._world.rank)
        except BaseException as error:
            if coordinator is not None:
                coordinator.give_up(error, timeout=self._timeout)
            raise
        self._coordinator = coordinator
        self._globals.put_back(dict(self._made))
        self._lease = Lease(_OWNER, self.generation, timeout=self._timeout)
        self._groups = collection(self._module, self._made, self._lease)
        self._given.add(self._made, self._groups, None)

    @override
    def _part(self, error: BaseException | None, alone: bool = False) -> dict[int, str]:
        """Leave the other ranks, if they have met: rank -> its problem."""
        coordinator = self._coordinator
        if coordinator is None or self._world.current:
            return super()._part(error, alone)
        self._coordinator = None  # all groups have ended, so there is no rank to wait for
        coordinator.part(error or SessionError("WORLD was destroyed"), timeout=self._timeout)
        return {}

    # -- the end -----------------------------------------------------------------------------

    @override
    def close(self, error: BaseException | None = None) -> None:
        """Destroy the groups and reset the globals, instead of ``destroy_model_parallel``.

        The ranks meet first, for ``timeout`` seconds at most. If all are well, the groups are
        destroyed in the reverse order of their creation, otherwise aborted. The globals are then as
        after an import, unless ``parallel_state`` was initialised since. Closing twice does
        nothing. If WORLD was destroyed before, and all groups with it, only the globals are reset.

        Args:
            error: why the ranks can't close in order, such as a lost rank. Then this rank aborts
                its groups and waits for no other rank, as after an exception in a ``with`` block.

        Raises:
            PublishedError: inside ``published()``; leave that block first.
            RendezvousError: ranks did not come, or were not well, and are named. The groups here
                were aborted all the same.
            TeardownError: some groups could not be destroyed; every one was attempted.
            CheckpointSaveError: a background save failed, and its error was not raised yet. The
                groups are closed all the same.
        """
        super().close(error)

    @override
    def _refuse_to_close(self) -> None:
        if published := self._globals.published():
            raise PublishedError(f"close() of {_OWNER}: {published}.")

    @override
    def _release(
        self, steps: Steps, news: Callable[[], None], abort: BaseException | None, alone: bool
    ) -> dict[int, str]:
        with steps.attempted("globals"):
            if vars(self._module).get(ADOPTED) is self:
                del vars(self._module)[ADOPTED]
            self._globals.reset({group for _, group in self._made}, finish=abort is None)
        with steps.attempted("groups"):
            self._destroy(abort=abort is not None or alone)
        news()
        return {}

    @override
    def _destroy(self, *, abort: bool) -> None:
        try:
            self._globals.clear({group for _, group in self._made})
        finally:
            super()._destroy(abort=abort)

    @override
    def _expect(self, state: LeaseState, doing: str) -> None:
        if self._state is not state:
            what_now = {
                LeaseState.LIVE: "suspend() first",
                LeaseState.SUSPENDED: "resume() first",
                LeaseState.CLOSED: "adopt() what there is now",
                LeaseState.FAILED: "close(), and initialise anew",
            }[self._state]
            raise SessionError(f"{doing} needs {state.value} groups; {self!r}: {what_now}.")
        if not self._world.current:
            raise SessionError(f"{doing}: WORLD was destroyed, and {self!r} with it: close().")


def _leftovers(ours: Collection[ProcessGroup]) -> tuple[Leftover, ...]:
    """Return the groups in torch's registry that are neither ``ours`` nor a session's, oldest
    first.
    """
    return tuple(
        Leftover(
            name=group.group_name,
            description=group.group_desc,
            ranks=tuple(dist.get_process_group_ranks(group)),
            backend=dist.get_backend_config(group),
        )
        for group in torch_private.known_groups()
        if group not in ours
        and group is not dist.group.WORLD
        and not communicators_of_torch.session_of(group)
    )


def _refuse_owned(module: ModuleType, held: Collection[ProcessGroup]) -> None:
    earlier = vars(module).get(ADOPTED)
    if isinstance(earlier, Adopted) and earlier._world.current:
        raise SessionError(f"adopt(): the groups have an owner, {earlier!r}. Close that one first.")
    owned = set(map(communicators_of_torch.session_of, held)) - {""}
    if owned:
        raise SessionError(
            f"adopt(): {NAME} holds groups of session {', '.join(sorted(owned))}, which is their "
            "owner and closes them."
        )


def _nothing_to_adopt() -> MissingGroupError:
    return MissingGroupError(
        f"adopt(): {NAME} holds no live group. Call initialize_model_parallel() first; or, where "
        "nothing reads its globals any more, open a session (`megapg.session(tp=..., pp=...)`)."
    )
