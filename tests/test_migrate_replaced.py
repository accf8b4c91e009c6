"""What tests and patches may put in the place of a function, as the codemod sees it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megapg.migrate.config import Config
from megapg.migrate.functions import Functions
from megapg.migrate.index import Index
from megapg.migrate.scopes import Defined

_CODE = """
def rank():
    return 0


class Sampler:
    def __init__(self):
        self.x = rank()
"""
_OTHER = """
from pkg.ranks import Sampler, rank
from pkg.twin import other


def f():
    return rank(), Sampler()
"""
_TWIN = """
def rank():
    return 1


class Sampler:
    pass


other = rank
"""


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def takes(root: Path, files: dict[str, str]) -> tuple[bool, bool]:
    """Whether ``pkg.ranks.rank`` and the constructor of ``Sampler`` beside it can be given a
    parameter in a project with some more files.
    """
    every = {
        "pkg/__init__.py": "",
        "pkg/ranks.py": _CODE,
        "pkg/user.py": _OTHER,
        "pkg/twin.py": _TWIN,
        **files,
    }
    for name, text in every.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    index = Index([root], Config(root, versions=(16,)))
    index.run(lambda done, total: None)
    path = root / "pkg" / "ranks.py"
    analysis = index.analysis(path)
    assert analysis is not None
    rank, sampler = (analysis.module.bindings[name][0] for name in ("rank", "Sampler"))
    assert isinstance(rank, Defined)
    assert isinstance(sampler, Defined)
    constructor = sampler.scope.bindings["__init__"][0]
    assert isinstance(constructor, Defined)
    functions = Functions(index)
    return functions.can_take(rank.scope, path), functions.can_take(constructor.scope, path)


REPLACED = sections("""
=== by its dotted name
from unittest.mock import patch

@patch("pkg.ranks.rank")
def test_it(fake): ...
=== where another module has it from there
from unittest import mock

def test_it():
    with mock.patch("pkg.user.rank"): ...
=== from the folder that holds it
def test_it(mocker):
    mocker.patch("ranks.rank")
=== in a module
from pkg import ranks

def test_it(monkeypatch):
    monkeypatch.setattr(ranks, "rank", lambda: 3)
=== in a module that has it from there
import pkg.user

def test_it(monkeypatch):
    monkeypatch.setattr(pkg.user, name="rank", value=lambda: 3)
=== in what may be any module
def replace(module):
    setattr(module, "rank", lambda: 3)
=== among the variables of a module
from pkg import ranks

vars(ranks)["rank"] = lambda: 3
=== among the variables of a module, by their name
from pkg import ranks

ranks.__dict__["rank"] = lambda: 3
=== among several
from unittest.mock import patch

def test_it():
    with patch.multiple("pkg.ranks", rank=lambda: 3): ...
=== in a dictionary
from unittest.mock import patch
from pkg import ranks

def test_it():
    with patch.dict(ranks.__dict__, {"rank": lambda: 3}): ...
=== with the module's name in a variable
from unittest.mock import patch

MODULE = "pkg.ranks"

def test_it():
    with patch(f"{MODULE}.rank"): ...
=== with the module's name added
from unittest.mock import patch

MODULE = "pkg.ranks"

def test_it():
    with patch(MODULE + ".rank"): ...
=== by a manager of patches
from adaptor import PatchesManager

PatchesManager.register("pkg.ranks.rank", print)
=== by a function under another name
from unittest.mock import patch as put

def test_it():
    with put("pkg.ranks.rank"): ...
=== by a method under another name
def test_it(monkeypatch):
    put = monkeypatch.setattr
    put("pkg.ranks.rank", print)
=== by a parameter of a test
import pytest

@pytest.mark.parametrize("target", ["pkg.ranks.rank"])
def test_it(monkeypatch, target):
    monkeypatch.setattr(target, print)
=== by a parameter of a class of tests
import pytest

@pytest.mark.parametrize("target", ["pkg.ranks.rank"])
class TestIt:
    def test_it(self, monkeypatch, target):
        monkeypatch.setattr(target, print)
=== in a loop
from unittest.mock import patch

def test_it():
    for name in ("rank", "size"):
        patch("pkg.ranks." + name).start()
=== by a table
from unittest.mock import patch

TARGETS = {"pkg.ranks.rank": print}
ALL = [*TARGETS.items()]

def test_it():
    for target, fake in ALL:
        patch(target, fake).start()
=== by a table of a class
from unittest.mock import patch

