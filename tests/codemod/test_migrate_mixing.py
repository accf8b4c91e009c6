"""The check that finds, in a new text, what asks two carriers about one kind of group."""

from __future__ import annotations

import ast

import pytest
from migrate_cases import cases
from test_migrate_engine import Case

from megapg.migrate.edit.lost import lost_in
from megapg.migrate.edit.mixing import mixed, new_in

_HEAD = "import megapg\nfrom megapg.megatron import getters\nfrom megatron.core import mpu\n"
_HEAD += "from megatron.core import tensor_parallel\n\n\n"
# A text, and what it mixes.
TEXTS = {
    "def f(model):\n    if megapg.resolve(None).rank('tp'):\n"
    "        return megapg.groups_of(model, 'tp').tp\n": ["f"],
    "def f(model):\n    pg = megapg.groups_of(model, 'embd')\n"
    "    if getters.is_rank_in_embedding_group(megapg.resolve(None)):\n"
    "        return pg.embd\n": ["f"],
    "def f(model):\n    if mpu.get_data_parallel_rank():\n"
    "        return g(pg_collection=megapg.groups_of(model, 'dp_cp'))\n": ["f"],
    "def f(pg_collection=None):\n"
    "    return mpu.get_data_parallel_rank(), megapg.resolve(pg_collection).dp\n": ["f"],
    "class A:\n    @staticmethod\n    def f():\n        return megapg.resolve(None).rank('ep')\n"
    "    def g(self):\n        return megapg.groups_of(self, 'ep').ep\n": ["class A"],
    "class A:\n    def f(self):\n        return megapg.resolve(None).rank('ep')\n"
    "    def g(self):\n        return self.pg_collection.ep.size()\n": ["class A"],
    "def f(model, x):\n    if megapg.groups_of(model, 'tp').size('tp') > 1:\n"
    "        return tensor_parallel.scatter_to_sequence_parallel_region(x)\n": ["f"],
    # A parameter of an inner function hides only there what is called so around it.
    "def f(model):\n    run(lambda x: x)\n    def g(model):\n        return model.x\n"
    "    if megapg.resolve(None).rank('tp'):\n"
    "        return g, megapg.groups_of(model, 'tp').tp\n": ["f"],
    # A function in it that has a model of its own, where the globals are asked around it.
    "def f(run):\n    pg = megapg.resolve(None)\n"
    "    def step(model):\n        return megapg.groups_of(model, 'cp').rank('cp')\n"
    "    def loss():\n        return pg.cp\n    return run(step, loss)\n": ["f"],
    "def f(run, model):\n    def step(module):\n"
    "        return megapg.groups_of(module, 'cp').rank('cp')\n"
    "    return run(step, megapg.groups_of(model, 'cp').cp)\n": [],
    "def f(run):\n    def step(pg_collection):\n        return megapg.resolve(pg_collection).tp\n"
    "    return run(step, megapg.resolve(None).cp)\n": [],
    # One carrier, or several that are about several kinds, or that are one.
    "def f(model):\n    pg = megapg.groups_of(model, 'tp')\n"
    "    return pg.rank('tp'), megapg.groups_of(model, 'tp').tp\n": [],
    "def f(model):\n"
    "    return megapg.resolve(None).rank('pp'), megapg.groups_of(model, 'tp').tp\n": ["f"],
    "def f(self):\n    model = make(pg_collection=megapg.groups_of(self, 'tp'))\n"
    "    return megapg.groups_of(model, 'tp').tp\n": [],
    "def f(self):\n    for each in self.models:\n        g(megapg.groups_of(each, 'tp').tp)\n"
    "    return megapg.groups_of(self, 'tp').tp\n": [],
    # What only the globals have counts, where it is a group.
    "def f(model, g):\n    g(mpu.get_data_modulo_expert_parallel_group())\n"
    "    return megapg.groups_of(model, 'ep').ep\n": ["f"],
    "def f(model, g):\n    g(getattr(megapg.resolve(None), 'tp', None))\n"
    "    return getters.gloo_group(megapg.groups_of(model, 'tp_cp'), 'tp_cp')\n": ["f"],
    # A variable that holds one and then another.
    "def f(model):\n    pg = megapg.resolve(None)\n    a = pg.tp\n"
    "    pg = megapg.groups_of(model, 'tp')\n    return a, pg.tp\n": ["f"],
    # A collection that was there before.
    "def f(model, make):\n    pg_collection = make()\n"
    "    return pg_collection.tp, megapg.groups_of(model, 'tp').tp\n": ["f"],
    "def f(model, make):\n    pg_collection = make(model)\n"
    "    return pg_collection.tp, megapg.groups_of(model, 'tp').tp\n": [],
    # What stands in for a model where there is none, and a model of another role.
    "def f(model=None, pg_collection=None):\n    if model is not None:\n"
    "        return megapg.groups_of(model, 'tp').tp\n"
    "    return megapg.resolve(pg_collection).tp\n": [],
    "def f(model, teacher_model):\n    megapg.groups_of(teacher_model, 'tp').tp\n"
    "    return megapg.groups_of(model, 'tp').tp\n": [],
    # What a constructor is passed is what the object has.
    "class A:\n    def __init__(self, pg_collection=None):\n"
    "        self.x = megapg.resolve(pg_collection).rank('pp')\n"
    "    def g(self):\n        return megapg.resolve(None).pp\n": ["class A"],
    "class A:\n    def __init__(self, pg_collection):\n        self.pg_collection = pg_collection\n"
    "        self.x = pg_collection.tp, megapg.groups_of(self, 'tp').tp\n": [],
    # What a constructor asked goes with what a method asks that reads it.
    "class A:\n    def __init__(self):\n        rank = megapg.groups_of(self, 'dp').rank('dp')\n"
    "        self.is_first = rank == 0\n    def g(self, model):\n        if self.is_first:\n"
    "            return megapg.groups_of(model, 'dp').dp\n": ["class A"],
    "class A:\n    def __init__(self):\n        self.x = megapg.resolve(None).rank('dp')\n"
    "    def g(self, model):\n        return self.x, megapg.groups_of(model, 'dp').dp\n": [
        "class A"
    ],
    "class A:\n    def __init__(self):\n        self.x = megapg.groups_of(self, 'dp').rank('dp')\n"
    "    def g(self, model):\n        return self.y, megapg.groups_of(model, 'dp').dp\n": [],
    # What a constructor calls to set its object up goes with it, as far as it was passed nothing.
    "class A:\n    def __init__(self, pg_collection=None):\n"
    "        self.pg_collection = pg_collection\n        self.load()\n"
    "        self.x = megapg.groups_of(self, 'dp').rank('dp')\n    def load(self):\n"
    "        model = make()\n        return megapg.groups_of(model, 'dp').dp\n": ["class A"],
    "class A:\n    def __init__(self, model, pg_collection=None):\n"
    "        self.pg_collection = pg_collection\n        self.load(model)\n"
    "        self.x = megapg.groups_of(self, 'dp').rank('dp')\n    def load(self, model):\n"
    "        return megapg.groups_of(model, 'dp').dp\n    def use(self):\n"
    "        model = make()\n        return megapg.groups_of(model, 'dp').dp\n": [],
    # Where nothing was passed the globals are meant, and nothing else.
    "def f(model, pg_collection=None):\n    if pg_collection is None:\n"
    "        return mpu.get_data_parallel_rank(), megapg.groups_of(model, 'dp').dp\n": ["f"],
    "def f(pg_collection=None):\n    if pg_collection is None:\n        print()\n"
    "    return megapg.resolve(None).tp, pg_collection.tp\n": ["f"],
    # What was passed, and the globals where nothing was.
    "def f(pg_collection=None):\n    if pg_collection is None:\n"
    "        return megapg.resolve(None).tp\n    return pg_collection.tp\n": [],
    # What is asked for by its name, and what asks no more than whether it is there.
    "def f(model):\n    x = getattr(mpu, 'get_tensor_model_parallel_rank')()\n"
    "    return x, megapg.groups_of(model, 'tp').tp\n": ["f"],
    "def f(model):\n    x = getattr(mpu, '_OURS', None), hasattr(mpu, 'get_data_parallel_rank')\n"
    "    return x, megapg.groups_of(model, 'dp').dp\n": [],
    "def f(model, name):\n    return getattr(mpu, name)(), megapg.groups_of(model, 'dp').dp\n": [
        "f"
    ],
    # What is left, and nothing can serve.
    "def f(model):\n    mpu.set_tensor_model_parallel_rank(1)\n"
    "    mpu.get_tensor_parallel_group_of_a_fork()\n"
    "    return megapg.groups_of(model, 'tp').tp\n": [],
}


