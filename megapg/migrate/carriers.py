"""From what the groups can be had where a global is read now: what is in scope, the best first."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from megapg.migrate.flow import (
    Held,
    Holding,
    blocks,
    is_ruled_out,
    runs_before,
    statements_around,
)
from megapg.migrate.mapping import (
    COLLECTION_NAMES,
    GROUP_PARAMETERS,
    MODEL_ATTRIBUTES,
    Refusal,
    Replacement,
)
from megapg.migrate.resolve import Resolver, Thing
from megapg.migrate.roles import has_another_role, role_asked_about
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
    walk,
)
from megapg.migrate.sites import Carrier

# What a model is called where it is passed, held in a variable, or kept by self.
MODEL_NAMES = (
    *("model", "module", "unwrapped_model", "gpt_model", "model_chunk", "actor_module"),
    *("models", "model_chunks", "model_list", "ddp_model", "language_model", "megatron_model"),
    *("wrapped_models", "unwrapped_models", "vpp_model", "gpt", "mcore_model", "megatron_module"),
    *("inference_wrapped_model", "parallel_model", "mg_model", "mg_models"),
    *("pl_module",),  # of Lightning's hooks
)
_MODULES = ("torch.nn.Module", "torch.nn.modules.module.Module", "nn.Module")
_ENDS_OF_MODULES = (
    *("Module", "Model", "Layer", "TransformerBlock", "PredictionBlock", "Attention", "Embedding"),
    *("MLP", "Linear", "Mixer", "Stack", "Router"),
)
# Of Transformer Engine, and names in torch.nn that are no modules.
_ENDS_OF_ENGINES = ("Linear", "LayerNormMLP", "Attention", "TransformerLayer")
_NO_MODULE = frozenset({"Parameter", "Buffer"})
_OF_THEIR_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_HOMES_OF_STRATEGIES = ("lightning.pytorch.strategies.", "pytorch_lightning.strategies.")
_MAY_BE_NONE = frozenset({"None", "Optional"})
_OF_SEVERAL = frozenset({"list", "List", "tuple", "Tuple", "Sequence"})
# What groups_of() takes from an object or looks into, whatever that is.
_LOOKED_INTO = frozenset({*MODEL_ATTRIBUTES, *COLLECTION_NAMES})
# Of these, those that are nothing else; and what is asked of modules only.
_ONLY_MODELS = frozenset({"unwrapped_models", "wrapped_models", "model_chunks"})
_ONLY_OF_MODULES = frozenset(
    {"parameters", "named_parameters", "modules", "named_modules", "state_dict", "load_state_dict"}
)
# Names of models that may be any part of a module, where a module has them.
_OF_ALL_MODULES = frozenset({"module"})
_RANKS = {"group": 0, "collection": 1, "model": 2}
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
        self._giving_way: dict[str, frozenset[str]] = {}

    def run(self) -> Iterator[Carrier]:
        found = [*self._of_another_role(), *self._by_name()]
        # A model at hand is asked before a self that may have nothing to say, or hold another one.
        found = sorted(found, key=lambda one: any(self._gives_way(one, each) for each in found))
        yield from found
        if not any(each.certain and each.kind == "model" for each in found):
            annotated = list(self._by_annotation())
            if len(annotated) == 1:  # of several the one that is meant can't be told
                yield Carrier("model", annotated[0], "parameter")

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
            if Holding(name, _is_nothing).at(around, function.node) is Held.SOMETHING:
                yield Carrier("model", name, "local")

    def _by_name(self) -> Iterator[Carrier]:
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
            yield from self._of_a_method_to_be(scope, hidden)
            if scope.given_to and scope.parent is not None and scope.parent.kind == "function":
                return  # what is around it is of one call, and this serves all objects
            hidden |= scope.bindings.keys() | scope.declared
            hidden |= {name for name, of in scope.elsewhere.items() if of.kind == "module"}

    def _of_a_method_to_be(self, function: Scope, hidden: set[str]) -> Iterator[Carrier]:
        """The first parameter of a function that becomes a method, of modules and nothing else."""
        arguments = getattr(function.node, "args", None)
        outer = function.parent
        if not function.given_to or outer is None or not isinstance(arguments, ast.arguments):
            return
        name = next((each.arg for each in (*arguments.posonlyargs, *arguments.args)), "")
        one_value = len(function.bindings.get(name, ())) == 1 and name not in function.deleted
        if name != "self" or name in hidden or not one_value:
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
        arguments = getattr(function.node, "args", None) if function is not None else None
        if function is None or function.parent is None or not isinstance(arguments, ast.arguments):
            return
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for each in every:
            bound = function.bindings.get(each.arg, [])
            first = bound[0] if len(bound) == 1 else None
            if not isinstance(first, Opaque) or first.default is not None:
                continue
            if each.annotation is None or each.arg in function.deleted:
                continue
            if self._use.scope.find(each.arg) != (function, bound):
                continue
            if self._is_a_module(each.annotation, function.parent):
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
            of = [each for each in getattr(inner, "elts", [inner]) if not _is_ellipsis(each)]
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
        kind = self._wanted[name]
        if name in scope.deleted or self._is_ruled_out(name, scope):
            return
        if kind == "collection" and (
            _is_filled(name, scope) or _is_asked_about(name, self._use.parents)
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
            certain = kind != "group" and self._is_still_one(name, bindings, scope, kind)
            yield Carrier(kind, name, "parameter", may_be_none, certain)
            return
        around = statements_around(self._use.parents, scope.node)
        known = all(isinstance(each, Alias | Opaque) for each in bindings)
        held = Holding(name, _is_nothing).at(around, scope.node)
        before = known and held is Held.SOMETHING
        before = before and self._is_still_one(name, bindings, scope, kind)
        if before or any(b.line < around[0].lineno for b in bindings if around):
            certain = before and (kind != "group" or self._are_of_the_field(bindings))
            yield Carrier(kind, name, "local", False, certain)

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
            return bool(called) and all(map(_is_generator, called))
        if isinstance(value, ast.Name | ast.Attribute | ast.IfExp):
            things = self._resolver.expression(value, scope, self._path)
            kinds = ("class", "function")
            return bool(things) and all(
                each.kind in kinds or (each.kind == "name" and is_torch_module(each.name))
                for each in things
            )
        return isinstance(value, ast.GeneratorExp | ast.Lambda | ast.DictComp | ast.SetComp)

    def _is_ruled_out(self, name: str, scope: Scope) -> bool:
        """Whether a variable holds nothing for certain; a function further in may run later."""
        if self._use.scope is not scope:
            return False
        return is_ruled_out(name, statements_around(self._use.parents, scope.node), scope.node)

    def _of_self(self, name: str, of: Scope, method: Scope) -> Iterator[Carrier]:
        method_name = getattr(method.node, "name", "")
        if method_name in _WITHOUT_SELF:
            return
        above = list(ancestry(of, self._path, self._resolver))
        ancestors = [each for each in above if isinstance(each, Scope)]
        outside = [each for each in above if isinstance(each, str)]
        held = {name for each in ancestors for name in (*each.attributes, *each.bindings)}
        is_module = any(is_torch_module(each) or is_engine_module(each) for each in outside)
        of_core = any(map(is_of_core, outside))
        is_sure = not has_another_role(method)
        made = method_name != "__init__"
        given = not made and self._may_have_a_model(method, ancestors)
        if any(map(_is_strategy, outside)):
            # There model is a property, and None until there is one; groups_of() asks no such.
            self._giving_way[f"{name}.model"] = frozenset()
            yield Carrier("model", f"{name}.model", "attribute", False, made and is_sure)
        for attribute in sorted(held & self._wanted.keys()):
            kind = self._wanted[attribute]
            # A group may be another one in a subclass, and what groups_of() finds by itself it
            # is asked for, as it does not mind what is not there.
            sure = made and kind != "group" and attribute not in MODEL_ATTRIBUTES
            sure = sure and (is_sure or kind != "model")
            certain = sure and _assigned_at_first(attribute, ancestors)
            yield Carrier(kind, f"{name}.{attribute}", "attribute", False, certain)
        if is_module:
            set_up = of_core and self._is_set_up(method)
            certain = made or set_up or given
            if not of_core and not any(_has_a_collection(each) for each in ancestors):
                self._giving_way[name] = _OF_ALL_MODULES
                certain = certain and is_sure
            if given and not set_up:
                self._giving_way[name] = frozenset()  # what it was given is the parameter here
            yield Carrier("model", name, "attribute", False, certain)
        elif any(_has_a_model(each) for each in ancestors):
            self._giving_way[name] = frozenset()
            yield Carrier("model", name, "attribute", False, (made or given) and is_sure)

    def _is_set_up(self, constructor: Scope) -> bool:
        """Whether the constructors of the bases have run."""
        around = statements_around(self._use.parents, constructor.node)
        return any(
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and _is_of_only_base(statement.value, constructor)
            and runs_before(statement, around, constructor.node)
            for block in blocks(constructor.node)
            for statement in block
        )

    def _may_have_a_model(self, constructor: Scope, classes: list[Scope]) -> bool:
        """Whether a constructor may have given its object a model before."""
        around = statements_around(self._use.parents, constructor.node)
        return any(
            runs_before(statement, around, constructor.node)
            for statement in _statements(constructor.node)
            if any(
                _gives_a_model(each, constructor, classes, 0)
                for each in (statement, *_statements(statement))
            )
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
        if not isinstance(each, (*_OF_THEIR_OWN, ast.Lambda)):
            waiting += ast.iter_child_nodes(each)
    return False


def is_super(node: ast.expr, method: Scope | None) -> bool:
    """Whether an expression is ``super()`` in a method, or ``super(C, self)`` in one of ``C``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id != "super" or len(node.args) != 2 or method is None:
        return node.func.id == "super" and not node.args
    klass, instance = node.args
    found = method.find(klass.id) if isinstance(klass, ast.Name) else None
    bound = found[1] if found else []
    around = [each.scope if isinstance(each, Defined) else None for each in bound]
    return around == [method.parent] and _is_self(instance, method)


