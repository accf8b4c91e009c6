"""Build a published model from the numbers of its file. It needs torch and Megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megapg.collection import ProcessGroupCollection
from megapg.errors import PlanError
from megapg.tools.plan.fused import FlashLikeAttention, FusedLikeRMSNorm
from megapg.tools.plan.training import Job

_RECOMPUTE: Mapping[str, Mapping[str, object]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
# Every expert gets its equal part of the tokens, so that no shape depends on their values.
_BALANCED = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}


def build(
    numbers: Mapping[str, Any], pg: ProcessGroupCollection, vp_stage: int | None, job: Job
) -> GPTModel:
    """Build a rank's chunk, with parameters of bfloat16.

    Args:
        numbers: the content of a file of ``architectures``.
        pg: the rank's groups.
        vp_stage: the virtual pipeline stage, if there are any.
        job: what is trained.

    Raises:
        PlanError: the layers cannot be divided among the stages, or the tokens among the ranks.
    """
    config, cp = _config(numbers, pg, job), pg.size("cp")
    pieces = pg.size("tp") * (2 * cp if cp > 1 else 1)
    if job.seq_length % pieces:
        raise PlanError(
            f"{job.seq_length} tokens cannot be divided into {pieces} pieces, for tp="
            f"{pg.size('tp')} and cp={cp}. Choose other sizes, or another --seq-length."
        )
    vpp = config.virtual_pipeline_model_parallel_size or 1
    place = {"vp_stage": vp_stage, "pp_rank": pg.rank("pp")}
    layers = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, **place
    )
    _fuse(layers, config)
    first, last = pg.rank("pp") == 0, pg.rank("pp") == pg.size("pp") - 1
    made = dict(numbers["model"])
    unit = 128 * pg.size("tp")
    made["vocab_size"] = -(-made["vocab_size"] // unit) * unit  # as megatron.training pads it
    model = GPTModel(
        config,
        layers,
        max_sequence_length=job.seq_length,
        pre_process=first and not vp_stage,
        post_process=last and (vp_stage or 0) == vpp - 1,
        pg_collection=pg,
        vp_stage=vp_stage,
        **made,
    )
    return model.bfloat16()


def _fuse(layers: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put modules that keep as much as fused kernels into the layers."""
    parts: list[Any] = [layers]
    for layer in layers.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = FlashLikeAttention
        parts += [layer.submodules, attention]
    for part in parts if config.normalization == "RMSNorm" else []:
        norms = [name for name, module in vars(part).items() if module is WrappedTorchNorm]
        vars(part).update(dict.fromkeys(norms, FusedLikeRMSNorm))


def _config(numbers: Mapping[str, Any], pg: ProcessGroupCollection, job: Job) -> TransformerConfig:
    """Return Megatron-core's configuration for a rank's groups."""
    given = dict(numbers["config"])
    activation = given.get("activation_func", "gelu")
    given["activation_func"] = getattr(F, activation)
    if experts := given.get("num_moe_experts"):
        if experts % pg.size("ep"):
            raise PlanError(f"{experts} experts cannot be divided among ep={pg.size('ep')}.")
        dense = numbers.get("first_dense_layers", 0)
        given["moe_layer_freq"] = [0] * dense + [1] * (given["num_layers"] - dense)
        given |= _BALANCED
        given["expert_model_parallel_size"] = pg.size("ep")
        given["expert_tensor_parallel_size"] = pg.size("expt_tp")
    vpp = pg.layout.vpp if pg.layout is not None else None
    kind = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    return kind(
        **given,
        **_RECOMPUTE[job.recompute],
        **split(given["num_layers"], pg.size("pp"), vpp or 1, numbers.get("split", "")),
        tensor_model_parallel_size=pg.size("tp"),
        sequence_parallel=pg.size("tp") > 1,
        pipeline_model_parallel_size=pg.size("pp"),
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=pg.size("cp"),
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,  # on the device of the caller
        masked_softmax_fusion=False,
        bias_activation_fusion=activation in ("gelu", "silu"),
        bias_dropout_fusion=True,
        transformer_impl="local",
    )


def split(layers: int, pp: int, vpp: int, how: str) -> dict[str, object]:
    """Divide the layers among the chunks of all stages."""
    chunks = pp * vpp
    if layers % chunks == 0:
        return {}
    if how == "ends count as layers" and (layers + 2) % chunks == 0:
        names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        return dict.fromkeys(names, True)
    each = -(-layers // chunks)
    lacking = each * chunks - layers
    if how == "rest in last stage" and lacking <= 2 * each - 1:
        # The last chunk has fewer layers. If it has none, the first chunk has fewer, too.
        first, last = each - max(0, lacking - each), max(0, each - lacking)
        middle = [["decoder"] * each] * (chunks - 2)
        ends = ["embedding"] + ["decoder"] * first, ["decoder"] * last + ["loss"]
        return {"pipeline_model_parallel_layout": [ends[0], *middle, ends[1]]}
    extra = 2 if how == "ends count as layers" else 0
    fits = [n for n in range(1, layers + 1) if layers % n == 0 or (layers + extra) % n == 0]
    raise PlanError(
        f"{layers} layers cannot be divided among pp={pp} x vpp={vpp} = {chunks} chunks. Choose "
        f"pp and vpp whose product is one of {', '.join(map(str, fits))}."
    )
