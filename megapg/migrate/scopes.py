"""What each name is bound to, scope by scope, as Python's own rules have it; nothing is run.

One pass over a syntax tree gives its scopes with their bindings, and every place that reads or
writes a name or a chain of attributes. What the names stand for is :mod:`megapg.migrate.resolve`'s.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

# Fields in which there is no node, or none that has anything in it.
_BARE = frozenset(
    {"id", "attr", "ctx", "op", "ops", "kind", "type_comment", "module", "level", "asname"}
    | {"conversion", "str", "simple", "is_async"}
)
# For each kind of node the other fields, and what may be in these that is not gone into.
_INNER = {
    kind: tuple(name for name in kind._fields if name not in _BARE)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
} | {ast.Constant: ()}
_EMPTY = frozenset({ast.Constant, str, bool, type(None)})

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(eq=False, slots=True)
class Imported:
    """Bound by an import: of a module, or of a module's member.

    Attributes:
        level: dots in front.
        module: parts of the module's name.
        member: the name taken from it; empty where it is the module itself.
        line: of the statement.
    """

    level: int
    module: tuple[str, ...]
    member: str
    line: int


@dataclass(eq=False, slots=True)
class Alias:
    """Bound to the value of an expression."""

    value: ast.expr
    scope: Scope
    line: int


@dataclass(eq=False, slots=True)
class Instance:
    """The first parameter of a method: self, or cls."""

    of: Scope
    line: int


@dataclass(eq=False, slots=True)
class Defined:
    """A class or a function defined here."""

    scope: Scope
    line: int


@dataclass(eq=False, slots=True)
class Opaque:
    """Bound to what can't be told: a parameter, a loop's variable."""

    line: int
    parameter: bool = False
    default: ast.expr | None = None


Binding: TypeAlias = Imported | Alias | Instance | Defined | Opaque


@dataclass(eq=False)
class Scope:
    """One scope: of a module, a class, a function (or lambda), or a comprehension."""

    kind: str
    name: str
    node: ast.AST
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    attributes: dict[str, list[Binding]] = field(default_factory=dict)  # self.x, of a class
    stars: list[Imported] = field(default_factory=list)
    elsewhere: dict[str, Scope] = field(default_factory=dict)  # global and nonlocal
    declared: set[str] = field(default_factory=set)  # annotated, and so its own, without a value

    def bind(self, name: str, binding: Binding) -> None:
        """One more thing that the name is bound to."""
        self.elsewhere.get(name, self).bindings.setdefault(name, []).append(binding)

    def chain(self) -> Iterator[Scope]:
        """Where names are looked up from here: classes count for their own body only."""
        yield self
        scope = self.parent
        while scope is not None:
            if scope.kind != "class":
                yield scope
            scope = scope.parent

    def find(self, name: str) -> tuple[Scope, list[Binding]] | None:
        """The scope whose name it is, and what it is bound to there."""
        scope: Scope | None = self
        while scope is not None:  # as chain() has it, without a generator: this is asked most
            if scope.kind != "class" or scope is self:
                owner = scope.elsewhere.get(name, scope)
                bindings = owner.bindings.get(name)
                if bindings is not None:
                    return owner, bindings
            scope = scope.parent
        return None

    def enclosing(self, *kinds: str) -> Scope | None:
        """The innermost scope of one of these kinds, from this one outwards."""
        scope: Scope | None = self
        while scope is not None and scope.kind not in kinds:
            scope = scope.parent
        return scope

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node in it but constants, those of the scopes in it too."""
        return list(walk(self.node))

    @cached_property
    def given_to(self) -> list[tuple[ast.expr, str]]:
        """The classes, and modules, of which a function becomes an attribute in the function or the
        module around, and the attribute's name: it serves all objects then, and stays when what is
        around it has returned. Those that get back what they had there are left out.
        """
        outer = self.parent
        if self.kind != "function" or outer is None or outer.kind == "class":
            return []
        restored = {
            (ast.unparse(owner), attribute)
            for owner, attribute, names in outer._assigned
            if self.name not in names
        }
        return [
            (owner, attribute)
            for owner, attribute, names in outer._assigned
            if self.name in names
            and _is_for_all(owner, outer)
            and (ast.unparse(owner), attribute) not in restored
        ]

    @cached_property
    def _assigned(self) -> list[tuple[ast.expr, str, set[str]]]:
        """What is assigned to attributes in it: of what, the attribute, and the names assigned."""
        found: list[tuple[ast.expr, str, ast.expr]] = []
        for each in self.nodes:
            if isinstance(each, ast.Assign):
                targets = (t for t in each.targets if isinstance(t, ast.Attribute))
                found += [(target.value, target.attr, each.value) for target in targets]
            elif isinstance(each, ast.Call) and last_name(each.func) == "setattr":
                attribute = each.args[1] if len(each.args) == 3 else None
                if isinstance(attribute, ast.Constant):
                    found.append((each.args[0], str(attribute.value), each.args[2]))
        return [
            (owner, attribute, {node.id for node in walk(value) if isinstance(node, ast.Name)})
            for owner, attribute, value in found
        ]

    @cached_property
    def said(self) -> frozenset[tuple[str, str]]:
        """The names in it, and the attributes of names: of which, and how it is called."""
        found = set()
        for each in self.nodes:
            if isinstance(each, ast.Name):
                found.add(("", each.id))
            elif isinstance(each, ast.arg):
                found.add(("", each.arg))
            elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                found.add((each.value.id, each.attr))
        return frozenset(found)

    @cached_property
    def deleted(self) -> frozenset[str]:
        """Names and attributes that are deleted somewhere in it, as that of an ``except ... as``
        is at its end.
        """
        return frozenset(
            each.name or "" if isinstance(each, ast.ExceptHandler) else last_name(each)
            for each in self.nodes
            if isinstance(each, ast.ExceptHandler)
            or (isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Del))
        )

    @property
    def qualname(self) -> str:
        """The names of classes and functions down to here, with dots."""
        names: list[str] = []
        scope: Scope | None = self
        while scope is not None and scope.kind != "module":
            if scope.kind != "comprehension":
                names.append(scope.name)
            scope = scope.parent
        return ".".join(reversed(names))


