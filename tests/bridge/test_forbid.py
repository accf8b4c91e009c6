"""A forbidden read raises at its line, and the error shows the replacement."""

import functools
import re
import types

import pytest
from megatron.core.parallel_state import get_tensor_model_parallel_group as bound_early

import megapg
from megapg.errors import GlobalReadError, MegapgError
from megapg.megatron import (
    GlobalGroups,
    core_version,
    getters,
    parallel_state,
    published,
    trace_global_reads,
)
from megapg.megatron.core import installed_version
from megapg.megatron.reading.resolve import globals_policy, resolve, resolves
from megapg.megatron.watching.forbid import forbid_global_reads
from megapg.megatron.watching.hook import active
from megapg.testing import fake_collection

pytestmark = pytest.mark.contract


@pytest.fixture
def pg():
    with fake_collection(tp=2, cp=2, world_size=8, rank=3) as collection, published(collection):
        yield collection


def reader(module):
    """Make a module of that name with a function that reads a global."""
    made = types.ModuleType(module)
    source = "def read():\n    return ps.get_tensor_model_parallel_rank()\n"
    exec(compile(source, f"{module}.py", "exec"), vars(made))
    made.ps = parallel_state
    return made.read


def mean(loss):
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) + loss


def test_the_error_stands_at_the_read_and_says_what_to_write(pg):
    field = "dp_cp" if core_version() < (0, 19) else "dp_cp_gtp_remat"
    with forbid_global_reads(), pytest.raises(GlobalReadError) as caught:
        mean(1)
    assert isinstance(caught.value, MegapgError)
    line = mean.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"{__file__}:{line}: mean reads get_data_parallel_rank(with_context_parallel=True) of "
        f'megatron.core.parallel_state, which is forbidden here. Write pg.rank("{field}") instead, '
        f"or let the module go on for now: forbid_global_reads(allow=['{__name__}'])."
    )
    assert "mean" in [entry.name for entry in caught.traceback]
    assert mean(1) == 2  # the ban has ended


READS = [
    (lambda: bound_early(), "get_tensor_model_parallel_group() of", "Write pg.tp instead"),
    (
        lambda: bound_early(check_initialized=False),
        "get_tensor_model_parallel_group(check_initialized=False) of",
        'Write getattr(pg, "tp", None) instead',
    ),
    (
        lambda: parallel_state._DATA_PARALLEL_GLOBAL_RANKS,
        "reads _DATA_PARALLEL_GLOBAL_RANKS of",
        'Write pg.ranks("dp") instead',
    ),
    (
        lambda: parallel_state.get_data_parallel_group(True, partial_data_parallel=True),
        "get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)",
        "Write getters.data_group(pg, with_context_parallel=True, partial_data_parallel=True)"
        if installed_version() >= (0, 19)
        else "Write pg.intra_dp_cp instead",
    ),
    (
        lambda: parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=1),
        "is_pipeline_last_stage(ignore_virtual=False, vp_stage=1)",
        "getters.is_pipeline_last_stage(pg, ignore_virtual=False, vp_stage=vp_stage)",
    ),
    (
        lambda: hasattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_RANK"),
        "reads _MPU_TENSOR_MODEL_PARALLEL_RANK",
        'Write pg.rank("tp") instead',
    ),
]


@pytest.mark.parametrize(("read", "name", "instead"), READS)
def test_each_kind_of_read(pg, read, name, instead):
    with forbid_global_reads(), pytest.raises(GlobalReadError) as caught:
        read()
    assert name in str(caught.value)
    assert instead in str(caught.value)
    read()


def test_an_unknown_variable_gets_an_answer_too(pg, monkeypatch):
    monkeypatch.setattr(parallel_state, "_OF_A_FORK", 1, raising=False)
    with forbid_global_reads(), pytest.raises(GlobalReadError, match="Write what your own coll"):
        _ = parallel_state._OF_A_FORK


def build(pg_collection=None):
    return resolve(pg_collection, needs=("tp", "pp")).rank("tp")


