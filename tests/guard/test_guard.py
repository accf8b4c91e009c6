"""The guard starts and stops with a second layout, and its errors name both places."""

import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import captured
from recording import functions, restored_parallel_state

import megapg
from megapg.errors import ForeignGroupError, UnsupportedOptionError, WrongGroupError
from megapg.errors import WrongGroupWarning as Warned
from megapg.layout import ParallelLayout
from megapg.megatron import getters, groups_of, parallel_state, resolve, trace_global_reads
from megapg.megatron.reading.resolve import globals_policy
from megapg.megatron.watching.hook import active
from megapg.ownership.opening import fake_session
from megapg.testing import fake_collection, run_distributed

pytestmark = pytest.mark.contract

tp_size = parallel_state.get_tensor_model_parallel_world_size


@contextlib.contextmanager
def globals_with(**sizes):
    """Initialise the globals on the current WORLD, and undo it after the block."""
    with restored_parallel_state():
        arguments = {f"{axis}_model_parallel_size": size for axis, size in sizes.items()}
        parallel_state.initialize_model_parallel(**arguments, create_gloo_process_groups=False)
        yield
        parallel_state.destroy_model_parallel()


@pytest.fixture
def pg():
    with fake_collection(tp=2, world_size=8, rank=3) as collection:
        yield collection


