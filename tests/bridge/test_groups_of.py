"""Tests of ``groups_of``: the groups of a model, however wrapped; the globals if it has none.

Most of these tests run on Megatron-core 0.12 as well.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import types
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, process_groups_config
from recording import initialised_megatron
from torch import nn

import megapg
from megapg import ProcessGroupCollection, groups_of
from megapg.errors import (
    ForeignGroupError,
    GlobalGroupsWarning,
    GlobalReadError,
    MissingGlobalGroupError,
    MissingGroupError,
    NoCollectionError,
    StaleGroupError,
    UnknownFieldError,
)
from megapg.megatron import (
    GlobalGroups,
    compare_with_globals,
    forbid_global_reads,
    from_megatron,
    getters,
    globals_policy,
    resolve,
    to_megatron,
    trace_global_reads,
)
from megapg.megatron.core import installed_version
from megapg.megatron.reading.resolve import POLICY_VARIABLE
from megapg.megatron.tables import OLDEST_CORE
from megapg.testing import fake_collection, megatron_on_cpu

OLD = installed_version()[:2] < OLDEST_CORE
pytestmark = pytest.mark.contract
needs_injection = pytest.mark.skipif(OLD, reason="this core has no collection of its own")


@pytest.fixture(autouse=True)
def _no_policy(monkeypatch):
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)


@pytest.fixture
def pg():
    with fake_collection(tp=2, world_size=8, rank=3) as collection:
        yield collection


@pytest.fixture
def initialised():
    with initialised_megatron(3, 8, 2):
        yield


def no_globals():
    """Make every fallback to the globals an error."""
    return globals_policy("error")


def here():
    """Return the caller's line number."""
    return sys._getframe(1).f_lineno


# -- real models -----------------------------------------------------------------------------------


def build_gpt(pg, **options):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    ranks = {}
    if pg is not None:
        axes = {"tp_rank": "tp", "ep_rank": "ep", "etp_rank": "expt_tp"}
        ranks = {argument: pg.rank(field) for argument, field in axes.items()}
    model_parallel_cuda_manual_seed(1, **ranks)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        bf16=True,
        params_dtype=torch.bfloat16,
        **options,
    )
    spec = get_gpt_layer_local_spec(options.get("num_moe_experts"))
    return GPTModel(config, spec, 32, max_sequence_length=8, pg_collection=pg)


def wrap(model, pg):
    """Wrap as training code does: mixed precision inside data parallelism."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    half = Float16Module(model.config, model)
    config = DistributedDataParallelConfig()
    return DistributedDataParallel(model.config, config, half, pg_collection=pg)


class Holder(nn.Module):
    """A user's module around a model, with its own name for the model."""

    def __init__(self, model):
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.gpt = model


def around(model, pg):
    """Return the model in every kind of wrapper."""
    wrapped = wrap(model, pg)
    return {
        "itself": model,
        "half": wrapped.module,
        "wrapped": wrapped,
        "chunks": [wrapped, wrap(model, pg)],
        "tuple": (wrapped,),
        "module list": nn.ModuleList([nn.Identity(), wrapped]),
        "holder": Holder(model),
        "holder of wrapped": Holder(wrapped),
        "torch's wrapper": nn.DataParallel(Holder(model)),
        "worker": types.SimpleNamespace(model=[wrapped], module=None),
        "trainer": types.SimpleNamespace(model=types.SimpleNamespace(module=wrapped)),
        "compiled": torch.compile(model),
        "proxy": weakref.proxy(wrapped),
    }


@needs_injection
def test_a_model_on_a_session_gives_the_sessions_collection(pg):
    with megatron_on_cpu(), no_globals():
        model = build_gpt(pg)
        for name, it in around(model, pg).items():
            assert groups_of(it) is pg, name
            assert groups_of(it, "tp", "dp_cp", "hcp") is pg, name
        assert groups_of(model, "tp").rank("tp") == 1


def test_a_session_gives_its_own_collection():
    with megapg.session(timeout=30) as session:
        assert groups_of(session, "tp") is session.groups


