"""Optimizer state: what Megatron-core needs to save and load it, and what can be resharded.

Megatron-core's optimizers describe their state with ``sharded_state_dict`` and take it back with
``load_state_dict``. Both assume the fused Adam of Apex or TransformerEngine, where the step counter
belongs to a parameter group. With torch's own optimizers it is a tensor of every parameter, and
both break. The functions here call them, and put right before and after what they get wrong; no
class is patched, and with a fused Adam nothing is changed.

The order at load::

    check_reshard(...)                      # from the metadata alone
    common = fit(optimizer, common)         # the part of the state that is no tensor
    state = sharded_state(optimizer, model_state, is_loading=True, metadata=...)
    ...                                     # read the tensors, merge them with the common part
    restore(optimizer, state)
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megapg.collection import ProcessGroupCollection
from megapg.errors import CheckpointError, CheckpointMismatchError, UnsupportedOptionError
from megapg.layout import ParallelLayout

OptimizerState: TypeAlias = dict[str | int, object]
"""What ``sharded_state_dict`` returns; of several chained optimizers, by their index."""

OptimizerSharding: TypeAlias = Literal["fully_reshardable", "dp_reshardable"]
"""``fully_reshardable`` loads under any layout; ``dp_reshardable`` is cheaper to save, and loads
only where nothing but the data-parallel size has changed."""

_TYPE = "distrib_optim_sharding_type"

_KIND = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""What a parameter group is, whatever the layout: groups that differ here are never the same."""

_TRAITS = ("is_expert_parallel", "max_lr", "min_lr", "start_wd", "end_wd", "optimizer")
"""What tells apart groups of one kind. An expert's group is expert-parallel only if ``ep`` > 1."""


# -- save and load ---------------------------------------------------------------------------------


def content_metadata(
    optimizer: MegatronOptimizer | None, *, sharding: OptimizerSharding = "fully_reshardable"
) -> dict[str, str | bool]:
    """What a checkpoint says about the form of its contents, as ``megatron.training`` writes it.

    The counterpart upstream is ``_build_sharded_state_dict_metadata``. The result goes to disk;
    what ``sharded_state_dict`` gets is :func:`with_groups` of it.

    Args:
        optimizer: the optimizer that is saved, or None.
        sharding: of the distributed optimizer. ``"fully_reshardable"``: every layout can load it,
            and saving gathers the state over data parallelism. ``"dp_reshardable"``: nothing is
            gathered, and only the data-parallel size may change.

    Raises:
        UnsupportedOptionError: another sharding.
    """
    if sharding not in get_args(OptimizerSharding):
        known = ", ".join(get_args(OptimizerSharding))
        raise UnsupportedOptionError(f"sharding={sharding!r}: the optimizer has {known}.")
    metadata: dict[str, str | bool] = {}
    if any(isinstance(leaf, DistributedOptimizer) for leaf in _leaves(optimizer)):
        metadata[_TYPE] = sharding
        if sharding == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return {**metadata, "singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def with_groups(
    metadata: Mapping[str, object] | None, pg_collection: ProcessGroupCollection
) -> dict[str, object]:
    """The metadata that model and optimizer get, from that of a checkpoint (None: it has none).

    Without ``dp_cp_group`` Megatron-core takes it from the globals. The memory-efficient form
    differs from the plain one in how state is gathered at a save, over gloo groups that an
    optimizer on explicit groups doesn't have; on disk they are the same, and so they are here.
    """
    live = {**(metadata or {}), "dp_cp_group": pg_collection.dp_cp}
    if live.get("distrib_optim_fully_reshardable_mem_efficient"):
        live["distrib_optim_fully_reshardable_mem_efficient"] = False
    return live


