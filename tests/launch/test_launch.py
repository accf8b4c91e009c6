"""Detection of the launcher, on environments recorded from real launchers."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import launch_environments as recorded
import pytest
from ports import free_port

import megapg
from megapg.errors import LaunchError, RendezvousError, SessionError
from megapg.launch import Launch, detect, slurm_nodes
from megapg.launch.ray_actor import RayActor
from megapg.testing import run_distributed


def address_of(node):
    return f"{node}.cluster"


def seen(environment):
    return detect(environment, address_of=address_of)


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


# -- one source ------------------------------------------------------------------------------------


def test_nothing_set_is_a_process_alone():
    launch = seen({"PATH": "/bin", "LOCAL_RANK": "0"})
    assert (launch.rank, launch.world_size, launch.address) == (0, 1, "")


@pytest.mark.parametrize(
    ("environments", "launcher", "address", "hosts", "local"),
    [
        (recorded.TORCHRUN, "torchrun", "localhost", (), [(0, 2), (1, 2)]),
        (recorded.MPIRUN, "Open MPI", "127.0.0.1", (), [(0, 2), (1, 2)]),
        (
            recorded.MPIRUN_IN_SBATCH,
            "Open MPI",
            "192.0.2.2",  # from mpirun
            (),
            [(0, 3), (1, 3), (2, 3), (0, 1)],
        ),
        *(
            (
                environments,
                "SLURM",
                "n1.cluster",
                tuple(f"n{each}" for each in nodes),
                [(nodes[:rank].count(n), nodes.count(n)) for rank, n in enumerate(nodes)],
            )
            for environments, nodes in (
                (recorded.SRUN, "1112"),
                (recorded.SRUN_IN_SBATCH, "1112"),
                (recorded.SRUN_CYCLIC, "1211"),
                (recorded.HETEROGENEOUS, "122"),
            )
        ),
    ],
)
def test_a_launcher(environments, launcher, address, hosts, local):
    launches = [seen(environment) for environment in environments]
    ranks = range(len(environments))
    assert [(each.rank, each.world_size) for each in launches] == [(r, len(ranks)) for r in ranks]
    assert [(each.local_rank, each.local_world_size) for each in launches] == local
    assert len({(each.port, each.job) for each in launches}) == 1
    for each in launches:
        assert (each.launcher, each.address, each.hosts) == (launcher, address, hosts)
        assert each.hosted == (launcher == "torchrun")


def test_hosts_are_not_guessed():
    unknown = {"SLURM_DISTRIBUTION": "plane=2"}
    assert seen(recorded.SRUN[0] | unknown).hosts == ()
    # rank 1 would be on n2, but its own variables name another node
    wrong = {"SLURM_DISTRIBUTION": "cyclic"}
    assert seen(recorded.SRUN[1] | wrong).hosts == ()


def test_one_node_needs_no_address():
    task = recorded.SRUN[1] | {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "4",
    }
    launch = detect(task)  # with the node look-up, which would not find n1
    assert (launch.address, launch.hosts) == ("127.0.0.1", ("n1",) * 4)
    alone = seen(task | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
    assert (alone.world_size, alone.address) == (1, "")


def by_hand(rank=0, world_size=4, **more):
    whole = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "host", "MASTER_PORT": 29500}
    return {name: str(value) for name, value in (whole | more).items()}


def test_by_hand():
    launch = seen(by_hand(3, LOCAL_RANK=1))
    assert (launch.rank, launch.world_size, launch.local_rank) == (3, 4, 1)
    assert (launch.address, launch.port, launch.hosted) == ("host", 29500, False)


# -- one inside the other --------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [recorded.SRUN[3], recorded.MPIRUN[1], recorded.SBATCH_SHELL])
def test_torchrun_inside_another_launcher(outer):
    assert seen(outer | recorded.TORCHRUN[1]) == seen(recorded.TORCHRUN[1])


def test_mpirun_inside_an_allocation():
    assert seen(recorded.SBATCH_SHELL | recorded.MPIRUN[1]).launcher == "Open MPI"


@pytest.mark.parametrize("outer", [recorded.SRUN, recorded.MPIRUN_IN_SBATCH])
def test_processes_that_a_task_started_itself(outer):
    for rank in range(8):
        inner = by_hand(rank, 8, LOCAL_RANK=rank % 2)
        assert seen(outer[rank // 2] | inner) == seen(inner)


def test_where_to_meet_may_be_said_by_hand():
    where = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    for task in (recorded.SRUN[3], recorded.MPIRUN[1]):
        launch = seen(task | where)
        assert (launch.address, launch.port) == ("10.0.0.1", 1234)
        assert launch.origin == "MASTER_ADDR, MASTER_PORT"
        repeated = {"RANK": str(launch.rank), "WORLD_SIZE": str(launch.world_size)}
        assert seen(task | where | repeated) == launch
    assert seen(recorded.SRUN[3] | where).hosts == ("n1", "n1", "n1", "n2")
    garbled = {"SLURM_STEP_NODELIST": "n[1-"}
    assert seen(recorded.SRUN[3] | where | garbled).hosts == ()
    newer = without(recorded.MPIRUN_IN_SBATCH[3], "OMPI_MCA_orte_hnp_uri")
    assert seen(newer | {"MASTER_ADDR": "n1"}).address == "n1"


# -- mixtures --------------------------------------------------------------------------------------

_CONTRADICTIONS = [
    # left over in the shell: every task would take itself for the whole job
    (recorded.SRUN[3] | by_hand(0, 1), "RANK=0, WORLD_SIZE=1", "SLURM_PROCID=3"),
    (recorded.MPIRUN[1] | by_hand(0, 1), "RANK=0, WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=1"),
    (recorded.SRUN[3] | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8", "SLURM_STEP_NUM_TASKS=4"),
    (recorded.SRUN[3] | {"LOCAL_RANK": "3"}, "LOCAL_RANK=3", "SLURM_LOCALID=0"),
    (recorded.SRUN[3] | by_hand(0, 8), "RANK=0, WORLD_SIZE=8", "SLURM_PROCID=3"),
    (recorded.SRUN[3] | by_hand(3, 6), "WORLD_SIZE=6", "SLURM_STEP_NUM_TASKS=4"),
]


@pytest.mark.parametrize(("environment", "ours", "theirs"), _CONTRADICTIONS)
def test_a_mixture_names_both_sources(environment, ours, theirs):
    with pytest.raises(LaunchError, match="two sources contradict") as caught:
        seen(environment)
    assert f"the environment has {ours}" in str(caught.value)
    assert theirs in str(caught.value)
    assert "Unset" in str(caught.value)


@pytest.mark.parametrize(
    ("inner", "names"),
    [
        # MPICH's mpiexec -n 8: four ranks per node, all with the variables of one srun task
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, "PMI_RANK=5, PMI_SIZE=8"),
        ({"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "5"}, "FLUX_TASK_RANK=3, FLUX_JOB_SIZE=5"),
    ],
)
def test_a_launcher_that_srun_started_is_no_task(inner, names):
    with pytest.raises(LaunchError, match="two sources contradict") as caught:
        seen(recorded.SRUN[3] | inner)
    assert f"{names}, but SLURM has SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=4" in str(caught.value)
    assert seen(recorded.SRUN[3] | {"PMI_RANK": "3", "PMI_SIZE": "4"}) == seen(recorded.SRUN[3])
    assert seen(recorded.TORCHRUN[1] | inner) == seen(recorded.TORCHRUN[1])


REFUSED = [
    (without(by_hand(), "MASTER_PORT"), "has RANK, WORLD_SIZE, MASTER_ADDR but not MASTER_PORT"),
    (without(recorded.TORCHRUN[0], "RANK"), "of torchrun, but not RANK"),
    (without(recorded.MPIRUN[0], "OMPI_COMM_WORLD_SIZE"), "but not OMPI_COMM_WORLD_SIZE"),
    (without(recorded.MPIRUN[0], "PMIX_NAMESPACE"), "no PMIX_NAMESPACE to derive a port"),
    (without(recorded.SRUN[0], "SLURM_PROCID"), "of SLURM, but not SLURM_PROCID"),
    (recorded.SRUN[0] | {"MASTER_ADDR": ""}, "MASTER_ADDR is set but empty"),
    (recorded.SRUN[0] | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not within SLURM_STEP_NUM_"),
    (by_hand(MASTER_PORT=0), r"port 0 \(MASTER_ADDR, MASTER_PORT from the environment\)"),
    (by_hand(MASTER_PORT=123456), "port 123456"),
    # an index among hosts says nothing of ranks
    ({**recorded.SEVERAL["SkyPilot"][1], "PMIX_RANK": "0"}, "PMIx .* rank 0 of an unknown"),
    ({**recorded.SEVERAL["SkyPilot"][1], "JOB_COMPLETION_INDEX": "3"}, "host 3 of an unknown"),
    (recorded.SEVERAL["SageMaker"][0][1], r"host algo-2 of 2 \(SM_CURRENT_HOST, SM_HOSTS\)"),
    # an elastic job
    (recorded.SEVERAL["Kubeflow"][0][0] | {"PET_NNODES": "1:4"}, "host 0 of an unknown"),
    ({"PET_NNODES": "1:4"}, r"host \? of an unknown number \(PET_NNODES\)"),
    # An address alone, as job templates set it, adds nothing: the platform's own advice remains.
    (
        {"JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "29500"},
        r"host 3 of an unk.*--node-rank=\$JOB_COMPLETION_INDEX",
    ),
    (
        {"PMI_RANK": "1", "PMI_SIZE": "4", "RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"},
        "RANK, WORLD_SIZE, MASTER_ADDR but not MASTER_PORT",
    ),
    (
        {"PMI_RANK": "2", "PMI_SIZE": "4"},
        r"rank 2 of 4 \(PMI_RANK, PMI_SIZE\).* set RANK=\$PMI_RANK, WORLD_SIZE=\$PMI_SIZE, LOCAL_R",
    ),
    # one of several on a host
    ({"LOCAL_RANK": "1"}, "the environment has LOCAL_RANK=1, so this is one of several"),
    (
        {"LOCAL_WORLD_SIZE": "4"},
        "the environment has LOCAL_WORLD_SIZE=4, so this is one of several",
    ),
    (by_hand(3, LOCAL_WORLD_SIZE=2), "LOCAL_WORLD_SIZE=2 of 4 ranks share a host, and LOCAL_RANK"),
    (by_hand(3, RAY_LOCAL_WORLD_SIZE=2), "RAY_LOCAL_WORLD_SIZE=2 of 4 ranks share a host"),
    (by_hand(3, PET_NPROC_PER_NODE=2), "PET_NPROC_PER_NODE=2 of 4 ranks share a host"),
    # shells of an allocation are no tasks
    (recorded.SALLOC_SHELL, "4 tasks on 2 nodes, .* none of them.* srun"),
    (recorded.SBATCH_SHELL, "4 tasks on 2 nodes, .* none of them.* srun"),
    (
        # salloc on a site that opens the shell on a node of the job, as an "interactive step"
        recorded.SRUN[0] | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        "4 tasks on 2 nodes, .* none of them.* srun",
    ),
    (recorded.SBATCH_SHELL_OF_ONE | {"SLURM_NTASKS_PER_NODE": "8"}, "8 tasks on 1 node,"),
    # mpirun elsewhere than rank 0, and a newer one that gives no address
    (
        recorded.MPIRUN_IN_SBATCH[0]
        | {"OMPI_MCA_orte_hnp_uri": "7.0;tcp://192.0.2.9:55459;tcp6://[fd00::9]:35489"},
        r"not run on mpirun's host \(192.0.2.9, fd00::9\).*-x MAS",
    ),
    (
        without(recorded.MPIRUN_IN_SBATCH[3], "OMPI_MCA_orte_hnp_uri"),
        "where to meet.* -x MASTER_ADDR",
    ),
]


@pytest.mark.parametrize(("environment", "message"), REFUSED)
def test_what_does_not_add_up(environment, message):
    with pytest.raises(LaunchError, match=message):
        seen(environment)


# -- one host of several, with no rank given -------------------------------------------------------


@pytest.mark.parametrize("name", recorded.SEVERAL)
def test_one_of_several_is_not_alone(name):
    several, alone = recorded.SEVERAL[name]
    for environment in several:
        with pytest.raises(LaunchError, match=r"each would train alone\..*MASTER_ADDR") as caught:
            seen(environment)
        assert "launch=megapg.Launch.alone()" in str(caught.value)
        assert name.partition(" ")[0] in str(caught.value)
        said = by_hand(1, 2, LOCAL_RANK=1)  # the variables give a rank
        assert seen(environment | said) == seen(said)
        assert seen(environment | recorded.TORCHRUN[1]) == seen(recorded.TORCHRUN[1])
    if alone is not None:
        assert seen(alone).world_size == 1


@pytest.mark.parametrize("name", recorded.ALONE)
def test_no_false_alarm(name):
    assert seen(recorded.ALONE[name]) == Launch("a single process")


def test_one_task_on_one_host_is_alone():
    for one in (recorded.SBATCH_SHELL_OF_ONE, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        assert seen(one) == Launch("a single process")


def test_alone_can_be_meant(monkeypatch):
    import torch.distributed as dist

    for name, value in recorded.SEVERAL["an Indexed Job"][0][1].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="an Indexed Job of Kubernetes"):
        megapg.session(backend="gloo")
    with megapg.session(backend="gloo", launch=Launch.alone()) as session:
        assert session.groups.dp.size() == 1
    assert not dist.is_initialized()


# -- local ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [
        (by_hand(3, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4), 1),
        (by_hand(0, 1), 0),
        (by_hand(3, RAY_LOCAL_WORLD_SIZE=4), 3),
        (by_hand(3, LOCAL_WORLD_SIZE=4), 3),
        (by_hand(3, LOCAL_WORLD_SIZE=1), 0),
        (by_hand(3, MASTER_ADDR="localhost"), 3),
        (by_hand(3, MASTER_ADDR="::1"), 3),
        # the launcher that gives rank and size gives the local rank, too
        (by_hand(1, 4, PMI_RANK=1, PMI_SIZE=4, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=2), 1),
        (by_hand(2, 4, HOROVOD_RANK=2, HOROVOD_SIZE=4, HOROVOD_LOCAL_RANK=0), 0),
        (by_hand(2, 4, PALS_RANKID=2, PALS_LOCAL_RANKID=0), 0),
        # one rank per host
        (by_hand(1, 2) | recorded.SEVERAL["SkyPilot"][0][1], 0),
        (by_hand(1, 2) | recorded.SEVERAL["SageMaker"][0][1], 0),
        (by_hand(1, 4, PET_NNODES=2, PET_NPROC_PER_NODE=1), 0),
        # unknown
        (by_hand(3), None),
        (by_hand(0, 4) | recorded.SEVERAL["SkyPilot"][0][0], None),
        (by_hand(1, 2) | recorded.SEVERAL["an Indexed Job"][0][1], None),
        (by_hand(1, 8, PMI_RANK=0, PMI_SIZE=2, MPI_LOCALRANKID=0), None),
        (recorded.SRUN[0] | by_hand(1, 8), None),
    ],
)
def test_a_local_rank_is_certain_or_unknown(environment, local_rank):
    assert seen(environment).local_rank == local_rank


def test_an_explicit_launch_is_not_number_0_by_default():
    where = {"rank": 3, "world_size": 4, "port": 29500}
    assert Launch(**where, address="127.0.0.1").local_rank == 3
    assert Launch(**where, address="a", local_world_size=4).local_rank == 3
    assert Launch(**where, address="a", local_world_size=1).local_rank == 0
    unknown = Launch(**where, address="a")
    assert unknown.local_rank is None
    assert "LOCAL_RANK" not in unknown.environment()
    assert Launch().local_rank == Launch.alone().local_rank == 0


# -- ports -----------------------------------------------------------------------------------------


def test_steps_of_one_job_never_meet():
    ports = {seen(recorded.SRUN[0] | {"SLURM_STEP_ID": str(step)}).port for step in range(2000)}
    assert len(ports) == 2000
    assert all(20_000 <= port < 32_768 for port in ports)


def test_port_and_job_follow_from_what_all_ranks_share():
    first, again = seen(recorded.SRUN[0]), seen(recorded.SRUN[0] | {"SLURM_RESTART_COUNT": "1"})
    other = seen(recorded.SRUN[0] | {"SLURM_JOB_ID": "2"})
    assert len({launch.port for launch in (first, again, other)}) == 3
    assert (first.attempt, again.attempt) == (0, 1)
    assert first.job == again.job != other.job


# -- addresses -------------------------------------------------------------------------------------


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Put a ``scontrol`` that runs these lines first in PATH."""

    def place(lines):
        program = tmp_path / "scontrol"
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    return place


