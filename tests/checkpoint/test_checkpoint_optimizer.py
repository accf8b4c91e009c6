"""Optimizer state keeps every value in Megatron-core's own format."""

import copy
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from resuming import Training, distributed, published_groups, training, whole_tensors

import megapg
from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint import optimizer_pieces
from megapg.checkpoint.can_reshard import check_reshard
from megapg.checkpoint.optimizer import content_metadata
from megapg.checkpoint.param_groups import fit
from megapg.checkpoint.restore import restore
from megapg.checkpoint.state import model_state
from megapg.errors import CheckpointError, CheckpointMismatchError, UnsupportedOptionError
from megapg.layout import ParallelLayout
from megapg.testing import megatron_on_cpu
from megapg.tools.demo import gpt
from megapg.tools.demo.job import GPTRun

pytestmark = pytest.mark.contract

FULLY = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
BUCKETS = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}


# -- states that can be resharded ------------------------------------------------------------------


def layout(world_size=8, **sizes):
    return ParallelLayout(world_size=world_size, **sizes)


PREFIXED = {"distrib_optim_sharding_type": "fully_reshardable"}
ORDERS = ({"tp": 2, "order": order} for order in ("tp-cp-ep-dp-pp", "cp-tp-ep-dp-pp"))


@pytest.mark.parametrize(
    ("metadata", "saved", "current", "has_experts"),
    [
        (FULLY, {"tp": 2}, {"tp": 1}, True),
        (FULLY, {"tp": 2, "pp": 2}, {"tp": 4}, True),
        (FULLY, {"pp": 2, "vpp": 2}, {"world_size": 1}, True),
        (FULLY, {"ep": 1}, {"ep": 4, "expt_tp": 1, "tp": 2}, True),
        (FULLY, None, {"ep": 2}, True),
        # Data parallelism, and what does not cut a bucket:
        (BUCKETS, {"tp": 2}, {"tp": 2, "world_size": 2}, False),
        (BUCKETS, {"tp": 2}, {"tp": 2, "cp": 2}, False),
        (BUCKETS, {"ep": 2}, {"ep": 4}, False),
        (BUCKETS, *ORDERS, False),
        # Names with the number of the optimizer do not change unless experts come or go:
        (PREFIXED, {"ep": 2}, {"ep": 4}, True),
        (PREFIXED, {"tp": 2}, {"ep": 2}, False),
    ],
)
def test_a_state_that_can_be_resharded(metadata, saved, current, has_experts):
    check_reshard(metadata, saved and layout(**saved), layout(**current), has_experts)


def of_form(sharding):
    return {"distrib_optim_sharding_type": sharding}


@pytest.mark.parametrize(
    ("metadata", "saved", "current", "named"),
    [
        (BUCKETS, {"tp": 2}, {}, "tp 2 -> 1.*fully_reshardable"),
        (BUCKETS, {"tp": 2, "pp": 2}, {"tp": 4}, "tp 2 -> 4, pp 2 -> 1"),
        (BUCKETS, {"pp": 2, "vpp": 2}, {"pp": 2}, "vpp 2 -> 1"),
        (BUCKETS, {"ep": 2}, {"ep": 4}, "ep 2 -> 4"),
        (
            BUCKETS,
            {"tp": 2, "pp": 2},
            {"tp": 2, "pp": 2, "order": "pp-tp-cp-ep-dp"},
            "order tp-pp -> pp-tp",
        ),
        (BUCKETS, None, {}, "not known"),
        (PREFIXED, {"ep": 2}, {}, "chained_optim_avoid_prefix.*ep was 2"),
        (PREFIXED, {}, {"ep": 2}, "chained_optim_avoid_prefix.*ep was 1"),
        (PREFIXED, None, {}, "ep was unknown and is 1"),
        (of_form("fully_sharded_model_space"), {}, {}, "'fully_sharded_model_space', which"),
        (of_form("dp_zero_gather_scatter"), {}, {}, "'dp_zero_gather_scatter', which"),
        (of_form("fsdp_dtensor"), {}, {}, "'fsdp_dtensor', which.*optimizer=None"),
        (of_form("another"), {}, {}, "'another', which is not known"),
        (None, {}, {}, "no content metadata"),
    ],
)
def test_a_state_that_can_not_be_resharded_is_refused(metadata, saved, current, named):
    saved = None if saved is None else layout(**saved)
    with pytest.raises(CheckpointMismatchError, match=named):
        check_reshard(metadata, saved, layout(**current), has_experts=True)


