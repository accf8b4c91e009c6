"""A tree that passes its linter, formatter and import sorter passes them after a migration."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from migrate_cases import cases
from test_migrate_engine import Case, check
from trees import write

import megapg.migrate
from megapg.migrate.python.layout import laid_out
from megapg.migrate.python.logical import Unsure, read
from megapg.migrate.python.source import line_starts

STYLE = cases("style")


@pytest.mark.parametrize("name", STYLE)
def test_written_as_the_project_writes(tmp_path: Path, name: str) -> None:
    check(tmp_path, STYLE[name])


def faults(root: Path, files: dict[str, str]) -> list[str]:
    """What ruff finds in a tree, by its own settings, and what it would write otherwise."""
    write(root, files)
    found = []
    formats = any(name.endswith(".toml") and "[tool.ruff.format]" in files[name] for name in files)
    for command in ["check"], *([["format", "--check"]] if formats else []):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "--quiet", "."],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        found += [ran.stdout + ran.stderr] if ran.returncode else []
    return found


@pytest.mark.parametrize("name", [name for name in STYLE if "ruff" in STYLE[name]])
def test_ruff_finds_nothing_new(tmp_path: Path, name: str) -> None:
    case = Case(STYLE[name])
    assert faults(tmp_path / "before", case.before) == []
    assert faults(tmp_path / "after", case.after) == []


def statements(text: str) -> list[int]:
    """Where each statement of a text begins, imports apart."""
    starts, imports = line_starts(text), ast.Import | ast.ImportFrom
    return [
        starts[node.lineno - 1] + node.col_offset
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and not isinstance(node, imports)
    ]


def test_a_layout_that_is_certain_is_that_of_ruff() -> None:
    """As ruff has laid out this very package."""
    counts = {"sure": 0, "unsure": 0}
    for file in Path(megapg.migrate.__file__).parent.rglob("*.py"):
        text = file.read_text()
        for begin in statements(text) if text.isascii() else ():
            try:
                statement = read(text, begin)
                gaps = laid_out(statement, 100, "\n")
            except Unsure:
                counts["unsure"] += 1
                continue
            there = [text[slice(*statement.gap(i + 1))] for i in range(len(gaps))]
            assert gaps == there, (file, text[begin : statement.stop])
            counts["sure"] += any("\n" in gap for gap in gaps)
    assert counts["sure"] > 100, counts


@pytest.mark.parametrize(
    "text",
    ["v = lambda y, z=first(1): y + second(2)\n", "assert lambda y, z: first(1) or second(2)\n"],
)
def test_what_a_lambda_has_is_none_of_its_statement(text: str) -> None:
    """Its = is no assignment, and its comma is before no message: parentheses there break it."""
    assert len(laid_out(read(text, 0), 100, "\n")) > 10
    with pytest.raises(Unsure):
        laid_out(read(text, 0), 30, "\n")
