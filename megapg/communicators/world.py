"""torch's WORLD, either adopted from the caller, or created and later destroyed by megapg.

A :class:`World` destroys WORLD only while the current WORLD is the same object that it created. A
WORLD that the caller made, before or since, is never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from megapg import torch_private
from megapg.communicators.backends import backend_for
from megapg.errors import LaunchError, RendezvousError, SessionError
from megapg.launch import Launch, Network, choose_network, detect
from megapg.launch.environment import overridden
from megapg.rendezvous.call_in_thread import bounded
from megapg.rendezvous.job_store import job_store
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.rendezvous.store import Store, host_of

logger = logging.getLogger(__name__)

# Seconds for which a rank that will not come tries to reach the other ranks.
_REFUSE_WAIT = 10.0
# WORLD -> connection to its store. The whole process shares it, because it knows the store's host
# and whether the store still answers.
_STORES: weakref.WeakKeyDictionary[dist.ProcessGroup, Store] = weakref.WeakKeyDictionary()

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@dataclass
class World:
    """The default process group, and whether megapg created it.

    Attributes:
        rank: this process's global rank.
        size: number of ranks.
        store: the connection to the store of WORLD, which all its ranks share.
        backend: as torch names it, for example ``"gloo"``.
        timeout: the timeout of collectives on WORLD, and so of those inside Megatron.
        generation: how often megapg made WORLD in this job; 0 if the caller made it.
        hosts: rank -> host, if the launcher gives it.
        network: the interfaces chosen for WORLD, if requested.
    """

    rank: int
    size: int
    store: Store
    backend: str
    timeout: timedelta
    generation: int = 0
    hosts: Sequence[str] = ()
    network: Network | None = None
    _known: weakref.ref[dist.ProcessGroup] | None = None
    _made: dist.ProcessGroup | None = None
    _rendezvous: Rendezvous | None = None
    _hooks: tuple[_Hook, _Hook] | None = None  # sys.excepthook before and after it was made
    _applied: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def ours(self) -> bool:
        """True if the current WORLD is the object that megapg made."""
        return self._made is not None and dist.group.WORLD is self._made

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The current WORLD if megapg made it, else None."""
        return self._made if self.ours else None

    @property
    def current(self) -> bool:
        """True if the current WORLD is the one that this object describes."""
        known = self._known and self._known()
        return known is not None and known is dist.group.WORLD

    def check(self) -> None:
        """Raise unless the current WORLD is the one that this object describes.

        Raises:
            SessionError: WORLD was destroyed, or replaced by another one.
        """
        if not self.current:
            what = "destroyed" if dist.group.WORLD is None else "replaced by another one"
            raise SessionError(
                f"WORLD was {what} behind the session's back. Open a new session, or leave WORLD "
                "alone as long as one is open or suspended."
            )

    def splits(self, backend: str) -> bool:
        """True if all ranks create the groups of this backend together, split from WORLD."""
        split = backend_for(backend).split
        bound = dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None
        return split == "always" or (split == "on a bound WORLD" and bound)

    def close(
        self, *, abort: BaseException | None, timeout: float, alone: bool = False
    ) -> dict[int, str]:
        """Destroy WORLD if megapg made it.

        Args:
            abort: the error of this rank, or None. With an error, this rank notifies the other
                ranks, waits for none, and aborts running collectives.
            timeout: seconds to wait for the other ranks in an orderly close.
            alone: True to notify the other ranks and wait for none, although there is no error.

        Returns:
            rank -> the error that kept this rank from an orderly close.
        """
        problems: dict[int, str] = {}
        if self._made is None:
            return problems
        in_order = False  # no rank has an error, and every rank knows it
        try:
            if self._rendezvous is not None and alone and abort is None:
                self._rendezvous.leave()
            elif self._rendezvous is not None:
                problems = self._rendezvous.part(abort, timeout=timeout)
            in_order = abort is None and not problems
        finally:  # after Ctrl-C as well
            self._applied.close()
            if self.ours:
                if alone or not in_order:
                    torch_private.abort(self._made)
                if dist.is_initialized():
                    dist.destroy_process_group()
            self._made = None
            # For each WORLD, torch installs a hook that prints the rank before each line of a
            # traceback. After a failure, keep the hook for the traceback to come.
            over = in_order or self._rendezvous is None  # a fake WORLD is this process only
            if over and self._hooks is not None and sys.excepthook is self._hooks[1]:
                sys.excepthook = self._hooks[0]
        return problems if abort is None else {}


