"""An example for each reason code: code that it is given for, and what a person makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """Code with a reason, and the same without it.

    Attributes:
        before: what the reason is given for.
        after: what a person makes of it.
        versions: of Megatron-core, as ``--from-core`` takes them.
    """

    before: str
    after: str
    versions: str = "0.16"


EXAMPLES: Mapping[str, Example] = {
    "lifecycle": Example(
        """
from megatron.core import parallel_state


def main(args):
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    try:
        train(args)
    finally:
        parallel_state.destroy_model_parallel()
""",
        """
import megapg


def main(args):
    with megapg.session(tp=args.tp, pp=args.pp) as session:
        train(args, pg_collection=session.groups)
""",
    ),
    "setter": Example(
        """
from megatron.core import mpu


def convert(checkpoint, tp):
    mpu.set_tensor_model_parallel_world_size(tp)
    for rank in range(tp):
        mpu.set_tensor_model_parallel_rank(rank)
        save_shard(checkpoint)
""",
        """
from megapg.testing import fake_collection


def convert(checkpoint, tp):
    for rank in range(tp):
        with fake_collection(tp=tp, rank=rank) as pg:
            save_shard(checkpoint, pg_collection=pg)
""",
    ),
    "vp-stage": Example(
        """
from megatron.core import mpu


def first_layer(layers_per_chunk):
    chunk = mpu.get_virtual_pipeline_model_parallel_rank() or 0
    return chunk * layers_per_chunk
""",
        """
def first_layer(layers_per_chunk, *, vp_stage=None):
    return (vp_stage or 0) * layers_per_chunk
""",
    ),
    "version": Example(
        """
import torch.distributed as dist
from megatron.core import mpu


def count_tokens(count):
    dist.all_reduce(count, group=mpu.get_tensor_and_data_parallel_group(True))
""",
        """
import torch.distributed as dist


def count_tokens(count, *, pg_collection):
    dist.all_reduce(count, group=pg_collection.tp_dp_cp)
""",
        versions="0.14-0.16",
    ),
    "not-in-core": Example(
        """
from megatron.core import parallel_state


def setup():
    if parallel_state.is_unitialized():
        raise RuntimeError("no groups")
""",
        """
def setup(*, pg_collection):
    if pg_collection is None:
        raise RuntimeError("no groups")
""",
        versions="0.19",
    ),
    "unknown-name": Example(
        """
from megatron.core import mpu


def gather(tensor):
    return all_gather(tensor, mpu.get_ulysses_parallel_group())
""",
        """
def gather(tensor, *, ulysses_group):
    return all_gather(tensor, ulysses_group)
""",
    ),
    "encoder-decoder": Example(
        """
from megatron.core import mpu


def setup(config):
    mpu.set_pipeline_model_parallel_split_rank(config.encoder_stages)
""",
        """
def setup(config):
    return config.encoder_stages  # passed on, to what asked for it
""",
        versions="0.12",
    ),
    "no-field": Example(
        """
from megatron.core import mpu


def average(grad):
    all_reduce(grad, group=mpu.get_data_modulo_expert_parallel_group())
""",
        """
def average(grad, *, data_modulo_expert_group):
    all_reduce(grad, group=data_modulo_expert_group)
""",
        versions="0.9",
    ),
    "run-time-flag": Example(
        """
from megatron.core import mpu


def companion(with_cp):
    return mpu.get_data_parallel_group_gloo(with_context_parallel=with_cp)
""",
        """
from megapg.megatron import getters


def companion(with_cp, *, pg_collection):
    return getters.gloo_group(pg_collection, "dp_cp" if with_cp else "dp")
""",
    ),
    "unchecked": Example(
        """
from megatron.core import mpu


def ranks():
    return mpu.get_context_parallel_global_ranks(check_initialized=False)
""",
        """
def ranks(*, pg_collection=None):
    return None if pg_collection is None else pg_collection.ranks("cp")
""",
    ),
    "arguments": Example(
        """
from megatron.core import mpu


def group(**flags):
    return mpu.get_data_parallel_group(**flags)
""",
        """
from megapg.megatron import getters


def group(*, with_context_parallel=False, pg_collection):
    return getters.data_group(pg_collection, with_context_parallel=with_context_parallel)
""",
    ),
    "no-state": Example(
        """
from megatron.core.parallel_state import RankGenerator


def data_ranks(tp, dp, pp):
    return RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=1, order="tp-dp-pp").get_ranks("dp")
""",
        """
from megapg import ParallelLayout


def data_ranks(tp, dp, pp):
    return list(ParallelLayout(world_size=tp * dp * pp, tp=tp, pp=pp).partition("dp"))
