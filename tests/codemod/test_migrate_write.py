"""Rewritten files reach the disk whole or not at all, whatever goes wrong.

Real files on real file systems: read-only, full, with links; a process that is killed, or
interrupted, before and after everything that it does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from damage import instead, mounted

from megapg.migrate.edit import write
from megapg.migrate.edit.write import write_files
from megapg.migrate.migration import Edit, Rewritten
from megapg.migrate.python.source import Problem
from megapg.migrate.python.tree import find_files

OLD, NEW = b"x = mpu.get()  # old\n", b"x = pg.tp  # new\n"
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may")


def rewritten(path: Path, old: bytes = OLD, new: bytes = NEW) -> Rewritten:
    """A rewrite of a file; what the edits are is nothing to the writer."""
    text = old.decode()
    edits = (Edit(0, len(text), new.decode(), "site"),)
    return Rewritten(path.name, path, old, new, text, edits)


def made(folder: Path, *names: str) -> list[Rewritten]:
    """Files with the old text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(OLD)
    return [rewritten(folder / name) for name in names]


def contents(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir()) if each.is_file()}


def why(problems: list[Problem]) -> str:
    (problem,) = problems
    return problem.message


# ---- what is written ---------------------------------------------------------------------------


def test_files_are_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    files = made(tmp_path / "a", "a.py", "b.py", "c.py") + made(tmp_path / "b", "a.py")
    (tmp_path / "a" / "other.py").write_bytes(OLD)
    assert write_files(files) == []
    assert contents(tmp_path / "a") == dict.fromkeys(("a.py", "b.py", "c.py"), NEW) | {
        "other.py": OLD
    }
    assert contents(tmp_path / "b") == {"a.py": NEW}
    assert write_files([]) == []


def test_any_bytes_and_any_name(tmp_path: Path) -> None:
    long = "ä" * 126 + ".py"
    for name, new in (("a b.py", bytes(range(256))), ("[x]*.py", b""), (long, b"\r\n" * 100_000)):
        (tmp_path / name).write_bytes(OLD)
        file = Rewritten(name, tmp_path / name, OLD, new, OLD.decode(), ())
        assert write_files([file, *made(tmp_path, "b.py")]) == []
        assert (tmp_path / name).read_bytes() == new
    assert len(list(tmp_path.iterdir())) == 4


def test_the_mode_is_kept(tmp_path: Path) -> None:
    for mode in (0o755, 0o600, 0o664, 0o4755):
        (file,) = made(tmp_path, "a.py")
        file.path.chmod(mode)
        assert write_files([file]) == []
        assert stat.S_IMODE(file.path.stat().st_mode) == mode


@as_root
def test_the_owner_is_kept(tmp_path: Path) -> None:
    (file,) = made(tmp_path, "a.py")
    os.chown(file.path, 1234, 4321)
    file.path.chmod(0o2755)
    assert write_files([file]) == []
    found = file.path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 4321, 0o2755)


def test_attributes_are_kept(tmp_path: Path) -> None:
    (file,) = made(tmp_path, "a.py")
    try:
        os.setxattr(file.path, "user.origin", b"here")
    except OSError as error:
        pytest.skip(f"no extended attributes here: {error.strerror}")
    assert write_files([file]) == []
    assert os.getxattr(file.path, "user.origin") == b"here"


def test_python_does_not_run_the_old_bytecode(tmp_path: Path) -> None:
    """Which it goes by time of change and size."""
    old, new = b"print(1)\n", b"print(2)\n"
    (tmp_path / "a.py").write_bytes(old)
    os.utime(tmp_path / "a.py", (time.time() - 1000,) * 2)
    run = [sys.executable, "-c", "import sys; sys.dont_write_bytecode = False; import a"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, check=True)
    assert (done.stdout, (tmp_path / "__pycache__").is_dir()) == (b"1\n", True)
    assert write_files([rewritten(tmp_path / "a.py", old, new)]) == []
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout == b"2\n"


def test_links_are_written_through(tmp_path: Path) -> None:
    files = made(tmp_path / "real", "a.py", "b.py")
    links = tmp_path / "links"
    links.mkdir()
    (links / "one.py").symlink_to("two.py")
    (links / "two.py").symlink_to(Path("..", "real", "a.py"))
    assert write_files([rewritten(links / "one.py"), files[1]]) == []
    assert os.readlink(links / "one.py") == "two.py"
    assert contents(tmp_path / "real") == {"a.py": NEW, "b.py": NEW}
    assert not (tmp_path / "real" / "a.py").is_symlink()


# ---- what is refused ---------------------------------------------------------------------------


