"""Compare the bridge to Megatron-core with the code of the installed version."""

import dataclasses
import inspect
import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection as CoreCollection

from megapg.collection import ProcessGroupCollection
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.errors import MissingGroupError, UnsupportedOptionError
from megapg.layout import FIELDS
from megapg.megatron import (
    core_version,
    from_megatron,
    from_parallel_state,
    groups_of,
    parallel_state,
    published,
    schedule_collection,
    session_arguments,
    to_megatron,
)
from megapg.megatron.tables import GROUP_GLOBALS
from megapg.testing import fake_collection
from megapg.upstream.mapping import RANK_GLOBALS

pytestmark = pytest.mark.contract


def state():
    return {n: v for n, v in vars(parallel_state).items() if re.match(r"_[A-Z]", n)}


@pytest.fixture
def pg():
    with fake_collection(tp=2, pp=2, ep=2, world_size=8, vpp=2, rank=3) as collection:
        yield collection


@pytest.fixture
def globals_of_a_layout():
    """Run ``initialize_model_parallel`` on torch's fake backend, and restore the globals."""
    before = state()
    with fake_collection(world_size=16, rank=5):
        arguments = {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 2,
            "create_gloo_process_groups": False,
        }
        parallel_state.initialize_model_parallel(**arguments)
        try:
            yield arguments
        finally:
            vars(parallel_state).update(before)


def test_the_tables_know_every_group_this_core_has():
    groups = {n for n in state() if re.search(r"_GROUPS?(_|$)", n) and "GLOO" not in n}
    assert groups - set(GROUP_GLOBALS) == {"_HYBRID_DP_CP_GROUPS"}
    rank_lists = {n for n in state() if n.endswith(("_RANKS", "_RANKS_WITH_CP"))}
    assert rank_lists == {n for n in RANK_GLOBALS if n in state()}
    declared = {f.name for f in dataclasses.fields(CoreCollection)}
    assert declared <= set(FIELDS)
    assert set(FIELDS) - declared - {"tp_dp"} <= {
        "dp_cp_ag",
        "expt_dp_ag",
        "gtp_remat",
        "expt_gtp_remat",
        "dp_cp_gtp_remat",
        "expt_dp_gtp_remat",
        "tp_ep_pp_with_egtp_remat",
    }
    assert core_version()[:2] in {(0, 16), (0, 17), (0, 18), (0, 19)}  # all tests ran on these


def test_to_megatron_holds_exactly_the_present_fields(pg):
    declared = {f.name for f in dataclasses.fields(CoreCollection)}
    core = to_megatron(pg)
    assert isinstance(core, CoreCollection)
    assert vars(core) == {f: g for f, g in vars(pg).items() if f in declared}
    part = to_megatron(ProcessGroupCollection.from_groups(tp=pg.tp, embd=None))
    assert vars(part) == {"tp": pg.tp, "embd": None}
    back = from_megatron(core)
    assert all(getattr(back, f) is getattr(pg, f) for f in back.present())
    assert set(back.present()) == set(pg.present()) & declared
    core.dp = None  # a core sets None for an undefined field: absent here
    assert not hasattr(from_megatron(core), "dp")


def test_a_collection_of_the_core_from_before_there_were_groups_holds_nothing(pg):
    core = to_megatron(ProcessGroupCollection.from_groups(embd=None, pos_embd=None))
    core.pp = None
    assert from_megatron(core).present() == ()  # None may mean "not set"
    with published(pg):
        model = SimpleNamespace(pg_collection=core)
        assert groups_of(model, "embd").embd is parallel_state.get_embedding_group()
    core.pp = pg.pp
    assert from_megatron(core).embd is None


def test_hierarchical_groups_are_a_list_for_the_core():
    with fake_collection(cp=4, hierarchical_cp=(2, 2)) as pg:
        core = to_megatron(pg)
        assert core.hcp == list(pg.hcp)
        assert from_megatron(core).hcp == pg.hcp
        with published(pg):
            assert parallel_state.get_hierarchical_context_parallel_groups() == list(pg.hcp)


