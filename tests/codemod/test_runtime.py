"""Test the module that ``--runtime vendored`` adds to a package: its place, text and functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trees import contents, write
from typer.testing import CliRunner

from megapg.errors import UnsupportedOptionError
from megapg.migrate import runtime
from megapg.migrate.config import Config
from megapg.migrate.runtime import MEGAPG, Runtime, Runtimes, text_of
from megapg.tools.cli.migrate import app

SUPPORT = Path(__file__).parents[1] / "support"
NAME = "process_groups.py"
WORK = """\
from megatron.core import mpu


def place(flag, model):
    return [
        mpu.get_tensor_model_parallel_src_rank(),
        mpu.is_pipeline_last_stage(ignore_virtual=True),
        mpu.get_data_parallel_rank(with_context_parallel=flag),
    ]


def total(model):
    return mpu.get_model_parallel_group()
"""
TREE = {
    "trainer/__init__.py": "",
    "trainer/work.py": WORK,
    "trainer/deep/__init__.py": "",
    "trainer/deep/main.py": (
        "from megatron.core import mpu\n\nfrom trainer.work import place\n\n\n"
        "def main():\n    return place(mpu.get_tensor_model_parallel_rank() > 0, None)\n"
    ),
    "pyproject.toml": '[tool.megapg]\nfrom-core = "0.16-0.17"\nruntime = "vendored"\n',
}


def migrated(root: Path, files: dict[str, str], *arguments: str) -> dict[str, str]:
    """Run ``megapg migrate``, which must rewrite all uses, and return the files."""
    write(root, files)
    command = ["migrate", str(root), "--write", "--allow-dirty", *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return {name: data.decode() for name, data in contents(root).items()}


def of(root: Path, name: str = "process_groups") -> Runtimes:
    return Runtimes(Config(root, vendored=name), sorted(root.rglob("*.py")))


def functions(text: str) -> set[str]:
    """Return the names that a module defines."""
    names: dict[str, object] = {}
    exec(text, names)
    return {*names}


# --- what the command writes ----------------------------------------------------------------------


def test_no_import_of_megapg_is_left_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    after = migrated(tmp_path, TREE)
    assert "from . import process_groups\n" in after["trainer/work.py"]
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


# --- the place of the module ----------------------------------------------------------------------

# Empty files, files with text, and for files that use the module: the module's folder and import.
PLACES: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("a/__init__.py a/b/__init__.py a/b/c.py a/d.py", {}, {"a/b/c.py": "a ..", "a/d.py": "a ."}),
    ("a/__init__.py a/x.py b/__init__.py b/x.py", {}, {"a/x.py": "a .", "b/x.py": "b ."}),
    # Files that import their package by name, and modules of namespace packages.
    ("s/a/__init__.py", {"s/a/b.py": "def f():\n    from a.c import g"}, {"s/a/b.py": "s/a a"}),
    ("a/__init__.py", {"a/b.py": "import a.c; __name__ == '__main__'"}, {"a/b.py": "a a"}),
    ("m/c/__init__.py", {"m/c/b.py": "import m.c.x"}, {"m/c/b.py": "m/c ."}),
    ("a/__init__.py", {"a/x/y/b.py": "from .c import f"}, {"a/x/y/b.py": "a ..."}),
    ("a/__init__.py", {"a/x/b.py": "from a.c import f"}, {"a/x/b.py": "a a"}),
    # The root counts as no package, even with an __init__.py, unless there is no other.
    ("__init__.py a/__init__.py a/b.py c.py", {}, {"a/b.py": "a .", "c.py": ". ."}),
    # Scripts, in a package of another name too.
    ("a/__init__.py", {"run.py": "import a.b", "t/x.py": "from a import b"}, {"run.py": "a a"}),
    ("a/__init__.py", {"t/x.py": "import torch\nfrom a import b"}, {"t/x.py": "a a"}),
    (
        "a/__init__.py t/__init__.py",
        {"t/x.py": "import a\nif __name__ == '__main__': pass"},
        {"t/x.py": "a a"},
    ),
    ("run.py a/__init__.py", {}, {"run.py": "."}),
]


@pytest.mark.parametrize(("empty", "files", "expected"), PLACES)
def test_each_top_package_gets_one(
    tmp_path: Path, empty: str, files: dict[str, str], expected: dict[str, str]
) -> None:
    write(tmp_path, {**dict.fromkeys(empty.split(), ""), **files})
    runtimes = of(tmp_path)
    for name, place in expected.items():
        folder, _, package = place.partition(" ")
        names = (package, "process_groups") if package else ("process_groups", "")
        assert runtimes.of(tmp_path / name) == Runtime(*names, NAME[:-3], *names, NAME[:-3])
        (module,) = runtimes.modules({tmp_path / name: ["resolve"]})
        assert module.file == str(Path(folder, NAME))
        assert module.is_new
        assert module.is_runtime


@pytest.mark.parametrize(
    ("empty", "text"),
    [
        ("", ""),
        ("main.py", "from t.other import f"),  # a namespace package, or a folder of scripts
        ("x/a/__init__.py y/a/__init__.py", "import a"),  # which of the two?
        ("t/__init__.py", "if __name__ == '__main__': pass"),  # t may be a folder of scripts
    ],
)
def test_a_file_that_may_be_a_script_needs_a_name(tmp_path: Path, empty: str, text: str) -> None:
    write(tmp_path, {**dict.fromkeys(empty.split(), ""), "t/x.py": text})
    with pytest.raises(UnsupportedOptionError, match=r"vendored:PACKAGE\.process_groups"):
        of(tmp_path).of(tmp_path / "t" / "x.py")
    for folder in ("t", "src/parts/low"):
        write(tmp_path, {f"{folder}/y.py": ""})
        package = folder.removeprefix("src/").replace("/", ".")
        runtimes = of(tmp_path, f"{package}.groups")
        assert runtimes.of(tmp_path / "t" / "x.py").module == package
        (module,) = runtimes.modules({tmp_path / "t" / "x.py": ["resolve"]})
        assert module.file == f"{folder}/groups.py"
    with pytest.raises(UnsupportedOptionError, match=r"no package parts\.high"):
        of(tmp_path, "parts.high.groups").of(tmp_path / "t" / "x.py")


def test_namespace_packages_share_the_module_that_is_named(tmp_path: Path) -> None:
    use = "from megatron.core import mpu\n\n\ndef f():\n    return mpu.get_data_parallel_rank()\n"
    files = {
        "pyproject.toml": TREE["pyproject.toml"].replace("vendored", "vendored:train.groups"),
        "main.py": "from parts import load\nfrom train.steps import loop\n",
        "parts/load.py": use,
        "train/steps/loop.py": use,
    }
    after = migrated(tmp_path, files)
    assert sorted({*after} - {*files}) == ["train/groups.py"]
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import main"
    subprocess.run([sys.executable, "-BP", "-c", code], cwd=tmp_path.parent, check=True)
    assert migrated(tmp_path, {}) == after


# --- existing modules -----------------------------------------------------------------------------


def written(root: Path, *names: str) -> str | None:
    """Return the new text of the module of ``a`` if ``a/b.py`` calls some functions, or None."""
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
