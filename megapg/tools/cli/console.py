"""Shared parts of the commands: how they are added, and how they refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated, Never, ParamSpec

import typer
from rich.console import Console
from rich.text import Text

P = ParamSpec("P")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, on one line.")]


def make_app(about: str) -> typer.Typer:
    """Return an app for commands, which prints its help if no command is named."""
    return typer.Typer(
        help=about, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
    )


def add_to(app: typer.Typer) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Add a command to an app; typer alone would keep the line breaks of its docstring."""

    def add(function: Callable[P, None]) -> Callable[P, None]:
        app.command(help=_help_of(function))(function)
        return function

    return add


def add_default_to(app: typer.Typer) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Add the command that an app runs if none of its commands is named."""

    def add(function: Callable[P, None]) -> Callable[P, None]:
        app.callback(invoke_without_command=True, help=_help_of(function))(function)
        return function

    return add


def _help_of(function: Callable[P, None]) -> str:
    paragraphs = cleandoc(function.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs)


def say(verdict: str, style: str, what: str | Text, *, stderr: bool = False) -> None:
    """Print a word in colour, and its text: on one line, unless a terminal is narrower."""
    console = Console(stderr=stderr, highlight=False)
    text = what if isinstance(what, Text) else Text(what)
    console.print(Text(verdict, style=style), text, soft_wrap=not console.is_terminal)


def print_json(value: object) -> None:
    """Print a value as JSON on one line; a value without a JSON form is written as text."""
    typer.echo(json.dumps(value, default=str))


def refuse(message: str | Text) -> Never:
    """End the command with an error and exit code 2."""
    say("error", "bold red", message, stderr=True)
    sys.stdout.flush()
    raise typer.Exit(2) from None
