"""What a process holds, and how often it asks torch for a group."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

_PAGE = os.sysconf("SC_PAGE_SIZE")
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; Python's mmap module does not name it


@dataclass(frozen=True)
class Holdings:
    """What one process holds at one moment.

    Attributes:
        communicators: groups that torch's registry knows, WORLD included.
        threads: of the process.
        descriptors: open files and sockets.
        memory: proportional set size in KiB: a page that n processes share counts for 1/n.
    """

    communicators: int
    threads: int
    descriptors: int
    memory: int

    @classmethod
    def now(cls) -> Holdings:
        """Of the calling process. Linux only."""
        return cls(
            communicators=len(c10d._world.pg_map),
            threads=len(os.listdir("/proc/self/task")),
            descriptors=len(os.listdir("/proc/self/fd")),
            memory=_proportional_set_size(),
        )


def _proportional_set_size() -> int:
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


class CallCounter:
    """Counts the calls that make groups, outermost ones only, from its creation on.

    ``new_group`` calls torch's helper, and megapg calls the helper itself: either way one group
    asked for is one call. For good: the process that counts ends after one trial.
    """

    # Modules that hold the functions under names of their own count as well.
    _PLACES = (
        (dist, ("new_group", "split_group")),
        (c10d, ("new_group", "split_group", "_new_process_group_helper")),
        (device_mesh, ("new_group", "split_group")),
    )

    def __init__(self) -> None:
        self.calls = 0
        self._depth = 0
        originals = [
            (place, name, getattr(place, name)) for place, ns in self._PLACES for name in ns
        ]
        for place, name, original in originals:
            setattr(place, name, self._counted(original))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += self._depth == 0
            self._depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._depth -= 1

        return counted


def own_every_page() -> None:
    """Make this process's copy-on-write pages its own, as they are in one that was not forked.

    Without this a forked process pays for a copy at the first touch of nearly every page, which
    no process of a real job does: they start by themselves. Needs Linux 5.14; does nothing before.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as lines, open("/proc/self/pagemap", "rb") as pages:
        for start, end in [_span(line) for line in lines if line.split()[1].startswith("rw")]:
            pages.seek(start // _PAGE * 8)
            entries = np.frombuffer(pages.read((end - start) // _PAGE * 8), np.uint64)
            # Only pages that exist: others would be new memory. Bit 63 says so.
            edges = np.diff(entries >> np.uint64(63), prepend=0, append=0).nonzero()[0].tolist()
            for first, past in zip(edges[::2], edges[1::2], strict=True):
                libc.madvise(start + first * _PAGE, (past - first) * _PAGE, _MADV_POPULATE_WRITE)


def _span(line: str) -> tuple[int, int]:
    start, end = line.split()[0].split("-")
    return int(start, 16), int(end, 16)
