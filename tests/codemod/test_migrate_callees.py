"""Functions that have a collection, or a model, and call what still asks the globals: the report
says so, with what to write; and those to which nobody passes a collection fall back.
"""

from __future__ import annotations

import json
from pathlib import Path

from migrate_cases import program_of
from trees import write
from typer.testing import CliRunner

from megapg.cli.app import app
from megapg.migrate.config import Config
from megapg.migrate.edit.write import write_files
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Callee, Migration

CALLEES = program_of("callees")
BY_AUTOGRAD = (
    "have Scale.forward take the group as its last argument, and keep it on ctx for backward, "
    "which returns one more None, also where it is called by hand; "
)
IN = "have it take pg_collection, hand it on to there, and pass it megapg.groups_of"
PASS_DP = 'pass it dp_group=megapg.groups_of(model, "dp").dp'
# Behind others, in an inherited constructor, instead of a group, and instead of a collection. Those
# who have the groups made, make the model, or have a collection that is None, have nothing to pass.
FOUND = [
    (
        *(15, "loss", "two", "tp", "pkg/lib.py:10"),
        f'{BY_AUTOGRAD}pass it from megapg.groups_of(model, "tp")',
    ),
    (20, "stages", "Last", "is_pipeline_first_stage", "pkg/lib.py:23", f"{IN}(model)"),
    (20, "stages", "Base", "is_pipeline_first_stage", "pkg/lib.py:23", f"{IN}(model)"),
    (
        *(24, "average", "averaged", "dp", "pkg/lib.py:36"),
        'pass it dp_group=megapg.groups_of(model, "dp").dp',
    ),
    (
        *(35, "hands_on", "Kept", "tp", "pkg/lib.py:52"),
        'pass it pg_collection=megapg.groups_of(model, "tp")',
    ),
    (
        *(51, "with_a_dictionary", "Kept", "tp", "pkg/lib.py:52"),
        'pass it pg_collection=megapg.groups_of(model, "tp")',
    ),
    # What is handed on as a value, bound, or called by a parameter.
    *(
        (line, function, "averaged", "dp", "pkg/lib.py:36", PASS_DP)
        for line, function in ((66, "hands_a_function_on"), (71, "binds"))
    ),
    (
        *(71, "binds", "Kept", "tp", "pkg/lib.py:52"),
        'pass it pg_collection=megapg.groups_of(model, "tp")',
    ),
    (77, "calls_what_it_is_passed", "averaged", "dp", "pkg/lib.py:36", PASS_DP),
    # What takes a collection is to be passed that, about whatever groups its caller asks.
    (
        *(95, "asks_about_others", "Kept", "tp", "pkg/lib.py:52"),
        'pass it pg_collection=megapg.groups_of(model, "tp")',
    ),
]

# The other way round: the globals are asked here, and a model there.
REVERSED = Callee(
    *("pkg/globals_first.py", 15, "of_the_globals_alone", "the globals", "hands_a_model_on", "pp"),
    "pkg/globals_first.py:6",
    'ask megapg.groups_of(first, "pp") here, too, and pass it to all that is called',
)


def migrated(root: Path) -> Migration:
    return migrate([root], Config(root, versions=(16,)))


def test_callees_that_still_ask_the_globals(tmp_path: Path) -> None:
    found = migrated(write(tmp_path, CALLEES))
    assert [*found.callees] == [
        REVERSED,
        *(
            Callee("pkg/use.py", line, function, "model", callee, what, place, instead)
            for line, function, callee, what, place, instead in FOUND
        ),
    ]
    (file,) = (file for file in found.files if file.file == "pkg/use.py")
    lines = file.after.decode().splitlines()
    assert {lines[each.line - 1].strip() for each in found.callees[1:]} == {
        "return two(x) + made()",  # as the new text has them
        "return Last(x), lib.Stage(), stage, scaled(x)",
        "averaged(x)",
        "Kept(x)",
        "Kept(**given), hands_on(model, x, pg_collection=None)",
        "runs(averaged, x)",
        "bound = partial(averaged, x), partial(averaged, x, dp_group=model.g), partial(Kept, x)",
        "build(x)",
        "Kept(**given), two(x)",
    }


def test_a_second_run_says_the_same(tmp_path: Path) -> None:
    first = migrated(write(tmp_path, CALLEES))
    assert not write_files(first.files)
    again = migrated(tmp_path)
    assert not again.files
    assert again.callees == first.callees


