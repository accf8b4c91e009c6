"""``megapg migrate`` on published code: how much it serves, whether it is right, and what it costs.

Each tree is copied, migrated, and written, without ``--unsafe``. What is then on disk is checked
from outside of the tool: every file parses and compiles that did before, taking the listed edits
back gives the old bytes, no byte outside of them is another one, and a second run finds nothing
to do. How many uses are served is counted in source only: tests are what the user migrates last.

``python -m benchmarks.migrate`` runs this alone; with ``--sample`` it prints changed uses to read,
with ``--digest`` a digest of each tree's new texts: two versions of the tool that print the same
write the same.
"""

from __future__ import annotations

import ast
import compileall
import difflib
import hashlib
import io
import os
import random
import shutil
import tempfile
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.corpora import CORPORA, Checkout, Corpus
from megapg.migrate.edit.lost import lost_in
from megapg.migrate.edit.mixing import mixed, new_in
from megapg.migrate.edit.soundness import verify
from megapg.migrate.edit.write import write_files
from megapg.migrate.engine import migrate
from megapg.migrate.migration import SHIMS, How, Migration, Rewritten, Served
from megapg.migrate.python.source import Problem, Source, parse
from megapg.migrate.python.tree import is_test
from megapg.migrate.reasons import FALLBACK, UNSERVED

AUTOMATIC_TARGET = 0.92
SHIMLESS_TARGET = 0.60
# What no collection tells; and what stands in for one where there is none.
_UNANSWERABLE = UNSERVED | {FALLBACK}
_CONTEXT = 8  # lines around what a sample shows

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Uses:
    """What became of the uses in some code; what is marked to be kept is not among them."""

    served: Counter[How]
    left: Counter[str]
    roots: int
    whys: Counter[str] = field(default_factory=Counter)  # of those that may end at the globals

    @property
    def total(self) -> int:
        return self.served.total() + self.left.total()

    @property
    def automatic(self) -> float:
        """The share that is rewritten."""
        return self.served.total() / (self.total or 1)

    @property
    def answerable(self) -> float:
        """The share that is rewritten of what a collection could answer at all."""
        never = sum(count for reason, count in self.left.items() if reason in _UNANSWERABLE)
        return self.served.total() / ((self.total - never) or 1)

    @property
    def shimless(self) -> float:
        """The share that is rewritten and never turns to the globals by design."""
        return self._without(SHIMS) / (self.total or 1)

    @property
    def shimless_or_model(self) -> float:
        """The same without those that ask a model, which may carry nothing."""
        return self._without(SHIMS | {How.MODEL}) / (self.total or 1)

    def _without(self, hows: frozenset[How]) -> int:
        return sum(count for how, count in self.served.items() if how not in hows)

    @classmethod
    def together(cls, several: Sequence[Uses]) -> Uses:
        return cls(
            sum((each.served for each in several), Counter()),
            sum((each.left for each in several), Counter()),
            sum(each.roots for each in several),
            sum((each.whys for each in several), Counter()),
        )


@dataclass(frozen=True)
class Outcome:
    """One tree after its migration.

    Attributes:
        corpus: which.
        source: its uses, tests left out.
        tests: those in tests.
        files: how many it has.
        changed: how many of them are changed.
        problems: what the tool itself reported: files that it could not look into or write.
        unparsed: changed files that no longer parse.
        not_undone: changed files where the verifier, or taking the edits back, finds fault.
        bytes_outside: how many bytes differ that no edit lists.
        uncompiled: files that compiled before and don't now.
        second_run: edits that a second run makes.
        cpu: seconds of the first run, without writing.
        mixed: functions and classes of the source that ask two carriers about one kind of group,
            and did not before.
    """

    corpus: Corpus
    source: Uses
    tests: Uses
    files: int
    changed: int
    problems: tuple[str, ...]
    unparsed: tuple[str, ...]
    not_undone: tuple[str, ...]
    bytes_outside: int
    uncompiled: tuple[str, ...]
    second_run: int
    cpu: float
    mixed: tuple[str, ...] = ()


