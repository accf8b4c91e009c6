"""Where an expression lies in its file, and whether that is certain.

Inside of f-strings the positions of older Pythons are not always right, so there an expression is
believed to be where the syntax tree says only if its text parses to the same tree.
"""

from __future__ import annotations

import ast
import re
import tokenize
from contextlib import suppress

from megapg.migrate.python.scopes import Parents
from megapg.migrate.python.source import Source, tokens


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


def is_shown(source: Source, parents: Parents) -> bool:
    """Whether an f-string around an expression shows its text, as ``f"{x=}"`` does."""
    return any(
        re.match(r"[\s)]*=\s*[!:}]", source.text[source.extent(each.value)[1] :])
        for each in parents
        if isinstance(each, ast.FormattedValue)
    )


def quote_in(source: Source, begin: int, parents: Parents) -> str | None:
    """The quote that may be written in an f-string for what begins there, on every Python;
    None where there is none.
    """
    above = list(parents)
    strings = [
        each
        for each, outer in zip(above, [*above[1:], None], strict=True)
        if isinstance(each, ast.JoinedStr)
        and not (isinstance(outer, ast.FormattedValue) and outer.format_spec is each)
    ]
    if len(strings) != 1:
        return None
    start, _ = source.extent(strings[0])
    delimiter = _delimiter_at(source.text, start, begin)
    return delimiter and ("'" if delimiter == '"' else '"')


def _delimiter_at(text: str, start: int, position: int) -> str | None:
    """The quote of the string literal that goes over a position; of several in a row that one."""
    delimiter, depth = None, 0
    with suppress(tokenize.TokenError, SyntaxError):  # the text begins in the middle of a file
        for token, begin, _ in tokens(text, start):
            if begin > position:
                break
            name = tokenize.tok_name[token.type]
            if depth == 0 and (name == "STRING" or name.endswith("STRING_START")):
                found = re.match(r"\w*(\"|')", token.string)
                delimiter = found[1] if found else None
            depth += name.endswith("STRING_START") - name.endswith("STRING_END")
    return delimiter