def test_the_report_says_who_fell_back_and_who_does_not_by_hand(tmp_path: Path) -> None:
    text = "def alone(x):\n    return two(x) + mpu.get_tensor_model_parallel_rank()\n"
    files = CALLEES | {"pkg/use.py": f"{CALLEES['pkg/use.py']}\n\n{text}"}
    served = migrated(write(tmp_path, files)).served
    (detail,) = {each.detail for each in served if each.site.function == "alone"}
    assert detail == (
        "the globals serve: alone is passed no pg_collection, and calls two, which has the globals "
        "asked (tp) at pkg/lib.py:10"
    )
    by_hand = migrate([tmp_path], Config(tmp_path, versions=(16,), thread_from=("alone",)))
    assert ("alone", "two") in {(each.function, each.callee) for each in by_hand.callees}


def test_the_report_names_them(tmp_path: Path) -> None:
    command = ["migrate", str(write(tmp_path, CALLEES)), "--from-core", "0.16"]
    said = CliRunner().invoke(app, command).output
    assert (
        "pkg/use.py:24: average asks model, and averaged has the globals asked for dp, at "
        'pkg/lib.py:36  -> pass it dp_group=megapg.groups_of(model, "dp").dp\n'
    ) in said
    assert (
        "pkg/globals_first.py:15: of_the_globals_alone asks the globals, and hands_a_model_on "
        f"has what it is passed asked for pp, at {REVERSED.place}  -> ask megapg.groups_of(first"
    ) in said
    document = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    lines = [REVERSED.line, *(line for line, *_ in FOUND)]
    assert [each["line"] for each in document["callees"]] == lines
    assert document["callees"][4] == {
        "file": "pkg/use.py",
        "line": 24,
        "function": "average",
        "asks": "model",
        "callee": "averaged",
        "what": "dp",
        "place": "pkg/lib.py:36",
        "instead": 'pass it dp_group=megapg.groups_of(model, "dp").dp',
    }


OBJECTS = {
    "pkg/__init__.py": "",
    "pkg/objects.py": """\
from megatron.core import mpu


class Counter:
    def __init__(self, start=0):
        self.start = start

    def place(self):
        return self.start + mpu.get_tensor_model_parallel_rank()

    def further(self):
        return self.place() + 1

    @classmethod
    def of_the_class(cls):
        return 0


class Other(Counter):
    pass


_COUNTER = None


def get_counter() -> Counter:
    return _COUNTER


def get_one_of(model) -> Counter:
    return Counter(model)


def get_any():
    return _COUNTER
""",
    "pkg/use.py": """\
from megatron.core import mpu
from pkg.objects import Counter, Other, get_any, get_counter, get_one_of


def asks(model):
    rank = mpu.get_tensor_model_parallel_rank()
    counter = get_counter()
    if model is None:
        counter = get_counter()
    counter.place()
    get_counter().further()
    Other().place()  # is passed it
    for_any, of_a_model, again = get_any(), get_one_of(model), Counter(model)
    for_any.place(), of_a_model.place(), again.place()
    given = get_counter()
    given.pg_collection = model.pg_collection
    given.place()
    return rank, counter.start, counter.of_the_class()


def asks_another(model):
    rank = mpu.get_pipeline_model_parallel_rank()
    return rank, get_counter().place()


def step(model):
    model.load()
    return asks(model), asks_another(model)
""",
}


def test_the_object_that_a_call_gives_was_handed_no_collection(tmp_path: Path) -> None:
    """A singleton, or what is made of nothing: it asks itself, and has nothing else to ask."""
    found = migrated(write(tmp_path, OBJECTS)).callees
    assert [(each.function, each.line, each.callee, each.what) for each in found] == [
        ("asks", 11, "Counter.place", "tp"),
        ("asks", 12, "Counter.further", "tp"),
    ]
    given = 'megapg.groups_of(model, "tp")'
    assert {each.instead for each in found} == {
        f"pass Counter a collection where it is made, such as {given}"
    }


CORE = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 16\nPATCH = 0\n",
    "megatron/core/tensor_parallel/__init__.py": "from .mappings import *\n",
    "megatron/core/tensor_parallel/mappings.py": """\
from megatron.core.parallel_state import get_tensor_model_parallel_group


def _if_none(tp_group, **kwargs):
    if tp_group is None:
        tp_group = get_tensor_model_parallel_group()
    return tp_group


def gather_from_tensor_model_parallel_region(x, group=None, **kwargs):
    return x, _if_none(group)


def scatter_to_tensor_model_parallel_region(x, **kwargs):
    return x, _if_none(None)


def gather(x, **given):
    return x, _if_none(**given)
""",
    "train.py": """\
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.mappings import gather, gather_from_tensor_model_parallel_region


def logits(model, x):
    group = parallel_state.get_tensor_model_parallel_group()
    if parallel_state.get_tensor_model_parallel_rank():
        return gather_from_tensor_model_parallel_region(x)
    y = gather_from_tensor_model_parallel_region(x, None)
    z = gather_from_tensor_model_parallel_region(x, group)
    return y, z, tensor_parallel.scatter_to_tensor_model_parallel_region(x), gather(x)
""",
}


