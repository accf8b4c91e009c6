"""``megapg migrate`` and its reports: a diff that can be applied, JSON, SARIF, tables."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pytest
import yaml
from commands import megapg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trees import contents, write
from typer.testing import CliRunner, Result

from megapg.cli.migrate import app
from megapg.migrate.config import load_config
from megapg.migrate.engine import migrate
from megapg.migrate.find.index import find_sites
from megapg.migrate.migration import Edit, How, Left, Migration, Rewritten, Root, Served, Why
from megapg.migrate.python.source import Problem, Source, parse
from megapg.migrate.report import as_json, sarif
from megapg.migrate.report.diff import base_of, unified
from megapg.migrate.report.outcome import Report, burn_down, of_findings, of_migration
from megapg.migrate.report.together import together

USES = """\
from megatron.core import mpu

def first():
    return mpu.get_tensor_model_parallel_rank()

def second():
    mpu.destroy_model_parallel()
    return mpu.get_data_parallel_group(), mpu.get_data_parallel_group()
"""


def rewritten(path: Path, edits: Sequence[Edit], encoding: str = "utf-8") -> Rewritten:
    before = path.read_bytes()
    mark = b"\xef\xbb\xbf" if before.startswith(b"\xef\xbb\xbf") else b""
    text = before.removeprefix(mark).decode(encoding)
    after, at = "", 0
    for edit in edits:
        after += text[at : edit.start] + edit.new
        at = edit.stop
    after += text[at:]
    return Rewritten(path.name, path, before, mark + after.encode(encoding), text, tuple(edits))


def migration(root: Path) -> Migration:
    """Each use with a replacement has it in its place, below an import; no more than a stand-in."""
    findings = find_sites([root], load_config(root, "0.16"))
    served, left, files = [], [], []
    for name in sorted({site.file for site in findings.sites}):
        source = parse(root / name, name, (root / name).read_bytes())
        assert isinstance(source, Source)
        edits = [Edit(0, 0, "import megapg\n", "import")]
        for site in (site for site in findings.sites if site.file == name):
            if not site.replacement:
                left.append(Left(site, site.reason, suggestion="session.close()"))
                continue
            text = site.replacement.replace("pg", "megapg.resolve(None)")
            start = source.line_starts[site.span.line - 1] + site.span.column - 1
            edits.append(Edit(start, start + len(site.text), text, "site"))
            served.append(Served(site, How.RESOLVED, text, Why.UNCALLED))
        each = rewritten(root / name, edits, source.encoding)
        files.append(Rewritten(name, each.path, each.before, each.after, each.text, each.edits))
    roots = [Root(name, "first", ("tp",), 3, Why.UNCALLED) for name in ("p/a.py",)]
    return Migration(served, left, files, roots, findings.problems, findings)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write(
        tmp_path, {"pyproject.toml": "", "p/a.py": USES, "q/sub/b.py": USES.replace("\n", "\r\n")}
    )
    return tmp_path


def outcome(root: Path) -> Report:
    return of_migration(migration(root), load_config(root, "0.16"))


# --- the diff -------------------------------------------------------------------------------------


def git_apply(folder: Path, diff: bytes) -> None:
    done = subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, capture_output=True)
    assert done.returncode == 0, done.stderr.decode() + diff.decode(errors="replace")


def patch_p1(folder: Path, diff: bytes) -> None:
    command = ["patch", "-p1", "--no-backup-if-mismatch", "--fuzz=0"]
    done = subprocess.run(command, cwd=folder, input=diff, capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + diff.decode(errors="replace")


APPLIERS = [git_apply]
if shutil.which("patch"):
    APPLIERS.append(patch_p1)

LINES = "".join(f"line {number}\n" for number in range(30))
CASES = {
    "one line": (LINES.encode(), [("line 15", "LINE")]),
    "first and last": (LINES.encode(), [("line 0", "a"), ("line 29", "b")]),
    "two hunks": (LINES.encode(), [("line 5", "a"), ("line 25", "b")]),
    "hunks that touch": (LINES.encode(), [("line 5", "a"), ("line 12\n", "b\n")]),
    "two on one line": (b"a = f(x) + g(x)\n", [("f(x)", "1"), ("g(x)", "2")]),
    "a line goes": (LINES.encode(), [("line 7\nline 8\n", "")]),
    "lines come": (LINES.encode(), [("line 7\n", "new\nmore\nline 7\n")]),
    "lines become one": (LINES.encode(), [("7\nline 8\nline", "7 to")]),
    "no newline at the end": (LINES.encode()[:-1], [("line 27", "a")]),
    "the last line has none": (LINES.encode()[:-1], [("line 29", "a")]),
    "it gets one": (b"a\nb", [("b", "c\n")]),
    "it loses it": (b"a\nb\n", [("b\n", "c")]),
    "windows": (LINES.replace("\n", "\r\n").encode(), [("line 15", "LINE"), ("line 20\r\n", "")]),
    "old mac": (LINES.replace("\n", "\r").encode(), [("line 15", "LINE")]),
    "mixed": (b"a\r\nb\nc\rd\ne\r\n", [("b", "B"), ("d", "D"), ("e", "E")]),
    "form feeds": (b"a\n\x0cb\n\x0c\nc\x0bd\n\x1ce\n", [("b", "B"), ("d", "D")]),
    "tabs and trailing space": (b"if a:\n\tb  \n\tc\t\n", [("b", "B"), ("c", "C")]),
    "a mark": ("\ufeffa\nb\n".encode(), [("a", "A")]),
    "latin-1": ("# coding: latin-1\nä\nb = 'é'\n".encode("latin-1"), [("b", "B")]),
    "looks like a diff": (b"-- a\n++ b\n@@ c\n d\n\\ e\n", [("a", "A"), ("b", "B"), ("e", "E")]),
}


@pytest.mark.parametrize("apply", APPLIERS)
@pytest.mark.parametrize("case", CASES)
def test_the_diff_applied_gives_the_same_bytes(
    tmp_path: Path, case: str, apply: Callable[[Path, bytes], None]
) -> None:
    data, replaced = CASES[case]
    write(tmp_path, {"some/a.py": data})
    encoding = "latin-1" if case == "latin-1" else "utf-8-sig"
    text, at, edits = data.decode(encoding), 0, []
    for old, new in replaced:
        start = text.index(old, at)
        at = start + len(old)
        edits.append(Edit(start, at, new, "site"))
    file = rewritten(tmp_path / "some" / "a.py", edits, encoding.removesuffix("-sig"))
    assert file.after != data
    apply(tmp_path, b"".join(unified(file, tmp_path)))
    assert file.path.read_bytes() == file.after


def test_lines_that_stay_are_no_part_of_a_change(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": LINES})
    old, new = "line 5\nline 6\nline 7\nline 8\n", "line 5\nline 6\nnew\nline 7\nline 8\n"
    start = LINES.index(old)
    file = rewritten(tmp_path / "a.py", [Edit(start, start + len(old), new, "statement")])
    assert b"".join(unified(file, tmp_path)).decode() == (
        "--- a/a.py\n+++ b/a.py\n@@ -5,6 +5,7 @@\n"
        " line 4\n line 5\n line 6\n+new\n line 7\n line 8\n line 9\n"
    )
    nothing = rewritten(tmp_path / "a.py", [Edit(start, start + len(old), old, "site")])
    assert unified(nothing, tmp_path) == []


@st.composite
def _edited(draw: st.DrawFn) -> tuple[str, list[Edit]]:
    lines = st.text(st.sampled_from("ab \r"), max_size=2)
    text = "\n".join(draw(st.lists(lines, min_size=1, max_size=40)))
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8).map(set)))
    new = st.text(st.sampled_from("ab\n\r"), max_size=4)
    starts, stops = places[::2], places[1::2]
    pairs = list(zip(starts, stops, strict=False))
    if len(starts) > len(stops) and draw(st.booleans()):
        pairs.append((starts[-1], starts[-1]))  # put in
    return text, [Edit(start, stop, draw(new), "site") for start, stop in pairs]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(_edited())
def test_any_diff_applied_gives_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, edited: tuple[str, list[Edit]]
) -> None:
    text, edits = edited
    folder = tmp_path_factory.mktemp("any")
    write(folder, {"a.py": text})
    file = rewritten(folder / "a.py", edits)
    diff = b"".join(unified(file, folder))
    assert diff or file.before == file.after
    if diff and file.before and file.after:  # with nothing on one side files come and go
        git_apply(folder, diff)
        assert file.path.read_bytes() == file.after


@pytest.mark.parametrize("apply", APPLIERS)
@pytest.mark.parametrize(
    "name", ["a b.py", "é.py", 'a"b.py', "a\\b.py", "a\tb.py", os.fsdecode(b"a\xff.py"), "-a.py"]
)
def test_odd_names(tmp_path: Path, name: str, apply: Callable[[Path, bytes], None]) -> None:
    write(tmp_path, {name: "a\nb\n"})
    file = rewritten(tmp_path / name, [Edit(0, 1, "c", "site")])
    apply(tmp_path, b"".join(unified(file, tmp_path)))
    assert file.path.read_bytes() == b"c\nb\n"


def test_where_the_diff_is_to_be_applied(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = migration(project).files
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for here, chosen, expected in (
        (elsewhere, files, project),
        (project, files, project),
        (project / "q", files, project),
        (project / "q", files[1:], project / "q"),
        (elsewhere, [*files, rewritten(Path(__file__), [])], None),
    ):
        monkeypatch.chdir(here)
        base = base_of(chosen, project)
        assert base == expected or (expected is None and Path(__file__).is_relative_to(base))
    monkeypatch.chdir(project / "q")
    assert unified(files[1], base_of(files[1:], project))[0] == b"--- a/sub/b.py\n"


def test_a_long_file_takes_no_search(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "x = 1\n" * 200_000})
    edits = [Edit(start, start + 1, "y", "site") for start in range(0, 1_200_000, 600)]
    file = rewritten(tmp_path / "a.py", edits)
    started = time.process_time()
    diff = unified(file, tmp_path)
    assert time.process_time() - started < 5  # difflib takes minutes
    assert sum(line.startswith(b"@@") for line in diff) == 2000


# --- the outcome ----------------------------------------------------------------------------------


def test_burn_down(project: Path) -> None:
    report = outcome(project)
    assert report.columns == ("collection", "model", "threaded", "resolved", "left")
    assert [(row.package, row.uses, row.fates) for row in burn_down(report)] == [
        ("p", 4, (0, 0, 0, 3, 1)),
        ("q/sub", 4, (0, 0, 0, 3, 1)),
        ("all", 8, (0, 0, 0, 6, 2)),
    ]
    assert report.reasons == {"lifecycle": 2}
    places = [entry.site.place for entry in report.entries]
    assert places[:2] == ["p/a.py:4:12", "p/a.py:7:5"]


def test_uses_in_a_file_that_could_not_be_written_are_left(project: Path) -> None:
    whole = migration(project)
    problem = Problem("p/a.py", 0, "can't be written: Read-only file system")
    report = of_migration(whole, load_config(project, "0.16"), {"p/a.py": problem})
    assert report.fates["left"] == 5
    assert report.reasons == {"unwritten": 3, "lifecycle": 2}
    assert [file.file for file in report.files] == ["q/sub/b.py"]
    assert report.roots == []
    assert report.problems == [problem]


CALLER = """\
from b import inner
from megatron.core import mpu


