"""Find the quick tests: those that start no process, judged by the text of their module."""

import ast
import functools
import re
from pathlib import Path

_STARTS = re.compile(
    r"\b(run_distributed|Ranks|subprocess|Popen|multiprocessing|fork|hosting|preloaded|ranks|Forge)\b"
    r"|\b(distributed|megapg|at_once|mounted|run_on_old_core)\("
)


@functools.cache
def _starting(file: Path) -> frozenset[str]:
    """Return functions and fixtures at the top of a file that start processes or use such ones."""
    source = file.read_text()
    texts = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    starting = {name for name, text in texts.items() if _STARTS.search(text)}
    while True:
        words = re.compile(rf"\b({'|'.join(starting)})\b") if starting else re.compile(r"(?!)")
        more = {name for name, text in texts.items() if words.search(text)} - starting
        if not more:
            return frozenset(starting)
        starting |= more


def is_quick(file: Path, test: str) -> bool:
    """True if a test, or its class, starts no process."""
    return test not in _starting(file)
