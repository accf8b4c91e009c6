"""The shim gives the answer of Megatron's getter, or its error.

The tests compare every getter of the installed Megatron-core, with every combination of its
arguments, with the codemod's replacement on ``resolve(None)``. They cover uninitialised globals, an
offline tool that has set ranks and sizes, a replaced getter, and a stub of the module.
The getters are found by introspection, so that no new one is forgotten. These tests run on
Megatron-core 0.12 as well: see test_old_core.py.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import pytest
from equivalence import BOUND, Question, questions
from megatron import core
from megatron.core import parallel_state
from recording import READERS, initialised_megatron, recorded_megatron, restored_parallel_state

import megapg
from megapg import groups_of
from megapg.errors import (
    GlobalGroupsWarning,
    GlobalReadError,
    MissingGlobalGroupError,
    NoCollectionError,
    NoGlobalGroupsError,
    UnknownStageError,
)
from megapg.layout import FIELDS
from megapg.layout.fields import TABLE
from megapg.megatron import forbid_global_reads, getters, globals_policy, trace_global_reads
from megapg.megatron.core import installed_version
from megapg.megatron.reading.resolve import resolve
from megapg.megatron.tables import GETTERS, OLDEST_CORE
from megapg.megatron.watching.advice import replacement
from megapg.testing import fake_collection

pytestmark = pytest.mark.contract
OLD = installed_version()[:2] < OLDEST_CORE

SETTERS = [name for name in vars(parallel_state) if re.fullmatch(r"set_\w+_(rank|size)", name)]

UNSERVED = {
    "get_nccl_options": "reads a file's contents, not the state",
    "get_virtual_pipeline_model_parallel_rank": "the schedule's: the caller passes vp_stage",
    "get_global_symmetric_memory_buffer": "0.16's only, of CUDA",
    "get_moe_layer_wise_logging_tracker": "0.12's only, and no group's",
}


@pytest.fixture(autouse=True)
def _silent():
    with globals_policy("silent"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.fixture(scope="module")
def asking():
    return served()


@functools.cache
def served() -> list[Question]:
    """Return every call of a getter with its replacement."""
    return [question for question in questions() if question.name in READERS]


def test_every_getter_is_served_or_has_a_reason(asking):
    names = {question.name for question in asking}
    assert set(READERS) - names == set(UNSERVED) & set(READERS)
    fields = {*FIELDS, *(name for name in GETTERS if name.startswith("gloo."))}
    assert set(GETTERS) == fields - {name for name, row in TABLE.items() if not row.getter}
    asked = {name for each in GETTERS.values() for name in (each.group, each.rank, each.size)}
    assert asked & set(READERS) - names == set()


# -- the comparison --------------------------------------------------------------------------------


def outcome(ask: Callable[[], object]) -> object:
    """Return the answer, or the type of the error."""
    try:
        return ask()
    except Exception as error:
        return type(error)


def evaluated(code: object, pg: object = None) -> object:
    scope = {"parallel_state": parallel_state, "getters": getters, "pg": pg, **BOUND}
    return outcome(lambda: eval(code, scope))


def same(theirs: object, ours: object) -> bool:
    """True if ours can replace theirs: the same group, an equal number, a subclass of the error."""
    if isinstance(theirs, type) and issubclass(theirs, Exception):
        return isinstance(ours, type) and issubclass(ours, theirs)
    if isinstance(theirs, list | tuple):
        return (
            type(theirs) is type(ours) and len(theirs) == len(ours) and all(map(same, theirs, ours))
        )
    if isinstance(theirs, bool | int | str | None):
        return type(theirs) is type(ours) and theirs == ours
    return theirs is ours


def differences(asking: list[Question], *, least: int) -> list[str]:
    """List where shim and getter differ; at least ``least`` getters must have answered."""
    pg, found, answered = resolve(None), [], set()
    for question in asking:
        theirs, ours = evaluated(question.theirs), evaluated(question.ours, pg)
        if not same(theirs, ours):
            written = question.written.expression
            found.append(f"{question.text} is {theirs!r}, {written} is {ours!r}")
        if not isinstance(theirs, type):
            answered.add(question.name)
    assert len(answered) >= least, sorted(answered)
    return found


# -- the states ------------------------------------------------------------------------------------


def test_nothing_is_initialised(asking):
    with restored_parallel_state():
        assert differences(asking, least=20) == []
    # The uninitialised module, now with a torch.distributed, gives no zeros.
    with recorded_megatron(1, 4):
        assert differences(asking, least=6) == []


def test_on_a_rank_that_is_in_no_embedding_group(asking):
    """Existing code has ``except AssertionError`` around these getters."""
    with initialised_megatron(2, 8, 1, 4):
        assert differences(asking, least=40) == []


def test_in_an_offline_tool_that_sets_ranks_and_sizes(asking):
    numbers = {name: 2 + place for place, name in enumerate(SETTERS)}
    some = [name for name in SETTERS if name.startswith(("set_tensor", "set_pipeline"))]
    assert len(some) >= 4
    for chosen in (SETTERS, some, *([name] for name in SETTERS)):
        with restored_parallel_state():
            for name in chosen:
                getattr(parallel_state, name)(numbers[name])
            assert differences(asking, least=20) == [], chosen
    with restored_parallel_state():  # converters of experts rely on it
        parallel_state.set_tensor_model_parallel_rank(3)
        parallel_state.set_tensor_model_parallel_world_size(8)
        pg = resolve(None)
        assert (pg.rank("expt_tp"), pg.size("expt_tp")) == (3, 8)
        assert (pg.rank("dp"), pg.size("cp"), pg.rank("ep"), pg.size("expt_dp")) == (0,) * 4


# -- replaced getters ------------------------------------------------------------------------------


def answers_of(name: str) -> list[object]:
    """Return answers of a replaced getter that no real getter gives."""
    if name.startswith(("is_", "has_", "model_parallel_is")):
        return [True, False]
    if name.endswith(("_rank", "_world_size", "_start")):
        return [41, 0]
    if name.endswith(("_groups", "_global_ranks")) and "hybrid" not in name:
        return [[5, 7]]
    return [types.SimpleNamespace(name=name)]


def plain_function(name: str, answer: object, calls: list[object]) -> types.FunctionType:
    """Make a function with the getter's signature that records its arguments."""
    parameters = inspect.signature(READERS[name]).parameters
    source = f"def {name}({', '.join(map(str, parameters.values()))}):\n    calls.append(locals())"
    scope = {"calls": calls}
    exec(f"{source}\n    return answer[0]\n", scope | {"answer": [answer]}, made := {})
    return made[name]