@dataclass(eq=False, slots=True)
class Parents:
    """The nodes around one, from the inside out."""

    node: ast.AST
    above: Parents | None

    def __iter__(self) -> Iterator[ast.AST]:
        at: Parents | None = self
        while at is not None:
            yield at.node
            at = at.above


@dataclass(eq=False, slots=True)
class Use:
    """A place that names something: a name, a chain of attributes, or a string passed to a call.

    Attributes:
        node: the expression.
        scope: in which it is.
        parents: the nodes around it.
        root: the name with which it begins; empty where that is something else.
    """

    node: ast.expr
    scope: Scope
    parents: Parents
    root: str = ""


@dataclass(frozen=True)
class Analysis:
    """What is in one module.

    Attributes:
        module: its scope, with those in it.
        uses: in the order of the source.
        deleted: names in ``del`` statements, which are no uses.
    """

    module: Scope
    uses: list[Use]
    deleted: set[str]


def analyse(tree: ast.Module) -> Analysis:
    """Scopes and uses of a module."""
    return _Analyser(tree).run()


class _Analyser:
    """Walks with a stack of its own: expressions may be nested deeper than Python recurses."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._module = Scope("module", "", tree, None)
        self._uses: list[Use] = []
        self._deleted: set[str] = set()
        self._stack: list[tuple[ast.AST, Scope, Parents]] = []
        self._handlers = {
            ast.FunctionDef: self._function,
            ast.AsyncFunctionDef: self._function,
            ast.Lambda: self._lambda,
            ast.ClassDef: self._class,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.DictComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.Global: self._elsewhere,
            ast.Nonlocal: self._elsewhere,
            ast.Assign: self._assign,
            ast.AnnAssign: self._annotated,
            ast.NamedExpr: self._walrus,
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.Call: self._call,
            ast.ExceptHandler: self._named,
            ast.MatchAs: self._named,
            ast.MatchStar: self._named,
            ast.MatchMapping: self._named,
        }

    def run(self) -> Analysis:
        top = Parents(self._tree, None)
        self._push(self._tree.body, self._module, top)
        while self._stack:
            node, scope, parents = self._stack.pop()
            handler = self._handlers.get(type(node))
            if handler is not None:
                handler(node, scope, parents)  # type: ignore[operator]
            elif children := _children(node):
                self._push(children, scope, Parents(node, parents))
        self._uses.sort(key=lambda use: (use.node.lineno, use.node.col_offset))
        return Analysis(self._module, self._uses, self._deleted)

    def _push(self, nodes: Iterable[ast.AST | None], scope: Scope, parents: Parents) -> None:
        # The first is handled first, so that declarations come before what they are about.
        entries = [(node, scope, parents) for node in nodes if node is not None]
        entries.reverse()
        self._stack += entries

    # -- scopes ------------------------------------------------------------------------------

    def _function(self, node: _Function, scope: Scope, parents: Parents) -> None:
        inner = Scope("function", node.name, node, scope)
        scope.bind(node.name, Defined(inner, node.lineno))
        inside = Parents(node, parents)
        static = any(
            isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list
        )
        self._parameters(node.args, inner, scope if scope.kind == "class" and not static else None)
        # Parameters of types, of Python 3.12, are names of the function.
        for parameter in getattr(node, "type_params", ()):
            inner.bind(parameter.name, Opaque(node.lineno))
        self._push(node.body, inner, inside)
        self._push(_annotations(node.args), scope, inside)
        outside = [*node.decorator_list, *_defaults(node.args), node.returns]
        self._push(outside, scope, inside)

    def _lambda(self, node: ast.Lambda, scope: Scope, parents: Parents) -> None:
        inner = Scope("function", "<lambda>", node, scope)
        self._parameters(node.args, inner, None)
        inside = Parents(node, parents)
        self._push([node.body], inner, inside)
        self._push(_defaults(node.args), scope, inside)

    def _parameters(self, given: ast.arguments, inner: Scope, of: Scope | None) -> None:
        positional = [*given.posonlyargs, *given.args]
        defaults: dict[str, ast.expr | None] = {
            each.arg: default
            for each, default in (
                *zip(positional[::-1], given.defaults[::-1], strict=False),
                *zip(given.kwonlyargs, given.kw_defaults, strict=True),
            )
        }
        every = [*positional, *given.kwonlyargs, given.vararg, given.kwarg]
        for each in every:
            if each is not None:
                binding = Opaque(each.lineno, parameter=True, default=defaults.get(each.arg))
                inner.bind(each.arg, binding)
        if of is not None and positional:
            first = positional[0]
            inner.bindings[first.arg] = [Instance(of, first.lineno)]

    def _class(self, node: ast.ClassDef, scope: Scope, parents: Parents) -> None:
        inner = Scope("class", node.name, node, scope)
        scope.bind(node.name, Defined(inner, node.lineno))
        inside = Parents(node, parents)
        self._push(node.body, inner, inside)
        self._push([*node.decorator_list, *node.bases, *node.keywords], scope, inside)

    def _comprehension(self, node: _Comprehension, scope: Scope, parents: Parents) -> None:
        inner = Scope("comprehension", "", node, scope)
        inside = Parents(node, parents)
        first, *others = node.generators
        result = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._push([*result, first.target, *first.ifs, *others], inner, inside)
        self._push([first.iter], scope, inside)  # outside of the comprehension, as Python does

    # -- bindings ----------------------------------------------------------------------------

    def _import(self, node: ast.Import, scope: Scope, parents: Parents) -> None:
        for alias in node.names:
            parts = tuple(alias.name.split("."))
            # `import a.b` binds a, `import a.b as c` binds what a.b is.
            bound = parts if alias.asname else parts[:1]
            scope.bind(alias.asname or parts[0], Imported(0, bound, "", node.lineno))

    def _import_from(self, node: ast.ImportFrom, scope: Scope, parents: Parents) -> None:
        module = tuple(node.module.split(".")) if node.module else ()
        for alias in node.names:
            found = Imported(node.level, module, alias.name, node.lineno)
            if alias.name == "*":
                scope.stars.append(found)
            else:
                scope.bind(alias.asname or alias.name, found)

    def _elsewhere(self, node: ast.Global | ast.Nonlocal, scope: Scope, parents: Parents) -> None:
        for name in node.names:
            if isinstance(node, ast.Global):
                scope.elsewhere[name] = self._module
            elif scope.parent is not None and (found := scope.parent.find(name)):
                scope.elsewhere[name] = found[0]

    def _assign(self, node: ast.Assign, scope: Scope, parents: Parents) -> None:
        inside = Parents(node, parents)
        self._push([node.value], scope, inside)
        for target in node.targets:
            self._target(target, node.value, scope, inside)

    def _annotated(self, node: ast.AnnAssign, scope: Scope, parents: Parents) -> None:
        inside = Parents(node, parents)
        self._push([node.annotation, node.value], scope, inside)
        if node.value is not None:
            self._target(node.target, node.value, scope, inside)
        elif isinstance(node.target, ast.Name):
            scope.declared.add(node.target.id)

    def _walrus(self, node: ast.NamedExpr, scope: Scope, parents: Parents) -> None:
        self._push([node.value], scope, Parents(node, parents))
        holder = scope.enclosing("function", "module", "class") or scope
        holder.bind(node.target.id, Alias(node.value, scope, node.lineno))

    def _target(self, target: ast.expr, value: ast.expr, scope: Scope, parents: Parents) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, Alias(value, scope, target.lineno))
        elif (
            isinstance(target, ast.Tuple | ast.List)
            and isinstance(value, ast.Tuple | ast.List)
            and len(target.elts) == len(value.elts)
            and not any(isinstance(e, ast.Starred) for e in (*target.elts, *value.elts))
        ):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._target(one, its, scope, parents)
        elif isinstance(target, ast.Attribute):
            self._written(target, scope, Alias(value, scope, target.lineno))
            self._chain(target, scope, parents)
        else:
            self._push([target], scope, parents)

    def _written(self, target: ast.Attribute, scope: Scope, binding: Binding) -> None:
        """Note what is assigned to an attribute of self."""
        if isinstance(target.value, ast.Name) and (found := scope.find(target.value.id)):
            for owner in found[1]:
                if isinstance(owner, Instance):
                    owner.of.attributes.setdefault(target.attr, []).append(binding)

    def _named(
        self,
        node: ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.MatchMapping,
        scope: Scope,
        parents: Parents,
    ) -> None:
        name = node.rest if isinstance(node, ast.MatchMapping) else node.name
        if name is not None:
            scope.bind(name, Opaque(node.lineno))
        self._push(ast.iter_child_nodes(node), scope, Parents(node, parents))

    # -- uses --------------------------------------------------------------------------------

    def _name(self, node: ast.Name, scope: Scope, parents: Parents) -> None:
        if isinstance(node.ctx, ast.Store):
            scope.bind(node.id, Opaque(node.lineno))
        elif isinstance(node.ctx, ast.Load):
            self._uses.append(Use(node, scope, parents, node.id))
        else:
            self._deleted.add(node.id)

    def _attribute(self, node: ast.Attribute, scope: Scope, parents: Parents) -> None:
        if isinstance(node.ctx, ast.Store):
            self._written(node, scope, Opaque(node.lineno))
        self._chain(node, scope, parents)

    def _chain(self, node: ast.Attribute, scope: Scope, parents: Parents) -> None:
        around = parents
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parents = Parents(inner, parents)
            inner = inner.value
        if isinstance(inner, ast.Name):
            self._uses.append(Use(node, scope, around, inner.id))
        else:
            self._uses.append(Use(node, scope, around))
            self._push([inner], scope, parents)

    def _call(self, node: ast.Call, scope: Scope, parents: Parents) -> None:
        inside = Parents(node, parents)
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                self._uses.append(Use(value, scope, inside))
        self._push([node.func, *node.args, *node.keywords], scope, inside)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those in it, in no order, but for constants; faster than ``ast.walk``."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += _children(each)


def _is_for_all(owner: ast.expr, scope: Scope) -> bool:
    """Whether an expression is a class or a module, as far as its name tells, and not an object."""
    if isinstance(owner, ast.Call):
        return last_name(owner.func) == "type"
    name = last_name(owner)
    if name == "__class__" or name[:1].isupper() or name.endswith(("cls", "class", "klass")):
        return True
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    bound = scope.find(owner.id) if isinstance(owner, ast.Name) else None
    return bound is not None and all(isinstance(each, Imported) for each in bound[1])


def last_name(node: ast.expr) -> str:
    """The name, or the last of a chain of attributes; empty for what is neither."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _children(node: ast.AST) -> list[ast.AST]:
    """The nodes directly in one, without those that have nothing in them, which are most."""
    found: list[ast.AST] = []
    for name in _INNER[node.__class__]:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [each for each in value if each.__class__ not in _EMPTY]
        elif value is not None and value.__class__ not in _EMPTY:
            found.append(value)
    return found


def _defaults(given: ast.arguments) -> list[ast.expr | None]:
    return [*given.defaults, *given.kw_defaults]


def _annotations(given: ast.arguments) -> list[ast.expr | None]:
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [each.annotation for each in every if each is not None]
