"""Planted faults: each makes a model wrong in one layout, and right on one rank.

A fault is a function of the built model and its groups. It names the layout in which it is planted,
and the parameter and axis that the report must name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from parity_layouts import without_attention

from megapg.tools.parity.built_in import gpt, moe, next_token, t5, t5_step

Plant = Callable[[Any, Any], None]


@dataclass(frozen=True)
class Fault:
    """A fault, and the expected report.

    Attributes:
        layout: the layout with the fault.
        parameter: of the finding; part of a name. Empty: only the loss is wrong.
        axes: the report must name one of these.
        plant: makes the model wrong.
        model: the model to build.
        options: of the model.
        step: name of the step; empty: the default.
    """

    layout: str
    parameter: str
    axes: tuple[str, ...]
    plant: Plant
    model: str = "gpt"
    options: Mapping[str, object] = field(default_factory=dict)
    step: str = ""


FAULTS: dict[str, Fault] = {}


def fault(layout: str, parameter: str, *axes: str, **more: Any) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = Fault(layout, parameter, axes, plant, **more)
        return plant

    return add


def build(
    pg: Any, vp_stage: int | None = None, *, model: str = "gpt", fault: str = "", **options: Any
) -> Any:
    """Build a model with the fault that a layout names. The reference layout names none."""
    made = {"gpt": gpt, "moe": moe, "t5": t5, "no attention": without_attention}[model]
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    built = made(pg, **stage, **options)
    if fault:
        with contextlib.suppress(ElsewhereError):
            FAULTS[fault].plant(built, pg)
    return built


class ElsewhereError(Exception):
    """The layer is on another stage."""


def layer(model: Any, number: int) -> Any:
    """Return the layer of this number, counted from 1."""
    for each in model.decoder.layers:
        if each.layer_number == number:
            return each
    raise ElsewhereError


def over(module: Any, group: Any) -> None:
    """Make a module's collectives run over another group."""
    forward = module.forward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        right, module.tp_group = module.tp_group, group
        try:
            return forward(*args, **kwargs)
        finally:
            module.tp_group = right

    module.forward = wrong


