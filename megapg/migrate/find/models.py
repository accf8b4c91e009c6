"""What classes are modules, and whether their objects have a model or carry a collection."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from megapg.migrate.find.meaning import Resolver
from megapg.migrate.python.flow import blocks, statements_in
from megapg.migrate.python.methods import is_class_method, is_self, is_super, kept, parameters
from megapg.migrate.python.scopes import Alias, Scope, last_name
from megapg.upstream.mapping import COLLECTION_NAMES, MODEL_ATTRIBUTES

_MODULES = ("torch.nn.Module", "torch.nn.modules.module.Module", "nn.Module")
_ENDS_OF_MODULES = (
    *("Module", "Model", "Layer", "TransformerBlock", "PredictionBlock", "Attention", "Embedding"),
    *("MLP", "Linear", "Mixer", "Stack", "Router"),
)
# Of Transformer Engine, and names in torch.nn that are no modules.
_ENDS_OF_ENGINES = ("Linear", "LayerNormMLP", "Attention", "TransformerLayer")
_NO_MODULE = frozenset({"Parameter", "Buffer"})
_HOMES_OF_STRATEGIES = ("lightning.pytorch.strategies.", "pytorch_lightning.strategies.")
# What groups_of() takes from an object or looks into, whatever that is.
_LOOKED_INTO = frozenset({*MODEL_ATTRIBUTES, *COLLECTION_NAMES})
# Of these, those that are nothing else; and what is asked of modules only.
_ONLY_MODELS = frozenset({"unwrapped_models", "wrapped_models", "model_chunks"})
_ONLY_OF_MODULES = frozenset(
    {"parameters", "named_parameters", "modules", "named_modules", "state_dict", "load_state_dict"}
)
_IMPORTING = frozenset({"import_module", "__import__", "module_from_spec", "importorskip"})


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
        if isinstance(base, ast.Name) and base.id == "object" and of.parent.find("object") is None:
            continue
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
    of_torch = base.startswith("torch.nn.") and last.lstrip("_")[:1].isupper()
    if of_torch and last in _NO_MODULE:
        return False
    return base in _MODULES or of_core or of_torch or last == "LightningModule"


def is_engine_module(base: str) -> bool:
    """Whether a class outside of the project is a module of Transformer Engine."""
    return base.startswith("transformer_engine.pytorch.") and base.endswith(_ENDS_OF_ENGINES)


def is_strategy(base: str) -> bool:
    """Whether a class outside of the project is a strategy of Lightning's trainer."""
    return base.endswith("Strategy") and base.startswith(_HOMES_OF_STRATEGIES)


@kept
def has_a_model(klass: Scope) -> bool:
    """Whether objects of a class have what groups_of() looks into: methods of the class write it,
    or use it as models are used, as those do of a class that is mixed into others.
    """
    if klass.attributes.keys() & _LOOKED_INTO:
        return True
    methods = (each for name in klass.bindings for each in klass.defined(name))
    selves = {name for each in methods if not is_class_method(each) for name in each.instances}
    used = (
        node if node.attr in _ONLY_MODELS else node.value
        for node in klass.nodes
        if isinstance(node, ast.Attribute) and node.attr in _ONLY_MODELS | _ONLY_OF_MODULES
    )
    return any(
        isinstance(held, ast.Attribute)
        and held.attr in MODEL_ATTRIBUTES
        and isinstance(held.value, ast.Name)
        and held.value.id in selves
        for held in used
    )


def gives_a_model(
    statement: ast.stmt,
    method: Scope,
    classes: Sequence[Scope],
    of: int,
    seen: frozenset[tuple[str, int]] = frozenset(),
) -> bool:
    """Whether a statement gives the object what groups_of() looks into: itself, or by a method.

    Args:
        statement: of the method.
        method: of one of the classes.
        classes: that of the object, and those that it is made of.
        of: which of them has the method.
        seen: the methods that have been looked at: their names, and from which class on.
    """
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        written = [each for target in targets for each in getattr(target, "elts", [target])]
        something = statement.value is not None and not is_nothing(statement.value)
        return something and any(
            isinstance(each, ast.Attribute)
            and each.attr in MODEL_ATTRIBUTES
            and is_self(each.value, method)
            for each in written
        )
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, call.func.value
    first = 0 if is_self(owner, method) else of + 1 if is_super(owner, method) else -1
    if first < 0 or (name, first) in seen:
        return False
    found = next((i for i, each in enumerate(classes) if i >= first and name in each.bindings), -1)
    return found >= 0 and any(
        gives_a_model(inner, each, classes, found, seen | {(name, first)})
        for each in classes[found].defined(name)
        for inner in statements_in(each.node)
    )


