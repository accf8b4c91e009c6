"""The line about our parameter, in a docstring that describes each of the others as Google's style
has it.
"""

from __future__ import annotations

import ast
import re

from megapg.migrate.edit.texts import DESCRIPTION, TYPED
from megapg.migrate.migration import Edit
from megapg.migrate.python.insert import newline_of
from megapg.migrate.python.methods import is_docstring, parameters
from megapg.migrate.python.scopes import FunctionNode, Scope
from megapg.migrate.python.source import Source

_SECTION = re.compile(r"^([ \t]*)(?:Args|Arguments|Parameters):[ \t]*$", re.MULTILINE)
_ENTRY = re.compile(r"^([ \t]+)\*{0,2}(\w+)[ \t]*(\([^\n]*\))?[ \t]*:", re.MULTILINE)
_INSTANCE = frozenset({"self", "cls", "ctx"})


def described(source: Source, function: Scope, width: int | None) -> list[Edit]:
    """The edit that describes the new parameter of a function behind the others; none where its
    docstring, or for a constructor that of its class, does not describe all of these.

    Args:
        source: the file.
        function: the scope of the function.
        width: up to which a line may grow; as far as it wants where that is None.
    """
    node = function.node
    assert isinstance(node, FunctionNode)
    others = {each.arg for each in parameters(node)} - _INSTANCE
    holders: list[ast.AST] = [node]
    if node.name == "__init__" and function.parent is not None:
        holders.append(function.parent.node)
    for holder in holders:
        begin, end = _section(source, holder)
        entries = [*_ENTRY.finditer(source.text, begin, end)]
        indent = min((each[1] for each in entries), key=len, default="")
        outer = [each for each in entries if each[1] == indent]
        if outer and others <= {each[2] for each in outer}:
            is_typed = all(each[3] for each in outer)
            fits = width is None or len(indent + TYPED) <= width
            text = TYPED if is_typed and fits else DESCRIPTION
            return [Edit(end, end, newline_of(source) + indent + text, "docstring")]
    return []


def _section(source: Source, holder: ast.AST) -> tuple[int, int]:
    """Where a docstring's section about the parameters begins and ends; empty without one."""
    body = getattr(holder, "body", ())
    if not body or not is_docstring(body[0]):
        return 0, 0
    begin, end = source.extent(body[0])
    literal = source.text[begin:end]
    quotes = literal[-3:]
    if quotes not in ('"""', "'''") or literal.lstrip("rRuU")[:3] != quotes:
        return 0, 0  # one line, or several strings
    found = _SECTION.search(source.text, begin, end)
    if found is None:
        return 0, 0
    last = found.end()
    for line in re.finditer(r"[^\r\n]+", source.text[found.end() : end - len(quotes)]):
        if line[0].strip():
            if not re.match(rf"{found[1]}[ \t]", line[0]):
                break
            last = found.end() + line.start() + len(line[0].rstrip())
    return found.end(), last
