"""The cost of starting ranks with Megatron-core, for a test that takes moments."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch.multiprocessing

from benchmarks.table import Cost, Options, Table, table_of_costs
from megapg.testing import preloaded, run_distributed

WORLD_SIZE = 4
REPEATS = 3
MODULES = ("torch.distributed", "megatron.core", "megatron.core.models.gpt")
PEER = f"torch.multiprocessing.spawn(fn, nprocs={WORLD_SIZE})"


def tables(_: Options) -> list[Table]:
    """Return the table."""
    note = (
        "Each rank imports Megatron-core's GPT and does nothing else. The fork server of "
        "`run_distributed` imports it once for all ranks, `preloaded` once for all calls."
    )
    return [table_of_costs("Ranks that have Megatron-core", run(), note)]


def run() -> list[Cost]:
    """Start four ranks that import Megatron-core, each way equally often and in turns."""
    spawned, alone, first, later = [], [], [], []
    for _ in range(REPEATS):
        spawned.append(_seconds(_spawn))
        alone.append(_seconds(partial(_ranks, MODULES)))
        with preloaded(*MODULES):
            first.append(_seconds(_ranks))
            later += [_seconds(_ranks) for _ in range(REPEATS)]
    theirs = statistics.median(spawned)
    return [
        Cost(what, written, PEER, statistics.median(ours), theirs, "s")
        for what, written, ours in (
            ("alone", f"run_distributed(fn, {WORLD_SIZE}, preload=...)", alone),
            ("first of many", "with preloaded(...): run_distributed", first),
            ("each later one", "run_distributed in that block", later),
        )
    ]


def _seconds(start: Callable[[], object]) -> float:
    began = time.perf_counter()
    start()
    return time.perf_counter() - began


def _ranks(preload: tuple[str, ...] = ()) -> None:
    assert run_distributed(_import, WORLD_SIZE, preload=preload) == [True] * WORLD_SIZE


def _spawn() -> None:
    torch.multiprocessing.spawn(_import_as, nprocs=WORLD_SIZE)


def _import() -> bool:
    return all(importlib.import_module(module) for module in MODULES)


def _import_as(_: int) -> None:
    _import()
