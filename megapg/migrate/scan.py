"""Find the uses of the globals in one file, and the functions, classes and calls around them.

LibCST says what a name is bound to in its scope; the project says what an import leads to.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import libcst as cst
from libcst.metadata import (
    ExpressionContext,
    ExpressionContextProvider,
    MetadataWrapper,
    PositionProvider,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

from megapg.migrate.facts import HERE, Call, Class, Facts, Found, Function, Parameter, Where
from megapg.migrate.project import PARALLEL_STATE
from megapg.migrate.uses import Kind, Span, Use
from megapg.upstream.expressions import known, replacement
from megapg.upstream.mapping import Argument, Refusal, Replacement

_KEEP = re.compile(r"#\s*megapg:\s*keep\b")
_GETTER_IN_A_STRING = re.compile(r"megatron\.core\.(?:parallel_state|mpu)\.(\w+)\Z")
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
    scanner = _Scanner(module, path, name, stands_for, versions)
    MetadataWrapper(module, unsafe_skip_copy=True).visit(scanner)
    return scanner.facts


def dotted_name(node: cst.BaseExpression) -> str:
    """Return the source of a name or of attributes of a name; empty for other expressions."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        inner = dotted_name(node.value)
        return f"{inner}.{node.attr.value}" if inner else ""
    return ""


