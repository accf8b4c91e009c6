"""Judge the results of a layout: one cell of the report per check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from megapg.launch.process import ranks_said
from megapg.tools.parity.cases import LayoutCase
from megapg.tools.parity.comparison import (
    GRADIENTS,
    LOSS,
    NORM,
    REPLICAS,
    SHARDED_WEIGHTS,
    WEIGHTS,
    Held,
    Shard,
)
from megapg.tools.parity.diagnose import Cause, explain, explain_number, only_axis
from megapg.tools.parity.differences import (
    Compared,
    Piece,
    Reference,
    closest_part,
    largest,
    line_up,
    unlike,
)
from megapg.tools.parity.parity_report import Cell


@dataclass
class Judge:
    """Compares the ranks of layouts with one rank.

    Attributes:
        reference: the results of one rank.
        tolerance: the largest difference that counts as rounding.
    """

    reference: Held
    tolerance: float

    def __post_init__(self) -> None:
        held = self.reference
        self._start = Reference(held.built)
        self._gradients = Reference(held.gradients)
        self._weights = [Reference(shards) for shards in held.weights[0]]

    def judge(self, case: LayoutCase, ranks: Sequence[Held]) -> tuple[Cell, ...]:
        """One cell per check."""
        return (
            self._loss(case, ranks),
            self._gradient(case, ranks),
            self._norm(case, ranks),
            self._trained(WEIGHTS, 0, case, ranks),
            self._trained(SHARDED_WEIGHTS, 1, case, ranks),
            self._replicas(case, ranks),
        )

    def _loss(self, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        wanted = self.reference.losses
        off, wrong = 0.0, list[tuple[int, int, float]]()
        for rank in range(len(ranks)):
            members = case.layout.members("cp", rank)  # each rank has a part of the sequence
            for number in ranks[rank].losses:
                value = sum(ranks[each].losses[number] for each in members) / len(members)
                error = _error(value, wanted[number])
                off = max(off, error)
                if error > self.tolerance:
                    wrong.append((rank, number, value))
        if not wrong:
            return Cell(LOSS, "agrees", off)
        rank, number, value = wrong[0]
        everywhere = tuple(sorted({each for each, *_ in wrong}))
        cause = explain_number(value, wanted[number], case)
        parts = [
            f"{value:.10g} on rank {rank} for sample {number}, {wanted[number]:.10g} on one rank; "
            f"wrong on {ranks_said(everywhere)}"
        ]
        parts += [cause.text] if cause.text else []
        losses = {each: v for each, sample, v in wrong if sample == number}
        unequal = [r for r in losses if _error(losses[r], value) > self.tolerance]
        if unequal:
            parts.append(f"rank {unequal[0]} has {losses[unequal[0]]:.10g} for the same sample")
        first = self._first_output(ranks)
        if first is not None:
            cause = explain(first, case, self.tolerance)
            module = first.name.rpartition(".")[0]
            where = ranks_said(first.wrong(self.tolerance))
            parts.append(f"the first module whose output differs is {module}, on {where}")
            parts += [cause.text] if cause.text else []
        name = first.name if first else ""
        return Cell(LOSS, "differs", off, name, cause.axis, everywhere, "; ".join(parts))

    def _first_output(self, ranks: Sequence[Held]) -> Compared | None:
        """Return the outputs of the first module that puts out something else."""
        pieces: dict[str, list[Piece]] = {name: [] for name, _ in self.reference.outputs}
        for rank, held in enumerate(ranks):
            names = {shard.name: self._start.name_of(shard) for shard in held.built}
            for (local, number), output in held.outputs.items():
                name = names.get(local) or ""
                whole = self.reference.outputs.get((name, number))
                part = None if whole is None else closest_part(output, whole)
                if part is not None and whole is not None:
                    # Ranks that hold a whole output share it; a part is held by one rank.
                    place = (number,) if part.shape == whole.shape else (number, rank)
                    box = (name, place, tuple(part.shape))
                    pieces[name].append(Piece(rank, box, output, part))
        for name, found in pieces.items():
            scale = max((largest(piece.wanted) for piece in found), default=0.0) or 1.0
            off = max((largest(p.value - p.wanted) for p in found), default=0.0) / scale
            if off > self.tolerance:
                return Compared(name, False, found, 0, off, scale)
        return None

    def _gradient(self, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        compared = line_up(self._gradients, [held.gradients for held in ranks])
        # Backward passes run from the last parameter to the first, and so do their faults.
        return self._tensors(GRADIENTS, case, compared[::-1])

    def _trained(self, check: str, kind: int, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        """A fault shows in few weights after the first step, and in all of them after the next."""
        cells = []
        for step, wanted in enumerate(self._weights):
            shards = [held.weights[kind][step] for held in ranks]
            cells.append(self._tensors(check, case, line_up(wanted, shards, self._start)))
        off = max(cell.off for cell in cells)
        return replace(next((each for each in cells if each.state == "differs"), cells[0]), off=off)

    def _tensors(self, check: str, case: LayoutCase, compared: Sequence[Compared]) -> Cell:
        off = max((each.off for each in compared), default=0.0)
        wrong = [each for each in compared if each.off > self.tolerance or each.missing]
        if not wrong:
            return Cell(check, "agrees", off)
        first = wrong[0]
        cause = explain(first, case, self.tolerance)
        ranks = first.wrong(self.tolerance)
        parts = [f"{first.name} is off by {first.off:.2g} of its scale on {ranks_said(ranks)}"]
        parts += [cause.text] if cause.text else []
        if len(wrong) > 1:
            parts.append(f"{len(wrong) - 1} more of {len(compared)} parameters differ")
        return Cell(check, "differs", off, first.name, cause.axis, ranks, "; ".join(parts))

    def _norm(self, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        wanted = self.reference.norms[0]
        norms = {
            (kind, r): norm for r, held in enumerate(ranks) for kind, norm in enumerate(held.norms)
        }
        errors = {place: _error(norm, wanted) for place, norm in norms.items()}
        off = max(errors.values())
        wrong = sorted(place for place, error in errors.items() if error > self.tolerance)
        if not wrong:
            return Cell(NORM, "agrees", off)
        kind, rank = wrong[0]
        value = norms[kind, rank]
        name, cause = self._norm_cause(value, rank, case, ranks)
        text = (
            f"{value:.10g} on rank {rank} {'with' if kind else 'without'} the distributed "
            f"optimizer, {wanted:.10g} on one rank"
        )
        text += f"; {cause.text}" if cause.text else ""
        everywhere = tuple(sorted({rank for _, rank in wrong}))
        return Cell(NORM, "differs", off, name, cause.axis, everywhere, text)

    def _norm_cause(
        self, value: float, rank: int, case: LayoutCase, ranks: Sequence[Held]
    ) -> tuple[str, Cause]:
        """Find the right gradients that a rank's norm counts too often, or not in full."""
        gradients = line_up(self._gradients, [held.gradients for held in ranks])
        counted = line_up(self._gradients, [held.counted for held in ranks])
        wrong = []
        for each, those in zip(gradients, counted, strict=True):
            members = case.layout.members("tp_ep_pp" if each.expert else "mp", rank)
            pieces = [piece for piece in those.pieces if piece.rank in members]
            whole = sum(map(_square, {piece.box: piece for piece in each.pieces}.values()))
            times = sum(map(_square, pieces)) / (whole or 1.0)
            if each.off <= self.tolerance and whole and not _close(times, 1.0):
                wrong.append((each, pieces, times))
        if not wrong:
            return "", explain_number(value, self.reference.norms[0], case)
        first, pieces, times = wrong[0]
        more = f", and {len(wrong) - 1} more gradients are miscounted" if len(wrong) > 1 else ""
        for axis in case.axes(expert=first.expert):
            places, held = (
                {case.layout.members(axis, p.rank).index(p.rank) for p in those}
                for those in (pieces, first.pieces)
            )
            if _close(times, len(case.layout.members(axis, 0))):
                text = f"the gradient of {first.name} is counted {times:.0f} times, over {axis}"
                return first.name, Cause(text + more, axis)
            if times < 1 and places == {0} != held:
                text = f"only the first rank of {axis} counts the gradient of {first.name}"
                return first.name, Cause(text + more, axis)
        text = f"the gradient of {first.name} is counted {times:.3g} times"
        return first.name, Cause(text + more, only_axis(case))

    def _replicas(self, case: LayoutCase, ranks: Sequence[Held]) -> Cell:
        kinds: tuple[tuple[str, Callable[[Held], Sequence[Shard]]], ...] = (
            ("as built", lambda held: held.built),
            ("in the gradients", lambda held: held.gradients),
            ("after training", lambda held: held.weights[0][-1]),
            ("after training with the distributed optimizer", lambda held: held.weights[1][-1]),
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
    """Yield the differences between the two runs of one rank on equal weights and data."""
    for number, value in held.losses.items():
        again = held.again[number]
        if not abs(again - value) <= tolerance * abs(value):
            yield f"the loss of sample {number} is {value:.6g} and then {again:.6g}"
    for first, second in zip(held.weights[0][-1], held.weights[1][-1], strict=True):
        if largest(first.data - second.data) > tolerance * (largest(first.data) or 1.0):
            yield f"{first.name} differs after two steps"


def _error(value: float, wanted: float) -> float:
    error = abs(value - wanted) / (abs(wanted) or 1.0)
    return math.inf if math.isnan(error) else error


def _square(piece: Piece) -> float:
    return float((piece.value**2).sum())


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-4)
