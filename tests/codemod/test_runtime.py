"""The module that a package gets with ``--runtime vendored``: its place, its text, its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trees import contents, write
from typer.testing import CliRunner

from megapg.cli.migrate import app
from megapg.errors import UnsupportedOptionError
from megapg.migrate import runtime
from megapg.migrate.config import Config, load_config
from megapg.migrate.runtime import MEGAPG, Runtime, Runtimes, text_of

SUPPORT = Path(__file__).parents[1] / "support"
NAME = "process_groups.py"
WORK = """\
import torch
import torch.distributed as dist
from megatron.core import mpu


def total(value):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return tensor.item() / mpu.get_data_parallel_world_size()


def step():
    return total(mpu.get_tensor_model_parallel_rank() + 1) * 2


def place(flag=True):
    return [
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_tensor_model_parallel_src_rank(),
        mpu.get_data_parallel_rank(with_context_parallel=flag),
        mpu.get_pipeline_model_parallel_next_rank(),
        mpu.is_pipeline_first_stage(),
        mpu.is_pipeline_last_stage(ignore_virtual=True),
        mpu.is_rank_in_embedding_group(),
        list(dist.get_process_group_ranks(mpu.get_context_parallel_group())),
    ]


def gathered():
    found = [None] * mpu.get_tensor_model_parallel_world_size()
    dist.all_gather_object(found, dist.get_rank(), group=mpu.get_tensor_model_parallel_group())
    return found


def norm(model):
    value = torch.ones(1)
    dist.all_reduce(value, group=mpu.get_model_parallel_group())
    return value.item() + mpu.get_tensor_model_parallel_rank()
