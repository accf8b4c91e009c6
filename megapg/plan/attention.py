"""Attention that keeps for the backward pass what FlashAttention keeps.

Megatron-core's local attention keeps the scores of all pairs of tokens. It does not take context
parallelism, nor the two head sizes of DeepSeek's latent attention. This one does, on every device.
It has no dropout.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from typing_extensions import override

from megapg.collection import ProcessGroupCollection


class FlashLikeAttention(MegatronModule):  # type: ignore[misc]  # Megatron-core is not typed
    """The core attention of a layer, causal.

    With context parallelism, a rank holds the pieces r and 2 * cp - 1 - r of the sequence. Keys and
    values are gathered, in the backward pass again (``cp_comm_type="all_gather"`` of
    TransformerEngine). A ring sends the same bytes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config)
        self._cp, self._scale = pg_collection.cp, softmax_scale

    @override
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> Tensor:
        """Attend. Tensors are (tokens, samples, heads, size)."""
        attend = functools.partial(_attend, self._cp, self._scale)
        result: Tensor = _Recomputed.apply(attend, query, key, value)  # type: ignore[no-untyped-call]
        return result


def _attend(cp: Any, scale: float | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = None
    if cp.size() > 1:
        mine, all_of_them = _positions(len(query), cp.size(), cp.rank(), query.device)
        mask = mine[:, None] >= all_of_them[None]
        key = gather_from_sequence_parallel_region(key.contiguous(), group=cp)
        value = gather_from_sequence_parallel_region(value.contiguous(), group=cp)
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
    found = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return found.permute(2, 0, 1, 3).flatten(2)


def _positions(length: int, size: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of a rank's tokens, and of all tokens in the order of the ranks."""
    pieces = torch.arange(length * size, device=device).view(2 * size, -1)
    order = [piece for each in range(size) for piece in (each, 2 * size - 1 - each)]
    return pieces[order[2 * rank : 2 * rank + 2]].flatten(), pieces[order].flatten()


class _Recomputed(torch.autograd.Function):
    """Computes the attention again in the backward pass."""

    @staticmethod
    @override
    def forward(ctx: Any, attend: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Tensor = attend(query, key, value)
        # FlashAttention keeps the logarithm of each sum of exponentials.
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.attend = attend
        ctx.save_for_backward(query, key, value, found, sums)
        return found

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors[:3]]
        # A caller that records what autograd keeps must not see the scores.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            found = ctx.attend(*inputs)
        return None, *torch.autograd.grad(found, inputs, gradients)


def _same(tensor: Tensor) -> Tensor:
    return tensor
