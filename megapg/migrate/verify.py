"""Whether a rewrite is what it says: its edits taken back on the new tree give the old tree.

Nothing here knows how the edits were planned. Both trees are walked side by side. What an edit
replaced, brought or took may differ, where that edit is and of the kind that it claims to be;
everything else must be the same. A piece of text that is in both files as the same kind of node
is the same tree, so the walk goes down only to where the edits are.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import string
import symtable
import tokenize
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from megapg.migrate.migration import Edit, Rewritten
from megapg.migrate.source import Problem, Source, parse

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Import: TypeAlias = ast.Import | ast.ImportFrom
Pair: TypeAlias = tuple[ast.AST, ast.AST]

_KEEPING = re.compile(r"\s*\w+\.(?P<name>\w+) = (?P=name)\s*")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"
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


class _Unsound(Exception):
    """The rewrite is not what it says."""


def verify(rewritten: Rewritten, old: Source | None = None) -> str | None:
    """What is wrong with a rewrite, in one line; None where it is sound.

    Sound means: the edits applied to the old text are the new bytes, none outside of their spans
    differs, and encoding, byte order mark and newlines are kept; the new file compiles; the edits
    taken back on the new syntax tree give the old one, each of them at one place and as the kind
    of change that it says; what is replaced was read, not written; no docstring is lost; what a
    constructor keeps is not lost to one of its bases in the file; no name is left without its
    import, and none that was in use comes to mean something else.

    What the new texts read can't be told from the edits: which group, say.

    Args:
        rewritten: the file, before and after.
        old: the file before, where it is parsed already; not having to do it again saves a third.
    """
    try:
        old, new = _sources(rewritten, old)
        _compiles(rewritten, new)
        undo = _ByPlace(old, new, rewritten.edits)
        undo.compare(old.tree, new.tree)
        undo.all_undone()
        _keeps_what_it_is_passed(new, rewritten.edits)
        _names_keep_their_meaning(old, new, undo)
    except _Unsound as unsound:
        return str(unsound)
    except (RecursionError, MemoryError):
        return "is nested too deeply to verify"
    return None


# ---- bytes -------------------------------------------------------------------------------------


def _sources(rewritten: Rewritten, old: Source | None) -> tuple[Source, Source]:
    """Both files, after the bytes are found to differ only where the edits are."""
    if old is None or old.data != rewritten.before:
        old = _parsed(rewritten, rewritten.before)
    if old.text != rewritten.text:
        raise _Unsound("the text that the edits are about is not the file's")
    text = _applied(old, rewritten.edits)
    mark = _BOM if rewritten.before.startswith(_BOM) else b""
    try:
        expected = mark + text.encode(old.encoding)
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise _Unsound(f"{character!r} can't be written in {old.encoding}") from error
    if expected != rewritten.after:
        raise _Unsound("the new bytes are not the old ones with the edits")
    if rewritten.before.startswith(b"#!") and not rewritten.after.startswith(b"#!"):
        raise _Unsound("line 1: the interpreter line would not be the first any more")
    new = _parsed(rewritten, rewritten.after, "would be unreadable: ")
    if new.encoding != old.encoding or new.text != text:
        raise _Unsound(f"would be read as {new.encoding} instead of {old.encoding}")
    return old, new


def _parsed(rewritten: Rewritten, data: bytes, what: str = "") -> Source:
    source = parse(rewritten.path, rewritten.file, data)
    if isinstance(source, Problem):
        raise _Unsound(f"{what}{f'line {source.line}: ' * bool(source.line)}{source.message}")
    return source


def _applied(old: Source, edits: Sequence[Edit]) -> str:
    """The text with the edits, which are in order and apart, in the newlines of the file."""
    text, pieces, at = old.text, [], 0
    newlines = set(_NEWLINE.findall(text) if "\r" in text else "\n" * ("\n" in text))
    for edit in edits:
        line = f"line {bisect_right(old.line_starts, edit.start)}"
        if not at <= edit.start <= edit.stop <= len(text):
            raise _Unsound(f"characters {edit.start} to {edit.stop}: edits overlap or lie outside")
        if newlines and not newlines.issuperset(_NEWLINE.findall(edit.new)):
            raise _Unsound(f"{line}: a newline of another style would come in")
        if any(text[i - 1 : i + 1] == "\r\n" for i in (edit.start, edit.stop) if i):
            raise _Unsound(f"{line}: an edit ends in the middle of a newline")
        pieces += [text[at : edit.start], edit.new]
        at = edit.stop
    return "".join([*pieces, text[at:]])


def _compiles(rewritten: Rewritten, new: Source) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(new.tree, rewritten.file, "exec", dont_inherit=True)
        except SyntaxError as error:
            raise _Unsound(f"would not compile: line {error.lineno}: {error.msg}") from error
        except ValueError as error:
            raise _Unsound(f"would not compile: {error}") from error


# ---- trees -------------------------------------------------------------------------------------


class _Walk(ABC):
    """Walks two trees side by side and takes the edits back on the way."""

    @abstractmethod
    def _same(self, old: ast.AST, new: ast.AST) -> bool:
        """Whether there is no need to look into them."""

    @abstractmethod
    def _replaced(self, old: ast.AST, new: ast.AST) -> bool:
        """Whether an edit has put the one in the place of the other."""

    @abstractmethod
    def _rest(
        self, parent: ast.AST, field: str, old: list[Any], new: list[Any]
    ) -> tuple[list[Any], list[Any]]:
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


def _differ(old: ast.AST, new: ast.AST) -> _Unsound:
    line = getattr(old, "lineno", getattr(new, "lineno", 0))
    where = f"line {line}: " if line else ""
    was, now = type(old).__name__, type(new).__name__
    what = f"{was} would become {now}" if was != now else f"{was} would change"
    return _Unsound(f"{where}beyond what the edits say {what}")


@dataclass(frozen=True)
class _Brought:
    """A statement of imports, or a part of one, that the edit of that number brought or took."""

    number: int
    node: ast.stmt | ast.alias
    place: tuple[int, int]


class _Text:
    """The text of a file, and where nodes of its tree are in it."""

    def __init__(self, source: Source) -> None:
        self.text = source.text
        self._starts, self._ascii = source.line_starts, source.text.isascii()
        self._index = source.index

    def extent(self, node: Any) -> tuple[int, int]:
        """Where a node is, with its decorators."""
        first = node
        if decorators := getattr(node, "decorator_list", None):
            first = decorators[0]
        if self._ascii:  # most files; and this is asked often
            starts = self._starts
            return (
                starts[first.lineno - 1] + first.col_offset,
                starts[node.end_lineno - 1] + node.end_col_offset,
            )
        begin = self._index(first.lineno, first.col_offset)
        return begin, self._index(node.end_lineno, node.end_col_offset)

    def line(self, index: int) -> int:
        """The number of the line in which a character is."""
        return bisect_right(self._starts, index)


class _ByPlace(_Walk):
    """Takes edits back by where they are in the two texts."""

    def __init__(self, old: Source, new: Source, edits: Sequence[Edit]) -> None:
        self._old, self._new, self._edits = _Text(old), _Text(new), edits
        self._before = [(edit.start, edit.stop) for edit in edits]
        self._after, shift = [], 0
        for edit in edits:
            start = edit.start + shift
            self._after.append((start, start + len(edit.new)))
            shift += len(edit.new) - (edit.stop - edit.start)
        self._kinds = {edit.what for edit in edits}
        self._undone: set[int] = set()
        self.came: list[_Brought] = []
        self.went: list[_Brought] = []

    def all_undone(self) -> None:
        """Raise where an edit is not one that could be taken back."""
        for number, edit in reversed([*enumerate(self._edits)]):
            if self._is_comma_of_next(number):
                self._undone.add(number)
            if number not in self._undone:
                raise _Unsound(f"{self._line(number)}: not the {edit.what} that the edit says")
            self._comments_stay(number)

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
            raise _Unsound(f"{line}: a comment would come in")
        if edit.what == "site":
            return
        if edit.new[:1] not in ("\r", "\n", "") and _ends_in_comment(_last_line(text[:start])):
            raise _Unsound(f"{line}: a comment would become longer")
        at, rest = start, ""
        for begin, end in sorted(each.place for each in self.went if each.number == number):
            rest += text[at:begin] + "_"
            at = end
        for each in _NEWLINE.split(rest + text[at:stop]):
            if each.lstrip().startswith("#") and each.strip() not in edit.new:
                raise _Unsound(f"{line}: {each.strip()} would be lost")

    def _same(self, old: ast.AST, new: ast.AST) -> bool:
        if not hasattr(old, "lineno"):
            return False
        (begin, end), (start, stop) = self._old.extent(old), self._new.extent(new)
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
        place = self._old.extent(old)
        number = _around(self._before, *place)
        if number is None or self._edits[number].what != "site":
            return False
        begin, end = self._new.extent(new)
        if not (
            _wraps(self._old.text, self._before[number], place)
            and _wraps(self._new.text, self._after[number], (begin, end))
        ):
            return False
        _readable(old, new, self._new.text[begin:end])
        self._undone.add(number)
        return True

    # Elements of lists that came or went.

    def _rest(
        self, parent: ast.AST, field: str, old: list[Any], new: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        first = next(iter(old or new), None)
        if not isinstance(first, ast.stmt | ast.alias | ast.keyword):
            return old, new
        if isinstance(first, ast.stmt):
            if bool(old) != bool(new):
                raise _Unsound(f"line {first.lineno}: a whole branch would come or go")
            if isinstance(parent, _WITH_DOCSTRING) and _docstring(old) != _docstring(new):
                raise _Unsound(f"line {first.lineno}: the docstring would not be first any more")
        kinds = {"argument"} if isinstance(first, ast.keyword) else {"statement", "import"}
        if kinds.isdisjoint(self._kinds):
            return old, new
        was = [node for node in old if not self._went(node)]
        now = [node for node in new if not self._came(parent, node)]
        return was, now

    def _came(self, parent: ast.AST, node: ast.stmt | ast.alias | ast.keyword) -> bool:
        place = self._new.extent(node)
        number = _around(self._after, *place)
        what = "" if number is None else self._edits[number].what
        if number is None or not _may_come(what, parent, node):
            return False
        if isinstance(node, ast.keyword) and _holds(node, _SPECIAL):
            raise _Unsound(f"{self._line(number)}: the argument does more than read")
        if isinstance(node, ast.stmt) and _holds(node, _LEAVING):
            raise _Unsound(f"{self._line(number)}: the statement leaves its place")
        if isinstance(node, ast.stmt) and self._edits[number].new.rstrip().endswith(","):
            raise _Unsound(f"{self._line(number)}: the statement ends in a comma")
        if not isinstance(node, ast.keyword) and _of_import(node):
            self.came.append(_Brought(number, node, place))
        self._undone.add(number)
        return True

    def _went(self, node: ast.stmt | ast.alias | ast.keyword) -> bool:
        if isinstance(node, ast.keyword) or not _of_import(node):
            return False
        place = self._old.extent(node)
        number = _around(self._before, *place)
        if number is None or self._edits[number].what != "import":
            return False
        self.went.append(_Brought(number, node, place))
        self._undone.add(number)
        return True

    def _line(self, number: int) -> str:
        return f"line {self._old.line(self._edits[number].start)}"

    # Parameters.

    def _children(self, old: ast.AST, new: ast.AST) -> Iterator[Pair]:
        if isinstance(old, _Function) and isinstance(new, _Function):
            self._no_capture(old, new)
        if isinstance(new, ast.arguments):
            new = self._arguments(new)
        return super()._children(old, new)

    def _added(self, arg: ast.arg) -> bool:
        number = _around(self._after, *self._new.extent(arg))
        if number is None or self._edits[number].what != "parameter":
            return False
        self._undone.add(number)
        return True

    def _arguments(self, new: ast.arguments) -> ast.arguments:
        """The parameters without those that were added, and without their defaults."""
        places = [*new.posonlyargs, *new.args]
        by_place = list(zip(places, _padded(new.defaults, len(places)), strict=True))
        by_name = list(zip(new.kwonlyargs, new.kw_defaults, strict=True))
        added = [(arg, default) for arg, default in by_place + by_name if self._added(arg)]
        for arg, default in added:
            if not isinstance(default, ast.Constant | None):
                raise _Unsound(f"line {arg.lineno}: the default of {arg.arg} would be no plain one")
            if arg in places and (arg is not places[-1] or new.vararg or default is None):
                raise _Unsound(f"line {arg.lineno}: {arg.arg} would come before other parameters")
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
        args = new.args
        names = {
            arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs] if self._added(arg)
        }
        begin, end = self._old.extent(old)
        text = self._old.text[begin:end]
        names = {name for name in names if name in text}
        body = old.body if isinstance(old.body, list) else [old.body]
        for name in names:
            if line := _uses(body, name):
                raise _Unsound(f"line {line}: {name} is in use where it would be a parameter")

    # F-strings, in which places can't be trusted.

    def _fstring(self, old: ast.AST, new: ast.AST) -> None:
        begin, end = self._old.extent(old)
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
        quotes = _open_quotes(text[begin : edit.start])
        never = [*quotes, "\\", *("\r\n" if any(len(each) == 1 for each in quotes) else "")]
        was = text[edit.start : edit.stop]
        if strange := [each for each in never if each in edit.new and each not in was]:
            what = f"{strange[0]!r} in an f-string, which Python has from 3.12 on"
            raise _Unsound(f"{self._line(number)}: {what}")


class _ByShape(_Walk):
    """Takes edits back by what their texts parse to, wherever that is."""

    def __init__(self, old: str, edits: dict[int, Edit]) -> None:
        self.undone: set[int] = set()
        self._sites: dict[int, tuple[str, str, str]] = {}
        self._keywords: dict[int, list[str]] = {}
        for number, edit in edits.items():
            was, now = _expression(old[edit.start : edit.stop]), _expression(edit.new)
            call = _expression(f"_({edit.new.strip().strip(',')})")
            if edit.what == "site" and was and now:
                self._sites[number] = ast.dump(was), ast.dump(now), edit.new
            elif edit.what == "argument" and edit.start == edit.stop and isinstance(call, ast.Call):
                self._keywords[number] = [ast.dump(keyword) for keyword in call.keywords]

    def _same(self, old: ast.AST, new: ast.AST) -> bool:
        return False

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

    def _rest(
        self, parent: ast.AST, field: str, old: list[Any], new: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        if not (field == "keywords" and isinstance(parent, ast.Call) and len(new) > len(old)):
            return old, new
        for number, dumps in self._keywords.items():
            added = [node for node in new if ast.dump(node) in dumps]
            if number not in self.undone and len(added) == len(dumps) == len(new) - len(old):
                self.undone.add(number)
                return old, [node for node in new if node not in added]
        return old, new


def _padded(defaults: Sequence[ast.expr], count: int) -> list[ast.expr | None]:
    """The defaults of the last parameters, with None for those before."""
    return [*[None] * (count - len(defaults)), *defaults]


def _expression(text: str) -> ast.expr | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(f"({text}\n)", mode="eval").body
    except (SyntaxError, ValueError):
        return None


def _last_line(text: str) -> str:
    return _NEWLINE.split(text[-1000:])[-1]


def _ends_in_comment(line: str) -> bool:
    """Whether a line ends within a comment, as far as can be told without those before it."""
    if "#" not in line:
        return False
    with suppress(tokenize.TokenError, SyntaxError):
        for token in tokenize.generate_tokens(io.StringIO(line.strip()).readline):
            if token.type == tokenize.COMMENT:
                return True
    return False


def _open_quotes(text: str) -> list[str]:
    """The quotes of the f-strings that are open behind a text; none where Python checks itself."""
    quotes: list[str] = []
    with suppress(tokenize.TokenError, SyntaxError):  # at the end, for what is open
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            name = tokenize.tok_name[token.type]
            if name.endswith("STRING_START"):
                quotes.append(token.string.lstrip(string.ascii_letters))
            elif name.endswith("STRING_END"):
                quotes.pop()
    return quotes


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
        raise _Unsound(f"line {old.lineno}: what would be replaced is written, not read")
    bare = isinstance(new, ast.Tuple) and not isinstance(_expression(f"{text}.x"), ast.Attribute)
    if bare or isinstance(new, _PIECES):
        raise _Unsound(f"line {old.lineno}: the replacement is not an expression by itself")
    if not isinstance(old, _REPLACEABLE):
        raise _Unsound(f"line {old.lineno}: {type(old).__name__} is no use of a getter")
    if _special(old) != _special(new):
        raise _Unsound(f"line {old.lineno}: the replacement does more than read, or less")


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
    return (_of_import(node) and what == "import") or (
        isinstance(node, ast.stmt) and what == "statement"
    )


def _of_import(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module != "__future__"
    return isinstance(node, ast.Import | ast.alias | ast.Pass)


def _docstring(body: Sequence[ast.stmt]) -> bool:
    first = body[0] if body else None
    value = first.value if isinstance(first, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _uses(body: Iterable[ast.AST], name: str) -> int:
    """The line in which a name is read or bound, functions with a parameter of it apart; or 0."""
    pending = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and node.id == name:
            return node.lineno
        if isinstance(node, _Function):
            args = node.args
            if name in {arg.arg for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]}:
                pending += [*args.defaults, *filter(None, args.kw_defaults)]
                continue
        pending.extend(ast.iter_child_nodes(node))
    return 0


# ---- constructors ------------------------------------------------------------------------------


def _keeps_what_it_is_passed(new: Source, edits: Sequence[Edit]) -> None:
    """Raise where a constructor keeps a parameter, and then calls that of a base which keeps one as
    well, and is not passed it.
    """
    matched = (_KEEPING.fullmatch(edit.new) for edit in edits if edit.what == "statement")
    names = [each["name"] for each in matched if each]
    for name in {each for each in names if names.count(each) > 1}:
        classes = {each.name: each for each in ast.walk(new.tree) if isinstance(each, ast.ClassDef)}
        keepers = {each: _last_kept(klass, name) for each, klass in classes.items()}
        for one, line in keepers.items():
            above = _above(classes[one], classes) if line else set()
            if any(keepers[each] for each in above) and _passes_nothing(classes[one], name, line):
                raise _Unsound(f"line {line}: the {name} that is kept would be lost to a base")


def _constructors(klass: ast.ClassDef) -> list[ast.FunctionDef]:
    return [e for e in klass.body if isinstance(e, ast.FunctionDef) and e.name == "__init__"]


def _of_its_class(method: ast.AST) -> Iterator[ast.AST]:
    """Every node in a method, but those of classes, and of functions with a self of their own, in
    it: what these call is not of the method's object.
    """
    own = _first_parameter(method)
    waiting = [method]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [
            inner
            for inner in ast.iter_child_nodes(each)
            if not isinstance(inner, ast.ClassDef) and not own == _first_parameter(inner) != ""
        ]


def _first_parameter(node: ast.AST) -> str:
    arguments = getattr(node, "args", None)
    if not isinstance(arguments, ast.arguments):
        return ""
    return next((each.arg for each in (*arguments.posonlyargs, *arguments.args)), "")


def _last_kept(klass: ast.ClassDef, name: str) -> int:
    """The line in which a constructor puts a parameter on its object; or 0."""
    lines = [
        each.lineno
        for constructor in _constructors(klass)
        for each in _of_its_class(constructor)
        if isinstance(each, ast.Assign)
        and isinstance(each.targets[0], ast.Attribute)
        and each.targets[0].attr == name
        and isinstance(each.value, ast.Name)
        and each.value.id == name
    ]
    return max(lines, default=0)


def _passes_nothing(klass: ast.ClassDef, name: str, line: int) -> bool:
    """Whether from a line on a constructor calls another one, and does not pass it a parameter."""
    for constructor in _constructors(klass):
        first = [each.arg for each in (*constructor.args.posonlyargs, *constructor.args.args)][:1]
        for call in _of_its_class(constructor):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            of, given = call.func.value, [e.id for e in call.args[:1] if isinstance(e, ast.Name)]
            by_super = isinstance(of, ast.Call) and getattr(of.func, "id", "") == "super"
            if (
                call.func.attr == "__init__"
                and call.lineno > line
                and (by_super or (given and given == first))
                and not any(each.arg in (name, None) for each in call.keywords)
            ):
                return True
    return False


def _above(klass: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """The classes of the file that a class is made of."""
    found: set[str] = set()
    waiting = [klass]
    while waiting:
        names = {each.id for each in waiting.pop().bases if isinstance(each, ast.Name)}
        waiting += [classes[each] for each in names - found if each in classes]
        found |= names & classes.keys()
    return found - {klass.name}


# ---- names -------------------------------------------------------------------------------------


def _names_keep_their_meaning(old: Source, new: Source, undo: _ByPlace) -> None:
    """No read of a name whose import went; none that was in use is taken by an import."""
    came, went = _bound(undo.came), _bound(undo.went)
    for name in went - came:
        if _mentions(new, name) and not hasattr(builtins, name):
            table = _table(new)
            if not _imports(table, name) and _reads(table, name) and not _has_star(new.tree):
                raise _Unsound(f"{name} would still be read, and its import be gone")
    for name in came - went:
        if _mentions(old, name):
            table = _table(old)
            if _assigns(table, name):
                raise _Unsound(f"{name} is in use where it would be imported")


def _bound(changes: Iterable[_Brought]) -> set[str]:
    """The names that imports bind."""
    found = set()
    for change in changes:
        aliases = change.node.names if isinstance(change.node, _Import) else [change.node]
        for alias in aliases:
            if isinstance(alias, ast.alias):
                found.add(alias.asname or alias.name.partition(".")[0])
    return found


def _table(source: Source) -> symtable.SymbolTable:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return symtable.symtable(source.text, source.name, "exec")


def _mentions(source: Source, name: str) -> bool:
    # The search for a string alone is much faster, and mostly enough.
    return name in source.text and bool(re.search(rf"\b{re.escape(name)}\b", source.text))


def _imports(table: symtable.SymbolTable, name: str) -> bool:
    """Whether a module has a name from an import, its own or one in a function that says global."""
    own = table.lookup(name) if name in table.get_identifiers() else None
    return bool(own and own.is_imported()) or any(
        each.is_declared_global() and each.is_imported() for each in _everywhere(table, name)
    )


def _assigns(table: symtable.SymbolTable, name: str) -> bool:
    """Whether a name is a module's own: a variable, a function, a class."""
    own = table.lookup(name) if name in table.get_identifiers() else None
    return bool(own and own.is_assigned() and not own.is_imported()) or any(
        each.is_declared_global() and each.is_assigned() for each in _everywhere(table, name)
    )


def _reads(table: symtable.SymbolTable, name: str) -> bool:
    own = table.lookup(name) if name in table.get_identifiers() else None
    return bool(own and own.is_referenced()) or any(
        each.is_global() and each.is_referenced() for each in _everywhere(table, name)
    )


def _everywhere(table: symtable.SymbolTable, name: str) -> Iterator[symtable.Symbol]:
    for child in table.get_children():
        if name in child.get_identifiers():
            yield child.lookup(name)
        yield from _everywhere(child, name)


def _has_star(tree: ast.Module) -> bool:
    return any(
        alias.name == "*"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
