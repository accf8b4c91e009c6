"""Run ``make test-upstream`` on a small checkout with two tests in upstream's style."""

from __future__ import annotations

import os
import re
import signal
import subprocess
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


OF_THE_CALLER = """\
import urllib.request

import on_the_callers_path
import pytest


def test_nothing_is_downloaded():
    with pytest.raises(OSError, match="make test-upstream downloads nothing"):
        urllib.request.urlopen("http://example.org")
"""
STANDS_STILL = """\
import threading


def test_forever():
    threading.Event().wait()
"""
FOLDER = "tests/unit_tests"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "__init__": "",
        "test_utilities": UTILITIES,
        "test_both": OF_BOTH,
        "test_one": OF_ONE,
        "more/__init__": "",
        "more/test_of_the_caller": OF_THE_CALLER,
        "more/test_stands_still": STANDS_STILL,
        "more/test_broken": "import not_there_at_all",
    }
    found = {f"{FOLDER}/{name}.py": text for name, text in files.items()}
    found["callers/on_the_callers_path.py"] = ""
    write(tmp_path, {"tests/__init__.py": "", "tools/__init__.py": "", **found})
    return tmp_path


def upstream(checkout: Path, *arguments: str) -> tuple[int, str]:
    """Run ``make test-upstream``; return its exit code and output."""
    variables = [f"MEGATRON={checkout}", f"PYTHON={sys.executable}", f"ARGS={' '.join(arguments)}"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "callers"),
        "PYTHONWARNINGS": "ignore",
    }
    ran = captured(["make", "test-upstream", *variables], cwd=ROOT, env=environment, timeout=550)
    told = re.search(r"test-upstream\] Error (\d+)", ran.stderr)
    return int(told[1]) if told else ran.returncode, ran.stdout + ran.stderr


def assert_rows(said: str, rows: dict[str, tuple[int, int]]) -> None:
    """Check each row of the tables: the tests that passed on globals and on sessions."""
    for name, (on_globals, on_sessions) in rows.items():
        row = rf"\| {name} +\| {on_globals} +\| {on_sessions} +\|"
        assert re.search(row, said), (name, said)


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen processes, each of which imports Megatron-core
def test_what_passes_on_globals_and_not_on_sessions_is_named(checkout: Path) -> None:
    code, said = upstream(checkout, "--ranks 2 --select _both --select _one")
    assert code == 1, said
    assert_rows(said, {"test_both.py": (1, 1), "test_one.py": (1, 0), r"\.": (2, 1), "all": (2, 1)})
    assert "only on globals: tests.unit_tests.test_one.test_globals\n" in said


@pytest.mark.slow
@pytest.mark.timeout(600)  # a dozen processes, each of which imports Megatron-core
def test_what_passes_on_both_and_what_can_not_be_imported(checkout: Path) -> None:
    code, said = upstream(checkout, "--select _caller --select _broken")
    assert code == 0, said
    assert_rows(said, {"more/test_of_the_caller.py": (1, 1), "more": (1, 1), "all": (1, 1)})
    broken = "more/test_broken.py, on both: ModuleNotFoundError: No module named 'not_there_at_all'"
    assert f"{broken}\n" in said


@pytest.mark.slow
def test_a_file_that_takes_too_long_is_no_empty_row(checkout: Path) -> None:
    code, said = upstream(checkout, "--select stands_still --minutes 0.05")
    assert code == 2, said
    assert "more/test_stands_still.py, on both: too slow, over 0.05 minutes\n" in said


def test_what_can_not_start_is_said_at_once(checkout: Path) -> None:
    code, said = upstream(checkout, "--select nothing_of --select the_kind")
    assert code == 2, said
    assert "no tests in tests/unit_tests with 'nothing_of' or 'the_kind' in their paths" in said
    (checkout / FOLDER / "test_utilities.py").write_text(
        "import transformer_engine_of_yours, parser_of_yours.inner\n"
    )
    code, said = upstream(checkout)
    assert code == 2, said
    assert "tests.unit_tests.test_utilities can't be imported by " in said
    assert "there is no parser_of_yours, transformer_engine_of_yours. Put what it misses" in said


@pytest.mark.slow
def test_results_so_far_are_printed_after_an_interrupt(checkout: Path) -> None:
    command = [sys.executable, "-m", "tools.upstream", str(checkout)]
    command += ["--select", "_caller", "--select", "stands_still", "--jobs", "2"]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "callers")}
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert running.stderr is not None
        ended = ("on globals: 1 passed", "on sessions: 1 passed")
        lines: list[str] = []
        for line in running.stderr:
            lines.append(line)
            if all(any(each in told for told in lines) for each in ended):
                break
        running.send_signal(signal.SIGINT)
        said, errors = running.communicate(timeout=100)
    finally:
        running.kill()
    assert "interrupted; these are the results so far" in errors
    assert_rows(said, {"more/test_of_the_caller.py": (1, 1), "all": (1, 1)})
