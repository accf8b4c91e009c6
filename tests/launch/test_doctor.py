"""``megapg doctor``: each check, the merged report, and real jobs, also with a missing rank."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from ports import free_port
from processes import captured
from schemas import check_schema
from typer.testing import CliRunner

import megapg
from megapg.launch import Launch
from megapg.launch.network import Interface, Kind, RdmaPort
from megapg.testing import run_distributed
from megapg.tools.cli import app
from megapg.tools.doctor.account import Account, Level
from megapg.tools.doctor.across import Gathering, compare, ranks_said
from megapg.tools.doctor.checks import examine
from megapg.tools.doctor.render import show
from megapg.tools.doctor.report import merge
from megapg.tools.doctor.rows import rows
from megapg.tools.doctor.survey import Device, Facts, collect

ROOT = Path(__file__).parents[2]

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


def running(facts: Facts, **versions: str) -> Facts:
    return replace(facts, versions={n: v for n, v in {**VERSIONS, **versions}.items() if v})


def found(facts: Facts) -> list[tuple[str, str]]:
    return [(finding.check, finding.level.value) for finding in examine(facts)]


# Facts, one variable, its value and the level of the finding.
SET = (
    (BARE, "MEGAPG_GUARD", "of", "error"),
    (BARE, "MEGAPG_GUARD", "off", "warning"),
    (BARE, "NCCL_SOCKET_IFNAME", "ib", "error"),
    (BARE, "GLOO_SOCKET_IFNAME", "^lo", "error"),
    (BARE, "TORCH_DISTRIBUTED_USE_TORCHCOMMS", "False", "error"),
    (BARE, "TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1", "warning"),
    (BARE, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning"),
    (BARE, "NCCL_ASYNC_ERROR_HANDLING", "0", "warning"),
    (
        having(BARE, TORCH_FR_BUFFER_SIZE="2000"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "1",
        "warning",
    ),
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
UNKNOWN_LOCAL_RANK = Launch("env", 1, 2, address="a", port=1)
OF_MACHINES = (
    (replace(BARE, launch_problem="RANK without WORLD_SIZE"), "launch", "error"),
    (replace(BARE, versions={}, torch_problem="is not installed"), "torch", "error"),
    (running(BARE, torch="2.5.1+cu121"), "torch", "error"),
    (running(BARE, **{"Megatron-core": "0.12.0"}), "megatron_core", "warning"),
    (running(BARE, einops=""), "einops", "warning"),
    (replace(BARE, device_problem="can't be used: no driver"), "devices", "error"),
    (replace(CLUSTER, launch=replace(JOB, world_size=9, local_rank=2)), "devices", "error"),
    (replace(CLUSTER, launch=UNKNOWN_LOCAL_RANK), "devices", "error"),
    (running(CLUSTER, NCCL=""), "nccl", "error"),
    (replace(CLUSTER, environment={}, launch=Launch()), "cuda_device_max_connections", "note"),
    (replace(CLUSTER, locked_memory=8 * 2**20), "locked_memory", "warning"),
    (replace(CLUSTER, shared_memory=64 * 2**20), "shared_memory", "warning"),
)


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        *OF_MACHINES,
        *((having(facts, **{name: v}), name.lower(), level) for facts, name, v, level in SET),
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
        BARE,
        CLUSTER,
        having(BARE, TORCH_DISTRIBUTED_USE_TORCHCOMMS="0", NCCL_IB_DISABLE="1", NCCL_DEBUG="INFO"),
        having(BARE, TORCH_NCCL_ASYNC_ERROR_HANDLING="1"),  # as torchrun sets it
        having(BARE, NCCL_CUMEM_ENABLE="0", NCCL_P2P_DISABLE="1"),  # no effect on this host
        having(CLUSTER, NCCL_SOCKET_IFNAME="^docker,lo", GLOO_SOCKET_IFNAME="ib0,eth0"),
        replace(CLUSTER, devices=(replace(H100, capability=(10, 0)),) * 2, environment={}),
        replace(CLUSTER, devices=(H100,)),  # the site shows each process only its own GPU
        replace(BARE, locked_memory=8 * 2**20, shared_memory=2**26),
    ],
)
def test_what_does_no_harm_is_not_reported(facts: Facts) -> None:
    assert found(facts) == []


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (BARE, "built without CUDA"),
        (running(BARE, CUDA="13.0"), r"\(535.104.05\) may be too old"),
        (having(BARE, CUDA_VISIBLE_DEVICES="-1"), "CUDA_VISIBLE_DEVICES='-1' hides them"),
        (having(BARE, CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES='' hides them"),
    ],
)
def test_why_gpus_are_not_seen(facts: Facts, cause: str) -> None:
    (finding,) = examine(replace(facts, driver="535.104.05"))
    assert (finding.check, finding.level) == ("devices", Level.WARNING)
    assert re.search(cause, finding.what)


def test_the_worst_comes_first() -> None:
    facts = having(
        replace(CLUSTER, shared_memory=0), NCCL_DEBUG="INFO", TORCH_DISTRIBUTED_USE_TORCHCOMMS="no"
    )
    assert [level for _, level in found(facts)] == ["error", "warning", "note"]


def test_facts_of_this_process() -> None:
    environment = {"RANK": "1", "NCCL_DEBUG": "WARN", "MEGAPG_GLOBALS": "warn"}
    others = {"PATH": "/bin", "MY_NCCL_TOKEN": "s3cret"}
    facts = collect({**environment, **others, "SLURM_JWT": "s3cret"})
    assert facts.launch_problem  # only RANK is set
    assert facts.environment == {**environment, "SLURM_JWT": "(hidden)"}
    assert facts.versions["megapg"] == megapg.__version__
    assert facts.version("torch") >= (2, 6)
    assert facts.version("Megatron-core") >= (0, 12)
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
            having(replace(CLUSTER, host_address="127.0.1.1"), NCCL_IB_DISABLE="1"),
            "the loopback, as this host's name resolves to 127.0.1.1",
            "TCP on ib0 (InfiniBand), told so by the environment",
        ),
        (
            having(BARE, NCCL_IB_HCA="mlx5_7"),
            "the loopback, as this host's name resolves to nothing",
            "TCP on eth0 (Ethernet)",
        ),
    ],
)
def test_what_nccl_and_gloo_would_take(facts: Facts, gloo: str, nccl: str) -> None:
    said = {row.name: row.text for row in rows(facts) if row.section == "network"}
    assert (said["gloo talks over"], said["NCCL talks over"]) == (gloo, nccl)


# --- several ranks --------------------------------------------------------------------------------


def account(facts: Facts, rank: int, **changes: object) -> Account:
    launch = replace(facts.launch, rank=rank, world_size=99, local_rank=rank)
    facts = replace(facts, launch=launch, **changes)  # type: ignore[arg-type]
    return Account(rank, facts.host, facts.device, tuple(rows(facts)), examine(facts))


def gathering(*accounts: Account, missing: tuple[int, ...] = (), **launch: object) -> Gathering:
    world = len(accounts) + len(missing)
    return Gathering(replace(JOB, rank=0, world_size=world, **launch), accounts, missing)  # type: ignore[arg-type]


def two(facts: Facts, **changes: object) -> Gathering:
    """Return ranks 0 and 1 with these facts. The changes are those of rank 1."""
    return gathering(account(facts, 0), account(facts, 1, **changes))


NO_JOB = replace(BARE, launch=JOB)
ONE_THREAD = having(NO_JOB, OMP_NUM_THREADS="1")
LOOPBACK_NAME = replace(CLUSTER, host_address="127.0.1.1")
FIRST = account(CLUSTER, 0)


@pytest.mark.parametrize(
    "those",
    [
        two(CLUSTER),
        two(ONE_THREAD),  # without GPUs they share none
        # one rank on each host may use all its cores
        two(replace(NO_JOB, host_address="10.0.0.4"), host="node2"),
        two(LOOPBACK_NAME),
        gathering(
            account(having(CLUSTER, RANK="0", NCCL_SOCKET_IFNAME="=eth0"), 0),
            account(having(CLUSTER, RANK="1", NCCL_SOCKET_IFNAME="=ib0"), 1),
        ),
    ],
)
def test_ranks_with_nothing_wrong(those: Gathering) -> None:
    assert compare(those) == ()


OLD_NCCL = {"versions": {**VERSIONS, "NCCL": "2.27.5"}}
ELSEWHERE = {"host": "node2", "host_address": "127.0.1.1"}


@pytest.mark.parametrize(
    ("those", "finding"),
    [
        (
            gathering(FIRST, account(CLUSTER, 1), account(CLUSTER, 2, **OLD_NCCL)),
            "(2,) differs error NCCL is 2.29.7 on ranks 0-1; 2.27.5 on rank 2.",
        ),
        (
            gathering(account(having(CLUSTER, NCCL_ALGO="Ring"), 0), account(CLUSTER, 1)),
            "(0,) differs warning NCCL_ALGO is Ring on rank 0; not set on rank 1.",
        ),
        (
            two(CLUSTER, host="node2", interfaces=(ETHERNET,), rdma_ports=()),
            "(0,) differs warning fastest link is InfiniBand on rank 0; Ethernet on rank 1.",
        ),
        (
            two(replace(CLUSTER, devices=(H100,))),
            "(0, 1) shared_device error ranks 0-1 on node1 would share one GPU (GPU-1).",
        ),
        (two(NO_JOB), "(0, 1) omp_num_threads warning OMP_NUM_THREADS is not set: each of the 2"),
        (two(CLUSTER, **ELSEWHERE), "(1,) gloo_on_loopback warning gloo on node2 talks over the"),
        (
            gathering(FIRST, missing=(1, 2, 3, 7)),
            "(1, 2, 3, 7) missing error ranks 1-3, 7 did not come: this report is about 1 of 5",
        ),
        (
            gathering(FIRST, missing=(1,), hosts=("node1", "node9")),
            "(1,) missing error rank 1 did not come (on node9): this report is about 1 of 2 ranks.",
        ),
    ],
)
def test_each_comparison_finds_its_own(those: Gathering, finding: str) -> None:
    ((found, ranks),) = compare(those)
    assert f"{ranks} {found.check} {found.level} {found.what}".startswith(finding)


@pytest.mark.parametrize(
    ("launch", "explains"),
    [
        ({"address": "localhost"}, True),
        ({"address": "127.0.0.1"}, True),
        ({}, False),
        ({"address": "localhost", "local_world_size": 2}, False),  # one host
    ],
)
def test_an_address_that_explains_a_missing_rank(
    launch: Mapping[str, object], explains: bool
) -> None:
    checks = [each.check for each, _ in compare(gathering(FIRST, missing=(1,), **launch))]
    assert checks == ["missing", "local_address"][: 1 + explains]


def test_hosts_are_listed_with_their_ranks() -> None:
    assert merge(two(CLUSTER, host="node2")).hosts == {"node1": (0,), "node2": (1,)}


def test_a_note_makes_nothing_look_wrong() -> None:
    noted = merge(gathering(account(having(CLUSTER, NCCL_DEBUG="INFO"), 0)))
    assert [finding.level for finding, _ in noted.findings] == [Level.NOTE]
    assert noted.good
    warned = merge(gathering(account(having(CLUSTER, NCCL_P2P_DISABLE="1"), 0)))
    assert not warned.good


def test_ranks_are_said_briefly() -> None:
    said = {(3,): "rank 3", (7, 0, 1, 2): "ranks 0-2, 7", (0, 2): "ranks 0, 2"}
    assert {ranks: ranks_said(ranks) for ranks in said} == said


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


def doctor_here(*arguments: str, **variables: str) -> tuple[int, str]:
    """Run the doctor in this process, which has imported torch; return exit code and output."""
    with mock.patch.dict(os.environ, clean(**variables), clear=True):
        ended = CliRunner().invoke(app, ["doctor", *arguments])
    return ended.exit_code, ended.stdout


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megapg", "doctor", *arguments]
    return captured(command, env=clean(**variables), cwd=ROOT, timeout=120)


def checks(report: Mapping[str, object]) -> set[str]:
    listed = report["findings"]
    assert isinstance(listed, list)
    return {finding["check"] for finding in listed}


SCHEMA = json.loads(
    Path(megapg.__file__).with_name("tools").joinpath("doctor", "schema.json").read_text()
)


@pytest.mark.parametrize(
    "change",
    [{"world_size": "2"}, {"missing": [-1]}, {"facts": [{"section": "a"}]}, {"mood": "fine"}],
)
def test_the_schema_is_not_for_anything(change: Mapping[str, object]) -> None:
    report = json.loads(json.dumps(merge(gathering(FIRST, missing=(1,))).as_json()))
    check_schema(report, SCHEMA)
    with pytest.raises((AssertionError, KeyError)):
        check_schema(report | change, SCHEMA)


def test_alone_it_looks_at_this_machine() -> None:
    code, out = doctor_here("--json")
    assert code == 0, out
    report = json.loads(out)
    check_schema(report, SCHEMA)
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
        GLOO_SOCKET_IFNAME="^lo",
        NCCL_CUMEM_ENABLE="0",
        RANK="0",
        SLURM_JWT="s3",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
    )
    lines = out.splitlines()
    verdict = ["megapg doctor: 1 rank on 1 host", "bad 2 errors, 1 warning"]
    assert (code, lines[:2]) == (1, verdict)
    starts = (
        "error the environment has RANK but not",
        "  do: Correct the environment",
        "error GLOO_SOCKET_IFNAME=^lo: this host has no interface '^lo'",
        "  do: Set GLOO_SOCKET_IFNAME to an interface",
        "warning TORCH_NCCL_ASYNC_ERROR_HANDLING=0: torch does not end",
        "  do: Unset TORCH_NCCL_ASYNC_ERROR_HANDLING; torch's default (3)",
        "note NCCL_CUMEM_ENABLE=0: ",
    )
    for line, start in zip(lines[2:], starts, strict=False):
        assert line.startswith(start)
    assert lines[10:12] == ["", "launch"]  # the facts follow
    assert "  SLURM_JWT: (hidden)" in lines
    assert lines == [line.rstrip() for line in lines]
    code, out = doctor_here()
    assert (code, out.splitlines()[1]) == (0, "good no problem found")


def test_without_torch_that_is_the_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12 is not here')\n")
    job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    alone = doctor("--json", PYTHONPATH=path)
    report = json.loads(alone.stdout)
    assert (alone.returncode, checks(report)) == (1, {"torch"})
    assert "can't be imported: libcudart.so.12 is not here" in report["findings"][0]["what"]
    first = doctor("--json", PYTHONPATH=path, RANK="0", **job)
    assert (first.returncode, json.loads(first.stdout)["missing"]) == (1, [1])
    second = doctor("--json", PYTHONPATH=path, RANK="1", **job)
    assert (second.returncode, second.stdout) == (2, "")
    assert "libcudart.so.12 is not here" in second.stderr


def on_a_rank(world_size: int, port: int, *arguments: str) -> tuple[int, str, str]:
    """Run the doctor in a job that meets at this port. Rank 1 sets a variable."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    mine = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK")}
    own = {"NCCL_ALGO": "Ring"} if mine["RANK"] == "1" else {}
    job = clean(WORLD_SIZE=str(world_size), **place, **mine, **own)
    with mock.patch.dict(os.environ, job, clear=True):
        ended = CliRunner().invoke(app, ["doctor", *arguments])
    return ended.exit_code, ended.stdout, ended.stderr


