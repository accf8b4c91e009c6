"""Runs a function on several real ranks of this host, from a test, a notebook or a script."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import pickletools
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process
from multiprocessing.connection import Connection, Pipe
from typing import IO, Generic, TypeVar

from torch.distributed import TCPStore

from megapg.errors import RankFailedError
from megapg.testing import _ranks
from megapg.testing._guard import Guard, end_guard, fork_guard, preloaded

__all__ = ["Ranks", "preloaded", "run_distributed"]

T = TypeVar("T")

_GRACE_S = 5.0
"""Time for the other ranks after one failed: they may be about to fail for the same reason."""

_STACKS_S = 5.0
"""Time for the ranks to write their stacks before they are killed."""

_DEFAULT_PRELOAD = ("torch", "torch.distributed")


def run_distributed(
    fn: Callable[[], T],
    world_size: int,
    *,
    deadline: float = 120.0,
    preload: Sequence[str] = _DEFAULT_PRELOAD,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Run ``fn`` in ``world_size`` processes on this host and return the result of each rank.

    Every rank is a real process with the environment that ``torchrun`` sets. So
    ``megapg.session(...)`` and ``torch.distributed.init_process_group("gloo")`` work unchanged.
    Neither is called for you. ::

        def total(start: int) -> int:
            dist.init_process_group("gloo")
            value = torch.tensor(start + dist.get_rank())
            dist.all_reduce(value)
            return int(value)


        assert run_distributed(partial(total, 10), world_size=4) == [46] * 4

    The processes share nothing with the caller but standard output and standard error. They are
    forks of one fresh interpreter, which imports ``preload`` before it forks. Name the heavy
    modules that ``fn`` needs there (``"megatron.core"``): they are imported once, not once per
    rank. They are imported before ``RANK`` is set, must not start threads or touch CUDA, and give
    all ranks the same hash seed. Each rank imports the module of ``fn``; a script must guard its
    call with ``if __name__ == "__main__"``. Handlers registered with ``atexit`` do not run in the
    ranks.

    Args:
        fn: the function to run: a module-level function; ``functools.partial`` binds its arguments.
            Function, arguments and results travel by pickle.
        world_size: number of ranks.
        deadline: seconds for the whole run, start of the processes included. When it passes, every
            rank is killed.
        preload: modules to import before the ranks fork.
        env: environment variables for the ranks, in addition to this process's. ``OMP_NUM_THREADS``
            is 1 if neither sets it; ``RANK`` and similar variables can't be overridden.

    Returns:
        The result of every rank, in rank order.

    Raises:
        RankFailedError: a rank raised, died, returned a value that can't be pickled, or did not
            finish in time. When one fails, the others get five seconds and are then killed. The
            error holds one exception per failed rank. It is the exception of the rank, with the
            remote traceback as a note (a ``RuntimeError`` if it can't be pickled); a
            ``ChildProcessError`` with exit code or signal; or a ``TimeoutError`` with the rank's
            position, and its stack as a note.
        TypeError: ``fn`` can't be pickled. Nothing was started.
        ValueError: ``world_size`` or ``deadline`` is not positive. Nothing was started.

    After a return, an exception or Ctrl-C, no process, thread, descriptor or port of the ranks is
    left. If this process is killed, the ranks are too.
    """
    with Ranks(fn, world_size, deadline=deadline, preload=preload, env=env) as ranks:
        return ranks.results()


