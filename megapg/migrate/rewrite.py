"""Make the new text of a file from its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor, RemoveImportsVisitor
from libcst.metadata import MetadataWrapper, PositionProvider

from megapg.migrate.carriers import PARAMETER
from megapg.migrate.plan import FilePlan
from megapg.migrate.scan import dotted_name
from megapg.migrate.uses import Span

_NO_SPACE = cst.SimpleWhitespace("")
_SPACE = cst.SimpleWhitespace(" ")

_Item = TypeVar("_Item", cst.Arg, cst.Param)


def rewritten(data: bytes, plan: FilePlan, is_unneeded: Callable[[str, str], bool]) -> bytes:
    """Return the new bytes of a file.

    Args:
        data: its bytes.
        plan: its changes.
        is_unneeded: True if an import, by its absolute or relative dotted name and the name that it
            binds, may go once nothing in the file uses it.
    """
    module = cst.parse_module(data)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    new = wrapper.visit(_Rewriter(module, plan))
    context = CodemodContext()
    runtime = plan.runtime
    text = plan.text()
    if f"{plan.name}." in text:
        alias = plan.name if plan.name != runtime.name else None
        AddImportsVisitor.add_needed_import(context, runtime.module, runtime.member or None, alias)
    if f"{plan.getters}." in text and plan.getters != plan.name:
        alias = plan.getters if plan.getters != runtime.getters_name else None
        AddImportsVisitor.add_needed_import(
            context, runtime.getters_module, runtime.getters_member, alias
        )
    new = AddImportsVisitor(context).transform_module(new)
    context = CodemodContext()
    for origin, member, alias in _imports(module, is_unneeded):
        RemoveImportsVisitor.remove_unused_import(context, origin, member, alias)
    return RemoveImportsVisitor(context).transform_module(new).bytes


class _Rewriter(cst.CSTTransformer):
    """Applies the planned changes; a node is found by its position."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, module: cst.Module, plan: FilePlan) -> None:
        super().__init__()
        self._config, self._plan = module.config_for_parsing, plan

    def _span(self, node: cst.CSTNode) -> Span:
        found = self.get_metadata(PositionProvider, node)
        start, end = found.start, found.end
        return Span(start.line, start.column + 1, end.line, end.column + 1)

    def _expression(self, text: str) -> cst.BaseExpression:
        return cst.parse_expression(text, self._config)

    def _replaced(
        self, node: cst.Call | cst.Name | cst.Attribute, new: cst.BaseExpression
    ) -> cst.BaseExpression:
        text = self._plan.replaced.get(self._span(node))
        if text is None:
            return new
        return self._expression(text).with_changes(lpar=node.lpar, rpar=node.rpar)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        return self._replaced(original_node, updated_node)

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        return self._replaced(original_node, updated_node)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        passed = self._plan.passed.get(self._span(original_node))
        if passed is None:
            return self._replaced(original_node, updated_node)
        new = cst.Arg(
            self._expression(passed),
            keyword=cst.Name(PARAMETER),
            equal=cst.AssignEqual(_NO_SPACE, _NO_SPACE),
        )
        args = [_in_parentheses(arg) for arg in updated_node.args]
        return updated_node.with_changes(
            args=_appended(args, new, updated_node.whitespace_before_args, "whitespace_after_arg")
        )

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        span = self._span(original_node)
        new = updated_node
        if span in self._plan.parameters:
            new = new.with_changes(params=_with_parameter(new.params, new.whitespace_before_params))
        if statements := self._plan.statements.get(span):
            lines = [cst.parse_statement(text, self._config) for text in statements]
            new = new.with_changes(body=_with_statements(new.body, lines))
        return new


def _in_parentheses(arg: cst.Arg) -> cst.Arg:
    """Return an argument that others may follow: ``f(x for x in y)`` needs parentheses then."""
    if isinstance(arg.value, cst.GeneratorExp) and not arg.value.lpar:
        inner = arg.value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return arg.with_changes(value=inner)
    return arg


