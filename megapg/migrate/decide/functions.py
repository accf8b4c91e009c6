"""The functions of a project that can be given a parameter.

A parameter is only ever added to free functions, to constructors, and to static methods whose name
nothing else has: a method has ``self``, and what else overrides it, or calls it through an object,
can't be seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from megapg.migrate.decide.autograd import Applied
from megapg.migrate.decide.references import Reference, References
from megapg.migrate.decide.replaced import Replaced
from megapg.migrate.find.index import Index
from megapg.migrate.find.meaning import Thing
from megapg.migrate.find.models import ancestry, is_of_core, is_torch_module
from megapg.migrate.migration import Why
from megapg.migrate.python.insert import add_behind, add_statement
from megapg.migrate.python.methods import (
    body_of,
    calls_of_bases,
    class_of,
    decorators,
    kept,
    kept_behind,
    mentions,
    parameters,
    set_up_behind,
)
from megapg.migrate.python.scopes import FunctionNode, Scope, last_name

PARAMETER = "pg_collection"

# Decorators, by their last name, that hand keyword arguments on as they come.
_TRANSPARENT = frozenset(
    {"no_grad", "inference_mode", "enable_grad", "contextmanager", "asynccontextmanager"}
    | {"override", "deprecated", "experimental_fn"}
)
# What a class may be made of for its constructor to be an ordinary function.
_PLAIN_BASES = frozenset({"ABC", "object", "Generic"})
# Bases outside of a project whose constructors put no collection on an object.
_KEEPING_NONE = _PLAIN_BASES | {"MegatronModule", "Module"}
_CLASS_DECORATORS = frozenset({"total_ordering", "final", "deprecated"})
# What makes an attribute more than one.
_SPECIAL = frozenset({PARAMETER, "__slots__", "__setattr__"})
# Names by which a constructor reads the parameter, be it with all others.
_ALL_TAKEN = frozenset({PARAMETER, "locals", "vars"})
# Functions that read the signature, or compile the source, of what they are passed.
_INSPECTING = frozenset({"script", "jit_fuser", "signature", "getfullargspec", "get_type_hints"})


class Functions:
    """Answers questions about the functions of the files of an index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._replaced = Replaced(index)
        self.references = References(index)
        self._references_of_tests = References(index, in_tests=True)

    def can_take(self, function: Scope, path: Path) -> bool:
        """Whether a keyword-only parameter with a default can be added without a caller, or
        anything that looks at the signature, noticing.
        """
        return self.in_the_way(function, path) is None

    @kept
    def in_the_way(self, function: Scope, path: Path) -> Why | None:
        """Why a function can't be given the parameter; None where it can."""
        node, outer = function.node, function.parent
        if not isinstance(node, FunctionNode) or outer is None:
            return Why.LAMBDA
        if node.args.kwarg is not None:
            return Why.ANY_KEYWORD
        if (applied := self.references.autograd.of(function, path)) is not None:
            return self._in_the_way_of(applied, function, outer, path)
        is_static = outer.kind == "class" and decorators(node) == {"staticmethod"}
        if not is_static and not decorators(node) <= _TRANSPARENT:
            return Why.DECORATED
        if node.name.startswith("test") or Path(path).suffix == ".pyi":
            return Why.BY_A_RUNNER
        if is_static:
            if not self._is_called_as_written(function, path):
                return Why.METHOD
        elif outer.kind == "class":
            if node.name != "__init__":
                return Why.METHOD
            if (odd := self.oddity(outer, path)) is not None:
                return odd
            body, looked = body_of(node), self._index.look(path)
            if looked is None or not body or add_statement(looked[0], body[0], "") is None:
                return Why.NO_PLACE
            above = list(ancestry(outer, path, self._index.resolver))[1:]
            behind = kept_behind(function) if any(isinstance(e, Scope) for e in above) else ()
            if behind is None or any(add_behind(looked[0], each, "") is None for each in behind):
                return Why.NO_PLACE  # behind what may put something else in its place
        elif outer.kind != "module":
            return Why.INSIDE
        if len(outer.bindings.get(node.name, ())) != 1:
            return Why.SEVERAL
        if mentions(function, PARAMETER):
            return Why.NAMED_SO
        called = class_of(function) or function
        if self._replaced.may_be(Thing(called.kind, path=path, scope=called)):
            return Why.REPLACED
        is_inspected = any(
            each.call is None
            and isinstance(parent := each.use.parents.node, ast.Call)
            and last_name(parent.func) in _INSPECTING
            for each in self.references.of(function, path)
        )
        return Why.INSPECTED if is_inspected else None

    @kept
    def set_up_by(self, constructor: Scope, path: Path) -> tuple[ast.stmt, ...]:
        """The calls of the constructors of torch's modules, behind which a constructor is to keep
        something: attributes come after them. None where another base, or the constructor itself
        before that, may ask for it; a base that only fills attributes does not.
        """
        klass, looked = class_of(constructor), self._index.look(path)
        if klass is None or looked is None or not isinstance(constructor.node, FunctionNode):
            return ()
        above = list(ancestry(klass, path, self._index.resolver))[1:]
        outside = {each.rpartition(".")[2] for each in above if isinstance(each, str)}
        if not outside <= _KEEPING_NONE or outside <= _PLAIN_BASES:
            return ()
        inherited = [e for a in above if isinstance(a, Scope) for e in a.defined("__init__")]
        if not all(map(_only_fills, inherited)):
            return ()
        calls, body = kept_behind(constructor) or (), constructor.node.body
        if not calls or any(
            each not in body or add_behind(looked[0], each, "") is None for each in calls
        ):
            return ()
        before = body[: body.index(calls[-1])]
        asks = any(
            isinstance(node, ast.Name) and node.id in constructor.instances
            for each in before
            if each not in calls
            for node in ast.walk(each)
        )
        return () if asks else tuple(calls)

    @kept
    def drops(self, constructor: Scope, path: Path) -> bool:
        """Whether a constructor takes a collection and does no more with it than read its fields,
        where neither its bases nor classes made of it keep one: what its methods find on ``self``
        is the globals.
        """
        klass, looked = class_of(constructor), self._index.look(path)
        named = {each.arg for each in parameters(constructor.node)}
        if klass is None or looked is None or PARAMETER not in named:
            return False
        if not only_reads_fields(constructor):
            return False
        for each in ancestry(klass, path, self._index.resolver):
            if isinstance(each, str):
                if each.rpartition(".")[2] not in _KEEPING_NONE:
                    return False
            elif (
                _SPECIAL & {*each.bindings, *each.attributes}
                or _shows_attributes(each)
                or (each is not klass and not all(map(_only_fills, each.defined("__init__"))))
            ):
                return False
        behind = set_up_behind(constructor)
        if behind is None or any(add_behind(looked[0], each, "") is None for each in behind):
            return False
        return not any(  # below it
            PARAMETER in each.bindings or PARAMETER in each.attributes
            for each, _ in self.references.made_of(klass.name, path)
        )

    @kept
    def oddity(self, klass: Scope, path: Path) -> Why | None:
        """Why the constructor of a class is not called as it is written, with ``self`` alone."""
        for each in ancestry(klass, path, self._index.resolver):
            if isinstance(each, str):
                if each.rpartition(".")[2] == "Function" and "autograd" in each:
                    return Why.AUTOGRAD
                if each.rpartition(".")[2] not in _PLAIN_BASES and not is_torch_module(each):
                    return Why.BASE_OUTSIDE
                continue
            node = each.node
            if not isinstance(node, ast.ClassDef) or not self._calls_as_written(each, path):
                return Why.METACLASS
            if not decorators(node) <= _CLASS_DECORATORS:
                return Why.CLASS_DECORATED
            if _SPECIAL & {*each.bindings, *each.attributes} or _shows_attributes(each):
                return Why.OWN_ATTRIBUTE
        below = any(
            PARAMETER in each.bindings or PARAMETER in each.attributes
            for each, _ in self.references.made_of(klass.name, path)
        )
        return Why.OWN_ATTRIBUTE if below else None

    def _in_the_way_of(
        self, applied: Applied, method: Scope, klass: Scope, path: Path
    ) -> Why | None:
        """Why an autograd function can't be given an argument by way of a method: it is applied in
        another way somewhere, handed on, or one of its methods is called by hand, be it in a test.
        """
        if method is not applied.forward:
            return Why.METHOD
        known = [*self.references.of(method, path), *self.references_in_tests(method, path)]
        all_seen = self.references.all_seen(method) and self._references_of_tests.all_seen(method)
        if not known or not all_seen or not all(each.is_applied for each in known):
            return Why.AUTOGRAD
        is_replaced = self._replaced.may_be(Thing("class", path=path, scope=klass))
        return Why.REPLACED if is_replaced else None

    def _is_called_as_written(self, method: Scope, path: Path) -> bool:
        """Whether a static method is called, by its own name alone, and not by what made its class
        up: a base of another project may call what it knows by name.
        """
        klass, name = method.parent, method.name
        if klass is None or name.startswith("__"):
            return False
        made_up = self.oddity(klass, path) in (Why.AUTOGRAD, Why.BASE_OUTSIDE)
        if made_up and not name.startswith("_"):
            return False
        return self.references.is_told(method, path) and bool(self.references.of(method, path))

    def _calls_as_written(self, klass: Scope, path: Path) -> bool:
        """Whether neither a metaclass nor ``__new__`` minds what the constructor is passed."""
        keywords = getattr(klass.node, "keywords", ())
        made_by = (
            []
            if klass.parent is None
            else [
                thing
                for each in keywords
                if last_name(each.value) != "ABCMeta"
                for thing in self._index.resolver.expression(each.value, klass.parent, path)
            ]
        )
        return (
            all(each.arg == "metaclass" for each in keywords)
            and all(
                each.kind == "class" and each.scope and _only_makes(each.scope) for each in made_by
            )
            and all(_takes_anything(each.node) for each in klass.defined("__new__"))
            and len(klass.defined("__new__")) == len(klass.bindings.get("__new__", ()))
        )

    def references_in_tests(self, function: Scope, path: Path) -> list[Reference]:
        """The places in tests that name a function of the source."""
        is_test = self._index.modules.is_test
        if is_test(path):
            return []
        found = self._references_of_tests.of(function, path)
        return [each for each in found if is_test(each.path)]

    def replaced_by_tests(self, thing: Thing) -> Iterator[tuple[Path, int]]:
        """Where tests may put something in the place of a thing of the source: file and line."""
        if thing.path is not None and not self._index.modules.is_test(thing.path):
            yield from self._replaced.by_tests(thing)

    def is_of_core(self, klass: Scope, path: Path) -> bool:
        """Whether a class is made of one of Megatron-core's, which has a collection of its own."""
        return any(
            isinstance(each, str) and is_of_core(each)
            for each in ancestry(klass, path, self._index.resolver)
        )


