"""Checkpoints of models of which a part trains, on some ranks or in some layers."""

import copy
from functools import partial

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from resuming import distributed, equal, published_groups, weights
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import megapg
from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint.planning import merge_plans
from megapg.checkpoint.verify import verify
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
)

pytestmark = pytest.mark.contract

VOCABULARY = 32


def job(pg, trains=lambda name: True, layers=2, vocabulary=VOCABULARY):
    """Return the arguments that a save and a load take of a small GPT on these groups."""
    megapg.seed_all(1, pg)
    stage, last = pg.rank("pp"), pg.size("pp") - 1
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=2,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=pg.size("pp"),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocabulary,
        8,
        pre_process=stage == 0,
        post_process=stage == last,
        share_embeddings_and_output_weights=False,
        pg_collection=pg,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp, model, pg_collection=pg)
    settings = OptimizerConfig(optimizer="adam", lr=0.1, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(
        settings, [model], use_gloo_process_groups=False, pg_collection=pg
    )
    return {"model": model, "optimizer": optimizer, "pg_collection": pg}


def step(job, times=1):
    for _ in range(times):
        job["model"].zero_grad_buffer()
        for parameter in job["model"].parameters():
            if parameter.requires_grad:
                grad = torch.linspace(-1, 1, parameter.numel())
                parameter.main_grad.copy_(grad.view_as(parameter))
        job["optimizer"].step()


# -- a head of other rows than the vocabulary ------------------------------------------------------


class Head(torch.nn.Linear):
    """A value head in the place of the output layer."""

    def forward(self, x, *args, **kwargs):
        return super().forward(x), None


@pytest.mark.parametrize("rows", [1, 4, VOCABULARY - 8])
def test_a_value_head_is_no_padded_vocabulary(tmp_path, rows):
    with published_groups() as pg:
        policy, critic = job(pg)["model"], job(pg)["model"]
        critic.module.output_layer = Head(16, rows, bias=False)
        before = weights([critic])
        megapg.save_checkpoint(tmp_path, 1, model=policy, pg_collection=pg)
        load = partial(
            megapg.load_checkpoint, tmp_path, model=critic, pg_collection=pg, weights_only=True
        )
        with pytest.raises(CheckpointMismatchError, match=rf"\(32, 16\), here \({rows}, 16\)"):
            load()
        assert equal(weights([critic]), before)
        loaded = load(strict=False)
        assert loaded.missing == ("output_layer.weight",)
        assert torch.equal(
            critic.module.output_layer.weight, before["0.module.output_layer.weight"]
        )
        megapg.save_checkpoint(tmp_path, 2, model=critic, pg_collection=pg)
        with pytest.raises(CheckpointMismatchError, match=rf"\({rows}, 16\), here \(32, 16\)"):
            megapg.load_checkpoint(tmp_path, model=policy, pg_collection=pg, weights_only=True)


@pytest.mark.parametrize("padded", [VOCABULARY + 8, 8 * VOCABULARY])
def test_a_vocabulary_may_be_padded_to_many_times_its_size(tmp_path, padded):
    with published_groups() as pg:
        saved, loaded = job(pg), job(pg, vocabulary=padded)
        step(saved)
        megapg.save_checkpoint(tmp_path, 1, **saved)
        assert megapg.load_checkpoint(tmp_path, **loaded).missing == ()
        for name in ("embedding.word_embeddings", "output_layer"):
            then, now = (
                each["model"].module.get_submodule(name).weight for each in (saved, loaded)
            )
            assert torch.equal(then, now[:VOCABULARY])
        megapg.save_checkpoint(tmp_path, 2, **loaded)
        assert megapg.load_checkpoint(tmp_path, **saved).missing == ()


# -- frozen layers ---------------------------------------------------------------------------------


def test_layers_that_train_are_saved_alone_and_no_more_is_loaded(tmp_path):
    with published_groups() as pg:
        some = partial(job, pg, lambda name: "layers.3." in name, layers=4)
        first = some()
        step(first, 2)
        megapg.save_checkpoint(tmp_path, 2, keep=1, **first)
        second = some()
        megapg.load_checkpoint(tmp_path, **second)
        step(first)
        step(second)
        assert equal(weights([first["model"]]), weights([second["model"]]))
        assert verify(tmp_path / "iter_0000002").good
        more = job(pg, lambda name: "layers." in name, layers=4)
        before = weights([more["model"]])
        with pytest.raises(CheckpointMismatchError, match="trains more than was saved"):
            megapg.load_checkpoint(tmp_path, **more)
        assert equal(weights([more["model"]]), before)
        assert megapg.load_checkpoint(tmp_path, weights_only=True, **more).missing == ()


def layer(key, number, layers=2):
    offsets = torch.Size((number, 0))
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size((1, 4)))
    about = TensorWriteData(
        chunk=chunk,
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size((layers, 4)),
    )
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=about)


