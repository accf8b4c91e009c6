"""The distributed optimizer's state, written by each rank in a form that any layout can load.

A rank holds a range of each flat parameter. Megatron-core's fully reshardable form is cut like the
parameters themselves. To write it, Megatron-core gathers the ranges on every rank. That stops
training, takes memory for the whole state, and is most of a save's time.

But a range of a tensor in row-major order is a handful of boxes: the rest of a row, some whole
rows, the beginning of another. A checkpoint consists of boxes, so each rank writes its own, and
nothing is gathered. Keys, global shapes and types are Megatron-core's. So any reader that asks for
parts of a tensor, such as Megatron-core's, finds them. Weights that are not gathered before the
next step are written in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megapg.checkpoint.planning import Item, State, shard
from megapg.checkpoint.step_count import STEP

Parameters: TypeAlias = Mapping[torch.Tensor, ShardedTensor | ShardedTensorFactory]


def parameters_of(model_state: State) -> Parameters:
    """Return each parameter's place in the checkpoint, from the sharded state of the model's
    chunks.
    """
    return {
        leaf.data: leaf
        for leaf in nested_values(model_state)
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory)
    }


def can_be_cut(leaf: Any, parameters: Parameters) -> bool:
    """True if the state of this optimizer can be written in pieces: the same on all its ranks.

    False if a parameter is stored otherwise in the optimizer's buffer than in the model (packed
    NVFP4), or goes through a factory that does more than cut it.
    """
    if type(leaf) is not DistributedOptimizer or leaf.ddp_config.use_megatron_fsdp:
        return False
    return all(
        parameter in parameters
        and end - start == parameter.numel()
        and _tensors(parameters[parameter]) is not None
        for buffer in leaf.buffers
        for parameter, (start, end, *_) in buffer.param_index_map.items()
    )


def pieces_of(leaf: Any, parameters: Parameters) -> Iterator[Item]:
    """Yield the entries of the optimizer's state that this rank writes: views of live tensors."""
    for parameter, start, end in _written(leaf, parameters):
        states = {_prefix(name): state for name, state in _states(leaf, parameter).items()}
        yield from items_of(parameters[parameter], states, start, end)


@dataclass(frozen=True)
class Weights:
    """The weights of a model, of which each rank writes those in its optimizers."""

    items: list[Item]  # entries that this rank writes
    keys: frozenset[str]  # keys that some rank must write, as far as this rank reports them
    rest: State  # the model's state without them


def weights_of(leaves: Sequence[Any], chunks: Sequence[Any], model_state: State) -> Weights | None:
    """Return the weights that this rank writes from its optimizers, and the rest of the model.

    These weights are up to date before they are gathered for the next step. Return None if a save
    has to gather them: a weight is in no optimizer that can be cut, is no plain tensor with
    elements, or may share its memory with other state of the model. All ranks with the same weights
    come to the same answer.
    """
    if not leaves or not all(type(leaf) is DistributedOptimizer for leaf in leaves):
        return None
    held = {p for leaf in leaves for buffer in leaf.buffers for p in buffer.param_index_map}
    buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    if not all(parameter in held for buffer in buffers for parameter in buffer.params):
        return None
    if not all(type(p) is torch.nn.Parameter and p.is_contiguous() and p.numel() for p in held):
        return None
    parameters = parameters_of(model_state)
    if not all(can_be_cut(leaf, parameters) for leaf in leaves):
        return None
    places = {id(parameters[parameter]) for parameter in held}
    _, rest = extract_matching_values(model_state, lambda leaf: id(leaf) in places)
    memory = {_memory(parameter) for parameter in held}
    for other in (getattr(leaf, "data", None) for leaf in nested_values(rest)):
        if isinstance(other, torch.Tensor) and (
            type(other) not in (torch.Tensor, torch.nn.Parameter) or _memory(other) in memory
        ):
            return None
    items, keys = list[Item](), set[str]()
    for parameter in held:
        place = parameters[parameter]
        if is_main_replica(place.replica_id):
            keys |= {tensor.key for tensor, _ in _tensors(place) or ()}
    for leaf in leaves:
        for parameter, start, end in _written(leaf, parameters):
            elements = parameter.detach().view(-1)[start:end]
            items += items_of(parameters[parameter], {"": elements}, start, end)
    return Weights(items, frozenset(keys), rest)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def items_of(
    place: ShardedTensor | ShardedTensorFactory,
    states: Mapping[str, torch.Tensor],
    start: int,
    end: int,
) -> Iterator[Item]:
    """Yield the entries of elements ``start`` to before ``end`` of the flat parameter.

    ``states``: prefix of the parameter's key -> the tensor of these elements.
    """
    for tensor, offset, view in _cut(place, start, end):
        where = _global(tensor, offset)
        for prefix, state in states.items():
            data = view(state)[(None,) * tensor.prepend_axis_num]
            yield shard(prefix + tensor.key, tensor.global_shape, where, data)


