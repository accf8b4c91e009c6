"""Saving and loading optimizer state with Megatron-core.

Megatron-core's optimizers describe their state with ``sharded_state_dict`` and take it back with
``load_state_dict``. Both differ by where the optimizer inside keeps its step, and fail if a rank
has nothing to train. The functions here call them for each optimizer of a chain, and correct the
state before and after. No class is patched. An optimizer is not asked for its class, but for what
it has: a step for each parameter or for each group, states that it scales itself.

The order at load::

    can_reshard.check_reshard(...)          # from the metadata alone
    common = param_groups.fit(optimizer, common)  # the part of the state without tensors
    state = wanted_state(optimizer, model_state, metadata=...)
    ...                                     # read the tensors, merge them with the common part
    restore(optimizer, state)
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megapg.checkpoint import optimizer_pieces as pieces
from megapg.checkpoint.can_reshard import FORM, OptimizerSharding
from megapg.checkpoint.param_groups import (
    MASTERS,
    PART_FORM,
    OptimizerState,
    groups_of,
    inner_of,
    leaves_of,
    matched_groups,
    members_of,
)
from megapg.checkpoint.planning import Item
from megapg.checkpoint.step_count import STEP, counts_by_parameter, inners_of, step_of
from megapg.collection import ProcessGroupCollection
from megapg.errors import CheckpointError, UnsupportedOptionError
from megapg.rng import replica_field

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
    # All ranks come to the same answer, also those with nothing to train.
    if any(isinstance(each, DistributedOptimizer) for each in members_of(optimizer)):
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
    live = {**(metadata or {}), "dp_cp_group": getattr(pg_collection, replica_field(pg_collection))}
    if live.get("distrib_optim_fully_reshardable_mem_efficient"):
        live["distrib_optim_fully_reshardable_mem_efficient"] = False
    return live


def prepare(optimizer: MegatronOptimizer | None) -> None:
    """Give an optimizer that has not stepped yet the state that its first step starts from.

    Megatron-core can't describe missing state, for saving or for loading. The zeros equal those
    that the optimizer makes at its first step, so training computes the same. Megatron's own
    way is a step with zero gradients, which decays the weights. Existing state is left alone.
    """
    for leaf in leaves_of(optimizer):
        inner = leaf.optimizer
        new = False
        for each in inners_of(leaf):
            new |= _prepare(each)
        if new and hasattr(inner, "sub_optimizers"):
            inner._sync_sub_optimizers_state_to_hdo()
        if new and leaf.init_state_fn is not None:
            leaf.init_state_fn(inner, leaf.config)  # passes over parameters that have a state


def _prepare(inner: Any) -> bool:
    """Give all parameters without state their first state; return True if there are any."""
    new = [
        (group, parameter)
        for group in inner.param_groups
        for parameter in group["params"]
        if not inner.state.get(parameter)
    ]
    for group, parameter in new:
        if hasattr(inner, "initialize_state"):  # Transformer Engine's: it scales its states
            flag = getattr(inner, "store_param_remainders", None)
            whole = () if flag is None else (flag and parameter.dtype == torch.bfloat16,)
            inner.initialize_state(parameter, *whole)
        elif state := _first_state(inner, group, parameter):
            inner.state[parameter].update(state)
    return bool(new)


def check(optimizer: MegatronOptimizer | None, metadata: Mapping[str, object]) -> None:
    """Check that the optimizer's state can be saved or loaded, before any collective.

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
    for leaf in leaves:
        step_of(leaf)


def sharded_state(
    optimizer: MegatronOptimizer | None,
    model_state: ShardedStateDict,
    *,
    is_loading: bool,
    metadata: Mapping[str, object],
) -> OptimizerState:
    """Call ``sharded_state_dict(...)`` of each optimizer, on every rank of the layout.

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
    leaves, members = leaves_of(optimizer), members_of(optimizer)
    prepare(optimizer)
    parts = []
    with _a_step_in_each(leaves), _sparing_the_collector():
        for number, leaf in enumerate(members):
            if leaf not in leaves:
                continue
            # is_loading=True makes room for what would be gathered. It also calls init_state_fn,
            # which prepare() replaces, and loads the live state, which merges groups alike.
            to_load = is_loading and metadata.get(FORM) == "fully_reshardable"
            keeping = matched_groups(leaf, leaf.optimizer.param_groups)
            with keeping if to_load else contextlib.nullcontext():
                part = leaf.sharded_state_dict(
                    model_state,
                    is_loading=to_load and isinstance(leaf, DistributedOptimizer),
                    metadata=dict(metadata),
                )
            if len(members) > 1 and _is_prefixed(metadata):
                add_prefix_for_sharding(part, f"chained_{number}.")
            parts.append(part)
    _unshare_steps(leaves)
    return _whole([_described(*each) for each in zip(leaves, parts, strict=True)])


def _is_prefixed(metadata: Mapping[str, object]) -> bool:
    """True if the names of a chain's tensors have the number of the optimizer in front."""
    whole = DistributedOptimizer.checkpoint_fully_reshardable_formats
    bound = FORM in metadata and metadata[FORM] not in whole
    return bound or not metadata.get("chained_optim_avoid_prefix", False)


