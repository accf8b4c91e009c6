"""What each name is bound to, scope by scope, as Python's own rules have it; nothing is run.

:mod:`megapg.migrate.python.analysis` finds them. What names stand for is said elsewhere, in
:mod:`megapg.migrate.find.meaning`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
"""A function that has a name."""

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


@dataclass(eq=False, slots=True)
class Imported:
    """Bound by an import: of a module, or of a module's member."""

    level: int  # dots in front
    module: tuple[str, ...]  # parts of the module's name
    member: str  # the name taken from it; empty where it is the module itself
    line: int  # of the statement


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

    def defined(self, name: str) -> list[Scope]:
        """The functions and classes that are defined in it by a name."""
        return [each.scope for each in self.bindings.get(name, ()) if isinstance(each, Defined)]

    def enclosing(self, *kinds: str) -> Scope | None:
        """The innermost scope of one of these kinds, from this one outwards."""
        scope: Scope | None = self
        while scope is not None and scope.kind not in kinds:
            scope = scope.parent
        return scope

    @cached_property
    def unit(self) -> Scope | None:
        """The function whose parameter a use in it can see: the outermost around it, up to a class,
        or to one that becomes a method of a class.
        """
        found: Scope | None = None
        each: Scope | None = self
        while each is not None and each.kind != "class":
            if each.kind == "function":
                found = each
                if each.given_to:
                    break
            each = each.parent
        return found

    @cached_property
    def instances(self) -> frozenset[str]:
        """The names that are bound to an instance first of all."""
        return frozenset(n for n, bound in self.bindings.items() if isinstance(bound[0], Instance))

    @cached_property
    def order(self) -> dict[str, int]:
        """The names in it, numbered as they are bound."""
        return {name: at for at, name in enumerate(self.bindings)}

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
        given = [
            (owner, attribute)
            for owner, attribute, names in outer._assigned
            if self.name in names and _is_for_all(owner, outer)
        ]
        attributes = {attribute for _, attribute in given}
        restored = {
            (ast.unparse(owner), attribute)
            for owner, attribute, names in outer._assigned
            if attribute in attributes and self.name not in names
        }
        return [each for each in given if (ast.unparse(each[0]), each[1]) not in restored]

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
    """A place that names something: a name, a chain of attributes, or a string passed to a call."""

    node: ast.expr  # the expression
    scope: Scope  # in which it is
    parents: Parents  # the nodes around it
    root: str = ""  # the name with which it begins; empty where that is something else


def scopes(scope: Scope) -> Iterator[Scope]:
    """A scope, and those of the classes and functions in it."""
    yield scope
    for bindings in scope.bindings.values():
        for each in bindings:
            if isinstance(each, Defined):
                yield from scopes(each.scope)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and those in it, in no order, but for constants; faster than ``ast.walk``."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += children_of(each)


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


def is_named(node: ast.AST, name: str) -> bool:
    """Whether a node is a variable of that name."""
    return isinstance(node, ast.Name) and node.id == name


def bound_name(alias: ast.alias) -> str:
    """The name that an import binds, or one of its parts."""
    return alias.asname or alias.name.partition(".")[0]


def children_of(node: ast.AST) -> list[ast.AST]:
    """The nodes directly in one, without those that have nothing in them, which are most."""
    found: list[ast.AST] = []
    for name in _INNER[node.__class__]:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [each for each in value if each.__class__ not in _EMPTY]
        elif value is not None and value.__class__ not in _EMPTY:
            found.append(value)
    return found
