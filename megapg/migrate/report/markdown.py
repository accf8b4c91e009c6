"""The report to paste into a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapg.migrate.reasons import REASONS
from megapg.migrate.report.entries import Entry, Report, burn_down, count, one_line, shortened

# Code hosts refuse a comment that is longer; GitHub's limit is 65,536.
_MOST_CHARACTERS = 60_000
_WORDS = ("package", "reason", "what it means")  # columns that are no numbers


def document(report: Report, summary: str) -> str:
    """Tables of what is served from where and what is left, then the uses that are, while room is.

    Args:
        report: the outcome of a migration.
        summary: it in a sentence.
    """
    head = "\n".join(_head(report, summary))
    room = _MOST_CHARACTERS - len(head)
    return head + "\n" + "\n".join(_tail(report, room))


def _head(report: Report, summary: str) -> Iterator[str]:
    yield "## Off Megatron's globals\n"
    yield f"{summary}\n"
    if report.entries:
        yield from _table(
            ("package", "uses", *report.columns),
            [(_code(row.package), row.uses, *row.fates) for row in burn_down(report)],
        )
    if reasons := report.reasons:
        yield "\n### Left, by reason\n"
        yield from _table(
            ("reason", "uses", "what it means"),
            [
                (_code(code), uses, REASONS[code].title if code in REASONS else "")
                for code, uses in reasons.items()
            ],
        )
        yield "\n`megapg explain CODE` says what to do about one."


def _tail(report: Report, room: int) -> Iterator[str]:
    roots = [
        f"- {_code(root.file)} {_code(root.function or 'module level')}: "
        f"{', '.join(root.fields) or 'any field'}, serves {count(root.serves, 'use')}"
        for root in sorted(report.roots, key=lambda root: -root.serves)
    ]
    sections = (
        ("Where the globals are still turned to when nothing is passed", roots),
        ("Uses that are left", [_item(entry) for entry in report.left]),
        (
            "Files with problems",
            [f"- {_code(each.file)}: {_escaped(each.message)}" for each in report.problems],
        ),
    )
    for title, items in sections:
        if items:
            yield f"\n<details><summary>{title}: {len(items):,}</summary>\n"
            shown = _fitting(items, room // 3)
            yield from items[:shown]
            if shown < len(items):
                yield f"- and {len(items) - shown:,} more"
            yield "\n</details>"


def _fitting(items: Sequence[str], room: int) -> int:
    """How many of them fit in so many characters."""
    for number, item in enumerate(items):
        room -= len(item) + 1
        if room < 0:
            return number
    return len(items)


def _item(entry: Entry) -> str:
    said = f"- {_code(entry.site.place)}: {_code(shortened(entry.site.text))} `[{entry.reason}]`"
    if entry.note:
        said += f" {_escaped(entry.note)}"
    if entry.suggestion:
        said += f" -> {_code(entry.suggestion)}"
    return said


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    aligned = [" --- " if heading in _WORDS else " ---: " for heading in headings]
    yield "| " + " | ".join(headings) + " |"
    yield "|" + "|".join(aligned) + "|"
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _code(text: str) -> str:
    """A piece of code on one line, whatever backticks are in it."""
    text = one_line(text)
    fence = "`"
    while fence in text:
        fence += "`"
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _escaped(text: str) -> str:
    return "".join("\\" + each if each in r"\`*_[]<>|" else each for each in one_line(text))
