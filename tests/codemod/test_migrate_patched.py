"""Patches of getters in tests stay, and migrated code hears them; else the report says why not."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from megatron.core import parallel_state
from migrate_cases import PROGRAMS
from trees import write

import megapg
from megapg.migrate.config import Config
from megapg.migrate.edit.write import write_files
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Migration
from megapg.testing import fake_collection, run_distributed

pytestmark = pytest.mark.contract

GLOBALS = "megatron.core.parallel_state"
CODE = PROGRAMS["CODE"]

TESTS = PROGRAMS["TESTS"]

FAULTS = (
    ("numbers[", "numbers[-"),
    ("return pg.size", "return 1 + pg.size"),
    ("return pg.rank", "return 1 + pg.rank"),
    ("total // ", "total * "),
    ("return rank", "return rank + 1"),
    ("return megapg.resolve(pg_collection).dp", "return 1, megapg.resolve(pg_collection).dp"),
    ("return getters.virtual", "return 1 + getters.virtual"),
)


def migrated(root: Path, code: str, test: str) -> Migration:
    """Migrate a package with its test, and write it."""
    write(root, {"pkg/__init__.py": "", "pkg/mod.py": code, "test_it.py": test})
    found = migrate([root], Config(root, versions=(16,)))
    assert not write_files(found.files)
    return found


class _Outcomes:
    """A plugin of pytest that notes what came of each test."""

    def __init__(self) -> None:
        self.of_tests: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.of_tests[report.nodeid.rpartition("::")[2]] = report.outcome.upper()


def run_here(root: Path) -> dict[str, str]:
    os.chdir(root)
    sys.path.insert(0, str(root))
    found = _Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", str(root)], plugins=[found])
    return found.of_tests


def outcomes(root: Path) -> dict[str, str]:
    """Of each test, in a process that has not imported what they import."""
    (found,) = run_distributed(partial(run_here, root), 1)
    return found


def test_migrated_code_hears_the_patches_of_its_tests(tmp_path: Path) -> None:
    found = migrated(tmp_path, CODE, TESTS)
    # The names that a module has imported are asked by nobody any more, and gone: what patches them
    # patches what is asked.
    told = TESTS.replace("pkg.mod.parallel_state", f"{GLOBALS}")
    told = told.replace('"pkg.mod.get_', f'"{GLOBALS}.get_')
    assert (tmp_path / "test_it.py").read_text() == told
    assert {(each.site.file, each.reason) for each in found.left} == {("test_it.py", "patched")}
    through = {each.site.text for each in found.left if each.site.text.startswith('"pkg.mod.')}
    assert {each.site.text for each in found.left if each.detail} == through
    assert not any(each.suggestion for each in found.left)
    code = (tmp_path / "pkg" / "mod.py").read_text()
    assert "parallel_state" not in code
    again = migrate([tmp_path], Config(tmp_path, versions=(16,)))
    assert not again.files

    names = {"test_by_name", "test_by_object", "test_without_mocks", "test_monkeypatch"}
    names |= {"test_decorated", "test_of_the_fixture", "test_the_whole_module"}
    assert outcomes(tmp_path) == dict.fromkeys(names, "PASSED")
    for right, fault in FAULTS:
        assert right in code
        code = code.replace(right, fault)
    (tmp_path / "pkg" / "mod.py").write_text(code)
    assert outcomes(tmp_path) == dict.fromkeys(names, "FAILED")


def test_a_patched_name_of_the_module_is_heard_where_the_report_says(tmp_path: Path) -> None:
    test = PROGRAMS["a patched name of the module is heard where the report says"]
    code = """\
from megatron.core.parallel_state import get_tensor_model_parallel_rank


def mine(numbers):
    return numbers[get_tensor_model_parallel_rank()]
"""
    found = migrated(tmp_path, code, test)
    advice = 'patch "megatron.core.parallel_state.get_tensor_model_parallel_rank"'
    assert [each.suggestion for each in found.left] == [advice, advice]
    assert outcomes(tmp_path) == {"test_mine": "FAILED", "test_yours": "FAILED"}
    told = test.replace('.object(pkg.mod, "get_', '("pkg.mod.get_').replace(
        "pkg.mod.get_", "megatron.core.parallel_state.get_"
    )
    (tmp_path / "test_it.py").write_text(told)
    assert outcomes(tmp_path) == {"test_mine": "PASSED", "test_yours": "PASSED"}


def test_a_patched_alias_is_redirected_where_it_goes_and_told_of_where_it_stays(
    tmp_path: Path,
) -> None:
    found = migrated(tmp_path, PROGRAMS["patched aliases"], PROGRAMS["patched aliases, the test"])
    advised = {each.site.text: each.suggestion for each in found.left if each.suggestion}
    size = f'patch "{GLOBALS}.get_tensor_model_parallel_world_size"'
    assert advised == {'"pkg.mod.size"': size}
    assert "tp_rank" not in (tmp_path / "pkg" / "mod.py").read_text()
    assert outcomes(tmp_path) == {"test_imported": "PASSED", "test_bound": "FAILED"}


def test_a_patch_stays_where_something_else_takes_the_import(tmp_path: Path) -> None:
    """Whoever reads the name hears the patch that he heard."""
    code, test = PROGRAMS["patched aliases"], PROGRAMS["patched aliases, the test"]
    write(tmp_path, {"pkg/other.py": "from pkg.mod import tp_rank\n"})
    found = migrated(tmp_path, code, test)
    advised = {each.site.text: each.suggestion for each in found.left if each.suggestion}
    assert advised['"pkg.mod.tp_rank"'] == f'patch "{GLOBALS}.get_tensor_model_parallel_rank"'
    assert (tmp_path / "test_it.py").read_text() == test
    assert " as tp_rank" in (tmp_path / "pkg" / "mod.py").read_text()


def test_an_unset_group_reads_the_same_through_a_collection() -> None:
    with (
        fake_collection(tp=2) as pg,
        megapg.published(pg),
        megapg.megatron.globals_policy("silent"),
    ):
        with patch("megatron.core.parallel_state._TENSOR_MODEL_PARALLEL_GROUP", None):
            with pytest.raises(AssertionError):
                parallel_state.get_tensor_model_parallel_group()
            with pytest.raises(megapg.errors.MissingGroupError):
                _ = megapg.resolve(None).tp
        assert megapg.resolve(None).size("tp") == 2