def test_the_cores_own_presence_rules_accept_a_collection(pg):
    """The core tests presence with hasattr (0.16) or vars() (0.19)."""

    class Chunk:
        ddp_config = None

    config = type("Config", (), {"context_parallel_size": 1})()
    ddp_config = type(
        "DDP", (), {"num_distributed_optimizer_instances": 1, "use_distributed_optimizer": True}
    )()
    chunk = Chunk()
    chunk.ddp_config, chunk.config = ddp_config, config
    groups = CoreCollection.setup_process_groups_for_ddp(pg, config, ddp_config)
    assert groups["tp_group"] is pg.tp
    assert groups["expt_dp_group"] is pg.expt_dp
    groups = CoreCollection.setup_process_groups_for_optimizer(
        pg, [chunk], use_gloo_process_groups=False
    )
    assert groups["intra_dist_opt_group"] is pg.intra_dist_opt
    part = ProcessGroupCollection.from_groups(tp=pg.tp)
    with pytest.raises(ValueError, match="dp process group is required"):
        CoreCollection.setup_process_groups_for_ddp(part, config, ddp_config)
    without = {f: g for f, g in vars(pg).items() if f != "mp"}
    with pytest.raises(ValueError, match="mp process group is required"):
        CoreCollection.setup_process_groups_for_optimizer(
            ProcessGroupCollection.from_groups(**without), [chunk], use_gloo_process_groups=False
        )


class ReachedSchedule(Exception):
    pass


def enter_schedule(pg_collection):
    """Call the core's pipelined schedule until it starts its timer."""

    def timers(*_, **__):
        raise ReachedSchedule

    config = SimpleNamespace(overlap_p2p_comm=False, finalize_model_grads_func=None, timers=timers)
    forward_backward_pipelining_without_interleaving(
        forward_step_func=None,
        data_iterator=None,
        model=SimpleNamespace(config=config, model_type=1),
        num_microbatches=2,
        seq_length=8,
        micro_batch_size=1,
        p2p_communicator=SimpleNamespace(config=config),
        pg_collection=pg_collection,
    )


def test_where_the_core_tests_the_class_it_takes_to_megatron(pg):
    """The test is in pipeline_parallel/schedules.py: 0.17.1:2091, 0.18.2:2142, 0.19.2:2192."""
    with pytest.raises(ReachedSchedule):
        enter_schedule(to_megatron(pg))
    expected = ReachedSchedule if core_version() < (0, 17) else TypeError
    with pytest.raises(expected):
        enter_schedule(pg)
    with pytest.raises(ReachedSchedule):
        enter_schedule(schedule_collection(pg))
    # No twin if the schedule accepts the frozen collection.
    assert (schedule_collection(pg) is pg) == (core_version() < (0, 17))


def test_from_parallel_state(globals_of_a_layout):
    pg = from_parallel_state()
    assert pg.ranks("tp") == (4, 5)
    assert pg.tp_dp is parallel_state.get_tensor_and_data_parallel_group()
    assert pg.inter_dist_opt is None
    # Compare each field with the core's own collection.
    for field, group in vars(CoreCollection.use_mpu_process_groups()).items():
        assert getattr(pg, field, None) is group, field


def test_from_parallel_state_needs_one():
    with pytest.raises(MissingGroupError, match=r"not initialised\. Open a session"):
        from_parallel_state()


def nccl_file(tmp_path, content):
    """Write a file of NCCL options, and return the argument that names it."""
    (tmp_path / "nccl.yaml").write_text(content)
    return {"nccl_communicator_config_path": str(tmp_path / "nccl.yaml")}