def arguments_of(question: Question) -> dict[str, object]:
    """Return the arguments that the real getter gets, with defaults."""
    calls: list[dict[str, object]] = []
    getter = plain_function(question.name, None, calls)
    scope = {"parallel_state": types.SimpleNamespace(**{question.name: getter}), **BOUND}
    eval(question.theirs, scope)
    return calls[0]


def telling(arguments: Mapping[str, object], question: Question) -> Mapping[str, object]:
    """Return the arguments that choose the answer."""
    passed = dict(arguments)
    passed.pop("check_initialized", None)
    if question.written.needs_getters:  # these refuse a call in which it matters
        passed.pop("with_gtp_remat", None)
    if not passed.get("with_context_parallel") or passed.get("partial_data_parallel"):
        passed.pop("independent_all_gather", None)  # not used in this case
    if passed.get("ignore_virtual"):
        passed.pop("vp_stage", None)
    return passed


@pytest.mark.parametrize("is_so", [False, True], ids=["nothing", "initialised"])
def test_a_getter_that_is_replaced_is_heard(asking, is_so):
    replaced = set()
    with initialised_megatron(3, 8, 2) if is_so else restored_parallel_state():
        for name, group in itertools.groupby(
            sorted(asking, key=lambda question: question.name), lambda question: question.name
        ):
            some = list(group)
            for answer in answers_of(name):
                calls: list[dict[str, object]] = []
                function = plain_function(name, answer, calls)
                with mock.patch.object(parallel_state, name, function):
                    pg = resolve(None)
                    for question in some:
                        calls.clear()
                        assert same(answer, evaluated(question.ours, pg)), question
                        assert telling(calls[-1], question) == telling(
                            arguments_of(question), question
                        ), question
                kinds = (
                    mock.Mock(return_value=answer),
                    mock.create_autospec(READERS[name], return_value=answer),
                )
                for kind in kinds:
                    with mock.patch.object(parallel_state, name, kind):
                        for question in some:
                            ours = evaluated(question.ours, resolve(None))
                            assert same(answer, ours), question
            replaced.add(name)
    assert replaced == set(READERS) - set(UNSERVED)


