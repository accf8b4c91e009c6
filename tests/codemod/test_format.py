"""Test that new texts are formatted by the project's tools if the old texts were."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from trees import write

from megapg.migrate import format as module
from megapg.migrate.format import formatted
from megapg.migrate.migration import Rewritten

OLD = b"import os\nimport sys\n\n\ndef f():\n    return os.sep + sys.path[0]\n"
UNSORTED = b"import os\nimport megapg\nimport sys\n\n\ndef f( ):\n    return os.sep + sys.path[0]\n"
SORTED = b"import os\nimport sys\n\nimport megapg\n\n\ndef f():\n    return os.sep + sys.path[0]\n"
RUFF = "[tool.ruff]\nline-length = 79\nlint.select = ['I']\n"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Clear the caches of programs and settings for each test."""
    for cached in (module._start, module._is_configured):
        cached.cache_clear()
    yield
    module._start.cache_clear()


def run(root: Path, files: dict[str, str], before: bytes = OLD, after: bytes = UNSORTED) -> bytes:
    """Return the new text of ``p/a.py``."""
    write(root, {**files, "p/a.py": before})
    steps: list[tuple[str, int, int]] = []
    (file,), missing = formatted(
        [Rewritten("p/a.py", root / "p" / "a.py", before, after)],
        root,
        lambda *step: steps.append(step),
    )
    assert steps == [("formatting", 1, 1)]
    assert (root / "p" / "a.py").read_bytes() == before
    assert not missing
    return file.after


@pytest.mark.parametrize(
    "files",
    [
        {"pyproject.toml": RUFF},
        {"pyproject.toml": "[tool.ruff.lint]\nextend-select = ['I001']\n"},
        {"ruff.toml": "lint.select = ['ALL']"},
        {".ruff.toml": "line-length = 79\nlint.select = ['F', 'I']"},
        {"p/ruff.toml": "lint.select = ['I']"},
    ],
    ids=str,
)
def test_ruff_is_run_if_it_is_configured(tmp_path: Path, files: dict[str, str]) -> None:
    assert run(tmp_path, files) == SORTED


@pytest.mark.parametrize("select", ["['E']", "['ALL']\nlint.ignore = ['I']"])
def test_imports_are_sorted_only_if_the_project_selects_that(tmp_path: Path, select: str) -> None:
    after = run(tmp_path, {"ruff.toml": f"lint.select = {select}\n"})
    assert after == UNSORTED.replace(b"f( )", b"f()")


def test_tools_that_are_not_installed_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = module._start
    monkeypatch.setattr(module, "_start", lambda each: start(each) if each == "ruff" else ())
    write(tmp_path, {"pyproject.toml": "[tool.black]\n[tool.isort]\n"})
    file = Rewritten("a.py", tmp_path / "a.py", OLD, UNSORTED)
    assert formatted([file, file], tmp_path, lambda *step: None)[1] == {"black": 2, "isort": 2}
    module._is_configured.cache_clear()
    write(tmp_path, {"pyproject.toml": f"[tool.black]\n[tool.isort]\n{RUFF}"})
    assert not formatted([file], tmp_path, lambda *step: None)[1]  # ruff replaces both


def test_a_pre_commit_hook_counts_as_settings(tmp_path: Path) -> None:
    hooks = "repos:\n- repo: x\n  hooks:\n    - id: ruff-format  # comment\n"
    after = run(tmp_path, {".pre-commit-config.yaml": hooks})
    assert b"def f():" in after
    assert after.startswith(b"import os\nimport megapg\n")  # no hook sorts imports


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"pyproject.toml": "[project]\nname = 'ruff'\n"},
        {"pyproject.toml": "[tool.ruffian]\n"},
        {"ruff.toml": "line-length = 'wide'\n"},  # ruff fails
    ],
    ids=str,
)
def test_without_settings_the_text_stays(tmp_path: Path, files: dict[str, str]) -> None:
    assert run(tmp_path, files) == UNSORTED


def test_settings_above_the_project_end_at_the_repository(tmp_path: Path) -> None:
    sort = "lint.select = ['I']"
    write(tmp_path, {"ruff.toml": sort, "repo/.git/HEAD": "", "repo/project/pyproject.toml": ""})
    assert run(tmp_path / "repo" / "project", {}) == UNSORTED
    module._is_configured.cache_clear()
    write(tmp_path, {"repo/ruff.toml": sort})
    assert run(tmp_path / "repo" / "project", {}) == SORTED


def test_a_file_that_was_not_formatted_is_not_formatted_now(tmp_path: Path) -> None:
    before = OLD.replace(b"f()", b"f( )")
    after = run(tmp_path, {"pyproject.toml": RUFF}, before)
    assert after == SORTED.replace(b"f()", b"f( )")  # its imports were sorted
    before = OLD.replace(b"import os\nimport sys", b"import sys\nimport os")
    after = run(tmp_path, {"pyproject.toml": RUFF}, before)
    assert after == UNSORTED.replace(b"f( )", b"f()")


