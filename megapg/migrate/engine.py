"""The codemod: from the files of a project to their new texts. Nothing is written to disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megapg.migrate.config import Config
from megapg.migrate.fakes import by_lines, patch_plans, served_by_fakes, with_fakes
from megapg.migrate.functions import Functions, unit_of
from megapg.migrate.imports import Imports
from megapg.migrate.index import Findings, Index
from megapg.migrate.migration import (
    SHIMS,
    Edit,
    Left,
    Migration,
    Rewritten,
    Root,
    Served,
    Style,
    applied,
)
from megapg.migrate.outside import names_taken
from megapg.migrate.plan import Decision, make_plan
from megapg.migrate.rewrite import Writer
from megapg.migrate.sites import Site
from megapg.migrate.source import Problem, Source
from megapg.migrate.verify import verify

_STANDS = "It can stay: what it patches is what is read after a migration, too."


def migrate(
    paths: Sequence[Path],
    config: Config,
    *,
    style: Style = Style.COLLECTION,
    unsafe: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Migration:
    """Rewrite the uses of the globals at and under the paths, as far as that is certain.

    Args:
        paths: files and directories.
        config: see :func:`megapg.migrate.index.find_sites`.
        style: what functions are given.
        unsafe: also rewrite what may behave differently where groups are missing.
        on_progress: called with the number of files done and to do.
    """
    index = Index(paths, config)
    findings = index.run(on_progress)
    plans = patch_plans(index)
    originals: dict[Path, Source] = {}
    instead: dict[Path, bytes] = {}
    for path, plan in plans.items():
        looked = index.look(path)
        data = with_fakes(looked[0], plan, Imports(*looked)) if looked else None
        if looked and data is not None:
            originals[path], instead[path] = looked[0], data
    fakes = [served for path in instead for served in served_by_fakes(plans[path])]
    if instead:
        index = Index(paths, config, instead)
        findings = index.run(lambda done, total: None)
        plans = patch_plans(index)
    advice = {site: what for plan in plans.values() for site, what in plan.left.items()}
    advice |= dict.fromkeys((site for plan in plans.values() for site in plan.stands), _STANDS)
    frozen: dict[Path, str] = {}
    while True:  # a file that fails verification takes no part, and then others may not rely on it
        attempt = _Attempt(index, frozen, originals, style, unsafe)
        if not attempt.failed:
            return attempt.migration(findings, fakes, advice)
        frozen |= attempt.failed


class _Attempt:
    """The new texts of all files but the frozen ones."""

    def __init__(
        self,
        index: Index,
        frozen: Mapping[Path, str],
        originals: Mapping[Path, Source],
        style: Style,
        unsafe: bool,
    ) -> None:
        self._index, self._frozen, self._originals = index, frozen, originals
        self.failed: dict[Path, str] = {}
        self._plan = make_plan(index, Functions(index), frozen, style=style, unsafe=unsafe)
        self._writers: dict[Path, Writer] = {}
        self._requires: dict[Path, set[str]] = defaultdict(set)
        self._texts: dict[Decision, str] = {}
        self._not_written: list[Left] = []
        self._write()
        taken = names_taken(index, {path: each.released for path, each in self._writers.items()})
        self._files = [
            file
            for path, writer in self._writers.items()
            if (file := self._rewritten(path, writer.edits(taken.get(path, set())))) is not None
        ]
        changed = {file.path for file in self._files}
        self._files += [
            self._since(original, self._source(path).data, self._source(path).text, path)
            for path, original in originals.items()
            if path not in changed
        ]

    def _writer(self, path: Path) -> Writer:
        if path not in self._writers:
            looked = self._index.look(path)
            assert looked is not None  # it has sites or functions
            self._writers[path] = Writer(*looked)
        return self._writers[path]

    def _write(self) -> None:
        by_file: dict[Path, list[Decision]] = defaultdict(list)
        for decision in self._plan.decisions:
            by_file[decision.located.path].append(decision)
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
                self._requires[at].add(self._name(where))

    def _name(self, path: Path) -> str:
        return self._source(path).name

    def _source(self, path: Path) -> Source:
        looked = self._index.look(path)
        assert looked is not None
        return looked[0]

    def _rewritten(self, path: Path, edits: list[Edit]) -> Rewritten | None:
        if not edits:
            return None
        source = self._source(path)
        after = applied(source.text, edits)
        file = Rewritten(
            source.name,
            path,
            source.data,
            source.encoded(after),
            source.text,
            tuple(edits),
            frozenset(self._requires[path]),
        )
        problem = verify(file, source)
        if problem is not None:
            self.failed[path] = problem
            return None
        if path in self._originals:
            return self._since(self._originals[path], file.after, after, path)
        return file

    def _since(self, original: Source, after: bytes, text: str, path: Path) -> Rewritten:
        """A file with fakes in it, as a rewrite of what it was before them."""
        return Rewritten(
            original.name,
            path,
            original.data,
            after,
            original.text,
            by_lines(original.text, text),
            frozenset(self._requires[path]),
        )

    def migration(
        self, findings: Findings, fakes: Sequence[Served], advice: Mapping[Site, str]
    ) -> Migration:
        """The result.

        Args:
            findings: of the index.
            fakes: patches of the users' tests that went before.
            advice: for patches that stay what to write by hand.
        """
        left = [
            replace(each, suggestion=advice.get(each.site, each.suggestion))
            for each in (*self._plan.left, *self._not_written)
        ]
        served = [
            Served(decision.located.site, decision.base.how, text)
            for decision, text in self._texts.items()
        ]
        problems = [
            Problem(
                self._name(path), 0, f"is left as it is, for its rewrite would not be sound: {why}"
            )
            for path, why in self._frozen.items()
        ]
        return Migration(
            served=sorted([*fakes, *served], key=lambda each: _order(each.site)),
            left=sorted(left, key=lambda each: _order(each.site)),
            kept=self._plan.kept,
            files=sorted(self._files, key=lambda file: file.file),
            roots=tuple(_roots(self._texts)),
            problems=(*findings.problems, *problems),
            looked_at=findings.files,
        )


def _order(site: Site) -> tuple[str, int]:
    return site.file, site.span.start


def _roots(decisions: Iterable[Decision]) -> Iterator[Root]:
    """The functions that turn to the globals."""
    fields: dict[tuple[str, str], set[str]] = defaultdict(set)
    count: dict[tuple[str, str], int] = defaultdict(int)
    for decision in decisions:
        if decision.base.how in SHIMS:
            unit = unit_of(decision.located.use.scope)
            key = decision.located.site.file, unit.qualname if unit else ""
            fields[key] |= set(decision.answer.needs)
            count[key] += 1
    for (file, function), serves in sorted(count.items()):
        yield Root(file, function, tuple(sorted(fields[file, function])), serves)
