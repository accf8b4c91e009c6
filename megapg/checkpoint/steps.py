"""The number of steps that an optimizer has taken, wherever the optimizer keeps it.

Torch's optimizers have a step for each parameter. The fused ones of Transformer Engine and Apex
have one in each parameter group. Others, such as SGD, have none. Megatron-core's checkpoints have
one step for all parameters of an optimizer.
"""

from __future__ import annotations

from typing import Any

import torch

from megapg.errors import CheckpointError

STEP = "step"


def counts_by_parameter(leaf: Any) -> bool:
    """True if the optimizer, which has its state, has a step for each parameter."""
    return any(STEP in state for state in leaf.optimizer.state.values())


def step_of(leaf: Any) -> float | None:
    """Return the number of steps; None if this rank has no parameter, or nothing counts them.

    Raises:
        CheckpointError: parameters have taken different numbers of steps.
    """
    holders = [state for state in leaf.optimizer.state.values() if STEP in state]
    if not holders:  # a group without parameters may be behind
        holders = [g for g in leaf.optimizer.param_groups if STEP in g and g["params"]]
    steps = {float(holder[STEP]) for holder in holders}
    if len(steps) > 1:
        raise CheckpointError(
            f"the parameters of one optimizer have taken different numbers of steps, "
            f"{sorted(steps)}, and Megatron-core's checkpoints have one for all of them."
        )
    return steps.pop() if steps else None


def set_step(leaf: Any, step: float | None) -> None:
    """Set the number of steps where the optimizer, which has its state, keeps it."""
    by_parameter = counts_by_parameter(leaf)
    for state in leaf.optimizer.state.values():
        if isinstance(state.get(STEP), torch.Tensor):  # not one tensor for all parameters
            state[STEP] = torch.full_like(state[STEP], step or 0.0)
    for group in leaf.optimizer.param_groups:
        group.pop(STEP, None)  # torch's optimizers never look at it, and it would not count on
        if step is not None and not by_parameter:
            group[STEP] = int(step)
