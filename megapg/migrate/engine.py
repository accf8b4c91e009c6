"""Find and rewrite the uses of the globals in a project. Nothing is written to disk.

The steps:

1. :mod:`~megapg.migrate.project` lists the files.
2. :mod:`~megapg.migrate.scan` finds uses, functions and calls in the files that mention the
   globals, or a function that may take the new parameter.
3. :mod:`~megapg.migrate.carriers` chooses where each function takes its groups from, and
   :mod:`~megapg.migrate.thread` which functions take the parameter.
4. :mod:`~megapg.migrate.decide` decides about each use, and :mod:`~megapg.migrate.rewrite` makes
   the new text.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

import libcst as cst

from megapg.errors import UnsupportedOptionError
from megapg.migrate.carriers import Carriers, Node
from megapg.migrate.config import Config
from megapg.migrate.decide import Decider, Decisions, FileChanges
from megapg.migrate.facts import Facts
from megapg.migrate.format import formatted
from megapg.migrate.migration import Found, Left, Migration, Problem, Rewritten, Served
from megapg.migrate.own_groups import find_own_groups
from megapg.migrate.project import OWN_MODULE, PARALLEL_STATE, Project, is_test
from megapg.migrate.replaced import find_replaced
from megapg.migrate.rewrite import rewritten
from megapg.migrate.runtime import Runtimes
from megapg.migrate.scan import scan
from megapg.migrate.thread import reached
from megapg.migrate.uses import Span
from megapg.upstream.helpers import NAMES
from megapg.upstream.signatures import SIGNATURES

_INVALID = (cst.CSTValidationError, cst.ParserSyntaxError, SyntaxError, ValueError, RecursionError)

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much."""

_MENTIONED = "|".join(["parallel_state", "mpu", *sorted({*SIGNATURES, *NAMES})])
_MENTIONS = re.compile(rb"\b(%b)\b" % _MENTIONED.encode())
_FILES_OF_A_PROCESS = 32  # at least: a process takes about a second to start


def unseen(what: str, done: int, of: int) -> None:
    """Show no progress."""


def check(
    paths: Sequence[Path],
    config: Config,
    on_progress: Progress = unseen,
    processes: int | None = None,
) -> Migration:
    """Return the uses of the globals at and under some paths, and what ``migrate`` does with each.

    The result has no new files.
    """
    scans = _Scans(paths, replace(config, vendored=""), on_progress, processes)
    return _decide(scans, Runtimes(scans.project.config, []), unsafe=False)[0]


def migrate(
    paths: Sequence[Path],
    config: Config,
    *,
    unsafe: bool = False,
    on_progress: Progress = unseen,
    check_files: Callable[[Mapping[Path, str]], object] = len,
    processes: int | None = None,
) -> Migration:
    """Rewrite the uses of the globals at and under some paths.

    Args:
        paths: files and directories.
        config: of the project.
        unsafe: also rewrite uses that may behave differently if groups are missing.
        on_progress: called as the work goes on.
        check_files: called before the analysis with the files that mention the globals, and their
            names.
        processes: number of processes that scan files. Default: as many as make it faster.

    Raises:
        UnsupportedOptionError: a wrapper holds groups that new code would not ask.
    """
    scans = _Scans(paths, config, on_progress, processes)
    check_files(scans.mentioning)
    runtimes = Runtimes(config, list(scans.project.files), scans.globals_module())
    decided, files, calls = _decide(scans, runtimes, unsafe=unsafe)
    files += runtimes.modules(calls)
    files, unformatted = formatted(files, config.root, on_progress)
    files.sort(key=lambda each: each.file)
    return replace(decided, files=files, unformatted=unformatted)


def _decide(
    scans: _Scans, runtimes: Runtimes, *, unsafe: bool
) -> tuple[Migration, list[Rewritten], Mapping[Path, Collection[str]]]:
    """Decide about each use.

    Return the decisions, the new text of each file, and the functions of the runtime that it calls.
    """
    scans.find_uses()
    scans.follow_calls()
    found, project = scans.found(), scans.project
    replaced = find_replaced(project, scans.facts)
    frozen: dict[Path, str] = {}
    while True:
        decisions = Decider(project, scans.facts, replaced, runtimes.of, frozen, unsafe).decide()
        files, failed = _write(scans, decisions)
        if not failed:
            break
        frozen |= failed  # other files may not rely on a file that stays
    failures = [Problem(project.files[path], 0, why) for path, why in frozen.items()]
    decided = Migration(
        found=found,
        served=sorted(decisions.served, key=_place),
        left=sorted(decisions.left, key=_place),
        files=(),
        roots=decisions.roots,
        problems=[*found.problems, *failures],
    )
    return decided, files, {path: _called(each) for path, each in decisions.files.items()}


def _place(each: Served | Left) -> tuple[str, Span]:
    return each.use.file, each.use.span


