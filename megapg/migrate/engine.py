"""Find and rewrite the uses of the globals in a project. Nothing is written to disk.

The steps:

1. :mod:`~megapg.migrate.project` lists the files.
2. :mod:`~megapg.migrate.scan` finds uses, functions and calls in the files that mention the
   globals, or a function that may take the new parameter.
3. :mod:`~megapg.migrate.carriers` chooses where each function takes its groups from, and
   :mod:`~megapg.migrate.thread` which functions take the parameter.
4. :mod:`~megapg.migrate.planner` decides about each use, and :mod:`~megapg.migrate.rewrite` makes
   the new text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

import libcst as cst

from megapg.migrate.carriers import Carriers, Node
from megapg.migrate.config import Config
from megapg.migrate.facts import Facts
from megapg.migrate.format import formatted
from megapg.migrate.migration import Found, Left, Migration, Problem, Rewritten, Served
from megapg.migrate.planner import FilePlan, Plan, Planner
from megapg.migrate.project import PARALLEL_STATE, Project, is_test
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
_OWN_MODULE = "/megatron/core/parallel_state.py"  # defines the globals, and does not use them


def unseen(what: str, done: int, of: int) -> None:
    """Show no progress."""


def find(paths: Sequence[Path], config: Config, on_progress: Progress = unseen) -> Found:
    """Find every use of the globals at and under some paths."""
    scans = _Scans(paths, config, on_progress)
    scans.find_uses()
    return scans.found()


def migrate(
    paths: Sequence[Path],
    config: Config,
    *,
    unsafe: bool = False,
    on_progress: Progress = unseen,
    check_files: Callable[[Mapping[Path, str]], object] = len,
) -> Migration:
    """Rewrite the uses of the globals at and under some paths.

    Args:
        paths: files and directories.
        config: of the project.
        unsafe: also rewrite uses that may behave differently if groups are missing.
        on_progress: called as the work goes on.
        check_files: called before the analysis with the files that mention the globals, and their
            names.
    """
    scans = _Scans(paths, config, on_progress)
    check_files(scans.mentioning)
    scans.find_uses()
    scans.follow_calls()
    found = scans.found()
    project = scans.project
    replaced = find_replaced(project, scans.facts)
    runtimes = Runtimes(config, list(project.files))
    frozen: dict[Path, str] = {}
    while True:
        plan = Planner(project, scans.facts, replaced, runtimes.of, frozen, unsafe).plan()
        files, failed = _write(scans, plan, on_progress)
        if not failed:
            break
        frozen |= failed  # other files may not rely on a file that stays
    files += runtimes.modules({path: _called(each) for path, each in plan.files.items()})
    files, unformatted = formatted(files, config.root, on_progress)
    failures = [Problem(project.files[path], 0, why) for path, why in frozen.items()]
    return Migration(
        found=found,
        served=sorted(plan.served, key=_place),
        left=sorted(plan.left, key=_place),
        files=sorted(files, key=lambda each: each.file),
        roots=plan.roots,
        problems=[*found.problems, *failures],
        unformatted=unformatted,
    )


def _place(each: Served | Left) -> tuple[str, Span]:
    return each.use.file, each.use.span


class _Scans:
    """The facts of the files that matter.

    Attributes:
        mentioning: files that mention the globals -> their names.
    """

    def __init__(self, paths: Sequence[Path], config: Config, on_progress: Progress) -> None:
        self.project = Project(paths, config)
        self.facts: dict[Path, Facts] = {}
        self._scanned: set[Path] = set()
        self._on_progress = on_progress
        self._problems = list(self.project.problems)
        names = {path: self.project.files[path] for path in self.project.mentioning(_MENTIONS)}
        self.mentioning = {p: n for p, n in names.items() if not f"/{n}".endswith(_OWN_MODULE)}

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
        project = self.project
        for done, path in enumerate(paths):
            self._on_progress(what, done, len(paths))
            self._scanned.add(path)
            name = project.files[path]

            def stands_for(dotted: str, path: Path = path) -> str:
                return project.meaning(project.absolute(dotted, path), path).name

            try:
                data = project.data(path)
                self.facts[path] = scan(data, path, name, stands_for, project.config.versions)
            except cst.ParserSyntaxError as error:
                self._problems.append(Problem(name, error.raw_line, "is no valid Python"))
            except (SyntaxError, LookupError, RecursionError, ValueError) as error:
                self._problems.append(Problem(name, 0, f"can't be read: {error}"))

    def found(self) -> Found:
        """Return the uses in the scanned files."""
        uses = [each.use for facts in self.facts.values() for each in facts.uses]
        return Found(
            uses=sorted(uses, key=lambda use: (use.file, use.span)),
            files=self.project.files.values(),
            notebooks=self.project.notebooks,
            skipped=self.project.skipped,
            problems=self._problems,
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

    def is_unneeded(self, path: Path, plan: FilePlan, dotted: str, name: str) -> bool:
        """True if an import of the globals may go since its file does not use it.

        An import from inside of the project stays, since circular imports may need its order.

        Args:
            path: of the file.
            plan: the changes of the file.
            dotted: what is imported.
            name: that it is bound to.
        """
        project = self.project
        dotted = project.absolute(dotted, path)
        is_globals = project.meaning(dotted, path).name.startswith(PARALLEL_STATE)
        if name not in plan.unused or not is_globals or (path, name) in self._reached:
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


def _outermost(carriers: Carriers, path: Path, name: str) -> set[Node]:
    around = carriers.around(path, name)
    return {Node(path, around[-1].of_class or around[-1].name)} if around else set()


def _write(
    scans: _Scans, plan: Plan, on_progress: Progress
) -> tuple[list[Rewritten], dict[Path, str]]:
    """Make the new texts; return them, and the files for which that fails."""
    project = scans.project
    files: list[Rewritten] = []
    failed: dict[Path, str] = {}
    for done, (path, changes) in enumerate(plan.files.items()):
        on_progress("rewriting", done, len(plan.files))
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


def _called(plan: FilePlan) -> set[str]:
    """Return the functions of the vendored module that the new text of a file calls."""
    return set(re.findall(rf"\b{re.escape(plan.name)}\.(\w+)", plan.text()))
