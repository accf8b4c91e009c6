"""Measured steps equal real ones: traffic on gloo ranks, and bytes of models with real tensors."""

import contextlib
import functools
import os
import sys
import warnings
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import real_step
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from real_step import Case, EvenRouting, real_steps
from test_real_steps import LARGE, QUICK

from megapg.errors import PlanError
from megapg.layout import ParallelLayout
from megapg.megatron import published
from megapg.testing import fake_collection, megatron_on_cpu
from megapg.tools.plan import load_cluster
from megapg.tools.plan.measure import measure
from megapg.tools.plan.models import Model, find_model
from megapg.tools.plan.pipeline import most_kept, passes
from megapg.tools.plan.saved import Saved, storages
from megapg.tools.plan.training import Job

pytestmark = pytest.mark.contract

CLUSTER = load_cluster("H100-8")


@cache
def measured(case):
    def build(pg, vp_stage=None, *, job):
        return real_step.build(case, pg, vp_stage)

    layout = ParallelLayout(world_size=case.world_size, **case.sizes)
    job = Job(
        model="case",
        seq_length=case.seq_length,
        micro_batch_size=case.micro_batch_size,
        microbatches=case.microbatches,
        recompute=case.recompute,
        distributed_optimizer=case.distributed_optimizer,
    )
    return measure(layout, CLUSTER, Model("case", case.seq_length, build), job)


# --- traffic --------------------------------------------------------------------------------------


@cache
def steps(*cases):
    return real_steps(cases)


def check_traffic(case, ranks):
    training = measured(case)
    per_stage = case.world_size // case.pp
    for rank, rows in enumerate(ranks):
        # Two interleaved stages send one way over WORLD, which this reports as pp.
        real = {
            ("pp" if row.collective in ("send", "recv") else row.field, row.collective): row
            for row in rows
            if row.size > 1
        }
        # Fields of equal ranks share a group on gloo, and only some of them do on NCCL.
        names = {name: row.field for row in rows for name in row.fields}
        counts, sizes = Counter(), Counter()
        for flow in training.stages[rank // per_stage].flows:
            key = names.get(flow.field, flow.field), flow.collective
            counts[key] += flow.count
            sizes[key] += flow.bytes
        assert counts == {key: row.count for key, row in real.items()}
        assert sizes == {key: row.bytes for key, row in real.items()}
        assert len(real) == sum(row.size > 1 for row in rows)


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_traffic_of_two_ranks(number):
    check_traffic(QUICK[number], steps(*QUICK)[QUICK[number]])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LARGE)))
def test_traffic_of_more_ranks(number):
    check_traffic(LARGE[number], steps(*LARGE)[LARGE[number]])


def test_crossing_counts_the_steps_of_a_ring_to_other_nodes():
    case = Case(32, tp=2, pp=4, vpp=2, layers=8, microbatches=4)
    first, *_, last = measured(case).stages
    crossing = {(flow.field, flow.collective): flow.crossing for flow in first.flows}
    assert crossing["tp", "all_reduce"] == 0
    assert crossing["dp", "reduce_scatter"] == 0
    assert crossing["embd", "all_reduce"] == 1
    assert crossing["pp", "send"] == crossing["pp", "recv"] == 1
    assert crossing["intra_dist_opt", "all_reduce"] == 4 / 32
    assert last.rank == 24


# --- memory ---------------------------------------------------------------------------------------


def held(case, rank):
    """Return the bytes that a rank holds after a real step with fake groups."""
    sizes = {key: value for key, value in case.sizes.items() if value is not None}
    with (
        warnings.catch_warnings(),
        megatron_on_cpu(),
        fake_collection(rank, case.world_size, **sizes) as pg,
        published(pg),
        EvenRouting(),
    ):
        warnings.simplefilter("ignore")
        chunks, optimizer, _ = real_step.trainer(case, pg)
        parameters = [each for chunk in chunks for each in chunk.parameters()]
        trained = [each for each in parameters if each.requires_grad]
        for parameter in trained:
            parameter.main_grad.normal_()
        optimizer.step()
        weights = storages(parameters)
        gradients = storages(each.main_grad for each in trained)
        state = storages(_state(optimizer))
        return (
            sum(each.numel() for each in parameters),
            sum(weights.values()),
            sum(gradients.values()),
            sum(size for number, size in state.items() if number not in weights),
        )


def _state(optimizer):
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:
            continue
        for main, kept in part.optimizer.state.items():
            yield from (main, kept["exp_avg"], kept["exp_avg_sq"])


