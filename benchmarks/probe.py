"""Count the resources of a process, and its calls to torch for a group."""

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
_MADV_POPULATE_WRITE = 23  # <linux/mman.h>; Python's mmap module lacks it


@dataclass(frozen=True)
class Holdings:
    """The resources of one process at one moment.

    Attributes:
        communicators: groups in torch's registry, with WORLD.
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
        """Measure the calling process. Linux only."""
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
    """Counts the outermost calls that make groups, from its creation on.

    ``new_group`` calls torch's helper, and megapg calls the helper directly. Each group counts as
    one call in both cases. The patches stay, as the process ends after one trial.
    """

    # Modules with their own references to the functions are patched as well.
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
    """Give this process its own copy of each copy-on-write page, as if it were not forked.

    Otherwise a forked process pays for a copy at the first write to nearly every page. Processes of
    a real job are not forked, and pay nothing. Needs Linux 5.14; does nothing on older kernels.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps") as lines, open("/proc/self/pagemap", "rb") as pages:
        for start, end in [_span(line) for line in lines if line.split()[1].startswith("rw")]:
            pages.seek(start // _PAGE * 8)
            entries = np.frombuffer(pages.read((end - start) // _PAGE * 8), np.uint64)
            # Only existing pages (bit 63), as others would be new memory.
            edges = np.diff(entries >> np.uint64(63), prepend=0, append=0).nonzero()[0].tolist()
            for first, past in zip(edges[::2], edges[1::2], strict=True):
                libc.madvise(start + first * _PAGE, (past - first) * _PAGE, _MADV_POPULATE_WRITE)


def _span(line: str) -> tuple[int, int]:
    start, end = line.split()[0].split("-")
    return int(start, 16), int(end, 16)
