"""Whether two syntax trees differ in nothing but the edits: these are taken back on the way.

Both trees are walked side by side. What an edit replaced, brought or took may differ, where that
edit is and of the kind that it claims to be; everything else must be the same. A piece of text that
is in both files as the same kind of node is the same tree, so the walk goes down only to where the
edits are.
"""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from megapg.migrate.edit.excuses import is_comment
from megapg.migrate.edit.texts import NEWLINE, describes, ends_in_comment, expression, open_quotes
from megapg.migrate.migration import Edit
from megapg.migrate.python.methods import docstrings_of, is_docstring, parameters
from megapg.migrate.python.scopes import FunctionNode, last_name
from megapg.migrate.python.source import Source

_Function: TypeAlias = FunctionNode | ast.Lambda
Pair: TypeAlias = tuple[ast.AST, ast.AST]
_Lists: TypeAlias = tuple[list[Any], list[Any]]

_FSTRINGS = (ast.JoinedStr, *filter(None, [getattr(ast, "TemplateStr", None)]))  # from 3.14
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# What a use can be: a call, the name of something, a string with it.
_REPLACEABLE = (ast.Call, ast.Attribute, ast.Name, ast.Constant, ast.JoinedStr)
# What is no expression by itself: a replacement is one.
_PIECES = (ast.Starred, ast.Slice)
# What a replacement does exactly if the old expression did: bind a name, make the function around
# another kind of function.
_SPECIAL = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
# What an added statement may not do: leave its place, change what kind of function is around.
_LEAVING = (
    *(ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Delete, ast.Global, ast.Nonlocal),
    *(ast.Await, ast.Yield, ast.YieldFrom, ast.AsyncFor, ast.AsyncWith),
)

# What may be between two tokens whatever they mean: the trees are compared all the same.
_BETWEEN = re.compile(r"[\s(),]*")


class Unsound(Exception):
    """The rewrite is not what it says."""


class _Walk(ABC):
    """Walks two trees side by side and takes the edits back on the way."""

    def _same(self, old: ast.AST, new: ast.AST) -> bool:
        """Whether there is no need to look into them."""
        return False

    @abstractmethod
    def _replaced(self, old: ast.AST, new: ast.AST) -> bool:
        """Whether an edit has put the one in the place of the other."""

    @abstractmethod
    def _rest(self, parent: ast.AST, field: str, old: list[Any], new: list[Any]) -> _Lists:
        """Two lists of a node without what edits took from the one and brought to the other."""

    def compare(self, old: ast.AST, new: ast.AST) -> None:
        """Raise where they differ in more than the edits."""
        pending: list[Pair] = [(old, new)]  # not by recursion: expressions may be deep
        while pending:
            pending.extend(self._below(*pending.pop()))

    def _below(self, old: ast.AST, new: ast.AST) -> Iterator[Pair]:
        if self._replaced(old, new):
            return
        if type(old) is not type(new):
            raise _differ(old, new)
        if not self._same(old, new):
            yield from self._children(old, new)

    def _children(self, old: ast.AST, new: ast.AST) -> Iterator[Pair]:
        for field in old._fields:
            was, now = getattr(old, field, None), getattr(new, field, None)
            if isinstance(was, list) and isinstance(now, list):
                was, now = self._rest(old, field, was, now)
                if len(was) != len(now):
                    raise _differ(old, new)
            else:
                was, now = [was], [now]
            for one, other in zip(was, now, strict=True):
                if isinstance(one, ast.AST) and isinstance(other, ast.AST):
                    yield one, other
                elif type(one) is not type(other) or one != other:
                    raise _differ(old, new)


def _differ(old: ast.AST, new: ast.AST) -> Unsound:
    line = getattr(old, "lineno", getattr(new, "lineno", 0))
    where = f"line {line}: " if line else ""
    was, now = type(old).__name__, type(new).__name__
    what = f"{was} would become {now}" if was != now else f"{was} would change"
    return Unsound(f"{where}beyond what the edits say {what}")


def _extent(source: Source, node: Any) -> tuple[int, int]:
    """Where a node is in the text of its file, with its decorators."""
    first = next(iter(getattr(node, "decorator_list", ())), node)
    begin = source.index(first.lineno, first.col_offset)
    return begin, source.index(node.end_lineno, node.end_col_offset)


