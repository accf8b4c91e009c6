"""Compare the helpers with the getters that they replace.

The tests of the contract run on Megatron-core 0.12 as well: see test_old_core.py.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from configurations import Configuration
from equivalence import questions
from megatron.core import parallel_state
from recording import initialised_megatron, recorded_megatron

from megapg import ProcessGroupCollection
from megapg.collection import OPTIONAL_FIELDS
from megapg.errors import (
    GlobalReadError,
    LayoutError,
    MissingGlobalGroupError,
    MissingGroupError,
    StaleGroupError,
    UnknownStageError,
    UnsupportedOptionError,
)
from megapg.layout import FIELDS
from megapg.megatron import (
    forbid_global_reads,
    from_parallel_state,
    getters,
    groups_of,
    trace_global_reads,
)
from megapg.megatron.core import installed_version
from megapg.megatron.reading.global_groups import GlobalGroups
from megapg.megatron.reading.resolve import resolve
from megapg.megatron.tables import GETTERS, OLDEST_CORE
from megapg.testing import fake_collection

pytestmark = pytest.mark.contract

OLD = installed_version()[:2] < OLDEST_CORE  # no sessions, no collection class

# All calls of getters that helpers replace. test_equivalence.py compares the answers, from the
# globals and from a session, on many grids, on this core and on 0.12.
ASKED = [question for question in questions() if question.written.needs_getters]


def is_group(value):
    return isinstance(value, dist.ProcessGroup)


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(world_size=16, tp=2, cp=4, hierarchical_cp=(2, 2)),
        Configuration(world_size=16, pp=2, vpp=2, ep=2, optimizer_instances=2),
    ],
    ids=["cp", "ep"],
)
def test_the_view_holds_what_the_globals_hold_each_field_by_itself(configuration):
    with recorded_megatron(3, configuration.world_size):
        view = GlobalGroups()
        assert not any(hasattr(view, field) for field in ("tp", "dp", "intra_dist_opt"))
        assert view.embd is None  # None means that the rank is in no such group
        configuration.initialize_megatron()
        whole = from_parallel_state()
        assert set(view.present()) - {"expt_dp_ag"} == set(whole.present())
        assert view.expt_dp_ag is None  # no core has a global for this field
        assert {f: vars(view)[f] for f in whole.present()} == {
            f: value or None for f, value in vars(whole).items()
        }
        levels = [f"hcp.{level}" for level in range(len(configuration.hierarchical_cp))]
        for field in [*(f for f in whole.present() if is_group(getattr(whole, f))), *levels]:
            assert view.ranks(field) == whole.ranks(field)
            assert view.rank(field) == whole.rank(field)
            assert view.size(field) == whole.size(field)
        # If one global is unset, only its field is missing.
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = None
        with pytest.raises(MissingGroupError, match=r"tp .*get_tensor_model_parallel_group\(\)"):
            _ = view.tp
        with pytest.raises(MissingGroupError, match=r"get_tensor_model_parallel_group\(\)"):
            view.rank("tp")
        with pytest.raises(MissingGroupError, match=r"init: no tp .*get_tensor_model_parallel_g"):
            view.require("pp", "tp", owner="init")
        assert "tp" not in vars(view)
        assert "tp" not in view.present()
        assert view.require("pp", "dp") is view
        assert view.pp is whole.pp
        # A rank can be in several pipelines in 0.12's encoder-decoder models.
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = [whole.pp, whole.pp]
        with pytest.raises(MissingGroupError, match=r"no pp .*several such groups"):
            _ = view.pp
        # A fork's own value, here a group and its owner, is returned for the fork's code.
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = of_fork = [whole.tp, (0, 4)]
        assert view.tp is getters.present_group(view, "tp") is of_fork
        assert "tp" not in view.present()  # not a group, so not a field of a collection


# Their getters return 0 for rank and size if torch.distributed is not initialised.
ZERO_WITHOUT_RANKS = {"cp", "tp_cp", "ep", "tp_ep", "dp", "dp_cp", "intra_dp_cp", "expt_dp"} | (
    {"intra_expt_dp"} if installed_version() >= (0, 13, 0) else set()
)
if "with_gtp_remat" in inspect.signature(parallel_state.get_data_parallel_rank).parameters:
    ZERO_WITHOUT_RANKS |= {"dp_cp_gtp_remat", "expt_dp_gtp_remat"}


def test_a_field_that_no_core_knows_is_missing_with_a_message(monkeypatch):
    monkeypatch.delitem(GETTERS, "tp_cp")
    view = GlobalGroups()
    for ask in (view.group, view.ranks, view.rank, view.size, view.require):
        with pytest.raises(MissingGlobalGroupError, match=r"no tp_cp .* has a getter for tp_cp"):
            ask("tp_cp")


def test_the_view_gives_every_missing_field_a_message():
    view = GlobalGroups()
    for field in FIELDS:
        if field in OPTIONAL_FIELDS:
            assert getattr(view, field) is None
            continue
        with pytest.raises(MissingGlobalGroupError, match=rf"no {field} .*get_\w+\("):
            getattr(view, field)
        of_zero = field in ZERO_WITHOUT_RANKS
        assert not of_zero or view.rank(field) == view.size(field) == 0  # as the getter returns
        of_tp = field == "expt_tp"
        assert not of_tp or view.rank(field) is view.size(field) is None  # likewise
        counts = () if of_zero or of_tp else (view.rank, view.size)
        if field == "pp" and installed_version() < (0, 14, 0):  # this getter calls torch first
            counts = (view.size,)
            with pytest.raises(ValueError, match="Default process group"):
                view.rank("pp")
        for ask in (*counts, view.ranks, view.require):
            with pytest.raises(MissingGlobalGroupError, match=rf"no {field} .*get_\w+\("):
                ask(field)
    for name in ("gloo.dp_cp", "hybrid.4"):
        for ask in (view.ranks, view.require):
            with pytest.raises(MissingGlobalGroupError, match="initialize_model_parallel"):
                ask(name)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = view.nonsense
    # The view has no state: after unpickling, it reads the globals of that process.
    assert isinstance(pickle.loads(pickle.dumps(view)), GlobalGroups)
    assert copy.deepcopy(view) is view


def test_each_helper_names_its_getter():
    """test_shim.py checks that every getter has a helper, a field or a reason."""
    docs = " ".join(str(each.__doc__) for each in vars(getters).values())
    shared = ("getters.present_group", "getters.gloo_group")
    own = {q.name for q in ASKED if not q.written.expression.startswith(shared)}
    own = {name for name in own if name[0] != "_"}
    assert len(own) > 25
    assert own <= {*re.findall(r"``(\w+)\(", docs)}


@pytest.mark.parametrize("field", ["embd", "pos_embd", "inter_dist_opt"])
def test_a_group_that_is_not_there_is_never_world(field):
    with recorded_megatron(2, 8):  # a middle stage, and one optimizer instance
        Configuration(world_size=8, pp=4).initialize_megatron()
        for pg in (GlobalGroups(), ProcessGroupCollection.from_groups(**{field: None})):
            with pytest.raises(MissingGroupError, match=rf"{field} is None here"):
                getters.present_group(pg, field)
            assert getters.present_group(pg, field, check_initialized=False) is None
        nothing = ProcessGroupCollection.from_groups()
        with pytest.raises(MissingGroupError, match=rf"has no {field}"):
            getters.present_group(nothing, field)
        assert getters.present_group(nothing, field, check_initialized=False) is None
    with fake_collection(pp=2, optimizer_instances=2, world_size=4) as pg:
        assert getters.present_group(pg, field) is getattr(pg, field)


needs_several = pytest.mark.skipif(
    "encoder_tensor_model_parallel_size"
    not in inspect.signature(parallel_state.initialize_model_parallel).parameters,
    reason="this core has no encoder that is narrower than its decoder",
)


def set_pipelines(*groups):
    """Set several pipelines, as with an encoder that is narrower than its decoder (until 0.13)."""
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = list(groups)
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    parallel_state._PIPELINE_GLOBAL_RANKS = ranks


@needs_several
def test_the_pipelines_of_a_rank_in_several_are_not_none():
    with recorded_megatron(0, 8):
        Configuration(world_size=8, pp=2).initialize_megatron()
        view, one = GlobalGroups(), parallel_state.get_pipeline_model_parallel_group()
        set_pipelines(one, one)
        for checked in (False, True):
            with pytest.raises(MissingGroupError, match="several such groups"):
                getters.present_group(view, "pp", check_initialized=checked)
        for ask in (view.ranks, view.require):
            with pytest.raises(MissingGlobalGroupError, match="several such groups"):
                ask("pp")
        assert (view.rank("pp"), view.size("pp")) == (one.rank(), one.size()) == (0, 2)
        assert getters.model_parallel_is_initialized(view)
        assert getters.is_pipeline_first_stage(view)
        assert not getters.is_pipeline_last_stage(view, ignore_virtual=True)


@needs_several
def test_groups_that_are_the_globals_are_split_as_theirs():
    with recorded_megatron(5, 8):
        Configuration(world_size=8, pp=4).initialize_megatron()
        theirs = ProcessGroupCollection.from_groups(pp=GlobalGroups().pp)
        own = ProcessGroupCollection.from_groups(pp=dist.new_group([1, 3, 5, 7]))
        for name in (
            "_PIPELINE_MODEL_PARALLEL_SPLIT_RANK",
            "_PIPELINE_MODEL_PARALLEL_DECODER_START",
        ):
            setattr(parallel_state, name, 3)  # restored with the other globals
        asked = (
            *(getters.pipeline_split_rank, getters.pipeline_decoder_start),
            *(getters.is_pipeline_stage_after_split, getters.is_inside_decoder),
            getters.is_pipeline_stage_at_split,
        )
        assert [ask(GlobalGroups()) for ask in asked] == [3, 3, False, False, True]
        assert [ask(theirs) for ask in asked] == [3, 3, False, False, True]
        assert [ask(own) for ask in asked] == [None, None, True, True, True]
        assert not getters.is_pipeline_stage_before_split(theirs, rank=3)


def test_a_sessions_pipeline_is_not_split():
    with fake_collection(rank=3, pp=4) as pg:
        assert getters.pipeline_split_rank(pg) is getters.pipeline_decoder_start(pg) is None
        assert getters.is_pipeline_stage_before_split(pg)
        assert getters.is_pipeline_stage_after_split(pg)
        assert getters.is_pipeline_stage_at_split(pg)
        assert getters.is_inside_decoder(pg)
        assert getters.is_inside_encoder(pg, rank=0)
        assert not getters.is_inside_encoder(pg)


# -- what needs an explicit collection -------------------------------------------------------------


def test_borrowed_groups_do_not_guess_about_the_virtual_pipeline():
    with fake_collection(pp=2, vpp=2, world_size=4) as pg:
        part = ProcessGroupCollection.from_groups(pp=pg.pp, embd=pg.embd)
        assert getters.is_pipeline_first_stage(part, ignore_virtual=True)
        with pytest.raises(LayoutError, match="vp_size="):
            getters.is_pipeline_first_stage(part, ignore_virtual=False, vp_stage=0)
        chunk = {"ignore_virtual": False, "vp_size": 2}
        assert getters.is_pipeline_first_stage(part, vp_stage=0, **chunk)
        assert not getters.is_pipeline_first_stage(part, vp_stage=1, **chunk)
        assert getters.is_rank_in_embedding_group(part, vp_stage=0, **chunk)
        with pytest.raises(UnknownStageError, match="vp_stage="):
            getters.is_rank_in_embedding_group(pg, ignore_virtual=False)
        assert issubclass(UnknownStageError, AssertionError)  # as from the getters since 0.13
        with pytest.raises(MissingGroupError, match="no tp"):
            getters.tensor_src_rank(part)


def test_groups_that_were_not_asked_for_are_not_made():
    with fake_collection(world_size=8, hybrid_cp=True, gloo=("dp",)) as pg:
        known = set(dist.distributed_c10d._world.pg_map)
        assert getters.gloo_group(pg, "dp") is pg.extras["gloo.dp"]
        assert resolve(pg, needs=("tp", "gloo.dp", "hybrid.4")) is pg
        with pytest.raises(MissingGroupError, match=r'gloo=\("dp_cp",\)'):
            getters.gloo_group(pg, "dp_cp")
        assert getters.hybrid_group(pg, 4) is pg.extras["hybrid.4"]
        assert getters.hybrid_group(pg, 8) is pg.dp_cp
        with pytest.raises(MissingGroupError, match=r"hybrid_cp=True"):
            getters.hybrid_group(pg, 3)
        assert set(dist.distributed_c10d._world.pg_map) == known


def test_is_there_a_collection():
    assert not getters.is_initialized(None)
    assert getters.is_unitialized(None)
    with fake_collection(tp=2) as pg:
        assert getters.is_initialized(pg)
        assert not getters.is_unitialized(pg)
        assert getters.model_parallel_is_initialized(pg)
        assert not getters.model_parallel_is_initialized(None)
        # A model of Megatron-core needs no data parallel group.
        for part in ({"dp": pg.dp}, {"tp": pg.tp, "pp": pg.pp, "cp": pg.cp}):
            part = ProcessGroupCollection.from_groups(**part)
            assert getters.is_initialized(part)
            assert getters.model_parallel_is_initialized(part)
        for empty in (ProcessGroupCollection.from_groups(embd=None), GlobalGroups()):
            assert not getters.is_initialized(empty)
            assert getters.is_unitialized(empty)
            assert not getters.model_parallel_is_initialized(empty)
    assert not getters.is_initialized(pg)  # closed
    assert getters.is_unitialized(pg)
    assert not getters.is_initialized(part)  # destroyed
    with initialised_megatron(3, 8, 2, 2):
        assert getters.is_initialized(ProcessGroupCollection.from_groups(embd=None))


def test_one_memory_buffer_for_each_owner():
    with pytest.raises(MissingGroupError, match=r"get_global_memory_buffer\(\)"):
        getters.memory_buffer(GlobalGroups())
    with recorded_megatron(0, 2):
        parallel_state._set_global_memory_buffer()
        theirs = parallel_state.get_global_memory_buffer()
        assert getters.memory_buffer(GlobalGroups()) is theirs
    with fake_collection(tp=2) as pg:
        buffer = getters.memory_buffer(pg)
        assert buffer is getters.memory_buffer(pg)
        assert buffer is not theirs
        assert type(buffer) is type(theirs)
        other = getters.memory_buffer(ProcessGroupCollection.from_groups(tp=pg.tp))
        assert other is not buffer
    with pytest.raises(StaleGroupError, match="memory_buffer"):
        getters.memory_buffer(pg)


def test_to_find_out_whose_groups_these_are_is_no_read():
    """Borrowed groups that equal the globals' groups may use the globals; others may not."""
    with initialised_megatron(3, 8, 2, 2):
        theirs = parallel_state.get_global_memory_buffer()
        tp, pp, dp, cp = (getattr(GlobalGroups(), field) for field in ("tp", "pp", "dp", "cp"))
        foreign = ProcessGroupCollection.from_groups(tp=dp, pp=dp)
        shared = ProcessGroupCollection.from_groups(tp=tp, pp=pp)
        with forbid_global_reads():
            assert getters.memory_buffer(foreign) is not theirs
            with pytest.raises(LayoutError, match="don't say whether the pipeline is virtual"):
                getters.virtual_pipeline_size(foreign)
            of_one_stage = ProcessGroupCollection.from_groups(tp=tp, pp=cp)
            assert getters.virtual_pipeline_size(of_one_stage) is None
            assert getters.is_pipeline_last_stage(of_one_stage, ignore_virtual=False)
            with pytest.raises(GlobalReadError, match="reads get_global_memory_buffer"):
                getters.memory_buffer(shared)
            with pytest.raises(GlobalReadError, match="reads get_virtual_pipeline_model_p"):
                getters.virtual_pipeline_size(shared)
        with trace_global_reads() as trace:
            assert getters.memory_buffer(shared) is theirs
            assert getters.virtual_pipeline_size(shared) is None
            assert getters.data_rank(GlobalGroups()) == parallel_state._DATA_PARALLEL_GROUP.rank()
        assert [read.getter for read in trace.reads] == [
            "get_global_memory_buffer",
            "get_virtual_pipeline_model_parallel_world_size",
            "_DATA_PARALLEL_GROUP",  # read by this line
            "get_data_parallel_rank",
        ]
        assert [read.count for read in trace.reads] == [1, 1, 1, 1]


