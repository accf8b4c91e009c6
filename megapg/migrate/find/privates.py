"""What a function does with what lists the ranks of a group: a private variable, or a getter.

Before there are groups a variable is None, which a collection can't be; and it is a list, which
somebody may change. Where it is only read, as a list of ranks, the ranks of the group serve.
"""

from __future__ import annotations

import ast
from dataclasses import replace

from megapg.migrate.python.scopes import Use, last_name
from megapg.upstream.mapping import OPTIONAL_FIELDS, RANK_GLOBALS, Replacement

# Calls that fail with None, and do with any sequence.
_OF_ANY_SEQUENCE = frozenset({"list", "tuple", "set", "sorted", "len", "min", "max", "enumerate"})
_READING_METHODS = frozenset({"index", "count", "copy"})


def as_it_is_read(name: str, use: Use, node: ast.expr, answer: Replacement) -> Replacement:
    """What is written for a private variable: without its caution where it is only read."""
    field = RANK_GLOBALS.get(name)
    unit = use.scope.unit
    if unit is None or field is None or field in OPTIONAL_FIELDS or answer.field != field:
        return answer
    around = [*_within(use.node, node), *use.parents]
    if not _only_reads(node, around):
        return answer
    template = f'$pg.ranks("{field}")' if _takes_any(node, around[0]) else answer.template
    return replace(answer, template=template, caution="")


def as_it_is_taken(use: Use, call: ast.expr, answer: Replacement) -> Replacement:
    """What is written for a getter: a list of ranks only where none is made of it anyway."""
    template = f'$pg.ranks("{answer.field}")'
    around = [each for each in use.parents if each is not call]
    if answer.template != f"list({template})" or not _only_reads(call, around):
        return answer
    return replace(answer, template=template) if _takes_any(call, around[0]) else answer


def _within(chain: ast.AST, node: ast.expr) -> list[ast.AST]:
    """The attributes of a chain that are read of a node in it, from the inside out."""
    found: list[ast.AST] = []
    while isinstance(chain, ast.Attribute) and chain is not node:
        found.insert(0, chain)
        chain = chain.value
    return found


def _takes_any(node: ast.expr, parent: ast.AST) -> bool:
    """Whether a sequence of any kind serves: a list of it is made, or one rank is taken."""
    match parent:
        case ast.Attribute():
            return parent.attr != "copy"
        case ast.Call(ast.Name(name), _, []):
            return name in _OF_ANY_SEQUENCE and node in parent.args
        case ast.Subscript(value):
            return value is node and not isinstance(parent.slice, ast.Slice)
        case ast.Compare(_, [ast.In() | ast.NotIn()], _):
            return parent.left is not node
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            return parent.iter is node
    return False


def _only_reads(node: ast.expr, around: list[ast.AST]) -> bool:
    """Whether what is around an expression reads it as a list, and asks not whether it is None."""
    parent = around[0] if around else None
    above = around[1] if len(around) > 1 else None
    match parent:
        case ast.Subscript(value):
            return value is node and isinstance(parent.ctx, ast.Load)
        case ast.Call():
            return last_name(parent.func) not in ("bool", "id", "print") and parent.func is not node
        case ast.keyword() | ast.Starred():
            return True
        case ast.Compare(_, [ast.In() | ast.NotIn()], _):
            return parent.left is not node
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            return parent.iter is node
        case ast.Attribute():
            called = isinstance(above, ast.Call) and above.func is parent
            return called and parent.attr in _READING_METHODS
        case ast.BinOp(_, ast.Add()):
            return True
        case ast.Tuple() | ast.List():
            return isinstance(parent.ctx, ast.Load) and _is_handed_on(around)
    return False


def _is_handed_on(around: list[ast.AST]) -> bool:
    """Whether a tuple, or a list of such, is an argument of a call."""
    outer = next((e for e in around if not isinstance(e, ast.Tuple | ast.List)), None)
    return isinstance(outer, ast.Call | ast.keyword)