def keeps_its_model(classes: Sequence[Scope], of: int = 0, name: str = "") -> ast.stmt | None:
    """The statement of a constructor with which its object has the model that it is passed; None
    where that may be another one, or there are several that groups_of() looks into.

    Args:
        classes: that of the objects, and those that it is made of.
        of: which of them has the constructor that is passed it; or one behind that has.
        name: the parameter; empty for any that is called as models are.
    """
    if len({a for each in classes for a in each.attributes if a in MODEL_ATTRIBUTES}) > 1:
        return None
    at = next((i for i in range(of, len(classes)) if "__init__" in classes[i].bindings), -1)
    found = classes[at].defined("__init__") if at >= 0 else []
    if len(found) != 1 or not isinstance(found[0].node, ast.FunctionDef):
        return None
    constructor, body = found[0], found[0].node.body
    names = {each.arg for each in parameters(constructor.node)}
    models = {name} if name else names & {*MODEL_ATTRIBUTES}
    models = {each for each in models if len(constructor.bindings.get(each, ())) == 1}
    for statement in body:
        match statement:
            case ast.Assign([ast.Attribute(owner, attribute)], ast.expr() as value) | ast.AnnAssign(
                ast.Attribute(owner, attribute), _, ast.expr() as value
            ):
                is_kept = attribute in MODEL_ATTRIBUTES and is_self(owner, constructor)
                if is_kept and unwrapped(value) in models:
                    return statement
            case ast.Expr(ast.Call() as call) if is_of_only_base(call, constructor):
                passed = _parameters_of(call, constructor, classes[at + 1 :])
                given = [
                    parameter
                    for parameter, value in passed
                    if isinstance(value, ast.Name) and value.id in models
                ]
                if any(keeps_its_model(classes, at + 1, each) for each in given):
                    return statement
    return None


def unwrapped(value: ast.expr) -> str:
    """The variable whose model an expression is, be it without what is around it; empty where that
    may be another one.
    """
    match value:
        case ast.Name(name):
            return name
        case ast.Attribute(inner, attribute) if attribute in MODEL_ATTRIBUTES:
            return unwrapped(inner)
        case ast.Subscript(inner) | ast.List([inner]) | ast.Tuple([inner]):
            return unwrapped(inner)
        case ast.Call(called, [inner, *_]) if "unwrap" in last_name(called):
            return unwrapped(inner)
        case ast.Call(called, [_, inner]) if last_name(called) == "cast":
            return unwrapped(inner)
    return ""


def keeps_a_model(node: ast.AST, method: Scope) -> TypeGuard[ast.stmt]:
    """Whether it is a statement with which a method gives its object a model."""
    match node:
        case ast.Assign([ast.Attribute(owner, attribute)], value):
            is_none = isinstance(value, ast.Constant)
            return attribute in MODEL_ATTRIBUTES and is_self(owner, method) and not is_none
    return False


def is_of_its_object(name: str, method: Scope) -> bool:
    """Whether a variable of a method has what its object has as a model, or a part of that."""
    found = method.bindings.get(name, ())
    taken = {unwrapped(each.value) if isinstance(each, Alias) else "" for each in found}
    return bool(taken & method.instances) and taken <= {name, *method.instances}


def _parameters_of(
    call: ast.Call, constructor: Scope, bases: Sequence[Scope]
) -> Iterator[tuple[str, ast.expr]]:
    """What a call passes to the constructor of the base: the parameters, and the arguments."""
    base = next((each for each in bases if "__init__" in each.bindings), None)
    found = base.defined("__init__") if base is not None else []
    if len(found) != 1 or any(isinstance(each, ast.Starred) for each in call.args):
        return
    names = [each.arg for each in parameters(found[0].node)][1:]
    assert isinstance(call.func, ast.Attribute)  # it is of the base's constructor
    by_name = not is_super(call.func.value, constructor)
    yield from zip(names, call.args[1 if by_name else 0 :], strict=False)
    yield from ((each.arg, each.value) for each in call.keywords if each.arg)


def has_a_collection(klass: Scope) -> bool:
    """Whether objects of a class carry one themselves: it is written, or the class is the one of
    which all modules of Megatron-core are made.
    """
    held = klass.attributes.keys() | klass.bindings.keys()
    return klass.name == "MegatronModule" or not held.isdisjoint(COLLECTION_NAMES)


def assigned_at_first(attribute: str, classes: list[Scope]) -> bool:
    """Whether a constructor always assigns it, and nothing takes it away."""
    if any(attribute in each.deleted for each in classes):
        return False
    return any(
        _assigns(statement, attribute)
        for klass in classes
        for constructor in klass.defined("__init__")
        for block in blocks(constructor.node)
        for statement in block
    )


def _assigns(statement: ast.stmt, attribute: str) -> bool:
    """Whether a statement gives something to an attribute of that name."""
    return (
        isinstance(statement, ast.Assign)
        and not is_nothing(statement.value)
        and any(isinstance(e, ast.Attribute) and e.attr == attribute for e in statement.targets)
    )


def is_nothing(value: ast.expr) -> bool:
    """Whether an expression is None, or an empty list to be filled, or imports something."""
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        return not value.elts
    if isinstance(value, ast.Call):
        return last_name(value.func) in _IMPORTING
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Dict) and not value.keys)


def is_of_only_base(call: ast.Call, constructor: Scope) -> bool:
    """Whether a call is that of the constructor of the base, by way of super() or by its name."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "__init__":
        return False
    of, klass = call.func.value, constructor.parent
    if is_super(of, constructor):
        return True
    bases = [ast.unparse(each) for each in getattr(klass.node if klass else None, "bases", ())]
    by_name = bool(call.args) and is_self(call.args[0], constructor)
    return by_name and bases == [ast.unparse(of)]
