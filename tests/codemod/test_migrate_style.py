"""A tree that passes its linter, formatter and import sorter passes them after a migration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from migrate_cases import cases
from test_migrate_engine import Case, check
from trees import write

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
