"""Suggestions: the layouts that fit, in the order of the time that they lose."""

import contextlib
import functools
import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import commands as cli
import pytest
from schemas import check_schema

import megapg.tools.plan
from megapg.errors import PlanError
from megapg.layout import ParallelLayout
from megapg.tools.cli import plan_command
from megapg.tools.plan import Flow, Quantity, StageCost, load_cluster
from megapg.tools.plan.least import least, look_at
from megapg.tools.plan.lost import time_lost
from megapg.tools.plan.measure import measure
from megapg.tools.plan.models import find_model
from megapg.tools.plan.suggest import _Search, suggest, text_of_options
from megapg.tools.plan.training import Job, default_microbatches, default_samples

SCHEMA = json.loads(Path(megapg.tools.plan.__file__).with_name("schema.json").read_text())
CLUSTER = """
gpus_per_node = 2
nvlink_domain = 2
memory_gb = 5.6
nvlink_gb_s = 100
network_gb_s = 10
bf16_tflops = 100
"""
MODEL = """
seq_length = 1024
{more}
[model]
vocab_size = 32000
position_embedding_type = "rope"
share_embeddings_and_output_weights = false
[config]
num_layers = {layers}
hidden_size = 2048
ffn_hidden_size = 8192
num_attention_heads = 16
activation_func = "silu"
gated_linear_unit = true
normalization = "RMSNorm"
add_bias_linear = false
hidden_dropout = 0.0
attention_dropout = 0.0
"""
GROUPS = "num_query_groups = 2\n"
EXPERTS = """
num_moe_experts = 4
moe_router_topk = 2
moe_ffn_hidden_size = 2048
moe_router_load_balancing_type = "aux_loss"
moe_aux_loss_coeff = 0.02
"""
LATENT = """
multi_latent_attention = true
q_lora_rank = 512
kv_lora_rank = 256
qk_head_dim = 128
qk_pos_emb_head_dim = 64
v_head_dim = 128
"""
MODELS = {
    "dense": MODEL.format(more="", layers=4) + GROUPS,
    "experts": MODEL.format(more="", layers=2) + GROUPS + EXPERTS,
    "latent": MODEL.format(more="first_dense_layers = 1", layers=2) + EXPERTS + LATENT,
}
KINDS = ["dense", "experts", pytest.param("latent", marks=pytest.mark.slow)]
SAMPLES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("suggest")
    for name, text in MODELS.items():
        (made / f"{name}.toml").write_text(text)
    (made / "small.toml").write_text(CLUSTER)
    return made


@pytest.fixture(scope="module")
def cluster(folder):
    return load_cluster(str(folder / "small.toml"))


def suggested(folder, cluster, name, **options):
    model = find_model(str(folder / f"{name}.toml"))
    job = Job(model=model.name, seq_length=model.seq_length)
    return suggest(4, cluster, model, job, **{"samples": SAMPLES, **options})


@functools.cache
def every_layout(folder, name, cluster):
    """Return each layout with its training, by recomputation, and the search that has it."""
    model = find_model(str(folder / f"{name}.toml"))
    jobs = [
        Job(model=model.name, seq_length=model.seq_length, recompute=each)
        for each in ("none", "full")
    ]
    search = _Search(4, cluster, model, jobs, SAMPLES, {}, 4e14)
    found = []
    for layout, microbatches in search._layouts(4):
        own = [replace(job, microbatches=microbatches) for job in jobs]
        with contextlib.suppress(PlanError):  # the layers cannot be divided
            found.append([(layout, job, measure(layout, cluster, model, job)) for job in own])
    return search, found