def stubs(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    """Yield the places where tests replace parallel_state by a module."""
    spot = "megatron.core.parallel_state"
    yield "in sys.modules", mock.patch.dict(sys.modules, {spot: module})
    yield "as mpu", mock.patch.dict(sys.modules, {"megatron.core.mpu": module})
    yield "in the package", mock.patch.object(core, "parallel_state", module)
    yield "in the package, as mpu", mock.patch.object(core, "mpu", module)
    fake = types.ModuleType("megatron.core")
    fake.mpu = module
    yield "all of Megatron-core", mock.patch.dict(sys.modules, {"megatron.core": fake})
    gone = {name: each for name, each in sys.modules.items() if name != spot}
    gone |= {"megatron": types.ModuleType("megatron"), "megatron.core": fake}
    yield "without Megatron-core", mock.patch.dict(sys.modules, gone, clear=True)


def test_a_stub_of_the_module_is_asked(asking):
    module = types.ModuleType("stub")
    answers = {name: answers_of(name)[0] for name in READERS}
    for name, answer in answers.items():
        vars(module)[name] = plain_function(name, answer, [])
    for where, put in stubs(module):
        with put:
            for question in asking:
                ours = evaluated(question.ours, resolve(None))
                assert same(answers[question.name], ours), (where, question)
    assert outcome(lambda: resolve(None).rank("tp")) is NoGlobalGroupsError


def test_a_stub_may_have_next_to_nothing():
    module = types.SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: 1,
        get_data_parallel_rank=lambda: 2,
        get_data_parallel_world_size=lambda: 4,
        get_tensor_model_parallel_group=lambda: None,
    )
    for where, put in stubs(module):
        with put:
            pg = resolve(None)
            assert (pg.rank("tp"), pg.rank("dp"), pg.size("dp")) == (1, 2, 4), where
            assert getters.data_rank(pg) == getters.data_rank(groups_of(None)) == 2, where
            assert pg.tp is None, where
            with pytest.raises(AttributeError):  # raised by the stub itself
                _ = pg.pp
            if where != "without Megatron-core":  # the real module answers what the stub lacks
                assert pg.rank("cp") == 0, where
                continue
            with pytest.raises(AttributeError):
                pg.rank("cp")
    with mock.patch.dict(sys.modules, {"megatron.core.parallel_state": mock.MagicMock()}) as _:
        stub = sys.modules["megatron.core.parallel_state"]
        assert resolve(None).rank("dp") is stub.get_data_parallel_rank.return_value
        stub.get_data_parallel_rank.assert_called_once_with()


# -- warnings and errors ---------------------------------------------------------------------------


def my_rank(pg_collection=None):
    return resolve(pg_collection).rank("tp")


@pytest.mark.parametrize("make", [lambda: resolve(None), lambda: groups_of(None)])
def test_what_answers_all_the_same_is_said_when_it_does(make):
    """A getter that a test has replaced answers, so the policy applies."""
    patched = mock.patch.object(parallel_state, "get_data_parallel_rank", return_value=3)
    with globals_policy("warn"), warnings.catch_warnings():
        warnings.simplefilter("error")
        pg = make()
        assert pg.rank("dp") == 0  # no getter answers: the value without ranks
        with patched, pytest.raises(GlobalGroupsWarning):
            pg.rank("dp")
    with globals_policy("error"), patched, pytest.raises(NoCollectionError, match="may not serve"):
        make().rank("dp")