def prepare(optimizer: MegatronOptimizer | None) -> None:
    """Give an optimizer that never stepped the state that its first step would begin with.

    Megatron-core can describe neither for saving nor for loading what isn't there. The zeros are
    those that torch's optimizer makes itself at the first step, so training computes the same;
    upstream's way is a step with zero gradients, which decays the weights. State that exists is
    left alone.
    """
    for leaf in _leaves(optimizer):
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
    """Whether the optimizer's state can be saved at all: before the collectives begin.

    Raises:
        CheckpointError: its parameters have taken different numbers of steps, or a bucket is empty.
        UnsupportedOptionError: it is of a kind that has a format of its own.
    """
    leaves = _leaves(optimizer)
    if optimizer is not None and leaves:
        _check_supported(optimizer, leaves, metadata)
        with _one_step_everywhere(leaves):
            pass


def gathered_memory(
    optimizer: MegatronOptimizer | None, state: OptimizerState, metadata: Mapping[str, object]
) -> frozenset[int]:
    """Addresses of tensors in a state that were gathered for it, and so belong to nobody else.

    The distributed optimizer's fully reshardable form is made that way
    (``sharded_param_state_fully_reshardable``); all others hand out live tensors.
    """
    if metadata.get(_TYPE) != "fully_reshardable":
        return frozenset()
    parts = zip(_leaves(optimizer), _parts(state), strict=True)
    return frozenset(
        leaf.data.untyped_storage().data_ptr()
        for optimizer_leaf, part in parts
        if type(optimizer_leaf) is DistributedOptimizer
        for leaf in nested_values(part.get("param_state", {}))
        if isinstance(leaf, ShardedTensor) and isinstance(leaf.data, torch.Tensor)
    )


def sharded_state(
    optimizer: MegatronOptimizer | None,
    model_state: ShardedStateDict,
    *,
    is_loading: bool,
    metadata: Mapping[str, object],
) -> OptimizerState:
    """``optimizer.sharded_state_dict(...)``, on every rank of the layout.

    Plain values in it (step, loss scale) are copies. The tensors that belong to a place in the
    checkpoint are not: those of the distributed optimizer's fully reshardable form are fresh, but
    others are the optimizer's own, as the model's are, so a save that goes on during training
    has to copy them; and reading into them at load changes the optimizer.

    Args:
        optimizer: the optimizer; None or a rank without parameters to train gives ``{}``.
        model_state: the sharded state of all model chunks, in any nesting, with the live
            parameters in it.
        is_loading: whether to make room for state that is read, or to show the state there is.
        metadata: from :func:`with_groups`.

    Raises:
        CheckpointError: the parameters have not all taken the same number of steps, or sharding
            by buckets meets a bucket with fewer elements than ranks; the format has no place for
            either.
        UnsupportedOptionError: a layer-wise distributed optimizer (Muon).
    """
    leaves = _leaves(optimizer)
    if optimizer is None or not leaves:
        return {}
    prepare(optimizer)
    # For the others, loading differs in a call of init_state_fn, which prepare() stands for: with
    # torch's optimizers it leaves the step out, and for SGD it is None.
    is_loading = is_loading and any(isinstance(leaf, DistributedOptimizer) for leaf in leaves)
    with _one_step_everywhere(leaves), _sparing_the_collector():
        state: OptimizerState = optimizer.sharded_state_dict(
            model_state, is_loading=is_loading, metadata=dict(metadata)
        )
    _unshare_steps(leaves)
    for leaf, part in zip(leaves, _parts(state), strict=True):
        if not isinstance(leaf, DistributedOptimizer):
            _inner(part)["state"].pop(_PLACEHOLDER, None)
    return {key: _apart(value) for key, value in state.items()}


