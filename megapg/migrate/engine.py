"""The codemod: from the files of a project to their new texts. Nothing is written to disk."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from megapg.migrate.config import Config
from megapg.migrate.decide.decisions import GLOBALS, Decision, Passing
from megapg.migrate.decide.facts import FallenBack
from megapg.migrate.decide.functions import Functions
from megapg.migrate.decide.rules import make_plan
from megapg.migrate.edit.callees import Callees, Calling
from megapg.migrate.edit.circles import Circles, Staying
from megapg.migrate.edit.outside import imported_through, names_taken, patched_through
from megapg.migrate.edit.rewrite import Writer
from megapg.migrate.edit.runtimes import Runtimes
from megapg.migrate.edit.soundness import verified
from megapg.migrate.edit.spans import Spans
from megapg.migrate.edit.style import Styles
from megapg.migrate.edit.unmixed import Unmixed
from megapg.migrate.find.index import Findings, Index, Progress, unseen
from megapg.migrate.find.meaning import PARALLEL_STATE
from megapg.migrate.find.sites import Site
from megapg.migrate.migration import Edit, Left, Migration, Rewritten, Root, Served, Why, applied
from megapg.migrate.python.analysis import Analysis
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import Imported, Scope
from megapg.migrate.python.source import Problem, Source
from megapg.migrate.python.tree import is_test
from megapg.migrate.python.unused import Removed

_GLOBALS = ".".join(PARALLEL_STATE)


def migrate(
    paths: Sequence[Path], config: Config, *, unsafe: bool = False, on_progress: Progress = unseen
) -> Migration:
    """Rewrite the uses of the globals at and under the paths, as far as that is certain.

    Args:
        paths: files and directories.
        config: see :func:`megapg.migrate.find.index.find_sites`.
        unsafe: also rewrite what may behave differently where groups are missing.
        on_progress: called with what is being done, how much of it is done, and of how much.
    """
    index = Index(paths, config)
    findings = index.run(on_progress)
    circles = Circles(index, paths)
    project = _Project(
        index, Functions(index), Styles(index.root), Runtimes(index, config), circles.staying
    )
    frozen: dict[Path, str] = {}
    unmixed = Unmixed(index)
    while True:  # a file that fails verification takes no part, and then others may not rely on it
        attempt = _Attempt(project, frozen, unmixed.fallen, unsafe, on_progress)
        frozen |= attempt.failed
        if attempt.failed or unmixed.finds_more(attempt.trees):
            continue
        callees = Callees(index, attempt.trees)
        if unmixed.hands_on_to(callees.of_models()):
            continue
        calling = callees.of_globals()
        if unmixed.falls_back_for(calling, attempt.taking, attempt.unpassed):
            continue
        if not circles.finds_more(attempt.removed(), attempt.trees, attempt.tree_with):
            return attempt.migration(findings, calling)


@dataclass(frozen=True)
class _Project:
    """What all attempts have in common."""

    index: Index
    functions: Functions
    styles: Styles
    runtimes: Runtimes
    staying: Mapping[Path, Staying]  # the imports that stay though nothing needs them


class _Attempt:
    """The new texts of all files but the frozen ones.

    Attributes:
        failed: the files whose new text is not sound, and why.
        trees: the new texts of the others, parsed.
    """

    def __init__(
        self,
        project: _Project,
        frozen: Mapping[Path, str],
        fallen: FallenBack,
        unsafe: bool,
        on_progress: Progress,
    ) -> None:
        self._index, self._runtimes, self._styles = project.index, project.runtimes, project.styles
        self._frozen = frozen
        self.failed: dict[Path, str] = {}
        self.trees: dict[Path, ast.Module] = {}
        self._why = dict(fallen.why)
        planned = partial(on_progress, "deciding")
        self._plan = make_plan(
            project.index, project.functions, frozen, fallen, unsafe=unsafe, on_progress=planned
        )
        self._writers: dict[Path, Writer] = {}
        self._requires: dict[Path, set[str]] = defaultdict(set)
        self._texts: dict[Decision, str] = {}
        self._not_written: list[Left] = []
        self._redirected: set[Site] = set()
        self._write()
        self._kept = self._taken()
        self._staying = {path: set(each) for path, each in project.staying.items()}
        self._files = []
        for done, path in enumerate(self._writers):
            on_progress("rewriting", done, len(self._writers))
            file = self._rewritten(path, self._edits(path))
            if file is not None:
                self._files.append(file)

    def _edits(self, path: Path, more: Staying | None = None) -> list[Edit]:
        staying = self._staying.get(path, set()) | (more or set())
        return self._writers[path].edits(self._kept.get(path, set()), staying)

    def removed(self) -> dict[Path, list[Removed]]:
        """The imports that go from each file, or stay for others alone."""
        return {p: self._writers[p].removed(self._kept.get(p, set())) for p in self.trees}

    def tree_with(self, path: Path, more: Staying) -> ast.Module | None:
        """A file's new text, parsed, where some more imports stay; None where it is not sound."""
        _, found = _with_edits(self._looked(path)[0], tuple(self._edits(path, more)))
        return None if isinstance(found, str) else found

    def _writer(self, path: Path) -> Writer:
        if path not in self._writers:
            style, runtime = self._styles.of(path), self._runtimes.of(path)
            self._writers[path] = Writer(*self._looked(path), style, runtime)
        return self._writers[path]

    def _looked(self, path: Path) -> tuple[Source, Analysis]:
        looked = self._index.look(path)
        assert looked is not None  # it has sites or functions
        return looked

    def _write(self) -> None:
        by_file: dict[Path, list[Decision]] = defaultdict(list)
        for decision in self._plan.decisions:
            by_file[decision.located.path].append(decision)
        asking: dict[Path, list[Decision | Passing]] = defaultdict(list)
        for path, decisions in by_file.items():
            asking[path] += decisions
        for passing in self._plan.passing:
            asking[passing.reference.path].append(passing)
        for path, places in asking.items():
            self._writer(path).share(places, Spans(partial(self._plan.renewals, path)))
        for path, decisions in by_file.items():
            texts = self._writer(path).serve(decisions)
            self._texts |= texts
            for decision in decisions:
                if decision not in texts:
                    site = decision.located.site
                    self._not_written.append(Left(site, "in-a-string", "", site.replacement))
        for taking in self._plan.taking:
            if not self._writer(taking.path).give_parameter(taking):
                self.failed[taking.path] = "a signature that can't be edited"
        for passing in self._plan.passing:
            at, where = passing.reference.path, passing.path
            if self._writer(at).pass_argument(passing) and at != where:
                self._requires[at].add(self._looked(where)[0].name)

    def _taken(self) -> dict[Path, set[str]]:
        """The names that others take of each file. A test that patches one which goes patches what
        is asked then, so that it hears what it heard.
        """
        released = {path: each.released for path, each in self._writers.items()}
        moving = list(imported_through(self._index, released))
        apart = {each[1] for each in moving}
        taken = names_taken(self._index, released, apart)
        if leaving := set(self._going(released, taken)):
            taken = names_taken(self._index, released, apart | leaving)
        for path, imported, name, source in moving:
            needed = taken.get(source, ())
            changeable = path not in self._frozen
            drops = changeable and self._writers[source].drops(imported.member, needed)
            if drops and self._writer(path).import_the_globals(imported, name):
                self._requires[path].add(self._looked(source)[0].name)
            else:
                taken[source].add(imported.member)
        for located, patched, through in patched_through(self._index):
            going = [
                path
                for path, name in through.items()
                if name in released.get(path, ())
                and self._writers[path].drops(name, taken.get(path, ()))
            ]
            changeable = located.path not in self._frozen and not located.site.keep
            if (
                going
                and changeable
                and is_test(located.site.file)
                and self._writer(located.path).patch_the_globals(patched, located.site.name)
            ):
                self._redirected.add(located.site)
                self._requires[located.path] |= {self._looked(path)[0].name for path in going}
                continue
            for path, name in through.items():
                taken[path].add(name)
        return taken

    def _going(
        self, released: Mapping[Path, Collection[str]], taken: Mapping[Path, Collection[str]]
    ) -> Iterator[Imported]:
        """The imports that a file drops of names which it took from another file that releases
        names.
        """
        for path in released.keys() - self._frozen.keys():
            bindings, writer = self._looked(path)[1].module.bindings, self._writers[path]
            dropped = [name for name in released[path] if writer.drops(name, taken.get(path, ()))]
            bound = (each for name in dropped for each in bindings.get(name, ()))
            for each in bound:
                if isinstance(each, Imported):
                    homes = self._index.resolver.module(each, path)
                    if any(home.path in released for home in homes):
                        yield each

    def _rewritten(self, path: Path, edits: list[Edit]) -> Rewritten | None:
        if not edits:
            return None
        source, _ = self._looked(path)
        file, found = _with_edits(source, tuple(edits))
        if isinstance(found, str):
            self.failed[path] = found
            return None
        self.trees[path] = found
        return replace(file, requires=frozenset(self._requires[path]))

    def _fell_back(self, decision: Decision) -> str:
        """Why the globals serve a use, where the check of what was written had them do so."""
        unit = decision.located.use.scope.unit
        found = self._why.get(unit, "") if unit is not None else ""
        return f"the globals serve: {found}" if found and decision.base == GLOBALS else ""

    @property
    def taking(self) -> Collection[Scope]:
        """The functions that get the parameter."""
        return {each.function for each in self._plan.taking}

    @property
    def unpassed(self) -> Collection[Scope]:
        """The functions that get the parameter, and to which nobody passes a collection."""
        return self._plan.unpassed

    def migration(self, findings: Findings, calling: Sequence[Calling]) -> Migration:
        """The result, with what the index found, and with what has the globals asked."""
        served = [
            Served(
                decision.located.site,
                decision.base.how,
                text,
                self._plan.whys.get(decision, ""),
                self._fell_back(decision),
            )
            for decision, text in self._texts.items()
        ]
        files = self._runtimes.with_modules(self._files)
        unsound = "is left as it is, for its rewrite would not be sound"
        problems = [
            Problem(self._looked(path)[0].name, 0, f"{unsound}: {why}")
            for path, why in self._frozen.items()
        ]
        left = [
            replace(each, detail=f"patches {_GLOBALS} from now on", suggestion="")
            if each.site in self._redirected
            else each
            for each in (*self._plan.left, *self._not_written)
        ]
        return Migration(
            served=sorted(served, key=lambda each: _order(each.site)),
            left=sorted(left, key=lambda each: _order(each.site)),
            files=sorted(files, key=lambda file: file.file),
            roots=tuple(_roots(self._texts, self._plan.whys)),
            problems=(*findings.problems, *problems, *self._runtimes.problems),
            findings=findings,
            starts=self._plan.starts,
            decided_by=self._plan.decided_by,
            noticed=sorted(self._plan.noticed, key=lambda each: (each.file, each.line)),
            callees=[each.callee for each in calling],
        )


@kept
def _with_edits(source: Source, edits: tuple[Edit, ...]) -> tuple[Rewritten, ast.Module | str]:
    """A file with edits, and its new tree or what is wrong with it, which attempts that write the
    same have in common.
    """
    after = source.encoded(applied(source.text, edits))
    file = Rewritten(source.name, source.path, source.data, after, source.text, edits)
    return file, verified(file, source)


def _order(site: Site) -> tuple[str, int]:
    return site.file, site.span.start


def _roots(decisions: Iterable[Decision], whys: Mapping[Decision, Why]) -> Iterator[Root]:
    """The functions that turn to the globals."""
    of: dict[tuple[str, str], list[Decision]] = defaultdict(list)
    for decision in decisions:
        if decision in whys:
            unit = decision.located.use.scope.unit
            of[decision.located.site.file, unit.qualname if unit else ""].append(decision)
    for (file, function), each in sorted(of.items()):
        needs = sorted({*chain(*(decision.answer.needs for decision in each))})
        [(why, _)] = Counter(whys[decision] for decision in each).most_common(1)
        yield Root(file, function, tuple(needs), len(each), why)
