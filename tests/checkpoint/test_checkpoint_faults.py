"""Failing saves and loads, with real ranks and real files.

Ranks are killed at many points of a save, disks are full or read-only, directories are not shared.
Ranks raise, do not call, or call with other arguments. Two jobs save into one directory, and files
are damaged. Afterwards the newest complete checkpoint loads. Every surviving rank soon gets an
error that names the failed rank and the reason.
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import resuming
import torch.distributed as dist
from asking import me
from damage import mounted
from fault_driver import Forge, Points, disk_points, random_points
from resuming import RUN, Training, cut, published_groups
from steps import Steps
from two_layers import Layers

import megapg
from megapg.checkpoint import optimizer_pieces as pieces
from megapg.checkpoint import save_write
from megapg.checkpoint.commit import ROOT_LOCK
from megapg.checkpoint.verify import verify
from megapg.errors import (
    CheckpointError,
    CheckpointSaveError,
)
from megapg.testing import megatron_on_cpu

pytestmark = pytest.mark.contract

SILENCE = 4.0
"""Seconds after which the ranks of these tests stop waiting for each other."""
SOON = 2 * SILENCE + 20
"""Deadline for an error: a rank may wait twice, and this machine may be busy."""
PATIENT = 60.0
"""Timeout for cases without a failure, and for cases in which no rank may wait for it."""
AT_A_TIME = 8
"""Number of jobs that run at the same time; most of their time is waiting."""
AT_ONCE = 20.0
"""Deadline in seconds for an error that the failed rank itself reports."""


@pytest.fixture(scope="module")
def forge():
    with Forge(__name__) as forge:
        yield forge


# ---- functions that the ranks run --------------------------------------------------------------


def opened(**sizes):
    """Open groups for the life of this process: killed ranks don't close sessions."""
    warnings.simplefilter("ignore")
    life = contextlib.ExitStack()
    life.enter_context(megatron_on_cpu())
    session = megapg.session(timeout=PATIENT, **sizes)
    life.enter_context(megapg.published(session.groups))
    opened.lives = life, session  # without this reference the session would end here
    return session.groups


@contextlib.contextmanager
def layers(width=8, **sizes):
    """Yield layers on groups that are closed at the end."""
    with published_groups(**sizes) as pg:
        yield Layers(pg, width)


def save(root, iteration, model, timeout=PATIENT, **options):
    model.fill(iteration)
    return megapg.save_checkpoint(
        root, iteration, model=model, pg_collection=model.pg, timeout=timeout, **options
    )


def load(root, model, timeout=PATIENT, **options):
    return megapg.load_checkpoint(
        root, model=model, pg_collection=model.pg, timeout=timeout, **options
    )


def attempt(work):
    """Return the result, the error and the seconds that ``work`` took."""
    started = time.monotonic()
    try:
        result, error = work(), None
    except Exception as raised:
        result, error = None, raised
    return result, error, time.monotonic() - started


def go_on(root, sizes, **options):
    """Resume as a new job and save once; return the iteration found and the mark of its weights."""
    with published_groups(**sizes) as pg:
        model = Layers(pg).fill(9999)
        found = load(root, model).iteration
        mark = model.mark()
        save(root, found + 1, model, **options)
        return found, mark


def check_said(error, *texts, blamed, seconds=0.0):
    """Check that the error is a prompt CheckpointSaveError with these texts and failed ranks."""
    assert isinstance(error, CheckpointSaveError), error
    for text in texts:
        assert text in str(error)
    assert error.problems.keys() == blamed
    assert seconds < AT_ONCE


def at_rest(root):
    """Check that failed saves left only the lock file, and that all checkpoints are whole."""
    assert {entry for entry in os.listdir(root) if entry.startswith(".")} <= {ROOT_LOCK}
    for info in megapg.list_checkpoints(root):
        assert info.complete, info
        assert not verify(info.path).problems
    return True


# ---- killed ranks ------------------------------------------------------------------------------


def first_saves(root, sizes):
    with layers(**sizes) as model:
        save(root, 1, model)
        save(root, 2, model)


