"""Test that Megatron-core, migrated by ``megapg migrate``, behaves like the installed one."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import migrated_core
import pytest
import torch
import torch.distributed as dist
from migrated_core import Case, Contrast, Trained

from megapg.megatron.watching.trace import GlobalRead
from megapg.testing import megatron_on_cpu, run_distributed
from megapg.tools.demo.job import GPTRun, TrainingResult

SMALL = {"layers": 2, "hidden": 32, "seq_length": 32, "steps": 2}
DENSE = GPTRun(tp=2, pp=2, **SMALL)
EXPERTS = GPTRun(tp=2, ep=2, experts=4, sequence_parallel=True, **SMALL)
CASES = (
    Case("dense", DENSE, save_in="dense"),
    Case("dense, resumed", DENSE, resume_from="dense"),
    Case("dense on globals, resumed", DENSE, session=False, resume_from="dense"),
    Case("dense, other globals", DENSE, globals_=replace(DENSE, pp=1)),
    Case("experts", EXPERTS, save_in="experts"),
    Case("experts on globals", EXPERTS, session=False),
    Case("experts, other globals", EXPERTS, globals_=replace(EXPERTS, ep=1)),
)
INSTALLED, MIGRATED = "installed", "migrated"


def training(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test for which Megatron-core is migrated, and four ranks train with both versions."""
    return pytest.mark.slow(pytest.mark.timeout(600)(test))


# -- small calls, with both versions ---------------------------------------------------------------


def config(**more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, **more)


def collection(*fields: str) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection(**dict.fromkeys(fields, alone()))


@cache
def alone() -> Any:
    """Return a group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def gpt(**options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return GPTModel(
        config(), get_gpt_layer_local_spec(), 32, 16, position_embedding_type="rope", **options
    )


def layout_of_a_stage() -> object:
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    layout = PipelineParallelLayerLayout([["embedding", "decoder"], ["decoder", "loss"]], 2)
    return layout.get_layer_offset(pp_rank=1), layout.get_num_layers_to_build(pp_rank=1)


def group_of_none() -> object:
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    return get_tensor_model_parallel_group_if_none(None) is None


def rotary_embedding() -> object:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    return RotaryEmbedding(8, 1.0).cp_group is None


def attention_with_a_buffer_set_by_hand() -> object:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megapg.megatron import parallel_state

    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    attention = DotProductAttention(
        config(), 1, AttnMaskType.causal, "self", pg_collection=collection("tp", "cp")
    )
    query = torch.ones(4, 1, 2, 8)
    parallel_state._set_global_memory_buffer()
    try:
        return attention(query, query, query, None).sum().item()
    finally:
        parallel_state.destroy_global_memory_buffer()


def state_of_a_model_with_groups() -> object:
    fields = ("tp", "cp", "pp", "embd", "pos_embd", "dp", "dp_cp", "expt_dp", "ep", "expt_tp")
    model = gpt(pg_collection=collection(*fields))
    return sorted(model.sharded_state_dict(metadata={"dp_cp_group": alone()}))


def default_groups_of_experts() -> object:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    pg = get_default_pg_collection()
    return sorted((name, group.size()) for name, group in vars(pg).items())


def experts_on_globals() -> object:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    spec = get_moe_module_spec(use_te=False, num_experts=2, moe_grouped_gemm=False)
    layer = MoELayer(config(num_moe_experts=2, add_bias_linear=False), spec.submodules)
    return sorted(name for name, _ in layer.named_parameters())


def optimizer_of_a_collection_without_tp() -> object:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = DistributedDataParallel(config(), DistributedDataParallelConfig(), gpt())
    fields = ("dp", "dp_cp", "mp", "intra_dp_cp", "expt_dp", "intra_expt_dp", "tp_ep_pp", "pp")
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, optimizer="adam"),
        [model],
        pg_collection=collection(*fields, "ep", "expt_tp", "intra_dist_opt"),
        use_gloo_process_groups=False,
    )
    return type(optimizer).__name__


def log_of_a_collection_without_dp() -> object:
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    with tempfile.TemporaryDirectory() as folder:
        try:
            CLIPViTModel(
                config(config_logger_dir=folder),
                get_vit_layer_with_local_spec(),
                patch_dim=8,
                img_h=16,
                img_w=16,
                pg_collection=collection("tp", "cp", "pp"),
            )
        except TypeError as error:  # Megatron-core itself can't write a group to the log
            return str(error)
        return sorted(file.name for file in Path(folder).iterdir())


WITHOUT_GLOBALS = (
    layout_of_a_stage,
    group_of_none,
    rotary_embedding,
    attention_with_a_buffer_set_by_hand,
    state_of_a_model_with_groups,
)
ON_GLOBALS = (
    layout_of_a_stage,
    group_of_none,
    rotary_embedding,
    state_of_a_model_with_groups,
    default_groups_of_experts,
    experts_on_globals,
    optimizer_of_a_collection_without_tp,
    log_of_a_collection_without_dp,
)
PROBES = [(False, probe) for probe in WITHOUT_GLOBALS] + [(True, probe) for probe in ON_GLOBALS]


def outcome(probe: Callable[[], object]) -> object:
    try:
        with megatron_on_cpu():
            return probe()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def make_the_calls() -> dict[tuple[bool, str], object]:
    from megapg.megatron import parallel_state

    found: dict[tuple[bool, str], object] = {}
    for probe in WITHOUT_GLOBALS:
        found[False, probe.__name__] = outcome(probe)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    for probe in ON_GLOBALS:
        found[True, probe.__name__] = outcome(probe)
    parallel_state.destroy_model_parallel()
    return found


def on_a_rank(core: Path, folder: Path) -> tuple[dict[Case, Trained], dict[Any, object]]:
    """Run all trainings and calls in the process of one rank, and return the results."""
    dist.init_process_group("gloo")
    trained = migrated_core.train_on_this_rank(core, CASES, folder)
    called = make_the_calls()
    dist.destroy_process_group()
    return trained, called


# -- results of both versions ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of each rank with the installed and the migrated Megatron-core."""
    found = {}
    with warnings.catch_warnings(), migrated_core.migrated_core() as (tree, migration):
        warnings.simplefilter("ignore")
        assert len(migration.files) > 50
        for name, root in ((INSTALLED, None), (MIGRATED, tree)):
            core = migrated_core.installed_core() if root is None else root / "megatron" / "core"
            with migrated_core.first_on_the_path(root):
                found[name] = run_distributed(
                    partial(on_a_rank, core, tmp_path_factory.mktemp(name)),
                    migrated_core.WORLD,
                    deadline=140,
                    preload=("megapg.tools.demo.gpt",),
                    env=migrated_core.QUIET,
                )
    return found


