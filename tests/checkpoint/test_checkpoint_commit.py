"""Publishing checkpoints: kills at every system call, full disks, concurrent jobs."""

import errno
import fcntl
import gc
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_checkpoint_directory import complaints, saved

from megapg.checkpoint.commit import ROOT_LOCK, Partial, _root_locked
from megapg.checkpoint.directory import (
    PENDING,
    TRACKER,
    committed_pending,
    find,
    hidden_name,
    iteration_name,
    latest,
    list_checkpoints,
    read_tracker,
    tracker_text,
)
from megapg.checkpoint.mounts import local_locks
from megapg.errors import CheckpointSaveError

# ---- helpers of the tests and of the processes that the tests start


def save(root, name="iter_0000200", mark="new", keep=None, retain_every=None):
    release = name == "release"
    iteration = 0 if release else int(name.removeprefix("iter_"))
    partial = Partial.begin(root, iteration=iteration, release=release)
    saved(partial.path, mark)
    return partial.publish(keep, retain_every=retain_every)


def lay_out(root, names, tracked):
    for name in names:
        saved(root / name, f"old {name}")
    if tracked:
        root.mkdir(exist_ok=True)
        (root / TRACKER).write_text(tracker_text(tracked))


def mark(info):
    return (info.path / "mark").read_text() if info else None


def hidden(root):
    return {name for name in os.listdir(root) if name.startswith(".")}


# ---- kill -9 at every point: each job runs in a small process that forks the victims

