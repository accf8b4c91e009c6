"""Find the uses of the globals in one file, and the functions, classes and calls around them.

LibCST finds the bindings of a name in its scope; the project follows imports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import libcst as cst
from libcst.metadata import (
    CodeRange,
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    PositionProvider,
    ScopeProvider,
)

from megapg.migrate.bindings import (
    Asked,
    Bindings,
    Names,
    answer_to,
    called_name,
    compared_to_none,
    dotted_name,
    is_docstring,
    nodes,
    span_of,
)
from megapg.migrate.facts import Call, Class, Facts, FoundUse, Function, Parameter, Where
from megapg.migrate.project import PARALLEL_STATE
from megapg.migrate.uses import Kind, Span, Use
from megapg.upstream.expressions import known
from megapg.upstream.mapping import Argument, Refusal, Replacement

STATEMENTS = (cst.SimpleStatementLine, cst.If, cst.For, cst.With)
"""Statements before which the rewrite can put another one."""

_KEEP = re.compile(r"#\s*megapg:\s*keep\b")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")
# Functions that call these see their own parameters and variables.
_LOOKING_AT_ITSELF = frozenset({"locals", "vars", "dir", "eval", "exec"})
_READING_LISTS = frozenset({"len", "list", "max", "min", "set", "sorted", "tuple"})
_MAKES_GROUPS = ("initialize_model_parallel", "destroy_model_parallel")


def scan(
    text: bytes, path: Path, name: str, stands_for: Callable[[str], str], versions: Sequence[int]
) -> Facts:
    """Return the facts about a file.

    Args:
        text: its bytes.
        path: of the file.
        name: of the file in reports.
        stands_for: returns what an imported dotted name stands for.
        versions: minor numbers of Megatron-core that may run the code.

    Raises:
        libcst.ParserSyntaxError: the file is no valid Python.
    """
    module = cst.parse_module(text)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    contexts = wrapper.resolve(ExpressionContextProvider)
    names = Names(module, wrapper.resolve(ScopeProvider), contexts, stands_for)
    positions = wrapper.resolve(PositionProvider)
    facts = Facts(path, repeated=names.repeated, loads=names.loads)
    module.visit(_Scanner(module, facts, name, names, contexts, positions, versions))
    return facts


class _Scanner(cst.CSTVisitor):
    """Visits a file once, in the order of its text, and collects its facts."""

    def __init__(
        self,
        module: cst.Module,
        facts: Facts,
        name: str,
        names: Names,
        contexts: Mapping[cst.CSTNode, ExpressionContext | None],
        positions: Mapping[cst.CSTNode, CodeRange],
        versions: Sequence[int],
    ) -> None:
        super().__init__()
        self.facts = facts
        self._module, self._name, self._versions = module, name, versions
        self._names, self._contexts, self._positions = names, contexts, positions
        self._lines = re.split(r"\r\n|\r|\n", module.code)
        self._around: list[Function | Class] = []
        self._where = Where()

    def _span(self, node: cst.CSTNode) -> Span:
        return span_of(self._positions[node])

    @property
    def _classes(self) -> list[Class]:
        return [each for each in self._around if isinstance(each, Class)]

    @property
    def _functions(self) -> list[Function]:
        return [each for each in self._around if isinstance(each, Function)]

    @property
    def _function(self) -> Function | None:
        return self._functions[-1] if self._functions else None

    # -- definitions -------------------------------------------------------------------------------

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        self._visit_inline([*node.decorators, *node.bases, *node.keywords])
        name = self._qualified(node.name.value)
        bases = tuple(self._one_meaning(base.value) for base in node.bases)
        found = Class(
            self.facts.path, name, bases, self._decorators(node), has_keywords=bool(node.keywords)
        )
        self.facts.classes[name] = found
        self._around.append(found)
        with self._in(Where(inline=True, in_class=True)):
            node.body.visit(self)
        self._around.pop()
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        parameters = [*node.params.posonly_params, *node.params.params, *node.params.kwonly_params]
        stars = [e for e in (node.params.star_arg, node.params.star_kwarg) if e]
        named = [*parameters, *(each for each in stars if isinstance(each, cst.Param))]
        outside = [e for p in named for e in (p.annotation, p.default) if e is not None]
        returns = [node.returns] if node.returns is not None else []
        self._visit_inline([*node.decorators, *outside, *returns])
        function = self._described(node, parameters)
        around = self._around[-1] if self._around else None
        if isinstance(around, Class):
            around.methods.add(function.last_name)
        if function.name in self.facts.functions:
            self.facts.repeated.add(function.name)
        self.facts.functions[function.name] = function
        self._around.append(function)
        for number, statement in enumerate(node.body.body):
            # The test of an ``if`` runs for certain, its branches do not: see ``_branch()``.
            certain = isinstance(statement, STATEMENTS) and (number or not is_docstring(statement))
            with self._in(Where(line=self._span(statement).line if certain else 0)):
                statement.visit(self)
        self._around.pop()
        return False

    def _described(self, node: cst.FunctionDef, parameters: Sequence[cst.Param]) -> Function:
        around = self._around[-1] if self._around else None
        outer = self._function
        return Function(
            path=self.facts.path,
            name=self._qualified(node.name.value),
            span=self._span(node),
            parameters=tuple(map(self._parameter, parameters)),
            any_keyword=node.params.star_kwarg is not None,
            decorators=self._decorators(node),
            of_class=around.name if isinstance(around, Class) else "",
            outer=outer.name if outer is not None else "",
            bound=self._names.bound_in(node.body),
        )

    def _parameter(self, node: cst.Param) -> Parameter:
        code = self._module.code_for_node
        return Parameter(
            node.name.value,
            annotation=code(node.annotation.annotation) if node.annotation else "",
        )

    def _qualified(self, name: str) -> str:
        return ".".join([*(each.name.rpartition(".")[2] for each in self._around), name])

    def _decorators(self, node: cst.FunctionDef | cst.ClassDef) -> tuple[str, ...]:
        found = []
        for each in node.decorators:
            call = each.decorator
            found.append(self._one_meaning(call.func if isinstance(call, cst.Call) else call))
        return tuple(found)

    def _one_meaning(self, node: cst.BaseExpression) -> str:
        """Return what an expression stands for; its source if LibCST does not know."""
        node = node.value if isinstance(node, cst.Subscript) else node
        return self._names.of(node).only or dotted_name(node)

    # -- surroundings ------------------------------------------------------------------------------

    @contextmanager
    def _in(self, where: Where) -> Iterator[None]:
        before, self._where = self._where, where
        yield
        self._where = before

    def _visit_inline(self, parts: Sequence[cst.CSTNode]) -> None:
        with self._in(replace(self._where, inline=True)):
            for part in parts:
                part.visit(self)

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        self._visit_inline([node.params, node.body])
        return False

    def visit_If(self, node: cst.If) -> bool:
        self._branch(node.test, node.body, node.orelse)
        return False

    def visit_IfExp(self, node: cst.IfExp) -> bool:
        self._branch(node.test, node.body, node.orelse)
        return False

    def visit_BooleanOperation(self, node: cst.BooleanOperation) -> bool:
        # ``x or y`` evaluates y if x is None; ``x is None or y`` if it is not.
        node.left.visit(self)
        none = frozenset({dotted_name(node.left)} - {""})
        none = none if isinstance(node.operator, cst.Or) else frozenset()
        with self._in(replace(self._where, none=self._where.none | none, line=0)):
            node.right.visit(self)
        return False

    def _branch(self, test: cst.CSTNode, body: cst.CSTNode, other: cst.CSTNode | None) -> None:
        test.visit(self)
        is_none, is_not_none = compared_to_none(test)
        with self._in(replace(self._where, none=self._where.none | is_none, line=0)):
            body.visit(self)
        if other is not None:
            with self._in(replace(self._where, none=self._where.none | is_not_none, line=0)):
                other.visit(self)

    def visit_FormattedString(self, node: cst.FormattedString) -> bool:
        quotes = self._where.quotes + node.start.lstrip("frFR")
        with self._in(replace(self._where, quotes=quotes)):
            for part in node.parts:
                part.visit(self)
        return False

    def visit_FormattedStringExpression(self, node: cst.FormattedStringExpression) -> bool:
        if node.equal is not None:  # the string shows the source of the expression
            with self._in(replace(self._where, quotes="'\"")):
                node.expression.visit(self)
            return False
        return True

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    # -- uses --------------------------------------------------------------------------------------

    def visit_Call(self, node: cst.Call) -> bool:
        function, bound = self._function, self._names.of(node.func)
        called = dotted_name(node.func)
        for each in self._functions:
            each.names.add(called.partition(".")[0])
            looks = called in _LOOKING_AT_ITSELF or called.endswith("save_hyperparameters")
            each.looks_at_itself |= looks
        for of in self._classes if called == "vars" else ():
            of.attributes.add("__dict__")
        if (helper := bound.helper) and helper.reads_globals(self._arguments(node.args)):
            answer = Refusal("inside-core", f"write {helper.instead}")
            self._add_use(node, Kind.CALL, node.func, called.rpartition(".")[2], answer)
        if bound.member:
            self._add(node, Kind.CALL, node.func, bound, node.args)
            if function is not None:
                function.makes_groups |= bound.member.startswith(_MAKES_GROUPS)
                function.fakes_ranks |= bound.member.startswith("set_")
        elif callee := called_name(node, bound, self._classes):
            keywords = frozenset(arg.keyword.value for arg in node.args if arg.keyword)
            passed = frozenset(dotted_name(arg.value).rpartition(".")[2] for arg in node.args)
            caller, span = function.name if function else "", self._span(node)
            self.facts.calls.append(Call(span, caller, callee, keywords, passed, self._where))
        else:
            node.func.visit(self)
        in_use = self._where.in_use or bool(bound.member)
        with self._in(replace(self._where, as_list=called in _READING_LISTS, in_use=in_use)):
            for argument in node.args:
                argument.value.visit(self)
        return False

    def visit_Element(self, node: cst.Element) -> bool:
        with self._in(replace(self._where, as_list=False)):
            node.value.visit(self)
        return False

    def visit_Subscript(self, node: cst.Subscript) -> bool:
        with self._in(replace(self._where, as_list=True)):
            node.value.visit(self)
        for each in node.slice:
            each.visit(self)
        return False

    def visit_Comparison(self, node: cst.Comparison) -> bool:
        with self._in(replace(self._where, as_list=False)):
            node.left.visit(self)
        for each in node.comparisons:
            is_in = isinstance(each.operator, cst.In | cst.NotIn)
            with self._in(replace(self._where, as_list=is_in)):
                each.comparator.visit(self)
        return False

    def visit_ExceptHandler(self, node: cst.ExceptHandler) -> None:
        names = set() if node.name is None else {dotted_name(node.name.name)}
        for function in self._functions:
            function.deleted |= names

    def visit_Del(self, node: cst.Del) -> None:
        names = {each.value for each in nodes(node.target) if isinstance(each, cst.Name)}
        for function in self._functions:
            function.deleted |= names

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        function = self._function
        for of in self._classes if node.attr.value == "__dict__" else ():
            of.attributes.add("__dict__")
        if self._contexts.get(node) is ExpressionContext.STORE and function is not None:
            is_self = isinstance(node.value, cst.Name) and node.value.value == function.self_name
            if is_self and function.of_class in self.facts.classes:
                self.facts.classes[function.of_class].attributes.add(node.attr.value)
        if not dotted_name(node):
            return True
        self._look_at(node)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        around = self._around[-1] if self._around else None
        if self._contexts.get(node) is ExpressionContext.STORE and isinstance(around, Class):
            around.attributes.add(node.value)
        self._look_at(node)

    def _look_at(self, node: cst.Name | cst.Attribute) -> None:
        """Add a use that is no call, or a value that is not called."""
        for function in self._functions:
            function.names.add(dotted_name(node).partition(".")[0])
        context, bound = self._contexts.get(node), self._names.of(node)
        if context is None or (
            isinstance(node, cst.Name) and context is not ExpressionContext.LOAD
        ):
            return
        if context is not ExpressionContext.LOAD:
            self.facts.replaced |= bound.imported
        if bound.member is None:
            self.facts.values |= bound.names
        elif context is not ExpressionContext.LOAD:
            self._add(node, Kind.ASSIGNED, node, bound)
        elif not bound.member:
            self._add(node, Kind.MODULE, node, bound)
        elif bound.member.startswith("_"):
            self._add(node, Kind.PRIVATE, node, bound)
        else:
            self._add(node, Kind.VALUE, node, bound)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        if isinstance(text, str) and _DOTTED.match(text):
            member = self._names.member_named(text)
            if member is not None and (known(member) or not member):
                self.facts.strings[self._span(node)] = text, member
            if member and text in (f"{PARALLEL_STATE}.{member}", f"megatron.core.mpu.{member}"):
                self._add(
                    node, Kind.STRING, node, Bindings(frozenset({f"{PARALLEL_STATE}.{member}"}))
                )

    def _add(
        self,
        node: cst.BaseExpression,
        kind: Kind,
        named_by: cst.BaseExpression,
        bound: Bindings,
        arguments: Sequence[cst.Arg] = (),
    ) -> None:
        text = self._module.code_for_node(node).strip()
        asked = Asked(kind, bound, text, self._versions, self._where)
        if any(self._has_a_use(each.value) for each in arguments):
            answer: Replacement | Refusal = Refusal("arguments", "an argument reads the globals")
        else:
            answer = answer_to(asked, self._arguments(arguments))
        self._add_use(node, kind, named_by, bound.member or "", answer)
        self.facts.reached |= bound.imported

    def _arguments(self, arguments: Sequence[cst.Arg]) -> list[Argument]:
        code = self._module.code_for_node
        return [
            Argument(each.star + code(each.value), each.keyword.value if each.keyword else "")
            for each in arguments
        ]

    def _add_use(
        self,
        node: cst.BaseExpression,
        kind: Kind,
        named_by: cst.BaseExpression,
        name: str,
        answer: Replacement | Refusal,
    ) -> None:
        span, function = self._span(node), self._function
        use = Use(
            file=self._name,
            span=span,
            kind=kind,
            name=name,
            text=self._module.code_for_node(node).strip(),
            function=function.name if function else "",
            answer=answer,
            keep=any(map(_KEEP.search, self._lines[span.line - 1 : span.end_line])),
        )
        root = dotted_name(named_by).partition(".")[0]
        self.facts.uses.append(FoundUse(use, root, self._where))

    def _has_a_use(self, node: cst.BaseExpression) -> bool:
        names = (each for each in nodes(node) if isinstance(each, cst.Name | cst.Attribute))
        return any(self._names.of(each).member is not None for each in names)
