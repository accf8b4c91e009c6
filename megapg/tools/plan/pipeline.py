"""The order in which a pipeline stage runs its microbatches, as Megatron-core's schedules do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapg.layout import ParallelLayout


def most_kept(
    layout: ParallelLayout, stage: int, microbatches: int, kept: Sequence[int], peaks: Sequence[int]
) -> int:
    """Return the most bytes of activations that a stage keeps at a time.

    Args:
        layout: the layout.
        stage: the stage's number.
        microbatches: number of microbatches in a step.
        kept: bytes that each chunk of the stage keeps of a microbatch after its forward pass.
        peaks: most bytes of the same during its backward pass.
    """
    held = most = 0
    for chunk, backward in passes(layout, stage, microbatches):
        if backward:
            most = max(most, held - kept[chunk] + peaks[chunk])
            held -= kept[chunk]
        else:
            held += kept[chunk]
            most = max(most, held)
    return most


def passes(layout: ParallelLayout, stage: int, microbatches: int) -> Iterator[tuple[int, bool]]:
    """Yield each pass of a stage in order: the chunk, and True if it is the backward pass."""
    chunks = layout.vpp or 1
    order = [
        chunk
        for first in range(0, microbatches, layout.pp)
        for chunk in range(chunks)
        for _ in range(first, min(first + layout.pp, microbatches))
    ]
    ahead = layout.pp - stage - 1
    if layout.vpp:
        ahead = 2 * ahead + (chunks - 1) * layout.pp
    ahead = min(ahead, len(order))
    for chunk in order[:ahead]:
        yield chunk, False
    for step, chunk in enumerate(order):
        if step + ahead < len(order):
            yield order[step + ahead], False
        yield chunks - 1 - chunk, True
