"""A small Qwen2 for the engines of RL frameworks, and the attention that they expect."""

import torch

WORDS = 96


def write_qwen2(folder):
    """Write a Qwen2 with random weights, and its tokenizer. Return the folder."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{n}>": n for n in range(WORDS)}, unk_token="<0>"))
    special = {"unk_token": "<0>", "pad_token": "<1>", "eos_token": "<2>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return folder


def causal_attention():
    """Return Megatron-core's attention that ignores masks of paddings.

    Transformer Engine's causal attention ignores them, and the frameworks pass them in its format.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Causal(DotProductAttention):
        def forward(self, query, key, value, attention_mask, *args, **kwargs):
            return super().forward(query, key, value, None, *args, **kwargs)

    return Causal