def test_session_arguments_knows_every_parameter_of_this_core(tmp_path):
    values = {
        **nccl_file(tmp_path, "dp_cp: {max_ctas: 8, min_ctas: 2}\nep_tp: {net_name: IB}\n"),
        "high_priority_stream_groups": ["dp_cp", "tp"],
        "hierarchical_context_parallel_sizes": [2, 2],
        "order": "tp-pp-dp",
        "get_embedding_ranks": list,
        "get_position_embedding_ranks": list,
        "sharp_enabled_group": "dp",
        "pipeline_model_parallel_comm_backend": "ucc",
    }
    refused = set()
    for name, parameter in inspect.signature(
        parallel_state.initialize_model_parallel
    ).parameters.items():
        other = True if isinstance(parameter.default, bool) else 4
        value = values.get(name, other)
        if name == "rank_offset":
            continue  # only with local_world_size, below
        try:
            assert session_arguments(**{name: value}) != session_arguments(), name
        except UnsupportedOptionError as error:
            refused.add(str(error).partition("=")[0])
    assert refused <= {
        "expert_gtp_remat_size",
        "gtp_remat_size",
        "pipeline_model_parallel_comm_backend",
        "sharp_enabled_group",
        "use_sharp",
    }


def test_session_arguments_refuses_what_a_fork_has_added(monkeypatch):
    """A fork's engram_size=2 makes groups there, but none here."""

    def initialise(engram_size=None, distributed_timeout_minutes=30):
        raise NotImplementedError

    monkeypatch.setattr(parallel_state, "initialize_model_parallel", initialise)
    assert session_arguments(engram_size=None) == session_arguments()
    with pytest.raises(UnsupportedOptionError, match="engram_size=2: no argument of NVIDIA's"):
        session_arguments(engram_size=2)


def test_session_arguments_translates(tmp_path):
    assert session_arguments(
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=2,
        distributed_timeout_minutes=5,
        create_gloo_process_groups=False,
        use_sharp=False,
        **nccl_file(tmp_path, "dp_cp: {max_ctas: 8}\nep_tp: {net_name: IB}\n"),
        high_priority_stream_groups=["dp_cp"],
    ) == {
        "tp": 2,
        "expt_tp": 1,
        "optimizer_instances": 2,
        "collective_timeout": timedelta(minutes=5),
        "options": {
            "dp_cp": CommunicatorOptions(max_ctas=8, is_high_priority_stream=True),
            "dp_cp_gtp_remat": CommunicatorOptions(max_ctas=8, is_high_priority_stream=True),
            "expt_tp": CommunicatorOptions(net_name="IB"),
        },
    }


def test_gloo_twins_are_made_where_they_are_asked_for():
    twins = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")
    assert session_arguments(create_gloo_process_groups=True)["gloo"] == twins
    assert "gloo" not in session_arguments()  # though Megatron's default is True
    assert session_arguments(hybrid_context_parallel=True)["hybrid_cp"] is True


def test_megatrons_own_timeout_holds_also_when_it_is_not_given():
    assert session_arguments() == {"collective_timeout": timedelta(minutes=30)}


def options_for(tmp_path, content, **arguments):
    made = session_arguments(**nccl_file(tmp_path, content), **arguments)
    return {field: options.max_ctas for field, options in made.get("options", {}).items()}


def test_fields_that_share_a_group_in_megatron_share_its_nccl_options(tmp_path):
    text = "dp_cp: {max_ctas: 1}\nep_dp: {max_ctas: 2}\ntp_ep_pp: {max_ctas: 3}\n"
    own = {"dp_cp": 1, "dp_cp_gtp_remat": 1, "expt_dp": 2, "expt_dp_gtp_remat": 2}
    own |= {"tp_ep_pp": 3, "tp_ep_pp_with_egtp_remat": 3}
    assert options_for(tmp_path, text) == own | {"intra_dp_cp": 1, "intra_expt_dp": 2}
    assert options_for(tmp_path, text, num_distributed_optimizer_instances=2) == own
    # Megatron makes these groups for two instances only. With one, it ignores their settings.
    intra = "intra_dp_cp: {max_ctas: 4}\nintra_ep_dp: {max_ctas: 5}\ninter_ep_dp: {max_ctas: 6}\n"
    two = options_for(tmp_path, text + intra, num_distributed_optimizer_instances=2)
    assert two == own | {"intra_dp_cp": 4, "intra_expt_dp": 5, "inter_dist_opt": 6}
    assert options_for(tmp_path, text + intra) == own | {"intra_dp_cp": 1, "intra_expt_dp": 2}
    assert options_for(tmp_path, intra) == {}