@needs_injection
def test_what_keeps_single_groups_gives_these():
    sizes = {"tp": 2, "ep": 4, "expt_tp": 1}
    with fake_collection(**sizes, world_size=8, rank=3) as pg, megatron_on_cpu(), no_globals():
        of_experts = {
            "num_moe_experts": 4,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
            "add_bias_linear": False,
        }
        model = build_gpt(pg, **of_experts)
        of = {type(each).__name__: each for each in model.modules()}
        for name, needs in {
            "SequentialMLP": ("ep", "expt_tp", "expt_dp"),
            "MoELayer": ("ep", "tp"),
            "TopKRouter": ("tp", "cp", "tp_cp", "tp_dp_cp"),
        }.items():
            inner = of[name]
            assert "pg_collection" not in vars(inner)
            found = groups_of(inner, *needs)
            assert all(getattr(found, field) is getattr(pg, field) for field in needs), name
            # Some tools change the class of an existing module to a subclass.
            inner.__class__ = type(f"Mine{name}", (inner.__class__,), {})
            assert getattr(groups_of(inner, needs[0]), needs[0]) is getattr(pg, needs[0])
            assert groups_of(Holder(inner), *needs).rank(needs[0]) == pg.rank(needs[0])
        vars(of["MoELayer"]).pop("tp_group")  # before 0.16 there is only attn_tp_group
        assert groups_of(of["MoELayer"], "ep", "tp").tp is pg.tp
        with pytest.raises(MissingGlobalGroupError, match="no such group"):
            _ = groups_of(of["SequentialMLP"], "tp").tp
        with pytest.raises(MissingGlobalGroupError, match="but one without dp"):
            _ = groups_of(of["SequentialMLP"], "ep", "dp").ep
        of["SequentialMLP"].dp_group = None  # as in a module from before the groups
        with pytest.raises(MissingGlobalGroupError, match="but one without expt_dp"):
            _ = groups_of(of["SequentialMLP"], "ep", "expt_dp").ep


@needs_injection
@pytest.mark.usefixtures("initialised")
def test_a_model_on_the_globals_gives_the_groups_it_was_built_with():
    with megatron_on_cpu(), no_globals():
        model = build_gpt(None)
        first = groups_of(model, "tp", "dp_cp")
        assert type(first) is ProcessGroupCollection
        assert first.tp is parallel_state.get_tensor_model_parallel_group()
        assert first.dp_cp is parallel_state.get_data_parallel_group(with_context_parallel=True)
        for name, it in around(model, None).items():
            assert groups_of(it, "tp", "dp_cp") is first, name


@needs_injection
@pytest.mark.usefixtures("initialised")
def test_inner_modules_have_only_the_fields_they_use():
    """Without groups, Megatron-core's attention reads tp and cp from the globals."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module

    with megatron_on_cpu():
        gpt = build_gpt(None)
        spec = get_gpt_layer_local_spec().submodules.self_attention
        alone = build_module(spec, config=gpt.config, layer_number=1)
        with no_globals():
            assert groups_of(alone, "tp", "cp").tp is gpt.pg_collection.tp
            part = groups_of(alone)
            assert {"tp", "cp"} <= set(part.present())
            assert not {"dp", "pp"} & set(part.present())
            # A module further in has all of the fields.
            assert groups_of([alone, gpt], "tp") is part
            assert groups_of([alone, gpt], "tp", "dp") is groups_of(gpt)
        view = groups_of(alone, "tp", "dp")
        assert isinstance(view, GlobalGroups)
        with pytest.warns(GlobalGroupsWarning, match=r"tp, dp \(but one without dp\), which test_"):
            assert view.rank("dp") == parallel_state.get_data_parallel_rank()
        with globals_policy("silent"):
            assert isinstance(groups_of(Holder(alone), "dp"), GlobalGroups)


@pytest.mark.usefixtures("initialised")  # with tp=2
def test_a_part_of_another_layout_is_not_completed_by_the_globals():
    """The model's dp and tp would come from different layouts."""
    groups = {"tp": dist.new_group([0, 1, 2, 3]), "dp": dist.new_group([3, 7])}
    whole = ProcessGroupCollection.from_groups(**groups)
    part = ProcessGroupCollection.from_groups(tp=whole.tp)
    model = types.SimpleNamespace(pg_collection=part)
    view = groups_of(model, "tp", "dp")
    assert isinstance(view, GlobalGroups)  # nothing is read yet
    for read in (lambda: view.dp, lambda: view.rank("tp"), lambda: view.size("dp")):
        with pytest.raises(NoCollectionError, match=r"dp\).*their tp has other ranks\. Give that"):
            read()
    # A test for a group, or a handler around a getter, must not hide the error.
    for ask in (vars, lambda pg: hasattr(pg, "dp"), lambda pg: getattr(pg, "embd", None)):
        with globals_policy("silent"), pytest.raises(NoCollectionError) as caught:
            ask(groups_of(model, "dp", "embd"))
        assert not isinstance(caught.value, AttributeError | AssertionError)
    # A group of another layout further in does not complete it either.
    model.module = types.SimpleNamespace(pg_collection=whole)
    assert groups_of(model, "dp") is whole
    groups["tp"] = dist.new_group([2, 3])
    model.module.pg_collection = ProcessGroupCollection.from_groups(**groups)
    with pytest.raises(NoCollectionError, match=r"several, of different tp\).* other ranks"):
        _ = groups_of(model, "dp").dp
    # A different communicator of the same ranks is the same layout.
    other = {**groups, "tp": dist.new_group([0, 1, 2, 3])}
    model.module.pg_collection = ProcessGroupCollection.from_groups(**other)
    assert groups_of(model, "dp") is model.module.pg_collection
    model.pg_collection = ProcessGroupCollection.from_groups(tp=groups["tp"])
    model.module = None
    with globals_policy("silent"):  # the same ranks as in the globals
        assert groups_of(model, "dp").dp is parallel_state.get_data_parallel_group()
        dist.destroy_process_group(model.pg_collection.tp)  # a destroyed group has no layout
        assert groups_of(model, "dp").dp is parallel_state.get_data_parallel_group()


