"""The function of each demo process: the same training, on a session's groups and on globals."""

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
from megapg.megatron import trace_global_reads
from megapg.megatron.watching.trace import GlobalRead
from megapg.ownership.opening import LayoutSizes
from megapg.testing import megatron_on_cpu
from megapg.tools.demo.job import Checkpoints, GPTRun, TrainingResult

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Usage:
    """The number of resources of this process that may leak."""

    groups: int
    threads: int
    descriptors: int


@dataclass(frozen=True)
class RankReport:
    """The report of one rank."""

    result: TrainingResult  # losses, weights and speed
    communicators: int  # process groups of this rank, WORLD excluded
    reads: tuple[GlobalRead, ...]  # reads of Megatron's globals during the training on a session
    before: Usage  # usage before the groups were made
    after: Usage  # usage after they were closed


def on_a_session(
    run: GPTRun, text: bytes, progress: Path, checkpoints: Checkpoints | None = None
) -> RankReport:
    """Train on groups from a session, and list every read of the globals by Megatron-core."""
    train = _trainer()
    with megapg.session(name="warm-up"):  # opens the connection that outlives sessions by design
        pass
    before = _usage()
    with megatron_on_cpu(), megapg.session(**_sizes(run), collective_timeout=TIMEOUT) as session:
        pg = session.groups
        with megapg.published(pg), trace_global_reads(session=pg) as trace:
            result = train(run, text, pg, _reporter(progress, session.rank), checkpoints)
        communicators = len(torch_private.known_groups()) - 1
        gc.unfreeze()  # lets a later search for references to groups see all objects
        del pg
    del session
    gc.collect()  # model and optimizer hold groups, and are cycles
    return RankReport(result, communicators, trace.reads, before, _usage())


def on_globals(run: GPTRun, text: bytes, progress: Path) -> RankReport:
    """Train the same job on ``initialize_model_parallel``."""
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
    """Import Megatron-core, which takes seconds, in the ranks only, and return the trainer."""
    warnings.simplefilter("ignore")  # Megatron-core's, about the CPU
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megapg.tools.demo.gpt import train

    gc.freeze()  # these objects stay: scanning them takes longer than a small training
    return train


def _sizes(run: GPTRun) -> LayoutSizes:
    return {
        "tp": run.tp,
        "pp": run.pp,
        "vpp": run.vpp,
        "ep": run.ep,
        "expt_tp": run.expt_tp or run.tp,
    }


def _reporter(progress: Path, rank: int) -> Callable[[int, float, int], None] | None:
    """Return a function that writes a line per step on rank 0; losses are equal on every rank."""
    if rank != 0:
        return None

    def report(step: int, loss: float, tokens: int) -> None:
        with progress.open("a") as file:
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")

    return report


def _usage() -> Usage:
    me = psutil.Process(os.getpid())
    return Usage(len(torch_private.known_groups()), me.num_threads(), me.num_fds())
