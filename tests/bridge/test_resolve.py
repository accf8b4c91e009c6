"""Tests of ``resolve``: passed groups, else the globals with a warning, else an error.

These tests run on Megatron-core 0.12 as well: see test_old_core.py.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from recording import initialised_megatron, recorded_megatron, restored_parallel_state

import megapg
from megapg import ProcessGroupCollection
from megapg.errors import (
    ForeignGroupError,
    GlobalGroupsWarning,
    MissingGroupError,
    NoCollectionError,
    NoGlobalGroupsError,
    StaleGroupError,
    UnknownFieldError,
    UnsupportedOptionError,
)
from megapg.megatron import getters
from megapg.megatron.core import installed_version
from megapg.megatron.reading.global_groups import GlobalGroups
from megapg.megatron.reading.resolve import POLICY_VARIABLE, globals_policy, resolve, resolves
from megapg.megatron.tables import OLDEST_CORE
from megapg.testing import fake_collection, run_distributed

OLD = installed_version()[:2] < OLDEST_CORE
pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def _no_policy(monkeypatch):
    monkeypatch.delenv(POLICY_VARIABLE, raising=False)


@pytest.fixture
def pg():
    with fake_collection(tp=2, pp=2, world_size=8, rank=3) as collection:
        yield collection


@pytest.fixture
def initialised():
    with initialised_megatron(3, 8, 2, 2):
        yield


def build(pg_collection=None):
    return resolve(pg_collection, needs=("tp", "pp"))


class Layer(torch.nn.Module):
    def forward(self, pg_collection=None):
        return resolve(pg_collection, needs=("tp",))


@resolves(needs=("tp",))
def decorated(scale: int, *, pg_collection: ProcessGroupCollection) -> tuple[int, object]:
    """Decorated."""
    return scale * pg_collection.size("tp"), pg_collection


def here():
    """Return the caller's line number."""
    return sys._getframe(1).f_lineno


# -- explicit --------------------------------------------------------------------------------------


def test_what_was_passed_is_what_comes_back(pg):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(pg) is pg
        assert Layer()(pg) is pg
        assert resolve(pg) is pg
        assert decorated(3, pg_collection=pg) == (6, pg)


def test_an_explicit_collection_is_checked(pg):
    part = ProcessGroupCollection.from_groups(dp=pg.dp)
    with pytest.raises(MissingGroupError, match=r"^build: .*no tp, pp; it has dp\."):
        build(part)
    with pytest.raises(MissingGroupError, match=r"^Layer.forward: .*no tp;"):
        Layer()(part)
    with pytest.raises(MissingGroupError, match=r"^decorated: .*no tp;"):
        decorated(1, pg_collection=part)
    with pytest.raises(MissingGroupError, match=r"^my step: "):
        resolve(part, needs=("tp",), owner="my step")
    with pytest.raises(MissingGroupError, match=r'gloo=\("dp",\)'):
        resolve(pg, needs=("gloo.dp",))
    for needs in (("tpp",), "tp"):
        with pytest.raises(UnknownFieldError, match=r"is no field|give the fields in a tuple"):
            resolve(pg, needs=needs)


def test_groups_must_be_alive():
    with fake_collection(tp=2) as pg:
        borrowed = ProcessGroupCollection.from_groups(tp=pg.tp, pp=pg.pp)
        assert build(borrowed) is borrowed
    for needs in ((), ("tp", "pp")):
        with pytest.raises(StaleGroupError, match=r"^me: .*fake_collection\(\).* were closed at"):
            resolve(pg, needs=needs, owner="me")
    with pytest.raises(StaleGroupError, match=r"^build: "):
        build(pg)
    # torch has forgotten the borrowed groups, which have no session.
    with pytest.raises(ForeignGroupError, match=r"^build: tp: .*destroyed"):
        build(borrowed)
    with fake_collection(tp=2), pytest.raises(ForeignGroupError, match="destroyed, or WORLD"):
        build(borrowed)


