"""The pages of the guide that come from the tables: one per reason code, one per version.

``python -m megapg.migrate.pages migration_guide`` writes them. They are checked in, and a test
holds them against the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path

from megapg.errors import MegapgError
from megapg.migrate.examples import EXAMPLES, OF_FILES, Example
from megapg.migrate.mapping import (
    OF_SEVERAL_PIPELINES,
    PRIVATE,
    SEVERAL_PIPELINES,
    Argument,
    Refusal,
    Replacement,
    Takes,
    replacement,
)
from megapg.migrate.reasons import CAUTIONS, REASONS, Reason
from megapg.migrate.signatures import SIGNATURES, VERSIONS, Parameter, functions, signature

FOLDERS = ("reasons", "mapping")
"""Where every page comes from here."""

_WRITTEN_BY = "<!-- Written by python -m megapg.migrate.pages; do not edit. -->"


def pages() -> Mapping[str, str]:
    """Path below the guide's folder -> text, of every page.

    Raises:
        MegapgError: a code has no example.
    """
    explained = {**REASONS, **CAUTIONS}
    if lacking := set(explained) - set(EXAMPLES) - set(OF_FILES):
        raise MegapgError(f"codes without an example in {__name__}: {', '.join(sorted(lacking))}.")
    return {
        "mapping.md": _mapping_index(),
        **{f"mapping/0.{version}.md": _mapping_page(version) for version in VERSIONS},
        "reasons/README.md": _reasons_index(),
        **{f"reasons/{code}.md": _reason_page(reason) for code, reason in explained.items()},
    }


def write(guide: Path) -> None:
    """Write the pages below a folder, and remove those of codes and versions that are gone."""
    texts = pages()
    for folder in FOLDERS:
        (guide / folder).mkdir(exist_ok=True)
        for old in (guide / folder).glob("*.md"):
            if f"{folder}/{old.name}" not in texts:
                old.unlink()
    for name, text in texts.items():
        (guide / name).write_text(text, encoding="utf-8")


# -- reasons ---------------------------------------------------------------------------------------


def _reasons_index() -> str:
    return _page(
        "Why something is left",
        "`megapg check` and `megapg migrate` print one of these codes beside each use that they "
        "leave. `megapg explain CODE` says the same in the terminal.",
        "## Left",
        _table(("code", ""), ((_link(each.code), each.title) for each in REASONS.values())),
        "## With a caution",
        "There is a replacement, and it may behave differently where there are no groups. `megapg "
        "migrate` writes it with `--unsafe` only.",
        _table(("code", ""), ((_link(each.code), each.title) for each in CAUTIONS.values())),
    )


def _reason_page(reason: Reason) -> str:
    names = _names_with(reason.code)
    return _page(
        f"`{reason.code}`: {reason.title}",
        reason.why,
        *_shown(EXAMPLES.get(reason.code)),
        "## What to do",
        reason.instead,
        *(("## Names that always have it", ", ".join(map(_quoted, names))) if names else ()),
        "[All codes](README.md)",
    )


def _shown(example: Example | None) -> Iterator[str]:
    if example is not None:
        read_as = "" if example.versions == "0.16" else f", on Megatron-core {example.versions}"
        yield f"Before{read_as}:"
        yield _code(example.before)
        yield "After:"
        yield _code(example.after)


def _names_with(code: str) -> list[str]:
    """Names that get a code whatever the arguments, in every version that has them."""
    names = [name for name in (*SIGNATURES, *sorted(PRIVATE)) if _by_name(name) == code]
    return sorted(names, key=lambda name: (name.startswith("_"), name))


def _by_name(name: str) -> str:
    """The one reason of every call of a name; empty where there is none, or not one."""
    versions = [version for version in VERSIONS if signature(name, version) is not None]
    answers = [answer for version in versions for _, answer in _answers(name, version)]
    if name in PRIVATE:
        answers = [replacement(name)]
    reasons = {answer.reason if isinstance(answer, Refusal) else "" for answer in answers}
    return reasons.pop() if len(reasons) == 1 else ""


# -- the table of a version ------------------------------------------------------------------------

_Form = tuple[Argument, ...]
_Answer = Replacement | Refusal

_PARTS: Mapping[str, str] = {
    "Groups": "_group _groups _group_gloo",
    "Ranks and sizes": "_rank _world_size",
    "Ranks of others": "_src_rank _first_rank _last_rank _next_rank _prev_rank _global_ranks",
}
_THE_REST = "Stages, and what else there is"

_CANNOT_RUN = ("arguments", "not-in-core")
"""Reasons of calls that the version does not take."""

_OF: Mapping[Takes, str] = {
    Takes.COLLECTION: "",
    Takes.LAZY: "if there is one",
    Takes.OPTIONAL: "of what was passed, None included",
    Takes.JOB: "of a session or the globals",
    Takes.GLOBALS: "asked of the globals",
}
"""From where the collection may come -> what a page says of it."""


def _mapping_index() -> str:
    private = {name: replacement(name) for name in sorted(PRIVATE)}
    return _page(
        "What is written instead of what",
        "Every function of `megatron.core.parallel_state` from "
        f"0.{VERSIONS[0]} to 0.{VERSIONS[-1]}. In what is written, `pg` is the collection and "
        "`getters` is `megapg.megatron.getters`. Where nothing certain can be written there is "
        "[a code for why](reasons/README.md).",
        "## By version",
        _table(
            ("Megatron-core", "functions", "served", "served in some forms", "not served"),
            map(_totals, VERSIONS),
        ),
        "## What changed its meaning",
        "The same call, and what it is in which version. A project that admits versions on both "
        "sides gets the code [version](reasons/version.md): name the one that you run.",
        _table(("call", "written"), _flips()),
        "## Private variables",
        "The same in every version that has them. They can be asked before there are groups.",
        _table(
            ("variable", "written"),
            ((_quoted(name), _written(answer, "reasons/")) for name, answer in private.items()),
        ),
    )


def _totals(version: int) -> Sequence[str]:
    served = [
        {isinstance(answer, Replacement) for _, answer in _answers(name, version)}
        for name in functions(version)
    ]
    counts = [sum(each == kind for each in served) for kind in ({True}, {True, False}, {False})]
    return (f"[0.{version}](mapping/0.{version}.md)", *map(str, (len(served), *counts)))


def _mapping_page(version: int) -> str:
    rows = {name: list(_answers(name, version)) for name in sorted(functions(version))}
    unserved = {name: _reasons_of(rows[name]) for name in rows if _refused_altogether(rows[name])}
    served = [name for name in rows if name not in unserved]
    blocks: list[str] = []
    for title in (*_PARTS, _THE_REST):
        body = [
            _row(_call(name, form), answer)
            for name in served
            if _part(name) == title
            for form, answer in rows[name]
            if not _at_run_time(form)
        ]
        if body:
            blocks += [f"## {title}", _table(_HEADINGS, body)]
    by_reason = sorted((reasons, name) for name, reasons in unserved.items())
    return _page(
        f"Megatron-core 0.{version}",
        "`pg` is the collection, `getters` is `megapg.megatron.getters`. Arguments that are left "
        "out have their defaults; calls that this version refuses itself are not listed.",
        "*Reads* are the fields. What is *of a session or the globals* is not known to a "
        "collection of borrowed groups, unless they are the globals' own; what is *asked of the "
        "globals* is state of the job, and the tool writes `megapg.resolve(None)` for `pg`."
        + (_CURRENT_CHUNK if version < _TAKES_VP_STAGE else ""),
        *blocks,
        *_of_several(version),
        *_of_flags({name: rows[name] for name in served}),
        "## Not served",
        _table(
            ("why", "names"),
            (
                (
                    ", ".join(_link(reason, "../reasons/") for reason in reasons),
                    ", ".join(_quoted(name) for _, name in named),
                )
                for reasons, named in groupby(by_reason, key=lambda row: row[0])
            ),
        ),
        "[All versions](../mapping.md)",
    )


_TAKES_VP_STAGE = 13
_CURRENT_CHUNK = (
    " Which model chunk is current this version's schedule keeps in the globals; it holds for "
    "whatever collection is asked with `ignore_virtual=False`, unless `vp_stage=` is passed."
)
_HEADINGS = ("call", "written", "reads")


def _of_several(version: int) -> Iterator[str]:
    """What there is to say of a rank in several pipelines, where there may be one."""
    if version in SEVERAL_PIPELINES:
        yield "## A rank in several pipelines"
        yield (
            "An encoder may have fewer tensor parallel ranks than its decoder. Its ranks are then "
            "in several pipelines, and the getters below give them a list, which no field can "
            'hold: `pg.pp`, the ranks of others in the pipeline and `pg.ranks("pp")` raise '
            '`MissingGlobalGroupError` there. `pg.rank("pp")` and `pg.size("pp")` are '
            "those in each of them. Where a function asks of the variable that gets the answer "
            "whether it is a list, as in `isinstance(pp_group, list)`, the tool writes instead "
            "what gives a list as well."
        )
        yield _table(
            ("call", "written where a list is asked about"),
            (
                (
                    _quoted(f"{name}()"),
                    _written(replacement(name, (), [version], or_several=True), ""),
                )
                for name in OF_SEVERAL_PIPELINES
            ),
        )


def _of_flags(rows: Mapping[str, Sequence[tuple[_Form, _Answer]]]) -> Iterator[str]:
    """What is written where an argument is no literal, or where no groups need be there."""
    chosen = [
        _row(_call(name, form), answer)
        for name, answers in rows.items()
        for form, answer in answers
        if _at_run_time(form) and form[-1].keyword != _CHECKED
    ]
    checked = {
        name: {
            form[-1].text: _written(answer, "../reasons/")
            for form, answer in answers
            if _at_run_time(form) and form[-1].keyword == _CHECKED
        }
        for name, answers in rows.items()
    }
    yield "## Flags that show at run time only"
    yield "`flag` is any expression that is no literal."
    if chosen:
        yield _table(_HEADINGS, chosen)
    if any(checked.values()):
        yield f"And `{_CHECKED}`, where no groups need be there:"
        yield _table(
            ("call", f"`{_CHECKED}=False`", f"`{_CHECKED}=flag`"),
            (
                (_quoted(name), each.get("False", ""), each.get(_FLAG, ""))
                for name, each in checked.items()
                if each
            ),
        )


def _row(call: str, answer: _Answer) -> Sequence[str]:
    return _quoted(call), _written(answer, "../reasons/"), _reads(answer)


def _reads(answer: _Answer) -> str:
    """The fields that an expression reads, and of which collections it may."""
    if isinstance(answer, Refusal):
        return ""
    fields = " ".join(answer.needs or filter(None, (answer.field,)))
    return ", ".join(filter(None, (fields, _OF[answer.takes])))


def _part(name: str) -> str:
    for title, ends in reversed(tuple(_PARTS.items())):  # _first_rank ends like _rank
        if name.startswith("get_") and name.endswith(tuple(ends.split())):
            return title
    return _THE_REST


def _refused_altogether(rows: Iterable[tuple[_Form, _Answer]]) -> bool:
    return all(isinstance(answer, Refusal) for _, answer in rows)


def _reasons_of(rows: Iterable[tuple[_Form, _Answer]]) -> tuple[str, ...]:
    return tuple(sorted({answer.reason for _, answer in rows if isinstance(answer, Refusal)}))


def _answers(name: str, version: int) -> Iterator[tuple[_Form, _Answer]]:
    """Every form of a call that a version takes, and what is written for it."""
    for form in _forms(signature(name, version) or ()):
        answer = replacement(name, form, [version])
        if not _cannot_run(answer) or form == (_ANYTHING,):
            yield form, answer


_ANYTHING = Argument("...")
_FLAG = "flag"


def _forms(parameters: Sequence[Parameter]) -> Iterator[_Form]:
    """The arguments that a call may have.

    All literals of all flags together; then one flag at a time that shows at run time only, and
    ``check_initialized``, which chooses no group.
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
    """What may be given for a parameter, first of all nothing."""
    if parameter.name == _CHECKED:
        return (None,)
    other = {"True": "False", "False": "True"}.get(parameter.default, parameter.name)
    return (None, Argument(other, parameter.name))