def test_the_order_of_the_embedding_ranks_is_a_read():
    with initialised_megatron(3, 8, 2, 2), trace_global_reads() as trace:
        assert getters.embedding_ranks(GlobalGroups()) == parallel_state._EMBEDDING_GLOBAL_RANKS
    assert {(read.getter, read.count) for read in trace.reads} == {("_EMBEDDING_GLOBAL_RANKS", 2)}


@pytest.mark.skipif(
    "with_gtp_remat" not in str(inspect.signature(parallel_state.get_data_parallel_group)),
    reason="this core has no generalised tensor parallelism",
)
def test_two_data_parallel_groups_are_one_too_many():
    with initialised_megatron(0, 8, gtp_remat_size=2, expert_gtp_remat_size=2):
        view = GlobalGroups()
        for ask in (getters.data_group, getters.data_rank, getters.expert_data_group):
            with pytest.raises(UnsupportedOptionError, match="gtp_remat has 2 ranks"):
                ask(view)
        assert view.dp is parallel_state.get_data_parallel_group(with_gtp_remat=False)


def test_the_gloo_companion_is_of_the_same_layout():
    """Borrowed groups of the globals use the globals' companion; other groups need their own."""
    with initialised_megatron(3, 8, 2, 2):
        theirs = {field: getters.gloo_group(GlobalGroups(), field) for field in ("dp", "expt_dp")}
        whole = from_parallel_state()
        parts = [ProcessGroupCollection.from_groups(**{f: getattr(whole, f)}) for f in theirs]
        for field, pg in [*((field, whole) for field in theirs), *zip(theirs, parts, strict=True)]:
            assert getters.gloo_group(pg, field) is theirs[field]
            assert (
                getters.gloo_group(groups_of(SimpleNamespace(pg_collection=pg), field), field)
                is (theirs[field])
            )
        foreign = ProcessGroupCollection.from_groups(dp=whole.tp, tp=whole.tp)
        with pytest.raises(MissingGroupError, match=r'gloo=\("dp",\)'):
            getters.gloo_group(foreign, "dp")
        with pytest.raises(MissingGroupError, match=r'gloo=\("dp_cp",\)'):
            getters.gloo_group(foreign, "dp_cp")  # this group has no such field either
        with (
            forbid_global_reads(),
            pytest.raises(GlobalReadError, match="get_data_parallel_group_gloo"),
        ):
            getters.gloo_group(whole, "dp")
        parallel_state._DATA_PARALLEL_GROUP_GLOO = None
        with pytest.raises(MissingGlobalGroupError, match="create_gloo_process_groups=True"):
            getters.gloo_group(whole, "dp")