def test_hostlists_by_the_library():
    assert slurm_nodes.names("gpu[01-03,7]-ib,login", 5, "X") == [
        *("gpu01-ib", "gpu02-ib", "gpu03-ib", "gpu7-ib", "login")
    ]
    for broken in ("n[1-2", "n[2-1]", "n[1-3]"):
        with pytest.raises(LaunchError, match=rf"X='{re.escape(broken)}'.*Set MASTER_ADDR"):
            slurm_nodes.names(broken, 2, "X")


def test_hostlists_by_scontrol(scontrol, monkeypatch):
    monkeypatch.setitem(sys.modules, "hostlist", None)
    scontrol('[ "$*" = "show hostnames n[1-2]" ] && printf "n1\\nn2\\n"')
    assert slurm_nodes.names("n[1-2]", 2, "X") == ["n1", "n2"]
    assert slurm_nodes.names("n1,n2", 2, "X") == ["n1", "n2"]
    scontrol("echo no such thing >&2; exit 3")
    with pytest.raises(LaunchError, match=r"ended with status 3: no such thing.*MASTER_ADDR"):
        slurm_nodes.names("n[1-2]", 2, "X")
    scontrol("echo 'n]'")  # scontrol's real output for "n[1-2"
    with pytest.raises(LaunchError, match="names 1 nodes, but the step has 2"):
        slurm_nodes.names("n[1-2", 2, "X")
    scontrol("exec sleep 60")
    monkeypatch.setattr(slurm_nodes, "_PATIENCE", 0.2)
    with pytest.raises(LaunchError, match=r"no answer in 0.2 s"):
        slurm_nodes.names("n[1-2]", 2, "X")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="there is no scontrol here"):
        slurm_nodes.names("n[1-2]", 2, "X")


