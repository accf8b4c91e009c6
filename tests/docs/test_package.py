"""Check the cost of an import, the content of the package, and its commands.

test_architecture.py checks which modules import which.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from processes import captured

import megapg

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megapg"

# --- imports --------------------------------------------------------------------------------------


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        check=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "module",
    [
        "megapg",
        "megapg.migrate",
        "megapg.upstream.mapping",
        "megapg.layout",
        "megapg.errors",
        "megapg.tools.plan",
    ],
)
def test_importing_needs_neither_torch_nor_megatron(module: str) -> None:
    trace = python("-X", "importtime", "-c", f"import {module}; dir({module})").stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in trace.splitlines()}
    assert "megapg" in imported
    assert not imported & {"torch", "megatron", "numpy"}


def test_every_public_name_is_listed() -> None:
    """test_architecture.py gets each name."""
    assert set(megapg.__all__) <= set(dir(megapg))


def test_the_public_names_are_told_alike_to_type_checkers() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    told = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megapg.")
        for alias in node.names
    }
    assert told == megapg._HOMES
    assert megapg.__all__ == sorted(megapg._HOMES)


def test_import_megapg_alone_reaches_the_parts() -> None:
    code = """if True:
        import megapg, sys
        assert {"megatron", "testing"} <= {*dir(megapg)}
        assert not {"torch", "megatron", "megapg.megatron", "megapg.testing"} & {*sys.modules}
        print(megapg.testing.run_distributed.__name__)
        assert not {"megatron", "megapg.megatron"} & {*sys.modules}
        print(megapg.megatron.session_arguments.__name__)
    """
    assert python("-c", code).stdout.split() == ["run_distributed", "session_arguments"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = megapg.no_such_name


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_types_and_its_licence(tmp_path: Path) -> None:
    python("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), ".")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"megapg-{megapg.__version__}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
        entry_points = archive.read(f"{info}/entry_points.txt").decode()

    sources = {str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*.py")}
    assert sources | {"megapg/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"megapg", info}
    assert metadata["Version"] == megapg.__version__
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "megapg = megapg.tools.cli:app" in entry_points
    # Users install torch themselves: a plain install must not download gigabytes.
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in required if re.match("torch|megatron", line)]


# --- the commands ---------------------------------------------------------------------------------


def run_in(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Remove the variables of a `make test` that runs this test.
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    return captured(
        command,
        cwd=folder,
        env={**env, **variables},
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of the files that make needs in a clean clone, with nothing installed."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


@pytest.fixture
def no_python(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which each Python is a shim of a missing version, as with pyenv."""
    shims = tmp_path / "shims"
    shims.mkdir()
    minors = ["", *(f".{minor}" for minor in range(8, 20))]
    for name in (*(f"python3{minor}" for minor in minors), "pyenv", "uv"):
        (shims / name).write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
        (shims / name).chmod(0o755)
    return {"PATH": f"{shims}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYENV_ROOT": ""}


def test_make_alone_lists_every_target(clone: Path) -> None:
    listed = run_in(clone, "make").stdout
    assert run_in(clone, "make", "help").stdout == listed
    assert all(len(line.split()) > 2 for line in listed.splitlines()), "say what each is for"
    targets = [line.split()[1] for line in listed.splitlines()]
    planned = run_in(clone, "make", "-n", *targets)
    assert planned.returncode == 0, planned.stderr
    assert named_in_pages_and_ci() <= set(targets)


def named_in_pages_and_ci() -> set[str]:
    """Return the targets that a page in the top folder, a result, or CI names."""
    pages = [*ROOT.glob("*.md"), ROOT / "benchmarks/RESULTS.md", ROOT / ".ci/run"]
    code = r"(?:`|^\$ |^step \d+ |^)make ((?:[a-z][a-z-]*(?: |(?=[`\n])))+)"
    found = [re.findall(code, page.read_text(), re.M) for page in pages if page.exists()]
    return {target for page in found for part in page for target in re.findall(r"[\w-]+", part)}


