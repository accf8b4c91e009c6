"""Where the lines of a statement end, as black and ruff lay them out.

Only the space between tokens is chosen here, the parentheses around a whole expression, and the
comma behind a last element. A caller can tell whether a file is laid out so: the layout of what is
there is what is there then.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megapg.migrate.python.logical import CLOSING, OPENING, Statement, Unsure, at_depth, is_call

_INDENT = "    "
# What a long line is split at, the first kind that there is; behind a comma, before others.
_KINDS = (
    frozenset({"for", "async"}),
    frozenset({","}),
    frozenset({"if", "else"}),
    frozenset({"and", "or"}),
    frozenset({"==", "!=", "<", ">", "<=", ">=", "in", "is", "not"}),
    frozenset({"|"}),
    frozenset({"^"}),
    frozenset({"&"}),
    frozenset({"<<", ">>"}),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "//", "%", "@"}),
)
_COMPREHENSION, _COMMA = 0, 1


def laid_out(
    statement: Statement, width: int, newline: str, *, splits_message: bool = False
) -> list[str]:
    """What is between the tokens of a statement: before each but the first, and behind the last.
    Of a long assertion the message goes into parentheses, as ruff has it since 0.9, or the test.

    Raises:
        Unsure: no rule here says how.
    """
    return _Layout(statement, width, newline, splits_message).run()


@dataclass
class _Layout:
    """Chooses the gaps of one statement."""

    statement: Statement
    width: int
    newline: str
    splits_message: bool
    gaps: dict[int, str] = field(default_factory=dict)

    def run(self) -> list[str]:
        statement = self.statement
        count = len(statement.kept)
        self.gaps = {i: self._glue(i) for i in range(1, count)} | {count: ""}
        self._statement(count)
        return [self.gaps[i] for i in range(1, count + 1)]

    def _statement(self, count: int) -> None:
        statement, indent = self.statement, self.statement.indent
        if self._fits(0, count, indent):
            return
        words = [each.text for each in statement.kept[:2]]
        if "def" in words:
            if self._text(count - 1) != ":":
                raise Unsure  # its body is on the same line
            opened = min(i for i in statement.closed)
            self._split(opened, 0, count, indent, "")
        elif words[0] == "assert" and statement.optional is not None:
            self._assert(*statement.optional, count)
        elif statement.optional is not None:
            self._with_optional(*statement.optional, count)
        elif words[0] == "with":
            self._with(count)
        elif words[0] in ("assert", "lambda", "del", "raise", "class", "match", "case"):
            raise Unsure
        else:
            self._right(0, count, indent, "")

    def _assert(self, begin: int, end: int, count: int) -> None:
        """Lay out what is asserted in parentheses, on one line, as it is where that was so."""
        indent = self.statement.indent
        deeper = indent + _INDENT
        if self.splits_message:  # which is a string, be it in parentheses already
            at = end + 1 + (self._text(end + 1) == "(")
            beyond = count - (at - end - 1)
            is_string = beyond == at + 1 and self.statement.kept[at].is_string
            if not is_string or not self._fits(0, end + 1, indent, " ("):
                raise Unsure
            is_bare = at == end + 1
            self.gaps[at] = f"{' (' if is_bare else ''}{self.newline}{deeper}"
            self.gaps[beyond] = f"{self.newline}{indent}{')' if is_bare else ''}"
            return
        if not self._fits(begin, end, deeper) or not self._fits(end, count, indent + ")"):
            raise Unsure
        self.gaps[begin] = f" ({self.newline}{deeper}"
        self.gaps[end] = f"{self.newline}{indent})"

    def _with(self, count: int) -> None:
        """Lay out the head of a statement with one manager, or with several in parentheses."""
        indent, closed = self.statement.indent, self.statement.closed
        if closed.get(1) == count - 2:
            if len(indent) + len(self._joined(0, count)) <= self.width:
                raise Unsure  # the parentheses may go
            self._split(1, 0, count, indent, "")
        elif any(self._text(each) == "," for each in self._flat(1, count)):
            raise Unsure
        else:
            self._right(0, count, indent, "")

    def _with_optional(self, begin: int, end: int, count: int) -> None:
        """Lay out a statement whose expression may stand in parentheses."""
        indent = self.statement.indent
        commas = [each for each in self._flat(begin, end) if self._text(each) == ","]
        is_returned = self._text(0) == "return" and commas[-1:] < [end - 1]
        is_sure = is_returned and (len(commas) > 1 or self._text(end - 1) in CLOSING)
        if (commas and not is_sure) or not self._fits(0, begin, indent, " ("):
            raise Unsure
        deeper = indent + _INDENT
        if self._may_do_without(begin, end):
            candidates = [each for each in self._brackets(begin, end) if each >= begin]
            for opened in self._fitting(candidates, 0, count, indent, ""):
                self._split(opened, 0, count, indent, "")
                return
            if begin in self.statement.closed:
                raise Unsure
        if not self._delimiters(begin, end) and not self._fits(begin, end, deeper):
            if list(self._brackets(begin, end)):
                raise Unsure
            return  # nothing makes it shorter
        self.gaps[begin] = f"{self._before_parenthesis(begin)}({self.newline}{deeper}"
        self.gaps[end] = f"{self.newline}{indent})"
        self._line(begin, end, deeper, "")
        if not self._fits(end, count, indent + ")"):
            raise Unsure

    def _before_parenthesis(self, begin: int) -> str:
        return " " if begin else ""

    def _may_do_without(self, begin: int, end: int) -> bool:
        delimiters = self._delimiters(begin, end)
        if not delimiters:
            return True
        if len(delimiters) > 1:
            return False
        closed = self.statement.closed
        deeper = len(self.statement.indent) + len(_INDENT)
        if begin in closed and closed[begin] > begin + 1:
            rest = closed[begin] + 1
            if rest < end:
                stop = min((each + 1 for each in closed if rest <= each < end), default=end)
                if deeper + 1 + len(self._joined(rest, stop)) <= self.width:
                    return True
        last = next((o for o, c in closed.items() if c == end - 1 and o >= begin), None)
        if last is None or closed[last] == last + 1:
            return False
        if self._text(last) == "[" and is_call(self.statement.kept, last):
            return False
        others = any(begin <= each < last for each in closed)
        return others or deeper + len(self._joined(begin, last + 1)) <= self.width

    def _line(self, begin: int, end: int, indent: str, trail: str) -> None:
        """Lay out what is within brackets, from the beginning of a line on."""
        if self._fits(begin, end, indent, trail):
            return
        delimiters = self._delimiters(begin, end)
        if not delimiters:
            self._right(begin, end, indent, trail)
            return
        self._at_each(delimiters, begin, end, indent, trail)

    def _at_each(
        self, delimiters: Sequence[int], begin: int, end: int, indent: str, trail: str
    ) -> None:
        """A line for each piece between delimiters."""
        is_comma = self.statement.kept[delimiters[0]].text == ","
        starts = [begin, *(each + is_comma for each in delimiters)]
        stops = [*starts[1:], end]
        for at, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            is_last = at == len(starts) - 1
            if at:
                self.gaps[start] = self.newline + indent
            self._line(start, stop, indent, (trail or "," * is_comma) if is_last else "")
            if is_last and is_comma and not trail:
                self._behind(stop, ",")

    def _behind(self, number: int, added: str) -> None:
        """Put a comma behind a token, before what is between it and the next."""
        self.gaps[number] = added + self.gaps[number]

    def _right(self, begin: int, end: int, indent: str, trail: str) -> None:
        """Split at the last brackets that leave a first line that fits."""
        candidates = list(self._brackets(begin, end))
        opened = next(self._fitting(candidates, begin, end, indent, trail), None)
        if opened is None:
            if candidates:
                raise Unsure
            return  # nothing makes it shorter
        self._split(opened, begin, end, indent, trail)

    def _fitting(
        self, candidates: Sequence[int], begin: int, end: int, indent: str, trail: str
    ) -> Iterator[int]:
        for opened in candidates:
            closed = self.statement.closed[opened]
            if not self._fits(begin, opened + 1, indent) or not self._fits(
                closed, end, indent, trail
            ):
                if opened in self.statement.magic:
                    return
                continue
            yield opened

    def _brackets(self, begin: int, end: int) -> Iterator[int]:
        """The brackets of a stretch with something in them, the last first."""
        closed = self.statement.closed
        outermost = [i for i in self._flat(begin, end) if i in closed]
        chained = [i for i in outermost if closed[i] + 1 < end and self._text(closed[i] + 1) == "."]
        if len(chained) > 1 and not self._delimiters(begin, end):
            raise Unsure  # a chain of calls, which has rules of its own
        for opened in reversed(outermost):
            if closed[opened] > opened + 1:
                yield opened

    def _split(self, opened: int, begin: int, end: int, indent: str, trail: str) -> None:
        """Put what is in brackets on lines of its own."""
        closed, deeper = self.statement.closed[opened], indent + _INDENT
        self.gaps[opened + 1] = self.newline + deeper
        self.gaps[closed] = self.newline + indent
        if not self._fits(begin, opened + 1, indent) or not self._fits(closed, end, indent, trail):
            raise Unsure
        delimiters = self._delimiters(opened + 1, closed)
        commas = delimiters and self._text(delimiters[0]) == ","
        is_def = "def" in [each.text for each in self.statement.kept[:2]] and not begin
        is_display = not is_call(self.statement.kept, opened)
        if opened in self.statement.magic or (is_def and not commas) or (is_display and commas):
            if commas:
                self._at_each(delimiters, opened + 1, closed, deeper, "")
            else:
                self._line(opened + 1, closed, deeper, ",")
                self._behind(closed, ",")
            return
        self._line(opened + 1, closed, deeper, "")

    # -- asking ------------------------------------------------------------------------------

    def _text(self, number: int) -> str:
        return self.statement.kept[number].text

    def _flat(self, begin: int, end: int) -> Iterator[int]:
        return at_depth(self.statement.kept, self.statement.closed, begin, end)

    def _fits(self, begin: int, end: int, indent: str, trail: str = "") -> bool:
        closed = self.statement.closed
        if any(begin <= each and closed[each] < end for each in self.statement.magic):
            return False
        return len(indent) + len(self._joined(begin, end)) + len(trail) <= self.width

    def _joined(self, begin: int, end: int) -> str:
        glue = (self._glue(i) if i > begin else "" for i in range(begin, end))
        return "".join(f"{space}{self._text(begin + i)}" for i, space in enumerate(glue))

    def _glue(self, number: int) -> str:
        """What is before a token that begins no line."""
        start, stop = self.statement.gap(number)
        between = self.statement.text[start:stop]
        before, here = self._text(number - 1), self._text(number)
        if not between.strip(" ") and (between or here != "("):
            return between
        if not between.strip(" ") and not between:
            return ""
        if before in OPENING or here in CLOSING or here in (",", ":", ".") or before == ".":
            return ""
        if here in ("(", "[") and "(" not in between and is_call(self.statement.kept, number):
            return ""
        return " "

    def _delimiters(self, begin: int, end: int) -> list[int]:
        """Where a stretch is split, by the first kind of delimiters that it has."""
        if self._text(begin) == "for":
            return []  # what it binds stays together
        flat = list(self._flat(begin, end))
        words = {self._text(i) for i in flat}
        if ":=" in words or "yield" in words:
            raise Unsure
        for number, kind in enumerate(_KINDS):
            found = [i for i in flat if self._text(i) in kind and self._divides(i, begin, end)]
            if "lambda" in words and number <= _COMMA:
                found = [i for i in found if not self._is_of_a_lambda(i, flat)]
            elif "lambda" in words:
                raise Unsure
            if found and number == _COMPREHENSION:
                if "else" in words or "async" in words:
                    raise Unsure
                found += [i for i in flat if self._text(i) == "if" and i > found[0]]
                return sorted(found)
            if found:
                return found
        return []

    def _is_of_a_lambda(self, number: int, flat: Sequence[int]) -> bool:
        """Whether a token stands between a ``lambda`` and its colon."""
        opened = 0
        for text in (self._text(i) for i in flat if i < number):
            opened += (text == "lambda") - (text == ":" and opened > 0)
        return opened > 0

    def _divides(self, number: int, begin: int, end: int) -> bool:
        if number == begin or self.statement.kept[number].is_string:
            return False
        here, before = self._text(number), self._text(number - 1)
        if here == ",":
            return number < end - 1
        if here in ("not", "in"):
            following = self._text(number + 1) if number + 1 < end else ""
            return (here == "not") == (following == "in") and before != "not"
        unary = before in OPENING or before in (",", "=", ":") or keyword.iskeyword(before)
        operator = not before.isidentifier() and before[:1] in "+-*/%@&|^<>=!~"
        if here in ("+", "-", "*", "**"):
            return not (unary and before not in ("None", "True", "False")) and not operator
        return True