def save_and_die(root, sizes, iteration, options, victim, fatal):
    """Save with a victim that dies at a point; return the points, the error and the seconds."""
    # Gloo connects at the first collective, and waits this long for a rank that is already dead.
    seconds = PATIENT if fatal is None else SILENCE
    pg = opened(**sizes, collective_timeout=timedelta(seconds=seconds))
    model = Layers(pg).fill(iteration + NEW)
    options = {"model": model, "pg_collection": pg, "timeout": PATIENT, **options}
    dist.barrier()
    points = Points(fatal if me() == victim else None)

    def trial():
        if options.get("asynchronous"):
            threading.setprofile(points)
            begun = megapg.save_checkpoint(root, iteration, **options)
            threading.setprofile(None)
            return begun.wait()
        with points:
            return megapg.save_checkpoint(root, iteration, **options).wait()

    _, error, seconds = attempt(trial)
    return points.seen, error, seconds


TP2, DP2 = {"tp": 2}, {}
NEW = 100
"""Added to the mark in saves during which a rank is killed."""
SAVES = {
    # name: layout, iteration, options; iterations 1 and 2 already exist
    "another": (TP2, 3, {"keep": 2}),
    "the same again": (DP2, 2, {}),
    "in the background": (DP2, 3, {"asynchronous": True}),
}


def killed_everywhere(forge, tmp_path, choice, disk, scattered):
    """Kill every victim at sampled points, a few jobs at a time because they mostly wait."""
    cases = []
    for number, (sizes, iteration, options) in enumerate(SAVES.values()):
        template = tmp_path / f"template {number}"
        forge.results(partial(first_saves, str(template), sizes))
        for victim in (0, 1):
            trial = shutil.copytree(template, tmp_path / f"dry {number} {victim}")
            go = partial(save_and_die, str(trial), sizes, iteration, options, victim)
            seen, error, _ = forge.results(partial(go, None))[victim]
            assert error is None
            changes = disk_points(seen)
            points = [point for point in changes if point[2] in ("rename", "replace")]
            others = [point for point in changes if point not in points]
            points += choice.sample(others, min(disk, len(others)))
            points += random_points(seen, scattered, choice)
            # These points come after all writes, just before the leader's announcement.
            points += [(*p, seen[p]) for p in seen if p[2:] == ("announce", "in")]
            cases += [(template, sizes, iteration, options, victim, point) for point in points]
    for first in range(0, len(cases), AT_A_TIME):
        running = []
        for number, case in enumerate(cases[first : first + AT_A_TIME], start=first):
            template, sizes, iteration, options, victim, point = case
            root = shutil.copytree(template, tmp_path / f"root {number}")
            store = "rank 0" if number % 3 == 0 else "outside"
            go = partial(save_and_die, str(root), sizes, iteration)
            go = partial(go, {**options, "timeout": SILENCE}, victim, point)
            running.append((case, store, root, forge.start(go, store=store)))
        for case, store, root, started in running:
            yield case, store, root, started.ends()


@pytest.mark.slow
@pytest.mark.timeout(600)  # sixty jobs, each of which waits for a dead rank
def test_a_rank_is_killed_anywhere_in_a_save(forge, tmp_path):
    seed = int(os.environ.get("MEGAPG_TEST_SEED", random.randrange(10**6)))
    print(f"MEGAPG_TEST_SEED={seed}")
    choice = random.Random(seed)
    killed, completed, left = 0, 0, []
    for case, store, root, ends in killed_everywhere(forge, tmp_path, choice, 6, 5):
        _, sizes, iteration, options, victim, point = case
        what = f"seed {seed}: rank {victim} at {point}, store {store}, {iteration} {options}"
        dead, survivor = ends[victim], ends[1 - victim]
        assert not survivor.signal, f"{what}: {survivor.stack}"
        _, error, seconds = survivor.get()
        assert seconds < SOON, what
        if dead.signal:
            assert dead.signal == signal.SIGKILL, what
            killed += 1
        assert error is None or isinstance(error, CheckpointSaveError), f"{what}: {error!r}"
        found = megapg.latest(root)
        assert found.iteration in (2, iteration), what
        assert not verify(found.path).problems, what
        if error is None:  # the save is complete
            assert found.iteration == iteration, what
            completed += 1
        marks = {iteration + NEW} if found.iteration == 3 or error is None else {2, 2 + NEW}
        left.append((what, root, sizes, found.iteration, marks))
    assert killed >= 50, "too few points were reached"
    assert 0 < completed < killed  # the follower may die, or the leader at the very end
    for first in range(0, len(left), AT_A_TIME):
        some = [
            (what, root, there, marks, forge.start(partial(go_on, str(root), sizes)))
            for what, root, sizes, there, marks in left[first : first + AT_A_TIME]
        ]
        for what, root, there, marks, started in some:
            loaded = {end.get() for end in started.ends()}
            assert len(loaded) == 1, what
            assert loaded <= {(there, mark) for mark in marks}, what
            assert megapg.latest(root).iteration == there + 1, what
            assert at_rest(root), what


