"""torchcomms, for which a stand-in is: torch's own code decides what is asked of it. See
``tests/support/torchcomms_stub``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ports import free_port

import megapg
from megapg.errors import UnsupportedVersionError

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
of_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the stand-in knows what torch 2.13 asks"
)


def environment(**more):
    ours = {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1", "OMP_NUM_THREADS": "1", **more}
    paths = [str(SUPPORT / "torchcomms_stub"), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **ours}


@of_2_13
def test_a_session_of_four_ranks_splits_every_family_from_world_once():
    job = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / "on_torchcomms.py")],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **job),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        said = [each.communicate(timeout=150) for each in started]
    finally:
        for each in started:
            each.kill()
    for each, (_, error) in zip(started, said, strict=True):
        assert each.returncode == 0, error[-3000:]
    of_first = json.loads(said[0][0])
    assert of_first["families"] < 19 < 4 * 19
    assert of_first["refused"].startswith(
        "tp: max_ctas=8; torch passes no options on to torchcomms."
    )
    assert of_first["out of order"].startswith("ranks=[3, 1, 0, 2]: WORLD is bound to a device")
    assert "or give the ranks in ascending order" in of_first["out of order"]


@of_2_13
def test_the_run_on_gpus_tries_it_where_it_is_there():
    asked = [sys.executable, "-m", "benchmarks.gpu", "--on-gloo", "2", "--cycles", "1"]
    variables = environment()
    del variables["TORCH_DISTRIBUTED_USE_TORCHCOMMS"]
    for path, said in ((variables["PYTHONPATH"], "sums are right"), (str(ROOT), "not there")):
        done = subprocess.run(
            asked,
            cwd=ROOT,
            env={**variables, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"2 ranks on torchcomms: {said}" in done.stdout


def test_torchcomms_that_is_not_there_is_an_error(monkeypatch):
    pytest.importorskip("torch.distributed.config", reason="this torch has no such switch")
    monkeypatch.setattr("torch.distributed.config.use_torchcomms", True)
    with pytest.raises(
        UnsupportedVersionError, match="asks for torchcomms, which this torch can't"
    ):
        megapg.session(tp=2)
