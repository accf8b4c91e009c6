"""``megapg check``, ``megapg migrate`` and ``megapg explain``: output, exit codes, settings."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import megapg
from trees import contents, write
from typer.testing import CliRunner

from megapg.migrate import engine
from megapg.migrate import format as format_module
from megapg.migrate.reasons import REASONS
from megapg.tools.cli.migrate import app

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
SETTINGS = '[tool.megapg]\nfrom-core = "0.16"\n'


def run(code: int, *arguments: object) -> str:
    """Return the output of a command that ends with an exit code."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result.output


def committed(folder: Path) -> Path:
    """Commit all files of a new repository."""
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if not name.startswith(".git/")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write(tmp_path, {"pyproject.toml": SETTINGS, "p/a.py": SERVED, "p/b.py": LEFT})


# --- check ----------------------------------------------------------------------------------------


def test_check_prints_a_line_for_each_use(project: Path) -> None:
    lines = run(1, "check", project).splitlines()
    assert lines[:2] == [
        'p/a.py:5:12: mpu.get_tensor_model_parallel_rank() -> pg.rank("tp")',
        "p/b.py:5:5: mpu.destroy_model_parallel() [lifecycle]",
    ]
    assert lines[-1] == "2 files; 2 uses. Read as Megatron-core 0.16 ([tool.megapg] from-core)."


def test_skipped_folders_are_named(project: Path) -> None:
    write(project, dict.fromkeys(("build/lib/p/a.py", "q/dist/a.py", "q/dist/b.txt"), SERVED))
    environments = ("env/a.py", "env/conda-meta/x", "venv/a.py", "venv/pyvenv.cfg")
    write(project, dict.fromkeys(environments, SERVED))
    for command in ("check", "migrate"):
        assert "; 2 files in build, q/dist skipped. Read as" in run(1, command, project)
        found = json.loads(run(1, command, project, "--json"))
        assert found["skipped"] == {"build": 1, "q/dist": 1}
    assert "skipped" not in run(1, "check", project, project / "build", project / "q" / "dist")
    write(project, {"pyproject.toml": f'{SETTINGS}exclude = ["build/*", "q/dist/*"]\n'})
    assert "skipped" not in run(1, "check", project)


def test_check_and_migrate_count_the_same_uses(project: Path) -> None:
    """Uses include getters that a file imports from another file of the project."""
    files = {
        "p/names.py": f"{SERVED}rank = mpu.get_tensor_model_parallel_rank\n",
        "p/again.py": "from p.names import rank as place\n",
        "p/c.py": "from p.names import *\n\n\ndef f():\n    return first() + rank()\n",
        "p/d.py": "from p import again\n\nx = again.place()\n",
        "p/e.py": "rank = 3\nprint(rank)\n",
    }
    write(project, files)
    for command in ("check", "migrate"):
        found = json.loads(run(1, command, project, "--json"))
        names = [use["file"] for use in found["uses"]]
        assert names == ["p/a.py", "p/b.py", "p/c.py", "p/d.py", "p/names.py", "p/names.py"]


def test_check_and_migrate_count_the_same_replacements(project: Path) -> None:
    group = "mpu.get_embedding_group()"
    files = {
        "tests/test_a.py": SERVED,
        "p/c.py": f"from megatron.core import mpu\n\n\ndef third():\n    return {group}\n",
        "p/d.py": f"{SERVED}\n\ndef both(pg):\n    if pg is None:\n        return first()\n",
        "p/e.py": f"from megatron.core import mpu\n\nx = f'{{{group}!r:\">9}}'\n",
    }
    write(project, files)
    checked, migrated = (
        json.loads(run(1, command, project, "--json"))["totals"] for command in ("check", "migrate")
    )
    assert checked["without"] == migrated["left"] >= 2
    assert checked["with a replacement"] == migrated["uses"] - migrated["left"] >= 2
    assert checked["reasons"] == migrated["reasons"]