def test_everyday_targets_leave_the_newest_core_alone(clone: Path) -> None:
    planned = run_in(clone, "make", "-n", "demo", "test", "lint", "bench", "docs").stdout
    assert ".venv " in planned
    assert "newest" not in planned
    assert "3.12" not in planned


def test_arguments_reach_the_demo(clone: Path) -> None:
    planned = run_in(clone, "make", "-n", "demo", "ARGS=--experts 4 --ep 2").stdout
    assert planned.rstrip().endswith(".venv/bin/megapg demo --experts 4 --ep 2")


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        ("test", "make setup PYTHON=/path/to/python3.11"),
        ("test-newest", "make test-newest PYTHON312=/path/to/python3.12"),
    ],
)
def test_without_a_python_that_runs_make_says_what_to_do(
    target: str, advice: str, clone: Path, no_python: dict[str, str]
) -> None:
    result = run_in(clone, "make", target, **no_python)
    assert result.returncode != 0
    assert advice in result.stderr
    assert not list(clone.glob(".venv*"))


@pytest.mark.parametrize("ci", [True, False])
def test_a_torch_that_cannot_be_had_fails_nobody_but_who_asks(ci: bool, clone: Path) -> None:
    (clone / ".ci" / "venv.sh").write_text("echo 'no such release' >&2; exit 1\n")
    asked = run_in(clone, "make", "test-torch", "TORCH_LOWEST=2.8.1", CI="true" if ci else "")
    assert (asked.returncode == 0) is ci
    assert asked.stderr.count("nothing was tested on it") == 2
    assert "LEFT OUT: torch 2.8.1" in asked.stderr


@pytest.fixture
def fake_environments(clone: Path) -> None:
    """Make environments whose Python records its calls, reports, and fails on torch 2.6.0."""
    python = clone / "python"
    python.write_text(
        "#!/bin/sh\n"
        'echo "$@"\n'
        "for last; do :; done\n"
        'suite=\'<testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10">\'\n'
        'echo "<testsuites>$suite</testsuite></testsuites>" >"${last#*=}"\n'
        'case "$0" in *2.6.0*) exit 1 ;; esac\n'
    )
    python.chmod(0o755)
    (clone / ".ci" / "venv.sh").write_text('mkdir -p "$1/bin"; cp python "$1/bin/python"\n')


@pytest.mark.usefixtures("fake_environments")
def test_what_fails_on_one_torch_fails(clone: Path) -> None:
    asked = run_in(clone, "make", "test-torch", "ARGS=-k some", "TORCH_BETWEEN=2.9.1", CI="true")
    assert asked.returncode != 0
    assert asked.stdout.count("-m torch -k some") == 3  # runs on the others, too
    table = asked.stdout.partition("| | passed | skipped | failed |\n")[2]
    rows = [f"| torch {each} | 4 | 3 | 3 |" for each in ("2.6.0", "2.9.1", "2.15.0")]
    assert table.splitlines()[1:] == rows


@pytest.mark.usefixtures("fake_environments")
def test_the_cores_between_make_a_table_too(clone: Path) -> None:
    asked = run_in(clone, "make", "test-cores")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.count("-m contract") == 2
    rows = [f"| core {each} | 4 | 3 | 3 |" for each in ("0.17.1", "0.18.2")]
    assert asked.stdout.splitlines()[-2:] == rows


def test_a_python_too_old_or_not_there_is_refused(clone: Path, tmp_path: Path) -> None:
    missing = run_in(clone, "make", "setup", f"PYTHON={tmp_path}/none")
    assert missing.returncode != 0
    assert "does not run" in missing.stderr

    old = tmp_path / "old"
    old.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1 ;; esac\necho "3.9 $0"\n')
    old.chmod(0o755)
    refused = run_in(clone, "make", "setup", f"PYTHON={old}")
    assert refused.returncode != 0
    assert "is Python 3.9; .venv needs 3.11 or newer" in refused.stderr


def test_the_version_is_said() -> None:
    command = [sys.executable, "-m", "megapg", "--version"]
    said = captured(command, timeout=60, check=True).stdout
    assert said == f"megapg {megapg.__version__}\n"
