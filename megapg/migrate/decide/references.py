"""Who in a project names a function, or a class for its constructor."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from megapg.migrate.decide.autograd import Autograd, count_of_arguments
from megapg.migrate.find.index import Index
from megapg.migrate.find.meaning import UNKNOWN, Thing
from megapg.migrate.find.models import ancestry
from megapg.migrate.python.methods import (
    class_of,
    decorators,
    is_super,
    kept,
    mentions,
    parameters,
)
from megapg.migrate.python.scopes import Defined, Imported, Scope, Use, last_name, scopes

_ASKING = re.compile(rb"getattr|attrgetter")
# What asks whether something is of a class, and what classes have that makes nothing of them.
_ASKING_A_CLASS = frozenset({"isinstance", "issubclass"})
_OF_CLASSES = frozenset({"__name__", "__qualname__", "__module__", "__doc__"})

# Kinds of things that are known not to be a method.
_TOLD = frozenset({"function", "class", "member", "file"})

_Named: TypeAlias = tuple[Use, ast.expr, ast.AST]
"""A use, the expression of it that ends in a name, and what is directly around that."""
_Class: TypeAlias = tuple[Scope, Path]


@dataclass(frozen=True, eq=False)
class Reference:
    """A place that names a function."""

    path: Path  # of its file
    use: Use  # the place
    # Of which it is the function, or which is ``functools.partial`` of it; None where it is handed
    # on, stored or decorated with.
    call: ast.Call | None
    node: ast.expr  # the expression that names it

    @property
    def is_applied(self) -> bool:
        """Whether it is an autograd function that is applied to all its arguments: ``apply`` takes
        no names.
        """
        called = self.call.func if self.call is not None else self.node
        return isinstance(called, ast.Attribute) and called.value is self.node


class References:
    """Finds the references to the functions and classes of an index.

    Args:
        index: the project.
        in_tests: whether those in tests are wanted. Else what names something of the source is in
            the source, so that it is decided about alike with the tests and without.
    """

    def __init__(self, index: Index, *, in_tests: bool = False) -> None:
        self._index, self._in_tests = index, in_tests
        self.autograd = Autograd(index)
        self._blind: set[Scope] = set()

    @kept
    def of(self, function: Scope, path: Path) -> list[Reference]:
        """Every place that names a function; for a constructor, or what an autograd function does
        when it is applied, its class.
        """
        return list(self._find(function, path))

    @kept
    def called_by(self, unit: Scope, path: Path) -> Sequence[tuple[Scope, Path]]:
        """The functions that a function calls; of a class its constructor."""
        return list(self._find_called(unit, path))

    def _find_called(self, unit: Scope, path: Path) -> Iterator[tuple[Scope, Path]]:
        analysis = self._index.analysis(path)
        for use, _ in analysis.calls.get(unit, ()) if analysis is not None else ():
            for thing in self._index.resolver.expression(use.node, use.scope, path):
                seen = thing.path is not None and self._index.modules.sees(path, thing.path)
                if seen and thing.scope is not None and thing.path is not None:
                    if thing.kind == "function":
                        yield thing.scope, thing.path
                    elif thing.kind == "class":
                        for constructor in thing.scope.defined("__init__"):
                            yield constructor, thing.path

    def _mentioning(self, word: str, path: Path) -> Sequence[Path]:
        """The files that have a word and may name something of a file by it."""
        if self._in_tests:
            return self._index.everywhere(word)
        return self._index.mentioning(word, path)

    def all_seen(self, function: Scope) -> bool:
        """Whether every file that could refer to a function could be looked into; asked after
        :meth:`of`.
        """
        return function not in self._blind

    @kept
    def is_told(self, method: Scope, path: Path) -> bool:
        """Whether a method that needs no object is told from others by its name alone."""
        return not any(
            each.kind == "class"
            and each is not method.parent
            and (method.name in each.bindings or method.name in each.attributes)
            for file in self._mentioning(method.name, path)
            for each in self._scopes_of(file)
        )

    def is_called_elsewhere(self, method: Scope, path: Path) -> bool:
        """Whether something may call a method, be it of whatever object, that is no constructor."""
        return any(
            isinstance(node, ast.Attribute) and node.attr == method.name
            for file in self._mentioning(method.name, path)
            for scope in self._scopes_of(file)
            if scope.kind == "function" and class_of(scope) is None
            for node in scope.nodes
        )

    def _find(self, function: Scope, path: Path) -> Iterator[Reference]:
        klass = class_of(function)
        wanted = {Thing("function", path=path, scope=function)}
        words, classes = {function.name}, list[Scope]()
        applied = self.autograd.of(function, path)
        is_applied = applied is not None and function is applied.forward
        if is_applied and function.parent is not None:
            wanted, classes = {Thing("class", path=path, scope=function.parent)}, [function.parent]
            words = {function.parent.name}
        if klass is not None:
            constructed = self._constructed_by(klass, path)
            classes = [each for each, _ in constructed]
            wanted |= {Thing("class", path=at, scope=each) for each, at in constructed}
            words = {each.name for each in classes}
        files = [
            file
            for file in self._files_naming(words, wanted, path)
            if self._index.modules.sees(file, path)
        ]
        if any(not words.isdisjoint(self._asked_for(file)) for file in files):
            self._blind.add(function)
        for file in files:
            analysis = self._index.analysis(file)
            if analysis is None:
                self._blind.add(function)
                continue
            names = words.union(*(self._imported_as(file).get(word, ()) for word in words))
            names |= {"__init__"} if klass else set()
            named: list[str | Scope] = [*sorted(names), *classes]
            for each in named:
                for use, node, parent in self._names(file).get(each, ()):
                    if klass is not None and _makes_none(node, parent, use, classes):
                        continue
                    if self._stands_for(node, use, file, wanted, classes, function):
                        call = _call_of(node, parent)
                        if is_applied:
                            call = _applying(node, parent, use, count_of_arguments(function))
                        yield Reference(file, use, call, node)

    def _files_naming(self, words: set[str], wanted: Collection[Thing], path: Path) -> list[Path]:
        """The files that may name something; other names under which modules hand it on are added
        to the words.
        """
        files: dict[Path, None] = {}
        waiting = sorted(words)
        for word in waiting:  # grows
            for file in self._mentioning(word, path):
                files[file] = None
                analysis = self._index.analysis(file)
                if analysis is None:
                    continue
                for name in self._imported_as(file).get(word, ()):
                    if name == word or not _is_import_of(word, analysis.module, name):
                        continue
                    things = self._index.resolver.name(name, analysis.module, file)
                    if name not in waiting and not things.isdisjoint(wanted):
                        waiting.append(name)
        words |= {*waiting}
        return list(files)

    @kept
    def _imported_as(self, file: Path) -> dict[str, dict[str, None]]:
        """For each name that a file imports, wherever in it, what it is called there."""
        names: dict[str, dict[str, None]] = {}
        for scope in self._scopes_of(file):
            for name, bindings in scope.bindings.items():
                for each in bindings:
                    if isinstance(each, Imported) and each.member:
                        names.setdefault(each.member, {})[name] = None
        return names

    def _scopes_of(self, file: Path) -> Iterator[Scope]:
        """The scopes of a file; none where it is not of the project, or can't be parsed."""
        analysis = self._index.analysis(file) if file in self._index else None
        return scopes(analysis.module) if analysis is not None else iter(())

    # -- classes -----------------------------------------------------------------------------

    @kept
    def _classes_in(self, file: Path) -> dict[str, list[Scope]]:
        """The classes of a file by the last names of those that they are made of."""
        found: dict[str, list[Scope]] = {}
        for each in self._scopes_of(file):
            for name in dict.fromkeys(map(last_name, getattr(each.node, "bases", ()))):
                found.setdefault(name, []).append(each)
        return found

    def made_of(self, name: str, path: Path) -> Iterator[_Class]:
        """The classes, with their files, that are made of one of that name of a file."""
        for file in self._mentioning(name, path):
            for each in self._classes_in(file).get(name, ()):
                yield each, file

    def only_base(self, klass: Scope, path: Path) -> _Class | None:
        """The class of the project of which alone a class is made, and its file."""
        bases: list[ast.expr] = getattr(klass.node, "bases", [])
        if len(bases) != 1 or klass.parent is None:
            return None
        things = self._index.resolver.expression(bases[0], klass.parent, path)
        thing = next(iter(things)) if len(things) == 1 else None
        if thing is None or thing.kind != "class" or thing.scope is None or thing.path is None:
            return None
        return thing.scope, thing.path

    def _constructed_by(self, klass: Scope, path: Path) -> list[_Class]:
        """A class, and those below it that have its constructor."""
        found = [(klass, path)]
        for above, _ in found:  # grows
            for file in self._mentioning(above.name, path):
                for each in self._without_constructor(file).get(above, ()):
                    if all(each is not known for known, _ in found):
                        found.append((each, file))
        return found

    @kept
    def _without_constructor(self, file: Path) -> dict[Scope, list[Scope]]:
        """The classes of a file that are made of one class alone and have its constructor."""
        inheriting: dict[Scope, list[Scope]] = {}
        for each in self._scopes_of(file):
            inherits = each.kind == "class" and "__init__" not in each.bindings
            base = self.only_base(each, file) if inherits else None
            if base is not None:
                inheriting.setdefault(base[0], []).append(each)
        return inheriting

    def _is_super_of(self, use: Use, path: Path, classes: Collection[Scope]) -> bool:
        """Whether ``super().__init__`` is the constructor of one of the classes, for certain."""
        klass, base = self._base_around(use, path)
        if klass is None or base is None or base not in classes:
            return False
        return not self._is_parted(klass, base, path)

    def _base_around(self, use: Use, path: Path) -> tuple[Scope | None, Scope | None]:
        """The class in whose constructor a use is, and the class of which alone that is made."""
        klass = class_of(use.scope.enclosing("function"))
        base = self.only_base(klass, path) if klass is not None else None
        return klass, base[0] if base is not None else None

    @kept
    def _is_parted(self, klass: Scope, base: Scope, path: Path) -> bool:
        """Whether objects may have another class between a class and its base: one that is made of
        both the class and another one that leads to the base, too.
        """
        below = [klass]
        for above in below:  # grows
            for each, file in self.made_of(above.name, path):
                if each in below or each.parent is None:
                    continue
                made_of = [
                    thing
                    for one in getattr(each.node, "bases", ())
                    for thing in self._index.resolver.expression(one, each.parent, file)
                    if thing.scope is not None and thing.path is not None
                ]
                if all(thing.scope is not above for thing in made_of):
                    continue
                if any(base in line and klass not in line for line in map(self._line, made_of)):
                    return True
                below.append(each)
        return False

    def _line(self, thing: Thing) -> list[Scope | str]:
        if thing.scope is None or thing.path is None:
            return []
        return list(ancestry(thing.scope, thing.path, self._index.resolver))

    # -- names -------------------------------------------------------------------------------

    def _stands_for(
        self,
        node: ast.expr,
        use: Use,
        path: Path,
        wanted: set[Thing],
        classes: Collection[Scope],
        function: Scope,
    ) -> bool:
        if _is_constructor_of_super(node, use):
            return self._is_super_of(use, path, classes)
        things = self._index.resolver.expression(node, use.scope, path)
        if len(things) == 1 and things <= wanted:
            return True
        is_method = not classes and function.parent is not None and function.parent.kind == "class"
        if is_method and not all(each.kind in _TOLD for each in things or {UNKNOWN}):
            self._blind.add(function)  # some object may have it
        if any(_may_be(each, thing) for each in wanted for thing in things):
            self._blind.add(function)
        return False

    @kept
    def _names(self, path: Path) -> dict[str | Scope | None, list[_Named]]:
        """The expressions of a file by the name in which they end; ``super().__init__`` by the
        class for which ``super()`` stands, as far as it can be told.
        """
        analysis = self._index.analysis(path)
        names: dict[str | Scope | None, list[_Named]] = {}
        for use in analysis.uses if analysis is not None else ():
            node: ast.expr = use.node
            parent: ast.AST = use.parents.node
            while isinstance(node, ast.Attribute):
                of_super = _is_constructor_of_super(node, use)
                name = self._base_around(use, path)[1] if of_super else node.attr
                names.setdefault(name, []).append((use, node, parent))
                parent, node = node, node.value
            if isinstance(node, ast.Name):
                names.setdefault(node.id, []).append((use, node, parent))
        return names

    @kept
    def _asked_for(self, file: Path) -> frozenset[str]:
        """The names of which a file asks for something by a string."""
        found = _ASKING.search(self._index.data(file))
        analysis = self._index.analysis(file) if found else None
        return frozenset(
            use.node.value
            for use in (analysis.uses if analysis is not None else ())
            if isinstance(use.node, ast.Constant)
            and isinstance(use.node.value, str)
            and isinstance(use.parents.node, ast.Call)
            and last_name(use.parents.node.func) in ("getattr", "attrgetter")
        )


