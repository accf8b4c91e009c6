"""Say what the names in one file stand for, by LibCST's scopes, and what replaces a use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import libcst as cst
from libcst.metadata import (
    Assignment,
    BaseAssignment,
    BuiltinAssignment,
    CodeRange,
    ExpressionContext,
    GlobalScope,
    ImportAssignment,
    Scope,
)

from megapg.migrate.facts import HERE, Class, Where
from megapg.migrate.project import PARALLEL_STATE
from megapg.migrate.uses import Kind, Span
from megapg.upstream.expressions import replacement
from megapg.upstream.helpers import CORE, HELPERS_OF_CORE, Helper
from megapg.upstream.mapping import OPTIONAL_FIELDS, RANK_GLOBALS, Argument, Refusal, Replacement

_READING = (ExpressionContext.LOAD, ExpressionContext.DEL)
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Bindings:
    """The meanings of a name.

    Attributes:
        names: dotted names after all imports; those of this file begin with ``HERE``.
        imported: dotted names as this file imports them.
        other: True if the name may also be bound to something without a dotted name.
    """

    names: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    other: bool = False

    @property
    def only(self) -> str:
        """The only name; empty if there are several meanings, or none."""
        return next(iter(self.names)) if len(self.names) == 1 and not self.other else ""

    @property
    def member(self) -> str | None:
        """The name in ``parallel_state``, empty for the module itself; None for anything else."""
        for each in self.names:
            if each == PARALLEL_STATE or each.startswith(PARALLEL_STATE + "."):
                return each[len(PARALLEL_STATE) + 1 :].partition(".")[0]
        return None

    @property
    def helper(self) -> Helper | None:
        """The function of Megatron-core that answers with the globals; None for anything else."""
        return HELPERS_OF_CORE.get(self.only.removeprefix(CORE))


class Names:
    """The names of one file.

    Args:
        module: the file.
        scopes: of its nodes, as ``ScopeProvider`` gives them.
        contexts: of its nodes, as ``ExpressionContextProvider`` gives them.
        stands_for: returns what an imported dotted name stands for.

    Attributes:
        loads: how often each name is read, deleted or named in a string.
        repeated: names at the top level that are bound several times.
    """

    def __init__(
        self,
        module: cst.Module,
        scopes: Mapping[cst.CSTNode, Scope | None],
        contexts: Mapping[cst.CSTNode, ExpressionContext | None],
        stands_for: Callable[[str], str],
    ) -> None:
        self._scopes, self._stands_for = scopes, stands_for
        self._aliases: dict[cst.CSTNode, str] = {}  # targets of assignments -> dotted names
        self._to_none: set[cst.CSTNode] = set()  # targets of ``name = None``
        self._stars: list[str] = []  # modules of ``from module import *``
        self._captured: set[str] = set()  # by patterns of ``match``, which LibCST leaves out
        found = Counter[str]()
        names = self

        class Reader(cst.CSTVisitor):
            def visit_Import(self, node: cst.Import) -> bool:
                return False

            def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
                if isinstance(node.names, cst.ImportStar):
                    module = dotted_name(node.module) if node.module else ""
                    names._stars.append("." * len(node.relative) + module)
                return False

            def visit_Name(self, node: cst.Name) -> None:
                found[node.value] += contexts.get(node) in _READING

            def visit_SimpleString(self, node: cst.SimpleString) -> None:
                found.update(set(_WORD.findall(node.value)))

            def visit_Expr(self, node: cst.Expr) -> None:
                if isinstance(node.value, cst.SimpleString):  # a docstring
                    found.subtract(set(_WORD.findall(node.value.value)))

            def visit_MatchAs(self, node: cst.MatchAs) -> None:
                names._captured |= {node.name.value} if node.name else set()

            def visit_MatchStar(self, node: cst.MatchStar) -> None:
                names._captured |= {node.name.value} if node.name else set()

            def visit_MatchMapping(self, node: cst.MatchMapping) -> None:
                names._captured |= {node.rest.value} if node.rest else set()

            def visit_Assign(self, node: cst.Assign) -> None:
                names._read(node)

        module.visit(Reader())
        self.loads: Mapping[str, int] = found
        times = Counter(each.name for each in _assignments(scopes.get(module)))
        self.repeated: set[str] = {name for name, number in times.items() if number > 1}

    def _read(self, node: cst.Assign) -> None:
        """Note ``name = None``, and variables for the globals' module or a getter."""
        target = node.targets[0].target
        if len(node.targets) > 1 or not isinstance(target, cst.Name):
            return
        if isinstance(node.value, cst.Name) and node.value.value == "None":
            self._to_none.add(target)
        bound = self.of(node.value)
        if bound.member is not None and bound.only:
            self._aliases[target] = bound.only

    def of(self, node: cst.BaseExpression) -> Bindings:
        """Return what a name, or an attribute of a name, stands for."""
        dotted, scope = dotted_name(node), self._scopes.get(node)
        if not dotted or scope is None:
            return Bindings()
        root, dot, rest = dotted.partition(".")
        names: set[str] = set()
        imported: set[str] = set()
        other = root in self._captured
        for each in scope[root]:
            if isinstance(each, ImportAssignment):
                imported |= {name.name for name in each.get_qualified_names_for(dotted)}
            elif isinstance(each, BuiltinAssignment):
                names.add(f"builtins.{dotted}")
            elif not isinstance(each, Assignment):
                other = True
            elif each.node in self._aliases:
                names.add(self._stands_for(self._aliases[each.node] + dot + rest))
            elif isinstance(each.scope, GlobalScope) and not isinstance(each.node, cst.Name):
                names.add(f"{HERE}.{dotted}")  # a function or a class
            elif each.node not in self._to_none:
                other = True
        names |= {self._stands_for(name) for name in imported}
        if not scope[root] and not other:
            found = {self._stands_for(f"{module}.{dotted}") for module in self._stars}
            names |= {each for each in found if each.startswith(PARALLEL_STATE)}
        return Bindings(frozenset(names), frozenset(imported), other)

    def member_named(self, dotted: str) -> str | None:
        """Return the name in ``parallel_state`` that the text of a string stands for."""
        return Bindings(frozenset({self._stands_for(dotted)})).member

    def bound_in(self, node: cst.CSTNode) -> frozenset[str]:
        """Return the names that the scope of a node binds, such as a function's parameters."""
        return frozenset(each.name for each in _assignments(self._scopes.get(node)))


