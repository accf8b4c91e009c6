"""Write the guide's pages about the mapping and the reasons, from their tables.

``python -m tools.guide.pages migration_guide`` writes them. They are checked in, and a test
compares them with the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, product
from pathlib import Path

from megapg.errors import MegapgError
from megapg.migrate.reasons import REASONS, Reason
from megapg.upstream.expressions import replacement
from megapg.upstream.mapping import (
    OF_SEVERAL_PIPELINES,
    PRIVATE,
    SEVERAL_PIPELINES,
    Argument,
    Refusal,
    Replacement,
    Takes,
)
from megapg.upstream.signatures import SIGNATURES, VERSIONS, Parameter, functions, signature
from tools.guide.examples import EXAMPLES, WITHOUT_EXAMPLE

_WRITTEN_BY = "<!-- Written by python -m tools.guide.pages; do not edit. -->"


def pages() -> Mapping[str, str]:
    """Return the text of every page, by its path in the guide's folder.

    Raises:
        MegapgError: a reason has no example.
    """
    if lacking := set(REASONS) - set(EXAMPLES) - set(WITHOUT_EXAMPLE):
        names = ", ".join(sorted(lacking))
        raise MegapgError(f"{names}: no example in tools/guide/examples.py.")
    return {"mapping.md": _mapping_page(), "reasons.md": _reasons_page()}


def write(guide: Path) -> None:
    """Write the pages into a folder."""
    for name, text in pages().items():
        (guide / name).write_text(text, encoding="utf-8")


# -- reasons ---------------------------------------------------------------------------------------


def _reasons_page() -> str:
    return _page(
        "Why a use stays",
        "`megapg check` and `megapg migrate` print one of these codes with each use that stays. "
        "`megapg explain CODE` prints the same text in the terminal. A use with the code "
        f"{_link('may-be-none')} has a replacement, which only `--unsafe` writes.",
        _table(("code", "the use"), ((_link(each.code), each.title) for each in REASONS.values())),
        *(block for reason in REASONS.values() for block in _section(reason)),
    )


def _section(reason: Reason) -> Iterator[str]:
    yield f"## {reason.code}"
    yield _plain(f"The use {reason.title}. {reason.why}")
    if example := EXAMPLES.get(reason.code):
        version = "" if example.versions == "0.16" else f", on Megatron-core {example.versions}"
        yield f"Before{version}:"
        yield _code(example.before)
        yield "After:"
        yield _code(example.after)
    yield f"**What to do.** {_plain(reason.instead)}"
    if names := _names_with(reason.code):
        yield f"Names that always have this code: {', '.join(map(_quoted, names))}."


def _names_with(code: str) -> list[str]:
    """Return the names that get a code for all arguments, in every version that has the name."""
    names = [name for name in (*SIGNATURES, *sorted(PRIVATE)) if _by_name(name) == code]
    return sorted(names, key=lambda name: (name.startswith("_"), name))


def _by_name(name: str) -> str:
    """Return the reason that all calls of a name share; empty if there is none."""
    versions = [version for version in VERSIONS if signature(name, version) is not None]
    answers = [answer for version in versions for _, answer in _answers(name, version)]
    if name in PRIVATE:
        answers = [replacement(name)]
    reasons = {answer.reason if isinstance(answer, Refusal) else "" for answer in answers}
    return reasons.pop() if len(reasons) == 1 else ""


# -- the mapping ------------------------------------------------------------------------

_Form = tuple[Argument, ...]
_Answer = Replacement | Refusal

_PARTS: Mapping[str, str] = {
    "Groups": "_group _groups _group_gloo",
    "Ranks and sizes": "_rank _world_size",
    "Ranks of others": "_src_rank _first_rank _last_rank _next_rank _prev_rank _global_ranks",
}
_THE_REST = "Stages, and what else there is"

_OF: Mapping[Takes, str] = {
    Takes.COLLECTION: "",
    Takes.LAZY: "if there is one",
    Takes.OPTIONAL: "of what was passed, None included",
    Takes.JOB: "of a session or the globals",
    Takes.GLOBALS: "asked of the globals",
}
"""From where the collection may come -> what a page says of it."""


@cache
def _mapping_page() -> str:
    answers = {name: list(_histories(name)) for name in sorted(SIGNATURES)}
    unserved = {name: _reasons_of(rows) for name, rows in answers.items() if not _served(rows)}
    served = {name: rows for name, rows in answers.items() if name not in unserved}
    blocks: list[str] = []
    for title in (*_PARTS, _THE_REST):
        body = [
            row
            for name, rows in served.items()
            if _part(name) == title
            for form, history in rows
            if not _at_run_time(form)
            for row in _rows(name, form, history)
        ]
        blocks += [f"## {title}", _table(_HEADINGS, body)]
    by_reason = sorted((reasons, name) for name, reasons in unserved.items())
    private = {name: replacement(name) for name in sorted(PRIVATE)}
    return _page(
        "What is written instead of what",
        "Every function of `megatron.core.parallel_state` from "
        f"0.{VERSIONS[0]} to 0.{VERSIONS[-1]}, and in which of them the answer is so. `pg` is the "
        "collection, `getters` is `megapg.megatron.getters`. Where nothing certain can be written "
        "there is [a code for why](reasons.md). A project that admits versions with different "
        "answers gets the code [version](reasons.md#version): name the one that you run.",
        "Arguments that are left out have their defaults; calls that a version refuses itself are "
        "not listed. *Reads* are the fields. What is *of a session or the globals* is not known to "
        "a collection of borrowed groups, unless they are the globals' own; what is *asked of the "
        "globals* is state of the job, and the tool writes `megapg.resolve(None)` for `pg`. Before "
        f"0.{_TAKES_VP_STAGE} the schedule keeps in the globals which model chunk is current; that "
        "holds for whatever collection is asked with `ignore_virtual=False`, unless `vp_stage=` is "
        "passed.",
        _table(
            ("Megatron-core", "functions", "served", "served in some forms", "not served"),
            map(_totals, VERSIONS),
        ),
        *blocks,
        *_of_several(),
        "## Flags that show at run time only",
        f"`flag` is any expression that is no literal. With `{_CHECKED}=False` no groups need be "
        "there.",
        _table(
            _HEADINGS,
            (
                row
                for name, rows in served.items()
                for form, history in rows
                if _at_run_time(form)
                for row in _rows(name, form, history)
            ),
        ),
        "## Not served",
        _table(
            ("why", "names"),
            (
                (
                    ", ".join(_link(reason, "reasons.md") for reason in reasons),
                    ", ".join(_quoted(name) for _, name in named),
                )
                for reasons, named in groupby(by_reason, key=lambda row: row[0])
            ),
        ),
        "## Private variables",
        "The same in every version that has them. They can be asked before there are groups.",
        _table(
            ("variable", "written"),
            ((_quoted(name), _written(answer)) for name, answer in private.items()),
        ),
    )


def _totals(version: int) -> Sequence[str]:
    served = [
        {isinstance(answer, Replacement) for _, answer in _answers(name, version)}
        for name in functions(version)
    ]
    counts = [sum(each == kind for each in served) for kind in ({True}, {True, False}, {False})]
    return (f"0.{version}", *map(str, (len(served), *counts)))


_TAKES_VP_STAGE = 13
_HEADINGS = ("call", "in", "written", "reads")


def _of_several() -> Iterator[str]:
    """Yield the paragraphs and the table about ranks in several pipelines."""
    yield "## A rank in several pipelines"
    yield (
        f"In {_span(sorted(SEVERAL_PIPELINES))} an encoder may have fewer tensor parallel ranks "
        "than its decoder. Its ranks are then in several pipelines, and the getters below give "
        "them a list, which no field can hold: `pg.pp`, the ranks of others in the pipeline and "
        '`pg.ranks("pp")` raise `MissingGlobalGroupError` there. `pg.rank("pp")` and '
        '`pg.size("pp")` are those in each of them. For code that accepts a list, '
        "write the functions below by hand."
    )
    yield _table(
        ("call", "for a list"),
        (
            (_quoted(f"{name}()"), _quoted(f"getters.{helper}(pg)"))
            for name, helper in OF_SEVERAL_PIPELINES.items()
        ),
    )


def _rows(name: str, form: _Form, history: _History) -> Iterator[Sequence[str]]:
    for answer, versions in history.items():
        call = _quoted(_call(name, form))
        yield call, _span(versions), _written(answer), _reads(answer)


def _reads(answer: _Answer) -> str:
    """Return the fields that an expression reads, and the kind of collection that it needs."""
    if isinstance(answer, Refusal):
        return ""
    fields = " ".join(answer.needs or filter(None, (answer.field,)))
    return ", ".join(filter(None, (fields, _OF[answer.takes])))


def _part(name: str) -> str:
    for title, ends in reversed(tuple(_PARTS.items())):  # _first_rank ends like _rank
        if name.startswith("get_") and name.endswith(tuple(ends.split())):
            return title
    return _THE_REST


def _served(rows: Iterable[tuple[_Form, _History]]) -> bool:
    return any(isinstance(answer, Replacement) for _, history in rows for answer in history)


def _reasons_of(rows: Iterable[tuple[_Form, _History]]) -> tuple[str, ...]:
    answers = [answer for _, history in rows for answer in history]
    return tuple(sorted({answer.reason for answer in answers if isinstance(answer, Refusal)}))


def _answers(name: str, version: int) -> Iterator[tuple[_Form, _Answer]]:
    """Yield every form of a call that a version accepts, with its replacement."""
    for form in _forms(signature(name, version) or ()):
        answer = replacement(name, form, [version])
        if not _cannot_run(answer) or form == (_ANYTHING,):
            yield form, answer


_ANYTHING = Argument("...")
_FLAG = "flag"


def _forms(parameters: Sequence[Parameter]) -> Iterator[_Form]:
    """Yield the arguments that a call may have.

    First all combinations of literal flags. Then one flag at a time that is known only at run time,
    and ``check_initialized``, which does not choose a group.
    """
    if [parameter.name for parameter in parameters] == [_ANYTHING.text]:
        yield (_ANYTHING,)
        return
    needed = tuple(Argument(each.name) for each in parameters if not each.default)
    named = [each for each in parameters if each.default]
    for choice in product(*map(_literals, named)):
        yield (*needed, *(argument for argument in choice if argument))
    for each in named:
        if each.name == _CHECKED:
            yield (*needed, Argument("False", each.name))
        if each.default in ("True", "False"):
            yield (*needed, Argument(_FLAG, each.name))


_CHECKED = "check_initialized"


def _literals(parameter: Parameter) -> Sequence[Argument | None]:
    """Return the values for a parameter; the first is no value."""
    if parameter.name == _CHECKED:
        return (None,)
    other = {"True": "False", "False": "True"}.get(parameter.default, parameter.name)
    return (None, Argument(other, parameter.name))


def _at_run_time(form: _Form) -> bool:
    return any(each.keyword == _CHECKED or each.text == _FLAG for each in form)


def _cannot_run(answer: _Answer) -> bool:
    return isinstance(answer, Refusal) and answer.is_error


# -- what changed ----------------------------------------------------------------------------------

_History = Mapping[_Answer, Sequence[int]]
"""What a call means -> in which versions."""


_BY_POSITION: Sequence[_Form] = ((Argument("True"),), (Argument("True"), Argument("True")))


def _histories(name: str) -> Iterator[tuple[_Form, _History]]:
    """Yield every form of a call that any version accepts, with its meaning by version."""
    parameters = [signature(name, version) for version in VERSIONS]
    forms = dict.fromkeys(form for each in parameters if each is not None for form in _forms(each))
    histories = [(form, _history(name, form)) for form in forms]
    yield from histories
    # Show positional calls only if they differ from calls by keyword: the order has changed.
    for form in _BY_POSITION:
        history = _history(name, form)
        if len(history) > 1 and all(history != other for _, other in histories):
            yield form, history


def _history(name: str, form: _Form) -> _History:
    history: dict[_Answer, list[int]] = {}
    for version in VERSIONS:
        if signature(name, version) is not None:
            answer = replacement(name, form, [version])
            if not _cannot_run(answer) or form == (_ANYTHING,):
                history.setdefault(answer, []).append(version)
    return history


# -- Markdown --------------------------------------------------------------------------------------


def _page(title: str, *blocks: str) -> str:
    return "\n\n".join((f"# {title} {_WRITTEN_BY}", *blocks)) + "\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (headings, ("---",) * len(headings), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return f"```python\n{text.strip()}\n```"


def _call(name: str, form: _Form) -> str:
    written = (f"{each.keyword}={each.text}" if each.keyword else each.text for each in form)
    return f"{name}({', '.join(written)})"


def _plain(text: str) -> str:
    """Escape ``_`` and ``*``, which mark text."""
    return text.replace("_", r"\_").replace("*", r"\*")


def _quoted(text: str) -> str:
    return f"`{text}`"


def _link(code: str, page: str = "") -> str:
    return f"[{code}]({page}#{code})"


def _written(answer: _Answer) -> str:
    if isinstance(answer, Replacement):
        caution = f", {_link(answer.caution, 'reasons.md')}" if answer.caution else ""
        return _quoted(answer.expression) + caution
    return _link(answer.reason, "reasons.md") + (f": {answer.detail}" if answer.detail else "")


def _span(versions: Sequence[int]) -> str:
    """Join adjacent versions: ``0.5 to 0.9, 0.12``."""
    runs = groupby(enumerate(versions), key=lambda pair: pair[1] - pair[0])
    parts = [[version for _, version in run] for _, run in runs]
    return ", ".join(
        f"0.{part[0]}" + (f" to 0.{part[-1]}" if len(part) > 1 else "") for part in parts
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.guide.pages GUIDE")
    write(Path(sys.argv[1]))
