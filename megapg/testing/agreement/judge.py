"""From what the ranks of a layout hold to the cells of the report."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megapg.testing.agreement.cases import LayoutCase
from megapg.testing.agreement.compare import (
    Compared,
    Reference,
    largest,
    line_up,
    output_differs,
    unlike,
)
from megapg.testing.agreement.diagnose import Cause, explain, explain_number
from megapg.testing.agreement.held import Held, Shard
from megapg.testing.agreement.job import (
    GRADIENTS,
    LOSS,
    NORM,
    REPLICAS,
    SHARDED_WEIGHTS,
    WEIGHTS,
)
from megapg.testing.agreement.report import Cell


@dataclass
class Judge:
    """Compares the ranks of layouts with one rank.

    Attributes:
        reference: what one rank holds.
        tolerance: the largest difference that counts as rounding.
    """

    reference: Held
    tolerance: float

    def __post_init__(self) -> None:
        held = self.reference
        self._start = Reference(held.built)
        self._gradients = Reference(held.gradients)
        self._weights = Reference(held.weights[0])

    def judge(self, case: LayoutCase, ranks: Sequence[Held]) -> tuple[Cell, ...]:
        """One cell per check."""
        return (
            self._loss(case, ranks),
            self._gradient(case, ranks),
            self._norm(case, ranks),
            self._trained(WEIGHTS, case, [held.weights[0] for held in ranks]),
            self._trained(SHARDED_WEIGHTS, case, [held.weights[1] for held in ranks]),
            self._replicas(case, ranks),
        )

    def _loss(self, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        wanted = self.reference.losses
        off, wrong = 0.0, list[tuple[int, int, float]]()
        for rank in range(len(ranks)):
            members = case.layout.members("cp", rank)  # each has a part of the sequence
            for number in ranks[rank].losses:
                value = sum(ranks[each].losses[number] for each in members) / len(members)
                error = abs(value - wanted[number]) / (abs(wanted[number]) or 1.0)
                error = math.inf if math.isnan(error) else error
                off = max(off, error)
                if error > self.tolerance:
                    wrong.append((rank, number, value))
        if not wrong:
            return Cell(LOSS, "agrees", off)
        rank, number, value = wrong[0]
        everywhere = sorted({each for each, *_ in wrong})
        cause = explain_number(value, wanted[number], case)
        parts = [
            f"{value:.6g} on rank {rank} for sample {number}, {wanted[number]:.6g} on one rank"
        ]
        if len(everywhere) > 1:
            parts.append(f"wrong on ranks {_listed(everywhere)}")
        parts += [cause.text] if cause.text else []
        losses = {each: v for each, sample, v in wrong if sample == number}
        unequal = [r for r in losses if abs(losses[r] - value) > self.tolerance * abs(value)]
        if unequal:
            parts.append(f"rank {unequal[0]} has {losses[unequal[0]]:.6g} for the same sample")
        site, differs = self._first_output(ranks)
        if site:
            parts.append(
                f"the first module whose output differs: {site.rpartition('.')[0]}, "
                f"on ranks {_listed(differs)}"
            )
        return Cell(LOSS, "differs", off, site, cause.axis, tuple(everywhere), "; ".join(parts))

    def _first_output(self, ranks: Sequence[Held]) -> tuple[str, list[int]]:
        """The first parameter, in the order of one rank, whose module puts out something else."""
        differs: dict[str, set[int]] = defaultdict(set)
        for rank, held in enumerate(ranks):
            names = {shard.name: self._start.name_of(shard) for shard in held.built}
            for (local, number), output in held.outputs.items():
                name = names.get(local)
                wanted = self.reference.outputs.get((name or "", number))
                if name and wanted is not None:
                    if output_differs(output, wanted, self.tolerance):
                        differs[name].add(rank)
        order = dict.fromkeys(name for name, _ in self.reference.outputs)
        first = next((name for name in order if name in differs), "")
        return first, sorted(differs[first]) if first else []

    def _gradient(self, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        compared = line_up(self._gradients, [held.gradients for held in ranks])
        # Backward passes run from the last parameter to the first, and so do their faults.
        return self._tensors(GRADIENTS, case, compared[::-1])

    def _trained(self, check: str, case: LayoutCase, ranks: Sequence[Sequence[Shard]]) -> Cell:
        return self._tensors(check, case, line_up(self._weights, ranks, self._start))

    def _tensors(self, check: str, case: LayoutCase, compared: Sequence[Compared]) -> Cell:
        off = max((each.off for each in compared), default=0.0)
        wrong = [each for each in compared if each.off > self.tolerance or each.missing]
        if not wrong:
            return Cell(check, "agrees", off)
        first = wrong[0]
        cause = explain(first, case, self.tolerance)
        ranks = first.wrong(self.tolerance)
        parts = [f"{first.name} is off by {first.off:.2g} of its scale on ranks {_listed(ranks)}"]
        parts += [cause.text] if cause.text else []
        if len(wrong) > 1:
            parts.append(f"{len(wrong) - 1} more of {len(compared)} parameters differ")
        return Cell(check, "differs", off, first.name, cause.axis, ranks, "; ".join(parts))

    def _norm(self, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        wanted = self.reference.norms[0]
        off, wrong = 0.0, list[tuple[int, int, int]]()
        for rank, held in enumerate(ranks):
            for kind, norms in enumerate(held.norms):
                for step, value in enumerate(norms):
                    error = abs(value - wanted[step]) / (wanted[step] or 1.0)
                    off = max(off, error)
                    if error > self.tolerance:
                        wrong.append((kind, step, rank))
        if not wrong:
            return Cell(NORM, "agrees", off)
        kind, step, rank = min(wrong)
        value = ranks[rank].norms[kind][step]
        name, cause = self._norm_cause(value, step, case, ranks)
        which = "with" if kind else "without"
        everywhere = sorted({each for *_, each in wrong})
        text = (
            f"{value:.6g} on rank {rank} in step {step + 1} {which} the distributed optimizer, "
            f"{wanted[step]:.6g} on one rank"
        )
        text += f"; {cause.text}" if cause.text else ""
        return Cell(NORM, "differs", off, name, cause.axis, tuple(everywhere), text)

    def _norm_cause(
        self, value: float, step: int, case: LayoutCase, ranks: Sequence[Held]
    ) -> tuple[str, Cause]:
        """Find the parameter whose gradient was counted too often, or not in full."""
        if step:
            return "", Cause("")
        excess = value**2 - self.reference.norms[0][0] ** 2
        for found in line_up(self._gradients, [held.gradients for held in ranks]):
            if found.off > self.tolerance:
                continue
            whole = sum(
                float((shard.data**2).sum())
                for shard in self._gradients.shards
                if shard.name == found.name
            )
            for axis in case.axes(expert=found.expert):
                size = len(case.layout.members(axis, 0))
                if _close(excess, (size - 1) * whole):
                    text = f"as if the gradient of {found.name} counted {size} times, over {axis}"
                    return found.name, Cause(text, axis)
                first = sum(
                    float((piece.value**2).sum())
                    for piece in {piece.box: piece for piece in found.pieces}.values()
                    if case.layout.members(axis, piece.rank)[0] == piece.rank
                )
                if first < whole and _close(excess, first - whole):
                    text = f"as if only the first rank of {axis} counted {found.name}"
                    return found.name, Cause(text, axis)
            if _close(excess, -whole):
                return found.name, Cause(f"as if the gradient of {found.name} did not count")
        return "", explain_number(value, self.reference.norms[0][0], case)

    def _replicas(self, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        kinds: tuple[tuple[str, Callable[[Held], Sequence[Shard]]], ...] = (
            ("as built", lambda held: held.built),
            ("in the gradients", lambda held: held.gradients),
            ("after training", lambda held: held.weights[0]),
            ("after training with the distributed optimizer", lambda held: held.weights[1]),
        )
        for when, of in kinds:
            for holders in unlike([of(held) for held in ranks], self.tolerance):
                return self._replica(when, holders, case)
        return Cell(REPLICAS, "agrees")

    def _replica(self, when: str, holders: Sequence[tuple[int, Shard]], case: LayoutCase) -> Cell:
        (rank, shard), *others = holders
        scale = largest(shard.data) or 1.0
        other, off = next(
            (other, each)
            for other, theirs in others
            if (each := largest(theirs.data - shard.data) / scale) > self.tolerance
        )
        axis = next(
            (
                axis
                for axis in case.axes(expert=shard.expert)
                if other in case.layout.members(axis, rank)
            ),
            "",
        )
        name = self._start.name_of(shard) or shard.name
        text = (
            f"{name} {when}: ranks {rank} and {other}"
            f"{f' of a {axis} group' if axis else ''} hold different values of what they share, "
            f"by {off:.2g} of the largest"
        )
        return Cell(REPLICAS, "differs", off, name, axis, (rank, other), text)


def disagreement(held: Held, tolerance: float) -> Iterator[str]:
    """What differs between the two runs of one rank, from equal weights on equal data."""
    for number, value in held.losses.items():
        again = held.again[number]
        if not abs(again - value) <= tolerance * abs(value):
            yield f"the loss of sample {number} is {value:.6g} and then {again:.6g}"
    for first, second in zip(held.weights[0], held.weights[1], strict=True):
        if largest(first.data - second.data) > tolerance * (largest(first.data) or 1.0):
            yield f"{first.name} differs after two steps"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4) and other != 0


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
