"""Forks that hold groups in a module of their own, as Megatron-DeepSpeed and GPT-NeoX do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trees import contents, write
from typer.testing import CliRunner

from megapg.tools.cli.migrate import app

GROUP = """
def get_{name}_group():
    return GROUPS["{field}"]
"""
RANKS = """

def get_{name}_world_size():
    return get_{name}_group().size()


def get_{name}_rank():
    return get_{name}_group().rank()
"""
NAMES = {"tensor_model_parallel": "tp", "data_parallel": "dp"}
HOME = "GROUPS = {}\n\n\ndef make(**groups):\n    GROUPS.update(groups)\n\n"
HOME += GROUP.format(name="model_parallel", field="mp") + "\n"
HOME += "\n".join((GROUP + RANKS).format(name=name, field=field) for name, field in NAMES.items())
LAYERS = """
from .initialize import get_tensor_model_parallel_world_size


class Linear:
    def __init__(self, size):
        self.part = size // get_tensor_model_parallel_world_size()
"""
TRAIN = """
from megatron import mpu


def average(values):
    return sum(values) / mpu.get_data_parallel_world_size()


def build(size):
    rank = mpu.get_tensor_model_parallel_rank()
    return mpu.Linear(size).part, rank, mpu.get_model_parallel_group()
"""
MAIN = """
import sys
from types import SimpleNamespace

from megatron import mpu
from megatron.train import average, build

def group(ranks):
    return SimpleNamespace(size=lambda: ranks, rank=lambda: ranks - 1)


mpu.make(mp=group(4), tp=group(2), dp=group(1))
part, rank, found = build(8)
print(average([1, 2]), part, rank, found is mpu.get_model_parallel_group())
print("megatron.core" in sys.modules)


class ProcessGroupCollection:
    pass


if "migrated" in sys.argv:
    pg = ProcessGroupCollection()
    pg.dp = group(3)
    print(average([1, 2], pg_collection=pg))
"""


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    package = [
        "make",
        "get_model_parallel_group",
        *(f"get_{n}_{end}" for n in NAMES for end in ("group", "rank", "world_size")),
    ]
    lines = [f"from .initialize import {name}" for name in package] + ["from .layers import Linear"]
    files = {
        "setup.py": "",
        "megatron/__init__.py": "",
        "megatron/mpu/__init__.py": "\n".join(lines) + "\n",
        "megatron/mpu/initialize.py": HOME,
        "megatron/mpu/layers.py": LAYERS,
        "megatron/train.py": TRAIN,
        "main.py": MAIN,
    }
    return write(tmp_path, files)


def run(code: int, *arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


def test_a_module_with_groups_of_its_own_is_named(fork: Path) -> None:
    for command in ("check", "migrate"):
        output = run(0, command, fork)
        assert "0 uses" in output
        assert "megatron/mpu/initialize.py defines getters of Megatron, such as get_" in output
        assert "--wrapper megatron.mpu --runtime vendored" in output
    # A module that asks Megatron-core wraps its groups.
    asks = f"from megatron.core import parallel_state\n{HOME}"
    write(fork, {"megatron/mpu/initialize.py": asks})
    assert "defines getters" not in run(0, "check", fork)


def test_megapg_would_not_ask_the_module(fork: Path) -> None:
    before = contents(fork)
    output = run(2, "migrate", fork, "--wrapper", "megatron.mpu", "--write", "--allow-dirty")
    assert "megatron/mpu/initialize.py holds groups of its own" in output
    assert "Add --runtime vendored" in output
    assert contents(fork) == before
    counted = json.loads(run(1, "check", fork, "--wrapper", "megatron.mpu", "--json"))
    assert [use["text"] for use in counted["uses"]] == [
        "mpu.get_model_parallel_group()",
        "get_tensor_model_parallel_world_size()",
        "mpu.get_data_parallel_world_size()",
        "mpu.get_tensor_model_parallel_rank()",
        "mpu.get_model_parallel_group()",
    ]


def test_if_nothing_is_passed_the_module_answers(fork: Path) -> None:
    def printed(*arguments: str) -> list[str]:
        command = [sys.executable, str(fork / "main.py"), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=120
        ).stdout.splitlines()

    before = printed()
    assert before == ["3.0 4 1 True", "False"]
    options = ("--wrapper", "megatron.mpu", "--runtime", "vendored", "--write", "--allow-dirty")
    run(0, "migrate", fork, *options)
    assert "mpu.get_data" not in (fork / "megatron" / "train.py").read_text()
    written = (fork / "megatron" / "process_groups.py").read_text()
    assert "megatron.core" not in written
    assert printed() == before
    assert printed("migrated") == [*before, "1.0"]
    after = contents(fork)
    run(0, "migrate", fork, *options)
    assert contents(fork) == after


def test_what_only_the_fork_knows_is_left_and_named(fork: Path) -> None:
    """In GPT-NeoX, "model parallel" is tensor parallelism, and has a rank."""
    home = fork / "megatron" / "mpu"
    for file, line in (
        ("initialize.py", GROUP.format(name="sequence_parallel", field="tp")),
        ("initialize.py", RANKS.format(name="model_parallel")),
        ("__init__.py", "from .initialize import get_sequence_parallel_group\n"),
        ("__init__.py", "from .initialize import get_model_parallel_rank\n"),
    ):
        (home / file).write_text((home / file).read_text() + line)
    uses = ("get_sequence_parallel_group", "get_model_parallel_rank", "get_model_parallel_group")
    lines = [f"print(mpu.{name}())\n" for name in uses]
    write(fork, {"megatron/more.py": "from megatron import mpu\n\n" + "".join(lines)})
    options = ("--wrapper", "megatron.mpu", "--runtime", "vendored")
    counted = json.loads(run(1, "check", fork / "megatron", *options[:2], "--json"))
    found = [use for use in counted["uses"] if use["file"].endswith("more.py")]
    assert [use["text"] for use in found] == [f"mpu.{name}()" for name in uses]
    assert {use["reason"] for use in found} == {"version"}
    run(1, "migrate", fork, *options, "--write", "--allow-dirty")
    assert (fork / "megatron" / "more.py").read_text().endswith("".join(lines))


def test_two_modules_cannot_both_answer(fork: Path) -> None:
    write(fork, {"megatron/other.py": "from megatron.core import parallel_state\n"})
    options = ("--wrapper", "megatron.mpu", "--runtime", "vendored")
    assert "the files also use megatron.core.parallel_state" in run(2, "migrate", fork, *options)
