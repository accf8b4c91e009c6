"""Attention and RMSNorm that keep for the backward pass what fused kernels keep.

Megatron-core's local attention keeps the scores of all pairs of tokens. It does not take context
parallelism, nor the two head sizes of DeepSeek's latent attention. This one does, on every device.
It has no dropout. torch's RMSNorm keeps two float32 copies of its input, unless a CUDA kernel runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
        # FlashAttention keeps the result, and the logarithm of each sum of exponentials.
        return _recompute(attend, True, query.shape[:3], query, key, value)


class FusedLikeRMSNorm(torch.nn.RMSNorm):
    """Normalizes as Megatron-core's WrappedTorchNorm. It keeps the input and each row's scale."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        normalize = functools.partial(_normalize, self.normalized_shape, self.eps)
        return _recompute(normalize, False, x.shape[:-1], x, self.weight)


def _normalize(shape: tuple[int, ...], eps: float | None, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, shape, weight, eps)


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
    pieces = torch.arange(length * size, device=device).chunk(2 * size)
    order = [pieces[piece] for each in range(size) for piece in (each, 2 * size - 1 - each)]
    return torch.cat(order[2 * rank : 2 * rank + 2]), torch.cat(order)


def _recompute(
    compute: Callable[..., Tensor], keep_result: bool, statistics: Sequence[int], *inputs: Tensor
) -> Tensor:
    """Compute, and in the backward pass again. Keep the inputs and float32 statistics."""
    result: Tensor = _Recomputed.apply(compute, keep_result, statistics, *inputs)  # type: ignore[no-untyped-call]
    return result


class _Recomputed(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, compute: Any, keep_result: bool, statistics: Sequence[int], *inputs: Tensor
    ) -> Tensor:
        result: Tensor = compute(*inputs)
        kept = [result] if keep_result else []
        kept.append(inputs[0].new_empty(statistics, dtype=torch.float32))
        ctx.compute, ctx.count = compute, len(inputs)
        ctx.save_for_backward(*inputs, *kept)
        return result

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors[: ctx.count]]
        # A caller that records what autograd keeps must not see what a fused kernel has not.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_same, _same):
            result = ctx.compute(*inputs)
        return None, None, None, *torch.autograd.grad(result, inputs, gradients)


def _same(tensor: Tensor) -> Tensor:
    return tensor
