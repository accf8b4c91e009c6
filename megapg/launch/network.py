"""Choose the network interfaces that the ranks use. They are found in sysfs, and logged.

InfiniBand is recognised by the kernel's link type, and RoCE by the RDMA device of an interface.
Names are not used: hosts rename their interfaces, and RoCE looks like any Ethernet interface.

NCCL and gloo take the choice in different forms. NCCL's ``NCCL_SOCKET_IFNAME`` is a filter, in
which a bare name is a prefix (``ib1`` also matches ``ib10``), so the exact form ``=ib1`` is used.
gloo's ``GLOO_SOCKET_IFNAME`` is a plain list of names. Values set by the user, or by the
administrator in ``/etc/nccl.conf``, are kept.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil
from typing_extensions import override

from megapg.errors import LaunchError
from megapg.launch.environment import overridden

NCCL_NAMES, GLOO_NAMES = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"

_ROOT = Path("/")
_UP = 0x1  # IFF_UP in an interface's flags


class Kind(StrEnum):
    """The type of an interface's network."""

    INFINIBAND = "InfiniBand"
    ROCE = "RoCE"
    ETHERNET = "Ethernet"
    LOOPBACK = "loopback"
    OTHER = "other"


# The kernel's ARPHRD_* numbers, as in /sys/class/net/*/type.
_LINK_TYPES = {1: Kind.ETHERNET, 32: Kind.INFINIBAND, 772: Kind.LOOPBACK}

# As in /sys/class/infiniband/*/ports/*/link_layer.
_LINK_LAYERS = {"InfiniBand": Kind.INFINIBAND, "Ethernet": Kind.ROCE}

# The kinds that "auto" takes, best first. The right one of several plain Ethernet interfaces can't
# be known, so NCCL, gloo or the user choose it.
_FAST = (Kind.INFINIBAND, Kind.ROCE)


@dataclass(frozen=True)
class Interface:
    """One network interface of this host.

    Attributes:
        name: as the kernel spells it: ``ib0.8001``, where ``ip`` prints ``ib0.8001@ib0``.
        kind: the type of its network; a VLAN or bond on RoCE is RoCE.
        up: True if it can carry traffic now.
        addresses: its IP addresses, IPv4 first, without link-local addresses.
        devices: its RDMA devices, such as ``mlx5_0``.
        speed: in megabits per second; None if the driver does not report it.
    """

    name: str
    kind: Kind
    up: bool
    addresses: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    speed: int | None = None

    @property
    def obstacle(self) -> str:
        """The reason why ranks can't use it; empty if they can."""
        if not self.up:
            return "is down"
        return "" if self.addresses else "has no IP address"

    @override
    def __str__(self) -> str:
        facts = [self.kind.value, *self.devices]
        if self.speed is not None:
            facts.append(f"{self.speed / 1000:g} Gb/s")
        facts += ["up" if self.up else "down", *(self.addresses or ["no address"])]
        return f"{self.name} ({', '.join(facts)})"


@dataclass(frozen=True)
class RdmaPort:
    """One port of an RDMA device. NCCL moves data over RDMA if it can."""

    device: str  # for example ``mlx5_0``
    number: int  # number of the port, from 1
    kind: Kind  # InfiniBand or RoCE, or other
    active: bool  # True if it can carry traffic now
    rate: str = ""  # text of the driver, ``"400 Gb/sec (4X NDR)"``; may be empty
    # the network interfaces whose addresses it uses, for RoCE
    interfaces: frozenset[str] = frozenset()

    @override
    def __str__(self) -> str:
        facts = [self.kind.value, "active" if self.active else "not active", self.rate]
        return f"{self.device}:{self.number} ({', '.join(filter(None, facts))})"


@dataclass(frozen=True)
class Variable:
    """One environment variable of a choice of network.

    Attributes:
        name: for example ``NCCL_SOCKET_IFNAME``.
        value: the value in effect.
        wanted: the value that the choice asked for.
        kept: where the value was set before, if it is kept; empty if megapg sets it.
        problem: what is wrong with a kept value; empty if it is valid.
    """

    name: str
    value: str
    wanted: str
    kept: str = ""
    problem: str = ""

    @override
    def __str__(self) -> str:
        if not self.kept:
            return f"set {self.name}={self.value}"
        instead = "" if self.value == self.wanted else f" instead of {self.wanted}"
        problem = f"; {self.problem}" if self.problem else ""
        return f"kept {self.name}={self.value} from {self.kept}{instead}{problem}"