def die_in_a_collective(root, victim, fatal):
    """Kill a rank in a collective of a save on four ranks.

    Each pair of ranks has its own collectives. The optimizer state has to be gathered, which is
    rarely needed.
    """
    pg = opened(**TP2, collective_timeout=timedelta(seconds=60))
    training = Training(cut(RUN, tp=2), pg)
    training.steps(0, 1)
    training.save(root, 1)
    points = Points(fatal if me() == victim else None)
    with mock.patch.object(pieces, "can_be_cut", return_value=False), points:
        _, error, seconds = attempt(lambda: training.save(root, 2, timeout=SILENCE))
    return points.seen, error, seconds


@pytest.mark.slow
def test_a_rank_is_killed_where_the_others_are_in_a_collective(forge, tmp_path):
    go = partial(die_in_a_collective, str(tmp_path / "dry"), 3)
    seen, error, _ = forge.results(partial(go, None), 4)[3]
    assert error is None
    inside = {place for place in seen if place[2:] == ("all_gather", "in")}
    assert len(inside) >= 2  # the optimizer's collectives and those of the tensor names
    for number, place in enumerate(sorted(inside)):
        root = tmp_path / str(number)
        go = partial(die_in_a_collective, str(root), 3, (*place, 1))
        ends = forge.run(go, 4)
        assert ends[3].signal == signal.SIGKILL
        for end in ends[:3]:
            _, error, seconds = end.get()
            assert isinstance(error, CheckpointSaveError), place
            assert seconds < SOON
        assert megapg.latest(root).iteration == 1


# ---- full disks ----------------------------------------------------------------------------------


def save_on_a_full_disk(root, free, sizes):
    """Save with each amount of free space, then with enough."""
    told = []
    with layers(**sizes) as model:
        save(root, 1, model)
        for number, left in enumerate(free):
            if me() == 0:
                disk = os.statvfs(root)
                ballast = disk.f_bavail * disk.f_frsize - left
                Path(root, "ballast").write_bytes(bytes(ballast))
            dist.barrier()
            _, error, seconds = attempt(lambda n=number: save(root, 2 + n, model))
            loaded = load(root, model.fill(9999)).iteration, model.mark()
            dist.barrier()  # before the next round writes its file
            told.append((error, seconds, loaded))
            if me() == 0:
                Path(root, "ballast").unlink()
            dist.barrier()
        save(root, 100, model)
    return told


def test_the_disk_is_full(forge, tmp_path):
    """The disk may run full at any point of the save; the last save has enough space."""
    free = [4096 * pages for pages in range(0, 46, 3)]
    with mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)) as root:
        told = forge.results(partial(save_on_a_full_disk, str(root), free, TP2))
        assert megapg.latest(root).iteration == 100
        assert at_rest(root)
    failed = [error is not None for error, *_ in told[0]]
    assert failed == sorted(failed, reverse=True)
    assert any(failed)
    assert not all(failed)
    blamed, newest = set(), 1
    for number, both in enumerate(zip(*told, strict=True)):
        newest = newest if failed[number] else 2 + number
        for error, seconds, loaded in both:
            assert loaded == (newest, newest)
            assert (error is not None) == failed[number]
            if error is not None:
                said = "No space left on device"
                check_said(error, said, str(root), blamed=set(error.problems), seconds=seconds)
                assert said in str(list(error.problems.values()))
                blamed |= set(error.problems)
    assert blamed == {0, 1}


def save_with_a_late_rank(root):
    """Rank 0 fails and cleans up before rank 1 has looked at the directory."""

    def late(frame, event, _):
        if event == "call" and frame.f_code.co_name == "_check_shared":
            time.sleep(1.5)

    with layers() as model:
        sys.setprofile(late if me() == 1 else None)
        with no_room(0):
            _, error, _ = attempt(lambda: save(root, 1, model))
        sys.setprofile(None)
        save(root, 2, model)
    return error


def test_a_late_rank_hears_the_reason(forge, tmp_path):
    for error in forge.results(partial(save_with_a_late_rank, str(tmp_path))):
        check_said(error, "File too large", blamed={0})  # not an error about a missing directory
    assert at_rest(tmp_path)


