"""Compare plans with published trainings: do they fit by our numbers, and how do we rank them?

Run with ``python -m benchmarks.published``, or with the start of a source's name to see only its
trainings. ``--places`` also searches for better layouts, which takes minutes a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.table import Table
from megapg.errors import MegapgError
from megapg.layout import ParallelLayout
from megapg.tools.plan.cluster import Cluster, load_cluster
from megapg.tools.plan.models import Model, describe_model, find_model
from megapg.tools.plan.training import Job, Recompute, StageCost, Training

NARAYANAN = "Narayanan et al., arXiv 2104.04473, table 1"
LLAMA = "The Llama 3 Herd of Models, arXiv 2407.21783v3, table 4"
SUMMARY = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md"
RECIPES = "NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/perf_recipes"


class Gpt(NamedTuple):
    """A GPT of table 1 of Narayanan et al.: 51,200 words, 2,048 tokens."""

    billions: float
    heads: int
    hidden: int
    layers: int


class Published(NamedTuple):
    """A published training. ``samples`` is the global batch size."""

    source: str
    row: str
    model: str | Gpt
    cluster: str
    world: int
    samples: int
    sizes: Mapping[str, int]
    seq: int = 0  # 0: the model's
    micro: int = 1
    recompute: Recompute = "none"
    distributed_optimizer: bool = True

    @property
    def gradients(self) -> str:
        """How the published training holds gradients."""
        return {LLAMA: "sharded", NARAYANAN: "float32"}.get(self.source, "bfloat16")


def _narayanan(gpt: Gpt, tp: int, pp: int, world: int, samples: int) -> Published:
    # The paper recomputes activations. It names no microbatch size for this table.
    row = f"{gpt.billions} billion parameters"
    sizes = {"tp": tp, "pp": pp}
    return Published(
        NARAYANAN,
        row,
        gpt,
        "A100-8",
        world,
        samples,
        sizes,
        recompute="full",
        distributed_optimizer=False,
    )


TRAININGS = (
    _narayanan(Gpt(1.7, 24, 2304, 24), 1, 1, 32, 512),
    _narayanan(Gpt(3.6, 32, 3072, 30), 2, 1, 64, 512),
    _narayanan(Gpt(7.5, 32, 4096, 36), 4, 1, 128, 512),
    _narayanan(Gpt(18.4, 48, 6144, 40), 8, 1, 256, 1024),
    _narayanan(Gpt(39.1, 64, 8192, 48), 8, 2, 512, 1536),
    _narayanan(Gpt(76.1, 80, 10240, 60), 8, 4, 1024, 1792),
    _narayanan(Gpt(145.6, 96, 12288, 80), 8, 8, 1536, 2304),
    _narayanan(Gpt(310.1, 128, 16384, 96), 8, 16, 1920, 2160),
    _narayanan(Gpt(529.6, 128, 20480, 105), 8, 35, 2520, 2520),
    _narayanan(Gpt(1008.0, 160, 25600, 128), 8, 64, 3072, 3072),
    Published(LLAMA, "row 1", "llama3-405b", "H100-8", 8192, 32 * 64, {"tp": 8, "pp": 16}),
    Published(LLAMA, "row 2", "llama3-405b", "H100-8", 16384, 16 * 128, {"tp": 8, "pp": 16}),
    Published(
        LLAMA,
        "row 3",
        "llama3-405b",
        "H100-8",
        16384,
        16 * 8,
        {"tp": 8, "pp": 16, "cp": 16},
        seq=131072,
    ),
    Published(
        RECIPES, "llama3_8b_pretrain_8gpu_h100_bf16", "llama3-8b", "H100-8", 8, 128, {"cp": 2}
    ),
    Published(
        RECIPES,
        "llama3_70b_pretrain_64gpu_h100_bf16",
        "llama3-70b",
        "H100-8",
        64,
        256,
        {"tp": 4, "pp": 4, "cp": 2, "vpp": 5},
    ),
    Published(
        RECIPES,
        "llama31_405b_pretrain_1024gpu_h100_bf16",
        "llama3-405b",
        "H100-8",
        1024,
        1536,
        {"tp": 8, "pp": 8, "cp": 2, "vpp": 8},
    ),
    Published(
        RECIPES,
        "llama31_405b_pretrain_256gpu_gb200_bf16",
        "llama3-405b",
        "GB200-NVL72",
        256,
        1536,
        {"tp": 4, "pp": 16, "vpp": 8},
    ),
    Published(
        RECIPES,
        "deepseek_v3_pretrain_1024gpu_h100_bf16",
        "deepseek-v3",
        "H100-8",
        1024,
        16384,
        {"tp": 2, "pp": 8, "vpp": 4, "ep": 64, "expt_tp": 1},
        recompute="selective",
    ),
    Published(
        RECIPES,
        "qwen3_235b_a22b_pretrain_256gpu_h100_bf16",
        "qwen3-235b-a22b",
        "H100-8",
        256,
        8192,
        {"tp": 2, "pp": 8, "vpp": 4, "ep": 32, "expt_tp": 1},
    ),
    Published(
        SUMMARY,
        "25.11, DGX-GB200, DeepSeekV3, BF16",
        "deepseek-v3",
        "GB200-NVL72",
        256,
        4096,
        {"pp": 4, "vpp": 4, "ep": 64},
        recompute="selective",
    ),
    Published(
        SUMMARY,
        "25.11, DGX-GB200, Qwen3_235B_a22B, BF16",
        "qwen3-235b-a22b",
        "GB200-NVL72",
        256,
        8192,
        {"pp": 8, "vpp": 3, "ep": 32},
    ),
    Published(
        SUMMARY,
        "25.11, DGX-H100, LLAMA3_70B, FP8",
        "llama3-70b",
        "H100-8",
        64,
        128,
        {"tp": 4, "pp": 8, "vpp": 5},
    ),
    Published(
        SUMMARY,
        "25.11, DGX-B200, LLAMA3.1_405B, FP8",
        "llama3-405b",
        "B200-8",
        128,
        64,
        {"tp": 4, "pp": 8, "cp": 2, "vpp": 8},
    ),
)

NOTES = (
    "The fullest rank holds parameters of bfloat16, gradients of float32, the states of Adam, "
    "activations, and what communicators take, at least and at most. The plans have sequence "
    "parallelism if tp > 1, and a distributed optimizer except for Narayanan et al.",
    "Published gradients: Megatron-Bridge's recipes hold them in bfloat16, and Llama 3 shards them "
    "over data parallel ranks. Plans can do neither.",
    "Not planned, either: FP8; moments of bfloat16 and recomputed up projections of DeepSeek-V3; "
    "the number of virtual stages of Llama 3, which is not published.",
)


@cache
def model_of(which: str | Gpt) -> Model:
    """Return the model of a training."""
    if isinstance(which, str):
        return find_model(which)
    numbers: dict[str, Any] = {
        "source": NARAYANAN,
        "seq_length": 2048,
        "model": {
            "vocab_size": 51200,
            "position_embedding_type": "learned_absolute",
            "share_embeddings_and_output_weights": True,
        },
        "config": {
            "num_layers": which.layers,
            "hidden_size": which.hidden,
            "num_attention_heads": which.heads,
            "activation_func": "gelu",
        },
    }
    return describe_model(f"gpt-{which.billions}b", numbers)


def planned(each: Published) -> tuple[ParallelLayout, Cluster, Model, Job]:
    """Return the plan's inputs for a training."""
    model, cluster = model_of(each.model), load_cluster(each.cluster)
    sizes: dict[str, Any] = dict(each.sizes)
    layout = ParallelLayout(world_size=each.world, **sizes)
    job = Job(
        model=model.name,
        seq_length=each.seq or model.seq_length,
        micro_batch_size=each.micro,
        microbatches=each.samples // (layout.dp * each.micro),
        recompute=each.recompute,
        distributed_optimizer=each.distributed_optimizer,
    )
    return layout, cluster, model, job


