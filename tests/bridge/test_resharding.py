"""Move weights from one session's model to another's with Megatron-core's resharding."""

import contextlib
import shutil
import zlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.resharding import refit, swap_model_weights
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model

import megapg
from megapg import torch_private
from megapg.errors import UnsupportedOptionError
from megapg.layout import ParallelLayout
from megapg.megatron import (
    core_version,
    for_resharding,
    forbid_global_reads,
    forget_resharding,
    parallel_state,
)
from megapg.testing import megatron_on_cpu, refuse_closed_groups, run_distributed

pytestmark = pytest.mark.contract

LAYERS, EXPERTS = 2, 4
since_0_19 = pytest.mark.skipif(core_version() < (0, 19), reason="0.19 brought it")


def build(pg, experts=None, biases=False):
    stage, stages = pg.rank("pp"), pg.size("pp")
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        gated_linear_unit=True,  # each half is split over tp
        add_bias_linear=biases or experts is None,
        num_moe_experts=experts,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=pg.size("tp"),
        pipeline_model_parallel_size=stages,
        expert_model_parallel_size=pg.size("ep"),
        expert_tensor_parallel_size=pg.size("expt_tp"),
    )
    ends = {"pre_process": stage == 0, "post_process": stage == stages - 1}
    spec = get_gpt_layer_local_spec(num_experts=experts)
    megapg.seed_all(1, pg)
    return GPTModel(config, spec, 256, 16, pg_collection=pg, **ends).cuda()


