"""Checkpoints with weights sharded over extra ranks (GTP, Megatron-core 0.19)."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from resuming import distributed
from streams import draw

import megapg
from megapg.checkpoint.optimizer import with_groups
from megapg.megatron import parallel_state
from megapg.rng import SHARD_STREAM
from megapg.testing import megatron_on_cpu

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(
        not hasattr(parallel_state, "get_gtp_weight_remat_group"),
        reason="this core shards no weights",
    ),
]

SIZES = {"tp": 2, "gtp_remat": 2}


def build(pg=None):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=2
    )
    return GPTModel(config, get_gpt_layer_local_spec(), 256, 16, pg_collection=pg).cuda()


def described(model, metadata):
    """Return the position of each tensor in the whole, and the replica id of this rank."""
    return {
        name: (entry.key, entry.global_shape, entry.global_offset, entry.replica_id)
        for name, entry in model.sharded_state_dict(metadata=metadata).items()
        if isinstance(entry, ShardedTensor)
    }


def on_globals():
    """Return the description on Megatron-core's own groups."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, gtp_remat_size=2)
    try:
        megapg.seed_all(5, None)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return described(build(), {"dp_cp_group": group})
    finally:
        parallel_state.destroy_model_parallel()


def saved_and_loaded(root):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    with megatron_on_cpu():
        theirs = on_globals()
        with megapg.session(**SIZES, timeout=60) as session:
            pg = session.groups
            with megapg.published(pg):  # layers ask the globals whether they are sharded
                assert described(build(pg), with_groups(None, pg)) == theirs

            megapg.seed_all(5, pg)
            model = build(pg)
            megapg.save_checkpoint(root, 1, model=model, pg_collection=pg, timeout=60)
            kept, first = [each.detach().clone() for each in model.parameters()], draw()
            megapg.seed_all(6, pg)
            again = build(pg)
            loaded = megapg.load_checkpoint(root, model=again, pg_collection=pg, timeout=60)
            assert loaded.rng.exact, loaded.rng.reason
            assert draw() == first
            for mine, old in zip(again.parameters(), kept, strict=True):
                assert torch.equal(mine, old)
            place = pg.rank("tp"), pg.rank("gtp_remat"), pg.rank("dp")
        with megapg.session(tp=2, name="whole", timeout=60) as session:
            pg = session.groups
            megapg.seed_all(7, pg)
            other = build(pg)
            with pytest.warns(megapg.errors.RngStateWarning, match="gtp_remat 2 -> 1"):
                megapg.load_checkpoint(root, model=other, pg_collection=pg, timeout=60)
            for mine, old in zip(other.parameters(), kept, strict=True):
                assert torch.equal(mine, old)
    dist.destroy_process_group()
    return place, first[SHARD_STREAM]


def test_ranks_that_share_weights_out_save_and_load(tmp_path):
    found = dict(distributed(partial(saved_and_loaded, tmp_path), 8))
    assert len(found) == 8
    # The replicas of a part draw equal initial values, and different parts draw different values.
    assert len({(tp, gtp, drawn) for (tp, gtp, _), drawn in found.items()}) == 4
    assert len({*found.values()}) == 4