WRITES = {
    *("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "open", "write", "truncate"),
    *("flock", "close", "remove"),
}
SCENARIOS = {  # existing checkpoints, tracker, checkpoint to save, number to keep
    "first": ((), None, "iter_0000200", None),
    "next": (("iter_0000100",), "iter_0000100", "iter_0000200", None),
    "again": (("iter_0000100", "iter_0000200"), "iter_0000200", "iter_0000200", None),
    "again after a roll-back": (
        ("iter_0000100", "iter_0000200"),
        "iter_0000100",
        "iter_0000200",
        None,
    ),
    "keep": (("iter_0000050", "iter_0000100"), "iter_0000100", "iter_0000200", 1),
    "release": (("release", "iter_0000100"), "release", "release", None),
}


def killed_at(point, work):
    """Fork a process that does ``work``, and kill it before or after write number ``point``."""
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"{point}: {status}"
        return os.WIFSIGNALED(status)
    try:
        seen = 0

        def watch(_frame, event, function):
            nonlocal seen
            if event in ("c_call", "c_return") and function.__name__ in WRITES:
                if seen == point:
                    os.kill(os.getpid(), signal.SIGKILL)
                seen += 1

        sys.setprofile(watch)
        work()
        sys.setprofile(None)
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def check_what_a_kill_left(root, allowed):
    """Check that the latest checkpoint is found before and after a full clean-up."""
    before = mark(latest(root))
    assert before in allowed, (before, sorted(os.listdir(root)))
    for info in list_checkpoints(root):
        assert not info.complete or mark(info), info
    Partial.begin(root, iteration=999).discard()
    after = latest(root)
    assert mark(after) == before, (before, mark(after))
    assert hidden(root) == {ROOT_LOCK}, hidden(root)
    if after:
        assert after.path == root / (read_tracker(root) or after.path.name)
    return before


def kill_everywhere(directory, scenario):
    names, tracked, name, keep = SCENARIOS[scenario]
    previous = f"old {tracked}" if tracked else None
    found, point = [], 0
    while True:
        root = directory / f"{point}"
        lay_out(root, names, tracked)
        if not killed_at(point, lambda root=root: save(root, name, "new", keep)):
            break
        root.mkdir(exist_ok=True)
        found.append(check_what_a_kill_left(root, {previous, "new"}))
        # Only retired checkpoints may be missing, and only after the new checkpoint is published.
        for old in {*names} - {name}:
            if keep is None or found[-1] != "new":
                assert mark(find(root, old)) == f"old {old}", old
        shutil.rmtree(root)
        point += 1
    assert mark(latest(root)) == "new"
    assert hidden(root) == {ROOT_LOCK}
    if keep == 1:
        assert [info.path.name for info in list_checkpoints(root)] == [name]
    commit = found.index("new")
    assert set(found[:commit]) == {previous}, found
    assert set(found[commit:]) == {"new"}, found
    return {"points": point, "commit": commit}


def kill_twice(directory, commit):
    """Kill a save around its commit, then kill the following clean-up at every point."""
    names, tracked, name, _ = SCENARIOS["again after a roll-back"]
    kills = 0
    for first in range(commit - 6, commit + 2):
        for second in range(1000):
            root = directory / f"{first}.{second}"
            lay_out(root, names, tracked)
            assert killed_at(first, lambda root=root: save(root, name, "new"))
            left = mark(latest(root))
            killed = killed_at(second, lambda root=root: Partial.begin(root, iteration=9))
            try:
                check_what_a_kill_left(root, {left})
            except AssertionError as error:
                raise AssertionError(f"killed at {first}, then at {second}: {error}") from None
            shutil.rmtree(root)
            if not killed:
                break
            kills += 1
    return {"kills": kills}


def kill_discard(directory):
    point = 0
    while True:
        root = directory / f"{point}"
        lay_out(root, ("iter_0000100",), "iter_0000100")

        def work(root=root):
            partial = Partial.begin(root, iteration=200)
            saved(partial.path)
            partial.discard()

        if not killed_at(point, work):
            break
        check_what_a_kill_left(root, {"old iter_0000100"})
        shutil.rmtree(root)
        point += 1
    assert hidden(root) == {ROOT_LOCK}
    return {"points": point}


def commit_many(root, who, iterations, keep):
    for number, iteration in enumerate(iterations):
        save(root, iteration_name(iteration), f"{who} {number}", keep)


def hold(root):
    partial = Partial.begin(root, iteration=7)
    saved(partial.path)
    print(json.dumps(str(partial.path)), flush=True)
    signal.pause()


if __name__ == "__main__":
    job, root, *rest = json.loads(sys.argv[1])
    print(json.dumps(globals()[job](Path(root), *rest)), flush=True)
    sys.exit(0)


def start(job, root, *args):
    # These jobs import only pytest and the standard library: one thread, so the process may fork.
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, json.dumps([job, str(root), *args])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def result(process, deadline=250):
    try:
        out, err = process.communicate(timeout=deadline)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def memory(tmp_path):
    """Yield a directory in memory if possible: syncing is free and a kill loses no written file."""
    if not os.access("/dev/shm", os.W_OK):
        yield str(tmp_path)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield directory


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_write(memory, scenario):
    said = result(start("kill_everywhere", memory, scenario))
    assert 0 < said["commit"] < said["points"]
    assert said["points"] > 50


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_again_while_cleaning_up(memory):
    commit = result(start("kill_everywhere", memory, "again after a roll-back"))["commit"]
    twice = start("kill_twice", f"{memory}/twice", commit)
    assert result(twice, deadline=600)["kills"] > 200


def test_killed_while_discarding(memory):
    assert result(start("kill_discard", memory))["points"] > 30


# ---- one process


def test_the_way_of_a_checkpoint(tmp_path):
    root = tmp_path / "new" / "dir"
    partial = Partial.begin(root, iteration=123)
    assert partial.path.parent == root
    assert partial.path.name.startswith(".iter_0000123.partial-")
    saved(partial.path)
    assert latest(root) is None
    info = partial.publish()
    assert info == latest(root) == find(root, "iter_0000123")
    assert info.path == root / "iter_0000123"
    assert sorted(os.listdir(info.path)) == [".metadata", "common.pt", "mark", "metadata.json"]
    assert (root / TRACKER).read_bytes() == b"123"
    assert hidden(root) == {ROOT_LOCK}
    assert (root / ROOT_LOCK).stat().st_mode & 0o111 == 0
    partial.discard()
    assert latest(root) == info
    with pytest.raises(CheckpointSaveError, match="published or discarded already"):
        partial.publish()

    assert save(root, "release").release
    assert (root / TRACKER).read_bytes() == b"release"
    assert save(str(root), "iter_0000005").path == root / "iter_0000005"  # the tracker moves back
    assert latest(root).iteration == 5


def test_everything_is_on_disk_before_the_next_step(tmp_path, monkeypatch):
    save(tmp_path)
    steps = []

    def record(name):
        real = getattr(os, name)

        def call(*args):
            what = [os.readlink(f"/proc/self/fd/{a}") if isinstance(a, int) else a for a in args]
            steps.append((name, *(Path(w).name for w in what)))
            return real(*args)

        monkeypatch.setattr(os, name, call)

    partial = Partial.begin(tmp_path, iteration=200)
    saved(partial.path)
    token = partial.path.name.rpartition("-")[2]
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc to tell which file is synced")
    for name in ("fsync", "rename", "replace"):
        record(name)
    partial.publish()
    root, pending = tmp_path.name, f"{PENDING}{token}"
    replaced = f".iter_0000200.replaced-{token}"
    expected = [
        ("fsync", partial.path.name),
        ("fsync", root),
        ("fsync", pending),
        ("fsync", root),
        ("rename", "iter_0000200", replaced),
        ("rename", partial.path.name, "iter_0000200"),
        ("fsync", root),
        ("replace", pending, TRACKER),
        ("fsync", root),
    ]
    assert steps[: len(expected)] == expected
    assert [step[:2] for step in steps[len(expected) :]] == [("rename", replaced)]


def test_what_is_not_complete_is_not_published(tmp_path):
    save(tmp_path, "iter_0000100")
    partial = Partial.begin(tmp_path, iteration=200)
    with pytest.raises(CheckpointSaveError, match=r"has no metadata.json, so it is not published"):
        partial.publish()
    saved(partial.path)
    (partial.path / "common.pt").unlink()
    with pytest.raises(CheckpointSaveError, match=r"has no common.pt"):
        partial.publish()
    assert latest(tmp_path).iteration == 100
    saved(partial.path)
    assert partial.publish().iteration == 200


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"keep": 0}, "keep=0: give how many"),
        ({"keep": 2, "retain_every": 0}, "retain_every=0"),
        ({"keep": 2, "retain_every": True}, "retain_every=True"),
        ({"retain_every": 4}, "Give keep= as well"),
    ],
)
def test_keeping_nothing_is_refused(tmp_path, wrong, said):
    partial = Partial.begin(tmp_path, iteration=1)
    saved(partial.path)
    with pytest.raises(CheckpointSaveError, match=said):
        partial.publish(**wrong)
    assert partial.publish(1).complete


