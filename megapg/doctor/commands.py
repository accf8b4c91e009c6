"""The command line: ``megapg doctor``."""

from __future__ import annotations

import json
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from megapg.errors import MegapgError

if TYPE_CHECKING:  # what it needs is loaded when it runs: --help is quick
    from megapg.doctor.across import Gathering


app = typer.Typer()


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs, on one line.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the other ranks of the job.", min=0.1)
    ] = 30.0,
) -> None:
    """Say what launched us, what this machine can do, and what looks wrong.

    Alone, it looks at this machine. Started as a job is, it brings all ranks together in one
    report, which rank 0 prints; ranks that don't come are named. It makes no process group.

    Exit code 0: nothing looks wrong; 1: something does; 2: it could not run.

    Examples: megapg doctor; torchrun --nproc-per-node 8 -m megapg doctor; srun megapg doctor --json
    """
    try:
        code = _run(timeout, as_json=as_json)
    except (MegapgError, ImportError) as error:
        message = Text("error", style="bold red").append(f" {error}", "none")
        Console(stderr=True, soft_wrap=True).print(message)
        code = 2
    raise typer.Exit(code)


# typer alone would keep the line breaks of the docstring.
_PARAGRAPHS = cleandoc(doctor.__doc__ or "").split("\n\n")
app.command(help="\n\n".join(" ".join(text.split()) for text in _PARAGRAPHS))(doctor)


def _run(timeout: float, *, as_json: bool) -> int:
    from megapg.doctor.account import Account
    from megapg.doctor.checks import examine
    from megapg.doctor.facts import collect
    from megapg.doctor.meeting import hold
    from megapg.doctor.rows import rows

    facts = collect()
    launch = facts.launch
    account = Account(launch.rank, facts.host, facts.device, tuple(rows(facts)), examine(facts))

    def judge(gathering: Gathering) -> int:
        from megapg.doctor.report import merge
        from megapg.doctor.screen import show

        report = merge(gathering)
        if as_json:
            print(json.dumps(report.as_json()), flush=True)
        else:
            show(report)
        return 0 if report.good else 1

    return hold(launch, account, timeout, judge)
