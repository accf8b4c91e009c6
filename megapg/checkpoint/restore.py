"""Giving an optimizer the state that was read from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megapg.checkpoint import optimizer_pieces as pieces
from megapg.checkpoint.optimizer import TORCHS_ADAM
from megapg.checkpoint.param_groups import (
    COMMON_STEP,
    MASTERS,
    PART_FORM,
    OptimizerState,
    groups_of,
    inner_of,
    leaves_of,
    matched_groups,
    parts_of,
    with_param_groups,
)
from megapg.checkpoint.step_count import STEP, counts_by_parameter, inners_of, set_step
from megapg.errors import CheckpointMismatchError


@torch.no_grad()
def restore(optimizer: MegatronOptimizer | None, state: OptimizerState) -> None:
    """Call ``load_state_dict(state)`` of each optimizer and correct the result.

    ``state`` comes from :func:`~megapg.checkpoint.param_groups.fit`, with its tensors read and
    merged in.

    Raises:
        CheckpointMismatchError: a parameter group of this optimizer has no counterpart.
    """
    for leaf, part in zip(leaves_of(optimizer), parts_of(state), strict=True):
        by_parameter = [counts_by_parameter(inner) for inner in inners_of(leaf)]
        with matched_groups(leaf, groups_of(part)) as groups:
            step = max((float(group[STEP]) for group in groups if STEP in group), default=None)
            _load(leaf, with_param_groups(part, groups), step)
        set_step(leaf, step, by_parameter)


@torch.no_grad()
def reload_weights(optimizer: MegatronOptimizer | None) -> None:
    """Take over new weights of the model, as ``reload_model_params()`` of each optimizer does."""
    for leaf in leaves_of(optimizer):
        leaf.reload_model_params()
        inner = leaf.optimizer
        for group in inner.param_groups if hasattr(inner, "set_scaled_state") else ():
            for parameter in group["params"]:  # Megatron-core leaves these to the first step
                if "master_param" in inner.state.get(parameter, ()):
                    pieces.put_master(inner, parameter, parameter.detach().float())


def _load(leaf: Any, part: dict[str, Any], step: float | None) -> None:
    by_parameter = counts_by_parameter(leaf.optimizer)
    if isinstance(leaf, DistributedOptimizer):
        for group in groups_of(part):
            group.pop(STEP, None)
            if by_parameter or step is not None or isinstance(leaf.optimizer, TORCHS_ADAM):
                group[STEP] = step or 0.0
        _load_distributed(leaf, part)
        return
    state = inner_of(part).setdefault("state", {})
    if by_parameter:
        state[COMMON_STEP] = torch.tensor(step or 0.0)  # a step of zero is not saved
    if hasattr(leaf, "fp32_from_float16_groups"):
        read: dict[int, dict[int, torch.Tensor]] = part.pop(MASTERS, {})
        part[MASTERS] = [
            [read[number][place] for place in range(len(group))]
            for number, group in enumerate(leaf.fp32_from_float16_groups)
        ]
    leaf.load_state_dict(part)


def _load_distributed(leaf: Any, part: dict[str, Any]) -> None:
    """Load in two calls, because the call that takes the tensors fails on a step among them."""
    leaf.load_state_dict({key: v for key, v in part.items() if not key.startswith("param_state")})
    state = part["param_state"]
    counting = [each for each in leaf.optimizer.state.values() if STEP in each]
    steps = [each.pop(STEP) for each in counting]
    try:
        if part[PART_FORM] == "dp_reshardable":
            _load_buckets(leaf, state)
        elif "held" in state:
            state["held"].put(leaf)
        else:
            leaf.load_parameter_state_from_fully_reshardable(state)
        if hasattr(leaf.optimizer, "sub_optimizers"):
            leaf.optimizer._sync_hdo_state_to_sub_optimizers()
    finally:
        for each, step in zip(counting, steps, strict=True):
            each[STEP] = step


def _load_buckets(leaf: Any, state: Mapping[Any, Any]) -> None:
    """Load the form ``dp_reshardable``. Megatron-core 0.16 takes its mark of padding for state."""
    saved, ours = state["per_bucket_numel_unpadded"], leaf.per_bucket_numel_unpadded
    if saved != ours:
        raise CheckpointMismatchError(
            f"the buckets of the distributed optimizer have {ours} elements, and had {saved}. Set "
            "bucket_size, and what else cuts buckets, as it was."
        )
    for number, ranges_of_buffer in enumerate(leaf.gbuf_ranges):
        for dtype, buckets in ranges_of_buffer.items():
            for bucket, read in zip(buckets, state[number][dtype], strict=True):
                parts = [each for each in read if not each["padding"]]
                for parameter, part in zip(bucket["param_map"], parts, strict=True):
                    tensors = {k: v for k, v in part.items() if k not in ("padding", STEP)}
                    leaf._set_main_param_and_optimizer_states(parameter, tensors)