def current_world(connection: Store | None = None) -> World:
    """Describe the WORLD that exists.

    Args:
        connection: for a new WORLD, the connection to its store.
    """
    default = dist.group.WORLD
    if default is None:
        raise RendezvousError("torch.distributed is not initialised: there is no WORLD to adopt.")
    config = dist.get_backend_config(default)
    behind = torch_private.default_store()
    kinds = {part.partition(":")[2] for part in config.split(",")}
    store = _STORES.get(default) if connection is None else connection.beside(behind)
    if store is None:
        store = Store(behind, host_of(behind, "the store behind WORLD"))
    _STORES[default] = store
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        store=store,
        # If all devices have the same backend, use its plain name, otherwise the device map.
        backend=kinds.pop() if len(kinds) == 1 else config,
        timeout=torch_private.timeout_of(default)
        or torch_private.default_timeout(dist.get_backend(default)),
        _known=weakref.ref(default),
    )


def create_world(
    *,
    backend: str | None,
    timeout: float,
    collective_timeout: timedelta | None,
    launch: Launch | None = None,
    network: str | Sequence[str] | None = None,
) -> World:
    """Create WORLD for this launch, once every rank has arrived.

    Args:
        backend: the backend. Default: ``"nccl"`` if CUDA is available, else ``"gloo"``.
        timeout: seconds to wait for ranks that are missing.
        collective_timeout: timeout of collectives on WORLD. Default: torch's for the backend.
        launch: rank, world size and address. Default: read from the environment.
        network: the interfaces, as for :func:`~megapg.launch.choose_network`. The variables that it
            sets stay set until WORLD is closed.

    Raises:
        LaunchError: the environment is incomplete or contradicts itself, or a requested interface
            can't be used.
        RendezvousError: a rank did not arrive, the port is taken, the store can't be reached, or
            the ranks' accelerators can't communicate.
    """
    launch = launch or detect()
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    row = backend_for(chosen)
    environment = dict(row.creation_environment)
    bound = row.split == "always"  # then the groups are split from WORLD's communicator
    if bound:
        # torchcomms would otherwise prefer the variables of mpirun and srun.
        environment |= {
            "TORCHCOMM_RANK": str(launch.rank),
            "TORCHCOMM_SIZE": str(launch.world_size),
        }
        chosen = "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen
    store = job_store(launch, timeout)
    rendezvous = Rendezvous(store, "WORLD", launch.rank, range(launch.world_size), launch.hosts)
    interfaces = None if network is None else _interfaces(network, chosen, rendezvous)
    settings = {
        "backend": chosen,
        "network": "left alone" if interfaces is None else interfaces.agreement,
    }
    agreement = rendezvous.meet(settings, timeout=timeout)
    made: dist.ProcessGroup | None = None
    applied = contextlib.ExitStack()
    try:
        if interfaces is not None:
            applied.enter_context(interfaces.applied())
        device = _device(launch) if "nccl" in chosen else None
        if device is not None:
            torch.cuda.set_device(device)  # before init: NCCL takes the current device
        hook, before = sys.excepthook, dist.group.WORLD
        try:
            with scoped_environment(environment):
                agreement.store.lend(
                    lambda: dist.init_process_group(
                        chosen,
                        store=agreement.store.torch,
                        rank=launch.rank,
                        world_size=launch.world_size,
                        timeout=collective_timeout,
                        device_id=device if bound else None,
                    ),
                    timeout,
                    "making WORLD",
                    undo=lambda _: _discard(dist.group.WORLD),
                )
        finally:  # a barrier that fails, or Ctrl-C, can leave a WORLD behind
            made = dist.group.WORLD if before is None else None
        hooked = sys.excepthook
        world = current_world(agreement.store)
        if made is not None:
            torch_private.part_in_peace(made)
        # Backends read keys with the store's own timeout, and may do so much later.
        store.torch.set_timeout(world.timeout)
        if device is not None:
            _meet_on(device, timeout)
        rendezvous.confirm(None, timeout=timeout)
    except BaseException as error:
        with applied:
            _discard(made)
            rendezvous.give_up(error, timeout=timeout)
        raise
    world.generation, world._rendezvous, world._made = agreement.generation, rendezvous, made
    world.hosts, world.network, world._applied = launch.hosts, interfaces, applied
    world._hooks = hook, hooked
    return world