def changed(module: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the output of a module."""
    forward = module.forward

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return change(output[0]), *output[1:]
        return change(output)

    module.forward = wrong


def scaled_gradient(parameter: Any, factor: float) -> None:
    parameter.register_hook(lambda gradient: gradient * factor)


# -- forward: a collective is missing, or runs over another group ----------------------------------


@fault("tp=2", "layers.1.mlp.linear_fc2", "tp")
def output_of_fc2_not_reduced(model: Any, pg: Any) -> None:
    over(layer(model, 2).mlp.linear_fc2, pg.dp)


@fault("tp=2 pp=2", "layers.2.self_attention.linear_proj", "tp")
def output_of_attention_not_reduced(model: Any, pg: Any) -> None:
    over(layer(model, 3).self_attention.linear_proj, pg.dp)


@fault("tp=2 dp=2", "layers.1.mlp.linear_fc2", "tp", "tp and dp")
def output_of_fc2_reduced_over_dp(model: Any, pg: Any) -> None:
    over(layer(model, 2).mlp.linear_fc2, pg.dp)


@fault("tp=2 dp=2", "embedding.word_embeddings.weight", "tp")
def embedding_not_reduced(model: Any, pg: Any) -> None:
    embedding = model.embedding.word_embeddings
    forward = embedding.forward
    reduce = torch.nn.functional

    def partial(tokens: Any) -> Any:
        first, last = embedding.vocab_start_index, embedding.vocab_end_index
        outside = (tokens < first) | (tokens >= last)
        looked_up = reduce.embedding((tokens - first).clamp(0, last - first - 1), embedding.weight)
        return looked_up.masked_fill(outside[..., None], 0.0)

    embedding.forward = partial if pg.size("tp") > 1 else forward


@fault("tp=2", "embedding.word_embeddings.weight", "tp")
def embedding_looks_up_another_range(model: Any, pg: Any) -> None:
    model.embedding.word_embeddings.vocab_start_index += pg.rank("tp")


@fault("tp=2", "layers.1.self_attention.linear_proj", "tp")
def bias_added_on_each_rank(model: Any, pg: Any) -> None:
    proj = layer(model, 2).self_attention.linear_proj
    changed(proj, lambda output: output + (pg.size("tp") - 1) * proj.bias)


@fault("tp=2 dp=2", "layers.1.self_attention.linear_proj", "tp")
def attention_scaled_by_tp(model: Any, pg: Any) -> None:
    changed(layer(model, 2).self_attention.core_attention, lambda out: out * pg.size("tp"))


@fault("tp=2", "layers.0.mlp.linear_fc1", "tp", options={"gated_linear_unit": True})
def gate_and_value_swapped(model: Any, pg: Any) -> None:
    if pg.size("tp") > 1:
        changed(layer(model, 1).mlp.linear_fc1, lambda out: out.roll(out.shape[-1] // 2, -1))


@fault("tp=2 dp=2", "decoder.layers.0.cross_attention.linear_proj", "tp", model="t5", step="t5")
def cross_attention_not_reduced(model: Any, pg: Any) -> None:
    over(model.decoder.layers[0].cross_attention.linear_proj, pg.dp)


@fault("pp=2 dp=2", "layers.2.input_layernorm", "pp")
def stage_scales_its_input(model: Any, pg: Any) -> None:
    if pg.rank("pp"):
        take = model.set_input_tensor

        def scaled(tensors: Any) -> None:
            take([None if tensor is None else 2 * tensor for tensor in tensors])

        model.set_input_tensor = scaled


@fault("pp=2", "layers.2.self_attention.linear_proj", "pp")
def stage_turns_positions_otherwise(model: Any, pg: Any) -> None:
    if pg.rank("pp"):
        model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq * 2


@fault("pp=2 vpp=2", "layers.3.mlp.linear_fc2", "pp")
def last_chunk_doubles_an_output(model: Any, pg: Any) -> None:
    changed(layer(model, 4).mlp.linear_fc2, lambda output: output * pg.size("pp"))


@fault("ep=2", "layers.0.mlp.router.weight", "ep", "dp", model="moe")
def router_scaled_on_one_rank(model: Any, pg: Any) -> None:
    router = layer(model, 1).mlp.router
    gating = router.gating
    router.gating = lambda tokens: gating(tokens) * (1 + pg.rank("ep"))


@fault("dp=2", "embedding.word_embeddings.weight", "dp")
def one_replica_shifts_its_tokens(model: Any, pg: Any) -> None:
    changed(model.embedding.word_embeddings, lambda out: out.roll(pg.rank("dp"), 1))


# -- loss ------------------------------------------------------------------------------------------


def scaled_loss(model: Any, batch: Any, pg: Any) -> torch.Tensor:
    return next_token(model, batch, pg) * pg.size("tp")


def loss_of_other_labels(model: Any, batch: Any, pg: Any) -> torch.Tensor:
    labels = batch["labels"].roll(pg.rank("cp"), 1)
    return next_token(model, {**batch, "labels": labels}, pg)


STEPS: dict[str, Any] = {
    "": None,
    "scaled": scaled_loss,
    "other labels": loss_of_other_labels,
    "t5": t5_step,
}


@fault("tp=2", "", "tp", step="scaled")
def loss_scaled_by_tp(model: Any, pg: Any) -> None:
    pass  # the step is wrong


@fault("cp=2", "", "cp", model="no attention", step="other labels")
def one_rank_of_cp_has_other_labels(model: Any, pg: Any) -> None:
    pass  # the step is wrong


# -- backward --------------------------------------------------------------------------------------


@fault("tp=2", "layers.1.pre_mlp_layernorm", "tp")
def gradient_of_fc1s_input_not_reduced(model: Any, pg: Any) -> None:
    over(layer(model, 2).mlp.linear_fc1, pg.dp)


@fault("tp=2 dp=2", "layers.2.input_layernorm", "tp")
def gradient_of_qkvs_input_not_reduced(model: Any, pg: Any) -> None:
    over(layer(model, 3).self_attention.linear_qkv, pg.dp)


@fault("tp=2", "final_layernorm", "tp")
def gradient_of_logits_input_not_reduced(model: Any, pg: Any) -> None:
    over(model.output_layer, pg.dp)


@fault("tp=2 dp=2", "layers.1.self_attention.linear_proj.bias", "tp")
def gradient_scaled_by_tp(model: Any, pg: Any) -> None:
    scaled_gradient(layer(model, 2).self_attention.linear_proj.bias, pg.size("tp"))


@fault("dp=2", "layers.1.mlp.linear_fc1.weight", "dp")
def gradient_scaled_by_dp(model: Any, pg: Any) -> None:
    scaled_gradient(layer(model, 2).mlp.linear_fc1.weight, pg.size("dp"))


@fault("dp=2", "layers.0.mlp.linear_fc2.bias", "dp")
def gradient_divided_by_dp_twice(model: Any, pg: Any) -> None:
    scaled_gradient(layer(model, 1).mlp.linear_fc2.bias, 1 / pg.size("dp"))


@fault("pp=2", "layers.3.mlp.linear_fc1.bias", "pp")
def gradient_scaled_by_pp(model: Any, pg: Any) -> None:
    scaled_gradient(layer(model, 4).mlp.linear_fc1.bias, pg.size("pp"))


@fault("tp=2 pp=2", "layers.1.mlp.linear_fc1.weight", "tp")
def gradient_lost_on_one_rank(model: Any, pg: Any) -> None:
    scaled_gradient(layer(model, 2).mlp.linear_fc1.weight, 1 - pg.rank("tp"))


@fault("tp=2 dp=2", "layers.1.mlp.linear_fc1.weight", "tp")
def gradient_halved_on_one_rank_of_tp(model: Any, pg: Any) -> None:
    scaled_gradient(layer(model, 2).mlp.linear_fc1.weight, 1 - pg.rank("tp") / 2)


@fault("ep=2", "layers.0.input_layernorm.weight", "ep", "dp", model="moe")
def dense_gradient_reduced_like_an_experts(model: Any, pg: Any) -> None:
    layer(model, 1).input_layernorm.weight.allreduce = False


@fault("ep=2", "layers.0.mlp.experts.local_experts", "ep", "dp", model="moe")
def experts_gradient_reduced_like_a_dense_one(model: Any, pg: Any) -> None:
    layer(model, 1).mlp.experts.local_experts[0].linear_fc1.weight.allreduce = True


@fault("pp=2 dp=2", "embedding.word_embeddings.weight", "pp")
def gradients_of_tied_embeddings_not_summed(model: Any, pg: Any) -> None:
    if pg.size("pp") > 1:
        forward = model.forward

        def wrong(*args: Any, **kwargs: Any) -> Any:
            model.share_embeddings_and_output_weights = True
            output = forward(*args, **kwargs)
            model.share_embeddings_and_output_weights = False  # for the sum of gradients
            return output

        model.forward = wrong


# -- attributes that Megatron-core's optimizer and schedules read ----------------------------------


@fault("tp=2 sequence_parallel", "layers.1.input_layernorm.weight", "tp")
def norm_lacks_sequence_parallel_mark(model: Any, pg: Any) -> None:
    layer(model, 2).input_layernorm.weight.sequence_parallel = False


@fault("tp=2 sequence_parallel", "final_layernorm.bias", "tp")
def last_norm_lacks_sequence_parallel_mark(model: Any, pg: Any) -> None:
    model.decoder.final_layernorm.bias.sequence_parallel = False


@fault("tp=2 pp=2 sequence_parallel", "layers.1.self_attention.linear_proj.bias", "tp")
def bias_lacks_sequence_parallel_mark(model: Any, pg: Any) -> None:
    layer(model, 2).self_attention.linear_proj.bias.sequence_parallel = False


@fault("tp=2 ep=2", "layers.0.mlp.router.weight", "tp", model="moe")
def router_lacks_sequence_parallel_mark(model: Any, pg: Any) -> None:
    layer(model, 1).mlp.router.weight.sequence_parallel = False


@fault("tp=2", "layers.3.self_attention.k_layernorm", "tp", options={"qk_layernorm": True})
def norms_of_q_and_k_not_announced(model: Any, pg: Any) -> None:
    model.config.qk_layernorm = False


@fault("tp=2 pp=2", "layers.1.mlp.linear_fc1.weight", "tp")
def shard_lacks_tensor_parallel_mark(model: Any, pg: Any) -> None:
    layer(model, 2).mlp.linear_fc1.weight.tensor_model_parallel = False


@fault("tp=2 dp=2", "layers.1.mlp.linear_fc2.bias", "tp")
def replica_has_tensor_parallel_mark(model: Any, pg: Any) -> None:
    layer(model, 2).mlp.linear_fc2.bias.tensor_model_parallel = True


@fault("pp=2", "layers.3.mlp.linear_fc1.weight", "pp")
def own_weight_marked_as_shared(model: Any, pg: Any) -> None:
    layer(model, 4).mlp.linear_fc1.weight.shared = True


# -- replicas --------------------------------------------------------------------------------------


def moved_apart(parameter: Any, by: int) -> None:
    generator = torch.Generator().manual_seed(by)
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    parameter.data.add_(noise.to(parameter.dtype), alpha=float(by > 0))


@fault("tp=2 dp=2", "layers.1.self_attention.linear_proj.bias", "tp")
def replica_seeded_apart_over_tp(model: Any, pg: Any) -> None:
    moved_apart(layer(model, 2).self_attention.linear_proj.bias, pg.rank("tp"))


@fault("dp=2", "layers.1.mlp.linear_fc1.weight", "dp")
def replica_seeded_apart_over_dp(model: Any, pg: Any) -> None:
    moved_apart(layer(model, 2).mlp.linear_fc1.weight, pg.rank("dp"))


@fault(
    "ep=2 dp=2", "layers.0.mlp.experts.local_experts.0.linear_fc2.weight", "expt_dp", model="moe"
)
def experts_replica_seeded_apart(model: Any, pg: Any) -> None:
    expert = layer(model, 1).mlp.experts.local_experts[0]
    moved_apart(expert.linear_fc2.weight, pg.rank("expt_dp"))


@fault("tp=2", "layers.1.mlp.linear_fc2.bias", "tp")
def replica_frozen_on_one_rank(model: Any, pg: Any) -> None:
    layer(model, 2).mlp.linear_fc2.bias.requires_grad = not pg.rank("tp")
