"""The command line: ``megapg doctor``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from megapg.errors import MegapgError
from megapg.tools.cli.console import add_to, refuse

if TYPE_CHECKING:  # loaded when the command runs, so that --help is quick
    from megapg.tools.doctor.across import Gathering


app = typer.Typer()


@add_to(app)
def doctor(
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print JSON for programs, on one line. schema.json of megapg.tools.doctor "
            "describes it.",
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(metavar="N", min=0.1, help="Seconds to wait for the other ranks of the job."),
    ] = 30.0,
) -> None:
    """Report problems of this machine or job, its launcher, network and software.

    Run it alone, or start it as you start your job. In a job rank 0 prints one report about all
    ranks, and names the ranks that did not come. It creates no process group.

    Exit code 0: no problem found. 1: problems found. 2: the doctor could not run.

    Example: megapg doctor

    Example: torchrun --nproc-per-node 8 -m megapg doctor

    Example: srun megapg doctor --json
    """
    try:
        code = _run(timeout, as_json=as_json)
    except (MegapgError, ImportError) as error:
        refuse(str(error))
    raise typer.Exit(code)


def _run(timeout: float, *, as_json: bool) -> int:
    from megapg.tools.doctor.account import Account
    from megapg.tools.doctor.checks import examine
    from megapg.tools.doctor.gather import hold
    from megapg.tools.doctor.rows import rows
    from megapg.tools.doctor.survey import collect

    facts = collect()
    launch = facts.launch
    account = Account(launch.rank, facts.host, facts.device, tuple(rows(facts)), examine(facts))

    def judge(gathering: Gathering) -> int:
        from megapg.tools.doctor.render import show
        from megapg.tools.doctor.report import merge

        report = merge(gathering)
        if as_json:
            print(json.dumps(report.as_json()), flush=True)
        else:
            show(report)
        return 0 if report.good else 1

    return hold(launch, account, timeout, judge)
