"""The verifier lets right rewrites pass and no damaged one.

The cases are marked texts: ``⟦site|old|new⟧`` is an edit. Each right one is tried in every
newline style, with tabs, with a byte order mark and in Latin-1; then it is damaged in every way
that could happen to it, and each damage must be found.
"""

from __future__ import annotations

import ast
import importlib.util
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

from megapg.migrate.insert import add_argument, add_parameter, add_statement
from megapg.migrate.migration import Edit, Rewritten
from megapg.migrate.source import Source, parse
from megapg.migrate.verify import verify

ROOT = Path(__file__).parents[1]
OLD_CORE = ROOT / ".venv" / "cores" / "0.12.0" / "megatron" / "core"
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


def sections(text: str) -> dict[str, str]:
    """What is below each ``=== heading``."""
    parts = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def applied(text: str, edits: list[Edit] | tuple[Edit, ...]) -> str:
    for edit in reversed(edits):
        text = text[: edit.start] + edit.new + text[edit.stop :]
    return text


# ---- right ones --------------------------------------------------------------------------------

RIGHT = sections(r"""
=== a call
from core import mpu
x = ⟦site|mpu.get()|pg.tp⟧
=== several on a line
x = ⟦site|mpu.a()|pg.tp⟧ * ⟦site|mpu.b()|pg.dp⟧, ⟦site|mpu.c()|c⟧
=== a tighter place
x = 2 * ⟦site|mpu.size()|(1 if pg is None else pg.tp.size())⟧ ** 2
=== its parentheses too
x = -⟦site|(mpu.size())|pg.tp.size()⟧
=== more parentheses
x = 2 * ⟦site|mpu.size()|((pg.tp.size() + 0))⟧
=== loose where it may be
x = ⟦site|mpu.size()|1 if pg is None else pg.tp.size()⟧
=== over lines
f(
    ⟦site|mpu.get(
        True,
    )|(
        pg.tp
        if pg
        else None
    )⟧,  # why
)
=== handed on
hook(⟦site|mpu.get_rank|pg.tp.rank⟧)
=== called
x = ⟦site|mpu.get_rank|pg.tp.rank⟧()
=== in a chain
x = ⟦site|mpu.get()|pg.tp⟧.ranks[⟦site|mpu.rank()|pg.tp.rank()⟧].real
=== a decorator
@wrap(⟦site|mpu.get()|pg.tp⟧)
@other
def f(a):  # one
    return a
=== a default
def f(a, b=⟦site|mpu.get()|pg.tp⟧, *, c=⟦site|mpu.get()|pg.tp⟧):
    return a
=== a lambda
f = lambda a: ⟦site|mpu.get()|pg.tp⟧ if a else ⟦site|mpu.get()|pg.dp⟧
=== a comprehension
x = [a for a in ⟦site|mpu.ranks()|pg.ranks('tp')⟧ if a != ⟦site|mpu.rank()|r⟧]
=== a dictionary
x = {'a': ⟦site|mpu.a()|pg.a⟧, **b, ⟦site|mpu.b()|pg.b⟧: 1}
=== a walrus around
if (a := ⟦site|mpu.get()|pg.tp⟧) is not None:
    print(a)
=== a walrus inside
print(⟦site|mpu.get(b := 1)|pg.get(b := 1)⟧, b)
=== match
match ⟦site|mpu.rank()|pg.rank('tp')⟧:
    case 0 if ⟦site|mpu.last()|pg.last⟧:
        pass
    case [1, *_] | {'a': 2}:
        x = ⟦site|mpu.get()|pg.tp⟧
=== async
async def f(a⟦parameter||, *, pg=None⟧):
    async with a as b:
        await g(⟦site|mpu.get()|pg.tp⟧⟦argument||, pg=pg⟧)
    return [c async for c in ⟦site|mpu.all()|pg.all⟧]
=== an annotation
x: ⟦site|mpu.Group|Group⟧ = None


def f(a: ⟦site|mpu.Group|Group⟧) -> ⟦site|mpu.Group|Group⟧: ...
=== assert, raise, yield, del
def f(a):
    assert ⟦site|mpu.a()|pg.a⟧, ⟦site|mpu.b()|pg.b⟧
    yield ⟦site|mpu.a()|pg.a⟧
    del a[⟦site|mpu.a()|pg.a⟧]
    raise E(⟦site|mpu.a()|pg.a⟧) from ⟦site|mpu.b()|pg.b⟧
=== semicolons
a = 1; b = ⟦site|mpu.a()|pg.a⟧; c = ⟦site|mpu.b()|pg.b⟧ ; d = 2
=== a continued line
x = 1 + \
    ⟦site|mpu.a()|pg.a⟧ + \
    2
=== strings side by side
patch('one.'
      'two', ⟦site|mpu.a()|pg.a⟧, ⟦site|'a.b.c'|'a.d.c'⟧)
=== in an f-string
x = f'{a!r:>{width}} of {⟦site|mpu.a()|pg.tp.a()⟧:>3} {{}} {⟦site|mpu.a()|pg.tp.a()⟧}' + b
=== deep in an f-string
x = f'{f(a, ⟦site|mpu.a()|b⟧, b=[c for c in ⟦site|mpu.b()|c⟧])} {d + ⟦site|m.e()|(1 if a else 2)⟧}'
=== f-strings side by side
x = ('é'
     f'{a} {⟦site|mpu.a()|pg.a⟧}'
     'plain' f"{⟦site|mpu.b()|pg['b']⟧}", 'é', ⟦site|mpu.c()|pg.c⟧)
=== a width in an f-string
x = f'{a:{⟦site|mpu.a()|pg.a⟧}}'
=== a long f-string
x = f'''é
  {⟦site|mpu.a()|pg.a⟧}
{  ⟦site|mpu.b(
    1)|pg["b"]⟧  }
'''
=== an argument in an f-string
x = f'{f(a⟦argument||, pg=pg⟧)} {g(⟦argument||pg=pg⟧)} {h(a, b=1)}'
=== a whole f-string
x = ⟦site|f'{mpu.a()}'|str(pg.a)⟧
=== a parameter
def f(a, b=1⟦parameter||, *, pg=None⟧) -> int:
    return g(a⟦argument||, pg=pg⟧)
=== the only parameter
def f(⟦parameter||*, pg=None⟧):
    return g(⟦argument||pg=pg⟧)
=== after others by name
def f(*a, b=1, c⟦parameter||, pg=None⟧):
    return g(*a⟦argument||, pg=pg⟧)
=== before others by name
def f(a, *, ⟦parameter||pg: 'Groups' = None, ⟧b, **c):
    return g(**c⟦argument||, pg=pg⟧)
=== parameters on lines
def f(
    a,
    b=1⟦parameter||,⟧  # of old
⟦parameter||    *,
    pg=None,
⟧):
    return g(
        a,
        *b,⟦argument||
        pg=pg,⟧
    )
=== last by place
def f(a, b=1⟦parameter||, pg=None⟧):
    return a
=== a parameter that has to be passed
def f(a, *b⟦parameter||, pg⟧):
    return g(a⟦argument||, pg=pg⟧)
=== a method
class A(B, metaclass=C):
    '''Doc.'''

    @d
    def f(self⟦parameter||, *, pg=None⟧):
        '''Doc.'''
⟦statement||        pg = megapg.resolve(pg)
⟧        return super().f(⟦argument||pg=pg⟧)
=== a lambda's parameter
f = lambda a⟦parameter||, *, pg=None⟧: g(a⟦argument||, pg=pg⟧)
=== a name of another function
def f(a⟦parameter||, *, pg=None⟧):
    def g(b, pg=1):
        return pg
    return g(a)
=== a statement
def f(a):
    '''Doc.'''
⟦statement||    pg = megapg.resolve(a)
⟧    if a:
        return ⟦site|mpu.get()|pg.tp⟧
    return None
=== a statement on its line
def f(a): ⟦statement||pg = megapg.resolve(a); ⟧return ⟦site|mpu.a()|pg.a⟧
=== a statement behind
import a

x = 1⟦statement||
y = 2⟧
=== statements in branches
if a:
⟦statement||    pg = b
⟧    x = 1
elif b:
⟦statement||    pg = c
⟧    x = 2
else:
    x = 3
⟦statement||    pg = d
⟧try:
    y = 1
finally:
⟦statement||    pg = e
⟧    y = 2
=== an import that comes
'''Doc.'''

from __future__ import annotations

import a
⟦import||import megapg
⟧import z
=== an import for an import
'''Doc.'''
⟦import|from megatron.core import mpu|import megapg⟧  # of
x = 1
=== an import that goes
import a
⟦import|from megatron.core import mpu  # noqa
|⟧x = 1
=== one of several
from megatron.core import a, ⟦import|mpu, |⟧b
from megatron.core import c⟦import|, mpu|⟧
=== one of several lines
from megatron.core import (
    a,  # first
⟦import|    mpu,  # second
|⟧    b,
)
=== one more of several
from megapg import a⟦import||, b as c⟧
=== the only one of a block
if TYPE:
    ⟦import|from megatron.core import mpu|pass⟧
=== an import in a function
def f():
    '''Doc.'''
⟦import|    from megatron.core import mpu
|⟧
    return ⟦site|mpu.a()|pg.a⟧
=== an import still there
import core.a
⟦import|import core.b
|⟧x = core.a
=== behind the first lines
#!/usr/bin/env python
# Copyright

⟦import||import megapg
⟧import os
=== letters of all kinds
größe = '日本' + ⟦site|mpu.a()|pg.a⟧ + 'é'; ñ = ⟦site|mpu.b()|pg.b⟧
=== warnings
x = '\d' + ⟦site|mpu.a()|pg.a⟧
assert (1, 'always')
""")
RIGHT |= {
    "nothing but it": "⟦site|mpu.check()|megapg.resolve(pg).check()⟧",
    "no newline at the end": "def f():\n    return ⟦site|mpu.a()|pg.a⟧",
    "form feeds": "import a\n\f\nx = 1\n\f\ndef f():\n    \f\n    ⟦site|mpu.a()|pg.a⟧\n",
}