def _assignments(scope: Scope | None) -> Iterator[BaseAssignment]:
    return iter(scope.assignments) if scope is not None else iter(())


def dotted_name(node: cst.CSTNode) -> str:
    """Return the source of a name or of attributes of a name; empty for other expressions."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        inner = dotted_name(node.value)
        return f"{inner}.{node.attr.value}" if inner else ""
    return ""


def nodes(node: cst.CSTNode, without: tuple[type[cst.CSTNode], ...] = ()) -> Iterator[cst.CSTNode]:
    """Yield a node and all nodes in it, from the outside in.

    Args:
        node: the outermost.
        without: types of nodes that are passed over, with all in them.
    """
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, without):
            yield each
            waiting.extend(reversed(each.children))


def compared_to_none(test: cst.CSTNode) -> tuple[frozenset[str], frozenset[str]]:
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
            return compared_to_none(left)[0] | compared_to_none(right)[0], nothing
    return nothing, nothing


def span_of(found: CodeRange) -> Span:
    """Return a position of LibCST, whose columns count from 0, as a span."""
    start, end = found.start, found.end
    return Span(start.line, start.column + 1, end.line, end.column + 1)


def called_name(node: cst.Call, bound: Bindings, classes: Sequence[Class]) -> str:
    """Return the dotted name of a called function; empty if there are several.

    Args:
        node: the call.
        bound: what its function is bound to.
        classes: the classes around it, from the outside in.
    """
    match node.func:
        case cst.Attribute(
            value=cst.Call(func=cst.Name(value="super"), args=arguments),
            attr=cst.Name(value="__init__"),
        ):
            own = classes[-1].name.rpartition(".")[2] if classes else ""
            of_own = not arguments or dotted_name(arguments[0].value) == own
            return "super().__init__" if of_own else ""
    return bound.only


def is_docstring(node: cst.CSTNode) -> bool:
    """True if a statement begins with a string."""
    match node:
        case cst.SimpleStatementLine(
            body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()), *_]
        ):
            return True
    return False


@dataclass(frozen=True)
class Asked:
    """A use to find a replacement for."""

    kind: Kind
    bound: Bindings  # of the name that it uses
    text: str
    versions: Sequence[int]  # minor numbers of Megatron-core that may run the code
    where: Where


def answer_to(asked: Asked, arguments: Sequence[Argument]) -> Replacement | Refusal:
    """Return the replacement of a use; arguments are those of a call."""
    name = asked.bound.member or ""
    if asked.kind is Kind.STRING:
        return Refusal("in-a-string")
    if asked.kind is Kind.ASSIGNED:
        return Refusal("assigned")
    if not asked.bound.only:
        return Refusal("assigned", "the name has several meanings")
    if asked.kind is Kind.MODULE:
        return Refusal("as-value")
    if asked.kind is Kind.VALUE:
        of_name = replacement(name, (), asked.versions)
        is_about_name = isinstance(of_name, Refusal) and of_name.reason != "arguments"
        return of_name if is_about_name else Refusal("as-value")
    if asked.where.in_use:
        return Refusal("arguments", "it is in the arguments of another use")
    if "#" in asked.text and "\n" in asked.text:
        return Refusal("arguments", "it contains a comment")
    answer = replacement(name, arguments, asked.versions)
    field = RANK_GLOBALS.get(name, "")
    is_read = isinstance(answer, Replacement) and field and asked.where.as_list
    if is_read and field not in OPTIONAL_FIELDS:  # None would fail there as well
        assert isinstance(answer, Replacement)
        return replace(answer, caution="")
    return answer