def test_milestones_stay(tmp_path):
    for iteration in range(1, 11):
        save(tmp_path, iteration_name(iteration), keep=2, retain_every=4)
    assert [info.iteration for info in list_checkpoints(tmp_path)] == [4, 8, 9, 10]


def test_retention(tmp_path):
    def kept():
        return sorted(p.name for p in tmp_path.iterdir() if p.name not in (ROOT_LOCK, TRACKER))

    lay_out(tmp_path, ["release", *map(iteration_name, (1, 2, 3, 4, 5))], "iter_0000005")
    elsewhere = saved(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    (tmp_path / "iter_0000000").symlink_to(elsewhere)
    (tmp_path / "iter_0000002" / ".metadata").unlink()
    always = ["iter_0000000", "iter_0000002", "release"]  # a link, incomplete, a release
    save(tmp_path, "iter_0000006", keep=3)
    assert kept() == sorted([*always, "iter_0000004", "iter_0000005", "iter_0000006"])
    save(tmp_path, "iter_0000006", keep=2)
    assert kept() == sorted([*always, "iter_0000005", "iter_0000006"])
    # After a roll-back the newest checkpoint stays, although the new checkpoint is older.
    save(tmp_path, "iter_0000003", keep=1)
    assert kept() == sorted([*always, "iter_0000003", "iter_0000006"])
    save(tmp_path, "release", keep=2)
    assert kept() == sorted([*always, "iter_0000003", "iter_0000006"])
    save(tmp_path, "release", keep=1)
    assert kept() == sorted([*always, "iter_0000006"])
    assert (tmp_path / "iter_0000000").is_symlink()
    assert elsewhere.is_dir()


def test_a_link_in_the_place_of_a_checkpoint_is_replaced_and_its_target_stays(tmp_path):
    elsewhere = saved(tmp_path / "elsewhere", "there")
    root = tmp_path / "root"
    root.mkdir()
    (root / "iter_0000200").symlink_to(elsewhere)
    info = save(root)
    assert not info.path.is_symlink()
    assert mark(info) == "new"
    assert (elsewhere / "mark").read_text() == "there"
    assert hidden(root) == {ROOT_LOCK}


def test_several_saves_in_one_process(tmp_path):
    partials = [Partial.begin(tmp_path, iteration=i) for i in (1, 2, 2, 3)]
    for number, partial in enumerate(partials):
        saved(partial.path, f"{number}")
    assert [info.complete for info in list_checkpoints(tmp_path)] == [False] * 4
    partials[3].publish()
    partials[0].discard()
    partials[2].publish()
    partials[1].publish()
    assert [(i.iteration, mark(i)) for i in list_checkpoints(tmp_path)] == [(2, "1"), (3, "3")]
    assert latest(tmp_path).iteration == 2
    assert hidden(tmp_path) == {ROOT_LOCK}


def test_a_forgotten_save_is_dead(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about the unclosed file
        Partial.begin(tmp_path, iteration=1)
        gc.collect()
    assert len(list_checkpoints(tmp_path)) == 1
    Partial.begin(tmp_path, iteration=2).discard()
    assert list_checkpoints(tmp_path) == ()


def test_a_forked_child_does_not_take_the_lock_with_it(tmp_path):
    partial = Partial.begin(tmp_path, iteration=1)
    pid = os.fork()
    if not pid:
        partial._lock = None  # closes the child's copy of the handle, as a child's exit does
        os._exit(0)
    os.waitpid(pid, 0)
    Partial.begin(tmp_path, iteration=2).discard()
    assert partial.path.exists()
    partial.discard()


def test_a_forked_child_that_stays_does_not_keep_the_root_locked(tmp_path):
    reading, writing = os.pipe()
    with _root_locked(tmp_path, 1):
        pid = os.fork()
        if not pid:
            os.close(writing)
            os.read(reading, 1)  # blocks until the parent closes its end
            os._exit(0)
    try:
        with _root_locked(tmp_path, 1):
            pass
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
        os.close(reading)


def test_a_roll_back_by_hand_after_a_crash_stays(tmp_path):
    lay_out(tmp_path, ("iter_0000100", "iter_0000200"), "iter_0000100")
    void = tmp_path / f"{PENDING}ab"
    void.write_text("200")
    os.utime(void, (1e9, 1e9))
    Partial.begin(tmp_path, iteration=300).discard()
    assert latest(tmp_path).iteration == 100
    assert hidden(tmp_path) == {ROOT_LOCK}


@contextmanager
def failing(monkeypatch, module, name, when=lambda *_: True, number=errno.EIO):
    """Make a function of the operating system fail, optionally for some arguments only."""
    real = getattr(module, name)

    def call(*args):
        if when(*args):
            raise OSError(number, os.strerror(number))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, call)
        yield


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device. Free some space"),
        (errno.EROFS, "Read-only file system. Mount it"),
        (errno.EACCES, "Permission denied. Give this user"),
        (errno.EIO, "Input/output error. Save elsewhere if that persists"),
    ],
)
def test_when_renaming_fails_everything_is_as_before(tmp_path, monkeypatch, number, advice):
    save(tmp_path, mark="old")
    partial = Partial.begin(tmp_path, iteration=200)
    saved(partial.path, "new")
    with (
        failing(monkeypatch, os, "rename", lambda source, _: Path(source) == partial.path, number),
        pytest.raises(CheckpointSaveError, match=f"can't publish .*: {advice}"),
    ):
        partial.publish()
    assert mark(latest(tmp_path)) == "old"
    assert not any(name.startswith(PENDING) or "replaced" in name for name in hidden(tmp_path))
    assert mark(partial.publish()) == "new"


