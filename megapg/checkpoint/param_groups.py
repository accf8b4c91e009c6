"""Matching the parameter groups of an optimizer with those of a saved state.

Megatron-core puts experts in a separate optimizer only if they are expert-parallel. So the
arrangement on disk is that of the layout which saved it. Groups are matched by their properties
(learning-rate and weight-decay multipliers, and so on), not by position.

A rank has the groups of what it trains. :func:`merged` joins those of all ranks, as the common
state of a checkpoint exists once.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megapg.checkpoint.can_reshard import WITHOUT
from megapg.errors import CheckpointMismatchError, CheckpointSaveError

OptimizerState: TypeAlias = dict[str | int, object]
"""The result of ``sharded_state_dict``; several chained optimizers are keyed by their index."""

PART_FORM = "param_state_sharding_type"
"""A key that only the state of the distributed optimizer has."""

_KIND = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Properties that do not depend on the layout. Groups that differ in one are never the same."""

_TRAITS = ("is_expert_parallel", "max_lr", "min_lr", "start_wd", "end_wd", "optimizer")
"""Properties that distinguish groups of one kind.

A group of experts is expert-parallel only if ``ep`` > 1.
"""

_OWN = ("is_expert_parallel", "optimizer")
"""Properties that follow from the layout or the optimizer, so a load does not change them."""

COMMON_STEP = "common_step"
"""The key of the step in the state of an optimizer that is not distributed."""

MASTERS = "fp32_from_fp16_params"
"""The key of the master weights in the state of a mixed-precision optimizer."""


