"""The names of Llama in Hugging Face's transformers, as parts of a Megatron-core GPT's tensors."""

from __future__ import annotations

from collections.abc import Iterator

from megapg.rl.refit.moves import Names, Part

_LAYERS = "decoder.layers"
_ATTENTION = f"{_LAYERS}.self_attention"


def llama_names(
    *,
    layers: int,
    hidden: int,
    heads: int,
    query_groups: int,
    intermediate: int,
    vocabulary: int,
    head_dim: int | None = None,
) -> Names:
    """Return ``names`` of :class:`megapg.Refit` for a target like Hugging Face's Llama.

    The source is a Megatron-core GPT with SwiGLU, RMSNorm, rotary positions and grouped queries.
    Biases of the queries, keys and values (Qwen2), and norms of queries and keys (Qwen3), are
    named as well. The arguments are the values in Hugging Face's ``config.json``.

    Args:
        layers: ``num_hidden_layers``.
        hidden: ``hidden_size``.
        heads: ``num_attention_heads``.
        query_groups: ``num_key_value_heads``.
        intermediate: ``intermediate_size``.
        vocabulary: ``vocab_size``, without padding.
        head_dim: ``head_dim``. Default: ``hidden_size // num_attention_heads``, as for Qwen2, whose
            ``config.json`` has no ``head_dim``.
    """
    head_dim = head_dim or hidden // heads
    embedding = (vocabulary, hidden)
    names: dict[str, str | list[Part]] = {
        "model.embed_tokens.weight": [
            Part("embedding.word_embeddings.weight", (0, 0), (0, 0), embedding)
        ],
        "lm_head.weight": [Part("output_layer.weight", (0, 0), (0, 0), embedding)],
        "model.norm.weight": "decoder.final_layernorm.weight",
    }
    queries = heads * head_dim
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        names |= {
            name: [Part(source, (layer, *(0 for _ in shape)), tuple(0 for _ in shape), shape)]
            for name, source, shape in (
                (
                    f"{prefix}input_layernorm.weight",
                    f"{_ATTENTION}.linear_qkv.layer_norm_weight",
                    (hidden,),
                ),
                (f"{attention}q_norm.weight", f"{_ATTENTION}.q_layernorm.weight", (head_dim,)),
                (f"{attention}k_norm.weight", f"{_ATTENTION}.k_layernorm.weight", (head_dim,)),
                (
                    f"{attention}o_proj.weight",
                    f"{_ATTENTION}.linear_proj.weight",
                    (hidden, queries),
                ),
                (
                    f"{prefix}post_attention_layernorm.weight",
                    f"{_LAYERS}.mlp.linear_fc1.layer_norm_weight",
                    (hidden,),
                ),
                (
                    f"{prefix}mlp.down_proj.weight",
                    f"{_LAYERS}.mlp.linear_fc2.weight",
                    (hidden, intermediate),
                ),
            )
        }
        for number, half in enumerate(("gate", "up")):
            names[f"{prefix}mlp.{half}_proj.weight"] = [
                Part(
                    f"{_LAYERS}.mlp.linear_fc1.weight",
                    (layer, number * intermediate, 0),
                    (0, 0),
                    (intermediate, hidden),
                )
            ]
        for letter in "qkv":
            rows = [*_rows(letter, heads // query_groups, query_groups, head_dim)]
            source = f"{_ATTENTION}.linear_qkv"
            names[f"{attention}{letter}_proj.weight"] = [
                Part(f"{source}.weight", (layer, begin, 0), (at, 0), (size, hidden))
                for begin, at, size in rows
            ]
            names[f"{attention}{letter}_proj.bias"] = [
                Part(f"{source}.bias", (layer, begin), (at,), (size,)) for begin, at, size in rows
            ]
    return names


def _rows(letter: str, heads: int, groups: int, channels: int) -> Iterator[tuple[int, int, int]]:
    """Yield first row in ``linear_qkv``, first row of the target and number of rows.

    For each query group, ``linear_qkv`` has the rows of its queries, its key and its value.
    """
    before = {"q": 0, "k": heads, "v": heads + 1}[letter] * channels
    size = heads * channels if letter == "q" else channels
    for group in range(groups):
        yield group * (heads + 2) * channels + before, group * size, size
