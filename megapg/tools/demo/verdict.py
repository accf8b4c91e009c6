"""The verdict of the demo. Every row is computed from the reports of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from megapg.megatron.watching.forbid import is_below
from megapg.megatron.watching.trace import GlobalRead, summed
from megapg.tools.demo.job import TrainingResult
from megapg.tools.demo.ranks import RankReport, Usage
from megapg.tools.parity.parity_report import ParityReport

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
    ranks = _side_by_side(session, globals_)
    pairs = [pair for one, other in ranks for pair in zip(one.losses, other.losses, strict=True)]
    equal, weights = _equal(pairs), _equal_weights(ranks)
    first = session[0].result
    ours = [report.communicators for report in session]
    theirs = [report.communicators for report in globals_]
    before, after = session[0].before, session[0].after
    return (
        Row(
            "losses equal the run on globals, bit for bit",
            equal == len(pairs) > 0,
            f"{equal} of {len(pairs)} equal; {first.losses[0]:.4f} at first, "
            f"{first.losses[-1]:.4f} at last",
        ),
        Row(
            "final weights equal the run on globals, bit for bit",
            weights == len(session) > 0,
            f"{weights} of {len(session)} ranks; {first.parameters:,} parameters on rank 0",
        ),
        Row(
            "no more communicators per rank than Megatron makes",
            all(mine <= other for mine, other in zip(ours, theirs, strict=True)),
            f"{_span(ours)} against {_span(theirs)} (without Megatron's gloo twins)",
        ),
        *_judge_reads(reads_of(session)),
        Row(
            "groups, threads and descriptors as before the session",
            not any(_leaks(report) for report in session),
            f"rank 0: {_usage(before)} before, {_usage(after)} after "
            f"(destroy_model_parallel leaves {globals_[0].after.groups - 1} groups)",
        ),
        Row("no process left behind", left_over == 0, f"{left_over} left"),
    )


def _judge_reads(reads: Sequence[GlobalRead]) -> Iterator[Row]:
    """Judge the reads of globals. Megatron does read some, so no reads mean a failed trace."""
    other = {read.answered_by for read in reads} - {"session"}
    total = sum(read.count for read in reads)
    yield Row(
        "what Megatron still read from globals came from this session",
        not other and total > 0,
        f"{total:,} reads from {len(reads)} places, listed above"
        + (f"; answered by {', '.join(sorted(other))}" if other else ""),
    )
    readers = {read.module for read in reads}
    others = {module for module in readers if not is_below(module, [CORE])}
    yield Row(
        "nobody but Megatron-core itself read a global",
        bool(readers) and not others,
        f"read by {', '.join(sorted(others))}"
        if others
        else f"{len(readers)} modules of {CORE}; forbid_global_reads() would let them pass",
    )


def judge_resumed(
    whole: Sequence[RankReport],
    resumed: Sequence[RankReport],
    recut: Sequence[RankReport],
    how: str,
) -> Iterator[Row]:
    """Yield the verdict on the runs that resumed from a checkpoint of the first one, rank by rank.

    ``whole`` was not interrupted, and ``resumed`` continued in its layout. ``recut``, which may be
    empty, continued in the layout that ``how`` names.
    """
    ranks = _side_by_side(whole, resumed)
    pairs = [
        pair
        for before, after in ranks
        for pair in zip(
            (before.at_checkpoint, *before.losses[len(before.losses) - len(after.losses) :]),
            (after.at_checkpoint, *after.losses),
            strict=True,
        )
    ]
    equal, weights = _equal(pairs), _equal_weights(ranks)
    yield Row(
        "resumed in the same layout: as if never stopped, bit for bit",
        equal == len(pairs) and weights == len(whole) and all(after.losses for _, after in ranks),
        f"{equal} of {len(pairs)} losses, final weights on {weights} of {len(whole)} ranks",
    )
    if not recut:
        return
    # Compare the loss without dropout, which draws other numbers in another layout.
    before, after = whole[0].result, recut[0].result
    if before.at_checkpoint is None or after.at_checkpoint is None:
        yield Row(f"resumed {how}: the same model", False, "no loss to compare")
        return
    off = abs(before.at_checkpoint - after.at_checkpoint) / before.at_checkpoint
    first, last, uninterrupted = after.losses[0], after.losses[-1], before.losses[-1]
    yield Row(
        f"resumed {how}: the same loss within {RECUT_TOLERANCE:.0e}, and goes on learning",
        off <= RECUT_TOLERANCE and abs(last - uninterrupted) <= LEARNING * last,
        f"{before.at_checkpoint:.6f} and {after.at_checkpoint:.6f} without dropout; then "
        f"{first:.4f} to {last:.4f}, uninterrupted {uninterrupted:.4f}",
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


def _side_by_side(
    some: Sequence[RankReport], others: Sequence[RankReport]
) -> list[tuple[TrainingResult, TrainingResult]]:
    return [(one.result, other.result) for one, other in zip(some, others, strict=True)]


def _equal(pairs: Sequence[tuple[float | None, float | None]]) -> int:
    return sum(one == other for one, other in pairs)


def _equal_weights(ranks: Sequence[tuple[TrainingResult, TrainingResult]]) -> int:
    return sum(one.weights_sha256 == other.weights_sha256 for one, other in ranks)


def _leaks(report: RankReport) -> bool:
    before, after = astuple(report.before), astuple(report.after)
    return any(now > then for then, now in zip(before, after, strict=True))


def _usage(usage: Usage) -> str:
    return "/".join(map(str, astuple(usage)))


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
