"""A training script in the style of Megatron-LM and its forks, on artificial data."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args


def datasets(samples, vp_stage=None):
    """Return a training set, and none for validation and test."""
    args = get_args()
    words = torch.randint(args.vocab_size, (64, args.seq_length + 1), generator=torch.Generator())
    return [sample(row) for row in words], None, None


def sample(words):
    length = len(words) - 1
    return {
        "tokens": words[:-1],
        "labels": words[1:],
        "loss_mask": torch.ones(length),
        "position_ids": torch.arange(length),
        "attention_mask": torch.ones(1, length, length).triu(1).bool(),
    }


def loss_of(mask, losses):
    total = torch.sum(losses.view(-1).float() * mask.view(-1))
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data, model):
    batch = next(data)
    # Each rank of a tensor parallel group trains on the data that its first rank has read.
    for tensor in batch.values():
        source = mpu.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(tensor, source, group=mpu.get_tensor_model_parallel_group())
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(loss_of, batch["loss_mask"])


def get_embedding_ranks(pp_ranks):
    """Return the stages with embeddings: the last one only if its weights are tied."""
    args = get_args()
    tied = [] if args.untie_embeddings_and_output_weights else [pp_ranks[-1]]
    heads = get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))
    return sorted({pp_ranks[0], *tied, *heads})


if __name__ == "__main__":
    datasets.is_distributed = True
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        config,
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        get_embedding_ranks=get_embedding_ranks,
    )
