"""The guards behind ``run_distributed``, and the interpreter from which they fork."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Protocol

from megapg.launch.environment import overridden
from megapg.testing import _ranks

if TYPE_CHECKING:  # a process that only starts an interpreter does not need torch
    from torch.distributed import TCPStore

_GUARD_S = 10.0
"""How long the guard may take to kill and reap everything."""


class Guard(Protocol):
    def wait(self, timeout: float) -> object: ...

    def kill(self) -> None: ...


class ForkedGuard:
    """A guard that is no child of this process, watched by a descriptor that outlives the pid."""

    def __init__(self, pid: int) -> None:
        self._watched = os.pidfd_open(pid)

    def wait(self, timeout: float = _GUARD_S) -> None:
        if not select.select([self._watched], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("the guard", timeout)
        os.close(self._watched)

    def kill(self) -> None:
        signal.pidfd_send_signal(self._watched, signal.SIGKILL)


def fork_guard(
    path: str, job: _ranks.Job, environment: dict[str, str], timeout: float
) -> tuple[Guard, Connection] | None:
    """Return a guard forked by the preloaded interpreter at ``path``; None if that can't run it."""
    descriptors = [1, 2, job["reports"], *job["files"]]
    if len(descriptors) > _ranks.MOST_DESCRIPTORS:
        return None
    moved: _ranks.Job = {**job, "reports": 2, "files": list(range(3, len(descriptors)))}
    request: _ranks.Request = {
        "job": moved,
        "environment": environment,
        "surroundings": _ranks.surroundings(),
    }
    with contextlib.ExitStack() as undo:
        try:
            caller = undo.enter_context(socket.socket(socket.AF_UNIX))
            caller.connect(path)
            socket.send_fds(caller, [b"."], descriptors)
            orders = undo.enter_context(Connection(caller.detach()))
            orders.send_bytes(pickle.dumps(request))
            pid = orders.recv() if orders.poll(timeout) else 0
            if pid:
                guard = ForkedGuard(pid)
                undo.pop_all()
                return guard, orders
        except (OSError, EOFError):  # it has ended
            pass
    return None


@contextlib.contextmanager
def preloaded(*modules: str) -> Iterator[None]:
    """Let every :func:`run_distributed` in this block fork its ranks from one interpreter. ::

        @pytest.fixture(scope="session", autouse=True)
        def preloaded_interpreter():
            with preloaded("torch", "megatron.core"):
                yield

    The interpreter imports ``modules`` once, for the first run. Each later run saves the seconds of
    these imports. The ranks are always forks of an interpreter, so they share nothing with each
    other or with earlier runs. All of ``modules`` are imported in them.

    A run gets a fresh interpreter, as without this block, if its surroundings have changed since
    the block began. The surroundings are the user, resource limits, CPU cores, and variables that
    are read at start-up (``PYTHON...``, ``OMP_...``, ``TORCH_...``).

    Processes started inside the block find the interpreter as well, by an environment variable. It
    ends with the block, or with this process.

    Args:
        modules: modules to import; as for ``preload``, they must not start threads or touch CUDA. A
            failed import is reported on standard error, and the runs continue without it.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with contextlib.ExitStack() as cleanup:
        # The path of a socket has at most 107 bytes, and TMPDIR alone may be longer.
        place = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > 80 else None
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="megapg-", dir=place))
        path = os.path.join(folder, "socket")
        theirs, lifeline = Pipe(duplex=False)
        with theirs, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)
            interpreter = subprocess.Popen(
                [sys.executable, "-P", _ranks.__file__, "serve"],
                stdin=theirs.fileno(),
                pass_fds=[listener.fileno()],
                env=environment,
                start_new_session=True,
            )
            cleanup.callback(wait_or_kill, interpreter)
            cleanup.enter_context(lifeline)
            config: _ranks.Preload = {
                "modules": list(modules),
                "sys_path": [str(entry) for entry in sys.path],
                "directory": os.getcwd(),
                "listener": listener.fileno(),
            }
            lifeline.send_bytes(pickle.dumps(config))
        with overridden({_ranks.PRELOADED: path}):
            yield


def end_guard(guard: Guard, orders: Connection, store: TCPStore) -> None:
    """End the guard, then the store: ``store`` is the last reference to it."""
    orders.close()
    wait_or_kill(guard)


def wait_or_kill(process: Guard) -> None:
    try:
        process.wait(_GUARD_S)
    except subprocess.TimeoutExpired:  # its children die with it
        process.kill()
        process.wait(_GUARD_S)
