"""How the walk came to a reference, as text for people."""

from __future__ import annotations

from typing import NamedTuple

_STEPS = 50  # in the text of a path; to show all of them would cost their square

# Kinds of steps: a thing that was passed, an attribute, what is under a key or an index, a key
# itself, a part of something opaque, a module's table of modules, and no step at all.
ROOT, ATTRIBUTE, ITEM, KEY, PART, MODULES, SAME = range(7)


class Path(NamedTuple):
    """How the walk came to a reference; text only when it is asked for."""

    parent: Path | None
    kind: int
    key: object

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
        """Whether the last step is one from a module to those in it."""
        return self.kind == MODULES or (self.parent is not None and self.parent.kind == MODULES)

    def name(self) -> str:
        """Of the attribute, or the key, that leads there."""
        step: Path | None = self
        while step is not None:
            if step.kind == ATTRIBUTE or (step.kind == ITEM and type(step.key) is str):
                return str(step.key)
            step = step.parent
        return "an item"


TELLING = frozenset({str, int, bool, type(None)})  # kinds of keys


def _plain(key: object) -> str:
    # The text of a key of any other kind may be long, and costs what its owner pleases.
    if type(key) in TELLING:
        return repr(key)
    return f"a {type(key).__name__}"
