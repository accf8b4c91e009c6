"""The command line: ``megapg plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from megapg.cli.console import AsJson, add_to, print_json, refuse, say
from megapg.errors import MegapgError
from megapg.layout import DEFAULT_ORDER, GroupName, ParallelLayout

app = typer.Typer()


def _size(text: str) -> typer.models.OptionInfo:
    return cast("typer.models.OptionInfo", typer.Option(min=1, metavar="N", help=text))


@add_to(app)
def plan(
    world_size: Annotated[int, _size("Number of ranks.")],
    tp: Annotated[int, _size("Tensor parallel size.")] = 1,
    pp: Annotated[int, _size("Pipeline parallel size.")] = 1,
    cp: Annotated[int, _size("Context parallel size.")] = 1,
    ep: Annotated[int, _size("Expert parallel size.")] = 1,
    expt_tp: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Tensor parallel size of experts.", show_default="tp"
        ),
    ] = None,
    vpp: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Model chunks of a rank.", show_default="none"),
    ] = None,
    order: Annotated[
        str, typer.Option(metavar="AXES", help="Axes, the fastest varying first.")
    ] = DEFAULT_ORDER,
    optimizer_instances: Annotated[int, _size("Replicas of the distributed optimizer.")] = 1,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Machines, such as H100-8 or 64xH100-8 for 64 nodes: A100-8, H100-8, H200-8, "
            "B200-8, GB200-NVL72, or a TOML file.",
        ),
    ] = "H100-8",
    field: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD",
            help="Draw the groups of this field only, such as tp. Can be repeated.",
            show_default="tp, cp, pp, dp, ep and expt_tp, if larger than 1",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Light up the groups of this rank, and list their ranks.",
            show_default="all groups, and the ranks of rank 0",
        ),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw the grid into this SVG file."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a page in which pointing at a rank or field lights up its groups.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a layout on a cluster before you have the GPUs. Needs no GPU and no torch.

    The grid has a row for each node, and the number of the group for each rank. Below are the
    nodes that groups cross, the NCCL communicators of a session, and problems with cures.

    Groups in a node communicate over NVLink, other groups over the network. tp, cp and ep
    communicate in every layer, pp for every microbatch, and dp for every step.

    megapg/plan/schema.json describes the JSON.

    Exit code 0: the plan is printed, with findings or without. 2: the sizes do not fit together or
    on the cluster, or an option names what does not exist.

    Example: megapg plan --world-size 512 --tp 8 --pp 8 --ep 8 --cluster 64xH100-8

    Example: megapg plan --world-size 64 --tp 4 --pp 2 --rank 5 --svg plan.svg --html plan.html
    """
    try:
        from megapg.plan import make_plan
        from megapg.plan.page import to_html
        from megapg.plan.screen import show
        from megapg.plan.svg import to_svg

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
        made = make_plan(layout, cluster, rank=rank)
        fields = [cast("GroupName", each) for each in field or ()]
        picture = made.picture(fields, rank, nodes=64) if fields else made.picture(rank=rank)
        if svg is not None:
            svg.write_text(to_svg(picture), encoding="utf-8")
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