def test_when_restoring_fails_the_replaced_checkpoint_stays(tmp_path, monkeypatch, caplog):
    replaced = saved(tmp_path / hidden_name("iter_0000200", "replaced", "ab"), "old")
    with failing(monkeypatch, os, "rename", lambda _, target: Path(target).name == "iter_0000200"):
        partial = Partial.begin(tmp_path, iteration=300)
    assert "could not restore" in complaints(caplog)[0]
    assert latest(tmp_path).path == replaced
    partial.discard()
    Partial.begin(tmp_path, iteration=300).discard()
    assert latest(tmp_path).path == tmp_path / "iter_0000200"


def test_when_only_the_tracker_fails_the_next_save_writes_it(tmp_path, monkeypatch):
    save(tmp_path, "iter_0000100")
    partial = Partial.begin(tmp_path, iteration=200)
    saved(partial.path)
    said = "is complete, but latest_checkpointed_"
    with failing(monkeypatch, os, "replace"), pytest.raises(CheckpointSaveError, match=said):
        partial.publish()
    partial.discard()  # as a caller does after an error; the published checkpoint stays
    assert committed_pending(tmp_path)
    assert latest(tmp_path).iteration == 200
    assert read_tracker(tmp_path) == "iter_0000100"
    Partial.begin(tmp_path, iteration=300).discard()
    assert read_tracker(tmp_path) == "iter_0000200"
    assert hidden(tmp_path) == {ROOT_LOCK}