@pytest.mark.parametrize("name", KINDS)
def test_no_layout_holds_or_loses_less_than_its_bound(name, folder, cluster):
    search, found = every_layout(folder, name, cluster)
    for layout, job, training in itertools.chain(*found):
        bound = least(layout, job, search.shape)
        held = max(each.total - each.communicators[1] for each in training.stages)
        assert 0.5 * held < bound.total <= held, layout
        lost, lower = (
            time_lost(layout, cluster, job, stages, search.arithmetic)
            for stages in (training.stages, [bound])
        )
        assert 0.3 * lost.seconds < lower.seconds <= lost.seconds * (1 + 1e-9), layout


@pytest.mark.parametrize("name", KINDS)
def test_the_first_ones_are_those_of_measuring_every_layout(name, folder, cluster):
    search, found = every_layout(folder, name, cluster)
    expected = []
    for rungs in found:
        fits = []
        for layout, job, training in rungs:
            if training.fullest.total <= cluster.memory_gb.value * 1e9:
                lost = time_lost(layout, cluster, job, training.stages, search.arithmetic)
                share = training.fullest.total / (cluster.memory_gb.value * 1e9)
                fits.append((share > 0.9, lost.seconds, layout.tp, layout.pp, layout, job))
        expected += sorted(fits, key=lambda each: each[0])[:1]
    expected.sort(key=lambda each: each[:4])
    assert {each[0] for each in expected} == {False, True} or name == "latent"
    assert 4 <= len(expected) < len(found)  # some do not fit
    made = suggested(folder, cluster, name, first=3)
    assert [(each.layout, each.training.job) for each in made.found] == [
        each[4:] for each in expected[:3]
    ]
    assert made.measured < 2 * len(found)
    assert made == suggested(folder, cluster, name, first=3)
    assert not made.complete
    assert not suggested(folder, cluster, name, first=1).complete
    assert suggested(folder, cluster, name, first=None).complete
    for each in made.found:
        job = each.training.job
        assert job.microbatches * job.micro_batch_size * each.layout.dp == SAMPLES
    last = expected[-1][4]
    everything = suggested(folder, cluster, name, until=last)
    assert everything.place_of(last) == len(everything.found) == len(expected)
    unknown = replace(last, order="tp-ep-cp-dp-pp")
    assert suggested(folder, cluster, name, first=3, until=unknown) == made


def test_more_memory_keeps_every_layout(folder, cluster):
    def found(memory):
        machines = replace(cluster, memory_gb=Quantity(memory, "test"))
        made = suggested(folder, machines, "dense", first=None).found
        return {each.layout: each.lost.seconds for each in made}

    little, much = found(cluster.memory_gb.value), found(2 * cluster.memory_gb.value)
    assert little.keys() < much.keys()
    assert all(much[layout] <= little[layout] for layout in little)


def test_a_slower_network_moves_down_only_layouts_that_use_it_more(folder, cluster):
    slow = replace(cluster, network_gb_s=Quantity(cluster.network_gb_s.value / 2, "test"))
    before = suggested(folder, cluster, "dense", first=None).found
    after = suggested(folder, slow, "dense", first=None)
    assert len({each.lost.network_bytes for each in before}) > 2
    for first, second in itertools.combinations(before, 2):
        if first.lost.network_bytes <= second.lost.network_bytes:
            assert after.place_of(first.layout) < after.place_of(second.layout)


def test_given_sizes_are_kept(folder, cluster):
    roomy = replace(cluster, memory_gb=Quantity(20, "test"))
    made = suggested(folder, roomy, "dense", given={"tp": 2, "vpp": None})
    assert {(each.layout.tp, each.layout.vpp) for each in made.found} == {(2, None)}
    assert {each.layout.pp for each in made.found} == {1, 2}
    made = suggested(folder, cluster, "dense", recompute=["full"])
    assert {each.training.job.recompute for each in made.found} == {"full"}


