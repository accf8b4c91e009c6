"""The command line: ``megapg plan``."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from megapg.errors import MegapgError, PlanError
from megapg.layout import DEFAULT_ORDER, GroupName, ParallelLayout
from megapg.tools.cli.console import add_to, print_json, refuse, say

if TYPE_CHECKING:  # loaded when the command runs, so that --help is quick
    from megapg.tools.plan import Cluster, Job

app = typer.Typer()
OptionInfo = typer.models.OptionInfo


class Recomputation(StrEnum):
    """The values of ``--recompute``."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def _size(text: str, panel: str = "Layout", default: str | bool = True) -> OptionInfo:
    option = typer.Option(
        min=1, metavar="N", help=text, rich_help_panel=panel, show_default=default
    )
    return cast("OptionInfo", option)


_MODEL, _OUTPUT = "Model", "Output"
_PAUSE = 5.0  # seconds between two lines of progress in a file


@add_to(app)
def plan(
    ctx: typer.Context,
    world_size: Annotated[int, _size("Number of ranks.")],
    tp: Annotated[int, _size("Tensor parallel size.")] = 1,
    pp: Annotated[int, _size("Pipeline parallel size.")] = 1,
    cp: Annotated[int, _size("Context parallel size.")] = 1,
    ep: Annotated[int, _size("Expert parallel size.")] = 1,
    expt_tp: Annotated[int | None, _size("Tensor parallel size of experts.", default="tp")] = None,
    vpp: Annotated[int | None, _size("Model chunks of a rank.", default="none")] = None,
    order: Annotated[
        str,
        typer.Option(
            metavar="AXES", rich_help_panel="Layout", help="Axes, the fastest varying first."
        ),
    ] = DEFAULT_ORDER,
    optimizer_instances: Annotated[int, _size("Replicas of the distributed optimizer.")] = 1,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel="Cluster",
            help="NAME-GPUS, or NODESxNAME-GPUS such as 64xH100-8 for 64 nodes of 8 GPUs: A100-8, "
            "H100-8, H200-8, B200-8, GB200-NVL72, or a TOML file.",
        ),
    ] = "H100-8",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_MODEL,
            help="Count the memory and traffic of a step of this model: llama3-8b, llama3-70b, "
            "llama3-405b, gpt3-175b, mixtral-8x7b, qwen3-235b-a22b, deepseek-v3, a TOML file, or "
            "your own FILE.py:FUNCTION or MODULE:FUNCTION. Needs torch and Megatron-core.",
            show_default=False,
        ),
    ] = None,
    seq_length: Annotated[int | None, _size("Tokens of a sample.", _MODEL, "the model's")] = None,
    micro_batch_size: Annotated[int | None, _size("Samples of a microbatch.", _MODEL, "1")] = None,
    microbatches: Annotated[
        int | None,
        _size("Microbatches of a pipeline in one step.", _MODEL, "about 4 million tokens"),
    ] = None,
    recompute: Annotated[
        Recomputation | None,
        typer.Option(
            metavar="MODE",
            rich_help_panel=_MODEL,
            help="Activations that the backward pass computes again: none, selective (those of "
            "the attention core) or full (those of whole layers).",
            show_default="none",
        ),
    ] = None,
    plain_optimizer: Annotated[
        bool,
        typer.Option(
            "--plain-optimizer",
            rich_help_panel=_MODEL,
            help="Each rank has the whole state of the optimizer. Without this option, it is "
            "distributed over dp.",
        ),
    ] = False,
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest",
            rich_help_panel="Suggestions",
            help="List the ten layouts that fit and lose the least time to traffic and to waiting. "
            "Sizes that you give are kept. Needs --model.",
        ),
    ] = False,
    global_batch_size: Annotated[
        int | None,
        _size("Samples of a step, with --suggest.", "Suggestions", "about 4 million tokens"),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            rich_help_panel=_OUTPUT,
            help="Draw the groups of this field only, such as tp. Can be repeated.",
            show_default="tp, cp, pp, dp, ep and expt_tp, if larger than 1",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel=_OUTPUT,
            help="Light up the groups of this rank, and list their ranks and its traffic.",
            show_default="all groups, and the ranks of rank 0",
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_OUTPUT,
            help="Also draw the grid, and the memory of the stages, into this SVG file.",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_OUTPUT,
            help="Also write a page in which pointing at a rank or field lights up its groups.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", rich_help_panel=_OUTPUT, help="Print JSON for programs, on one line."
        ),
    ] = False,
) -> None:
    """Show a layout on a cluster before you have the GPUs. Needs no GPU.

    The grid has a row for each node, and the number of the group for each rank. Below are the nodes
    that groups cross, the NCCL communicators of a session, and problems with cures.

    With --model, megapg builds the model of each pipeline stage without weights, and runs a step.
    It shows the memory of each stage and the traffic of a rank. With --suggest it tries the layouts
    of the world size, and lists those that fit into memory and lose the least time.

    Groups in a node communicate over NVLink, other groups over the network. tp, cp and ep
    communicate in every layer. pp communicates for every microbatch, and dp for every step.

    megapg/tools/plan/schema.json describes the JSON.

    Exit code 0: the plan is printed, with findings or without. 2: a name does not exist, or the
    sizes do not fit each other, the cluster or the model. --suggest: also if no layout fits.

    Example: megapg plan --world-size 512 --tp 8 --pp 8 --cluster 64xH100-8

    Example: megapg plan --world-size 64 --tp 8 --pp 4 --model llama3-70b --svg plan.svg

    Example: megapg plan --world-size 16 --tp 4 --pp 2 --model train.py:build --rank 5

    Example: megapg plan --world-size 64 --cluster 8xH100-8 --model llama3-70b --suggest
    """
    if bad := _misplaced(ctx, suggest=suggest):
        refuse(bad)
    try:
        from megapg.tools.cli.plan_screen import show
        from megapg.tools.plan import make_plan
        from megapg.tools.plan.page import to_html
        from megapg.tools.plan.svg import to_svg

        if suggest:
            _suggest(ctx, cluster, as_json=as_json)
            return
        layout = ParallelLayout(
            world_size=world_size,
            tp=tp,
            pp=pp,
            cp=cp,
            ep=ep,
            expt_tp=expt_tp or tp,
            vpp=vpp,
            order=order,
            optimizer_instances=optimizer_instances,
        )
        with _progress() as progress:
            job = _job(
                model,
                layout,
                seq_length,
                micro_batch_size,
                microbatches,
                recompute,
                plain_optimizer,
            )
            machines = _cluster(cluster, world_size)
            made = make_plan(layout, machines, rank=rank, job=job, say=progress)
        fields = [cast("GroupName", each) for each in field or ()]
        picture = made.picture(fields, rank, nodes=64) if fields else made.picture(rank=rank)
        if svg is not None:
            svg.write_text(to_svg(picture, made.memory), encoding="utf-8")
        if html is not None:
            html.write_text(to_html(made, made.picture(fields, rank, nodes=64)), encoding="utf-8")
        if as_json:
            print_json(made.as_json(picture))
            return
        show(made, picture, Console(highlight=False))
    except MegapgError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"{error.filename}: {error.strerror}.")
    for file in filter(None, (svg, html)):
        say("wrote", "green", str(file))


