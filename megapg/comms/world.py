"""torch's WORLD: adopted from whoever made it, or made here and then closed here.

Ownership is identity: a :class:`World` destroys WORLD only while the current WORLD is the very
object it made, so what a caller set up, or put in its place since, is never touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megapg.comms.backends import backend_for
from megapg.comms.rollcall import RollCall
from megapg.errors import RendezvousError, SessionError
from megapg.launch import Launch, detect

# The one thing that outlives a session, by (address, port): the connection to the store where the
# ranks of this job meet. Ranks close at different moments, so whoever hosts the store must keep it
# until the process ends, and a second rendezvous on the same port would race with the first.
_MEETING_PLACES: dict[tuple[str, int], dist.Store] = {}


@dataclass
class World:
    """The default process group, and whether it is ours to destroy.

    Attributes:
        rank: this process's global rank.
        size: number of ranks.
        store: the store behind WORLD, shared by all its ranks.
        backend: as torch names it, for example ``"gloo"``.
        timeout: of collectives on WORLD, and so of those inside Megatron.
        generation: how often megapg made WORLD in this job; 0 where the caller made it.
    """

    rank: int
    size: int
    store: dist.Store
    backend: str
    timeout: timedelta
    generation: int = 0
    _made: dist.ProcessGroup | None = None
    _roll_call: RollCall | None = None

    @property
    def ours(self) -> bool:
        """Whether the current WORLD is the object that we made."""
        return self._made is not None and dist.group.WORLD is self._made

    @property
    def device_bound(self) -> bool:
        """Whether WORLD is tied to one device: then torch splits every group from it, together."""
        return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None

    def close(self, *, abort: bool, timeout: float) -> None:
        """Destroy WORLD if it is ours; leave it alone if it is not.

        Args:
            abort: do not wait for the other ranks; collectives under way fail.
            timeout: seconds to wait for the others in an orderly close.
        """
        if self._made is None:
            return
        if self._roll_call is not None:
            problem = RendezvousError("aborted") if abort else None
            self._roll_call.part(problem, timeout=timeout)
        if self.ours:
            if abort:
                c10d._abort_process_group()
            if dist.is_initialized():
                dist.destroy_process_group()
        self._made = None


def adopt() -> World:
    """The WORLD that somebody else has made."""
    default = dist.group.WORLD
    if default is None:
        raise RendezvousError("torch.distributed is not initialised: there is no WORLD to adopt.")
    config = dist.get_backend_config(default)
    kinds = {part.partition(":")[2] for part in config.split(",")}
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        store=c10d._get_default_store(),
        # One backend on every device goes by its plain name; otherwise the device map matters.
        backend=kinds.pop() if len(kinds) == 1 else config,
        timeout=_timeout_of(default),
    )


def found(*, backend: str | None, timeout: float, collective_timeout: timedelta | None) -> World:
    """Make WORLD from what the launcher said, once every rank is here.

    Args:
        backend: ``"nccl"`` where CUDA is available and ``"gloo"`` elsewhere, unless given.
        timeout: seconds to wait for ranks that are missing.
        collective_timeout: of collectives on WORLD; torch's default for the backend unless given.

    Raises:
        LaunchError: the environment is incomplete.
        RendezvousError: a rank did not come, the port is taken, the store can't be reached.
    """
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    row = backend_for(chosen)
    launch = detect()
    store = _meeting_place(launch, timeout)
    host = "the launcher's store" if launch.hosted else "the store that rank 0 hosts"
    roll_call = RollCall(store, "WORLD", launch.rank, range(launch.world_size), host)
    agreement = roll_call.meet({"backend": chosen}, timeout=timeout)
    made: dist.ProcessGroup | None = None
    try:
        if "nccl" in chosen:
            torch.cuda.set_device(launch.local_rank)  # before init: NCCL takes the current device
        with scoped_environment(row.creation_environment):
            dist.init_process_group(
                chosen,
                store=agreement.store,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=collective_timeout,
            )
        made = dist.group.WORLD
        world = adopt()
        # Backends read keys under the store's own timeout, and may first do so much later.
        store.set_timeout(world.timeout)
        roll_call.confirm(None, timeout=timeout)
    except BaseException as error:
        if made is not None and dist.group.WORLD is made:
            dist.destroy_process_group()
        else:
            roll_call.confirm(error, timeout=timeout)
        raise
    world.generation, world._roll_call, world._made = agreement.generation, roll_call, made
    return world


def imagine(rank: int, size: int) -> World:
    """WORLD on torch's fake backend: this process plays ``rank`` of ``size``; nothing is sent.

    Raises:
        SessionError: torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise SessionError(
            "a fake WORLD can't be made while torch.distributed is initialised; destroy the "
            "current one first."
        )
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
    world = adopt()
    world._made = dist.group.WORLD
    return world


@contextlib.contextmanager
def scoped_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set, and take them back at the end."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _meeting_place(launch: Launch, timeout: float) -> dist.Store:
    if not launch.address:
        return dist.HashStore()
    place = (launch.address, launch.port)
    if place not in _MEETING_PLACES:
        # One connection a process; what a launcher starts again meets apart from the dead.
        hosting = launch.rank == 0 and not launch.hosted
        try:
            _MEETING_PLACES[place] = _connect(launch, hosting, timeout)
        except (dist.DistError, TimeoutError) as error:
            doing = "host" if hosting else "reach"
            # Whether torch gives up first, and with which words, is a race: look for ourselves.
            reason = str(error).splitlines()[0] if hosting else _what_is_there(launch)
            raise RendezvousError(
                f"rank {launch.rank} could not {doing} the store at {launch.address}:"
                f"{launch.port} (MASTER_ADDR, MASTER_PORT from {launch.launcher}) within "
                f"{timeout:g} s: {reason}. "
                + (
                    "Another program may have the port; choose a free MASTER_PORT."
                    if hosting
                    else "Rank 0 hosts it: see whether rank 0 started and what it says."
                ),
                () if hosting else (0,),
            ) from error
    return dist.PrefixStore(f"megapg/attempt {launch.attempt}", _MEETING_PLACES[place])


def _connect(launch: Launch, hosting: bool, timeout: float) -> dist.Store:
    """Open the store within ``timeout`` seconds, come what may.

    torch's own timeout does not cover a port where something listens that is no store and says
    nothing; the thread that is left waiting for it in that case is a daemon.
    """
    connecting: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            store = dist.TCPStore(
                launch.address,
                launch.port,
                is_master=hosting,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
            connecting.set_result(store)
        except BaseException as error:
            connecting.set_exception(error)

    threading.Thread(target=connect, daemon=True, name="megapg store").start()
    try:
        return connecting.result(timeout + 1.0)
    except TimeoutError:
        raise TimeoutError("no answer") from None


def _what_is_there(launch: Launch) -> str:
    """Why the store can't be reached."""
    try:
        socket.create_connection((launch.address, launch.port), timeout=1.0).close()
    except socket.gaierror:
        return f"there is no host called {launch.address!r}"
    except OSError as error:
        return f"nobody listens there ({error.strerror or error})"
    return "something listens there that is no store"


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the group's collectives really have; the backend's default if unknown."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            found: timedelta = options._timeout
            return found
    return c10d._get_default_timeout(dist.Backend(dist.get_backend(group)))