def test_a_reason_is_given_if_nothing_fits(folder, cluster):
    tiny = replace(cluster, memory_gb=Quantity(4.3, "test"))
    with pytest.raises(PlanError) as caught:
        suggested(folder, tiny, "dense")
    words = r"no layout fits. The nearest one lacks 0\.\d GB or more: (.*) --recompute full\. "
    found = re.fullmatch(words + r"--world-size (\d+) may be enough\.", str(caught.value))
    assert found, caught.value
    assert int(found[2]) in (8, 16)
    with pytest.raises(PlanError, match="no layout has these sizes"):
        suggested(folder, cluster, "dense", given={"tp": 3})
    with pytest.raises(PlanError, match="no layout has these sizes"):
        suggested(folder, cluster, "dense", samples=1, given={"tp": 1, "pp": 1})
    with pytest.raises(PlanError, match=r"has no bf16_tflops: the dense bfloat16 arithmetic"):
        suggested(folder, replace(cluster, bf16_tflops=None), "dense")


def test_a_function_without_recomputation_is_not_asked_for_it(tmp_path, cluster):
    """The errors of its author are shown."""
    file = tmp_path / "own.py"
    file.write_text("def build(pg):\n    raise ValueError('no such layer')\n")
    model = find_model(f"{file}:build")
    with pytest.raises(PlanError, match="no such layer"):
        suggest(4, cluster, model, Job(model=model.name, seq_length=64))


def test_the_function_of_the_guide_has_suggestions(tmp_path):
    """Its vocabulary of an odd size does not divide among tp."""
    page = (Path(__file__).parents[2] / "migration_guide/plan.md").read_text()
    (source,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.S)
    source = source.replace("50304", "50257").replace("num_layers=16", "num_layers=2")
    (tmp_path / "train.py").write_text(source)
    words = "plan --world-size 4 --suggest --model train.py:build --global-batch-size 8 --pp 1"
    done = cli.megapg(*words.split(), at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"The 1 that work of 3" in done.stdout
    assert "--model train.py:build" in done.stdout.decode()


def test_a_function_with_recomputation_of_its_own_is_bounded_by_its_weights(tmp_path):
    page = (Path(__file__).parents[2] / "migration_guide/plan.md").read_text()
    (source,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.S)
    named = f"{tmp_path}/recomputed.py:build"
    source = source.replace('recompute="none", ', "").replace("recompute ==", '"full" ==')
    source = source.replace("else recompute", 'else "full"')
    (tmp_path / "recomputed.py").write_text(source)
    job = Job(model=named, seq_length=2048, microbatches=8)
    layout = ParallelLayout(world_size=1)
    model = find_model(named)
    bound = least(layout, job, look_at(model, job))
    (stage,) = measure(layout, load_cluster("H100-8"), model, job).stages
    assert bound.total <= stage.total - stage.communicators[1]


@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"tp": 2}])
def test_a_model_that_is_trained_in_part_is_bounded_by_less(sizes, tmp_path, cluster):
    page = (Path(__file__).parents[2] / "migration_guide/plan.md").read_text()
    (source,) = re.findall(r"```python\n(# train.py\n.*?)```", page, re.S)
    head = """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("final_layernorm" in name)
    return model
"""
    source = source.replace("return GPTModel(", "model = GPTModel(") + head
    name = "_".join(["frozen_in_part", *sizes])  # a module is imported once
    (tmp_path / f"{name}.py").write_text(source)
    model = find_model(f"{tmp_path}/{name}.py:build")
    job = Job(model=model.name, seq_length=2048, microbatches=8)
    layout = ParallelLayout(world_size=2, **sizes)
    bound = least(layout, job, look_at(model, job))
    stages = measure(layout, cluster, model, job).stages
    assert bound.total <= max(stage.total - stage.communicators[1] for stage in stages)
    for flow in (each for each in bound.flows if getattr(layout, each.field) > 1):
        # Without sequence parallelism, an all-reduce takes the place of a gather and a scatter.
        counted = sum(
            each.bytes * (2 if each.collective == "all_reduce" else 1)
            for stage in stages
            for each in stage.flows
            if each.field == flow.field
        )
        assert flow.bytes <= counted


