"""What each process of the demo does: the same training, on a session's groups and on globals."""

from __future__ import annotations

import gc
import json
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

import megapg
from megapg import torch_private
from megapg.demo.job import Checkpoints, GPTRun, TrainingResult
from megapg.megatron import GlobalRead, trace_global_reads
from megapg.testing import megatron_on_cpu

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Usage:
    """What this process holds of things that leak."""

    groups: int
    threads: int
    descriptors: int


@dataclass(frozen=True)
class RankReport:
    """What one rank brings home."""

    result: TrainingResult  # losses, weights and pace
    communicators: int  # process groups it was in, WORLD apart
    reads: tuple[GlobalRead, ...]  # reads of Megatron's globals while it trained on a session
    before: Usage  # usage when the groups were not yet there
    after: Usage  # usage when they were gone again


def on_a_session(
    run: GPTRun, text: bytes, progress: Path, checkpoints: Checkpoints | None = None
) -> RankReport:
    """Train on groups from a session; Megatron's forced reads are answered from it, and listed."""
    train = _trainer()
    with megapg.session(name="warm-up"):  # opens the connection that outlives sessions by design
        pass
    before = _usage()
    with megatron_on_cpu(), megapg.session(**_sizes(run), collective_timeout=TIMEOUT) as session:
        pg = session.groups
        with megapg.published(pg), trace_global_reads(session=pg) as trace:
            result = train(run, text, pg, _reporter(progress, session.rank), checkpoints)
        communicators = len(torch_private.known_groups()) - 1
        gc.unfreeze()  # whoever is asked now what holds a group is told of all
        del pg
    del session
    gc.collect()  # the model and the optimizer hold groups, and are cycles
    return RankReport(result, communicators, trace.reads, before, _usage())


def on_globals(run: GPTRun, text: bytes, progress: Path) -> RankReport:
    """The same training the classic way, on ``initialize_model_parallel``."""
    from megapg.megatron import parallel_state

    train = _trainer()
    before = _usage()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.vpp,
        expert_model_parallel_size=run.ep,
        expert_tensor_parallel_size=run.expt_tp,
        create_gloo_process_groups=False,
    )
    with megatron_on_cpu():
        result = train(run, text, None, _reporter(progress, dist.get_rank()))
    communicators = len(torch_private.known_groups()) - 1  # after training, as on a session
    parallel_state.destroy_model_parallel()
    gc.collect()
    after = _usage()
    dist.destroy_process_group()
    return RankReport(result, communicators, (), before, after)


def _trainer() -> Callable[..., TrainingResult]:
    """Loads Megatron-core, which takes seconds: the ranks need it, the process that shows not."""
    warnings.simplefilter("ignore")  # Megatron-core's, about what a CPU lacks
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megapg.demo.gpt import train

    gc.freeze()  # all that stays: to look through it takes longer than a small training does
    return train


def _sizes(run: GPTRun) -> megapg.LayoutSizes:
    return {
        "tp": run.tp,
        "pp": run.pp,
        "vpp": run.vpp,
        "ep": run.ep,
        "expt_tp": run.expt_tp or run.tp,
    }


def _reporter(progress: Path, rank: int) -> Callable[[int, float, int], None] | None:
    """Rank 0 writes a line per step; the losses are the same on every rank."""
    if rank != 0:
        return None

    def report(step: int, loss: float, tokens: int) -> None:
        with progress.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss, "tokens": tokens}) + "\n")

    return report


def _usage() -> Usage:
    me = psutil.Process(os.getpid())
    return Usage(len(torch_private.known_groups()), me.num_threads(), me.num_fds())