def test_check_without_uses(project: Path) -> None:
    write(project, {"p/a.py": "", "p/b.py": LEFT.replace("l()", "l()  # megapg: keep")})
    write(project, {"p/c.ipynb": "{}", "p/d.IPYNB": "{}"})
    assert "0 uses; 1 kept; 2 notebooks not read" in run(0, "check", project)


def test_the_ratchet(project: Path) -> None:
    options = ("check", project, "--baseline", project / "baseline.json")
    assert "there is no baseline" in run(2, *options)
    assert "0 more than in" in run(0, *options, "--update-baseline")
    write(project, {"p/a.py": f"\n\n{SERVED}"})
    assert "0 more than in" in run(0, *options)
    write(project, {"p/c.py": LEFT})
    output = run(1, *options)
    assert "1 more than in" in output
    assert output.count("mpu.") == 1
    log = json.loads(run(1, *options, "--sarif", "-"))
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == ["lifecycle"]
    write(project, {"p/c.py": "", "p/b.py": ""})
    assert "1 fewer: lower it with --update-baseline" in run(0, *options)
    assert run(2, "check", project, "--update-baseline")


def test_the_ratchet_of_some_files(project: Path) -> None:
    """Entries of files that were not read stay, even if such a file is now invalid Python."""
    baseline = project / "baseline.json"
    options = ("--baseline", baseline, "--update-baseline")
    run(0, "check", project, *options)
    allowed = json.loads(baseline.read_text())["allowed"]
    assert len(allowed) == 2
    assert "fewer" not in run(0, "check", project / "p" / "a.py", *options[:2])
    write(project, {"p/a.py": "", "p/c.py": LEFT})
    run(0, "check", project / "p" / "a.py", project / "p" / "c.py", *options)
    found = [key.partition("::")[0] for key in json.loads(baseline.read_text())["allowed"]]
    assert found == ["p/b.py", "p/c.py"]
    write(project, {"p/c.py": f"{LEFT}print 'two'\n"})
    assert "fewer" not in run(1, "check", project, *options[:2])
    (project / "p" / "c.py").unlink()
    assert "1 fewer" in run(0, "check", project / "p" / "a.py", *options[:2])


def test_the_hook_for_pre_commit(project: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["language"], hook["pass_filenames"]) == ("python", False)
    program, *arguments = shlex.split(hook["entry"])
    assert program == "megapg"
    assert megapg(*arguments, *hook["args"], at=project).returncode == 1


# --- migrate --------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_diff_and_the_report_apart(project: Path) -> None:
    before = contents(write(project, {"p/test_a.py": SERVED}))
    result = CliRunner().invoke(app, ["migrate", str(project)])
    assert result.exit_code == 1
    assert result.stdout.startswith("--- a/p/a.py\n+++ b/p/a.py\n@@ -1,")
    assert "\n-    return mpu.get_tensor_model_parallel_rank()\n" in result.stdout
    assert "b.py" not in result.stdout
    assert "test_a.py" not in result.output  # its uses are only reported
    assert "is in a test" in result.stderr
    lines = result.stderr.splitlines()
    assert lines[0] == "p/b.py:5:5: mpu.destroy_model_parallel() [lifecycle]"
    assert lines[-1].startswith("3 files; 3 uses: 1 can be rewritten in 1 file; 2 left; 1 function")
    assert lines[-1].endswith("Nothing is written yet: add --write.")
    for text in ("functions that read the globals", "pass pg_collection= (no call in these files)"):
        assert text in result.stderr
    assert contents(project) == before


def test_write_and_a_second_run(project: Path) -> None:
    committed(project)
    output = run(1, "migrate", project, "--write")
    assert "1 rewritten in 1 file; 1 left" in output.splitlines()[-1]
    assert output.endswith("Line numbers are those of the old files.\n")
    assert "resolve(pg_collection)" in (project / "p" / "a.py").read_text()
    assert (project / "p" / "b.py").read_text() == LEFT
    after = files_of(project)
    assert "0 rewritten in 0 files; 1 left" in run(1, "migrate", project, "--write")
    assert files_of(project) == after
    (project / "p" / "b.py").unlink()
    run(0, "migrate", project)