""",
    ),
    "buffer": Example(
        """
from megatron.core import parallel_state


def end():
    parallel_state.destroy_global_memory_buffer()
""",
        """
def end(session):
    session.close()  # the buffer goes with the groups
""",
    ),
    "assigned": Example(
        """
from megatron.core import mpu


def pretend_one_rank():
    mpu.get_tensor_model_parallel_world_size = lambda: 1
    return build_model()
""",
        """
from megapg.testing import fake_collection


def pretend_one_rank():
    with fake_collection(tp=1) as pg:
        return build_model(pg_collection=pg)
""",
    ),
    "patched": Example(
        """
from unittest.mock import patch

from layers import shard


def test_shard():
    with patch("megatron.core.parallel_state.get_tensor_model_parallel_world_size") as size:
        size.return_value = 2
        assert shard(8) == 4
        size.assert_called_once()
""",
        """
from layers import shard

from megapg.testing import fake_collection


def test_shard():
    with fake_collection(tp=2) as pg:
        assert shard(8, pg_collection=pg) == 4
""",
    ),
    "as-value": Example(
        """
from megatron.core import mpu


def setup(logger):
    logger.rank_of = mpu.get_data_parallel_rank
""",
        """
def setup(logger, *, pg_collection):
    logger.rank_of = lambda: pg_collection.rank("dp")
""",
    ),
    "module-as-value": Example(
        """
import deepspeed
from megatron.core import mpu


def build():
    with deepspeed.zero.Init(mpu=mpu):
        return make_model()
""",
        """
import deepspeed
from megatron.core import mpu

import megapg


def build(*, pg_collection):
    with megapg.published(pg_collection), deepspeed.zero.Init(mpu=mpu):  # megapg: keep
        return make_model()
""",
    ),
    "dynamic": Example(
        """
from megatron.core import mpu


def expert_ranks():
    if hasattr(mpu, "get_expert_tensor_parallel_world_size"):
        return mpu.get_expert_tensor_parallel_world_size()
    return 1
""",
        """
def expert_ranks(*, pg_collection):
    return pg_collection.size("expt_tp") if hasattr(pg_collection, "expt_tp") else 1
""",
    ),
    "ambiguous": Example(
        """
try:
    from megatron.core import mpu
except ImportError:
    from shim import mpu


def rank():
    return mpu.get_tensor_model_parallel_rank()
""",
        """
def rank(*, pg_collection=None):
    return 0 if pg_collection is None else pg_collection.rank("tp")
""",
    ),
    "may-be-none": Example(
        """
from megatron.core import mpu


def tie(weight):
    all_reduce(weight.grad, group=mpu.get_embedding_group(check_initialized=False))
""",
        """
def tie(weight, *, pg_collection):
    if pg_collection.embd is not None:
        all_reduce(weight.grad, group=pg_collection.embd)
""",
    ),
    "private-global": Example(
        """
from megatron.core import parallel_state


def replicas():
    if parallel_state._DATA_PARALLEL_GLOBAL_RANKS is None:
        return []
    return parallel_state._DATA_PARALLEL_GLOBAL_RANKS
""",
        """
def replicas(*, pg_collection=None):
    return [] if pg_collection is None else pg_collection.ranks("dp")
""",
    ),
    "in-a-string": Example(
        """
from megatron.core import mpu


def name(step):
    return f"step {step}{f'-{mpu.get_tensor_model_parallel_rank()}' if step else ''}"
""",
        """
def name(step, *, pg_collection):
    rank = pg_collection.rank("tp")
    return f"step {step}{f'-{rank}' if step else ''}"
""",
    ),
    "fallback": Example(
        """
from megatron.core import mpu


def replicas(pg_collection=None):
    if pg_collection is None:
        return mpu.get_data_parallel_world_size()
    return pg_collection.dp.size()
""",
        """
def replicas(pg_collection):
    return pg_collection.dp.size()
""",
    ),
    "at-import": Example(
        """
from megatron.core import mpu

RANK = mpu.get_data_parallel_rank()


def speaks():
    return RANK == 0
""",
        """
def speaks(*, pg_collection):
    return pg_collection.rank("dp") == 0
""",
    ),
    "comment-inside": Example(
        """
from megatron.core import mpu


def replicas():
    return mpu.get_data_parallel_group(
        with_context_parallel=True,  # norms are replicated there too
    )
""",
        """
def replicas(*, pg_collection):
    return pg_collection.dp_cp  # norms are replicated there too
""",
    ),
}

OF_FILES = ("unverified", "unwritten")
"""Codes that say something of a whole file, whatever stands in it: no example can have them."""
