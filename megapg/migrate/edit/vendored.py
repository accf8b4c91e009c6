"""The module that a package gets in place of megapg: its text, of as many functions as are used.

Its first line says who wrote it, with a sum of the rest by which an edit is seen. Formatters change
neither.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_HEADER = "# megapg migrate --runtime vendored wrote this, and writes it anew. "
_FIRST_LINE = re.compile(re.escape(_HEADER) + r"(\w{16})\s*\n")
# The first has the module's docstring; each may use what is in those before it.
_SOURCES = ("process_groups.py", "more_getters.py")
# What formatters add, remove and exchange.
_LAYOUT = re.compile(r"[\s(),'\"]+")
_ALWAYS = ("ProcessGroupCollection", "resolve")


@dataclass(frozen=True)
class _Part:
    """A definition, with the comment on top of it."""

    names: frozenset[str]  # what it defines
    uses: frozenset[str]  # the names that it mentions
    text: str
    is_block: bool  # a function or a class, and no constant


@dataclass(frozen=True)
class Written:
    """Such a module, as it is there."""

    edited: bool  # whether somebody has changed it
    sum: str  # of what was written
    names: frozenset[str]  # that it defines


def text_of(names: Collection[str]) -> str:
    """The text of the module that has the functions of these names."""
    docstring, parts, imports = _templates()
    by_name = {name: part for part in parts for name in part.names}
    chosen: set[_Part] = set()
    waiting = [*_ALWAYS, *sorted(names)]
    while waiting:
        part = by_name.get(waiting.pop())
        if part is not None and part not in chosen:
            chosen.add(part)
            waiting += part.uses
    used = {name for part in chosen for name in part.uses}
    lines = [line for bound, line in imports if bound in used or bound == "annotations"]
    body = f'"""{docstring}"""\n\n{"".join(_joined(lines))}'
    last_is_block = False
    for number, part in enumerate(each for each in parts if each in chosen):
        blocks = part.is_block or last_is_block
        has_comment = part.text.startswith("#")
        gap = "\n\n" if blocks else "\n" if not number or has_comment else ""
        body += f"{gap}{part.text}\n"
        last_is_block = part.is_block
    return f"{_HEADER}{_sum(body)}\n{body}"


def read(text: str) -> Written | None:
    """What is there; None where megapg did not write it."""
    found = _FIRST_LINE.match(text)
    if found is None:
        return None
    defined = {match[1] for match in re.finditer(r"^(?:def|class) (\w+)", text, re.MULTILINE)}
    return Written(_sum(text[found.end() :]) != found[1], found[1], frozenset(defined))


def same(text: str, there: Written) -> bool:
    """Whether a text is what was written there, but for its layout."""
    now = read(text)
    return now is not None and now.sum == there.sum


def is_known(name: str) -> bool:
    """Whether the module can have a function or a class of that name."""
    _, parts, _ = _templates()
    return any(name in part.names for part in parts)


def _sum(body: str) -> str:
    return hashlib.sha256(_LAYOUT.sub("", body).encode()).hexdigest()[:16]


@cache
def _templates() -> tuple[str, list[_Part], list[tuple[str, str]]]:
    """The docstring, the definitions, and the imports: each name with the statement for it."""
    docstring = ""
    parts: list[_Part] = []
    imports: list[tuple[str, str]] = []
    for name in _SOURCES:
        text = files("megapg").joinpath("megatron", "vendored", name).read_text(encoding="utf-8")
        tree = ast.parse(text)
        docstring = docstring or ast.get_docstring(tree, clean=False) or ""
        for node in tree.body[1:]:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports += _imports(node)
            else:
                parts.append(_part(node, text.splitlines()))
    return docstring, parts, imports


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield alias.name, f"import {alias.name}"
        elif not (node.module or "").startswith("megapg."):
            yield alias.name, f"from {node.module} import {alias.name}"


def _joined(lines: Collection[str]) -> Iterator[str]:
    """The imports as sorters of imports have them, each module once."""
    members: dict[str, dict[str, None]] = {}
    for line in lines:
        module, _, member = line.partition(" import ")
        members.setdefault(module, {})[member] = None
    futures = [each for each in members if each.startswith("from __future__")]
    rest = sorted(members.keys() - set(futures), key=lambda each: (each.startswith("from"), each))
    for module in (*futures, *rest):
        named = (
            f" import {', '.join(sorted(members[module]))}" if module.startswith("from ") else ""
        )
        yield f"{module}{named}\n" + "\n" * (module in futures)


def _part(node: ast.stmt, lines: list[str]) -> _Part:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)]) - 1
    while lines[first - 1].startswith("#"):
        first -= 1
    targets = getattr(node, "targets", [])
    names = {getattr(node, "name", ""), *(each.id for each in targets)}
    uses = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    text = "\n".join(lines[first : node.end_lineno])
    return _Part(frozenset(names - {""}), frozenset(uses - names), text, not targets)