def test_a_call_that_passes_no_group_to_a_core_of_the_project_is_named(tmp_path: Path) -> None:
    """What it does for want of a group that it was handed is done for its caller, too."""
    found = migrated(write(tmp_path, CORE))
    assert [(each.line, each.callee, each.what, each.instead) for each in found.callees] == [
        (
            *(10, "gather_from_tensor_model_parallel_region", "tp"),
            'pass it group=megapg.groups_of(model, "tp").tp',
        ),
        (
            *(11, "gather_from_tensor_model_parallel_region", "tp"),
            'pass it group=megapg.groups_of(model, "tp").tp',
        ),
        (13, "scatter_to_tensor_model_parallel_region", "tp", f'{IN}(model, "tp")'),
    ]


BEFORE = {
    "a.py": """\
from megatron.core import mpu


def loader(**kwargs):
    return mpu.get_data_parallel_rank()


def made(**kwargs):
    return object()


def finetune(**kwargs):
    data = loader()
    model = made()
    return data, mpu.get_data_parallel_world_size(), loader()


def handed(model, **kwargs):
    return mpu.get_data_parallel_world_size(), loader()


def uses(model):
    handed(model)
    return finetune(), mpu.get_data_parallel_rank()
"""
}


def test_what_is_asked_before_a_model_is_made_is_not_asked_of_it(tmp_path: Path) -> None:
    found = migrated(write(tmp_path, BEFORE))
    assert [(each.function, each.callee, each.place) for each in found.callees] == [
        ("finetune", "loader", "a.py:5"),  # behind the model
        ("handed", "loader", "a.py:5"),
        ("uses", "finetune", "a.py:5"),  # before it
    ]


SCHEDULES = """\
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


def run(model, data):
    schedule = get_forward_backward_func()
    return schedule(model=model, data_iterator=data)


def losses(model, data):
    found = run(model, data)
    return found if mpu.is_pipeline_last_stage(ignore_virtual=True) else None


def at_once(model, data):
    found = get_forward_backward_func()(model=model, data_iterator=data)
    return found if mpu.is_pipeline_last_stage(ignore_virtual=True) else None


def calls_at_once(model, data):
    return at_once(model, data), mpu.get_pipeline_model_parallel_rank()


def with_sizes(model, data, config):
    communicator = P2PCommunicator(mpu.get_pipeline_model_parallel_group(), config)
    return get_forward_backward_func()(model=model, p2p_communicator=communicator)


def about_others(model, data):
    return run(model, data), mpu.get_data_parallel_rank()
"""


def test_the_schedule_that_a_core_outside_gives_is_one_of_the_globals(tmp_path: Path) -> None:
    found = migrated(write(tmp_path, {"a.py": SCHEDULES})).callees
    assert [(each.function, each.callee, each.instead) for each in found] == [
        ("losses", "run", f'{IN}(model, "pp")'),
        (
            *("at_once", "get_forward_backward_func"),
            "pass it pp_size= and vp_size=, and what it gives "
            "pg_collection=megapg.megatron.schedule_collection(megapg.groups_of(model)), "
            "and where there are stages the p2p_communicator= of its pp",
        ),
    ]
    assert {each.place for each in found} == {"megatron/core/pipeline_parallel/schedules.py"}
    core = "megatron/core/pipeline_parallel/__init__.py"
    in_it = {"a.py": SCHEDULES, core: "def get_forward_backward_func():\n    return print\n"}
    in_it["megatron/core/tensor_parallel/__init__.py"] = "from megatron.core import mpu\n"
    assert not migrated(write(tmp_path / "with_core", in_it)).callees


