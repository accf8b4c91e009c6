"""Tracing reads of the globals: all ways to read, all threads, and no traces left behind."""

import _thread
import functools
import inspect
import io
import itertools
import json
import re
import threading
import types
from collections import Counter

import pytest
import torch
from megatron.core import mpu
from megatron.core.parallel_state import _DATA_PARALLEL_GROUP as BOUND_VALUE
from megatron.core.parallel_state import get_tensor_model_parallel_rank as bound_early
from recording import READERS
from rich.console import Console
from torch.utils.checkpoint import checkpoint

from megapg.collection import ProcessGroupCollection
from megapg.megatron import parallel_state, published, trace_global_reads
from megapg.megatron.marks import READS
from megapg.megatron.reading.resolve import globals_policy, resolve
from megapg.megatron.watching.advice import NOT_READS, NOTHING_KNOWN, replacement
from megapg.megatron.watching.hook import Hook, active
from megapg.testing import fake_collection

pytestmark = pytest.mark.contract

GETTERS = {name: getter for name, getter in READERS.items() if name not in NOT_READS}
PRIVATE = sorted(name for name in vars(parallel_state) if re.match(r"_[A-Z]", name))


@pytest.fixture
def pg():
    with fake_collection(tp=2, pp=2, ep=2, world_size=8, vpp=2, rank=3) as collection:
        yield collection


def everything():
    """Return the identity of every object that a trace changes."""
    functions = [f for f in vars(parallel_state).values() if inspect.isfunction(f)]
    return (
        type(parallel_state),
        set(vars(parallel_state)),
        [(f, id(f.__code__), f.__defaults__, f.__kwdefaults__, f.__dict__) for f in functions],
    )


def counts(trace):
    found = Counter()
    for read in trace.reads:
        found[read.getter, read.answered_by] += read.count
    return found


# -- nothing left behind ---------------------------------------------------------------------


def test_functions_and_module_are_exactly_restored(pg):
    before = everything()
    signatures = {name: inspect.signature(getter) for name, getter in GETTERS.items()}
    codes = {name: getter.__code__ for name, getter in GETTERS.items()}
    with published(pg), trace_global_reads():
        assert active() is vars(parallel_state)[READS]
        assert isinstance(parallel_state, types.ModuleType)
        for name, getter in GETTERS.items():
            assert getter.__code__ is not codes[name], name
            # Code that inspects signatures to tell versions apart must see the right ones.
            assert inspect.signature(getter) == signatures[name], name
    assert active() is None
    assert everything() == before
    assert type(parallel_state) is types.ModuleType


def fail_in_a_trace(pg):
    with trace_global_reads(pg=pg):
        raise ZeroDivisionError


def test_an_exception_ends_its_own_trace_only(pg):
    before = everything()
    with published(pg), trace_global_reads(pg=pg) as trace:
        with pytest.raises(ZeroDivisionError):
            fail_in_a_trace(pg)
        assert bound_early() == 1
    assert everything() == before
    assert counts(trace) == {("get_tensor_model_parallel_rank", "pg"): 1}


def test_an_installation_that_fails_half_way_is_undone(monkeypatch):
    before = everything()
    monkeypatch.setattr(Hook, "_watching_class", lambda _: int)  # not a class for a module
    with pytest.raises(TypeError, match="__class__"), trace_global_reads():
        pass
    assert everything() == before


def test_traces_nest_and_end_in_any_order(pg):
    rank = "get_tensor_model_parallel_rank"
    with published(pg):
        before = everything()
        first, second = trace_global_reads(first=pg), trace_global_reads(second=pg)
        early, late = first.__enter__(), second.__enter__()
        assert bound_early() == 1
        first.__exit__(None, None, None)
        assert bound_early() == 1
        assert everything() != before
        second.__exit__(None, None, None)
        assert everything() == before
        assert bound_early() == 1
    assert counts(early) == {(rank, "first"): 1}
    assert counts(late) == {(rank, "second"): 2}


def test_a_call_under_way_when_the_trace_ends_is_answered(pg):
    """Another thread that is already in the reporting code continues without the hook."""
    with published(pg):
        with trace_global_reads():
            late = types.FunctionType(bound_early.__code__, vars(parallel_state))
        assert late() == 1


# -- every way to read -----------------------------------------------------------------------


