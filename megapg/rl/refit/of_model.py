"""The slices of a model on this rank: Megatron-core's, a torch module's, or plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megapg.errors import RefitError
from megapg.rl.refit.slices import Slice, Slices, check_plain, dtype_name

if TYPE_CHECKING:
    import torch

    from megapg.collection import ProcessGroupCollection


def slices_of(
    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.Tensor],
    *,
    pg_collection: ProcessGroupCollection | None = None,
) -> Slices:
    """Return the slices of a model on this rank.

    For a Megatron-core model the slices are those of a checkpoint: they come from the model's own
    ``sharded_state_dict``. Every other module and every dict of tensors is taken as whole: this
    rank has all elements of each tensor, under the names of the module or dict.

    Args:
        model: a Megatron-core model, wrapped or not, or the list of its chunks; a torch module; or
            a dict of tensors.
        pg_collection: the groups that the Megatron-core model was built with.

    Returns:
        The slices, with views of the live tensors. The views follow a parameter that gets other
        memory, as when the model is wrapped. If the model was built anew, call this again.

    Raises:
        RefitError: a tensor can't be described, or the groups are missing.
        CheckpointError: the model was built with other groups.
        StaleGroupError: the groups are closed or suspended.
    """
    if isinstance(model, Mapping):
        return _whole(model)
    modules: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
    if not any(hasattr(_innermost(module), "sharded_state_dict") for module in modules):
        if len(modules) != 1 or not hasattr(modules[0], "state_dict"):
            raise RefitError(
                f"slices_of(): {type(model).__name__} is no Megatron-core model, torch module or "
                "dict of tensors."
            )
        seen = dict[int, str]()  # tied tensors count once, under their first name
        state = modules[0].state_dict(keep_vars=True)
        return _whole({k: v for k, v in state.items() if seen.setdefault(id(v), k) == k})
    if pg_collection is None:
        raise RefitError(
            "slices_of(): pass pg_collection, the groups that the Megatron-core model was built "
            "with."
        )
    from megapg.rl.refit.places import slices_of_model  # needs Megatron-core

    return slices_of_model(modules, pg_collection)


def _innermost(module: object) -> object:
    while hasattr(module, "module"):
        module = module.module
    return module


def _whole(tensors: Mapping[str, Any]) -> Slices:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    described = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            continue  # extra state of a module
        check_plain(name, tensor)
        described.append(
            Slice(
                name,
                tuple(tensor.shape),
                dtype_name(tensor),
                tensor.itemsize,
                (0,) * tensor.dim(),
                tuple(tensor.shape),
                (rank,),
                name,
            )
        )
    return Slices(tuple(described), tuple(_returning(tensors[each.name]) for each in described))


def _returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor.detach()
