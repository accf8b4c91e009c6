"""An example for each reason: code with the reason, and the code after a manual change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """Code with a reason, and the same code without the reason."""

    before: str
    after: str
    versions: str = "0.16"  # of Megatron-core, as ``--from-core`` takes them
    file: str = "example.py"  # name of the file with the code


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
    "inside-core": Example(
        """
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection


def build(config, layer):
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return GPTModel(config, layer, 32000, 2048, pg_collection=groups)
""",
        """
from megatron.core.models.gpt import GPTModel


def build(config, layer, *, pg_collection):
    return GPTModel(config, layer, 32000, 2048, pg_collection=pg_collection)
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
    "test": Example(
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
        file="test_shard.py",
    ),
}

WITHOUT_EXAMPLE = ("unverified", "unwritten")
"""Reasons of a whole file. They do not depend on the code in it."""