class TestIt:
    TARGETS = ["pkg.ranks.rank"]

    def test_it(self):
        for target in self.TARGETS:
            patch(target).start()
=== by a helper
def put(module, name, value):
    setattr(module, name, value)

def test_it(module):
    put(module, "rank", print)
=== by a helper that is told by a table
from unittest.mock import patch

NAMES = ["rank"]

def put(names):
    return [patch("pkg.ranks." + name) for name in names]

def test_it():
    put(NAMES)
=== by a fixture
import pytest

@pytest.fixture
def target():
    return "pkg.ranks.rank"

def test_it(monkeypatch, target):
    monkeypatch.setattr(target, print)
=== by a part of a function
import functools
from pkg import ranks

def test_it(monkeypatch):
    put = functools.partial(monkeypatch.setattr, ranks)
    put("rank", print)
=== at the top
import sys

for name in ("rank", "size"):
    setattr(sys.modules["pkg.ranks"], name, print)
""")


@pytest.mark.parametrize("what", ["rank", "Sampler"])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_keeps_its_signature(tmp_path: Path, name: str, what: str) -> None:
    text = REPLACED[name].replace("rank:", f"{what}:")
    text = re.sub(r"\brank\b", what, text)
    rank, constructor = takes(tmp_path, {"tests/test_it.py": text})
    assert (rank, constructor) == (what != "rank", what != "Sampler")


def test_a_constructor_that_is_replaced_keeps_its_signature(tmp_path: Path) -> None:
    test = """
from pkg.ranks import Sampler

def test_it(monkeypatch):
    monkeypatch.setattr(Sampler, "__init__", lambda self: None)
"""
    assert takes(tmp_path, {"tests/test_it.py": test}) == (True, False)


def test_a_table_in_one_file_and_what_patches_by_it_in_another(tmp_path: Path) -> None:
    table = 'PATCHED = ["pkg.ranks.rank"]\n\ndef patch_all(): ...\n'
    by_it = """
from table import PATCHED
from unittest.mock import patch

def test_it():
    for each in PATCHED:
        patch(each).start()
"""
    assert takes(tmp_path, {"table.py": table, "test_it.py": by_it}) == (False, True)
    (tmp_path / "test_it.py").unlink()
    assert takes(tmp_path, {"table.py": table}) == (True, True)


def test_a_helper_in_another_file(tmp_path: Path) -> None:
    helper = "def put(module, name):\n    setattr(module, name, None)\n"
    test = """
from helper import put
import mock

def test_it(module):
    put(module, "rank")
"""
    assert takes(tmp_path, {"helper.py": helper, "test_it.py": test}) == (False, True)


STAYS = sections("""
=== a table of lazy imports
import sys
from typing import TYPE_CHECKING
from .patcher import apply_patch

if TYPE_CHECKING:
    from .ranks import Sampler, rank
else:
    _import_structure = {"ranks": ["Sampler", "rank"]}
    sys.modules[__name__] = Lazy(__name__, _import_structure)

class Lazy:
    def __getattr__(self, name):
        value = load(name)
        setattr(self, name, value)
        return value

apply_patch()
=== a star, in several parts
from .patcher import apply_patch

__all__ = ["rank"]
__all__ += ["Sampler"]
=== words of images
SIZES = {"rank": "patch14", "Sampler": "patch16"}

def f(patch_size):
    return patch_size, SIZES["rank"], "Sampler"
=== comments and what is said
# patch("pkg.ranks.rank")
def patch_all():
    '''Like patch("pkg.ranks.rank"), "Sampler"'''
=== attributes of objects
class A:
    def set(self, **values):
        self.known = ["rank", "Sampler"]
        for name, value in values.items():
            setattr(self, name, value)
        setattr(self, "rank", 3)
=== another module's function of the name
from unittest.mock import patch
import pkg.twin
import megatron.core.utils

@patch("pkg.twin.rank")
@patch("pkg.twin.Sampler", None)
@patch("megatron.core.utils.rank")
def test_it(monkeypatch):
    monkeypatch.setattr(pkg.twin, "rank", None)
    monkeypatch.setattr(megatron.core.utils, "Sampler", None)
=== another function that patches something
from unittest.mock import patch

def test_it():
    with patch("pkg.user.f"):
        assert load("rank") == "Sampler"
""")


@pytest.mark.parametrize("name", STAYS)
def test_what_only_looks_like_a_patch_is_none(tmp_path: Path, name: str) -> None:
    assert takes(tmp_path, {"pkg/__init__.py": STAYS[name]}) == (True, True)