# ---- the root directory --------------------------------------------------------------------------


def save_where_it_cannot(places):
    """Return this rank's error for each place; then save successfully with the same groups."""
    told = []
    with layers() as model:
        for place in places:
            told.append(attempt(partial(save, place, 1, model))[1:])
        save(places[-1] + " well", 1, model)
    return told


def test_the_directory_cannot_be_written(forge, tmp_path):
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "inside").mkdir()
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    with mounted("-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(sealed)):
        places = [sealed, sealed / "new", Path("/proc/checkpoints"), tmp_path / "file"]
        told = forge.results(partial(save_where_it_cannot, [str(place) for place in places]))
    reasons = ["Read-only file system"] * 2 + ["No such file or directory", "File exists"]
    for place, reason, *both in zip(places, reasons, *told, strict=True):
        for error, seconds in both:
            # rank 0 creates the directory
            check_said(error, reason, str(place), blamed={0}, seconds=seconds)


def save_on_two_hosts(root):
    """Save to a directory that rank 1 mounts and rank 0 does not see."""
    with layers() as model:
        if me() == 1:
            # a private mount namespace
            unshared = ctypes.CDLL(None, use_errno=True).unshare(0x00020000)
            assert unshared == 0, os.strerror(ctypes.get_errno())
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
        dist.barrier()
        first = attempt(partial(save, root, 1, model))[1:]
        if me() == 1:
            subprocess.run(["umount", root], check=True)
        dist.barrier()
        save(root, 2, model)
    return first


def test_the_directory_is_not_shared(forge, tmp_path):
    # skips the test if mounting is not permitted
    with mounted("--bind", str(tmp_path), str(tmp_path)):
        pass
    root = tmp_path / "checkpoints"
    root.mkdir()
    for error, seconds in forge.results(partial(save_on_two_hosts, str(root))):
        said = "does not see it", "file system that all hosts share"
        check_said(error, *said, blamed={1}, seconds=seconds)
    assert at_rest(root)
    assert megapg.latest(root).iteration == 2


@pytest.mark.parametrize(("content", "seen"), [(None, "none of it"), (b"abc", "3 bytes")])
def test_a_file_is_shorter_than_its_rank_wrote_it(tmp_path, content, seen):
    shard = tmp_path / "__1_0.distcp"
    if content is not None:
        shard.write_bytes(content)
    with pytest.raises(CheckpointSaveError, match=f"rank 1 wrote __1_0.distcp with 5 .* {seen}"):
        save_write._check_arrived(shard, 5, 1)
    shard.write_bytes(b"abcde")
    save_write._check_arrived(shard, 5, 1)


# ---- ranks that raise, do not call, or call with other arguments ---------------------------------


class Broken:
    """A proxy of an object that raises when one method is called."""

    def __init__(self, whole, method):
        self._whole, self._method = whole, method

    def __getattr__(self, name):
        if name == self._method:
            raise ZeroDivisionError(f"{name} is broken")
        return getattr(self._whole, name)


class Scheduler:
    def state_dict(self):
        return {"num_steps": 1}


@contextlib.contextmanager
def broken_model(model):
    def raises(*_, **__):
        raise ZeroDivisionError("sharded_state_dict is broken")

    model.sharded_state_dict = raises
    yield
    del model.sharded_state_dict


def broken_save(root, fault, victims, training):
    """Save iteration 2 with this fault on the victims."""
    options = {
        "model": training.chunks,
        "optimizer": training.optimizer,
        "scheduler": Scheduler(),
        "extra": {"note": "plain"},
        "pg_collection": training.pg,
        "timeout": PATIENT,
    }
    iteration, healing = 2, contextlib.nullcontext()
    if me() in victims:
        match fault:
            case "model":
                healing = broken_model(training.chunks[0].module)
            case "iteration":
                iteration = 3
            case "directory":
                root = f"{root} elsewhere"
            case _:
                options |= {
                    "optimizer": {"optimizer": Broken(training.optimizer, "sharded_state_dict")},
                    "scheduler": {"scheduler": Broken(Scheduler(), "state_dict")},
                    "no optimizer": {"optimizer": None},
                    "keep": {"keep": 0},
                    "no model": {"model": []},
                    "lambda": {"extra": {"note": lambda: None}},
                    "class": {"args": {"scheduler": Scheduler()}},
                    "taken": {"extra": {"iteration": 7}},
                    "rng_layout": {"rng_layout": "both of them"},
                }[fault]
    with healing:
        return attempt(lambda: megapg.save_checkpoint(root, iteration, **options))[1:]


RAISING = [
    # fault, ranks, exception on these ranks, text of the error on the others
    ("model", {0}, ZeroDivisionError, "sharded_state_dict is broken"),
    ("model", {2}, ZeroDivisionError, "sharded_state_dict is broken"),
    ("scheduler", {2}, ZeroDivisionError, "state_dict is broken"),
    ("keep", {1}, CheckpointError, "keep=0"),
    ("no model", {0}, CheckpointError, "at least one chunk"),
    ("taken", {2}, CheckpointError, "choose other names"),
    ("rng_layout", {1}, CheckpointError, "both of them"),
    ("lambda", {0}, CheckpointSaveError, "can't be saved"),
    ("class", {0}, CheckpointSaveError, "can't be saved so that it loads safely"),
    ("iteration", {1}, CheckpointSaveError, "iteration is 2 on ranks 0, 2; 3 on rank 1"),
    ("directory", {2}, CheckpointSaveError, " elsewhere on rank 2"),
    ("no optimizer", {0}, CheckpointSaveError, "optimizer is none on rank 0; given on ranks 1, 2"),
]


def save_with_faults(root):
    """Try all faults with the same groups, which must stay usable."""
    told = []
    with resuming.training(RUN) as training:
        training.steps(0, 1)
        training.save(root, 1)
        for fault, victims, *_ in RAISING:
            told.append(broken_save(root, fault, victims, training))
            dist.barrier()
        training.save(root, 2)
        before = training.digest()
        training.steps(1, 2)
        loaded = training.load(root).iteration, training.digest() == before
    return told, loaded


def test_a_rank_that_raises(forge, tmp_path):
    root = tmp_path / "here"
    ranks = forge.results(partial(save_with_faults, str(root)), 3)
    for number, (fault, victims, kind, text) in enumerate(RAISING):
        for rank, (told, _) in enumerate(ranks):
            error, seconds = told[number]
            what = f"{fault}, rank {rank}: {error!r}"
            together = fault in ("iteration", "directory", "no optimizer")
            if rank in victims and not together:
                assert isinstance(error, kind), what
            else:
                assert isinstance(error, CheckpointSaveError), what
                if not together:
                    assert error.problems.keys() == victims, what
                    assert f"rank {min(victims)}: " in str(error), what
            assert text in str(error), what
            assert seconds < AT_ONCE, what
    assert [loaded for _, loaded in ranks] == [(2, True)] * 3
    assert [info.iteration for info in megapg.list_checkpoints(root)] == [1, 2]
    assert at_rest(root)
    assert not Path(f"{root} elsewhere").exists()


def save_in_collectives(root):
    steps = Steps()
    with resuming.training(RUN) as training:
        training.steps(0, 1)
        training.save(root, 1)
        for group in vars(training.pg).values():
            if isinstance(group, dist.ProcessGroup):
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=SILENCE), group)
        # The optimizer state has to be gathered, so every rank takes part.
        with mock.patch.object(pieces, "can_be_cut", return_value=False):
            told = broken_save(root, "optimizer", {1}, training)
        steps.say("over")
        # the collective timeout must free the others, not the end of this rank
        steps.hear("over", range(3))
        raise told[0]