def test_replicas_of_the_optimizer_do_not_raise_the_bound(folder, cluster):
    model = find_model(str(folder / "dense.toml"))
    job = Job(model=model.name, seq_length=model.seq_length, microbatches=1)
    layout = ParallelLayout(world_size=8, optimizer_instances=2)
    stages = [least(layout, job, look_at(model, job))]
    stages += measure(layout, cluster, model, job).stages
    lower, lost = (time_lost(layout, cluster, job, [each], 1).seconds for each in stages)
    assert lower <= lost


def test_the_groups_that_cross_most_decide():
    layout = ParallelLayout(world_size=24, tp=6)
    flows = (Flow("tp", "all_gather", 1, 6 * 10**9, 0.0),)
    stage = StageCost(0, 0, 1, 1, 1, 1, 1, (0, 0), flows)
    job = Job(model="any", seq_length=1)
    lost = time_lost(layout, load_cluster("H100-8"), job, [stage], 1)
    assert lost.network_bytes == pytest.approx(5e9 / 3)


def test_options_name_the_order_and_the_replicas():
    sizes = {"tp": 2, "pp": 2, "order": "tp-cp-ep-pp-dp", "optimizer_instances": 2}
    words = text_of_options(ParallelLayout(world_size=16, **sizes), Job(model="", seq_length=1))
    assert "--order tp-cp-ep-pp-dp --optimizer-instances 2" in words


def test_chunks_that_are_not_equal_are_considered(cluster):
    model = find_model("deepseek-v3")
    job = Job(model=model.name, seq_length=4096)
    jobs = [job]
    search = object.__new__(_Search)
    search._model, search._jobs = model, jobs
    search.shape = SimpleNamespace(layers=61, experts=256)
    for pp, vpp, possible in ((8, 4, True), (4, 4, True), (8, 7, False), (8, None, True)):
        layout = ParallelLayout(world_size=256, pp=pp, vpp=vpp, ep=8)
        assert search._divides(layout, 64) == possible


@pytest.mark.parametrize(
    ("world_size", "seq_length", "samples"),
    [(64, 8192, 512), (1024, 8192, 512), (96, 8192, 768), (8, 3000, 2048), (7, 2**24, 7)],
)
def test_a_step_has_four_million_tokens_or_more(world_size, seq_length, samples):
    assert default_samples(world_size, seq_length) == samples
    odd = world_size // math.gcd(world_size, 2**30)
    assert samples * seq_length >= 4 * 2**20
    assert samples % odd == 0


# --- the command ----------------------------------------------------------------------------------