@needs_injection
def test_what_the_core_leaves_unset_is_not_held(pg):
    """On 0.19 an unset field reads as None."""
    part = process_groups_config.ProcessGroupCollection(tp=pg.tp)
    owner = types.SimpleNamespace(
        pg_collection=part, module=types.SimpleNamespace(_pg_collection=pg)
    )
    with no_globals():
        assert groups_of(owner, "tp").present() == ("tp",)
        assert groups_of(owner, "tp", "dp") is pg


# -- attributes with groups ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pg_collection", "_pg_collection", "model_comm_pgs"])
def test_the_names_under_which_a_collection_is_carried(pg, name):
    owner = types.SimpleNamespace(**{name: pg})
    computed = type("Computed", (), {name: property(lambda self: pg)})
    computed_module = type("ComputedModule", (nn.Module,), {name: property(lambda self: pg)})
    slotted = type("Slotted", (), {"__slots__": (name,)})()
    setattr(slotted, name, pg)

    class Proxy:
        def __getattr__(self, asked):
            return getattr(owner, asked)

    with no_globals():
        for carrier in (owner, computed(), computed_module(), slotted, Proxy()):
            assert groups_of(carrier, "tp") is pg
            assert groups_of([None, Holder(nn.Identity()), carrier], "tp") is pg


def test_the_outermost_that_holds_all_comes_first(pg):
    tp, pp, both = (
        ProcessGroupCollection.from_groups(**{field: getattr(pg, field) for field in fields})
        for fields in (["tp"], ["pp"], ["tp", "pp"])
    )
    inner = nn.Module()
    inner.pg_collection = both
    outer = nn.Module()
    outer.first, outer.module, outer.pg_collection = nn.Module(), nn.Module(), tp
    outer.first.pg_collection, outer.module.pg_collection = pg, pp
    outer.module.inner = inner
    with no_globals():
        assert groups_of(outer) is tp
        assert groups_of(outer, "tp") is tp
        assert groups_of(outer, "pp") is pp  # wrapped modules come before other submodules
        assert groups_of(outer, "tp", "pp") is both
        assert groups_of(outer, "dp") is pg
        outer.pg_collection = None
        assert groups_of(outer, "tp") is both
        outer.module = None
        outer.last = inner
        assert groups_of(outer, "tp") is pg  # the first submodule


def of_two_layouts(pg, other):
    """Return a model with two parts, as a multimodal one: only the parts have groups."""
    model = nn.Module()
    model.encoder, model.decoder = Holder(nn.Module()), Holder(nn.Module())
    model.encoder.pg_collection, model.decoder.pg_collection = pg, other
    return model


@pytest.mark.usefixtures("initialised")
def test_submodules_of_different_groups_do_not_answer_for_the_model():
    tp, dp = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )
    one, other = (ProcessGroupCollection.from_groups(tp=each, pp=tp) for each in (dp, tp))
    model = of_two_layouts(one, other)
    for owner in (model, [model], Holder(model)):
        with pytest.warns(GlobalGroupsWarning) as caught:
            assert groups_of(owner, "tp").tp is tp
    assert str(caught[0].message).startswith(
        "Holder carries no collection with tp (but several, of different tp), which test_sub"
    )
    with no_globals():
        assert groups_of(model, "pp") is one


def test_a_submodule_answers_for_what_is_inside_and_for_what_the_others_do_not_have(pg):
    part = ProcessGroupCollection.from_groups(tp=pg.tp)
    other = ProcessGroupCollection.from_groups(tp=pg.dp, pp=pg.cp)
    model = of_two_layouts(pg, part)
    model.encoder.inner = Holder(nn.Module())
    model.encoder.inner.pg_collection = other
    with no_globals():
        assert groups_of(model, "tp") is pg
        assert groups_of(model, "dp") is pg
        model.decoder.pg_collection = other
        with pytest.raises(MissingGlobalGroupError, match="several, of different tp"):
            _ = groups_of(model, "tp", "pp").tp
        with pytest.raises(MissingGlobalGroupError, match=r"no collection \(but several, of"):
            _ = groups_of(model).tp
        assert groups_of(model.encoder, "tp") is pg
        assert groups_of(model.decoder, "tp") is other
        model.pg_collection = pg
        assert groups_of(model, "tp") is pg


