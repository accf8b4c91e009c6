"""Where an expression lies in its file, and whether that is certain.

Inside of f-strings the positions of older Pythons are not always right, so there an expression is
believed to be where the syntax tree says only if its text parses to the same tree.
"""

from __future__ import annotations

import ast

from megapg.migrate.scopes import Parents
from megapg.migrate.source import Source


def locate(source: Source, node: ast.expr, parents: Parents) -> tuple[int, int, bool]:
    """Begin and end of an expression in the text, and whether they are certain.

    Where they are not, they are those of the f-string around.
    """
    begin, end = source.extent(node)
    around = [each for each in parents if isinstance(each, ast.JoinedStr)]
    if not around or parses_to(source.text[begin:end], node):
        return begin, end, True
    return *source.extent(around[-1]), False


def parses_to(text: str, node: ast.expr) -> bool:
    """Whether some source is that expression, positions apart."""
    try:
        return ast.dump(ast.parse(f"({text}\n)", mode="eval").body) == ast.dump(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
