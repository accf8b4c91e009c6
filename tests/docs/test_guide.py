"""The migration guide: its generated pages, and every command that it shows."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import megapg
from megapg.errors import MegapgError
from megapg.migrate.config import Config, load_config, parse_versions
from megapg.migrate.engine import migrate
from megapg.migrate.migration import How, Migration
from megapg.migrate.write import write_files
from megapg.tools.cli import app
from megapg.upstream.expressions import replacement
from megapg.upstream.mapping import Replacement
from megapg.upstream.signatures import VERSIONS, functions
from tools.guide import pages
from tools.guide.examples import EXAMPLES, Example

GUIDE = Path(__file__).parents[2] / "migration_guide"
PAGES = {str(page.relative_to(GUIDE)): page.read_text() for page in sorted(GUIDE.rglob("*.md"))}

# --- generated pages ------------------------------------------------------------------------------


def test_the_generated_pages_are_those_of_the_tables() -> None:
    made = pages.pages()
    differ = sorted(name for name, text in made.items() if PAGES.get(name) != text)
    assert not differ, (
        f"{', '.join(differ)}: run python -m tools.guide.pages migration_guide, and read the diff"
    )


def test_writing_makes_the_pages_and_keeps_others(tmp_path: Path) -> None:
    (tmp_path / "by-hand.md").write_text("mine")
    pages.write(tmp_path)
    written = {file.name: file for file in tmp_path.iterdir()}
    assert {*written} == {*pages.pages(), "by-hand.md"}
    assert written["by-hand.md"].read_text() == "mine"


def test_a_code_without_an_example_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {code: example for code, example in EXAMPLES.items() if code != "setter"}
    monkeypatch.setattr(pages, "EXAMPLES", fewer)
    with pytest.raises(MegapgError, match="setter"):
        pages.pages()


def test_the_mapping_has_every_name_of_every_version() -> None:
    rows = [line.split(" | ") for line in PAGES["mapping.md"].splitlines()]
    for version in VERSIONS:
        for name in functions(version):
            assert f"`{name}" in PAGES["mapping.md"], name
            plain = replacement(name, (), [version])
            if isinstance(plain, Replacement):
                of_call = [row for row in rows if row[0] == f"| `{name}()`" and len(row) == 4]
                (answer,) = {row[2] for row in of_call if within(version, row[1])}
                assert answer.startswith(f"`{plain.expression}`")


def within(version: int, spans: str) -> bool:
    """True if ``spans``, such as ``0.5 to 0.9, 0.12``, contain the version."""
    ends = [re.findall(r"0\.(\d+)", span) for span in spans.split(", ")]
    return any(int(end[0]) <= version <= int(end[-1]) for end in ends)


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_of_a_code_has_it_and_then_has_not(code: str, tmp_path: Path) -> None:
    example = EXAMPLES[code]
    assert code in [left.reason for left in migrated(example.before, example, tmp_path).left]
    after = migrated(example.after, example, tmp_path)
    assert (list(after.left), list(after.files)) == ([], [])


def migrated(source: str, example: Example, folder: Path) -> Migration:
    (folder / example.file).write_text(source)
    return migrate([folder], Config(folder, versions=parse_versions(example.versions)))


@pytest.mark.parametrize("code", EXAMPLES)
def test_what_the_examples_use_of_megapg_is_there(code: str) -> None:
    tree = ast.parse(EXAMPLES[code].after)
    names: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name: importlib.import_module(alias.name) for alias in node.names
                      if alias.name == "megapg"}  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megapg"):
            module = importlib.import_module(node.module or "")
            names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in names:
            start, *rest = ast.unparse(node.func).split(".")
            function = names[start]
            for part in rest:
                function = getattr(function, part)
            keywords = {keyword.arg: 0 for keyword in node.keywords if keyword.arg}
            inspect.signature(function).bind(*node.args, **keywords)  # type: ignore[arg-type]


# --- pages that show a project and commands -------------------------------------------------------

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.S | re.M)
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
_ROLES = ("AUTHOR", "COMMITTER")
_MARK = "<<<megapg>>>"


def follow(page: str, folder: Path) -> int:
    """Write the files of a page, run its commands, and compare the output.

    A block is a file if its first line is a comment with the file's name. In a ``console`` block,
    each ``$`` line is run in one shell, and its output must be the text below it. ``...`` stands
    for anything: in a line for its rest, on its own line for any number of lines. Returns the
    number of commands.
    """
    tools = folder.parent / f"{folder.name}-tools"
    tools.mkdir()
    for tool, arguments in (("python", ""), ("megapg", "-m megapg")):
        (tools / tool).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (tools / tool).chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "MEGAPG_GLOBALS"},
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(megapg.__file__).parents[1])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{f"GIT_{who}_{what}": "me@home" for who in _ROLES for what in ("NAME", "EMAIL")},
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "COLUMNS": "100",
    }
    commands = 0
    for language, text in _BLOCK.findall(page):
        if language == "console":
            commands += run(text, folder, environment)
        elif name := _FILE.match(text):
            file = folder / name[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return commands


def run(block: str, folder: Path, environment: dict[str, str]) -> int:
    steps = re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", block, re.M)
    script = "".join(
        f"{command}\nstatus=$?; echo '{_MARK}'; (exit $status)\n" for command, _ in steps
    )
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=550,
        check=False,
    )
    printed = done.stdout.split(f"{_MARK}\n")
    assert len(printed) == len(steps) + 1, done.stdout
    for (command, shown), said in zip(steps, printed, strict=False):
        said = re.sub(r"[ \t]+$", "", said, flags=re.M)
        assert re.fullmatch(_pattern(shown), said), f"$ {command}\n{said}"
    return len(steps)


def _pattern(shown: str) -> str:
    lines = (
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        for line in shown.splitlines()
    )
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_on_the_tool(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    assert follow(PAGES["by-tool.md"], tmp_path / "project") > 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_on_a_real_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpora = pytest.importorskip("benchmarks.corpora", reason="benchmarks/ is not here")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_TIMEOUT", "10")
    try:
        corpora.Wheel("mbridge", "0.15.1").tree()
    except RuntimeError:
        pytest.skip("the wheel of mbridge 0.15.1 can't be downloaded")
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the page downloads it from the package index
    monkeypatch.setenv("PIP_FIND_LINKS", str(corpora.CACHE / "wheels"))
    (tmp_path / "project").mkdir()
    shutil.copy(GUIDE / "mbridge-finish.patch", tmp_path / "project")
    assert follow(PAGES["mbridge.md"], tmp_path / "project") > 12


def test_what_the_first_page_shows_is_what_the_tool_writes(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(
        "import torch.distributed as dist\n"
        "from megatron.core import mpu\n\n\n"
        "def average(value):\n"
        "    dist.all_reduce(value, group=mpu.get_data_parallel_group(True))\n"
        "    return value / mpu.get_data_parallel_world_size(True)\n\n\n"
        "def place(model):\n"
        "    return mpu.get_tensor_model_parallel_rank()\n"
    )
    migration = migrate([tmp_path], Config(tmp_path, versions=(16,)))
    (file,) = migration.files
    blocks = _PYTHON.findall(PAGES["README.md"])
    assert len(blocks) == 2
    for block in blocks:
        assert block.rstrip() in file.after.decode()


def test_the_first_page_explains_every_column_of_the_table() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGES["README.md"], re.M) == list(How)


def test_a_test_that_patches_a_getter_passes_when_the_package_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (steps,) = (each for each in _PYTHON.findall(PAGES["by-tool.md"]) if "# trainer/steps" in each)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "steps.py").write_text(steps)
    patching = (
        "from unittest.mock import patch\n\n"
        "from trainer.steps import my_share\n\n\n"
        "def test_each_rank_has_its_share():\n"
        "    with (\n"
        "        patch('trainer.steps.mpu.get_data_parallel_rank', return_value=1),\n"
        "        patch('trainer.steps.mpu.get_data_parallel_world_size', return_value=2),\n"
        "    ):\n"
        "        assert my_share([0, 1, 2, 3]) == [1, 3]\n"
    )
    (tmp_path / "test_steps.py").write_text(patching)
    migration = migrate([tmp_path], Config(tmp_path, versions=(16,)))
    assert not migration.left
    assert not write_files(migration.files)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec((tmp_path / "test_steps.py").read_text(), names)
    with megapg.megatron.globals_policy("silent"):
        names["test_each_rank_has_its_share"]()
    with megapg.testing.fake_collection(world_size=2, rank=1) as pg:
        assert names["my_share"]([0, 1, 2, 3], pg_collection=pg) == [1, 3]
    for name in ("trainer", "trainer.steps"):
        del sys.modules[name]


def test_the_settings_on_the_page_are_all_that_there_are(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```toml\n(\[tool\.megapg\].*?)^```$", PAGES["by-tool.md"], re.S | re.M)
    (tmp_path / "pyproject.toml").write_text(shown)
    assert load_config(tmp_path).wrappers == ("trainer.groups",)
    (tmp_path / "pyproject.toml").write_text("[tool.megapg]\nnonsense = 1\n")
    with pytest.raises(MegapgError) as refused:
        load_config(tmp_path)
    there_are = str(refused.value).partition("The keys are ")[2].rstrip(".").split(", ")
    assert set(there_are) == set(re.findall(r"^([\w-]+) =", shown, re.M))


def test_the_hook_on_the_page_is_defined() -> None:
    (page,) = re.findall(r"^```yaml\n(.*?)^```$", PAGES["by-tool.md"], re.S | re.M)
    (hook,) = yaml.safe_load(page)["repos"][0]["hooks"]
    defined = yaml.safe_load((GUIDE.parent / ".pre-commit-hooks.yaml").read_text())
    assert hook["id"] in [each["id"] for each in defined]
    assert f"megapg check {' '.join(hook['args'])} " in PAGES["by-tool.md"]  # a test runs it


def test_the_page_goes_through_every_reason() -> None:
    section = PAGES["by-tool.md"].split("## What is left")[1].split("\n## ")[0]
    for code in EXAMPLES:
        assert f"[{code}](reasons.md#{code})" in section, code


def options_of(command: Any) -> set[str]:
    inner = getattr(command, "commands", {}).values()
    own = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return own.union(*map(options_of, inner))


@pytest.mark.parametrize("name", ["README.md", "by-tool.md", "by-hand.md", "mbridge.md"])
def test_the_options_on_a_page_are_there(name: str) -> None:
    plugin = (Path(megapg.__file__).parent / "testing" / "plugin.py").read_text()
    known = options_of(typer.main.get_command(app)) | set(re.findall(r'"(--[a-z-]+)"', plugin))
    known |= {"--quiet", "--no-deps"}  # options of pip
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGES[name]))
    assert shown <= known, shown - known


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        ("$ echo one; echo two\none\ntwo\n", True),
        ("$ echo one; echo two\n...\ntwo\n", True),
        ("$ echo one two three\none ...\n", True),
        ("$ false\n$ echo $?\n1\n", True),
        ("$ echo one\ntwo\n", False),
        ("$ echo one; echo two\none\n", False),
        ("$ echo one; echo two\n...\none\n", False),
        ("$ echo one\n", False),
    ],
)
def test_what_a_page_shows_is_compared(tmp_path: Path, shown: str, right: bool) -> None:
    (tmp_path / "project").mkdir()
    page = f"# Page\n\n```console\n{shown}```\n"
    if right:
        assert follow(page, tmp_path / "project") >= 1
    else:
        with pytest.raises(AssertionError):
            follow(page, tmp_path / "project")
