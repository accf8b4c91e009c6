"""The package as a house: what imports what, what ships, and that the commands are there."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

import megapg

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megapg"

# The floors of the house: part of megapg -> (its floor, the highest floor it may import). A part
# is a module or a subpackage; its own modules may always import each other.
FLOORS = {
    "errors": (0, -1),
    "layout": (0, -1),
    "migrate": (1, 0),  # runs where torch is not installed
    "collection": (1, 0),
    "launch": (1, 0),
    "signals": (1, 0),
    "comms": (2, 1),
    "rebind": (3, 2),
    "ownership": (4, 3),
    "sessions": (5, 4),
    "megatron": (6, 5),
    "rng": (7, 6),
    "checkpoint": (8, 7),
    "mesh": (7, 6),
    "testing": (9, 9),
    "demo": (9, 9),
    "doctor": (9, 9),
    "plan": (9, 9),
    "cli": (9, 9),
}
# The exceptions are for every part, also for those on the same floor.
FOR_ALL = "errors"
# Its command line has Typer and Rich.
MIGRATE_COMMANDS = (
    PACKAGE / "migrate" / "commands.py",
    PACKAGE / "migrate" / "report" / "screen.py",
)
STDLIB_ONLY = ("errors", "layout", "migrate")
FIRST_FLOOR_WITH_MEGATRON = 6

PARALLEL_STATE = ("megatron.core.parallel_state", "megatron.core.mpu")

TARGETS = {"help", "setup", "demo", "test", "test-newest", "test-gpu", "bench", "lint", "clean"}


# --- what imports what ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported name: ``from a import b`` is ``a.b``, which may be a module or not."""

    file: Path
    line: int
    name: str

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]

    @property
    def part(self) -> str:
        """The part of megapg it is in; '' for megapg's own metadata."""
        _, _, rest = self.name.partition(".")
        first = rest.partition(".")[0]
        # A name that the package re-exports counts as what it stands for.
        return megapg._HOMES.get(first, f"megapg.{first}").split(".")[1]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.name}"


