"""Tensors of a Megatron-core model as a checkpoint describes them: which part of which whole.

Every tensor goes through the model's own ``sharded_state_dict``, as for a checkpoint. Parity reads
weights and gradients through these places as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint import state as states
from megapg.collection import ProcessGroupCollection
from megapg.errors import RefitError
from megapg.rl.refit.slices import Slice, Slices, check_plain, dtype_name


@dataclass(frozen=True)
class Place:
    """One tensor of the model's state.

    Attributes:
        leaf: Megatron-core's description of the tensor.
        parameter: the parameter that contains the tensor; None: a buffer.
        name: name of the parameter on this rank. A tensor that is no parameter has its key.
    """

    leaf: ShardedTensor | ShardedTensorFactory
    parameter: torch.nn.Parameter | None
    name: str

    def cut(self, data: torch.Tensor) -> Iterator[ShardedTensor]:
        """Yield the parts of the wholes that ``data``, shaped as the tensor, stands for."""
        if isinstance(self.leaf, ShardedTensor):
            yield replace(self.leaf, data=data)
            return
        for part in nested_values({"": replace(self.leaf, data=data).build()}):
            if isinstance(part, ShardedTensor):
                yield part


@dataclass(frozen=True)
class Places:
    """The tensors of a model's state, and the parameters that it leaves out."""

    places: tuple[Place, ...]
    undescribed: tuple[str, ...]


def places_of(chunks: Sequence[torch.nn.Module], pg: ProcessGroupCollection) -> Places:
    """Return the places of all tensors of the model's chunks."""
    metadata = optimizers.with_groups(optimizers.content_metadata(None), pg)
    state = states.model_state(chunks, metadata, pg)
    plain = unwrap_model(list(chunks))
    prefixes = [f"chunk {number}: " if len(plain) > 1 else "" for number in range(len(plain))]
    names = {
        parameter: f"{prefix}{name}"
        for prefix, chunk in zip(prefixes, plain, strict=True)
        for name, parameter in chunk.named_parameters()
    }
    owners: dict[int, list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in names:
        owners[parameter.untyped_storage().data_ptr()].append(parameter)
    places = []
    for leaf in nested_values(state):
        if isinstance(leaf, ShardedTensor | ShardedTensorFactory) and isinstance(
            leaf.data, torch.Tensor
        ):
            owner = _owner(leaf.data, owners)
            places.append(Place(leaf, owner, leaf.key if owner is None else names[owner]))
    found = {place.parameter for place in places}
    return Places(tuple(places), tuple(name for each, name in names.items() if each not in found))


def _owner(
    data: torch.Tensor, owners: Mapping[int, Sequence[torch.nn.Parameter]]
) -> torch.nn.Parameter | None:
    """Return the parameter that contains a tensor."""
    for parameter in owners.get(data.untyped_storage().data_ptr(), ()):
        begin = data.storage_offset() - parameter.storage_offset()
        if data is parameter or (0 <= begin < parameter.numel() and data.numel()):
            return parameter
    return None


def slices_of_model(
    chunks: Sequence[torch.nn.Module], pg_collection: ProcessGroupCollection
) -> Slices:
    """Return the slices of a Megatron-core model. See :func:`megapg.slices_of`."""
    chunks = states.chunks_of(chunks)
    pg_collection.require("tp", "pp")
    states.check_groups(chunks, pg_collection)
    found = places_of(chunks, pg_collection)
    if found.undescribed:
        raise RefitError(
            f"slices_of(): sharded_state_dict of the model leaves out "
            f"{', '.join(found.undescribed[:3])}. Add them there: a checkpoint needs them, too."
        )
    described, live = list[Slice](), list[Callable[[], torch.Tensor]]()
    for place in found.places:
        owner = place.leaf.data if place.parameter is None else place.parameter
        check_plain(place.name, owner)
        for part in place.cut(place.leaf.data.detach()):
            described.append(_described(place, part))
            live.append(_view(place, part, owner))
    return Slices(tuple(described), tuple(live), partial(states.gather_parameters, chunks))


def _described(place: Place, part: ShardedTensor) -> Slice:
    replica = part.replica_id
    return Slice(
        part.key,
        tuple(part.global_shape),
        dtype_name(part.data),
        part.data.itemsize,
        tuple(part.global_offset),
        (1,) * part.prepend_axis_num + tuple(part.local_shape),
        tuple(replica) if isinstance(replica, tuple) else (replica,),
        place.name,
        part.allow_shape_mismatch,
    )


def _view(place: Place, part: ShardedTensor, owner: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that makes the part's view of ``owner``, wherever its memory is then."""
    data = part.data
    same = data.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
    if not same or data.dtype != owner.dtype:
        raise RefitError(
            f"slices_of(): sharded_state_dict copies {place.name} instead of cutting it. A refit "
            "reads and writes the parameters themselves."
        )
    begin = data.storage_offset() - owner.storage_offset()
    layout = owner.stride()
    size = (1,) * part.prepend_axis_num + tuple(data.shape)
    strides = (0,) * part.prepend_axis_num + data.stride()

    def view() -> torch.Tensor:
        now = owner.detach()
        if now.stride() != layout:
            raise RefitError(
                f"{place.name} has other strides than when slices_of() saw it. Call slices_of() "
                "again, and make a new Refit."
            )
        return now.as_strided(size, strides, now.storage_offset() + begin)

    return view
