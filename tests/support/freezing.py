"""Jobs whose store is hosted by a process that can be frozen, and thawed again, while ranks wait.

The ranks of a job are in step with each other over the store of ``run_distributed``, which nobody
freezes; the one that they give to megapg is another.
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

from megapg.testing import Ranks


def _host(said, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    (whole := said.with_suffix(".whole")).write_text(f"{os.getpid()} {store.port}")
    whole.rename(said)
    signal.pause()


@contextlib.contextmanager
def hosting(port=0):
    """A process that hosts a store, as a launcher does: its pid and the port."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        with Ranks(partial(_host, said, port), 1) as host:
            while not said.exists():
                if host.done(timeout=0.01):
                    host.results()
            yield tuple(map(int, said.read_text().split()))


def has_stopped(pid):
    """Wait until every thread of a process that was sent SIGSTOP has stopped.

    The signal is sent before they have: on a busy machine the thread that serves a store answers
    some more calls meanwhile.
    """
    deadline = time.monotonic() + 30.0
    while not stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        time.sleep(0.005)


def stopped(pid):
    """Whether every thread of a process stands still: "T", after the last bracket."""
    return all(
        stat.read_text().rpartition(")")[2].split()[0] in "tT"
        for stat in Path("/proc", str(pid), "task").glob("*/stat")
    )


@dataclass
class Rank:
    """One rank of such a job.

    Attributes:
        me: its rank.
        size: how many there are.
        host_pid: of the process that hosts the store; None where rank 0 does.
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
        """Take megapg's store from here, and keep that of ``run_distributed`` to be in step."""
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
        """Whether it is this rank that is frozen."""
        return self.me == 0 and self.host_pid is None

    @property
    def host(self):
        """What errors call the host."""
        who = "rank 0 hosts" if self.host_pid is None else "torchrun hosts"
        return f"the store that {who} at 127.0.0.1:{self.port}"

    def step(self, ranks=None):
        """Wait for the others."""
        self.turn += 1
        self.side.set(f"{self.turn}/{self.me}", "")
        self.side.wait([f"{self.turn}/{rank}" for rank in ranks or range(self.size)])

    @contextlib.contextmanager
    def frozen(self, when=None, late=()):
        """Freeze the host until every rank that is not frozen has left the block.

        At once; or once ``when()`` lasts on every rank, but those that are ``late``: these call
        :meth:`wait_until_frozen`.
        """
        self.step()
        survivors = [r for r in range(self.size) if r or self.host_pid is not None]
        pid = self.host_pid or int(self.side.get("host"))
        left = threading.Event()
        # A wait holds its connection: nobody else can say anything on it.
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
        """The host is asked nothing before it has stopped, or it may still answer."""
        self.side.wait([f"frozen {self.turn}"])
        if not self.freezing:
            has_stopped(self.host_pid or int(self.side.get("host")))


def inside(function):
    """Whether the main thread is in a call of it."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def lasting(when, left):
    """Wait until that has been so for a while; False: the block was left in which it should be."""
    seen = 0
    while seen < 8 and not left.is_set():
        seen = seen + 1 if when() else 0
        time.sleep(0.05)
    return not left.is_set()


def once_inside(function, do):
    """Do it once the main thread waits in a call of that function."""

    def wait_and_do():
        lasting(partial(inside, function), threading.Event())
        do()

    threading.Thread(target=wait_and_do, daemon=True).start()


@contextlib.contextmanager
def interrupted(when, soon=15.0):
    """Ctrl-C once ``when()`` lasts: it must be heard soon, and end the block soon after that."""
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