@dataclass(frozen=True)
class Network:
    """A choice of interfaces and its variables for NCCL and gloo. Made by :func:`choose_network`.

    Attributes:
        interfaces: the chosen ones; empty if NCCL and gloo choose themselves.
        why: the reason for the choice.
        variables: the variables that are set or kept.
        passed_over: interface -> why it was not chosen.
    """

    interfaces: tuple[Interface, ...]
    why: str
    variables: tuple[Variable, ...] = ()
    passed_over: Mapping[str, str] = field(default_factory=dict)

    @property
    def agreement(self) -> str:
        """The text that must be equal on every rank: kinds of interfaces, not names."""
        if not self.interfaces:
            return "left to NCCL and gloo"
        return " + ".join(interface.kind.value for interface in self.interfaces)

    def environment(self) -> dict[str, str]:
        """Return the environment variables to set: those that were not set before."""
        return {each.name: each.value for each in self.variables if not each.kept}

    def check(self, backend: str) -> None:
        """Raise if a kept value can't work.

        Args:
            backend: as torch spells it; variables of other backends are not checked.

        Raises:
            LaunchError: a variable that was set before names no usable interface.
        """
        for each in self.variables:
            if each.problem and each.name.partition("_")[0].lower() in backend.lower():
                raise LaunchError(
                    f"{each.name}={each.value} (from {each.kept}): {each.problem}. Correct it, or "
                    f"unset it{f' for {each.wanted}' if each.wanted else ''}."
                )

    @contextlib.contextmanager
    def applied(self) -> Iterator[Network]:
        """Context that sets :meth:`environment` and removes it at the end.

        Enter it before the first communicator is made: NCCL reads its variables once per process.
        """
        unset = {name: v for name, v in self.environment().items() if name not in os.environ}
        with overridden(unset):
            yield self

    @override
    def __str__(self) -> str:
        chosen = ", ".join(map(str, self.interfaces)) or "no interface chosen"
        lines = [f"network: {chosen}: {self.why}", *(f"  {each}" for each in self.variables)]
        lines += [f"  passed over {name}: {reason}" for name, reason in self.passed_over.items()]
        return "\n".join(lines)


def choose_network(
    wanted: str | Sequence[str] = "auto",
    *,
    environment: Mapping[str, str] = os.environ,
    root: Path = _ROOT,
    addresses: Mapping[str, Sequence[str]] | None = None,
) -> Network:
    """Choose the network interfaces for ranks on this host. Sets nothing.

    Args:
        wanted: ``"auto"`` for the first InfiniBand interface that is up and has an address. If
            there is none, the first such RoCE interface; if there is none, NCCL and gloo choose
            themselves. A value that the user has set for one of them limits the choice for the
            other. Or exact names: ``"ib0"``, ``"ib0,ib1"``, ``["ib0", "ib1"]``; give every rank the
            same number.
        environment: the environment variables, which the user may have set.
        root: the directory that holds ``sys/class`` and ``etc/nccl.conf``.
        addresses: interface -> IP addresses, instead of the host's own.

    Raises:
        LaunchError: a named interface does not exist, is down or has no address.
    """
    found = {each.name: each for each in interfaces(root, addresses)}
    already = _already_set(environment, root)
    if wanted == "auto":
        chosen, why, passed_over = _fastest(found, already)
    else:
        names = wanted.split(",") if isinstance(wanted, str) else wanted
        chosen = tuple(_named(name.strip(), found) for name in names)
        why, passed_over = "asked for by name", {}
    return Network(chosen, why, tuple(_variables(chosen, found, already)), passed_over)


def interfaces(
    root: Path = _ROOT, addresses: Mapping[str, Sequence[str]] | None = None
) -> tuple[Interface, ...]:
    """Return the network interfaces of this host, in natural order of names.

    Args:
        root: the directory that holds ``sys/class``.
        addresses: interface -> IP addresses, instead of the host's own.
    """
    net = root / "sys/class/net"
    # In some containers, sysfs is of another network namespace and lists other interfaces than this
    # process has. Interfaces without an address are dropped later, and interfaces with an address
    # but without an entry are added here.
    reachable = _addresses() if addresses is None else addresses
    listed = {path.name for path in _entries(net) if (path / "type").exists()}
    behind: dict[str, set[str]] = {}
    for port in rdma_ports(root):
        for name in port.interfaces:
            behind.setdefault(name, set()).add(port.device)
    names = sorted(listed | set(reachable), key=_natural)
    return tuple(
        Interface(
            name=name,
            kind=_kind(net / name, behind),
            up=_is_up(net / name),
            addresses=tuple(reachable.get(name, ())),
            devices=tuple(sorted(_devices_behind(net / name, behind), key=_natural)),
            speed=speed if (speed := _number(net / name / "speed")) and speed > 0 else None,
        )
        for name in names
    )


