"""Checks that compare ranks: a table of small functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from megapg.launch import Launch
from megapg.launch.process import is_loopback, ranks_said
from megapg.tools.doctor.account import Account, Finding, Level

K = TypeVar("K")

_NOT_SET = "not set"


@dataclass(frozen=True)
class Gathering:
    """The accounts of the ranks that came, and the missing ranks."""

    launch: Launch  # the launch of the gathering rank
    accounts: tuple[Account, ...]  # in the order of their ranks
    missing: tuple[int, ...] = ()  # ranks that did not come in time
    problem: str = ""  # why the ranks could not meet; empty if they could


Located: TypeAlias = tuple[Finding, tuple[int, ...]]
"""A finding, and the ranks that it is about."""


def compare(gathering: Gathering) -> tuple[Located, ...]:
    """Run every check that looks at more than one rank."""
    return tuple(found for check in CHECKS for found in check(gathering))


def missing(gathering: Gathering) -> Iterator[Located]:
    """A rank did not come."""
    if gathering.missing:
        world = gathering.launch.world_size
        came = world - len(gathering.missing)
        reason = f" {gathering.problem}" if gathering.problem else ""
        what = (
            f"{ranks_said(gathering.missing)} did not come{_where(gathering)}: this report is "
            f"about {came} of {world} ranks.{reason}"
        )
        remedy = (
            "Look at the output of those ranks. Was every rank started, with the same command, and "
            "can its host reach the address above? Slow ones get longer with --timeout."
        )
        yield Finding("missing", Level.ERROR, what, remedy), gathering.missing


def differing(gathering: Gathering) -> Iterator[Located]:
    """A fact that must be the same on every rank is not."""
    has_to = {(r.section, r.name) for a in gathering.accounts for r in a.rows if r.alike}
    for section, name in sorted(has_to):
        found = _by_value(gathering.accounts, section, name)
        if len(found) > 1:
            values = "; ".join(f"{value} on {ranks_said(ranks)}" for value, ranks in found)
            fewest = min((ranks for _, ranks in found), key=len)
            level = Level.ERROR if section in ("launch", "software") else Level.WARNING
            remedy = "Make it the same on every rank." + (
                " The same image on every host is the surest way." if section == "software" else ""
            )
            yield Finding("differs", level, f"{name} is {values}.", remedy), tuple(fewest)


def one_device_each(gathering: Gathering) -> Iterator[Located]:
    """Two ranks would use one GPU."""
    for (host, device), ranks in _grouped(gathering.accounts, lambda a: (a.host, a.device)).items():
        if device and len(ranks) > 1:
            what = f"{ranks_said(ranks)} on {host} would share one GPU ({device})."
            remedy = (
                "Give every rank its own: as many ranks as GPUs on a host, and a LOCAL_RANK (or "
                "SLURM_LOCALID) that counts from 0 there."
            )
            yield Finding("shared_device", Level.ERROR, what, remedy), tuple(ranks)


def threads(gathering: Gathering) -> Iterator[Located]:
    """Several ranks on a host each start a thread for every core."""
    for host, ranks in _grouped(gathering.accounts, lambda account: account.host).items():
        unset = [
            account.rank
            for account in gathering.accounts
            if account.host == host and account.get("environment", "OMP_NUM_THREADS") is None
        ]
        if len(ranks) > 1 and unset:
            what = (
                f"OMP_NUM_THREADS is not set: each of the {len(ranks)} ranks on {host} starts as "
                "many threads as the host has cores."
            )
            remedy = "Set OMP_NUM_THREADS to the cores of a host / its ranks, or to 1."
            yield Finding("omp_num_threads", Level.WARNING, what, remedy), tuple(unset)


def local_address(gathering: Gathering) -> Iterator[Located]:
    """The ranks of several hosts may try to meet at each host's own loopback address."""
    launch = gathering.launch
    one_host = len(set(launch.hosts)) == 1 or launch.local_world_size == launch.world_size
    if gathering.missing and is_loopback(launch.address) and not one_host:
        what = (
            f"The ranks meet at {launch.address}, a loopback address: ranks on other hosts can't "
            "reach rank 0 there."
        )
        remedy = "Set MASTER_ADDR to the name or address of the host of rank 0, on every host."
        yield Finding("local_address", Level.ERROR, what, remedy), gathering.missing


def gloo_on_loopback(gathering: Gathering) -> Iterator[Located]:
    """gloo would make the other hosts connect to 127.0.0.1 or another loopback address."""
    if len({account.host for account in gathering.accounts}) < 2:
        return
    for account in gathering.accounts:
        used = account.data("network", "gloo talks over")
        if used and not used["reaches_other_hosts"]:
            what = f"gloo on {account.host} talks over {used['text']}: other hosts can't reach it."
            remedy = (
                "Set GLOO_SOCKET_IFNAME to an interface that they reach, or correct /etc/hosts, or "
                "let megapg choose (megapg.launch.choose_network)."
            )
            yield Finding("gloo_on_loopback", Level.WARNING, what, remedy), (account.rank,)


CHECKS: tuple[Callable[[Gathering], Iterator[Located]], ...] = (
    missing,
    local_address,
    differing,
    one_device_each,
    gloo_on_loopback,
    threads,
)
"""Every check that compares ranks."""


def _where(gathering: Gathering) -> str:
    """Return the hosts of the missing ranks, if the launcher names them."""
    hosts = gathering.launch.hosts
    named = dict.fromkeys(hosts[rank] for rank in gathering.missing if rank < len(hosts))
    return f" (on {', '.join(named)})" if named else ""


def _by_value(accounts: Sequence[Account], section: str, name: str) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = defaultdict(list)
    for account in accounts:
        value = account.get(section, name)
        found[_NOT_SET if value is None else value].append(account.rank)
    return list(found.items())


def _grouped(accounts: Sequence[Account], key: Callable[[Account], K]) -> dict[K, list[int]]:
    found: dict[K, list[int]] = defaultdict(list)
    for account in accounts:
        found[key(account)].append(account.rank)
    return found
