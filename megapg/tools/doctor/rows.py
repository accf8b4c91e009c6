"""The facts of one rank for display, one row each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from megapg.launch.network import GLOO_NAMES, NCCL_NAMES, Interface, Kind, nccl_takes
from megapg.tools.doctor.account import Row
from megapg.tools.doctor.survey import Facts

# Environment variables that must be equal on all ranks, so that they can communicate ...
_SHARED = re.compile(
    r"(MASTER|NCCL|TORCH|TORCHCOMM|MEGAPG)_|(WORLD_SIZE|OMP_NUM_THREADS|CUDA_DEVICE_MAX_.*)$"
)
# ... except those whose value belongs to a host.
_OWN = re.compile(r"NCCL_(SOCKET_IFNAME|IB_HCA|HOSTID|CONF_FILE|.*FILE|GRAPH_.*)$|TORCH_.*FILE$")

GUARD = {
    "error": "a read that contradicts the reader's own groups is an error",
    "warn": "a read that contradicts the reader's own groups is a warning",
    "off": "off: the globals may answer with a group of the wrong layout",
}
"""Mode of :func:`megapg.guard` -> its effect if a process has two layouts."""


# NCCL tries these in turn if NCCL_SOCKET_IFNAME is not set. From "NCCL_SOCKET_IFNAME" in its user
# guide.
_NCCL_DEFAULTS = ("ib", "^docker,lo,virbr", "docker", "lo")


def rows(facts: Facts) -> Iterator[Row]:
    """Yield the facts, one by one, in the order of their display."""
    launch = facts.launch
    yield Row("launch", "launched by", launch.launcher, alike=True)
    yield Row("launch", "host", facts.host)
    yield Row("launch", "ranks", str(launch.world_size), launch.world_size, alike=True)
    local = launch.local_rank
    yield Row("launch", "local rank", "unknown" if local is None else str(local), local)
    if launch.address:
        hosted = "the launcher" if launch.hosted else "rank 0"
        place = f"{launch.address}:{launch.port} ({launch.origin}), where {hosted} hosts the store"
        yield Row("launch", "meet at", place, alike=True)
    for name, version in facts.versions.items():
        yield Row("software", name, version, alike=True)
    if facts.driver:
        yield Row("devices", "NVIDIA driver", facts.driver, alike=True)
    for index, device in enumerate(facts.devices):
        major, minor = device.capability
        text = f"{device.name}, capability {major}.{minor}, {device.memory / 2**30:.0f} GiB"
        yield Row("devices", f"cuda:{index}", text, asdict(device))
    if not facts.devices:
        yield Row("devices", "accelerators", facts.device_problem or "none", alike=True)
    for interface in facts.interfaces:
        text = str(interface).partition(" ")[2].strip("()")
        yield Row("network", interface.name, text, asdict(interface))
    for port in facts.rdma_ports:
        text = str(port).partition(" ")[2].strip("()")
        data = {**asdict(port), "interfaces": sorted(port.interfaces)}
        yield Row("network", f"{port.device}:{port.number}", text, data)
    text, outward = _of_gloo(facts)
    yield Row("network", "gloo talks over", text, {"text": text, "reaches_other_hosts": outward})
    if facts.version("NCCL"):
        yield Row("network", "NCCL talks over", _of_nccl(facts))
    yield Row("network", "network='auto' takes", facts.automatic)
    yield Row("network", "fastest link", _fastest(facts), alike=True)
    for way, obstacle in facts.offload.items():
        text = f"no: {obstacle}" if obstacle else "yes"
        yield Row("offload", way, text, not obstacle, alike=True)
    mode = facts.variable("MEGAPG_GUARD") or "error"
    yield Row("guard", "two layouts in a process", GUARD.get(mode, mode), alike=True)
    for name, value in facts.environment.items():
        alike = bool(_SHARED.match(name)) and not _OWN.match(name)
        yield Row("environment", name, value, alike=alike)


# --- the interfaces that NCCL and gloo would use, found without opening a connection -----------


def _fastest(facts: Facts) -> str:
    """Return the fastest kind of link between hosts."""
    kinds = [each.kind for each in facts.interfaces if not each.obstacle]
    kinds += [port.kind for port in facts.rdma_ports if port.active]
    return min(kinds, key=list(Kind).index).value if kinds else "none"


def _of_gloo(facts: Facts) -> tuple[str, bool]:
    """Return the interfaces that gloo listens on, and True if other hosts can reach them.

    They are those of GLOO_SOCKET_IFNAME, or else of the address that the host's own name resolves
    to. If that is no address of this host, gloo falls back to the loopback.
    """
    setting, address = facts.variable(GLOO_NAMES), facts.host_address
    if setting:
        named = [each for each in facts.interfaces if each.name in setting.split(",")]
        why = f"from {GLOO_NAMES}"
    else:
        named = [each for each in facts.interfaces if address and address in each.addresses]
        why = f"as this host's name resolves to {address or 'nothing'}"
    outward = bool(named) and all(each.kind is not Kind.LOOPBACK for each in named)
    return f"{_listed(named) if named else 'the loopback'}, {why}", outward


def _of_nccl(facts: Facts) -> str:
    """Return RDMA ports if there are any, else TCP. The ranks always meet over TCP first."""
    sockets = _listed(_sockets(facts))
    if (facts.variable("NCCL_IB_DISABLE") or "0") != "0" or facts.variable("NCCL_NET") == "Socket":
        return f"TCP on {sockets}, told so by the environment"
    filtered = facts.variable("NCCL_IB_HCA")
    ports = [
        f"{port.device} ({port.kind.value})"
        for port in facts.rdma_ports
        if port.active and (not filtered or nccl_takes(filtered, port.device))
    ]
    return f"{', '.join(ports)}, meeting over {sockets}" if ports else f"TCP on {sockets}"


def _sockets(facts: Facts) -> list[Interface]:
    setting = facts.variable(NCCL_NAMES)
    usable = [each for each in facts.interfaces if not each.obstacle]
    for each in (setting,) if setting else _NCCL_DEFAULTS:
        if taken := [interface for interface in usable if nccl_takes(each, interface.name)]:
            return taken
    return []


def _listed(found: Sequence[Interface]) -> str:
    return ", ".join(f"{each.name} ({each.kind.value})" for each in found) or "no interface"
