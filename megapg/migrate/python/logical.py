"""Logical lines of a file: their tokens, and what a layout of them may add or take."""

from __future__ import annotations

import keyword
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from megapg.migrate.python.source import tokens

OPENING, CLOSING = frozenset("([{"), frozenset(")]}")
_ASSIGNING = re.compile(r"(?:\*\*|//|<<|>>|[-+*/%@&|^])?=")


class Unsure(Exception):
    """A statement with something that no rule here is about."""


@dataclass(frozen=True)
class Token:
    """A token, or an f-string, and where it is."""

    text: str
    start: int
    stop: int
    is_string: bool = False


@dataclass
class Statement:
    """The tokens of one logical line, without what a layout may add or take."""

    text: str  # of the file
    indent: str  # of the line
    stop: int  # index behind the last token
    kept: list[Token]
    # For each opening bracket the index of its closing one.
    closed: dict[int, int]
    magic: set[int]  # brackets that a comma before their end keeps open
    optional: tuple[int, int] | None  # what may have parentheses or not, as a half-open range

    def gap(self, number: int) -> tuple[int, int]:
        """Where the text before a token is, and that behind the last one."""
        begin = self.kept[number - 1].stop
        return begin, self.kept[number].start if number < len(self.kept) else self.stop


def read(text: str, begin: int, *, magic_comma: bool = True) -> Statement:
    """The statement, or the head of one, that begins at an index.

    Raises:
        Unsure: it has comments, strings over several lines, or the like.
    """
    found = list(_tokens(text, begin))
    start = max(text.rfind("\n", 0, begin), text.rfind("\r", 0, begin)) + 1
    indent = text[start:begin]
    if indent.strip(" ") or not found:
        raise Unsure
    strings = [each.is_string for each in found]
    if any(one and other for one, other in pairwise(strings)):
        raise Unsure
    pairs = _pairs(found)
    dropped: set[int] = set()
    magic: set[int] = set()
    for opened, closed in pairs.items():
        if found[closed - 1].text == "," and closed - 1 > opened:
            inner = at_depth(found, pairs, opened + 1, closed)
            commas = sum(found[i].text == "," for i in inner)
            calls, bracket = is_call(found, opened), found[opened].text
            if commas > 1 or (bracket == "(") == calls:  # not what makes one value a tuple
                dropped.add(closed - 1)
                if magic_comma:
                    magic.add(opened)
    whole = _expression(found, pairs)
    if whole is not None:
        first, last = whole
        if (
            found[first].text == "("
            and pairs[first] == last - 1
            and _is_redundant(found, pairs, first, last - 1)
        ):
            dropped |= {first, last - 1}
            whole = first + 1, last - 1
    places = {old: new for new, old in enumerate(i for i in range(len(found)) if i not in dropped)}
    places[len(found)] = len(places)

    def place(index: int) -> int:
        while index not in places:
            index += 1
        return places[index]

    return Statement(
        text=text,
        indent=indent,
        stop=found[-1].stop,
        kept=[each for i, each in enumerate(found) if i not in dropped],
        closed={places[o]: places[c] for o, c in pairs.items() if o not in dropped},
        magic={places[each] for each in magic if each in places},
        optional=(place(whole[0]), place(whole[1])) if whole else None,
    )


def _tokens(text: str, begin: int) -> Iterator[Token]:
    """The tokens up to the end of the logical line."""
    inside: list[int] = []
    end = begin
    try:
        for token, start, stop in tokens(text, begin):
            name = tokenize.tok_name[token.type]
            if name.endswith("STRING_START"):
                inside.append(start)
            elif name.endswith("STRING_END"):
                start = inside.pop()
            if inside or token.type == tokenize.NL:
                continue
            if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
                return
            between, said = text[end:start], text[start:stop]
            if token.type == tokenize.COMMENT or said == ";" or "\\" in between:
                raise Unsure
            is_string = name == "STRING" or name.endswith("STRING_END")
            if is_string and ("\n" in said or "\r" in said):
                raise Unsure
            yield Token(said, start, stop, is_string)
            end = stop
    except (tokenize.TokenError, SyntaxError, IndexError) as error:
        raise Unsure from error


def _pairs(found: Sequence[Token]) -> dict[int, int]:
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for i, each in enumerate(found):
        if each.text in OPENING:
            opened.append(i)
        elif each.text in CLOSING:
            if not opened:
                raise Unsure
            pairs[opened.pop()] = i
    if opened:
        raise Unsure
    return pairs


def at_depth(found: Sequence[Token], pairs: dict[int, int], begin: int, end: int) -> Iterator[int]:
    """The tokens of a stretch that are in no bracket of it; of these the opening ones."""
    at = begin
    while at < end:
        yield at
        at = pairs[at] + 1 if at in pairs else at + 1


def is_call(found: Sequence[Token], opened: int) -> bool:
    """Whether a bracket opens what is called or looked up with."""
    if not opened:
        return False
    before = found[opened - 1]
    if before.is_string or before.text in CLOSING:
        return True
    return before.text.isidentifier() and not keyword.iskeyword(before.text)


def _expression(found: Sequence[Token], pairs: dict[int, int]) -> tuple[int, int] | None:
    """The expression of a statement around which parentheses mean nothing."""
    first, last = found[0].text, len(found)
    if first in ("if", "elif", "while"):
        return 1, last - 1
    if first == "return" and last > 1:
        return 1, last
    outside = at_depth(found, pairs, 0, last)  # up to a lambda, which has its own = and commas
    flat = list(takewhile(lambda i: found[i].text != "lambda", outside))
    if first == "assert":
        behind = [i for i in flat if found[i].text == ","]
        return (1, behind[0]) if behind else None
    if first == "for":
        behind = [i for i in flat if found[i].text == "in"]
        return (behind[0] + 1, last - 1) if behind else None
    if keyword.iskeyword(first) and first not in ("await", "None", "True", "False", "not"):
        return None
    behind = [i for i in flat if _ASSIGNING.fullmatch(found[i].text)]
    return (behind[-1] + 1, last) if behind else None


def _is_redundant(found: Sequence[Token], pairs: dict[int, int], opened: int, closed: int) -> bool:
    words = {found[i].text for i in at_depth(found, pairs, opened + 1, closed)}
    return closed > opened + 1 and words.isdisjoint((",", "for", ":=", "yield", "await"))
