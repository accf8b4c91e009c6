"""The help of every command, on a screen of 80 columns without colour."""

from collections.abc import Iterator

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from megapg.tools.cli import app


def commands(words: str, command: object) -> Iterator[tuple[str, object]]:
    yield words, command
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            yield from commands(f"{words} {name}", below)


@pytest.mark.parametrize(("words", "command"), [*commands("megapg", get_command(app))])
def test_help_fits_80_columns(words: str, command: TyperCommand) -> None:
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    shown = runner.invoke(app, [*words.split()[1:], "--help"])
    assert shown.exit_code == 0
    assert max(map(len, shown.output.splitlines())) <= 80
    assert "…" not in shown.output  # the name or default of an option is cut
    assert "\x1b" not in shown.output
    # Rich takes brackets for markup and drops them.
    assert not [each for each in command.params if "[default" in (getattr(each, "help", "") or "")]
