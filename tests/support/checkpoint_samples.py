"""Small real checkpoints, made once by Megatron-core on two ranks and by torch alone."""

from __future__ import annotations

import atexit
import functools
import os
import random
import shutil
import tempfile
import warnings
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from stepwise import distributed
from xxhash import xxh3_64

from megapg.checkpoint.contents import read_metadata
from megapg.checkpoint.entries import end_of
from megapg.checkpoint.manifest import FileSum, sum_of, write_manifest
from megapg.testing import megatron_on_cpu

ARGS = {
    "world_size": 2,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "hidden_size": 32,
}
CONTENT = {"distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": False}
VALUE = 1234.5  # value of every element of "weight"; easy to find in a file
SHARDS = ("__0_0.distcp", "__1_0.distcp")


@functools.cache
def scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="megapg-samples-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def random_streams() -> dict[str, object]:
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
    }


def save_with_megatron(path: Path, iteration: int, **options: object) -> None:
    """Save a checkpoint; every rank calls this."""
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.transformer.enums import AttnBackend
    from resuming import megatron_saves_alone

    import megapg

    megatron_saves_alone()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with megatron_on_cpu(), megapg.session(tp=world, timeout=60):
        own = torch.full((4, 8), VALUE) + torch.arange(32).reshape(4, 8) * rank
        state = {
            "weight": ShardedTensor.from_rank_offsets("weight", own, (0, rank, world)),
            "bias": ShardedTensor.from_rank_offsets("bias", torch.ones(8), replica_id=rank),
            f"half.{rank}": ShardedTensor.from_rank_offsets(
                f"half.{rank}", torch.ones(3, dtype=torch.bfloat16)
            ),
            "rng_state": ShardedObject("rng_state", [random_streams()], (1, world), (0, rank)),
            "args": Namespace(**ARGS, attention_backend=AttnBackend.auto),
            "iteration": iteration,
            "checkpoint_version": 3.0,
        }
        dist_checkpointing.save(state, str(path), content_metadata=CONTENT, **options)


@functools.cache
def by_megatron(iteration: int = 5, **options: object) -> Path:
    """Return a root with ``iter_0000005`` and a tracker, saved by the installed Megatron-core."""
    root = scratch() / "-".join(["megatron", str(iteration), *options])
    path = root / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    distributed(partial(save_with_megatron, path, iteration, **options), 2, deadline=120)
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def sums_of(path: Path) -> dict[str, FileSum]:
    """Return the checksums of a checkpoint as megapg's manifest has them."""
    sums = {file.name: sum_of(file) for file in path.iterdir() if file.suffix != ".distcp"}
    places = (read_metadata(path).storage_data or {}).values()
    for shard in path.glob("*.distcp"):
        data = shard.read_bytes()
        ends = sorted((at.offset, end_of(at)) for at in places if at.relative_path == shard.name)
        entries = tuple(xxh3_64(data[start:end]).hexdigest() for start, end in ends)
        sums[shard.name] = replace(sum_of(shard, "xxh3_128"), entries=entries)
    return sums


@functools.cache
def with_manifest() -> Path:
    """Return the same root with megapg's manifest."""
    root = scratch() / "manifest"
    shutil.copytree(by_megatron(), root)
    path = root / "iter_0000005"
    layout = {"world_size": 2, "tp": 2, "order": "tp-cp-ep-dp-pp", "vpp": None}
    write_manifest(path, sums_of(path), {"version": "1.2.3", "iteration": 5, "layout": layout})
    return root


def save_plain(path: Path, state: dict[str, object]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@functools.cache
def by_torch() -> Path:
    """Return a root with one checkpoint of torch, in ``plain``."""
    state = {
        "model": {
            "weight": torch.full((4, 4), VALUE),
            "empty": torch.empty(0),
            "one": torch.ones(()),
        },
        "optimizer": {"step": 3, "list": [1, torch.ones(2)]},
    }
    return save_plain(scratch() / "torch" / "plain", state)
