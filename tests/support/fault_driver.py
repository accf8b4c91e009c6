"""Fork ranks from one warm interpreter, for tests that need hundreds of ranks and kill many.

The interpreter is itself a rank of ``run_distributed``, starts no thread, and forks on request.
Every rank is a real process with a launcher's environment. The ranks never outlive the interpreter,
and the interpreter never outlives the tests.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path

from ports import free_port

from megapg.testing.distributed import Ranks

PRELOAD = (
    "megapg.tools.demo.gpt",
    "megapg.checkpoint.save",
    "megapg.checkpoint.load",
    "megapg.testing",
)
_PR_SET_PDEATHSIG = 1


@dataclass
class End:
    """The end of a rank: it returned ``value``, raised ``error``, or a signal ended it."""

    value: object = None
    error: BaseException | None = None
    trace: str = ""
    signal: int = 0
    stack: str = ""

    def get(self):
        """Return the rank's value, or raise its error."""
        if self.error is not None:
            self.error.add_note(self.trace)
            raise self.error
        assert not self.signal, f"{signal.Signals(self.signal).name}\n{self.stack}"
        return self.value


class Forge:
    """The interpreter, as the tests see it. Use it as a context manager."""

    def __init__(self, *modules):
        self._modules = [*PRELOAD, *modules]
        self._jobs = {}

    def __enter__(self):
        with contextlib.ExitStack() as undo:
            self._folder = undo.enter_context(tempfile.TemporaryDirectory())
            address = f"{self._folder}/forge"
            work = partial(main, address, self._modules, self._folder)
            listener = undo.enter_context(Listener(address, "AF_UNIX"))
            interpreter = undo.enter_context(
                Ranks(work, 1, deadline=3600, preload=PRELOAD, env={"PYTHONWARNINGS": "ignore"})
            )
            while not select.select([listener._listener._socket], [], [], 0.1)[0]:
                assert not interpreter.done(), interpreter.results()
            self._pipe = listener.accept()
            undo.callback(interpreter.done, 20)
            undo.callback(self._pipe.close)  # the interpreter kills its ranks and ends
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_):
        self._undo.close()

    def start(self, fn, ranks=2, *, deadline=60.0, store="outside", env=None):
        """Fork the ranks of a job.

        Args:
            fn: a function of a module that was named, or a ``partial`` of one.
            ranks: the number of ranks.
            deadline: seconds after which the ranks are killed.
            store: ``outside`` of the ranks, as with torchrun, or in ``rank 0``.
            env: environment variables of all ranks.
        """
        number = len(self._jobs)
        job = Job(self, number, ranks)
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            **(env or {}),
        }
        if store == "outside":
            job.store = _store()
            variables |= {
                "MASTER_PORT": str(job.store.port),
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
        else:
            variables["MASTER_PORT"] = str(free_port())
        self._jobs[number] = job
        self._pipe.send((number, pickle.dumps(fn), ranks, deadline, variables))
        return job

    def run(self, fn, ranks=2, **options):
        """Return the ends of the ranks of one job, in rank order."""
        return self.start(fn, ranks, **options).ends()

    def results(self, fn, ranks=2, **options):
        """Return the values of the ranks of one job, or raise the first error."""
        return [end.get() for end in self.run(fn, ranks, **options)]

    def _receive(self):
        number, rank, status = self._pipe.recv()
        end = End()
        outcome = Path(self._folder, f"{number}.{rank}")
        if os.WIFSIGNALED(status):
            end.signal = os.WTERMSIG(status)
            end.stack = Path(f"{outcome}.stack").read_text(errors="replace")
        else:
            end = pickle.loads(outcome.read_bytes())
        self._jobs[number].ended[rank] = end


@dataclass
class Job:
    """Ranks that were forked together."""

    forge: Forge
    number: int
    ranks: int
    ended: dict[int, End] = field(default_factory=dict)
    store: object = None

    def ends(self):
        """Wait for all ranks, and return their ends."""
        while len(self.ended) < self.ranks:
            self.forge._receive()
        self.store = None
        return [self.ended[rank] for rank in range(self.ranks)]


def _store():
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# -- the interpreter -------------------------------------------------------------------------------


def main(address, modules, folder):
    pipe = Client(address, "AF_UNIX")
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC_") or name == "MASTER_PORT":
            del os.environ[name]
    for name in modules:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "forking needs a process of one thread"
    running, deadlines = {}, {}
    while True:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                deadlines.pop(ended[0])
                pipe.send((*running.pop(ended[0]), ended[1]))
        for pid, deadline in deadlines.items():
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        if not pipe.poll(0.01):
            continue
        try:
            number, function, ranks, limit, variables = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        me = os.getpid()
        for rank in range(ranks):
            pid = os.fork()
            if not pid:
                pipe.close()
                os.environ |= {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                _rank(me, function, Path(folder, f"{number}.{rank}"), limit)
            running[pid] = number, rank
            deadlines[pid] = time.monotonic() + limit
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _rank(parent, function, outcome, limit):
    from megapg.rendezvous import job_store

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    stack = open(f"{outcome}.stack", "w")  # noqa: SIM115  (as long as the process)
    faulthandler.dump_traceback_later(max(limit - 1, 0.5), file=stack)
    end = End()
    try:
        end.value = pickle.loads(function)()
        pickle.dumps(end)
    except BaseException as error:
        end = End(error=error, trace=traceback.format_exc())
    try:
        data = pickle.dumps(end)
    except Exception:
        data = pickle.dumps(End(error=RuntimeError(repr(end.error)), trace=end.trace))
    sys.stdout.flush()
    sys.stderr.flush()
    outcome.write_bytes(data)
    job_store._linger()  # as at the exit of a process: the host of the store stays for the others
    os._exit(0)


# -- killing at a point ----------------------------------------------------------------------------


class Points:
    """Counts a thread's calls, and kills the process at one of them.

    A point is a place in the code, the name of a function, the moment (before, after or inside the
    call), and the number of the call, from 1.
    """

    def __init__(self, fatal=None):
        self.seen = {}
        self._fatal = fatal

    def __call__(self, frame, event, what):
        if event in ("c_call", "c_return"):
            name = what.__name__
        elif event == "call":
            name = frame.f_code.co_name
        else:
            return
        file = frame.f_code.co_filename
        if file.startswith("<frozen") or file == __file__:
            return
        when = {"c_call": "before", "c_return": "after", "call": "in"}[event]
        place = "/".join(file.rsplit("/", 2)[-2:]), frame.f_lineno, name, when
        self.seen[place] = self.seen.get(place, 0) + 1
        if (*place, self.seen[place]) == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


ON_DISK = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir", "link", "flock")
"""Built-in functions that change what others find on the disk."""


def random_points(seen, count, choice):
    """Choose points, with equal weight for all places, however often a loop passes them."""
    places = choice.sample(sorted(seen), count)
    return [(*place, choice.randint(1, min(seen[place], 3))) for place in places]


def disk_points(seen):
    """Return the points before and after each change of the disk; in a loop, the first and last."""
    places = [place for place in seen if place[2] in ON_DISK and place[3] != "in"]
    return [(*place, times) for place in places for times in sorted({1, seen[place]})]