@pytest.mark.parametrize("text", TEXTS)
def test_what_mixes_carriers(text: str) -> None:
    found = mixed({"a.py": ast.parse(_HEAD + text)}, (16,))
    assert [each.where for _, each in found] == TEXTS[text]


def test_what_a_class_is_made_of_asks_the_same_object() -> None:
    base = "class Base:\n    def f(self):\n        return megapg.resolve(None).rank('tp')\n\n\n"
    other = "class Other(B):\n    def g(self):\n        return megapg.groups_of(self, 'cp').cp\n"
    klass = "from of.base import Base\n" + other.replace("cp", "tp").replace("(B)", "(Base)")
    trees = {"of/base.py": base, "b.py": klass, "c.py": base.replace("Base", "B") + other}
    found = mixed({file: ast.parse(_HEAD + text) for file, text in trees.items()}, (16,))
    assert [(file, each.where) for file, each in found] == [("b.py", "class Other")]
    trees["b.py"] = klass.replace("of.base", "megatron.core.base")  # another one of that name
    assert not list(mixed({file: ast.parse(_HEAD + text) for file, text in trees.items()}, (16,)))


@pytest.mark.parametrize("name", cases("alike"))
def test_no_case_mixes_carriers(name: str) -> None:
    case = Case(cases("alike")[name])
    before, after = (
        mixed({file: ast.parse(text) for file, text in files.items()}, (16,))
        for files in (case.before, case.after)
    )
    assert not new_in(after, lambda: before)


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        ("self.x = pg_collection.tp", ["Net"]),
        ("self.x = megapg.resolve(pg_collection).tp", ["Net"]),
        ("self.pg_collection = pg_collection", []),
        ("super().__init__(pg_collection)", []),
    ],
)
def test_a_constructor_that_loses_what_it_is_passed(body: str, lost: list[str]) -> None:
    text = (
        f"class Net(Base):\n    def __init__(self, pg_collection):\n        {body}\n\n"
        "    def f(self):\n        return megapg.groups_of(self, 'tp').tp\n"
    )
    assert list(lost_in(ast.parse(_HEAD + text))) == lost
