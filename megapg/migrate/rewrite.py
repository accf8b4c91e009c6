"""Make the new text of a file from its changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.metadata import MetadataWrapper, PositionProvider

from megapg.migrate.bindings import dotted_name, span_of
from megapg.migrate.carriers import PARAMETER
from megapg.migrate.decide import FileChanges
from megapg.migrate.scan import STATEMENTS
from megapg.migrate.uses import Span

_NO_SPACE = cst.SimpleWhitespace("")
_SPACE = cst.SimpleWhitespace(" ")
_BLOCKS = (cst.FunctionDef, cst.ClassDef, cst.If, cst.Try)

_Item = TypeVar("_Item", cst.Arg, cst.Param)
_Import = TypeVar("_Import", cst.Import, cst.ImportFrom)


def rewritten(data: bytes, changes: FileChanges, is_unneeded: Callable[[str, str], bool]) -> bytes:
    """Return the new bytes of a file.

    Args:
        data: its bytes.
        changes: what changes in it.
        is_unneeded: True if an import, by its absolute or relative dotted name and the name that it
            binds, may go.
    """
    module = cst.parse_module(data)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    return _with_imports(wrapper.visit(_Rewriter(module, changes, is_unneeded)), changes).bytes


def _with_imports(module: cst.Module, changes: FileChanges) -> cst.Module:
    """Return a module that imports what its new code calls."""
    context, runtime, text = CodemodContext(), changes.runtime, changes.text()
    if f"{changes.name}." in text:
        alias = changes.name if changes.name != runtime.name else None
        AddImportsVisitor.add_needed_import(context, runtime.module, runtime.member or None, alias)
    if f"{changes.getters}." in text and changes.getters != changes.name:
        alias = changes.getters if changes.getters != runtime.getters_name else None
        AddImportsVisitor.add_needed_import(
            context, runtime.getters_module, runtime.getters_member, alias
        )
    # The visitor is slow, and looks at imports only.
    last = max((i for i, each in enumerate(module.body) if _is_import(each)), default=0) + 1
    head = module.with_changes(body=module.body[:last], footer=())
    head = AddImportsVisitor(context).transform_module(head)
    return module.with_changes(header=head.header, body=[*head.body, *module.body[last:]])


def _is_import(node: cst.BaseStatement) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and any(
        isinstance(each, cst.Import | cst.ImportFrom) for each in node.body
    )


class _Rewriter(cst.CSTTransformer):
    """Applies the planned changes; a node is found by its position."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(
        self, module: cst.Module, changes: FileChanges, is_unneeded: Callable[[str, str], bool]
    ) -> None:
        super().__init__()
        self._config, self._changes, self._is_unneeded = (
            module.config_for_parsing,
            changes,
            is_unneeded,
        )
        # For each of ``_BLOCKS`` around: True if its imports may go. Those of
        # a class are attributes, and the branches of ``if`` and ``try`` bind the same names.
        self._may_go = [True]
        self._unused_line = False  # True if an import of this line stays although it is unused now

    def _span(self, node: cst.CSTNode) -> Span:
        return span_of(self.get_metadata(PositionProvider, node))

    def _expression(self, text: str) -> cst.BaseExpression:
        return cst.parse_expression(text, self._config)

    def _replaced(
        self, node: cst.Call | cst.Name | cst.Attribute | cst.SimpleString, new: cst.BaseExpression
    ) -> cst.BaseExpression:
        text = self._changes.replaced.get(self._span(node))
        if text is None:
            return new
        return self._expression(text).with_changes(lpar=node.lpar, rpar=node.rpar)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        passed = self._changes.passed.get(self._span(original_node))
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
        span, new = self._span(original_node), updated_node
        if span in self._changes.parameters:
            new = new.with_changes(params=_with_parameter(new.params, new.whitespace_before_params))
        if statements := self._changes.statements.get(span):
            lines = [cst.parse_statement(text, self._config) for text in statements]
            new = new.with_changes(body=_with_statements(new.body, lines))
        return new

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _BLOCKS):
            self._may_go.append(isinstance(node, cst.FunctionDef))
        return super().on_visit(node)

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]:
        """Replace a use, or put a statement before another one, if the changes say so."""
        if isinstance(original_node, _BLOCKS):
            self._may_go.pop()
        if isinstance(original_node, cst.Name | cst.Attribute | cst.SimpleString):
            return self._replaced(original_node, cast("cst.BaseExpression", updated_node))
        new = super().on_leave(original_node, updated_node)
        if not isinstance(new, STATEMENTS):
            return new
        text = self._changes.before.get(self._span(original_node).line)
        if text is None:
            return new
        lines = list(new.leading_lines)
        blank = list(itertools.takewhile(lambda line: line.comment is None, lines))
        more = cst.parse_statement(text, self._config).with_changes(leading_lines=blank)
        return cst.FlattenSentinel([more, new.with_changes(leading_lines=lines[len(blank) :])])

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        self._unused_line = False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        return _with_noqa(updated_node) if self._unused_line else updated_node

    def leave_Import(
        self, original_node: cst.Import, updated_node: cst.Import
    ) -> cst.Import | cst.RemovalSentinel:
        return self._without_unneeded(updated_node, "")

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.RemovalSentinel:
        home = dotted_name(updated_node.module) + "." if updated_node.module else ""
        return self._without_unneeded(updated_node, "." * len(updated_node.relative) + home)

    def _without_unneeded(self, node: _Import, home: str) -> _Import | cst.RemovalSentinel:
        if isinstance(node.names, cst.ImportStar) or not self._may_go[-1]:
            return node
        kept = []
        for each in node.names:
            name = dotted_name(each.name)
            alias = each.asname.name if each.asname else None
            bound = alias.value if isinstance(alias, cst.Name) else name.partition(".")[0]
            if not self._is_unneeded(home + name, bound):
                kept.append(each)
                self._unused_line |= bound in self._changes.unused
        if not kept:
            return cst.RemoveFromParent()
        if kept[-1] is not node.names[-1]:
            kept[-1] = kept[-1].with_changes(comma=node.names[-1].comma)
        return node.with_changes(names=kept) if len(kept) < len(node.names) else node