def test_each_module_of_a_class_is_asked(pg):
    class Computed(nn.Module):
        def __init__(self, held):
            super().__init__()
            self.held = held

        @property
        def pg_collection(self):
            return self.held

    with no_globals():
        assert groups_of([Computed(None), Computed(pg)], "tp") is pg


def test_extras_count_as_held():
    with fake_collection(tp=2, gloo=("dp",)) as pg, no_globals():
        part = ProcessGroupCollection.from_groups(tp=pg.tp)
        owner = types.SimpleNamespace(pg_collection=part, module=Holder(nn.Module()))
        owner.module.pg_collection = pg
        assert groups_of(owner, "tp", "gloo.dp") is pg


class Trainer:
    """Stores its argument; builds its model later."""

    def __init__(self, model=None, pg_collection=None):
        self.pg_collection = pg_collection
        self.model = model


def early_trainers(pg):
    """Return trainers that stored a placeholder for the groups before the model existed."""
    chunk = Holder(nn.Module())
    chunk.gpt.pg_collection = pg
    for kept in (clip(None), GlobalGroups(), resolve(clip(Takes()))):
        outer = types.SimpleNamespace(pg_collection=clip(None), model=None)
        trainer = Trainer(pg_collection=kept)
        trainer.model = [nn.Module(), chunk]
        trainer.model[0]._pg_collection = kept
        outer.model = trainer
        yield from (trainer, outer)


@pytest.mark.usefixtures("initialised")
def test_what_stood_in_for_a_collection_does_not_hide_the_models():
    pg = megapg.from_parallel_state()
    part = ProcessGroupCollection.from_groups(tp=pg.tp)
    with no_globals():  # and the globals are not read
        for trainer in early_trainers(pg):
            assert groups_of(trainer) is pg
            assert groups_of(trainer, "tp", "mp") is pg
        for trainer in early_trainers(part):
            assert groups_of(trainer, "tp") is part
            assert groups_of(trainer, "tp", "dp") is trainer.pg_collection


@pytest.mark.usefixtures("initialised")
def test_where_only_a_stand_in_is_found_it_tells_its_own_place_once():
    def step(trainer):
        return groups_of(trainer, "mp").rank("mp")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(TakesNone(), clip(Takes()))
        assert [step(trainer), step(trainer)] == [parallel_state._MODEL_PARALLEL_GROUP.rank()] * 2
    (said,) = [each for each in caught if each.category is GlobalGroupsWarning]
    assert (said.filename, said.lineno) == (__file__, clip.__code__.co_firstlineno + 1)
    assert str(said.message).startswith("Takes carries no collection with tp, dp, which clip asks ")


def test_a_collection_is_checked_as_by_resolve(pg):
    assert groups_of(pg, "tp") is pg
    part = ProcessGroupCollection.from_groups(tp=pg.tp)
    for carrier in (part, types.SimpleNamespace(pg_collection=part)):
        assert groups_of(carrier, "tp") is part
    with pytest.raises(MissingGroupError, match=r"^groups_of: .*no dp;"):
        groups_of(part, "dp")
    with pytest.raises(UnknownFieldError, match="'tpp' is no field"):
        groups_of(pg, "tpp")
    with pytest.raises(UnknownFieldError, match="'tpp' is no field"):
        groups_of(types.SimpleNamespace(pg_collection=pg), "tpp")


def test_groups_must_be_alive():
    model = nn.Module()
    with fake_collection(tp=2) as pg:
        model.pg_collection = pg
        borrower = types.SimpleNamespace(
            pg_collection=ProcessGroupCollection.from_groups(tp=pg.tp), model=model
        )
        assert groups_of(model) is pg
    for needs in ((), ("tp",)):
        with pytest.raises(
            StaleGroupError, match=r"^groups_of\(Module\): .*fake_collection\(\).* closed at"
        ):
            groups_of(model, *needs)
        with pytest.raises(StaleGroupError, match=r"^groups_of: "):
            groups_of(pg, *needs)
    # If the outer group is destroyed, an inner one is no substitute.
    with pytest.raises(ForeignGroupError, match=r"^groups_of\(Module\): tp: .*destroyed"):
        groups_of(borrower, "tp")


# -- collections of the core -----------------------------------------------------------------------


