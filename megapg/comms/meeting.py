"""Where the ranks of a job meet: the store, hosted by rank 0 or by the launcher."""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import torch.distributed as dist

from megapg.errors import RendezvousError
from megapg.launch import Launch

# The one thing that outlives a session, by (address, port): the connection to the store where the
# ranks of this job meet. Ranks close at different moments, so whoever hosts the store must keep it
# until the process ends, and a second rendezvous on the same port would race with the first.
_MEETING_PLACES: dict[tuple[str, int], dist.Store] = {}

# For how long torch may go on trying to connect after we have given up, in seconds: it pauses
# between two tries, by chance up to three seconds.
_AFTERWARDS = 5.0


def meeting_place(launch: Launch, timeout: float) -> dist.Store:
    """The store of the job that ``launch`` is part of; a process alone has one to itself.

    Args:
        launch: who this process is.
        timeout: seconds to wait for whoever hosts it.

    Raises:
        RendezvousError: it can't be hosted, or reached.
    """
    if not launch.address:
        return dist.HashStore()
    place = (launch.address, launch.port)
    if place in _MEETING_PLACES and not _answers(_MEETING_PLACES[place]):
        del _MEETING_PLACES[place]  # its host died: whoever hosts it now is to be met anew
    if place not in _MEETING_PLACES:
        hosting = launch.rank == 0 and not launch.hosted
        try:
            _MEETING_PLACES[place] = _connect(launch, hosting, timeout)
        except (dist.DistError, TimeoutError) as error:
            doing = "host" if hosting else "reach"
            # Whether torch gives up first, and with which words, is a race: look for ourselves.
            reason = str(error).splitlines()[0] if hosting else _what_is_there(launch)
            raise RendezvousError(
                f"rank {launch.rank} could not {doing} the store at {launch.address}:"
                f"{launch.port} ({launch.origin}) within {timeout:g} s: {reason.rstrip('.')}. "
                + (_why_not_here(launch) if hosting else _whose_fault(launch)),
                () if hosting else (0,),
            ) from error
    # What a launcher starts again meets apart from the dead, and another job that came to the same
    # port by chance apart from this one.
    return dist.PrefixStore(f"megapg/{launch.job}/{launch.attempt}", _MEETING_PLACES[place])


def _answers(store: dist.Store) -> bool:
    """Whether the store is still there."""
    try:
        store.check(["megapg"])
    except dist.DistError:
        return False
    return True


def _connect(launch: Launch, hosting: bool, timeout: float) -> dist.Store:
    """Open the store within ``timeout`` seconds, come what may.

    torch's own timeout does not cover a port where something listens that is no store and says
    nothing; the thread that is left waiting for it in that case is a daemon.
    """
    deadline = time.monotonic() + timeout
    if not hosting:
        _await_listener(launch, deadline)
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

    thread = threading.Thread(target=connect, daemon=True, name="megapg store")
    thread.start()
    try:
        return connecting.result(max(deadline - time.monotonic(), 0.0) + 1.0)
    except TimeoutError:
        # One that comes back from C++ while the interpreter is exiting ends it with SIGABRT.
        atexit.register(thread.join, _AFTERWARDS)
        raise TimeoutError("no answer") from None


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
    return "something listens there that is no store"


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
            return "Another program may have the port; choose a free MASTER_PORT."
    return (
        f"That is no address of {socket.gethostname()}, where rank 0 runs; set MASTER_ADDR to one."
    )
