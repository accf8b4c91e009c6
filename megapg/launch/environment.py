"""Read an environment, with errors that name the variable, and change it temporarily."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from megapg.errors import LaunchError


class Variables:
    """The variables of one process. Reading a variable that is set but empty is an error."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def __contains__(self, name: str) -> bool:
        return name in self._environment

    def among(self, names: Iterable[str]) -> list[str]:
        """Return the names that are set."""
        return [name for name in names if name in self._environment]

    def text(self, name: str, default: str | None = None) -> str:
        """Return the value. If the variable is not set, return the default or raise."""
        value = self._environment.get(name, default)
        if value is None:
            raise LaunchError(f"{name} is not set.")
        if not value.strip() and name in self._environment:
            raise LaunchError(f"{name} is set but empty: whatever was to set it failed.")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return the value as a whole number. If it is not set, return the default or raise."""
        text = self.text(name, None if default is None else str(default))
        try:
            return int(text)
        except ValueError:
            raise LaunchError(f"{name}={text!r} is no whole number.") from None

    def maybe(self, name: str) -> int | None:
        """Return the value as a whole number; None if the variable is not set."""
        return self.number(name) if name in self else None

    # These never raise, whatever the variable holds.

    def plain(self, name: str) -> str:
        """Return the value; empty if the variable is not set."""
        return self._environment.get(name, "").strip()

    def whole(self, name: str) -> int | None:
        """Return the value as a whole number; None if it is none, or is not set."""
        text = self.plain(name)
        return int(text) if text.isdecimal() else None

    def like(self, pattern: str) -> list[str]:
        """Return the names that are set and match a pattern with ``*``."""
        if "*" not in pattern:
            return self.among([pattern])
        return sorted(name for name in self._environment if fnmatchcase(name, pattern))


@contextlib.contextmanager
def overridden(variables: Mapping[str, str]) -> Iterator[None]:
    """Context that sets environment variables of this process and restores them at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