def outer(x, pg_collection):
    return inner(x), mpu.get_data_parallel_group()
"""
CALLEE = """\
from megatron.core import mpu


def inner(x):
    return x, mpu.get_tensor_model_parallel_group()
"""


def test_files_that_pass_groups_to_each_other_are_a_unit(tmp_path: Path) -> None:
    files = {"a.py": CALLER, "b.py": CALLEE, "c.py": SERVED}
    write(tmp_path, {"pyproject.toml": "", **files})
    config = load_config(tmp_path, "0.16")
    whole = migrate([tmp_path], config)
    units = [[file.file for file in unit] for unit in together(whole.files)]
    assert units == [["a.py", "b.py"], ["c.py"]]

    report = of_migration(whole, config)
    fixes = [result["fixes"] for result in log(report)["results"] if "fixes" in result]  # type: ignore[attr-defined]
    changed = [
        [change["artifactLocation"]["uri"] for change in fix["artifactChanges"]] for (fix,) in fixes
    ]
    assert changed == units

    # One that can't be written holds up the other, and no more.
    (tmp_path / "b.py").chmod(0o444)
    result = run(tmp_path, "--write")
    assert result.exit_code == 2
    assert "a.py: is not written, since b.py could not be\n" in result.stdout
    assert (tmp_path / "a.py").read_text() == CALLER
    assert (tmp_path / "c.py").read_text() != SERVED


def test_units_of_many_files(tmp_path: Path) -> None:
    def file(name: str, *requires: str) -> Rewritten:
        return Rewritten(name, tmp_path / name, b"", b"", "", (), frozenset(requires))

    chain = [file(f"{n:04}", f"{n + 1:04}", "elsewhere") for n in range(2000)]
    found = together([*chain, file("alone"), file("b", "c"), file("c"), file("d", "c")])
    assert [len(unit) for unit in found] == [2000, 1, 3]
    assert [each.file for each in found[2]] == ["b", "c", "d"]


# --- JSON -----------------------------------------------------------------------------------------


def test_json(project: Path) -> None:
    report = outcome(project)
    found = json.loads(json.dumps(as_json.document(report, report.entries)))
    assert found["totals"] == {
        "uses": 8,
        "collection": 0,
        "model": 0,
        "threaded": 0,
        "resolved": 6,
        "left": 2,
        "reasons": {"lifecycle": 2},
    }
    assert found["by_package"] == {"p": 4, "q/sub": 4}
    first, second = found["sites"][:2]
    assert (first["fate"], first["replacement"]) == (
        "resolved",
        'megapg.resolve(None).rank("tp")',
    )
    assert (second["fate"], second["replacement"], second["reason"], second["suggestion"]) == (
        "left",
        None,
        "lifecycle",
        "session.close()",
    )
    for site in found["sites"]:
        data = (project / site["file"]).read_bytes()
        assert data[site["start"] : site["stop"]].decode() == site["text"]
    assert found["roots"] == [
        {
            "file": "p/a.py",
            "function": "first",
            "fields": ["tp"],
            "serves": 3,
            "why": "nobody calls it",
        }
    ]
    assert first["why"] == "nobody calls it"
    assert second["why"] is None
    # The edits are all that is needed to do it elsewhere.
    for change, file in zip(found["changes"], report.files, strict=True):
        assert change["file"] == file.file
        assert edited(file.before, change["edits"], "line", "column", "end_line", "end_column")(
            lambda edit: edit["new"]
        ) == (file.after)


def edited(
    data: bytes, edits: Sequence[dict[str, object]], *keys: str
) -> Callable[[Callable[[dict[str, object]], object]], bytes]:
    """The bytes with lines and columns replaced, as a program that reads a report would do it."""
    lines = data.decode().split("\n")
    starts = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    text = data.decode()

    def apply(new: Callable[[dict[str, object]], object]) -> bytes:
        changed = text
        for edit in reversed(edits):
            line, column, end_line, end_column = (edit[key] for key in keys)
            start, stop = starts[line - 1] + column - 1, starts[end_line - 1] + end_column - 1  # type: ignore[index,operator]
            changed = changed[:start] + str(new(edit)) + changed[stop:]
        return changed.encode()

    return apply


# --- SARIF ----------------------------------------------------------------------------------------


def log(report: Report) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(sarif.document(report, report.entries)))
    check_sarif(found)
    return found["runs"][0]  # type: ignore[index,no-any-return]


def check_sarif(found: dict[str, object]) -> None:
    """What the standard demands of the parts that are used; the schema itself is not shipped."""
    assert set(found) == {"$schema", "version", "runs"}
    assert found["version"] == "2.1.0"
    (run,) = found["runs"]  # type: ignore[misc]
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "megapg"
    assert len({rule["id"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["shortDescription"]["text"]
        assert rule["help"]["text"]
    for invocation in run["invocations"]:
        assert isinstance(invocation["executionSuccessful"], bool)
    bases = run["originalUriBaseIds"]
    assert all(base["uri"].startswith("file:///") and base["uri"].endswith("/")
               for base in bases.values())  # fmt: skip
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        for location in result["locations"]:
            check_place(location["physicalLocation"], bases)
        for fix in result.get("fixes", ()):
            assert fix["description"]["text"]
            for change in fix["artifactChanges"]:
                assert change["replacements"]
                for replacement in change["replacements"]:
                    place = {
                        "artifactLocation": change["artifactLocation"],
                        "region": replacement["deletedRegion"],
                    }
                    check_place(place, bases)
                    assert isinstance(replacement["insertedContent"]["text"], str)


def check_place(place: dict[str, dict[str, object]], bases: dict[str, object]) -> None:
    artifact, region = place["artifactLocation"], place["region"]
    absolute = str(artifact["uri"]).startswith("file:///")
    assert absolute != ("uriBaseId" in artifact)
    assert absolute or artifact["uriBaseId"] in bases
    start = (region["startLine"], region["startColumn"])
    assert (1, 1) <= start <= (region["endLine"], region["endColumn"])  # type: ignore[operator]


def test_sarif(project: Path) -> None:
    report = outcome(project)
    run = log(report)
    results = run["results"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["global-read", "lifecycle"]  # type: ignore[index,call-overload]
    levels = [(result["ruleId"], result["level"]) for result in results]  # type: ignore[attr-defined]
    assert levels[:2] == [("global-read", "note"), ("lifecycle", "warning")]
    for result, entry in zip(results, report.entries, strict=True):  # type: ignore[call-overload]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == entry.site.file
        lines = (project / entry.site.file).read_text().split("\n")
        region = place["region"]
        line = lines[region["startLine"] - 1]
        assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == entry.site.text


def test_sarif_has_a_fix_for_every_file_that_does_the_same_as_write(project: Path) -> None:
    report = outcome(project)
    results = log(report)["results"]
    fixes = [fix for result in results for fix in result.get("fixes", ())]  # type: ignore[attr-defined]
    changes = {
        change["artifactLocation"]["uri"]: change["replacements"]
        for fix in fixes
        for change in fix["artifactChanges"]
    }
    assert sorted(changes) == ["p/a.py", "q/sub/b.py"]
    keys = ("startLine", "startColumn", "endLine", "endColumn")
    for file in report.files:
        replacements = changes[file.file]
        regions = [{**each["deletedRegion"], **each} for each in replacements]
        after = edited(file.before, regions, *keys)(lambda each: each["insertedContent"]["text"])  # type: ignore[index]
        assert after == file.after


def test_fingerprints_stay_when_code_moves(project: Path) -> None:
    def prints() -> list[tuple[object, str]]:
        return [
            (result["ruleId"], result["partialFingerprints"]["megapgUse/v1"])
            for result in log(outcome(project))["results"]  # type: ignore[attr-defined]
        ]

    before = prints()
    assert len({print for _, print in before}) == 8  # two of them in one line of one function
    write(
        project, {"p/a.py": "import os\n\n\n" + USES.replace("    mpu.d", "    x = 1\n    mpu.d")}
    )
    assert prints() == before
    write(project, {"p/a.py": USES.replace("first", "other")})
    assert len(set(prints()) - set(before)) == 1


def test_sarif_of_check_has_no_fixes(project: Path) -> None:
    config = load_config(project, "0.16")
    run = log(of_findings(find_sites([project], config), config))
    assert not any("fixes" in result for result in run["results"])  # type: ignore[attr-defined]
    assert {result["level"] for result in run["results"]} == {"warning"}  # type: ignore[attr-defined]


def test_sarif_names_files_that_were_not_read_and_odd_names(project: Path) -> None:
    write(project, {"p/old.py": USES + "print 'two'\n", "p/a b%é.py": USES})
    run = log(outcome(project))
    (note,) = run["invocations"][0]["toolExecutionNotifications"]  # type: ignore[index]
    assert note["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "p/old.py"
    assert note["locations"][0]["physicalLocation"]["region"] == {"startLine": 9}
    uris = {
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for result in run["results"]  # type: ignore[attr-defined]
    }
    assert "p/a%20b%25%C3%A9.py" in uris
    assert "p/a b%é.py" in {unquote_to_bytes(uri).decode() for uri in uris}


# --- speed ----------------------------------------------------------------------------------------


def test_a_use_takes_no_more_work_to_report_among_many(tmp_path: Path) -> None:
    uses = USES + "    mpu.get_context_parallel_group()\n"
    calls = {}
    for many in (50, 200):
        write(tmp_path, {"pyproject.toml": "", **{f"p{n % 50}/a{n}.py": uses for n in range(many)}})
        whole, config = migration(tmp_path), load_config(tmp_path, "0.16")
        with counted() as count:  # calls, as their time depends on what else runs
            report = of_migration(whole, config)
            assert len(report.entries) == 5 * many
            json.dumps(as_json.document(report, report.entries))
            json.dumps(sarif.document(report, report.entries))
            for file in report.files:
                unified(file, tmp_path)
        calls[many] = sum(count.values()) / many
    assert calls[200] < 1.2 * calls[50]


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what is called, of Python's functions and of C's."""
    count: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, value: count.update([event]))
    try:
        yield count
    finally:
        sys.setprofile(None)