def test_a_question_of_the_shim_is_one_read_by_who_asks():
    def mine(pg):
        return pg.rank("dp_cp"), pg.tp, getters.pipeline_next_rank(pg), getters.all_ranks(pg)

    with initialised_megatron(3, 8, 2, 2):
        pg = resolve(None)
        with trace_global_reads() as trace:
            mine(pg)
            mine(groups_of(None))
        reads = [read for read in trace.reads if read.getter != "resolve"]
        assert {(read.getter, read.module, read.count) for read in reads} == {
            (name, __name__, 2)
            for name in (
                "get_data_parallel_rank",
                "get_tensor_model_parallel_group",
                "get_pipeline_model_parallel_next_rank",
                "get_all_ranks",
            )
        }
        assert {read.function.rpartition(".")[2] for read in reads} == {"mine"}
        with trace_global_reads() as direct:
            parallel_state.get_tensor_model_parallel_group()
        (theirs,) = direct.reads
        (ours,) = [read for read in reads if read.getter == theirs.getter]
        assert (ours.field, ours.replacement) == (theirs.field, theirs.replacement)
        with forbid_global_reads(), pytest.raises(GlobalReadError, match=r"mine reads get_data_p"):
            mine(pg)
        with forbid_global_reads(allow=[__name__]):
            assert mine(pg) == mine(pg)
        # A test's replacement reads no globals, and a direct call of it is not reported either.
        with (
            mock.patch.object(parallel_state, "get_tensor_model_parallel_rank", return_value=5),
            forbid_global_reads(),
        ):
            assert parallel_state.get_tensor_model_parallel_rank() == pg.rank("tp") == 5


@pytest.mark.skipif(OLD, reason="this core can't be injected")
def test_what_is_published_answers(asking):
    gloo = [name.removeprefix("gloo.") for name in GETTERS if name.startswith("gloo.")]
    with fake_collection(tp=2, pp=2, ep=2, world_size=8, rank=5, gloo=gloo) as pg:
        with megapg.published(pg):
            shim = resolve(None)
            assert differences(asking, least=40) == []
            held = {f: g for f, g in vars(shim).items() if f in GETTERS}
            asked = [f for f in held if GETTERS[f].group in READERS]
            assert len(asked) > 20
            assert {f: held[f] for f in asked} == {f: getattr(pg, f) for f in asked}
        assert not hasattr(shim, "tp")


@pytest.mark.skipif(OLD, reason="this core can't be injected")
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "cp": 2, "ep": 2, "world_size": 16, "rank": 9, "hybrid_cp": True},
        {"tp": 2, "pp": 4, "vpp": 2, "expt_tp": 1, "ep": 2, "world_size": 16, "rank": 15},
        {"cp": 4, "hierarchical_cp": (2, 2), "world_size": 8, "rank": 3},
        {"tp": 2, "optimizer_instances": 2, "world_size": 16, "rank": 10},
    ],
)
def test_what_a_trace_advises_gives_what_the_read_gave(asking, sizes):
    gloo = [name.removeprefix("gloo.") for name in GETTERS if name.startswith("gloo.")]
    with fake_collection(**sizes, gloo=gloo) as pg, megapg.published(pg):
        reads = [(q.name, arguments_of(q), evaluated(q.theirs)) for q in asking]
        reads += [(n, {}, v) for n, v in vars(parallel_state).items() if re.match(r"_[A-Z]", n)]
        compared = set()
        for name, arguments, theirs in reads:
            if isinstance(theirs, dict):  # the hybrid groups by size
                theirs = theirs.get(2)
            if theirs is None or isinstance(theirs, type) or "_PARALLEL_RANK" in name:
                continue  # there is no answer; or a rank that only set_*() sets
            write = replacement(name, arguments).write
            ours = eval(write, {"pg": pg, "getters": getters, "size": 2, **arguments})
            assert same(theirs, list(ours) if isinstance(theirs, list) else ours), (name, write)
            compared.add(name)
    assert len(compared) > 60


# -- what does not change --------------------------------------------------------------------------


def test_a_partial_stand_in_hides_nothing_that_it_does_not_have():
    part = types.ModuleType("my_mpu")
    part.get_data_parallel_rank = lambda **_: 6
    with initialised_megatron(3, 8, 2, 2), mock.patch.object(core, "mpu", part):
        parallel_state.set_tensor_model_parallel_rank(5)
        assert (resolve(None).rank("tp"), resolve(None).rank("dp")) == (5, 6)
        assert resolve(None).tp is parallel_state.get_tensor_model_parallel_group()
        assert getters.is_initialized(None)


