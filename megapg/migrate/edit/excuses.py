"""The comments that an import gets which nothing in its file needs any more."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right

from megapg.migrate.edit.texts import NEWLINE, ends_in_comment
from megapg.migrate.migration import EXCUSE, WHY_UNUSED, Edit
from megapg.migrate.python.methods import kept
from megapg.migrate.python.source import Source
from megapg.migrate.python.unused import Import

_IMPORT = re.compile(r"\s*(from|import)\s")


def is_comment(edit: Edit, old: Source) -> bool:
    """Whether an edit adds such a comment, above an import or behind a line of it, and nothing
    else.
    """
    if (edit.what, edit.stop) != ("excuse", edit.start):
        return False
    line = bisect_right(old.line_starts, edit.start)
    before = old.text[old.line_starts[line - 1] : edit.start]
    behind = old.text[edit.start :].lstrip(" \t\f")
    if edit.new == EXCUSE:
        is_at_end = behind[:1] in ("", "\r", "\n", "#") and not ends_in_comment(before)
        return is_at_end and line in _lines_of_imports(old)
    is_ours = NEWLINE.sub("", edit.new).strip(" \t\f") == WHY_UNUSED
    is_line = edit.new.endswith(("\r", "\n")) and not before
    return is_ours and is_line and _IMPORT.match(behind) is not None


@kept
def _lines_of_imports(source: Source) -> set[int]:
    imports = (each for each in ast.walk(source.tree) if isinstance(each, Import))
    return {line for each in imports for line in range(each.lineno, (each.end_lineno or 0) + 1)}
