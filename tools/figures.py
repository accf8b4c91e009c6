"""Print figures of the sources: `make figures`.

Only the last rows start programs: they count the CPU time of Python.
"""

from __future__ import annotations

import argparse
import ast
import collections
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megapg"
LONG_MODULE, LONG_CLASS = 500, 300  # lines
CASES = (".py", ".txt", ".diff", ".json")
TIMES = 15


def python_in(*folders: str) -> list[Path]:
    """Return the Python files below these folders."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def lines_of(files: Sequence[Path]) -> int:
    """Return the number of lines of all files together."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def case_files() -> list[Path]:
    """Return the files in the folders ``cases`` of the tests."""
    files = sorted((ROOT / "tests").rglob("cases/**/*"))
    return [file for file in files if file.suffix in CASES]


def public_names(module: str) -> list[str]:
    """Return the names in the ``__all__`` of a package, without importing it."""
    tree = ast.parse((ROOT.joinpath(*module.split(".")) / "__init__.py").read_text("utf-8"))
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [f"{module}.{each}" for each in names]


def longest(files: Sequence[Path]) -> int:
    """Return the number of lines of the longest file."""
    return max((lines_of([file]) for file in files), default=0)


def long_modules() -> list[str]:
    """Return the package's modules of more than ``LONG_MODULE`` lines."""
    files = {file: lines_of([file]) for file in python_in("megapg")}
    return [f"{name(file)} {size}" for file, size in files.items() if size > LONG_MODULE]


def long_classes() -> list[str]:
    """Return the package's classes of more than ``LONG_CLASS`` lines."""
    found = []
    for file in python_in("megapg"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size > LONG_CLASS:
                    found.append(f"{name(file)}:{node.name} {size}")
    return found


def same_names() -> list[str]:
    """Return the names that modules in several folders of the package share."""
    folders = collections.defaultdict(list)
    for file in python_in("megapg"):
        if not file.stem.startswith("__"):
            folders[file.stem].append(name(file))
    return [" ".join(files) for files in folders.values() if len(files) > 1]


def imports_of(folder: str, other: str) -> list[str]:
    """Return the modules of one part of the package that import another part."""
    files = python_in(f"megapg/{folder}")
    return [name(file) for file in files if any(each.startswith(other) for each in _imported(file))]


def circles() -> list[str]:
    """Return the import cycles of the package and the benchmarks."""
    files = {_module(file): file for file in python_in("megapg", "benchmarks")}
    wanted = {module: _imported(file) & files.keys() for module, file in files.items()}
    found = []
    for start in wanted:
        seen, ahead = set(), list(wanted[start])
        while ahead:
            module = ahead.pop()
            if module not in seen:
                seen.add(module)
                ahead += wanted[module]
        if start in seen and start != "megapg":
            found.append(start)
    return found


def cpu_seconds(*command: str) -> float:
    """Return the CPU time of a command, as the median of several runs."""
    spent = []
    for _ in range(TIMES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=os.environ)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(spent)


def name(file: Path) -> str:
    """Return the path of a file below the package, without its suffix."""
    return str(file.relative_to(PACKAGE).with_suffix(""))


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imported(file: Path) -> set[str]:
    """Return the modules that a file imports, also inside functions, but not for types alone."""
    found = set()
    ahead: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while ahead:
        node = ahead.pop()
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            ahead += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each for each in within if _is_module(each)} or {node.module}
    return found


def _is_module(dotted: str) -> bool:
    place = ROOT.joinpath(*dotted.split("."))
    return place.with_suffix(".py").exists() or (place / "__init__.py").exists()


def rows(times: bool) -> Iterator[tuple[str, object, Sequence[str]]]:
    """Yield the title, the figure, and the names of the things that it counts."""
    guide = sorted((ROOT / "migration_guide").rglob("*.md"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    yield "package, lines of Python", lines_of(python_in("megapg")), ()
    yield "tests, lines of Python", lines_of(python_in("tests")), ()
    measuring = python_in("benchmarks", "tools")
    yield "benchmarks and tools, lines of Python", lines_of(measuring), ()
    yield "case files of tests, lines", lines_of(case_files()), ()
    public = [*public_names("megapg"), *public_names("megapg.megatron")]
    yield "public names of megapg, megapg.megatron", len(public), public
    yield "guide, lines", lines_of(guide), ()
    yield "README, lines", len(readme), ()
    codemod = python_in("megapg/migrate")
    cases = [file for file in (ROOT / "tests/codemod").rglob("*") if file.suffix in CASES]
    yield "megapg/migrate, lines of Python", lines_of(codemod), ()
    yield "megapg/migrate, modules", len(codemod), ()
    yield "megapg/migrate, longest module", longest(codemod), ()
    yield "tests/codemod with cases, lines", lines_of(cases), ()
    yield "guide, by-tool.md", lines_of([ROOT / "migration_guide/by-tool.md"]), ()
    for title, found in (
        ("circles of imports", circles()),
        ("names of modules in several folders", same_names()),
        (f"modules over {LONG_MODULE} lines", long_modules()),
        (f"classes over {LONG_CLASS} lines", long_classes()),
        ("megatron/ imports from migrate/", imports_of("megatron", "megapg.migrate")),
    ):
        yield title, len(found), found
    if times:
        nothing = cpu_seconds(sys.executable, "-c", "pass")
        for title, command in (
            ("import megapg", (sys.executable, "-c", "import megapg")),
            ("megapg --help", (sys.executable, "-m", "megapg", "--help")),
        ):
            ratio = cpu_seconds(*command) / nothing
            yield f"{title}: CPU, times python -c pass", f"{ratio:.1f}", ()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="say which they are")
    parser.add_argument("--no-times", action="store_true", help="start nothing")
    given = parser.parse_args()
    for title, figure, found in rows(not given.no_times):
        shown = f"{figure:,}" if isinstance(figure, int) else figure
        print(f"{title:<44} {shown:>8}")
        if given.names:
            for each in found:
                print(f"    {each}")


if __name__ == "__main__":
    main()