def printed(code):
    """Run code in a new interpreter, and return what it prints."""
    ran = captured([sys.executable, "-W", "ignore", "-c", code], timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def codes():
    return {name: function.__code__ for name, function in functions().items()}


# -- when the guard runs ---------------------------------------------------------------------------


def test_one_layout_leaves_every_getter_alone():
    before, names = codes(), set(vars(parallel_state))
    with fake_collection(tp=2, world_size=8) as pg:
        assert active() is None
        getters_now = {n: c for n, c in codes().items() if n.startswith(("get_", "is_", "has_"))}
        assert all(code is before[name] for name, code in getters_now.items())
        with megapg.published(pg), globals_policy("silent"):
            assert active() is None
            assert tp_size() == 2
    assert codes() == before
    assert set(vars(parallel_state)) == names


def test_it_runs_from_the_second_layout_to_the_last_but_one(pg):
    before = codes()
    assert active() is None
    with globals_with(tensor=4):
        assert active() is not None
        with pytest.raises(WrongGroupError):
            tp_size()
    assert active() is None
    with globals_with(tensor=2):  # the same ranks
        assert active() is None
        assert tp_size() == 2
    assert codes() == before


def test_globals_that_came_before_the_session():
    with fake_session(ParallelLayout(world_size=8), 3) as world, restored_parallel_state():
        parallel_state.initialize_model_parallel(4, create_gloo_process_groups=False)
        assert active() is not None  # because of the world's own session
        with megapg.published(world.groups):
            assert tp_size() == 1
        with pytest.raises(WrongGroupError, match=r"set at .*test_guard\.py"):
            tp_size()


def test_only_fields_that_differ_are_checked(pg):
    with globals_with(tensor=2, pipeline=2):
        assert tp_size() == 2
        assert parallel_state.get_context_parallel_world_size() == 1
        with pytest.raises(WrongGroupError):
            parallel_state.get_pipeline_model_parallel_rank()


def test_a_session_that_closes_inside_published_leaves_nothing():
    before = codes()
    with restored_parallel_state():
        session = fake_session(ParallelLayout(world_size=8, tp=2), 3)
        with megapg.published(session.groups):
            session.close()
        assert codes() == before


def test_megatron_that_is_imported_after_the_session():
    code = (
        "import sys, megapg, torch.distributed as dist\n"
        "from megapg.ownership.opening import fake_session\n"
        "from megapg.layout import ParallelLayout\n"
        "from megapg.errors import WrongGroupError\n"
        "megapg.session\n"
        "session = fake_session(ParallelLayout(world_size=8, tp=2), 3)\n"
        "assert 'megatron.core.parallel_state' not in sys.modules\n"
        "from megatron.core import parallel_state\n"
        "import inspect\n"
        "assert 'def initialize_model_parallel' in inspect.getsource(parallel_state)\n"
        "parallel_state.initialize_model_parallel(1, create_gloo_process_groups=False)\n"
        "try:\n"
        "    parallel_state.get_tensor_model_parallel_rank()\n"
        "except WrongGroupError as error:\n"
        "    print(error)\n"
        "session.close()\n"
    )
    assert "set at <string>:11" in printed(code)


# -- reads by functions that were given groups -----------------------------------------------------


def reads():
    return tp_size()


def given(pg_collection):
    return reads()


def given_a_group(tp_group):
    return reads()


class Slots:
    __slots__ = ("mine", "unset")

    def __init__(self, mine):
        self.mine = mine

    def step(self):
        return reads()


class Kept:
    mine = None

    @classmethod
    def step(cls):
        return reads()


def with_a_model(model):
    return reads()


def wrapped(pg_collection):
    """Return a model inside a wrapper, as Megatron nests them."""
    model, wrapper = torch.nn.Module(), torch.nn.Module()
    model.pg_collection, wrapper.module = pg_collection, model
    return wrapper


class Holder:
    def __init__(self, **held):
        vars(self).update(held)

    def step(self):
        return reads()


def test_the_nearest_frame_decides(pg, monkeypatch):
    with globals_with(tensor=4):
        theirs = megapg.from_parallel_state()
        fine = [
            lambda: given(theirs),
            lambda: given_a_group(theirs.tp),
            lambda: Holder(pg_collection=theirs).step(),
            lambda: Holder(anything=theirs).step(),
            lambda: Holder(tp_group=theirs.tp).step(),
        ]
        for call in fine:
            assert call() == 4
        wrong = {
            "given ": lambda: given(pg),
            "pg_collection with tp = ranks (2, 3)": lambda: given(pg),
            "tp_group = ranks (2, 3)": lambda: given_a_group(pg.tp),
            "Holder.step": lambda: Holder(pg_collection=pg).step(),
            "self.anything with tp": lambda: Holder(anything=pg).step(),
            "self.tp_group = ranks": lambda: Holder(tp_group=pg.tp).step(),
            "self.mine with tp": lambda: Slots(pg).step(),
            "cls.mine with tp": lambda: Kept.step(),
            "model.pg_collection with tp": lambda: with_a_model(wrapped(pg)),
        }
        monkeypatch.setattr(Kept, "mine", pg)
        for text, call in wrong.items():
            with pytest.raises(WrongGroupError) as caught:
                call()
            assert text in str(caught.value)


def test_the_error_names_both_places_and_the_ways_out(pg):
    with globals_with(tensor=4), pytest.raises(WrongGroupError) as caught:
        given(pg)
    line = {name: f.__code__.co_firstlineno + 1 for name, f in globals().items() if name in NAMES}
    text = str(caught.value)
    for part in (
        f"{__file__}:{line['reads']}: reads asks parallel_state.{tp_size.__name__}(): ",
        "the globals answer ranks (0, 1, 2, 3), set at ",
        f"given ({__file__}:{line['given']}) was given pg_collection with tp = ranks (2, 3)",
        "Pass the collection",
        "megapg.published(pg)",
        "megapg.allow_global_reads()",
    ):
        assert part in text


NAMES = ("reads", "given")


def test_no_user_code_runs(pg):
    class Loud:
        def __getattribute__(self, name):
            raise AssertionError("user code ran")

        def __bool__(self):
            raise AssertionError("user code ran")

        __eq__ = __hash__ = __bool__

        def step(self):
            return reads()

    with globals_with(tensor=4), pytest.raises(WrongGroupError):
        Loud.step(Loud())


def test_the_block_is_nearer_than_the_frame_that_entered_it(pg):
    with globals_with(tensor=4), fake_other(pg) as mine:

        @contextlib.contextmanager
        def shown():
            with megapg.published(pg):
                yield

        def entered_here(other):
            with megapg.published(pg):
                return reads()

        def entered_by_a_helper(other):
            with shown():
                return reads()

        def entered_by_a_stack(other):
            with contextlib.ExitStack() as stack:
                stack.enter_context(megapg.published(pg))
                return reads()

        for call in (entered_here, entered_by_a_helper, entered_by_a_stack):
            assert call(mine) == 2
            with megapg.published(pg), pytest.raises(WrongGroupError):
                given(mine)


def test_a_frame_that_ended_is_not_taken_for_a_new_one(pg):
    def phase(stack, pg_collection, block):
        stack.enter_context(block)
        return reads()

    with globals_with(tensor=4), fake_other(pg) as mine, contextlib.ExitStack() as stack:
        assert phase(stack, mine, megapg.published(pg)) == 2
        with pytest.raises(WrongGroupError):
            phase(stack, mine, contextlib.nullcontext())


def test_none_stands_for_no_group_of_several_ranks(pg):
    def quiet(pg_collection):
        return parallel_state.get_tensor_model_parallel_group(check_initialized=False)

    with megapg.session(tp=4, name="second") as second, restored_parallel_state():
        for mine in (pg, second.groups):
            with pytest.raises(WrongGroupError, match=r"the globals answer None"):
                quiet(mine)
        one = megapg.ProcessGroupCollection.from_groups(tp=dist.new_group([3]))
        assert quiet(one) is None
        assert parallel_state.get_tensor_model_parallel_group(check_initialized=False) is None
        with pytest.raises(AssertionError, match="not initialized"):
            given(pg)  # the getter's own error


@contextlib.contextmanager
def fake_other(pg):
    """Yield a collection with other ranks on the same WORLD."""
    group = dist.new_group(list(range(8)))
    yield megapg.ProcessGroupCollection.from_groups(tp=group)


def test_a_shim_that_falls_back_is_a_read_of_its_caller(pg):
    def falls_back():
        return resolve(None).size("tp")

    def asks_a_model():
        return groups_of(torch.nn.Linear(1, 1), "tp").tp

    def mixes(pg_collection):
        return falls_back()

    with globals_with(tensor=4), globals_policy("silent"):
        for call in (falls_back, asks_a_model, lambda: mixes(pg)):
            with pytest.raises(WrongGroupError):
                call()


def test_private_variables_and_numbers(pg):
    with globals_with(tensor=4):
        with pytest.raises(WrongGroupError, match=r"asks parallel_state\._TENSOR"):
            _ = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        theirs = megapg.from_parallel_state()
        parallel_state.set_tensor_model_parallel_world_size(16)
        with pytest.raises(WrongGroupError, match="the globals answer size 16"):
            given(theirs)
        parallel_state.set_tensor_model_parallel_world_size(None)
        assert given(theirs) == 4


def test_what_names_no_group_is_not_checked(pg):
    with globals_with(tensor=4):
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None
        parallel_state.get_global_memory_buffer()
        assert parallel_state.model_parallel_is_initialized()
        with megapg.published(pg):
            assert getters.memory_buffer(pg) is parallel_state.get_global_memory_buffer()


def test_frames_keep_nothing_alive(pg):
    class Big:
        pass

    def phase(pg_collection):
        big = Big()
        known = weakref.ref(big)
        tp_size()
        del big
        return known() is None

    with globals_with(tensor=4):
        assert phase(megapg.from_parallel_state())


def test_functions_of_a_fork_that_can_not_be_wrapped_stay_as_they_are(pg, monkeypatch):
    source = (
        "def get_one(a=1, *, b=2): return a + b\n"
        "def get_two(*args, **kwargs): return len(args)\n"
        "def get_three(a, /, b=2): return a\n"
        "def set_four(a=1, *, b=2): return b\n"
        "get_five = lambda: 5\n"
    )
    forked = {"__name__": parallel_state.__name__}
    exec(source, forked)
    for name in ("get_one", "get_two", "get_three", "set_four", "get_five"):
        monkeypatch.setattr(parallel_state, name, forked[name], raising=False)
    with globals_with(tensor=4):
        assert active() is not None
        ps = parallel_state
        assert (ps.get_one(), ps.get_two(1), ps.get_three(3), ps.set_four(), ps.get_five()) == (
            *(3, 1, 3, 2, 5),
        )


def test_a_guard_that_is_loaded_late_looks_at_once():
    code = (
        "from megapg.ownership.opening import fake_session, session\n"
        "from megapg.layout import ParallelLayout\n"
        "from megatron.core import parallel_state\n"
        "first = fake_session(ParallelLayout(world_size=8, tp=2), 3)\n"
        "second = session(tp=4, name='second')\n"
        "assert '__megapg_guard__' not in vars(parallel_state)\n"
        "import megapg.megatron\n"
        "assert '__megapg_guard__' in vars(parallel_state)\n"
        "second.close()\n"
        "assert '__megapg_guard__' not in vars(parallel_state)\n"
        "first.close()\n"
    )
    printed(code)


def test_a_mode_that_is_misspelt_later_closes_nothing(pg, monkeypatch):
    with globals_with(tensor=4):
        second = megapg.session(tp=8, name="second")
        monkeypatch.setenv("MEGAPG_GUARD", "loud")
        second.close()
        with pytest.raises(WrongGroupError):
            given(pg)
        monkeypatch.delenv("MEGAPG_GUARD")


def test_a_trace_marks_each_kind_of_read_at_one_place(pg):
    with globals_with(tensor=4), megapg.guard("off"), trace_global_reads() as trace:
        given(megapg.from_parallel_state())
        given(pg)
    refused = [bool(read.refused) for read in trace.reads if read.getter == tp_size.__name__]
    assert sorted(refused) == [False, True]


def test_readers_in_other_threads_while_the_guard_comes_and_goes(pg):
    stop, failed = threading.Event(), []

    def read_on():
        while not stop.is_set():
            try:
                parallel_state.get_tensor_model_parallel_world_size()
            except Exception as error:
                failed.append(error)

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=read_on) for _ in range(2)]
    with megapg.published(pg):
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for _ in range(40):
                megapg.session(tp=4, name="second").close()
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            for thread in threads:
                thread.join()
    assert failed == []