class Ranks(Generic[T]):
    """The ranks of :func:`run_distributed` while they run, for callers with other work to do. ::

        with Ranks(fn, world_size=4) as ranks:
            while not ranks.done(timeout=0.1):
                screen.update(waiting_for=ranks.running)
            results = ranks.results()

    The processes start with the block and end with it. The deadline counts from the start of the
    block and is enforced by :meth:`done` and :meth:`results`. A handle serves one block and one
    thread. Arguments and their errors are those of :func:`run_distributed`.
    """

    def __init__(
        self,
        fn: Callable[[], T],
        world_size: int,
        *,
        deadline: float = 120.0,
        preload: Sequence[str] = _DEFAULT_PRELOAD,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if getattr(process.current_process(), "_inheriting", False):
            raise RuntimeError(
                "ranks are started while a rank imports this script: put the call under "
                "if __name__ == '__main__'"
            )
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        if not 0 < deadline < math.inf:
            raise ValueError(f"deadline must be a positive number of seconds, not {deadline}")
        self._function = _pickled(fn)
        # "__main__", or "__mp_main__" if this process is itself a rank.
        self._main = _main_module() if _refers_to_main(self._function) else {}
        self._world_size = world_size
        self._deadline = deadline
        self._preload = [preload] if isinstance(preload, str) else list(preload)
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, **(env or {})}
        self._pending = set(range(world_size))
        self._results: dict[int, T] = {}
        self._failures: dict[int, Exception] = {}
        self._failed_at: dict[int, float] = {}  # without those that were stopped
        self._stopped = ""  # why the pending ranks were stopped
        self._forked = False
        self._files: list[IO[bytes]] = []
        self._cleanup = contextlib.ExitStack()
        self._orders: Connection | None = None  # to the guard, which ends when this closes
        self._reports: Connection | None = None  # from the launcher

    @property
    def running(self) -> frozenset[int]:
        """The ranks that have neither finished nor failed, as of the last :meth:`done`."""
        return frozenset(self._pending)

    def __enter__(self) -> Ranks[T]:
        if self._reports is not None:
            raise RuntimeError("a Ranks handle serves one with block; make another")
        self._expires = self._limit = time.monotonic() + self._deadline
        with self._cleanup:  # undoes a start that fails half-way
            self._start()
            self._cleanup = self._cleanup.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def done(self, timeout: float | None = 0.0) -> bool:
        """Wait for every rank to finish or fail, at most ``timeout`` seconds. True if all have.

        ``None`` waits as long as the deadline allows. After True, nothing of the run is left but
        its :meth:`results`.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while self._pending:
            if self._reports is None or self._orders is None or self._reports.closed:
                raise RuntimeError("the ranks live inside the with block of their handle only")
            if time.monotonic() >= self._limit:
                self._stop(self._reports, self._orders)
            elif self._reports.poll(max(0.0, min(until, self._limit) - time.monotonic())):
                self._receive(self._reports)
            elif time.monotonic() >= until:
                return False
        self._cleanup.close()
        return True

    def results(self) -> list[T]:
        """Wait for every rank and return the results in rank order.

        Raises:
            RankFailedError: as :func:`run_distributed` does.
        """
        self.done(timeout=None)
        if not self._failures:
            return [self._results[rank] for rank in range(self._world_size)]
        failures = dict(sorted(self._failures.items()))
        first = f", rank {self._culprit()} first" if self._failed_at else ""
        lines = [f"{len(failures)} of {self._world_size} ranks failed{first}:"]
        for rank, failure in failures.items():
            summary = f"{type(failure).__name__}: {failure}"
            lines.append(f"  rank {rank}: {summary.splitlines()[0]}")
        error = RankFailedError("\n".join(lines), list(failures.values()))
        error.failures, error.results = failures, dict(self._results)
        raise error

    def _start(self) -> None:
        # Hosted here, the store has its port before a rank needs it, and keeps it.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Files, not pipes: a rank writes a result of any size and exits, before it is read.
        for _ in range(self._world_size):
            file = tempfile.TemporaryFile()  # noqa: SIM115
            self._files.append(self._cleanup.enter_context(file))
        files = [file.fileno() for file in self._files]
        self._reports, reports = Pipe(duplex=False)
        self._cleanup.enter_context(self._reports)
        job: _ranks.Job = {
            "function": self._function,
            "world_size": self._world_size,
            "preload": self._preload,
            "main": self._main,
            "sys_path": [str(entry) for entry in sys.path],
            "directory": os.getcwd(),
            "port": store.port,
            "reports": reports.fileno(),
            "files": files,
        }
        with reports:
            guard, self._orders = self._start_guard(job)
            self._cleanup.callback(end_guard, guard, self._orders, store)

    def _start_guard(self, job: _ranks.Job) -> tuple[Guard, Connection]:
        """Start the guard, and send it the job over a connection. The guard ends when it closes."""
        path = self._environment.get(_ranks.PRELOADED)
        if path and (forked := fork_guard(path, job, self._environment, self._deadline)):
            return forked
        theirs, orders = Pipe(duplex=False)
        try:
            with theirs:
                guard = subprocess.Popen(
                    [sys.executable, "-P", _ranks.__file__],
                    stdin=theirs.fileno(),
                    pass_fds=[job["reports"], *job["files"]],
                    env=self._environment,
                    start_new_session=True,  # Ctrl-C in the terminal is for the caller only
                )
        except BaseException:
            orders.close()
            raise
        with contextlib.suppress(BrokenPipeError):  # a dead guard shows as the end of the reports
            orders.send_bytes(pickle.dumps(job))
        return guard, orders

    def _receive(self, reports: Connection) -> None:
        try:
            rank, exit_code, when = reports.recv()
        except EOFError:  # the launcher died, and its ranks with it
            self._settle_all(time.monotonic())
            return
        if rank != _ranks.LAUNCHER:
            self._settle(rank, exit_code, when)
        elif exit_code == 0:
            self._forked = True
        else:
            self._settle(0, 0, when)
            self._settle_all(when)

    def _settle_all(self, when: float) -> None:
        for rank in sorted(self._pending):
            self._settle(rank, None, when)

    def _settle(self, rank: int, exit_code: int | None, when: float) -> None:
        """Convert the file of a rank into its result or failure. ``exit_code`` None: unknown."""
        self._pending.discard(rank)
        file = self._files[rank]
        file.seek(0)
        if exit_code == 0 and file.read(len(_ranks.MAGIC)) == _ranks.MAGIC:
            self._settle_outcome(rank, file)
            return
        file.seek(0)
        stack = _without_our_frames(file.read().decode(errors="replace"))
        if exit_code in (None, -_ranks.STACK_SIGNAL) and self._stopped:
            failure: Exception = TimeoutError(f"{self._stopped}{_position(stack)}")
            when = math.inf
        elif exit_code is None:
            lost = "lost with the launcher" if self._forked else "not started: no launcher"
            failure = ChildProcessError(f"{lost}{_position(stack)}")
        elif exit_code < 0:
            failure = ChildProcessError(f"killed by {_signal_name(-exit_code)}{_position(stack)}")
        else:
            failure = ChildProcessError(f"exited with code {exit_code} before it returned")
        self._fail(rank, failure, when, f"Stack of {self._origin(rank)}:\n{stack}" if stack else "")

    def _settle_outcome(self, rank: int, file: IO[bytes]) -> None:
        ok, summary, trace, when = pickle.load(file)
        try:
            value = pickle.load(file)
        except Exception as error:
            ok, value = False, None
            summary = summary or f"its result cannot be unpickled here: {error!r}"
        if ok:
            self._results[rank] = value
            return
        failure = value if isinstance(value, Exception) else RuntimeError(summary)
        note = f"Raised by {self._origin(rank)}:\n{trace.rstrip()}" if trace else ""
        self._fail(rank, failure, when, note)

    def _fail(self, rank: int, failure: Exception, when: float, note: str) -> None:
        if note:
            failure.add_note(note)
        if not self._failures:
            self._limit = min(self._limit, time.monotonic() + _GRACE_S)
        self._failures[rank] = failure
        if when < math.inf:
            self._failed_at[rank] = when

    def _origin(self, rank: int) -> str:
        return f"rank {rank}" if self._forked else "the launcher, before it started the ranks"

    def _stop(self, reports: Connection, orders: Connection) -> None:
        """Make the pending ranks write their stacks and die."""
        if time.monotonic() >= self._expires:
            self._stopped = f"not finished at the deadline of {self._deadline:g} s"
        else:
            self._stopped = f"stopped {_GRACE_S:g} s after rank {self._culprit()} failed"
        if not self._forked:
            self._stopped += f", the ranks not yet started (preload={self._preload})"
        with contextlib.suppress(BrokenPipeError):
            orders.send_bytes(b"stop")
        until = time.monotonic() + _STACKS_S
        while self._pending and reports.poll(max(0.0, until - time.monotonic())):
            self._receive(reports)
        self._settle_all(math.inf)

    def _culprit(self) -> int:
        # Reports may come in another order than the failures: a failure may cause others.
        return min(self._failed_at, key=self._failed_at.__getitem__)


def _pickled(fn: Callable[[], object]) -> bytes:
    try:
        return pickle.dumps(fn)
    except Exception as error:
        raise TypeError(
            f"{fn!r} cannot be sent to the ranks ({error}): bind arguments with functools.partial "
            "over a module-level function, in place of a lambda or a local function"
        ) from error


def _refers_to_main(pickled: bytes) -> bool:
    """True if a pickled object is of the main module. Its name may also be part of a text."""
    return any(word in ("__main__", "__mp_main__") for _, word, _ in pickletools.genops(pickled))


def _main_module() -> dict[str, str]:
    """Return the data with which ``multiprocessing.spawn.prepare`` makes ``__main__`` importable.

    ``multiprocessing.spawn.get_preparation_data`` would also fix the caller's start method.
    """
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return {"init_main_from_name": spec.name}
    if getattr(main, "__file__", None):
        return {"init_main_from_path": os.path.abspath(main.__file__ or "")}
    raise TypeError(
        "the function or an argument is defined in an interactive session, where the ranks cannot "
        "import it: put it in a file"
    )


def _without_our_frames(stack: str) -> str:
    lines = stack.splitlines()
    return "\n".join(line for line in lines if f'"{_ranks.__file__}"' not in line).strip()


def _position(stack: str) -> str:
    """Return the innermost frame of a faulthandler dump, which has the most recent call first."""
    found = re.search(r'Current thread.*\n  File "(.+)", line (\d+) in (.+)', stack)
    if found is None:
        return ""
    path, line, function = found.groups()
    return f", in {function} ({os.path.basename(path)}:{line})"


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):  # real-time signals have no name
        return signal.Signals(number).name
    return f"signal {number}"