def test_addresses_of_nodes(scontrol):
    assert slurm_nodes.address_of("localhost") == "localhost"
    scontrol('echo "NodeName=$4 Arch=x86_64 NodeAddr=127.0.0.7 NodeHostName=vm"')
    assert slurm_nodes.address_of("n1.invalid") == "127.0.0.7"
    scontrol("echo NodeName=$4 NodeAddr=$4")
    with pytest.raises(
        LaunchError, match=r"no host called 'n1.invalid'.*'n1.invalid' for its NodeA"
    ):
        slurm_nodes.address_of("n1.invalid")
    scontrol("echo Node n1.invalid not found; exit 1")
    with pytest.raises(LaunchError, match=r"status 1: Node n1.invalid not found.*Set MASTER_ADDR"):
        slurm_nodes.address_of("n1.invalid")


# -- the value -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"rank": 4, "world_size": 4, "address": "a", "port": 1},
            "rank 4 of launch= is not within",
        ),
        ({"world_size": 4}, "need an address= and a port="),
        ({"world_size": 4, "address": "a"}, "port 0"),
        ({"local_rank": -1}, "below 0"),
    ],
)
def test_an_explicit_launch_is_checked(wrong, message):
    with pytest.raises(LaunchError, match=message):
        Launch(**wrong)


