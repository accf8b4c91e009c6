"""From what the groups can be had where a global is read now: what is in scope, the best first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from megapg.migrate.flow import binding_statements, blocks, runs_before, statements_around
from megapg.migrate.mapping import (
    COLLECTION_NAMES,
    GROUP_PARAMETERS,
    MODEL_ATTRIBUTES,
    Refusal,
    Replacement,
)
from megapg.migrate.resolve import Resolver
from megapg.migrate.scopes import (
    Alias,
    Binding,
    Defined,
    Instance,
    Opaque,
    Parents,
    Scope,
    Use,
    last_name,
)
from megapg.migrate.sites import Carrier

# What a model is called where it is passed, held in a variable, or kept by self.
MODEL_NAMES = (
    *("model", "module", "unwrapped_model", "gpt_model", "model_chunk", "actor_module"),
    *("models", "model_chunks", "model_list", "ddp_model", "language_model", "megatron_model"),
    *("wrapped_models", "unwrapped_models", "vpp_model", "gpt", "mcore_model", "megatron_module"),
    "inference_wrapped_model",
)
_MODULES = ("torch.nn.Module", "torch.nn.modules.module.Module", "nn.Module")
_ENDS_OF_MODULES = ("Module", "Model", "Layer")
_RANKS = {"group": 0, "collection": 1, "model": 2}
# Annotations of parameters that have a model's name and hold none.
_NO_MODEL = frozenset(
    {"str", "int", "float", "bool", "bytes", "dict", "Dict", "Path", "ModuleType"}
)
# Where asking self for its attributes may not end, or there is no self yet.
_WITHOUT_SELF = frozenset(
    {"__getattr__", "__getattribute__", "__setattr__", "__new__", "__del__", *COLLECTION_NAMES}
)
_IMPORTING = frozenset({"import_module", "__import__", "module_from_spec", "importorskip"})


def carriers(
    use: Use, path: Path, answer: Replacement | Refusal | None, resolver: Resolver
) -> tuple[Carrier, ...]:
    """What is in scope at a use: groups of the field that it asks for, collections, models.

    Args:
        use: the place.
        path: of its file.
        answer: what is asked for there; None for collections and models alone.
        resolver: what names stand for.
    """
    found: dict[str, Carrier] = {}
    for carrier in _Search(use, path, answer, resolver).run():
        found.setdefault(carrier.expression, carrier)
    return tuple(sorted(found.values(), key=lambda each: (not each.certain, _RANKS[each.kind])))


class _Search:
    def __init__(
        self, use: Use, path: Path, answer: Replacement | Refusal | None, resolver: Resolver
    ) -> None:
        self._use, self._path, self._resolver = use, path, resolver
        narrow = isinstance(answer, Replacement) and answer.write_narrow("group") is not None
        self._field = answer.field if narrow and isinstance(answer, Replacement) else ""
        self._wanted = {
            **dict.fromkeys(MODEL_NAMES, "model"),
            **{name: "group" for name, of in GROUP_PARAMETERS.items() if self._field in of},
            **dict.fromkeys(COLLECTION_NAMES, "collection"),
        }

    def run(self) -> Iterator[Carrier]:
        hidden: set[str] = set()  # names that mean something else further in
        for scope in self._use.scope.chain():
            for name, bindings in scope.bindings.items():
                first = bindings[0]
                if scope.kind != "function" or name in hidden:
                    continue
                if isinstance(first, Instance):
                    if not _is_class_method(scope):
                        yield from self._of_self(name, first.of, scope)
                elif name in self._wanted:
                    yield from self._variable(name, bindings, scope)
            hidden |= scope.bindings.keys() | scope.declared
            hidden |= {name for name, of in scope.elsewhere.items() if of.kind == "module"}

    def _variable(self, name: str, bindings: list[Binding], scope: Scope) -> Iterator[Carrier]:
        kind = self._wanted[name]
        if _is_deleted(name, scope.node):
            return
        if kind == "collection" and (
            _is_filled(name, scope.node) or _is_asked_about(name, self._use.parents)
        ):
            return
        parameter = next((b for b in bindings if isinstance(b, Opaque) and b.parameter), None)
        if parameter is not None:
            if kind == "model" and _cannot_be_a_model(name, scope.node):
                return
            default = parameter.default
            may_be_none = (
                isinstance(default, ast.Constant) and default.value is None and len(bindings) == 1
            )
            # What a group is of can't be told from its name; nor which of two a parameter holds.
            yield Carrier(kind, name, "parameter", may_be_none, kind != "group")
            return
        around = statements_around(self._use.parents, scope.node)
        before = not any(map(_is_placeholder, bindings)) and any(
            runs_before(statement, around, scope.node)
            for statement in binding_statements(scope.node, name)
        )
        if before or any(b.line < around[0].lineno for b in bindings if around):
            certain = before and (kind != "group" or self._are_of_the_field(bindings))
            yield Carrier(kind, name, "local", False, certain)

    def _of_self(self, name: str, of: Scope, method: Scope) -> Iterator[Carrier]:
        method_name = getattr(method.node, "name", "")
        if method_name in _WITHOUT_SELF:
            return
        above = list(ancestry(of, self._path, self._resolver))
        ancestors = [each for each in above if isinstance(each, Scope)]
        outside = [each for each in above if isinstance(each, str)]
        held = {name for each in ancestors for name in (*each.attributes, *each.bindings)}
        is_module = any(map(is_torch_module, outside))
        of_core = any(map(is_of_core, outside))
        made = method_name != "__init__"
        for attribute in sorted(held & self._wanted.keys()):
            kind = self._wanted[attribute]
            # A group may be another one in a subclass, and what groups_of() finds by itself it
            # is asked for, as it does not mind what is not there.
            sure = made and kind != "group" and attribute not in MODEL_ATTRIBUTES
            certain = sure and _assigned_at_first(attribute, ancestors)
            yield Carrier(kind, f"{name}.{attribute}", "attribute", False, certain)
        if is_module:
            set_up = of_core and self._is_set_up(method)
            yield Carrier("model", name, "attribute", False, made or set_up)
        elif any(
            attribute in each.attributes for each in ancestors for attribute in MODEL_ATTRIBUTES
        ):
            yield Carrier("model", name, "attribute", False, made)

    def _is_set_up(self, constructor: Scope) -> bool:
        """Whether the constructors of the bases have run."""
        around = statements_around(self._use.parents, constructor.node)
        return any(
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and ast.unparse(statement.value.func) == "super().__init__"
            and runs_before(statement, around, constructor.node)
            for block in blocks(constructor.node)
            for statement in block
        )

    def _are_of_the_field(self, bindings: list[Binding]) -> bool:
        """Whether every value is a collection's attribute of that name."""
        return all(
            isinstance(each, Alias)
            and isinstance(each.value, ast.Attribute)
            and each.value.attr == self._field
            and last_name(each.value.value) in COLLECTION_NAMES
            for each in bindings
        )