# --- the command ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
SERVED = """\
from megatron.core import mpu


def first():
    return mpu.get_tensor_model_parallel_rank()
"""
LEFT = """\
from megatron.core import mpu


def second():
    mpu.destroy_model_parallel()
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["migrate", *map(str, arguments), "--from-core", "0.16"])


def test_a_dry_run_prints_the_diff_and_apart_from_it_what_is_left(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "p/a.py": SERVED, "p/b.py": LEFT})
    before = contents(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 1
    assert result.stdout.startswith("--- a/p/a.py\n+++ b/p/a.py\n@@ -1,")
    assert "\n-    return mpu.get_tensor_model_parallel_rank()\n" in result.stdout
    assert "b.py" not in result.stdout
    lines = result.stderr.splitlines()
    assert lines[0].startswith("p/b.py:5:5: mpu.destroy_model_parallel() [lifecycle]")
    assert lines[-1].startswith("2 files, 2 uses: 1 can be rewritten in 1 file; 1 left")
    assert lines[-1].endswith("Nothing is written yet: add --write.")
    assert contents(tmp_path) == before


def test_write(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "p/a.py": SERVED, "p/b.py": LEFT})
    result = run(tmp_path, "--write")
    assert result.exit_code == 1
    assert result.stderr == ""
    assert "p/b.py:5:5: mpu.destroy_model_parallel() [lifecycle]" in result.stdout
    assert "1 rewritten in 1 file; 1 left" in result.stdout.splitlines()[-1]
    assert (tmp_path / "p/b.py").read_text() == LEFT
    assert "mpu" not in (tmp_path / "p/a.py").read_text()
    after = contents(tmp_path)

    result = run(tmp_path, "--write")  # what is left is left
    assert result.exit_code == 1
    assert "0 rewritten in 0 files; 1 left" in result.stdout
    assert contents(tmp_path) == after

    (tmp_path / "p/b.py").unlink()
    assert run(tmp_path).exit_code == 0
    assert run(tmp_path, "--write").exit_code == 0


def test_a_long_call_is_shortened(tmp_path: Path) -> None:
    arguments = ", ".join(f"argument_{number}=\n        {number}" for number in range(30))
    call = f"destroy_model_parallel({arguments})"
    write(tmp_path, {"pyproject.toml": "", "a.py": LEFT.replace("destroy_model_parallel()", call)})
    line = run(tmp_path).stderr.splitlines()[0]
    assert line.startswith("a.py:5:5: mpu.destroy_model_parallel(argument_0= 0, argument_1= 1")
    assert line.endswith("... [lifecycle]")
    assert len(line) < 160


def test_what_is_kept_is_not_left(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "a.py": LEFT.replace("l()", "l()  # megapg: keep")})
    before = contents(tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "1 kept" in result.stderr
    assert run(tmp_path, "--write").exit_code == 0
    assert contents(tmp_path) == before


MORE = "\n\ndef third(x):\n    return f'{x}', mpu.get_data_parallel_group()"
FILES: dict[str, str | bytes] = {
    "p/plain.py": SERVED,
    "p/sub dir/no_newline.py": SERVED + MORE,
    "p/windows.py": (SERVED + MORE).replace("\n", "\r\n"),
    "p/mac.py": SERVED.replace("\n", "\r"),
    "p/mark.py": "\ufeff" + SERVED,
    "p/latin.py": ("# coding: latin-1\nname = 'é'\n" + SERVED + MORE).encode("latin-1"),
    "p/tabs.py": SERVED.replace("    ", "\t") + MORE.replace("    ", "\t") + "  # ä\n",
    "p/documented.py": '"""What it is."""\n\nfrom __future__ import annotations\n' + SERVED,
    "p/é.py": SERVED,
    "p/left.py": LEFT,
}


@pytest.mark.parametrize("where", ["", "p"])
@pytest.mark.parametrize("apply", APPLIERS)
def test_the_diff_applied_is_what_write_writes(
    tmp_path: Path, where: str, apply: Callable[[Path, bytes], None]
) -> None:
    """Also in a directory below the project's root, and where colours are forced."""
    one, other = tmp_path / "one", tmp_path / "other"
    for root in (one, other):
        write(root, {"pyproject.toml": "", **FILES})
    subprocess.run(["git", "init", "-q", one], check=True)  # where git knows of a root, too
    options = ("migrate", ".", "--from-core", "0.16")
    done = megapg(*options, at=one / where, FORCE_COLOR="1")
    assert done.returncode == 1, done.stderr.decode()
    apply(one / where, done.stdout)
    assert megapg(*options, "--write", at=other / where).returncode == 1
    shutil.rmtree(one / ".git")
    found = contents(other)
    assert contents(one) == found
    changed = {name for name in FILES if found[name] != contents_of(FILES[name])}
    assert changed == set(FILES) - {"p/left.py"}


