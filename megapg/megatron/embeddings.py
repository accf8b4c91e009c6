"""Check that the ranks of the embedding groups are those with a copy of the embedding.

A copy of the word embedding is on the first stage of a pipeline, on the last one if the output
layer has the same weights, and on the stage that predicts several tokens (MTP). Megatron-core adds
the gradients of the copies over the group ``embd``, and compares nothing: with another group, the
copies drift apart, or the weights of an output layer become part of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megapg.errors import LayoutError
from megapg.megatron.core import core_version

_CURE = (
    "Give the layout {setting}, a function from the ranks of a pipeline to those with a copy, such "
    "as {setting}=lambda pipeline: [pipeline[0], pipeline[1]], and build the model anew."
)
_PRE_PROCESS = (
    " Or this stage should have no embedding: build it with pre_process only on the first stage, "
    "and with post_process only on the last one."
)


def check_embeddings(model: torch.nn.Module | Sequence[torch.nn.Module]) -> None:
    """Refuse a model on whose rank an embedding group does not fit the embeddings.

    Looks at this rank only and sends nothing. Models without Megatron-core's ``LanguageModule``
    pass.

    Args:
        model: the model, or the list of its chunks, wrapped or not.

    Raises:
        LayoutError: this rank has a copy of an embedding, and the group leaves it out. Or the rank
            is in the group ``embd`` without a copy.
        UnsupportedVersionError: Megatron-core is not installed, or older than 0.16.
    """
    core_version()
    from megatron.core.models.common.language_module.language_module import LanguageModule

    chunks = [model] if isinstance(model, torch.nn.Module) else model
    found = [each for chunk in chunks for each in chunk.modules()]
    languages: list[Any] = [each for each in found if isinstance(each, LanguageModule)]
    for module in languages:
        pipeline = _ranks(module.pp_group)
        if len(pipeline) > 1:
            # The chunks of a virtual pipeline have the same groups.
            together = [each for each in languages if each.pp_group is module.pp_group]
            _check_words(module, together, pipeline)
            _check_positions(module, pipeline)


def _check_words(module: Any, together: Sequence[Any], pipeline: Sequence[int]) -> None:
    group = _ranks(module.embd_group)
    where = f"pipeline stage {pipeline.index(dist.get_rank())} (rank {dist.get_rank()})"
    cure = _CURE.format(setting="embedding_ranks")
    if any(map(_has_copy, together)):
        if pipeline[0] not in group:
            outside = f"has the ranks {group}" if group else "leaves the rank out"
            raise LayoutError(
                f"{where} has a copy of the word embedding, and its group embd {outside}: the "
                f"gradients of the copies would not be added. {cure}"
            )
    elif len(group) > 1 and any(map(_shares, together)):
        raise LayoutError(
            f"{where} is in the group embd, {group}, and has no copy of the word embedding: "
            f"Megatron-core would add other weights to it. {cure}"
        )


def _check_positions(module: Any, pipeline: Sequence[int]) -> None:
    positions = getattr(getattr(module, "embedding", None), "position_embeddings", None)
    group = getattr(getattr(module, "pg_collection", None), "pos_embd", None)
    if positions is not None and group is None and dist.get_rank() != pipeline[0]:
        raise LayoutError(
            f"pipeline stage {pipeline.index(dist.get_rank())} (rank {dist.get_rank()}) has a copy "
            "of the position embeddings, and its group pos_embd leaves the rank out. "
            f"{_CURE.format(setting='position_embedding_ranks')} Rotary positions need no copy."
            + _PRE_PROCESS
            * bool(getattr(module, "pre_process", False))
        )


def _shares(module: Any) -> bool:
    """True if stages of this model have copies of the word embedding."""
    tied = getattr(module, "share_embeddings_and_output_weights", False)
    return bool(tied or getattr(module.config, "mtp_num_layers", 0))


def _has_copy(module: Any) -> bool:
    tied = getattr(module, "share_embeddings_and_output_weights", False)
    first, last = (getattr(module, name, False) for name in ("pre_process", "post_process"))
    predicts = getattr(module, "mtp_process", False)
    return _shares(module) and bool(first or predicts or (last and tied))


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)