def run(corpus: Corpus) -> Outcome:
    """Migrate a copy of a tree, and look at what came of it."""
    with _copy_of(corpus) as tree:
        before, cpu = _migration(corpus, tree)
        problems = [*before.problems, *write_files(before.files)]
        files = [_as_written(file) for file in before.files]
        undone = {file.file: _undone(file) for file in files}
        outcome = Outcome(
            corpus=corpus,
            source=_uses(before, lambda file: not is_test(file)),
            tests=_uses(before, is_test),
            files=before.findings.files,
            changed=len(files),
            problems=tuple(f"{problem.file}: {problem.message}" for problem in problems),
            unparsed=tuple(file.file for file in files if not _parses(file.after)),
            not_undone=tuple(
                file.file
                for file in files
                if verify(file) is not None or undone[file.file][0] != file.before
            ),
            bytes_outside=sum(outside for _, outside in undone.values()),
            uncompiled=tuple(_uncompiled(corpus, tree)),
            second_run=0,
            cpu=cpu,
            mixed=tuple(_mixed(corpus, tree, files)),
        )
        again, _ = _migration(corpus, tree)
        return replace(outcome, second_run=sum(len(file.edits) for file in again.files))


@contextmanager
def _copy_of(corpus: Corpus) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="megapg-bench-") as folder:
        # Published trees have links to files that they do not publish.
        yield Path(
            shutil.copytree(
                corpus.wheel.tree(), Path(folder, "tree"), ignore_dangling_symlinks=True
            )
        )


def _migration(corpus: Corpus, tree: Path) -> tuple[Migration, float]:
    """What there is to do, and seconds of CPU time, helper processes included."""
    begin = sum(os.times()[:4])
    found = migrate([tree], corpus.config(tree))
    return found, sum(os.times()[:4]) - begin


def _uses(found: Migration, counted: Callable[[str], bool]) -> Uses:
    return Uses(
        Counter(each.how for each in found.served if counted(each.site.file)),
        Counter(each.reason for each in found.left if counted(each.site.file)),
        sum(counted(root.file) for root in found.roots),
        Counter(each.why for each in found.served if each.why and counted(each.site.file)),
    )


# -- checks ----------------------------------------------------------------------------------------


def _as_written(file: Rewritten) -> Rewritten:
    """The same with what is on disk now."""
    return replace(file, after=file.path.read_bytes())


def _undone(file: Rewritten) -> tuple[bytes, int]:
    """The bytes with the listed edits taken back, and how many differ outside of the edits."""
    old = parse(file.path, file.file, file.before)
    if isinstance(old, Problem):
        return b"", len(file.before)
    head = len(file.before) - len(old.text.encode(old.encoding))  # the byte order mark
    undone, at, outside = [file.after[:head]], head, 0
    for start, stop, new in _pieces(old, file):
        kept = old.text[start:stop].encode(old.encoding)
        found = file.after[at : at + len(kept)]
        outside += sum(a != b for a, b in zip(kept, found, strict=False)) + len(kept) - len(found)
        undone.append(found)
        at += len(kept)
        if new is not None:
            removed, written = new[0].encode(old.encoding), new[1].encode(old.encoding)
            undone.append(removed if file.after[at : at + len(written)] == written else b"")
            at += len(written)
    outside += abs(len(file.after) - at)
    return b"".join((*undone, file.after[at:])), outside


def _pieces(old: Source, file: Rewritten) -> Iterator[tuple[int, int, tuple[str, str] | None]]:
    """What lies before each edit, with what the edit takes away and puts there; then the rest."""
    at = 0
    for edit in file.edits:
        yield at, edit.start, (old.text[edit.start : edit.stop], edit.new)
        at = edit.stop
    yield at, len(old.text), None


