"""Functions that a user names: ``train.py:build`` or ``package.module:build``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from megapg.errors import ParityInputError


@dataclass(frozen=True)
class Named:
    """A function by its place. Each rank loads the function itself."""

    place: str  # a file, or a module
    name: str

    @property
    def __signature__(self) -> inspect.Signature:
        """The function's own signature."""
        return inspect.signature(self._load())

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Call the function."""
        return self._load()(*args, **kwargs)

    def _load(self) -> Callable[..., object]:
        module = _module(self.place)
        found: Callable[..., object] | None = getattr(module, self.name, None)
        if callable(found):
            return found
        functions = [value for value in vars(module).values() if inspect.isfunction(value)]
        named = [each.__name__ for each in functions if each.__module__ == module.__name__]
        raise ParityInputError(
            f"{self.place} has no function {self.name!r}. It has "
            f"{', '.join(named[:8]) or 'no function'}."
        )


def named(text: str) -> Named:
    """Read the text that names a function.

    Raises:
        ParityInputError: the text has no function, or there is no such file.
    """
    place, colon, name = text.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise ParityInputError(
            f"{text!r} names no function. Write FILE.py:FUNCTION or MODULE:FUNCTION, or one of "
            "gpt, moe and t5."
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ParityInputError(f"{place}: no such file.")
        place = str(Path(place).absolute())
    return Named(place, name)


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == place:
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ParityInputError(f"{place} can't be imported.")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
