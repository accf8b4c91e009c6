"""Checks whether an optimizer's state can be cut for another layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from megapg.errors import CheckpointMismatchError
from megapg.layout import ParallelLayout

OptimizerSharding: TypeAlias = Literal["fully_reshardable", "dp_reshardable"]
"""``fully_reshardable`` loads under any layout. ``dp_reshardable`` is cheaper to save, and loads
only if nothing but the data-parallel size has changed.
"""

FORM = "distrib_optim_sharding_type"
"""The key of the sharding in a checkpoint's metadata."""

WITHOUT = "Load the model without the optimizer (optimizer=None), or save it again from there."


def check_reshard(
    metadata: Mapping[str, object] | None,
    saved: ParallelLayout | None,
    current: ParallelLayout | None,
    has_experts: bool,
) -> None:
    """Refuse, from the metadata alone, optimizer state that can't be cut for this layout.

    Nothing is read or communicated, so every rank comes to the same answer. The model without the
    optimizer loads under any layout.

    Args:
        metadata: ``content_metadata`` of the checkpoint; None if it has none.
        saved: the layout that wrote it; None if unknown.
        current: the layout that is going to load it; None if unknown.
        has_experts: whether the model has experts.

    Raises:
        CheckpointMismatchError: the obstacle, and what to do.
    """
    if why := _obstacle(metadata, saved, current, has_experts):
        raise CheckpointMismatchError(f"{why}. {WITHOUT}")


def _obstacle(
    metadata: Mapping[str, object] | None,
    saved: ParallelLayout | None,
    current: ParallelLayout | None,
    has_experts: bool,
) -> str:
    if metadata is None:
        return (
            "the checkpoint has no content metadata, as before Megatron-core 0.13, so how its "
            "optimizer state is sharded isn't known"
        )
    sharding = metadata.get(FORM, "fully_reshardable")  # absent: not a distributed optimizer
    if sharding not in get_args(OptimizerSharding):
        why = _UNREADABLE.get(str(sharding), "is not known")
        return f"the optimizer state of the checkpoint is sharded as {sharding!r}, which {why}"
    bound = sharding == "dp_reshardable"
    if not bound and (not has_experts or metadata.get("chained_optim_avoid_prefix")):
        return ""
    if current is None:
        return (
            "the optimizer state of the checkpoint is bound to the layout that saved it, and the "
            "groups passed here form no layout that is known"
        )
    if not bound:
        # If ep > 1, experts have a separate optimizer, and here tensors are named after it.
        if saved is not None and (saved.ep > 1) == (current.ep > 1):
            return ""
        before = "unknown" if saved is None else str(saved.ep)
        return (
            "the checkpoint was saved without chained_optim_avoid_prefix, so the names in its "
            "optimizer state tell whether experts were spread over ranks, and that may not change: "
            f"ep was {before} and is {current.ep}"
        )
    # A piece of a bucket is identified by its model-parallel rank and its place in the bucket.
    if saved is None:
        return (
            "the optimizer state is sharded as 'dp_reshardable', which only the layout that saved "
            "it can read (apart from data parallelism), and that layout is not known"
        )
    then, now = _grid(saved, has_experts), _grid(current, has_experts)
    changed = [f"{name} {then[name]} -> {now[name]}" for name in then if then[name] != now[name]]
    if not changed:
        return ""
    return (
        "the optimizer state is sharded as 'dp_reshardable': only data parallelism may change, "
        f"and here it is {', '.join(changed)}. Load it in the layout that saved it and save it "
        "with optimizer_sharding='fully_reshardable', which every layout can read"
    )


_UNREADABLE = {
    "fully_sharded_model_space": "Megatron-core from 0.16 on refuses (flattened tensors)",
    "dp_zero_gather_scatter": "needs gloo groups that an optimizer on explicit groups doesn't have",
    "fully_sharded_bucket_space": "Megatron-core can no longer read",
    "fsdp_dtensor": "is Megatron-FSDP's, in another format",
}


def _grid(layout: ParallelLayout, has_experts: bool) -> dict[str, object]:
    """Return what numbers the model-parallel ranks and cuts their parameters into buckets."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp or 1}
    split = {"tp": layout.tp, "pp": layout.pp}
    if has_experts:
        sizes |= {"ep": layout.ep, "expt_tp": layout.expt_tp}
        split |= {"ep": layout.ep, "tp": max(layout.tp, layout.expt_tp)}
    order = "-".join(axis for axis in layout.order.split("-") if split.get(axis, 1) > 1)
    return {**sizes, "order": order}
