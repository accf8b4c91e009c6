"""Tests never spoil the source: it is rewritten alike with them and without, they go on hearing the
getters that they stub and patch, and what they notice is told with its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from migrate_cases import PROGRAMS, cases, program_of
from test_migrate_engine import Case
from test_migrate_patched import outcomes
from trees import write
from typer.testing import CliRunner

from megapg.cli.app import app
from megapg.migrate.config import Config
from megapg.migrate.edit.write import write_files
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Migration
from megapg.migrate.python.tree import is_test

# With what tests replace, as the cases of another file have it.
CASES = {name: Case(text).before for name, text in cases("beside_tests").items()}
PATCHING = {
    f"{name}, in a test": {
        "a.py": PROGRAMS["_REPLACEABLE"],
        "tests/test_a.py": f"from unittest import mock\n\nimport a\n\n\n{text}",
    }
    for name, text in cases("replaced").items()
}
NOTICED = program_of("noticed")
STUBBED = program_of("stubbed")


def migrated(root: Path, files: Mapping[str, str]) -> Migration:
    return migrate([write(root, files)], Config(root, versions=(16,)))


def of_source(found: Migration) -> tuple[object, ...]:
    """What becomes of the source."""
    files = {file.file: file.after for file in found.files if not is_test(file.file)}
    served = [(each.site, each.how) for each in found.served if not is_test(each.site.file)]
    left = [each for each in found.left if not is_test(each.site.file)]
    return files, served, left


@pytest.mark.parametrize(
    "files",
    [*CASES.values(), *PATCHING.values(), NOTICED],
    ids=[*CASES, *PATCHING, "noticed"],
)
def test_source_is_rewritten_alike_with_its_tests_and_without(
    tmp_path: Path, files: Mapping[str, str]
) -> None:
    source = {name: text for name, text in files.items() if not is_test(name)}
    alone = of_source(migrated(tmp_path / "alone", source))
    assert of_source(migrated(tmp_path / "both", files)) == alone


def test_only_an_import_that_tests_reach_through_stays_for_them(tmp_path: Path) -> None:
    """A patch of ``mod.mpu.getter`` is heard, for it is of Megatron's module."""
    source = {name: text for name, text in STUBBED.items() if not is_test(name)}
    (alone,) = migrated(tmp_path / "alone", source).files
    (both,) = migrated(tmp_path / "both", STUBBED).files
    others = [edit for edit in alone.edits if edit.what != "import"]
    assert [edit for edit in both.edits if edit.what != "import"] == others
    assert b"import mpu" not in alone.after
    kept = both.after.replace(b"from megatron.core import mpu\n", b"")
    assert sorted(kept.splitlines()) == sorted(alone.after.splitlines())


@pytest.mark.contract
def test_tests_that_stub_the_getters_pass_before_and_after(tmp_path: Path) -> None:
    names = {"test_stubs_of_the_modules", "test_getters_by_name"}
    names |= {"test_getters_that_are_assigned", "test_a_model_that_carries_nothing"}
    write(tmp_path, STUBBED)
    assert outcomes(tmp_path) == dict.fromkeys(names, "PASSED")
    found = migrated(tmp_path, STUBBED)
    assert not write_files(found.files)
    assert [file.file for file in found.files] == ["pkg/mod.py"]
    code = (tmp_path / "pkg" / "mod.py").read_text()
    assert "mpu.get" not in code
    assert "ps.get" not in code
    assert outcomes(tmp_path) == dict.fromkeys(names, "PASSED")
    told = {each.site.text: each.detail for each in found.left}
    assert told["mod.mpu.get_tensor_model_parallel_rank"] == (
        "pkg/mod.py:8:20 may ask a model or a collection instead: there pass "
        "megapg.testing.fake_collection(...)"
    )


def test_what_tests_notice_is_told_with_its_place(tmp_path: Path) -> None:
    found = migrated(tmp_path, NOTICED)
    assert [(each.file, each.line, each.what, each.instead) for each in found.noticed] == [
        (
            "tests/test_a.py",
            line,
            f"stands in for {name}, which is passed pg_collection now",
            "let it take pg_collection=None",
        )
        for line, name in ((8, "rank"), (10, "Sampler"))
    ]
    answer = CliRunner().invoke(app, ["migrate", str(tmp_path), "--from-core", "0.16"])
    assert "tests/test_a.py:8: stands in for rank, which is passed" in answer.output
    details = {each.site.span.line: each.detail for each in found.left}
    assert details[9].startswith("a.py:18:32 may ask a model or a collection instead")
    assert details[15] == ""  # nobody passes anything to that one


def test_what_stands_in_for_an_autograd_function_is_told(tmp_path: Path) -> None:
    source = (
        "import torch\nfrom megatron.core import mpu\n\n\n"
        "class Sum(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        return x + mpu.get_tensor_model_parallel_rank()\n\n    @staticmethod\n"
        "    def backward(ctx, grad):\n        return grad\n\n\n"
        "def step(model, x):\n    return Sum.apply(x)\n"
    )
    test = (
        'import importlib\n\na = getattr(importlib, "import_module")("a")\n\n\n'
        "def test_sum(monkeypatch):\n    loader = a.loader()\n"
        '    loader.forward = print\n    monkeypatch.setattr(a.Sum, "apply", lambda x: x)\n'
    )
    found = migrated(tmp_path, {"a.py": source, "tests/test_a.py": test})
    what = "stands in for Sum, which is passed pg_collection now"
    assert [(each.line, each.what) for each in found.noticed] == [(9, what)]


def test_where_the_source_assigns_is_said(tmp_path: Path) -> None:
    found = migrated(tmp_path, CASES["a getter that source assigns"])
    assert [each.detail for each in found.left] == [
        "the getter is replaced elsewhere, at pkg/b.py:3",
        "",
    ]
    read_back = (
        "from megatron.core import parallel_state as ps\n\n\n"
        "def f(value):\n    ps._GROUP = value\n    return ps._TENSOR_MODEL_PARALLEL_GROUP\n"
    )
    found = migrated(tmp_path / "other", {"a.py": read_back})
    assert found.left[-1].detail == (
        "its function writes variables of the module and reads them back, at a.py:5"
    )
