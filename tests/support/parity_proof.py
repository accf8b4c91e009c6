"""Run parity on sound layouts, on planted faults and on faults of Megatron-core."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from parity_faults import FAULTS, STEPS, Fault, build
from parity_layouts import SOUND
from parity_upstream import FINDINGS

from megapg.errors import ParityInputError
from megapg.testing import parity
from megapg.tools.parity.parity_report import Cell, LayoutReport

MODULES = ("parity_faults", "parity_upstream")


@dataclass(frozen=True)
class Verdict:
    """The report of parity on one layout.

    Attributes:
        name: of the model, of the fault or of the finding.
        layout: the layout.
        first: the first cell that does not agree; None: all agree.
        expected: True if a sound layout agrees, or if the report of a fault names the fault.
        text: of the report.
    """

    name: str
    layout: str
    first: Cell | None
    expected: bool
    text: str


def sound_layouts(names: Iterable[str] = SOUND) -> Iterator[Verdict]:
    """Yield every sound layout; ``expected`` is False for a false alarm."""
    for name in names:
        sound = SOUND[name]
        report = parity(sound.model, sound.layouts.split(";"), options=sound.options)
        for layout in report.layouts:
            yield _verdict(name, layout, layout.agrees)


def planted_faults(names: Iterable[str] = tuple(FAULTS)) -> Iterator[Verdict]:
    """Yield every planted fault; ``expected`` is True for the fault's parameter and axis."""
    ordered = sorted(names, key=lambda name: _model(FAULTS[name]))
    for _, group in groupby(ordered, lambda name: _model(FAULTS[name])):
        same = [*group]
        fault = FAULTS[same[0]]
        report = parity(
            build,
            [f"{FAULTS[name].layout} fault={name}" for name in same],
            options={"model": fault.model, **fault.options},
            step=STEPS[fault.step],
        )
        for name, layout in zip(same, report.layouts, strict=True):
            first = next(iter(layout.wrong), None)
            yield _verdict(name, layout, first is not None and _names(FAULTS[name], first))


def upstream_findings(names: Iterable[str] = tuple(FINDINGS)) -> Iterator[Verdict]:
    """Yield faults of Megatron-core; ``expected`` is True if parity reports the core's faults."""
    core = importlib.metadata.version("megatron-core")
    for name in names:
        finding = FINDINGS[name]
        has = not finding.before or core < finding.before
        try:
            report = parity(
                finding.model,
                [finding.layout],
                options=finding.options,
                step=finding.step,
                global_sizes=finding.global_sizes,
            )
        except ParityInputError as error:  # Megatron-core cannot describe this model
            refused = Cell("loss", "failed", text=str(error))
            yield Verdict(name, finding.layout, refused, has, str(error))
        else:
            yield _verdict(name, report.layouts[0], report.agrees != has)


def _model(fault: Fault) -> str:
    return f"{fault.model} {sorted(fault.options.items())} {fault.step}"


def _names(fault: Fault, cell: Cell) -> bool:
    named = fault.parameter in cell.parameter and bool(fault.parameter) == bool(cell.parameter)
    return cell.state == "differs" and named and cell.axis in fault.axes


def _verdict(name: str, layout: LayoutReport, expected: bool) -> Verdict:
    first = next(iter(layout.wrong), None)
    return Verdict(name, layout.layout, first, expected, first.text if first else "")