MEMORY = [
    Case(2),
    Case(2, distributed_optimizer=False),
    Case(2, bf16=False),
    Case(2, bf16=False, distributed_optimizer=False),
    Case(4, tp=2, sequence_parallel=True),
    Case(4, tp=2, tied=False, learned_positions=True),
    Case(4, pp=2),
    Case(4, pp=2, vpp=2, microbatches=2),
    Case(8, pp=4, vpp=2, layers=8, microbatches=4, tied=False, distributed_optimizer=False),
    Case(4, ep=2, experts=4),
    Case(8, tp=2, sequence_parallel=True, ep=4, expt_tp=1, experts=8),
    Case(8, pp=2, ep=2, experts=4, distributed_optimizer=False),
]


@pytest.mark.parametrize("number", range(len(MEMORY)))
def test_bytes_equal_those_of_the_built_model(number):
    case = MEMORY[number]
    for stage in measured(case).stages:
        found = stage.weights, stage.parameters, stage.gradients, stage.optimizer
        assert found == held(case, stage.rank)


HEAD, LOW, HIGH = "output_layer", r"layers\.[01]\.", r"layers\.[23]\."
FROZEN = [
    Case(2, pp=2, tied=False, trains=HEAD),
    Case(2, pp=2, tied=False, trains=HEAD, distributed_optimizer=False),
    Case(2, pp=2, tied=False, trains="embedding"),
    Case(2, pp=2, vpp=2, microbatches=2, tied=False, trains="layers.0.mlp"),
    Case(2, pp=2, adapters=True, trains="adapter"),
    Case(2, pp=2, adapters=True, trains=r"layers\.1\..*adapter"),
    Case(2, ep=2, experts=4, trains="experts"),
    Case(2, ep=2, experts=4, trains="experts", distributed_optimizer=False),
    Case(4, pp=2, ep=2, experts=4, tied=False, trains="output_layer|router"),
    Case(1, trains="nothing"),
]


@pytest.mark.parametrize("number", range(len(FROZEN)))
def test_bytes_of_models_that_are_trained_in_part(number):
    case = FROZEN[number]
    for stage in measured(case).stages:
        found = stage.weights, stage.parameters, stage.gradients, stage.optimizer
        assert found == held(case, stage.rank)


def test_weights_of_the_whole_model():
    alone = measured(Case(1, layers=8, experts=4)).weights
    for case in (
        Case(2, tp=2, layers=8, experts=4, sequence_parallel=True),
        Case(4, pp=4, vpp=2, layers=8, microbatches=4, experts=4),
        Case(2, tp=2, expt_tp=1, layers=8, experts=4, sequence_parallel=True),
        Case(8, tp=2, ep=4, expt_tp=1, layers=8, experts=4, sequence_parallel=True),
        Case(8, tp=2, pp=2, ep=2, layers=8, experts=4, sequence_parallel=True),
    ):
        assert measured(case).weights == alone


# --- activations ----------------------------------------------------------------------------------


def kept_by_real_tensors(case, rank=0):
    """Return the most bytes that autograd keeps for a microbatch of a real model."""
    with (
        warnings.catch_warnings(),
        megatron_on_cpu(),
        fake_collection(rank, case.world_size, tp=case.tp, pp=case.pp) as pg,
        published(pg),
    ):
        warnings.simplefilter("ignore")
        (chunk,), _, _ = real_step.trainer(case, pg)
        tensors = [*chunk.parameters(), *chunk.module.buffers()]
        gradients = [each.main_grad for each in chunk.parameters() if each.requires_grad]
        saved = Saved(storages([*tensors, *gradients]))
        tokens, labels, positions = next(real_step._batches(case))
        with saved.watched():
            if rank:  # what a stage receives takes gradients
                given = (case.seq_length, 1, case.hidden)
                chunk.module.set_input_tensor([torch.zeros(given, requires_grad=True)])
            loss = chunk(tokens, positions, None, labels=labels).mean()
            if loss.requires_grad:
                loss.backward()
        del loss
        assert saved.bytes == 0
        return saved.most


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("tp", [1, 2])
def test_activations_equal_those_of_real_tensors(recompute, tp):
    # Without dropout, and in float32: kernels of a CPU keep other types than those of a GPU.
    case = Case(tp, tp=tp, sequence_parallel=tp > 1, recompute=recompute, bf16=False, dropout=0.0)
    assert measured(case).stages[0].activations == kept_by_real_tensors(case)