def refuse(error: BaseException, launch: Launch | None = None) -> None:
    """Tell the ranks that wait to create WORLD why this rank will not come, if possible."""
    with contextlib.suppress(LaunchError, RendezvousError):
        launch = launch or detect()
        store = job_store(launch, _REFUSE_WAIT)
        ranks = range(launch.world_size)
        Rendezvous(store, "WORLD", launch.rank, ranks, launch.hosts).decline(error)


def fake_world(rank: int, size: int) -> World:
    """Return WORLD on torch's fake backend: this process plays ``rank`` of ``size``.

    Nothing is communicated. A fake WORLD of this rank that is large enough is used again.

    Raises:
        SessionError: torch.distributed is initialised already, in another way.
    """
    if dist.is_initialized():
        world = current_world()
        if world.backend == "fake" and world.rank == rank and world.size >= size:
            return world
        if world.backend == "fake":
            raise SessionError(
                f"this process plays rank {world.rank} of {world.size}, and can't play rank {rank} "
                f"of {size} at the same time. Give both the same rank, and the first one "
                f"world_size={max(size, world.size)}."
            )
        raise SessionError(
            "a fake WORLD can't be made while torch.distributed is initialised; destroy the "
            "current one first."
        )
    torch_private.register_fake_backend()
    hook = sys.excepthook
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    world = current_world()
    world._made, world._hooks = dist.group.WORLD, (hook, sys.excepthook)
    return world


@contextlib.contextmanager
def scoped_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context that sets environment variables that are not set, and removes them at the end."""
    with overridden({n: value for n, value in variables.items() if n not in os.environ}):
        yield


def _device(launch: Launch) -> torch.device:
    """Return the accelerator of this rank."""
    count = torch.cuda.device_count()
    # Some sites show each process only its own device.
    index = 0 if count == 1 else launch.local_rank
    if index is None:
        raise LaunchError(
            f"rank {launch.rank} sees {count} CUDA devices, and nobody says which is its own: set "
            "LOCAL_RANK in each rank, counting from 0 on each host, or local_rank= of its launch=."
        )
    if index >= count:
        raise LaunchError(
            f"rank {launch.rank} is number {launch.local_rank} on its host ({launch.launcher}), "
            f"but sees {count} CUDA devices: start at most one rank per device, and look at "
            "CUDA_VISIBLE_DEVICES; or choose backend='gloo'."
        )
    return torch.device("cuda", index)


def _meet_on(device: torch.device, timeout: float) -> None:
    """Run a barrier on the accelerators: ranks that met over TCP may not be able to use NCCL.

    The barrier may never return, and can't be cancelled.
    """

    def meet() -> None:
        torch.cuda.set_device(device)  # the current device is per thread
        dist.barrier(device_ids=[device.index])

    try:
        bounded(meet, time.monotonic() + timeout, name="megapg barrier")
    except TimeoutError:
        raise RendezvousError(
            f"all ranks came, but a barrier of their accelerators did not end within {timeout:g} "
            f"s on {device} of {socket.gethostname()}. NCCL_DEBUG=INFO shows which network it "
            "tries; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose another."
        ) from None
    except dist.DistBackendError as error:
        last = (str(error).strip() or repr(error)).splitlines()[-1]
        advice = "NCCL_DEBUG=WARN shows more."
        if "Duplicate GPU" in last:
            advice = "Start at most one rank per GPU, or choose backend='gloo'."
        raise RendezvousError(
            f"all ranks came, but a barrier of their accelerators failed on {device} of "
            f"{socket.gethostname()}: {last}. {advice}"
        ) from error


def _interfaces(wanted: str | Sequence[str], backend: str, rendezvous: Rendezvous) -> Network:
    """Choose the interfaces of this host. If this fails, report it to the other ranks."""
    try:
        network = choose_network(wanted)
        network.check(backend)
    except LaunchError as error:
        rendezvous.decline(error)
        raise
    logger.info("%s", network)
    return network


def _discard(made: dist.ProcessGroup | None) -> None:
    """Abort the WORLD that was made, unless another one has replaced it."""
    if made is not None and dist.group.WORLD is made:
        torch_private.abort(made)
        if dist.is_initialized():
            dist.destroy_process_group()
