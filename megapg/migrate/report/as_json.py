"""The report as one JSON document, in the same form for both commands."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict

from megapg import __version__
from megapg.migrate.migration import Rewritten
from megapg.migrate.report.diff import unified
from megapg.migrate.report.outcome import Entry, Report, by_package


def document(report: Report, counted: Collection[Entry]) -> dict[str, object]:
    """Return the document, for ``json.dumps``.

    Args:
        report: the outcome of the command.
        counted: the uses that make the command end with exit code 1.
    """
    counts = set(map(id, counted))
    packages = [row for row in by_package(report) if row.package != "all"]
    return {
        "megapg": __version__,
        "versions": [f"0.{version}" for version in report.config.versions],
        "versions_from": report.config.versions_from,
        "files": len(report.found.files),
        "notebooks": report.found.notebooks,
        "skipped": dict(report.found.skipped),
        "kept": report.kept,
        "totals": {"uses": len(report.entries), **report.fates, "reasons": report.reasons},
        "by_package": {row.package: row.uses for row in packages},
        "uses": [{**_described(entry), "counts": id(entry) in counts} for entry in report.entries],
        "changes": [_changed(file, report) for file in report.files],
        "unformatted": dict(report.unformatted),
        "roots": list(map(asdict, report.roots)),
        "problems": list(map(asdict, report.problems)),
    }


def _described(entry: Entry) -> dict[str, object]:
    use = entry.use
    return {
        "file": use.file,
        **asdict(use.span),
        "name": use.name,
        "kind": str(use.kind),
        "text": use.text,
        "function": use.function,
        "fate": str(entry.fate),
        "replacement": entry.instead or None,
        "reason": entry.reason or None,
        "detail": entry.detail,
        "suggestion": entry.suggestion or None,
    }


def _changed(file: Rewritten, report: Report) -> dict[str, object]:
    diff = b"".join(unified(file, report.config.root)).decode(errors="surrogateescape")
    return {"file": file.file, "new": file.is_new, "diff": diff}
