"""Where the ranks of a job meet: the store, hosted by rank 0 or by the launcher."""

from __future__ import annotations

import atexit
import contextlib
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from megapg.errors import RendezvousError
from megapg.launch import Launch
from megapg.rendezvous.bounded import bounded
from megapg.rendezvous.store import Host, Store, StoreError

# The one thing that outlives a session, by (address, port): the connection to the store where the
# ranks of this job meet. Ranks close at different moments, so whoever hosts the store must keep it
# until the process ends, and a second rendezvous on the same port would race with the first.
_STORES: dict[tuple[str, int], Store] = {}

# For how long torch may go on trying to connect after we have given up, in seconds: it pauses
# between two tries, by chance up to three seconds.
_AFTERWARDS = 5.0


def job_store(launch: Launch, timeout: float) -> Store:
    """The store of the job that ``launch`` is part of; a process alone has one to itself.

    Args:
        launch: who this process is.
        timeout: seconds to wait for whoever hosts it.

    Raises:
        RendezvousError: it can't be hosted, or reached.
    """
    if not launch.address:
        return Store(dist.HashStore(), Host("this process's own store", launch.rank, here=True))
    place, deadline = (launch.address, launch.port), time.monotonic() + timeout
    if place in _STORES and _is_gone(_STORES[place], deadline):
        del _STORES[place]  # its host died: whoever hosts it now is to be met anew
    if place not in _STORES:
        hosting = launch.rank == 0 and not launch.hosted
        try:
            opened = _connect(launch, hosting, deadline)
        except (RuntimeError, TimeoutError) as error:  # older releases have no DistError for it
            doing = "host" if hosting else "reach"
            # Whether torch gives up first, and with which words, is a race: look for ourselves.
            reason = str(error).splitlines()[0] if hosting else _what_is_there(launch)
            raise RendezvousError(
                f"rank {launch.rank} could not {doing} the store at {launch.address}:"
                f"{launch.port} ({launch.origin}) within {timeout:g} s: {reason.rstrip('.')}. "
                + (_why_not_here(launch) if hosting else _whose_fault(launch)),
                () if hosting or launch.hosted else (0,),
            ) from error
        _STORES[place] = Store(opened, _host(launch, hosting))
    # What a launcher starts again meets apart from the dead, and another job that came to the same
    # port by chance apart from this one.
    return _STORES[place].view(f"megapg/{launch.job}/{launch.attempt}")


@atexit.register
def _linger() -> None:
    """After the sessions that are closed at exit: what is registered then is not called."""
    for store in _STORES.values():
        store.linger()


def _host(launch: Launch, hosting: bool) -> Host:
    if launch.hosted:
        return Host(f"the store that {launch.launcher} hosts at {launch.address}:{launch.port}")
    where = f" on {launch.hosts[0]}" if launch.hosts else ""
    name = f"the store that rank 0{where} hosts at {launch.address}:{launch.port}"
    return Host(name, 0, here=hosting)


def _is_gone(store: Store, deadline: float) -> bool:
    """Whether whoever hosted the store has died.

    Raises:
        RendezvousError: it is there and does not answer.
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


def _connect(launch: Launch, hosting: bool, deadline: float) -> dist.Store:
    """Open the store by the deadline, come what may.

    torch's own timeout does not cover a port where something listens that is no store, or is one
    whose host is frozen, and says nothing.
    """
    timeout = max(deadline - time.monotonic(), 0.1)
    if not hosting:
        _await_listener(launch, deadline)

    def connect() -> dist.Store:
        return dist.TCPStore(
            launch.address,
            launch.port,
            is_master=hosting,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )

    latest = max(deadline, time.monotonic()) + 1.0
    return bounded(connect, latest, name="megapg store", at_exit=_AFTERWARDS)


def _await_listener(launch: Launch, deadline: float) -> None:
    """Wait until somebody listens where the store shall be.

    torch would wait too, but prints a C++ stack when it gives up, and does so in a thread that
    nobody can stop: one that comes back while the process is exiting ends it with SIGABRT.
    """
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            socket.create_connection((launch.address, launch.port), timeout=left).close()
            return
        except (OSError, UnicodeError) as error:  # the latter: no name that a host can have
            if time.monotonic() + 0.1 >= deadline:
                raise TimeoutError(str(error)) from error
        time.sleep(0.1)


def _what_is_there(launch: Launch) -> str:
    """Why the store can't be reached."""
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
    """What to do about a store that this rank should host and can't."""
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
