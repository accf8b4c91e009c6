"""What falls back since the check of a result found that it mixes carriers."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from megapg.migrate.decide.facts import FallenBack
from megapg.migrate.edit.callees import Calling
from megapg.migrate.edit.mixing import GLOBALS, PASSED, Mixed, definitions_in, mixed, new_in
from megapg.migrate.find.axes import AXES
from megapg.migrate.find.index import Index
from megapg.migrate.find.models import ancestry
from megapg.migrate.python.methods import class_of, kept
from megapg.migrate.python.scopes import Scope, scopes
from megapg.upstream.mapping import COLLECTION_NAMES

_COLLECTIONS = tuple(each.encode() for each in COLLECTION_NAMES)


class Unmixed:
    """Remembers which functions fall back, from one attempt to the next.

    Args:
        index: the project.

    Attributes:
        fallen: these functions.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self.fallen = FallenBack()

    def finds_more(self, trees: Mapping[Path, ast.Module]) -> bool:
        """Whether there is more that has to fall back.

        Args:
            trees: the new texts, parsed, by their files. Tests may ask whom they like.
        """
        new = {self._name(path): tree for path, tree in trees.items() if not self._is_test(path)}
        paths = {self._name(path): path for path in trees}
        # Classes of other files may be of one line with those that change.
        old = {self._name(path): tree for path, tree in self._trees_before.items()}
        old = {name: tree for name, tree in old.items() if name not in new}
        found = mixed(new, self._index.config.versions, old, self._runtime)
        fallen = frozenset(self.fallen.parted)  # and so did not help
        fell_back = [
            self._fall_back(each, paths.get(file) or self._paths_before[file], fallen)
            for file, each in new_in(found, self._mixed_before)
        ]
        return any(fell_back)

    def hands_on_to(self, asking: Iterable[tuple[tuple[Path, int], tuple[Path, int]]]) -> bool:
        """Whether there are more functions that are to ask what they are passed, and no model, as
        those do that call them.

        Args:
            asking: which functions of the new texts ask a model, by their files, and who calls it.
        """
        more, handed = False, self.fallen.handed
        for (path, number), (at, of_caller) in asking:
            function, caller = self._scopes(path)[number], self._scopes(at)[of_caller]
            more |= function not in handed
            handed.setdefault(function, (path, set()))[1].add(caller)
        return more

    def falls_back_for(
        self, calling: Iterable[Calling], taking: Collection[Scope], unpassed: Collection[Scope]
    ) -> bool:
        """Whether there are more functions that fall back since they call what asks the globals: a
        parameter that nobody passes yet would serve only a part of what they do, and so does an
        object of which some kinds of groups are not asked, where that is to be passed no other. So
        does a class whose methods communicate by an autograd function that can't be handed the
        group: what its constructor is passed would cut what they reduce over another group.

        Args:
            calling: what was found in the new texts.
            taking: the functions that get the parameter.
            unpassed: those of them to which nobody passes a collection.
        """
        more = False
        for each in calling:
            if each.constructor is not None:
                more |= self._falls_back_as_a_class(each, taking)
            scope, callee = self._scopes(each.path)[each.number], each.callee
            known = self.fallen.parted.get(scope, frozenset())
            if callee.asks == PASSED and scope in unpassed and not known:
                why = f"is passed no {PASSED}"
            elif each.lacks_it and known and not known >= AXES:
                why = f"asks the globals about {', '.join(sorted(known))}"
            else:
                continue
            self.fallen.parted[scope], more = AXES, True
            self.fallen.why[scope] = (
                f"{callee.function} {why}, and calls {callee.callee}, "
                f"which has the globals asked ({callee.what}) at {callee.place}"
            )
        return more

    def _falls_back_as_a_class(self, calling: Calling, taking: Collection[Scope]) -> bool:
        """Have the methods of the class fall back whose constructor gets the parameter."""
        assert calling.constructor is not None  # that was asked
        path, number = calling.constructor
        maker, callee, parted = self._scopes(path)[number], calling.callee, self.fallen.parted
        klass = class_of(maker) if maker in taking else None
        more = False
        for unit in self._methods(klass, path) if klass is not None else ():
            if not calling.axes <= parted.get(unit, frozenset()):
                parted[unit], more = parted.get(unit, frozenset()) | calling.axes, True
                self.fallen.why.setdefault(
                    unit,
                    f"{callee.function} calls {callee.callee}, which has the globals asked "
                    f"({callee.what}) at {callee.place}, and can't be handed what its object has",
                )
        return more

    def _fall_back(self, found: Mixed, path: Path, fallen: Collection[Scope]) -> bool:
        """Have a function, or the methods of a class, fall back; whether they did not yet. Those
        that fell back in an earlier attempt, and ask something else still, are left.
        """
        scope = self._scopes(path)[found.number]
        if scope.kind == "class":
            units, axes = list(self._methods(scope, path)), found.axes
        else:  # a function falls back as a whole, with the methods of classes in it
            outer = scope.unit or scope
            inner = (each for each in self._scopes(path) if outer in _around(each))
            units, axes = [outer, *(e for e in inner if e.unit is e)], AXES
        parted = self.fallen.parted
        more = [each for each in units if not axes <= parted.get(each, frozenset())]
        if not more and GLOBALS not in (found.one.carrier, found.other.carrier):
            more = [each for each in units if each in fallen and each not in self.fallen.left]
            self.fallen.left.update(more)
        for unit in more:
            parted[unit] = parted.get(unit, frozenset()) | axes
            self.fallen.why.setdefault(unit, str(found))
        return bool(more)

    def _methods(self, klass: Scope, path: Path) -> Iterator[Scope]:
        """The methods of a class and of what it is made of."""
        for each in ancestry(klass, path, self._index.resolver):
            if isinstance(each, Scope):
                for name in each.bindings:
                    yield from (one for one in each.defined(name) if one.kind == "function")

    def _is_test(self, path: Path) -> bool:
        return self._index.modules.is_test(path)

    @property
    def _runtime(self) -> str:
        return self._index.config.vendored or "megapg"

    def _name(self, path: Path) -> str:
        looked = self._index.look(path)
        assert looked is not None  # it was rewritten, or has uses
        return looked[0].name

    @kept
    def _scopes(self, path: Path) -> list[Scope]:
        """Those of the functions and classes of a file, as definitions_in() has them."""
        looked = self._index.look(path)
        assert looked is not None  # it was rewritten, or has uses
        source, analysis = looked
        by_node = {each.node: each for each in scopes(analysis.module)}
        return [by_node[each] for each in definitions_in(source.tree)]

    @cached_property
    def _trees_before(self) -> dict[Path, ast.Module]:
        """The texts of before that ask for something about groups."""
        asking = {each.path for each in self._index.located}
        asking |= {
            path
            for path, _ in self._index.analyses()
            if any(each in self._index.data(path) for each in _COLLECTIONS)
        }
        looked = {path: self._index.look(path) for path in asking if not self._is_test(path)}
        return {path: of[0].tree for path, of in looked.items() if of is not None}

    @cached_property
    def _paths_before(self) -> dict[str, Path]:
        return {self._name(path): path for path in self._trees_before}

    @kept
    def _mixed_before(self) -> list[tuple[str, Mixed]]:
        trees = {self._name(path): tree for path, tree in self._trees_before.items()}
        return list(mixed(trees, self._index.config.versions))


def _around(scope: Scope) -> Iterator[Scope]:
    """The scopes in which a scope is."""
    while (outer := scope.parent) is not None:
        yield outer
        scope = outer