def test_no_nccl_options_for_a_group_that_is_not_made(tmp_path):
    text = "hcp: {max_ctas: 1}\ndp: {max_ctas: 2}\n"
    assert options_for(tmp_path, text) == {"dp": 2}
    hierarchical = {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]}
    assert options_for(tmp_path, text, **hierarchical) == {"hcp": 1, "dp": 2}
    if (
        "create_all_gather_group"
        not in inspect.signature(parallel_state.initialize_model_parallel).parameters
    ):
        return
    text = "dp_cp: {max_ctas: 1}\nep_dp: {max_ctas: 2}\n"
    apart = options_for(tmp_path, text)
    twins = options_for(tmp_path, text, create_all_gather_group=True)
    assert twins == apart | {"dp_cp_ag": 1, "expt_dp_ag": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- dp_cp\n", r"nccl\.yaml: a list at the top"),
        ("dp_cp\n", r"nccl\.yaml: a str at the top"),
        ("dp_cp:\n", r"nccl\.yaml: dp_cp is None, not a mapping"),
        ("dp_cp: 8\n", r"nccl\.yaml: dp_cp is 8, not a mapping"),
        ("dp_cp: [max_ctas]\n", r"nccl\.yaml: dp_cp is \['max_ctas'\], not a mapping"),
        ("dp_cp: {1: 2}\n", r"nccl\.yaml: dp_cp has 1; known are"),
        ("dp_cp: {ctas: 8}\n", r"dp_cp has ctas; known are cga_cluster_size"),
        ("dpcp: {max_ctas: 8}\n", r"nccl\.yaml: 'dpcp' is no communicator"),
        ("dp_cp: {\n", r"nccl\.yaml can't be read"),
    ],
)
def test_a_malformed_nccl_file_is_refused_by_entry(tmp_path, content, message):
    with pytest.raises(UnsupportedOptionError, match=message):
        options_for(tmp_path, content)


def test_settings_shared_by_a_yaml_anchor_stay_apart(tmp_path):
    text = "dp: &same {max_ctas: 8}\ntp: *same\n"
    made = session_arguments(**nccl_file(tmp_path, text), high_priority_stream_groups=["tp"])
    assert made["options"] == {
        "dp": CommunicatorOptions(max_ctas=8),
        "tp": CommunicatorOptions(max_ctas=8, is_high_priority_stream=True),
    }


@pytest.mark.skipif(core_version() < (0, 19), reason="this core has no rank_offset")
def test_a_part_of_the_world_is_an_offset_and_a_size():
    assert session_arguments(rank_offset=4, local_world_size=2)["ranks"] == range(4, 6)
    assert session_arguments(local_world_size=2)["ranks"] == range(2)
    with pytest.raises(UnsupportedOptionError, match="rank_offset=4 needs local_world_size"):
        session_arguments(rank_offset=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_sharp": True}, "use_sharp=True: NCCL gives SHARP to one"),
        ({"tensor_size": 2}, "tensor_size is no argument"),
        ({"high_priority_stream_groups": ["dpcp"]}, "'dpcp' is no communicator; known are"),
        ({"nccl_communicator_config_path": "nowhere.yaml"}, r"nowhere\.yaml can't be read"),
    ],
)
def test_session_arguments_refuses_by_name(arguments, message):
    with pytest.raises(UnsupportedOptionError, match=message):
        session_arguments(**arguments)
