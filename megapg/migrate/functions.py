"""The functions of a project that can be given a parameter, and who refers to them.

A parameter is only ever added to free functions and to constructors: a method has ``self``, and
what else overrides it, or calls it through an object, can't be seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from megapg.migrate.carriers import (
    ancestry,
    calls_of_bases,
    is_of_core,
    is_super,
    is_torch_module,
)
from megapg.migrate.imports import scopes
from megapg.migrate.index import Index
from megapg.migrate.insert import add_behind, add_statement
from megapg.migrate.replaced import Replaced
from megapg.migrate.resolve import Thing
from megapg.migrate.scopes import Analysis, Imported, Scope, Use, last_name

PARAMETER = "pg_collection"

# Decorators, by their last name, that hand keyword arguments on as they come.
_TRANSPARENT = frozenset(
    {"no_grad", "inference_mode", "enable_grad", "contextmanager", "asynccontextmanager"}
    | {"override", "deprecated", "experimental_fn"}
)
# What a class may be made of for its constructor to be an ordinary function.
_PLAIN_BASES = frozenset({"ABC", "object", "Generic"})
_CLASS_DECORATORS = frozenset({"total_ordering", "final", "deprecated"})
# What makes an attribute more than one.
_SPECIAL = frozenset({PARAMETER, "__slots__", "__new__", "__setattr__"})
_ASKING = re.compile(rb"getattr|attrgetter")
# Functions that read the signature, or compile the source, of what they are passed.
_INSPECTING = frozenset({"script", "jit_fuser", "signature", "getfullargspec", "get_type_hints"})


@dataclass(frozen=True, eq=False)
class Reference:
    """A place that names a function.

    Attributes:
        path: of its file.
        use: the place.
        call: of which it is the function, or which is ``functools.partial`` of it; None where it
            is handed on, stored or decorated with.
        node: the expression that names it.
    """

    path: Path
    use: Use
    call: ast.Call | None
    node: ast.expr


def unit_of(scope: Scope) -> Scope | None:
    """The function whose parameter a use can see: the outermost around it, up to a class, or to
    one that becomes a method of a class.
    """
    found: Scope | None = None
    each: Scope | None = scope
    while each is not None and each.kind != "class":
        if each.kind == "function":
            found = each
            if each.given_to:
                break
        each = each.parent
    return found


def class_of(function: Scope) -> Scope | None:
    """The class whose constructor a function is."""
    outer = function.parent if function.name == "__init__" else None
    return outer if outer is not None and outer.kind == "class" else None


def kept_behind(constructor: Scope) -> list[ast.stmt] | None:
    """The statements that call constructors of bases; None where one is called in another way."""
    calls = calls_of_bases(constructor)
    found = [
        each
        for each in constructor.nodes
        if isinstance(each, ast.Expr) and any(each.value is call for call in calls)
    ]
    return sorted(found, key=lambda each: each.lineno) if len(found) == len(calls) else None


class Functions:
    """Answers questions about the functions of the files of an index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._replaced = Replaced(index)
        self._taking: dict[Scope, bool] = {}
        self._references: dict[Scope, list[Reference]] = {}
        self._blind: set[Scope] = set()
        self._parted: dict[Scope, bool] = {}
        self._quoted: dict[Path, frozenset[str] | None] = {}
        self._names: dict[Path, dict[str, list[tuple[Use, ast.expr, ast.AST]]]] = {}

    def can_take(self, function: Scope, path: Path) -> bool:
        """Whether a keyword-only parameter with a default can be added without a caller, or
        anything that looks at the signature, noticing.
        """
        if function not in self._taking:
            self._taking[function] = self._can_take(function, path)
        return self._taking[function]

    def _can_take(self, function: Scope, path: Path) -> bool:
        node, outer = function.node, function.parent
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or outer is None:
            return False
        if node.args.kwarg is not None or not decorators(node) <= _TRANSPARENT:
            return False
        if node.name.startswith("test") or Path(path).suffix == ".pyi":
            return False
        if outer.kind == "class":
            if node.name != "__init__" or not self._is_plain(outer, path):
                return False
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            looked = self._index.look(path)
            if looked is None or not body or add_statement(looked[0], body[0], "") is None:
                return False  # there is no place to keep it
            above = list(ancestry(outer, path, self._index.resolver))[1:]
            behind = kept_behind(function) if any(isinstance(e, Scope) for e in above) else ()
            if behind is None or any(add_behind(looked[0], each, "") is None for each in behind):
                return False  # nor one behind what may put something else in its place
        elif outer.kind != "module":
            return False
        if len(outer.bindings.get(node.name, ())) != 1:
            return False
        called = outer if outer.kind == "class" else function
        if mentions(function, PARAMETER):
            return False
        if self._replaced.may_be(Thing(called.kind, path=path, scope=called)):
            return False
        return not any(_is_inspected(reference) for reference in self.references(function, path))

    def _is_plain(self, klass: Scope, path: Path) -> bool:
        """Whether the constructor of a class is called as it is written, with ``self`` alone."""
        for each in ancestry(klass, path, self._index.resolver):
            if isinstance(each, str):
                last = each.rpartition(".")[2]
                if last not in _PLAIN_BASES and (
                    not is_torch_module(each) or last == "LightningModule"
                ):
                    return False
                continue
            node = each.node
            if not isinstance(node, ast.ClassDef):
                return False
            if any(k.arg != "metaclass" or last_name(k.value) != "ABCMeta" for k in node.keywords):
                return False
            if not decorators(node) <= _CLASS_DECORATORS:
                return False
            if _SPECIAL & {*each.bindings, *each.attributes} or _shows_attributes(each):
                return False
        return not self._is_set_below(klass)

    def _is_set_below(self, klass: Scope) -> bool:
        """Whether a class that may be made of this one has an attribute of the parameter's name."""
        for file in self._index.mentioning(klass.name):
            analysis = self._index.analysis(file) if file in self._index else None
            for each in _classes(analysis.module) if analysis else ():
                named = [last_name(base) for base in getattr(each.node, "bases", ())]
                if klass.name in named and PARAMETER in (*each.bindings, *each.attributes):
                    return True
        return False

    def _is_asked_for(self, file: Path, name: str) -> bool:
        """Whether a file asks for something by a string with its name."""
        if not _ASKING.search(self._index.data(file)) or not self._quotes(file, name):
            return False
        analysis = self._index.analysis(file)
        return analysis is not None and any(
            isinstance(use.node, ast.Constant)
            and use.node.value == name
            and isinstance(use.parents.node, ast.Call)
            and last_name(use.parents.node.func) in ("getattr", "attrgetter")
            for use in analysis.uses
        )

    def _quotes(self, file: Path, name: str) -> bool:
        """Whether a file has a name in a string, alone or at the end of dots, other than to say
        that ``import *`` takes it.
        """
        word = re.escape(name.encode())
        if not re.search(rb"[\"'](?:[\w.]+\.)?" + word + rb"[\"']", self._index.data(file)):
            return False
        if file not in self._quoted:
            looked = self._index.look(file)
            self._quoted[file] = frozenset(_strings(looked[0].tree)) if looked else None
        quoted = self._quoted[file]
        return quoted is None or name in quoted

    def is_of_core(self, klass: Scope, path: Path) -> bool:
        """Whether a class is made of one of Megatron-core's, which has a collection of its own."""
        return any(
            isinstance(each, str) and is_of_core(each)
            for each in ancestry(klass, path, self._index.resolver)
        )

    def all_seen(self, function: Scope) -> bool:
        """Whether every file that could refer to a function could be looked into; asked after
        :meth:`references`.
        """
        return function not in self._blind

    # -- references --------------------------------------------------------------------------

    def references(self, function: Scope, path: Path) -> list[Reference]:
        """Every place in the project that names a function; for a constructor, its class."""
        if function not in self._references:
            self._references[function] = list(self._find(function, path))
        return self._references[function]

    def _find(self, function: Scope, path: Path) -> Iterator[Reference]:
        klass = class_of(function)
        wanted = {Thing("function", path=path, scope=function)}
        words = {function.name}
        if klass is not None:
            classes = self._constructed_by(klass, path)
            wanted |= {Thing("class", path=at, scope=each) for each, at in classes}
            words = {each.name for each, _ in classes}
        files = self._files_naming(words, wanted)
        if any(self._is_asked_for(file, word) for file in files for word in words):
            self._blind.add(function)
        for file in files:
            analysis = self._index.analysis(file)
            if analysis is None:
                self._blind.add(function)
                continue
            names = words | _other_names(analysis, words) | ({"__init__"} if klass else set())
            for name in sorted(names):
                for use, node, parent in self._named(file, analysis, name):
                    if _is_base(node, parent):
                        continue
                    if self._stands_for(
                        node, use, file, wanted, classes if klass else (), function
                    ):
                        yield Reference(file, use, _call_of(node, parent), node)

    def _files_naming(self, words: set[str], wanted: Collection[Thing]) -> list[Path]:
        """The files that may name something; other names under which modules hand it on are added
        to the words.
        """
        files: dict[Path, None] = {}
        waiting = sorted(words)
        for word in waiting:  # grows
            for file in self._index.mentioning(word):
                files[file] = None
                analysis = self._index.analysis(file)
                if analysis is None:
                    continue
                for name in _renamed(analysis.module, word):
                    things = self._index.resolver.name(name, analysis.module, file)
                    if name not in waiting and not things.isdisjoint(wanted):
                        waiting.append(name)
        words |= {*waiting}
        return list(files)

    def _constructed_by(self, klass: Scope, path: Path) -> list[tuple[Scope, Path]]:
        """A class, and those below it that have its constructor."""
        found = [(klass, path)]
        for above, _ in found:  # grows
            for file in self._index.mentioning(above.name):
                analysis = self._index.analysis(file)
                for each in _classes(analysis.module) if analysis else ():
                    node = each.node
                    if (
                        isinstance(node, ast.ClassDef)
                        and len(node.bases) == 1
                        and each.parent is not None
                        and "__init__" not in each.bindings
                        and all(each is not known for known, _ in found)
                    ):
                        things = self._index.resolver.expression(node.bases[0], each.parent, file)
                        if {thing.scope for thing in things} == {above}:
                            found.append((each, file))
        return found

    def _stands_for(
        self,
        node: ast.expr,
        use: Use,
        path: Path,
        wanted: set[Thing],
        classes: list[tuple[Scope, Path]] | tuple[()],
        function: Scope,
    ) -> bool:
        method = use.scope.enclosing("function")
        by_super = isinstance(node, ast.Attribute) and is_super(node.value, method)
        if by_super and last_name(node) == "__init__":
            return self._is_super_of(use, path, {each for each, _ in classes})
        things = self._index.resolver.expression(node, use.scope, path)
        if len(things) == 1 and things <= wanted:
            return True
        if any(_may_be(each, thing) for each in wanted for thing in things):
            self._blind.add(function)
        return False

    def _is_super_of(self, use: Use, path: Path, classes: set[Scope]) -> bool:
        """Whether ``super().__init__`` is the constructor of one of the classes, for certain."""
        method = use.scope.enclosing("function")
        klass = class_of(method) if method is not None else None
        node = klass.node if klass is not None else None
        if klass is None or klass.parent is None or not isinstance(node, ast.ClassDef):
            return False
        if len(node.bases) != 1:
            return False
        things = self._index.resolver.expression(node.bases[0], klass.parent, path)
        certain = len(things) == 1 and {thing.scope for thing in things} <= classes
        if not certain:
            return False
        if klass not in self._parted:
            self._parted[klass] = self._is_parted(klass, next(iter(things)).scope)
        return not self._parted[klass]

    def _is_parted(self, klass: Scope, base: Scope | None) -> bool:
        """Whether objects may have another class between a class and its base: one that is made of
        both the class and another one that leads to the base, too.
        """
        below = [klass]
        for above in below:  # grows
            for file in self._index.mentioning(above.name):
                analysis = self._index.analysis(file) if file in self._index else None
                for each in _classes(analysis.module) if analysis else ():
                    bases = getattr(each.node, "bases", ())
                    if each in below or each.parent is None:
                        continue
                    if above.name not in map(last_name, bases):
                        continue
                    made_of = [
                        thing
                        for one in bases
                        for thing in self._index.resolver.expression(one, each.parent, file)
                        if thing.scope is not None and thing.path is not None
                    ]
                    if all(thing.scope is not above for thing in made_of):
                        continue
                    lines = [self._line(thing) for thing in made_of]
                    if any(base in line and klass not in line for line in lines):
                        return True
                    below.append(each)
        return False

    def _line(self, thing: Thing) -> list[Scope | str]:
        if thing.scope is None or thing.path is None:
            return []
        return list(ancestry(thing.scope, thing.path, self._index.resolver))

    def _named(
        self, path: Path, analysis: Analysis, name: str
    ) -> list[tuple[Use, ast.expr, ast.AST]]:
        """The expressions of a file that end in a name, with what is directly around them."""
        if path not in self._names:
            names: dict[str, list[tuple[Use, ast.expr, ast.AST]]] = {}
            for use in analysis.uses:
                node: ast.expr = use.node
                parent: ast.AST = use.parents.node
                while isinstance(node, ast.Attribute):
                    names.setdefault(node.attr, []).append((use, node, parent))
                    parent, node = node, node.value
                if isinstance(node, ast.Name):
                    names.setdefault(node.id, []).append((use, node, parent))
            self._names[path] = names
        return self._names[path].get(name, [])


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