class _Scanner(cst.CSTVisitor):
    """Visits a file once, in the order of its text, and collects its facts."""

    METADATA_DEPENDENCIES = (ScopeProvider, PositionProvider, ExpressionContextProvider)

    def __init__(
        self,
        module: cst.Module,
        path: Path,
        name: str,
        stands_for: Callable[[str], str],
        versions: Sequence[int],
    ) -> None:
        super().__init__()
        self.facts = Facts(path)
        self._module, self._name, self._versions = module, name, versions
        self._lines = module.code.splitlines()
        self._stands_for = stands_for
        self._aliases: dict[str, str] = {}  # local name, qualified by LibCST -> dotted name
        self._around: list[Function | Class] = []
        self._where = Where()

    # -- names -------------------------------------------------------------------------------------

    def _meanings(self, node: cst.BaseExpression) -> set[str]:
        """Return the dotted names that a name or attribute may stand for.

        A name of this file begins with ``HERE``. A local variable has no meaning.
        """
        scope = self.get_metadata(ScopeProvider, node, None)
        found: set[str] = set()
        if not isinstance(scope, Scope) or not dotted_name(node):
            return found
        for each in scope.get_qualified_names_for(node):
            if each.source is QualifiedNameSource.IMPORT:
                found.add(self._stands_for(each.name))
            elif each.source is QualifiedNameSource.LOCAL:
                found |= self._local(each.name)
        return found

    def _local(self, name: str) -> set[str]:
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            alias = self._aliases.get(".".join(parts[:end]))
            if alias is not None:
                return {self._stands_for(".".join([alias, *parts[end:]]))}
        return set() if "<locals>" in name else {f"{HERE}.{name}"}

    def _member(self, node: cst.BaseExpression) -> str | None:
        """Return the name in ``parallel_state`` that an expression stands for; empty for the module
        itself, None for anything else.
        """
        for each in self._meanings(node):
            if each == PARALLEL_STATE or each.startswith(PARALLEL_STATE + "."):
                return each[len(PARALLEL_STATE) + 1 :].partition(".")[0]
        return None

    def _is_ambiguous(self, node: cst.BaseExpression) -> bool:
        """True if the name may also be an import of something else."""
        meanings = {each for each in self._meanings(node) if not each.startswith(HERE)}
        return len(meanings) > 1

    def _span(self, node: cst.CSTNode) -> Span:
        found = self.get_metadata(PositionProvider, node)
        start, end = found.start, found.end
        return Span(start.line, start.column + 1, end.line, end.column + 1)

    @property
    def _function(self) -> Function | None:
        return next((e for e in reversed(self._around) if isinstance(e, Function)), None)

    def _function_name(self) -> str:
        function = self._function
        return function.name if function else ""

    # -- definitions -------------------------------------------------------------------------------

    def visit_Module(self, node: cst.Module) -> None:
        """Note aliases of the globals, and functions and classes whose name has other meanings."""
        scope = self.get_metadata(ScopeProvider, node, None)
        if isinstance(scope, Scope):
            names = Counter(each.name for each in scope.assignments)
            self.facts.repeated |= {name for name, times in names.items() if times > 1}
        scanner = self

        class Aliases(cst.CSTVisitor):
            def visit_Assign(self, node: cst.Assign) -> None:
                target = node.targets[0].target
                if len(node.targets) == 1 and isinstance(target, cst.Name):
                    scope = scanner.get_metadata(ScopeProvider, target, None)
                    if isinstance(scope, Scope) and scanner._member(node.value) is not None:
                        meaning = next(iter(scanner._meanings(node.value)))
                        for name in scope.get_qualified_names_for(target):
                            scanner._aliases[name.name] = meaning

        node.visit(Aliases())

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:
        self._visit_all([*node.decorators, *node.bases, *node.keywords], inline=True)
        name = self._qualified(node.name.value)
        bases = tuple(self._one_meaning(base.value) for base in node.bases)
        found = Class(
            self.facts.path, name, bases, self._decorators(node), has_keywords=bool(node.keywords)
        )
        self.facts.classes[name] = found
        self._around.append(found)
        with self._in(Where(inline=True)):
            node.body.visit(self)
        self._around.pop()
        return False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        parameters = [*node.params.posonly_params, *node.params.params, *node.params.kwonly_params]
        outside = [e for p in parameters for e in (p.annotation, p.default) if e is not None]
        self._visit_all([*node.decorators, *outside], inline=True)
        if node.returns is not None:
            self._visit_all([node.returns], inline=True)
        function = self._described(node, parameters)
        around = self._around[-1] if self._around else None
        if isinstance(around, Class):
            around.methods.add(function.last_name)
        if function.name in self.facts.functions:
            self.facts.repeated.add(function.name)
        self.facts.functions[function.name] = function
        self._around.append(function)
        for statement in node.body.body:
            # The test of an ``if`` runs for certain, its branches do not: see ``_branch()``.
            certain = isinstance(statement, cst.SimpleStatementLine | cst.If)
            with self._in(Where(line=self._span(statement).line if certain else 0)):
                statement.visit(self)
        self._around.pop()
        return False

    def _described(self, node: cst.FunctionDef, parameters: Sequence[cst.Param]) -> Function:
        around = self._around[-1] if self._around else None
        outer = self._function
        names = {each.value for each in _nodes(node) if isinstance(each, cst.Name)}
        return Function(
            path=self.facts.path,
            name=self._qualified(node.name.value),
            span=self._span(node),
            parameters=tuple(map(self._parameter, parameters)),
            any_keyword=node.params.star_kwarg is not None,
            decorators=self._decorators(node),
            of_class=around.name if isinstance(around, Class) else "",
            outer=outer.name if outer is not None else "",
            names=frozenset(names),
        )

    def _parameter(self, node: cst.Param) -> Parameter:
        code = self._module.code_for_node
        return Parameter(
            node.name.value,
            annotation=code(node.annotation.annotation) if node.annotation else "",
            default=code(node.default) if node.default else "",
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
        meanings = self._meanings(node)
        return meanings.pop() if len(meanings) == 1 else dotted_name(node)

    # -- surroundings ------------------------------------------------------------------------------

    @contextmanager
    def _in(self, where: Where) -> Iterator[None]:
        before, self._where = self._where, where
        yield
        self._where = before

    def _visit_all(self, nodes: Sequence[cst.CSTNode], inline: bool) -> None:
        with self._in(replace(self._where, inline=inline or self._where.inline)):
            for node in nodes:
                node.visit(self)

    def visit_Lambda(self, node: cst.Lambda) -> bool:
        self._visit_all([node.params, node.body], inline=True)
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
        is_none, is_not_none = _compared_to_none(test)
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
        function = self._function
        member = self._member(node.func)
        if member:
            self._add(node, Kind.CALL, member, node.func, node.args)
            if function is not None:
                function.makes_groups |= member.startswith(_MAKES_GROUPS)
                function.fakes_ranks |= member.startswith("set_")
            for argument in node.args:
                argument.value.visit(self)
            return False
        callee = self._callee(node.func)
        if len(callee) != 1:
            return True
        keywords = frozenset(arg.keyword.value for arg in node.args if arg.keyword)
        span, caller = self._span(node), self._function_name()
        self.facts.calls.append(Call(span, caller, callee.pop(), keywords, self._where))
        for argument in node.args:
            argument.value.visit(self)
        return False

    def _callee(self, func: cst.BaseExpression) -> set[str]:
        match func:
            case cst.Attribute(
                value=cst.Call(func=cst.Name(value="super")), attr=cst.Name(value="__init__")
            ):
                return {"super().__init__"}
        return self._meanings(func)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        context = self.get_metadata(ExpressionContextProvider, node, None)
        function = self._function
        if context is ExpressionContext.STORE and function is not None and self._around:
            is_self = isinstance(node.value, cst.Name) and node.value.value == function.self_name
            if is_self and function.of_class in self.facts.classes:
                self.facts.classes[function.of_class].attributes.add(node.attr.value)
        if not dotted_name(node):
            return True
        self._look_at(node, context)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        context = self.get_metadata(ExpressionContextProvider, node, None)
        around = self._around[-1] if self._around else None
        if context is ExpressionContext.STORE and isinstance(around, Class):
            around.attributes.add(node.value)
        self._look_at(node, context)

    def _look_at(self, node: cst.Name | cst.Attribute, context: ExpressionContext | None) -> None:
        """Add a use that is no call."""
        if context is None:
            return
        member = self._member(node)
        if member is None:
            if context is ExpressionContext.LOAD or isinstance(node, cst.Attribute):
                self.facts.values |= self._meanings(node)
        elif context is not ExpressionContext.LOAD:
            if isinstance(node, cst.Attribute):
                self._add(node, Kind.ASSIGNED, member, node)
        elif not member:
            self._add(node, Kind.MODULE, "", node)
        elif member.startswith("_"):
            self._add(node, Kind.PRIVATE, member, node)
        else:
            self._add(node, Kind.VALUE, member, node)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        text = node.evaluated_value
        getter = _GETTER_IN_A_STRING.match(text) if isinstance(text, str) else None
        if getter and known(getter[1]):
            self._add(node, Kind.STRING, getter[1], node)

    def _add(
        self,
        node: cst.BaseExpression,
        kind: Kind,
        name: str,
        named_by: cst.BaseExpression,
        arguments: Sequence[cst.Arg] = (),
    ) -> None:
        span, text = self._span(node), self._module.code_for_node(node).strip()
        lines = self._lines[span.line - 1 : span.end_line]
        use = Use(
            file=self._name,
            span=span,
            kind=kind,
            name=name,
            text=text,
            function=self._function_name(),
            answer=self._answer(kind, name, named_by, arguments, text),
            keep=any(map(_KEEP.search, lines)),
        )
        root = (dotted_name(named_by) or "").partition(".")[0]
        self.facts.uses.append(Found(use, root, self._where))

    def _answer(
        self,
        kind: Kind,
        name: str,
        named_by: cst.BaseExpression,
        arguments: Sequence[cst.Arg],
        text: str,
    ) -> Replacement | Refusal:
        if kind is Kind.STRING:
            return Refusal("in-a-string")
        if kind is Kind.ASSIGNED:
            return Refusal("assigned")
        if self._is_ambiguous(named_by):
            return Refusal("assigned", "the name has several meanings")
        if kind is Kind.MODULE:
            return Refusal("as-value")
        if kind is Kind.VALUE:
            of_name = replacement(name, (), self._versions)
            own = isinstance(of_name, Refusal) and of_name.reason not in ("arguments",)
            return of_name if own else Refusal("as-value")
        if "#" in text and "\n" in text:
            return Refusal("arguments", "it contains a comment")
        if any(self._has_a_use(argument.value) for argument in arguments):
            return Refusal("arguments", "an argument reads the globals, too")
        code = self._module.code_for_node
        given = [
            Argument(
                argument.star + code(argument.value),
                argument.keyword.value if argument.keyword else "",
            )
            for argument in arguments
        ]
        return replacement(name, given, self._versions)

    def _has_a_use(self, node: cst.BaseExpression) -> bool:
        return any(
            self._member(each) is not None
            for each in _nodes(node)
            if isinstance(each, cst.Name | cst.Attribute)
        )


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _compared_to_none(test: cst.CSTNode) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that are None if a test holds, and those that are None if it does not."""
    nothing: frozenset[str] = frozenset()
    match test:
        case cst.Comparison(
            left=left,
            comparisons=[cst.ComparisonTarget(operator=operator, comparator=cst.Name("None"))],
        ):
            name = frozenset({dotted_name(left)} - {""})
            if isinstance(operator, cst.Is):
                return name, nothing
            if isinstance(operator, cst.IsNot):
                return nothing, name
        case cst.UnaryOperation(operator=cst.Not(), expression=expression):
            return frozenset({dotted_name(expression)} - {""}), nothing
        case cst.Name() | cst.Attribute():
            return nothing, frozenset({dotted_name(test)} - {""})
        case cst.BooleanOperation(left=left, operator=cst.And(), right=right):
            return _compared_to_none(left)[0] | _compared_to_none(right)[0], nothing
    return nothing, nothing