def rdma_ports(root: Path = _ROOT) -> tuple[RdmaPort, ...]:
    """Return the RDMA ports of this host. InfiniBand works without a network interface.

    Args:
        root: the directory that holds ``sys/class``.
    """
    return tuple(
        RdmaPort(
            device=device.name,
            number=int(port.name),
            kind=_LINK_LAYERS.get(_text(port / "link_layer"), Kind.OTHER),
            active=_text(port / "state").endswith(": ACTIVE"),
            rate=_text(port / "rate"),
            # Most entries of the table are empty and can't be read.
            interfaces=frozenset(filter(None, map(_text, _entries(port / "gid_attrs/ndevs")))),
        )
        for device in sorted(_entries(root / "sys/class/infiniband"), key=_by_name)
        for port in sorted(_entries(device / "ports"), key=_by_name)
        if port.name.isdigit()
    )


def nccl_takes(setting: str, name: str) -> bool:
    """True if NCCL may use the interface with this ``NCCL_SOCKET_IFNAME``.

    The value is a list of prefixes. ``^`` excludes them, ``=`` makes them exact names.
    """
    listed = setting.removeprefix("^")
    exact = listed.startswith("=")
    wanted = [part.partition(":")[0] for part in listed.removeprefix("=").split(",") if part]
    hit = any(name == each if exact else name.startswith(each) for each in wanted)
    return hit != setting.startswith("^")


def nccl_problem(setting: str, found: Mapping[str, Interface]) -> str:
    """Return what is wrong with ``NCCL_SOCKET_IFNAME`` on this host; empty if it is valid."""
    taken = [each for name, each in found.items() if nccl_takes(setting, name)]
    if not setting or any(not each.obstacle for each in taken):
        return ""
    if taken:
        return f"{taken[0].name} {taken[0].obstacle}"
    return f"no interface of this host matches; it has {', '.join(found) or 'none'}"


def gloo_problem(setting: str, found: Mapping[str, Interface]) -> str:
    """Return what is wrong with ``GLOO_SOCKET_IFNAME`` on this host; empty if it is valid."""
    for name in filter(None, setting.split(",")):
        if name not in found:
            hint = " (gloo takes plain names; ^ and = are NCCL's)" if name[0] in "^=" else ""
            return f"this host has no interface {name!r}{hint}; it has {', '.join(found) or 'none'}"
        if found[name].obstacle:
            return f"{name} {found[name].obstacle}"
    return ""


PROBLEMS: Mapping[str, Callable[[str, Mapping[str, Interface]], str]] = {
    NCCL_NAMES: nccl_problem,
    GLOO_NAMES: gloo_problem,
}

# --- choosing -------------------------------------------------------------------------------------


def _fastest(
    found: Mapping[str, Interface], already: Mapping[str, tuple[str, str]]
) -> tuple[tuple[Interface, ...], str, dict[str, str]]:
    usable = [each for each in found.values() if not _drawback(each, already)]
    usable.sort(key=lambda each: _FAST.index(each.kind))  # stable sort: by name within a kind
    passed_over = {
        each.name: _drawback(each, already) or f"{usable[0].name} comes first"
        for each in found.values()
        if each not in usable[:1]
    }
    if not usable:
        why = "no InfiniBand or RoCE interface can serve, so NCCL and gloo choose for themselves"
        return (), why, passed_over
    alike = sum(each.kind is usable[0].kind for each in usable)
    why = f"the first of {alike} {usable[0].kind.value} interfaces" if alike > 1 else "the fastest"
    return (usable[0],), why, passed_over


def _drawback(interface: Interface, already: Mapping[str, tuple[str, str]]) -> str:
    """Return why "auto" does not take the interface; empty if it may."""
    if interface.obstacle or interface.kind not in _FAST:
        return interface.obstacle or f"is {interface.kind.value}"
    for name, takes in _TAKES.items():
        setting, where = already.get(name, ("", ""))
        if setting and not takes(setting, interface.name):
            return f"is not among {name}={setting} from {where}"
    return ""


