"""The facts of one rank for display, one row each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict

from megapg.doctor.account import Row
from megapg.doctor.survey import Facts
from megapg.doctor.traffic import fastest, of_gloo, of_nccl

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
    text, outward = of_gloo(facts)
    yield Row("network", "gloo talks over", text, {"text": text, "reaches_other_hosts": outward})
    if facts.version("NCCL"):
        yield Row("network", "NCCL talks over", of_nccl(facts))
    yield Row("network", "network='auto' takes", facts.automatic)
    yield Row("network", "fastest link", fastest(facts), alike=True)
    for way, obstacle in facts.offload.items():
        text = f"no: {obstacle}" if obstacle else "yes"
        yield Row("offload", way, text, not obstacle, alike=True)
    mode = facts.variable("MEGAPG_GUARD") or "error"
    yield Row("guard", "two layouts in a process", GUARD.get(mode, mode), alike=True)
    for name, value in facts.environment.items():
        alike = bool(_SHARED.match(name)) and not _OWN.match(name)
        yield Row("environment", name, value, alike=alike)