@pytest.mark.skipif(installed_version() >= (0, 13), reason="this core passes vp_stage")
def test_the_schedule_says_which_chunk_is_current():
    with initialised_megatron(0, 8, 1, 4, 2):
        pp, foreign = GlobalGroups().pp, ProcessGroupCollection.from_groups(pp=GlobalGroups().dp)
        theirs = ProcessGroupCollection.from_groups(pp=pp)
        for chunk in range(2):
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            for pg, size in ((GlobalGroups(), None), (theirs, None), (foreign, 2)):
                ask = {"ignore_virtual": False, "vp_size": size}
                assert getters.is_pipeline_first_stage(pg, **ask) == (chunk == 0)
                assert getters.is_pipeline_first_stage(pg, vp_stage=1 - chunk, **ask) == (
                    chunk == 1
                )
    with fake_collection(pp=2, vpp=2, world_size=4) as pg:
        for chunk in range(2):
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            assert getters.is_pipeline_first_stage(pg, ignore_virtual=False) == (chunk == 0)
        for odd in (2, None):  # of another schedule, or without one
            parallel_state.set_virtual_pipeline_model_parallel_rank(odd)
            with pytest.raises(UnknownStageError, match="vp_stage="):
                getters.is_pipeline_first_stage(pg, ignore_virtual=False)