def test_a_job_has_one_report() -> None:
    (code, out, _), (other, *nothing) = run_distributed(
        partial(on_a_rank, 2, free_port(), "--json", "--timeout=60"), 2
    )
    assert (code, other, nothing) == (1, 1, ["", ""])  # rank 0's verdict
    report = json.loads(out)
    check_schema(report, SCHEMA)
    assert (report["world_size"], report["missing"]) == (2, [])
    assert report["hosts"] == {socket.gethostname(): [0, 1]}
    assert checks(report) == {"differs"}
    assert report["findings"][0]["what"] == "NCCL_ALGO is not set on rank 0; Ring on rank 1."
    values = {fact["name"]: fact["values"] for fact in report["facts"]}
    assert [value["ranks"] for value in values["torch"]] == [[0, 1]]
    assert [value["value"] for value in values["local rank"]] == [0, 1]


def test_a_missing_rank_is_named() -> None:
    (code, out, err), second = run_distributed(partial(on_a_rank, 3, free_port(), "--timeout=4"), 2)
    assert code == 1, err
    assert out.startswith("megapg doctor: 3 ranks on 1 host\n")
    assert "\nerror [rank 2] rank 2 did not come: this report is about 2 of 3 ranks.\n" in out
    assert "The ranks meet at 127.0.0.1, a loopback address" in out
    assert second == (1, "", "")


def alone_as_rank_1(port: int) -> tuple[int, str, str]:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1"
    return on_a_rank(2, port, "--timeout=1")


def test_without_rank_0_the_others_end() -> None:
    ((code, out, err),) = run_distributed(partial(alone_as_rank_1, free_port()), 1)
    assert (code, out) == (2, "")
    assert err.startswith("error")
    assert "Rank 0 hosts it" in err