def places_of(leaf: Any, parameters: Parameters) -> dict[str, object]:
    """Return the parts of the optimizer's state that this rank reads, into live tensors if
    possible.

    Returns:
        A sharded state. After the read, its :class:`Held` copies the other tensors into place.
    """
    held: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    places = []
    for parameter, start, end in _ranges(leaf):
        held[parameter] = _states(leaf, parameter)
        for tensor, offset, view in _cut(parameters[parameter], start, end):
            for name, state in held[parameter].items():
                data = view(state)
                place = replace(
                    tensor,
                    key=_prefix(name) + tensor.key,
                    data=data,
                    dtype=data.dtype,
                    local_shape=tuple(data.shape),
                    global_offset=_global(tensor, offset),
                    axis_fragmentations=None,  # not a regular grid
                )
                places.append(place)
    return {"places": places, "held": LocalNonpersistentObject(Held(held))}


@dataclass(frozen=True)
class Held:
    """The tensors that were read into: parameter -> name -> tensor."""

    tensors: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]

    def put(self, leaf: Any) -> None:
        """Give the optimizer those tensors that are not its own."""
        for parameter, tensors in self.tensors.items():
            live = leaf._get_main_param_and_optimizer_states(parameter)
            if all(live[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items()):
                continue
            new = dict(tensors)
            if live["param"].dtype == torch.int16:
                part = _part_of(leaf, parameter)
                put_master(leaf.optimizer, part, new["param"])
                new["param"] = leaf.optimizer.state[part]["master_param"]
            leaf._set_main_param_and_optimizer_states(parameter, new)


def _written(leaf: Any, parameters: Parameters) -> Iterator[tuple[torch.Tensor, int, int]]:
    """As :func:`_ranges`, without the ranges that another rank also writes."""
    if leaf.distributed_optimizer_instance_id:
        return
    for parameter, start, end in _ranges(leaf):
        replica = parameters[parameter].replica_id
        if not (isinstance(replica, tuple) and any(replica[:-1])):
            yield parameter, start, end


def _ranges(leaf: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield each parameter that this rank has a part of, with the start and end of that part."""
    for ranges_of_buffer in leaf.gbuf_ranges:
        for buckets in ranges_of_buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _states(leaf: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return this rank's part of a parameter and of its state, in 32 bits as on disk."""
    states = leaf._get_main_param_and_optimizer_states(parameter)
    if states["param"].dtype == torch.int16:
        high = _part_of(leaf, parameter).detach().view(torch.int16).int()
        low = states["param"].int()
        bits = (high - (low < 0).int() << 16) | (low & 0xFFFF)
        states["param"] = bits.view(torch.float32)
    return {name: state.detach().float() for name, state in states.items() if name != STEP}


def _part_of(leaf: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, as the optimizer inside has it."""
    group, place = leaf.model_param_group_index_map[parameter]
    part: torch.Tensor = leaf.optimizer.param_groups[group]["params"][place]
    return part


def put_master(inner: Any, parameter: torch.Tensor, weights: torch.Tensor) -> None:
    """Give Transformer Engine's optimizer the master weights (float32) of a parameter.

    With ``store_param_remainders``, it holds the lower 16 bits of a bfloat16 parameter's. The
    parameter has the upper ones, rounded up if the lower ones are a negative number.
    """
    if inner.state[parameter]["master_param"].dtype != torch.int16:
        inner.set_scaled_state(parameter, "master_param", weights)
        return
    low, high = weights.contiguous().view(torch.int16).view(*weights.shape, 2).unbind(-1)
    inner.set_scaled_state(parameter, "master_param", low.contiguous())
    rounded = (high.int() + (low < 0).int()).to(torch.int16)
    parameter.detach().copy_(rounded.view(torch.bfloat16))


def tensors_of(place: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the tensors that a parameter becomes on disk."""
    return [place] if isinstance(place, ShardedTensor) else [*nested_values({"": place.build()})]


def _tensors(place: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]] | None:
    """Return the tensors that a parameter becomes on disk, each with its offset in the parameter.

    None if they are no views of it.
    """
    if isinstance(place, ShardedTensor):
        return [(place, 0)] if place.data.is_contiguous() else None
    whole = place.data.detach()
    if not whole.is_contiguous():
        return None
    found = []
    for leaf in nested_values({"": replace(place, data=whole).build()}):
        data = leaf.data
        strides = data.stride()
        if (
            not leaf.key.startswith(place.key)
            or data.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
            or data.dtype != whole.dtype
            or list(strides) != sorted(strides, reverse=True)
        ):
            return None
        found.append((leaf, data.storage_offset() - whole.storage_offset()))
    return found


def _cut(
    place: ShardedTensor | ShardedTensorFactory, start: int, end: int
) -> Iterator[tuple[ShardedTensor, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]]:
    """Yield the boxes that elements ``start`` to before ``end`` of the flat parameter make.

    The third value makes a view of the box from a tensor of these elements.
    """
    for tensor, begin in _tensors(place) or ():
        shape, strides = tensor.local_shape, tensor.data.stride()
        first, last = (_before(at - begin, shape, strides) for at in (start, end))
        for offset, size in boxes(shape, first, last):
            at = sum(o * stride for o, stride in zip(offset, strides, strict=True))
            yield tensor, offset, partial(_view, size, strides, begin + at - start)


def _view(
    size: Sequence[int], strides: Sequence[int], at: int, elements: torch.Tensor
) -> torch.Tensor:
    return elements.as_strided(size, strides, elements.storage_offset() + at)


def _prefix(name: str) -> str:
    return f"optimizer.state.{name}."


def _global(tensor: ShardedTensor, offset: Sequence[int]) -> tuple[int, ...]:
    inside = (*(0 for _ in range(tensor.prepend_axis_num)), *offset)
    return tuple(whole + own for whole, own in zip(tensor.global_offset, inside, strict=True))


def boxes(
    shape: Sequence[int], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and size of the boxes of elements ``first`` to before ``last``, in row-major
    order.
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    (begin, before), (end, beyond) = divmod(first, row), divmod(last, row)
    if begin == end:
        yield from _in_row(shape, begin, before, beyond)
        return
    if before:
        yield from _in_row(shape, begin, before, row)
        begin += 1
    if begin < end:
        yield (begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:])
    if beyond:
        yield from _in_row(shape, end, 0, beyond)


def _in_row(
    shape: Sequence[int], row: int, first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in boxes(shape[1:], first, last):
        yield (row, *offset), (1, *size)


def _before(at: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of a view lie before this offset in the memory of the view."""
    count = 0
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        rest = math.prod(shape[axis + 1 :])
        last_axis = axis == len(shape) - 1
        rows = min(max(-(-at // stride) if last_axis else at // stride, 0), size)
        count += rows * rest
        if rows == size or last_axis:
            return count
        at -= rows * stride
    return count if shape else int(at > 0)
