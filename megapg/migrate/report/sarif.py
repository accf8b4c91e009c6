"""SARIF 2.1.0, which code hosts and editors read.

A result is a use, a rule is the reason why nothing serves it. A fix has all edits of a file, since
one alone would lack the import or the parameter that it needs, and of the files that work with it
only; it stands at the first use in them that is rewritten.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from urllib.parse import quote_from_bytes

from megapg import __version__
from megapg.migrate.baseline import key_of
from megapg.migrate.migration import Rewritten, located
from megapg.migrate.python.source import Problem
from megapg.migrate.reasons import CAUTIONS, REASONS
from megapg.migrate.report.outcome import Entry, Report, one_line
from megapg.migrate.report.together import together

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_BASE = "%SRCROOT%"  # the name that code hosts know
_SERVED = "global-read"

_Json = dict[str, object]


def document(report: Report, counted: Sequence[Entry]) -> _Json:
    """The whole log.

    Args:
        report: the outcome.
        counted: the uses that become results.
    """
    rules = [_rule(code) for code in sorted(set(map(_rule_of, counted)))]
    at = {rule["id"]: index for index, rule in enumerate(rules)}
    prints = dict(zip(map(id, report.entries), _fingerprints(report.entries), strict=True))
    units = {file.file: unit for unit in together(report.files) for file in unit}
    fixed: set[str] = set()
    results = []
    for entry in counted:
        result = {**_result(entry, prints[id(entry)]), "ruleIndex": at[_rule_of(entry)]}
        file = entry.site.file
        if not entry.left and file in units and file not in fixed:
            result["fixes"] = [_fix(units[file])]
            fixed |= {each.file for each in units[file]}
        results.append(result)
    notes = [_notification(problem) for problem in report.problems]
    run = {
        "tool": {"driver": {"name": "megapg", "version": __version__, "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "newlineSequences": ["\r\n", "\r", "\n"],
        "originalUriBaseIds": {_BASE: {"uri": report.config.root.as_uri() + "/"}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


# --- rules ----------------------------------------------------------------------------------------


def _rule_of(entry: Entry) -> str:
    return entry.reason or _SERVED


def _rule(code: str) -> _Json:
    if code == _SERVED:
        title = "reads Megatron's globals, and a collection can serve it"
        why = "A getter of parallel_state answers for the one set of groups that the process has."
        instead = "megapg migrate --write rewrites it; megapg check says what it would write."
    else:
        known = REASONS.get(code) or CAUTIONS[code]
        title, why, instead = known.title, known.why, f"Instead: {known.instead}"
    return {
        "id": code,
        "shortDescription": {"text": title},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"tags": ["megatron-core", "maintainability"]},
        "fullDescription": {"text": why},
        "help": {"text": f"{why}\n\n{instead}"},
    }


# --- results --------------------------------------------------------------------------------------


def _result(entry: Entry, fingerprint: str) -> _Json:
    site = entry.site
    region = {**_region(asdict(site.span)), "snippet": {"text": site.text}}
    location: _Json = {
        "physicalLocation": {"artifactLocation": _artifact(site.file), "region": region}
    }
    if around := site.function or site.class_name:
        location["logicalLocations"] = [{"fullyQualifiedName": around}]
    return {
        "ruleId": _rule_of(entry),
        "level": "warning" if entry.left else "note",
        "message": {"text": _message(entry)},
        "locations": [location],
        "partialFingerprints": {"megapgUse/v1": fingerprint},
    }


def _message(entry: Entry) -> str:
    name = entry.site.name or "parallel_state"
    if entry.instead:
        said = f"{name} reads Megatron's globals. Instead: {one_line(entry.instead)}"
    else:
        known = REASONS.get(entry.reason)
        said = f"{name} {known.title if known else entry.reason}."
        if entry.note:
            said += f" {entry.note}."
        if entry.suggestion:
            said += f" Instead: {one_line(entry.suggestion)}"
    return said.replace("[", "\\[").replace("]", "\\]")  # else it could be read as a link


def _fingerprints(entries: Iterable[Entry]) -> Iterator[str]:
    """What a use is known by when code around it moves: as in the baseline, and the how-manieth."""
    seen: Counter[str] = Counter()
    for entry in entries:
        key = key_of(entry.site)
        seen[key] += 1
        yield hashlib.sha256(f"{key}::{seen[key]}".encode(errors="surrogateescape")).hexdigest()


def _fix(files: Sequence[Rewritten]) -> _Json:
    return {
        "description": {"text": f"Rewrite {', '.join(file.file for file in files)}."},
        "artifactChanges": [
            {
                "artifactLocation": _artifact(file.file),
                "replacements": [
                    {"deletedRegion": _region(region), "insertedContent": {"text": edit.new}}
                    for edit, region in located(file)
                ],
            }
            for file in files
        ],
    }


def _region(region: Mapping[str, int]) -> _Json:
    return {
        "startLine": region["line"],
        "startColumn": region["column"],
        "endLine": region["end_line"],
        "endColumn": region["end_column"],
    }


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
    """A file of the project by its name in it, another one by its whole name."""
    uri = quote_from_bytes(name.encode(errors="surrogateescape"))
    if PurePath(name).is_absolute():
        return {"uri": f"file://{uri}"}
    return {"uri": uri, "uriBaseId": _BASE}
