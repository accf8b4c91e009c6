"""The app that ``megapg`` runs, with all commands."""

from __future__ import annotations

from typing import Annotated

import typer

import megapg
from megapg.tools.cli.checkpoint import app as checkpoint_app
from megapg.tools.cli.console import make_app
from megapg.tools.cli.demo import app as demo_app
from megapg.tools.cli.doctor import app as doctor_app
from megapg.tools.cli.migrate import app as migrate_app
from megapg.tools.cli.parity import app as parity_app
from megapg.tools.cli.plan_command import app as plan_app

app = make_app("Process groups for Megatron-core by injection instead of module globals.")
app.add_typer(demo_app, name="demo")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(migrate_app)
app.add_typer(doctor_app)
app.add_typer(parity_app)
app.add_typer(plan_app)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megapg {megapg.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Process groups for Megatron-core by injection instead of module globals."""