"""
TREE = {
    "trainer/__init__.py": "",
    "trainer/work.py": WORK,
    "trainer/deep/__init__.py": "",
    "trainer/deep/main.py": (
        "from megatron.core import mpu\n\nfrom trainer.work import total\n\n\n"
        "def main():\n    return total(mpu.get_tensor_model_parallel_rank())\n"
    ),
    "pyproject.toml": '[tool.megapg]\nfrom-core = "0.16-0.17"\nruntime = "vendored"\n',
}


def migrated(root: Path, files: dict[str, str], *arguments: str) -> dict[str, str]:
    """Return the files after ``megapg migrate``, which rewrites all uses."""
    write(root, files)
    command = ["migrate", str(root), "--write", "--allow-dirty", *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return {name: data.decode() for name, data in contents(root).items()}


def of(root: Path, name: str = "process_groups") -> Runtimes:
    return Runtimes(Config(root, vendored=name), sorted(root.rglob("*.py")))


def functions(text: str) -> set[str]:
    """The names that a module defines."""
    names: dict[str, object] = {}
    exec(text, names)
    return {*names}


# --- on real ranks --------------------------------------------------------------------------------


@pytest.mark.contract
def test_the_same_on_real_ranks_with_and_without_megapg(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("before", "megapg", "vendored")]
    write(folders[0], TREE)
    for folder in folders[1:]:
        migrated(folder, TREE, "--runtime", folder.name)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SUPPORT / "runtime_ranks.py", *folders],
        env={**os.environ, "MEGAPG_GLOBALS": "silent", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    before, ours, vendored = (
        [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
        for folder in folders
    )
    uses = [rank.pop("uses megapg") for rank in (*before, *ours, *vendored)]
    assert uses == [*[False] * 4, *[True] * 4, *[False] * 4]
    assert len({json.dumps(rank) for rank in before}) == 4
    assert {rank["before"] for rank in before} == {"no such group"}
    assert ours == before
    assert vendored == before


def test_no_import_of_megapg_is_left_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    after = migrated(tmp_path, TREE)
    assert "from trainer import process_groups\n" in after["trainer/work.py"]
    assert "from trainer import process_groups\n" in after["trainer/deep/main.py"]
    assert not any("import megapg" in text or "from megapg" in text for text in after.values())
    module = after[f"trainer/{NAME}"]
    assert {"tensor_src_rank", "is_pipeline_last_stage", "groups_of"} <= functions(module)
    assert "model_src_rank" not in functions(module)
    for name, text in after.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
    assert migrated(tmp_path, {}) == after


def test_the_diff_makes_the_same_files(tmp_path: Path) -> None:
    write(tmp_path / "a", TREE)
    after = migrated(tmp_path / "b", TREE)
    done = subprocess.run(
        [sys.executable, "-m", "megapg", "migrate", tmp_path / "a"], capture_output=True, text=True
    )
    assert f"--- /dev/null\n+++ b/trainer/{NAME}\n@@ -0,0 +1," in done.stdout
    assert f"trainer/{NAME} to be written" in done.stderr
    subprocess.run(
        ["git", "apply", "-"], input=done.stdout, cwd=tmp_path / "a", text=True, check=True
    )
    assert {name: data.decode() for name, data in contents(tmp_path / "a").items()} == after


# --- where it goes --------------------------------------------------------------------------------

PLACES: dict[str, tuple[dict[str, str], dict[str, tuple[str, str]]]] = {
    # files -> those that use it: the module's file, and the import
    "a package without absolute imports": (
        {"a/__init__.py": "", "a/b/__init__.py": "", "a/b/c.py": "", "a/d.py": ""},
        {
            "a/b/c.py": ("a", "from .. import process_groups"),
            "a/d.py": ("a", "from . import process_groups"),
        },
    ),
    "a package with absolute imports": (
        {"a/__init__.py": "", "a/b.py": "", "a/c.py": "from a.b import f\n"},
        {"a/b.py": ("a", "from a import process_groups")},
    ),
    "below src": (
        {"src/a/__init__.py": "", "src/a/b.py": "import a.c\n", "src/a/c.py": ""},
        {"src/a/__init__.py": ("src/a", "from a import process_groups")},
    ),
    "a namespace package": (
        {"a/b.py": "", "a/c.py": "from a.b import f\n"},
        {"a/b.py": ("a", "from a import process_groups")},
    ),
    "a script in a namespace package": (
        {"a/b.py": "", "a/c/d.py": "import a.c.e\n", "a/c/e.py": ""},
        {"a/b.py": ("a", "import process_groups")},
    ),
    "a package in a namespace package": (
        {"a/b/__init__.py": "", "a/b/c.py": "", "a/b/d.py": "import a.b.c\n"},
        {"a/b/c.py": ("a/b", "from a.b import process_groups")},
    ),
    "a root with __init__.py": (
        {"__init__.py": "", "a/__init__.py": "", "a/b.py": "", "a/c.py": "import a.b\n"},
        {"a/b.py": ("a", "from a import process_groups")},
    ),
    "a root with __init__.py, without absolute imports": (
        {"__init__.py": "", "a/__init__.py": "", "a/b.py": ""},
        {"a/b.py": ("a", "from . import process_groups")},
    ),
    "a script in another package": (
        {
            "a/__init__.py": "",
            "a/b.py": "",
            "a/c.py": "import a.b\n",
            "tools/__init__.py": "",
            "tools/run.py": "import a.b\n",
            "tools/other.py": "import tools.run\n",
        },
        {
            "a/b.py": ("a", "from a import process_groups"),
            "tools/run.py": ("a", "from a import process_groups"),
        },
    ),
    "a script": ({"run.py": ""}, {"run.py": (".", "import process_groups")}),
    "a script that imports a package": (
        {
            "a/__init__.py": "",
            "a/b.py": "",
            "a/c.py": "from a.b import f\n",
            "run.py": "from a.b import f\n",
        },
        {"run.py": ("a", "from a import process_groups")},
    ),
    "two packages": (
        {"a/__init__.py": "", "a/x.py": "", "b/__init__.py": "", "b/x.py": ""},
        {
            "a/x.py": ("a", "from . import process_groups"),
            "b/x.py": ("b", "from . import process_groups"),
        },
    ),
}


def import_of(used: Runtime) -> str:
    assert (used.module, used.member) == (used.getters_module, used.getters_member)
    assert {used.name, used.getters_name} == {used.member or used.module}
    return f"from {used.module} import {used.member}" if used.member else f"import {used.module}"


@pytest.mark.parametrize(("files", "expected"), PLACES.values(), ids=PLACES)
def test_each_top_package_gets_one(
    tmp_path: Path, files: dict[str, str], expected: dict[str, tuple[str, str]]
) -> None:
    write(tmp_path, files)
    runtimes = of(tmp_path)
    imports = {name: import_of(runtimes.of(tmp_path / name)) for name in expected}
    assert imports == {name: statement for name, (_, statement) in expected.items()}
    modules = runtimes.modules({tmp_path / name: ["resolve"] for name in expected})
    places = sorted({str(Path(folder, NAME)) for folder, _ in expected.values()})
    assert [each.file for each in modules] == places
    assert all(each.is_new and each.is_runtime and not each.before for each in modules)


# --- what is there already ------------------------------------------------------------------------


def written(root: Path, *names: str) -> str | None:
    """The new text of the module of ``a``, whose one file calls some functions."""
    modules = of(root).modules({root / "a" / "b.py": names})
    assert len(modules) < 2
    return modules[0].after.decode() if modules else None


@pytest.fixture
def package(tmp_path: Path) -> Path:
    write(tmp_path, {"a/__init__.py": "", "a/b.py": "", f"a/{NAME}": text_of(["tensor_src_rank"])})
    return tmp_path


def test_without_vendored_files_import_megapg(tmp_path: Path) -> None:
    runtimes = of(tmp_path, "")
    assert runtimes.of(tmp_path / "a.py") == MEGAPG
    assert runtimes.modules({tmp_path / "a.py": ["resolve"]}) == []


def test_what_is_there_stays_and_more_is_added(package: Path) -> None:
    assert written(package) is None
    assert written(package, "tensor_src_rank", "size", "not_a_function") is None
    text = written(package, "model_src_rank")
    assert text is not None
    before = functions((package / "a" / NAME).read_text())
    assert functions(text) - before == {"model_src_rank"}


def test_a_module_of_an_older_megapg_is_renewed(package: Path) -> None:
    text = text_of([])
    first, _, body = text.partition("\n")
    (package / "a" / NAME).write_text(text)
    older = body.replace('"""There is no such group', '"""No group')
    checksum = runtime._checksum(older)
    (package / "a" / NAME).write_text(f"{first[:-16]}{checksum}\n{older}")
    assert written(package) == text


def test_a_formatted_module_stays(package: Path) -> None:
    file = package / "a" / NAME
    text = file.read_text().replace('"', "'").replace("    ", "  ").replace("'''", '"""')
    file.write_text(text.replace("(self, field: str)", "(\n    self,\n    field: str,\n  )"))
    assert written(package, "tensor_src_rank") is None