class TakingBack(_Walk):
    """Takes edits back by where they are in the two texts."""

    def __init__(self, old: Source, new: Source, edits: Sequence[Edit]) -> None:
        self._old, self._new, self._edits = old, new, edits
        self._before = [(edit.start, edit.stop) for edit in edits]
        self._after, shift = [], 0
        for edit in edits:
            start = edit.start + shift
            self._after.append((start, start + len(edit.new)))
            shift += len(edit.new) - (edit.stop - edit.start)
        self._kinds = {edit.what for edit in edits}
        self._docstrings = set(docstrings_of(old.tree)) if "docstring" in self._kinds else set()
        self._undone: set[int] = set()
        self.came: list[ast.AST] = []
        self.went: list[ast.AST] = []
        self._cut: dict[int, list[tuple[int, int]]] = {}

    def all_undone(self) -> None:
        """Raise where an edit is not one that could be taken back."""
        for number, edit in reversed([*enumerate(self._edits)]):
            if is_comment(edit, self._old):
                continue
            if self._is_comma_of_next(number) or self._is_layout(number):
                self._undone.add(number)
            if number not in self._undone:
                raise Unsound(f"{self._line(number)}: not the {edit.what} that the edit says")
            self._comments_stay(number)

    def _is_layout(self, number: int) -> bool:
        """Whether an edit changes nothing but what the trees do not have."""
        edit = self._edits[number]
        texts = self._old.text[edit.start : edit.stop], edit.new
        return edit.what == "layout" and all(map(_BETWEEN.fullmatch, texts))

    def _is_comma_of_next(self, number: int) -> bool:
        """Whether an edit only sets the comma for what the next one adds behind a comment."""
        edit, following = self._edits[number], self._edits[number + 1 : number + 2]
        return (
            edit.new == ","
            and edit.start == edit.stop
            and edit.what in ("parameter", "argument")
            and any(each.what == edit.what for each in following)
            and number + 1 in self._undone
        )

    def _comments_stay(self, number: int) -> None:
        """Raise where an edit makes a comment, adds to one, or takes one that was not about it."""
        edit, (start, stop), text = self._edits[number], self._before[number], self._old.text
        line = self._line(number)
        if "#" in edit.new and "#" not in text[start:stop]:
            raise Unsound(f"{line}: a comment would come in")
        if edit.what == "site":
            return
        if edit.new[:1] not in ("\r", "\n", "") and ends_in_comment(text[:start]):
            raise Unsound(f"{line}: a comment would become longer")
        at, rest = start, ""
        for begin, end in sorted(self._cut.get(number, ())):
            rest += text[at:begin] + "_"
            at = end
        for each in NEWLINE.split(rest + text[at:stop]):
            if each.lstrip().startswith("#") and each.strip() not in edit.new:
                raise Unsound(f"{line}: {each.strip()} would be lost")

    def _same(self, old: ast.AST, new: ast.AST) -> bool:
        if not hasattr(old, "lineno"):
            return False
        (begin, end), (start, stop) = _extent(self._old, old), _extent(self._new, new)
        if self._old.text[begin:end] == self._new.text[start:stop]:
            return True
        if isinstance(old, _FSTRINGS):
            self._fstring(old, new)
            return True
        return False

    # Expressions that were replaced.

    def _replaced(self, old: ast.AST, new: ast.AST) -> bool:
        if not isinstance(old, ast.expr) or not isinstance(new, ast.expr):
            return False
        place = _extent(self._old, old)
        number = _around(self._before, *place)
        if number is None or self._edits[number].what != "site":
            return old in self._docstrings and self._says_more(old, new)
        begin, end = _extent(self._new, new)
        if not (
            _wraps(self._old.text, self._before[number], place)
            and _wraps(self._new.text, self._after[number], (begin, end))
        ):
            return False
        _readable(old, new, self._new.text[begin:end])
        self._undone.add(number)
        return True

    def _says_more(self, old: ast.expr, new: ast.expr) -> bool:
        """Whether a docstring got lines in which nothing has a meaning of its own."""
        begin, end = _extent(self._old, old)
        within = {n for n, (start, _) in enumerate(self._before) if begin < start < end}
        if isinstance(new, ast.Constant) and all(self._describes(n, end) for n in within):
            self._undone |= within
        return not within.isdisjoint(self._undone)

    def _describes(self, number: int, end: int) -> bool:
        """Whether an edit puts our line behind one of the docstring that ends there."""
        edit, rest = self._edits[number], self._old.text[self._edits[number].start : end]
        is_added = (edit.what, edit.start) == ("docstring", edit.stop) and describes(edit.new)
        return is_added and (rest[:1] in "\r\n" or len(rest) == len('"""'))

    # Elements of lists that came or went.

    def _rest(self, parent: ast.AST, field: str, old: list[Any], new: list[Any]) -> _Lists:
        first = next(iter(old or new), None)
        if field == "args" and isinstance(parent, ast.Call):
            return old, new[:-1] if self._is_applied_to(new, parent.func, len(old)) else new
        if not isinstance(first, ast.stmt | ast.alias | ast.keyword):
            return old, new
        if isinstance(first, ast.stmt):
            if bool(old) != bool(new):
                raise Unsound(f"line {first.lineno}: a whole branch would come or go")
            begin = {is_docstring(each) for each in (*old[:1], *new[:1])}
            if isinstance(parent, _WITH_DOCSTRING) and len(begin) > 1:
                raise Unsound(f"line {first.lineno}: the docstring would not be first any more")
        kinds = {"argument"} if isinstance(first, ast.keyword) else {"statement", "import"}
        if kinds.isdisjoint(self._kinds):
            return old, new
        was = [node for node in old if not self._went(node)]
        now = [node for node in new if not self._came(parent, node)]
        return was, now

    def _came(self, parent: ast.AST, node: ast.stmt | ast.alias | ast.keyword) -> bool:
        place = _extent(self._new, node)
        number = _around(self._after, *place)
        what = "" if number is None else self._edits[number].what
        if number is None or not _may_come(what, parent, node):
            return False
        if isinstance(node, ast.keyword) and _holds(node, _SPECIAL):
            raise Unsound(f"{self._line(number)}: the argument does more than read")
        if isinstance(node, ast.stmt) and _holds(node, _LEAVING):
            raise Unsound(f"{self._line(number)}: the statement leaves its place")
        if isinstance(node, ast.stmt) and self._edits[number].new.rstrip().endswith(","):
            raise Unsound(f"{self._line(number)}: the statement ends in a comma")
        if not isinstance(node, ast.keyword) and _of_import(node):
            self.came.append(node)
        self._undone.add(number)
        return True

    def _went(self, node: ast.stmt | ast.alias | ast.keyword) -> bool:
        if isinstance(node, ast.keyword) or not _of_import(node):
            return False
        place = _extent(self._old, node)
        number = _around(self._before, *place)
        if number is None or self._edits[number].what != "import":
            return False
        self.went.append(node)
        self._cut.setdefault(number, []).append(place)
        self._undone.add(number)
        return True

    def _line(self, number: int) -> str:
        return f"line {bisect_right(self._old.line_starts, self._edits[number].start)}"

    # Parameters.

    def _children(self, old: ast.AST, new: ast.AST) -> Iterator[Pair]:
        if isinstance(old, _Function) and isinstance(new, _Function):
            self._no_capture(old, new)
        if isinstance(new, ast.arguments):
            new = self._arguments(new)
        if isinstance(old, ast.Return) and isinstance(new, ast.Return):
            new = self._without_gradient(old, new)
        return super()._children(old, new)

    # Autograd functions.

    def _is_applied_to(self, given: list[Any], applied: ast.expr, count: int) -> bool:
        """Whether the last argument of a call is one that an autograd function is given."""
        if len(given) != count + 1 or last_name(applied) != "apply":
            return False
        return self._is_within(given[-1], "argument") and not _holds(given[-1], _SPECIAL)

    def _without_gradient(self, old: ast.Return, new: ast.Return) -> ast.Return:
        """What is returned without the None that was added at its end."""
        match new.value:
            case ast.Tuple([*rest, ast.Constant(None) as last]) if rest:
                if self._is_within(last, "gradient"):
                    was_tuple = isinstance(old.value, ast.Tuple)
                    value = ast.Tuple(rest, ast.Load()) if was_tuple else rest[0]
                    if was_tuple:
                        ast.copy_location(value, new.value)
                    return ast.copy_location(ast.Return(value), new)
        return new

    def _is_within(self, node: ast.expr, what: str) -> bool:
        """Whether an expression came by an edit of some kind."""
        number = _around(self._after, *_extent(self._new, node))
        if number is None or self._edits[number].what != what:
            return False
        self._undone.add(number)
        return True

    def _added(self, arg: ast.arg) -> bool:
        number = _around(self._after, *_extent(self._new, arg))
        if number is None or self._edits[number].what != "parameter":
            return False
        self._undone.add(number)
        return True

    def _arguments(self, new: ast.arguments) -> ast.arguments:
        """The parameters without those that were added, and without their defaults."""
        places = [*new.posonlyargs, *new.args]
        without = [None] * (len(places) - len(new.defaults))
        by_place = list(zip(places, [*without, *new.defaults], strict=True))
        by_name = list(zip(new.kwonlyargs, new.kw_defaults, strict=True))
        added = [(arg, default) for arg, default in by_place + by_name if self._added(arg)]
        for arg, default in added:
            if not isinstance(default, ast.Constant | None):
                raise Unsound(f"line {arg.lineno}: the default of {arg.arg} would be no plain one")
            if arg in places and (arg is not places[-1] or new.vararg or default is None):
                raise Unsound(f"line {arg.lineno}: {arg.arg} would come before other parameters")
        gone = {arg for arg, _ in added}
        return ast.arguments(
            posonlyargs=[arg for arg in new.posonlyargs if arg not in gone],
            args=[arg for arg in new.args if arg not in gone],
            vararg=new.vararg,
            kwonlyargs=[arg for arg in new.kwonlyargs if arg not in gone],
            kw_defaults=[default for arg, default in by_name if arg not in gone],
            kwarg=new.kwarg,
            defaults=[default for arg, default in by_place if default and arg not in gone],
        )

    def _no_capture(self, old: _Function, new: _Function) -> None:
        """No added parameter has the name of something that the function reads or binds."""
        begin, end = _extent(self._old, old)
        body = old.body if isinstance(old.body, list) else [old.body]
        for name in {arg.arg for arg in parameters(new) if self._added(arg)}:
            # The search for a string alone is much faster, and mostly enough.
            if name in self._old.text[begin:end] and (line := _uses(body, name)):
                raise Unsound(f"line {line}: {name} is in use where it would be a parameter")

    # F-strings, in which places can't be trusted.

    def _fstring(self, old: ast.AST, new: ast.AST) -> None:
        begin, end = _extent(self._old, old)
        inside = [
            number
            for number, (start, stop) in enumerate(self._before)
            if begin <= start and stop <= end and number not in self._undone
        ]
        for number in inside:
            self._fits_quotes(number, begin)
        by_shape = _ByShape(self._old.text, {number: self._edits[number] for number in inside})
        by_shape.compare(old, new)
        self._undone |= by_shape.undone

    def _fits_quotes(self, number: int, begin: int) -> None:
        """Raise where new text in an f-string would need Python 3.12."""
        edit, text = self._edits[number], self._old.text
        quotes = open_quotes(text[begin : edit.start])
        never = [*quotes, "\\", *("\r\n" if any(len(each) == 1 for each in quotes) else "")]
        was = text[edit.start : edit.stop]
        if strange := [each for each in never if each in edit.new and each not in was]:
            what = f"{strange[0]!r} in an f-string, which Python has from 3.12 on"
            raise Unsound(f"{self._line(number)}: {what}")


