"""Test the reports: the diff, which git can apply, JSON, SARIF, the baseline, the tables."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees import write

from megapg.errors import UnsupportedOptionError
from megapg.migrate.baseline import beyond, gone, read_baseline, write_baseline
from megapg.migrate.config import Config
from megapg.migrate.migration import Found, How, Left, Migration, Problem, Rewritten, Root, Served
from megapg.migrate.report import as_json, sarif
from megapg.migrate.report.diff import base_of, unified
from megapg.migrate.report.outcome import (
    Report,
    by_package,
    of_check,
    of_migration,
    shortened,
    versions,
)
from megapg.migrate.uses import Kind, Span, Use
from megapg.upstream.mapping import Refusal, Replacement

RANK = Replacement('$pg.rank("tp")', "tp", "rank", needs=("tp",))
GROUP = Replacement('getattr($pg, "embd", None)', "embd", caution="may-be-none")
LIFECYCLE = Refusal("lifecycle")


def use(
    file: str, line: int, answer: Replacement | Refusal, function: str = "f", keep: bool = False
) -> Use:
    name = "destroy_model_parallel" if answer is LIFECYCLE else "get_tensor_model_parallel_rank"
    span = Span(line, 5, line, 5 + len(f"mpu.{name}()"))
    return Use(file, span, Kind.CALL, name, f"mpu.{name}()", function, answer, keep)


FOUND = Found(
    uses=[
        use("p/a.py", 4, RANK),
        use("p/a.py", 5, RANK),
        use("p/a.py", 6, LIFECYCLE),
        use("p/a.py", 9, GROUP, "g"),
        use("p/a.py", 10, RANK, "g", keep=True),
        use("q/s/b.py", 4, RANK),
        use("top.py", 1, RANK, ""),
    ],
    files=[f"{number}.py" for number in range(9)],
    notebooks=1,
    problems=[Problem("p/a b%é.py", 9, "is no valid Python")],
)


def migrated(root: Path, *, unwritten: bool = False) -> Report:
    failed = [Problem("p/a.py", 0, "can't be written: it is read-only")] if unwritten else []
    config = Config(root, versions=(16,), versions_from="here")
    return of_migration(migration(root), config, failed)


def migration(root: Path) -> Migration:
    served = [Served(FOUND.uses[n], How.RESOLVED, 'pg.rank("tp")') for n in (0, 1, 5)]
    left = [
        Left(FOUND.uses[2], "lifecycle", "[the] detail"),
        Left(FOUND.uses[3], "may-be-none"),
        Left(FOUND.uses[6], "unverified"),
    ]
    files = [Rewritten("p/a.py", root / "p" / "a.py", b"a\nb\n", b"a\nc\n")]
    roots = [Root("p/a.py", 3, "f", True, 2, ("q/s/b.py:7",))]
    problems = [*FOUND.problems, Problem("top.py", 0, "does not compile")]
    return Migration(FOUND, served, left, files, roots, problems)


# --- the diff -------------------------------------------------------------------------------------


def git_apply(folder: Path, diff: bytes) -> None:
    done = subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, capture_output=True)
    assert done.returncode == 0, done.stderr.decode() + diff.decode(errors="replace")


def patch_p1(folder: Path, diff: bytes) -> None:
    command = ["patch", "-p1", "--no-backup-if-mismatch", "--fuzz=0", "--binary"]
    done = subprocess.run(command, cwd=folder, input=diff, capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + diff.decode(errors="replace")


APPLIERS = [git_apply, *([patch_p1] if shutil.which("patch") else [])]
LINES = b"".join(b"line %d\n" % number for number in range(30))
CASES = {
    "one line": (LINES, LINES.replace(b"line 15", b"LINE")),
    "first and last": (LINES, b"a\n" + LINES[7:-8] + b"b\n"),
    "two hunks": (LINES, LINES.replace(b"line 5\n", b"").replace(b"line 25", b"b\nc")),
    "no newline at the end": (LINES[:-1], LINES[:-1].replace(b"line 27", b"a")),
    "the last line has no newline": (LINES[:-1], LINES[:-2] + b"8"),
    "the file gets a newline": (b"a\nb", b"a\nc\n"),
    "the file loses its newline": (b"a\nb\n", b"a\nc"),
    "windows": (LINES.replace(b"\n", b"\r\n"), LINES.replace(b"\n", b"\r\n")[:-2] + b" x\r\n"),
    "old mac": (LINES.replace(b"\n", b"\r"), LINES.replace(b"\n", b"\r") + b"x\r"),
    "form feeds": (b"a\n\x0cb\n\x0c\nc\x0bd\n\x1ce\n", b"a\n\x0cB\n\x0c\nc\x0bD\n\x1ce\n"),
    "no text": (b"a\n\xff\xfe\nb\n", b"a\n\xff\xfe\nc\n"),
    "looks like a diff": (b"-- a\n++ b\n@@ c\n d\n\\ e\n", b"-- A\n++ B\n@@ c\n d\n\\ E\n"),
}


def rewritten(path: Path, before: bytes, after: bytes) -> Rewritten:
    write(path.parent, {path.name: before})
    return Rewritten(path.name, path, before, after)


@pytest.mark.parametrize("apply", APPLIERS)
@pytest.mark.parametrize(("before", "after"), CASES.values(), ids=CASES)
def test_the_diff_applied_gives_the_same_bytes(
    tmp_path: Path, before: bytes, after: bytes, apply: Callable[[Path, bytes], None]
) -> None:
    file = rewritten(tmp_path / "some" / "a.py", before, after)
    apply(tmp_path, b"".join(unified(file, tmp_path)))
    assert file.path.read_bytes() == after


_TEXTS = st.lists(st.text(st.sampled_from("ab \r"), max_size=2), min_size=1, max_size=20)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(_TEXTS, _TEXTS)
def test_any_diff_applied_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, old: list[str], new: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    file = rewritten(folder / "a.py", "\n".join(old).encode(), "\n".join(new).encode())
    diff = b"".join(unified(file, folder))
    assert bool(diff) == (file.before != file.after)
    if diff and file.before and file.after:  # git takes an empty file for a new or deleted one
        git_apply(folder, diff)
        assert file.path.read_bytes() == file.after


@pytest.mark.parametrize("apply", APPLIERS)
@pytest.mark.parametrize("is_new", [False, True], ids=["old", "new"])
@pytest.mark.parametrize(
    "name", ["a b.py", "é.py", 'a"b.py', "a\\b.py", "a\tb.py", os.fsdecode(b"a\xff.py"), "-a.py"]
)
def test_odd_names(
    tmp_path: Path, name: str, is_new: bool, apply: Callable[[Path, bytes], None]
) -> None:
    file = Rewritten(name, tmp_path / name, b"" if is_new else b"a\nb\n", b"c\nb\n", is_new)
    if not is_new:
        write(tmp_path, {name: file.before})
    apply(tmp_path, b"".join(unified(file, tmp_path)))
    assert file.path.read_bytes() == b"c\nb\n"


def test_the_folder_of_a_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [rewritten(tmp_path / name / "a.py", b"a\n", b"b\n") for name in ("p", "q/s")]
    monkeypatch.chdir(tmp_path / "p")
    assert base_of(files, tmp_path) == tmp_path
    assert base_of(files[:1], tmp_path) == tmp_path / "p"
    assert base_of(files, tmp_path / "p" / "q") == tmp_path
    assert unified(files[0], tmp_path / "p")[:2] == [b"--- a/a.py\n", b"+++ b/a.py\n"]


# --- the outcome ----------------------------------------------------------------------------------


def test_the_table_of_packages(tmp_path: Path) -> None:
    report = migrated(tmp_path)
    assert report.columns == ("collection", "model", "threaded", "resolved", "left")
    assert [(row.package, row.uses, row.fates) for row in by_package(report)] == [
        ("p", 4, (0, 0, 0, 2, 2)),
        (".", 1, (0, 0, 0, 0, 1)),
        ("q/s", 1, (0, 0, 0, 1, 0)),
        ("all", 6, (0, 0, 0, 3, 3)),
    ]
    assert report.reasons == {"lifecycle": 1, "may-be-none": 1, "unverified": 1}
    assert report.kept == 1
    assert [entry.use.span.line for entry in report.entries] == [4, 5, 6, 9, 4, 1]
    assert report.entries[0].use.place == "p/a.py:4:5"
    assert versions(report.config) == "0.16 (here)"
    assert shortened("f(\n    a,\n    b)") == "f( a, b)"
    assert len(shortened("x" * 500)) == 120


def test_the_suggestion_for_a_use_that_is_left(tmp_path: Path) -> None:
    left = {entry.reason: entry.suggestion for entry in migrated(tmp_path).left}
    assert left == {"lifecycle": "", "may-be-none": 'getattr(pg, "embd", None)', "unverified": ""}


def test_all_uses_are_left_if_a_file_could_not_be_written(tmp_path: Path) -> None:
    report = migrated(tmp_path, unwritten=True)
    assert report.fates["left"] == 6
    assert report.reasons["unwritten"] == 3
    assert (list(report.files), list(report.roots)) == ([], [])
    assert report.problems[-1].message == "can't be written: it is read-only"


def test_check_tells_what_could_be_written(tmp_path: Path) -> None:
    report = of_check(migration(tmp_path), Config(tmp_path))
    assert report.fates == {"with a replacement": 3, "without": 3}
    assert report.fates["without"] == len(migrated(tmp_path).left)
    assert [(e.instead, e.reason, e.suggestion) for e in report.entries[1:4]] == [
        ('pg.rank("tp")', "", ""),
        ("", "lifecycle", ""),
        ("", "may-be-none", 'getattr(pg, "embd", None)'),
    ]


# --- JSON -----------------------------------------------------------------------------------------


def test_json(tmp_path: Path) -> None:
    report = migrated(tmp_path)
    found = json.loads(json.dumps(as_json.document(report, report.left)))
    totals = {"uses": 6, "collection": 0, "model": 0, "threaded": 0, "resolved": 3, "left": 3}
    assert found["totals"] == {**totals, "reasons": report.reasons}
    assert found["by_package"] == {"p": 4, ".": 1, "q/s": 1}
    assert (found["files"], found["notebooks"], found["kept"]) == (9, 1, 1)
    assert (found["versions"], found["versions_from"]) == (["0.16"], "here")
    first, _, third = found["uses"][:3]
    keys = ("line", "column", "function", "kind", "fate", "replacement", "counts")
    assert [first[key] for key in keys] == [4, 5, "f", "call", "resolved", 'pg.rank("tp")', False]
    keys = ("fate", "replacement", "reason", "detail", "counts")
    assert [third[key] for key in keys] == ["left", None, "lifecycle", "[the] detail", True]
    (change,) = found["changes"]
    assert (change["file"], change["new"]) == ("p/a.py", False)
    write(tmp_path, {"p/a.py": "a\nb\n"})
    git_apply(tmp_path, change["diff"].encode())
    assert (tmp_path / "p" / "a.py").read_text() == "a\nc\n"
    (root,) = found["roots"]
    assert (root["function"], root["takes"], root["calls"]) == ("f", True, ["q/s/b.py:7"])
    assert [problem["line"] for problem in found["problems"]] == [9, 0]


# --- SARIF ----------------------------------------------------------------------------------------


def log(report: Report) -> Any:
    """Check a SARIF log against the parts of the standard that megapg uses; return its run."""
    whole = json.loads(json.dumps(sarif.document(report, list(report.entries))))
    assert set(whole) == {"$schema", "version", "runs"}
    assert whole["version"] == "2.1.0"
    (run,) = whole["runs"]
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    assert all(rule["shortDescription"]["text"] and rule["help"]["text"] for rule in rules)
    bases = run["originalUriBaseIds"]
    assert all(base["uri"].startswith("file:///") for base in bases.values())
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        (location,) = result["locations"]
        place = location["physicalLocation"]
        assert place["artifactLocation"]["uriBaseId"] in bases
        region = place["region"]
        start = (region["startLine"], region["startColumn"])
        assert (1, 1) <= start <= (region["endLine"], region["endColumn"])
    return run


def test_sarif(tmp_path: Path) -> None:
    run = log(migrated(tmp_path))
    assert [(result["ruleId"], result["level"]) for result in run["results"]][:3] == [
        ("global-read", "note"),
        ("global-read", "note"),
        ("lifecycle", "warning"),
    ]
    message = run["results"][2]["message"]["text"]
    assert message == "destroy_model_parallel makes or destroys the groups. \\[the\\] detail."
    notes = run["invocations"][0]["toolExecutionNotifications"]
    place = notes[0]["locations"][0]["physicalLocation"]
    assert place["region"] == {"startLine": 9}
    assert place["artifactLocation"]["uri"] == "p/a%20b%25%C3%A9.py"
    assert unquote_to_bytes(place["artifactLocation"]["uri"]).decode() == "p/a b%é.py"
    checked = log(of_check(migration(tmp_path), Config(tmp_path)))
    assert {result["level"] for result in checked["results"]} == {"warning"}


def test_fingerprints_stay_when_code_moves(tmp_path: Path) -> None:
    def prints(uses: list[Use]) -> set[str]:
        served = [Served(each, How.RESOLVED, each.text) for each in uses]
        found = Found(uses, ["a.py"], 0, [])
        report = of_check(Migration(found, served, [], [], [], []), Config(tmp_path))
        return {each["partialFingerprints"]["megapgUse/v1"] for each in log(report)["results"]}

    before = prints([use("a.py", 4, RANK), use("a.py", 5, RANK)])
    assert len(before) == 2
    assert prints([use("a.py", 8, RANK), use("a.py", 9, RANK)]) == before
    assert len(prints([use("a.py", 8, RANK), use("a.py", 9, RANK, "g")]) & before) == 1


# --- the baseline ---------------------------------------------------------------------------------


def test_the_baseline(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    uses = [use("a.py", 4, RANK), use("a.py", 5, RANK), use("a.py", 9, LIFECYCLE)]
    write_baseline(file, uses, lambda name: True)
    allowed = read_baseline(file)
    assert [each.name for each in tmp_path.iterdir()] == ["baseline.json"]
    moved = [use("a.py", each.span.line + 7, each.answer) for each in uses]
    assert (beyond(moved, allowed), gone(moved, allowed)) == ([], 0)
    more = [*moved, use("a.py", 90, RANK)]
    assert beyond(more, allowed) == [more[-1]]
    elsewhere = [use("a.py", 4, RANK, "g"), *uses[1:]]
    assert (beyond(elsewhere, allowed), gone(elsewhere, allowed)) == (elsewhere[:1], 1)
    assert gone([], allowed) == 3


BROKEN = [
    None,
    "",
    "[]",
    "{}",
    '{"format": 2, "allowed": {}}',
    '{"format": 1, "allowed": {"a": 0}}',
]


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_baseline_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        write(tmp_path, {"b.json": content})
    with pytest.raises(UnsupportedOptionError, match="--update-baseline"):
        read_baseline(tmp_path / "b.json")
    with pytest.raises(UnsupportedOptionError, match="can't be written"):
        write_baseline(tmp_path / "nowhere" / "b.json", [], lambda name: True)