def calls_by_another_name(reference: Reference) -> list[ast.Call]:
    """The calls of the variable to which a function is given in another one; none where something
    else may happen to it than to be called. ``functools.partial`` of the function can stand there.
    """
    use, inner = reference.use, reference.node
    function, name = use.scope, ""
    for outer in use.parents if inner is use.node and function.kind == "function" else ():
        if isinstance(outer, ast.IfExp) and inner is not outer.test:
            inner = outer
            continue
        if isinstance(outer, ast.Assign) and outer.value is inner and len(outer.targets) == 1:
            name = outer.targets[0].id if isinstance(outer.targets[0], ast.Name) else ""
        break
    if not name or name in function.elsewhere or mentions(function, "locals"):
        return []
    calls = [
        each
        for each in function.nodes
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == name
    ]
    called = {id(each.func) for each in calls}
    only_called = all(
        id(each) in called or not isinstance(each.ctx, ast.Load)
        for each in function.nodes
        if isinstance(each, ast.Name) and each.id == name
    )
    return calls if only_called else []


def _is_constructor_of_super(node: ast.expr, use: Use) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "__init__"
        and is_super(node.value, use.scope.enclosing("function"))
    )


def _makes_none(node: ast.expr, parent: ast.AST, use: Use, classes: Collection[Scope]) -> bool:
    """Whether nothing is made of a class where it is named: it is a base, says what is expected, or
    is asked for what all its objects share.
    """
    if isinstance(parent, ast.ClassDef):
        return node in parent.bases
    if isinstance(parent, ast.Attribute):
        bound = [each for klass in classes for each in klass.bindings.get(parent.attr, ())]
        inner = [each.scope for each in bound if isinstance(each, Defined)]
        shared = bool(inner) and len(inner) == len(bound)
        return parent.attr in _OF_CLASSES or (shared and not any(map(_knows_its_class, inner)))
    if node is not use.node:
        return False
    inside: ast.AST = node
    for outer in use.parents:
        match outer:
            case ast.Tuple() | ast.List() | ast.Subscript() | ast.BinOp():
                inside = outer
            case ast.Call(ast.Name("super")):
                return len(outer.args) == 2 and inside is outer.args[0]
            case ast.Call():
                return last_name(outer.func) in _ASKING_A_CLASS and inside in outer.args[1:]
            case ast.ExceptHandler():
                return inside is outer.type
            case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
                given = [*parameters(outer), arguments.vararg, arguments.kwarg]
                annotated = [each.annotation for each in given if each is not None]
                return any(inside is each for each in (*annotated, outer.returns))
            case ast.AnnAssign():
                return inside is outer.annotation and use.scope.kind == "function"
            case _:
                return isinstance(outer, ast.Compare)
    return False


