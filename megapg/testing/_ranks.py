"""The processes behind ``run_distributed``: a guard, a launcher and the ranks.

The caller starts this file as a script: the *guard*. The guard forks the *launcher*, which imports
the preload modules and forks the ranks. The guard stays single-threaded and does nothing else, so
it can always react. It ends with the caller (end of file on its standard input), and before it
exits, it kills and reaps all its descendants.

With ``serve`` as its argument, this file is the interpreter behind ``preloaded``: it imports the
preload modules once, and forks a guard for each caller that connects to its socket.

Only the standard library is imported here, and nothing of megapg. So the guard starts in
milliseconds, and the ranks have no module that the caller did not ask for.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import io
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process, spawn
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypedDict

STACK_SIGNAL = signal.SIGUSR2
"""Makes a rank (or the launcher, while it imports) write its Python stack and die."""

MAGIC = b"megapg-outcome\n"
"""The first bytes of a rank's file if it holds an outcome; otherwise it holds a stack dump."""

LAUNCHER = -1
"""Reported like a rank: exit code 0 says that the ranks run, 1 that file 0 says why they do not."""

PRELOADED = "MEGAPG_PRELOADED"
"""The environment variable with the path of a preloaded interpreter's socket."""

MOST_DESCRIPTORS = 253
"""The most descriptors that Linux passes with one message."""

# These variables are read when an interpreter starts or a library is imported.
_READ_EARLY = ("CUDA_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "TORCH_")

_ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_WARNINGS = "PYTHONWARNINGS"
# Values of PYTHONWARNINGS that a fork can apply afterwards.
_ACTIONS = ("default", "error", "always", "ignore", "module", "once")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


class Preload(TypedDict):
    """The first message to a preloaded interpreter."""

    modules: list[str]
    sys_path: list[str]
    directory: str
    listener: int  # descriptor of the socket


class Request(TypedDict):
    """The message of a caller to a preloaded interpreter, after its descriptors."""

    job: Job  # its descriptors are positions among those received
    environment: dict[str, str]
    surroundings: dict[str, object]


class Job(TypedDict):
    """The message to the guard. A plain dict when pickled, so that loading it imports nothing."""

    function: bytes  # pickled; only the ranks load it
    world_size: int
    preload: list[str]
    main: dict[str, Any]  # for multiprocessing.spawn.prepare
    sys_path: list[str]
    directory: str
    port: int
    reports: int  # descriptor: (rank, exit code, time.monotonic()) messages to the caller
    files: list[int]  # descriptors: one file per rank, for its outcome or its stack


def start() -> None:
    """Run a guard as the child of the caller."""
    caller = os.getppid()
    orders = Connection(0, writable=False)
    try:
        job: Job = pickle.loads(orders.recv_bytes())
    except EOFError:
        return
    guard(job, orders, lambda: os.getppid() == caller)


def serve() -> None:
    """Import once, and fork a guard for each caller, until the process that started this ends.

    That process writes once; from then on descriptor 0 is readable when it has closed its end.
    """
    lifeline = Connection(0, writable=False)
    config: Preload = pickle.loads(lifeline.recv_bytes())
    environment = dict(os.environ)
    sys.path[:] = config["sys_path"]
    os.chdir(config["directory"])
    with socket.socket(fileno=config["listener"]) as listener:
        while 0 not in select.select([0, listener.fileno()], [], [])[0]:
            _preload(config["modules"])  # on the first caller; later calls do nothing
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no guard stays as a zombie
            caller, _ = listener.accept()
            if not os.fork():
                listener.close()
                _guard_for(caller, environment)
            caller.close()


def _guard_for(caller: socket.socket, started_with: Mapping[str, str]) -> NoReturn:
    """Run as the guard of the caller, unless its ranks could tell the difference."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # Ctrl-C in the terminal is for the caller only
        _, received, _, _ = socket.recv_fds(caller, 1, MOST_DESCRIPTORS)
        credentials = caller.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        alive = _watch(struct.unpack("3i", credentials)[0])
        os.dup2(caller.detach(), 0)
        orders = Connection(0)
        request: Request = pickle.loads(orders.recv_bytes())
        environment = request["environment"]
        if request["surroundings"] != surroundings() or not _fits(environment, started_with):
            orders.send(0)
            os._exit(0)
        orders.send(os.getpid())
        os.environ.clear()
        os.environ.update(environment)
        if _WARNINGS not in started_with and (action := environment.get(_WARNINGS)):
            warnings.simplefilter(action)  # type: ignore[arg-type]  # one of _ACTIONS
        for number in (1, 2):
            os.dup2(received[number - 1], number)
            os.close(received[number - 1])
        job = request["job"]
        job["reports"] = received[job["reports"]]
        job["files"] = [received[position] for position in job["files"]]
        guard(job, orders, alive)
    except EOFError:
        pass  # the caller has ended
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def surroundings() -> dict[str, object]:
    """Return the properties, besides modules and environment, that a rank inherits."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "interpreter": (sys.executable, sys.version),
        "user": (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
        "cores": sorted(os.sched_getaffinity(0)),
    }


def _fits(environment: Mapping[str, str], started_with: Mapping[str, str]) -> bool:
    """True if an interpreter started in one environment behaves as one started in the other.

    The action for warnings may differ, because it can be set afterwards.
    """
    wanted, started = _read_at_start(environment), _read_at_start(started_with)
    if _WARNINGS not in started and wanted.get(_WARNINGS) in _ACTIONS:
        del wanted[_WARNINGS]
    return wanted == started


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(_READ_EARLY)}
    found.pop("PYTHONPATH", None)  # sys.path is sent in the request
    return found