def calls_of_bases(constructor: Scope) -> list[ast.Call]:
    """The calls in a constructor that may be of the constructors of its bases."""
    return [
        each
        for each in _of_its_class(constructor.node)
        if isinstance(each, ast.Call)
        and isinstance(each.func, ast.Attribute)
        and each.func.attr == "__init__"
        and (
            (isinstance(each.func.value, ast.Call) and last_name(each.func.value.func) == "super")
            or (each.args and _is_self(each.args[0], constructor))
        )
    ]


def _of_its_class(method: ast.AST) -> Iterator[ast.AST]:
    """Every node in a method, but those of classes, and of functions with a self of their own, in
    it: what these call is not of the method's object.
    """
    own = _first_parameter(method)
    waiting = [method]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [
            inner
            for inner in ast.iter_child_nodes(each)
            if not isinstance(inner, ast.ClassDef) and not own == _first_parameter(inner) != ""
        ]


def _first_parameter(node: ast.AST) -> str:
    arguments = getattr(node, "args", None)
    if not isinstance(arguments, ast.arguments):
        return ""
    return next((each.arg for each in (*arguments.posonlyargs, *arguments.args)), "")


def _is_of_only_base(call: ast.Call, constructor: Scope) -> bool:
    """Whether a call is that of the constructor of the base, by way of super() or by its name."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "__init__":
        return False
    of, klass = call.func.value, constructor.parent
    if is_super(of, constructor):
        return True
    bases = [ast.unparse(each) for each in getattr(klass.node if klass else None, "bases", ())]
    by_name = bool(call.args) and _is_self(call.args[0], constructor)
    return by_name and bases == [ast.unparse(of)]


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


def _is_strategy(base: str) -> bool:
    """Whether a class outside of the project is a strategy of Lightning's trainer."""
    return base.endswith("Strategy") and base.startswith(_HOMES_OF_STRATEGIES)