@needs_injection
def test_the_cores_own_collection_is_adapted_once_until_it_changes(pg):
    core = to_megatron(pg)
    model = nn.Module()
    model.pg_collection = core
    with no_globals():
        first = groups_of(model, "tp")
        assert type(first) is ProcessGroupCollection
        assert first == from_megatron(core)
        assert groups_of(model, "dp") is first
        assert groups_of(core, "tp") is resolve(core, needs=("tp",)) is first
        assert groups_of(to_megatron(pg), "tp") is not first
        core.tp = pg.dp
        assert groups_of(model, "tp").tp is pg.dp
        core.tp = pg.tp
        assert groups_of(model, "tp").tp is pg.tp
        del core.tp
        assert "tp" not in groups_of(model).present()
        assert isinstance(groups_of(model, "tp"), GlobalGroups)


@needs_injection
def test_an_adaptation_goes_with_what_was_adapted(pg):
    core = to_megatron(pg)
    ours = weakref.ref(groups_of(core))
    core.dp = None  # and again
    groups_of(core)
    assert ours() is None
    ours = weakref.ref(groups_of(core))
    assert "megapg" not in repr(core)
    del core
    assert ours() is None


@needs_injection
def test_a_dead_collection_of_the_core_is_refused(pg):
    core = to_megatron(pg)
    model = types.SimpleNamespace(pg_collection=core)
    groups_of(model, "tp")
    dist.destroy_process_group(pg.tp)
    for carrier in (model, types.SimpleNamespace(pg_collection=copy.copy(core))):
        with pytest.raises(ForeignGroupError, match=r"tp: .*destroyed"):
            groups_of(carrier, "tp")


@pytest.mark.skipif(
    not hasattr(process_groups_config, "ModelCommProcessGroups"), reason="gone in 0.15"
)
def test_the_collections_of_older_cores_are_taken(pg):
    old = process_groups_config.ModelCommProcessGroups()
    old.tp, old.pp = pg.tp, pg.pp  # 0.12 takes no arguments
    model = nn.Module()
    model.model_comm_pgs = old
    with no_globals():
        assert groups_of(Holder(model), "tp", "pp").pp is pg.pp
        assert resolve(old).tp is pg.tp


# -- the globals -----------------------------------------------------------------------------------


class Takes(nn.Module):
    def __init__(self, config=None, pg_collection=None):
        super().__init__()


class TakesNone(nn.Module):
    pass


def clip(model):
    return groups_of(model, "tp", "dp")


def rank(model):
    return clip(model).rank("tp")


@pytest.mark.usefixtures("initialised")
def test_the_globals_serve_with_one_warning_for_each_call_site():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            view = clip(Takes())
            assert view.tp is parallel_state.get_tensor_model_parallel_group()
        other, line = groups_of(None), here()
        assert other.rank("dp") == parallel_state.get_data_parallel_rank()
    caught = [each for each in caught if each.category is GlobalGroupsWarning]
    assert [(each.filename, each.lineno) for each in caught] == [
        (__file__, clip.__code__.co_firstlineno + 1),
        (__file__, line),
    ]
    assert str(caught[0].message) == (
        "Takes carries no collection with tp, dp, which clip asks groups_of() for, so it takes "
        "them from megatron.core.parallel_state. Write Takes(..., pg_collection=pg) where that is "
        "made."
    )
    assert str(caught[1].message).startswith("None carries no collection, which test_the_globals")
    assert isinstance(view, GlobalGroups)
    assert isinstance(other, GlobalGroups)


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize(
    ("owner", "named", "advice"),
    [
        (lambda: [nn.DataParallel(Takes())], "Takes", "Write Takes(..., pg_collection=pg)"),
        (lambda: Holder(Takes()), "Holder", "Set the attribute pg_collection of Holder"),
        (TakesNone, "TakesNone", "Set the attribute pg_collection of TakesNone"),
        (lambda: types.SimpleNamespace(model=[Takes()]), "Takes", "Write Takes("),
        (lambda: [Takes(), TakesNone()], "Takes", "Write Takes("),
        (lambda: None, "None", "Pass groups_of() a model"),
        (list, "list", "Pass groups_of() a model"),
    ],
)
def test_the_warning_names_the_class_and_what_to_do(owner, named, advice):
    with pytest.warns(GlobalGroupsWarning) as caught:
        rank(owner())
    assert str(caught[0].message).startswith(f"{named} carries no collection with tp, dp, which ")
    assert advice in str(caught[0].message)


