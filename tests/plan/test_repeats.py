"""A few of the equal layers stand for all of them."""

from dataclasses import replace
from functools import partial

import pytest

import megapg.plan.stage
from megapg.layout import ParallelLayout
from megapg.plan import Job, load_cluster
from megapg.plan.measure import measure
from megapg.plan.models import Model, find_model

MODEL = """
seq_length = 256
first_dense_layers = {dense}
[model]
vocab_size = 1024
position_embedding_type = "rope"
share_embeddings_and_output_weights = false
[config]
num_layers = 16
hidden_size = 256
ffn_hidden_size = 512
num_attention_heads = 4
activation_func = "silu"
gated_linear_unit = true
normalization = "RMSNorm"
add_bias_linear = false
hidden_dropout = 0.0
attention_dropout = 0.0
"""
EXPERTS = """
num_moe_experts = 4
moe_router_topk = 2
moe_ffn_hidden_size = 128
moe_router_load_balancing_type = "aux_loss"
moe_aux_loss_coeff = 0.02
"""
MODELS = {"dense": MODEL.format(dense=0), "experts": MODEL.format(dense=5) + EXPERTS}


@pytest.mark.parametrize(
    ("name", "sizes", "recompute"),
    [
        ("dense", {"tp": 2, "pp": 2}, "none"),
        ("dense", {"cp": 2, "pp": 2, "vpp": 2}, "full"),
        ("experts", {"tp": 2, "ep": 2, "expt_tp": 1}, "selective"),
    ],
)
def test_the_cost_of_all_layers_is_that_of_running_them(
    name, sizes, recompute, tmp_path, monkeypatch
):
    file = tmp_path / "model.toml"
    file.write_text(MODELS[name])
    model, cluster = find_model(str(file)), load_cluster("H100-8")
    layout = ParallelLayout(world_size=8, **sizes)
    job = Job(model=model.name, seq_length=256, microbatches=4, recompute=recompute)
    ran = []

    def counted(chunk, run):
        return run_layers(
            chunk, lambda: ran.append(len(chunk.module.module.decoder.layers)) or run()
        )

    run_layers = megapg.plan.stage.run_layers
    monkeypatch.setattr(megapg.plan.stage, "run_layers", counted)
    few = measure(layout, cluster, model, job)
    assert max(ran) <= 5 < 8
    monkeypatch.setattr(megapg.plan.stage, "run_layers", lambda chunk, run: run())
    assert few == measure(layout, cluster, model, job)
    more = measure(layout, cluster, model, replace(job, microbatches=8))
    assert few.stages != more.stages


def test_layers_that_are_recomputed_together_all_run(tmp_path):
    file = tmp_path / "model.toml"
    file.write_text(MODELS["dense"])
    model, cluster = find_model(str(file)), load_cluster("H100-8")

    def build(together, pg, vp_stage=None, *, job):
        chunk = model.build(pg, vp_stage, job=job)
        chunk.config.recompute_num_layers = together
        return chunk

    def cost(together):
        job = Job(model="uniform", seq_length=256, recompute="full")
        made = Model("uniform", 256, partial(build, together))
        (stage,) = measure(ParallelLayout(world_size=1), cluster, made, job).stages
        return stage.activations

    # Fewer inputs of layers are kept, and more layers are computed again at a time.
    assert cost(16) > cost(1)
    assert cost(4) != cost(1)