def fit(optimizer: MegatronOptimizer | None, saved: Mapping[str | int, object]) -> OptimizerState:
    """The common part of a saved optimizer state, arranged as this optimizer has it.

    Megatron-core keeps experts in an optimizer of their own where they are expert-parallel, and
    else together with the rest, so the arrangement on disk is that of the layout which saved it.
    Parameter groups are paired by what they are (learning-rate and weight-decay multipliers, and so
    on), not by position. Call it before anything is read, and merge the tensors into the result.

    Args:
        optimizer: the optimizer that is going to load it.
        saved: ``common["optimizer"]`` of the checkpoint.

    Raises:
        CheckpointMismatchError: a parameter group of this optimizer has no counterpart, or the
            state is of another kind of optimizer.
    """
    leaves, parts = _leaves(optimizer), _parts(saved)
    if not leaves:
        return {}
    if not parts:
        raise CheckpointMismatchError(
            "the common part of the checkpoint has no optimizer state: the rank that wrote it had "
            f"nothing to train, or no optimizer was saved. {_WITHOUT}"
        )
    for leaf in leaves:
        _check_kind(leaf, parts[0])
    pool = [group for part in parts for group in _groups(part)]
    fitted: OptimizerState = {}
    for index, leaf in enumerate(leaves):
        part = copy.deepcopy(parts[min(index, len(parts) - 1)])
        # Of a state sharded by buckets the groups are not in the common part.
        fitted[index] = _with_groups(part, _paired(leaf, pool)) if _groups(part) else part
    return fitted if len(leaves) > 1 else _parts(fitted)[0]


@torch.no_grad()
def restore(optimizer: MegatronOptimizer | None, state: OptimizerState) -> None:
    """``optimizer.load_state_dict(state)``, once the tensors of ``state`` have been read.

    Args:
        optimizer: the optimizer; None or a rank without parameters to train does nothing.
        state: what :func:`fit` returned, with the tensors merged in.

    Raises:
        CheckpointMismatchError: a parameter group of this optimizer has no counterpart.
    """
    leaves = _leaves(optimizer)
    for leaf, part in zip(leaves, _parts(state), strict=True):
        with _told_apart(leaf, _groups(part)) as groups:
            _load(leaf, _with_groups(part, groups))
    _unshare_steps(leaves)


# -- what can be resharded -------------------------------------------------------------------------


def check_reshard(
    metadata: Mapping[str, object] | None,
    saved: ParallelLayout | None,
    current: ParallelLayout | None,
    has_experts: bool,
) -> None:
    """Say from the metadata alone what optimizer state can't be cut for this layout.

    Nothing is read and nothing communicated, so every rank comes to the same answer. Loading the
    model without the optimizer is not limited so.

    Args:
        metadata: ``content_metadata`` of the checkpoint; None where it has none.
        saved: the layout that wrote it; None where that is not known.
        current: the layout that is going to load it; None where that is not known.
        has_experts: whether the model has experts.

    Raises:
        CheckpointMismatchError: what stands against it, and what to do.
    """
    if metadata is None:
        raise CheckpointMismatchError(
            f"the checkpoint has no content metadata, as before Megatron-core 0.13, so how its "
            f"optimizer state is sharded isn't known. {_WITHOUT}"
        )
    sharding = metadata.get(_TYPE, "fully_reshardable")  # absent: not a distributed optimizer
    if sharding not in get_args(OptimizerSharding):
        why = _UNREADABLE.get(str(sharding), "is not known")
        raise CheckpointMismatchError(
            f"the optimizer state of the checkpoint is sharded as {sharding!r}, which {why}. "
            f"{_WITHOUT}"
        )
    bound = sharding == "dp_reshardable"
    if bound or (has_experts and not metadata.get("chained_optim_avoid_prefix")):
        if current is None:
            raise CheckpointMismatchError(
                "the optimizer state of the checkpoint is bound to the layout that saved it, and "
                f"the groups passed here form no layout that is known. {_WITHOUT}"
            )
        if bound:
            _check_same_buckets(saved, current, has_experts)
        else:
            _check_same_names(saved, current)


_WITHOUT = "Load the model without the optimizer (optimizer=None), or save it again from there."

_UNREADABLE = {
    "fully_sharded_model_space": "Megatron-core from 0.16 on refuses (flattened tensors)",
    "dp_zero_gather_scatter": "needs gloo groups that an optimizer on explicit groups doesn't have",
    "fully_sharded_bucket_space": "Megatron-core can no longer read",
    "fsdp_dtensor": "is Megatron-FSDP's, in another format",
}