def _mixed(corpus: Corpus, tree: Path, files: Iterable[Rewritten]) -> list[str]:
    """The functions and classes of the source that ask two carriers about one kind of group, and
    did not before.
    """
    versions = corpus.config(tree).versions
    source = [each for each in files if not is_test(each.file) and _parses(each.after)]
    trees = {each.file: ast.parse(each.after) for each in source}
    old = {each.file: ast.parse(each.before) for each in source}
    found = [
        (file, each.where)
        for file, each in new_in(mixed(trees, versions), lambda: mixed(old, versions))
    ]
    found += [(file, name) for file, tree in trees.items() for name in lost_in(tree)]
    return [f"{file}: {name}" for file, name in found]


def _parses(data: bytes) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(data)
    except (SyntaxError, ValueError):
        return False
    return True


def _uncompiled(corpus: Corpus, tree: Path) -> Iterator[str]:
    """Files that don't compile and did: what is written for a newer Python never does."""
    original = corpus.wheel.tree()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sorted(tree.rglob("*.py")):
            name = path.relative_to(tree)
            if not compileall.compile_file(path, quiet=2) and _compiles(original / name):
                yield str(name)


def _compiles(path: Path) -> bool:
    try:
        compile(path.read_bytes(), path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


# -- a sample to read ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A changed use, and what is changed around it.

    Attributes:
        corpus: where it is.
        served: the use.
        diff: of the function around it, and of what the file imports.
        callers: of that function: what is changed where it is called, if something is.
    """

    corpus: Corpus
    served: Served
    diff: str
    callers: str


def samples(
    count: int, seed: int, corpora: Sequence[Corpus], on_progress: Callable[[], None]
) -> list[Sample]:
    """Changed uses of all trees, as many of each kind as of any other while there are some."""
    candidates: dict[How, list[tuple[Corpus, Served]]] = {}
    changed: dict[Corpus, dict[str, Rewritten]] = {}
    for corpus in corpora:
        found, _ = _migration(corpus, corpus.wheel.tree())
        changed[corpus] = {file.file: file for file in found.files}
        for served in found.served:
            candidates.setdefault(served.how, []).append((corpus, served))
        on_progress()
    drawn = random.Random(seed)
    chosen: list[tuple[Corpus, Served]] = []
    rarest_first = sorted(candidates.values(), key=len)
    for at, many in enumerate(rarest_first):
        share = (count - len(chosen)) // (len(rarest_first) - at)
        chosen += drawn.sample(many, min(share, len(many)))
    return [_sample(corpus, served, changed[corpus]) for corpus, served in chosen]


def _sample(corpus: Corpus, served: Served, changed: dict[str, Rewritten]) -> Sample:
    file, site = changed[served.site.file], served.site
    around = _function_around(file.text, site.span.line)
    imports = [_line_of(file.text, edit.start) for edit in file.edits if edit.what == "import"]
    diff = _hunks(file, [around, *((line, line) for line in imports)])
    name = site.function.rpartition(".")[2]
    if name == "__init__":  # it is the class that is called
        name = site.class_name.rpartition(".")[2]
    callers = [
        _hunks(each, lines, context=1)
        for each in changed.values()
        if (lines := _changed_calls(each, name))
    ]
    return Sample(corpus, served, diff, "\n".join(callers))


def _function_around(text: str, line: int) -> tuple[int, int]:
    """First and last line of the innermost function, or else of the statement."""
    found = (line, line)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            begin, end = node.lineno, node.end_lineno or node.lineno
            if begin <= line <= end and (found == (line, line) or begin > found[0]):
                found = begin, end
    return found


def _changed_calls(file: Rewritten, name: str) -> list[tuple[int, int]]:
    """The lines of the calls of a name to which an argument is added."""
    added = [_line_of(file.text, edit.start) for edit in file.edits if edit.what == "argument"]
    if not added or not name:
        return []
    return [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(file.text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] == name
        and any(node.lineno <= line <= (node.end_lineno or 0) for line in added)
    ]


def _line_of(text: str, index: int) -> int:
    return text.count("\n", 0, index) + 1


def _hunks(file: Rewritten, shown: list[tuple[int, int]], context: int = _CONTEXT) -> str:
    """Of a file's diff the hunks that touch some of its old lines."""
    encoding = tokenize.detect_encoding(io.BytesIO(file.before).readline)[0]
    old, new = (data.decode(encoding).splitlines() for data in (file.before, file.after))
    hunks: list[list[str]] = []
    for line in difflib.unified_diff(old, new, file.file, file.file, n=context, lineterm=""):
        if line.startswith("@@"):
            hunks.append([])
        if hunks:
            hunks[-1].append(line)
    return "\n".join(
        [f"--- {file.file}"]
        + [
            line
            for hunk in hunks
            if any(_touches(hunk[0], lines) for lines in shown)
            for line in hunk
        ]
    )


def _touches(heading: str, lines: tuple[int, int]) -> bool:
    begin, length = (int(n) for n in (*heading.split()[1][1:].split(","), "1")[:2])
    return begin <= lines[1] and lines[0] < begin + length


# -- a digest to compare ---------------------------------------------------------------------------


def digest_line(corpus: Corpus) -> str:
    """What a tree's migration comes to, in source and in tests, on one line."""
    found, _ = _migration(corpus, corpus.wheel.tree())
    parts = [corpus.name]
    for part, counted in (("source", lambda file: not is_test(file)), ("tests", is_test)):
        uses = _uses(found, counted)
        shimless = sum(count for how, count in uses.served.items() if how not in SHIMS)
        digest = digest_of(file for file in found.files if counted(file.file))
        parts.append(
            f"{part} {uses.total} uses, {uses.served.total()} rewritten, {shimless} without shim, "
            f"{uses.left.total()} left, {digest}"
        )
    return "; ".join(parts)


def digest_of(files: Iterable[Rewritten]) -> str:
    """SHA-256 of the names and the new bytes of files, in whatever order they come."""
    each = sorted((file.file, hashlib.sha256(file.after).hexdigest()) for file in files)
    return hashlib.sha256(repr(each).encode()).hexdigest()


# -- the command -----------------------------------------------------------------------------------


@app.command()
def main(
    sample: Annotated[
        int, typer.Option(min=0, help="Print that many changed uses to read, and measure nothing.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Which ones: the same ones for the same seed.")] = 0,
    digest: Annotated[
        bool, typer.Option("--digest", help="Print a digest of each tree, and measure nothing.")
    ] = False,
    tree: Annotated[
        list[Path] | None,
        typer.Option(help="A tree of your own in place of the corpora; can be given again."),
    ] = None,
) -> None:
    """Migrate the corpora and print what came of it; nothing is written to RESULTS.md."""
    corpora = [Corpus(Checkout(path)) for path in tree] if tree else CORPORA
    if digest:
        for corpus in corpora:
            print(digest_line(corpus), flush=True)
        return
    console = Console(soft_wrap=bool(sample), highlight=False)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("corpora", total=len(corpora))

        def advance() -> None:
            progress.advance(task)

        if sample:
            drawn = samples(sample, seed, corpora, advance)
        else:
            outcomes = []
            for corpus in corpora:
                outcomes.append(run(corpus))
                advance()
    if sample:
        for number, each in enumerate(drawn, 1):
            print(_heading(number, each), each.diff, sep="\n")
            if each.callers:
                print("\nwhere it is called:", each.callers, sep="\n")
            print()
        return
    from benchmarks import migrate_report

    for table in migrate_report.corpora_tables(outcomes):
        table.print(console)


def _heading(number: int, sample: Sample) -> str:
    site = sample.served.site
    return (
        f"=== {number}. {sample.served.how} in {sample.corpus.name}, {site.place}, "
        f"{site.function or 'module level'}\n    {' '.join(site.text.split())}\n"
        f"    -> {' '.join(sample.served.text.split())}"
    )


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.migrate")
