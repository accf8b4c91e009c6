"""The command line: ``megapg check``, ``megapg migrate`` and ``megapg explain``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from megapg.cli.console import AsJson, add_to, make_app, print_json, refuse, say
from megapg.cli.migrate_screen import (
    screen,
    show,
    show_callees,
    show_diff,
    show_noticed,
    show_problems,
    show_reasons,
    show_roots,
    show_starts,
    show_use,
)
from megapg.errors import MegapgError
from megapg.migrate import engine
from megapg.migrate.baseline import beyond, gone, read_baseline, write_baseline
from megapg.migrate.config import Config, load_config, project_root
from megapg.migrate.decide.rules import RULES
from megapg.migrate.edit.uncommitted import uncommitted
from megapg.migrate.edit.undo import keep, keep_only
from megapg.migrate.edit.undo import undo as put_back
from megapg.migrate.edit.write import write_files
from megapg.migrate.find.index import Progress, find_sites, unseen
from megapg.migrate.find.sites import Site
from megapg.migrate.migration import Rewritten
from megapg.migrate.python.source import Problem
from megapg.migrate.python.tree import is_notebook
from megapg.migrate.reasons import explain as explanation
from megapg.migrate.report.diff import base_of, unified
from megapg.migrate.report.outcome import Entry, Report, count, of_findings, of_migration, versions
from megapg.migrate.report.together import together

_STDOUT = Path("-")

app = make_app(
    "Move code off Megatron's globals: find what still reads them, rewrite it, and say why "
    "where it can't be. Nothing of the code is imported or run."
)

_Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Files and directories to look into.")
]
_FromCore = Annotated[
    str | None,
    typer.Option(
        help="The Megatron-core that the code runs on: 0.16, or 0.12-0.16 where it runs on "
        "several. Without it, from-core in \\[tool.megapg], else what the project pins."
    ),
]
_Wrapper = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="A module of yours that stands for parallel_state, such as megatron.mpu; can be given "
        "several times. Goes with wrappers in \\[tool.megapg].",
    ),
]
_Sarif = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write SARIF 2.1.0 for code hosts and editors; - is standard output."
    ),
]


@add_to(app)
def check(
    paths: _Paths,
    from_core: _FromCore = None,
    wrapper: _Wrapper = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Only what is more than in this file counts: the ratchet for CI."),
    ] = None,
    update_baseline: Annotated[
        bool, typer.Option("--update-baseline", help="Write what is left now to --baseline.")
    ] = False,
    as_json: AsJson = False,
    sarif: _Sarif = None,
) -> None:
    """List every use of Megatron's globals: what to write instead, or a code for why not.

    Uses are found by what names stand for, through imports, aliases and re-exports. A line with
    "# megapg: keep" is passed over. \\[tool.megapg] in pyproject.toml takes exclude, wrappers (your
    modules that stand for parallel_state) and from-core.

    Exit code 0: nothing left, or nothing more than in the baseline; 1: there is; 2: the paths or
    the settings are no good, or nothing is left and a file that is named can't be read.

    Example: megapg check src --baseline megapg-baseline.json
    """
    with _refusing(), _uncollected():
        if update_baseline and baseline is None:
            raise typer.BadParameter("--update-baseline needs --baseline FILE.")
        quiet = _one_document(as_json, sarif)
        config = _config(paths, from_core, wrapper)
        with _progress("checking") as advance:
            findings = find_sites(paths, config, advance)
        report = of_findings(findings, config)
        sites = [entry.site for entry in report.entries]
        counted: Sequence[Entry] = report.entries
        fewer = 0
        if baseline is not None and update_baseline:
            write_baseline(baseline, sites)
            counted = ()
        elif baseline is not None:
            allowed = read_baseline(baseline)
            new = set(map(id, beyond(sites, allowed)))
            counted = [entry for entry in report.entries if id(entry.site) in new]
            fewer = gone(sites, allowed)
        if not quiet:
            out = screen()
            show(out, report, counted, "left, by package")
            said = [f"{count(report.findings.files, 'file')}, {count(len(sites), 'use')} left"]
            said += _beside(report)
            if baseline is not None and fewer:
                said.append(f"{fewer} fewer than in {baseline}: lower it with --update-baseline")
            if baseline is not None:
                said.append(f"{len(counted)} more than in {baseline}")
            out.print(Text(f"{'; '.join(said)}. Read as Megatron-core {versions(config)}."))
        _write_documents(report, counted, as_json, sarif)
    if counted:
        raise typer.Exit(1)
    _refuse_unread(paths, findings.problems, config.root)


@add_to(app)
def migrate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH...", help="Files and directories to look into."),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the files.")] = False,
    from_core: _FromCore = None,
    wrapper: _Wrapper = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="What the rewritten files import: megapg, or vendored: a module process_groups.py "
            "of their own package, which is written, too. vendored:NAME gives it another name. "
            "Without it, runtime in \\[tool.megapg], else megapg."
        ),
    ] = None,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Rewrite also where it may change what the code does.")
    ] = False,
    thread_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FUNCTION",
            help="Have this function, or class, take pg_collection and hand it to all that it "
            "calls, though nobody passes it one yet; can be given several times.",
        ),
    ] = None,
    undo: Annotated[
        bool,
        typer.Option(
            "--undo",
            help="Put back what the last --write changed, in the project around PATH, or here.",
        ),
    ] = False,
    as_json: AsJson = False,
    sarif: _Sarif = None,
) -> None:
    """Rewrite uses of Megatron's globals: to a collection or a model that is at hand.

    Without --write nothing is written: the changes are a diff on standard output, for git apply or
    patch -p1, and what is left is reported on standard error. Each file is replaced as a whole or
    not at all, and only what passed verification. A line with "# megapg: keep" stays. To see the
    report alone: megapg migrate src > /dev/null.

    --write warns of files with changes that are in no commit. What the files were is kept in
    .megapg of the project until the next --write: --undo puts back, byte for byte, each that was
    not changed since.

    Exit code 0: nothing left; 1: uses are left, or changes not written; 2: the paths or the
    settings are no good, a file could not be written or put back, or nothing is left and one that
    is named can't be read.

    Example: megapg migrate src --from-core 0.16, and when the diff looks right the same with
    --write
    """
    with _refusing(), _uncollected():
        if undo:
            if any((write, unsafe, as_json, from_core, wrapper, runtime, thread_from, sarif)):
                raise typer.BadParameter("--undo takes paths, and no other options.")
            _undo(paths or [Path()])
            return
        if not paths:
            raise typer.BadParameter("Missing argument 'PATH...'.")
        quiet = _one_document(as_json, sarif)
        config = _config(paths, from_core, wrapper, runtime)
        config = replace(config, thread_from=tuple(thread_from or ()))
        with _progress("migrating") as advance:
            migration = engine.migrate(paths, config, unsafe=unsafe, on_progress=advance)
        unwritten = _write(migration.files, config.root) if write else {}
        report = of_migration(migration, config, unwritten)
        if not quiet:
            if not write:
                base = base_of(report.files, config.root)
                for file in report.files:
                    show_diff(unified(file, base))
            out = screen(stderr=not write)
            show(out, report, report.left, "by package")
            show_noticed(out, report)
            show_callees(out, report)
            show_reasons(out, report)
            show_roots(out, report)
            show_starts(out, report)
            out.print(Text(_summary(report, write)))
        _write_documents(report, report.entries, as_json, sarif)
    if unwritten:
        raise typer.Exit(2)
    if report.left or (report.files and not write):
        raise typer.Exit(1)
    _refuse_unread(paths, migration.findings.problems, config.root)


@add_to(app)
def explain(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CODE|FILE:LINE", help="As megapg check prints it, such as vp-stage."
        ),
    ],
    wrapper: _Wrapper = None,
    from_core: _FromCore = None,
) -> None:
    """Say what a code of a report means, and what to do about it; or of a line, which rules are
    asked about each use in it, and what they say: the first that applies decides. The whole project
    is read for that, tests included, as who calls a function matters.

    Exit code 0: explained; 2: there is no such code, or no use in that line.

    Example: megapg explain vp-stage, or megapg explain trainer/data.py:12
    """
    place = re.fullmatch(r"(.+?):(\d+)(:\d+)?", what)  # a column says nothing more
    with _refusing(), _uncollected():
        if place:
            _explain_line(Path(place[1]), int(place[2]), from_core, wrapper)
            return
        reason = explanation(what)
        console = Console()
        console.print(Text(f"{reason.code}: {reason.title}", style="bold"))
        console.print(Text(f"\n{reason.why}"))
        console.print(Text(f"\nInstead: {reason.instead}"))


def _explain_line(
    file: Path, line: int, from_core: str | None, wrappers: Sequence[str] | None
) -> None:
    config = _config([file], from_core, wrappers)
    migration = engine.migrate([file, config.root], config)
    report = of_migration(migration, config)
    name = os.path.relpath(os.path.abspath(file), config.root)

    def is_there(site: Site) -> bool:
        return site.file == name and site.span.line <= line <= site.span.end_line

    uses = [each for each in report.entries if is_there(each.site)]
    if not uses:
        why = next((each.message for each in migration.problems if each.file == name), "")
        if not why and any(is_there(site) for site in migration.findings.sites):
            why = "what is there is kept, as # megapg: keep says"
        raise typer.BadParameter(f"{file}:{line}: {why or 'no use of the globals is there'}.")
    decided_by = {id(site): number for site, number in migration.decided_by}
    out = screen()
    for use in uses:
        show_use(out, use)
        number = decided_by.get(id(use.site))
        if number is None:
            out.print(Text(f"  it has no replacement: {explanation(use.reason).title}"))
        else:
            for rule in RULES[:number]:
                out.print(Text(f"  no   {rule.says}", style="dim"))
            out.print(Text(f"  yes  {RULES[number].says}"))
        if use.why:
            out.print(Text(f"  where its callers end: {use.why}"))


# --- what both commands do ------------------------------------------------------------------------


def _config(
    paths: Sequence[Path],
    from_core: str | None,
    wrappers: Sequence[str] | None,
    runtime: str | None = None,
) -> Config:
    _check_exist(paths)
    if all(is_notebook(path) and not path.is_dir() for path in paths):
        raise typer.BadParameter(
            f"{', '.join(map(str, paths))}: notebooks are not read. "
            "jupyter nbconvert --to script makes a file that is."
        )
    return load_config(paths[0], from_core, wrappers or (), runtime)


def _check_exist(paths: Sequence[Path]) -> None:
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise typer.BadParameter(f"{', '.join(map(str, missing))} does not exist.")


def _refuse_unread(paths: Sequence[Path], problems: Sequence[Problem], root: Path) -> None:
    """End with 2 where a file is named that was not read: what is left in it is not known."""
    named = {os.path.realpath(path) for path in paths if not path.is_dir()}
    if any(os.path.realpath(root / problem.file) in named for problem in problems):
        raise typer.Exit(2)


def _one_document(as_json: bool, sarif: Path | None) -> bool:
    """Whether standard output is a document's; there is room for one."""
    if as_json and sarif == _STDOUT:
        raise typer.BadParameter("only one of --json and the reports to - can be printed.")
    return as_json or sarif == _STDOUT


