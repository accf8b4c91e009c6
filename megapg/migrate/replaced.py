"""Find what a project replaces at run time: patches in tests, and assignments to modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.facts import Everything
from megapg.migrate.project import Project
from megapg.migrate.uses import Span

_MENTIONS = re.compile(rb"\b(patch|setattr)\b")
_STRING = re.compile(r"""["']([A-Za-z_][\w.]*)\.(\w+)["']""")
_OBJECT = re.compile(r"""(?:setattr|object)\(\s*([A-Za-z_][\w.]*)\s*,\s*["'](\w+)["']""")


@dataclass(frozen=True)
class Replaced:
    """A name in a module that another file replaces.

    Attributes:
        module: the module.
        parts: the name; with a second part if an attribute of it is replaced.
        path: the file that does so.
        span: of a string with the name of a getter, which can be rewritten.
        getter: that getter.
    """

    module: Path
    parts: tuple[str, ...]
    path: Path
    span: Span | None = None
    getter: str = ""


def find_replaced(project: Project, everything: Everything) -> list[Replaced]:
    """Return what the files of a project replace in its modules."""
    found = []
    for path, facts in everything.items():
        named: list[tuple[str, Span | None, str]] = [(each, None, "") for each in facts.replaced]
        named += [(text, span, getter) for span, (text, getter) in facts.strings.items()]
        for dotted, span, getter in named:
            at = project.split(project.absolute(dotted, path), path)
            if at is not None and at[1]:
                found.append(Replaced(*at, path, span, getter))
    known = {(each.path, each.module, each.parts) for each in found}
    for path in project.mentioning(_MENTIONS):
        for pattern in (_STRING, _OBJECT):
            for dotted in _patched(project, path, pattern):
                at = project.split(dotted, path)
                is_new = pattern is _OBJECT or (path, *at) not in known if at else False
                if at is not None and at[1] and is_new:
                    found.append(Replaced(*at, path))
    return found


def _patched(project: Project, path: Path, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yield the dotted names in calls such as ``patch("a.b")`` and ``setattr(a, "b", ...)``."""
    imports = project.table(path).everywhere
    for owner, name in pattern.findall(project.data(path).decode(errors="replace")):
        head, dot, rest = owner.partition(".")
        for each in imports.get(head, {head}):
            yield f"{each}{dot}{rest}.{name}"