def contents_of(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "a.py": SERVED, "b.py": SERVED})
    (tmp_path / "a.py").chmod(0o444)
    found = run(tmp_path, "--write", "--json")
    assert found.exit_code == 2
    report = json.loads(found.stdout)
    assert report["problems"] == [{"file": "a.py", "line": 0, "message": "is read-only"}]
    assert report["totals"]["left"] == 1
    assert report["totals"]["reasons"] == {"unwritten": 1}
    assert [change["file"] for change in report["changes"]] == ["b.py"]
    assert (tmp_path / "a.py").read_text() == SERVED
    assert (tmp_path / "b.py").read_text() != SERVED

    result = run(tmp_path, "--write")
    assert result.exit_code == 2
    assert "a.py: is read-only\n" in result.stdout
    assert "1 file with problems" in result.stdout


def test_files_that_could_not_be_looked_into(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "a.py": SERVED, "old.py": SERVED + "print 'two'\n"})
    result = run(tmp_path, "--write")
    assert result.exit_code == 0
    assert "old.py:6: is no Python 3" in result.stdout
    assert "1 file with problems" in result.stdout


def test_documents_for_programs_and_people(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "p/a.py": SERVED, "p/b.py": LEFT})
    printed = {option: run(tmp_path, *option.split()) for option in ("--json", "--sarif -")}
    for result in printed.values():
        assert result.exit_code == 1
        assert result.stderr == ""
    report = json.loads(printed["--json"].stdout)
    assert printed["--json"].stdout.count("\n") == 1
    assert report["totals"]["left"] == 1
    check_sarif(json.loads(printed["--sarif -"].stdout))

    sarif_file = tmp_path / "log.sarif"
    result = run(tmp_path, "--sarif", sarif_file)
    assert result.exit_code == 1
    assert result.stdout.startswith("--- a/")
    assert sarif_file.read_text() == printed["--sarif -"].stdout

    result = CliRunner().invoke(app, ["check", str(tmp_path), "--sarif", "-"])
    assert result.exit_code == 1
    check_sarif(json.loads(result.stdout))