def imports_of(file: Path) -> Iterator[Import]:
    """Every import in the file, also those inside functions and under TYPE_CHECKING."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            called = called.id if isinstance(called, ast.Name) else called
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names = [node.args[0].value]
        for name in names:
            yield Import(file, getattr(node, "lineno", 0), name)


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def files_of_megapg() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def said(imports: list[Import]) -> str:
    return "\n".join(map(str, imports))


def test_every_part_has_a_floor() -> None:
    parts = {part_of(file) for file in files_of_megapg()} - {"__init__", "__main__"}
    assert parts <= set(FLOORS), "new part: give it a floor here and in the design"
    assert set(STDLIB_ONLY) <= parts, "the scan looks in the wrong place"


def test_each_floor_imports_only_floors_below() -> None:
    wrong = []
    for file in files_of_megapg():
        part = part_of(file)
        if part in ("__init__", "__main__"):  # names everything, lazily
            continue
        highest = FLOORS[part][1]
        for found in imports_of(file):
            if found.root != "megapg" or found.part in (part, FOR_ALL, "__version__"):
                continue
            # A part on no floor (`import megapg`, which is everything) is for the top.
            if FLOORS.get(found.part, (9, 9))[0] > highest:
                wrong.append(found)
    assert not wrong, said(wrong)


def test_layout_errors_and_migrate_need_only_the_standard_library() -> None:
    allowed = {*sys.stdlib_module_names, "megapg"}
    wrong = [
        found
        for file in files_of_megapg()
        if part_of(file) in STDLIB_ONLY and file not in MIGRATE_COMMANDS
        for found in imports_of(file)
        if found.root not in allowed
    ]
    assert not wrong, said(wrong)


def test_the_lower_floors_do_not_know_megatron() -> None:
    wrong = [
        found
        for file in files_of_megapg()
        if FLOORS.get(part_of(file), (9, 9))[0] < FIRST_FLOOR_WITH_MEGATRON
        for found in imports_of(file)
        if found.root == "megatron"
    ]
    assert not wrong, said(wrong)


def test_only_the_bridge_imports_parallel_state() -> None:
    files = [file for file in files_of_megapg() if part_of(file) not in ("megatron", "migrate")]
    files += sorted((ROOT / "benchmarks").rglob("*.py"))
    wrong = [
        found
        for file in files
        for found in imports_of(file)
        if any(f"{found.name}.".startswith(f"{name}.") for name in PARALLEL_STATE)
    ]
    assert not wrong, said(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from megatron.core import parallel_state", "megatron.core.parallel_state"),
        ("import importlib\nimportlib.import_module('megatron.core')", "megatron.core"),
        ("def f():\n    from . import session", "megapg.session"),
        ("from .comms.plan import Communicator", "megapg.comms.plan.Communicator"),
    ],
)
def test_the_scan_sees_every_way_to_import(
    source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "megapg" / "some.py"
    file.parent.mkdir()
    file.write_text(source)
    assert expected in [found.name for found in imports_of(file)]


# --- what importing costs, and what is there ------------------------------------------------------


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


@pytest.mark.parametrize("module", ["megapg", "megapg.migrate", "megapg.layout", "megapg.errors"])
def test_importing_needs_neither_torch_nor_megatron(module: str) -> None:
    trace = python("-X", "importtime", "-c", f"import {module}").stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in trace.splitlines()}
    assert "megapg" in imported
    assert not imported & {"torch", "megatron", "numpy"}


def test_listing_the_names_loads_nothing() -> None:
    code = (
        "import megapg, sys; dir(megapg); print('torch' in sys.modules, 'megatron' in sys.modules)"
    )
    assert python("-c", code).stdout.split() == ["False", "False"]


@pytest.mark.parametrize("name", megapg.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(megapg, name) is not None
    assert name in dir(megapg)


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


@pytest.mark.parametrize("name", ["megatron.session_arguments", "testing.run_distributed"])
def test_import_megapg_alone_reaches_the_parts(name: str) -> None:
    code = (
        "import megapg, sys\n"
        f"assert {name.partition('.')[0]!r} in dir(megapg)\n"
        "assert not {'torch', 'megatron', 'megapg.megatron', 'megapg.testing'} & set(sys.modules)\n"
        f"print(megapg.{name}.__name__)"
    )
    assert python("-c", code).stdout.strip() == name.partition(".")[2]


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

    sources = {str(file.relative_to(ROOT)) for file in files_of_megapg()}
    assert sources | {"megapg/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"megapg", info}
    assert metadata["Version"] == megapg.__version__
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "megapg = megapg.cli:app" in entry_points
    # torch is the machine's business: a plain install must not bring gigabytes.
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in required if re.match("torch|megatron", line)]


# --- the commands ---------------------------------------------------------------------------------


def run_in(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Not as a part of the `make test` that may run this.
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        command,
        cwd=folder,
        env={**env, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What make needs of a clean clone: nothing is installed yet."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    return tmp_path


@pytest.fixture
def no_python(tmp_path: Path) -> dict[str, str]:
    """An environment in which every Python is, as under pyenv, a shim of one that isn't there."""
    shims = tmp_path / "shims"
    shims.mkdir()
    minors = ["", *(f".{minor}" for minor in range(8, 20))]
    for name in (*(f"python3{minor}" for minor in minors), "pyenv", "uv"):
        (shims / name).write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
        (shims / name).chmod(0o755)
    return {"PATH": f"{shims}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYENV_ROOT": ""}


def test_make_alone_lists_every_target(clone: Path) -> None:
    listed = run_in(clone, "make").stdout
    assert {line.split()[1] for line in listed.splitlines()} >= TARGETS
    assert all(len(line.split()) > 2 for line in listed.splitlines()), "say what each is for"
    assert run_in(clone, "make", "help").stdout == listed


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_make_has_the_target(target: str, clone: Path) -> None:
    result = run_in(clone, "make", "-n", target)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("target", ["demo", "test", "lint", "bench"])
def test_everyday_targets_leave_the_newest_core_alone(target: str, clone: Path) -> None:
    planned = run_in(clone, "make", "-n", target).stdout
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
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == f"megapg {megapg.__version__}\n"
