"""On a Megatron-core that can't be injected there are globals to resolve, and clear refusals."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.12.0"


@pytest.fixture(scope="module")
def run():
    """Runs Python where only the old core can be imported; returns what it printed."""
    core = ROOT / ".venv" / "cores" / VERSION  # where .ci/venv.sh puts it
    if not (core / "megatron").is_dir():
        if list(core.parents[1].glob(".ready-*")):
            pytest.fail(f"{core} is missing: .ci/venv.sh could not install it. Try `make setup`.")
        pytest.skip(f"no Megatron-core {VERSION}: `make setup` installs it")
    paths = os.pathsep.join(map(str, (core, ROOT, ROOT / "tests")))

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    return run


def test_the_view_and_the_helpers_hold_there_too(run):
    """The tests of both, once more on that core."""
    pytest_alone = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore")
    files = ("tests/test_getters.py", "tests/test_resolve.py")
    printed = run(*pytest_alone, *files, "-k", "not real_ranks")
    assert int(re.search(r"(\d+) passed", printed)[1]) >= 30, printed


def test_injection_is_refused_with_the_versions_that_can(run):
    printed = run(
        "-c",
        textwrap.dedent("""
            from megapg.errors import UnsupportedVersionError
            from megapg.megatron import (
                core_version, parallel_state, published, session_arguments, to_megatron
            )
            from megapg.megatron.core import collection_class, installed_version
            from megapg.testing import fake_collection

            assert installed_version() == (0, 12, 0), installed_version()
            assert parallel_state.get_tensor_model_parallel_rank
            with fake_collection(tp=2) as pg:
                injected = (lambda: to_megatron(pg), lambda: published(pg).__enter__())
                for ask in (core_version, collection_class, session_arguments, *injected):
                    try:
                        ask()
                    except UnsupportedVersionError as error:
                        print(error)
        """),
    )
    assert printed.count("Megatron-core 0.12.0 can't run on injected groups") == 5
    assert printed.count("0.16.0 is the oldest that can") == 5