def test_write_refuses_files_that_git_could_not_restore(project: Path) -> None:
    write(project, {f"p/c{number}.py": SERVED for number in range(6)})
    before = contents(project)
    output = run(2, "migrate", project, "--write")
    assert output.startswith("error nothing is written, since git could not restore the files: ")
    assert "p/a.py is in no git repository; " in output
    assert "p/c2.py is in no git repository; and 3 more. Commit your changes first" in output
    assert "--allow-dirty" in output
    assert contents(project) == before

    committed(project)
    write(project, {"p/a.py": f"{SERVED}# edited\n"})
    assert "p/a.py has uncommitted changes" in run(2, "migrate", project, "--write")
    write(project, {"p/a.py": SERVED, "p/b.py": LEFT, "p/new.py": "x = 1\n"})
    run(1, "migrate", project, "--write")
    write(project, {"p/a.py": f"{SERVED}# edited\n"})
    run(1, "migrate", project, "--write", "--allow-dirty")
    assert "megapg" in (project / "p" / "a.py").read_text()


def test_uncommitted_changes_are_refused_before_the_analysis(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(project)
    write(project, {"p/b.py": f"{LEFT}# edited\n"})
    monkeypatch.setattr(engine, "scan", None)
    assert "p/b.py has uncommitted changes" in run(2, "migrate", project, "--write")


def test_a_caller_with_uncommitted_changes_is_refused(project: Path) -> None:
    write(project, {"p/c.py": "from p.a import first\n\n\ndef third(model):\n    return first()\n"})
    write(committed(project), {"p/c.py": (project / "p" / "c.py").read_text() + "# edited\n"})
    assert "p/c.py has uncommitted changes" in run(2, "migrate", project, "--write")


@pytest.mark.parametrize("where", ["", "p"])
def test_the_diff_applied_is_what_write_writes(tmp_path: Path, where: str) -> None:
    files: dict[str, str | bytes] = {
        "pyproject.toml": f"{SETTINGS}[tool.ruff]\n",
        "p/a.py": SERVED,
        "p/a b.py": SERVED[:-1],
        "p/windows.py": SERVED.replace("\n", "\r\n"),
        "p/mark.py": f"\ufeff{SERVED}",
        "p/latin.py": f"# coding: latin-1\nNAME = 'é'\n{SERVED}".encode("latin-1"),
        "p/é.py": SERVED.replace("    ", "\t"),
        "p/left.py": LEFT,
    }
    if where:  # the names in the diff are those below the current folder
        files = {name: files[name] for name in ("pyproject.toml", "p/a.py", "p/é.py", "p/left.py")}
    one, other = write(tmp_path / "one", files), write(tmp_path / "other", files)
    committed(one)
    done = megapg("migrate", ".", at=one / where, FORCE_COLOR="1")
    assert done.returncode == 1, done.stderr.decode()
    subprocess.run(["git", "apply", "-"], input=done.stdout, cwd=one / where, check=True)
    assert megapg("migrate", ".", "--write", "--allow-dirty", at=other / where).returncode == 1
    assert files_of(one) == files_of(other)
    unchanged = {name for name, data in files_of(one).items() if data in (LEFT.encode(), b"")}
    assert unchanged == {"p/left.py"}
    assert "import megapg\nfrom megatron" not in (one / "p" / "a.py").read_text()  # ruff sorts


def test_nothing_is_written_if_one_file_is_read_only(project: Path) -> None:
    write(project, {"p/c.py": SERVED})
    (project / "p" / "c.py").chmod(0o444)
    before = contents(project)
    found = json.loads(run(2, "migrate", project, "--write", "--allow-dirty", "--json"))
    assert found["problems"] == [
        {"file": "p/c.py", "line": 0, "message": "can't be written: it is read-only"}
    ]
    assert found["totals"]["reasons"] == {"unwritten": 2, "lifecycle": 1}
    assert found["changes"] == []
    assert contents(project) == before


def test_documents_for_programs(project: Path) -> None:
    for command in ("check", "migrate"):
        found = json.loads(run(1, command, project, "--json"))
        assert found["totals"]["uses"] == 2
        printed = run(1, command, project, "--sarif", "-")
        assert json.loads(printed)["version"] == "2.1.0"
        file = project / "log.sarif"
        assert run(1, command, project, "--sarif", file)
        assert file.read_text() == printed
        assert "not both" in run(2, command, project, "--json", "--sarif", "-")
        assert "can't be written" in run(2, command, project, "--sarif", project / "no" / "log")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": SETTINGS, os.fsdecode(b"a\xff.py"): SERVED + LEFT})
    for options in (["check"], ["migrate"], ["migrate", "--sarif", "-"], ["migrate", "--json"]):
        done = megapg(*options, ".", at=tmp_path)
        assert done.returncode == 1, done.stderr.decode()
        assert b"Traceback" not in done.stderr


def test_a_formatter_that_is_not_installed_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, {"pyproject.toml": f"{SETTINGS}[tool.black]\n", "p/c.py": SERVED})
    monkeypatch.setattr(format_module, "_start", lambda program: ())
    said = "black is configured but not installed: 2 files not formatted\n"
    for options in ([], ["--write", "--allow-dirty"]):
        assert said in run(1, "migrate", project, *options)
        write(project, {"p/a.py": SERVED, "p/c.py": SERVED})
    assert json.loads(run(1, "migrate", project, "--json"))["unformatted"] == {"black": 2}


