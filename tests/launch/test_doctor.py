"""``megapg doctor``: each check, the merged report, and real jobs, also with a missing rank."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import namespaces
import pytest
import slurm
from ports import free_port
from schemas import check_schema
from typer.testing import CliRunner

import megapg
from megapg.cli import app
from megapg.doctor.account import Account, Finding, Level
from megapg.doctor.across import Gathering, compare, ranks_said
from megapg.doctor.checks import examine
from megapg.doctor.render import show
from megapg.doctor.report import merge
from megapg.doctor.rows import rows
from megapg.doctor.survey import Device, Facts, collect
from megapg.launch import Launch
from megapg.launch.network import Interface, Kind, RdmaPort

ROOT = Path(__file__).parents[2]
TORCHRUN = Path(sys.executable).with_name("torchrun")

# --- one rank: every check ------------------------------------------------------------------------

H100 = Device("NVIDIA H100", (9, 0), 80 * 2**30, "GPU-1")
ETHERNET = Interface("eth0", Kind.ETHERNET, up=True, addresses=("10.0.0.4",))
LOOPBACK = Interface("lo", Kind.LOOPBACK, up=True, addresses=("127.0.0.1",))
INFINIBAND = Interface("ib0", Kind.INFINIBAND, up=True, addresses=("10.4.0.4",))
VERSIONS = {"torch": "2.13.0", "NCCL": "2.29.7", "Megatron-core": "0.16.1", "einops": "0.8.2"}

BARE = Facts("node1", Launch(), versions=VERSIONS, interfaces=(ETHERNET, LOOPBACK))
JOB = Launch("torchrun", rank=1, world_size=2, local_rank=1, address="node1", port=29500)
# The GPU hosts of a well-configured cluster.
CLUSTER = replace(
    BARE,
    launch=JOB,
    host_address="10.0.0.4",
    devices=(H100, replace(H100, uuid="GPU-2")),
    interfaces=(ETHERNET, INFINIBAND, LOOPBACK),
    rdma_ports=(RdmaPort("mlx5_0", 1, Kind.INFINIBAND, active=True, rate="400 Gb/sec (4X NDR)"),),
    offload={"suspend": "", "recreate": "", "recreate world": ""},
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "8"},
    shared_memory=2**36,
)


CUMEM_OFF = replace(
    CLUSTER, offload={"suspend": "NCCL_CUMEM_ENABLE=0 takes the memory management away"}
)
NO_GPU = replace(BARE, offload={"suspend": "there is no NVIDIA GPU here"})


def having(facts: Facts, **environment: str) -> Facts:
    return replace(facts, environment={**facts.environment, **environment})


def running(versions: Mapping[str, str]) -> Facts:
    return replace(BARE, versions=versions)


def found(facts: Facts) -> list[tuple[str, str]]:
    return [(finding.check, finding.level.value) for finding in examine(facts)]


# Facts, one variable, its value and the level of the finding.
SET = (
    (BARE, "MEGAPG_GUARD", "of", "error"),
    (BARE, "MEGAPG_GUARD", "off", "warning"),
    (BARE, "NCCL_SOCKET_IFNAME", "ib", "error"),
    (BARE, "GLOO_SOCKET_IFNAME", "^lo", "error"),
    (BARE, "GLOO_SOCKET_IFNAME", "=eth0", "error"),
    (BARE, "TORCH_DISTRIBUTED_USE_TORCHCOMMS", "False", "error"),
    (BARE, "TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1", "warning"),
    (BARE, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning"),
    (BARE, "NCCL_ASYNC_ERROR_HANDLING", "0", "warning"),
    (BARE, "TORCH_NCCL_BLOCKING_WAIT", "true", "warning"),
    (CUMEM_OFF, "NCCL_CUMEM_ENABLE", "0", "warning"),
    (NO_GPU, "NCCL_CUMEM_ENABLE", "0", "note"),
    (CLUSTER, "NCCL_IB_DISABLE", "1", "warning"),
    (CLUSTER, "NCCL_P2P_DISABLE", "1", "warning"),
    (CLUSTER, "NCCL_DEBUG", "INFO", "note"),
    (CLUSTER, "CUDA_LAUNCH_BLOCKING", "1", "warning"),
    (BARE, "TORCH_DISTRIBUTED_DEBUG", "detail", "warning"),
    (CLUSTER, "CUDA_DEVICE_MAX_CONNECTIONS", "8", "warning"),
)


@pytest.mark.parametrize("facts", [BARE, CLUSTER], ids=["no job", "cluster"])
def test_nothing_looks_wrong_where_nothing_is(facts: Facts) -> None:
    assert found(facts) == []


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        (replace(BARE, launch_problem="RANK without WORLD_SIZE"), "launch", "error"),
        (replace(BARE, versions={}, torch_problem="is not installed"), "torch", "error"),
        (running({**VERSIONS, "torch": "2.5.1+cu121"}), "torch", "error"),
        (running({**VERSIONS, "Megatron-core": "0.12.0"}), "megatron_core", "warning"),
        (running({n: v for n, v in VERSIONS.items() if n != "einops"}), "einops", "warning"),
        (replace(BARE, device_problem="can't be used: no driver"), "devices", "error"),
        (replace(BARE, driver="535.104.05"), "devices", "warning"),
        (having(replace(BARE, driver="535"), CUDA_VISIBLE_DEVICES=""), "devices", "warning"),
        (replace(CLUSTER, launch=replace(JOB, world_size=9, local_rank=2)), "devices", "error"),
        (replace(CLUSTER, launch=Launch("env", 1, 2, address="a", port=1)), "devices", "error"),
        (
            replace(CLUSTER, versions={n: v for n, v in VERSIONS.items() if n != "NCCL"}),
            "nccl",
            "error",
        ),
        *(
            (having(facts, **{name: value}), name.lower(), level)
            for facts, name, value, level in SET
        ),
        (
            having(BARE, TORCH_NCCL_ASYNC_ERROR_HANDLING="1", TORCH_FR_BUFFER_SIZE="2000"),
            "torch_nccl_async_error_handling",
            "warning",
        ),
        (replace(CLUSTER, environment={}, launch=Launch()), "cuda_device_max_connections", "note"),
        (replace(CLUSTER, locked_memory=8 * 2**20), "locked_memory", "warning"),
        (replace(CLUSTER, shared_memory=64 * 2**20), "shared_memory", "warning"),
    ],
)
def test_each_check_finds_its_own_and_says_what_to_do(facts: Facts, check: str, level: str) -> None:
    assert found(facts) == [(check, level)]
    (finding,) = examine(facts)
    assert finding.what.endswith((".", "WORLD_SIZE"))
    assert finding.remedy


@pytest.mark.parametrize(
    "facts",
    [
        having(BARE, TORCH_DISTRIBUTED_USE_TORCHCOMMS="0", NCCL_IB_DISABLE="1", NCCL_DEBUG="INFO"),
        having(BARE, TORCH_NCCL_ASYNC_ERROR_HANDLING="1"),  # as torchrun sets it
        having(BARE, NCCL_CUMEM_ENABLE="0", NCCL_P2P_DISABLE="1"),  # no effect on this host
        having(CLUSTER, NCCL_SOCKET_IFNAME="^docker,lo", GLOO_SOCKET_IFNAME="ib0,eth0"),
        replace(CLUSTER, devices=(replace(H100, capability=(10, 0)),) * 2, environment={}),
        # The site shows each process only its own GPU.
        replace(CLUSTER, devices=(H100,)),
        replace(BARE, locked_memory=8 * 2**20, shared_memory=2**26),
    ],
)
def test_what_does_no_harm_is_not_reported(facts: Facts) -> None:
    assert found(facts) == []


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (BARE, "built without CUDA"),
        (replace(BARE, versions={**VERSIONS, "CUDA": "13.0"}), r"\(535.104.05\) may be too old"),
        (having(BARE, CUDA_VISIBLE_DEVICES="-1"), "CUDA_VISIBLE_DEVICES='-1' hides them"),
    ],
)
def test_why_gpus_are_not_seen(facts: Facts, cause: str) -> None:
    (finding,) = examine(replace(facts, driver="535.104.05"))
    assert re.search(cause, finding.what)


def test_the_worst_comes_first() -> None:
    facts = having(
        replace(CLUSTER, shared_memory=0), NCCL_DEBUG="INFO", TORCH_DISTRIBUTED_USE_TORCHCOMMS="no"
    )
    assert [level for _, level in found(facts)] == ["error", "warning", "note"]


def test_facts_of_this_process() -> None:
    environment = {
        "RANK": "1",
        "NCCL_DEBUG": "WARN",
        "SLURM_JWT": "s3cret",
        "MEGAPG_GLOBALS": "warn",
        "PATH": "/bin",
        "MY_NCCL_TOKEN": "s3cret",
    }
    facts = collect(environment)
    assert facts.launch_problem  # only RANK is set
    assert facts.environment == {
        "MEGAPG_GLOBALS": "warn",
        "NCCL_DEBUG": "WARN",
        "RANK": "1",
        "SLURM_JWT": "(hidden)",
    }
    assert facts.versions["megapg"] == megapg.__version__
    assert facts.version("torch") >= (2, 6)
    assert facts.version("Megatron-core") >= (0, 12)
    assert facts.host == socket.gethostname()
    assert facts.torch_problem == ""
    assert set(facts.offload) == {"suspend", "recreate", "recreate world"}


# --- where traffic goes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "gloo", "nccl"),
    [
        (
            CLUSTER,
            "eth0 (Ethernet), as this host's name resolves to 10.0.0.4",
            "mlx5_0 (InfiniBand), meeting over ib0 (InfiniBand)",
        ),
        (
            having(CLUSTER, GLOO_SOCKET_IFNAME="ib0", NCCL_SOCKET_IFNAME="=eth0"),
            "ib0 (InfiniBand), from GLOO_SOCKET_IFNAME",
            "mlx5_0 (InfiniBand), meeting over eth0 (Ethernet)",
        ),
        (
            replace(having(CLUSTER, NCCL_IB_DISABLE="1"), host_address="127.0.1.1"),
            "the loopback, as this host's name resolves to 127.0.1.1",
            "TCP on ib0 (InfiniBand), told so by the environment",
        ),
        (
            having(replace(BARE, host_address=""), NCCL_IB_HCA="mlx5_7"),
            "the loopback, as this host's name resolves to nothing",
            "TCP on eth0 (Ethernet)",
        ),
    ],
)
def test_what_nccl_and_gloo_would_take(facts: Facts, gloo: str, nccl: str) -> None:
    said = {row.name: row.text for row in rows(facts) if row.section == "network"}
    assert said["gloo talks over"] == gloo
    assert said["NCCL talks over"] == nccl


# --- several ranks --------------------------------------------------------------------------------


def account(facts: Facts, rank: int, **changes: object) -> Account:
    launch = replace(facts.launch, rank=rank, world_size=99, local_rank=rank)
    facts = replace(facts, launch=launch, **changes)  # type: ignore[arg-type]
    return Account(rank, facts.host, facts.device, tuple(rows(facts)), examine(facts))


def gathering(*accounts: Account, missing: tuple[int, ...] = (), **launch: object) -> Gathering:
    world = len(accounts) + len(missing)
    return Gathering(replace(JOB, rank=0, world_size=world, **launch), accounts, missing)  # type: ignore[arg-type]


def compared(those: Gathering) -> dict[str, tuple[Finding, tuple[int, ...]]]:
    return {finding.check: (finding, ranks) for finding, ranks in compare(those)}


def test_ranks_that_are_alike_have_nothing_wrong() -> None:
    assert compared(gathering(account(CLUSTER, 0), account(CLUSTER, 1))) == {}


def test_a_version_that_differs_is_an_error_and_names_the_fewer_ranks() -> None:
    other = account(CLUSTER, 2, versions={**VERSIONS, "NCCL": "2.27.5"}, devices=())
    those = gathering(account(CLUSTER, 0), account(CLUSTER, 1), other)
    finding, ranks = compared(those)["differs"]
    assert finding.level is Level.ERROR
    assert finding.what == "NCCL is 2.29.7 on ranks 0-1; 2.27.5 on rank 2."
    assert ranks == (2,)


def test_a_variable_that_only_some_ranks_have_differs() -> None:
    those = gathering(account(having(CLUSTER, NCCL_ALGO="Ring"), 0), account(CLUSTER, 1))
    finding, _ = compared(those)["differs"]
    assert finding.level is Level.WARNING
    assert finding.what == "NCCL_ALGO is Ring on rank 0; not set on rank 1."
    fact = next(each for each in merge(those).facts if each.name == "NCCL_ALGO")
    assert fact.differs
    assert [value.ranks for value in fact.values] == [(0,)]


def test_what_may_differ_does_not() -> None:
    one = having(CLUSTER, RANK="0", NCCL_SOCKET_IFNAME="=eth0", CUDA_VISIBLE_DEVICES="0")
    two = having(CLUSTER, RANK="1", NCCL_SOCKET_IFNAME="=ib0", CUDA_VISIBLE_DEVICES="1")
    assert compared(gathering(account(one, 0), account(two, 1))) == {}


def test_a_host_without_the_fast_network_is_found() -> None:
    slow = account(CLUSTER, 1, host="node2", interfaces=(ETHERNET,), rdma_ports=())
    finding, ranks = compared(gathering(account(CLUSTER, 0), slow))["differs"]
    assert finding.what == "fastest link is InfiniBand on rank 0; Ethernet on rank 1."
    assert ranks in ((0,), (1,))


def test_two_ranks_on_one_gpu() -> None:
    those = gathering(account(CLUSTER, 0, devices=(H100,)), account(CLUSTER, 1, devices=(H100,)))
    finding, ranks = compared(those)["shared_device"]
    assert finding.what == "ranks 0-1 on node1 would share one GPU (GPU-1)."
    assert ranks == (0, 1)


def test_ranks_without_gpus_share_none() -> None:
    bare = replace(BARE, launch=JOB, environment={"OMP_NUM_THREADS": "1"})
    assert compared(gathering(account(bare, 0), account(bare, 1))) == {}


def test_a_note_makes_nothing_look_wrong() -> None:
    noted = merge(gathering(account(having(CLUSTER, NCCL_DEBUG="INFO"), 0)))
    assert [finding.level for finding, _ in noted.findings] == [Level.NOTE]
    assert noted.good
    warned = merge(gathering(account(having(CLUSTER, NCCL_P2P_DISABLE="1"), 0)))
    assert not warned.good


def test_threads_are_counted_where_ranks_share_a_host() -> None:
    free = replace(BARE, launch=JOB)
    assert compared(gathering(account(free, 0), account(free, 1)))["omp_num_threads"][1] == (0, 1)
    apart = gathering(account(free, 0), account(free, 1, host="node2"))
    assert "omp_num_threads" not in compared(apart)


def test_gloo_on_the_loopback_is_wrong_between_hosts_only() -> None:
    closed = {"host_address": "127.0.1.1"}
    one_host = gathering(account(CLUSTER, 0, **closed), account(CLUSTER, 1, **closed))
    assert compared(one_host) == {}
    apart = gathering(account(CLUSTER, 0), account(CLUSTER, 1, host="node2", **closed))
    finding, ranks = compared(apart)["gloo_on_loopback"]
    assert "node2" in finding.what
    assert ranks == (1,)


def test_a_rank_that_is_missing_and_an_address_that_explains_it() -> None:
    came = account(CLUSTER, 0)
    finding, ranks = compared(gathering(came, missing=(1, 2, 3, 7)))["missing"]
    assert finding.what == "ranks 1-3, 7 did not come: this report is about 1 of 5 ranks."
    assert ranks == (1, 2, 3, 7)
    assert "local_address" in compared(gathering(came, missing=(1,), address="localhost"))
    assert "local_address" in compared(gathering(came, missing=(1,), address="127.0.0.1"))
    assert "local_address" not in compared(gathering(came, missing=(1,)))
    here = gathering(came, missing=(1,), address="localhost", local_world_size=2)
    assert "local_address" not in compared(here)
    named = gathering(came, missing=(1,), hosts=("node1", "node9"))
    assert "rank 1 did not come (on node9)" in compared(named)["missing"][0].what


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([7, 0, 1, 2], "ranks 0-2, 7"),
        ([0, 2], "ranks 0, 2"),
    ],
)
def test_ranks_are_said_briefly(ranks: list[int], said: str) -> None:
    assert ranks_said(ranks) == said


def test_an_account_survives_the_store() -> None:
    told = account(having(CLUSTER, NCCL_DEBUG="INFO"), 1)
    assert told.findings
    again = Account.from_json(told.to_json())
    of_another_version = json.loads(told.to_json()) | {"mood": "fine"}
    assert Account.from_json(json.dumps(of_another_version)) == again
    assert again.to_json() == told.to_json()
    assert again.findings == told.findings


def test_the_screen_shows_what_differs_and_lets_nothing_draw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = having(CLUSTER, NCCL_ALGO="Ring\x1b[2J[bold]", SLURM_NODELIST="n[1-2]")
    many = [account(odd if rank == 1 else CLUSTER, rank, devices=()) for rank in range(12)]
    report = merge(gathering(*many))
    show(report)
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    assert "  NCCL_ALGO: Ring\\x1b[2J[bold]  [rank 1]  (differs)" in plain
    assert "  SLURM_NODELIST: n[1-2]  [rank 1]\n" in plain
    assert "  local rank: 7  [rank 7]\n" in plain
    assert "and 4 other values; --json has them" in plain
    assert plain.splitlines()[0] == "megapg doctor: 12 ranks on 1 host"
    assert "warning [rank 1] NCCL_ALGO is not set on ranks 0, 2-11; Ring" in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    show(report)
    coloured = capsys.readouterr().out
    assert "\x1b[33m" in coloured  # differing rows are yellow
    assert "\x1b[2J" not in coloured
    assert all(len(line) < 200 for line in coloured.splitlines())


# --- the command ----------------------------------------------------------------------------------


def clean(**variables: str) -> dict[str, str]:
    """Return this environment without variables that a launcher or a user may have set."""
    names = ("NCCL_", "GLOO_", "TORCH", "SLURM", "OMPI_", "CUDA_", "MASTER_", "PMI", "MEGAPG_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(names) and not name.endswith(("RANK", "WORLD_SIZE"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}


@contextmanager
def started(command: list[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait(30)


def doctor_here(*arguments: str, **variables: str) -> tuple[int, str]:
    """Run the doctor in this process, which has imported torch; return exit code and output."""
    with mock.patch.dict(os.environ, clean(**variables), clear=True):
        ended = CliRunner().invoke(app, ["doctor", *arguments])
    return ended.exit_code, ended.stdout


def doctor(*arguments: str, **variables: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "megapg", "doctor", *arguments]
    with started(command, clean(**variables)) as process:
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


def checks(report: Mapping[str, object]) -> set[str]:
    listed = report["findings"]
    assert isinstance(listed, list)
    return {finding["check"] for finding in listed}


SCHEMA = json.loads(Path(megapg.__file__).with_name("doctor").joinpath("schema.json").read_text())


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"world_size": "2"},
        {"world_size": 0},
        {"missing": [-1]},
        {"hosts": {"n1": ["0"]}},
        {"findings": [{"check": "a", "level": "bad", "ranks": [], "what": "", "remedy": ""}]},
        {"facts": [{"section": "a"}]},
        {"mood": "fine"},
    ],
)
def test_the_schema_is_not_for_anything(change: Mapping[str, object]) -> None:
    report = json.loads(json.dumps(merge(gathering(account(CLUSTER, 0), missing=(1,))).as_json()))
    check_schema(report, SCHEMA)
    with pytest.raises((AssertionError, KeyError)):
        check_schema(report | change, SCHEMA)


def test_alone_it_looks_at_this_machine() -> None:
    code, out, err = doctor("--json")
    assert code == 0, out + err
    report = json.loads(out)
    check_schema(report, SCHEMA)
    assert report["schema_version"] == 1
    assert report["good"]
    assert report["hosts"] == {socket.gethostname(): [0]}
    facts = {
        (fact["section"], fact["name"]): fact["values"][0]["value"] for fact in report["facts"]
    }
    assert facts["software", "megapg"] == megapg.__version__
    assert facts["network", "lo"]["kind"] == "loopback"
    assert facts["offload", "recreate"] is True
    assert ("environment", "OMP_NUM_THREADS") in facts


def test_the_verdict_comes_first() -> None:
    code, out = doctor_here(
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0", NCCL_CUMEM_ENABLE="0", GLOO_SOCKET_IFNAME="^lo"
    )
    lines = out.splitlines()
    assert (code, lines[0], lines[1]) == (
        1,
        "megapg doctor: 1 rank on 1 host",
        "bad 1 error, 1 warning",
    )
    assert lines[2].startswith("error GLOO_SOCKET_IFNAME=^lo")
    assert lines[4].startswith("warning TORCH_NCCL_ASYNC_ERROR_HANDLING=0: torch does not end")
    assert lines[6].startswith("note NCCL_CUMEM_ENABLE=0: ")
    assert lines[8:10] == ["", "launch"]  # the facts follow
    assert lines[-1].startswith("  ")
    code, out = doctor_here()
    assert (code, out.splitlines()[1]) == (0, "good no problem found")


def test_a_wrong_environment_is_reported_as_text_with_what_to_do() -> None:
    code, out = doctor_here(
        TORCH_DISTRIBUTED_USE_TORCHCOMMS="False", GLOO_SOCKET_IFNAME="^lo", RANK="0", SLURM_JWT="s3"
    )
    assert code == 1
    assert "error TORCH_DISTRIBUTED_USE_TORCHCOMMS=False: torch knows 0 and 1 only" in out
    assert "  do: Set TORCH_DISTRIBUTED_USE_TORCHCOMMS=0 to turn it off" in out
    assert "error GLOO_SOCKET_IFNAME=^lo: this host has no interface '^lo'" in out
    assert "RANK" in out[out.index("\nerror") :]  # the variables that the launch lacks
    assert "s3" not in out[out.index("SLURM_JWT") :].splitlines()[0]
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_without_torch_that_is_the_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is not here')\n")
    job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    code, out, _ = doctor("--json", PYTHONPATH=path)
    report = json.loads(out)
    assert (code, checks(report)) == (1, {"torch"})
    assert "can't be imported: libcudart.so.12 is not here" in report["findings"][0]["what"]
    code, out, _ = doctor("--json", PYTHONPATH=path, RANK="0", **job)
    assert (code, json.loads(out)["missing"]) == (1, [1])
    code, out, err = doctor("--json", PYTHONPATH=path, RANK="1", **job)
    assert (code, out) == (2, "")
    assert "libcudart.so.12 is not here" in err


# Acts as `-m megapg doctor` on ranks that differ in one value.
UNEQUAL = textwrap.dedent(
    """
    import os, sys
    if os.environ["RANK"] == "1":
        os.environ["NCCL_ALGO"] = "Ring"
    sys.argv = ["megapg", "doctor", "--json"]
    from megapg.cli import app
    app(prog_name="megapg")
    """
)


def test_torchrun_has_one_report(tmp_path: Path) -> None:
    script = tmp_path / "unequal.py"
    script.write_text(UNEQUAL)
    command = [str(TORCHRUN), "--standalone", "--nproc-per-node=2", str(script)]
    with started(command, clean()) as process:
        out, _ = process.communicate(timeout=180)
    assert process.returncode == 1
    report = json.loads(out)  # one line, from rank 0
    check_schema(report, SCHEMA)
    assert (report["launcher"], report["world_size"], report["missing"]) == ("torchrun", 2, [])
    assert checks(report) == {"differs"}
    assert report["findings"][0]["what"] == "NCCL_ALGO is not set on rank 0; Ring on rank 1."
    values = {fact["name"]: fact["values"] for fact in report["facts"]}
    assert [value["ranks"] for value in values["torch"]] == [[0, 1]]
    assert [value["value"] for value in values["local rank"]] == [0, 1]


def test_a_missing_rank_is_named_and_without_rank_0_the_others_end() -> None:
    free_ports = free_port(), free_port()

    def rank(number: int, world: int, port: int, *arguments: str) -> subprocess.Popen[str]:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        who = {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}
        command = [sys.executable, "-m", "megapg", "doctor", *arguments]
        return stack.enter_context(started(command, clean(**place, **who)))

    with ExitStack() as stack:
        lonely = rank(1, 2, free_ports[0], "--timeout=1")
        second = rank(1, 3, free_ports[1], "--timeout=120")
        out, err = lonely.communicate(timeout=120)
        assert (lonely.returncode, out) == (2, "")
        assert "error" in err
        assert "Rank 0 hosts it" in err
        assert "Traceback" not in err

        # By now rank 1 of the other job is running and looks for rank 0.
        first = rank(0, 3, free_ports[1], "--timeout=10")
        out, err = first.communicate(timeout=120)
        assert first.returncode == 1, err
        assert out.startswith("megapg doctor: 3 ranks on 1 host\n")
        assert "\nerror [rank 2] rank 2 did not come: this report is about 2 of 3 ranks.\n" in out
        assert "The ranks meet at 127.0.0.1, a loopback address" in out
        assert second.communicate(timeout=60)[0] == ""
        assert second.returncode == 1  # rank 0's verdict


@pytest.mark.timeout(500)  # the time of two clusters; see slurm.Clusters
def test_srun_has_one_report(tmp_path_factory: pytest.TempPathFactory) -> None:
    if lacking := slurm.missing_programs():
        pytest.skip(f"no {', '.join(lacking)} here")
    command = [sys.executable, "-m", "megapg", "doctor", "--json", "--timeout=90"]
    with slurm.Clusters(lambda: tmp_path_factory.mktemp("slurm")) as cluster:
        ended = cluster.run("srun", "-N2", "-n2", *command, timeout=150, env=clean())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(ended.stdout)
    assert (report["launcher"], report["world_size"], report["missing"]) == ("SLURM", 2, [])
    assert report["findings"] == []
    values = {fact["name"]: fact["values"] for fact in report["facts"]}
    assert [value["text"] for value in values["SLURMD_NODENAME"]] == ["n1", "n2"]


def test_two_hosts_have_one_report() -> None:
    if reason := namespaces.lacking():
        pytest.skip(reason)
    command = ["-m", "megapg", "doctor", "--json", "--timeout=60"]
    first, second = namespaces.run(command, command, environment={}, timeout=150)
    report = json.loads(first.out)
    assert (first.code, second.code, second.out) == (1, 1, "")
    assert report["hosts"] == {"alpha": [0], "beta": [1]}
    # These names do not resolve, so gloo would listen where the other host can't connect.
    assert checks(report) == {"gloo_on_loopback"}
    facts = {fact["name"]: fact["values"] for fact in report["facts"]}
    assert [value["ranks"] for value in facts["fast0"] + facts["fast1"]] == [[0], [1]]
    assert facts["fast1"][0]["value"]["addresses"] == [namespaces.HOSTS[1].address]