def test_groups_of_the_parent_are_refused_after_a_fork(pg):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            build(pg)
            os.write(writer, b"taken")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        assert re.match(
            rf"ForeignGroupError: build: .*process {os.getpid()}, .*process {child}, forked",
            said.read(),
        )
    assert build(pg) is pg


@pytest.mark.skipif(OLD, reason="this core has no collection of its own")
def test_the_cores_own_collection_is_taken(pg):
    core = megapg.to_megatron(pg)
    taken = build(core)
    assert isinstance(taken, ProcessGroupCollection)
    assert all(getattr(taken, field) is getattr(pg, field) for field in ("tp", "pp", "dp", "embd"))
    del core.pp
    with pytest.raises(MissingGroupError, match=r"^build: .*no pp;"):
        build(core)


def test_anything_else_is_named(pg):
    for wrong, named in ((pg.tp, "ProcessGroup"), ({"tp": pg.tp}, "builtins.dict"), (2, "2")):
        with pytest.raises(ForeignGroupError, match=rf"^build: pg_collection is .*{named}"):
            build(wrong)


# -- the globals -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("initialised")
def test_the_globals_serve_with_one_warning_for_each_call_site():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            view, first = build(), here()
            view.rank("tp")
        build().tp, build().size("pp")
        second = here() - 1
        _, third = Layer()().tp, here()
        build()  # the value is not used
        _, fourth = decorated(2), here()
    caught = [each for each in caught if each.category is GlobalGroupsWarning]
    # Python's registry counts a file and a line, so two calls on one line are one place.
    assert [(each.filename, each.lineno) for each in caught] == [
        (__file__, line) for line in (first, second, third, fourth)
    ]
    assert re.match(
        r"build needs the process groups tp, pp .*build\(\.\.\., pg_coll", str(caught[0].message)
    )
    assert str(caught[2].message).startswith("Layer.forward needs the process groups tp ")
    assert isinstance(view, GlobalGroups)
    assert view.tp is parallel_state.get_tensor_model_parallel_group()
    assert view.rank("dp") == parallel_state.get_data_parallel_rank()


@pytest.mark.usefixtures("initialised")
def test_the_advice_is_one_that_can_be_taken():
    def outer(*, pg_collection=None):
        def inner():
            return resolve(pg_collection)

        return inner()

    def without():
        return resolve(None)

    here_ = "test_the_advice_is_one_that_can_be_taken.<locals>"
    with pytest.warns(GlobalGroupsWarning, match=r"Write .*locals>\.outer\(\.\.\., pg_coll"):
        outer().rank("tp")
    expected = f"Give {here_}.without a keyword-only parameter pg_collection, and pass pg there"
    with pytest.warns(GlobalGroupsWarning, match=re.escape(expected)):
        without().rank("tp")
    # If Megatron-core calls a user's function, the warning must not name Megatron's line.
    calling = {"__name__": "megatron.core.datasets.builder"}
    exec("def call(function):\n    return function()", calling)
    with pytest.warns(GlobalGroupsWarning, match=r"hand build over.*partial\(build, pg_coll"):
        calling["call"](build).rank("tp")


def test_nothing_is_read_before_it_is_asked_for():
    """During an initialisation, the groups that exist already can be read."""
    with recorded_megatron(0, 2), globals_policy("silent"):
        parallel_state.set_tensor_model_parallel_rank(1)
        view = resolve(None, needs=("tp", "dp", "pp"))
        assert view.rank("tp") == 1
        assert resolve(view, needs=("dp",)) is view
        with pytest.raises(MissingGroupError, match=r"get_data_parallel_group\(\)"):
            _ = view.dp
        parallel_state.initialize_model_parallel(1, 1)
        assert view.dp is parallel_state.get_data_parallel_group()


