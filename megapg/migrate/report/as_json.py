"""The report for programs: one JSON document, the same form for both commands."""

from __future__ import annotations

from collections.abc import Collection

from megapg import __version__
from megapg.migrate.mapping import Replacement
from megapg.migrate.migration import Rewritten
from megapg.migrate.report.entries import Entry, Report, burn_down
from megapg.migrate.report.positions import located


def document(report: Report, counted: Collection[Entry]) -> dict[str, object]:
    """What there is to say, for ``json.dumps``.

    Args:
        report: the outcome.
        counted: the uses for which the command ends with 1.
    """
    counts = set(map(id, counted))
    return {
        "megapg": __version__,
        "versions": [f"0.{version}" for version in report.config.versions],
        "versions_from": report.config.versions_from,
        "files": report.looked_at,
        "kept": report.kept,
        "totals": {"uses": len(report.entries), **report.fates, "reasons": report.reasons},
        "by_package": {row.package: row.uses for row in burn_down(report) if row.package != "all"},
        "sites": [{**_described(entry), "counts": id(entry) in counts} for entry in report.entries],
        "changes": [_changed(file) for file in report.files],
        "roots": [
            {
                "file": root.file,
                "function": root.function,
                "fields": list(root.fields),
                "serves": root.serves,
            }
            for root in report.roots
        ],
        "problems": [
            {"file": problem.file, "line": problem.line, "message": problem.message}
            for problem in report.problems
        ],
    }


def _described(entry: Entry) -> dict[str, object]:
    site = entry.site
    return {
        "file": site.file,
        "line": site.span.line,
        "column": site.span.column,
        "end_line": site.span.end_line,
        "end_column": site.span.end_column,
        "start": site.span.start,
        "stop": site.span.stop,
        "exact": site.exact,
        "name": site.name,
        "kind": str(site.kind),
        "text": site.text,
        "function": site.function,
        "class": site.class_name,
        "fate": str(entry.fate),
        "replacement": entry.instead or None,
        "reason": entry.reason or None,
        "detail": entry.note if entry.reason else "",
        "caution": site.answer.caution if isinstance(site.answer, Replacement) else "",
        "suggestion": entry.suggestion,
        "carriers": [
            {
                "kind": carrier.kind,
                "expression": carrier.expression,
                "origin": carrier.origin,
                "may_be_none": carrier.may_be_none,
            }
            for carrier in site.carriers
        ],
    }


def _changed(file: Rewritten) -> dict[str, object]:
    edits = [{**region, "what": edit.what, "new": edit.new} for edit, region in located(file)]
    return {"file": file.file, "edits": edits}