def members_of(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers of a chain, also those with nothing to train; or the only one."""
    if isinstance(optimizer, ChainedOptimizer):
        return list(optimizer.chained_optimizers)
    return [] if optimizer is None else [optimizer]


def leaves_of(optimizer: MegatronOptimizer | None) -> list[Any]:
    """Return the optimizers that have something to train on this rank."""
    return [each for each in members_of(optimizer) if not getattr(each, "is_stub_optimizer", False)]


def parts_of(state: Mapping[str | int, object]) -> list[dict[Any, Any]]:
    """Return the states of the leaves. Those of several leaves are keyed by index."""
    if not state:
        return []
    parts: Any = [state]
    if all(isinstance(key, int) for key in state):
        parts = [state[index] for index in sorted(state, key=int)]
    return list(parts)


def inner_of(part: dict[str, Any]) -> dict[str, Any]:
    """Return the state of torch's optimizer, which a mixed-precision optimizer has under a key."""
    inner: Any = part if "param_groups" in part else part.get("optimizer", {})
    whole: dict[str, Any] = inner.data if isinstance(inner, ShardedObject) else inner
    return whole


def groups_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return its parameter groups; none in the common part of a state sharded by buckets."""
    groups: list[dict[str, Any]] = inner_of(part).get("param_groups", [])
    return groups


def merged(states: Mapping[int, OptimizerState]) -> OptimizerState:
    """Return the common part of the optimizer's state, made of those of the ranks.

    A rank lacks the groups of parameters that it does not train, and their step.

    Args:
        states: rank -> the common part that this rank would write; rank order decides on values.

    Raises:
        CheckpointSaveError: two ranks have taken different numbers of steps.
    """
    whole = max(states.values(), key=lambda state: len(parts_of(state)), default={})
    parts = parts_of(whole)
    known: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for part in parts:
        for group in groups_of(part):
            known[_identity(group)].append(group)
    steps: dict[int, dict[Any, Any]] = {}  # id of the holder of a step -> rank -> step
    for rank, state in states.items():
        for number, part in enumerate(parts_of(state)):
            into = parts[min(number, len(parts) - 1)]
            for group in groups_of(part):
                found = known[_identity(group)]
                if not found:
                    found.append(group)
                    groups_of(into).append(group)
                for each in found:  # those of several optimizers may be equal
                    _join_step(each, group, "step", steps, rank)
            if PART_FORM not in part:
                holder = inner_of(into).setdefault("state", {})
                held = inner_of(part).get("state", {})
                _join_step(holder, held, COMMON_STEP, steps, rank)
    return whole


def _join_step(
    into: dict[str, Any],
    part: Mapping[str, Any],
    key: str,
    steps: dict[int, dict[Any, Any]],
    rank: int,
) -> None:
    if key not in part:
        return
    first, step = next(iter(steps.setdefault(id(into), {rank: part[key]}).items()))
    if float(step) != float(part[key]):
        raise CheckpointSaveError(
            f"the optimizer has taken {float(step):g} steps on rank {first} and "
            f"{float(part[key]):g} on rank {rank}, and a checkpoint has one number for all ranks."
        )
    into[key] = part[key]


def _identity(group: Mapping[str, Any]) -> tuple[object, ...]:
    return *(_value(group, key) for key in (*_KIND, *_TRAITS)), _names(group)


def _names(group: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the group's settings, which tell Adam from Muon, for example."""
    return frozenset(group) - {"params", "step"}


def _check_kind(leaf: Any, part: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of Megatron's optimizers."""
    distributed, mixed = "DistributedOptimizer", "Float16OptimizerWithFloat16Params"
    plain = "FP32Optimizer"
    saved = distributed if PART_FORM in part else plain if "param_groups" in part else mixed
    ours = mixed if isinstance(leaf, MixedPrecisionOptimizer) else plain
    if isinstance(leaf, DistributedOptimizer):
        ours = distributed
    if saved != ours:
        raise CheckpointMismatchError(
            f"the optimizer state of the checkpoint is that of a {saved}, and this optimizer is a "
            f"{ours}. Build it as it was (use_distributed_optimizer, bf16, fp16). {WITHOUT}"
        )


def with_param_groups(part: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the same state with these groups."""
    if "param_groups" in part:
        return {**part, "param_groups": list(groups)}
    return {**part, "optimizer": {**part["optimizer"], "param_groups": list(groups)}}


def paired(leaf: Any, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each parameter group of ``leaf``, the values of the matching saved group.

    Properties that say which parameters a group has stay those of ``leaf``.

    Raises:
        CheckpointMismatchError: a group has no counterpart, or several.
    """
    return [_same_group(live, saved) for live in leaf.optimizer.param_groups]


def _same_group(live: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def alike(group: Mapping[str, Any]) -> tuple[int, int, bool]:
        same = [_value(group, key) == _value(live, key) for key in _TRAITS]
        return len(_names(group) & _names(live)), sum(same), same[0]

    ours = {key: _value(live, key) for key in _KIND}
    candidates = [g for g in saved if ours == {key: _value(g, key) for key in _KIND}]
    if not candidates:
        have = [{key: _value(g, key) for key in _KIND} for g in saved]
        raise CheckpointMismatchError(
            f"the optimizer has a parameter group with {ours}, and the checkpoint has none like "
            f"it: {have}. Build the optimizer with the same groups, or load without it."
        )
    best = max(map(alike, candidates))
    found, *others = [_values(g) for g in candidates if alike(g) == best]
    if any(other != found for other in others):
        raise CheckpointMismatchError(
            f"the optimizer has a parameter group with {ours}, and several groups of the "
            f"checkpoint are equally like it: {[found, *others]}. Build the optimizer with the "
            f"learning rates it was saved with. {WITHOUT}"
        )
    now = _values(live)
    now.pop("step", None)
    return {**now, **found, **{key: now[key] for key in (*_KIND, *_OWN) if key in now}}


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _value(group: Mapping[str, Any], key: str) -> Any:
    return group.get(key, group.get(f"pre_{key}"))  # NeMo's name


def fit(optimizer: MegatronOptimizer | None, saved: Mapping[str | int, object]) -> OptimizerState:
    """Return the common part of a saved optimizer state, arranged as this optimizer has it.

    Call it before anything is read, and merge the tensors into the result.

    Raises:
        CheckpointMismatchError: a parameter group of this optimizer has no counterpart, or the
            state is of another kind of optimizer.
    """
    leaves, parts = leaves_of(optimizer), parts_of(saved)
    if not leaves:
        return {}
    if not parts:
        raise CheckpointMismatchError(
            "the common part of the checkpoint has no optimizer state: the rank that wrote it had "
            f"nothing to train, or no optimizer was saved. {WITHOUT}"
        )
    for leaf in leaves:
        _check_kind(leaf, parts[0])
    pool = [{**_step_of(part), **group} for part in parts for group in groups_of(part)]
    fitted: OptimizerState = {}
    for index, leaf in enumerate(leaves):
        part = copy.deepcopy(parts[min(index, len(parts) - 1)])
        part.pop(MASTERS, None)
        inner_of(part).get("state", {}).pop(COMMON_STEP, None)
        # If the state is sharded by buckets, the groups are not in the common part.
        fitted[index] = with_param_groups(part, paired(leaf, pool)) if groups_of(part) else part
    return fitted if len(leaves) > 1 else parts_of(fitted)[0]


def _step_of(part: dict[str, Any]) -> dict[str, Any]:
    """Return the step that all groups of a part share, as in a group; empty if there is none."""
    step = inner_of(part).get("state", {}).get(COMMON_STEP)
    return {} if step is None else {"step": float(step)}


@contextlib.contextmanager
def matched_groups(leaf: Any, saved: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the saved groups in the order of the live ones, so that Megatron-core matches them so.

    Megatron-core 0.16 matches by some traits only, and may merge two groups. Version 0.19 matches
    by all of them, so a changed learning rate finds no match. Inside the block, both versions match
    by a number in a key that they compare.
    """
    live = leaf.optimizer.param_groups
    found = paired(leaf, saved)
    ours = [{key: group[key] for key in (*_KIND, *_TRAITS) if key in group} for group in live]
    for number, group in enumerate(live):
        group["lr_mult"] = number
    # If the state has the numbers of a group's parameters, take those of this process.
    numbers = [{"params": group["params"]} if "params" in group else {} for group in saved]
    numbers += [{} for _ in live[len(numbers) :]]
    try:
        yield [
            {**then, **now, "lr_mult": number, **numbers[number]}
            for number, (then, now) in enumerate(zip(found, ours, strict=True))
        ]
    except BaseException:
        found = ours
        raise
    finally:
        for group, values in zip(leaf.optimizer.param_groups, found, strict=True):
            del group["lr_mult"]
            group.update(values)
