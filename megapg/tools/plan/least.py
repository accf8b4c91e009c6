"""The least that a layout can hold and send, in closed form. It rules out most layouts at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megapg.errors import PlanError
from megapg.layout import GroupName, ParallelLayout
from megapg.tools.plan.measure import as_rank, weightless_on_cpu
from megapg.tools.plan.training import Flow, Job, StageCost

if TYPE_CHECKING:
    from megapg.tools.plan.models import Model

_EXPERTS = (512, 256, 128, 64, 32, 16, 8, 4, 2)


@dataclass(frozen=True)
class Shape:
    """A whole model in numbers.

    Attributes:
        layers: number of layers.
        moe_layers: number of those with experts.
        hidden: size of a token between layers.
        heads: what tensor parallelism has to divide.
        experts: number of experts of a layer; 0 if there are none.
        routed: times that a token is sent to experts.
        kept: numbers that the backward pass needs of a token in a layer, at least: the inputs of
            matrix products. 0 for a function, whose own config may ask for recomputation.
        weights: number of parameters without experts.
        expert_weights: number of parameters of all experts.
        active: number of parameters that a token is multiplied with.
        sent: times that tensor parallelism gathers or scatters all tokens, forward and backward.
        sent_again: the same for a forward pass alone, which recomputation repeats.
        bytes: bytes of a parameter, of its gradient, and of the optimizer's state.
        trained: True if every parameter is trained. If not, a stage may have no gradients, no state
            and no backward pass, and none is counted.
    """

    layers: int
    moe_layers: int
    hidden: int
    heads: int
    experts: int
    routed: int
    kept: int
    weights: int
    expert_weights: int
    active: int
    sent: int
    sent_again: int
    bytes: tuple[int, int, int]
    trained: bool


def look_at(model: Model, job: Job) -> Shape:
    """Build the whole model without memory, and return its numbers."""
    ep, module = _with_few_experts(model, job)
    config: Any = getattr(module, "config", None)
    if config is None:
        raise PlanError(f"--suggest with --model {job.model}: the model has no config of Megatron.")
    sizes = {name: each.numel() for name, each in module.named_parameters()}
    every = sum(sizes.values())
    of_experts = {name: size for name, size in sizes.items() if ".experts." in name}
    every += (ep - 1) * sum(of_experts.values())
    expert_weights = ep * sum(of_experts.values())
    untied = any("output_layer" in name for name in sizes)
    looked_up = untied * sum(size for name, size in sizes.items() if "word_embeddings" in name)
    layers, experts, topk = config.num_layers, config.num_moe_experts or 0, config.moe_router_topk
    moe_layers = len({name.split(".experts.")[0] for name in of_experts})
    idle = expert_weights * (experts - topk) // experts if experts else 0
    heads, groups = config.num_attention_heads, config.num_query_groups
    divided = math.gcd(heads, groups or heads)
    attention = 3 * config.hidden_size + 2 * (heads + (groups or heads)) * config.kv_channels
    inner = 2 + bool(config.gated_linear_unit)
    dense = config.hidden_size + inner * config.ffn_hidden_size
    expert = topk * (config.hidden_size + inner * (config.moe_ffn_hidden_size or 0))
    kept = attention + min([dense] * (layers > moe_layers) + [expert] * (moe_layers > 0))
    latent = getattr(config, "multi_latent_attention", False)  # gathers less than all tokens
    whole = (layers - moe_layers) + layers * (not latent)
    size = next(module.parameters()).itemsize
    trained = all(each.requires_grad for each in module.parameters())
    sent_again = whole * 2 + layers * latent
    sent = whole * (4 + bool(model.source)) + 2 * layers * latent  # if published, split
    return Shape(
        layers=layers,
        moe_layers=moe_layers,
        hidden=config.hidden_size,
        heads=divided,
        experts=experts,
        routed=topk * (config.moe_token_dispatcher_type == "alltoall"),
        kept=kept if model.source and trained else 0,
        weights=every - expert_weights,
        expert_weights=expert_weights,
        active=every - looked_up - idle,
        sent=sent if trained else sent_again,
        sent_again=sent_again,
        bytes=(size, 4 if config.bf16 else size, 8 if size == 4 else 12)
        if trained
        else (size, 0, 0),
        trained=trained,
    )


def _with_few_experts(model: Model, job: Job) -> tuple[int, Any]:
    """Build the model on a rank that has as few of the experts as possible."""
    for ep in _EXPERTS:
        with contextlib.suppress(PlanError):  # no multiple of ep
            return ep, _built(model, job, ep)
    return 1, _built(model, job, 1)


def _built(model: Model, job: Job, ep: int) -> Any:
    layout = ParallelLayout(world_size=ep, ep=ep, expt_tp=1)
    with weightless_on_cpu(), as_rank(layout, 0) as pg:
        return model.build(pg, job=job)


def least(layout: ParallelLayout, job: Job, shape: Shape) -> StageCost:
    """Return the cost of an average stage, or less. Communicators are not counted."""
    dense = shape.weights // (layout.tp * layout.pp)
    experts = shape.expert_weights // (layout.expt_tp * layout.ep * layout.pp)
    sharded = dense // (layout.dp * layout.cp) + experts // layout.expt_dp
    weights = dense + experts
    parameter, gradient, state = shape.bytes
    return StageCost(
        stage=0,
        rank=layout.ranks[0],
        weights=weights,
        parameters=parameter * weights,
        gradients=gradient * weights,
        optimizer=state * (sharded if job.distributed_optimizer else weights),
        activations=_kept(layout, job, shape),
        communicators=(0, 0),
        flows=tuple(_flows(layout, job, shape, dense, experts)),
    )


def _kept(layout: ParallelLayout, job: Job, shape: Shape) -> int:
    """Return the bytes that the backward pass of a stage keeps at a time, or less.

    The stage is the first. It is the second if stages cannot be equal, as the first one may have
    fewer layers.
    """
    pp, chunks = layout.pp, layout.vpp or 1
    uneven = shape.layers % (pp * chunks) > 0
    ahead = pp if chunks == 1 else 2 * (pp - 1) + (chunks - 1) * pp + 1
    if uneven:
        ahead -= 1 if chunks == 1 else 2
    each = shape.layers // (pp * chunks) + (uneven and pp > 2)
    layers = each * min(ahead, job.microbatches * chunks)
    tokens = job.micro_batch_size * job.seq_length // layout.cp
    kept = shape.kept * layers
    if job.recompute == "full" and kept:  # the inputs of all layers, and one whole layer
        kept = shape.hidden * (layers - 1) + shape.kept
    return shape.bytes[0] * tokens * kept // layout.tp


def _flows(
    layout: ParallelLayout, job: Job, shape: Shape, dense: int, experts: int
) -> Iterator[Flow]:
    """Yield traffic that a rank has on average over the stages, or less."""
    again = shape.trained and job.recompute == "full"
    token = shape.bytes[0] * shape.hidden * job.micro_batch_size * job.seq_length // layout.cp
    routed = (2 + 2 * shape.trained + 2 * again) * shape.moe_layers * shape.routed / layout.tp
    sizes: dict[tuple[GroupName, str], float] = {
        ("tp", "all_gather"): shape.sent + again * shape.sent_again,
        ("ep", "all_to_all"): routed,
        ("expt_tp", "all_gather"): routed * layout.expt_tp,
    }
    passes = token * job.microbatches / layout.pp
    for (field, collective), size in sizes.items():
        yield Flow(field, collective, 0, int(passes * size), 0)
    held: dict[GroupName, int] = {"intra_dp_cp": dense, "intra_expt_dp": experts}
    if not shape.trained:
        return
    for field, count in held.items():
        yield Flow(field, "reduce_scatter", 0, shape.bytes[1] * count, 0)
        yield Flow(field, "all_gather", 0, shape.bytes[0] * count, 0)
