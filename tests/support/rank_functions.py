"""Functions for the ranks of test_run_distributed. Few need torch, so it is not imported."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import NamedTuple


def rank() -> int:
    return int(os.environ["RANK"])


def total(start: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


ASKS_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def asked_whom() -> tuple[str | None, str | None]:
    """Return the variable that torch reads, as set at a preload and in this rank."""
    import asks_for_a_gpu

    return asks_for_a_gpu.ASKS_NVML, os.environ.get(ASKS_NVML)


def surroundings() -> dict[str, str]:
    return {**os.environ, "cwd": os.getcwd(), "stdin": sys.stdin.read(), "pid": str(os.getpid())}


def raise_in_one_while_others_wait() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank() == 1:
        raise LookupError("no such thing", 7)
    dist.barrier()


def raise_or_sleep(folder: Path | None = None) -> None:
    asleep = folder and folder / "asleep"
    if rank() == 1:
        while asleep and not asleep.exists():
            time.sleep(0.01)
        raise LookupError("no such thing")
    if asleep:
        asleep.touch()
    sleep_long()


def sleep_long() -> None:
    time.sleep(300)


def hang_in_a_collective(folder: Path) -> str:
    if rank() == 2:
        return "finished"
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=rank(), world_size=2)
    (folder / str(rank())).touch()
    if rank() == 1:
        sleep_long()
    dist.barrier()
    return "never"


def die_each_in_its_way() -> int:
    if rank() == 1:
        print("last words")
        os._exit(3)
    if rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 3:
        os.abort()
    if rank() == 4:
        os._exit(0)
    return rank()


class Picky(Exception):
    """An exception that can be pickled but not unpickled, as many can."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def leave_unpicklable() -> object:
    if rank() == 0:
        return threading.Lock()
    if rank() == 1:
        raise Picky(1, 2)
    if rank() == 2:
        sys.exit(4)
    return "fine"


def leave_a_grandchild() -> int:
    # In a new session, it survives a kill of the ranks' process group.
    return subprocess.Popen(["sleep", "300"], start_new_session=True).pid


def large() -> bytes:
    print("unfinished line", end=";")
    ctypes.CDLL(None).printf(b"line of C;")
    return bytes(3_000_000)


def rank_of(lock: object) -> int:
    return rank()


def wait_for(folder: Path) -> int:
    """Wait until the test has made this rank's file."""
    while not (folder / str(rank())).exists():
        time.sleep(0.01)
    return rank()


IMPORTED_BY = os.getpid()
LIMIT = resource.RLIMIT_NOFILE


class Rank(NamedTuple):
    """The process of this rank, that of the import, and properties of the rank."""

    pid: int
    imported_by: int
    extra: str
    warnings_raise: bool
    limit: tuple[int, int]


def where() -> Rank:
    try:
        warnings.warn("of nothing", stacklevel=1)
        raises = False
    except UserWarning:
        raises = True
    extra = os.environ.get("EXTRA", "")
    return Rank(os.getpid(), IMPORTED_BY, extra, raises, resource.getrlimit(LIMIT))


def give_birth(file: Path) -> None:
    leave_a_grandchild_in(file)
    sleep_long()


def leave_a_grandchild_in(file: Path) -> None:
    import psutil

    pids = [os.getpid(), os.getppid(), psutil.Process(os.getppid()).ppid(), leave_a_grandchild()]
    file.with_suffix(f".{rank()}").write_text(" ".join(map(str, pids)))
