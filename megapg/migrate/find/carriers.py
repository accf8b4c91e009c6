"""From what the groups can be had where a global is read now: what is in scope, the best first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megapg.migrate.find.filled import fields_of, is_filled, is_filled_before
from megapg.migrate.find.meaning import Resolver, Thing
from megapg.migrate.find.models import (
    ancestry,
    assigned_at_first,
    gives_a_model,
    has_a_collection,
    has_a_model,
    is_engine_module,
    is_nothing,
    is_of_core,
    is_of_only_base,
    is_strategy,
    is_torch_module,
)
from megapg.migrate.find.roles import has_another_role, role_asked_about
from megapg.migrate.find.sites import Carrier
from megapg.migrate.python.flow import (
    Held,
    Holding,
    blocks,
    is_ruled_out,
    runs_before,
    statements_around,
    statements_in,
)
from megapg.migrate.python.methods import (
    first_parameter,
    is_class_method,
    is_self,
    parameters,
)
from megapg.migrate.python.scopes import (
    Alias,
    Binding,
    Instance,
    Opaque,
    Parents,
    Scope,
    Use,
    last_name,
    walk,
)
from megapg.upstream.mapping import COLLECTION_NAMES, MODEL_ATTRIBUTES

# What a model is called where it is passed, held in a variable, or kept by self.
MODEL_NAMES = (
    *("model", "module", "unwrapped_model", "gpt_model", "model_chunk", "actor_module"),
    *("models", "model_chunks", "model_list", "ddp_model", "language_model", "megatron_model"),
    *("wrapped_models", "unwrapped_models", "vpp_model", "gpt", "mcore_model", "megatron_module"),
    *("inference_wrapped_model", "parallel_model", "mg_model", "mg_models"),
    *("pl_module",),  # of Lightning's hooks
)
# What a variable or an attribute of some name may be.
_WANTED = {
    **dict.fromkeys(MODEL_NAMES, "model"),
    **dict.fromkeys(COLLECTION_NAMES, "collection"),
}
_OF_SEVERAL = frozenset({"list", "List", "tuple", "Tuple", "Sequence"})
# Names of models that may be any part of a module, where a module has them.
_OF_ALL_MODULES = frozenset({"module"})
# Annotations of parameters that have a model's name and hold none.
_NO_MODEL = frozenset(
    {"str", "int", "float", "bool", "bytes", "dict", "Dict", "Path", "ModuleType"}
    | {"type", "Type", "Iterator", "Generator"}
)
# What gives no model, whatever it is called with, and what is no model of a model's.
_GIVING_NONE = frozenset(
    {"iter", "map", "filter", "zip", "enumerate", "reversed", "partial", "dict", "set", "type"}
)
_PARTS_OF_MODELS = frozenset(
    {"state_dict", "parameters", "named_parameters", "modules", "named_modules", "children"}
)
# What a class may be made of that is nothing else.
PLAIN = frozenset({"object", "ABC"})
# Whose values are numbers, texts and containers.
_PLAIN_VALUES = (
    *(ast.Dict, ast.List, ast.Set, ast.Tuple, ast.JoinedStr, ast.BinOp, ast.Compare),
    *(ast.DictComp, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.Lambda),
)
# Where asking self for its attributes may not end, or there is no self yet.
_WITHOUT_SELF = frozenset(
    {"__getattr__", "__getattribute__", "__setattr__", "__new__", "__del__", *COLLECTION_NAMES}
)


def carriers(use: Use, path: Path, resolver: Resolver) -> tuple[Carrier, ...]:
    """What is in scope at a use: collections, and models that may carry one.

    Args:
        use: the place.
        path: of its file.
        resolver: what names stand for.
    """
    found: dict[str, Carrier] = {}
    for carrier in _Search(use, path, resolver).run():
        found.setdefault(carrier.expression, carrier)
    best_first = sorted(found.values(), key=lambda each: (not each.certain, each.kind == "model"))
    return tuple(best_first)


class _Search:
    def __init__(self, use: Use, path: Path, resolver: Resolver) -> None:
        self._use, self._path, self._resolver = use, path, resolver
        self._giving_way: dict[str, frozenset[str]] = {}

    def run(self) -> Iterator[Carrier]:
        found = [*self._of_another_role(), *self._by_name()]
        # A model at hand is asked before a self that may have nothing to say, or hold another one.
        found = sorted(found, key=lambda one: any(self._gives_way(one, each) for each in found))
        yield from found
        if not any(each.certain and each.kind == "model" for each in found):
            annotated = list(self._by_annotation())
            if len(annotated) == 1:  # of several the one that is meant can't be told
                yield Carrier("model", annotated[0], "parameter", is_part=True)

    def _gives_way(self, one: Carrier, other: Carrier) -> bool:
        except_for = self._giving_way.get(one.expression)
        if except_for is None or other.kind != "model" or other.origin == "attribute":
            return False
        return other.certain and not other.may_be_none and other.expression not in except_for

    def _of_another_role(self) -> Iterator[Carrier]:
        function = self._use.scope
        name = role_asked_about(self._use) if function.kind == "function" else ""
        if name:
            around = statements_around(self._use.parents, function.node)
            if Holding(name, is_nothing).at(around, function.node) is Held.SOMETHING:
                yield Carrier("model", name, "local")

    def _by_name(self) -> Iterator[Carrier]:
        inner: list[Scope] = []  # in which a name may mean something else
        for scope in self._use.scope.chain():
            for name in self._at_hand(scope) if scope.kind == "function" else ():
                if _is_hidden(name, inner):
                    continue
                bindings = scope.bindings[name]
                first = bindings[0]
                if isinstance(first, Instance):
                    if not is_class_method(scope):
                        yield from self._of_self(name, first.of, scope)
                else:
                    yield from self._variable(name, bindings, scope)
            yield from self._of_a_method_to_be(scope, inner)
            if scope.given_to and scope.parent is not None and scope.parent.kind == "function":
                return  # what is around it is of one call, and this serves all objects
            inner.append(scope)

    def _at_hand(self, function: Scope) -> list[str]:
        """The names of a function that may carry something, in the order of their bindings."""
        found = _WANTED.keys() & function.bindings.keys() | function.instances
        return sorted(found, key=lambda name: function.order[name])

    def _of_a_method_to_be(self, function: Scope, inner: Sequence[Scope]) -> Iterator[Carrier]:
        """The first parameter of a function that becomes a method, of modules and nothing else."""
        outer = function.parent
        if not function.given_to or outer is None:
            return
        name = first_parameter(function.node)
        one_value = len(function.bindings.get(name, ())) == 1 and name not in function.deleted
        if name != "self" or _is_hidden(name, inner) or not one_value:
            return
        for owner, attribute in function.given_to:
            things = self._resolver.expression(owner, outer, self._path)
            if attribute.startswith("__") or not things:
                return
            if not all(map(self._is_module_class, things)):
                return
        yield Carrier("model", name, "attribute")

    def _by_annotation(self) -> Iterator[str]:
        """The parameters of the function around that are modules by what they are annotated with,
        and nothing else.
        """
        function = self._use.scope.enclosing("function")
        if function is None or function.parent is None:
            return
        for each in parameters(function.node):
            bound = function.bindings.get(each.arg, [])
            first = bound[0] if len(bound) == 1 else None
            if (
                isinstance(first, Opaque)
                and first.default is None
                and each.annotation is not None
                and each.arg not in function.deleted
                and self._use.scope.find(each.arg) == (function, bound)
                and self._is_a_module(each.annotation, function.parent)
            ):
                yield each.arg

    def _is_a_module(self, annotation: ast.expr, scope: Scope) -> bool:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            try:
                written = ast.parse(annotation.value, mode="eval").body
            except SyntaxError:
                return False
            return not isinstance(written, ast.Constant) and self._is_a_module(written, scope)
        if isinstance(annotation, ast.Subscript):
            if last_name(annotation.value) not in _OF_SEVERAL:
                return False
            inner = annotation.slice
            of = [e for e in getattr(inner, "elts", [inner]) if ast.unparse(e) != "..."]
            return bool(of) and all(self._is_a_module(each, scope) for each in of)
        if isinstance(annotation, ast.BinOp):
            sides = (annotation.left, annotation.right)
            return all(self._is_a_module(each, scope) for each in sides)
        things = self._resolver.expression(annotation, scope, self._path)
        return bool(things) and all(map(self._is_module_class, things))

    def _is_module_class(self, thing: Thing) -> bool:
        if thing.kind == "class" and thing.scope is not None and thing.path is not None:
            above = ancestry(thing.scope, thing.path, self._resolver)
            return any(isinstance(each, str) and is_torch_module(each) for each in above)
        return thing.kind == "name" and is_torch_module(thing.name)

    def _variable(self, name: str, bindings: list[Binding], scope: Scope) -> Iterator[Carrier]:
        kind = _WANTED[name]
        around = statements_around(self._use.parents, scope.node)
        # A function further in may run later.
        holds_nothing = self._use.scope is scope and is_ruled_out(name, around, scope.node)
        if name in scope.deleted or holds_nothing:
            return
        if kind == "collection" and (
            (is_filled(name, scope) and not is_filled_before(name, around, scope))
            or _is_asked_about(name, self._use.parents)
            or any(isinstance(b, Alias) and _is_plain(b.value) for b in bindings)
        ):
            return
        fields = None
        if kind == "collection":
            fields = fields_of(name, scope, self._path, self._resolver)
        parameter = next((b for b in bindings if isinstance(b, Opaque) and b.parameter), None)
        if parameter is not None:
            if kind == "model" and _cannot_be_a_model(name, scope.node):
                return
            default = parameter.default
            may_be_none = (
                isinstance(default, ast.Constant) and default.value is None and len(bindings) == 1
            )
            certain = self._is_still_one(name, bindings, scope, kind)
            is_part = name in _OF_ALL_MODULES
            origin = "parameter" if scope is self._use.scope.unit else "inner"
            yield Carrier(kind, name, origin, may_be_none, certain, is_part, fields=fields)
            return
        known = all(isinstance(each, Alias | Opaque) for each in bindings)
        held = Holding(name, is_nothing).at(around, scope.node)
        before = known and held is Held.SOMETHING
        before = before and self._is_still_one(name, bindings, scope, kind)
        if before or any(b.line < around[0].lineno for b in bindings if around):
            yield Carrier(kind, name, "local", False, before, fields=fields)

    def _is_still_one(
        self, name: str, bindings: Sequence[Binding], scope: Scope, kind: str
    ) -> bool:
        """Whether a variable for a model has not been given what can't be one."""
        values = [each.value for each in bindings if isinstance(each, Alias)]
        if kind != "model" or not any(self._is_no_model(each, scope) for each in values):
            return True
        if self._use.scope.enclosing("function") is not scope:
            return False  # it may run at any time
        holding = Holding(name, lambda value: self._is_no_model(value, scope), Held.SOMETHING)
        around = statements_around(self._use.parents, scope.node)
        return holding.at(around, scope.node) is Held.SOMETHING

    def _is_no_model(self, value: ast.expr, scope: Scope) -> bool:
        """Whether a value is a class, a function, an iterator, or the like."""
        if isinstance(value, ast.Call):
            name = last_name(value.func)
            by_name = isinstance(value.func, ast.Name) or name == "partial"
            if name in (_GIVING_NONE if by_name else _PARTS_OF_MODELS):
                return True
            called = self._resolver.expression(value.func, scope, self._path)
            return bool(called) and all(
                _is_generator(each) or self._is_class_without_a_model(each) for each in called
            )
        if isinstance(value, ast.Name | ast.Attribute | ast.IfExp):
            things = self._resolver.expression(value, scope, self._path)
            kinds = ("class", "function")
            return bool(things) and all(
                each.kind in kinds or (each.kind == "name" and is_torch_module(each.name))
                for each in things
            )
        return isinstance(value, ast.GeneratorExp | ast.Lambda | ast.DictComp | ast.SetComp)

    def _is_class_without_a_model(self, thing: Thing) -> bool:
        """Whether it is a class of the project alone, whose objects neither are a model nor keep
        one: an actor that runs it elsewhere, or a description of it.
        """
        if thing.kind != "class" or thing.scope is None or thing.path is None:
            return False
        above = ancestry(thing.scope, thing.path, self._resolver)
        return all(
            each.rpartition(".")[2] in PLAIN
            if isinstance(each, str)
            else not has_a_model(each) and not has_a_collection(each) and is_as_written(each)
            for each in above
        )

    def _of_self(self, name: str, of: Scope, method: Scope) -> Iterator[Carrier]:
        method_name = getattr(method.node, "name", "")
        if method_name in _WITHOUT_SELF:
            return
        above = list(ancestry(of, self._path, self._resolver))
        ancestors = [each for each in above if isinstance(each, Scope)]
        outside = [each for each in above if isinstance(each, str)]
        held = {
            name
            for each in ancestors
            for of_class in (each.attributes, each.bindings)
            for name in _WANTED.keys() & of_class.keys()
        }
        is_module = any(is_torch_module(each) or is_engine_module(each) for each in outside)
        of_core = any(map(is_of_core, outside))
        is_sure = not has_another_role(method)
        made = method_name != "__init__"
        reads = tuple(sorted(_read_in_constructors(ancestors))) if made else ()
        given = not made and self._may_have_a_model(method, ancestors)
        if any(map(is_strategy, outside)):
            # There model is a property, and None until there is one; groups_of() asks no such.
            self._giving_way[f"{name}.model"] = frozenset()
            yield Carrier("model", f"{name}.model", "attribute", False, made and is_sure)
        for attribute in sorted(held):
            kind = _WANTED[attribute]
            # What groups_of() finds by itself it is asked for, as it does not mind what is not
            # there.
            sure = made and attribute not in MODEL_ATTRIBUTES
            sure = sure and (is_sure or kind != "model")
            certain = sure and assigned_at_first(attribute, ancestors)
            yield Carrier(kind, f"{name}.{attribute}", "attribute", False, certain, reads=reads)
        if is_module:
            set_up = of_core and self._is_set_up(method)
            certain = made or set_up or given
            if not of_core and not any(has_a_collection(each) for each in ancestors):
                self._giving_way[name] = _OF_ALL_MODULES
                certain = certain and is_sure
            if given and not set_up:
                self._giving_way[name] = frozenset()  # what it was given is the parameter here
            is_part = not any(each.endswith("Model") for each in outside)
            yield Carrier("model", name, "attribute", False, certain, is_part, reads)
        elif any(has_a_model(each) for each in ancestors):
            self._giving_way[name] = frozenset()
            yield Carrier("model", name, "attribute", False, (made or given) and is_sure)

    def _is_set_up(self, constructor: Scope) -> bool:
        """Whether the constructors of the bases have run."""
        around = statements_around(self._use.parents, constructor.node)
        return any(
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and is_of_only_base(statement.value, constructor)
            and runs_before(statement, around, constructor.node)
            for block in blocks(constructor.node)
            for statement in block
        )

    def _may_have_a_model(self, constructor: Scope, classes: list[Scope]) -> bool:
        """Whether a constructor may have given its object a model before."""
        around = statements_around(self._use.parents, constructor.node)
        return any(
            runs_before(statement, around, constructor.node)
            for statement in statements_in(constructor.node)
            if any(
                gives_a_model(each, constructor, classes, 0)
                for each in (statement, *statements_in(statement))
            )
        )