@pytest.mark.parametrize("policy", ["warn", "error", "silent"])
def test_without_globals_nothing_is_raised_before_a_field_is_read(policy):
    """The call may come before ``if not is_initialized(): return``."""
    with globals_policy(policy), warnings.catch_warnings():
        warnings.simplefilter("error")
        view = clip(Takes())
        assert isinstance(view, GlobalGroups)
        assert getattr(view, "tp", None) is None
        assert view.rank("dp") == 0  # as the getter returns
        reads = (lambda: view.tp, lambda: view.ranks("dp"), lambda: view.size("tp"))
        for read in reads:
            with pytest.raises(MissingGlobalGroupError) as caught:
                read()
            assert isinstance(caught.value, AssertionError)  # as from Megatron's getters
            for part in (
                "Takes carries no collection with tp, dp, which clip asks groups_of() for",
                "initialize_model_parallel()",
                "pg_collection=session.groups",
            ):
                assert part in str(caught.value)
    with initialised_megatron(3, 8, 2):
        with globals_policy("error"), pytest.raises(NoCollectionError):
            view.ranks("tp")
        with pytest.warns(GlobalGroupsWarning):
            assert view.tp is parallel_state.get_tensor_model_parallel_group()


READS = {
    "a field": lambda view: view.tp,
    "a field, asked about": lambda view: hasattr(view, "dp"),
    "a field that may be None": lambda view: view.hcp,
    "rank": lambda view: view.rank("tp"),
    "size": lambda view: view.size("dp"),
    "ranks": lambda view: view.ranks("tp"),
    "require": lambda view: view.require("tp"),
    "vars": vars,
    "present": lambda view: view.present(),
    "describe": lambda view: view.describe(),
    "extras": lambda view: view.extras,
    "an extra": lambda view: view.rank("gloo.dp"),
    "equality": lambda view: view == GlobalGroups(),
    "hash": hash,
    "pickle": pickle.dumps,
    "virtual stages": getters.virtual_pipeline_size,
    "a stage": getters.is_pipeline_first_stage,
    "a neighbour": getters.pipeline_next_rank,
    "a predicate": getters.model_parallel_is_initialized,
    "the encoder": getters.is_inside_encoder,
    "embeddings": getters.embedding_ranks,
    "a group chosen by flags": getters.data_group,
    "a group that may not be there": lambda view: getters.present_group(view, "embd"),
    "memory": getters.memory_buffer,
}


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("ask", READS.values(), ids=list(READS))
def test_what_is_said_waits_for_the_first_read_and_is_said_once(ask):
    view, line = groups_of(Takes(), "tp", "dp"), here()
    with forbid_global_reads(), pytest.raises(GlobalReadError, match=f":{line}: test_what_is_said"):
        ask(view)
    with globals_policy("error"), pytest.raises(NoCollectionError, match=f"{__file__}:{line},"):
        ask(view)
    with trace_global_reads() as trace, pytest.warns(GlobalGroupsWarning) as caught:
        ask(view)
    assert [(each.filename, each.lineno) for each in caught] == [(__file__, line)]
    assert [read.line for read in trace.reads if read.getter == "resolve"] == [line]
    with trace_global_reads() as trace, warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(view)
    assert "resolve" not in {read.getter for read in trace.reads}


NO_READS = {
    "nothing": lambda view: None,
    "passed on to resolve": lambda view: resolve(view, needs=("tp",)),
    "passed on to groups_of": lambda view: groups_of(view, "dp"),
    "carried": lambda view: groups_of(types.SimpleNamespace(pg_collection=view), "dp"),
    "its printed form": repr,
    "a copy": copy.deepcopy,
    "what is no field": lambda view: hasattr(view, "tpp"),
    "its lease": lambda view: view.lease.check("test"),
}


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("use", NO_READS.values(), ids=list(NO_READS))
def test_where_nothing_is_read_nothing_has_happened(use, monkeypatch):
    monkeypatch.setenv(POLICY_VARIABLE, "loud")  # not read yet
    with warnings.catch_warnings(), trace_global_reads() as trace, forbid_global_reads():
        warnings.simplefilter("error")
        use(clip(Takes()))
    assert trace.reads == ()


@pytest.mark.usefixtures("initialised")
def test_what_waits_keeps_no_model_alive():
    def ask(model):
        model.pg_collection = groups_of(model, "tp")
        return weakref.ref(model), model.pg_collection

    gc.collect()
    gc.disable()  # no reference cycle either
    try:
        model, view = ask(nn.Linear(2, 2))
        assert model() is None
    finally:
        gc.enable()
    with pytest.warns(GlobalGroupsWarning, match="^Linear carries no collection with tp"):
        assert view.rank("tp") == 1


# -- odd owners ------------------------------------------------------------------------------------


