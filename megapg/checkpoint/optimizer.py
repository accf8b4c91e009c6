"""Saving and loading optimizer state with Megatron-core.

Megatron-core's optimizers describe their state with ``sharded_state_dict`` and take it back with
``load_state_dict``. Both assume the fused Adam of Apex or TransformerEngine, which has one step
counter per parameter group. Torch's own optimizers have one step tensor per parameter, and both
functions fail on it. The functions here call them, and correct the state before and after. No class
is patched, and with a fused Adam nothing changes.

The order at load::

    reshard.check_reshard(...)              # from the metadata alone
    common = param_groups.fit(optimizer, common)  # the part of the state without tensors
    state = wanted_state(optimizer, model_state, metadata=...)
    ...                                     # read the tensors, merge them with the common part
    restore(optimizer, state)
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megapg.checkpoint import pieces
from megapg.checkpoint.param_groups import (
    PART_FORM,
    OptimizerState,
    groups_of,
    inner_of,
    leaves_of,
    matched_groups,
    parts_of,
    with_param_groups,
)
from megapg.checkpoint.planning import Item
from megapg.checkpoint.reshard import FORM, OptimizerSharding
from megapg.collection import ProcessGroupCollection
from megapg.errors import CheckpointError, UnsupportedOptionError
from megapg.rng import replicas

# -- save and load ---------------------------------------------------------------------------------


def content_metadata(
    optimizer: MegatronOptimizer | None, *, sharding: OptimizerSharding = "fully_reshardable"
) -> dict[str, str | bool]:
    """Return the metadata of a checkpoint's contents, as ``megatron.training`` writes it.

    See ``_build_sharded_state_dict_metadata`` there. This metadata is stored on disk.
    ``sharded_state_dict`` gets the result of :func:`with_groups`.

    Raises:
        UnsupportedOptionError: another sharding.
    """
    if sharding not in get_args(OptimizerSharding):
        known = ", ".join(get_args(OptimizerSharding))
        raise UnsupportedOptionError(f"sharding={sharding!r}: the optimizer has {known}.")
    metadata: dict[str, str | bool] = {}
    if any(isinstance(leaf, DistributedOptimizer) for leaf in leaves_of(optimizer)):
        metadata[FORM] = sharding
        if sharding == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {**metadata, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def with_groups(
    metadata: Mapping[str, object] | None, pg_collection: ProcessGroupCollection
) -> dict[str, object]:
    """Return the metadata for model and optimizer, from that of a checkpoint (None: it has none).

    Without ``dp_cp_group``, Megatron-core takes that group from the globals. The memory-efficient
    form gathers state at a save over gloo groups, which an optimizer on explicit groups does not
    have. On disk it equals the plain form, so the plain form is used here.
    """
    live = {**(metadata or {}), "dp_cp_group": getattr(pg_collection, replicas(pg_collection))}
    if live.get("distrib_optim_fully_reshardable_mem_efficient"):
        live["distrib_optim_fully_reshardable_mem_efficient"] = False
    return live


def prepare(optimizer: MegatronOptimizer | None) -> None:
    """Give an optimizer that has not stepped yet the state that its first step starts from.

    Megatron-core can't describe missing state, for saving or for loading. The zeros equal those
    that torch's optimizer makes at its first step, so training computes the same. Megatron's own
    way is a step with zero gradients, which decays the weights. Existing state is left alone.
    """
    for leaf in leaves_of(optimizer):
        inner = leaf.optimizer
        if not isinstance(inner, (*_ADAM, torch.optim.SGD)):
            if leaf.init_state_fn is not None:
                leaf.init_state_fn(inner, leaf.config)
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    inner.state[parameter].update(_first_state(inner, group, parameter))


def check(optimizer: MegatronOptimizer | None, metadata: Mapping[str, object]) -> None:
    """Check that the optimizer's state can be saved, before any collective.

    Raises:
        CheckpointError: its parameters have taken different numbers of steps, or a bucket is empty.
        UnsupportedOptionError: this kind of optimizer has its own format.
    """
    leaves = leaves_of(optimizer)
    if not leaves:
        return
    if type(optimizer).__name__ == "LayerWiseDistributedOptimizer":
        raise UnsupportedOptionError(
            "the state of a LayerWiseDistributedOptimizer (Muon) can't be saved or loaded here; "
            "its own format is bound to the data-parallel size. Pass optimizer=None."
        )
    buckets = (
        bucket
        for leaf in leaves
        for ranges in getattr(leaf, "gbuf_ranges", ())
        for of_type in ranges.values()
        for bucket in of_type
    )
    if metadata.get(FORM) == "dp_reshardable" and not all(b["param_map"] for b in buckets):
        raise CheckpointError(
            "a bucket of the distributed optimizer has no element for this rank, and "
            "optimizer_sharding='dp_reshardable' needs one. Use 'fully_reshardable', or fewer and "
            "larger buckets (bucket_size)."
        )
    with _one_step_everywhere(leaves):
        pass


def sharded_state(
    optimizer: MegatronOptimizer | None,
    model_state: ShardedStateDict,
    *,
    is_loading: bool,
    metadata: Mapping[str, object],
) -> OptimizerState:
    """Call ``optimizer.sharded_state_dict(...)``, on every rank of the layout.

    Return ``{}`` if there are no parameters to train. Plain values in the result (step, loss scale)
    are copies. Tensors may be the optimizer's own. So a background save has to copy them, and
    reading into them changes the optimizer.

    Args:
        model_state: the sharded state of all model chunks, in any nesting, with the live parameters
            in it.
        is_loading: True to make room for state that is read, False to describe the present state.
        metadata: from :func:`with_groups`.

    Raises:
        CheckpointError: the parameters have not all taken the same number of steps.
    """
    leaves = leaves_of(optimizer)
    if optimizer is None or not leaves:
        return {}
    prepare(optimizer)
    # For other optimizers, is_loading=True only adds a call of init_state_fn. prepare() replaces
    # it: with torch's optimizers it leaves the step out, and for SGD it is None.
    is_loading = is_loading and any(isinstance(leaf, DistributedOptimizer) for leaf in leaves)
    with _one_step_everywhere(leaves), _sparing_the_collector():
        state: OptimizerState = optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=dict(metadata)
        )
    _unshare_steps(leaves)
    for leaf, part in zip(leaves, parts_of(state), strict=True):
        if not isinstance(leaf, DistributedOptimizer):
            inner_of(part)["state"].pop(_PLACEHOLDER, None)
    return {key: _apart(value) for key, value in state.items()}


def gathers(
    optimizer: MegatronOptimizer | None,
    model_state: ShardedStateDict,
    metadata: Mapping[str, object],
) -> bool:
    """True if :func:`saved_state` has to ``gather``, which may be a collective."""
    leaves = leaves_of(optimizer)
    return bool(leaves) and not _can_be_cut(leaves, pieces.parameters_of(model_state), metadata)


def saved_state(
    optimizer: MegatronOptimizer | None,
    model_state: ShardedStateDict,
    metadata: Mapping[str, object],
    *,
    gather: bool,
) -> tuple[OptimizerState, list[Item]]:
    """Return the optimizer's state to save: a state as from :func:`sharded_state`, and entries.

    The distributed optimizer's fully reshardable form is gathered only if ``gather`` is set (see
    :func:`gathers`). Otherwise each rank writes entries of the parts it holds. All tensors are live
    ones. For the other arguments and errors see :func:`sharded_state`.
    """
    leaves = leaves_of(optimizer)
    if gather or not leaves:
        return sharded_state(optimizer, model_state, is_loading=False, metadata=metadata), []
    parameters = pieces.parameters_of(model_state)
    prepare(optimizer)
    if len(leaves) > 1:
        optimizer._synchronize_steps()  # type: ignore[union-attr]  # as its sharded_state_dict does
    with _one_step_everywhere(leaves):
        states = [leaf.state_dict() for leaf in leaves]
    _unshare_steps(leaves)
    parts = [_apart({**state, PART_FORM: "fully_reshardable"}) for state in states]
    return _whole(parts), [item for leaf in leaves for item in pieces.pieces_of(leaf, parameters)]


def wanted_state(
    optimizer: MegatronOptimizer | None,
    model_state: ShardedStateDict,
    *,
    metadata: Mapping[str, object],
) -> OptimizerState:
    """Return the optimizer's state to load: a state as from :func:`sharded_state`.

    For the distributed optimizer's fully reshardable form, each rank reads only the parts it holds,
    directly into place. For the arguments and errors see :func:`sharded_state`.
    """
    leaves = leaves_of(optimizer)
    parameters = pieces.parameters_of(model_state)
    if not _can_be_cut(leaves, parameters, metadata):
        return sharded_state(optimizer, model_state, is_loading=True, metadata=metadata)
    prepare(optimizer)
    return _whole([{"param_state": pieces.places_of(leaf, parameters)} for leaf in leaves])


def _can_be_cut(
    leaves: Sequence[Any], parameters: pieces.Parameters, metadata: Mapping[str, object]
) -> bool:
    return (
        metadata.get(FORM) == "fully_reshardable"
        and (len(leaves) == 1 or bool(metadata.get("chained_optim_avoid_prefix")))
        and all(pieces.can_be_cut(leaf, parameters) for leaf in leaves)
    )


def _whole(parts: list[OptimizerState]) -> OptimizerState:
    """Return the state of the optimizer, made of those of its leaves."""
    return parts[0] if len(parts) == 1 else dict(enumerate(parts))


@torch.no_grad()
def restore(optimizer: MegatronOptimizer | None, state: OptimizerState) -> None:
    """Call ``optimizer.load_state_dict(state)`` and correct the result.

    ``state`` comes from :func:`~megapg.checkpoint.param_groups.fit`, with its tensors read and
    merged in.

    Raises:
        CheckpointMismatchError: a parameter group of this optimizer has no counterpart.
    """
    leaves = leaves_of(optimizer)
    for leaf, part in zip(leaves, parts_of(state), strict=True):
        with matched_groups(leaf, groups_of(part)) as groups:
            _load(leaf, with_param_groups(part, groups))
    _unshare_steps(leaves)


# -- repairs ---------------------------------------------------------------------------------------

_ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Torch's own, with a step per parameter. A fused Adam has one step in the parameter group."""