def test_the_environment_is_written_on_request_and_put_back(monkeypatch):
    monkeypatch.setenv("RANK", "before")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    before = dict(os.environ)
    launch = seen(recorded.SRUN[3])
    assert dict(os.environ) == before  # detection sets no variables
    with pytest.raises(KeyError), launch.exported():  # noqa: PT012
        assert os.environ["RANK"] == "3"
        assert os.environ["MASTER_ADDR"] == "n1.cluster"
        repeated = seen(recorded.SRUN[3] | launch.environment())
        assert repeated == replace(launch, origin="MASTER_ADDR, MASTER_PORT")
        raise KeyError
    assert dict(os.environ) == before


def hooked():
    before = sys.excepthook
    for _ in range(3):
        with megapg.session(timeout=60):
            assert sys.excepthook is not before
    return sys.excepthook is before


def test_the_rank_is_not_put_before_a_traceback_once_for_each_session():
    assert run_distributed(hooked, world_size=1, deadline=120) == [True]


def no_host():
    for rank, doing in ((0, "host"), (1, "reach")):
        launch = Launch(rank=rank, world_size=2, address="gpu..01", port=29500)
        with pytest.raises(RendezvousError, match=rf"could not {doing} .*gpu\.\.01"):
            megapg.session(timeout=1, launch=launch)
    return True