def _write_documents(
    report: Report, counted: Sequence[Entry], as_json: bool, sarif: Path | None
) -> None:
    # What a document takes is loaded for it alone: most runs print none.
    if as_json:
        from megapg.migrate.report import as_json as json_report

        print_json(json_report.document(report, counted))
    if sarif is not None:
        from megapg.migrate.report import sarif as sarif_report

        text = json.dumps(sarif_report.document(report, counted), indent=1) + "\n"
        if sarif == _STDOUT:
            typer.echo(text, nl=False)
            return
        try:
            sarif.write_text(text, encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{sarif} can't be written: {error.strerror}.") from error


def _write(files: Sequence[Rewritten], root: Path) -> dict[str, Problem]:
    """Why files could not be written, by their names: those that need each other all or none."""
    if not files:
        return {}
    changed, unanswered = uncommitted(file.path for file in files if not file.is_new)
    if changed:
        _warn(
            f"{len(changed)} of the {count(len(files), 'file')} written now had changes that are "
            "in no commit. git can't tell the two apart any more; megapg migrate --undo takes back "
            "what is written now, and nothing else."
        )
    for repository, why in unanswered.items():
        _warn(
            f"git does not answer for {repository}: {why}. Of the files written now there, any may "
            "have had changes that are in no commit."
        )
    try:
        keep(files, root)
    except OSError as error:
        raise typer.BadParameter(
            f"nothing is written, for what --undo needs could not be kept in {root}: "
            f"{error.strerror or error}."
        ) from error
    unwritten: dict[str, Problem] = {}
    for unit in together(files):
        problems = write_files(unit)
        for file in unit if problems else ():
            why = f"is not written, since {problems[0].file} could not be"
            unwritten[file.file] = Problem(file.file, 0, why)
        unwritten |= {problem.file: problem for problem in problems}
    with contextlib.suppress(OSError):  # then more is kept than need be
        keep_only([file for file in files if file.file not in unwritten], root)
    return unwritten


def _warn(what: str) -> None:
    say("warning", "bold yellow", what)


def _undo(paths: Sequence[Path]) -> None:
    _check_exist(paths)
    done = put_back(project_root(paths[0]), paths)
    out = screen()
    show_problems(out, done.problems)
    said = [f"{count(len(done.put_back), 'file')} put back"]
    if done.untouched:
        said.append(f"{done.untouched:,} as before already")
    if done.problems:
        said.append(f"{len(done.problems):,} left")
    out.print(Text(f"{'; '.join(said)}."))
    if done.problems:
        raise typer.Exit(2)


def _summary(report: Report, written: bool) -> str:
    modules = [file for file in report.files if file.is_runtime]
    said = [
        f"{count(report.findings.files, 'file')}, {count(len(report.entries), 'use')}: "
        f"{len(report.served):,} {'rewritten' if written else 'can be rewritten'} "
        f"in {count(len(report.files) - len(modules), 'file')}",
        *(f"{file.file} {'written' if written else 'to be written'}" for file in modules),
        f"{len(report.left):,} left",
        *_beside(report),
    ]
    if report.roots:
        said.append(f"{count(len(report.roots), 'place')} may turn to the globals")
    hint = "" if written or not report.files else " Nothing is written yet: add --write."
    return f"{'; '.join(said)}. Read as Megatron-core {versions(report.config)}.{hint}"


def _beside(report: Report) -> list[str]:
    """What is neither left nor rewritten."""
    said = []
    if report.findings.kept:
        said.append(f"{report.findings.kept} kept")
    if report.findings.notebooks:
        said.append(f"{count(report.findings.notebooks, 'notebook')} not read")
    if report.problems:
        said.append(f"{count(len(report.problems), 'file')} {report.problem or 'with problems'}")
    return said


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the search for garbage in circles: among so many nodes of syntax trees, which all
    live until the end, it takes as long as the work itself. Nor when Python ends.
    """
    was_on = gc.isenabled()
    gc.disable()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # not now: in a process that goes on, it stays frozen
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # and so all of it is old, and not looked through at once
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _progress(command: str) -> Iterator[Progress]:
    """Give a function that is told what is done, and how much of it, and draw it on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield unseen
        return
    # Not for a run that nobody watches.
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    # The clock goes on where one long file takes its time.
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(command, total=None)
        step = ""

        def advance(doing: str, done: int, total: int) -> None:
            nonlocal step
            begins, step = doing != step, doing  # each step is drawn once, however short it is
            bar.update(
                task, description=f"{command}: {doing}", completed=done, total=total, refresh=begins
            )

        yield advance


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What megapg raises for the user becomes one line and exit code 2."""
    try:
        yield
    except (MegapgError, typer.BadParameter) as error:
        refuse(error.message if isinstance(error, typer.BadParameter) else str(error))