class Hostile:
    """Raises an error for every attribute."""

    def __init__(self, error):
        vars(self)["error"] = error

    def __getattr__(self, name):
        raise vars(self)["error"]


class MoreHostile:
    def __getattribute__(self, name):
        raise RuntimeError(name)


class Hole:
    """Returns another one for every attribute and call."""

    __slots__ = ()

    def __getattr__(self, name):
        return Hole()

    def __call__(self, *args, **kwargs):
        return Hole()


def cyclic():
    one, other = types.SimpleNamespace(), nn.Module()
    one.model, other.module = [other, one], one  # a cycle of wrappers
    return one


def own_tail():
    chunks = []
    chunks.append(chunks)
    return chunks


ODD = {
    "string": lambda: "tp",
    "dict": lambda: {"pg_collection": 1, "module": 2},
    "number": lambda: 3,
    "none": lambda: None,
    "empty": list,
    "nones": lambda: [None, (None,)],
    "class": lambda: nn.Linear,
    "module of Python": lambda: types,
    "tensor": lambda: torch.ones(3),
    "wraps a tensor": lambda: types.SimpleNamespace(model=torch.ones(3), module=torch.zeros(2)),
    "mock": mock.Mock,
    "magic mock": mock.MagicMock,
    "mock of a module": lambda: mock.Mock(spec=nn.Linear(2, 2)),
    "mock of a collection": lambda: types.SimpleNamespace(pg_collection=mock.MagicMock()),
    "KeyError": lambda: Hostile(KeyError("no")),
    "RuntimeError": lambda: Hostile(RuntimeError("no")),
    "more hostile": MoreHostile,
    "hole": Hole,
    "wraps a hole": lambda: types.SimpleNamespace(model=Hole(), pg_collection=Hole()),
    "module before its __init__": lambda: nn.Linear.__new__(nn.Linear),
    "cycle": cyclic,
    "own tail": own_tail,
    "deep": lambda: functools.reduce(lambda inner, _: Holder(inner), range(3000), nn.Identity()),
}


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
def test_odd_owners_are_survived(odd):
    with pytest.warns(GlobalGroupsWarning):
        assert groups_of(odd(), "tp").rank("tp") == 1
    carrier = types.SimpleNamespace(pg_collection=megapg.from_parallel_state())
    with no_globals():
        assert groups_of([odd(), carrier], "tp") is carrier.pg_collection


def test_only_properties_that_may_give_a_collection_are_run(pg):
    ran = []

    def noted(name, value=None):
        return property(lambda self: ran.append(name) or value)

    names = {name: noted(name) for name in ("model", "module", "trainer", "device")}
    thing = type("Thing", (), {**names, "pg_collection": noted("pg_collection")})
    torch_s = type("Torchs", (nn.Module,), {**names, "pg_collection": noted("pg_collection", pg)})
    with globals_policy("silent"):
        groups_of(thing(), "tp")
        assert groups_of([thing(), torch_s()], "tp") is pg
    assert set(ran) == {"pg_collection"}


def test_a_net_is_looked_into_where_it_is_a_module(pg):
    model = nn.Identity()
    model.pg_collection = pg
    with no_globals():
        for owner in ({"net": nn.Sequential(model)}, {"model": None, "net": model}):
            assert groups_of(types.SimpleNamespace(**owner), "tp") is pg
        inner = ProcessGroupCollection.from_groups(tp=pg.tp)
        both = types.SimpleNamespace(net=model, model=types.SimpleNamespace(pg_collection=inner))
        assert groups_of(both, "tp") is inner
        # Other code uses the name for other things.
        host = types.SimpleNamespace(pg_collection=pg)
        assert isinstance(groups_of(types.SimpleNamespace(net=host), "tp"), GlobalGroups)


@pytest.mark.usefixtures("initialised")
def test_errors_of_megapg_in_a_property_come_through():
    class Model(nn.Module):
        @property
        def pg_collection(self):
            return resolve(object())

    class Standing(nn.Module):
        @property
        def pg_collection(self):
            return resolve(None)

    with pytest.raises(ForeignGroupError, match=r"pg_collection: pg_collection is <object"):
        groups_of(Model(), "tp")
    with globals_policy("error"), pytest.raises(NoCollectionError, match=r"pg_collection needs"):
        groups_of(Standing(), "tp").rank("tp")


# -- a ban -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("initialised")
def test_a_ban_stops_the_fallback_and_no_other():
    carrier = types.SimpleNamespace(pg_collection=megapg.from_parallel_state())
    with globals_policy("silent"), forbid_global_reads():
        assert rank(carrier) == 1
        with pytest.raises(
            GlobalReadError, match=r"clip calls Takes without pg_collection.*tp, dp"
        ):
            rank(Takes())
    with globals_policy("silent"), forbid_global_reads(allow=[__name__]):
        assert rank(Takes()) == 1


