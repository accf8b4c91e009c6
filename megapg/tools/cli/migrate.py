"""The command line: ``megapg check``, ``megapg migrate`` and ``megapg explain``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megapg.errors import MegapgError
from megapg.migrate.baseline import beyond, gone, of_files, read_baseline, write_baseline
from megapg.migrate.config import load_config
from megapg.migrate.reasons import explain as explanation
from megapg.migrate.report import as_json as json_report
from megapg.migrate.report import sarif as sarif_report
from megapg.migrate.report.diff import base_of, unified
from megapg.migrate.report.outcome import Entry, Report, count, of_check, of_migration, versions
from megapg.migrate.write import uncommitted, write_files
from megapg.tools.cli.console import AsJson, add_to, make_app, print_json, refuse
from megapg.tools.cli.migrate_screen import (
    progress,
    screen,
    show,
    show_diff,
    show_reasons,
    show_roots,
    show_use,
)

_STDOUT = Path("-")
_MOST_NAMES = 5  # of files, in a message
_NOTHING_WRITTEN = "Nothing is written yet: add --write."

app = make_app(
    "Move code off Megatron's globals: find the uses, rewrite them, and explain the rest. "
    "The code is only read, never imported or run."
)

_Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Files and folders to search.")
]
_FromCore = Annotated[
    str | None,
    typer.Option(
        help="The Megatron-core that the code runs on: 0.16, or 0.12-0.16 for several. Default: "
        "from-core in \\[tool.megapg], else the version that the project pins, else 0.12-0.19."
    ),
]
_Wrapper = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="A module of yours that stands for parallel_state, such as megatron.mpu. Can be "
        "repeated. Added to wrappers in \\[tool.megapg].",
    ),
]
_Sarif = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write SARIF 2.1.0 for code hosts and editors; - for standard output.",
    ),
]


@add_to(app)
def check(
    paths: _Paths,
    from_core: _FromCore = None,
    wrapper: _Wrapper = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Count only uses that this file does not allow, for CI."),
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write the current uses to --baseline.")
    ] = False,
    as_json: AsJson = False,
    sarif: _Sarif = None,
) -> None:
    """List every use of Megatron's globals, with a replacement or a reason why there is none.

    Name all your code, because imports and re-exports are followed in these files only. Lines with
    "# megapg: keep" are skipped. The settings exclude, wrappers and from-core are read from
    \\[tool.megapg] of pyproject.toml.

    Exit code 0: no uses, or none beyond the baseline. 1: there are uses, or a file in a folder
    can't be read. 2: wrong paths or settings, or a file given by name can't be read.

    Example: megapg check src --baseline megapg-baseline.json
    """
    with _refusing():
        from megapg.migrate import engine

        if update_baseline and baseline is None:
            raise typer.BadParameter("--update-baseline needs --baseline FILE.")
        quiet = _is_document(as_json, sarif)
        _check_paths(paths)
        config = load_config(paths[0], from_core, wrapper or ())
        with progress("checking") as advance:
            report = of_check(engine.check(paths, config, advance), config)
        uses = [entry.use for entry in report.entries]
        counted = list(report.entries)
        compared = []
        if baseline is not None:
            read = {*report.found.files} - {problem.file for problem in report.problems}

            def is_read(name: str) -> bool:
                return name in read or not (config.root / name).exists()

            if update_baseline:
                write_baseline(baseline, uses, is_read)
            allowed = of_files(read_baseline(baseline), is_read)
            new = set(map(id, beyond(uses, allowed)))
            counted = [entry for entry in report.entries if id(entry.use) in new]
            compared = [f"{len(counted)} more than in {baseline}"]
            if fewer := gone(uses, allowed):
                compared += [f"{fewer} fewer: lower it with --update-baseline"]
        if not quiet:
            out = screen()
            show(out, report, counted, "uses, by package")
            parts = [count(len(report.found.files), "file"), count(len(uses), "use")]
            _end(out, report, [*parts, *compared])
        _write_documents(report, counted, as_json, sarif)
    _exit(paths, report, bool(counted))


@add_to(app)
def migrate(
    paths: _Paths,
    write: Annotated[bool, typer.Option("--write", help="Write the files.")] = False,
    allow_dirty: Annotated[
        bool,
        typer.Option("--allow-dirty", help="Write even if git could not restore the files."),
    ] = False,
    from_core: _FromCore = None,
    wrapper: _Wrapper = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="What rewritten files import: megapg, or vendored for a module process_groups.py "
            "in each package, which is written as well. vendored:NAME names it differently, and "
            "vendored:PACKAGE.NAME writes one for all files. Default: runtime in \\[tool.megapg], "
            "else megapg."
        ),
    ] = None,
    unsafe: Annotated[
        bool,
        typer.Option(
            "--unsafe", help="Also rewrite uses whose replacement may be None (may-be-none)."
        ),
    ] = False,
    thread_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FUNCTION",
            help="Add the parameter pg_collection to this function, class or static method "
            "although no caller passes it yet, and pass it on from there: train, Trainer or "
            "Trainer.make. The module's name picks one of several: steps.train. Can be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
    sarif: _Sarif = None,
) -> None:
    """Rewrite uses of Megatron's globals: to a collection, a model, or a new parameter.

    If no collection is passed, the program does what it did before. Name all your code and its
    tests, because calls are followed in these files only. Getters that tests patch stay patched.

    Without --write no file changes. The diff goes to standard output, for git apply or patch -p1,
    and the report to standard error. To see the report alone: megapg migrate src tests > /dev/null.

    --write changes all files or none. It refuses if a file that mentions the globals, or that it
    would change, has uncommitted changes or is not in git, unless you add --allow-dirty. To undo
    the changes, use git restore, and delete a new vendored module by hand. New text is formatted
    with the black, isort or ruff that the project configures. Lines with "# megapg: keep" stay.

    Exit code 0: all uses are rewritten. 1: uses are left, changes are not written yet, or a file in
    a folder can't be read. 2: wrong paths or settings, files could not be written, or a file given
    by name can't be read.

    Example: megapg migrate src tests, and if the diff looks right, again with --write
    """
    with _refusing():
        from megapg.migrate import engine

        quiet = _is_document(as_json, sarif)
        _check_paths(paths)
        config = load_config(paths[0], from_core, wrapper or (), runtime, thread_from or ())
        with progress("migrating") as advance:
            check: Callable[[Mapping[Path, str]], object] = len
            if write and not allow_dirty:
                check = _refuse_uncommitted
            migration = engine.migrate(
                paths, config, unsafe=unsafe, on_progress=advance, check_files=check
            )
        check({file.path: file.file for file in migration.files})
        unwritten = write_files(migration.files) if write else []
        report = of_migration(migration, config, unwritten)
        if not quiet:
            if not write:
                base = base_of(report.files, config.root)
                for file in report.files:
                    show_diff(unified(file, base))
            _show_migration(report, write)
        _write_documents(report, report.entries, as_json, sarif)
    if unwritten:
        raise typer.Exit(2)
    _exit(paths, report, bool(report.left or (report.files and not write)))


@add_to(app)
def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CODE|FILE:LINE|EXPRESSION",
            help="A code of a report, such as vp-stage, a line of a file, or an expression, such "
            "as 'mpu.get_data_parallel_rank()'.",
        ),
    ],
    from_core: _FromCore = None,
    wrapper: _Wrapper = None,
) -> None:
    """Explain a code of a report, or show what replaces the uses in a line or an expression.

    Exit code 0: explained. 2: the code is unknown, or the line or the expression has no use.

    Example: megapg explain vp-stage, or megapg explain trainer/data.py:12

    Example: megapg explain 'mpu.get_data_parallel_group(with_context_parallel=True)'
    """
    place = re.fullmatch(r"(.+?):(\d+)(:\d+)?", what)
    with _refusing():
        out = screen()
        if place:
            for entry in _in_line(Path(place[1]), int(place[2]), from_core, wrapper or ()):
                show_use(out, entry)
            return
        if re.search(r"[^a-z-]", what):
            for entry in _in_expression(what, from_core, wrapper or ()):
                show_use(out, entry)
            return
        reason = explanation(what)
        prose = Text(f"{reason.code}: the use {reason.title}.", style="bold")
        prose.append(f"\n\n{reason.why}\n\nInstead: {reason.instead}", "not bold")
        out.print(prose, soft_wrap=not out.is_terminal)


def _in_line(file: Path, line: int, from_core: str | None, wrappers: Sequence[str]) -> list[Entry]:
    """The uses in a line, and what ``megapg migrate`` does with them. The project is read."""
    from megapg.migrate import engine

    _check_paths([file])
    config = load_config(file, from_core, wrappers)
    with progress("explaining") as advance:
        migration = engine.migrate([file, config.root], config, on_progress=advance)
    name = Path(os.path.relpath(os.path.abspath(file), config.root)).as_posix()
    entries = [
        entry
        for entry in of_migration(migration, config).entries
        if entry.use.file == name and entry.use.span.line <= line <= entry.use.span.end_line
    ]
    if not entries:
        problems = [each.message for each in migration.problems if each.file == name]
        raise typer.BadParameter(f"{file}:{line}: {'; '.join(problems) or 'no use is there'}.")
    return entries


def _in_expression(text: str, from_core: str | None, wrappers: Sequence[str]) -> list[Entry]:
    """The uses in an expression, which knows the names of Megatron-core and of the wrappers."""
    from megapg.migrate import engine
    from megapg.upstream.signatures import SIGNATURES

    getters = [name for name in re.findall(r"(?<![\w.])\w+", text) if name in SIGNATURES]
    lines = [text, "from megatron.core import mpu, parallel_state", "import megatron.core"]
    lines += [f"from megatron.core.parallel_state import {name}" for name in getters]
    lines += [f"import {wrapper}" for wrapper in wrappers]
    try:
        compile(text, what := "expression", "eval", dont_inherit=True)
    except SyntaxError:
        raise typer.BadParameter(
            f"{text!r} is no code of a report, no FILE:LINE and no expression of Python."
        ) from None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, what)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        config = load_config(file, from_core, wrappers)
        entries = of_check(engine.check([file], config), config).entries
    if not entries:
        raise typer.BadParameter(f"{text}: no use of Megatron's globals is there.")
    return [*entries]


# --- parts of the commands ------------------------------------------------------------------------


def _check_paths(paths: Sequence[Path]) -> None:
    from megapg.migrate.project import is_notebook

    if missing := [str(path) for path in paths if not path.exists()]:
        raise typer.BadParameter(f"{', '.join(missing)} does not exist.")
    if all(is_notebook(path) and not path.is_dir() for path in paths):
        raise typer.BadParameter(
            f"{', '.join(map(str, paths))}: notebooks are not read. "
            "Convert them with jupyter nbconvert --to script."
        )


def _exit(paths: Sequence[Path], report: Report, is_unfinished: bool) -> None:
    """Exit with the code of the outcome. A file that was not read may have uses."""
    named = {os.path.realpath(path) for path in paths if not path.is_dir()}
    unread = {os.path.realpath(report.config.root / each.file) for each in report.problems}
    if named & unread:
        raise typer.Exit(2)
    if is_unfinished or unread:
        raise typer.Exit(1)


def _is_document(as_json: bool, sarif: Path | None) -> bool:
    """True if a document goes to standard output. There can be one only."""
    if as_json and sarif == _STDOUT:
        raise typer.BadParameter("use --json or --sarif -, not both.")
    return as_json or sarif == _STDOUT


def _write_documents(
    report: Report, counted: Sequence[Entry], as_json: bool, sarif: Path | None
) -> None:
    if as_json:
        print_json(json_report.document(report, counted))
    if sarif is not None:
        text = json.dumps(sarif_report.document(report, counted), indent=1) + "\n"
        if sarif == _STDOUT:
            typer.echo(text, nl=False)
            return
        try:
            sarif.write_text(text, encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{sarif} can't be written: {error.strerror}.") from error


def _refuse_uncommitted(files: Mapping[Path, str]) -> None:
    if lines := uncommitted(files):
        raise typer.BadParameter(
            f"nothing is written, since git could not restore the files: {_some(lines, '; ')}. "
            "Commit your changes first, or add --allow-dirty."
        )


def _some(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return separator.join([*names[:_MOST_NAMES], *([f"and {more:,} more"] if more > 0 else [])])


def _show_migration(report: Report, written: bool) -> None:
    out = screen(stderr=not written)
    # Tests stay as they are, so each of their uses needs no line.
    show(out, report, [each for each in report.left if each.reason != "test"], "uses, by package")
    show_reasons(out, report)
    show_roots(out, report.roots)
    verb = "written" if written else "to be written"
    modules = [file.file for file in report.files if file.is_runtime]
    done = "rewritten" if written else "can be rewritten"
    parts = [
        count(len(report.found.files), "file"),
        f"{count(len(report.entries), 'use')}: {len(report.entries) - len(report.left):,} {done} "
        f"in {count(len(report.files) - len(modules), 'file')}",
        *(f"{module} {verb}" for module in modules),
        f"{len(report.left):,} left",
    ]
    if report.roots:
        parts.append(f"{count(len(report.roots), 'function')} may read the globals")
    for program, number in report.unformatted.items():
        text = f"{program} is configured but not installed: {count(number, 'file')} not formatted"
        out.print(Text(text, style="yellow"))
    hint = "Line numbers are those of the old files." if written else _NOTHING_WRITTEN
    hint = f" {hint}" if report.files else ""
    _end(out, report, parts, hint)


def _end(out: Console, report: Report, parts: Sequence[str], hint: str = "") -> None:
    """Print the last line of a report."""
    parts = [*parts]
    if report.kept:
        parts.append(f"{report.kept} kept")
    if report.found.notebooks:
        parts.append(f"{count(report.found.notebooks, 'notebook')} not read")
    if report.found.skipped:
        number = sum(report.found.skipped.values())
        parts.append(f"{count(number, 'file')} in {_some(list(report.found.skipped))} skipped")
    if report.problems:
        parts.append(count(len(report.problems), "problem"))
    for each in report.found.own_groups:
        out.print(
            Text(
                f"{each.file} defines getters of Megatron, such as {each.getters[0]}(), for groups "
                "of its own. Their uses are not counted. To rewrite them: "
                f"--wrapper {each.wrapper} --runtime vendored",
                style="yellow",
            )
        )
    out.print(Text(f"{'; '.join(parts)}. Read as Megatron-core {versions(report.config)}.{hint}"))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn errors for the user into one message and exit code 2."""
    try:
        yield
    except (MegapgError, typer.BadParameter) as error:
        refuse(error.message if isinstance(error, typer.BadParameter) else str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "libcst":
            raise
        refuse('LibCST is not installed: pip install "megapg[migrate]"')
