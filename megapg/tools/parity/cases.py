"""Layouts and functions as users write them.

A layout is ``"tp=2 pp=2 vpp=2 sequence_parallel"``, and a function ``train.py:build`` or
``package.module:build``.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from megapg.errors import LayoutError, ParityInputError
from megapg.layout import EmbeddingRanks, Field, ParallelLayout

Option: TypeAlias = int | bool | str
Setting: TypeAlias = Option | Sequence[int] | EmbeddingRanks

FACTORS = ("tp", "pp", "cp", "ep", "dp", "gtp_remat")
_INTEGERS = ("expt_tp", "vpp", "expt_gtp_remat", "optimizer_instances")
_LISTS = ("hierarchical_cp", "ranks")
_STAGES = ("embedding_ranks", "position_embedding_ranks")
SIZES = (*FACTORS, *_INTEGERS, "world", "order", "hybrid_cp", *_LISTS, *_STAGES)
"""The words of a layout that :func:`megapg.session` takes, and ``dp`` and ``world``."""
_WORDS: Mapping[str, Option] = {"true": True, "false": False}

# The axes of each grid, in the order of the search for a cause.
DENSE_AXES: tuple[Field, ...] = ("tp", "cp", "dp", "pp")
EXPERT_AXES: tuple[Field, ...] = ("expt_tp", "ep", "expt_dp", "pp")


@dataclass(frozen=True)
class LayoutCase:
    """One layout to compare, and the options that ``build`` gets in it.

    Attributes:
        text: as the user wrote it.
        layout: the ranks of each group.
        options: further words, passed to ``build`` as keyword arguments.
    """

    text: str
    layout: ParallelLayout
    options: Mapping[str, Setting]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.layout.world_size

    @property
    def dp(self) -> int:
        """Size of the data-parallel group."""
        return self.layout.dp

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes above one that were written."""
        layout = self.layout
        sizes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep}
        sizes["dp"] = max(self.dp // layout.ep, 1)
        return {axis: size for axis, size in sizes.items() if size > 1}

    def axes(self, *, expert: bool) -> list[Field]:
        """The axes of more than one rank, for a dense or an expert parameter."""
        axes = EXPERT_AXES if expert else DENSE_AXES
        return [axis for axis in axes if len(self.layout.members(axis, 0)) > 1]

    def globals_of(self, sizes: Mapping[str, int]) -> ParallelLayout:
        """A layout of other sizes over the same ranks.

        Raises:
            ParityInputError: the sizes do not fit the ranks.
        """
        written = " ".join(f"{name}={size}" for name, size in sizes.items())
        return parse_layout(f"{written} world={self.world_size}").layout


def parse_layout(written: str | Mapping[str, Setting]) -> LayoutCase:
    """Read one layout. The world is the product of the sizes tp, pp, cp, ep, dp and gtp_remat.

    Raises:
        ParityInputError: a word is no size, or the sizes do not fit together.
    """
    words = _words(written) if isinstance(written, str) else dict(written)
    if isinstance(written, str) and not words:
        raise ParityInputError("an empty layout: write sizes, such as 'tp=2'.")
    text = " ".join(
        name if value is True else f"{name}={_text(value)}" for name, value in words.items()
    )
    found = {name: _setting(words.pop(name), name, text) for name in SIZES if name in words}
    sizes = {name: found.get(name, 1) for name in FACTORS}
    world = found.pop("world", math.prod(sizes.values()))
    found.pop("dp", None)
    if found.get("vpp") == 1:
        del found["vpp"]
    try:
        layout = ParallelLayout(world_size=world, **found)
    except LayoutError as error:
        raise ParityInputError(f"layout {text!r}: {error}") from error
    return LayoutCase(text or "one rank", layout, words)


def parse_sizes(text: str) -> dict[str, int]:
    """Read sizes alone, such as ``"tp=2"``.

    Raises:
        ParityInputError: a word is no size.
    """
    return {name: _size(value, name, text) for name, value in _words(text).items()}


@dataclass(frozen=True)
class Stages:
    """Chooses ranks of a pipeline by the numbers of their stages."""

    numbers: tuple[int, ...]

    def __call__(self, pipeline: list[int]) -> list[int]:
        """Return the ranks of these stages. A stage that the pipeline lacks is left out."""
        return [pipeline[number] for number in self.numbers if number < len(pipeline)]


def _setting(value: Any, name: str, text: str) -> Any:
    """Return a setting of a layout as ``megapg.session`` takes it."""
    if name in _STAGES and callable(value):
        return value
    if name in (*_LISTS, *_STAGES):
        numbers = value.split("-") if isinstance(value, str) else value
        numbers = [numbers] if isinstance(numbers, int) else numbers
        if not all(str(each).isdecimal() for each in numbers):
            raise ParityInputError(
                f"layout {text!r}: {name} takes whole numbers joined by -, such as {name}=0-1."
            )
        found = tuple(int(each) for each in numbers)
        return Stages(found) if name in _STAGES else found
    if name in ("order", "hybrid_cp"):
        return value
    return _size(value, name, text)


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return "-".join(map(str, value))
    return getattr(value, "__name__", str(value))


def _words(text: str) -> dict[str, Option]:
    found: dict[str, Option] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not name.isidentifier() or (equals and not value):
            raise ParityInputError(
                f"layout {text!r}: {word!r} is no size. Write sizes such as 'tp=2 pp=2'; the sizes "
                f"are {', '.join(SIZES)}."
            )
        if name in found:
            raise ParityInputError(f"layout {text!r} gives {name} twice.")
        found[name] = _value(value) if equals else True
    return found


def _value(text: str) -> Option:
    return int(text) if text.isdecimal() else _WORDS.get(text.lower(), text)


def _size(value: object, name: str, text: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ParityInputError(f"layout {text!r}: {name} must be a whole number from 1.")
    return value


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
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script
    module = importlib.import_module(path.stem)
    if module.__file__ != place:
        raise ParityInputError(f"{place}: another module is called {path.stem}. Rename the file.")
    return module
