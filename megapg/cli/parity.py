"""The command line: ``megapg parity``."""

from __future__ import annotations

import enum
from typing import Annotated

import typer
from rich.console import Console

from megapg.cli.console import AsJson, add_to, print_json, refuse, say
from megapg.errors import MegapgError

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
            help="FILE.py:FUNCTION or MODULE:FUNCTION, a function build(pg) that makes the model; "
            "or gpt, moe or t5.",
        ),
    ],
    layout: Annotated[
        list[str] | None,
        typer.Option(
            help="Sizes of tp, pp, cp, ep, dp, expt_tp and vpp, such as 'tp=2 pp=2'; may be given "
            "more than once. Words that are no sizes go to build, as in 'tp=2 sequence_parallel'. "
            f"[default: {', '.join(_DEFAULT)}]"
        ),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(help="FILE.py:FUNCTION, step(model, batch, pg) that returns the loss."),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(help="FILE.py:FUNCTION, sample(n) that makes sample n of the global batch."),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(help="[default: float64, and float32 if the model does not run in it]"),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sample. [default: 16]")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Tokens to choose from. [default: the model's]")
    ] = None,
    global_sizes: Annotated[
        str | None,
        typer.Option(
            "--globals",
            metavar="SIZES",
            help="Sizes of the groups in Megatron's globals, to find code that reads them in place "
            "of pg. [default: the layout's]",
        ),
    ] = None,
    deadline: Annotated[int, typer.Option(min=1, help="Seconds for each layout.")] = 180,
    as_json: AsJson = False,
) -> None:
    """Compare what a model computes in other layouts with what one rank computes.

    Every layout starts from the same weights and gets the same global batch. Compared are losses,
    gradients, the gradient norm, the weights after two optimizer steps, and replicas. All ranks are
    processes on this machine; no GPU is needed.

    Exit code 0: all layouts agree; 1: one differs; 2: bad input.

    Example: megapg parity train.py:build --layout tp=2 --layout "pp=2 ep=2"
    """
    console = Console(stderr=as_json)
    try:
        with console.status("importing torch and Megatron-core") as status:
            from megapg.testing import parity as compare
            from megapg.testing.agreement.cases import parse_sizes

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