def test_a_rank_that_raises_where_the_others_are_in_a_collective(forge, tmp_path):
    """The store can't interrupt a collective; the timeout of collectives does."""
    ends = forge.run(partial(save_in_collectives, str(tmp_path)), 3)
    assert isinstance(ends[1].error, ZeroDivisionError)
    for end in (ends[0], ends[2]):
        check_said(end.error, "sharded_state_dict is broken", blamed={1})
    assert megapg.latest(tmp_path).iteration == 1
    assert at_rest(tmp_path)


def save_without(root, absent):
    """One rank does not call save; in a second job it ends before the save."""
    with layers() as model:
        save(root, 1, model)
        told = None
        if me() != absent:
            told = attempt(partial(save, root, 2, model, timeout=SILENCE))[1:]
        dist.barrier()
        save(root, 3, model)
    pg = opened(**DP2)
    model = Layers(pg)
    if me() == absent:
        raise ZeroDivisionError("before the save")
    return told, attempt(partial(save, root, 4, model, timeout=SILENCE))[1:]


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_stays_away(forge, tmp_path, absent):
    ends = forge.run(partial(save_without, str(tmp_path), absent), 3)
    assert isinstance(ends[absent].error, ZeroDivisionError), ends[absent]
    rounds = zip(*(end.get() for rank, end in enumerate(ends) if rank != absent), strict=True)
    for both in rounds:
        for error, seconds in both:
            check_said(error, f"rank {absent} ", blamed={absent})
            assert seconds < SOON
        # The first rank to arrive waits the whole time and tells a rank that arrives later.
        assert max(seconds for _, seconds in both) >= SILENCE
    assert megapg.latest(tmp_path).iteration == 3
    assert at_rest(tmp_path)