class _Scans:
    """The facts of the files that matter.

    Attributes:
        mentioning: files that mention the globals -> their names.
        on_progress: called as the work goes on.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        config: Config,
        on_progress: Progress,
        processes: int | None = None,
    ) -> None:
        self.project = Project(paths, config)
        self.facts: dict[Path, Facts] = {}
        self.on_progress = on_progress
        self._scanned: set[Path] = set()
        self._processes = processes
        self._problems = list(self.project.problems)
        own = list(find_own_groups(self.project))
        self._own = [e for e in own if {e.module, e.wrapper}.isdisjoint(config.wrappers)]
        self._wrapped = [each for each in own if each not in self._own]
        # Files next to a wrapper import its getters from the module that defines them.
        wrappers = dict.fromkeys((*config.wrappers, *(each.module for each in self._wrapped)))
        self.project.config = replace(config, wrappers=tuple(wrappers))
        paths_of = {name: path for path, name in self.project.files.items()}
        self.project.own = {
            name: self.project.table(paths_of[each.file]).functions
            for each in self._wrapped
            for name in (each.module, each.wrapper)
        }
        names = {path: self.project.files[path] for path in self.project.mentioning(_MENTIONS)}
        homes = {each.file for each in self._wrapped}
        self.mentioning = {
            p: n for p, n in names.items() if n not in homes and not f"/{n}".endswith(OWN_MODULE)
        }

    def globals_module(self) -> str:
        """Return the wrapper that a vendored module asks for groups; empty for Megatron-core.

        Raises:
            UnsupportedOptionError: the new code would not ask a wrapper that holds groups.
        """
        if not self._wrapped:
            return ""
        config, (first, *more) = self.project.config, self._wrapped
        holds = f"--wrapper {first.wrapper}: {first.file} holds groups of its own"
        if not config.vendored:
            raise UnsupportedOptionError(
                f"{holds}. If no collection is passed, megapg asks megatron.core.parallel_state, "
                "which does not know these groups. Add --runtime vendored: its module asks "
                f"{first.wrapper}."
            )
        others = [each.wrapper for each in more]
        others += [n for n in config.wrappers if n not in (first.wrapper, first.module, *others)]
        others += [PARALLEL_STATE] * any(
            dotted.startswith(("megatron.core.parallel_state", "megatron.core.mpu"))
            for path in self.mentioning
            for several in self.project.table(path).everywhere.values()
            for dotted in several
        )
        if others:
            raise UnsupportedOptionError(
                f"{holds}, and the files also use {others[0]}. A vendored module can ask only one "
                "of them. Name the files of one in each run."
            )
        return first.wrapper

    def find_uses(self) -> None:
        """Scan the files that mention the globals, and those that import them by other names."""
        self._scan("finding", list(self.mentioning))
        known: set[tuple[Path, str]] = set()
        while new := self._other_names() - known:
            known |= new
            self._scan("finding", sorted(self.project.importers(new) - self._scanned))

    def _other_names(self) -> set[tuple[Path, str]]:
        """Return the modules and names that stand for the globals but do not mention them."""
        project = self.project
        return {
            (path, name)
            for path in self.facts
            for name, several in project.table(path).imports.items()
            if not _MENTIONS.fullmatch(name.encode())
            if any(project.meaning(each, path).name.startswith(PARALLEL_STATE) for each in several)
        }

    def _scan(self, what: str, paths: Sequence[Path]) -> None:
        self._scanned |= {*paths}
        processes = self._processes
        if processes is None:
            processes = min(_cores(), len(paths) // _FILES_OF_A_PROCESS)
        found: dict[Path, Facts | Problem] = {}
        if processes < 2:
            for path in paths:
                self.on_progress(what, len(found), len(paths))
                found[path] = _facts_of(self.project, path)
        else:
            found = self._scan_in_processes(what, paths, processes)
        for path in paths:
            facts = found[path]
            if isinstance(facts, Problem):
                self._problems.append(facts)
            else:
                self.facts[path] = facts

    def _scan_in_processes(
        self, what: str, paths: Sequence[Path], processes: int
    ) -> dict[Path, Facts | Problem]:
        parts = [paths[start :: 4 * processes] for start in range(4 * processes)]
        found: dict[Path, Facts | Problem] = {}
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            waiting = [pool.submit(_facts_of_several, self.project, part) for part in parts]
            for each in as_completed(waiting):
                self.on_progress(what, len(found), len(paths))
                found |= each.result()
        return found

    def found(self) -> Found:
        """Return the uses in the scanned files."""
        uses = [each.use for facts in self.facts.values() for each in facts.uses]
        return Found(
            uses=sorted(uses, key=lambda use: (use.file, use.span)),
            files=self.project.files.values(),
            notebooks=self.project.notebooks,
            skipped=self.project.skipped,
            problems=self._problems,
            own_groups=self._own,
        )

    @cached_property
    def _reached(self) -> set[tuple[Path, str]]:
        """The modules and names by which other modules get at the globals."""
        found = set()
        for path, facts in self.facts.items():
            for dotted in facts.reached:
                at = self.project.split(self.project.absolute(dotted, path), path)
                if at is not None and at[1]:
                    found.add((at[0], at[1][0]))
        return found

    def is_unneeded(self, path: Path, changes: FileChanges, dotted: str, name: str) -> bool:
        """True if an import of the globals may go since its file does not use it.

        An import from inside of the project stays, since circular imports may need its order.

        Args:
            path: of the file.
            changes: those of the file.
            dotted: what is imported.
            name: that it is bound to.
        """
        project = self.project
        dotted = project.absolute(dotted, path)
        is_globals = project.meaning(dotted, path).name.startswith(PARALLEL_STATE)
        if name not in changes.unused or not is_globals or (path, name) in self._reached:
            return False
        parts = dotted.split(".")
        if any(project.find(".".join(parts[:end]), path) for end in range(1, len(parts) + 1)):
            return False
        exported = path.stem == "__init__" or name in project.table(path).exported
        return not exported and not project.is_imported(path, name, self.facts)

    def follow_calls(self) -> None:
        """Scan the files that call what may take the parameter, and so on up to the entries."""
        known: set[Node] = set()
        while True:
            nodes = self._may_take()
            more = self._bases(nodes)
            if nodes - known:
                new = {(n.path, n.name.partition(".")[0]) for n in nodes - known}
                more |= self.project.importers(new)
            known |= nodes
            more -= self._scanned
            if not more:
                return
            self._scan("following calls", sorted(more))

    def _bases(self, nodes: Collection[Node]) -> set[Path]:
        """Return the files with bases of some classes."""
        carriers = Carriers(self.project, self.facts)
        found = set()
        for node in nodes:
            of = carriers.class_at(node.path, node.name)
            for each in carriers.ancestry(of) if of is not None else ():
                for base in each.bases:
                    path = carriers.meaning(base, each.path).path
                    found |= {path} if path is not None else set()
        return found

    def _may_take(self) -> set[Node]:
        """Return the functions and classes with uses, and those that call them."""
        carriers = Carriers(self.project, self.facts)
        nodes: set[Node] = set()
        callers: dict[Node, set[Node]] = defaultdict(set)
        for path, facts in self.facts.items():
            if is_test(self.project.files[path]):
                continue
            for use in facts.uses:
                nodes |= _outermost(carriers, path, use.use.function)
            for call in facts.calls:
                meaning = carriers.meaning(call.callee, path)
                if meaning.path is not None and meaning.local:
                    callee = Node(meaning.path, meaning.local)
                    callers[callee] |= _outermost(carriers, path, call.function)
        return reached(nodes, lambda node: callers[node])


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _facts_of_several(project: Project, paths: Sequence[Path]) -> dict[Path, Facts | Problem]:
    return {path: _facts_of(project, path) for path in paths}


def _facts_of(project: Project, path: Path) -> Facts | Problem:
    """Return the facts about a file, or why it can't be read."""
    name, data = project.files[path], project.data(path)

    def stands_for(dotted: str) -> str:
        return project.meaning(project.absolute(dotted, path), path).name

    try:
        return scan(data, path, name, stands_for, project.config.versions)
    except cst.ParserSyntaxError as error:
        return Problem(name, error.raw_line, "is no valid Python")
    except (SyntaxError, LookupError, RecursionError, ValueError) as error:
        return Problem(name, 0, f"can't be read: {error}")


def _outermost(carriers: Carriers, path: Path, name: str) -> set[Node]:
    around = carriers.around(path, name)
    return {Node(path, around[-1].of_class or around[-1].name)} if around else set()


def _write(scans: _Scans, decisions: Decisions) -> tuple[list[Rewritten], dict[Path, str]]:
    """Make the new texts; return them, and the files for which that fails."""
    project = scans.project
    files: list[Rewritten] = []
    failed: dict[Path, str] = {}
    for done, (path, changes) in enumerate(decisions.files.items()):
        scans.on_progress("rewriting", done, len(decisions.files))
        before = project.data(path)
        try:
            after = rewritten(before, changes, partial(scans.is_unneeded, path, changes))
            if not project.files[path].endswith(".pyi"):
                compile(after, str(path), "exec", dont_inherit=True)
        except _INVALID as error:
            failed[path] = f"its rewrite is not valid: {error}"
            continue
        files.append(Rewritten(project.files[path], path, before, after))
    return files, failed


def _called(changes: FileChanges) -> set[str]:
    """Return the functions of the vendored module that the new text of a file calls."""
    return set(re.findall(rf"\b{re.escape(changes.name)}\.(\w+)", changes.text()))
