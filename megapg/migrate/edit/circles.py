"""The imports that stay though nothing uses them: others fail without them.

Modules that import each other work in some orders alone, and an import that goes may be what made
the order. The imports of the project are replayed before and after the migration.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

from megapg.migrate.find.index import Index
from megapg.migrate.python.importing import Reader, Replays, Steps
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import bound_name
from megapg.migrate.python.source import Source, parse, read_bytes
from megapg.migrate.python.tree import File, Modules, find_files
from megapg.migrate.python.unused import Removed, with_names

Staying: TypeAlias = set[tuple[int, str]]
"""The lines of the imports of a file that stay, each with a name that it still imports."""
_One: TypeAlias = tuple[Path, int, str]
_Missing: TypeAlias = frozenset[str]


class Circles:
    """Remembers which imports stay, from one attempt to the next.

    Args:
        index: the project.
        paths: what is migrated of it. Modules beside them are read where they may import it.

    Attributes:
        staying: these imports, by their files.
    """

    def __init__(self, index: Index, paths: Iterable[Path]) -> None:
        self._index, self._paths = index, paths
        self.staying: dict[Path, Staying] = defaultdict(set)
        self._steps: dict[Path, Steps] = {}

    def finds_more(
        self,
        removed: Mapping[Path, Iterable[Removed]],
        trees: Mapping[Path, ast.Module],
        tree_with: Callable[[Path, Staying], ast.Module | None],
    ) -> bool:
        """Whether there are more imports that have to stay.

        Args:
            removed: what goes from each file.
            trees: the new texts, parsed.
            tree_with: a file's new text, parsed, where some more imports stay.
        """
        going = [one for path, each in removed.items() for one in self._of_project(path, each)]
        found = _Search(self, going, trees, tree_with).staying() if going else []
        more = [one for one in found if one[1:] not in self.staying[one[0]]]
        for path, line, name in more:
            self.staying[path].add((line, name))
        return bool(more)

    def _of_project(self, path: Path, removed: Iterable[Removed]) -> Iterator[_One]:
        """What goes from a file and is of the project: of each module the shortest name."""
        for statement, names in removed:
            modules: dict[Path, str] = {}
            out = [each for each in statement.names if names is None or bound_name(each) in names]
            for alias in sorted(out, key=lambda each: len(ast.unparse(each))):
                for step in self.reader.imports(with_names(statement, [alias]), path):
                    # What the names that stay are taken from is loaded all the same.
                    whole = step.runs[-1:] if names is None else ()
                    for module in (*(each.module for each in step.names), *whole):
                        if module is not None:
                            modules.setdefault(module, bound_name(alias))
            for name in dict.fromkeys(modules.values()):
                yield path, statement.lineno, name

    # -- the project ---------------------------------------------------------------------------

    @cached_property
    def reader(self) -> Reader:
        """Reads what the modules of the project do, tests and what is not migrated included."""
        root, exclude = self._index.root, self._index.config.exclude
        if root in map(Path, map(os.path.abspath, self._paths)) and not exclude:
            modules = self._index.modules
        else:
            found = find_files([root], root)
            modules = Modules(each for each in found if isinstance(each, File))
        return Reader(modules, self._index.config.vendored)

    def before(self, path: Path) -> Steps:
        """What a module does now."""
        if path not in self._steps:
            tree = self._tree(path)
            self._steps[path] = self.reader.steps(tree, path) if tree is not None else ()
        return self._steps[path]

    def _tree(self, path: Path) -> ast.Module | None:
        if path in self._parsed:
            looked = self._index.look(path)
            return looked[0].tree if looked else None
        data = read_bytes(path, path.name)
        source = parse(path, path.name, data) if isinstance(data, bytes) else data
        return source.tree if isinstance(source, Source) else None

    @cached_property
    def _parsed(self) -> set[Path]:
        return {path for path, _ in self._index.analyses()}

    @kept
    def replays(self, missing: _Missing) -> Replays:
        """What comes of the imports now."""
        return Replays(self.reader, self.before, missing)


class _Search:
    """Looks for the fewest imports whose staying has all imports work that did.

    Args:
        circles: knows what the modules do now.
        going: the imports that go.
        trees: the new texts, parsed.
        tree_with: a file's new text, parsed, where some more imports stay.
    """

    def __init__(
        self,
        circles: Circles,
        going: Sequence[_One],
        trees: Mapping[Path, ast.Module],
        tree_with: Callable[[Path, Staying], ast.Module | None],
    ) -> None:
        self._circles, self._going = circles, going
        self._trees, self._tree_with = trees, tree_with
        self._new: dict[tuple[Path, frozenset[tuple[int, str]]], Steps] = {}

    def staying(self) -> list[_One]:
        """These imports; none where none of them would help."""
        broken = self._that_work(self._entries(), [], works=False)
        chosen: list[_One] = []
        while broken:
            one = self._first_that_helps(chosen, *broken[0])
            if one is None:
                return self._fewest(broken)
            chosen.append(one)
            broken = self._that_work(broken, chosen, works=False)
        return chosen

    def _entries(self) -> Iterator[tuple[_Missing, Path]]:
        """The modules with which a program may begin, and what it may lack of others."""
        reader = self._circles.reader
        paths = dict.fromkeys([*reader.modules.sources(), *self._trees])
        for path in paths:
            yield frozenset(), path
        optional = reader.optional  # as far as that was read so far
        for path in paths if optional else ():
            yield optional, path

    def _first_that_helps(
        self, chosen: Sequence[_One], missing: _Missing, entry: Path
    ) -> _One | None:
        """The import that comes first in a program and has it work."""
        replay = self._circles.replays(missing).up_to(entry)
        order = {path: number for number, path in enumerate(replay.order if replay else ())}
        going = [each for each in self._going if each[0] in order and each not in chosen]
        for one in sorted(going, key=lambda each: order[each[0]]):
            if self._that_work([(missing, entry)], [*chosen, one], works=True):
                return one
        return None

    def _fewest(self, broken: Sequence[tuple[_Missing, Path]]) -> list[_One]:
        """The imports without any of which something would fail, of all that can be cured."""
        chosen = list(self._going)
        cured = self._that_work(broken, chosen, works=True)
        for one in self._going:
            rest = [each for each in chosen if each != one]
            if not self._that_work(cured, rest, works=False):
                chosen = rest
        return chosen

    def _that_work(
        self, entries: Iterable[tuple[_Missing, Path]], staying: Sequence[_One], *, works: bool
    ) -> list[tuple[_Missing, Path]]:
        """Those whose import does what it did, where some imports stay, or else those whose does
        not.
        """
        by_file: dict[Path, Staying] = defaultdict(set)
        for path, line, name in staying:
            by_file[path].add((line, name))
        replays: dict[_Missing, Replays] = {}
        found = []
        for missing, path in entries:
            if missing not in replays:
                steps = partial(self._after, by_file)
                replays[missing] = Replays(self._circles.reader, steps, missing)
            before = self._circles.replays(missing).failed(path)
            after = replays[missing].failed(path) if before is not None else before
            if works == (before is None or (after is not None and after <= before)):
                found.append((missing, path))
        return found

    def _after(self, staying: Mapping[Path, Staying], path: Path) -> Steps:
        """What a module will do where some more imports stay."""
        if path not in self._trees:
            return self._circles.before(path)
        here = frozenset(staying.get(path, ()))
        if (path, here) not in self._new:
            tree = self._tree_with(path, set(here)) if here else None
            steps = self._circles.reader.steps(tree or self._trees[path], path)
            self._new[path, here] = steps
        return self._new[path, here]
