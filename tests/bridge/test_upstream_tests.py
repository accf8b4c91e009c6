"""Upstream's tests, run on globals and on sessions: on a checkout that has two of its own kind."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from processes import captured
from trees import write

UTILITIES = """\
import torch.distributed as dist
from megatron.core import parallel_state


class Utils:
    inited = False

    @staticmethod
    def initialize_distributed():
        raise RuntimeError("there is no GPU")

    @staticmethod
    def initialize_model_parallel(tp=1, pp=1, vpp=None, **more):
        parallel_state.destroy_model_parallel()
        Utils.initialize_distributed()
        parallel_state.initialize_model_parallel(tp, pp, vpp, **more)

    @staticmethod
    def destroy_model_parallel():
        parallel_state.destroy_model_parallel()
        Utils.inited = False
"""
OF_BOTH = """\
import torch
from megatron.core import parallel_state
from tests.unit_tests.test_utilities import Utils


def test_sizes():
    for sizes in ((2, 1), (1, 2)):
        Utils.initialize_model_parallel(*sizes, expert_model_parallel_size=1)
        assert parallel_state.get_tensor_model_parallel_world_size() == sizes[0]
        assert parallel_state.get_pipeline_model_parallel_world_size() == sizes[1]
        assert parallel_state.get_data_parallel_group_gloo().size() == 1
        value = torch.ones(1)
        torch.distributed.all_reduce(value, group=parallel_state.get_model_parallel_group())
        assert value == 2
    Utils.destroy_model_parallel()
    assert not parallel_state.model_parallel_is_initialized()
    assert Utils.inited is False


def test_that_fails_on_one_rank():
    assert torch.distributed.get_rank() == 0
"""
OF_ONE = """\
import sys

from megatron.core import parallel_state
from tests.unit_tests.test_utilities import Utils


def test_globals():
    Utils.initialize_model_parallel(2)
    assert "megapg" not in (parallel_state.get_tensor_model_parallel_group().group_desc or "")
    Utils.destroy_model_parallel()
"""


@pytest.mark.slow
def test_what_passes_on_globals_and_not_on_sessions_is_named(tmp_path: Path) -> None:
    folder = "tests/unit_tests"
    files = {
        f"{folder}/{name}.py": text
        for name, text in {
            "__init__": "",
            "test_utilities": UTILITIES,
            "test_both": OF_BOTH,
            "test_one": OF_ONE,
        }.items()
    }
    write(tmp_path, {"tests/__init__.py": "", "tools/__init__.py": "", **files})

    def run(*arguments: str) -> tuple[int, str]:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tools.upstream",
            str(tmp_path),
            *arguments,
        ]
        ran = captured(command, timeout=250)
        return ran.returncode, ran.stdout + ran.stderr * (ran.returncode > 1)

    code, said = run("--ranks", "2")
    assert code == 1
    assert re.search(r"test_both.py\W+1\W+1\W", said), said
    assert re.search(r"test_one.py\W+1\W+0\W", said), said
    assert said.endswith("only on globals: tests.unit_tests.test_one.test_globals\n")
    code, said = run("--select", "nothing_of_the_kind")
    assert code == 2
    assert "no tests in tests/unit_tests with 'nothing_of_the_kind'" in said