_TAKES: Mapping[str, Callable[[str, str], bool]] = {
    NCCL_NAMES: nccl_takes,
    GLOO_NAMES: lambda setting, name: name in setting.split(","),
}


def _named(name: str, found: Mapping[str, Interface]) -> Interface:
    if name not in found:
        plain = name.partition("@")[0].lstrip("^=")
        hint = f" Write {plain!r}." if plain in found and plain != name else ""
        have = "; ".join(map(str, found.values())) or "none"
        raise LaunchError(
            f"network={name!r}: {socket.gethostname()} has no interface of that name.{hint} It has "
            f"{have}."
        )
    if obstacle := found[name].obstacle:
        raise LaunchError(
            f"network={name!r}: on {socket.gethostname()} that interface {obstacle}. Bring it up "
            "with an address, or choose another."
        )
    return found[name]


def _variables(
    chosen: Sequence[Interface],
    found: Mapping[str, Interface],
    already: Mapping[str, tuple[str, str]],
) -> Iterator[Variable]:
    names = ",".join(each.name for each in chosen)
    for name, wanted in {NCCL_NAMES: f"={names}", GLOO_NAMES: names}.items():
        if name in already:
            value, where = already[name]
            problem = PROBLEMS[name](value, found)
            yield Variable(name, value, wanted if chosen else "", where, problem)
        elif chosen:
            yield Variable(name, wanted, wanted)


def _already_set(environment: Mapping[str, str], root: Path) -> dict[str, tuple[str, str]]:
    """Return variable -> (value, source). The environment overrides NCCL's files."""
    named = environment.get("NCCL_CONF_FILE")
    personal = Path(environment["HOME"], ".nccl.conf") if "HOME" in environment else None
    files = [root / "etc/nccl.conf", Path(named) if named else personal]
    found = {}
    for file in filter(None, files):  # the personal file overrides
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip() == NCCL_NAMES:
                    found[NCCL_NAMES] = (value.strip(), str(file))
    given = {name: environment[name] for name in (NCCL_NAMES, GLOO_NAMES) if name in environment}
    return found | {name: (value, "the environment") for name, value in given.items()}


# --- reading sysfs --------------------------------------------------------------------------------


def _addresses() -> dict[str, list[str]]:
    """Return interface -> its IP addresses, IPv4 first."""
    found: dict[str, list[str]] = {}
    for label, entries in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # eth0:1 is a further address of eth0
        for family in (socket.AF_INET, socket.AF_INET6):
            found.setdefault(name, []).extend(
                entry.address
                for entry in entries
                # link-local addresses have a zone
                if entry.family == family and "%" not in entry.address
            )
    return found


def _kind(path: Path, behind: Mapping[str, set[str]]) -> Kind:
    kind = _LINK_TYPES.get(_number(path / "type") or 0, Kind.OTHER)
    over_rdma = any(each.name in behind for each in _layers(path))
    return Kind.ROCE if kind is Kind.ETHERNET and over_rdma else kind


def _devices_behind(path: Path, behind: Mapping[str, set[str]]) -> set[str]:
    own = {each.name for each in _entries(path / "device/infiniband")}
    return own.union(*(behind.get(each.name, set()) for each in _layers(path)))


def _layers(path: Path) -> Iterator[Path]:
    """Yield the interface and those below it, which a VLAN or a bond uses."""
    yield path
    for lower in _entries(path):
        if lower.name.startswith("lower_"):
            yield from _layers(path.parent / lower.name.removeprefix("lower_"))


def _is_up(path: Path) -> bool:
    """True if the interface carries traffic; some drivers report ``unknown``."""
    state = _text(path / "operstate")
    if state:
        return state == "up" or (state == "unknown" and bool((_number(path / "flags") or 0) & _UP))
    statistics = psutil.net_if_stats().get(path.name)
    return statistics is not None and statistics.isup


def _entries(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(path.iterdir())
    return []


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _number(path: Path) -> int | None:
    with contextlib.suppress(ValueError):
        return int(_text(path), 0)
    return None


def _by_name(path: Path) -> list[int | str]:
    return _natural(path.name)


def _natural(name: str) -> list[int | str]:
    """Return a sort key that puts ``ib10`` after ``ib2``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