# ---- in the background ---------------------------------------------------------------------------


@contextlib.contextmanager
def another_job_holds(root):
    """Hold the lock of the directory, so that no save makes progress there."""
    Path(root).mkdir(exist_ok=True)
    dist.barrier()
    with open(Path(root, ROOT_LOCK), "ab") as file:
        if me() == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        yield file


def let_go_in(file, seconds):
    """Release the lock later; return a function that is True after the release."""
    released = threading.Event()

    def release():
        released.set()
        fcntl.flock(file, fcntl.LOCK_UN)

    threading.Timer(seconds, release).start()
    return lambda: me() != 0 or released.is_set()


@contextlib.contextmanager
def no_room(rank):
    """Keep this rank from writing more than a few bytes."""
    if me() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def over(save):
    """Wait until the save has ended, without collecting its result."""
    while not save.done:
        time.sleep(0.01)


def train_while_saving(root):
    with layers(width=4096) as model:
        with another_job_holds(root) as lock:
            first = save(root, 1, model, asynchronous=True)
            for parameter in model.parameters():  # one step
                parameter.data.add_(1000)
                dist.all_reduce(parameter.data, group=model.pg.dp)
            assert not first.done
            with pytest.raises(TimeoutError, match="iteration 1"):
                first.wait(0.1)
            assert megapg.latest(root) is None

            released = let_go_in(lock, 1.0)
            second = save(root, 2, model, asynchronous=True)
            assert released()  # one save at a time
            assert first.done
            assert first.wait().iteration == 1
        second.wait()
        with another_job_holds(root) as lock:
            both = [save(root, n, model, asynchronous=True, in_flight=2) for n in (3, 4)]
            assert [each.done for each in both] == [False, False]
            released = let_go_in(lock, 1.0)
            both.append(save(root, 5, model, asynchronous=True, in_flight=2))
            assert released()
            assert both[0].done
        assert [each.wait().iteration for each in both] == [3, 4, 5]
        with another_job_holds(root) as lock:
            save(root, 6, model, asynchronous=True)
            released = let_go_in(lock, 1.0)
            save(root, 7, model)
            assert released()
        for iteration in range(1, 8):
            assert load(root, model.fill(9999), iteration=iteration).iteration == iteration
            assert model.mark() == iteration
    return True


def test_training_goes_on_during_a_save(forge, tmp_path):
    assert all(forge.results(partial(train_while_saving, str(tmp_path / "here"))))
    assert len(megapg.list_checkpoints(tmp_path / "here")) == 7
    assert at_rest(tmp_path / "here")


def hear_of_failures(root):
    """Return the errors of the calls that report failed background saves."""
    heard = {}

    def failed(model, victim):
        with no_room(victim):
            found = save(root, 2, model, timeout=PATIENT, asynchronous=True)
            over(found)
        dist.barrier()
        return found

    with layers() as model:
        save(root, 1, model)
        for victim in (0, 1):
            found = failed(model, victim)
            heard["wait", victim] = attempt(found.wait)[1]
            # a second wait raises again
            assert isinstance(attempt(found.wait)[1], CheckpointSaveError)
            load(root, model)
            failed(model, victim)
            heard["load", victim] = attempt(lambda: load(root, model))[1]
            assert load(root, model).iteration == 1
            failed(model, victim)
            heard["save", victim] = attempt(lambda: save(root, 3, model))[1]
            failed(model, victim)
            heard["background", victim] = attempt(
                lambda: save(root, 3, model, asynchronous=True, in_flight=2)
            )[1]
        failed(model, 1).cancel()  # too late to cancel
        heard["save", "after"] = attempt(lambda: save(root, 3, model))[1]
        assert load(root, model).iteration == 1

    def close(body):
        session = megapg.session(timeout=PATIENT)
        with megatron_on_cpu(), megapg.published(session.groups):
            body(Layers(session.groups))
        _, error, _ = attempt(session.close)
        assert session.closed
        session.close()
        return error

    heard["close", 1] = close(lambda model: failed(model, 1))

    def heard_already(model):
        assert attempt(failed(model, 1).wait)[1]

    assert close(heard_already) is None
    return heard