def merge(*items, **expected):
    return merge_plans({0: list(items)}, {0: [None] * len(items)}, "iter_0000001", **expected)


def test_a_layer_that_no_tensor_has_is_lost():
    merge(layer("mlp", 0), layer("mlp", 1), layer("adapter", 1))
    with pytest.raises(CheckpointSaveError, match="leave layer 1 out"):
        merge(layer("mlp", 0), layer("adapter", 0))


def test_a_layer_that_trains_has_its_state():
    whole = layer("mlp", 0), layer("mlp", 1)
    state = [layer("optimizer.state.exp_avg.mlp", number) for number in range(2)]
    merge(*whole, state[0], trained={"mlp": 4})
    merge(*whole, *state, trained={"mlp": 8})
    with pytest.raises(CheckpointSaveError, match="has 4 elements, and 8 are trained"):
        merge(*whole, state[0], trained={"mlp": 8})
    with pytest.raises(CheckpointSaveError, match="state of attention is written by no rank"):
        merge(*whole, *state, trained={"mlp": 8, "attention": 8})


# -- ranks that do not train the same --------------------------------------------------------------


def one_rank_is_a_step_ahead(root):
    with published_groups(pp=2, timeout=30) as pg:
        jobs = job(pg)
        step(jobs)
        megapg.save_checkpoint(root, 1, **jobs)
        step(jobs)
        if pg.rank("pp"):
            (leaf,) = jobs["optimizer"].chained_optimizers
            for state in leaf.optimizer.state.values():
                state["step"] += 1
        with pytest.raises(CheckpointSaveError, match="2 steps on rank 0 and 3 on rank 1"):
            megapg.save_checkpoint(root, 2, keep=1, **jobs)
        return megapg.load_checkpoint(root, **jobs).iteration


def test_ranks_with_other_numbers_of_steps_are_named(tmp_path):
    assert distributed(partial(one_rank_is_a_step_ahead, tmp_path), 2) == [1, 1]


def the_head_trains_alone(root):
    with published_groups(pp=2, timeout=30) as pg:
        trains = partial(job, pg, lambda name: "output_layer" in name)
        first, second = trains(), trains()
        step(first, 3)
        megapg.save_checkpoint(root, 3, **first)
        megapg.load_checkpoint(root, **second)
        step(first)
        step(second)
        return [
            float(state["step"])
            for leaf in optimizers.leaves_of(second["optimizer"])
            for state in leaf.optimizer.state.values()
        ], equal(weights([first["model"]]), weights([second["model"]]))


def test_the_step_is_that_of_a_rank_that_trains(tmp_path):
    assert distributed(partial(the_head_trains_alone, tmp_path), 2) == [([], True), ([4.0], True)]


# -- a load that fails late ------------------------------------------------------------------------


def test_an_error_after_the_first_tensor_says_that_the_model_has_changed(tmp_path):
    with published_groups() as pg:
        first, second = job(pg), job(pg)
        step(first)
        path = megapg.save_checkpoint(tmp_path, 1, **first).wait().path
        for file in path.glob("*.distcp"):
            content = bytearray(file.read_bytes())
            content[-40] ^= 1
            file.write_bytes(content)
        with pytest.raises(BrokenCheckpointError) as caught:
            megapg.load_checkpoint(tmp_path, **second)
        assert any("The load had begun" in note for note in caught.value.__notes__)
        with pytest.raises(CheckpointMismatchError) as caught:
            megapg.load_checkpoint(tmp_path, **job(pg, layers=4))
        assert not getattr(caught.value, "__notes__", [])


def test_groups_of_another_optimizer_do_not_match():
    """Muon and Adam next to each other have groups that differ in their settings alone."""
    from megapg.checkpoint.param_groups import paired

    common = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": True}
    muon, adam = (
        {**common, "nesterov": True, "lr": 1.0},
        {**common, "betas": (0.9, 0.99), "lr": 2.0},
    )
    live = {**copy.deepcopy(adam), "lr": 5.0, "is_expert_parallel": False, "params": []}

    class Inner:
        param_groups = [live]

    class Leaf:
        optimizer = Inner

    (found,) = paired(Leaf, [muon, adam])
    assert found == {**adam, "is_expert_parallel": False}


def test_equal_groups_of_two_optimizers_get_the_step_of_another_rank():
    from megapg.checkpoint.param_groups import groups_of, merged, parts_of

    def state(*steps):
        groups = [{"wd_mult": 1.0, "lr": 2.0} | ({"step": s} if s else {}) for s in steps]
        form = {"param_state_sharding_type": "fully_reshardable"}
        return {n: {**form, "optimizer": {"param_groups": [g]}} for n, g in enumerate(groups)}

    whole = merged({0: state(None, None), 1: state(None, 5.0)})
    assert [g["step"] for part in parts_of(whole) for g in groups_of(part)] == [5.0, 5.0]