CHANGED = "was changed since it was looked at"
NOT_REGULAR = "is no regular file any more"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "edited": (lambda path: path.write_bytes(OLD + b"y = 1\n"), CHANGED),
    "half written": (lambda path: path.write_bytes(OLD[:5]), CHANGED),
    "removed": (Path.unlink, "No such file"),
    "a directory": (instead(Path.mkdir), NOT_REGULAR),
    "a fifo": (instead(os.mkfifo), NOT_REGULAR),
    "a loop": (instead(lambda path: path.symlink_to(path.name)), "Too many levels"),
    "a link to nothing": (instead(lambda path: path.symlink_to("nothing.py")), "No such file"),
    "read-only": (lambda path: path.chmod(0o444), "is read-only"),
    "hard linked": (
        lambda path: os.link(path, path.with_name("other name")),
        "has 2 hard links, which would be parted",
    ),
}


def listed(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every name with what it is."""
    found = {}
    for each in sorted(folder.iterdir()):
        at = each.lstat()
        found[each.name] = at.st_mode, at.st_ino, each.read_bytes() if each.is_file() else b""
    return found


@pytest.mark.parametrize(("harm", "said"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_not_what_it_was(
    tmp_path: Path, harm: Callable[[Path], object], said: str
) -> None:
    files = made(tmp_path, "a.py", "b.py", "c.py")
    harm(tmp_path / "b.py")
    before = listed(tmp_path)
    (problem,) = write_files(files)
    assert (problem.file, problem.line) == ("b.py", 0)
    assert said in problem.message
    assert listed(tmp_path) == before


def test_every_problem_is_told(tmp_path: Path) -> None:
    files = made(tmp_path, "a.py", "b.py", "c.py", "d.py")
    (tmp_path / "a.py").write_bytes(OLD + b"y = 1\n")
    (tmp_path / "c.py").chmod(0o444)
    before = listed(tmp_path)
    assert [each.file for each in write_files(files)] == ["a.py", "c.py"]
    assert listed(tmp_path) == before


def test_what_was_replaced_is_put_back(tmp_path: Path) -> None:
    """The fourth is the first under another name, so it is not what it was when its turn comes."""
    files = made(tmp_path, "a.py", "b.py", "c.py")
    (tmp_path / "link.py").symlink_to("a.py")
    before = listed(tmp_path)
    problems = write_files([*files, rewritten(tmp_path / "link.py")])
    assert [each.file for each in problems] == ["link.py"]
    assert listed(tmp_path) == before  # the very files


def test_a_file_that_can_not_be_replaced(tmp_path: Path) -> None:
    """What something is mounted on keeps its name: all before it are put back."""
    files = made(tmp_path, "a.py", "b.py", "c.py")
    (tmp_path / "other").write_bytes(OLD)
    with mounted("--bind", str(tmp_path / "other"), str(tmp_path / "b.py")):
        before = listed(tmp_path)
        message = why(write_files(files))
        assert message == f"can't be written: {os.strerror(errno.EBUSY)}"
        assert listed(tmp_path) == before
        assert [len(write_files([file])) for file in files] == [0, 1, 0]
        assert contents(tmp_path) == {"a.py": NEW, "b.py": OLD, "c.py": NEW, "other": OLD}


def test_a_read_only_file_system(tmp_path: Path) -> None:
    files = made(tmp_path / "a", "a.py") + made(tmp_path / "b", "b.py")
    with mounted("--bind", str(tmp_path / "a"), str(tmp_path / "a")) as here:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(here)], check=True)
        assert why(write_files(files)) == "is read-only"
        assert [len(write_files([file])) for file in files] == [1, 0]
    assert contents(tmp_path / "a") == {"a.py": OLD}
    assert contents(tmp_path / "b") == {"b.py": NEW}


def test_an_immutable_file(tmp_path: Path) -> None:
    files = made(tmp_path, "a.py", "b.py")
    done = shutil.which("chattr") and subprocess.run(
        ["chattr", "+i", tmp_path / "b.py"], capture_output=True
    )
    if not done or done.returncode:
        pytest.skip("chattr is not permitted here")
    try:
        assert why(write_files(files)) == "is read-only"
        assert contents(tmp_path) == {"a.py": OLD, "b.py": OLD}
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "b.py"], check=True)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Without root's rights."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@as_root
def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)  # pytest's own
    (file,) = made(tmp_path / "a", "a.py")
    file.path.chmod(0o666)
    with nobody():
        message = why(write_files([file]))
    assert message == f"can't be written beside: {os.strerror(errno.EACCES)}"
    (tmp_path / "a").chmod(0o777)
    with nobody():
        message = why(write_files([file]))
    assert message == "belongs to somebody else, which could not be kept"
    assert contents(tmp_path / "a") == {"a.py": OLD}


def test_a_full_disk(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=64k", "none", str(folder)):
        small, large = made(folder, "a.py", "b.py")
        large = rewritten(large.path, new=b"#" * 100_000)
        message = why(write_files([small, large]))
        assert message == f"can't be written: {os.strerror(errno.ENOSPC)}"
        assert contents(folder) == {"a.py": OLD, "b.py": OLD}


def test_a_file_larger_than_is_allowed(tmp_path: Path) -> None:
    small, large = made(tmp_path, "a.py", "b.py")
    large = rewritten(large.path, new=b"#" * 100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        problems = write_files([small, large])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert why(problems) == f"can't be written: {os.strerror(errno.EFBIG)}"
    assert contents(tmp_path) == {"a.py": OLD, "b.py": OLD}


def test_no_more_open_files(tmp_path: Path) -> None:
    files = made(tmp_path, "a.py", "b.py")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/dev/fd"))
    taken = [os.open(tmp_path, os.O_RDONLY) for _ in range(4)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(taken), hard))
    try:
        problems = write_files(files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)
    assert used > 2
    assert [each.file for each in problems] == ["a.py", "b.py"]
    assert contents(tmp_path) == {"a.py": OLD, "b.py": OLD}


# ---- killed and interrupted --------------------------------------------------------------------

NAMES = ("a.py", "b.py", "c.py")


class Stop:
    """Does something before or after the given number of what the writer and the system do.

    That is: whatever the writer calls, and every call of the system below that.
    """

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at, self.act, self.count = at, act, 0
        # What is on disk when a call returns is there when the next one begins.
        self.events = (
            ("call", "c_call") if act is kill else ("call", "return", "c_call", "c_return")
        )

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        of_writer = frame.f_code.co_filename == write.__file__
        of_system = event.startswith("c_") and getattr(arg, "__module__", "") in ("posix", "_io")
        of_writer = of_writer or (of_system and frame.f_code.co_filename != __file__)
        self.count += of_writer and event in self.events
        if self.count == self.at:
            sys.setprofile(None)
            self.act()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def stopped(folder: Path, at: int, act: Callable[[], None]) -> str:
    """What becomes of a process that writes and is stopped at that point."""
    files = made(folder, *NAMES)
    pid = os.fork() if act is kill else 0
    if pid:
        return "killed" if os.WIFSIGNALED(os.waitpid(pid, 0)[1]) else "written"
    end = "broken"
    try:
        sys.setprofile(Stop(at, act))
        end = "refused" if write_files(files) else "written"
    except KeyboardInterrupt:
        end = "interrupted"
    finally:
        sys.setprofile(None)
        if act is kill:
            os._exit(end != "written")
    return end


def every_stop(root: Path, act: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Stop at one point after the other until the process comes to its end."""
    at, end = 0, ""
    while end != "written":
        at += 1
        folder = root / str(at)
        end = stopped(folder, at, act)
        whole = {OLD: "old", NEW: "new"}
        found = contents(folder)
        yield {
            "end": end,
            "files": [whole.get(found.pop(name, b""), "torn") for name in NAMES],
            "left": sorted(found),
            "again": len(write_files(made_again(folder))),
            "python": sorted(each.name for each in find_files([folder], folder)),
        }
        shutil.rmtree(folder)


def made_again(folder: Path) -> list[Rewritten]:
    """What a second run has to write."""
    files = [rewritten(folder / name) for name in NAMES]
    return [file for file in files if file.path.read_bytes() == OLD]


def all_stops(root: Path, act: str) -> list[dict[str, Any]]:
    """Told by a process of its own, from which it is safe to fork."""
    command = [sys.executable, __file__, str(root), act]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("act", ["kill", "interrupt"])
def test_stopped_anywhere(tmp_path: Path, act: str) -> None:
    memory = Path("/dev/shm")  # hundreds of times to a disk and back would take minutes
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        *stops, last = all_stops(Path(folder), act)
    print(len(stops), "stops")
    assert last == {"end": "written", "files": ["new"] * 3, "left": [], "again": 0} | {
        "python": list(NAMES)
    }
    assert len(stops) > (150 if act == "interrupt" else 75)
    states = set()
    for stop in stops:
        assert stop["end"] == {"kill": "killed", "interrupt": "interrupted"}[act]
        assert "torn" not in stop["files"]
        assert stop["files"] == sorted(stop["files"])  # new ones, then old ones
        assert all(each.startswith(".") and ".megapg-" in each for each in stop["left"])
        assert not any(each.endswith(".py") for each in stop["left"])
        assert stop["python"] == list(NAMES)
        assert stop["again"] == 0
        states.add(stop["files"].count("new"))
    assert states == ({0, 3} if act == "interrupt" else {0, 1, 2, 3})
    if act == "interrupt":  # while something is made or removed, it may stay
        untidy = [stop for stop in stops if stop["left"]]
        print(len(untidy), "of which leave something")
        assert len(untidy) < len(stops) / 5


if __name__ == "__main__":
    root, act = sys.argv[1:]
    acts = {"kill": kill, "interrupt": interrupt}
    for found in every_stop(Path(root), acts[act]):
        print(json.dumps(found))
