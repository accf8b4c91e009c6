"""The codemod: from the files of a project to their new texts. Nothing is written to disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megapg.migrate.config import Config
from megapg.migrate.functions import Functions, unit_of
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
)
from megapg.migrate.outside import names_taken
from megapg.migrate.plan import Decision, make_plan
from megapg.migrate.rewrite import Writer
from megapg.migrate.sites import Site
from megapg.migrate.source import Problem, Source
from megapg.migrate.verify import verify


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
    frozen: dict[Path, str] = {}
    while True:  # a file that fails verification takes no part, and then others may not rely on it
        attempt = _Attempt(index, unsafe, frozen)
        if not attempt.failed:
            return attempt.migration(findings)
        frozen |= attempt.failed


class _Attempt:
    """The new texts of all files but the frozen ones."""

    def __init__(self, index: Index, unsafe: bool, frozen: dict[Path, str]) -> None:
        self._index, self._frozen = index, frozen
        self.failed: dict[Path, str] = {}
        self._plan = make_plan(index, Functions(index), unsafe, frozen)
        self._writers: dict[Path, Writer] = {}
        self._requires: dict[Path, set[str]] = defaultdict(set)
        self._texts: dict[Decision, str] = {}
        self._not_written: list[Left] = []
        self._write()
        taken = names_taken(index)
        self._files = [
            file
            for path, writer in self._writers.items()
            if (file := self._rewritten(path, writer.edits(taken.get(path, set())))) is not None
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
        text, at = [], 0
        for edit in edits:
            text += [source.text[at : edit.start], edit.new]
            at = edit.stop
        after = "".join([*text, source.text[at:]])
        mark = source.data[: len(source.data) - len(source.text.encode(source.encoding))]
        file = Rewritten(
            source.name,
            path,
            source.data,
            mark + after.encode(source.encoding),
            source.text,
            tuple(edits),
            frozenset(self._requires[path]),
        )
        problem = verify(file, source)
        if problem is not None:
            self.failed[path] = problem
            return None
        return file

    def migration(self, findings: Findings) -> Migration:
        """The result."""
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
            served=sorted(served, key=lambda each: _order(each.site)),
            left=sorted([*self._plan.left, *self._not_written], key=lambda each: _order(each.site)),
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