def test_the_command_lists_layouts_and_how_to_see_the_first(folder):
    words = "--world-size 4 --cluster 2xsmall.toml --model dense.toml --global-batch-size 8"
    sizes = ["--tp", "2", "--pp", "2"]
    done = cli.megapg("plan", *words.split(), "--suggest", *sizes, at=folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert max(map(len, lines[:-1])) <= 80
    first = next(line.split() for line in lines if line.strip().startswith("1 "))
    assert any(re.fullmatch(r"\d+%", word) for word in first)
    command = lines[-1].split()
    assert command[:2] == ["megapg", "plan"]
    assert int(first[1]) == int(command[command.index("--tp") + 1]) == 2
    asked = cli.megapg("plan", *words.split(), "--suggest", "--json", *sizes, at=folder)
    found = json.loads(asked.stdout)
    check_schema(found, SCHEMA)
    suggestions = found["suggestions"]["layouts"]
    assert suggestions[0]["command"].split() == command
    assert {each["tp"] for each in suggestions} == {2}
    with pytest.raises((AssertionError, KeyError)):
        check_schema(found | {"suggestions": {"layouts": []}}, SCHEMA)
    shown = cli.megapg(*command[1:], "--json", at=folder)
    plan = json.loads(shown.stdout)
    assert plan["training"] == found["training"]
    assert plan["training"]["job"]["microbatches"] == suggestions[0]["microbatches"]
    totals = [stage["total"] for stage in plan["training"]["stages"]]
    assert max(totals) == suggestions[0]["bytes"]
    assert suggestions[0]["share"] == max(totals) / 5.6e9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--suggest", "--suggest: only with --model."),
        ("--global-batch-size 8", "--global-batch-size: only with --suggest."),
        ("--suggest --model llama3-8b --rank 1 --svg a.svg", "--rank, --svg: not with --suggest"),
        ("--suggest --model llama3-8b --cluster 1xH100-8", "Use 2xH100-8"),
        ("--suggest --model llama3-8b --cluster 4xH100-8", "Use 2xH100-8, or --world-size 32"),
        ("--suggest --model llama3-8b --order bogus", "bogus"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, message, tmp_path):
    done = cli.megapg("plan", "--world-size", "16", *words.split(), at=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.decode()


def test_a_file_gets_few_lines_of_progress(monkeypatch, capsys):
    for pause, lines in (
        (0, ["building the model: stage 1 of 2", "building the model: stage 2 of 2"]),
        (60, []),
    ):
        monkeypatch.setattr(plan_command, "_PAUSE", pause)
        with plan_command._progress() as progress:
            progress("stage 1 of 2")
            progress("stage 2 of 2")
        printed = capsys.readouterr()
        assert printed.err.splitlines() == lines
        assert printed.out == ""


def test_a_plan_and_its_suggestions_have_equal_steps():
    """A layout with vpp rounds up to a multiple of pp."""
    for world_size, sizes in ((64, {"tp": 8, "pp": 4}), (96, {"tp": 2, "cp": 2}), (8, {"pp": 8})):
        layout = ParallelLayout(world_size=world_size, **sizes)
        microbatches = default_microbatches(layout, 8192, 2)
        assert microbatches * layout.dp * 2 == default_samples(world_size, 8192)
    layout = ParallelLayout(world_size=96, pp=3, vpp=2, tp=2)
    assert default_microbatches(layout, 8192, 7) % 3 == 0
    assert default_microbatches(ParallelLayout(world_size=512), 2**22, 1) == 1


OWN = """
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig


def build(pg{more}):
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, tensor_model_parallel_size=pg.size("tp"),
        pipeline_model_parallel_size=pg.size("pp"),
    )
    first, last = pg.rank("pp") == 0, pg.rank("pp") == pg.size("pp") - 1
    return GPTModel(config, get_gpt_layer_local_spec(), 256, 64, pre_process=first,
                    post_process=last, pg_collection=pg)
"""


@pytest.mark.parametrize("more", ["", ", recompute='none'"])
def test_a_function_that_cannot_recompute_is_told_so(tmp_path, more):
    (tmp_path / "own.py").write_text(OWN.format(more=more))
    words = "plan --world-size 2 --cluster H100-8 --model own.py:build --seq-length 64 --suggest"
    said = " ".join(cli.megapg(*words.split(), at=tmp_path, timeout=500).stdout.decode().split())
    # The function has no virtual stages.
    assert said.startswith("The 3 that work of 4 layouts of 2 ranks for own.py:build"), said
    told = "Recomputation: the function has no parameter recompute. Add recompute='none' to its"
    assert (told in said) == (not more)


@pytest.mark.slow
def test_seventy_billion_parameters_on_64_gpus_need_few_measurements(tmp_path):
    """A measurement takes less than a second, so all of them take less than a minute.

    Layouts that leave too little memory come last, so all those that may leave enough are measured.
    """
    words = "plan --world-size 64 --cluster 8xH100-8 --model llama3-70b --suggest --json"
    done = cli.megapg(*words.split(), at=tmp_path, timeout=500)
    suggestions = json.loads(done.stdout)["suggestions"]
    assert suggestions["measured"] <= 40
    found = suggestions["layouts"]
    assert len(found) == 10
    assert all(each["bytes"] <= 80e9 and each["tp"] <= 8 for each in found)