def _has_a_model(klass: Scope) -> bool:
    """Whether objects of a class have what groups_of() looks into: methods of the class write it,
    or use it as models are used, as those do of a class that is mixed into others.
    """
    if klass.attributes.keys() & _LOOKED_INTO:
        return True
    selves = {
        name
        for bound in klass.bindings.values()
        for each in bound
        if isinstance(each, Defined) and not _is_class_method(each.scope)
        for name in each.scope.bindings
        if isinstance(each.scope.bindings[name][0], Instance)
    }
    for node in klass.nodes:
        if not isinstance(node, ast.Attribute):
            continue
        held: ast.expr = node if node.attr in _ONLY_MODELS else node.value
        if held is not node and node.attr not in _ONLY_OF_MODULES:
            continue
        if (
            isinstance(held, ast.Attribute)
            and held.attr in MODEL_ATTRIBUTES
            and isinstance(held.value, ast.Name)
            and held.value.id in selves
        ):
            return True
    return False


def _gives_a_model(
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
        something = statement.value is not None and not _is_nothing(statement.value)
        return something and any(
            isinstance(each, ast.Attribute)
            and each.attr in MODEL_ATTRIBUTES
            and _is_self(each.value, method)
            for each in written
        )
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, call.func.value
    first = 0 if _is_self(owner, method) else of + 1 if is_super(owner, method) else -1
    if first < 0 or (name, first) in seen:
        return False
    found = next((i for i, each in enumerate(classes) if i >= first and name in each.bindings), -1)
    return found >= 0 and any(
        _gives_a_model(inner, each.scope, classes, found, seen | {(name, first)})
        for each in classes[found].bindings[name]
        if isinstance(each, Defined)
        for inner in _statements(each.scope.node)
    )


def _statements(outer: ast.AST) -> Iterator[ast.stmt]:
    """The statements in a function or a statement, in any depth, but those of functions in it."""
    for block in blocks(outer):
        for statement in block:
            yield statement
            if not isinstance(statement, _OF_THEIR_OWN):
                yield from _statements(statement)


def _is_self(value: ast.expr, method: Scope) -> bool:
    bound = method.bindings.get(value.id, ()) if isinstance(value, ast.Name) else ()
    return any(isinstance(each, Instance) for each in bound)


def _has_a_collection(klass: Scope) -> bool:
    """Whether objects of a class carry one themselves: it is written, or the class is the one of
    which all modules of Megatron-core are made.
    """
    held = klass.attributes.keys() | klass.bindings.keys()
    return klass.name == "MegatronModule" or not held.isdisjoint(COLLECTION_NAMES)


def _is_class_method(scope: Scope) -> bool:
    decorators = getattr(scope.node, "decorator_list", ())
    return any(last_name(each) == "classmethod" for each in decorators)


def _assigned_at_first(attribute: str, classes: list[Scope]) -> bool:
    """Whether a constructor always assigns it, and nothing takes it away."""
    if any(attribute in each.deleted for each in classes):
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


def _is_filled(name: str, function: Scope) -> bool:
    """Whether a function puts groups into a collection: until then it lacks them."""
    return any(
        isinstance(each, ast.Attribute)
        and not isinstance(each.ctx, ast.Load)
        and isinstance(each.value, ast.Name)
        and each.value.id == name
        for each in function.nodes
    )


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


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


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