def test_an_edited_module_stays_unless_it_lacks_something(package: Path) -> None:
    file = package / "a" / NAME
    file.write_text(file.read_text() + "MINE = 1\n")
    assert written(package, "resolve", "tensor_src_rank") is None
    with pytest.raises(UnsupportedOptionError, match="was edited, and lacks model_src_rank"):
        written(package, "model_src_rank")


@pytest.mark.parametrize("there", [NAME, "process_groups/__init__.py"])
def test_another_file_of_that_name_is_an_error(tmp_path: Path, there: str) -> None:
    write(tmp_path, {"a/__init__.py": "", "a/b.py": "", f"a/{there}": "# mine\n"})
    with pytest.raises(UnsupportedOptionError, match="exists and is not megapg's") as raised:
        written(tmp_path, "resolve")
    assert 'runtime = "vendored:my_process_groups"' in str(raised.value)
    (module,) = of(tmp_path, "my_process_groups").modules({tmp_path / "a" / "b.py": ["resolve"]})
    assert module.file == "a/my_process_groups.py"


# --- the setting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "option", "expected"),
    [
        ("", None, ""),
        ("megapg", None, ""),
        ("vendored", None, "process_groups"),
        ("vendored:groups", None, "groups"),
        ("vendored", "megapg", ""),
        ("megapg", "vendored", "process_groups"),
    ],
)
def test_the_setting(tmp_path: Path, setting: str, option: str | None, expected: str) -> None:
    text = f'[tool.megapg]\nruntime = "{setting}"\n' if setting else ""
    write(tmp_path, {"pyproject.toml": text})
    assert load_config(tmp_path, runtime=option).vendored == expected


@pytest.mark.parametrize("setting", ['"none"', "3", '"vendored:a.b"', '"vendored:"'])
def test_another_setting_is_an_error(tmp_path: Path, setting: str) -> None:
    write(tmp_path, {"pyproject.toml": f"[tool.megapg]\nruntime = {setting}\n"})
    with pytest.raises(UnsupportedOptionError, match=r"no runtime .*: use megapg"):
        load_config(tmp_path)