@needs_injection
@pytest.mark.usefixtures("initialised")
def test_what_was_found_is_compared_with_the_globals():
    groups = megapg.from_parallel_state()
    swapped = ProcessGroupCollection.from_groups(tp=groups.dp, dp=groups.dp)
    with compare_with_globals() as comparison:
        clip(types.SimpleNamespace(pg_collection=swapped))
    (found,) = comparison.disagreements
    assert (found.field, found.line) == ("tp", clip.__code__.co_firstlineno + 1)


# -- layers themselves -----------------------------------------------------------------------------


@needs_injection
def test_a_layer_answers_with_the_group_it_was_given():
    sizes = {"tp": 2, "ep": 2, "expt_tp": 1}
    with fake_collection(**sizes, world_size=8, rank=3) as pg, megatron_on_cpu(), no_globals():
        model = build_gpt(
            pg,
            num_moe_experts=2,
            expert_model_parallel_size=2,
            expert_tensor_parallel_size=1,
            sequence_parallel=True,
            add_bias_linear=False,
        )
        layers = dict(model.named_modules())
        word = layers["embedding.word_embeddings"]
        expert = layers["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1"]
        for dense in (word, model.output_layer):
            assert groups_of(dense, "tp").tp is groups_of(wrapping(dense), "tp").tp is pg.tp
            assert groups_of(dense, "tp").size("tp") == 2
            with pytest.raises(MissingGlobalGroupError, match="but one without cp"):
                _ = groups_of(dense, "tp", "cp").tp
        assert groups_of(expert, "expt_tp").expt_tp is pg.expt_tp
        with pytest.raises(MissingGlobalGroupError, match="no such group"):
            _ = groups_of(expert, "tp").tp
        # A layer inside another module does not count, as the module may be anything.
        with pytest.raises(MissingGlobalGroupError, match="no such group"):
            _ = groups_of(nn.Sequential(model.output_layer), "tp").tp
        word.tp_group = None
        with pytest.raises(MissingGlobalGroupError, match="no such group"):
            _ = groups_of(word, "tp").tp


def wrapping(model):
    return types.SimpleNamespace(module=[model])


def layer_of(module, **attributes):
    """Return a layer that looks like one of Megatron-core's module, with these attributes."""
    made = type("Layer", (nn.Module,), {"__module__": f"megatron.core.{module}"})()
    vars(made).update(attributes)
    return made


def test_a_layer_of_transformer_engine_answers_where_its_group_is_certain():
    with fake_collection(tp=2, ep=2, expt_tp=1, world_size=8) as pg, no_globals():
        config = types.SimpleNamespace(tensor_model_parallel_size=2)
        te = functools.partial(layer_of, "extensions.transformer_engine", config=config)
        assert groups_of(te(_tp_group=pg.tp, parallel_mode="row"), "tp").tp is pg.tp
        for uncertain in (
            te(_tp_group=pg.tp, parallel_mode=None),  # not sharded, or an expert
            te(_tp_group=pg.expt_tp, parallel_mode="column"),  # an expert, without ep
            te(_tp_group=object(), parallel_mode="row"),
            layer_of("transformer.mlp", tp_group=pg.tp, config=config),
        ):
            with pytest.raises(MissingGlobalGroupError, match="no such group"):
                _ = groups_of(uncertain, "tp").tp
            config._pg_collection = pg
            assert groups_of(uncertain, "tp") is pg
            del config._pg_collection


def test_the_config_of_a_module_may_have_the_collection(pg):
    """A different group of the module itself comes before the config."""
    config = types.SimpleNamespace(_pg_collection=pg)
    plain, linear = nn.Linear(1, 1), layer_of("tensor_parallel.layers", tp_group=pg.tp)
    plain.config = linear.config = config
    with no_globals():
        assert groups_of(plain, "tp", "cp") is groups_of(wrapping(plain)) is pg
        assert groups_of(linear, "tp").tp is pg.tp
        assert groups_of(linear, "tp", "cp") is groups_of(linear) is pg
        linear.tp_group = pg.dp
        assert groups_of(linear, "tp").tp is pg.dp
        with pytest.raises(MissingGlobalGroupError, match="but one without cp"):
            _ = groups_of(linear, "tp", "cp").cp
        plain.pg_collection = ProcessGroupCollection.from_groups(tp=pg.dp)
        assert groups_of(plain, "tp") is plain.pg_collection
        assert groups_of(types.SimpleNamespace(config=config), "tp") is not pg  # not a module
        config._pg_collection = view = GlobalGroups()
        assert groups_of(linear, "cp") is view
