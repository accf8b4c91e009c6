"""The report as SARIF 2.1.0, for code hosts and editors: uses are results, reasons are rules."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from urllib.parse import quote_from_bytes

from megapg import __version__
from megapg.migrate.baseline import key_of
from megapg.migrate.migration import Problem
from megapg.migrate.reasons import REASONS
from megapg.migrate.report.outcome import Entry, Report

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_BASE = "%SRCROOT%"  # a name that code hosts know
_REPLACEABLE = "global-read"  # the rule of uses that have a replacement

_Json = dict[str, object]


def document(report: Report, counted: Sequence[Entry]) -> _Json:
    """Return the log, for ``json.dumps``.

    Args:
        report: the outcome of the command.
        counted: the uses that become results.
    """
    codes = sorted(set(map(_rule_of, counted)))
    prints = _fingerprints(report.entries)
    results = [
        {**_result(each, prints[id(each)]), "ruleIndex": codes.index(_rule_of(each))}
        for each in counted
    ]
    notes = [_notification(problem) for problem in report.problems]
    run = {
        "tool": {
            "driver": {"name": "megapg", "version": __version__, "rules": list(map(_rule, codes))}
        },
        "columnKind": "unicodeCodePoints",
        "newlineSequences": ["\r\n", "\r", "\n"],
        "originalUriBaseIds": {_BASE: {"uri": report.config.root.as_uri() + "/"}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule_of(entry: Entry) -> str:
    return _REPLACEABLE if entry.instead else entry.reason


def _rule(code: str) -> _Json:
    if code == _REPLACEABLE:
        title = "reads Megatron's globals and can be replaced"
        why = "A getter of parallel_state knows only the one set of groups of the process."
        instead = "Run megapg migrate --write."
    else:
        reason = REASONS[code]
        title, why, instead = reason.title, reason.why, reason.instead
    return {
        "id": code,
        "shortDescription": {"text": title},
        "fullDescription": {"text": why},
        "help": {"text": f"{why}\n\n{instead}"},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"tags": ["megatron-core", "maintainability"]},
    }


def _result(entry: Entry, fingerprint: str) -> _Json:
    use = entry.use
    region = {
        "startLine": use.span.line,
        "startColumn": use.span.column,
        "endLine": use.span.end_line,
        "endColumn": use.span.end_column,
        "snippet": {"text": use.text},
    }
    location: _Json = {
        "physicalLocation": {"artifactLocation": _artifact(use.file), "region": region}
    }
    if use.function:
        location["logicalLocations"] = [{"fullyQualifiedName": use.function}]
    return {
        "ruleId": _rule_of(entry),
        "level": "warning" if entry.is_left else "note",
        "message": {"text": _message(entry)},
        "locations": [location],
        "partialFingerprints": {"megapgUse/v1": fingerprint},
    }


def _message(entry: Entry) -> str:
    name = entry.use.name or "parallel_state"
    if entry.instead:
        new = " ".join(entry.instead.split())
        text = f"{name} reads Megatron's globals. Instead: {new}"
    else:
        detail = f" {entry.detail}." if entry.detail else ""
        text = f"{name} {REASONS[entry.reason].title}.{detail}"
    return text.replace("[", "\\[").replace("]", "\\]")  # brackets would be a link


def _fingerprints(entries: Sequence[Entry]) -> dict[int, str]:
    """Hashes by ``id(entry)`` that stay when code moves: the baseline's key, and a number."""
    seen: Counter[str] = Counter()
    found = {}
    for entry in entries:
        key = key_of(entry.use)
        seen[key] += 1
        text = f"{key}::{seen[key]}".encode(errors="surrogateescape")
        found[id(entry)] = hashlib.sha256(text).hexdigest()
    return found


def _notification(problem: Problem) -> _Json:
    place: _Json = {"artifactLocation": _artifact(problem.file)}
    if problem.line:
        place["region"] = {"startLine": problem.line}
    return {
        "level": "error",
        "message": {"text": problem.message},
        "locations": [{"physicalLocation": place}],
    }


def _artifact(name: str) -> _Json:
    uri = quote_from_bytes(name.encode(errors="surrogateescape"))
    if PurePath(name).is_absolute():
        return {"uri": f"file://{uri}"}
    return {"uri": uri, "uriBaseId": _BASE}
