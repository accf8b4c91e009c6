"""``megapg migrate --undo`` gives back what ``--write`` took, byte for byte, wherever that ended;
and ``--write`` says what no commit has yet.

Real files, real repositories, processes that are killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from trees import write
from typer.testing import CliRunner, Result

from megapg.cli.migrate import app
from megapg.errors import UnsupportedOptionError
from megapg.migrate.edit import undo as undo_module
from megapg.migrate.edit import write as write_module
from megapg.migrate.edit.undo import keep, keep_only, undo
from megapg.migrate.edit.write import write_files
from megapg.migrate.migration import Rewritten
from megapg.migrate.python.tree import find_files

READS = (
    "from megatron.core import mpu\n\n\ndef f():\n    return mpu.get_tensor_model_parallel_rank()\n"
)
SETTINGS = '[tool.megapg]\nfrom-core = "0.16"\n'


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["migrate", *map(str, arguments)])


def ended(code: int, *arguments: object) -> str:
    """What a command said that ended so."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    return result.output


def contents(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file that is none of git's, with its mode; links are links."""
    return {
        str(path.relative_to(root)): (
            stat.S_IMODE(path.lstat().st_mode),
            os.readlink(path).encode() if path.is_symlink() else path.read_bytes(),
        )
        for path in sorted(root.rglob("*"))
        if (path.is_symlink() or path.is_file()) and ".git" not in path.relative_to(root).parts[:1]
    }


@pytest.fixture
def project(tmp_path: Path) -> Path:
    tree = tmp_path / "project"
    files: dict[str, str | bytes] = {
        "pyproject.toml": SETTINGS,
        "a.py": READS,
        "p/__init__.py": "",
        "p/b.py": READS,
        "p/left.py": "x = 1\n",
        "p/dos.py": READS.replace("\n", "\r\n"),
        "p/mark.py": b"\xef\xbb\xbf" + READS.encode(),
        "p/latin.py": ("# coding: latin-1\n# \xe9\n" + READS).encode("latin-1"),
        "p/end.py": READS.rstrip("\n"),
        "real/c.py": READS,
    }
    write(tree, files)
    (tree / "p" / "c.py").symlink_to(Path("..", "real", "c.py"))
    (tree / "a.py").chmod(0o751)
    return tree


# --- what is put back -----------------------------------------------------------------------------


def test_what_was_written_is_put_back_byte_for_byte(project: Path) -> None:
    before = contents(project)
    assert run(project / "p", project / "a.py", "--write").exit_code == 0
    between = contents(project)
    changed = {name for name in before if between[name] != before[name]}
    assert changed == {"a.py", "p/b.py", "p/dos.py", "p/mark.py", "p/latin.py", "p/end.py"} | {
        "real/c.py"
    }
    assert set(between) - set(before) == {".megapg/.gitignore", ".megapg/undo.zip"}
    assert not any(".megapg" in each.name for each in find_files([project], project))
    result = run("--undo", project / "p")  # any path in the project will do
    assert result.exit_code == 0, result.output
    assert "7 files put back." in result.output
    assert contents(project) == before
    assert not (project / ".megapg").exists()


def test_undo_is_of_the_project_that_one_is_in(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(project)
    monkeypatch.chdir(project / "p")
    assert run("..", "--write").exit_code == 0
    assert run("--undo").exit_code == 0
    assert contents(project) == before


def test_only_the_last_write_is_put_back(project: Path) -> None:
    run(project / "p", "--write")
    between = contents(project / "p")
    assert run(project / "a.py", "--write").exit_code == 0
    assert run(project, "--write").exit_code == 0  # has nothing to write, and takes nothing away
    result = run("--undo", project)
    assert "1 file put back." in result.output
    assert (project / "a.py").read_text() == READS
    assert contents(project / "p") == between
    assert "there is nothing to put back" in ended(2, "--undo", project)


def test_a_file_that_was_changed_since_is_left(project: Path) -> None:
    run(project, "--write")
    written = (project / "a.py").read_bytes()
    (project / "a.py").write_bytes(written + b"more = 1\n")
    (project / "p" / "dos.py").unlink()
    (project / "p" / "b.py").write_text(READS)  # by hand
    output = ended(2, "--undo", project)
    assert "a.py: was changed since, and is left as it is" in output
    assert f"{Path('p', 'dos.py')}: can't be read: No such file" in output
    assert "4 files put back; 1 as before already; 2 left." in output
    assert (project / "a.py").read_bytes() == written + b"more = 1\n"
    assert not (project / "p" / "dos.py").exists()
    assert (project / "p" / "mark.py").read_bytes() == b"\xef\xbb\xbf" + READS.encode()
    (project / "a.py").write_bytes(written)
    (project / "p" / "dos.py").write_bytes(READS.replace("\n", "\r\n").encode())
    assert "1 file put back; 6 as before already." in ended(0, "--undo", project)
    assert (project / "a.py").read_text() == READS


def test_a_file_that_can_not_be_replaced_is_named(project: Path) -> None:
    run(project, "--write")
    (project / "a.py").chmod(0o444)
    output = ended(2, "--undo", project)
    assert "a.py: is read-only" in output
    assert "6 files put back; 1 left." in output


def test_files_elsewhere_are_put_back_where_they_are_named(project: Path, tmp_path: Path) -> None:
    write(tmp_path, {"other/d.py": READS})
    assert run(project / "a.py", tmp_path / "other", "--write", "--from-core", "0.16")
    assert "is not in the project" in ended(2, "--undo", project)
    assert (project / "a.py").read_text() == READS
    assert (tmp_path / "other" / "d.py").read_text() != READS
    assert run("--undo", project, tmp_path / "other").exit_code == 0
    assert (tmp_path / "other" / "d.py").read_text() == READS


def test_a_write_that_writes_nothing_takes_nothing_away(project: Path) -> None:
    before = contents(project)
    assert run(project / "p", "--write").exit_code == 0
    (project / "a.py").chmod(0o444)
    assert run(project, "--write").exit_code == 2  # there is a.py alone to write
    (project / "a.py").chmod(0o751)
    assert "6 files put back." in run("--undo", project).output
    assert contents(project) == before
    (project / "a.py").chmod(0o444)
    assert run(project / "a.py", "--write").exit_code == 2
    assert not (project / ".megapg").exists()  # there was nothing to keep


def test_what_was_not_written_is_nothing_to_put_back(project: Path) -> None:
    (project / "a.py").chmod(0o444)
    assert run(project, "--write").exit_code == 2
    (project / "a.py").chmod(0o751)
    (project / "a.py").write_text("mine = 1\n")
    assert "6 files put back." in ended(0, "--undo", project)
    assert (project / "a.py").read_text() == "mine = 1\n"
    assert not (project / ".megapg").exists()


def test_a_path_may_lead_up(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(project)
    monkeypatch.chdir(project / "p")
    for path in (Path("..", "..", "project"), Path("..", "a.py"), Path("..", "real", "..", "p")):
        assert run(path, "--write").exit_code == 0
        with zipfile.ZipFile(project / ".megapg" / "undo.zip") as archive:
            names = [each["name"] for each in json.loads(archive.read("undo.json"))["files"]]
        assert names
        assert all((project / name).is_file() for name in names)
        assert not any(Path(name).is_absolute() for name in names)
        ended(0, "--undo", path)
        assert contents(project) == before


# --- what is refused ------------------------------------------------------------------------------


def test_a_path_that_is_not_there_is_refused(project: Path) -> None:
    run(project, "--write")
    between = contents(project)
    assert "nosuch.py does not exist." in ended(2, "--undo", project / "nosuch.py")
    assert contents(project) == between


@pytest.mark.parametrize(
    "options",
    [["--write"], ["--unsafe"], ["--json"], ["--from-core", "0.16"]],
)
def test_undo_goes_alone(project: Path, options: list[str]) -> None:
    assert "--undo takes paths" in ended(2, "--undo", project, *options)


def test_without_undo_a_path_is_needed() -> None:
    assert "Missing argument 'PATH...'" in ended(2)


def test_nothing_is_written_that_could_not_be_undone(project: Path) -> None:
    (project / ".megapg").write_text("")
    before = contents(project)
    output = ended(2, project, "--write")
    assert "nothing is written, for what --undo needs could not be kept" in output
    assert contents(project) == before


def test_a_damaged_record_puts_nothing_back(project: Path) -> None:
    run(project, "--write")
    record = project / ".megapg" / "undo.zip"
    whole, before = record.read_bytes(), contents(project / "p")
    flipped = [bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]) for at in range(0, 900, 21)]
    said: list[str] = []
    for damaged in (b"", b"no zip", whole[:-1], whole[: len(whole) // 2], *flipped):
        record.write_bytes(damaged)
        try:  # a flip in a time of day, say, does no harm
            undone = undo(project)
        except UnsupportedOptionError as error:
            said.append(str(error))
            assert contents(project / "p") == before
        else:
            assert len(undone.put_back) == 7
            assert run(project, "--write").exit_code == 0
            assert contents(project / "p") == before
    assert len(said) > len(flipped) / 2
    assert all("undo.zip can't be read, and nothing is put back" in each for each in said)


def test_a_record_from_elsewhere_reaches_no_file_outside(project: Path, tmp_path: Path) -> None:
    """It may come with a tree that somebody else made."""
    (tmp_path / "victim").write_text("mine")
    (project / ".megapg").mkdir()
    digest = "0a9bb7d3a6b3e1c0"  # whatever it is, it is not asked for
    for name in (str(tmp_path / "victim"), "../victim", "p/../../victim"):
        with zipfile.ZipFile(project / ".megapg" / "undo.zip", "w") as archive:
            files = [{"name": name, "written": digest}]
            archive.writestr("undo.json", json.dumps({"format": 1, "files": files}))
            archive.writestr("0", b"theirs")
        (problem,) = undo(project).problems
        assert "is not in the project" in problem.message
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_record_of_another_make_puts_nothing_back(project: Path) -> None:
    """Encrypted, or of a method that this Python does not know."""
    run(project, "--write")
    record = project / ".megapg" / "undo.zip"
    whole, before = record.read_bytes(), contents(project / "p")
    entry = whole.rindex(b"PK\x01\x02")
    for at, value in ((8, 1), (10, 99)):  # of its flags, and the method
        damaged = bytearray(whole)
        damaged[entry + at] ^= value
        record.write_bytes(damaged)
        assert "can't be read, and nothing is put back" in ended(2, "--undo", project)
        assert contents(project / "p") == before


# --- killed ---------------------------------------------------------------------------------------

NAMES = ("a.py", "b.py", "c.py")
OLD, NEW = b"old\n", b"new\n"


class Kill:
    """Kills the process at a given number of what writing does."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        ours = frame.f_code.co_filename in (write_module.__file__, undo_module.__file__)
        of_system = event.startswith("c_") and getattr(arg, "__module__", "") in ("posix", "_io")
        ours = ours or (of_system and frame.f_code.co_filename != __file__)
        # What is on disk when a call returns is there when the next one begins.
        self.count += ours and event in ("call", "c_call")
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def every_kill(root: Path) -> Iterator[str]:
    """Kill a write at one point after the other, and say what there is, and after undo."""
    at, killed = 0, True
    while killed:
        at += 1
        folder = root / str(at)
        write(folder, dict.fromkeys(NAMES, OLD))
        files = [Rewritten(n, folder / n, OLD, NEW, OLD.decode(), ()) for n in NAMES]
        former = Rewritten("d.py", folder / "d.py", OLD, NEW, OLD.decode(), ())
        write(folder, {"d.py": OLD})
        keep([former], folder)
        write_files([former])
        keep_only([former], folder)
        pid = os.fork()
        if pid == 0:
            sys.setprofile(Kill(at))
            keep(files, folder)
            write_files(files[:2])
            write_files(files[2:])
            keep_only(files, folder)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        found = [(folder / name).read_bytes().decode().strip() for name in NAMES]
        with contextlib.suppress(UnsupportedOptionError):
            assert not undo(folder).problems
        after = [(folder / name).read_bytes() == OLD for name in NAMES]
        was = (folder / "d.py").read_bytes().decode().strip()
        yield json.dumps({"killed": killed, "found": found, "after": after, "former": was})
        shutil.rmtree(folder)


def test_killed_anywhere(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        done = subprocess.run(
            [sys.executable, __file__, folder],  # from which it is safe to fork
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=280,
        )
    assert done.returncode == 0, done.stderr
    *kills, last = map(json.loads, done.stdout.splitlines())
    print(len(kills), "kills")
    assert last == {
        "killed": False,
        "found": ["new"] * 3,
        "after": [True] * 3,
        "former": "new",
    }
    assert len(kills) > 100
    assert {tuple(each["found"]).count("new") for each in kills} == {0, 1, 2, 3}
    assert all(each["after"] == [True] * 3 for each in kills)
    # Before the first file is written, what can be put back is what was written before.
    assert all((each["former"] == "old") == ("new" not in each["found"]) for each in kills)


# --- what no commit has ---------------------------------------------------------------------------

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", *who, *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write(tmp_path, {"pyproject.toml": SETTINGS, ".gitignore": "made/\n*.gen.py\n"})
    write(tmp_path, dict.fromkeys(("a.py", "b.py", "c.py", "p/d.py"), READS))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


@needs_git
def test_a_clean_tree_needs_no_word(repository: Path) -> None:
    write(repository, {"notes.txt": "mine", "e.py": "x = 1\n"})  # these are not written
    assert "in no commit" not in ended(0, repository, "--write")
    assert ".megapg" not in git(repository, "status", "--porcelain", "--untracked-files=all")
    assert git(repository, "add", "--all", "--dry-run").count(".megapg") == 0


@needs_git
def test_what_is_in_no_commit_is_said(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "a.py").write_text(READS + "# mine\n")
    (repository / "b.py").write_text(READS + "# staged\n")
    git(repository, "add", "b.py")
    git(repository, "mv", "c.py", "moved.py")
    write(repository, dict.fromkeys(("new é.py", "made/e.py", "f.gen.py"), READS))
    before = contents(repository)
    assert "in no commit" not in run(repository).output  # nothing is written
    monkeypatch.setenv("GIT_DIR", "/nonexistent")  # as in a hook of another repository
    output = ended(0, repository, repository / "made", "--write")
    assert "warning 6 of the 7 files written now had changes that are in no commit" in output
    assert "--undo" in output
    assert run("--undo", repository).exit_code == 0
    assert contents(repository) == before


@needs_git
def test_where_git_does_not_answer_it_is_said(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a checkout that belongs to somebody else, seen by root in a container."""
    for name, value in (
        ("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1"),
        ("GIT_CONFIG_GLOBAL", os.devnull),
        ("GIT_CONFIG_NOSYSTEM", "1"),
    ):
        monkeypatch.setenv(name, value)
    output = ended(0, repository, "--write")
    (line,) = (each for each in output.splitlines() if each.startswith("warning"))
    assert f"git does not answer for {repository}: fatal: detected dubious ownership" in line
    assert "in no commit" in line


@needs_git
def test_no_program_of_the_repository_is_run(repository: Path, tmp_path: Path) -> None:
    program = tmp_path / "watch"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    program.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(program))
    (repository / "a.py").write_text(READS + "# mine\n")
    assert "1 of the 4 files" in run(repository, "--write").output
    assert not (tmp_path / "ran").exists()


def test_without_git_there_is_no_word(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "in no commit" not in run(project, "--write").output  # no repository
    run("--undo", project)
    (project / ".git").mkdir()  # a broken one
    assert "in no commit" not in run(project, "--write").output
    run("--undo", project)
    monkeypatch.setenv("PATH", "")
    assert "in no commit" not in ended(0, project, "--write")


if __name__ == "__main__":
    for line in every_kill(Path(sys.argv[1])):
        print(line)