# -- one optimizer, one process --------------------------------------------------------------------


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values))


def group(parameters, **traits):
    common = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}
    return {"params": parameters, **common, **traits}


def optimizer_of(groups, kind=torch.optim.Adam, **options):
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    inner = kind(groups, lr=0.1, **options)
    return FP32Optimizer(inner, OptimizerConfig(optimizer="adam", lr=0.1), None)


def step(optimizer, times=1):
    for _ in range(times):
        for number, parameters in enumerate(g["params"] for g in optimizer.param_groups):
            for p in parameters:
                p.grad = torch.full_like(p, 0.5 + number) * p.detach().sign()
        optimizer.optimizer.step()


def through_disk(saver, parameters, loader, into):
    """Save and load a state whose tensors are each in one piece."""
    from megatron.core.dist_checkpointing.dict_utils import (
        dict_list_map_outplace,
        merge,
        nested_values,
    )
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
    from megatron.core.dist_checkpointing.utils import extract_sharded_base

    def state_of(optimizer, named, is_loading):
        model = {str(n): ShardedTensor.from_rank_offsets(str(n), p) for n, p in enumerate(named)}
        return optimizers.sharded_state(optimizer, model, is_loading=is_loading, metadata={})

    sharded, common = save_preprocess(
        {"optimizer": state_of(saver, parameters, False)}, validate_access_integrity=False
    )
    stored = {piece.key: piece.data.clone() for piece in nested_values(sharded)}
    common = {"optimizer": fit(loader, copy.deepcopy(common["optimizer"]))}

    sharded, own, _ = load_preprocess({"optimizer": state_of(loader, into, True)})
    sharded, _ = extract_sharded_base(sharded)
    merge(common, own)
    merge(common, dict_list_map_outplace(lambda piece: stored[piece.key].clone(), sharded))
    restore(loader, common["optimizer"])


