"""The path from a passed object to a reference, as text for people."""

from __future__ import annotations

from typing import NamedTuple

from typing_extensions import override

_STEPS = 50  # most steps in the text of a path, to bound the cost of long paths

# Kinds of steps: a passed object, an attribute, the value of a key or index, a key, a part of an
# opaque object, a module's table of submodules, and no step.
ROOT, ATTRIBUTE, ITEM, KEY, PART, MODULES, SAME = range(7)


class Path(NamedTuple):
    """The path to a reference. The text is made only when needed."""

    parent: Path | None
    kind: int
    key: object

    @override
    def __str__(self) -> str:
        steps: list[Path] = []
        step: Path | None = self
        while step is not None and len(steps) < _STEPS:
            steps.append(step)
            step = step.parent
        text = "..." if step is not None else ""
        in_modules = False
        for kind, key in ((step.kind, step.key) for step in reversed(steps)):
            if kind == ROOT:
                text = str(key)
            elif kind == ATTRIBUTE or (kind == ITEM and in_modules):
                text += f".{key}"
            elif kind == ITEM:
                text += f"[{_plain(key)}]"
            elif kind == KEY:
                text += f"[key {_plain(key)}]"
            elif kind == PART:
                text += f"<{key}>"
            in_modules = kind == MODULES
        return text

    def by_modules(self) -> bool:
        """True if the last step leads from a module to its submodules."""
        return self.kind == MODULES or (self.parent is not None and self.parent.kind == MODULES)

    def name(self) -> str:
        """Return the last attribute or string key on the path."""
        step: Path | None = self
        while step is not None:
            if step.kind == ATTRIBUTE or (step.kind == ITEM and type(step.key) is str):
                return str(step.key)
            step = step.parent
        return "an item"


TELLING = frozenset({str, int, bool, type(None)})  # types of keys that are shown in full


def _plain(key: object) -> str:
    # repr() of a key of any other type may be long or slow.
    if type(key) in TELLING:
        return repr(key)
    return f"a {type(key).__name__}"