@pytest.mark.parametrize(
    "name", ["second", "C", "C.make", "a.second", "p.a.second", "a.C", "p.a.C.make"]
)
def test_the_forms_of_thread_from(project: Path, name: str) -> None:
    text = (
        f"{SERVED}\n\nclass C:\n    def __init__(self):\n        first()\n\n"
        "    @staticmethod\n    def make():\n        first()\n\n\ndef second():\n    first()\n"
    )
    write(project, {"p/__init__.py": "", "p/a.py": text})
    diff = CliRunner().invoke(app, ["migrate", str(project), "--thread-from", name]).stdout
    starts = {"C": "    def __init__(self, ", "make": "    def make(", "second": "def second("}
    for each, start in starts.items():
        taken = f"+{start}*, pg_collection=None)" in diff
        assert taken == (each == name.rpartition(".")[2])
    assert "no function or class of that name" in run(2, "migrate", project, "--thread-from", "b.D")


@pytest.mark.parametrize(
    ("arguments", "title"),
    [(["migrate", "."], "migrating: "), (["explain", "p/a.py:5"], "explaining: ")],
)
def test_colours_and_progress_on_a_terminal(
    project: Path, arguments: list[str], title: str
) -> None:
    leader, follower = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "megapg", *arguments],
        cwd=project,
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
        except OSError:  # the process has ended
            break
    is_migrate = arguments[0] == "migrate"
    assert process.wait(60) == int(is_migrate)
    assert title.encode() in drawn
    assert (b"\x1b[31m-    return mpu.get_tensor_model_parallel_rank()" in drawn) == is_migrate


# --- explain --------------------------------------------------------------------------------------


def test_explain_a_code() -> None:
    assert len(REASONS) == 15
    for code, reason in REASONS.items():
        output = run(0, "explain", code)
        assert output.startswith(f"{code}: the use {reason.title}.\n\n")
        assert output.count("Instead: ") == 1
    assert "Did you mean vp-stage?" in run(2, "explain", "vp-stgae")


