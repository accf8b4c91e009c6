"""Keep ranks of ``run_distributed`` in step over its store, which no test damages."""

import contextlib
import os
import select

import torch.distributed as dist


class Steps:
    """One rank's part. Every rank makes one before anything else."""

    def __init__(self):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.PrefixStore("steps", dist.TCPStore(host, port, wait_for_workers=False))
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._turn = 0
        self.say("pid", str(os.getpid()))

    def say(self, word, value=""):
        """Post a word for the ranks that wait for it, once."""
        self._store.set(f"{word}/{self._rank}", value)

    def hear(self, word, ranks):
        """Wait until all of these ranks have posted the word."""
        self._store.wait([f"{word}/{rank}" for rank in ranks])

    def together(self, ranks=None):
        """Wait until all ranks call this."""
        self._turn += 1
        self.say(f"turn {self._turn}")
        self.hear(f"turn {self._turn}", range(self._size) if ranks is None else ranks)

    def until_gone(self, rank):
        """Wait until the process of another rank has ended."""
        until_gone(int(self._store.get(f"pid/{rank}")))


def until_gone(pid):
    """Wait until a process has ended, even if its parent has not reaped it."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        assert select.select([process], [], [], 60)[0], f"process {pid} did not end"
        os.close(process)
