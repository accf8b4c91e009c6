"""Compare planned memory with Megatron-LM's theoretical memory and with measured peaks.

Run with ``.venv-newest/bin/python -m benchmarks.plan_memory``: ``megatron.training`` has the
formulas.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from benchmarks.published import Gpt, model_of
from benchmarks.table import Table
from megapg.layout import ParallelLayout
from megapg.tools.plan.cluster import load_cluster
from megapg.tools.plan.measure import measure
from megapg.tools.plan.models import Model
from megapg.tools.plan.training import Job, Training

GIB = 2**30
ANALYSIS = "NVIDIA/Megatron-LM #482, tools/get_training_info/README.md"


@dataclass(frozen=True)
class Compared:
    """A model in a layout."""

    label: str
    model: str | Gpt
    world: int
    sizes: Mapping[str, int]
    micro: int = 1
    distributed: bool = True


GPT_22B = Gpt(22.0, 64, 6144, 48)  # Korthikanti et al., arXiv 2205.05198, table 3
COMPARED = (
    Compared("GPT-3 175B", "gpt3-175b", 64, {"tp": 8, "pp": 8}, distributed=False),
    Compared("GPT-3 175B", "gpt3-175b", 512, {"tp": 8, "pp": 8}),
    Compared("GPT-3 175B", "gpt3-175b", 512, {"tp": 8, "pp": 8, "vpp": 3}),
    Compared("GPT 22B", GPT_22B, 8, {"tp": 8}, micro=4, distributed=False),
    Compared("GPT 22B", GPT_22B, 64, {"tp": 4, "pp": 4}, micro=2),
    Compared("Llama 3 8B", "llama3-8b", 8, {}),
    Compared("Llama 3 8B", "llama3-8b", 8, {"tp": 4}, distributed=False),
    Compared("Llama 3 70B", "llama3-70b", 64, {"tp": 8, "pp": 4}),
    Compared("Llama 3 70B", "llama3-70b", 64, {"tp": 4, "pp": 4, "vpp": 5}),
    Compared("Mixtral 8x7B", "mixtral-8x7b", 64, {"ep": 8}),
    Compared("Mixtral 8x7B", "mixtral-8x7b", 64, {"tp": 2, "pp": 4, "ep": 8, "expt_tp": 1}),
    Compared("Mixtral 8x7B", "mixtral-8x7b", 64, {"tp": 4, "pp": 2, "ep": 8, "expt_tp": 4}),
)


def _planned(each: Compared) -> tuple[ParallelLayout, dict[str, Any], Job, Training]:
    """Return the layout, the model's numbers, the job and our memory of it."""
    model = model_of(each.model)
    sizes: dict[str, Any] = dict(each.sizes)
    layout = ParallelLayout(world_size=each.world, **sizes)
    job = Job(
        model=model.name,
        seq_length=model.seq_length,
        micro_batch_size=each.micro,
        microbatches=4 * layout.pp,
        distributed_optimizer=each.distributed,
    )
    numbers = cast("Any", model.build).args[1]
    return layout, numbers, job, measure(layout, load_cluster("H100-8"), model, job)


