"""Compare ``published(pg)`` with the installed Megatron-core: each getter, all arguments.

The oracle is ``initialize_model_parallel`` on torch's fake backend (``recording.py``), where one
process plays any rank of any layout.
"""

import functools
import gc
import inspect
import itertools
import re
import sys
import threading
import time
import traceback
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from configurations import Configuration, last_stage_first, middle_stage
from recording import (
    READERS,
    fake_world,
    functions,
    recorded_megatron,
    restored_parallel_state,
)

import megapg
from megapg.collection import Lease, ProcessGroupCollection
from megapg.errors import ForeignGroupError, PublishedError, StaleGroupError
from megapg.layout import ParallelLayout
from megapg.megatron import (
    from_parallel_state,
    getters,
    guard,
    parallel_state,
    published,
    to_megatron,
    trace_global_reads,
)
from megapg.megatron.tables import OWNERS_CALLS
from megapg.ownership.opening import fake_session
from megapg.testing import fake_collection, megatron_on_cpu

pytestmark = pytest.mark.contract

GLOO = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")

# Bound before anything is published, as in users' modules.
bound_destroy = parallel_state.destroy_model_parallel
bound_initialize = parallel_state.initialize_model_parallel


LAYOUTS = {
    "one rank": {"world_size": 1},
    "tp pp dp": {"world_size": 8, "tp": 2, "pp": 2},
    "vpp": {"world_size": 8, "tp": 2, "pp": 2, "vpp": 2},
    "ep": {"world_size": 8, "tp": 2, "pp": 2, "ep": 2},
    "cp": {"world_size": 8, "tp": 2, "cp": 2},
    "every axis": {"world_size": 32, "tp": 2, "cp": 2, "pp": 2, "ep": 2, "vpp": 3},
    "expt_tp 1": {"world_size": 8, "tp": 2, "ep": 2, "expt_tp": 1},
    "expt_tp > tp": {"world_size": 8, "ep": 2, "expt_tp": 4},
    "instances": {"world_size": 8, "tp": 2, "optimizer_instances": 2},
    "instances of all": {
        "world_size": 16,
        "tp": 2,
        "pp": 2,
        "ep": 2,
        "vpp": 2,
        "optimizer_instances": 2,
    },
    "instances of cp": {"world_size": 16, "tp": 2, "cp": 2, "optimizer_instances": 4},
    "hcp": {"world_size": 8, "cp": 4, "hierarchical_cp": (2, 2)},
    "hybrid cp": {"world_size": 16, "tp": 2, "cp": 2, "hybrid_cp": True},
    "uneven hybrid cp": {"world_size": 20, "tp": 2, "hybrid_cp": True},
    "order": {"world_size": 8, "tp": 2, "pp": 2, "order": "tp-pp-dp"},
    "embeddings": {
        "world_size": 8,
        "pp": 4,
        "vpp": 2,
        "embedding_ranks": last_stage_first,
        "position_embedding_ranks": middle_stage,
    },
}

if hasattr(parallel_state, "get_gtp_weight_remat_group"):
    LAYOUTS |= {
        "gtp": {"world_size": 8, "tp": 2, "pp": 2, "gtp_remat": 2},
        "gtp and egtp": {"world_size": 8, "ep": 2, "gtp_remat": 2, "expt_gtp_remat": 4},
        "egtp": {"world_size": 16, "tp": 2, "cp": 2, "ep": 2, "expt_gtp_remat": 2},
    }

# Values of the getters' arguments; a bool takes both. An unknown new argument fails here.
ARGUMENTS = {
    "vp_stage": (None, 0, 1, 2),
    "group_size": (None, 1, 2, 4, 8, 10, 16),
    "pg_name": ("dp",),
    "nccl_comm_cfgs": ({},),
}


def initialise_megatron(sizes, **more):
    Configuration(**{"world_size": 0, **sizes}).initialize_megatron(**more)


def twins_of(sizes):
    """Return the twins that upstream makes: none for groups whose ranks shard weights."""
    of_experts = sizes.get("expt_gtp_remat", 1) == 1
    found = () if sizes.get("gtp_remat", 1) > 1 else GLOO
    return tuple(field for field in found if of_experts or "expt" not in field)