def _at_run_time(form: _Form) -> bool:
    return any(each.keyword == _CHECKED or each.text == _FLAG for each in form)


def _cannot_run(answer: _Answer) -> bool:
    return isinstance(answer, Refusal) and answer.reason in _CANNOT_RUN


# -- what changed ----------------------------------------------------------------------------------

_History = Mapping[_Answer, Sequence[int]]
"""What a call means -> in which versions."""


_BY_POSITION: Sequence[_Form] = ((Argument("True"),), (Argument("True"), Argument("True")))


def _flips() -> Iterator[Sequence[str]]:
    """Calls that mean one thing in some versions and another in others."""
    for name in sorted(SIGNATURES):
        parameters = [signature(name, version) or () for version in VERSIONS]
        by_keyword = dict.fromkeys(form for each in parameters for form in _forms(each))
        histories = [(form, _history(name, form)) for form in by_keyword]
        # By position only where that is another thing than by keyword: the order has changed.
        for form in _BY_POSITION:
            history = _history(name, form)
            if all(history != other for _, other in histories):
                histories.append((form, history))
        for form, history in histories:
            if len(history) > 1:
                meanings = (
                    f"{_span(versions)}: {_written(answer, 'reasons/')}"
                    for answer, versions in history.items()
                )
                yield _quoted(_call(name, form)), "<br>".join(meanings)