def ancestry(
    of: Scope, path: Path, resolver: Resolver, seen: frozenset[int] = frozenset()
) -> Iterator[Scope | str]:
    """A class and the classes that it is made of: scopes in the project, names outside of it."""
    if id(of) in seen or not isinstance(of.node, ast.ClassDef) or of.parent is None:
        return
    yield of
    for base in of.node.bases:
        if isinstance(base, ast.Subscript):  # Generic[T]
            base = base.value
        for thing in resolver.expression(base, of.parent, path):
            if thing.kind == "class" and thing.scope is not None and thing.path is not None:
                yield from ancestry(thing.scope, thing.path, resolver, seen | {id(of)})
            else:
                yield thing.name


def is_of_core(base: str) -> bool:
    """Whether a class outside of the project, by its dotted name, is one of Megatron-core's."""
    return base.startswith("megatron.core.")


def is_torch_module(base: str) -> bool:
    """Whether a class outside of the project, by its dotted name, is a module of torch."""
    last = base.rpartition(".")[2]
    of_core = is_of_core(base) and base.endswith(_ENDS_OF_MODULES)
    of_torch = base.startswith("torch.nn.") and last[:1].isupper()
    return base in _MODULES or of_core or of_torch or last == "LightningModule"


def _is_class_method(scope: Scope) -> bool:
    decorators = getattr(scope.node, "decorator_list", ())
    return any(last_name(each) == "classmethod" for each in decorators)


def _assigned_at_first(attribute: str, classes: list[Scope]) -> bool:
    """Whether a constructor always assigns it, and nothing takes it away."""
    if any(_is_deleted(attribute, each.node) for each in classes):
        return False
    for klass in classes:
        for binding in klass.bindings.get("__init__", ()):
            if isinstance(binding, Defined):
                for block in blocks(binding.scope.node):
                    if any(_assigns(statement, attribute) for statement in block):
                        return True
    return False


def _assigns(statement: ast.stmt, attribute: str) -> bool:
    """Whether a statement gives something to an attribute of that name."""
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    if isinstance(statement, ast.Assign) and _is_nothing(statement.value):
        return False
    return any(isinstance(each, ast.Attribute) and each.attr == attribute for each in targets)


def _is_deleted(name: str, node: ast.AST) -> bool:
    """Whether a variable or attribute of that name is deleted somewhere in a node, as that of an
    ``except ... as`` is at its end.
    """
    return any(
        (isinstance(each, ast.ExceptHandler) and each.name == name)
        or (
            isinstance(each, ast.Name | ast.Attribute)
            and isinstance(each.ctx, ast.Del)
            and name == (each.id if isinstance(each, ast.Name) else each.attr)
        )
        for each in ast.walk(node)
    )


def _is_filled(name: str, function: ast.AST) -> bool:
    """Whether a function puts groups into a collection: until then it lacks them."""
    return any(
        isinstance(each, ast.Attribute)
        and not isinstance(each.ctx, ast.Load)
        and isinstance(each.value, ast.Name)
        and each.value.id == name
        for each in ast.walk(function)
    )


def _is_asked_about(name: str, parents: Parents) -> bool:
    """Whether a branch around a use depends on what a collection is, or has: it may be the one for
    where it is not there.
    """
    return any(
        isinstance(each, ast.Name) and each.id == name
        for outer in parents
        if isinstance(outer, ast.If | ast.IfExp)
        for each in ast.walk(outer.test)
    )


def _is_placeholder(binding: Binding) -> bool:
    """Whether a variable is bound to nothing as yet, or to a module of Python."""
    return isinstance(binding, Alias) and _is_nothing(binding.value)


def _is_nothing(value: ast.expr) -> bool:
    """Whether an expression is None, or an empty list to be filled, or imports something."""
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        return not value.elts
    if isinstance(value, ast.Call):
        return last_name(value.func) in _IMPORTING
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Dict) and not value.keys)


def _cannot_be_a_model(name: str, function: ast.AST) -> bool:
    arguments = getattr(function, "args", None)
    if not isinstance(arguments, ast.arguments):
        return True
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if each.arg == name and each.annotation is not None:
            return bool(_NO_MODEL & set(_words(ast.unparse(each.annotation))))
    return False


def _words(annotation: str) -> list[str]:
    return "".join(c if c.isalnum() or c in "_." else " " for c in annotation).split()