# -- ways to allow reads and to set the mode -------------------------------------------------------


def test_the_globals_may_be_meant(pg):
    with globals_with(tensor=4):
        with megapg.allow_global_reads():
            assert reads() == 4
            with pytest.raises(WrongGroupError):  # the closer argument names the intended groups
                given(pg)
        with pytest.raises(WrongGroupError):
            reads()
        with megapg.allow_global_reads(), ThreadPoolExecutor() as pool:
            assert pool.submit(reads).result() == 4
            with pytest.raises(WrongGroupError):
                pool.submit(given, pg).result()


def test_the_modes(pg):
    with globals_with(tensor=4):
        with megapg.guard("off"):
            assert active() is None
            assert given(pg) == 4
            with trace_global_reads() as trace:
                given(pg)
            assert "was given pg_collection" in trace.reads[0].refused
            assert "refused by the guard" in rendered(trace)
        with megapg.guard("warn"), pytest.warns(Warned, match="was given pg_collection"):
            assert given(pg) == 4
        with trace_global_reads() as trace, pytest.raises(WrongGroupError):
            given(pg)
        assert trace.reads[0].refused
        with pytest.raises(UnsupportedOptionError, match="'of' is no mode"), megapg.guard("of"):
            pass


def test_an_unknown_mode_opens_no_session(monkeypatch):
    monkeypatch.setenv("MEGAPG_GUARD", "loud")
    with pytest.raises(UnsupportedOptionError, match="'loud'"):
        fake_session(ParallelLayout(world_size=8), 0)
    assert not dist.is_initialized()


