"""The verdict of the demo. Every row is computed from the reports of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapg.demo.job import TrainingResult
from megapg.demo.ranks import RankReport, Usage
from megapg.megatron import GlobalRead
from megapg.megatron.watching.forbid import is_below
from megapg.megatron.watching.trace import summed
from megapg.testing import ParityReport

CORE = "megatron.core"  # no argument can prevent its own reads

# Tolerance of the loss after a checkpoint was cut otherwise: sums are taken in another order.
RECUT_TOLERANCE = 1e-5
# Tolerance of the last loss, as a share of it: dropout draws other numbers after the checkpoint.
LEARNING = 0.05


@dataclass(frozen=True)
class Row:
    """One claim, whether it held, and its figures."""

    claim: str
    held: bool
    figures: str


def judge(
    session: Sequence[RankReport], globals_: Sequence[RankReport], left_over: int
) -> tuple[Row, ...]:
    """Return the verdict on a run on a session and the same on Megatron's globals, rank by rank.

    ``left_over`` is the number of live processes that the demo started.
    """
    return (
        _losses(session, globals_),
        _weights(session, globals_),
        _communicators(session, globals_),
        _answers(session),
        _readers(session),
        _leaks(session, globals_),
        Row("no process left behind", left_over == 0, f"{left_over} left"),
    )


def judge_resumed(
    whole: Sequence[RankReport],
    resumed: Sequence[RankReport],
    recut: Sequence[RankReport],
    how: str,
) -> tuple[Row, ...]:
    """Return the verdict on the runs that resumed from a checkpoint of the first one, rank by rank.

    ``whole`` was not interrupted, and ``resumed`` continued in its layout. ``recut``, which may be
    empty, continued in the layout that ``how`` names.
    """
    same = _resumed(whole, resumed)
    return (same, _recut(whole, recut, how)) if recut else (same,)


def _resumed(whole: Sequence[RankReport], resumed: Sequence[RankReport]) -> Row:
    ranks = _side_by_side(whole, resumed)
    pairs = [
        (ours, theirs)
        for before, after in ranks
        for ours, theirs in zip(
            (before.at_checkpoint, *before.losses[len(before.losses) - len(after.losses) :]),
            (after.at_checkpoint, *after.losses),
            strict=True,
        )
    ]
    equal, weights = sum(ours == theirs for ours, theirs in pairs), _equal_weights(ranks)
    return Row(
        "resumed in the same layout: as if never stopped, bit for bit",
        equal == len(pairs) and weights == len(whole) and all(after.losses for _, after in ranks),
        f"{equal} of {len(pairs)} losses, final weights on {weights} of {len(whole)} ranks",
    )


def _side_by_side(
    some: Sequence[RankReport], others: Sequence[RankReport]
) -> list[tuple[TrainingResult, TrainingResult]]:
    return [(one.result, other.result) for one, other in zip(some, others, strict=True)]


def _equal_weights(ranks: Sequence[tuple[TrainingResult, TrainingResult]]) -> int:
    return sum(one.weights_sha256 == other.weights_sha256 for one, other in ranks)


def _recut(whole: Sequence[RankReport], recut: Sequence[RankReport], how: str) -> Row:
    """Compare the loss without dropout, which draws other numbers in another layout."""
    before, after = whole[0].result.at_checkpoint, recut[0].result.at_checkpoint
    if before is None or after is None:
        return Row(f"resumed {how}: the same model", False, "no loss to compare")
    off = abs(before - after) / before
    first, last = recut[0].result.losses[0], recut[0].result.losses[-1]
    return Row(
        f"resumed {how}: the same loss within {RECUT_TOLERANCE:.0e}, and goes on learning",
        off <= RECUT_TOLERANCE and abs(last - whole[0].result.losses[-1]) <= LEARNING * last,
        f"{before:.6f} and {after:.6f} without dropout; then {first:.4f} to {last:.4f}, "
        f"uninterrupted {whole[0].result.losses[-1]:.4f}",
    )


def judge_parity(report: ParityReport) -> Row:
    """Return the verdict on the layouts of the demo, each compared with one rank."""
    off = max(cell.off for layout in report.layouts for cell in layout.cells)
    agree = sum(layout.agrees for layout in report.layouts)
    return Row(
        "each layout computes what one rank computes, weights and gradients",
        report.agrees,
        f"{agree} of {len(report.layouts)} layouts; differences up to {off:.0e} in "
        f"{report.precision}" + "".join(f"; {line}" for line in report.findings()[:1]),
    )


def reads_of(session: Sequence[RankReport]) -> tuple[GlobalRead, ...]:
    """Return the reads of globals of all ranks, one entry per place, by file and line."""
    return summed(read for report in session for read in report.reads)


def _losses(session: Sequence[RankReport], globals_: Sequence[RankReport]) -> Row:
    pairs = [
        (ours, theirs)
        for mine, other in _side_by_side(session, globals_)
        for ours, theirs in zip(mine.losses, other.losses, strict=True)
    ]
    equal = sum(ours.hex() == theirs.hex() for ours, theirs in pairs)
    losses = session[0].result.losses
    return Row(
        "losses equal the run on globals, bit for bit",
        equal == len(pairs) > 0,
        f"{equal} of {len(pairs)} equal; {losses[0]:.4f} at first, {losses[-1]:.4f} at last",
    )


def _weights(session: Sequence[RankReport], globals_: Sequence[RankReport]) -> Row:
    equal = _equal_weights(_side_by_side(session, globals_))
    return Row(
        "final weights equal the run on globals, bit for bit",
        equal == len(session) > 0,
        f"{equal} of {len(session)} ranks; {session[0].result.parameters:,} parameters on rank 0",
    )


def _communicators(session: Sequence[RankReport], globals_: Sequence[RankReport]) -> Row:
    ours = [report.communicators for report in session]
    theirs = [report.communicators for report in globals_]
    return Row(
        "no more communicators per rank than Megatron makes",
        all(mine <= other for mine, other in zip(ours, theirs, strict=True)),
        f"{_span(ours)} against {_span(theirs)} (without Megatron's gloo twins)",
    )


def _answers(session: Sequence[RankReport]) -> Row:
    reads = reads_of(session)
    other = {read.answered_by for read in reads} - {"session"}
    total = sum(read.count for read in reads)
    return Row(
        "what Megatron still read from globals came from this session",
        not other and total > 0,  # Megatron does read some, so no reads mean a failed trace
        f"{total:,} reads from {len(reads)} places, listed above"
        + (f"; answered by {', '.join(sorted(other))}" if other else ""),
    )


def _readers(session: Sequence[RankReport]) -> Row:
    readers = {read.module for read in reads_of(session)}
    others = {module for module in readers if not is_below(module, [CORE])}
    return Row(
        "nobody but Megatron-core itself read a global",
        bool(readers) and not others,
        f"read by {', '.join(sorted(others))}"
        if others
        else f"{len(readers)} modules of {CORE}; forbid_global_reads() would let them pass",
    )


def _leaks(session: Sequence[RankReport], globals_: Sequence[RankReport]) -> Row:
    held = all(
        report.after.groups <= report.before.groups
        and report.after.threads <= report.before.threads
        and report.after.descriptors <= report.before.descriptors
        for report in session
    )
    first, other = session[0], globals_[0]
    return Row(
        "groups, threads and descriptors as before the session",
        held,
        f"rank 0: {_usage(first.before)} before, {_usage(first.after)} after "
        f"(destroy_model_parallel leaves {other.after.groups - 1} groups)",
    )


def _usage(usage: Usage) -> str:
    return f"{usage.groups}/{usage.threads}/{usage.descriptors}"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