def mentions(function: Scope, name: str) -> bool:
    """Whether a name means something in a function already, or locals() are taken as a whole."""
    for each in function.nodes:
        if isinstance(each, ast.Name) and each.id in (name, "locals", "vars"):
            return True
        if isinstance(each, ast.arg) and each.arg == name:
            return True
    return False


def _strings(tree: ast.Module) -> Iterator[str]:
    """What is behind the last dot of each string in a module but those in ``__all__``."""
    listed = {
        id(each)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and last_name(statement.targets[0]) == "__all__"
        for each in getattr(statement.value, "elts", ())
    }
    for each in ast.walk(tree):
        value = each.value if isinstance(each, ast.Constant) else None
        if isinstance(value, str) and id(each) not in listed:
            yield value.rpartition(".")[2]


def _is_inspected(reference: Reference) -> bool:
    parent = reference.use.parents.node
    return (
        isinstance(parent, ast.Call)
        and reference.call is None
        and last_name(parent.func) in _INSPECTING
    )


def _is_base(node: ast.expr, parent: ast.AST) -> bool:
    """Whether a class is named for another one to be made of it."""
    return isinstance(parent, ast.ClassDef) and any(node is base for base in parent.bases)


def _shows_attributes(klass: Scope) -> bool:
    """Whether a class looks at its attributes all together."""
    return any(
        (isinstance(each, ast.Attribute) and each.attr == "__dict__")
        or (isinstance(each, ast.Name) and each.id == "vars")
        for each in klass.nodes
    )


