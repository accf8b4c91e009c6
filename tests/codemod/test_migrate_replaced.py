"""What tests and patches may put in the place of a function, as the codemod sees it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from migrate_cases import cases
from trees import write

from megapg.migrate.config import Config
from megapg.migrate.decide.functions import Functions
from megapg.migrate.find.index import Index, unseen
from megapg.migrate.python.scopes import Defined

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
    functions = Functions(index)
    return functions.can_take(rank.scope, path), functions.can_take(constructor.scope, path)


REPLACED = cases("replaced_replaced")


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


STAYS = cases("replaced_stays")


@pytest.mark.parametrize("name", STAYS)
def test_what_only_looks_like_a_patch_is_none(tmp_path: Path, name: str) -> None:
    assert takes(tmp_path, {"pkg/__init__.py": STAYS[name]}) == (True, True)
