"""Cases for the codemod, which are text files in ``tests/codemod/cases``.

A file has one case below each line ``=== heading``. A line ``@@ name`` begins a file of the case.
Getters have short names in capitals.

In a ``.diff`` file the lines are marked as in a diff: a minus is only in the old text, a plus only
in the new text. ``???`` lists the carriers of the rewritten uses in the order of the tree, ``!!!``
the reasons of the others, and ``$$$`` settings as JSON. A heading with ``XFAIL reason`` names a
known bug.

In ``programs.txt`` each case has a module ``main`` with a function ``run()``, which calls ``f()``
unless it is there. A file that uses ``mpu`` begins with its import unless the file imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from trees import write

import megapg
from megapg.migrate.config import Config
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Migration
from megapg.testing import fake_collection

CASES = Path(__file__).parents[1] / "codemod" / "cases"
VERSIONS = (16,)
# No two groups have the same size, and the ranks differ as far as they can.
LAYOUT: Mapping[str, int] = {"tp": 3, "cp": 2, "pp": 5, "ep": 6, "expt_tp": 4}
GETTERS = {
    "TP_RANK": "get_tensor_model_parallel_rank",
    "TP_SIZE": "get_tensor_model_parallel_world_size",
    "TP_GROUP": "get_tensor_model_parallel_group",
    "PP_RANK": "get_pipeline_model_parallel_rank",
    "PP_SIZE": "get_pipeline_model_parallel_world_size",
    "CP_SIZE": "get_context_parallel_world_size",
    "DP_RANK": "get_data_parallel_rank",
    "DP_SIZE": "get_data_parallel_world_size",
    "DP_GROUP": "get_data_parallel_group",
    "EMBD_GROUP": "get_embedding_group",
    "FIRST": "is_pipeline_first_stage",
    "LAST": "is_pipeline_last_stage",
    "SET_TP": "set_tensor_model_parallel_rank",
}
_GETTER = re.compile(rf"\b({'|'.join(GETTERS)})\b")


def with_names(text: str) -> str:
    """Return a text with the real names of the getters."""
    return _GETTER.sub(lambda found: GETTERS[found[0]], text)


def sections(name: str, folder: Path = CASES) -> Iterator[tuple[str, str]]:
    """Yield the headings of a file of cases, and the text below each."""
    parts = re.split(r"^=== (.*)\n", (folder / name).read_text(), flags=re.MULTILINE)[1:]
    yield from zip(parts[::2], map(with_names, parts[1::2]), strict=True)


def parameters(name: str) -> list[ParameterSet]:
    """Return the cases of a file for ``pytest.mark.parametrize``; those with XFAIL are marked."""
    found = []
    for heading, text in sections(name):
        title, _, reason = heading.partition(" XFAIL ")
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        found.append(pytest.param(text, id=title, marks=marks))
    return found


def files_of(text: str) -> dict[str, str]:
    """Return the files of a case; text above the first ``@@`` is ``main.py``."""
    first, *rest = re.split(r"^@@ (.*)\n", text, flags=re.MULTILINE)
    named = dict(zip(rest[::2], rest[1::2], strict=True))
    return {"main.py": first, **named} if first.strip() else named


def program_of(text: str) -> dict[str, str]:
    """Return the files of a program, with the lines that the case leaves out."""
    files = files_of(text)
    for name, content in files.items():
        if re.search(r"(?<![\w.])mpu\.", content) and not re.search(
            r"\bimport\b.*\bmpu\b", content
        ):
            files[name] = f"from megatron.core import mpu\n{content}"
    if "def run(" not in files["main.py"]:
        files["main.py"] += "def run(): return f()\n"
    return files


@dataclass
class Case:
    """A case of a ``.diff`` file."""

    before: dict[str, str] = field(default_factory=dict)
    after: dict[str, str] = field(default_factory=dict)
    hows: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    settings: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Case:
        """Read the text of a case."""
        case = cls()
        for name, lines in files_of(text).items():
            old, new = [], []
            for line in lines.rstrip("\n").split("\n"):
                mark, content = line[:1], line[1:]
                if line.startswith("??? "):
                    case.hows = content[3:].split()
                elif line.startswith("!!! "):
                    case.reasons = content[3:].split()
                elif line.startswith("$$$ "):
                    given = json.loads(content[3:]).items()
                    case.settings = {key: tuple(value) for key, value in given}
                else:
                    assert mark in ("", " ", "-", "+"), line
                    old += [content] * (mark != "+")
                    new += [content] * (mark != "-")
            case.before[name] = "\n".join(old).rstrip("\n") + "\n"
            case.after[name] = "\n".join(new).rstrip("\n") + "\n"
        return case


def migrated(root: Path, **settings: tuple[str, ...]) -> Migration:
    """Migrate a tree and write the new files; check that they compile and are final."""
    config = Config(root, versions=VERSIONS, **settings)  # type: ignore[arg-type]
    migration = migrate([root], config)
    for each in migration.files:
        compile(each.after, each.file, "exec", dont_inherit=True)
        each.path.write_bytes(each.after)
    assert not migrate([root], config).files, "a second run edits again"
    return migration


# -- programs --------------------------------------------------------------------------------------


@contextlib.contextmanager
def globals_published() -> Iterator[megapg.ProcessGroupCollection]:
    """Publish fake groups as the globals."""
    with (
        fake_collection(**LAYOUT, world_size=120, rank=89) as pg,  # type: ignore[arg-type]
        megapg.megatron.globals_policy("silent"),
        megapg.published(pg),
    ):
        yield pg


@contextlib.contextmanager
def importable(root: Path) -> Iterator[None]:
    """Import modules from a folder, and forget them at the end."""
    modules = {*sys.modules}
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        sys.dont_write_bytecode = bytecode
        names = {path.stem for path in root.iterdir()}
        for module in {*sys.modules} - modules:
            if module.partition(".")[0] in names:
                del sys.modules[module]


def outcome(root: Path) -> str:
    """Return what ``run()`` of the module ``main`` prints and returns, or its error."""
    printed = io.StringIO()
    with importable(root), contextlib.redirect_stdout(printed):
        try:
            result = repr(importlib.import_module("main").run())
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
    return printed.getvalue() + result


def runs(root: Path, files: Mapping[str, str]) -> tuple[str, str, Migration]:
    """Return the outcome of a program before and after its migration."""
    write(root, files)
    before = outcome(root)
    migration = migrated(root)
    return before, outcome(root), migration