_KEPT = ("tp", "pp", "cp", "ep", "expt_tp", "vpp", "order", "optimizer_instances")
_ONE_LAYOUT = ("microbatches", "field", "rank", "svg", "html")


def _misplaced(ctx: typer.Context, *, suggest: bool) -> str:
    """Return what is wrong with the options of ``--suggest``; empty if nothing is."""
    given = _given(ctx, ("global_batch_size", "model", *_ONE_LAYOUT))
    if not suggest:
        return "--global-batch-size: only with --suggest." if "global_batch_size" in given else ""
    if "model" not in given:
        return "--suggest: only with --model."
    wrong = [f"--{name}" for name in _ONE_LAYOUT if name in given]
    return f"{', '.join(wrong)}: not with --suggest, which looks at many layouts." if wrong else ""


def _given(ctx: typer.Context, names: Iterable[str]) -> dict[str, Any]:
    """Return the options that the user has written, by their names here."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    written = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return {name: ctx.params[name] for name in written}


def _suggest(ctx: typer.Context, named: str, *, as_json: bool) -> None:
    """Print the first layouts that fit."""
    from megapg.tools.plan import make_plan

    options = ctx.params
    cluster = _cluster(named, options["world_size"])
    names = ("seq_length", "micro_batch_size", "microbatches", "recompute", "plain_optimizer")
    job = _job(options["model"], ParallelLayout(world_size=1), *(options[name] for name in names))
    assert job is not None  # _misplaced has refused a missing model
    # Refuses too few GPUs, and an order that does not exist.
    make_plan(ParallelLayout(world_size=options["world_size"], order=options["order"]), cluster)
    with _progress() as progress:
        from megapg.tools.cli import plan_suggest
        from megapg.tools.plan.models import find_model
        from megapg.tools.plan.suggest import suggest

        made = suggest(
            options["world_size"],
            cluster,
            find_model(job.model),
            job,
            samples=options["global_batch_size"],
            given=_given(ctx, _KEPT),
            recompute=[job.recompute] if options["recompute"] else [],
            say=progress,
        )
    if as_json:
        first = replace(make_plan(made.found[0].layout, cluster), training=made.found[0].training)
        print_json(first.as_json() | {"suggestions": plan_suggest.as_json(made, named, job)})
    else:
        plan_suggest.show(made, cluster, named, job, Console(highlight=False))


def _cluster(named: str, world_size: int) -> Cluster:
    """Return the cluster. A number of nodes that the user names is that of the ranks."""
    from megapg.tools.plan import load_cluster

    cluster = load_cluster(named)
    needed = -(-world_size // cluster.node_size)
    if re.match(r"\d+x", named.strip()) and cluster.nodes and cluster.nodes > needed:
        most = cluster.nodes * cluster.node_size
        raise PlanError(
            f"{cluster.nodes} nodes of {cluster.name} have {most} GPUs, but --world-size is "
            f"{world_size}. Use {needed}x{cluster.name}, or --world-size {most}."
        )
    return cluster


def _job(
    model: str | None,
    layout: ParallelLayout,
    seq_length: int | None,
    micro_batch_size: int | None,
    microbatches: int | None,
    recompute: Recomputation | None,
    plain_optimizer: bool,
) -> Job | None:
    """Return the job of the options; None without a model."""
    options = {
        "--seq-length": seq_length,
        "--micro-batch-size": micro_batch_size,
        "--microbatches": microbatches,
        "--recompute": recompute,
        "--plain-optimizer": plain_optimizer,
    }
    if model is None:
        if given := [name for name, value in options.items() if value]:
            refuse(f"{', '.join(given)}: only with --model.")
        return None
    from megapg.tools.plan import Job
    from megapg.tools.plan.models import find_model
    from megapg.tools.plan.training import default_microbatches

    length, samples = seq_length or find_model(model).seq_length, micro_batch_size or 1
    return Job(
        model=model,
        seq_length=length,
        micro_batch_size=samples,
        microbatches=microbatches or default_microbatches(layout, length, samples),
        recompute=recompute.value if recompute else "none",
        distributed_optimizer=not plain_optimizer,
    )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show progress on the standard error: on a terminal all of it, in a file a line at times."""
    console = Console(stderr=True, highlight=False)
    due = time.monotonic() + _PAUSE

    def print_if_due(text: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _PAUSE
            say("building", "green", f"the model: {text}", stderr=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="megatron")  # of packages for GPUs
        if not console.is_terminal:
            yield print_if_due
            return
        with console.status("building the model") as status:
            yield lambda text: status.update(f"building the model: {text}")