def _applying(node: ast.expr, parent: ast.AST, use: Use, count: int) -> ast.Call | None:
    """The call that applies an autograd function to that many arguments, by place."""
    call = use.parents.node
    if not isinstance(parent, ast.Attribute) or parent.attr != "apply" or use.node is not parent:
        return None
    if not isinstance(call, ast.Call) or call.func is not parent:
        return None
    is_told = len(call.args) == count and not any(isinstance(e, ast.Starred) for e in call.args)
    return call if is_told else None


def _knows_its_class(inner: Scope) -> bool:
    """Whether what a class has may make an object of it: its constructor, or a method of it."""
    if inner.kind != "function":
        return False
    return inner.name.startswith("__") or not decorators(inner.node) <= {"staticmethod"}


def _call_of(node: ast.expr, parent: ast.AST) -> ast.Call | None:
    if not isinstance(parent, ast.Call):
        return None
    if parent.func is node:
        return parent
    is_partial = last_name(parent.func) == "partial"
    return parent if is_partial and parent.args and parent.args[0] is node else None


def _is_import_of(word: str, module: Scope, name: str) -> bool:
    """Whether a module imports something by a name at its top."""
    bindings = module.bindings.get(name, ())
    return any(isinstance(each, Imported) and each.member == word for each in bindings)


def _may_be(wanted: Thing, thing: Thing) -> bool:
    """Whether a name may stand for a function or a class: it may mean another one as well, or is
    of a module by the name of its file, which is found on a path that no import tells.
    """
    if thing.kind != "name" or wanted.path is None or wanted.scope is None:
        return thing == wanted
    return thing.name.split(".")[-2:] == [wanted.path.stem, wanted.scope.name]
