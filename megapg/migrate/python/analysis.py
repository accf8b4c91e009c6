"""One pass over a syntax tree: its scopes with their bindings, and every place that reads or writes
a name or a chain of attributes.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import (
    Alias,
    Binding,
    Defined,
    FunctionNode,
    Imported,
    Instance,
    Opaque,
    Parents,
    Scope,
    Use,
    children_of,
)

_Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True)
class Analysis:
    """What is in one module."""

    module: Scope  # its scope, with those in it
    uses: list[Use]  # in the order of the source
    deleted: set[str]  # names in ``del`` statements, which are no uses

    @cached_property
    def calls(self) -> Mapping[Scope | None, Sequence[tuple[Use, ast.Call]]]:
        """What is called in it by a name, or a chain, by the functions that do."""
        found: dict[Scope | None, list[tuple[Use, ast.Call]]] = defaultdict(list)
        for use in self.uses:
            parent = use.parents.node
            if isinstance(parent, ast.Call) and parent.func is use.node:
                found[use.scope.unit].append((use, parent))
        return dict(found)


@kept
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
            elif children := children_of(node):
                self._push(children, scope, Parents(node, parents))
        self._uses.sort(key=lambda use: (use.node.lineno, use.node.col_offset))
        return Analysis(self._module, self._uses, self._deleted)

    def _push(self, nodes: Iterable[ast.AST | None], scope: Scope, parents: Parents) -> None:
        # The first is handled first, so that declarations come before what they are about.
        entries = [(node, scope, parents) for node in nodes if node is not None]
        entries.reverse()
        self._stack += entries

    # -- scopes ------------------------------------------------------------------------------

    def _function(self, node: FunctionNode, scope: Scope, parents: Parents) -> None:
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
        self._push([each.annotation for each in _every(node.args)], scope, inside)
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
        for each in _every(given):
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


def _defaults(given: ast.arguments) -> list[ast.expr | None]:
    return [*given.defaults, *given.kw_defaults]


def _every(given: ast.arguments) -> list[ast.arg]:
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [each for each in every if each is not None]