OWN_SCHEDULES = {
    "megatron/core/tensor_parallel/__init__.py": "",
    "megatron/core/schedules.py": """\
from megatron.core import parallel_state


def get_forward_backward_func():
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        chosen = with_stages
    else:
        chosen = without_any
    return chosen


def without_any(model, *, pg_collection=None):
    group = parallel_state.get_pipeline_model_parallel_group()
    return model(pg_collection.pp if pg_collection is not None else group)


def with_stages(model, *, p2p_communicator=None, pg_collection=None):
    if p2p_communicator is None and pg_collection is None:
        group = parallel_state.get_pipeline_model_parallel_group()
    else:
        group = pg_collection.pp
    return model(group)


def get_one():
    return get_forward_backward_func()


def counted():
    def counting(model):
        return model.n

    return counting


def picked(n):
    return with_stages if n else without_any
""",
    "train.py": """\
from megatron.core import mpu
from megatron.core.schedules import counted, get_forward_backward_func, get_one, picked


def at_once(model):
    return get_one()(model=model), mpu.get_pipeline_model_parallel_rank()


def step(model, schedule):
    found = schedule(model=model)
    return found if mpu.is_pipeline_last_stage(ignore_virtual=True) else None


def train(model):
    schedule = get_forward_backward_func()
    return step(model, schedule)


def run(model):
    schedule = picked(model.n)
    return schedule(model)


def losses(model):
    return run(model), mpu.get_pipeline_model_parallel_rank()


def is_handed_it(model, sender):
    schedule, count = get_one(), counted()
    found = schedule(model, p2p_communicator=sender, pg_collection=model.pg_collection)
    return found, count(model), mpu.get_pipeline_model_parallel_rank()


class Loop:
    def __init__(self, schedule):
        self.schedule = schedule


def loop(model):
    return Loop(get_one()), mpu.get_pipeline_model_parallel_rank()
""",
}


def test_functions_that_others_return_are_followed(tmp_path: Path) -> None:
    """Such as the schedules of a Megatron-core in the project."""
    found = migrated(write(tmp_path, OWN_SCHEDULES)).callees
    instead = (
        "pass it pg_collection=megapg.megatron.schedule_collection(megapg.groups_of(model)), "
        "and where there are stages the p2p_communicator= of its pp"
    )
    assert [(each.function, each.line, each.callee, each.instead) for each in found] == [
        ("at_once", 8, "with_stages", instead),
        ("step", 12, "with_stages", instead),
        ("train", 18, "with_stages", instead),
        ("losses", 27, "run", f"{IN}(model)"),
        ("loop", 44, "with_stages", instead),
    ]
    assert {each.place for each in found} == {"megatron/core/schedules.py:20"}


HANDED_ON = {
    "train.py": """\
from megatron.core import mpu


def build(provider):
    return provider(1)


def prints(provider):
    print(provider)


def loaders(of):
    return build(of)


def pretrain(provider, model, x):
    prints(provider)
    data = loaders(of=provider)
    return data, mpu.get_tensor_model_parallel_rank()
""",
    "data.py": """\
from megatron.core import mpu


class Settings:
    def __init__(self, is_built):
        self.is_built = is_built


def is_built():
    return mpu.get_tensor_model_parallel_rank() == 0


def is_asked_for_nothing():
    return True


def settings():
    return Settings(is_built=is_built), Settings(is_asked_for_nothing)


def provider(n):
    return n, settings()
""",
    "main.py": """\
from data import Settings, is_built, provider
from megatron.core import mpu
from train import pretrain


def keeps(model, x):
    return Settings(is_built), mpu.get_tensor_model_parallel_world_size()


pretrain(provider, print, 1)
""",
}


def test_functions_that_are_handed_on_are_followed(tmp_path: Path) -> None:
    """Through parameters to what calls them, and into objects that keep them."""
    found = migrated(write(tmp_path, HANDED_ON)).callees
    assert [(each.function, each.line, each.callee, each.place) for each in found] == [
        ("keeps", 7, "is_built", "data.py:10"),
        ("pretrain", 18, "provider", "data.py:10"),
    ]


def test_the_first_that_takes_no_collection_is_named(tmp_path: Path) -> None:
    text = (
        "from megatron.core import mpu\n\n\n"
        "def top(model):\n"
        "    return mpu.get_tensor_model_parallel_rank() + takes(1, model.pg_collection)\n\n\n"
        "def takes(x, pg_collection):\n"
        "    return pg_collection.pp.size() + between(x)\n\n\n"
        "def between(x, **given):\n"
        "    return asks(x, **given)\n\n\n"
        "def asks(x, **given):\n"
        "    return x * mpu.get_tensor_model_parallel_world_size()\n"
    )
    (found,) = migrated(write(tmp_path, {"a.py": text.encode()})).callees
    assert (found.function, found.callee, found.what) == ("top", "takes", "tp")
    assert found.instead == (
        "have between take pg_collection, hand it on to there, "
        'and pass it megapg.groups_of(model, "tp") by way of takes'
    )


def test_a_package_whose_name_ends_like_megatron_is_no_core(tmp_path: Path) -> None:
    beside = "hcu_megatron/core/tensor_parallel/layers.py"
    (found,) = migrated(
        write(tmp_path, {"a.py": SCHEDULES[: SCHEDULES.index("def at_once")], beside: "x = 1\n"})
    ).callees
    assert (found.function, found.callee) == ("losses", "run")