@pytest.mark.parametrize(
    ("trains", "recompute", "stages"),
    [
        (HEAD, "none", 1),
        (HEAD, "selective", 2),
        (LOW, "none", 1),
        (HIGH, "none", 1),
        (HIGH, "full", 2),
        (r"layers\.4|output_layer", "none", 1),
        ("adapter", "full", 2),
        ("embedding", "full", 1),
        ("nothing", "full", 2),
    ],
)
def test_activations_of_models_that_are_trained_in_part(trains, recompute, stages):
    layers = 9 * stages
    case = Case(stages, pp=stages, layers=layers, tied=False, adapters=True, trains=trains)
    case = replace(case, recompute=recompute, bf16=False, dropout=0.0)
    for stage in measured(case).stages:
        assert stage.activations == kept_by_real_tensors(case, stage.rank)


def gpt3_layers(layers, pg, vp_stage=None, *, job):
    """Build layers of GPT-3, on each of three stages, with a softmax that keeps bfloat16."""
    recompute = {"selective": ["core_attn"], "none": None, "full": None}[job.recompute]
    config = TransformerConfig(
        num_layers=3 * layers,
        hidden_size=12288,
        num_attention_heads=96,
        pipeline_model_parallel_size=3,
        tensor_model_parallel_size=pg.size("tp"),
        sequence_parallel=pg.size("tp") > 1,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_softmax_in_fp32=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=True,
        use_cpu_initialization=True,
        recompute_granularity=None if job.recompute == "none" else job.recompute,
        recompute_modules=recompute,
        recompute_method="uniform" if job.recompute == "full" else None,
        recompute_num_layers=1 if job.recompute == "full" else None,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=51200,
        max_sequence_length=2048,
        pre_process=pg.rank("pp") == 0,
        post_process=pg.rank("pp") == 2,
        pg_collection=pg,
    )


@pytest.mark.parametrize(
    ("recompute", "factor"), [("none", 34 + 5 * 96 * 2048 / 12288), ("selective", 34), ("full", 2)]
)
@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_layer_as_published(recompute, factor, tp):
    """Korthikanti et al., arXiv 2205.05198, table 2: sbh(34 + 5as/h) / t with sequence parallel."""
    s, b, h = 2048, 4, 12288
    layout = ParallelLayout(world_size=3 * tp, tp=tp, pp=3)
    job = Job(model="gpt3", seq_length=s, micro_batch_size=b, recompute=recompute)
    few, many = (
        measure(layout, CLUSTER, Model("gpt3", s, functools.partial(gpt3_layers, n)), job)
        for n in (2, 3)
    )
    of_layer = many.stages[1].activations - few.stages[1].activations
    assert of_layer == pytest.approx(s * b * h * factor / tp, rel=0.05)


def test_passes_of_a_pipeline_without_interleaving():
    layout = ParallelLayout(world_size=4, pp=4)
    for stage in range(4):
        order = list(passes(layout, stage, 8))
        assert order.count((0, False)) == order.count((0, True)) == 8
        assert most_kept(layout, stage, 8, [10], [13]) == 10 * (4 - stage) + 3
        assert most_kept(layout, stage, 2, [10], [13]) == 10 * min(4 - stage, 2) + 3


def test_interleaved_passes_follow_the_schedule_of_megatron():
    layout = ParallelLayout(world_size=4, pp=4, vpp=2)
    for stage in range(4):
        order = list(passes(layout, stage, 8))
        assert [order.count((chunk, way)) for chunk in (0, 1) for way in (True, False)] == [8] * 4
        ahead = 2 * (4 - stage - 1) + 4
        assert [backward for _, backward in order].index(True) == ahead + 1
        assert most_kept(layout, stage, 8, [1, 1], [1, 1]) == ahead + 1
    assert most_kept(layout, 0, 4, [1, 1], [1, 1]) == 8


class _Passes(torch.autograd.Function):
    """Records the forward and backward passes of a chunk."""

    @staticmethod
    def forward(ctx, tensor, record, chunk):
        ctx.record, ctx.chunk = record, chunk
        record.append((chunk, False))
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.record.append((ctx.chunk, True))
        return gradient, None, None