def _with_noqa(line: cst.SimpleStatementLine) -> cst.SimpleStatementLine:
    """Return a line with an import, for which linters do not report that it is unused."""
    statement = line.body[-1]
    match statement:
        case cst.ImportFrom(
            lpar=cst.LeftParen(whitespace_after=cst.ParenthesizedWhitespace() as space)
        ):
            first = _noqa(space.first_line)
            lpar = cst.LeftParen(space.with_changes(first_line=first))
            return line.with_changes(body=[*line.body[:-1], statement.with_changes(lpar=lpar)])
    return line.with_changes(trailing_whitespace=_noqa(line.trailing_whitespace))


def _noqa(space: cst.TrailingWhitespace) -> cst.TrailingWhitespace:
    """Return the end of a line with ``# noqa: F401``, unless its comment has a ``noqa``."""
    if space.comment is None:
        blank = cst.SimpleWhitespace("  ")
        return space.with_changes(whitespace=blank, comment=cst.Comment("# noqa: F401"))
    text = space.comment.value
    new = cst.Comment(text if "noqa" in text else f"{text}  # noqa: F401")
    return space.with_changes(comment=new)


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
    between = _without_comment(comma.whitespace_after if isinstance(comma, cst.Comma) else before)
    end = last.comma
    if isinstance(end, cst.Comma) and isinstance(end.whitespace_after, cst.ParenthesizedWhitespace):
        if isinstance(between, cst.ParenthesizedWhitespace):  # a comment stays where it is
            between = end.whitespace_after.with_changes(last_line=between.last_line)
        end = end.with_changes(whitespace_after=_without_comment(end.whitespace_after))
    new = new.with_changes(comma=end, **{after: getattr(last, after)})
    changes = {"comma": cst.Comma(whitespace_after=between), after: _NO_SPACE}
    result = list(items)
    result[-1:] = [last.with_changes(**changes), new]
    return result


def _without_comment(
    space: cst.BaseParenthesizableWhitespace,
) -> cst.BaseParenthesizableWhitespace:
    """Return the white space between two items: a line break with its indentation, or a space."""
    if isinstance(space, cst.ParenthesizedWhitespace):
        return cst.ParenthesizedWhitespace(indent=space.indent, last_line=space.last_line)
    return _SPACE


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
        both = _appended([*params.params, params.star_arg], new, before, after)
        return params.with_changes(star_arg=both[-2], kwonly_params=both[-1:])
    if not params.params:  # nothing, or positional-only parameters and a slash
        return params.with_changes(star_arg=cst.ParamStar(), kwonly_params=[new])
    items = _appended(params.params, new, before, after)
    comma = cast("cst.Comma", items[-2].comma)
    star = cst.ParamStar(cst.Comma(whitespace_after=_without_comment(comma.whitespace_after)))
    return params.with_changes(params=items[:-1], star_arg=star, kwonly_params=items[-1:])


def _with_statements(
    body: cst.BaseSuite, lines: Sequence[cst.SimpleStatementLine | cst.BaseCompoundStatement]
) -> cst.IndentedBlock:
    """Return a body with statements at its top, after the docstring."""
    if isinstance(body, cst.SimpleStatementSuite):
        body = cst.IndentedBlock([cst.SimpleStatementLine(body.body)])
    block = cast("cst.IndentedBlock", body)
    first = block.body[0]
    match first:
        case cst.SimpleStatementLine(
            body=[cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString()) as doc, *rest]
        ):
            docstring: list[cst.BaseStatement] = [first]
            if rest:  # of the same line
                alone = doc.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)
                docstring = [first.with_changes(body=[alone])]
                lines = [*lines, cst.SimpleStatementLine(rest)]
            return block.with_changes(body=[*docstring, *lines, *block.body[1:]])
    return block.with_changes(body=[*lines, *block.body])