def place(each: Published) -> str:
    """Return the place of a training among the suggestions for its model and world."""
    from megapg.tools.plan.suggest import suggest

    layout, cluster, model, job = planned(each)
    tried: tuple[Recompute, ...] = ("none", "full") if each.recompute != "full" else ("full",)
    found = suggest(
        each.world, cluster, model, job, samples=each.samples, recompute=tried, until=layout
    )
    number = found.place_of(layout)
    return f"{number or '-'} of {found.considered:,}"


def row(each: Published, *, places: bool) -> tuple[str, ...]:
    """Return the table's row of a training."""
    from megapg.tools.plan.measure import measure

    layout, cluster, model, job = planned(each)
    training: Training = measure(layout, cluster, model, job)
    full = training.fullest
    shares = {"float32": 1.0, "bfloat16": 0.5, "sharded": 1 / (layout.dp * layout.cp)}
    saved = full.gradients * (1 - shares[each.gradients])
    room = cluster.memory_gb.value * 1e9 / 2**30
    sizes = " ".join(f"{name}={size}" for name, size in each.sizes.items())
    cells = [
        f"{each.source.split(',')[0]}: {each.row}",
        f"{training.weights / 1e9:,.1f}",
        f"{each.world:,}",
        f"{sizes} {each.recompute}",
        f"{(full.parameters + full.gradients + full.optimizer) / 2**30:.1f}",
        f"{full.activations / 2**30:.1f}",
        f"{room:.1f}",
        _fits(full, room),
        _fits(full, room, saved),
    ]
    if places:
        try:
            cells.append(place(each) if full.total / 2**30 <= room else "-")
        except MegapgError as error:
            cells.append(str(error)[:60])
    return tuple(cells)


def _fits(full: StageCost, room: float, saved: float = 0) -> str:
    """Return the least and the most memory, and whether the GPU has it."""
    least, most = full.communicators
    low, high = ((full.total - most + each - saved) / 2**30 for each in (least, most))
    answer = "fits" if high <= room else "may fit" if low <= room else "too much"
    return f"{low:.1f} to {high:.1f}: {answer}"


def table(which: str = "", *, places: bool = False) -> Table:
    """Return the table of all trainings whose source or row starts with ``which``."""
    names = ("training", "10^9 weights", "ranks", "layout", "states GiB", "activations GiB")
    totals = ("GPU GiB", "fullest GiB", "with published gradients")
    columns = (*names, *totals, *(["place"] if places else []))
    chosen = [each for each in TRAININGS if each.source.startswith(which) or which in each.row]
    rows = tuple(row(each, places=places) for each in chosen)
    return Table("Published trainings", columns, rows, NOTES)


def main() -> None:
    """Print the table, as Markdown if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="?", default="")
    parser.add_argument("--places", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    made = table(given.which, places=given.places)
    print(made.markdown()) if given.markdown else made.print(Console(width=200))


if __name__ == "__main__":
    main()