def test_check_has_only_what_is_new_in_sarif(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "a.py": SERVED})
    options = ["check", str(tmp_path), "--baseline", str(tmp_path / "baseline.json")]
    assert CliRunner().invoke(app, [*options, "--update-baseline"]).exit_code == 0
    write(tmp_path, {"b.py": LEFT})
    found = json.loads(CliRunner().invoke(app, [*options, "--sarif", "-"]).stdout)
    assert [result["ruleId"] for result in found["runs"][0]["results"]] == ["lifecycle"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "--sarif", "-"], "only one of --json"),
        (["--sarif", "nowhere/at/all.sarif"], "can't be written: No such file"),
    ],
)
def test_arguments_that_are_no_good(tmp_path: Path, arguments: Sequence[str], message: str) -> None:
    write(tmp_path, {"pyproject.toml": "", "a.py": SERVED})
    result = run(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_paths_and_settings_that_are_no_good(tmp_path: Path) -> None:
    assert run(tmp_path / "nowhere").exit_code == 2
    write(tmp_path, {"pyproject.toml": "[tool.megapg]\nexclude = 'wide'", "a.py": SERVED})
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "exclude in [tool.megapg] is a list of strings." in result.stderr


def test_names_that_are_no_text(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", os.fsdecode(b"a\xff.py"): SERVED + LEFT})
    documents = (["--sarif", "-"], ["--json"])
    for options in (["check", "."], *(["migrate", ".", *each] for each in ([], *documents))):
        done = megapg(*options, at=tmp_path)
        assert done.returncode == 1, done.stderr.decode()
        assert b"Traceback" not in done.stderr
    done = subprocess.run(  # an encoding is chosen when Python starts
        [sys.executable, "-m", "megapg", "migrate", ".", "--write"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr.decode()
    assert b"a\\udcff.py:" in done.stdout


def test_on_a_terminal_there_are_colours_and_progress(tmp_path: Path) -> None:
    # Long enough for each step to be drawn.
    many = "".join(
        f"\n\ndef f{i}():\n    return mpu.get_data_parallel_rank()\n" for i in range(600)
    )
    write(
        tmp_path,
        {
            "pyproject.toml": "",
            "a.py": SERVED,
            "b.py": LEFT,
            "c.py": "from megatron.core import mpu\n" + many,
        },
    )
    leader, follower = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-m", "megapg", "migrate", ".", "--from-core", "0.16"],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    drawn = b""
    while select.select([leader], [], [], 60)[0]:
        try:
            drawn += os.read(leader, 65536)
        except OSError:  # it has ended
            break
    assert process.wait(60) == 1
    for doing in (b"looking", b"deciding", b"rewriting"):
        assert b"migrating: " + doing in drawn
    assert b"\x1b[31m-    return mpu.get_tensor_model_parallel_rank()" in drawn
    assert b"\x1b[32m+" in drawn


def test_help_teaches() -> None:
    text = CliRunner().invoke(app, ["migrate", "--help"], terminal_width=200).output
    for said in ("Example: megapg migrate", "git apply", "Exit code 0", "megapg: keep", "--write"):
        assert said in text


# --- the hook -------------------------------------------------------------------------------------


def test_the_hook_for_pre_commit(tmp_path: Path) -> None:
    """As pre-commit would run it; with pre-commit itself it was tried by hand."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hook["id"] == "megapg-check"
    assert hook["language"] == "python"
    assert hook["pass_filenames"] is False  # else a name that another file hands on is not seen
    program, *arguments = shlex.split(hook["entry"])
    assert program == "megapg"
    write(tmp_path, {"pyproject.toml": "", "a.py": SERVED})
    baseline = ["--baseline", "baseline.json"]
    assert megapg(*arguments, *hook["args"], at=tmp_path).returncode == 1
    assert megapg(*arguments, ".", *baseline, "--update-baseline", at=tmp_path).returncode == 0
    assert megapg(*arguments, ".", *baseline, at=tmp_path).returncode == 0
    write(tmp_path, {"b.py": SERVED})
    done = megapg(*arguments, ".", *baseline, at=tmp_path)
    assert done.returncode == 1
    assert b"b.py:5:12" in done.stdout