def _history(name: str, form: _Form) -> _History:
    history: dict[_Answer, list[int]] = {}
    for version in VERSIONS:
        answer = replacement(name, form, [version])
        if not _cannot_run(answer):
            means = Refusal(answer.reason) if isinstance(answer, Refusal) else answer
            history.setdefault(means, []).append(version)
    return history


# -- Markdown --------------------------------------------------------------------------------------


def _page(title: str, *blocks: str) -> str:
    return "\n\n".join((_WRITTEN_BY, f"# {title}", *blocks)) + "\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (headings, ("---",) * len(headings), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _code(text: str) -> str:
    return f"```python\n{text.strip()}\n```"


def _call(name: str, form: _Form) -> str:
    written = (f"{each.keyword}={each.text}" if each.keyword else each.text for each in form)
    return f"{name}({', '.join(written)})"


def _quoted(text: str) -> str:
    return f"`{text}`"


def _link(code: str, to: str = "") -> str:
    return f"[{code}]({to}{code}.md)"


def _written(answer: _Answer, to: str) -> str:
    if isinstance(answer, Replacement):
        caution = f", {_link(answer.caution, to)}" if answer.caution else ""
        return _quoted(answer.expression) + caution
    return _link(answer.reason, to) + (f": {answer.detail}" if answer.detail else "")


def _span(versions: Sequence[int]) -> str:
    """``0.5 to 0.9, 0.12``: neighbours together."""
    runs = groupby(enumerate(versions), key=lambda pair: pair[1] - pair[0])
    parts = [[version for _, version in run] for _, run in runs]
    return ", ".join(
        f"0.{part[0]}" + (f" to 0.{part[-1]}" if len(part) > 1 else "") for part in parts
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m megapg.migrate.pages GUIDE")
    write(Path(sys.argv[1]))