def test_an_error_in_the_background_is_heard_once(forge, tmp_path):
    for heard in forge.results(partial(hear_of_failures, str(tmp_path))):
        assert len(heard) == 10
        for (_, victim), error in heard.items():
            blamed = {victim if victim != "after" else 1}
            check_said(error, "File too large", "saving iteration 2 to", blamed=blamed)
    assert megapg.latest(tmp_path).iteration == 1
    assert at_rest(tmp_path)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    @classmethod
    def of_megapg(cls):
        log, lines = logging.getLogger("megapg"), cls()
        log.addHandler(lines)
        log.setLevel(logging.INFO)
        return lines.lines


def close_while_saving(root):
    lines = Lines.of_megapg()
    with layers() as model:
        with another_job_holds(root) as lock:
            still = os.dup(lock.fileno())
            found = save(root, 1, model, asynchronous=True)
        waiting = not found.done
        released = let_go_in(still, 1.0)
    return waiting and released() and found.done, lines


def cut_short(root, how):
    """Cancel a background save of 128 MB on one rank, or raise in that rank's session."""
    lines = Lines.of_megapg()
    found = None

    def body():
        nonlocal found
        with layers(width=2 * 2**20) as model:
            small = Layers(model.pg)
            save(root, 1, small)
            found = save(root, 2, model, asynchronous=True)
            if me() == 1 and how == "body":
                raise ZeroDivisionError("in the body")
            if me() == 1:
                found.cancel()
            error = attempt(found.wait)[1]
            if how == "cancel":
                load(root, small)
                save(root, 3, small)
            if error is not None:
                raise error

    error = attempt(body)[1]
    return error, attempt(found.wait)[1], lines


def test_a_closing_session_waits(forge, tmp_path):
    for done, lines in forge.results(partial(close_while_saving, str(tmp_path))):
        assert done
        assert any("waiting for the checkpoint of iteration 1" in line for line in lines)
    assert megapg.latest(tmp_path).iteration == 1
    assert at_rest(tmp_path)


def test_a_save_is_called_off(forge, tmp_path):
    for error, waited, _ in forge.results(partial(cut_short, str(tmp_path), "cancel")):
        for each in (error, waited):
            check_said(each, "called off", blamed={1})
    assert [info.iteration for info in megapg.list_checkpoints(tmp_path)] == [1, 3]
    assert at_rest(tmp_path)


def test_a_session_that_fails_calls_its_saves_off(forge, tmp_path):
    ranks = forge.results(partial(cut_short, str(tmp_path), "body"))
    assert isinstance(ranks[1][0], ZeroDivisionError)
    assert any("calling off the checkpoint of iteration 2" in line for line in ranks[1][2])
    for error in (ranks[0][0], ranks[0][1], ranks[1][1]):
        check_said(error, "called off", blamed={1})
    assert [info.iteration for info in megapg.list_checkpoints(tmp_path)] == [1]
    assert at_rest(tmp_path)


# ---- failing loads -------------------------------------------------------------------------------


def load_where_one_rank_raises(root):
    with resuming.training(RUN, collective_timeout=timedelta(seconds=PATIENT)) as training:
        training.steps(0, 1)
        training.save(root, 1)
        before = training.digest()
        if me() == 1:
            training.chunks[0].module.load_state_dict = None  # not callable
        _, error, seconds = attempt(partial(training.load, root))
        if me() == 1:
            del training.chunks[0].module.load_state_dict
        training.load(root)
        again = training.digest() == before
    return error, seconds, again


def test_a_rank_that_raises_while_it_loads(forge, tmp_path):
    """The other ranks do not hang in the optimizer's collectives."""
    well, raised = forge.results(partial(load_where_one_rank_raises, str(tmp_path)))
    assert type(raised[0]) is TypeError
    assert type(well[0]) is CheckpointError
    assert "rank 1: TypeError" in str(well[0])
    for _, seconds, again in (well, raised):
        assert seconds < AT_ONCE
        assert again
