"""The number of steps that an optimizer has taken, wherever the optimizer keeps it.

Torch's optimizers have a step for each parameter. The fused ones of Transformer Engine and Apex
have one in each parameter group. Others, such as SGD, have none. An optimizer that offloads to the
CPU consists of several of these. Megatron-core's checkpoints have one step for all parameters of
an optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megapg.errors import CheckpointError

STEP = "step"


def inners_of(leaf: Any) -> list[Any]:
    """Return the optimizers that make the steps of one of Megatron-core's."""
    return list(getattr(leaf.optimizer, "sub_optimizers", [leaf.optimizer]))


def counts_by_parameter(inner: Any) -> bool:
    """True if an optimizer that has its state has a step for each parameter."""
    return any(STEP in state for state in inner.state.values())


def step_of(leaf: Any) -> float | None:
    """Return the number of steps; None if this rank has no parameter, or nothing counts them.

    Raises:
        CheckpointError: parameters have taken different numbers of steps.
    """
    steps: set[float] = set()
    for inner in inners_of(leaf):
        holders = [state for state in inner.state.values() if STEP in state]
        if not holders:  # a group without parameters may be behind
            holders = [g for g in inner.param_groups if STEP in g and g["params"]]
        steps |= {float(holder[STEP]) for holder in holders}
    if len(steps) > 1:
        raise CheckpointError(
            f"the parameters of one optimizer have taken different numbers of steps, "
            f"{sorted(steps)}, and Megatron-core's checkpoints have one for all of them."
        )
    return steps.pop() if steps else None


def set_step(leaf: Any, step: float | None, by_parameter: Sequence[bool]) -> None:
    """Set the number of steps where each of :func:`inners_of` keeps it.

    Args:
        by_parameter: for each of them, the result of :func:`counts_by_parameter` before
            Megatron-core loaded a state, which puts a step everywhere. It says nothing if this
            rank has no state.
    """
    for group in leaf.optimizer.param_groups:
        group.pop(STEP, None)  # it would not count on
    for inner, counts in zip(inners_of(leaf), by_parameter, strict=True):
        for state in inner.state.values():
            if not counts:
                state.pop(STEP, None)
            elif STEP in state:  # not one tensor for all parameters
                state[STEP] = torch.full_like(torch.as_tensor(state[STEP]), step or 0.0)
        for group in inner.param_groups:
            group.pop(STEP, None)
            if step is not None and not counts and inner.state:
                group[STEP] = int(step)