def plain(value):
    """Return a value that can be compared between two independent sets of groups."""
    if isinstance(value, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(value)), value.rank(), value.size()
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if value is None or isinstance(value, bool | int | str):
        return value
    return type(value)


def answer(function, arguments):
    try:
        return plain(function(**arguments))
    except Exception as error:
        return type(error), str(error)


def every_answer():
    """Return the answer of every getter for all values of its arguments.

    The variables behind them are included, as code reads these too.
    """
    answers = {}
    for name, getter in READERS.items():
        choices = []
        for parameter in inspect.signature(getter).parameters.values():
            both = (False, True) if isinstance(parameter.default, bool) else ()
            values = ARGUMENTS.get(parameter.name, both)
            assert values, f"{name} takes {parameter.name}, which this test does not know"
            choices.append([(parameter.name, value) for value in values])
        for chosen in itertools.product(*choices):
            answers[name, repr(chosen)] = answer(getter, dict(chosen))
    return answers | {
        (name, ""): plain(value)
        for name, value in vars(parallel_state).items()
        if re.match("_[A-Z]", name)
    }


def everything():
    """Return every name of the module, and the code of its functions."""
    names = dict(vars(parallel_state))
    names.pop("__warningregistry__", None)  # Python's own, for the deprecated getters
    codes = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in functions().values()]
    return names, codes


def assert_unchanged(before):
    names, codes = everything()
    assert names.keys() == before[0].keys()
    for name, value in names.items():
        assert value is before[0][name], name
    assert codes == before[1]


@pytest.fixture(autouse=True)
def without_the_guard():
    """Allow reads of one layout's globals in a process with another layout."""
    with guard("off"):
        yield


@pytest.fixture(autouse=True)
def leaves_the_globals_alone(without_the_guard):
    warnings.simplefilter("ignore", DeprecationWarning)  # some getters are deprecated
    before = everything()
    yield
    assert_unchanged(before)


@pytest.fixture
def pg():
    with fake_collection(tp=2, pp=2, ep=2, world_size=8, vpp=2, rank=3, gloo=GLOO) as collection:
        yield collection


@contextmanager
def somebody_elses_globals(**sizes):
    """Set globals of another layout than the collection's, on the existing WORLD."""
    with restored_parallel_state():
        initialise_megatron(sizes, create_gloo_process_groups=False)
        parallel_state.set_tensor_model_parallel_rank(7)
        parallel_state._GLOBAL_SYMMETRIC_MEMORY_BUFFER = object()
        yield


