"""The contents of a checkpoint: Megatron's state dict of model, optimizer, scheduler and the rest.

Names and nesting are those of ``generate_state_dict`` in ``megatron/training/checkpointing.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import utils

from megapg.checkpoint.planning import State
from megapg.collection import ProcessGroupCollection
from megapg.errors import (
    CheckpointError,
    CheckpointMismatchError,
    PublishedError,
    UnsupportedOptionError,
)
from megapg.megatron.embeddings import check_embeddings
from megapg.megatron.publish import published

CHECKPOINT_VERSION = 3.0

RANK_EXTRA = "megapg_rank_extra"
"""The key of each rank's own values. Its shards are numbered by the rank's place in its job."""

# Megatron's keys of the common state; all others are the user's.
KNOWN = frozenset(
    {
        *("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far"),
        *("model", "optimizer", "opt_param_scheduler", "lr_scheduler", "rng_state"),
        *("rerun_state_machine", "content_metadata", "common_state"),
    }
)


class Stateful(Protocol):
    """An object with a state dict, such as ``OptimizerParamScheduler`` of Megatron-core."""

    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


class MegatronOptimizer(Protocol):
    """The result of ``get_megatron_optimizer`` of Megatron-core."""

    def sharded_state_dict(self, *args: object, **kwargs: object) -> dict[str, object]: ...
    def reload_model_params(self) -> object: ...
    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


def model_state(
    chunks: Sequence[torch.nn.Module],
    metadata: Mapping[str, object],
    pg: ProcessGroupCollection | None = None,
) -> State:
    """Return the sharded state of the model's chunks: ``model``, or ``model0``, ``model1``, ...

    Megatron-core asks the globals about tied embeddings. They show ``pg`` meanwhile.
    """
    plain = utils.unwrap_model(list(chunks))
    with showing(pg):
        return {
            name: chunk.sharded_state_dict(metadata=dict(metadata))
            for name, chunk in zip(model_names(len(plain)), plain, strict=True)
        }


@contextlib.contextmanager
def showing(pg: ProcessGroupCollection | None) -> Iterator[None]:
    """Publish the groups inside the block; not if there are none, or another thread publishes."""
    with contextlib.ExitStack() as stack:
        if pg is not None:
            with contextlib.suppress(PublishedError, UnsupportedOptionError):
                stack.enter_context(published(pg))
        yield


def vocabularies_of(chunks: Sequence[torch.nn.Module]) -> set[int]:
    """Return the padded sizes of the vocabularies that the model names."""
    names = ("vocab_size", "num_embeddings")
    parts = [part for chunk in chunks for part in chunk.modules()]
    sizes = (getattr(part, name, None) for part in parts for name in names)
    return {size for size in sizes if isinstance(size, int)}


def load_model(chunks: Sequence[torch.nn.Module], state: State, *, strict: bool) -> None:
    """Load the state into the model's chunks."""
    plain = utils.unwrap_model(list(chunks))
    for name, chunk in zip(model_names(len(plain)), plain, strict=True):
        if name in state or strict:
            chunk.load_state_dict(state[name], strict=strict)


def model_names(count: int) -> list[str]:
    """Return the keys of ``count`` model chunks."""
    return ["model"] if count == 1 else [f"model{number}" for number in range(count)]


def prepare_parameters(optimizer: MegatronOptimizer | None) -> None:
    """Copy each rank's own shard of the new weights into place, if the optimizer has not yet."""
    prepare = getattr(optimizer, "prepare_model_params_for_param_sync", None)  # 0.19
    if prepare is not None:
        prepare()


def gather_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Gather the parameters now if the optimizer left that to the next forward pass."""
    for chunk in not_gathered(chunks):
        chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


def not_gathered(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the chunks with ``overlap_param_gather``.

    Until the next forward pass, a rank has only its own shard of their new weights.
    """
    configs = [getattr(chunk, "ddp_config", None) for chunk in chunks]
    late = [getattr(config, "overlap_param_gather", False) for config in configs]
    return [chunk for chunk, is_late in zip(chunks, late, strict=True) if is_late]


def chunks_of(model: Sequence[torch.nn.Module] | torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model's chunks, with their wrappers.

    Raises:
        CheckpointError: a chunk is not Megatron-core's.
    """
    chunks: list[torch.nn.Module] = []
    for chunk in model if isinstance(model, list | tuple) else (model,):
        if isinstance(chunk, torch.nn.Module) and hasattr(
            utils.unwrap_model([chunk])[0], "sharded_state_dict"
        ):
            chunks.append(chunk)
        else:
            raise CheckpointError(
                f"model: {type(chunk).__name__} has no sharded_state_dict; give the Megatron-core "
                "model, or the list of its chunks (virtual pipeline)."
            )
    if not chunks:
        raise CheckpointError("model: give at least one chunk.")
    return chunks


def check_groups(chunks: Sequence[torch.nn.Module], pg: ProcessGroupCollection) -> None:
    """Refuse groups that the model was not built with, or that leave out copies of its embedding.

    Raises:
        CheckpointError: names both groups.
        LayoutError: a stage has a copy of the embedding, and is not in the group for it.
    """
    for chunk in utils.unwrap_model(list(chunks)):
        for field in ("tp", "pp", "ep"):
            group = getattr(getattr(chunk, "pg_collection", None), field, None)
            if not isinstance(group, dist.ProcessGroup):
                continue
            built = tuple(dist.get_process_group_ranks(group))
            if built != pg.ranks(field):
                raise CheckpointError(
                    f"the model was built with {field} group {list(built)}, and pg_collection has "
                    f"{list(pg.ranks(field))}. Pass the collection that the model was built with."
                )
    check_embeddings(chunks)


def check_extra(extra: Mapping[str, object]) -> None:
    """Refuse names that Megatron uses.

    Raises:
        CheckpointError: names them.
    """
    taken = sorted(
        name
        for name in extra
        if name in KNOWN or is_model(name) or name.startswith(("rng_state", "rank_extra"))
    )
    if taken:
        raise CheckpointError(f"extra: Megatron uses {', '.join(taken)}; choose other names.")


def check_key(key: str) -> None:
    """Refuse a key of random streams that is unlike Megatron's: no reader would find it."""
    if "rng_state" not in key or "/" in key:
        raise CheckpointError(
            f"rng_key={key!r}: put a prefix before rng_state, or a module's name after it, as in "
            "'rng_state.critic'."
        )


def is_model(name: str) -> bool:
    """True if the key is that of a model chunk."""
    return name == "model" or (name.startswith("model") and name[5:].isdigit())


def scheduler_state(state: Mapping[str, object]) -> dict[str, object]:
    """Return the scheduler's state, under its present or its old name.

    Raises:
        CheckpointMismatchError: there is none.
    """
    for name in ("opt_param_scheduler", "lr_scheduler"):
        found = state.get(name)
        if isinstance(found, dict):
            return found
    raise CheckpointMismatchError(
        "the checkpoint has no scheduler state; pass scheduler=None to go on without it."
    )