def test_clean_up_that_fails_is_logged_and_done_later(tmp_path, monkeypatch, caplog):
    save(tmp_path)
    with failing(monkeypatch, shutil, "rmtree"):
        assert mark(save(tmp_path, mark="newer")) == "newer"
    assert "could not delete" in complaints(caplog)[0]
    assert len(hidden(tmp_path)) == 2
    Partial.begin(tmp_path, iteration=1).discard()
    assert hidden(tmp_path) == {ROOT_LOCK}


def test_a_locked_root_is_an_error_that_names_the_holder(tmp_path):
    partial = Partial.begin(tmp_path, iteration=1, timeout=0.1)
    saved(partial.path)
    with _root_locked(tmp_path, 1):
        holder = rf"locked by another save \(.*, pid {os.getpid()}, since .*stayed so for 0.1 s"
        with pytest.raises(CheckpointSaveError, match=holder):
            partial.publish()
        with pytest.raises(CheckpointSaveError, match=holder):
            Partial.begin(tmp_path, iteration=2, timeout=0.1)
    assert partial.publish().complete
    assert hidden(tmp_path) == {ROOT_LOCK}


def test_where_there_are_no_locks_saves_go_on_and_nothing_unfinished_is_removed(
    tmp_path, monkeypatch, caplog
):
    with failing(monkeypatch, fcntl, "flock", number=errno.ENOSYS):
        for partial in [Partial.begin(tmp_path, iteration=iteration) for iteration in (1, 2)]:
            saved(partial.path)
            partial.publish()
    assert latest(tmp_path).iteration == 2
    assert "no file locks here" in complaints(caplog)[0]


MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /lustre rw,nosuid - lustre mds@tcp:/fs rw,localflock,lazystatfs
31 22 0:41 / /lustre/with\040flock rw - lustre mds@tcp:/fs rw,flock,lazystatfs
32 22 0:42 / /nfs rw - nfs4 host:/vol rw,vers=4.2,local_lock=none
33 22 0:43 / /nfs/old rw - nfs host:/vol rw,vers=3,nolock,local_lock=all
34 22 0:44 / /bucket rw master:3 - fuse.gcsfuse bucket rw,user_id=0
35 22 0:45 / /hidden rw - nfs host:/a rw,nolock
36 22 0:46 / /hidden rw - ext4 /dev/sdb rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/home/checkpoints", ""),
        ("/lustre/checkpoints", "/lustre is lustre mounted with localflock"),
        ("/lustre/with flock/checkpoints", ""),
        ("/lustrevil", ""),
        ("/nfs/checkpoints", ""),
        ("/nfs/old", "/nfs/old is nfs mounted with nolock"),
        ("/bucket/run", "/bucket is fuse.gcsfuse"),
        ("/hidden/run", ""),
    ],
)
def test_the_mount_table_tells_where_locks_are_local(path, why):
    assert local_locks(Path(path), MOUNTS) == why


