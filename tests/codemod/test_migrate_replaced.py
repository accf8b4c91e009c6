"""What patches may put in the place of a function, as the codemod sees it: where the
source does so, the function keeps its signature; where a test does, that is told.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from migrate_cases import cases
from trees import write

from megapg.migrate.config import Config
from megapg.migrate.decide.functions import Functions
from megapg.migrate.find.index import Index, unseen
from megapg.migrate.find.meaning import Thing
from megapg.migrate.python.methods import class_of
from megapg.migrate.python.scopes import Defined, Scope

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


def asked(root: Path, files: dict[str, str]) -> tuple[Functions, Path, tuple[Scope, Scope]]:
    """``pkg.ranks.rank`` and the constructor of ``Sampler`` beside it in a project with some more
    files, and what answers about them.
    """
    every = {
        "pkg/__init__.py": "",
        "pkg/ranks.py": _CODE,
        "pkg/user.py": _OTHER,
        "pkg/twin.py": _TWIN,
        **files,
    }
    write(root, every)
    index = Index([root], Config(root, versions=(16,)))
    index.run(unseen)
    path = root / "pkg" / "ranks.py"
    analysis = index.analysis(path)
    assert analysis is not None
    rank, sampler = (analysis.module.bindings[name][0] for name in ("rank", "Sampler"))
    assert isinstance(rank, Defined)
    assert isinstance(sampler, Defined)
    constructor = sampler.scope.bindings["__init__"][0]
    assert isinstance(constructor, Defined)
    return Functions(index), path, (rank.scope, constructor.scope)


def takes(root: Path, files: dict[str, str]) -> tuple[bool, bool]:
    """Whether the two can be given a parameter."""
    functions, path, (rank, constructor) = asked(root, files)
    return functions.can_take(rank, path), functions.can_take(constructor, path)


def told(root: Path, files: dict[str, str]) -> list[list[str]]:
    """For each of the two the places in tests that stand in for it."""
    functions, path, of = asked(root, files)
    return [
        [
            f"{at.relative_to(root).as_posix()}:{line}"
            for at, line in functions.replaced_by_tests(Thing(called.kind, path=path, scope=called))
        ]
        for called in (class_of(each) or each for each in of)
    ]


REPLACED = cases("replaced_replaced")


@pytest.mark.parametrize("what", ["rank", "Sampler"])
@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_keeps_its_signature(tmp_path: Path, name: str, what: str) -> None:
    text = REPLACED[name].replace("rank:", f"{what}:")
    text = re.sub(r"\brank\b", what, text)
    rank, constructor = takes(tmp_path, {"play.py": text})
    assert (rank, constructor) == (what != "rank", what != "Sampler")
    (tmp_path / "play.py").unlink()
    assert takes(tmp_path, {"tests/test_it.py": text}) == (True, True)
    places = told(tmp_path, {"tests/test_it.py": text})[what == "Sampler"]
    lines = text.splitlines()
    (found,) = [int(each.removeprefix("tests/test_it.py:")) for each in places]
    assert what in lines[found - 1]
    assert not told(tmp_path, {"tests/test_it.py": text})[what == "rank"]


def test_a_constructor_that_is_replaced_keeps_its_signature(tmp_path: Path) -> None:
    text = """
from pkg.ranks import Sampler

def test_it(monkeypatch):
    monkeypatch.setattr(Sampler, "__init__", lambda self: None)
"""
    assert takes(tmp_path, {"play.py": text}) == (True, False)
    (tmp_path / "play.py").unlink()
    assert takes(tmp_path, {"tests/test_it.py": text}) == (True, True)
    assert told(tmp_path, {"tests/test_it.py": text}) == [[], ["tests/test_it.py:5"]]


def test_a_table_in_one_file_and_what_patches_by_it_in_another(tmp_path: Path) -> None:
    table = 'PATCHED = ["pkg.ranks.rank"]\n\ndef patch_all(): ...\n'
    by_it = """
from table import PATCHED
from unittest.mock import patch

def test_it():
    for each in PATCHED:
        patch(each).start()
"""
    assert takes(tmp_path, {"table.py": table, "play.py": by_it}) == (False, True)
    (tmp_path / "play.py").unlink()
    assert takes(tmp_path, {"table.py": table}) == (True, True)
    assert takes(tmp_path, {"table.py": table, "test_it.py": by_it}) == (True, True)


def test_a_helper_in_another_file(tmp_path: Path) -> None:
    helper = "def put(module, name):\n    setattr(module, name, None)\n"
    test = """
from helper import put
import mock

def test_it(module):
    put(module, "rank")
"""
    assert takes(tmp_path, {"helper.py": helper, "play.py": test}) == (False, True)
    (tmp_path / "play.py").unlink()
    files = {"helper.py": helper, "test_it.py": test}
    assert takes(tmp_path, files) == (True, True)
    assert told(tmp_path, files) == [["test_it.py:6"], []]


STAYS = cases("replaced_stays")


@pytest.mark.parametrize("name", STAYS)
def test_what_only_looks_like_a_patch_is_none(tmp_path: Path, name: str) -> None:
    assert takes(tmp_path, {"pkg/__init__.py": STAYS[name]}) == (True, True)