def test_with_neither_the_error_says_what_to_write():
    def nested(pg_collection=None):
        return resolve(pg_collection, needs=("ep", "tp", "mp")).mp

    line = here() + 2
    with pytest.raises(NoCollectionError) as caught:
        nested()
    owner = "test_with_neither_the_error_says_what_to_write.<locals>.nested"
    for part in (
        f"{owner} needs the process groups ep, tp, mp",
        f"{__file__}:{line}",
        "parallel_state is not initialised",
        f"{owner}(..., pg_collection=session.groups)",
        "megapg.session(tp=..., ep=...)",
    ):
        assert part in str(caught.value)
    with pytest.raises(NoCollectionError, match=r"megapg\.session\(tp=\.\.\., pp=\.\.\.\)"):
        _ = resolve(None).tp
    with recorded_megatron(3, 8):  # the state that destroy_model_parallel() leaves does not count
        parallel_state.initialize_model_parallel(2, 2)
        parallel_state.destroy_model_parallel()
        with pytest.raises(NoCollectionError, match="not initialised"):
            _ = build().dp
    with pytest.raises(UnknownFieldError, match="'dpp' is no field"):
        resolve(None, needs=("dpp",))


def test_a_handler_around_a_getter_works_around_what_replaces_it(pg):
    """Megatron's getters assert, so errors about the globals are AssertionErrors as well."""

    def before():
        try:
            return parallel_state.get_model_parallel_group()
        except AssertionError:
            return "none"

    def after(pg_collection=None):
        try:
            return resolve(pg_collection).mp
        except AssertionError:
            return "none"

    part = ProcessGroupCollection.from_groups(dp=pg.dp)
    with globals_policy("silent"):
        assert before() == after() == "none"
        with restored_parallel_state():
            parallel_state._DATA_PARALLEL_GROUP = pg.dp  # initialised, but without that group
            assert before() == after() == "none"
            parallel_state._MODEL_PARALLEL_GROUP = pg.mp
            assert before() is after() is pg.mp
            # Such a handler catches no error about passed groups or about a forbidden read.
            with pytest.raises(MissingGroupError):
                after(part)
            with globals_policy("error"), pytest.raises(NoCollectionError, match="may not serve"):
                after()
        with pytest.raises(NoGlobalGroupsError, match="not initialised either"):
            _ = resolve(None).mp


def test_asking_does_not_import_megatron():
    """The import takes seconds. It is only needed for answers before an initialisation."""
    with mock.patch.dict(sys.modules):
        for name in [each for each in sys.modules if each.partition(".")[0] == "megatron"]:
            del sys.modules[name]
        view = resolve(None, needs=("tp",))
        assert repr(view) == "<GlobalGroups: nothing of megatron.core.parallel_state>"
        assert not getters.is_initialized(view)
        assert not getters.is_initialized(None)
        assert not [each for each in sys.modules if each.partition(".")[0] == "megatron"]
        target = f"{GlobalGroups.__module__}.parallel_state_module"
        with mock.patch(target, return_value=parallel_state) as imported:
            assert view.rank("dp") == 0
            with pytest.raises(NoGlobalGroupsError):
                _ = view.tp
        assert imported.called


