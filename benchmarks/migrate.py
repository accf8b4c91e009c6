"""Run ``megapg migrate`` over published code, write the result, and check it.

Each tree is copied, migrated without ``--unsafe``, and written. The changed files are compiled, and
a second run counts the edits that are still to do. ``python -m benchmarks.migrate`` prints the
table.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.corpora import CORPORA, Checkout, Corpus, named
from benchmarks.table import Options, Table
from megapg.migrate.engine import migrate
from megapg.migrate.migration import How, Migration, Problem, Rewritten
from megapg.migrate.project import is_test
from megapg.migrate.write import write_files


@dataclass(frozen=True)
class Outcome:
    """The migration of one tree. Tests are left out of the counts of uses."""

    tree: str
    uses: int
    rewritten: int
    not_resolved: int  # rewritten uses that do not need resolve()
    uncompiled: tuple[str, ...]  # changed files that compiled before
    second_run: int  # edits of a second run
    seconds: float  # time of the first run, without writing
    problems: tuple[Problem, ...] = ()  # files that could not be rewritten or written

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        return (
            self.tree,
            f"{self.uses:,}",
            _percent(self.rewritten, self.uses),
            _percent(self.not_resolved, self.uses),
            f"{len(self.uncompiled):,}",
            f"{self.second_run:,}",
            f"{self.seconds:.0f}",
        )


def tables(given: Options) -> list[Table]:
    """Return the table of the published trees."""
    corpora = (named("mbridge"), named("mcore_bridge")) if given.quick else CORPORA
    return [table(list(map(run, corpora)))]


def run(corpus: Corpus, processes: int | None = None) -> Outcome:
    """Migrate a copy of a tree, in so many processes, and check the files that are written."""
    with tempfile.TemporaryDirectory(prefix="megapg-bench-") as folder:
        tree = Path(folder, "tree")
        # Published trees have links to unpublished files.
        shutil.copytree(corpus.wheel.tree(), tree, ignore_dangling_symlinks=True)
        begin = time.perf_counter()
        migration = migrate([tree], corpus.config(tree), processes=processes)
        seconds = time.perf_counter() - begin
        unwritten = write_files(migration.files)
        again = migrate([tree], corpus.config(tree))
        return outcome(corpus.name, migration, unwritten, again, seconds)


def outcome(
    tree: str,
    migration: Migration,
    unwritten: Sequence[Problem],
    again: Migration,
    seconds: float,
) -> Outcome:
    """Return the row of a tree.

    Args:
        tree: its name.
        migration: the first run. Its files are written.
        unwritten: problems of writing them.
        again: the second run.
        seconds: time of the first run.
    """
    hows = [each.how for each in migration.served if not is_test(each.use.file)]
    left = sum(not is_test(each.use.file) for each in migration.left)
    new_problems = [each for each in migration.problems if each not in migration.found.problems]
    return Outcome(
        tree=tree,
        uses=len(hows) + left,
        rewritten=len(hows),
        not_resolved=sum(how is not How.RESOLVED for how in hows),
        uncompiled=tuple(file.file for file in migration.files if _is_broken(file)),
        second_run=sum(map(_edits, again.files)),
        seconds=seconds,
        problems=(*new_problems, *unwritten),
    )


def _is_broken(file: Rewritten) -> bool:
    """True if a written file does not compile and its old text did."""
    return not _compiles(file.path.read_bytes()) and _compiles(file.before)


def _compiles(text: bytes) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(text, "text", "exec", dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
    return True


def _edits(file: Rewritten) -> int:
    """Return the number of ranges of lines that differ."""
    before, after = file.before.splitlines(), file.after.splitlines()
    ranges = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(tag != "equal" for tag, *_ in ranges)


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return the table of several trees."""
    wrong = [
        f"{each.tree}: {file} does not compile." for each in outcomes for file in each.uncompiled
    ]
    problems = [
        f"{each.tree}: {problem.file} {problem.message}."
        for each in outcomes
        for problem in each.problems
    ]
    return Table(
        "The codemod on published code",
        ("tree", "uses", "rewritten", "not by resolve()", "not compiling", "second run", "seconds"),
        tuple(each.cells for each in outcomes),
        (
            "`python -m benchmarks.migrate` counts uses of the globals in source files without "
            "tests, and the share that is rewritten without `--unsafe`. A use is not by "
            "`resolve()` if it takes its groups from a collection, a model, or a parameter that "
            "every call passes. The last columns count changed files that no longer compile, edits "
            "of a second run, and seconds of the first run.",
            *wrong,
            *problems,
        ),
    )


def _percent(part: int, of: int) -> str:
    return f"{100 * part / of:.1f} %" if of else "-"


app = typer.Typer(add_completion=False)


@app.command()
def main(
    tree: Annotated[
        list[Path] | None,
        typer.Option(help="A tree in place of the published ones; several may be given."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Processes of the first run. Default: as megapg migrate."),
    ] = None,
) -> None:
    """Migrate copies of the trees and print the table; RESULTS.md is not written."""
    corpora = [Corpus(Checkout(path)) for path in tree] if tree else CORPORA
    outcomes = []
    with Progress(console=Console(stderr=True)) as progress:
        for corpus in progress.track(corpora, description="trees"):
            outcomes.append(run(corpus, processes))
    table(outcomes).print(Console(highlight=False))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.migrate")
