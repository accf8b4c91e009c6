"""Listing and resuming from a directory of checkpoints, intact or damaged."""

import json
import logging
import os
import shutil
from datetime import UTC, datetime

import pytest

from megapg.checkpoint import directory
from megapg.checkpoint.directory import (
    PENDING,
    TRACKER,
    find,
    hidden_name,
    iteration_name,
    iteration_of,
    latest,
    list_checkpoints,
    parse_hidden,
    read_tracker,
    tracker_text,
    what_is_missing,
)
from megapg.errors import BrokenCheckpointError, CheckpointError

FORM = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def saved(path, mark=""):
    """Write the files of a complete checkpoint, and a file that marks which checkpoint it is."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "mark").write_text(mark or path.name)
    (path / "common.pt").write_bytes(b"common")
    (path / ".metadata").write_bytes(b"index")
    (path / "metadata.json").write_text(json.dumps(FORM))
    return path


@pytest.fixture
def root(tmp_path):
    """Checkpoints 100 and 200, with the tracker at 200."""
    saved(tmp_path / "iter_0000100")
    saved(tmp_path / "iter_0000200")
    (tmp_path / TRACKER).write_text("200")
    return tmp_path


def complaints(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_names():
    assert iteration_name(0) == "iter_0000000"
    assert iteration_name(123) == "iter_0000123"
    assert iteration_name(123456789) == "iter_123456789"
    for iteration in (0, 7, 9999999, 10000000):
        assert iteration_of(iteration_name(iteration)) == iteration
    assert iteration_of("release") == 0
    for other in (
        "iter_123",
        "iter_00000123",
        "iter_",
        "iter_00001_3",
        "iter_\u06612345678",
        "123",
        "",
    ):
        assert iteration_of(other) is None, other
    assert tracker_text("iter_0000123") == "123"
    assert tracker_text("release") == "release"
    with pytest.raises(CheckpointError, match="iteration -1"):
        iteration_name(-1)


def test_hidden_names_are_parsed_back_and_nothing_else_is():
    for name in ("iter_0000123", "release"):
        for kind in ("partial", "replaced", "removed"):
            assert parse_hidden(hidden_name(name, kind, "0af3")) == (name, kind, "0af3")
    for other in (
        "iter_0000123.partial-0af3",
        ".iter_123.partial-0af3",
        ".iter_00000123.partial-0af3",
        ".iter_0000123.other-0af3",
        ".iter_0000123.partial-0af3.lock",
        ".iter_0000123.partial-",
    ):
        assert parse_hidden(other) is None, other


def test_no_directory_and_an_empty_one(tmp_path, caplog):
    for folder in (tmp_path / "nowhere", tmp_path, str(tmp_path)):
        assert list_checkpoints(folder) == ()
        assert latest(folder) is None
        assert find(folder, "iter_0000001") is None
        assert read_tracker(folder) is None
    assert complaints(caplog) == []


def test_a_file_is_no_directory_of_checkpoints(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for look in (list_checkpoints, latest):
        with pytest.raises(CheckpointError, match=r"can't look for checkpoints in .*file: Not a"):
            look(file)


def test_listing(root, caplog):
    saved(root / "release")
    saved(root / "iter_10000000")
    (root / "iter_0000300").mkdir()
    saved(root / hidden_name("iter_0000200", "partial", "ab"))
    # a directory with the final name exists
    saved(root / hidden_name("iter_0000200", "replaced", "ab"))
    saved(root / hidden_name("iter_0000150", "removed", "ab"))
    saved(root / "iter_5")
    (root / "iter_0000400").write_text("a file")
    (root / "tensorboard").mkdir()

    listed = list_checkpoints(root)
    assert [(i.path.name, i.iteration, i.release, i.complete, i.problem) for i in listed] == [
        ("release", 0, True, True, ""),
        ("iter_0000100", 100, False, True, ""),
        (".iter_0000200.partial-ab", 200, False, False, "is an unfinished save"),
        ("iter_0000200", 200, False, True, ""),
        ("iter_0000300", 300, False, False, "has no metadata.json"),
        ("iter_10000000", 10000000, False, True, ""),
    ]
    assert listed[3].size == sum(len(f.read_bytes()) for f in listed[3].path.iterdir())
    assert listed[4].saved_at is None
    os.utime(root / "iter_0000200" / "metadata.json", (1.5e9, 1.5e9))
    again = find(root, "iter_0000200")
    assert again.saved_at == datetime.fromtimestamp(1.5e9, UTC)
    assert latest(root) == again
    assert complaints(caplog) == []


def form_file(data):
    return lambda path: (path / "metadata.json").write_bytes(data)


def in_an_older_format(path):
    (path / "mp_rank_00_000").mkdir()
    (path / "metadata.json").unlink()


@pytest.mark.parametrize(
    ("problem", "damage"),
    [
        ("has no metadata.json", lambda p: (p / "metadata.json").unlink()),
        ("has an empty metadata.json", form_file(b"")),
        ("has a metadata.json that is no JSON", form_file(b"{")),
        ("has a metadata.json that is no JSON", form_file(b"[" * 99999)),
        ("has a metadata.json that is no JSON", form_file(b"\xff\0")),
        ("has a metadata.json that names no sharded_backend", form_file(b"{}")),
        ("has a metadata.json that names no sharded_backend", form_file(b'"sharded_backend"')),
        ("has a metadata.json that is far too large", form_file(b" " * (2 << 20) + b"{}")),
        ("has no .metadata", lambda p: (p / ".metadata").unlink()),
        ("has an empty .metadata", lambda p: (p / ".metadata").write_bytes(b"")),
        ("has no common.pt", lambda p: (p / "common.pt").unlink()),
        ("has no x", lambda p: (p / "integrity.json").write_text('{"files": {"x": "0"}}')),
        ("has an empty common.pt", lambda p: (p / "common.pt").write_bytes(b"")),
        (
            "is in an older format (mp_rank_*), which megapg does not read",
            in_an_older_format,
        ),
    ],
)
def test_an_incomplete_checkpoint_is_marked_and_not_resumed_from(root, caplog, problem, damage):
    damage(root / "iter_0000200")
    assert what_is_missing(root / "iter_0000200") == problem
    assert [(i.iteration, i.complete, i.problem) for i in list_checkpoints(root)] == [
        (100, True, ""),
        (200, False, problem),
    ]
    assert latest(root).iteration == 100
    assert complaints(caplog) == [
        f"{root}: {TRACKER} names iter_0000200, which {problem}; taking the newest complete "
        f"checkpoint, {root / 'iter_0000100'}"
    ]


@pytest.mark.contract
def test_the_format_file_of_the_installed_core_says_whether_common_pt_is_needed(tmp_path):
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    path = saved(tmp_path / "iter_0000001")
    save_config(CheckpointingConfig("torch_dist", 1), str(path))
    form = json.loads((path / "metadata.json").read_text())
    assert what_is_missing(path) == ""
    (path / "common.pt").unlink()
    assert what_is_missing(path) == ("has no common.pt" if "common_backend" in form else "")


@pytest.mark.parametrize("text", ["100", "100\n", " 100 ", "0000100"])
def test_an_intact_tracker_is_obeyed_where_newer_ones_exist(root, caplog, text):
    (root / TRACKER).write_text(text)
    assert latest(root).path == root / "iter_0000100"
    assert complaints(caplog) == []


def test_a_release(root):
    saved(root / "release")
    assert latest(root).iteration == 200
    (root / TRACKER).write_text("release")
    info = latest(root)
    assert (info.path, info.iteration, info.release) == (root / "release", 0, True)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\0\0\0", r"holds '\x00\x00\x00', neither a number nor 'release'"),
        (b"-5", "holds '-5', neither"),
        (b"1_00", "holds '1_00', neither"),
        ("\u0661\u0660\u0660".encode(), "neither a number"),
        (b"iter_0000100", "holds 'iter_0000100', neither"),
        (b"\xff\xfe", "neither a number"),
        (b"7" * 100000, f"{TRACKER}: is far too large"),
        (b"20", "names iter_0000020, which is not there"),
        (b"150", "names iter_0000150, which is not there"),
        (b"300", "names iter_0000300, which has no metadata.json"),
        (b"release", "names release, which is not there"),
        (None, f"there is no {TRACKER}"),
    ],
)
def test_a_torn_or_wrong_tracker(root, caplog, content, complaint):
    (root / "iter_0000300").mkdir()
    (root / TRACKER).unlink()
    if content is not None:
        (root / TRACKER).write_bytes(content)
    assert latest(root).iteration == 200
    [said] = complaints(caplog)
    assert complaint in said
    assert f"taking the newest complete checkpoint, {root / 'iter_0000200'}" in said


def test_a_tracker_without_any_complete_checkpoint(tmp_path, caplog):
    (tmp_path / TRACKER).write_text("5")
    assert latest(tmp_path) is None
    assert "which is not there, and there is no complete checkpoint" in complaints(caplog)[0]


def test_read_tracker(root):
    assert read_tracker(root) == "iter_0000200"
    (root / TRACKER).write_text("what")
    with pytest.raises(BrokenCheckpointError, match=r"holds 'what'.*Write the") as caught:
        read_tracker(root)
    assert caught.value.problems == (f"{TRACKER} holds 'what', neither a number nor 'release'",)


def pending(root, text, *, seconds_before_the_tracker=0):
    file = root / f"{PENDING}ab"
    file.write_text(text)
    then = (root / TRACKER).stat().st_mtime_ns - seconds_before_the_tracker * 10**9
    os.utime(file, ns=(then, then))


def test_a_save_cut_off_before_its_tracker_counts_once_its_directory_has_its_name(root, caplog):
    partial = saved(root / hidden_name("iter_0000300", "partial", "ab"))
    pending(root, "300")
    assert latest(root).iteration == 200
    partial.rename(root / "iter_0000300")
    assert latest(root).iteration == 300
    # A manual roll-back after the save takes precedence.
    (root / TRACKER).write_text("100")
    pending(root, "300", seconds_before_the_tracker=1)
    assert latest(root).iteration == 100
    assert complaints(caplog) == []


def test_a_pending_tracker_does_not_speak_for_an_older_save_of_its_iteration(root, caplog):
    (root / TRACKER).write_text("100")
    saved(root / hidden_name("iter_0000200", "partial", "ab"))
    pending(root, "200")
    assert latest(root).iteration == 100
    assert complaints(caplog) == []


@pytest.mark.parametrize("text", ["", "what", "400"])
def test_a_torn_or_orphaned_pending_tracker_does_not_count(root, caplog, text):
    pending(root, text)
    assert latest(root).iteration == 200
    assert complaints(caplog) == []


def test_a_replaced_checkpoint_stands_in_where_its_final_name_is_missing(root, caplog):
    replaced = root / hidden_name("iter_0000200", "replaced", "ab")
    (root / "iter_0000200").rename(replaced)
    saved(root / hidden_name("iter_0000200", "replaced", "cd"), "older")
    os.utime(root / hidden_name("iter_0000200", "replaced", "cd") / "metadata.json", (1e9, 1e9))
    assert latest(root).path == replaced
    assert [(i.iteration, i.complete, i.path) for i in list_checkpoints(root)] == [
        (100, True, root / "iter_0000100"),
        (200, True, replaced),
    ]
    saved(root / "iter_0000200", "new")
    assert latest(root).path == root / "iter_0000200"
    assert complaints(caplog) == []


def test_a_save_that_ends_while_we_look_is_found(root, monkeypatch):
    (root / "iter_0000200").rename(root / hidden_name("iter_0000200", "replaced", "ab"))

    def replaced(root, name):  # called after the first look at the final name
        saved(root / name, "new")
        shutil.rmtree(root / hidden_name(name, "replaced", "ab"))
        return []

    monkeypatch.setattr(directory, "_replaced", replaced)
    assert find(root, "iter_0000200").complete
