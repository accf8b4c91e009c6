"""Choice of the network: sysfs trees copied from hosts, and the loopback."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import megapg
from megapg.errors import LaunchError, LayoutMismatchError, RendezvousError, SessionError
from megapg.launch.network import (
    GLOO_NAMES,
    NCCL_NAMES,
    Kind,
    Network,
    choose_network,
    gloo_problem,
    interfaces,
    nccl_problem,
    nccl_takes,
    rdma_ports,
)
from megapg.testing import run_distributed

# --- sysfs trees of hosts -------------------------------------------------------------------------


def card(
    *below: str, type_: int = 1, state: str = "up", speed: int | None = None, device: str = ""
) -> dict[str, str]:
    """Return the files of a network interface, which may lie on others."""
    files = {"type": str(type_), "operstate": state, "flags": "0x1003"}
    files |= {} if speed is None else {"speed": str(speed)}
    files |= {f"device/infiniband/{device}/node_type": "1: CA"} if device else {}
    return files | {f"lower_{each}/x": "" for each in below}


def port(layer: str, *interfaces: str, state: str = "4: ACTIVE", rate: str = "") -> dict[str, str]:
    """Return the files of a port of an RDMA device, which may serve interfaces."""
    names = {f"gid_attrs/ndevs/{number}": name for number, name in enumerate(interfaces)}
    return {"link_layer": layer, "state": state, "rate": rate, **names}


LOOPBACK = {"lo": {"type": "772", "operstate": "unknown", "flags": "0x9"}}

# A host with eight adapters, two of which are listed: the second has no cable. The first adapter
# has a partition (P_Key).
INFINIBAND = {
    **LOOPBACK,
    "eno1": card(speed=1000),
    "ibp24s0": card(type_=32, speed=400_000, device="mlx5_0"),
    "ibp24s0.8001": card(type_=32, speed=400_000),
    "ibp64s0": card(type_=32, state="down", speed=-1, device="mlx5_1"),
}
INFINIBAND_PORTS = {
    "mlx5_0/ports/1": port("InfiniBand", rate="400 Gb/sec (4X NDR)"),
    "mlx5_1/ports/1": port("InfiniBand", state="1: DOWN", rate="10 Gb/sec (4X SDR)"),
}
INFINIBAND_ADDRESSES = {
    "lo": ["127.0.0.1"],
    "eno1": ["192.168.7.4"],
    "ibp24s0": ["10.4.0.7"],
    "ibp24s0.8001": ["10.5.0.7"],
}

# RoCE: a bond of two ports with a VLAN on top, an adapter with a neutral name, and Ethernet without
# RDMA. The driver decides whether the table names the bond or its ports.
ROCE = {
    **LOOPBACK,
    "eth0": card(speed=1000),
    "rdma10": card(speed=100_000),
    "rdma2": card(speed=100_000),
    "ens2f0": card(speed=25_000),
    "ens2f1": card(speed=25_000),
    "bond0": card("ens2f0", "ens2f1"),
    "bond0.100": card("bond0"),
}
ROCE_PORTS = {
    "mlx5_3/ports/1": port("Ethernet", "rdma2", "rdma2"),
    "mlx5_4/ports/1": port("Ethernet", "rdma10"),
    "mlx5_bond_0/ports/1": port("Ethernet", "ens2f0"),
}
ROCE_ADDRESSES = {
    "lo": ["127.0.0.1"],
    "eth0": ["192.168.7.4"],
    "rdma10": ["10.0.10.1"],
    "rdma2": ["10.0.2.1"],
    "bond0.100": ["172.16.0.9"],
}


def tree(
    root: Path,
    net: Mapping[str, Mapping[str, str]],
    ports: Mapping[str, Mapping[str, str]] | None = None,
) -> Path:
    files = {f"net/{name}/{file}": text for name, of in net.items() for file, text in of.items()}
    for port, of in (ports or {}).items():
        files |= {f"infiniband/{port}/{file}": text for file, text in of.items()}
        # An unused entry can't be read, as in the kernel's sysfs.
        (root / "sys/class/infiniband" / port / "gid_attrs/ndevs/7").mkdir(parents=True)
    (root / "sys/class/net").mkdir(parents=True, exist_ok=True)
    (root / "sys/class/net/bonding_masters").write_text("bond0\n")
    for name, text in files.items():
        (root / "sys/class" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/class" / name).write_text(f"{text}\n")
    return root


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    return tree(tmp_path, INFINIBAND, INFINIBAND_PORTS)


@pytest.fixture
def roce(tmp_path: Path) -> Path:
    return tree(tmp_path, ROCE, ROCE_PORTS)


def choose(
    root: Path,
    addresses: Mapping[str, Sequence[str]],
    wanted: str | Sequence[str] = "auto",
    **environment: str,
) -> Network:
    return choose_network(wanted, environment=environment, root=root, addresses=addresses)


# --- detected interfaces --------------------------------------------------------------------------


def test_infiniband_is_told_by_its_link_type(infiniband: Path) -> None:
    found = {each.name: each for each in interfaces(infiniband, INFINIBAND_ADDRESSES)}
    assert list(found) == ["eno1", "ibp24s0", "ibp24s0.8001", "ibp64s0", "lo"]
    assert [each.kind for each in found.values()] == [
        Kind.ETHERNET,
        Kind.INFINIBAND,
        Kind.INFINIBAND,
        Kind.INFINIBAND,
        Kind.LOOPBACK,
    ]
    assert [name for name, each in found.items() if not each.up] == ["ibp64s0"]
    assert found["ibp24s0"].devices == ("mlx5_0",)
    assert found["ibp24s0"].speed == 400_000
    assert found["ibp64s0"].speed is None
    assert str(found["ibp24s0"]) == "ibp24s0 (InfiniBand, mlx5_0, 400 Gb/s, up, 10.4.0.7)"
    assert str(found["ibp64s0"]) == "ibp64s0 (InfiniBand, mlx5_1, down, no address)"


def test_roce_is_told_by_the_device_behind_it_also_under_a_bond_and_a_vlan(roce: Path) -> None:
    found = {each.name: each for each in interfaces(roce, ROCE_ADDRESSES)}
    assert {name for name, each in found.items() if each.kind is Kind.ROCE} == {
        "rdma2",
        "rdma10",
        "ens2f0",
        "bond0",
        "bond0.100",
    }
    assert found["bond0.100"].devices == ("mlx5_bond_0",)
    assert found["eth0"].kind is Kind.ETHERNET
    assert found["eth0"].devices == ()


def test_rdma_ports_are_found_without_an_interface(infiniband: Path, roce: Path) -> None:
    # Both fixtures share one directory, which describes a host with InfiniBand and RoCE.
    ports = {port.device: port for port in rdma_ports(infiniband)}
    assert str(ports["mlx5_0"]) == "mlx5_0:1 (InfiniBand, active, 400 Gb/sec (4X NDR))"
    assert not ports["mlx5_1"].active
    assert ports["mlx5_3"].kind is Kind.ROCE
    assert ports["mlx5_3"].interfaces == {"rdma2"}


def test_this_host_is_as_psutil_sees_it() -> None:
    found = {each.name: each for each in interfaces()}
    statistics = psutil.net_if_stats()
    assert set(found) >= {name.partition(":")[0] for name in statistics}
    assert found["lo"].kind is Kind.LOOPBACK
    assert found["lo"].up
    assert "127.0.0.1" in found["lo"].addresses
    assert not any("%" in address for each in found.values() for address in each.addresses)


def test_a_host_without_sysfs_still_has_its_interfaces(tmp_path: Path) -> None:
    found = {each.name: each for each in interfaces(tmp_path)}
    assert found["lo"].kind is Kind.OTHER
    assert found["lo"].obstacle == ""
    assert rdma_ports(tmp_path) == ()
    chosen = choose_network("lo", environment={}, root=tmp_path)
    assert chosen.environment() == {NCCL_NAMES: "=lo", GLOO_NAMES: "lo"}


# --- auto -----------------------------------------------------------------------------------------


def test_auto_takes_the_first_infiniband_that_can_carry_traffic(infiniband: Path) -> None:
    network = choose(infiniband, INFINIBAND_ADDRESSES)
    assert [each.name for each in network.interfaces] == ["ibp24s0"]
    assert network.why == "the first of 2 InfiniBand interfaces"
    assert network.passed_over == {
        "eno1": "is Ethernet",
        "ibp24s0.8001": "ibp24s0 comes first",
        "ibp64s0": "is down",
        "lo": "is loopback",
    }
    # For NCCL a bare name is a prefix and would match ibp24s0.8001; gloo accepts only a bare name.
    assert network.environment() == {NCCL_NAMES: "=ibp24s0", GLOO_NAMES: "ibp24s0"}
    assert network.agreement == "InfiniBand"


def test_auto_takes_no_interface_without_an_address(infiniband: Path) -> None:
    network = choose(infiniband, {"eno1": ["192.168.7.4"], "lo": ["127.0.0.1"]})
    assert network.interfaces == ()
    assert network.environment() == {}
    assert network.passed_over["ibp24s0"] == "has no IP address"
    assert network.agreement == "left to NCCL and gloo"
    assert "NCCL and gloo choose for themselves" in str(network)


def test_auto_takes_infiniband_before_roce_and_counts_as_people_do(
    roce: Path, tmp_path: Path
) -> None:
    network = choose(roce, ROCE_ADDRESSES)
    assert [each.name for each in network.interfaces] == ["bond0.100"]
    fewer = {name: found for name, found in ROCE_ADDRESSES.items() if name != "bond0.100"}
    assert choose(roce, fewer).environment()[GLOO_NAMES] == "rdma2"  # sorts before rdma10
    mixed = tree(tmp_path / "mixed", {**ROCE, **INFINIBAND}, ROCE_PORTS)
    assert choose(mixed, {**ROCE_ADDRESSES, **INFINIBAND_ADDRESSES}).agreement == "InfiniBand"


@pytest.mark.parametrize(
    ("variable", "value", "taken"),
    [
        (NCCL_NAMES, "^ibp24s0", None),  # a prefix of every InfiniBand interface
        (NCCL_NAMES, "^=ibp24s0", "ibp24s0.8001"),
        (NCCL_NAMES, "=ibp24s0.8001", "ibp24s0.8001"),
        (NCCL_NAMES, "eno", None),
        (GLOO_NAMES, "ibp24s0.8001", "ibp24s0.8001"),
        (GLOO_NAMES, "eno1", None),
    ],
)
def test_what_the_user_set_for_one_is_kept_and_narrows_the_other(
    infiniband: Path, variable: str, value: str, taken: str | None
) -> None:
    network = choose(infiniband, INFINIBAND_ADDRESSES, **{variable: value})
    assert [each.name for each in network.interfaces] == ([taken] if taken else [])
    assert variable not in network.environment()
    kept = next(each for each in network.variables if each.name == variable)
    assert (kept.value, kept.kept) == (value, "the environment")
    if taken:
        (other,) = network.environment().values()
        assert other.removeprefix("=") == taken
    else:
        assert f"is not among {variable}={value}" in network.passed_over["ibp24s0"]


def test_what_the_administrator_set_for_nccl_is_kept(infiniband: Path) -> None:
    # NCCL reads these files itself, but an environment variable would override them.
    (infiniband / "etc").mkdir()
    (infiniband / "etc/nccl.conf").write_text("# site\nNCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==eno1\n")
    network = choose(infiniband, INFINIBAND_ADDRESSES, "ibp24s0")
    assert network.environment() == {GLOO_NAMES: "ibp24s0"}
    assert f"kept {NCCL_NAMES}==eno1 from {infiniband}/etc/nccl.conf instead of =ibp24s0" in str(
        network
    )
    own = infiniband / "own.conf"
    own.write_text("NCCL_SOCKET_IFNAME=ibp24s0\n")
    network = choose(infiniband, INFINIBAND_ADDRESSES, NCCL_CONF_FILE=str(own))
    assert network.variables[0].value == "ibp24s0"
    assert network.variables[0].kept == str(own)


# --- by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["rdma2,rdma10", "rdma2, rdma10", ["rdma2", "rdma10"]])
def test_several_names_in_each_ones_own_form(roce: Path, wanted: str | Sequence[str]) -> None:
    network = choose(roce, ROCE_ADDRESSES, wanted)
    assert network.environment() == {NCCL_NAMES: "=rdma2,rdma10", GLOO_NAMES: "rdma2,rdma10"}
    assert network.agreement == "RoCE + RoCE"


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("ib0", "no interface of that name. It has eno1 (Ethernet, 1 Gb/s, up, 192.168.7.4); ibp"),
        ("ibp24s0.8001@ibp24s0", "no interface of that name. Write 'ibp24s0.8001'."),
        ("=ibp24s0", "no interface of that name. Write 'ibp24s0'."),
        ("ibp", "no interface of that name"),
        ("", "no interface of that name"),
        ("ibp24s0,nope", "network='nope'"),
        ("ibp64s0", "that interface is down"),
    ],
)
def test_a_name_that_cannot_serve_is_refused(infiniband: Path, wanted: str, said: str) -> None:
    with pytest.raises(LaunchError) as refused:
        choose(infiniband, INFINIBAND_ADDRESSES, wanted)
    assert said in str(refused.value)


def test_an_interface_asked_for_without_an_address_is_refused(infiniband: Path) -> None:
    with pytest.raises(LaunchError, match="interface has no IP address"):
        choose(infiniband, {"eno1": ["192.168.7.4"]}, "ibp24s0")


def test_a_value_that_is_kept_though_it_cannot_work_is_reported(infiniband: Path) -> None:
    network = choose(
        infiniband, INFINIBAND_ADDRESSES, "ibp24s0", **{GLOO_NAMES: "=ibp24s0", NCCL_NAMES: "ib9"}
    )
    assert network.environment() == {}
    nccl, gloo = network.variables
    assert nccl.problem.startswith("no interface of this host matches")
    assert "gloo takes plain names; ^ and = are NCCL's" in gloo.problem
    assert gloo.problem in str(network)
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME==ibp24s0 .*unset it for ibp24s0\."):
        network.check("gloo")
    with pytest.raises(LaunchError, match=r"NCCL_SOCKET_IFNAME=ib9 \(from the environment\)"):
        network.check("cpu:gloo,cuda:nccl")
    network.check("fake")
    choose(infiniband, INFINIBAND_ADDRESSES, "ibp24s0", **{GLOO_NAMES: "no"}).check("cuda:nccl")


# --- the two spellings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "takes"),
    [
        ("ib1", {"ib1", "ib10"}),
        ("=ib1", {"ib1"}),
        ("ib1,eth", {"ib1", "ib10", "eth0"}),
        ("=ib1,eth", {"ib1"}),
        ("^ib1", {"eth0", "lo"}),
        ("^=ib1,lo", {"ib10", "eth0"}),
        ("=ib1:1", {"ib1"}),
    ],
)
def test_which_interfaces_nccl_takes(setting: str, takes: set[str]) -> None:
    names = ("ib1", "ib10", "eth0", "lo")
    assert {name for name in names if nccl_takes(setting, name)} == takes


def test_what_is_wrong_with_a_setting(infiniband: Path) -> None:
    found = {each.name: each for each in interfaces(infiniband, INFINIBAND_ADDRESSES)}
    assert nccl_problem("ibp", found) == ""
    assert nccl_problem("^docker,lo", found) == ""
    assert nccl_problem("=ibp64s0", found) == "ibp64s0 is down"
    assert nccl_problem("mlx5_0", found).startswith("no interface of this host matches")
    assert gloo_problem("ibp24s0,eno1", found) == ""
    assert gloo_problem("ibp24s0,ibp64s0", found) == "ibp64s0 is down"
    assert "no interface '^lo'" in gloo_problem("^lo", found)
    assert nccl_problem("", found) == gloo_problem("", found) == ""


# --- the environment ------------------------------------------------------------------------------


def test_applied_sets_and_takes_back(infiniband: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GLOO_NAMES, raising=False)
    monkeypatch.delenv(NCCL_NAMES, raising=False)
    network = choose(infiniband, INFINIBAND_ADDRESSES)
    assert GLOO_NAMES not in os.environ  # choosing alone sets no variables
    with suppress(KeyError), network.applied() as same:
        assert same is network
        assert os.environ[NCCL_NAMES] == "=ibp24s0"
        assert os.environ[GLOO_NAMES] == "ibp24s0"
        raise KeyError
    assert not {NCCL_NAMES, GLOO_NAMES} & set(os.environ)
    monkeypatch.setenv(NCCL_NAMES, "eth")  # set after the choice
    with network.applied():
        assert (os.environ[NCCL_NAMES], os.environ[GLOO_NAMES]) == ("eth", "ibp24s0")
    assert os.environ[NCCL_NAMES] == "eth"


# --- the network of a session ---------------------------------------------------------------------


def together(folder: Path, case: str) -> None:
    """Wait until both ranks have reached this case."""
    (folder / f"{case}.{os.environ['RANK']}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob(f"{case}.*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sessions_with_a_network(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    for name in (NCCL_NAMES, GLOO_NAMES):
        os.environ.pop(name, None)
    with megapg.session(network="lo") as session:
        assert (os.environ[NCCL_NAMES], os.environ[GLOO_NAMES]) == ("=lo", "lo")
        value = torch.ones(1)
        dist.all_reduce(value, group=session.groups.dp)
        assert value.item() == 2
        with pytest.raises(SessionError, match="network= says how to make WORLD"):
            megapg.session(name="second", network="lo")
    assert not {NCCL_NAMES, GLOO_NAMES} & set(os.environ)

    together(folder, "one host has no such interface")
    mine, said = (RendezvousError, "rank 0 on .* gave up: LaunchError: network='no-such'")
    if rank == 0:
        mine, said = LaunchError, "network='no-such': .* has no interface of that name"
    with pytest.raises(mine, match=said):
        megapg.session(network="lo" if rank else "no-such")

    together(folder, "only one rank asks")
    with pytest.raises(LayoutMismatchError) as different:
        megapg.session(network="lo" if rank else None)
    assert different.value.differences == {"network": {0: "left alone", 1: "loopback"}}

    together(folder, "what is kept can't work")
    os.environ[GLOO_NAMES] = "^lo"
    with pytest.raises((LaunchError, RendezvousError), match="GLOO_SOCKET_IFNAME=\\^lo"):
        megapg.session(network="lo")
    assert NCCL_NAMES not in os.environ
    del os.environ[GLOO_NAMES]

    together(folder, "afterwards all is well")
    fastest = choose_network().environment()  # empty on hosts with Ethernet only
    with megapg.session(network="auto"):
        assert {n: os.environ[n] for n in (NCCL_NAMES, GLOO_NAMES) if n in os.environ} == fastest


def test_a_session_uses_the_network_while_it_is_open(tmp_path: Path) -> None:
    run_distributed(partial(sessions_with_a_network, tmp_path), 2, deadline=150)
