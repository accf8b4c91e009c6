"""The torchcomms backend, with a stub: torch's own code decides which calls the backend gets.

See ``tests/support/torchcomms_stub``.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from processes import captured

import megapg
from megapg.errors import UnsupportedVersionError
from megapg.testing import run_distributed

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "support" / "torchcomms_stub"
of_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the stand-in knows what torch 2.13 asks"
)


def on_four_ranks():
    from on_torchcomms import run  # imports modules that exist in the ranks only

    return run()


@of_2_13
def test_a_session_of_four_ranks_splits_every_family_from_world_once(monkeypatch):
    monkeypatch.syspath_prepend(STUB)
    of_first, *_ = run_distributed(
        on_four_ranks, 4, deadline=150, env={"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}
    )
    assert of_first["families"] < 19 < 4 * 19
    assert of_first["refused"].startswith(
        "tp: max_ctas=8 are NCCL settings, and this backend is not NCCL."
    )
    assert of_first["out of order"].startswith("ranks=[3, 1, 0, 2]: WORLD is bound to a device")
    assert "or give the ranks in ascending order" in of_first["out of order"]


@of_2_13
def test_the_run_on_gpus_tries_it_where_it_is_there():
    asked = [sys.executable, "-m", "benchmarks.gpu", "--on-gloo", "2", "--cycles", "1"]
    done = captured(
        asked,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{STUB}:{ROOT}"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks on torchcomms: sums are right" in done.stdout


def test_torchcomms_that_is_not_there_is_an_error(monkeypatch):
    pytest.importorskip("torch.distributed.config", reason="this torch has no such switch")
    monkeypatch.setattr("torch.distributed.config.use_torchcomms", True)
    with pytest.raises(
        UnsupportedVersionError, match="asks for torchcomms, which this torch can't"
    ):
        megapg.session(tp=2)
