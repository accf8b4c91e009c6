"""The interfaces that NCCL and gloo would use, found without opening a connection."""

from __future__ import annotations

from collections.abc import Sequence

from megapg.doctor.survey import Facts
from megapg.launch.network import GLOO_NAMES, NCCL_NAMES, Interface, Kind, nccl_takes

# NCCL tries these in turn if NCCL_SOCKET_IFNAME is not set. From "NCCL_SOCKET_IFNAME" in its user
# guide.
_NCCL_DEFAULTS = ("ib", "^docker,lo,virbr", "docker", "lo")


def fastest(facts: Facts) -> str:
    """Return the fastest kind of link between hosts."""
    kinds = [each.kind for each in facts.interfaces if not each.obstacle]
    kinds += [port.kind for port in facts.rdma_ports if port.active]
    return min(kinds, key=list(Kind).index).value if kinds else "none"


def of_gloo(facts: Facts) -> tuple[str, bool]:
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


def of_nccl(facts: Facts) -> str:
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