def test_every_way_to_call_a_getter(pg):
    with published(pg), trace_global_reads(mine=pg) as trace:
        assert bound_early() == 1
        assert mpu.get_tensor_model_parallel_rank() == 1
        assert functools.partial(bound_early)() == 1
        for _ in range(3):
            parallel_state.get_data_parallel_rank(with_context_parallel=True)
        parallel_state.get_pipeline_model_parallel_group(False)  # by position
        thread = threading.Thread(target=parallel_state.get_global_memory_buffer)
        thread.start()
        thread.join()
        answered = threading.Event()
        _thread.start_new_thread(lambda *_: answered.set(), (parallel_state.is_initialized(),))
        assert answered.wait(10)
        parallel_state.set_tensor_model_parallel_rank(0)  # a write
        parallel_state._NEW_VARIABLE = 1  # another write; published removes it
    found = {read.getter: read for read in trace.reads}
    assert set(found) == {
        "get_tensor_model_parallel_rank",
        "get_data_parallel_rank",  # not the getters that it calls
        "get_pipeline_model_parallel_group",
        "get_global_memory_buffer",
        "is_initialized",
    }
    ranks = [read for read in trace.reads if read.getter == "get_tensor_model_parallel_rank"]
    assert [read.count for read in ranks] == [1, 1, 1]  # three lines
    rank = ranks[0]
    assert (rank.field, rank.answered_by, rank.replacement) == ("tp", "mine", 'pg.rank("tp")')
    assert (rank.file, rank.module) == (__file__, __name__)
    assert rank.function == "test_every_way_to_call_a_getter"
    assert found["get_data_parallel_rank"].count == 3
    assert found["get_data_parallel_rank"].field in {"dp_cp", "dp_cp_gtp_remat"}  # 0.16, 0.19
    assert found["get_global_memory_buffer"].file == threading.__file__


def test_a_getter_without_any_python_caller(pg):
    """Such calls come from raw threads and from callbacks of C code."""
    with published(pg), trace_global_reads() as trace:
        _thread.start_new_thread(bound_early, ())
        for _ in range(1000):
            if trace.reads:
                break
            threading.Event().wait(0.01)
    assert counts(trace) == {("get_tensor_model_parallel_rank", "other globals"): 1}


def read_private():
    return parallel_state._TENSOR_MODEL_PARALLEL_GROUP


def test_private_globals(pg):
    for _ in range(1000):  # until the interpreter specialises the code
        read_private()
    with published(pg), trace_global_reads(mine=pg) as trace:
        assert read_private() is read_private() is pg.tp
        assert list(pg.ranks("pp")) == mpu._PIPELINE_GLOBAL_RANKS
        from megatron.core.parallel_state import _MODEL_PARALLEL_GROUP

        assert _MODEL_PARALLEL_GROUP is pg.mp
        assert getattr(parallel_state, "_EMBEDDING_" + "GROUP") is pg.embd
        assert not hasattr(parallel_state, "_NO_SUCH_GROUP")
        # A trace cannot see values bound earlier, or reads of the dictionary itself.
        assert BOUND_VALUE is None
        assert vars(parallel_state)["_CONTEXT_PARALLEL_GROUP"] is pg.cp
        # Functions and modules are not state.
        assert parallel_state._set_global_memory_buffer
        assert parallel_state.torch is torch
    found = {read.getter: read for read in trace.reads}
    assert {name: read.replacement for name, read in found.items()} == {
        "_TENSOR_MODEL_PARALLEL_GROUP": "pg.tp",
        "_PIPELINE_GLOBAL_RANKS": 'pg.ranks("pp")',
        "_MODEL_PARALLEL_GROUP": "pg.mp",
        "_EMBEDDING_GROUP": "pg.embd",
    }
    tp = found["_TENSOR_MODEL_PARALLEL_GROUP"]
    assert (tp.count, tp.function, tp.field, tp.answered_by) == (2, "read_private", "tp", "mine")
    assert tp.line == inspect.getsourcelines(read_private)[1] + 1


def recomputed(x):
    parallel_state.get_context_parallel_world_size()
    return x * x


class Nested(torch.autograd.Function):
    """A backward pass inside a backward pass; from depth 60 the engine uses its own threads."""

    @staticmethod
    def forward(ctx, x, depth, work):
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                leaf = torch.ones(1, requires_grad=True)
                Nested.apply(leaf, ctx.depth - 1, ctx.work).backward()
        else:
            ctx.work()
        return gradient, None, None