@pytest.fixture(scope="module")
def contrasts(ranks: dict[str, list[Any]]) -> dict[str, Contrast]:
    """The training runs with both versions, by name."""
    return {
        case.what: Contrast(
            case,
            tuple(rank[case] for rank, _ in ranks[INSTALLED]),
            tuple(rank[case] for rank, _ in ranks[MIGRATED]),
        )
        for case in CASES
    }


@training
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_training_gives_the_same_bits(contrasts: dict[str, Contrast], case: Case) -> None:
    contrast = contrasts[case.what]
    assert len(contrast.migrated) == 4
    assert all(each.result.losses for each in contrast.migrated)
    assert contrast.equal
    assert len({each.result.weights_sha256 for each in contrast.migrated}) > 1


@training
@pytest.mark.parametrize("case", [case for case in CASES if case.session], ids=lambda c: c.what)
def test_with_groups_passed_the_globals_are_read_less(
    contrasts: dict[str, Contrast], case: Case
) -> None:
    contrast = contrasts[case.what]
    assert 0 < migrated_core.reads(contrast.migrated) < migrated_core.reads(contrast.installed)
    assert 0 < migrated_core.places(contrast.migrated) < migrated_core.places(contrast.installed)


@training
def test_globals_of_another_layout_change_nothing(contrasts: dict[str, Contrast]) -> None:
    for other in ("dense", "experts"):
        with_others, without = contrasts[f"{other}, other globals"], contrasts[other]
        assert lessons(with_others.migrated) == lessons(without.migrated)


def lessons(trained: tuple[Trained, ...]) -> list[tuple[object, ...]]:
    """Return losses and weights, without the loss after a checkpoint."""
    return [(each.result.losses, each.result.weights_sha256) for each in trained]


def name_of(probe: tuple[bool, Callable[[], object]]) -> str:
    return f"{probe[1].__name__}{' on globals' * probe[0]}"


# Calls that read a field which their collection lacks. The installed core then reads the globals.
PARTIAL = {log_of_a_collection_without_dp: "dp", optimizer_of_a_collection_without_tp: "tp"}


@training
@pytest.mark.parametrize("probe", PROBES, ids=name_of)
def test_a_call_gives_the_same(
    ranks: dict[str, list[Any]], probe: tuple[bool, Callable[[], object]]
) -> None:
    key = probe[0], probe[1].__name__
    before = [called[key] for _, called in ranks[INSTALLED]]
    after = [called[key] for _, called in ranks[MIGRATED]]
    if field := PARTIAL.get(probe[1]):
        assert all(str(each).startswith("MissingGroupError: ") for each in after), after
        assert all(f"has no {field};" in str(each) for each in after), after
    else:
        assert after == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_module_is_imported_as_before() -> None:
    with migrated_core.migrated_core() as (tree, _):
        before, after = migrated_core.importable(None), migrated_core.importable(tree)
    assert len(after) > 300
    assert before - after == set()


# -- the comparison itself -------------------------------------------------------------------------


def trained(loss: float = 1.0, *reads: GlobalRead) -> Trained:
    return Trained(TrainingResult((loss,), "weights", 1, 0.0, 1), reads)


def read(function: str, getter: str = "get_x", line: int = 1) -> GlobalRead:
    return GlobalRead(getter, "a.py", line, function, "tp", "", count=2)


def test_one_loss_on_one_rank_is_enough_to_differ() -> None:
    same = Contrast(CASES[0], (trained(), trained()), (trained(), trained()))
    assert same.equal
    assert not replace(same, migrated=(trained(), trained(1.0 + 2**-52))).equal


def test_look_ups_are_not_counted_as_reads() -> None:
    found = trained(1.0, read("f", "resolve"), read("g", "_GLOBAL", line=2), read("h", line=2))
    assert migrated_core.reads([found]) == 4
    assert migrated_core.places([found]) == 1


def test_another_core_than_expected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"megatron\.core is .*, and should be in"):
        migrated_core._check_core(tmp_path)