def _only_makes(metaclass: Scope) -> bool:
    """Whether a metaclass of the project does nothing to the calls of its classes."""
    bases = getattr(metaclass.node, "bases", ())
    plain = {"type", "ABCMeta"}.issuperset(map(last_name, bases))
    return plain and not {"__call__", "__getattribute__"} & metaclass.bindings.keys()


def _takes_anything(function: ast.AST) -> bool:
    arguments = function.args if isinstance(function, ast.FunctionDef) else None
    return arguments is not None and None not in (arguments.vararg, arguments.kwarg)


@kept
def _shows_attributes(klass: Scope) -> bool:
    """Whether a class looks at its attributes all together, or saves what its constructor takes."""
    one_by_one = {
        id(each.value)
        for each in klass.nodes
        if isinstance(each, ast.Attribute | ast.Subscript)
        and (each.attr == "get" if isinstance(each, ast.Attribute) else _is_read(each))
    }
    return any(
        (isinstance(each, ast.Attribute) and each.attr == "__dict__" and id(each) not in one_by_one)
        or (isinstance(each, ast.Name) and each.id == "vars")
        or _saves_arguments(each)
        for each in klass.nodes
    )


def _is_read(node: ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Load)


def _saves_arguments(node: ast.AST) -> bool:
    """Whether it is what saves all of a constructor's arguments, by Lightning."""
    if not isinstance(node, ast.Call) or last_name(node.func) != "save_hyperparameters":
        return False
    return not any(isinstance(each, ast.Constant) for each in node.args)


def only_reads_fields(constructor: Scope) -> bool:
    """Whether a constructor hands the collection that it takes to nobody, and keeps it nowhere."""
    harmless: set[int] = set()
    for each in constructor.nodes:
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Load):
            harmless.add(id(each.value))
        elif isinstance(each, ast.Compare):  # with None
            harmless.add(id(each.left))
    return not any(
        isinstance(each, ast.Name)
        and each.id in _ALL_TAKEN
        and isinstance(each.ctx, ast.Load)
        and id(each) not in harmless
        for each in constructor.nodes
    )


def _only_fills(constructor: Scope) -> bool:
    """Whether all that a constructor does with its object is to give it attributes."""
    filled = {
        id(each.value)
        for each in constructor.nodes
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
    }
    for call in calls_of_bases(constructor.node):
        filled |= set(map(id, (*call.args[:1], *ast.walk(call.func))))
    return not any(
        isinstance(each, ast.Name) and each.id in constructor.instances and id(each) not in filled
        for each in constructor.nodes
    )