KINDS = [
    (torch.optim.Adam, {}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("steps", [0, 3])
def test_the_next_steps_are_those_of_the_uninterrupted_run(kind, options, steps):
    with megatron_on_cpu():
        ours = [parameter(1.0, 2.0), parameter(3.0)]
        theirs = [parameter(-9.0, 9.0), parameter(9.0)]
        run, resumed = (optimizer_of([group(p)], kind, **options) for p in (ours, theirs))
        step(run, steps)
        through_disk(run, ours, resumed, theirs)
        with torch.no_grad():
            for p, q in zip(ours, theirs, strict=True):
                q.copy_(p)
        step(run, 5)
        step(resumed, 5)
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_preparing_changes_nothing_that_training_computes(kind, options):
    with megatron_on_cpu():
        plain, prepared = [parameter(1.0, -2.0)], [parameter(1.0, -2.0)]
        runs = [optimizer_of([group(p)], kind, **options) for p in (plain, prepared)]
        optimizers.prepare(runs[1])
        assert torch.equal(plain[0], prepared[0])
        for run in runs:
            step(run, 3)
        optimizers.prepare(runs[1])
        assert torch.equal(plain[0], prepared[0])


def test_groups_that_differ_in_their_learning_rate_keep_it():
    with megatron_on_cpu():
        ours = [parameter(1.0, 2.0), parameter(3.0, 4.0)]
        theirs = [parameter(1.0, 2.0), parameter(3.0, 4.0)]
        run = optimizer_of([group([p], max_lr=r) for p, r in zip(ours, (0.1, 0.2), strict=True)])
        resumed = optimizer_of(
            [group([p], max_lr=r) for p, r in zip(theirs, (0.1, 0.2), strict=True)]
        )
        for live, rate in zip(run.param_groups, (0.01, 0.02), strict=True):
            live["lr"] = rate
        step(run, 2)
        through_disk(run, ours, resumed, theirs)
        assert [g["lr"] for g in resumed.param_groups] == [0.01, 0.02]
        assert [g["lr_mult"] for g in resumed.param_groups] == [1.0, 1.0]
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(
                run.optimizer.state[p]["exp_avg"], resumed.optimizer.state[q]["exp_avg"]
            )


def test_a_new_learning_rate_still_finds_its_group():
    with megatron_on_cpu():
        ours, theirs = [parameter(1.0)], [parameter(1.0)]
        run = optimizer_of([group(ours, max_lr=0.1)])
        resumed = optimizer_of([group(theirs, max_lr=0.7, default_config=True)])
        step(run)
        through_disk(run, ours, resumed, theirs)
        assert resumed.param_groups[0]["max_lr"] == 0.1
        assert resumed.param_groups[0]["default_config"] is True  # old checkpoints lack it


def test_groups_without_a_counterpart_are_named_and_nothing_is_changed():
    with megatron_on_cpu():
        p = parameter(1.0)
        live = optimizer_of([group([p], wd_mult=0.0)])
        before = copy.deepcopy(live.optimizer.state_dict())
        with pytest.raises(CheckpointMismatchError, match=r"'wd_mult': 0\.0.*none like it"):
            fit(live, {"param_groups": [group([0])]})
        live = optimizer_of([group([p], max_lr=0.3)])
        rates = [group([0], max_lr=0.1, lr=0.1), group([1], max_lr=0.2, lr=0.2)]
        with pytest.raises(CheckpointMismatchError, match="equally like it"):
            fit(live, {"param_groups": rates})
        with pytest.raises(CheckpointMismatchError, match=r"DistributedOptimizer.*FP32Optimizer"):
            fit(live, {"optimizer": {}, "param_state_sharding_type": "fully_reshardable"})
        with pytest.raises(CheckpointMismatchError, match="no optimizer state"):
            fit(live, {})
        assert live.optimizer.state_dict()["state"] == before["state"] == {}


def test_a_failed_load_leaves_the_groups_as_they_were():
    with megatron_on_cpu():
        live = optimizer_of([group([parameter(1.0)], lr_mult=0.5)])
        with pytest.raises(ValueError, match="size"):
            restore(live, {"state": {}, "param_groups": [group([0, 1, 2], lr_mult=0.5, lr=7.0)]})
        assert live.param_groups[0]["lr_mult"] == 0.5
        assert live.param_groups[0]["lr"] == 0.1


def test_plain_values_of_the_state_are_no_part_of_the_live_one():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    with megatron_on_cpu():
        p = parameter(1.0)
        run = optimizer_of([group([p])])
        step(run)
        model = {"p": ShardedTensor.from_rank_offsets("p", p)}
        state = optimizers.sharded_state(run, model, is_loading=False, metadata={})
        step(run)
        assert state["state"]["common_step"] == 1


def test_unequal_steps_are_refused():
    with megatron_on_cpu():
        p, late = parameter(1.0), parameter(1.0)
        run = optimizer_of([group([p, late])])
        p.grad = torch.ones_like(p)
        run.optimizer.step()
        with pytest.raises(CheckpointError, match=r"different numbers of steps, \[0.0, 1.0\]"):
            optimizers.sharded_state(run, {}, is_loading=False, metadata={})


def test_metadata_of_an_optimizer_that_is_not_distributed():
    with megatron_on_cpu():
        plain = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        assert content_metadata(None) == plain
        assert content_metadata(optimizer_of([group([parameter(1.0)])])) == plain
        with pytest.raises(UnsupportedOptionError, match="fully_reshardable, dp_reshardable"):
            content_metadata(None, sharding="everywhere")


# -- the distributed optimizer, real ranks ---------------------------------------------------------

SHORT = GPTRun(layers=2, hidden=32, seq_length=32, num_microbatches=1, dropout=0.0)
EXPERTS = replace(SHORT, experts=4)


def steps_are_apart(optimizer):
    for leaf in optimizer.chained_optimizers:
        steps = [state["step"] for state in leaf.optimizer.state.values()]
        assert len({id(s) for s in steps}) == len(steps)
        assert {float(s) for s in steps} == {3.0}


def nothing_requires_grad(state):
    """True if no piece requires a gradient: Megatron-core could not read into such a piece."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    pieces = [piece.data for piece in nested_values(state) if isinstance(piece, ShardedTensor)]
    return not any(piece.requires_grad for piece in pieces)


def same_tensors(*roots):
    """True if both checkpoints have the same tensors; elements that no rank wrote are NaN."""
    one, two = (whole_tensors(root / "iter_0000003") for root in roots)
    assert one.keys() == two.keys()
    return all(torch.equal(one[key].nan_to_num(7.0), two[key].nan_to_num(7.0)) for key in one)


def save_and_resume(root, run, others, sharding="fully_reshardable"):
    """Return the losses of the uninterrupted run, and of runs resumed in ``run`` and ``others``.

    The state has Megatron-core's own format: gathered, or in buckets.
    """
    described = optimizers.sharded_state

    def checked(*args, **options):
        state = described(*args, **options)
        assert nothing_requires_grad(state)
        return state

    with (
        mock.patch.object(optimizer_pieces, "can_be_cut", return_value=False),
        mock.patch.object(optimizers, "sharded_state", checked),
    ):
        with training(run) as job:
            job.steps(0, 3)
            job.save(root / "first", 3, optimizer_sharding=sharding)
            first = job.steps(3, 8), job.digest()
        resumed = []
        for number, other in enumerate([run, *others]):
            with training(other) as job:
                job.load(root / "first")
                steps_are_apart(job.optimizer)
                again = root / f"again {number}"
                job.save(again, 3, optimizer_sharding=sharding)  # the steps are separate already
                if dist.get_rank() == 0:
                    assert same_tensors(root / "first", again)
                resumed.append((job.steps(3, 8), job.digest()))
    return first, resumed


def on_every_rank(cases):
    with megapg.session(name="around", timeout=60):
        return [save_and_resume(*case) for case in cases]


def check(root, world_size, *cases):
    """Check equality bit for bit in the same layout; in other layouts sums run in another order."""
    numbered = [(root / str(number), *case) for number, case in enumerate(cases)]
    for told in distributed(partial(on_every_rank, numbered), world_size):
        for run, (again, *others) in told:
            assert again == run
            for losses, _ in others:
                assert losses == pytest.approx(run[0], abs=1e-6)


def test_state_is_restored_bit_for_bit(tmp_path):
    """Experts move between the shared optimizer and a separate one; another case uses buckets."""
    spread, buckets = replace(EXPERTS, ep=2), "dp_reshardable"
    check(
        tmp_path,
        2,
        *((spread, [EXPERTS]), (EXPERTS, [spread])),
        *((SHORT, [], buckets), (EXPERTS, [], buckets)),
    )


@pytest.mark.slow
def test_dense_state_is_cut_for_another_layout(tmp_path):
    wide = replace(SHORT, tp=2, pp=2, num_microbatches=4)
    tall = replace(SHORT, tp=4, num_microbatches=4)
    flat = replace(SHORT, pp=2, num_microbatches=2)
    check(tmp_path, 4, (wide, [tall, flat]))


class Nearly(gpt.GPTModel):
    """A model with one trainable parameter, smaller than a rank's share of a bucket."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name == "decoder.final_layernorm.bias")


def with_an_empty_shard():
    with published_groups(timeout=20) as pg:
        with mock.patch.object(gpt, "GPTModel", Nearly):
            job = Training(SHORT, pg)
        job.steps(0, 2)
        (leaf,) = job.optimizer.chained_optimizers
        parts = len(leaf.optimizer.state)
        live = optimizers.with_groups(content_metadata(job.optimizer), pg)
        state = model_state(job.chunks, live)
        state = optimizers.sharded_state(job.optimizer, state, is_loading=False, metadata=live)
        groups = state["optimizer"]["param_groups"]
        assert len(leaf.optimizer.state) == parts  # the call leaves no extra state
        metadata = content_metadata(job.optimizer, sharding="dp_reshardable")
        try:
            optimizers.check(job.optimizer, metadata)
            refused = ""
        except CheckpointError as error:
            refused = str(error)
        job.let_go()
        return parts, [g.get("step") for g in groups], refused


def test_a_rank_without_any_piece_of_a_parameter():
    (first, steps, allowed), (second, other_steps, refused) = distributed(with_an_empty_shard, 2)
    assert (first, second) == (1, 0)
    assert set(steps) == {2.0}
    assert set(other_steps) == {None}  # it does not know; the saved ones are of rank 0
    assert allowed == ""
    assert "no element for this rank" in refused
    assert "fully_reshardable" in refused