def rendered(trace):
    from rich.console import Console

    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=300, file=nowhere)
        console.print(trace.table())
        return console.export_text()


def test_a_warning_comes_once_for_a_place(pg):
    with globals_with(tensor=4), megapg.guard("warn"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            given(pg)
    assert len([each for each in seen if each.category is Warned]) == 1


# -- after fork ------------------------------------------------------------------------------------


def in_a_child(check):
    """Fork, run ``check`` in the child, and return its exit code; 99 if it hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return 99


def forking():
    with megapg.session(tp=2) as session:
        pg = session.groups

        def refused():
            for use in (lambda: dist.all_reduce(torch.ones(1), group=pg.tp), lambda: pg.extras):
                with pytest.raises(ForeignGroupError, match="forked from it"):
                    use()
            assert (pg.size("tp"), pg.ranks("tp"), pg.describe()["tp"]) == (2, (0, 1), [0, 1])

        code = in_a_child(refused)
        total = torch.ones(1)
        dist.all_reduce(total, group=pg.tp)
        return code, total.item()


def test_a_forked_child_can_not_use_a_group_of_its_parent():
    assert run_distributed(forking, 2, deadline=60) == [(0, 2.0)] * 2


def test_the_modules_of_the_guard_are_those_that_the_package_lists():
    folder = Path(megapg.__file__).parent / "megatron" / "watching"
    text = (folder / "__init__.py").read_text()
    for name in ("alive", "changes", "stack", "contradiction", "guard"):
        assert f":mod:`{name}`" in text
        assert (folder / f"{name}.py").exists()