# -- the contract ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_getter_says_what_it_says_after_initialize_model_parallel(name):
    sizes = LAYOUTS[name]
    size = sizes["world_size"]
    for rank in sorted({0, size // 3, size // 2, size - 1}):
        with recorded_megatron(rank, size):
            nothing = every_answer()
            initialise_megatron(sizes)
            expected = every_answer()
        with fake_session(ParallelLayout(**sizes), rank, gloo=twins_of(sizes)) as session:
            before = everything()
            assert every_answer() == nothing
            with published(session.groups):
                found = every_answer()
            assert_unchanged(before)
            assert every_answer() == nothing
        assert expected != nothing
        differences = {
            call: (said, expected[call]) for call, said in found.items() if said != expected[call]
        }
        assert differences == {}, f"rank {rank}"
        assert found.keys() == expected.keys()


@pytest.mark.skipif(
    "create_all_gather_group" not in inspect.signature(bound_initialize).parameters,
    reason="this core has no getter for these groups",
)
def test_the_groups_for_all_gathers_are_those_of_the_session():
    with fake_world(3, 8), megapg.session(cp=2, ep=2, all_gather_groups=True) as session:
        with published(session.groups) as pg:
            ask = functools.partial(parallel_state.get_data_parallel_group, True)
            assert ask(independent_all_gather=True) is pg.dp_cp_ag
            assert parallel_state.has_separate_all_gather_group()
        plain = ProcessGroupCollection.from_groups(tp=pg.tp, dp_cp_ag=None)
        with published(plain):
            assert not parallel_state.has_separate_all_gather_group()


def test_every_getter_is_called():
    """A getter is any function of the module that reads state and does not change it."""
    calls = {name for name, arguments in every_answer() if arguments}
    others = set(functions()) - calls
    assert {name.partition("_")[0] for name in calls} == {"get", "is", "model"} | (
        {"has"} if hasattr(parallel_state, "has_separate_all_gather_group") else set()
    )
    assert {name.lstrip("_").partition("_")[0] for name in others} <= {
        *("initialize", "create", "destroy", "set", "update", "inject"),  # change state
        *("generate", "default", "overwrite"),  # use no state
    }


def test_every_setter_acts_on_what_is_published_and_is_undone(pg):
    with somebody_elses_globals(tp=4):
        said = every_answer()
        before = everything()
        with published(pg):
            for name, setter in functions("set_").items():
                getter = getattr(parallel_state, f"get_{name.removeprefix('set_')}")
                assert getter() != 17, name
                setter(17)
                assert getter() == 17, name
            with published(pg):
                assert parallel_state.get_tensor_model_parallel_rank() == pg.rank("tp")
            assert parallel_state.get_tensor_model_parallel_rank() == 17
        assert_unchanged(before)
        assert every_answer() == said


# -- the rest of the state -------------------------------------------------------------------------


def test_the_globals_of_somebody_else_come_back(pg):
    with somebody_elses_globals(tp=4, cp=2):
        theirs = every_answer()
        before = everything()
        with published(pg):
            assert parallel_state.get_tensor_model_parallel_rank() == 1  # not their override
            assert parallel_state.get_tensor_model_parallel_group() is pg.tp
            assert parallel_state._GLOBAL_SYMMETRIC_MEMORY_BUFFER is None
            parallel_state._LEFT_BEHIND = 1
        assert_unchanged(before)
        assert every_answer() == theirs


def test_borrowed_groups_say_what_they_said_before(pg):
    """They have no layout with the virtual pipeline or the order of the embedding ranks."""
    sizes = {"pp": 4, "vpp": 2, "embedding_ranks": last_stage_first}
    with restored_parallel_state():
        initialise_megatron(sizes, create_gloo_process_groups=False)
        parallel_state.set_virtual_pipeline_model_parallel_rank(1)
        assert parallel_state._EMBEDDING_GLOBAL_RANKS == [7, 5, 3, 1]
        theirs = every_answer()
        borrowed = from_parallel_state()
        with published(borrowed):
            assert every_answer() == theirs
        with published(pg), published(borrowed):  # and no value of another layout
            assert parallel_state._EMBEDDING_GLOBAL_RANKS == [1, 3, 5, 7]
        # A layout without a virtual pipeline.
        plain_layout = ParallelLayout(world_size=8, pp=4)
        groups = ProcessGroupCollection(
            vars(borrowed), borrowed._members, Lease("plain"), plain_layout
        )
        with published(groups):
            assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
            assert parallel_state.get_virtual_pipeline_model_parallel_rank() is None


def test_the_error_for_a_group_that_was_not_asked_for_names_the_argument_that_makes_it():
    asked = {
        "gloo=('intra_dp_cp',)": lambda: parallel_state.get_data_parallel_group_gloo(True, True),
        "gloo=('dp_cp',)": lambda: parallel_state.get_data_parallel_group_gloo(True),
        "gloo=('expt_dp',)": lambda: parallel_state.get_expert_data_parallel_group_gloo(),
    }
    for argument, ask in asked.items():
        with pytest.raises(AssertionError) as raised:
            ask_inside(ask)
        (note,) = raised.value.__notes__
        assert "session 'default' has no" in note
        assert argument in note
    # Errors of other functions get no note, and those for other reasons name no argument.
    with pytest.raises(AssertionError) as raised:
        ask_inside(fail_an_assertion)
    assert not hasattr(raised.value, "__notes__")
    with pytest.raises(AssertionError) as raised:
        ask_inside(parallel_state.get_hierarchical_context_parallel_groups)
    assert "gloo=" not in "".join(raised.value.__notes__)


FORKS_GETTER = """
_LAST_STAGE = None
def get_last_stage():
    assert _LAST_STAGE is not None, "the last stage is not initialized"
    return _LAST_STAGE
"""


def test_what_a_fork_has_added_to_parallel_state_says_that_nobody_sets_it(monkeypatch):
    with restored_parallel_state():
        monkeypatch.setattr(parallel_state, "get_last_stage", None, raising=False)
        exec(FORKS_GETTER, vars(parallel_state))
        with pytest.raises(AssertionError, match="last stage is not initialized") as raised:
            ask_inside(lambda: parallel_state.get_last_stage())
        (note,) = raised.value.__notes__
        assert "session 'default' sets nothing for get_last_stage" in note

        def ask():  # as in the note
            parallel_state._LAST_STAGE = 7
            assert parallel_state.get_last_stage() == 7

        ask_inside(ask)
        assert parallel_state._LAST_STAGE is None


def fail_an_assertion():
    raise AssertionError


def ask_inside(ask):
    with fake_world(0, 2), megapg.session() as session, published(session.groups):
        ask()


def test_the_list_of_groups_whose_timeouts_change_together(pg):
    with published(pg):
        listed = parallel_state._global_process_group_list
        assert listed[0] is None  # WORLD
        every = {vars(pg)[field] for field in pg.present()} | set(pg.extras.values())
        assert set(listed[1:]) == every - {None}
        assert len(listed) == len(set(listed))


def test_the_memory_buffer_is_the_collections_and_ends_with_its_session():
    with megatron_on_cpu(), fake_world(0, 2), megapg.session(tp=2, name="other") as session:
        other = session.groups
        theirs = getters.memory_buffer(other)
        with megapg.session(tp=1, name="inner") as session:
            pg = session.groups
            for _ in range(2):  # the value survives the block, as the collection does
                with published(pg):
                    buffer = parallel_state.get_global_memory_buffer()
                    assert buffer is getters.memory_buffer(pg)
                    with published(other):
                        assert parallel_state.get_global_memory_buffer() is theirs
                    with published(pg):
                        assert parallel_state.get_global_memory_buffer() is buffer
            tensor = buffer.get_tensor((4,), torch.float32, "mpu")
            kept = weakref.ref(buffer), weakref.ref(tensor)
            del buffer, tensor
        gc.collect()
        assert [reference() for reference in kept] == [None, None]
        assert getters.memory_buffer(other) is theirs


def test_groups_borrowed_from_the_globals_bring_their_buffer_along(pg):
    with restored_parallel_state():
        initialise_megatron({"tp": 2}, create_gloo_process_groups=False)
        theirs = parallel_state.get_global_memory_buffer()
        borrowed = from_parallel_state()
        with published(pg):
            mine = parallel_state.get_global_memory_buffer()
            assert mine is not theirs
            with published(ProcessGroupCollection.from_groups(tp=pg.tp)):
                assert parallel_state.get_global_memory_buffer() is mine
        with trace_global_reads() as trace, published(borrowed):
            pass
        assert trace.reads == ()
        with published(borrowed):
            assert parallel_state.get_global_memory_buffer() is theirs
        parallel_state._GLOBAL_MEMORY_BUFFER = None
        with published(borrowed):
            found = parallel_state.get_global_memory_buffer()
            assert found is getters.memory_buffer(borrowed)


# -- nesting and order -----------------------------------------------------------------------------


def fail_while_published(pg):
    with published(pg):
        assert parallel_state.get_tensor_model_parallel_group() is pg.tp
        raise ZeroDivisionError


def test_blocks_nest_and_an_exception_ends_its_own(pg):
    other = ProcessGroupCollection.from_groups(tp=pg.pp, pp=pg.tp, dp=pg.dp)
    before = everything()
    with published(pg):
        inside = everything()
        with pytest.raises(ZeroDivisionError):
            fail_while_published(other)
        assert_unchanged(inside)
        with published(pg):  # re-entrant
            assert parallel_state.get_tensor_model_parallel_group() is pg.tp
        assert_unchanged(inside)
    assert_unchanged(before)


def test_blocks_may_be_left_in_any_order(pg):
    other = ProcessGroupCollection.from_groups(tp=pg.pp, pp=pg.tp, dp=pg.dp)
    for order in itertools.permutations(range(3)):
        before = everything()
        blocks = [published(pg), published(other), published(pg)]
        answers = [block.__enter__().tp for block in blocks]
        for number in order:
            assert parallel_state.get_tensor_model_parallel_group() is answers[-1]
            blocks[number].__exit__(None, None, None)
            blocks[number] = None
            while answers and blocks[len(answers) - 1] is None:
                answers.pop()
        assert_unchanged(before)


def test_a_trace_and_a_publication_overlap_in_any_order(pg):
    before = everything()
    for enter, leave in itertools.product(itertools.permutations(range(2)), repeat=2):
        blocks = [published(pg), trace_global_reads(mine=pg)]
        entered = {number: blocks[number].__enter__() for number in enter}
        assert parallel_state.get_tensor_model_parallel_rank() == 1
        with pytest.raises(PublishedError):
            bound_destroy()
        for number in leave:
            blocks[number].__exit__(None, None, None)
        assert_unchanged(before)
        assert [read.answered_by for read in entered[1].reads] == ["mine"]


def test_a_failure_on_entry_leaves_nothing_behind(pg, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    before = everything()
    with monkeypatch.context() as patched:
        patched.setattr("megatron.core.utils.GlobalMemoryBuffer", fail)
        with pytest.raises(ZeroDivisionError), published(pg):
            pass
        assert_unchanged(before)
    other = ProcessGroupCollection.from_groups(tp=pg.pp)  # no buffer yet
    with published(pg):
        inside = everything()
        with monkeypatch.context() as patched:
            patched.setattr("megatron.core.utils.GlobalMemoryBuffer", fail)
            with pytest.raises(ZeroDivisionError), published(other):
                pass
        assert_unchanged(inside)


# -- what is refused -------------------------------------------------------------------------------


def test_what_makes_and_ends_groups_is_refused(pg):
    owners = functions("|".join(OWNERS_CALLS))
    assert {"initialize_model_parallel", "destroy_model_parallel"} <= set(owners)
    signatures = {name: inspect.signature(function) for name, function in owners.items()}
    before = everything()
    with published(pg), published(pg):
        inside = everything()
        for name, function in owners.items():
            assert inspect.signature(function) == signatures[name]
            required = [p for p in signatures[name].parameters.values() if p.default is p.empty]
            with pytest.raises(PublishedError) as caught:
                function(*[None for _ in required])
            # Debuggers and error reports read the variables of every frame.
            report = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
            assert f"in {name}" in "".join(report.format())
            message = str(caught.value)
            assert message.startswith(f"parallel_state.{name}() inside published():")
            advice = {"initialize": "open a second session"}
            assert advice.get(name.partition("_")[0], "session.close() ends") in message
        # With arguments, and by names bound before.
        for call in (
            lambda: bound_destroy(),
            lambda: bound_initialize(2, pipeline_model_parallel_size=2),
        ):
            with pytest.raises(PublishedError):
                call()
        assert_unchanged(inside)
        assert pg.require() is pg
    assert_unchanged(before)
    with restored_parallel_state():
        bound_initialize(2, create_gloo_process_groups=False)
        assert parallel_state.get_tensor_model_parallel_world_size() == 2


def test_what_megatrons_functions_make_inside_ends_with_the_session():
    registered = dist.distributed_c10d._world.pg_map
    layout = ParallelLayout(world_size=8, tp=2)
    session, other = fake_session(layout, 3), None
    with restored_parallel_state(), published(session.groups) as pg:
        every = parallel_state._global_process_group_list
        first = parallel_state.create_group([1, 3])
        assert first in every
        assert isinstance(parallel_state.create_group([1, 2]), int)  # not a member
        borrowed = ProcessGroupCollection.from_groups(tp=pg.tp)
        with published(borrowed):  # a group made in this block belongs to the caller
            other = parallel_state.create_group([3, 4])
        with published(pg):
            assert first not in parallel_state._global_process_group_list  # not in the list yet
            second = parallel_state.create_group([2, 3])
        with published(pg):
            assert second in parallel_state._global_process_group_list
        assert parallel_state._global_process_group_list is every
    with restored_parallel_state(), published(session.groups):
        listed = parallel_state._global_process_group_list
        assert [listed.count(each) for each in (first, second, other)] == [1, 1, 0]
        dist.destroy_process_group(second)  # the caller may destroy it earlier
    assert {first, other} <= set(registered)
    dist.destroy_process_group(other)
    session.close()
    assert not registered


def test_a_function_that_somebody_has_wrapped_is_refused_too(pg, monkeypatch):
    calls = []
    wrapped = bound_destroy

    @functools.wraps(wrapped)
    def wrapper():
        calls.append("wrapper")
        wrapped()

    monkeypatch.setattr(parallel_state, "destroy_model_parallel", wrapper)
    with published(pg), pytest.raises(PublishedError, match=r"\.destroy_model_parallel\(\) inside"):
        parallel_state.destroy_model_parallel()
    with restored_parallel_state():
        parallel_state.destroy_model_parallel()
    assert calls == ["wrapper", "wrapper"]
    # A wrapper without ``__wrapped__`` is not refused.
    del wrapper.__wrapped__
    wrapped = calls.clear
    with published(pg):
        parallel_state.destroy_model_parallel()
    assert calls == []


def in_thread(work, name):
    """Run ``work`` in a new thread; return its result or its error."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_second_thread_is_refused_and_told_who_is_first(pg):
    def publish():
        with published(pg):
            return parallel_state.get_tensor_model_parallel_rank()

    before = everything()
    with published(pg):
        inside = everything()
        refused = in_thread(publish, "evaluation")
        assert isinstance(refused, PublishedError)
        assert "thread 'evaluation': thread 'MainThread' has published" in str(refused)
        assert "the groups of fake_collection()" in str(refused)
        assert "pg_collection=" in str(refused)
        assert_unchanged(inside)
        # Reads are allowed in other threads, as backward passes run in their own threads.
        assert in_thread(parallel_state.get_tensor_model_parallel_rank, "reader") == 1
    assert_unchanged(before)
    assert in_thread(publish, "evaluation") == 1


class SlowToSayWhoseItIs(Lease):
    """Lets other threads run while ``published`` prepares to claim the globals."""

    def __getattribute__(self, name):
        if name == "owner":
            time.sleep(1e-5)
        return super().__getattribute__(name)


def test_threads_that_come_at_once_never_mix(pg):
    pg = ProcessGroupCollection(vars(pg), pg._members, SlowToSayWhoseItIs("one"), pg.layout)
    swapped = {"tp": pg.pp, "pp": pg.tp}
    other = ProcessGroupCollection(swapped, pg._members, SlowToSayWhoseItIs("other"), pg.layout)
    start = threading.Barrier(4)
    wrong, refused, done = [], [], []

    def publish(mine):
        start.wait()
        for _ in range(300):
            try:
                with published(mine):
                    held = [parallel_state.get_tensor_model_parallel_group() for _ in range(5)]
                    wrong.extend(group for group in held if group is not mine.tp)
                done.append(mine)
            except PublishedError as error:
                refused.append(error)

    before = everything()
    threads = [threading.Thread(target=publish, args=(p,)) for p in (pg, other, pg, other)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    assert wrong == []
    assert done
    assert len(done) + len(refused) == 1200
    assert_unchanged(before)


# -- a session that ends ---------------------------------------------------------------------------


def test_what_is_no_collection_of_an_open_session_is_refused():
    with fake_collection(tp=2) as pg:
        core = to_megatron(pg)
        for wrong in (None, "pg", {"tp": None}, core):
            with pytest.raises(ForeignGroupError, match=r"was given .*session\.groups.*from_megat"):
                published(wrong).__enter__()
    with pytest.raises(
        StaleGroupError, match=r"published\(\): the process groups of fake_collection"
    ):
        published(pg).__enter__()


def test_a_session_closed_inside_takes_its_groups_out_of_the_globals():
    before = everything()
    with (
        fake_world(1, 8),
        megapg.session(tp=2, pp=2, name="outer", gloo=GLOO, hybrid_cp=True) as outer,
    ):
        nothing = every_answer()
        inner = megapg.session(tp=4, name="inner", gloo=GLOO, hybrid_cp=True)
        stale = inner.groups
        with published(outer.groups):
            says = every_answer()
            with published(stale):
                with published(stale):
                    inner.close()
                    assert every_answer() == nothing
                    with pytest.raises(StaleGroupError), published(stale):
                        pass
                    with pytest.raises(PublishedError):
                        bound_destroy()
                    with published(outer.groups):
                        assert every_answer() == says
                    assert every_answer() == nothing
                assert every_answer() == nothing
            assert every_answer() == says
        assert outer.groups.lease.at_end == []
    assert_unchanged(before)
