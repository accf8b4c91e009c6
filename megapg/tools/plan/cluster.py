"""The GPUs, links and nodes that a layout is planned for.

A cluster is a small TOML file. The folder ``clusters`` has files of well-known machines. Every
number of theirs names the document that it was read from.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megapg.errors import PlanError

FULL = 0.9  # of a GPU's memory: CUDA, kernels and fragments take memory that no plan shows
_NAMED = "NODESxNAME-GPUS, such as 64xH100-8 for 64 nodes of 8 GPUs"
_PRESETS = Path(__file__).with_name("clusters")


@dataclass(frozen=True)
class Quantity:
    """A number of a cluster.

    Attributes:
        value: the number, in the unit of its key.
        source: the document that has the number.
    """

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machines of one kind.

    Attributes:
        name: such as ``H100-8``.
        gpus_per_node: number of GPUs of one machine. Neighbouring ranks are on one node.
        nvlink_domain: number of GPUs that NVLink connects: those of one node or of a rack.
        memory_gb: memory of a GPU, in 10^9 bytes.
        nvlink_gb_s: bandwidth of a GPU over NVLink in one direction, in 10^9 bytes a second.
        network_gb_s: the same over the network, for each GPU of a node.
        bf16_tflops: dense bfloat16 arithmetic of a GPU, in 10^12 operations a second; None if the
            file has no such number. Only suggestions need it.
        nodes: number of nodes; None if as many as the layout needs.
    """

    name: str
    gpus_per_node: Quantity
    nvlink_domain: Quantity
    memory_gb: Quantity
    nvlink_gb_s: Quantity
    network_gb_s: Quantity
    bf16_tflops: Quantity | None = None
    nodes: int | None = None

    @property
    def node_size(self) -> int:
        """Number of GPUs of a node."""
        return int(self.gpus_per_node.value)

    @property
    def domain_size(self) -> int:
        """Number of GPUs that NVLink connects."""
        return int(self.nvlink_domain.value)

    @property
    def quantities(self) -> dict[str, Quantity]:
        """Every number with its source, by its key in the file."""
        return {name: each for name in NUMBERS if (each := getattr(self, name)) is not None}


NUMBERS = tuple(each.name for each in fields(Cluster) if each.name not in ("name", "nodes"))
_OPTIONAL = ("bf16_tflops",)
_WHOLE = ("gpus_per_node", "nvlink_domain")


def presets() -> list[str]:
    """Return the names of the clusters that megapg has."""
    return sorted(file.stem for file in _PRESETS.glob("*.toml"))


def load_cluster(text: str) -> Cluster:
    """Return the cluster that ``text`` names.

    Args:
        text: a name of ``presets`` or a TOML file, with the number of nodes before it or without:
            ``64xH100-8``, ``H100-8``, ``64xmine.toml``.

    Raises:
        PlanError: there is no such cluster, or its file has an error.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", text.strip())
    count, name = match.groups() if match else (None, text)
    file = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    if not name.endswith(".toml") and name not in presets():
        raise PlanError(
            f"--cluster {text}: there is no {name!r}.{did_you_mean(name, presets())} Write "
            f"{_NAMED}. NAME-GPUS is one of {', '.join(presets())}, or a TOML file."
        )
    if count is not None and int(count) < 1:
        raise PlanError(f"--cluster {text}: the number of nodes is a whole number from 1.")
    cluster = _read(file)
    return replace(cluster, nodes=int(count)) if count else cluster


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """Return a sentence with the name that is nearest, whatever its case; empty if none is."""
    lower = {each.lower(): each for each in names}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return f" Did you mean {lower[close[0]]}?" if close else ""


def _read(file: Path) -> Cluster:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{file}: {error}") from None
    if wrong := sorted(found.keys() - {*NUMBERS, "name", "nodes"}):
        raise PlanError(f"{file}: unknown keys {', '.join(wrong)}; the keys are {_all_keys()}.")
    if missing := [name for name in NUMBERS if name not in {*found, *_OPTIONAL}]:
        raise PlanError(f"{file}: {', '.join(missing)} missing; the keys are {_all_keys()}.")
    numbers = {name: _quantity(file, name, found[name]) for name in NUMBERS if name in found}
    nodes = found.get("nodes")
    if nodes is not None and (not isinstance(nodes, int) or nodes < 1):
        raise PlanError(f"{file}: nodes={nodes!r}; the number of nodes is a whole number from 1.")
    cluster = Cluster(name=str(found.get("name", file.stem)), nodes=nodes, **numbers)
    sizes = sorted((cluster.node_size, cluster.domain_size))
    if sizes[1] % sizes[0]:
        raise PlanError(
            f"{file}: gpus_per_node={cluster.node_size} and nvlink_domain={cluster.domain_size}; "
            "one has to divide by the other."
        )
    return cluster


def _quantity(file: Path, name: str, given: object) -> Quantity:
    """Return a number that is given alone, or as ``{value = 8, source = "..."}``."""
    table = given if isinstance(given, Mapping) else {"value": given}
    value = table.get("value")
    whole = isinstance(value, int)
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if not number or (name in _WHOLE and not whole) or table.keys() - {"value", "source"}:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise PlanError(
            f'{file}: {name} = {given!r}; write {kind} above 0, or {{value = 8, source = "..."}}.'
        )
    assert isinstance(value, int | float)
    return Quantity(value, str(table.get("source", file.name)))


def _all_keys() -> str:
    return ", ".join(("name", "nodes", *NUMBERS))
