"""The command line: ``megapg parity``."""

from __future__ import annotations

import enum
from typing import Annotated

import typer
from rich.console import Console

from megapg.errors import MegapgError
from megapg.tools.cli.console import AsJson, add_to, print_json, refuse, say

app = typer.Typer()

_DEFAULT = ("tp=2", "pp=2", "dp=2")


class Precision(enum.StrEnum):
    """Precisions to choose from."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"


@add_to(app)
def parity(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A built-in model: gpt, moe or t5. Or a function build(pg) that returns the model:"
            " FILE.py:FUNCTION or MODULE:FUNCTION.",
        ),
    ],
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="Sizes of tp, pp, cp, ep, dp, expt_tp and vpp, such as 'tp=2 pp=2', and other "
            "settings of megapg.session, such as optimizer_instances=2 or embedding_ranks=0-1 (of "
            "stages). Can be repeated. Other words are keyword arguments of build in this layout, "
            "as in 'tp=2 sequence_parallel'.",
            show_default=", ".join(_DEFAULT),
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="A function step(model, batch, pg) that returns the loss: FILE.py:FUNCTION.",
            show_default="the loss of the next token",
        ),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="FUNCTION",
            help="A function sample(n) that returns sample n of the global batch: "
            "FILE.py:FUNCTION.",
            show_default="random tokens",
        ),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(
            help="Precision of the comparison.",
            show_default="float64, or float32 if the model does not run in float64",
        ),
    ] = None,
    seq_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens in a sample.", show_default="16"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Tokens to choose from.", show_default="the model's vocabulary"
        ),
    ] = None,
    global_sizes: Annotated[
        str | None,
        typer.Option(
            "--globals",
            metavar="SIZES",
            help="Sizes of the groups in Megatron's globals. If they differ from the layout, code "
            "that reads the globals gives wrong results.",
            show_default="the layout's sizes",
        ),
    ] = None,
    deadline: Annotated[
        int, typer.Option(min=1, metavar="N", help="Seconds that each layout may take.")
    ] = 180,
    as_json: AsJson = False,
) -> None:
    """Compare what a model computes in other layouts with what one rank computes.

    All layouts start with the same weights and the same global batch. The command compares losses,
    gradients, the gradient norm, the weights after two optimizer steps, and replicas. All ranks are
    processes on this machine; no GPU is needed.

    Exit code 0: all layouts agree. 1: a layout differs. 2: the input can't be compared.

    Example: megapg parity train.py:build --layout tp=2 --layout "pp=2 ep=2"
    """
    console = Console(stderr=as_json)
    try:
        with console.status("importing torch and Megatron-core") as status:
            from megapg.testing import parity as compare
            from megapg.tools.parity.cases import parse_sizes

            report = compare(
                model,
                layout or _DEFAULT,
                step=step,
                sample=sample,
                precision=None if precision is None else precision.value,
                seq_length=seq_length,
                vocab_size=vocab_size,
                global_sizes=None if global_sizes is None else parse_sizes(global_sizes),
                deadline=deadline,
                progress=status.update,
            )
    except ImportError as error:
        refuse(
            f"{error}. Parity needs torch and Megatron-core: pip install 'megapg[torch,megatron]'."
        )
    except MegapgError as error:
        refuse(str(error))
    if as_json:
        print_json(report.as_dict())
    else:
        console.print(report.table())
        for line in report.findings():
            say("differs", "bold red", line)
        for note in report.notes:
            say("note", "yellow", note)
        say(
            "agrees" if report.agrees else "differs",
            "green" if report.agrees else "bold red",
            f"{sum(each.agrees is report.agrees for each in report.layouts)} of "
            f"{len(report.layouts)} layouts; "
            f"{report.samples} samples in {report.precision}, loss {report.loss:.6g} on one rank; "
            f"up to {report.tolerance:.0e} counts as rounding",
        )
    raise typer.Exit(0 if report.agrees else 1)