def test_backward_threads_of_the_engine_and_recomputation(pg):
    threads = []

    def work():
        threads.append(threading.current_thread())
        assert bound_early() == 1
        assert read_private() is not None

    with published(pg), trace_global_reads(mine=pg) as trace:
        leaf = torch.ones(1, requires_grad=True)
        Nested.apply(leaf, 80, work).backward()
        checkpoint(recomputed, leaf, use_reentrant=True).sum().backward()
        checkpoint(recomputed, leaf, use_reentrant=False).sum().backward()
    assert isinstance(threads[0], threading._DummyThread)  # Python has not started it
    assert counts(trace) == {
        ("get_tensor_model_parallel_rank", "mine"): 1,
        ("_TENSOR_MODEL_PARALLEL_GROUP", "mine"): 1,
        ("get_context_parallel_world_size", "mine"): 4,
    }
    functions = {read.function.rpartition(".")[2] for read in trace.reads}
    assert functions == {"work", "read_private", "recomputed"}


def build(pg_collection=None):
    return resolve(pg_collection, needs=("tp", "pp")).rank("tp")


def test_a_fallback_of_resolve_is_a_read_where_the_collection_was_left_out(pg):
    with published(pg), globals_policy("silent"), trace_global_reads(mine=pg) as trace:
        assert build() == build(pg) == 1
    within, read = sorted(trace.reads, key=lambda read: read.line)
    assert (within.getter, within.function) == ("get_tensor_model_parallel_rank", "build")
    assert (read.getter, read.field, read.count) == ("resolve", "tp, pp", 1)
    assert read.function == "test_a_fallback_of_resolve_is_a_read_where_the_collection_was_left_out"
    assert read.replacement == "pg_collection= in the call of build"


# -- the report of a read --------------------------------------------------------------------------


def test_the_trace_says_who_answered(pg):
    other = ProcessGroupCollection.from_groups(tp=pg.pp, pp=pg.tp, dp=pg.dp)
    with trace_global_reads(mine=pg) as trace:
        parallel_state.is_initialized()
        with published(other):
            parallel_state.get_tensor_model_parallel_rank()
        with pytest.raises(AssertionError):
            parallel_state.get_tensor_model_parallel_group()
    assert counts(trace) == {
        ("is_initialized", "nothing: not initialised"): 1,
        ("get_tensor_model_parallel_rank", "other globals"): 1,
        ("get_tensor_model_parallel_group", "nothing: not initialised"): 1,
    }


def test_table_and_json(pg):
    with published(pg), trace_global_reads(mine=pg) as trace:
        _ = bound_early(), bound_early()  # one line is one place
        read_private()
    plain = json.loads(trace.to_json())
    assert [read["getter"] for read in plain] == [read.getter for read in trace.reads]
    assert plain[0]["count"] + plain[1]["count"] == 3
    shown = io.StringIO()
    Console(file=shown, width=200).print(trace.table())
    lines = shown.getvalue().replace("│", " ").splitlines()
    first, second = [line.split() for line in lines if f"{__name__}:" in line]
    assert first[2:] == ["get_tensor_model_parallel_rank", 'pg.rank("tp")', "mine", "2"]
    assert second[1:] == ["read_private", "_TENSOR_MODEL_PARALLEL_GROUP", "pg.tp", "mine", "1"]


# -- what to write instead -------------------------------------------------------------------


def every_call(getter):
    """Yield every combination of the getter's arguments that makes a difference."""
    parameters = dict(inspect.signature(getter).parameters)
    parameters.pop("check_initialized", None)
    values = [
        {"group_size": (2, 4), "vp_stage": (0, 1)}.get(name, (False, True)) for name in parameters
    ]
    for chosen in itertools.product(*values):
        yield dict(zip(parameters, chosen, strict=True))


def test_every_getter_and_every_private_global_has_a_replacement():
    """test_shim.py compares their answers."""
    for name in PRIVATE:
        assert replacement(name, {}) != NOTHING_KNOWN, name
    for name, getter in GETTERS.items():
        for arguments in every_call(getter):
            assert replacement(name, arguments).write, name
        kinds = {p.kind for p in inspect.signature(getter).parameters.values()}
        assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}  # kinds that the hook handles
    assert replacement("get_no_such_thing", {}) == replacement("_NO_SUCH", {}) == NOTHING_KNOWN


def test_a_trace_prints_the_places():
    with fake_collection(tp=2) as pg, published(pg), trace_global_reads() as trace:
        for _ in range(3):
            parallel_state.get_tensor_model_parallel_rank()
    assert repr(trace) == "<Trace: 3 reads from 1 places>"
    assert re.fullmatch(
        r"<Trace: .*>\n  test_trace:\d+ \(test_a_trace_prints_the_places\) reads "
        r'get_tensor_model_parallel_rank, 3 times: write pg\.rank\("tp"\)',
        str(trace),
    )