def _call_of(node: ast.expr, parent: ast.AST) -> ast.Call | None:
    if not isinstance(parent, ast.Call):
        return None
    if parent.func is node:
        return parent
    is_partial = last_name(parent.func) == "partial"
    return parent if is_partial and parent.args and parent.args[0] is node else None


def _other_names(analysis: Analysis, words: set[str]) -> set[str]:
    """What the words are imported as."""
    found = set()
    for scope in scopes(analysis.module):
        for name, bindings in scope.bindings.items():
            if any(isinstance(each, Imported) and each.member in words for each in bindings):
                found.add(name)
    return found


def _renamed(module: Scope, word: str) -> Iterator[str]:
    """The other names under which a module imports something at its top."""
    for name, bindings in module.bindings.items():
        if name != word and any(isinstance(b, Imported) and b.member == word for b in bindings):
            yield name


def _may_be(wanted: Thing, thing: Thing) -> bool:
    """Whether a name may stand for a function or a class: it may mean another one as well, or is
    of a module by the name of its file, which is found on a path that no import tells.
    """
    if thing.kind != "name" or wanted.path is None or wanted.scope is None:
        return thing == wanted
    return thing.name.split(".")[-2:] == [wanted.path.stem, wanted.scope.name]


def _classes(module: Scope) -> Iterator[Scope]:
    return (scope for scope in scopes(module) if scope.kind == "class")


def decorators(node: ast.AST) -> set[str]:
    """The last names of a function's or class's decorators, called or not."""
    given = getattr(node, "decorator_list", ())
    return {last_name(each.func if isinstance(each, ast.Call) else each) for each in given}
