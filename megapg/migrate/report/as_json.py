"""The report for programs: one JSON document, the same form for both commands."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

from megapg import __version__
from megapg.migrate.migration import Rewritten, located
from megapg.migrate.report.outcome import WITH, Entry, Report, burn_down
from megapg.upstream.mapping import Replacement


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
        "old_core": report.config.old_core or None,
        "files": report.findings.files,
        "kept": report.findings.kept,
        "totals": {"uses": len(report.entries), **report.fates, "reasons": report.reasons},
        "by_package": {row.package: row.uses for row in burn_down(report) if row.package != "all"},
        "sites": [{**_described(entry), "counts": id(entry) in counts} for entry in report.entries],
        "changes": [_changed(file) for file in report.files],
        "roots": list(map(asdict, report.roots)),
        "starts": list(map(asdict, report.starts)),
        "noticed": list(map(asdict, report.noticed)),
        "callees": list(map(asdict, report.callees)),
        "notebooks": report.findings.notebooks,
        "namesakes": [each.name for each in report.findings.namesakes],
        "problems": list(map(asdict, report.problems)),
    }


def _described(entry: Entry) -> dict[str, object]:
    site = entry.site
    return {
        "file": site.file,
        **asdict(site.span),
        "exact": site.exact,
        "name": site.name,
        "kind": str(site.kind),
        "text": site.text,
        "function": site.function,
        "class": site.class_name,
        "fate": str(entry.fate),
        "replacement": entry.instead or None,
        "reason": entry.reason or None,
        "detail": entry.note if entry.fate != WITH else "",  # there it is the caution
        "caution": site.answer.caution if isinstance(site.answer, Replacement) else "",
        "suggestion": entry.suggestion,
        "why": entry.why or None,
        "carriers": [
            {name: getattr(each, name) for name in ("kind", "expression", "origin", "may_be_none")}
            for each in site.carriers
        ],
    }


def _changed(file: Rewritten) -> dict[str, object]:
    edits = [{**region, "what": edit.what, "new": edit.new} for edit, region in located(file)]
    return {"file": file.file, "new": file.is_new, "edits": edits}