def test_to_look_at_it_never_fails():
    broken = mock.Mock(side_effect=NotImplementedError("a stub's"))
    with initialised_megatron(3, 8, 2, 2):
        pg = resolve(None)
        with mock.patch.object(parallel_state, "get_context_parallel_group", broken):
            assert "tp, pp" in repr(pg)
            assert " cp" not in repr(pg)
            assert pg.require("tp", "dp") is pg
            for ask in (lambda: pg.require("tp", "cp"), lambda: vars(pg), lambda: pg.cp):
                with pytest.raises(NotImplementedError):
                    ask()


def test_each_field_is_asked_once_for_a_comparison():
    with initialised_megatron(3, 8, 2, 2):
        pg = resolve(None)
        for ask in (lambda: hash(pg), pg.describe):
            with mock.patch.object(
                parallel_state,
                "get_expert_model_parallel_group",
                wraps=parallel_state.get_expert_model_parallel_group,
            ) as asked:
                ask()
            assert asked.call_count <= 2, ask  # describe() reads the ranks as well


@pytest.mark.parametrize("answer", [3, 0])
def test_what_somebody_has_put_there_serves_whatever_it_answers(answer):
    """If the answer mattered, rank 0 would continue while other ranks are refused."""
    put = [
        ("get_data_parallel_rank", lambda pg: pg.rank("dp"), answer),
        ("is_pipeline_first_stage", getters.is_pipeline_first_stage, bool(answer)),
        ("get_context_parallel_global_ranks", lambda pg: pg.ranks("cp"), [answer][:answer]),
    ]
    with restored_parallel_state(), globals_policy("error"):
        for name, ask, value in put:
            for kind in (lambda *_, value=value, **__: value, mock.Mock(return_value=value)):
                pg = resolve(None)
                with (
                    mock.patch.object(parallel_state, name, kind),
                    pytest.raises(NoCollectionError),
                ):
                    ask(pg)
            assert resolve(None).rank("dp") == 0  # not replaced
        ranks = [
            name for name in SETTERS if name.endswith("parallel_rank") and "virtual" not in name
        ]
        assert len(ranks) >= 5
        for name in ranks:
            field = {"expert_model": "ep", "expert_tensor": "expt_tp", "data": "dp"} | {
                "tensor_model": "tp",
                "pipeline_model": "pp",
            }
            pg = resolve(None)
            getattr(parallel_state, name)(answer)
            with pytest.raises(NoCollectionError):
                pg.rank(field[name.removeprefix("set_").removesuffix("_parallel_rank")])
            getattr(parallel_state, name)(None)


@pytest.mark.skipif(installed_version()[1] < 13, reason="the schedule's chunk is in the globals")
def test_a_stage_that_nobody_names_is_said_to_be_that():
    asking = (
        getters.is_pipeline_first_stage,
        getters.is_pipeline_last_stage,
        getters.is_rank_in_embedding_group,
    )
    with initialised_megatron(0, 8, 2, 4, virtual_pipeline_model_parallel_size=2):
        for ask in asking:
            with pytest.raises(UnknownStageError, match="pass the one that is meant"):
                ask(resolve(None), ignore_virtual=False)
            assert ask(resolve(None), ignore_virtual=False, vp_stage=0) is not None
    with restored_parallel_state():
        parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
        asks_torch_first = installed_version() < (0, 14, 0)
        with pytest.raises(ValueError if asks_torch_first else MissingGlobalGroupError):
            getters.is_pipeline_first_stage(resolve(None), ignore_virtual=False, vp_stage=0)


def test_what_goes_by_keyword_on_a_collection_does_on_the_globals():
    with restored_parallel_state():
        for wrong in (getters.data_rank, getters.is_pipeline_first_stage, getters.all_ranks):
            with pytest.raises(TypeError):
                wrong(resolve(None), True)
        assert getters.data_rank(resolve(None), with_context_parallel=True) == 0
