"""Jobs whose store host can be frozen, and thawed again, while ranks wait.

The ranks of a job meet over the store of ``run_distributed``, which is never frozen. They give
megapg another store.
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megapg.testing.distributed import Ranks


def _host(said, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    (whole := said.with_suffix(".whole")).write_text(f"{os.getpid()} {store.port}")
    whole.rename(said)
    signal.pause()


@contextlib.contextmanager
def hosting(port=0):
    """Start a process that hosts a store, as a launcher does; yield its pid and port."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        with Ranks(partial(_host, said, port), 1) as host:
            while not said.exists():
                if host.done(timeout=0.01):
                    host.results()
            yield tuple(map(int, said.read_text().split()))


def has_stopped(pid):
    """Wait until every thread of a process has stopped after SIGSTOP.

    On a busy machine, the thread that serves a store may answer more calls after the signal.
    """
    deadline = time.monotonic() + 30.0
    while not stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        time.sleep(0.005)


def stopped(pid):
    """True if every thread of a process is stopped: "T", after the last bracket."""
    return all(
        stat.read_text().rpartition(")")[2].split()[0] in "tT"
        for stat in Path("/proc", str(pid), "task").glob("*/stat")
    )


@dataclass
class Rank:
    """One rank of such a job.

    Attributes:
        me: its rank.
        size: the number of ranks.
        host_pid: process that hosts the store; None if rank 0 hosts it.
        port: of the store.
    """

    me: int
    size: int
    host_pid: int | None
    port: int
    side: dist.Store
    turn: int = 0

    @classmethod
    def begin(cls, host_pid, port):
        """Use this store for megapg, and the store of ``run_distributed`` to meet."""
        side = dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        me, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ["MASTER_PORT"] = str(port)
        if host_pid is None:
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        rank = cls(me, size, host_pid, port, side)
        if me == 0 and host_pid is None:
            side.set("host", str(os.getpid()))
        return rank

    @property
    def freezing(self):
        """True if this rank is the one to freeze."""
        return self.me == 0 and self.host_pid is None

    def step(self):
        """Wait until all ranks call this."""
        self.turn += 1
        self.side.set(f"{self.turn}/{self.me}", "")
        self.side.wait([f"{self.turn}/{rank}" for rank in range(self.size)])

    @contextlib.contextmanager
    def frozen(self, when=None, late=()):
        """Freeze the host until every rank that is not frozen has left the block.

        Without ``when``, freeze at once. Otherwise freeze when ``when()`` has held for a while on
        every rank that is not in ``late``. Ranks in ``late`` call :meth:`wait_until_frozen`.
        """
        self.step()
        survivors = [r for r in range(self.size) if r or self.host_pid is not None]
        pid = self.host_pid or int(self.side.get("host"))
        left = threading.Event()
        # A waiting call blocks its connection, so a second one is needed.
        words = self.side.clone()

        def freeze():
            if when is not None and self.me not in late:
                lasting(when, left)
                words.set(f"ready {self.turn}/{self.me}", "")
            if self.me == 0:
                if when is not None:
                    ready = [rank for rank in range(self.size) if rank not in late]
                    words.wait([f"ready {self.turn}/{rank}" for rank in ready])
                words.set(f"frozen {self.turn}", "")
                os.kill(pid, signal.SIGSTOP)

        freezing = threading.Thread(target=freeze)
        freezing.start()
        if when is None:
            self.wait_until_frozen()
        try:
            yield
        finally:
            left.set()
            if self.me in survivors:
                self.side.set(f"out {self.turn}/{self.me}", "")
            if self.me == survivors[0]:
                self.side.wait([f"out {self.turn}/{rank}" for rank in survivors])
                self.wait_until_frozen()
                os.kill(pid, signal.SIGCONT)
            freezing.join()
            self.step()

    def wait_until_frozen(self):
        """Wait for the freeze before any call to the host, which might still answer."""
        self.side.wait([f"frozen {self.turn}"])
        if not self.freezing:
            has_stopped(self.host_pid or int(self.side.get("host")))


def inside(function):
    """True if the main thread is in a call of the function."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def lasting(when, left):
    """Wait until ``when()`` holds for a while; False if the block has ended first."""
    seen = 0
    while seen < 8 and not left.is_set():
        seen = seen + 1 if when() else 0
        time.sleep(0.05)
    return not left.is_set()


def once_inside(function, do):
    """Call ``do`` when the main thread waits in a call of the function."""

    def wait_and_do():
        lasting(partial(inside, function), threading.Event())
        do()

    threading.Thread(target=wait_and_do, daemon=True).start()


@contextlib.contextmanager
def interrupted(when, soon=15.0):
    """Send SIGINT when ``when()`` holds; it must arrive soon, and end the block soon after."""
    sent, heard, left = [], [], threading.Event()

    def hear(*_):
        heard.append(time.monotonic())
        raise KeyboardInterrupt

    def interrupt():
        if lasting(when, left):
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, hear)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        ended = time.monotonic()
        left.set()
        interrupting.join()
        signal.signal(signal.SIGINT, before)
    assert heard, "Ctrl-C was not heard"
    assert heard[0] - sent[0] < soon
    assert ended - heard[0] < soon, f"it took {ended - heard[0]:.1f} s to end after Ctrl-C"
