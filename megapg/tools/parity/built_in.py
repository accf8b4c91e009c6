"""Built-in models, and the default batches and step."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.transformer import TransformerConfig

from megapg.collection import ProcessGroupCollection
from megapg.tools.parity.comparison import SEED, Batch, Job, Sample

VOCABULARY = 64
SEQ_LENGTH = 16
_LAYERS, _HIDDEN, _HEADS = 4, 32, 4


def gpt(
    pg: ProcessGroupCollection,
    vp_stage: int | None = None,
    *,
    tied: bool = True,
    mtp: int = 0,
    experts: int = 0,
    qk_layernorm: bool = False,
    positions: str = "rope",
    parallel_output: bool = True,
    **config: Any,
) -> GPTModel:
    """A GPT of four layers; ``config`` has fields of Megatron-core's TransformerConfig."""
    layout = pg.layout
    vpp = None if layout is None else layout.vpp
    if mtp:
        config["mtp_num_layers"] = mtp
    if experts:
        config["num_moe_experts"] = experts
    if qk_layernorm:
        config["qk_layernorm"] = True
    made = TransformerConfig(
        **{"num_layers": _LAYERS, "hidden_size": _HIDDEN, "num_attention_heads": _HEADS, **config},
        tensor_model_parallel_size=pg.size("tp"),
        pipeline_model_parallel_size=pg.size("pp"),
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=pg.size("cp"),
        expert_model_parallel_size=pg.size("ep"),
        expert_tensor_parallel_size=pg.size("expt_tp"),
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
    )
    layers = get_gpt_layer_local_spec(num_experts=experts or None, qk_layernorm=qk_layernorm)
    first, last = pg.rank("pp") == 0, pg.rank("pp") == pg.size("pp") - 1
    stage = vp_stage or 0
    return GPTModel(
        made,
        layers,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LENGTH,
        pre_process=first and stage == 0,
        post_process=last and stage == (vpp or 1) - 1,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=positions,
        parallel_output=parallel_output,
        mtp_block_spec=get_gpt_mtp_block_spec(
            made, layers, use_transformer_engine=False, vp_stage=vp_stage, pp_rank=pg.rank("pp")
        )
        if mtp
        else None,
        pg_collection=pg,
        vp_stage=vp_stage,
    )


def moe(
    pg: ProcessGroupCollection,
    vp_stage: int | None = None,
    *,
    dispatcher: str = "allgather",
    **config: Any,
) -> GPTModel:
    """A GPT with four experts in every layer; ``dispatcher`` brings tokens to them."""
    more = {
        "experts": 4,
        "add_bias_linear": False,  # Megatron-core refuses it with tensor-parallel experts
        "sequence_parallel": pg.size("tp") > 1,  # and demands this there
        "moe_token_dispatcher_type": dispatcher,
        "moe_router_load_balancing_type": "none",
        **config,
    }
    return gpt(pg, vp_stage, **more)


def t5(pg: ProcessGroupCollection, **config: Any) -> T5Model:
    """A T5 of two encoder and two decoder layers."""
    layers = _LAYERS // 2
    made = TransformerConfig(
        num_layers=layers,
        hidden_size=_HIDDEN,
        num_attention_heads=_HEADS,
        tensor_model_parallel_size=pg.size("tp"),
        pipeline_dtype=torch.float32,
        masked_softmax_fusion=False,
        **config,
    )
    return T5Model(
        made,
        made,
        get_t5_encoder_with_local_block_spec(layers),
        get_t5_decoder_with_local_block_spec(layers),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=True,
        pg_collection=pg,
    )


def next_token(model: torch.nn.Module, batch: Batch, pg: ProcessGroupCollection) -> torch.Tensor:
    """Return the loss of every next token, as GPTModel computes it."""
    output: torch.Tensor = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return output


def t5_step(model: torch.nn.Module, batch: Batch, pg: ProcessGroupCollection) -> torch.Tensor:
    """Return the loss of a T5 that reads tokens and writes them shifted by one."""
    length = batch["tokens"].shape[1]
    seen = torch.zeros(1, 1, length, length, dtype=torch.bool)  # True: hidden
    later = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    output: torch.Tensor = model(
        batch["tokens"], batch["labels"], seen, later, seen, lm_labels=batch["tokens"]
    )
    return output


def random_tokens(
    job: Job, chunk: torch.nn.Module, pg: ProcessGroupCollection
) -> tuple[int, Sample]:
    """Return the length of a sample and the function that makes it. Default: random tokens."""
    limit = getattr(chunk, "max_sequence_length", SEQ_LENGTH)
    length = job.seq_length or min(SEQ_LENGTH, limit)
    vocabulary = job.vocab_size or getattr(chunk, "vocab_size", VOCABULARY)

    def sample(number: int) -> Batch:
        generator = torch.Generator().manual_seed(SEED + number)
        tokens = torch.randint(vocabulary, (1, length + 1), generator=generator)
        whole = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "positions": torch.arange(length)[None],
        }
        return {name: _of_this_rank(tensor, pg) for name, tensor in whole.items()}

    return length, job.sample or sample


def _of_this_rank(tensor: torch.Tensor, pg: ProcessGroupCollection) -> torch.Tensor:
    """Return the rank's two pieces of the sequence, cut for context parallelism."""
    size, rank = pg.size("cp"), pg.rank("cp")
    pieces = tensor.chunk(2 * size, dim=1)
    return torch.cat((pieces[rank], pieces[-1 - rank]), dim=1) if size > 1 else tensor.contiguous()