def _check_same_buckets(
    saved: ParallelLayout | None, current: ParallelLayout, has_experts: bool
) -> None:
    """The bucket format knows a piece by its model-parallel rank's number and place in a bucket."""
    if saved is None:
        raise CheckpointMismatchError(
            "the optimizer state is sharded as 'dp_reshardable', which only the layout that saved "
            f"it can read (apart from data parallelism), and that layout is not known. {_WITHOUT}"
        )
    then, now = _grid(saved, has_experts), _grid(current, has_experts)
    changed = [f"{name} {then[name]} -> {now[name]}" for name in then if then[name] != now[name]]
    if changed:
        raise CheckpointMismatchError(
            "the optimizer state is sharded as 'dp_reshardable': only data parallelism may change, "
            f"and here it is {', '.join(changed)}. Load it in the layout that saved it and save it "
            f"with optimizer_sharding='fully_reshardable', which every layout can read. {_WITHOUT}"
        )


def _check_same_names(saved: ParallelLayout | None, current: ParallelLayout) -> None:
    """With ep > 1 experts have an optimizer of their own, and here tensors are named after it."""
    if saved is None or (saved.ep > 1) != (current.ep > 1):
        before = "unknown" if saved is None else str(saved.ep)
        raise CheckpointMismatchError(
            "the checkpoint was saved without chained_optim_avoid_prefix, so the names in its "
            "optimizer state tell whether experts were spread over ranks, and that may not change: "
            f"ep was {before} and is {current.ep}. {_WITHOUT}"
        )


def _grid(layout: ParallelLayout, has_experts: bool) -> dict[str, object]:
    """What numbers the model-parallel ranks and cuts their parameters into buckets."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp or 1}
    split = {"tp": layout.tp, "pp": layout.pp}
    if has_experts:
        sizes |= {"ep": layout.ep, "expt_tp": layout.expt_tp}
        split |= {"ep": layout.ep, "tp": max(layout.tp, layout.expt_tp)}
    order = "-".join(axis for axis in layout.order.split("-") if split.get(axis, 1) > 1)
    return {**sizes, "order": order}


# -- parts of a state ------------------------------------------------------------------------------


def _leaves(optimizer: MegatronOptimizer | None) -> list[Any]:
    """The optimizers with state of their own; none where this rank has nothing to train."""
    if optimizer is None or getattr(optimizer, "is_stub_optimizer", False):
        return []
    if isinstance(optimizer, ChainedOptimizer):
        return list(optimizer.chained_optimizers)
    return [optimizer]


def _parts(state: Mapping[str | int, object]) -> list[dict[Any, Any]]:
    """The states of the leaves: those of several are kept by index."""
    if not state:
        return []
    parts: Any = [state]
    if all(isinstance(key, int) for key in state):
        parts = [state[index] for index in sorted(state, key=int)]
    return list(parts)


def _inner(part: dict[str, Any]) -> dict[str, Any]:
    """The state of torch's optimizer: a mixed-precision optimizer has it under a key."""
    inner: dict[str, Any] = part if "param_groups" in part else part.get("optimizer", {})
    return inner