def test_a_link_to_where_locks_are_local(tmp_path):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "bucket")
    bucket = str((tmp_path / "bucket").resolve()).replace(" ", r"\040")
    table = f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n36 22 0:5 / {bucket} rw - fuse.gcsfuse b rw\n"
    assert local_locks(tmp_path / "link" / "run", table).endswith("is fuse.gcsfuse")


def test_where_locks_are_local_what_another_host_began_is_left_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("megapg.checkpoint.commit.local_locks", lambda path: "/x is a test")
    theirs, dead = (Partial.begin(tmp_path, iteration=iteration) for iteration in (1, 2))
    for partial, host in ((theirs, "another-host"), (dead, socket.gethostname())):
        partial._lock.free()  # as if its process had ended, or as seen from another host
        lock_file = partial.path.with_name(f"{partial.path.name}.lock")
        assert lock_file.read_text().startswith(f"{socket.gethostname()}, pid {os.getpid()}, ")
        lock_file.write_text(f"{host}, pid 17, since yesterday")
    Partial.begin(tmp_path, iteration=3).discard()
    assert theirs.path.is_dir()
    assert not dead.path.exists()
    assert "locks are not seen by other hosts there (/x is a test)" in complaints(caplog)[0]


# ---- roots that are not writable


def test_a_root_that_can_not_be(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for root in (file, file / "below"):
        with pytest.raises(CheckpointSaveError, match=r"can't make .*There is a file where a dir"):
            Partial.begin(root, iteration=1)
    if os.path.isdir("/proc/self"):
        with pytest.raises(CheckpointSaveError, match=r"can't make /proc/self/ckpt: "):
            Partial.begin("/proc/self/ckpt", iteration=1)


# ---- several processes


def test_another_process_lives_and_dies(tmp_path):
    process = start("hold", tmp_path)
    try:
        path = Path(json.loads(process.stdout.readline()))
        save(tmp_path, "iter_0000100")
        assert path.exists()
        process.kill()
        process.wait()
        save(tmp_path, "iter_0000200")
        assert not path.exists()
        assert hidden(tmp_path) == {ROOT_LOCK}
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("keep", [None, 2])
@pytest.mark.parametrize("same", [True, False], ids=["same iterations", "different iterations"])
def test_two_jobs_save_into_one_directory(tmp_path, caplog, same, keep):
    save(tmp_path, "iter_0000001", "first")
    rounds = 40
    iterations = {
        who: [2 + n % 3 if same else 2 + 2 * n + job for n in range(rounds)]
        for job, who in enumerate(("a", "b"))
    }
    jobs = [start("commit_many", tmp_path, who, i, keep) for who, i in iterations.items()]
    looks = 0
    while any(job.poll() is None for job in jobs):
        info = latest(tmp_path)
        assert info is not None
        assert info.complete
        looks += 1
    for job in jobs:
        result(job)
    assert looks > 10
    assert hidden(tmp_path) == {ROOT_LOCK}
    expected = {1, *iterations["a"], *iterations["b"]}
    there = [i.iteration for i in list_checkpoints(tmp_path)]
    if keep is None:
        # A reader never sees a tracker that names a missing checkpoint.
        assert complaints(caplog) == []
        assert there == sorted(expected)
    else:
        assert len(there) >= keep
        assert expected.issuperset(there)
        assert max(there) == max(expected)
    assert all(i.complete for i in list_checkpoints(tmp_path))
    ends = {(iterations[who][-1], f"{who} {rounds - 1}") for who in iterations}
    assert (latest(tmp_path).iteration, mark(latest(tmp_path))) in ends


def test_a_removed_directory_is_deleted_by_any_later_save(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    saved(tmp_path / hidden_name("iter_0000001", "removed", "ab"))
    saved(tmp_path / hidden_name("iter_0000002", "partial", "ab"))
    save(tmp_path)
    assert hidden(tmp_path) == {ROOT_LOCK}
    assert "which a save that died has left" in caplog.text
