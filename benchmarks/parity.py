"""Measures `megapg parity` on sound layouts, planted faults, and known faults of Megatron-core.

The layouts and the faults are those of the tests, in ``tests/support``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import Options, Table
from megapg.testing import preloaded

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
KINDS = ("sound layouts", "planted faults", "known faults of Megatron-core")
_QUICK = 2


@dataclass(frozen=True)
class Proof:
    """The outcome of one kind of layouts.

    Attributes:
        kind: one of :data:`KINDS`.
        layouts: number of layouts that ran.
        alarms: number of layouts that parity reports.
        expected: number of layouts with the expected report.
        odd: names of the other layouts.
        seconds: wall time.
    """

    kind: str
    layouts: int
    alarms: int
    expected: int
    odd: tuple[str, ...]
    seconds: float


def tables(given: Options) -> list[Table]:
    """Return the table."""
    return [table(list(run(quick=given.quick)))]


def run(*, quick: bool = False) -> Iterator[Proof]:
    """Run each kind; with ``quick``, only a few models, faults and findings."""
    sys.path.insert(0, str(SUPPORT))  # the ranks get this path, too
    proof: Any = importlib.import_module("parity_proof")
    runs: tuple[tuple[Callable[..., Any], Sequence[Any]], ...] = (
        (proof.sound_layouts, [*proof.SOUND]),
        (proof.planted_faults, [*proof.FAULTS]),
        (proof.upstream_findings, [*proof.FINDINGS]),
    )
    with preloaded(*proof.MODULES):
        for kind, (verdicts_of, names) in zip(KINDS, runs, strict=True):
            started = time.monotonic()
            found = [*verdicts_of(names[:_QUICK] if quick else names)]
            odd = tuple(f"{each.name}, {each.layout}" for each in found if not each.expected)
            alarms = sum(each.first is not None for each in found)
            seconds = time.monotonic() - started
            yield Proof(kind, len(found), alarms, len(found) - len(odd), odd, seconds)


def table(proofs: Sequence[Proof]) -> Table:
    """Return the table for RESULTS.md."""
    core = importlib.metadata.version("megatron-core")
    rows = tuple(
        (
            f"{proof.kind}, core {core}",
            str(proof.layouts),
            str(proof.alarms),
            str(proof.expected),
            f"{proof.seconds:.0f} s",
        )
        for proof in proofs
    )
    odd = [f"{proof.kind}: {'; '.join(proof.odd)}" for proof in proofs if proof.odd]
    notes = (
        '"As it should": a sound layout agrees; a planted fault is reported with its parameter and '
        "axis; a known fault is reported if this core has it.",
        *(f"Not so: {each}." for each in odd),
    )
    columns = ("", "layouts", "reported", "as it should", "time")
    return Table("What parity finds", columns, rows, notes)