# -- policy ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("initialised")
def test_the_policy_decides_and_is_put_back(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with globals_policy("silent"):
            assert build().rank("tp") == 1
        with pytest.raises(GlobalGroupsWarning):
            build().rank("tp")
        with pytest.raises(GlobalGroupsWarning), globals_policy("warn"):
            build().rank("tp")
    with globals_policy("error"):
        view = build()  # the groups may not be needed
        with pytest.raises(NoCollectionError) as caught:
            view.rank("tp")
    for part in (
        "build needs",
        f"{__file__}:",
        "MEGAPG_GLOBALS=error",
        "build(..., pg_collection=pg)",
    ):
        assert part in str(caught.value)
    assert POLICY_VARIABLE not in os.environ

    def fails():
        with globals_policy("error"):
            seen = []
            thread = threading.Thread(target=lambda: seen.append(os.environ[POLICY_VARIABLE]))
            thread.start()
            thread.join()
            assert seen == ["error"]
            raise KeyError("through")

    monkeypatch.setenv(POLICY_VARIABLE, "error")
    with globals_policy("silent"):
        with pytest.raises(KeyError, match="through"):
            fails()
        assert os.environ[POLICY_VARIABLE] == "silent"
        build()
    assert os.environ[POLICY_VARIABLE] == "error"
    with pytest.raises(NoCollectionError):
        decorated(1)


@pytest.mark.usefixtures("initialised")
def test_a_wrong_policy_is_named(monkeypatch):
    known = "'loud' .*warn, error, silent"
    with pytest.raises(UnsupportedOptionError, match=known), globals_policy("loud"):
        pass
    monkeypatch.setenv(POLICY_VARIABLE, "loud")
    with pytest.raises(UnsupportedOptionError, match=rf"{POLICY_VARIABLE}: {known}"):
        build()
    monkeypatch.setenv(POLICY_VARIABLE, "")  # CI files unset a variable like this
    with pytest.warns(GlobalGroupsWarning):
        build().rank("tp")


def test_the_policy_is_of_no_concern_to_an_explicit_collection(pg, monkeypatch):
    monkeypatch.setenv(POLICY_VARIABLE, "loud")
    assert build(pg) is pg


# -- the decorator ---------------------------------------------------------------------------------


def test_a_decorated_function_looks_as_before_and_can_be_a_method(pg):
    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Decorated."
    assert list(inspect.signature(decorated).parameters) == ["scale", "pg_collection"]

    class Model:
        @resolves(needs=("tp", "pp"))
        def __init__(self, *, pg_collection=None):
            self.pg_collection = pg_collection

    assert Model(pg_collection=pg).pg_collection is pg
    with pytest.raises(NoCollectionError, match=r"Model\.__init__ needs the process groups tp, pp"):
        _ = Model().pg_collection.tp


def test_a_function_without_the_keyword_is_refused():
    def positional(pg_collection=None): ...

    def none(): ...

    def collected(**pg_collection): ...

    for function in (positional, none, collected):
        with pytest.raises(TypeError, match=rf"{function.__name__}: .*\*, pg_collection"):
            resolves(needs=("tp",))(function)
    with pytest.raises(UnknownFieldError, match="'tpp' is no field"):
        resolves(needs=("tpp",))


# -- real ranks ------------------------------------------------------------------------------------


def _sum_ranks(pg_collection=None):
    pg = resolve(pg_collection, needs=("tp", "dp"))
    sums = []
    for field in ("tp", "dp"):
        tensor = torch.tensor([dist.get_rank()])
        dist.all_reduce(tensor, group=getattr(pg, field))
        sums.append(int(tensor))
    return sums


def _both_ways():
    with megapg.session(tp=2) as session:
        groups = session.groups
        explicit = _sum_ranks(groups)
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        with globals_policy("silent"):
            globals_ = _sum_ranks()
        parallel_state.destroy_model_parallel()
        with pytest.raises(NoCollectionError):
            _sum_ranks()
    with pytest.raises(StaleGroupError):
        _sum_ranks(groups)
    return explicit, globals_


@pytest.mark.smoke
def test_real_ranks_talk_on_what_was_resolved():
    expected = [[1, 0], [1, 1]]
    assert run_distributed(_both_ways, 2) == [(sums, sums) for sums in expected]


@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize(
    ("rank", "action", "seen"), [(0, "default", 1), (1, "default", 0), (1, "always", 1)]
)
def test_one_rank_of_a_node_prints_the_warning(monkeypatch, rank, action, seen):
    """A filter that a program set itself holds on every rank."""
    for name, value in {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        warnings.simplefilter(action)
        resolve(None, owner=f"{rank} {action}").rank("tp")
    assert [each.category for each in caught] == [GlobalGroupsWarning] * seen
