"""Measure how much communicator memory this machine's GPUs give back: `make test-gpu`.

    python -m benchmarks.gpu [--cycles 10]

With one GPU, every communicator has one rank. With more GPUs, the communicators of a layout over
all of them are tried too. Each way of suspending runs in its own processes: create, use, suspend,
resume, use, and then cycle by cycle, with a look at the free device memory in between. The
benchmark needs only this Python's torch, and megapg with its dependencies. If torchcomms can be
imported, a session on it is used as well. Exit status 1: a sum was wrong or memory drifted. Exit
status 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import megapg
from benchmarks.table import Table
from megapg.errors import UnsupportedOffloadError
from megapg.ownership.suspension import WAYS, How, OffloadReport
from megapg.testing import run_distributed

_MIB = 2**20
# Large enough for NCCL's path for large messages. Communicators allocate at first use.
_ELEMENTS = 16 * _MIB
_USED = ("tp", "pp", "dp", "dp_cp", "ep", "expt_dp")
# The driver's allocations are coarse, and other processes may run.
_DRIFT_ALLOWED = 8 * _MIB


@dataclass(frozen=True)
class Life:
    """One way of suspending on one rank: bytes, and seconds.

    Attributes:
        refused: why this way is refused here; all else is empty then.
        took: free memory that creating and using the groups once took.
        back: free memory that suspending gave back.
        held: the communicators' memory before and after, by the backend; None: unknown.
        suspend_s: seconds, the median over the cycles.
        resume_s: likewise.
        drift: free memory after the first cycle, less that after the last one.
        left: free memory before opening, less that after closing.
        right: True if every sum was right.
    """

    refused: str = ""
    took: int | None = None
    back: int | None = None
    held: tuple[int | None, int | None] = (None, None)
    suspend_s: float = 0.0
    resume_s: float = 0.0
    drift: int | None = None
    left: int | None = None
    right: bool = True


def live(way: How, backend: str, cycles: int) -> Life:
    """Run a session with one way of suspending, on every rank."""
    device = "cuda" if "nccl" in backend else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    value = torch.ones(_ELEMENTS if device == "cuda" else 1, device=device)
    before = _free(device)
    tp = 2 if int(os.environ["WORLD_SIZE"]) % 2 == 0 else 1
    # A rank alone needs dedicated groups, or it would have a single communicator.
    session = megapg.session(tp=tp, backend=backend, dedicated=_USED)
    right = _use(session, value)
    opened, times = _free(device), []
    reports: list[OffloadReport] = []
    settled = None
    try:
        for _ in range(cycles):
            moments = [time.perf_counter()]
            report = session.suspend(way)
            moments.append(time.perf_counter())
            reports = reports or [report]
            away = _free(device)
            moments.append(time.perf_counter())
            session.resume()
            moments.append(time.perf_counter())
            right = _use(session, value) and right
            times.append((moments[1] - moments[0], moments[3] - moments[2]))
            settled = _free(device) if settled is None else settled
            if len(times) == 1:
                back = _less(away, opened)
    except UnsupportedOffloadError as error:
        session.close()
        return Life(refused=str(error).removesuffix(" Nothing was touched."))
    at_end = _free(device)
    session.close()
    named = "nccl" if device == "cuda" else "gloo"
    middle = len(times) // 2
    return Life(
        took=_less(before, opened),
        back=back,
        held=reports[0].bytes.get(named, (None, None)),
        suspend_s=sorted(s for s, _ in times)[middle],
        resume_s=sorted(r for _, r in times)[middle],
        drift=_less(settled, at_end),
        left=_less(before, _free(device)),
        right=right,
    )


def on_torchcomms() -> bool:
    """True if sums are right over groups that torchcomms makes; runs on every rank."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with megapg.session(tp=2 if int(os.environ["WORLD_SIZE"]) % 2 == 0 else 1) as session:
        return _use(session, torch.ones(1, device=device))


def _torchcomms_there() -> bool:
    """True if torchcomms is installed, and is not the empty package of the package index."""
    try:
        return importlib.util.find_spec("torchcomms._comms") is not None
    except ModuleNotFoundError:
        return False


def _use(session: megapg.Session, value: torch.Tensor) -> bool:
    right = True
    for field in _USED:
        value.fill_(1.0)
        dist.all_reduce(value, group=getattr(session.groups, field))
        right = right and bool((value == session.groups.size(field)).all())
    return right


def _free(device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def _less(before: int | None, after: int | None) -> int | None:
    """Return the decrease of free memory."""
    return None if before is None or after is None else before - after


def table(world_size: int, lives: Sequence[tuple[How, Sequence[Life]]], cycles: int) -> Table:
    """Return the results by way: the worst of the ranks, and NCCL's own count on rank 0."""
    rows, refusals = [], []
    for way, ranks in lives:
        if ranks[0].refused:
            rows.append((way, *["-"] * 7, "refused"))
            refusals.append(f"{way}: {ranks[0].refused}")
            continue
        held = ranks[0].held
        rows.append(
            (
                way,
                _mib(_largest(each.took for each in ranks)),
                _mib(min((each.back for each in ranks if each.back is not None), default=None)),
                f"{_mib(held[0])} to {_mib(held[1])}",
                f"{max(each.suspend_s for each in ranks):.3f}",
                f"{max(each.resume_s for each in ranks):.3f}",
                _mib(_largest(each.drift for each in ranks)),
                _mib(_largest(each.left for each in ranks)),
                "right" if all(each.right for each in ranks) else "WRONG",
            )
        )
    return Table(
        f"{world_size} rank{'s' if world_size > 1 else ''}: {cycles} cycles",
        (
            *("way", "taken, MiB", "given back, MiB", "NCCL's own count, MiB", "suspend, s"),
            *("resume, s", "drift, MiB", "left after close, MiB", "sums"),
        ),
        tuple(rows),
        (*refusals, _versions()),
    )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((each for each in values if each is not None), default=None)


def _mib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / _MIB:.1f}"


def _versions() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    nccl = "none"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"{gpu}, torch {torch.__version__}, NCCL {nccl}, megapg {megapg.__version__}."


def _ok(lives: Sequence[Life]) -> bool:
    return all(each.right and (each.drift or 0) <= _DRIFT_ALLOWED for each in lives)


def main() -> int:
    """Run the ways that this machine allows, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=10, help="suspend and resume so often")
    parser.add_argument(
        "--on-gloo", type=int, metavar="RANKS", help="try the script itself, without a GPU"
    )
    options = parser.parse_args()
    if options.cycles < 1:
        parser.error("--cycles: at least 1")
    gpus = 0 if options.on_gloo else torch.cuda.device_count()
    if not gpus and not options.on_gloo:
        print("no GPU at hand: torch sees none", file=sys.stderr)
        return 2
    backend = "gloo" if options.on_gloo else "cpu:gloo,cuda:nccl"
    fine = True
    for world_size in sorted({options.on_gloo} if options.on_gloo else {1, gpus}):
        lives = []
        for way in WAYS:
            print(f"{world_size} ranks, {way} ...", file=sys.stderr, flush=True)
            work = partial(live, way, backend, options.cycles)
            lives.append((way, run_distributed(work, world_size, deadline=600.0)))
            fine = fine and _ok(lives[-1][1])
        print(table(world_size, lives, options.cycles).markdown(), end="\n\n")
        sums = "not there"
        if _torchcomms_there():
            wanted = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
            right = all(run_distributed(on_torchcomms, world_size, deadline=600.0, env=wanted))
            sums, fine = "sums are right" if right else "sums are WRONG", fine and right
        print(f"{world_size} ranks on torchcomms: {sums}", end="\n\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
