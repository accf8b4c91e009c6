"""Modules that import each other, in an order that works: they import after a migration, too.

Real files, imported by a Python of their own, before and after.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_migrate_engine import run
from trees import contents, write
from typer.testing import CliRunner

from megapg.cli.migrate import app
from megapg.migrate.config import Config
from megapg.migrate.edit.soundness import verify
from megapg.migrate.engine import migrate
from megapg.migrate.find.index import find_sites
from megapg.migrate.migration import EXCUSE, WHY_UNUSED, Edit, Rewritten

GETTER = "get_tensor_model_parallel_rank"
SIZE = "get_tensor_model_parallel_world_size"
STATE = f"""\
from .utils import Buffer

_BUFFER = Buffer()


def {GETTER}():
    return 0


def {SIZE}():
    return 1
"""
UTILS = f"""\
from megatron.core import parallel_state


class Buffer:
    pass


def where(pg_collection=None):
    return parallel_state.{GETTER}()  # megapg: keep
"""
ASKS = f"""\
from megatron.core.parallel_state import (
    {GETTER},
    {SIZE},
)

from .utils import where


def loss(pg_collection=None):
    return {GETTER}() + {SIZE}() + where()
"""
LEFT = f"{WHY_UNUSED}\nfrom megatron.core.parallel_state import {GETTER}{EXCUSE}\n"
# As forks of Megatron-LM have it: utils can't be the first of the two.
CORE = {
    "megatron/core/__init__.py": "import megatron.core.loss\nimport megatron.core.utils\n",
    "megatron/core/parallel_state.py": STATE,
    "megatron/core/utils.py": UTILS,
    "megatron/core/loss.py": ASKS,
    "megapg.py": "def resolve(groups):\n    return groups\n",  # importing it needs no torch
    "pyproject.toml": "[tool.megapg]\nfrom-core = '0.16'\nexclude = ['megapg.py']\n",
}
PLAIN = STATE.replace("from .utils import Buffer\n\n_BUFFER = Buffer()\n\n\n", "")


def error(root: Path, module: str) -> str:
    """What the import of a module says that fails; nothing where it does not."""
    ran = subprocess.run(
        [sys.executable, "-B", "-S", "-c", f"import {module}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stderr


def migrated(
    root: Path, files: Mapping[str, str], *modules: str, **config: object
) -> dict[str, str]:
    """The files after, written: the modules import before and after, and a second run edits
    nothing.
    """
    write(root, files)
    assert [error(root, module) for module in modules] == [""] * len(modules)
    found = run(root, **{"exclude": ("megapg.py",), **config})
    write(root, {file.file: file.after for file in found.files})
    assert [error(root, module) for module in modules] == [""] * len(modules)
    assert run(root, **{"exclude": ("megapg.py",), **config}).files == []
    return {name: data.decode() for name, data in contents(root).items()}


def test_the_import_stays_that_others_need(tmp_path: Path) -> None:
    after = migrated(tmp_path, CORE, "megatron.core", "megatron.core.utils")
    loss = after["megatron/core/loss.py"]
    assert LEFT in loss
    assert loss.count(GETTER) == 1
    assert 'pg.rank("tp") + pg.size("tp")' in loss
    write(tmp_path, {"megatron/core/loss.py": loss.replace(LEFT, "")})
    assert "cannot import name 'Buffer'" in error(tmp_path, "megatron.core")


WORKING = {
    "that needs no order": {"megatron/core/parallel_state.py": PLAIN},
    "that the migration ends": {"megatron/core/utils.py": UTILS.replace("  # megapg: keep", "")},
    "in the right order already": {
        "megatron/core/__init__.py": "import megatron.core.parallel_state\n"
        "import megatron.core.loss\n"
    },
    "whose name is bound in time": {
        "megatron/core/utils.py": UTILS.replace(
            "from megatron.core import parallel_state\n\n\n", ""
        )
        + "\n\nfrom megatron.core import parallel_state  # noqa: E402\n"
    },
    "of what is imported on use": {
        "megatron/core/utils.py": UTILS.replace(
            "from megatron.core import parallel_state\n\n\n", ""
        ).replace("    return", "    from megatron.core import parallel_state\n\n    return")
    },
    "that only a type checker sees": {
        "megatron/core/utils.py": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
        "    from megatron.core import parallel_state\n\n\n"
        + UTILS.partition("\n\n\n")[2].replace("parallel_state.", "__import__('x').")
    },
    "whose name is made when it is asked for": {
        "megatron/core/utils.py": "def __getattr__(name):\n    return object\n\n\n"
        "from megatron.core import parallel_state\n"
    },
    "that goes on without": {
        "megatron/core/parallel_state.py": STATE.replace(
            "from .utils import Buffer",
            "try:\n    from .utils import Buffer\nexcept ImportError:\n    Buffer = object",
        ),
        "megatron/core/__init__.py": "import megatron.core.utils\nimport megatron.core.loss\n",
    },
    "that failed before": {
        "megatron/core/__init__.py": "",
        "megatron/core/loss.py": "from .utils import where\n\n"
        + ASKS.replace("from .utils import where\n\n", ""),
    },
}


@pytest.mark.parametrize("circle", WORKING)
def test_an_import_goes_with_its_uses_beside_a_circle(tmp_path: Path, circle: str) -> None:
    works = [] if "failed" in circle else ["megatron.core", "megatron.core.loss"]
    after = migrated(tmp_path, CORE | WORKING[circle], *works)
    assert "import parallel_state" not in after["megatron/core/loss.py"]
    assert GETTER not in after["megatron/core/loss.py"]
    assert EXCUSE not in "".join(after.values()).replace("# noqa: E402", "")


def test_what_is_only_tried_goes_on_as_it_did(tmp_path: Path) -> None:
    """Nothing fails where an import is only tried; but what it gets would not be there any more."""
    state = STATE.replace(
        "from .utils import Buffer",
        "try:\n    from .utils import Buffer\nexcept ImportError:\n    Buffer = None",
    ).replace("Buffer()", "Buffer and Buffer()")
    after = migrated(tmp_path, CORE | {"megatron/core/parallel_state.py": state}, "megatron.core")
    assert LEFT in after["megatron/core/loss.py"]


def test_it_stays_for_a_run_without_what_may_be_missing(tmp_path: Path) -> None:
    """With it, another import comes first."""
    first = "import missing\n\n    import megatron.core.parallel_state\n"
    init = f"try:\n    {first}except ImportError:\n    pass\n" + CORE["megatron/core/__init__.py"]
    after = migrated(tmp_path, CORE | {"megatron/core/__init__.py": init}, "megatron.core")
    assert LEFT in after["megatron/core/loss.py"]


def test_it_stays_where_a_backslash_has_it_on_two_lines(tmp_path: Path) -> None:
    """No comment can be behind a backslash."""
    loss = f"""\
