"""The command line: one module for each command, or for those that belong together."""

from megapg.cli.app import app

__all__ = ["app"]