def _groups(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Its parameter groups; none in the common part of a state that is sharded by buckets."""
    groups: list[dict[str, Any]] = _inner(part).get("param_groups", [])
    return groups


def _check_kind(leaf: Any, part: Mapping[str, Any]) -> None:
    """The state of one kind of Megatron's optimizers has no place in another."""
    if "param_state_sharding_type" in part:
        saved = "DistributedOptimizer"
    else:
        saved = "FP32Optimizer" if "param_groups" in part else "Float16OptimizerWithFloat16Params"
    if isinstance(leaf, DistributedOptimizer):
        ours = "DistributedOptimizer"
    else:
        mixed = isinstance(leaf, MixedPrecisionOptimizer)
        ours = "Float16OptimizerWithFloat16Params" if mixed else "FP32Optimizer"
    if saved != ours:
        raise CheckpointMismatchError(
            f"the optimizer state of the checkpoint is that of a {saved}, and this optimizer is a "
            f"{ours}. Build it as it was (use_distributed_optimizer, bf16, fp16). {_WITHOUT}"
        )


def _with_groups(part: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if "param_groups" in part:
        return {**part, "param_groups": list(groups)}
    return {**part, "optimizer": {**part["optimizer"], "param_groups": list(groups)}}


def _paired(leaf: Any, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each parameter group of ``leaf`` the values of the saved group that is the same."""
    return [_same_group(live, saved) for live in leaf.optimizer.param_groups]


def _same_group(live: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def alike(group: Mapping[str, Any]) -> tuple[int, bool]:
        same = [_value(group, key) == _value(live, key) for key in _TRAITS]
        return sum(same), same[0]

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
            f"learning rates it was saved with. {_WITHOUT}"
        )
    return {**_values(live), **found}


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _value(group: Mapping[str, Any], key: str) -> Any:
    return group.get(key, group.get(f"pre_{key}"))  # NeMo's name for it


# -- repairs ---------------------------------------------------------------------------------------

_ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Torch's own: a step for every parameter. A fused Adam keeps one in the parameter group."""


def _check_supported(
    optimizer: MegatronOptimizer, leaves: Sequence[Any], metadata: Mapping[str, object]
) -> None:
    if type(optimizer).__name__ == "LayerWiseDistributedOptimizer":
        raise UnsupportedOptionError(
            "the state of a LayerWiseDistributedOptimizer (Muon) can't be saved or loaded here; "
            "its own format is bound to the data-parallel size. Pass optimizer=None."
        )
    if metadata.get(_TYPE) == "dp_reshardable" and any(map(_has_empty_bucket, leaves)):
        raise CheckpointError(
            "a bucket of the distributed optimizer has no element for this rank, and "
            "optimizer_sharding='dp_reshardable' needs one. Use 'fully_reshardable', or fewer and "
            "larger buckets (bucket_size)."
        )


def _has_empty_bucket(leaf: Any) -> bool:
    ranges_of_buffers = getattr(leaf, "gbuf_ranges", ())
    buckets = (b for ranges in ranges_of_buffers for of_type in ranges.values() for b in of_type)
    return not all(bucket["param_map"] for bucket in buckets)


def _first_state(
    inner: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What torch's optimizer makes of a parameter at its first step, before that step."""
    zeros = torch.zeros_like(parameter, requires_grad=False)
    if isinstance(inner, torch.optim.SGD):
        return {"momentum_buffer": zeros} if group["momentum"] else {}
    device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
    step = torch.zeros((), dtype=torch.float32, device=device)
    return {"step": step, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


@contextlib.contextmanager
def _one_step_everywhere(leaves: Sequence[Any]) -> Iterator[None]:
    """Let Megatron-core find exactly one step in each optimizer, as it wants to.

    A rank may hold no piece of any parameter of an optimizer: its stage has no experts, or there
    are fewer elements than ranks. For the time being the state is a step alone.
    """
    steps = [_steps(leaf) for leaf in leaves]
    for found in steps:
        if len(found) > 1:
            raise CheckpointError(
                f"the parameters of one optimizer have taken different numbers of steps, "
                f"{sorted(found)}, and Megatron-core's checkpoints have one for all of them."
            )
    step = torch.tensor(max((step for found in steps for step in found), default=0.0))
    empty = [leaf.optimizer.state for leaf in leaves if _lacks_state(leaf.optimizer)]
    for state in empty:
        state[_PLACEHOLDER] = {"step": step}
    try:
        yield
    finally:
        for leaf in leaves:  # loading makes other objects of the state
            leaf.optimizer.state.pop(_PLACEHOLDER, None)


_PLACEHOLDER = "no parameter"


def _lacks_state(inner: torch.optim.Optimizer) -> bool:
    return isinstance(inner, _ADAM) and not inner.state


def _steps(leaf: Any) -> set[float]:
    if not isinstance(leaf.optimizer, _ADAM):
        return set()
    return {float(state["step"]) for state in leaf.optimizer.state.values()}


@contextlib.contextmanager
def _sparing_the_collector() -> Iterator[None]:
    """Megatron-core collects garbage on the way (distrib_optimizer.py), for those who have turned
    automatic collection off. That goes through every object there is, half of the time of a save;
    frozen ones are passed over.
    """
    if gc.get_freeze_count():  # the user's
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _unshare_steps(leaves: Sequence[Any]) -> None:
    """Megatron-core hands one step tensor to every parameter, and each would count it up."""
    seen: set[int] = set()
    for leaf in leaves:
        for state in leaf.optimizer.state.values():
            step = state.get("step")
            if isinstance(step, torch.Tensor):
                state["step"] = step.clone() if id(step) in seen else step
                seen.add(id(step))


@contextlib.contextmanager
def _told_apart(leaf: Any, saved: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The saved groups in the order of the live ones, so that Megatron-core pairs them so.

    Its own pairing looks at some traits only (0.16), so that two groups become one, or at all of
    them (0.19), so that a changed learning rate finds no partner. Meanwhile a number decides, in a
    key that both versions look at.
    """
    live = leaf.optimizer.param_groups
    found = _paired(leaf, saved)
    ours = [{key: group[key] for key in (*_KIND, *_TRAITS) if key in group} for group in live]
    for number, group in enumerate(live):
        group["lr_mult"] = number
    try:
        yield [
            {**then, **now, "lr_mult": number, **_parameters(saved, number)}
            for number, (then, now) in enumerate(zip(found, ours, strict=True))
        ]
    except BaseException:
        found = ours
        raise
    finally:
        for group, values in zip(leaf.optimizer.param_groups, found, strict=True):
            del group["lr_mult"]
            group.update(values)


def _parameters(saved: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """The numbers of a group's parameters, where they are part of the state: this process's own."""
    has = number < len(saved) and "params" in saved[number]
    return {"params": saved[number]["params"]} if has else {}


def _load(leaf: Any, part: dict[str, Any]) -> None:
    if not isinstance(leaf.optimizer, _ADAM):
        leaf.load_state_dict(part)
    elif isinstance(leaf, DistributedOptimizer):
        _load_distributed(leaf, part)
    else:
        state = _inner(part).setdefault("state", {})
        state.setdefault("common_step", torch.tensor(0.0))  # zero is not saved
        leaf.load_state_dict(part)


def _load_distributed(leaf: Any, part: dict[str, Any]) -> None:
    """In two calls: the one that takes the tensors stumbles over a step among them."""
    load = {
        "fully_reshardable": leaf.load_parameter_state_from_fully_reshardable,
        "dp_reshardable": leaf.load_parameter_state_from_dp_reshardable,
    }[part["param_state_sharding_type"]]
    leaf.load_state_dict({key: v for key, v in part.items() if not key.startswith("param_state")})
    states = list(leaf.optimizer.state.values())
    steps = [state.pop("step") for state in states]
    try:
        load(part["param_state"])
    finally:
        for state, step in zip(states, steps, strict=True):
            state["step"] = step


def _apart(value: Any) -> Any:
    """The same state with plain values copied, and its sharded tensors free of autograd."""
    if isinstance(value, dict):
        apart = {key: _apart(inner) for key, inner in value.items()}
        if isinstance(padding := value.get("padding"), LocalNonpersistentObject) and padding.obj:
            _clear(apart)
        return apart
    if isinstance(value, list):
        return [_apart(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, ShardedObject):
        value.data = _apart(value.data)
    elif isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None:
        value.data = value.data.detach()  # reading into a leaf of autograd is refused
    return value


def _clear(padding: Mapping[str, Any]) -> None:
    """Memory between the parameters of a bucket is saved too, and nobody has written there."""
    for piece in padding.values():
        if isinstance(piece, ShardedTensor) and piece.data is not None:
            piece.data.zero_()
