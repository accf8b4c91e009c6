"""The command line: one module for each command or group of commands."""

from megapg.tools.cli.app import app

__all__ = ["app"]