class _ByShape(_Walk):
    """Takes edits back by what their texts parse to, wherever that is."""

    def __init__(self, old: str, edits: dict[int, Edit]) -> None:
        self.undone: set[int] = set()
        self._sites: dict[int, tuple[str, str, str]] = {}
        self._keywords: dict[int, list[str]] = {}
        for number, edit in edits.items():
            was, now = expression(old[edit.start : edit.stop]), expression(edit.new)
            call = expression(f"_({edit.new.strip().strip(',')})")
            if edit.what == "site" and was and now:
                self._sites[number] = ast.dump(was), ast.dump(now), edit.new
            elif edit.what == "argument" and edit.start == edit.stop and isinstance(call, ast.Call):
                self._keywords[number] = [ast.dump(keyword) for keyword in call.keywords]

    def _replaced(self, old: ast.AST, new: ast.AST) -> bool:
        if not isinstance(old, ast.expr) or not isinstance(new, ast.expr):
            return False
        for number, (was, now, text) in self._sites.items():
            # Dumped only if they can be it: dumps are slow.
            if (
                number not in self.undone
                and was.startswith(type(old).__name__)
                and now.startswith(type(new).__name__)
                and ast.dump(old) == was
                and ast.dump(new) == now
            ):
                _readable(old, new, text)
                self.undone.add(number)
                return True
        return False

    def _rest(self, parent: ast.AST, field: str, old: list[Any], new: list[Any]) -> _Lists:
        if not (field == "keywords" and isinstance(parent, ast.Call) and len(new) > len(old)):
            return old, new
        for number, dumps in self._keywords.items():
            added = [node for node in new if ast.dump(node) in dumps]
            if number not in self.undone and len(added) == len(dumps) == len(new) - len(old):
                self.undone.add(number)
                return old, [node for node in new if node not in added]
        return old, new