def _appended(
    items: Sequence[_Item], new: _Item, before: cst.BaseParenthesizableWhitespace, after: str
) -> list[_Item]:
    """Return arguments or parameters with one more at the end, laid out like the others.

    Args:
        items: the others.
        new: the new one.
        before: the white space before the first.
        after: the attribute with the white space after the last.
    """
    if not items:
        return [new]
    last = items[-1]
    comma = items[-2].comma if len(items) > 1 else None
    between = comma.whitespace_after if isinstance(comma, cst.Comma) else before
    if isinstance(between, cst.SimpleWhitespace):
        between = _SPACE
    new = new.with_changes(comma=last.comma, **{after: getattr(last, after)})
    changes = {"comma": cst.Comma(whitespace_after=between), after: _NO_SPACE}
    return [*items[:-1], last.with_changes(**changes), new]


def _with_parameter(
    params: cst.Parameters, before: cst.BaseParenthesizableWhitespace
) -> cst.Parameters:
    """Return parameters with ``*, pg_collection=None`` at the end."""
    new = cst.Param(
        cst.Name(PARAMETER),
        default=cst.Name("None"),
        equal=cst.AssignEqual(_NO_SPACE, _NO_SPACE),
        star="",
    )
    after = "whitespace_after_param"
    if params.kwonly_params:
        items = _appended(params.kwonly_params, new, before, after)
        return params.with_changes(kwonly_params=items)
    if isinstance(params.star_arg, cst.Param):
        both = _appended([params.star_arg], new, before, after)
        return params.with_changes(star_arg=both[0], kwonly_params=both[1:])
    if not params.params:  # nothing, or positional-only parameters and a slash
        return params.with_changes(star_arg=cst.ParamStar(), kwonly_params=[new])
    items = _appended(params.params, new, before, after)
    star = cst.ParamStar(comma=cast("cst.Comma", items[-2].comma))
    return params.with_changes(params=items[:-1], star_arg=star, kwonly_params=items[-1:])


def _with_statements(
    body: cst.BaseSuite, lines: Sequence[cst.SimpleStatementLine | cst.BaseCompoundStatement]
) -> cst.IndentedBlock:
    """Return a body with statements at its top, after the docstring."""
    if isinstance(body, cst.SimpleStatementSuite):
        body = cst.IndentedBlock([cst.SimpleStatementLine(body.body)])
    block = cast("cst.IndentedBlock", body)
    at = 0
    match block.body[0]:
        case cst.SimpleStatementLine(
            body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString())]
        ):
            at = 1
    return block.with_changes(body=[*block.body[:at], *lines, *block.body[at:]])


def _imports(
    module: cst.Module, is_unneeded: Callable[[str, str], bool]
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield the imports that may go, as LibCST names them: module, member and alias.

    Imports in ``try`` and ``if`` stay: their other branches bind the same names.
    """
    found: list[cst.Import | cst.ImportFrom] = []

    class Imports(cst.CSTVisitor):
        def visit_Try(self, node: cst.Try) -> bool:
            return False

        def visit_If(self, node: cst.If) -> bool:
            return False

        def visit_Import(self, node: cst.Import) -> None:
            found.append(node)

        def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
            found.append(node)

    module.visit(Imports())
    for node in found:
        if isinstance(node.names, cst.ImportStar):
            continue
        for each in node.names:
            name = dotted_name(each.name)
            asname = each.asname.name if each.asname else None
            alias = asname.value if isinstance(asname, cst.Name) else None
            if isinstance(node, cst.Import):
                if is_unneeded(name, alias or name.partition(".")[0]):
                    yield name, None, alias
                continue
            home = "." * len(node.relative) + (dotted_name(node.module) if node.module else "")
            if is_unneeded(f"{home.rstrip('.')}.{name}" if node.module else home + name, alias or name):
                yield home, name, alias
