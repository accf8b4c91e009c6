"""What a piece of text is by itself: an expression, within a comment, within f-strings."""

from __future__ import annotations

import ast
import io
import re
import string
import tokenize
import warnings
from contextlib import suppress

NEWLINE = re.compile(r"\r\n|\r|\n")
"""What ends a line."""
DESCRIPTION = "pg_collection: The process groups; None for the globals."
"""What a docstring that describes each parameter says of ours."""
TYPED = DESCRIPTION.replace(":", " (ProcessGroupCollection, optional):", 1)
"""The same where it has the types of parameters, too."""
_DESCRIBING = re.compile(
    rf"(?:{NEWLINE.pattern})[ \t]*(?:{re.escape(DESCRIPTION)}|{re.escape(TYPED)})"
)


def describes(text: str) -> bool:
    """Whether a text is the line about our parameter, which means nothing in any string."""
    return _DESCRIBING.fullmatch(text) is not None


def expression(text: str) -> ast.expr | None:
    """The expression that a text is; None where it is none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(f"({text}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        return None


def ends_in_comment(text: str) -> bool:
    """Whether a text ends within a comment, as far as its last line tells."""
    line = NEWLINE.split(text[-1000:])[-1].strip()
    with suppress(tokenize.TokenError, SyntaxError):
        tokens = tokenize.generate_tokens(io.StringIO(line).readline)
        return "#" in line and any(token.type == tokenize.COMMENT for token in tokens)
    return False


def open_quotes(text: str) -> list[str]:
    """The quotes of the f-strings that are open behind a text; none where Python checks itself."""
    quotes: list[str] = []
    with suppress(tokenize.TokenError, SyntaxError):  # at the end, for what is open
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            name = tokenize.tok_name[token.type]
            if name.endswith("STRING_START"):
                quotes.append(token.string.lstrip(string.ascii_letters))
            elif name.endswith("STRING_END"):
                quotes.pop()
    return quotes