def fill(model, pg, mark):
    """Fill every shard of every parameter with other values; replicas get the same values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            of_expert = ".experts." in name
            shard = [name, mark, pg.rank("pp")]
            if getattr(parameter, "tensor_model_parallel", False):
                shard.append(pg.rank("expt_tp" if of_expert else "tp"))
            if of_expert:
                shard.append(pg.rank("ep"))
            seed = zlib.crc32(repr(shard).encode())
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_(values)


def save(folder, model, pg):
    megapg.save_checkpoint(folder, 1, model=model, pg_collection=pg)


def differing(model, reference, folder, pg):
    """Return the parameters that differ from ``reference`` after a checkpoint, bit for bit."""
    megapg.load_checkpoint(folder, model=reference, pg_collection=pg, weights_only=True)
    pairs = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    return [name for (name, mine), (_, theirs) in pairs if not torch.equal(mine, theirs)]


def through_checkpoint(folder, trained, train, served, rollout, **kind):
    """Return :func:`differing` between two sessions over the same ranks."""
    save(folder, trained, train.groups)
    different = differing(served, build(rollout.groups, **kind), folder, rollout.groups)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return different


@contextlib.contextmanager
def two_sessions(source, target):
    with (
        megatron_on_cpu(),
        megapg.session(name="train", **source) as train,
        megapg.session(name="rollout", **target) as rollout,
    ):
        yield train, rollout


def swapped(source, target, experts, folder):
    with two_sessions(source, target) as (train, rollout):
        trained, served = build(train.groups, experts), build(rollout.groups, experts)
        compare = partial(through_checkpoint, folder, trained, train, served, rollout)
        many = len(torch_private.known_groups())
        passed = for_resharding(trained), for_resharding(served)
        assert (passed == (trained, served)) == (experts is None)
        for mark in (1, 2):
            fill(trained, train.groups, mark)
            with forbid_global_reads(), refuse_closed_groups():
                swap_model_weights(*passed, "nccl")
            assert compare(experts=experts) == []
            if mark == 1:  # memory was lent and groups were replaced; the plan is kept
                rollout.suspend("recreate")
                rollout.resume()
                assert not rollout.rebind(served).left
        kept = kept_by_resharding(*passed)
        assert kept
        forget_resharding(*passed)
        assert not kept_by_resharding(*passed)
        assert len(torch_private.known_groups()) == many
        assert not parallel_state.is_initialized()


def kept_by_resharding(*models):
    """Return what Megatron-core keeps: services, plans, and attributes of models."""
    of_models = [
        name
        for model in models
        for holder in (model, unwrap_model(getattr(model, "_model", model)))
        for name in vars(holder)
        if "refit" in name or "reshard" in name
    ]
    return [*refit._service_cache, *getattr(refit, "_plan_cache", ()), *of_models]


def unnumbered(folder):
    with two_sessions({"tp": 2}, {"ep": 2}) as (train, rollout):
        trained, served = build(train.groups, EXPERTS), build(rollout.groups, EXPERTS)
        fill(trained, train.groups, 1)
        swap_model_weights(trained, served, "nccl")
        return through_checkpoint(folder, trained, train, served, rollout, experts=EXPERTS)


def refused():
    with two_sessions({"ep": 2}, {}) as (train, rollout):
        with pytest.raises(UnsupportedOptionError, match=r"local_experts\.0\.linear_fc2\.bias"):
            for_resharding(build(train.groups, EXPERTS, biases=True))
        for_resharding(build(rollout.groups, EXPERTS, biases=True))  # every rank has all of them


def on_two_ranks(folder):
    dist.init_process_group("gloo")
    swapped({"tp": 2}, {"pp": 2}, None, folder)
    swapped({"pp": 2}, {"tp": 2}, None, folder)
    swapped({"ep": 2}, {"tp": 2}, EXPERTS, folder)
    swapped({"tp": 2}, {"ep": 2}, EXPERTS, folder)
    refused()
    forget_resharding()  # of the last swap
    different = unnumbered(folder)
    dist.destroy_process_group()
    return different


def test_weights_reach_another_layout(tmp_path):
    """Experts without their numbers are mistaken for each other; with biases they are refused."""
    first, second = run_distributed(partial(on_two_ranks, tmp_path / "saved"), 2, deadline=120)
    assert first == []
    # If upstream numbers the groups itself, for_resharding changes nothing.
    assert second == [
        f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc{part}.weight"
        for layer in range(LAYERS)
        for expert in range(EXPERTS // 2)
        for part in (1, 2)
    ]


def apart(folder):
    dist.init_process_group("gloo")
    trains = dist.get_rank() < 2
    layout = (
        ParallelLayout(world_size=2, tp=2, ranks=range(2))
        if trains
        else ParallelLayout(world_size=2, pp=2, ranks=range(2, 4))
    )
    with (
        megatron_on_cpu(),
        megapg.session(layout, name="train" if trains else "rollout") as session,
    ):
        pg = session.groups
        model = build(pg)
        fill(model, pg, "train" if trains else "rollout")
        with forbid_global_reads():
            swap_model_weights(model if trains else None, None if trains else model, "nccl")
        if trains:
            save(folder, model, pg)
        dist.barrier()
        assert trains or differing(model, build(pg), folder, pg) == []
    dist.barrier()
    dist.destroy_process_group()


@since_0_19
def test_weights_reach_a_session_on_other_ranks(tmp_path):
    run_distributed(partial(apart, tmp_path / "saved"), 4)


def of_equal_sizes(folder):
    with (
        megatron_on_cpu(),
        megapg.session(pp=2, name="train") as train,
        megapg.session(tp=2, name="near") as near,
        megapg.session(tp=2, order="dp-tp-cp-ep-pp", name="far") as far,
    ):
        trained = build(train.groups)
        fill(trained, train.groups, 1)
        different = []
        for session, forget in ((near, False), (far, False), (far, True)):
            if forget:
                forget_resharding(trained, None)
            served = build(session.groups)
            swap_model_weights(trained, served, "nccl")
            different.append(len(through_checkpoint(folder, trained, train, served, session)) > 0)
        return different


@since_0_19
def test_a_plan_is_kept_by_sizes_and_the_ranks_may_be_others(tmp_path):
    ranks = run_distributed(partial(of_equal_sizes, tmp_path / "saved"), 4)
    right, other, again = zip(*ranks, strict=True)
    assert not any(right)
    assert any(other)  # else remove the statement from the guide
    assert not any(again)
