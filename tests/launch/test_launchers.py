"""The same script under real launchers: torchrun, SLURM with two nodes on this host, Open MPI."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from launch_script import SOON
from ports import free_port
from processes import captured

SCRIPT = str(Path(__file__).parents[1] / "support" / "launch_script.py")
PATIENCE = 240.0
# Twice PATIENCE, and a minute to find that SLURM itself is broken; see slurm.Clusters.
pytestmark = pytest.mark.timeout(600)
# Extra seconds after a deadline on a busy machine.
SLACK = 15.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing := slurm.missing_programs():
        pytest.skip(f"no {', '.join(missing)} here: sh .ci/launchers.sh installs it where it can")
    with slurm.Clusters(lambda: tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Remove the variables of a job in which the tests may run."""
    for name in os.environ:
        if slurm.OF_LAUNCHERS.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(*command):
    done = captured(
        command,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return said(done.stdout)


def said(output):
    """Return the lines of the ranks in order; a launcher may add a prefix to each line."""
    lines = [json.loads(line) for line in re.findall(r"\{.*\}", output)]
    return sorted(lines, key=lambda line: line.get("rank", -1))


def check(ranks, count, launcher):
    """Check that each rank of a job worked with all the others."""
    assert [line["rank"] for line in ranks] == list(range(count))
    assert {line["of"] for line in ranks} == {count}
    assert {line["total"] for line in ranks} == {count * (count + 1) / 2}
    assert {line["by"] for line in ranks} == {launcher}
    assert len({line["at"] for line in ranks}) == 1


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@pytest.fixture(scope="module")
def mpirun():
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here: sh .ci/launchers.sh installs it where it can")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe"]


def test_mpirun(mpirun):
    check(run(*mpirun, "-n", "3", sys.executable, SCRIPT, "train"), 3, "Open MPI")


def test_srun_and_what_can_go_wrong_with_it(cluster):
    done = cluster.run("srun", "-N2", "-n4", sys.executable, SCRIPT, "troubles", timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [json.loads((cluster.folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [rank["host"] for rank in ranks] == ["n1", "n1", "n1", "n2"]

    def texts(step, kind, of=ranks):
        """Check that the step failed on every rank in time; return the errors."""
        assert [rank[step]["kind"] for rank in of] == [kind] * len(of)
        assert max(rank[step]["seconds"] for rank in of) < SOON + SLACK
        return [rank[step]["text"] for rank in of]

    for text in texts("mixture", "LaunchError"):
        assert re.search(r"the environment has .*WORLD_SIZE=1, but SLURM has SLURM_", text)
    for text in texts("too many nodes", "LaunchError"):
        assert "SLURM_STEP_NODELIST='n[1-3]' names 3 nodes, but the step has 2" in text
    for text in texts("unknown nodes", "LaunchError"):
        assert "no host called 'absent1'" in text
        assert "Node absent1 not found" in text  # scontrol's own text
    assert all("MASTER_PORT is set but empty" in text for text in texts("no port", "LaunchError"))
    host, *others = texts("wrong address", "RendezvousError")
    assert re.search(r"rank 0 could not host .*198.51.100.7.*MASTER_ADDR, port from SLURM", host)
    assert f"That is no address of {ranks[0]['name']}, where rank 0 runs" in host
    assert all(re.search(r"rank \d could not reach .*Rank 0 on n1 hosts", text) for text in others)

    for text in texts("missing rank", "RendezvousError", ranks[:3]):
        assert "3 of 4 ranks came together in time. Missing: rank 3 on n2 never arrived" in text
    assert [rank["missing rank"]["missing"] for rank in ranks[:3]] == [[3]] * 3
    (text,) = texts("late rank", "RendezvousError", ranks[3:])
    assert "gave up" in text
    assert [rank["afterwards"] for rank in ranks] == [2.0] * 4


def test_a_shell_is_no_task_and_two_steps_of_its_job_run_at_once(cluster):
    steps = f"{sys.executable} {SCRIPT} refused; for step in 1 2; do " + (
        f"srun -N2 -n2 --overlap {sys.executable} {SCRIPT} train & done; wait"
    )
    done = cluster.run("salloc", "-N2", "-n4", "sh", "-c", steps, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    refusal, *ranks = said(done.stdout)
    assert re.search("4 tasks on 2 nodes, but it is none of them", refusal["refused"])
    jobs = {rank["job"] for rank in ranks}
    assert len(jobs) == 2, done.stderr[-4000:]
    assert len({rank["at"] for rank in ranks}) == 2
    for job in jobs:
        check([rank for rank in ranks if rank["job"] == job], 2, "SLURM")


def test_torchrun_inside_srun(cluster):
    agent = (
        f"exec {' '.join(TORCHRUN)} --nnodes=2 --node-rank=$SLURM_NODEID --nproc-per-node=1 "
        f"--master-addr=127.0.0.1 --master-port={free_port()} {SCRIPT} train"
    )
    done = cluster.run("srun", "-N2", "-n2", "sh", "-c", agent, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    check(said(done.stdout), 2, "torchrun")


def test_mpirun_inside_an_allocation(cluster, mpirun):
    """Open MPI starts its daemons with srun, so that its ranks see SLURM's variables too."""
    command = [*mpirun, "-n", "2", "--map-by", "node", sys.executable, SCRIPT, "train"]
    done = cluster.run("salloc", "-N2", "-n2", *command, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = said(done.stdout)
    check(ranks, 2, "Open MPI")
    assert not ranks[0]["at"].startswith("127.")  # for Open MPI these are two hosts


# Initialises Megatron as upstream scripts do, from the variables that torchrun sets.
OF_MEGATRON = """
import os
import sys

import torch.distributed as dist
from megatron.core import parallel_state

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=int(sys.argv[1]))
rank, of = os.environ["LOCAL_RANK"], parallel_state.get_tensor_model_parallel_world_size()
here = parallel_state.get_tensor_model_parallel_rank()
sys.stdout.write(f'{{"rank": {here}, "of": {of}, "local": {rank}}}\\n')
sys.stdout.flush()
"""


def test_a_script_of_megatrons_is_started_on_a_session(cluster, tmp_path):
    """``megapg.megatron.run`` sets the variables that the script reads from the detected launch."""
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(OF_MEGATRON)
    command = (sys.executable, "-W", "ignore", "-m", "megapg.megatron.run", str(script), "2")
    done = cluster.run("srun", "-N1", "-n2", *command, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-4000:]
    assert said(done.stdout) == [{"rank": each, "of": 2, "local": each} for each in (0, 1)]
    assert "megapg: initialize_model_parallel took" in done.stderr
