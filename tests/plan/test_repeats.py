"""A few of the equal layers stand for all of them."""

from dataclasses import replace
from functools import partial

import pytest
import real_step
import torch
from real_step import Case

import megapg.tools.plan.stage
from megapg.layout import ParallelLayout
from megapg.tools.plan import Job, load_cluster
from megapg.tools.plan.measure import measure
from megapg.tools.plan.models import Model, find_model
from megapg.tools.plan.repeats import Known
from megapg.tools.plan.stage import Stage

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

    run_layers = megapg.tools.plan.stage.run_layers
    monkeypatch.setattr(megapg.tools.plan.stage, "run_layers", counted)
    few = measure(layout, cluster, model, job)
    assert max(ran) <= 5 < 8
    monkeypatch.setattr(megapg.tools.plan.stage, "run_layers", lambda chunk, run: run())
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


def test_layouts_with_equal_groups_of_layers_share_what_was_run(tmp_path, monkeypatch):
    (tmp_path / "dense.toml").write_text(MODELS["dense"])
    (tmp_path / "experts.toml").write_text(MODELS["experts"])
    dense, experts = (find_model(str(tmp_path / f"{name}.toml")) for name in MODELS)
    cluster = load_cluster("H100-8")
    ran, run = [], Stage._microbatch
    monkeypatch.setattr(Stage, "_microbatch", lambda *given: ran.append(1) or run(*given))

    def counted(model, known=None, microbatches=8, **sizes):
        ran.clear()
        layout = ParallelLayout(world_size=32, **sizes)
        job = Job(model=model.name, seq_length=256, microbatches=microbatches)
        return measure(layout, cluster, model, job, known=known), len(ran)

    known = Known()
    counted(dense, known, tp=2, pp=4)
    for sizes in ({"pp": 2}, {"pp": 2, "vpp": 2}, {"pp": 4, "microbatches": 16}):
        alone, several = counted(dense, tp=2, **sizes)
        assert counted(dense, known, tp=2, **sizes) == (alone, 0)
        assert several > 0
    known = Known()
    for sizes in ({"ep": 2}, {"ep": 4}, {"ep": 2, "expt_tp": 1}, {"ep": 2, "pp": 2}):
        assert counted(experts, known, tp=2, **sizes)[0] == counted(experts, tp=2, **sizes)[0]


def test_what_a_layer_sends_to_other_groups_is_not_shared():
    """The groups of dp have two ranks in one layout, and four in the other."""

    def build(pg, vp_stage=None, *, job):
        chunk = real_step.build(Case(1), pg, vp_stage)
        forward = chunk.forward

        def gather(*given, **named):
            part = torch.zeros(4)
            whole = torch.empty(4 * pg.size("dp"))
            torch.distributed.all_gather_into_tensor(whole, part, group=pg.dp)
            return forward(*given, **named)

        chunk.forward = gather
        return chunk

    def gathered(known, world_size):
        made = Model("gathers", Case(1).seq_length, build)
        job = Job(model="gathers", seq_length=Case(1).seq_length)
        layout = ParallelLayout(world_size=world_size)
        cluster = load_cluster("H100-8")
        return measure(layout, cluster, made, job, known=known)

    known = Known()
    assert [gathered(known, size) for size in (2, 4)] == [gathered(None, size) for size in (2, 4)]