def test_the_settings_of_the_project_are_used(tmp_path: Path) -> None:
    settings = "[tool.ruff.format]\nquote-style = 'single'\n"
    before, after = OLD + b"\n\nX = 'a'\n", OLD + b"\n\nX = 'a'\nY = \"b\"\n"
    assert run(tmp_path, {"pyproject.toml": settings}, before, after).endswith(b"Y = 'b'\n")


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_newlines_and_encodings_stay(tmp_path: Path, newline: bytes) -> None:
    before, after, expected = (
        (b"# coding: utf-8\nNAME = '\xc3\xa9'\n\n" + text).replace(b"\n", newline)
        for text in (OLD[22:], OLD[22:].replace(b"f()", b"f( )"), OLD[22:])
    )
    settings = "[tool.ruff.format]\nquote-style = 'preserve'\n[tool.ruff.lint]\nignore = ['ALL']\n"
    assert run(tmp_path, {"pyproject.toml": settings}, before, after) == expected


def test_a_new_file_is_formatted_and_the_vendored_module_is_not_sorted(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": RUFF})
    files = [
        Rewritten(f"{name}.py", tmp_path / f"{name}.py", b"", UNSORTED, True, is_runtime=is_runtime)
        for name, is_runtime in (("a", False), ("b", True))
    ]
    (plain, runtime), _ = formatted(files, tmp_path, lambda *step: None)
    assert plain.after == SORTED
    assert runtime.after == UNSORTED.replace(b"f( )", b"f()")


# --- which tool -----------------------------------------------------------------------------------


def program(folder: Path, name: str, script: str) -> None:
    """Write a fake formatter: ``script`` changes ``text``, which is read from stdin."""
    folder.mkdir(exist_ok=True)
    text = f"#!{sys.executable} -I\nimport sys\ntext = sys.stdin.buffer.read()\n{script}\n"
    write(folder, {name: text + "sys.stdout.buffer.write(text)\n"})
    (folder / name).chmod(stat.S_IRWXU)


BOTH = {"pyproject.toml": f"[tool.black]\n[tool.isort]\n{RUFF}"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a folder with fake formatters first on the path."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    program(folder, "black", "text = text.replace(b'NEW', b'by black')")
    program(folder, "isort", "text = text.replace(b'NEW', b'by isort, NEW')")
    return folder


def test_black_and_isort_come_before_ruff(tmp_path: Path, programs: Path) -> None:
    after = run(tmp_path, BOTH, OLD, UNSORTED + b"# NEW\n")
    assert after == UNSORTED + b"# by isort, by black\n"


def test_ruff_is_run_if_black_is_left_over_from_before(tmp_path: Path, programs: Path) -> None:
    program(programs, "black", "text = text.replace(b'def', b'  def')")
    program(programs, "isort", "text = text.replace(b'import', b' import')")
    assert run(tmp_path, BOTH) == SORTED


@pytest.mark.parametrize("script", ["sys.exit(1)", "sys.exit(0)"], ids=["fails", "prints nothing"])
def test_a_tool_that_fails_changes_nothing(tmp_path: Path, programs: Path, script: str) -> None:
    program(programs, "black", script)
    files = {"pyproject.toml": "[tool.black]\n", "setup.cfg": "[isort]\nprofile = black\n"}
    assert run(tmp_path, files, OLD, UNSORTED + b"# NEW\n") == UNSORTED + b"# by isort, NEW\n"


def test_a_module_of_the_project_is_not_taken_for_a_tool(tmp_path: Path) -> None:
    files = {"pyproject.toml": RUFF, "ruff.py": "raise SystemExit(3)", "p/ruff.py": "1 / 0"}
    assert run(tmp_path, files) == SORTED


@pytest.mark.skipif(
    not all(map(module._start, ("black", "isort"))), reason="black or isort is not installed"
)
@pytest.mark.parametrize("settings", [".isort.cfg", "setup.cfg", "tox.ini"])
def test_the_real_black_and_isort(tmp_path: Path, settings: str) -> None:
    section = "settings" if settings == ".isort.cfg" else "isort"
    files = {
        "pyproject.toml": "[tool.black]\nskip-string-normalization = true\n",
        settings: f"[{section}]\nprofile = black\nlines_between_types = 1\n",
    }
    before = OLD + b"\n\nX = 'a'\n"
    after = run(tmp_path, files, before, UNSORTED + b"X = 'a'\nfrom re import sub\n")
    assert after == SORTED + b"\n\nX = 'a'\nfrom re import sub\n"