def _watch(pid: int) -> Callable[[], bool]:
    """Return a function that is True while the process, which lives now, is alive."""
    watched = os.pidfd_open(pid)
    return lambda: not select.select([watched], [], [], 0)[0]


def guard(job: Job, orders: Connection, caller_lives: Callable[[], bool]) -> None:
    """Run the ranks, and end them with the caller.

    Args:
        job: the job to run.
        orders: from the caller, on descriptor 0; one message means that the ranks must stop.
        caller_lives: True while the caller lives. If a fork of the caller holds the other end of
            ``orders``, that does not close with the caller.
    """
    descriptors = [job["reports"], *job["files"]]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    me = os.getpid()
    launcher = os.fork()
    if not launcher:
        _die_with(me)
        os.setpgid(0, 0)
        _launch(job)
    for descriptor in descriptors:  # the caller must see end of file when the launcher dies
        os.close(descriptor)
    while caller_lives():
        if orders.poll(1.0):
            try:
                orders.recv_bytes()
            except EOFError:
                break
            os.kill(launcher, STACK_SIGNAL)
    with contextlib.suppress(OSError):
        os.killpg(launcher, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            # Orphans of every depth become children of the subreaper, also in new sessions.
            with contextlib.suppress(OSError), open(f"/proc/{me}/task/{me}/children") as children:
                for child in children.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.wait()


def _launch(job: Job) -> NoReturn:
    reports = Connection(job["reports"], readable=False)
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        faulthandler.enable(file=job["files"][0])
        faulthandler.register(STACK_SIGNAL, file=job["files"][0], all_threads=True, chain=True)
        for stream in (sys.stdout, sys.stderr):  # output of a killed rank must not be lost
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
        sys.path[:] = job["sys_path"]
        os.chdir(job["directory"])
        _preload(job["preload"])
        signal.pthread_sigmask(signal.SIG_BLOCK, [STACK_SIGNAL])
        faulthandler.unregister(STACK_SIGNAL)
        me = os.getpid()
        running: dict[int, int] = {}
        for rank in range(job["world_size"]):
            pid = os.fork()
            if not pid:
                _die_with(me)
                reports.close()
                _run(rank, job)
            running[pid] = rank

        def forward(*_: object) -> None:
            for pid in running:  # only their parent can be sure that a pid is still theirs
                with contextlib.suppress(ProcessLookupError):  # os.wait is returning this one
                    os.kill(pid, STACK_SIGNAL)

        signal.signal(STACK_SIGNAL, forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
    except BaseException as error:
        _write_outcome(job["files"][0], error, None)
        reports.send((LAUNCHER, 1, time.monotonic()))
        os._exit(1)
    with contextlib.suppress(BrokenPipeError):  # then the guard ends this process
        reports.send((LAUNCHER, 0, time.monotonic()))
        while running:
            pid, status = os.wait()
            if pid in running:
                exit_code = os.waitstatus_to_exitcode(status)
                reports.send((running.pop(pid), exit_code, time.monotonic()))
    os._exit(0)


def _preload(modules: Sequence[str]) -> None:
    """Import the modules of the ranks, without initialising CUDA.

    Some modules ask at import whether there is a GPU. torch would ask CUDA, which no fork of this
    process could use from then on. Asking NVML does no harm.
    """
    asked = os.environ.get(_ASKS_NVML)
    os.environ[_ASKS_NVML] = "1"
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        os.environ.pop(_ASKS_NVML, None)
        if asked is not None:
            os.environ[_ASKS_NVML] = asked


def _run(rank: int, job: Job) -> NoReturn:
    file = job["files"][rank]
    try:
        for other in job["files"]:
            if other != file:
                os.close(other)
        faulthandler.enable(file=file)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACK_SIGNAL])
        os.environ.update(_environment(rank, job["world_size"], job["port"]))
        current: Any = process.current_process()
        current._inheriting = True  # multiprocessing's mark: a script without a guard is refused
        spawn.prepare(job["main"])
        del current._inheriting
        result = pickle.loads(job["function"])()
        try:
            error, payload = None, pickle.dumps(result)
        except Exception as reason:
            kind = f"{type(result).__module__}.{type(result).__qualname__}"
            raise TypeError(
                f"the function returned a {kind} that cannot be pickled ({reason}); return plain "
                "data, arrays or tensors"
            ) from reason
    except BaseException as raised:
        error, payload = raised, None
        if "torch" in sys.modules:  # sessions may still be open
            from megapg.ownership.closing import explain

            explain(raised)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _libc.fflush(None)
    # From here on the file holds an outcome, and a late signal must not write a stack into it.
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    faulthandler.disable()
    try:
        _write_outcome(file, error, payload)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # destructors of torch and gloo may wait for ranks that have ended


def _write_outcome(file: int, error: BaseException | None, payload: bytes | None) -> None:
    """Write (ok, summary, traceback, time) as one pickle, then the result or the exception."""
    now = time.monotonic()
    summary, trace = "", ""
    if error is not None:
        summary = f"{type(error).__name__}: {error}"
        own = error.__traceback__
        trace = "".join(traceback.format_exception(type(error), error, own and own.tb_next))
        payload = pickle.dumps(None)
        with contextlib.suppress(Exception):
            payload = pickle.dumps(error)
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    with open(file, "wb", closefd=False) as stream:
        stream.write(MAGIC)
        pickle.dump((error is None, summary, trace, now), stream)
        stream.write(payload or b"")


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that ``torchrun --nproc-per-node=<world_size>`` sets."""
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "ROLE_WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    return {name: str(value) for name, value in variables.items()}


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError):  # Linux only
        _libc.prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    serve() if "serve" in sys.argv else start()