def _read_in_constructors(classes: Iterable[Scope]) -> set[str]:
    """What constructors read of the collection that their object keeps: attribute and field."""
    return {
        f"{node.value.attr}.{node.attr}"
        for klass in classes
        for constructor in klass.defined("__init__")
        for node in constructor.nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in COLLECTION_NAMES
        and is_self(node.value.value, constructor)
    }


def is_as_written(klass: Scope) -> bool:
    """Whether nothing but its statements says what a class is, and what its objects have."""
    node = klass.node
    asks = ("__getattr__", "__getattribute__", "__new__", "__call__")
    return (
        isinstance(node, ast.ClassDef)
        and not node.decorator_list
        and not node.keywords
        and not any(name in klass.bindings for name in asks)
    )


def _is_generator(thing: Thing) -> bool:
    """Whether it is a function of the project that gives an iterator when it is called."""
    function = thing.scope.node if thing.kind == "function" and thing.scope else None
    waiting: list[ast.AST] = []
    if isinstance(function, ast.FunctionDef) and not function.decorator_list:
        waiting += function.body
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(each)
    return False


def _is_hidden(name: str, inner: Iterable[Scope]) -> bool:
    """Whether a name means something else in one of the scopes further in."""
    return any(
        name in scope.bindings
        or name in scope.declared
        or (name in scope.elsewhere and scope.elsewhere[name].kind == "module")
        for scope in inner
    )


def _is_plain(value: ast.expr) -> bool:
    """Whether a value is a number, a text or a container, and so no collection."""
    if isinstance(value, ast.Constant):
        return value.value is not None
    return isinstance(value, _PLAIN_VALUES)


def _is_asked_about(name: str, parents: Parents) -> bool:
    """Whether a branch around a use depends on what a collection is, or has: it may be the one for
    where it is not there.
    """
    return any(
        isinstance(each, ast.Name) and each.id == name
        for outer in parents
        if isinstance(outer, ast.If | ast.IfExp)
        for each in walk(outer.test)
    )


def _cannot_be_a_model(name: str, function: ast.AST) -> bool:
    for each in parameters(function):
        if each.arg == name and each.annotation is not None:
            return not _NO_MODEL.isdisjoint(re.findall(r"[\w.]+", ast.unparse(each.annotation)))
    return False
