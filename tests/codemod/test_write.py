"""Test that rewritten files are written whole or not at all, and that git can restore them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from damage import instead, mounted

from megapg.migrate.migration import Problem, Rewritten
from megapg.migrate.write import uncommitted, write_files

OLD, NEW = b"x = mpu.get()  # old\n", b"x = pg.tp  # new\n"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may")


def rewritten(path: Path, old: bytes = OLD, new: bytes = NEW) -> Rewritten:
    return Rewritten(path.name, path, old, new)


def made(folder: Path, *names: str) -> list[Rewritten]:
    """Create files with the old text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(OLD)
    return [rewritten(folder / name) for name in names]


def new_file(path: Path) -> Rewritten:
    return Rewritten(path.name, path, b"", NEW, is_new=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir()) if each.is_file()}


def listed(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the mode, inode and content of every name."""
    found = {}
    for each in sorted(folder.iterdir()):
        at = each.lstat()
        found[each.name] = at.st_mode, at.st_ino, each.read_bytes() if each.is_file() else b""
    return found


def message(problems: Sequence[Problem]) -> str:
    (problem,) = problems
    return problem.message


# --- what is written ------------------------------------------------------------------------------


def test_files_are_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    files = [*made(tmp_path / "a", "a.py", "b.py"), *made(tmp_path / "b", "a.py")]
    (tmp_path / "a" / "other.py").write_bytes(OLD)
    assert write_files([*files, new_file(tmp_path / "b" / "new.py")]) == []
    assert contents(tmp_path / "a") == {"a.py": NEW, "b.py": NEW, "other.py": OLD}
    assert contents(tmp_path / "b") == {"a.py": NEW, "new.py": NEW}
    assert write_files([]) == []


def test_any_bytes_and_any_name(tmp_path: Path) -> None:
    long = "ä" * 126 + ".py"
    for name, new in (("a b.py", bytes(range(256))), ("[x]*.py", b""), (long, b"\r\n" * 100_000)):
        (tmp_path / name).write_bytes(OLD)
        assert write_files([rewritten(tmp_path / name, OLD, new)]) == []
        assert (tmp_path / name).read_bytes() == new
    assert len(list(tmp_path.iterdir())) == 3


def test_the_mode_is_kept(tmp_path: Path) -> None:
    for mode in (0o755, 0o600, 0o664, 0o4755):
        (file,) = made(tmp_path, "a.py")
        file.path.chmod(mode)
        assert write_files([file]) == []
        assert stat.S_IMODE(file.path.stat().st_mode) == mode
    tmp_path.chmod(0o755)
    assert write_files([new_file(tmp_path / "new.py")]) == []
    assert stat.S_IMODE((tmp_path / "new.py").stat().st_mode) == 0o644


@as_root
def test_the_owner_is_kept(tmp_path: Path) -> None:
    (file,) = made(tmp_path, "a.py")
    os.chown(file.path, 1234, 4321)
    file.path.chmod(0o2755)
    assert write_files([file]) == []
    found = file.path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 4321, 0o2755)


def test_python_does_not_run_the_old_bytecode(tmp_path: Path) -> None:
    old, new = b"print(1)\n", b"print(2)\n"  # of the same size
    (tmp_path / "a.py").write_bytes(old)
    os.utime(tmp_path / "a.py", (time.time() - 1000,) * 2)
    run = [sys.executable, "-c", "import sys; sys.dont_write_bytecode = False; import a"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, check=True)
    assert (done.stdout, (tmp_path / "__pycache__").is_dir()) == (b"1\n", True)
    assert write_files([rewritten(tmp_path / "a.py", old, new)]) == []
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"2\n"


def test_links_are_followed(tmp_path: Path) -> None:
    files = made(tmp_path / "real", "a.py", "b.py")
    links = tmp_path / "links"
    links.mkdir()
    (links / "one.py").symlink_to("two.py")
    (links / "two.py").symlink_to(Path("..", "real", "a.py"))
    assert write_files([rewritten(links / "one.py"), files[1]]) == []
    assert os.readlink(links / "one.py") == "two.py"
    assert contents(tmp_path / "real") == {"a.py": NEW, "b.py": NEW}
    assert not (tmp_path / "real" / "a.py").is_symlink()


# --- what is refused ------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "edited": (lambda path: path.write_bytes(OLD + b"y = 1\n"), "was changed meanwhile"),
    "half written": (lambda path: path.write_bytes(OLD[:5]), "was changed meanwhile"),
    "removed": (Path.unlink, "No such file"),
    "a folder": (instead(Path.mkdir), "is no regular file"),
    "a pipe": (instead(os.mkfifo), "is no regular file"),
    "a loop": (instead(lambda path: path.symlink_to(path.name)), "Too many levels"),
    "a link to nothing": (instead(lambda path: path.symlink_to("nothing.py")), "No such file"),
    "read-only": (lambda path: path.chmod(0o444), "is read-only"),
}


@pytest.mark.parametrize(("harm", "expected"), REFUSED.values(), ids=REFUSED)
def test_nothing_is_written_if_one_file_is_not_as_it_was(
    tmp_path: Path, harm: Callable[[Path], object], expected: str
) -> None:
    files = made(tmp_path, "a.py", "b.py", "c.py")
    harm(tmp_path / "b.py")
    before = listed(tmp_path)
    (problem,) = write_files([*files, new_file(tmp_path / "new.py")])
    assert (problem.file, problem.line) == ("b.py", 0)
    assert problem.message.startswith("can't be written: ")
    assert expected in problem.message
    assert listed(tmp_path) == before


def test_every_problem_is_reported(tmp_path: Path) -> None:
    files = made(tmp_path, "a.py", "b.py", "c.py")
    (tmp_path / "a.py").write_bytes(OLD + b"y = 1\n")
    (tmp_path / "c.py").chmod(0o444)
    (tmp_path / "new.py").write_bytes(OLD)
    before = listed(tmp_path)
    problems = write_files([*files, new_file(tmp_path / "new.py")])
    assert [each.file for each in problems] == ["a.py", "c.py", "new.py"]
    assert "it was created meanwhile" in problems[-1].message
    assert listed(tmp_path) == before


def test_files_are_restored_if_a_later_one_cannot_be_replaced(tmp_path: Path) -> None:
    """A mount point can't be replaced."""
    files = [new_file(tmp_path / "0.py"), *made(tmp_path, "a.py", "b.py", "c.py")]
    (tmp_path / "other").write_bytes(OLD)
    with mounted("--bind", str(tmp_path / "other"), str(tmp_path / "b.py")):
        before = contents(tmp_path)
        assert message(write_files(files)) == f"can't be written: {os.strerror(errno.EBUSY)}"
        assert contents(tmp_path) == before
        assert [len(write_files([file])) for file in files] == [0, 0, 1, 0]


def test_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=64k", "none", str(folder)):
        small, large = made(folder, "a.py", "b.py")
        large = rewritten(large.path, new=b"#" * 100_000)
        problems = write_files([small, large])
        assert message(problems) == f"can't be written: {os.strerror(errno.ENOSPC)}"
        assert contents(folder) == {"a.py": OLD, "b.py": OLD}


# --- what git could not restore -------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    made(tmp_path, "a.py", "b.py", "c.py", "[a].py", "é b.py")
    (tmp_path / ".gitignore").write_text("out/\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    return tmp_path


def restorable(folder: Path, *names: str) -> list[str]:
    return uncommitted({folder / name: name for name in names})


def test_committed_files_can_be_restored(repository: Path) -> None:
    (repository / "c.py").write_bytes(NEW)
    assert restorable(repository, "a.py", "b.py", "[a].py", "é b.py") == []
    assert restorable(repository, "new.py") == []
    assert restorable(repository) == []


def test_files_that_git_could_not_restore(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (repository / "a.py").write_bytes(NEW)
    (repository / "b.py").write_bytes(NEW)
    git(repository, "add", "b.py")
    git(repository, "mv", "c.py", "moved.py")
    made(repository / "out", "d.py")
    made(repository / "more", "e.py")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    made(elsewhere, "f.py")
    (repository / "link.py").symlink_to(elsewhere / "f.py")
    names = ["a.py", "b.py", "moved.py", "[a].py", "out/d.py", "more/e.py", "link.py"]
    assert restorable(repository, *names) == [
        "a.py has uncommitted changes",
        "b.py has uncommitted changes",
        "link.py is in no git repository",
        "more/e.py is not in git",
        "moved.py has uncommitted changes",
        "out/d.py is ignored by git",
    ]


def test_many_files_and_several_repositories(repository: Path) -> None:
    inner = repository / "inner"
    names = [f"{number}.py" for number in range(450)]
    made(inner, *names)
    git(inner, "init", "-q")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "x")
    (inner / "449.py").write_bytes(NEW)
    found = restorable(repository, "a.py", *(f"inner/{name}" for name in names))
    assert found == ["inner/449.py has uncommitted changes"]


def test_a_hook_of_another_repository_does_not_mislead(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert restorable(repository, "a.py") == []


def test_a_repository_that_git_cannot_read(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ["a.py can't be checked: git status fails"]
    monkeypatch.setenv("PATH", str(repository))
    assert restorable(repository, "a.py") == expected
    monkeypatch.undo()
    shutil.rmtree(repository / ".git")
    (repository / ".git").mkdir()
    assert restorable(repository, "a.py") == expected