def _described(leaf: Any, part: dict[str, Any]) -> OptimizerState:
    """Return a state of Megatron-core's with its plain values copied and its step put right."""
    step = step_of(leaf)
    state: dict[Any, Any] = {key: _apart(value) for key, value in part.items()}
    if not isinstance(leaf, DistributedOptimizer):
        inner_of(state)["state"].pop(_PLACEHOLDER, None)
        if MASTERS in state:  # of lists, only those with elements come back from a checkpoint
            groups = enumerate(state[MASTERS])
            state[MASTERS] = {number: dict(enumerate(group)) for number, group in groups if group}
        return state
    for group in groups_of(state):
        group.pop(STEP, None)
        if step is not None:
            group[STEP] = step if counts_by_parameter(leaf.optimizer) else int(step)
    return state


def trained(
    optimizer: MegatronOptimizer | None,
    model_state: ShardedStateDict,
    metadata: Mapping[str, object],
) -> dict[str, int]:
    """Return key of a weight -> its elements here that the optimizer trains, once in all replicas.

    Empty if the state is not stored by weights.
    """
    found = defaultdict[str, int](int)
    if metadata.get(FORM, "fully_reshardable") != "fully_reshardable":
        return found
    places = pieces.parameters_of(model_state)
    for weight in {weight for leaf in leaves_of(optimizer) for weight in _weights_of(leaf)}:
        if weight.numel() and weight in places and is_main_replica(places[weight].replica_id):
            for tensor in pieces.tensors_of(places[weight]):
                found[tensor.key] += math.prod(tensor.local_shape)
    return found


def _weights_of(leaf: Any) -> Iterator[torch.Tensor]:
    """Yield the model's parameters that an optimizer trains, of all ranks of data parallelism."""
    for buffer in getattr(leaf, "buffers", ()):
        yield from buffer.param_index_map
    groups = getattr(leaf, "float16_groups", [])
    for group in [*groups, *getattr(leaf, "fp32_from_fp32_groups", [])]:
        yield from group
    if not isinstance(leaf, MixedPrecisionOptimizer):
        yield from leaf.get_parameters()


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
    with _a_step_in_each(leaves):
        states = [leaf.state_dict() for leaf in leaves]
    _unshare_steps(leaves)
    parts = [
        _described(leaf, {**state, PART_FORM: "fully_reshardable"})
        for leaf, state in zip(leaves, states, strict=True)
    ]
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
        bool(leaves)
        and metadata.get(FORM) == "fully_reshardable"
        and (len(leaves) == 1 or bool(metadata.get("chained_optim_avoid_prefix")))
        and all(pieces.can_be_cut(leaf, parameters) for leaf in leaves)
    )


def _whole(parts: list[OptimizerState]) -> OptimizerState:
    """Return the state of the optimizer, made of those of its leaves."""
    return parts[0] if len(parts) == 1 else dict(enumerate(parts))


# -- repairs ---------------------------------------------------------------------------------------


def _first_state(
    inner: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the state that the optimizer gives a parameter just before its first step.

    Empty if it is not known. Before the first step, there is only the class to ask.
    """
    zeros = torch.zeros_like(parameter, requires_grad=False)
    if "momentum" in group and "dampening" in group:
        return {"momentum_buffer": zeros} if group["momentum"] else {}
    if not isinstance(inner, TORCHS_ADAM):
        return {}
    device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
    step = torch.zeros((), dtype=torch.float32, device=device)
    state = {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    return {**state, "max_exp_avg_sq": zeros.clone()} if group["amsgrad"] else state


TORCHS_ADAM = (torch.optim.Adam, torch.optim.AdamW)


@contextlib.contextmanager
def _a_step_in_each(leaves: Sequence[Any]) -> Iterator[None]:
    """Let Megatron-core find a step in each of torch's Adams, as it requires.

    A rank may hold no piece of any parameter of an optimizer: its stage has no experts, or there
    are fewer elements than ranks. Then the state is a single step inside the block.

    Raises:
        CheckpointError: the parameters have not all taken the same number of steps.
    """
    for leaf in leaves:
        step_of(leaf)
        if isinstance(leaf.optimizer, TORCHS_ADAM) and not leaf.optimizer.state:
            leaf.optimizer.state[_PLACEHOLDER] = {STEP: torch.tensor(0.0)}  # type: ignore[index]
    try:
        yield
    finally:
        for leaf in leaves:  # loading replaces the state objects
            leaf.optimizer.state.pop(_PLACEHOLDER, None)


_PLACEHOLDER = "no parameter"


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


def _apart(value: Any) -> Any:
    """Return the state with plain values copied, and its sharded tensors detached from autograd.

    Padding between parameters is zeroed in place. Classes, which the optimizer that offloads to the
    CPU has among the settings of a group, are left out: a load keeps those of the live group.
    """
    if isinstance(value, dict):
        apart = {key: _apart(each) for key, each in value.items() if not isinstance(each, type)}
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