def test_explain_a_line(project: Path) -> None:
    write(project, {"p/old.py": f"{SERVED}print 'two'\n"})
    assert '-> pg.rank("tp")' in run(0, "explain", f"{project / 'p' / 'a.py'}:5")
    assert "[lifecycle]" in run(0, "explain", f"{project / 'p' / 'b.py'}:5:5")
    assert "no use is there" in run(2, "explain", f"{project / 'p' / 'a.py'}:1")
    assert "is no valid Python" in run(2, "explain", f"{project / 'p' / 'old.py'}:5")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("mpu.get_tensor_model_parallel_rank()", '-> pg.rank("tp")'),
        ("1 + get_tensor_model_parallel_rank()", '-> pg.rank("tp")'),
        ("parallel_state.get_data_parallel_group(with_context_parallel=True)", "pg.dp_cp"),
        ("mpu.destroy_model_parallel()", "[lifecycle]"),
        ("my.mpu.get_tensor_model_parallel_rank()", '-> pg.rank("tp")'),
    ],
)
def test_explain_an_expression(expression: str, expected: str) -> None:
    options = ("--from-core", "0.16", "--wrapper", "my.mpu")
    assert expected in run(0, "explain", expression, *options)


def test_explain_what_is_no_expression() -> None:
    assert "no use of Megatron's globals" in run(2, "explain", "len('x')")
    assert "no expression of Python" in run(2, "explain", "mpu.get(")
    assert "EXPRESSION" in run(0, "explain", "--help")


# --- paths and settings ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_paths_that_can_not_be_read(project: Path, command: str) -> None:
    write(project, {"q/old.py": f"{SERVED}print 'two'\n", "q/clean.py": "x = 1\n", "q/x.ipynb": ""})
    assert "nowhere does not exist" in run(2, command, project / "nowhere")
    assert "notebooks are not read" in run(2, command, project / "q" / "x.ipynb")
    assert "q/old.py:6: is no valid Python" in run(2, command, project / "q" / "old.py")
    assert "1 problem" in run(1, command, project / "q")
    run(2, command, project / "p", project / "q" / "old.py")
    # A file that does not mention the globals has no uses, and is not parsed.
    write(project, {"r/plain.py": "print 'two'\n", "r/notes.md": "no Python"})
    run(0, command, project / "r" / "plain.py", project / "r" / "notes.md")
    run(2, command, project / "q" / "clean.py", project / "q" / "old.py")
    run(0, command, project / "q" / "clean.py")
    run(2, command)


@pytest.mark.parametrize(
    ("command", "missing", "message"),
    [
        ("migrate", ["torch", "megatron", "numpy"], ""),
        ("check", ["libcst"], 'pip install "megapg[migrate]"'),
    ],
)
def test_without_torch_and_without_libcst(
    project: Path, command: str, missing: list[str], message: str
) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        "from megapg.tools.cli import app; app(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, command, str(project)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (2 if message else 1), done.stderr
    assert (message or "2 uses") in done.stdout + done.stderr


def test_help_teaches() -> None:
    text = " ".join(run(0, "migrate", "--help").split())
    for part in ("Example: megapg migrate", "git apply", "Exit code 0", "megapg: keep", "--write"):
        assert part in text
    assert "Trainer.make" in text


def test_settings_in_pyproject(project: Path) -> None:
    settings = (
        '[tool.megapg]\nexclude = ["third_party/*"]\nwrappers = ["p.own"]\nfrom-core = "0.18"'
    )
    own = "from p.own import get_data_parallel_group\n\nget_data_parallel_group()\n"
    write(project, {"pyproject.toml": settings, "third_party/a.py": LEFT, "p/a.py": own})
    write(project, {"p/own.py": "def get_data_parallel_group(): pass\n", "p/b.py": ""})
    found = json.loads(run(1, "check", project, "--json"))
    assert [(each["file"], each["replacement"]) for each in found["uses"]] == [("p/a.py", "pg.dp")]
