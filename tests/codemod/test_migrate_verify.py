"""The verifier lets right rewrites pass and no damaged one.

The cases are marked texts: ``⟦site|old|new⟧`` is an edit. Each right one is tried in every
newline style, with tabs, with a byte order mark and in Latin-1; then it is damaged in every way
that could happen to it, and each damage must be found.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from migrate_cases import PROGRAMS, cases
from old_core import core_folders

from megapg.migrate.edit.soundness import verify
from megapg.migrate.edit.texts import DESCRIPTION
from megapg.migrate.migration import Edit, Rewritten
from megapg.migrate.python.insert import add_argument, add_parameter, add_statement
from megapg.migrate.python.source import Source, parse

NEWER = sys.version_info >= (3, 12)

_MARK = re.compile(r"⟦(\w+)\|(.*?)\|(.*?)⟧", re.DOTALL)


def rewritten(marked: str, encoding: str = "utf-8", mark: bytes = b"") -> Rewritten:
    """The rewrite that a marked text describes."""
    text, edits, at = "", [], 0
    for found in _MARK.finditer(marked):
        what, old, new = found.groups()
        text += marked[at : found.start()]
        edits.append(Edit(len(text), len(text) + len(old), new, what))
        text, at = text + old, found.end()
    text += marked[at:]
    return of(text, edits, encoding, mark)


def of(text: str, edits: list[Edit], encoding: str = "utf-8", mark: bytes = b"") -> Rewritten:
    data = [mark + each.encode(encoding) for each in (text, applied(text, edits))]
    return Rewritten("a.py", Path("a.py"), *data, text, tuple(edits))


def applied(text: str, edits: list[Edit] | tuple[Edit, ...]) -> str:
    for edit in reversed(edits):
        text = text[: edit.start] + edit.new + text[edit.stop :]
    return text


# ---- right ones --------------------------------------------------------------------------------

RIGHT = cases("verify_right")
RIGHT |= {
    "nothing but it": "⟦site|mpu.check()|megapg.resolve(pg).check()⟧",
    "no newline at the end": "def f():\n    return ⟦site|mpu.a()|pg.a⟧",
    "form feeds": "import a\n\f\nx = 1\n\f\ndef f():\n    \f\n    ⟦site|mpu.a()|pg.a⟧\n",
}

RIGHT_ON_NEWER = cases("verify_right_on_newer")

CASES = RIGHT | (RIGHT_ON_NEWER if NEWER else {})
every_case = pytest.mark.parametrize("case", CASES)


def latin(marked: str) -> Rewritten:
    cookie = "# -*- coding: latin-1 -*-\n# é\n"
    first = "#!/usr/bin/env python\n" if marked.startswith("#!") else ""
    rest = marked.removeprefix(first).replace("日本", "ü")
    return rewritten(first + cookie + rest, "latin-1")


DRESSES = {
    "unix": rewritten,
    "windows": lambda marked: rewritten(marked.replace("\n", "\r\n")),
    "old mac": lambda marked: rewritten(marked.replace("\n", "\r")),
    "tabs": lambda marked: rewritten(marked.replace("    ", "\t")),
    "byte order mark": lambda marked: rewritten(marked, mark=b"\xef\xbb\xbf"),
    "latin-1": latin,
}


@pytest.mark.parametrize("dress", DRESSES)
@every_case
def test_a_right_rewrite_passes(case: str, dress: str) -> None:
    assert verify(DRESSES[dress](CASES[case])) is None


def test_the_marks_mean_what_they_say() -> None:
    found = rewritten("a ⟦site|b|c⟧ d⟦import||e⟧", mark=b"!")
    assert (found.before, found.after) == (b"!a b d", b"!a c de")
    assert found.edits == (Edit(2, 3, "c", "site"), Edit(5, 5, "e", "import"))


# ---- wrong ones, one by one --------------------------------------------------------------------

WRONG = cases("verify_wrong")
WRONG |= {
    "another call's arguments -> is no Python": "f(a⟦argument||, pg=pg⟧",
    "a statement taken -> beyond": "x = 1\n⟦statement|y = 2\n|z = 2\n⟧",
    "another newline -> newline": "x = 1\n⟦import||import a\r\n⟧y = 2\n",
    "half a newline -> newline": "x = 1\r⟦import||import a\r\n⟧\ny = 2\n",
    "a line in another string -> would change": 'x = """a⟦docstring||\n' + DESCRIPTION + '⟧"""',
    "a string in two -> not the docstring": 'def f():\n    """a⟦docstring||""" """⟧b"""',
    "a line in place of another -> would change": 'def f():\n    """a⟦docstring|\nb|\nc⟧"""',
    "a line with a meaning -> would change": 'def f():\n    """a⟦docstring||\n\\x41⟧"""',
    "a site in a docstring -> would change": 'def f():\n    """a⟦site||\nb⟧"""',
    "outside of a function -> compile": "def f():\n    x = 1\n⟦statement||await g()\n⟧",
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rewrite_is_refused(case: str) -> None:
    message = case.partition(" -> ")[2]
    found = verify(rewritten(WRONG[case]))
    assert found is not None
    assert message in found
    assert "\n" not in found


def test_an_f_string_stays_one_of_python_3_11() -> None:
    """Also where a newer Python would take the quotes."""
    marked = "x = f\"{a} {⟦site|mpu.a()|pg.rank('tp')⟧}\"\n"
    assert verify(rewritten(marked)) is None
    found = verify(rewritten(marked.replace("'tp'", '"tp"')))
    assert found is not None
    assert not NEWER or "from 3.12 on" in found
    found = verify(rewritten("x = f'{⟦site|mpu.a()|pg.join(\"\\\\n\")⟧}'\n"))
    assert found is not None
    assert not NEWER or "from 3.12 on" in found


def test_a_coding_line_that_would_not_be_seen() -> None:
    marked = "#\n⟦import||import a\n⟧# coding: latin-1\nx = 'é'\n"
    assert "would be unreadable" in (verify(rewritten(marked, "latin-1")) or "")
    plain = verify(rewritten(marked.replace("é", "e"), "latin-1"))
    assert plain == "would be read as utf-8 instead of iso-8859-1"


def test_a_letter_that_the_encoding_has_not() -> None:
    marked = "# coding: latin-1\nx = ⟦site|a()|b⟧\n"
    found = rewritten(marked, "latin-1")
    edits = (replace(found.edits[0], new="日"),)
    assert verify(replace(found, edits=edits)) == "'日' can't be written in iso-8859-1"


def test_bytes_that_are_not_the_edits() -> None:
    right = rewritten("x = ⟦site|a()|b⟧  # why\ny = 'a'\n")
    assert verify(right) is None
    for data in (
        right.after + b"\n",
        right.after.replace(b"why", b"who"),
        right.after.replace(b"'", b'"'),
        right.after.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + right.after,
        right.before,
    ):
        assert (
            verify(replace(right, after=data))
            == "the new bytes are not the old ones with the edits"
        )
    assert "is not the file's" in (verify(replace(right, text=right.text + " ")) or "")


def test_a_file_that_is_parsed_already() -> None:
    right = rewritten("x = 2 * ⟦site|a()|b⟧\n")
    wrong = rewritten("x = 2 * ⟦site|a()|b + c⟧\n")
    for text in (right.before, b"y = 1\n"):  # the other is of no use
        source = parse(right.path, right.file, text)
        assert isinstance(source, Source)
        assert verify(right, source) is None
        assert "would become" in (verify(wrong, source) or "")


def test_warnings_are_not_ours() -> None:
    marked = "⟦import|import a\n|import megapg\n⟧x = '\\d' is 'a'\ny = b.a, '\\d'.megapg\n"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify(rewritten(marked)) is None


def test_edits_out_of_order() -> None:
    right = rewritten("x = ⟦site|a()|b⟧ + ⟦site|c()|d⟧\n")
    assert "overlap" in (verify(replace(right, edits=right.edits[::-1])) or "")
    twice = (right.edits[0], *right.edits)
    assert "overlap" in (verify(replace(right, edits=twice)) or "")
    outside = (*right.edits, Edit(99, 100, "", "site"))
    assert "outside" in (verify(replace(right, edits=outside)) or "")


@pytest.mark.parametrize("depth", [50, 90, 1000, 100_000])
@pytest.mark.parametrize("shape", ["(%s)", "-%s", "[%s]", "f(%s)", "(lambda: %s)", "1 + %s"])
def test_depth_is_no_crash(shape: str, depth: int) -> None:
    before, behind = shape.split("%s")
    found = rewritten(f"x = {before * depth}⟦site|a()|b⟧{behind * depth}\n")
    said = verify(found)
    assert said is None or "too" in said or "no Python" in said
    if depth == 50:
        assert said is None


def test_a_long_chain_is_no_crash() -> None:
    for length in (900, 20_000):
        chain = " + ".join(["1"] * length)
        said = verify(rewritten(f"x = ⟦site|a()|b⟧ + {chain} + ⟦site|a()|b⟧\n"))
        assert said is None or "too deeply" in said
        said = verify(rewritten(f"x = f'{{⟦site|a()|b⟧ + {chain}}}'\n"))
        assert said is None or "too deeply" in said


# ---- real files --------------------------------------------------------------------------------


def much_rewritten(source: Source, every: int) -> Rewritten:
    """Many of its reads replaced, and a parameter, an argument, a statement wherever one can be."""
    nodes = [*ast.walk(source.tree)]
    in_strings = {
        id(inner) for node in nodes if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)
    }
    edits: list[Edit] = []
    for node in nodes[::every]:
        if id(node) in in_strings:
            continue
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            edits.append(Edit(*source.extent(node), "(1 if pg_new else 2)", "site"))
        elif isinstance(node, ast.FunctionDef) and node.args.kwarg is None:
            edits += add_parameter(source, node, "pg_new=None")
        elif isinstance(node, ast.Call):
            edits += add_argument(source, node, "pg_new=pg_new")
        elif isinstance(node, ast.Assign | ast.If | ast.Return):
            edits += filter(None, [add_statement(source, node, "pg_new = None")])
    apart: list[Edit] = []
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.stop)):
        if not apart or edit.start >= apart[-1].stop:
            apart.append(edit)
    return of(source.text, apart)


@pytest.mark.contract
def test_right_rewrites_of_real_files_pass() -> None:
    tried = 0
    for file in sorted(core_folders()[0].rglob("*.py"))[::10]:
        source = parse(file, file.name, file.read_bytes())
        assert isinstance(source, Source)
        for every in (1, 40):
            right = much_rewritten(source, every)
            found = verify(right)
            assert found is None or not right.edits, (file, found)
            tried += len(right.edits)
            for edit in right.edits[:: max(1, len(right.edits) // 3)]:
                place = right.edits.index(edit)
                damaged = changed(right, place, start=edit.start - 1, new=edit.new + "+")
                assert verify(damaged) is not None, (file, edit)
    assert tried > 5_000


# ---- damage ------------------------------------------------------------------------------------


def comments_of(text: str) -> list[str] | None:
    try:
        tokens = [*tokenize.generate_tokens(io.StringIO(text, newline="\n").readline)]
    except (tokenize.TokenError, SyntaxError):
        return None
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def dump(text: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.dump(ast.parse(text))
    except SyntaxError:
        return None


def alike(one: str, other: str) -> bool:
    """Whether two files differ in layout only, so that a damage is none."""
    return dump(one) == dump(other) and comments_of(one) == comments_of(other)


def changed(right: Rewritten, number: int, **values: object) -> Rewritten:
    """The rewrite with another edit, and the bytes that fit."""
    edits = list(right.edits)
    edits[number] = replace(edits[number], **values)
    return of(right.text, edits)


def in_agreement(right: Rewritten) -> Iterator[tuple[str, Rewritten]]:
    """Damage to what the edits do: the bytes are those that the edits say."""
    text = right.text
    for number, edit in enumerate(right.edits):
        for left, rest in ((-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (1, 1), (-1, 1), (1, -1)):
            start, stop = edit.start + left, edit.stop + rest
            behind = right.edits[number + 1].start if number + 1 < len(right.edits) else len(text)
            before = right.edits[number - 1].stop if number else 0
            if before <= start <= stop <= behind:
                yield "span", changed(right, number, start=start, stop=stop)
        for at, letter in enumerate(edit.new):
            if letter in "()[]{},:='\"\n":
                yield (
                    "letter dropped",
                    changed(right, number, new=edit.new[:at] + edit.new[at + 1 :]),
                )
        for letter in "(),:=#\\'\"\n;":
            yield "letter added", changed(right, number, new=edit.new + letter)
            yield "letter added", changed(right, number, new=letter + edit.new)
        if edit.what == "site":
            for loose in LOOSE:
                yield "precedence", changed(right, number, new=loose)
    for one in range(len(right.edits)):
        for other in range(one):
            texts = [edit.new for edit in right.edits]
            if right.edits[one].what != right.edits[other].what:  # else either may be right
                texts[one], texts[other] = texts[other], texts[one]
                pairs = zip(right.edits, texts, strict=True)
                yield "swapped", of(text, [replace(edit, new=new) for edit, new in pairs])


AGREEING = ("span", "letter dropped", "letter added", "swapped")
LOOSE = ("a if b else c", "a or b", "not a", "a == b", "a | b", "a + b", "-a", "lambda: a")
LOOSE += ("a ** b", "a, b", "a for a in b", "*a", "**a", "a=b", "a: b", "await a", "a := b", "")


def in_disagreement(right: Rewritten) -> Iterator[tuple[str, Rewritten]]:
    """Damage to the list of edits, to the bytes, or to the kinds."""
    for number, edit in enumerate(right.edits):
        edits = right.edits
        for values in (
            *({"start": edit.start - 1, "stop": edit.stop - 1}, {"start": edit.start + 1}),
            *({"stop": edit.stop + 1}, {"stop": edit.stop - 1}, {"start": edit.start - 1}),
            *({"new": edit.new + " "}, {"new": edit.new[1:]}),
        ):
            other = (*edits[:number], replace(edit, **values), *edits[number + 1 :])
            yield "listed otherwise", replace(right, edits=other)
        yield "not listed", replace(right, edits=edits[:number] + edits[number + 1 :])
        yield "listed twice", replace(right, edits=(*edits[: number + 1], *edits[number:]))
        for what in {"site", "parameter", "argument", "statement", "import", ""} - {edit.what}:
            yield "kind", changed(right, number, what=what)
    for one in range(len(right.edits)):
        for other in range(one):
            texts = [edit.new for edit in right.edits]
            texts[one], texts[other] = texts[other], texts[one]
            pairs = zip(right.edits, texts, strict=True)
            edits = tuple(replace(edit, new=new) for edit, new in pairs)
            yield "swapped in the list", replace(right, edits=edits)
    for at in range(len(right.after)):
        yield "byte dropped", replace(right, after=right.after[:at] + right.after[at + 1 :])
        yield (
            "byte changed",
            replace(
                right, after=right.after[:at] + bytes([right.after[at] ^ 1]) + right.after[at + 1 :]
            ),
        )
    for comment in re.finditer(rb"[ ]*#[^\n]*", right.after):
        begin, end = comment.span()
        yield "comment dropped", replace(right, after=right.after[:begin] + right.after[end:])


def harmless(kind: str, right: Rewritten, mutant: Rewritten) -> bool:
    """Whether a damage is none, told without the verifier."""
    text, other = (each.after.decode(errors="replace") for each in (mutant, right))
    if kind == "precedence":
        return stands_alone(mutant)
    if kind == "kind":  # an import that comes is a statement
        edits = zip(right.edits, mutant.edits, strict=True)
        kinds = {(was.what, now.what, was.start == was.stop) for was, now in edits if was != now}
        return kinds == {("import", "statement", True)}
    if kind in AGREEING:
        return alike(text, other) or requires_more(mutant)
    return text == other == applied(mutant.text, mutant.edits)  # the same said in another way


def requires_more(mutant: Rewritten) -> bool:
    """Whether ``pg=None`` became a parameter ``pgNone``: as good a text as any."""
    return any(edit.what == "parameter" and "pgNone" in edit.new for edit in mutant.edits)


def stands_alone(mutant: Rewritten) -> bool:
    """Whether every replacement means what it would in parentheses."""
    enclosed = [
        replace(edit, new=f"({edit.new})") if edit.what == "site" else edit for edit in mutant.edits
    ]
    tree = dump(mutant.after.decode())
    return tree is not None and tree == dump(applied(mutant.text, enclosed))


def test_every_damage_is_found() -> None:
    found: Counter[str] = Counter()
    survivors = []
    for name, marked in CASES.items():
        right = rewritten(marked)
        for kind, mutant in (*in_agreement(right), *in_disagreement(right)):
            if verify(mutant) is not None:
                found[kind] += 1
            elif not harmless(kind, right, mutant):
                survivors.append((kind, name, mutant.after, mutant.edits))
    print(f"{sum(found.values())} damaged rewrites, {len(survivors)} not found: {dict(found)}")
    assert survivors == []
    assert sum(found.values()) > 10_000
    assert len(found) == 13
    assert min(found.values()) > 5


# ---- constructors ------------------------------------------------------------------------------

KEEPING = """
class Base:
    def __init__(self, a⟦parameter||, *, pg=None⟧):
⟦statement||        self.pg = pg
⟧        self.a = a


class Derived(Base):
    def __init__(self⟦parameter||, *, pg=None⟧):
⟦statement||        self.pg = pg
⟧        {}
"""
KEPT_BEHIND = PROGRAMS["KEPT_BEHIND"]


@pytest.mark.parametrize("call", ["super()", "super(Derived, self)", "Base"])
def test_what_a_constructor_keeps_is_not_lost_to_a_base(call: str) -> None:
    first = "self, " if call == "Base" else ""
    passing = KEEPING.format(f"{call}.__init__({first}1⟦argument||, pg=pg⟧)")
    assert verify(rewritten(passing)) is None
    lost = verify(rewritten(KEEPING.format(f"{call}.__init__({first}1)")))
    assert lost is not None
    assert "lost to a base" in lost
    assert verify(rewritten(KEPT_BEHIND)) is None
