"""Chains of checkpoints, from layout to layout: fixed ones, and a seeded draw.

``tests/support/chains.py`` says what a chain compares. ``python -m benchmarks.chains`` runs many.
"""

import functools
import tempfile

import pytest
from chain_model import Chain, Layout, can_run, draw_chain, seeded_chains
from chains import ROUNDED, run_chains, shrink
from hypothesis import given, settings
from hypothesis import strategies as st

ONE, DP2, TP2, PP2, EP2 = Layout(), Layout(2), Layout(2, tp=2), Layout(2, pp=2), Layout(2, ep=2)

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
        assert outcome.kind == expected, outcome


@pytest.mark.slow
def test_drawn_chains(tmp_path):
    """None is wrong. A wrong one is shrunk before it is shown."""
    chains = seeded_chains("tests", 20)
    found = run_chains(chains, tmp_path)
    wrong = [each for each, o in zip(chains, found, strict=True) if o.kind == "wrong"]
    if wrong:
        least = shrink(wrong[0], tmp_path / "shrink")
        pytest.fail(f"{len(wrong)} of {len(chains)} are wrong; simplest: {least}")


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_every_drawn_chain_can_run(data):
    assert can_run(draw_chain(lambda options: data.draw(st.sampled_from(options))))
