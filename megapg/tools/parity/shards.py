"""Tensors of a model as a checkpoint describes them: which part of which whole.

Weights and gradients go through the model's own ``sharded_state_dict``, as for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from megapg.collection import ProcessGroupCollection
from megapg.rl.refit.places import places_of
from megapg.tools.parity.comparison import Shard

Value: TypeAlias = Callable[[torch.nn.Parameter], torch.Tensor | None]


class Shards:
    """The description of a model's tensors, for values of any kind."""

    def __init__(self, chunks: Sequence[torch.nn.Module], pg: ProcessGroupCollection) -> None:
        found = places_of(chunks, pg)
        self._places = [each for each in found.places if each.leaf.data.is_floating_point()]
        self.undescribed = found.undescribed

    def of(self, value: Value | None = None) -> list[Shard]:
        """Return the shards of each parameter's value. Default: of every tensor in the state."""
        return [*self._of(value)]

    def _of(self, value: Value | None) -> Iterator[Shard]:
        for place in self._places:
            parameter = place.parameter
            data: torch.Tensor | None = place.leaf.data
            if value is not None:
                data = None if parameter is None else value(parameter)
                if data is not None and parameter is not None:
                    data = _same_part(data, place.leaf.data, parameter)
            if data is None:
                continue
            expert = parameter is not None and not getattr(parameter, "allreduce", True)
            for tensor in place.cut(data.detach()):
                extra = (1,) * tensor.prepend_axis_num
                yield Shard(
                    place.name,
                    tensor.key,
                    tuple(tensor.global_offset),
                    tuple(tensor.global_shape),
                    tensor.data.reshape(*extra, *tensor.data.shape).clone(),
                    expert,
                    tensor.allow_shape_mismatch,
                )


def _same_part(
    value: torch.Tensor, part: torch.Tensor, parameter: torch.nn.Parameter
) -> torch.Tensor:
    """Return the elements of ``value`` at the positions of ``part`` in ``parameter``."""
    if part.shape == parameter.shape:
        return value.view_as(part)
    begin = part.storage_offset() - parameter.storage_offset()
    value = value.contiguous()
    return value.as_strided(part.shape, part.stride(), value.storage_offset() + begin)