def _arguments(layout: ParallelLayout, numbers: Mapping[str, Any], job: Job) -> SimpleNamespace:
    """Return the arguments of Megatron-LM's command line that its formulas read."""
    config, model = numbers["config"], numbers["model"]
    unit = 128 * layout.tp
    heads, groups = config["num_attention_heads"], config.get("num_query_groups")
    return SimpleNamespace(
        num_layers=config["num_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config.get("ffn_hidden_size", 4 * config["hidden_size"]),
        num_attention_heads=heads,
        kv_channels=config.get("kv_channels", config["hidden_size"] // heads),
        group_query_attention=groups is not None,
        num_query_groups=groups or heads,
        multi_latent_attention=False,
        swiglu=config.get("gated_linear_unit", False),
        normalization=config.get("normalization", "LayerNorm"),
        add_bias_linear=config.get("add_bias_linear", True),
        num_experts=config.get("num_moe_experts"),
        moe_layer_freq=1,
        moe_ffn_hidden_size=config.get("moe_ffn_hidden_size"),
        moe_router_topk=config.get("moe_router_topk", 0),
        moe_shared_expert_intermediate_size=None,
        moe_latent_size=None,
        mtp_num_layers=None,
        padded_vocab_size=-(-model["vocab_size"] // unit) * unit,
        untie_embeddings_and_output_weights=not model["share_embeddings_and_output_weights"],
        seq_length=job.seq_length,
        micro_batch_size=job.micro_batch_size,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expt_tp,
        data_parallel_size=layout.dp,
        world_size=layout.world_size,
        use_distributed_optimizer=job.distributed_optimizer,
    )


def _missing(args: SimpleNamespace, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes of a layer that Megatron-LM's formula lacks, by their reason."""
    tp, hidden, ffn = args.tensor_model_parallel_size, args.hidden_size, args.ffn_hidden_size
    tokens = args.seq_length * args.micro_batch_size
    query = args.num_attention_heads * args.kv_channels
    keys = args.num_query_groups * args.kv_channels
    found = {"GQA": 4 * tokens * (query + keys - 2 * hidden) / tp}
    if not config.get("hidden_dropout", 0.1):
        found["no dropout"] = -2 * tokens * hidden / tp
    if args.add_bias_linear is False:  # Llama 3 and Mixtral rotate queries and keys
        tables = 4 * 2 * args.seq_length * args.kv_channels
        found["RoPE"] = 2 * tokens * (query + keys) / tp + tables
    if args.num_experts:
        routed = tokens * args.moe_router_topk
        found["experts"] = (6 * routed * args.moe_ffn_hidden_size - 4 * tokens * ffn) / tp
        found["experts"] += 2 * routed * hidden * args.expert_tensor_parallel_size / tp
    elif args.swiglu:
        found["SwiGLU"] = 2 * tokens * ffn / tp
    return {reason: size for reason, size in found.items() if size}


def _difference(ours: float, theirs: float) -> str:
    return f"{100 * (ours / theirs - 1):+.1f} %"


def row(each: Compared) -> tuple[str, ...]:
    """Return the row of a model in a layout."""
    from megatron.training import theoretical_memory_usage as theory

    layout, numbers, job, training = _planned(each)
    args = _arguments(layout, numbers, job)
    their_states = theory.compute_weight_and_optimizer_memory(args)
    theirs = theory.compute_activation_memory(args, job.microbatches)
    states = max(s.parameters + s.gradients + s.optimizer for s in training.stages)
    ours = training.stages[0].activations
    missing = _missing(args, numbers["config"])
    times = args.num_layers  # the layers of a stage, times the microbatches in flight
    if layout.vpp:
        times = times * (1 + (layout.pp - 1) / (layout.pp * layout.vpp))
    explained = theirs + times * sum(missing.values())
    reasons = [f"{why} {100 * times * size / theirs:+.1f}" for why, size in missing.items()]
    sizes = " ".join(f"{name}={size}" for name, size in each.sizes.items()) or "-"
    return (
        f"{each.label}, {each.world} ranks",
        f"{sizes}{'' if each.distributed else ' plain'}",
        f"{their_states / GIB:.2f} / {states / GIB:.2f}",
        _difference(states, their_states),
        f"{theirs / GIB:.2f} / {ours / GIB:.2f}",
        _difference(ours, theirs),
        ", ".join(reasons) or "-",
        _difference(ours, explained),
    )


def theoretical() -> Table:
    """Return the table of plans and ``theoretical_memory_usage``."""
    states = ("states GiB, theirs / ours", "difference")
    activations = ("activations GiB", "difference", "missing terms, %", "with these")
    columns = ("model", "layout", *states, *activations)
    notes = (
        "Theirs: compute_weight_and_optimizer_memory and compute_activation_memory of "
        "megatron.training 0.19.2. States: parameters, gradients and optimizer of the fullest "
        "stage. Activations: the first stage. Plain: not the distributed optimizer.",
    )
    return Table(
        "Plans against theoretical_memory_usage", columns, tuple(map(row, COMPARED)), notes
    )


# --- Megatron-LM #482 -----------------------------------------------------------------------------

# Microbatch size, dp, pp, tp, measured peak and estimate in GiB. Llama2 7B, bf16, on H800.
MEASURED = (
    (2, 8, 1, 1, 69.1, 68.8),
    (4, 4, 1, 2, 55.7, 55.5),
    (2, 4, 2, 1, 49.8, 49.5),
    (4, 1, 1, 8, 28.8, 28.6),
)
# The table leaves these out. With them, the tool's formula gives the estimates of the table.
LENGTH, VOCABULARY, FFN = 2048, 50257, 10880


def _padded(tp: int) -> int:
    return -(-VOCABULARY // (128 * tp)) * 128 * tp


def _llama2(pg: Any, vp_stage: int | None = None, *, job: Job) -> Any:
    """Build Llama2 7B as Megatron-LM of September 2023 did with the flags of #482."""
    import torch
    import torch.nn.functional as F
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from megapg.tools.plan.fused import FlashLikeAttention

    config = TransformerConfig(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=FFN,
        num_attention_heads=32,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
        bias_dropout_fusion=True,
        tensor_model_parallel_size=pg.size("tp"),
        pipeline_model_parallel_size=pg.size("pp"),
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
    )
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    spec.submodules.self_attention.submodules.core_attention = FlashLikeAttention
    model = GPTModel(
        config,
        spec,
        vocab_size=_padded(pg.size("tp")),
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True,
        pre_process=pg.rank("pp") == 0,
        post_process=pg.rank("pp") == pg.size("pp") - 1,
        pg_collection=pg,
    )
    return model.bfloat16()


def measured_row(micro: int, dp: int, pp: int, tp: int, peak: float, estimate: float) -> list[str]:
    """Return the row of a measured peak."""
    layout = ParallelLayout(world_size=dp * pp * tp, pp=pp, tp=tp)
    job = Job(model="llama2", seq_length=LENGTH, micro_batch_size=micro, microbatches=4 * pp)
    model = Model("llama2", LENGTH, _llama2)
    first = measure(layout, load_cluster("H100-8"), model, job).stages[0]
    ours = (first.total - first.communicators[1]) / GIB
    # Megatron-core keeps half of SwiGLU's input plus an offset. The code of 2023 did not.
    copies = 32 * 2 * LENGTH * micro * FFN / tp / GIB
    return [
        f"dp={dp} pp={pp} tp={tp}, microbatches of {micro}",
        f"{peak}",
        f"{estimate}",
        f"{ours:.1f}",
        _difference(ours, peak),
        f"{ours - copies:.1f}",
        _difference(ours - copies, peak),
    ]


def measured() -> Table:
    """Return the table of plans and of the peaks that #482 measured."""
    plans = ("plan", "difference", "as in 2023", "difference")
    columns = ("layout", "measured GiB", "#482's estimate", *plans)
    rows = tuple(tuple(measured_row(*each)) for each in MEASURED)
    notes = (
        f"Measured: {ANALYSIS}, torch.cuda.max_memory_allocated of Llama2 7B on H800. It names "
        f"neither the length of samples nor the vocabulary. {LENGTH} tokens and {VOCABULARY} words "
        "reproduce its estimates within 0.2 GiB. The plan is without communicators, which "
        "this counter leaves out.",
        "As in 2023: without the sum of SwiGLU's input and its offset, which Megatron-core 0.19.2 "
        "keeps and Megatron-LM of 2023 did not. The rest are buffers of the loss and of the "
        "backward pass, which plans leave out.",
    )
    return Table("Plans against measured memory", columns, rows, notes)


def main() -> None:
    """Print the tables, as Markdown if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    logging.disable(logging.INFO)  # megatron.training logs to the standard output
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for made in (measured(), theoretical()):
            print(made.markdown()) if given.markdown else made.print(Console(width=200))


if __name__ == "__main__":
    main()