def _first_state(
    inner: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the state that torch's optimizer gives a parameter just before its first step."""
    zeros = torch.zeros_like(parameter, requires_grad=False)
    if isinstance(inner, torch.optim.SGD):
        return {"momentum_buffer": zeros} if group["momentum"] else {}
    device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
    step = torch.zeros((), dtype=torch.float32, device=device)
    return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


@contextlib.contextmanager
def _one_step_everywhere(leaves: Sequence[Any]) -> Iterator[None]:
    """Let Megatron-core find exactly one step in each optimizer, as it requires.

    A rank may hold no piece of any parameter of an optimizer: its stage has no experts, or there
    are fewer elements than ranks. Then the state is a single step inside the block.
    """
    steps = [_steps(leaf) for leaf in leaves]
    for found in steps:
        if len(found) > 1:
            raise CheckpointError(
                f"the parameters of one optimizer have taken different numbers of steps, "
                f"{sorted(found)}, and Megatron-core's checkpoints have one for all of them."
            )
    step = torch.tensor(max((step for found in steps for step in found), default=0.0))
    inner: list[Any] = [leaf.optimizer for leaf in leaves]
    empty: list[Any] = [each.state for each in inner if isinstance(each, _ADAM) and not each.state]
    for state in empty:
        state[_PLACEHOLDER] = {"step": step}
    try:
        yield
    finally:
        for leaf in leaves:  # loading replaces the state objects
            leaf.optimizer.state.pop(_PLACEHOLDER, None)


_PLACEHOLDER = "no parameter"


def _steps(leaf: Any) -> set[float]:
    if not isinstance(leaf.optimizer, _ADAM):
        return set()
    return {float(state["step"]) for state in leaf.optimizer.state.values()}


@contextlib.contextmanager
def _sparing_the_collector() -> Iterator[None]:
    """Make Megatron-core's garbage collection cheap inside the block.

    ``distrib_optimizer.py`` collects garbage, for users who turned automatic collection off. That
    visits every object, which takes half of the time of a save. Frozen objects are skipped.
    """
    if gc.get_freeze_count():  # frozen by the user
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _unshare_steps(leaves: Sequence[Any]) -> None:
    """Give each parameter its own step tensor.

    Megatron-core gives one step tensor to all parameters, and each parameter would increment it.
    """
    seen: set[int] = set()
    for leaf in leaves:
        for state in leaf.optimizer.state.values():
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                state["step"] = step.clone() if id(step) in seen else step
                seen.add(id(step))


def _load(leaf: Any, part: dict[str, Any]) -> None:
    if not isinstance(leaf.optimizer, _ADAM):
        leaf.load_state_dict(part)
    elif isinstance(leaf, DistributedOptimizer):
        _load_distributed(leaf, part)
    else:
        state = inner_of(part).setdefault("state", {})
        state.setdefault("common_step", torch.tensor(0.0))  # a step of zero is not saved
        leaf.load_state_dict(part)


def _load_distributed(leaf: Any, part: dict[str, Any]) -> None:
    """Load in two calls, because the call that takes the tensors fails on a step among them."""
    held = part["param_state"].get("held")
    load = {
        "fully_reshardable": leaf.load_parameter_state_from_fully_reshardable,
        "dp_reshardable": leaf.load_parameter_state_from_dp_reshardable,
    }[part[PART_FORM]]
    leaf.load_state_dict({key: v for key, v in part.items() if not key.startswith("param_state")})
    states = list(leaf.optimizer.state.values())
    steps = [state.pop("step") for state in states]
    try:
        if held is None:
            load(part["param_state"])
        else:
            held.put(leaf)
    finally:
        for state, step in zip(states, steps, strict=True):
            state["step"] = step


def _apart(value: Any) -> Any:
    """Return the state with plain values copied, and its sharded tensors detached from autograd.

    Padding between parameters is zeroed in place.
    """
    if isinstance(value, dict):
        apart = {key: _apart(inner) for key, inner in value.items()}
        if isinstance(padding := value.get("padding"), LocalNonpersistentObject) and padding.obj:
            # Padding between the parameters of a bucket is saved too, and is uninitialised memory.
            for piece in apart.values():
                if isinstance(piece, ShardedTensor) and piece.data is not None:
                    piece.data.zero_()
        return apart
    if isinstance(value, list):
        return [_apart(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, ShardedObject):
        value.data = _apart(value.data)
    elif isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None:
        value.data = value.data.detach()  # a leaf of autograd can't be read into
    return value