def _around(spans: Sequence[tuple[int, int]], begin: int, end: int) -> int | None:
    """Number of the span in which a piece of text lies."""
    number = bisect_right(spans, begin, key=lambda span: span[0]) - 1
    return number if number >= 0 and end <= spans[number][1] else None


def _wraps(text: str, span: tuple[int, int], place: tuple[int, int]) -> bool:
    """Whether between a span and the place of the expression in it are only parentheses."""
    (start, stop), (begin, end) = span, place
    if not start <= begin < end <= stop:
        return False
    if (start, stop) == (begin, end):
        return True
    before, behind = text[start:begin], text[end:stop]
    if before[:1] != "(" or behind[-1:] != ")":
        return False
    left, right = "".join(before.split()), "".join(behind.split())
    return left == "(" * len(left) and right == ")" * len(left)


def _readable(old: ast.expr, new: ast.expr, text: str) -> None:
    """Raise unless the one is read, and the other is an expression by itself that only reads."""
    if not isinstance(getattr(old, "ctx", ast.Load()), ast.Load):
        raise Unsound(f"line {old.lineno}: what would be replaced is written, not read")
    bare = isinstance(new, ast.Tuple) and not isinstance(expression(f"{text}.x"), ast.Attribute)
    if bare or isinstance(new, _PIECES):
        raise Unsound(f"line {old.lineno}: the replacement is not an expression by itself")
    if not isinstance(old, _REPLACEABLE):
        raise Unsound(f"line {old.lineno}: {type(old).__name__} is no use of a getter")
    if _special(old) != _special(new):
        raise Unsound(f"line {old.lineno}: the replacement does more than read, or less")


def _special(node: ast.AST) -> list[str]:
    """What an expression does besides reading."""
    found = (each for each in ast.walk(node) if isinstance(each, _SPECIAL))
    return sorted(
        each.target.id if isinstance(each, ast.NamedExpr) else type(each).__name__ for each in found
    )


def _holds(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    return any(isinstance(each, kinds) for each in ast.walk(node))


def _may_come(what: str, parent: ast.AST, node: ast.stmt | ast.alias | ast.keyword) -> bool:
    """Whether an edit of that kind may add an element to a node."""
    if isinstance(node, ast.keyword):
        return what == "argument" and isinstance(parent, ast.Call)
    if what == "import":
        return _of_import(node)
    return what == "statement" and isinstance(node, ast.stmt)


def _of_import(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    return isinstance(node, ast.Import | ast.alias | ast.Pass)


def _uses(body: Iterable[ast.AST], name: str) -> int:
    """The line in which a name is read or bound, functions with a parameter of it apart; or 0."""
    pending = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and node.id == name:
            return node.lineno
        if isinstance(node, _Function) and name in {arg.arg for arg in parameters(node)}:
            pending += [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            continue
        pending.extend(ast.iter_child_nodes(node))
    return 0
