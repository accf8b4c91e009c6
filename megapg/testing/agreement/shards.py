"""Tensors of a model as a checkpoint describes them: which part of which whole.

Weights and gradients go through the model's own ``sharded_state_dict``, as for a checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint.state import model_state
from megapg.collection import ProcessGroupCollection
from megapg.testing.agreement.comparison import Shard

Place: TypeAlias = ShardedTensor | ShardedTensorFactory
Value: TypeAlias = Callable[[torch.nn.Parameter], torch.Tensor | None]


class Shards:
    """The description of a model's tensors, for values of any kind."""

    def __init__(self, chunks: Sequence[torch.nn.Module], pg: ProcessGroupCollection) -> None:
        metadata = optimizers.with_groups(optimizers.content_metadata(None), pg)
        state = model_state(chunks, metadata)
        plain = unwrap_model(list(chunks))
        prefixes = [f"chunk {number}: " if len(plain) > 1 else "" for number in range(len(plain))]
        names = {
            parameter: f"{prefix}{name}"
            for prefix, chunk in zip(prefixes, plain, strict=True)
            for name, parameter in chunk.named_parameters()
        }
        self._places: list[tuple[Place, str, torch.nn.Parameter | None]] = []
        owners: dict[int, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in names:
            owners[parameter.untyped_storage().data_ptr()].append(parameter)
        found = set()
        for leaf in nested_values(state):
            if not isinstance(leaf, ShardedTensor | ShardedTensorFactory):
                continue
            if not isinstance(leaf.data, torch.Tensor) or not leaf.data.is_floating_point():
                continue
            parameter = _owner(leaf.data, owners)
            found.add(parameter)
            name = leaf.key if parameter is None else names[parameter]
            self._places.append((leaf, name, parameter))
        self.undescribed = [name for parameter, name in names.items() if parameter not in found]

    def of(self, value: Value | None = None) -> list[Shard]:
        """Return the shards of each parameter's value. Default: of every tensor in the state."""
        return [*self._of(value)]

    def _of(self, value: Value | None) -> Iterator[Shard]:
        for place, name, parameter in self._places:
            data: torch.Tensor | None = place.data
            if value is not None:
                data = None if parameter is None else value(parameter)
                if data is not None and parameter is not None:
                    data = _same_part(data, place.data, parameter)
            if data is None:
                continue
            expert = parameter is not None and not getattr(parameter, "allreduce", True)
            for tensor in _built(place, data.detach()):
                extra = (1,) * tensor.prepend_axis_num
                yield Shard(
                    name,
                    tensor.key,
                    tuple(tensor.global_offset),
                    tuple(tensor.global_shape),
                    tensor.data.reshape(*extra, *tensor.data.shape).clone(),
                    expert,
                    tensor.allow_shape_mismatch,
                )


def _owner(
    data: torch.Tensor, owners: Mapping[int, Sequence[torch.nn.Parameter]]
) -> torch.nn.Parameter | None:
    """Return the parameter that contains a tensor."""
    for parameter in owners.get(data.untyped_storage().data_ptr(), ()):
        begin = data.storage_offset() - parameter.storage_offset()
        if data is parameter or (0 <= begin < parameter.numel() and data.numel()):
            return parameter
    return None


def _same_part(
    value: torch.Tensor, part: torch.Tensor, parameter: torch.nn.Parameter
) -> torch.Tensor:
    """Return the elements of ``value`` at the positions of ``part`` in ``parameter``."""
    if part.shape == parameter.shape:
        return value.view_as(part)
    begin = part.storage_offset() - parameter.storage_offset()
    value = value.contiguous()
    return value.as_strided(part.shape, part.stride(), value.storage_offset() + begin)


def _built(place: Place, data: torch.Tensor) -> Iterator[ShardedTensor]:
    if isinstance(place, ShardedTensor):
        yield replace(place, data=data)
        return
    for leaf in nested_values({"": replace(place, data=data).build()}):
        if isinstance(leaf, ShardedTensor):
            yield leaf