def test_a_name_that_no_host_can_have():
    assert run_distributed(no_host, world_size=1, deadline=120) == [True]


def test_reading_needs_no_torch():
    code = "import sys, megapg.launch; megapg.launch.detect(); sys.exit('torch' in sys.modules)"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


# -- sessions on a launch --------------------------------------------------------------------------


def two_jobs_at_one_port(port):
    """Ranks 0 and 1 form one job. The third process is rank 1 of another job without a rank 0."""
    import torch
    import torch.distributed as dist

    me = int(os.environ["RANK"])
    signals = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    mine = Launch(rank=min(me, 1), world_size=2, address="127.0.0.1", port=port, job="mine")
    if me == 2:
        signals.wait(["open"])
        with pytest.raises(RendezvousError, match="rank 0 never arrived") as caught:
            megapg.session(timeout=2, launch=replace(mine, job="another"))
        signals.set("refused", "")
        return caught.value.missing
    with megapg.session(timeout=60, launch=mine) as session:
        signals.set("open", "")
        signals.wait(["refused"])  # rank 0 hosts the store, also for processes of other jobs
        total = torch.tensor([session.rank + 1.0])
        dist.all_reduce(total, group=session.groups.dp)
        with pytest.raises(SessionError, match=r"initialised already. Leave launch= out"):
            megapg.session(name="inner", launch=mine)
    return total.item()