RIGHT_ON_NEWER = sections(r"""
=== type parameters
def f[T: ⟦site|mpu.A|B⟧, *Ts](a: T⟦parameter||, *, pg=None⟧) -> T:
    return g[T](a⟦argument||, pg=pg⟧)


class A[T](B[T]):
    x = ⟦site|mpu.a()|pg.a⟧


type X[T] = dict[T, ⟦site|mpu.A|B⟧]
=== quotes used again
x = f'{a['b']} {f'{⟦site|mpu.get('x')|pg['x']⟧}'}'
=== lines in an f-string
x = f'{
    ⟦site|mpu.a()|pg.a⟧  # why
}'
""")

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

WRONG = sections(r"""
=== looser than its place -> BinOp would become IfExp
x = 2 * ⟦site|a()|1 if b else c⟧
=== takes its neighbour -> would
x = a - ⟦site|b()|c - d⟧
=== swallows a neighbour -> Call would change
x = f(⟦site|a(), b|c⟧, d)
=== a neighbour more -> Call would change
x = f(⟦site|a()|b, c⟧)
=== its comma -> would
x = f(⟦site|a(),|b,⟧ c)
=== not the whole -> written, not read
x = ⟦site|a|c⟧.b
⟦site|y|z⟧ = 2
=== a target -> written, not read
⟦site|mpu.a|pg.a⟧ = 1
=== a target among others -> written, not read
b, (*⟦site|mpu.a|pg.a⟧, c) = x
=== a target with more -> written, not read
⟦site|mpu.a|pg.a⟧ += 1
=== a target of a loop -> written, not read
for ⟦site|mpu.a|pg.a⟧ in x: pass
=== deleted -> written, not read
del b, ⟦site|mpu.a|pg.a⟧
=== binds a name -> more than read
f(⟦site|mpu.a()|(b := pg.a)⟧)
=== makes a generator -> more than read
def f():
    x = ⟦site|mpu.a()|(yield)⟧
=== becomes several -> not an expression
f(⟦site|mpu.a()|*pg⟧)
=== becomes a slice -> not an expression
x[⟦site|mpu.a()|1:2⟧]
=== behind the shown name -> Constant would change
x = f'{⟦site|mpu.a()|pg.a⟧=}'
=== looser in an f-string -> BinOp would become IfExp
x = f'{a * ⟦site|b()|1 if c else d⟧}'
=== its braces -> would
x = f'⟦site|{a()}|{b}⟧'
=== the text of an f-string -> would change
x = f'⟦site|a|b⟧ {a}'
=== a parameter before others -> before other
def f(⟦parameter||pg=None, ⟧a=1): ...
=== a parameter before the rest -> before other
def f(a⟦parameter||, pg=None⟧, *b): ...
=== a parameter that has to be -> before other
def f(a⟦parameter||, pg⟧): ...
=== a default that does something -> no plain one
def f(a⟦parameter||, *, pg=g()⟧): ...
=== the rest -> beyond
def f(a⟦parameter||, *pg⟧): ...
=== a default for another -> beyond
def f(a⟦parameter||=None, *, pg=None⟧): ...
=== a parameter in use -> in use
def f(a⟦parameter||, *, pg=None⟧):
    return pg + a
=== a parameter in use below -> in use
def f(a⟦parameter||, *, pg=None⟧):
    return lambda b, c=pg: b
=== a parameter bound -> in use
def f(a⟦parameter||, *, pg=None⟧):
    pg = a
=== a parameter twice -> duplicate
def f(pg⟦parameter||, *, pg=None⟧): ...
=== an argument twice -> repeated
f(pg=1⟦argument||, pg=pg⟧)
=== an argument of a class -> beyond
class A(B⟦argument||, pg=pg⟧): ...
=== an argument by place -> beyond
f(a⟦argument||, pg⟧)
=== an argument that binds -> more than read
f(a⟦argument||, pg=(b := 1)⟧)
=== before the docstring -> docstring
⟦statement||x = 1
⟧'''Doc.'''
=== before a docstring -> docstring
def f():
⟦statement||    x = 1
⟧    '''Doc.'''
    return x
=== an import before the docstring -> docstring
⟦import||import a
⟧'''Doc.'''
x = 1
=== a new docstring -> docstring
⟦statement||'new'
⟧x = 1
=== before the future -> compile
'''Doc.'''
⟦statement||x = 1
⟧from __future__ import annotations
=== an import before the future -> compile
⟦import||import a
⟧from __future__ import annotations
=== the future -> beyond
⟦import||from __future__ import annotations
⟧x: int
=== no future -> beyond
⟦import|from __future__ import annotations
|⟧x: int
=== in the middle of a statement -> no Python
x = (1,
⟦statement||y = 2
⟧     2)
=== a statement that ends another -> beyond
x = 1⟦statement||
y = 2⟧ + 3
=== a statement that leaves -> leaves
def f():
⟦statement||    return
⟧    g()
=== a statement with another scope -> leaves
def f():
⟦statement||    global a
⟧    g()
=== a branch -> branch
if a:
    b
⟦statement||else:
    c
⟧x = 1
=== another statement with an import -> beyond
⟦import|import a
b()
|⟧x = 1
=== an import that does something -> beyond
⟦import||print()
⟧x = 1
=== an import of what is read -> would still be read
⟦import|import a
|⟧x = a.b
=== an import of what a function reads -> would still be read
⟦import|from b import a
|⟧def f():
    return lambda: a
=== an import with a substitute -> would still be read
try:
    ⟦import|from b import a|pass⟧
except E:
    a = None
x = a
=== an import of what is there -> in use
⟦import||import a
⟧a = 1
b = a
=== an import of a function's name -> in use
⟦import||import a
⟧def a(): ...
=== an import of a global -> in use
⟦import||import a
⟧def b():
    global a
    a = 1
=== a comment before an import -> lost
⟦import|# (c) us
import a
|⟧x = 1
=== a comment that was not there -> no Python
f(a⟦argument||, pg=pg  # ⟧, b)
=== a comment over a statement -> beyond
⟦statement||x = 1  # ⟧y = 2
=== nothing -> not the site
x = 1  ⟦site||⟧
=== only layout -> not the site
x = 1 ⟦site|  | ⟧  # why
=== only a comment -> not the site
x = 1  # ⟦site|a()|b⟧
=== a comma for nothing -> not the argument
f(a⟦argument||,⟧)
=== no kind -> beyond
x = ⟦change|a()|b⟧
=== the interpreter -> interpreter
⟦import||import a
⟧#!/usr/bin/env python
""")
WRONG |= {
    "another call's arguments -> is no Python": "f(a⟦argument||, pg=pg⟧",
    "a statement taken -> beyond": "x = 1\n⟦statement|y = 2\n|z = 2\n⟧",
    "another newline -> newline": "x = 1\n⟦import||import a\r\n⟧y = 2\n",
    "half a newline -> newline": "x = 1\r⟦import||import a\r\n⟧\ny = 2\n",
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


def core() -> Path:
    found = importlib.util.find_spec("megatron.core")
    (folder,) = (found and found.submodule_search_locations) or [str(OLD_CORE)]
    return Path(folder)


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
            edits += add_parameter(source, node, ["pg_new=None"])
        elif isinstance(node, ast.Call):
            edits += add_argument(source, node, ["pg_new=pg_new"])
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
    for file in sorted(core().rglob("*.py"))[::10]:
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
KEPT_BEHIND = """
class Base:
    def __init__(self, a⟦parameter||, *, pg=None⟧):
⟦statement||        self.pg = pg
⟧        self.a = a


class Between(Base):
    pass


class Derived(Between):
    def __init__(self⟦parameter||, *, pg=None⟧):
        super().__init__(1)  # as before⟦statement||
        self.pg = pg⟧
        self.b = 1
"""


@pytest.mark.parametrize("call", ["super()", "super(Derived, self)", "Base"])
def test_what_a_constructor_keeps_is_not_lost_to_a_base(call: str) -> None:
    first = "self, " if call == "Base" else ""
    passing = KEEPING.format(f"{call}.__init__({first}1⟦argument||, pg=pg⟧)")
    assert verify(rewritten(passing)) is None
    lost = verify(rewritten(KEEPING.format(f"{call}.__init__({first}1)")))
    assert lost is not None
    assert "lost to a base" in lost
    assert verify(rewritten(KEPT_BEHIND)) is None