@pytest.mark.parametrize("vpp", [None, 2])
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("stage", range(4))
def test_passes_of_the_real_schedules(vpp, microbatches, stage):
    case = Case(4, pp=4, vpp=vpp, layers=8, microbatches=microbatches)
    sizes = {key: value for key, value in case.sizes.items() if value is not None}
    record = []
    with (
        warnings.catch_warnings(),
        megatron_on_cpu(),
        fake_collection(stage, 4, **sizes) as pg,
        published(pg),
    ):
        warnings.simplefilter("ignore")
        chunks, _, step = real_step.trainer(case, pg)
        for number, chunk in enumerate(chunks):
            chunk.register_forward_hook(
                lambda module, given, made, number=number: _Passes.apply(made, record, number)
            )
        with contextlib.suppress(AssertionError):  # what fake groups receive is no number
            step()
    layout = ParallelLayout(world_size=4, pp=4, vpp=vpp)
    assert record == list(passes(layout, stage, microbatches))


# --- cost -----------------------------------------------------------------------------------------


def test_say_names_each_stage():
    case, said = Case(2, pp=2, seq_length=8), []
    layout = ParallelLayout(world_size=2, pp=2)
    build = functools.partial(_build, case)
    measure(layout, CLUSTER, Model("x", 8, build), Job(model="x", seq_length=8), said.append)
    assert said == ["stage 1 of 2", "stage 2 of 2"]


def _build(case, pg, vp_stage=None, *, job):
    return real_step.build(case, pg, vp_stage)


def test_seventy_billion_weights():
    model = find_model("llama3-70b")
    layout = ParallelLayout(world_size=64, tp=4, pp=16)
    training = measure(layout, CLUSTER, model, Job(model=model.name, seq_length=8192))
    assert training.weights == pytest.approx(70.55e9, rel=0.0005)


def test_a_step_that_fails_names_the_model_and_the_rank():
    def build(pg, vp_stage=None, *, job):
        chunk = real_step.build(Case(1), pg, vp_stage)
        chunk.forward = lambda *given, **named: 1 / 0
        return chunk

    job = Job(model="mine.py:build", seq_length=8)
    with pytest.raises(PlanError, match=r"mine.py:build: a step of rank 0 failed: ZeroDivision"):
        measure(ParallelLayout(world_size=1), CLUSTER, Model("mine.py:build", 8, build), job)
    assert not torch.distributed.is_initialized()


def test_a_module_without_a_config_is_named():
    def build(pg, vp_stage=None, *, job):
        return torch.nn.Linear(2, 2)

    hook = sys.excepthook
    with pytest.raises(PlanError, match=r"mine: a step of rank 0 failed: .* attribute 'config'"):
        measure(
            ParallelLayout(world_size=1),
            CLUSTER,
            Model("mine", 8, build),
            Job(model="", seq_length=8),
        )
    assert sys.excepthook is hook


@pytest.mark.parametrize("microbatches", [3, 6])
def test_interleaved_microbatches_are_a_multiple_of_pp(microbatches):
    # Megatron-core's schedule refuses any other number.
    with pytest.raises(PlanError, match=r"microbatches: .* pp=4. Plan with --microbatches [48]\."):
        measured(Case(4, pp=4, vpp=2, layers=8, microbatches=microbatches))


def test_frozen_parameters_have_no_gradients():
    def build(pg, vp_stage=None, *, job):
        chunk = real_step.build(case, pg, vp_stage)
        chunk.decoder.layers[0].requires_grad_(False)
        return chunk

    case = Case(2)
    job = Job(model="frozen", seq_length=case.seq_length)
    found = measure(ParallelLayout(world_size=2), CLUSTER, Model("frozen", 8, build), job)
    (stage,), (whole,) = found.stages, measured(case).stages
    assert stage.weights == whole.weights
    assert stage.parameters == pytest.approx(whole.parameters, rel=0.05)  # other padding
    trained = stage.gradients / whole.gradients
    assert 0.3 < trained < 0.9
    assert stage.optimizer / whole.optimizer == pytest.approx(trained, rel=0.05)


def test_leaves_the_random_numbers_and_the_variables_of_the_caller(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        monkeypatch.delenv(name)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    tracker = get_cuda_rng_tracker()
    kept, states = dict(vars(tracker)), {"mine": torch.tensor([7])}
    try:
        tracker.reset()
        for given in ({}, states):
            if given:
                tracker.set_states(given)
            measured.__wrapped__(Case(2, tp=2))
            assert tracker.get_states() == given
            assert tracker.is_initialized() == bool(given)
    finally:
        vars(tracker).update(kept)
    assert torch.rand(3).equal(expected)
    assert not any(name.startswith("NVTE_") for name in os.environ)
