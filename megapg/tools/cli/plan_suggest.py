"""``megapg plan --suggest``: the layouts that fit, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megapg.layout import ParallelLayout
from megapg.tools.plan import Cluster, Job
from megapg.tools.plan.cluster import FULL
from megapg.tools.plan.models import ADD_RECOMPUTE, NO_RECOMPUTE
from megapg.tools.plan.suggest import Suggestion, Suggestions, text_of_options

_SIZES = ("tp", "pp", "vpp", "cp", "ep", "expt_tp", "dp")


def show(made: Suggestions, cluster: Cluster, named: str, job: Job, console: Console) -> None:
    """Print the table, its formulas, and the command for the first place.

    Args:
        made: the suggestions.
        cluster: the machines.
        named: the machines as the user names them.
        job: what is trained.
        console: where to print.
    """
    first = made.found[0]
    console.print(Text(_title(made, first), style="bold"))
    console.print()
    console.print(_table(made))
    console.print(Text("\nHow places are decided", style="bold"))
    for line in _formulas(made, cluster, job):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    if not made.recomputed:
        console.print(Text("\nNot tried", style="bold"))
        words = f"Recomputation: {NO_RECOMPUTE}. {ADD_RECOMPUTE}."
        console.print(Padding(Text(words), (0, 0, 0, 2)))
    console.print(Text("\nLook closer at the first one", style="bold"))
    console.print(Text(f"  {command(first, named, job)}"), soft_wrap=True)


def as_json(made: Suggestions, named: str, job: Job) -> dict[str, Any]:
    """Return plain data, as described by ``schema.json`` of ``megapg.tools.plan``."""
    return {
        "samples": made.samples,
        "active_weights": made.active,
        "arithmetic_seconds": made.arithmetic,
        "considered": made.considered,
        "measured": made.measured,
        "layouts": [
            {
                **{size: getattr(each.layout, size) for size in _SIZES},
                "recompute": each.training.job.recompute,
                "microbatches": each.training.job.microbatches,
                "bytes": each.training.fullest.total,
                "share": each.share,
                "lost": asdict(each.lost),
                "command": command(each, named, job),
            }
            for each in made.found
        ],
    }


def command(each: Suggestion, named: str, job: Job) -> str:
    """Return the command that shows the plan of a suggestion."""
    layout, own = each.layout, each.training.job
    options = [
        f"--world-size {layout.world_size}",
        text_of_options(layout, own),
        f"--microbatches {own.microbatches} --seq-length {job.seq_length}",
        f"--micro-batch-size {job.micro_batch_size}" if job.micro_batch_size > 1 else "",
        "" if job.distributed_optimizer else "--plain-optimizer",
        f"--model {job.model} --cluster {named}",
    ]
    return " ".join(["megapg plan", *filter(None, options)])


def _title(made: Suggestions, first: Suggestion) -> str:
    count = len(made.found)
    some = f"The {count} that work" if made.complete else f"The first {count}"
    several = f"{some} of " if made.considered > count else ""
    return (
        f"{several}{made.considered:,} layouts of {first.layout.world_size:,} ranks for "
        f"{first.training.job.model}, with {made.samples:,} samples in a step"
    )


def _table(made: Suggestions) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    sizes = [size for size in _SIZES if any(_matters(each.layout, size) for each in made.found)]
    heads = [size.replace("expt_tp", "etp") for size in sizes]
    for head in ("", *heads, "again", "mb", "memory", "GPU", "network", "NVLink", "bubble", "lost"):
        table.add_column(head, justify="left" if head == "again" else "right", no_wrap=True)
    units = ["GB", "", "GB", "GB", "", "s"]
    table.add_row(*("" for _ in range(len(sizes) + 3)), *units, style="dim")
    for place, each in enumerate(made.found, 1):
        table.add_row(
            str(place),
            *(str(getattr(each.layout, size) or 1) for size in sizes),
            each.training.job.recompute[:6],
            f"{each.training.job.microbatches}",
            f"{each.training.fullest.total / 1e9:.1f}",
            f"{each.share:.0%}",
            f"{each.lost.network_bytes / 1e9:,.1f}",
            f"{each.lost.nvlink_bytes / 1e9:,.1f}",
            f"{each.lost.bubble:.1%}",
            f"{each.lost.seconds:.2f}",
        )
    return table


def _matters(layout: ParallelLayout, size: str) -> bool:
    """True if a size has to be shown."""
    usual = {"vpp": None, "cp": 1, "ep": 1, "expt_tp": layout.tp}
    return size not in usual or getattr(layout, size) != usual[size]


def _formulas(made: Suggestions, cluster: Cluster, job: Job) -> Iterator[str]:
    assert cluster.bf16_tflops is not None
    ranks, tokens = made.found[0].layout.world_size, made.samples * job.seq_length
    yield (
        "again: recomputation. mb: microbatches of a pipeline. memory: that of the fullest rank. "
        "GPU: its share of a GPU's memory. network, NVLink: what a rank of the slowest stage sends "
        "in a step."
    )
    yield "lost = traffic + bubble + again: the least time that a step loses if nothing overlaps."
    yield f"Layouts that take more than {FULL:.0%} of a GPU are last."
    yield (
        f"traffic = network / {cluster.network_gb_s.value:g} GB/s + NVLink / "
        f"{cluster.nvlink_gb_s.value:g} GB/s. In a ring of n ranks, a rank sends (n - 1) / n of "
        "the bytes, and twice as much for an all-reduce."
    )
    yield (
        f"arithmetic = 6 x {made.active / 1e9:.1f}e9 weights x {tokens / 1e6:.2f}e6 tokens / "
        f"({ranks:,} x {cluster.bf16_tflops.value:g} TFLOPS) = {made.arithmetic:.2f} s"
    )
    yield (
        "bubble = (pp - 1) / (mb x vpp) of the arithmetic. again = 1/3 of it for full, else 0; "
        "then the bubble is longer by 1/3, too."
    )
