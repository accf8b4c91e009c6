"""Connect to the store of a job, hosted by rank 0 or by the launcher."""

from __future__ import annotations

import atexit
import contextlib
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from megapg import torch_private
from megapg.errors import LaunchError, RendezvousError
from megapg.launch import Launch
from megapg.rendezvous.call_in_thread import bounded
from megapg.rendezvous.store import Host, Store, StoreError

# Connections to the stores of jobs, by (address, port). They outlive sessions: ranks close at
# different times, so the host must keep the store until its process exits. Hosting another store on
# the same port would race with the first.
_STORES: dict[tuple[str, int], Store] = {}

_INTERNET = (socket.AF_INET, socket.AF_INET6)

# Seconds that torch may go on connecting after this module gave up. Between two tries, torch pauses
# for a random time of up to three seconds.
_STILL_CONNECTING = 5.0


def job_store(launch: Launch, timeout: float) -> Store:
    """Return the store of the job of ``launch``. A single process has its own store.

    Args:
        launch: rank, world size and address of this process.
        timeout: seconds to wait for the host of the store.

    Raises:
        RendezvousError: the store can't be hosted, or reached.
        LaunchError: the socket of the launch is not this process's.
    """
    if not launch.address:
        return Store(dist.HashStore(), Host("this process's own store", launch.rank, here=True))
    place, deadline = (launch.address, launch.port), time.monotonic() + timeout
    if place in _STORES and _is_gone(_STORES[place], deadline):
        del _STORES[place]  # its host died: connect to the new host
    if place not in _STORES:
        hosting = launch.rank == 0 and not launch.hosted
        if hosting and launch.socket is not None:
            _check_socket(launch, launch.socket)
        try:
            opened = connect(launch, hosting, deadline)
        except (RuntimeError, TimeoutError) as error:  # older releases do not raise a DistError
            doing = "host" if hosting else "reach"
            # torch may give up first or not, with various messages, so find the reason here.
            reason = str(error).splitlines()[0] if hosting else what_is_there(launch)
            raise RendezvousError(
                f"rank {launch.rank} could not {doing} the store at {launch.address}:"
                f"{launch.port} ({launch.origin}) within {timeout:g} s: {reason.rstrip('.')}. "
                + (_why_not_here(launch) if hosting else _whose_fault(launch)),
                () if hosting or launch.hosted else (0,),
            ) from None
        _STORES[place] = Store(opened, _host(launch, hosting))
    # Separate keys per job and attempt, so that restarted ranks do not meet dead ones, and another
    # job on the same port does not meet this one.
    return _STORES[place].view(f"megapg/{launch.job}/{launch.attempt}")


@atexit.register
def _linger() -> None:
    """Keep the stores up for a while at exit. Runs after sessions are closed at exit.

    A function registered with atexit at that point would not be called any more.
    """
    for store in _STORES.values():
        store.linger()


def _host(launch: Launch, hosting: bool) -> Host:
    if launch.hosted:
        return Host(f"the store that {launch.launcher} hosts at {launch.address}:{launch.port}")
    where = f" on {launch.hosts[0]}" if launch.hosts else ""
    name = f"the store that rank 0{where} hosts at {launch.address}:{launch.port}"
    return Host(name, 0, here=hosting)


def _is_gone(store: Store, deadline: float) -> bool:
    """True if the host of the store has died.

    Raises:
        RendezvousError: the host is alive but does not respond.
    """
    try:
        store.come_back(deadline)
        with store.until(deadline):
            store.check(["megapg"])
    except StoreError as error:
        if not error.gone:
            raise
        return True
    return False


def connect(launch: Launch, hosting: bool, deadline: float) -> dist.Store:
    """Connect to the store by the deadline.

    torch's own timeout does not apply if the port belongs to something else than a store, or to a
    store whose host is frozen.
    """
    timeout = max(deadline - time.monotonic(), 0.1)
    bound = launch.socket if hosting else None
    if not hosting:
        _await_listener(launch, deadline)

    def connecting() -> dist.Store:
        return dist.TCPStore(
            launch.address,
            launch.port,
            is_master=hosting,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=bound,
            use_libuv=bound is None or torch_private.libuv_takes_a_socket(),
        )

    latest = max(deadline, time.monotonic()) + 1.0
    return bounded(connecting, latest, name="megapg store", at_exit=_STILL_CONNECTING)


def _check_socket(launch: Launch, descriptor: int) -> None:
    """Raise a LaunchError if the descriptor is no socket that is bound to the launch's port."""
    with contextlib.suppress(OSError):
        known = socket.socket(fileno=descriptor)
        try:
            if known.family in _INTERNET and known.getsockname()[1] == launch.port:
                return
        finally:
            known.detach()
    raise LaunchError(
        f"rank {launch.rank}: socket={descriptor} of launch= is not bound to port {launch.port} in "
        "this process. The launch was made for another process, which may have been restarted: "
        "make new launches for all ranks."
    )


def _await_listener(launch: Launch, deadline: float) -> None:
    """Wait until the store's port accepts connections.

    torch would wait too, but prints a C++ stack when it gives up. It also waits in a thread that
    can't be stopped: if it returns while the process is exiting, the process ends with SIGABRT.
    """
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            socket.create_connection((launch.address, launch.port), timeout=left).close()
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            if time.monotonic() + 0.1 >= deadline:
                raise TimeoutError(str(error)) from error
        time.sleep(0.1)


def what_is_there(launch: Launch) -> str:
    """Return why the store can't be reached."""
    try:
        socket.create_connection((launch.address, launch.port), timeout=1.0).close()
    except (socket.gaierror, UnicodeError):
        return f"there is no host called {launch.address!r}"
    except OSError as error:
        return f"nobody listens there ({error.strerror or error})"
    return "something listens there that is no store, or one whose host is stopped"


def _whose_fault(launch: Launch) -> str:
    if launch.hosted:
        return f"{launch.launcher} hosts it: see whether it still runs, and what it says."
    where = f" on {launch.hosts[0]}" if launch.hosts else ""
    return f"Rank 0{where} hosts it: see whether rank 0 started and what it says."


def _why_not_here(launch: Launch) -> str:
    """Return what to do if this rank can't host the store."""
    addresses = set()
    with contextlib.suppress(OSError, UnicodeError):
        addresses = {info[-1][0] for info in socket.getaddrinfo(launch.address, None)}
    for address in addresses:
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))
            return (
                "Another program may have the port, or a second process came as rank 0; choose a "
                "free MASTER_PORT, or give each process a rank of its own."
            )
    return (
        f"That is no address of {socket.gethostname()}, where rank 0 runs; set MASTER_ADDR to one."
    )