def test_a_fallback_of_resolve_is_forbidden_where_the_collection_was_left_out(pg):
    with globals_policy("silent"), forbid_global_reads():
        assert build(pg) == 1
        message = r"_left_out calls build without .* Pass it a collection with tp, pp: build\(..., "
        with pytest.raises(GlobalReadError, match=message):
            build()
        with forbid_global_reads(allow=[__name__]), pytest.raises(GlobalReadError):
            build()
    with globals_policy("silent"), forbid_global_reads(allow=[__name__]):
        assert build() == 1


def test_what_counts_is_who_falls_back_not_who_calls(pg):
    """The schedule calls the user's forward step, as Megatron's schedules do."""
    schedules = types.ModuleType("megatron.core.schedules")
    exec("def calls(step):\n    return step()\n", vars(schedules))
    calls = schedules.calls
    with globals_policy("silent"), forbid_global_reads(allow=["megatron.core"]):
        with pytest.raises(GlobalReadError, match=r"functools\.partial"):
            calls(build)
        with pytest.raises(GlobalReadError, match=r"functools\.partial"):
            calls(decorated)


@resolves(needs=("tp",))
def decorated(*, pg_collection):
    return pg_collection.rank("tp")


def test_the_bridges_own_ways_to_the_globals_are_reads(pg):
    view = resolve_silently()
    ways = {
        "from_parallel_state": megapg.from_parallel_state,
        "a field": lambda: view.tp,
        "a rank": lambda: view.rank("pp"),
        "a predicate": lambda: getters.model_parallel_is_initialized(None),
        "a neighbour": lambda: getters.pipeline_next_rank(GlobalGroups()),
        "the buffer": lambda: getters.memory_buffer(GlobalGroups()),
    }
    for name, way in ways.items():
        way()
        with forbid_global_reads(), pytest.raises(GlobalReadError, match=__file__) as caught:
            way()
        assert "megatron.core.parallel_state" in str(caught.value), name
        with trace_global_reads() as trace:
            way()
        assert {read.module for read in trace.reads} == {__name__}, name


def resolve_silently():
    with globals_policy("silent"):
        return resolve(None)


def test_a_wrapped_getter_is_watched_all_the_same(pg, monkeypatch):
    original = parallel_state.get_tensor_model_parallel_rank

    @functools.wraps(original)
    def logged():
        return original()

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", logged)
    with forbid_global_reads(), pytest.raises(GlobalReadError):
        logged()
    assert logged() == 1


def test_allowed_are_modules_and_what_is_below_them_by_whole_names(pg):
    inside, below, beside = reader("old.part"), reader("old.part.deep"), reader("old.partner")
    with forbid_global_reads(allow=["other", "old.part"]):
        assert inside() == below() == 1
        for stranger in (beside, reader("old"), reader("part")):
            with pytest.raises(GlobalReadError):
                stranger()
    with pytest.raises(TypeError, match=r"allow='old': give a list of modules, such as \['old'\]"):
        forbid_global_reads(allow="old").__enter__()
    assert active() is None


def test_megatrons_own_reads_go_through_when_allowed(pg):
    from megatron.core.utils import get_tensor_model_parallel_group_if_none as fallback

    with forbid_global_reads(allow=["megatron.core"]):
        assert fallback(None) is pg.tp
    with forbid_global_reads(allow=["megatron.cor"]), pytest.raises(GlobalReadError) as caught:
        fallback(None)
    assert re.search(r"megatron/core/utils\.py:\d+: get_tensor_model", str(caught.value))


def test_a_trace_records_what_a_ban_forbids_whichever_began_first(pg):
    traces = []
    for first, second in ((trace_global_reads, forbid_global_reads), (forbid_global_reads,) * 2):
        with first() as outer, second(), trace_global_reads() as inner:
            with pytest.raises(GlobalReadError):
                bound_early()
            traces += [trace for trace in (outer, inner) if trace is not None]
    assert [[read.count for read in trace.reads] for trace in traces] == [[1], [1], [1]]
    ban = forbid_global_reads()
    ban.__enter__()
    with trace_global_reads() as trace:
        ban.__exit__(None, None, None)
        bound_early()  # the ban has ended, the trace has not
    assert active() is None
    assert [read.count for read in trace.reads] == [1]