def test_an_explicit_launch_and_a_stranger_at_the_same_port():
    port = free_port()
    assert run_distributed(partial(two_jobs_at_one_port, port), 3) == [3.0, 3.0, (0,)]


def on_a_bound_socket():
    """Open a session on a socket that rank 0 has bound, and refuse sockets of other ports."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    ranks = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with socket.socket() as bound, socket.socket() as other:
        for each in (bound, other):
            each.bind(("", 0))
        if rank == 0:
            ranks.set("port", str(bound.getsockname()[1]))
        place = {"address": "127.0.0.1", "port": int(ranks.get("port"))}
        launch = Launch(rank=rank, world_size=2, **place)
        if rank == 0:
            for wrong in (other.fileno(), sys.stdout.fileno(), 1000):
                with pytest.raises(LaunchError, match=rf"socket={wrong} .* not bound to port"):
                    megapg.session(launch=replace(launch, socket=wrong))
            launch = replace(launch, socket=bound.detach())
        with megapg.session(launch=launch, timeout=60) as session:
            return session.groups.ranks("dp")


@pytest.mark.torch
def test_the_store_takes_over_a_bound_socket():
    assert run_distributed(on_a_bound_socket, 2) == [(0, 1)] * 2


def test_more_ranks_than_devices(monkeypatch):
    import torch
    import torch.distributed as dist

    from megapg.communicators import world

    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match=r"rank 0 is number 0 on its host .* sees 0 CUDA"):
            megapg.session(backend="nccl", launch=Launch())
        assert not dist.is_initialized()
    for count, local_rank, index in ((8, 5, 5), (1, 5, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert world._device(Launch(local_rank=local_rank)) == torch.device("cuda", index)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(LaunchError, match=r"number 4 on its host .* sees 4 CUDA devices"):
        world._device(Launch(local_rank=4))
    unknown = Launch(rank=1, world_size=2, address="a", port=1)
    with pytest.raises(LaunchError, match=r"rank 1 sees 4 CUDA devices, .* set LOCAL_RANK"):
        world._device(unknown)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert world._device(unknown) == torch.device("cuda", 0)


def test_accelerators_that_cannot_talk_are_named(monkeypatch):
    import torch
    import torch.distributed as dist

    from megapg.communicators import world

    used = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(dist, "barrier", lambda device_ids: time.sleep(2 if device_ids[0] else 0))
    world._meet_on(torch.device("cuda", 0), 60)
    with pytest.raises(RendezvousError, match=r"did not end within 0.2 s on cuda:1 of"):
        world._meet_on(torch.device("cuda", 1), 0.2)
    assert used == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_what_nccl_says_of_accelerators_is_passed_on(monkeypatch):
    import torch
    import torch.distributed as dist

    from megapg.communicators import world

    def barrier(device_ids):
        # The error of torch 2.11 with NCCL 2.28.9 for two ranks on one H200.
        raise dist.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60\n"
        )

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "barrier", barrier)
    with pytest.raises(RendezvousError, match=r"rank 0 and rank 1 both .* one rank per GPU, or"):
        world._meet_on(torch.device("cuda", 0), 60)


# -- actors of Ray ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "visible", "index"),
    [(("2",), "2", 0), (("2", "3"), "2,3", 0), (("3",), "1,3", 1), (("3",), "", 3)],
)
def test_an_actor_on_a_node_that_srun_started(gpus, visible, index):
    """The variables of SLURM are those of Ray's node, not of the actor."""
    node = recorded.SRUN[3] | {"CUDA_VISIBLE_DEVICES": visible, "LOCAL_RANK": "5"}
    see = partial(detect, actor=lambda: RayActor("node", "192.0.2.7", gpus))
    with pytest.raises(LaunchError, match=r"a Ray actor on 192.0.2.7, and no variable says"):
        see(without(node, "LOCAL_RANK"))
    launch = see(node | by_hand(1, 2))
    assert (launch.rank, launch.world_size, launch.address) == (1, 2, "host")
    assert launch.local_rank == index
