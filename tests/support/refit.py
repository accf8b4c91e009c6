import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.resharding import swap_model_weights
from megatron.core.transformer import TransformerConfig

import megapg
from megapg.testing import megatron_on_cpu


def build(pg):
    stage, stages = pg.rank("pp"), pg.size("pp")
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, pipeline_dtype=torch.float32,
        tensor_model_parallel_size=pg.size("tp"), pipeline_model_parallel_size=stages,
    )  # fmt: skip
    ends = {"pre_process": stage == 0, "post_process": stage == stages - 1}
    return GPTModel(config, get_gpt_layer_local_spec(), 256, 16, pg_collection=pg, **ends).cuda()


with megatron_on_cpu(), megapg.session(tp=2) as train, megapg.session(pp=2, name="serve") as serve:
    megapg.seed_all(1234, train.groups)
    trained, served = build(train.groups), build(serve.groups)
    with megapg.megatron.forbid_global_reads():
        swap_model_weights(trained, served, "nccl")  # over WORLD, which is gloo on a CPU
    print(f"rank {serve.rank} serves stage {serve.groups.rank('pp')}")
