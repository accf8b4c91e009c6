"""Chains of checkpoints, from layout to layout: fixed ones, and a seeded draw.

``tests/support/chains.py`` says what a chain compares. ``python -m benchmarks.chains`` runs many.
"""

import functools
import tempfile

import pytest
from chain_model import (
    SEQ_LENGTH,
    Chain,
    Job,
    Layout,
    build_model,
    can_run,
    draw_chain,
    seeded_chains,
    transformer_config,
)
from chains import ROUNDED, run_chains, shrink
from hypothesis import given, settings
from hypothesis import strategies as st

import megapg
from megapg.layout import ParallelLayout
from megapg.megatron import core_version
from megapg.testing import fake_collection, megatron_on_cpu, parity
from megapg.tools.plan import load_cluster
from megapg.tools.plan.measure import measure
from megapg.tools.plan.models import Model
from megapg.tools.plan.saved import storages
from megapg.tools.plan.training import Job as PlannedJob

ONE, DP2, TP2, PP2, EP2 = Layout(), Layout(2), Layout(2, tp=2), Layout(2, pp=2), Layout(2, ep=2)
COPIED = Layout(2, tp=2, expt_tp=1)

FIXED = {
    "a fused Adam of TE": Chain((TP2, ONE, DP2), optimizer="te"),
    "a fused Adam of Apex": Chain((DP2, PP2, ONE), optimizer="apex", form="plain", dtype="bf16"),
    "states in 16 bits": Chain((DP2, TP2, ONE), optimizer="aware fp16", dtype="bf16"),
    "states on the CPU": Chain((DP2, ONE, TP2), optimizer="offload half", dtype="bf16"),
    "only the head, which rank 0 lacks": Chain((PP2, ONE, DP2), trains="head"),
    "adapters in some layers": Chain((PP2, ONE, PP2), trains="adapters in some layers"),
    "no main weights on a rank": Chain(
        (PP2, ONE, DP2), trains="first half", form="plain", dtype="bf16"
    ),
    "experts, parallel and not": Chain((EP2, ONE, EP2), model="moe"),
    "the groups alone": Chain((PP2, ONE, TP2), tied=True, explicit=True, optimizer="te main"),
    "experts copied over tp": Chain((COPIED, ONE, TP2), model="moe", form="plain"),
    "only experts": Chain((EP2, ONE, EP2), model="moe some", trains="experts"),
    "two learning rates in buckets": Chain(
        (DP2, ONE, DP2), form="dp_reshardable", decoupled=True, keep=1
    ),
    "layer by layer, as Muon": Chain((DP2, ONE, DP2), optimizer="layer wise", form="plain"),
    "another layout of buckets": Chain(
        (TP2, PP2, ONE), form="dp_reshardable", dtype="fp16", keep=1
    ),
}
REFUSED = {
    "another layout of buckets": "fully_reshardable",
    "layer by layer, as Muon": "LayerWiseDistributedOptimizer",
}
"""The chains that megapg refuses, and a word that the refusal must have."""


@functools.cache
def outcomes():
    """Run the fixed chains in one set of processes."""
    with tempfile.TemporaryDirectory() as root:
        return dict(zip(FIXED, run_chains(FIXED.values(), root), strict=True))


@pytest.mark.contract
@pytest.mark.parametrize("name", FIXED)
def test_a_chain_is_exact_or_refused_before_anything_changes(name):
    outcome = outcomes()[name]
    if name in REFUSED:
        assert outcome.kind == "refused", outcome
        assert REFUSED[name] in outcome.reason, outcome
    else:
        expected = "rounded" if FIXED[name].optimizer in ROUNDED else "exact"
        if FIXED[name].layouts[0] == COPIED and core_version() < (0, 19):
            expected = "apart"
        assert outcome.kind == expected, outcome


@pytest.mark.slow
def test_drawn_chains(tmp_path):
    """None is wrong. A wrong one is shrunk before it is shown."""
    chains = seeded_chains("tests", 10)
    found = run_chains(chains, tmp_path)
    wrong = [each for each, o in zip(chains, found, strict=True) if o.kind == "wrong"]
    if wrong:
        least = shrink(wrong[0], tmp_path / "shrink")
        pytest.fail(f"{len(wrong)} of {len(chains)} are wrong; simplest: {least}")


# -- the same models in plans and in parity --------------------------------------------------------

PLANNED = {
    "head": Chain((PP2,), model="gqa", trains="head"),
    "experts": Chain((EP2,), model="moe some", trains="experts", form="plain"),
    "all": Chain((TP2,), model="mtp", tied=True),
}


def build_in(chain, pg, vp_stage=None, *, job=None):
    """Build the model of a chain on any layout, as plans and parity ask for it."""
    sizes = {name: pg.size(name) for name in ("tp", "pp", "cp", "ep", "expt_tp")}
    layout = Layout(pg.layout.world_size, **sizes)
    return build_model(chain, layout, transformer_config(chain, layout), pg, vp_stage or 0)


def held(chain, rank):
    """Return the bytes of weights, gradients and optimizer that a rank holds after a step."""
    layout = chain.layouts[0]
    with (
        megatron_on_cpu(),
        fake_collection(rank, layout.world, **layout.sizes) as pg,
        megapg.published(pg),
    ):
        job = Job(chain, layout, pg, 1)
        parameters = [each for chunk in job.chunks for each in chunk.parameters()]
        trained = [each for each in parameters if each.requires_grad]
        for each in trained:
            each.main_grad.normal_()
        job.optimizer.step()
        state = [
            tensor
            for inner in job._inner()
            for main, kept in inner.state.items()
            for tensor in (main, kept["exp_avg"], kept["exp_avg_sq"])
        ]
        weights = storages(parameters)
        own = {number: size for number, size in storages(state).items() if number not in weights}
        gradients = storages(each.main_grad for each in trained)
        return sum(weights.values()), sum(gradients.values()), sum(own.values())


@pytest.mark.contract
@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_has_the_bytes_of_the_model(name):
    chain = PLANNED[name]
    layout = chain.layouts[0]
    job = PlannedJob(
        model="chain",
        seq_length=SEQ_LENGTH,
        micro_batch_size=1,
        microbatches=layout.pp,
        recompute="none",
        distributed_optimizer=chain.distributed,
    )
    model = Model("chain", SEQ_LENGTH, functools.partial(build_in, chain))
    measured = measure(
        ParallelLayout(world_size=layout.world, **layout.sizes), load_cluster("H100-8"), model, job
    )
    for stage in measured.stages:
        assert (stage.parameters, stage.gradients, stage.optimizer) == held(chain, stage.rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["head", "experts"])
def test_the_models_agree_with_one_rank(name):
    chain = PLANNED[name]
    parity(functools.partial(build_in, chain), ["tp=2", "pp=2"]).check()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_drawn_chain_can_run(data):
    assert can_run(draw_chain(lambda options: data.draw(st.sampled_from(options))))