from megatron.core import parallel_state, \\
    utils


def loss(pg_collection=None):
    return parallel_state.{GETTER}() + utils.where()
"""
    after = migrated(tmp_path, CORE | {"megatron/core/loss.py": loss}, "megatron.core")
    assert f"parallel_state, \\\n    utils{EXCUSE}\n" in after["megatron/core/loss.py"]


def test_one_of_several_is_enough(tmp_path: Path) -> None:
    files = {
        "megatron/core/__init__.py": "import megatron.core.one\nimport megatron.core.loss\n",
        "megatron/core/one.py": ASKS.replace("loss", "one"),
    }
    after = migrated(tmp_path, CORE | files, "megatron.core")
    assert LEFT in after["megatron/core/one.py"]
    assert GETTER not in after["megatron/core/loss.py"]


def test_each_circle_has_its_own(tmp_path: Path) -> None:
    files = {
        "megatron/__init__.py": "",
        "megatron/core/__init__.py": "",
        "megatron/core/other.py": ASKS.replace("loss", "other"),
    }
    modules = ("megatron.core.loss", "megatron.core.other")
    after = migrated(tmp_path, CORE | files, *modules)
    assert LEFT in after["megatron/core/loss.py"]
    assert LEFT in after["megatron/core/other.py"]


def test_the_first_of_several_that_would_do(tmp_path: Path) -> None:
    files = {
        "megatron/core/loss.py": ASKS.replace(
            "from .utils", "from .one import one\nfrom .utils"
        ).replace("+ where()", "+ where() + one()"),
        "megatron/core/one.py": ASKS.replace("loss", "one"),
    }
    after = migrated(tmp_path, CORE | files, "megatron.core")
    assert LEFT in after["megatron/core/loss.py"]
    assert GETTER not in after["megatron/core/one.py"]


def test_what_only_helps_together(tmp_path: Path) -> None:
    """Of two circles that a program comes upon, one after the other; what is beside them goes."""
    files = {
        "megatron/core/__init__.py": "import megatron.core.loss\nimport megatron.core.more\n"
        "import megatron.core.beside\n",
        "megatron/core/groups.py": STATE.replace(".utils", ".helpers"),
        "megatron/core/helpers.py": UTILS.replace("parallel_state", "groups"),
        "megatron/core/more.py": ASKS.replace("parallel_state", "groups").replace(
            "utils", "helpers"
        ),
        "megatron/core/beside.py": ASKS,
    }
    after = migrated(tmp_path, CORE | files, "megatron.core", wrappers=("megatron.core.groups",))
    assert LEFT in after["megatron/core/loss.py"]
    assert LEFT.replace("parallel_state", "groups", 1) in after["megatron/core/more.py"]
    assert GETTER not in after["megatron/core/beside.py"]


def test_a_program_that_is_left_as_it_is(tmp_path: Path) -> None:
    """Its own order of imports counts."""
    asks = ASKS.replace("from .utils import where\n\n", "").replace(" + where()", "")
    files = {
        "megatron/core/__init__.py": "",
        "megatron/core/loss.py": asks,
        "train.py": "from megatron.core import loss\nfrom megatron.core import utils\n",
    }
    assert LEFT in migrated(tmp_path, CORE | files, "train")["megatron/core/loss.py"]


LINES = {
    "of one name": (f"from megatron.core.parallel_state import {GETTER}", GETTER, None),
    "of the shortest name": (
        f"from megatron.core.parallel_state import {SIZE}, {GETTER}",
        f"{SIZE}() + {GETTER}",
        f"from megatron.core.parallel_state import {GETTER}",
    ),
    "in a block": (
        "if True:\n    BEFORE = 1\n    from megatron.core import parallel_state\n",
        f"parallel_state.{GETTER}",
        f"    {WHY_UNUSED}\n    from megatron.core import parallel_state",
    ),
    "with a comment on its line": (
        "from megatron.core import (\n    parallel_state,  # groups\n    things,\n)",
        f"things.THING + parallel_state.{GETTER}",
        f"from megatron.core import (\n    parallel_state,{EXCUSE}  # groups\n    things,\n)",
    ),
    "behind another statement": (
        "BEFORE = 1; from megatron.core import parallel_state, things",
        f"things.THING + parallel_state.{GETTER}",
        f"BEFORE = 1; from megatron.core import parallel_state, things{EXCUSE}",
    ),
    "of a name called otherwise": (
        f"from megatron.core.parallel_state import {GETTER} as rank",
        "rank",
        None,
    ),
    "of the module": ("from megatron.core import parallel_state", f"parallel_state.{GETTER}", None),
    "of the module, called otherwise": (
        "import megatron.core.parallel_state as mpu",
        f"mpu.{GETTER}",
        None,
    ),
    "from a folder": ("from . import parallel_state", f"parallel_state.{GETTER}", None),
    "with a comment": (
        "from . import parallel_state  # the groups",
        f"parallel_state.{GETTER}",
        f"from . import parallel_state{EXCUSE}  # the groups",
    ),
    "on several lines": (
        f"from .parallel_state import (\n    {GETTER},  # which\n)",
        GETTER,
        f"from .parallel_state import {GETTER}",
    ),
    "beside one that is in use": (
        "from megatron.core import parallel_state, things",
        f"things.THING + parallel_state.{GETTER}",
        None,
    ),
    "beside one that is in use, with a line each": (
        "from megatron.core import (\n    parallel_state,\n    things,\n)",
        f"things.THING + parallel_state.{GETTER}",
        f"from megatron.core import (\n    parallel_state,{EXCUSE}\n    things,\n)",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_how_it_is_written(tmp_path: Path, name: str) -> None:
    line, asked, left = LINES[name]
    gap = "" if line.startswith("from .") else "\n"
    text = f"{line}\n{gap}from .utils import where\n\n\ndef loss(pg_collection=None):\n"
    text += f"    return {asked}() + where()\n"
    sorts = CORE["pyproject.toml"] + "[tool.ruff.lint]\nselect = ['F', 'I', 'RUF100']\n"
    sorts += (
        "[tool.ruff.lint.isort]\nknown-first-party = ['megatron']\nknown-third-party = ['megapg']\n"
    )
    files = {"megatron/core/things.py": "THING = 1\n", "pyproject.toml": sorts}
    files["megatron/core/loss.py"] = text
    after = migrated(tmp_path, CORE | files, "megatron.core")["megatron/core/loss.py"]
    left = left or f"{line}{EXCUSE}"
    left = left if EXCUSE in left else f"{left}{EXCUSE}"
    above = "" if WHY_UNUSED in left or "; " in left else f"{WHY_UNUSED}\n"
    assert f"{above}{left}\n" in after, after
    assert after.count(WHY_UNUSED) == ("; " not in left)
    if "BEFORE" in line:  # which ruff would not have before
        return
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "megatron/core/loss.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, after + ran.stdout


def test_it_keeps_the_newlines_of_its_file(tmp_path: Path) -> None:
    write(tmp_path, CORE | {"megatron/core/loss.py": ASKS.replace("\n", "\r\n")})
    [loss] = [each for each in run(tmp_path).files if each.file.endswith("loss.py")]
    assert LEFT.replace("\n", "\r\n").encode() in loss.after
    assert b"\n" not in loss.after.replace(b"\r\n", b"")


def test_it_is_no_use_and_is_undone(tmp_path: Path) -> None:
    write(tmp_path, CORE)
    root, runner = str(tmp_path), CliRunner()
    runner.invoke(app, ["migrate", root, "--write"])
    assert LEFT in (tmp_path / "megatron/core/loss.py").read_text()
    found = find_sites([tmp_path], Config(tmp_path, versions=(16,)))
    assert [site.file for site in found.sites if not site.keep] == []
    assert runner.invoke(app, ["migrate", root, "--undo"]).exit_code == 0
    assert {name: data.decode() for name, data in contents(tmp_path).items()} == CORE


@pytest.mark.parametrize("exclude", [(), ("megatron/core/parallel_state.py", "megatron/core/u*")])
@pytest.mark.parametrize("path", ["megatron/core/loss.py", "."])
def test_it_stays_whatever_is_looked_at(
    tmp_path: Path, exclude: tuple[str, ...], path: str
) -> None:
    write(tmp_path, CORE)
    config = Config(tmp_path, versions=(16,), exclude=exclude)
    found = {each.file: each.after for each in migrate([tmp_path / path], config).files}
    assert LEFT.encode() in found["megatron/core/loss.py"]


def test_what_the_vendored_module_needs(tmp_path: Path) -> None:
    settings = CORE["pyproject.toml"] + "runtime = 'vendored'\n"
    write(tmp_path, CORE | {"pyproject.toml": settings})
    found = migrate([tmp_path], Config(tmp_path, versions=(16,), vendored="process_groups"))
    write(tmp_path, {file.file: file.after for file in found.files})
    loss = (tmp_path / "megatron/core/loss.py").read_text()
    assert LEFT in loss
    assert "import process_groups" in loss
    assert error(tmp_path, "megatron.core.process_groups") == ""


def test_only_such_comments_are_sound(tmp_path: Path) -> None:
    text = "from a import (\n    b,\n)\nx = 1  # y\nimport c  # z\nz = 2; import d\n"

    def fault(at: str, new: str) -> str | None:
        place = text.index(at)
        edit = Edit(place, place, new, "excuse")
        after = text[:place] + new + text[place:]
        return verify(
            Rewritten("m.py", tmp_path / "m.py", text.encode(), after.encode(), text, (edit,))
        )

    assert fault("\n    b", EXCUSE) is None
    assert fault("\n)", EXCUSE) is None
    assert fault("  # z", EXCUSE) is None
    assert fault("from", f"{WHY_UNUSED}\n") is None
    assert fault("import c", f"{WHY_UNUSED}\n") is None
    assert fault("\nimport c", EXCUSE)  # behind a comment, of no import
    assert fault("  # y", EXCUSE)
    assert fault("\nz = 2", EXCUSE)  # behind the comment of an import
    assert fault("import d", f"{WHY_UNUSED}\n")
    assert fault("a import", EXCUSE)
    assert fault("x = 1", f"{WHY_UNUSED}\n")
    assert fault("    b", f"{WHY_UNUSED}\n")
    assert fault("from", f"{WHY_UNUSED} x = 1\n")
    assert fault("from", f"x = 1\n{WHY_UNUSED}\n")
