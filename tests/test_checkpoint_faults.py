"""Saves and loads that go wrong, with real ranks and real files.

Ranks are killed all along a save, disks are full or read-only, directories are not shared, ranks
raise, stay away or come with something else, two jobs save into one directory, files are damaged.
Afterwards the newest complete checkpoint loads, and every rank that lives has heard, soon, of whom
and what.
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
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_driver import Forge, Points, disk_points, random_points
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from resuming import RUN, Training, cut, equal, weights

import megapg
from megapg.checkpoint.manifest import verify
from megapg.checkpoint.names import TRACKER, iteration_name
from megapg.checkpoint.publish import ROOT_LOCK
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    UnsafeCheckpointError,
)
from megapg.testing import megatron_on_cpu

pytestmark = pytest.mark.contract

SILENCE = 3.0
"""Seconds after which the ranks of these tests give each other up."""
SOON = 2 * SILENCE + 10
"""By when a rank must have heard: it may wait twice, and this machine may be busy."""
PATIENT = 60.0
"""The timeout where all goes well, or where nobody may wait for it."""
AT_ONCE = 5.0
"""Seconds for word of a rank that says what happened to it."""


@pytest.fixture(scope="module")
def forge():
    with Forge(__name__) as forge:
        yield forge


# ---- what the ranks run ------------------------------------------------------------------------


class Layers(MegatronModule):
    """Two layers of Megatron-core, so that two data-parallel ranks write one each."""

    def __init__(self, pg, width=8):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            use_cpu_initialization=True,
            perform_initialization=False,
        )
        super().__init__(config)
        self.pg = pg
        for name in ("first", "second"):
            layer = ColumnParallelLinear(
                8, width, config=config, init_method=torch.nn.init.zeros_, tp_group=pg.tp
            )
            self.add_module(name, layer)

    def fill(self, mark):
        """Every element another value, the same under every layout, and marked."""
        with torch.no_grad():
            for parameter in self.parameters():
                start = self.pg.rank("tp") * parameter.numel()
                values = torch.arange(start, start + parameter.numel(), dtype=torch.float64)
                parameter.copy_(values.remainder(1000).view_as(parameter) / 1000 + mark)
        return self

    def mark(self):
        """Of which :meth:`fill` all of this is; None if it is a mixture."""
        found = float(next(self.parameters()).detach().flatten()[0]) // 1
        mine = [parameter.detach().clone() for parameter in self.parameters()]
        kept = all(
            torch.equal(a, b) for a, b in zip(mine, self.fill(found).parameters(), strict=True)
        )
        return int(found) if kept else None


def opened(**sizes):
    """Groups that live as long as this process: ranks that are killed don't close sessions."""
    warnings.simplefilter("ignore")
    life = contextlib.ExitStack()
    life.enter_context(megatron_on_cpu())
    session = megapg.session(timeout=PATIENT, **sizes)
    life.enter_context(megapg.published(session.groups))
    opened.lives = life  # or it would end here
    return session.groups


@contextlib.contextmanager
def job(**sizes):
    """Groups that are closed in the end."""
    warnings.simplefilter("ignore")
    with (
        megatron_on_cpu(),
        megapg.session(timeout=PATIENT, **sizes) as session,
        megapg.published(session.groups),
    ):
        yield session.groups


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
    """What came of it, and how long it took."""
    started = time.monotonic()
    try:
        result, error = work(), None
    except Exception as raised:
        result, error = None, raised
    return result, error, time.monotonic() - started


def me():
    return int(os.environ["RANK"])


def go_on(root, sizes, **options):
    """A new job: which iteration it found, which mark is in the weights; it saves the next one."""
    with job(**sizes) as pg:
        model = Layers(pg).fill(9999)
        found = load(root, model).iteration
        mark = model.mark()
        save(root, found + 1, model, **options)
        return found, mark


def at_rest(root):
    """Nothing is left of saves that failed but the lock file, and all checkpoints are whole."""
    assert {entry for entry in os.listdir(root) if entry.startswith(".")} <= {ROOT_LOCK}
    for info in megapg.list_checkpoints(root):
        assert info.complete, info
        assert not verify(info.path).problems
    return True


# ---- ranks that are killed ---------------------------------------------------------------------


def first_saves(root, sizes):
    with job(**sizes) as pg:
        model = Layers(pg)
        save(root, 1, model)
        save(root, 2, model)


def save_and_die(root, sizes, iteration, options, victim, fatal):
    """Save 3; the victim dies at its point. Returns what it passed, and how long it took."""
    pg = opened(**sizes)
    model = Layers(pg)
    dist.barrier()
    points = Points(fatal if me() == victim else None)

    def trial():
        if options.get("asynchronous"):
            threading.setprofile(points)
            megapg_save = save(root, iteration, model, **options)
            threading.setprofile(None)
            return megapg_save.wait()
        with points:
            return save(root, iteration, model, **options).wait()

    _, error, seconds = attempt(trial)
    return points.seen, error, seconds


TP2, DP2 = {"tp": 2}, {}
SAVES = {
    # name: layout, iteration, options; iterations 1 and 2 are there
    "another": (TP2, 3, {"keep": 2}),
    "the same again": (DP2, 2, {}),
    "in the background": (DP2, 3, {"asynchronous": True}),
}


def killed_everywhere(forge, tmp_path, choice, disk, scattered):
    """Victims, points and ends, a few at a time since most of it is waiting."""
    cases = []
    for number, (sizes, iteration, options) in enumerate(SAVES.values()):
        template = tmp_path / f"template {number}"
        forge.results(partial(first_saves, str(template), sizes))
        for victim in (0, 1):
            trial = shutil.copytree(template, tmp_path / f"dry {number} {victim}")
            go = partial(save_and_die, str(trial), sizes, iteration, options, victim)
            seen, error, _ = forge.results(partial(go, None))[victim]
            assert error is None
            points = disk_points(seen)
            points = choice.sample(points, min(disk, len(points)))
            points += random_points(seen, scattered, choice)
            cases += [(template, sizes, iteration, options, victim, point) for point in points]
    for first in range(0, len(cases), 6):
        running = []
        for number, case in enumerate(cases[first : first + 6], start=first):
            template, sizes, iteration, options, victim, point = case
            root = shutil.copytree(template, tmp_path / f"root {number}")
            store = "rank 0" if number % 3 == 0 else "outside"
            go = partial(save_and_die, str(root), sizes, iteration)
            go = partial(go, {**options, "timeout": SILENCE}, victim, point)
            running.append((case, store, root, forge.start(go, store=store)))
        for case, store, root, started in running:
            yield case, store, root, started.ends()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_rank_is_killed_anywhere_in_a_save(forge, tmp_path):
    seed = int(os.environ.get("MEGAPG_TEST_SEED", random.randrange(10**6)))
    print(f"MEGAPG_TEST_SEED={seed}")
    choice = random.Random(seed)
    killed, completed, left = 0, 0, []
    for case, store, root, ends in killed_everywhere(forge, tmp_path, choice, 12, 6):
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
        if error is None:  # then it really was saved
            assert found.iteration == iteration, what
            completed += 1
        left.append((what, root, sizes, found.iteration))
    assert killed >= 60, "too few points were reached"
    assert 0 < completed < killed  # the follower may die, or the leader right at the end
    for first in range(0, len(left), 6):
        some = [
            (what, root, there, forge.start(partial(go_on, str(root), sizes)))
            for what, root, sizes, there in left[first : first + 6]
        ]
        for what, root, there, started in some:
            for end in started.ends():
                assert end.get() == (there, there), what
            assert megapg.latest(root).iteration == there + 1, what
            assert at_rest(root), what


# ---- full disks ----------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(*arguments):
    """Mount something for a while; skip where that is not permitted."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield Path(arguments[-1])
    finally:
        subprocess.run(["umount", "--lazy", arguments[-1]], check=True)


def save_on_a_full_disk(root, free, sizes):
    """Try with so much free space each; then with enough."""
    told = []
    with job(**sizes) as pg:
        model = Layers(pg)
        save(root, 1, model)
        for number, left in enumerate(free):
            if me() == 0:
                disk = os.statvfs(root)
                ballast = disk.f_bavail * disk.f_frsize - left
                Path(root, "ballast").write_bytes(bytes(ballast))
            dist.barrier()
            _, error, seconds = attempt(lambda n=number: save(root, 2 + n, model))
            loaded = load(root, model.fill(9999)).iteration, model.mark()
            dist.barrier()  # before the file of the next round is there
            told.append((error, seconds, loaded))
            if me() == 0:
                Path(root, "ballast").unlink()
            dist.barrier()
        save(root, 100, model)
    return told


def test_the_disk_is_full(forge, tmp_path):
    """Wherever in the save it runs full; in the end there is room for all of it."""
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
                assert isinstance(error, CheckpointSaveError)
                assert "No space left on device" in str(error)
                assert str(root) in str(error)
                assert seconds < AT_ONCE
                assert "No space left on device" in str(list(error.problems.values()))
                blamed |= set(error.problems)
    assert blamed == {0, 1}


def save_with_a_limit(root, limits):
    """One rank can't write files beyond a size. What each rank heard of each limit."""
    told = []
    with job(**DP2) as pg:
        model = Layers(pg, width=4096)
        save(root, 1, model)
        for number, (victim, limit) in enumerate(limits):
            if me() == victim:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            _, error, seconds = attempt(lambda n=number: save(root, 2 + n, model))
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            loaded = load(root, model.fill(9999)).iteration, model.mark()
            told.append((error, seconds, loaded, sorted(os.listdir(root))))
            dist.barrier()
        save(root, 100, model)
    return told


def test_one_rank_cannot_write(forge, tmp_path):
    limits = [(victim, limit) for limit in (0, 2000, 100_000) for victim in (0, 1)]
    told = forge.results(partial(save_with_a_limit, str(tmp_path), limits))
    for (victim, _), *both in zip(limits, *told, strict=True):
        for error, seconds, loaded, there in both:
            assert isinstance(error, CheckpointSaveError)
            assert error.problems.keys() == {victim}
            assert f"rank {victim}" in str(error)
            assert "File too large" in str(error)
            assert str(tmp_path) in str(error)
            assert seconds < AT_ONCE
            assert loaded == (1, 1)
            assert there == [ROOT_LOCK, "iter_0000001", TRACKER]
    assert megapg.latest(tmp_path).iteration == 100
    assert at_rest(tmp_path)


# ---- the directory -------------------------------------------------------------------------------


def save_where_it_cannot(places):
    """Of each place what this rank heard; then a save that works, with the same groups."""
    told = []
    with job(**DP2) as pg:
        model = Layers(pg)
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
            assert isinstance(error, CheckpointSaveError)
            assert reason in str(error)
            assert str(place) in str(error)
            assert error.problems.keys() == {0}  # who begins it
            assert seconds < AT_ONCE


def save_on_two_hosts(root):
    """What rank 1 mounts, rank 0 does not see."""
    with job(**DP2) as pg:
        model = Layers(pg)
        if me() == 1:
            unshared = ctypes.CDLL(None, use_errno=True).unshare(0x00020000)  # mounts of our own
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
    with mounted("--bind", str(tmp_path), str(tmp_path)):  # skips where this is not permitted
        pass
    root = tmp_path / "checkpoints"
    root.mkdir()
    for error, seconds in forge.results(partial(save_on_two_hosts, str(root))):
        assert isinstance(error, CheckpointSaveError)
        assert error.problems.keys() == {1}
        assert "does not see it" in str(error)
        assert "file system that all hosts share" in str(error)
        assert seconds < AT_ONCE
    assert at_rest(root)
    assert megapg.latest(root).iteration == 2


TORN = {
    # what the tracker holds: which checkpoint is loaded
    b"": 12,
    b"1": 12,  # of "12": names one that is not there
    b"\x00\x00": 12,
    b"12\n\n": 12,
    b"twelve": 12,
    b"11": 11,  # rolled back on purpose
    b"99999": 12,
    b"9" * 5000: 12,
    b"release": 12,
    b"-3": 12,
}


def load_with_torn_trackers(root):
    found = []
    with job(**DP2) as pg:
        model = Layers(pg)
        for iteration in (10, 11, 12):
            save(root, iteration, model)
        for content in [*TORN, None]:
            dist.barrier()
            if me() == 0:
                if content is None:
                    Path(root, TRACKER).unlink()
                else:
                    Path(root, TRACKER).write_bytes(content)
            dist.barrier()
            loaded = load(root, model.fill(9999))
            found.append((loaded.iteration, model.mark()))
        save(root, 13, model)
    return found


def test_a_torn_tracker(forge, tmp_path):
    for found in forge.results(partial(load_with_torn_trackers, str(tmp_path))):
        assert found == [(iteration, iteration) for iteration in [*TORN.values(), 12]]
    assert megapg.latest(tmp_path).iteration == 13
    assert (tmp_path / TRACKER).read_text() == "13"
    assert at_rest(tmp_path)


# ---- two jobs ------------------------------------------------------------------------------------

ROUNDS = 12


def save_rounds(root, first, step, keep, start):
    """This job's marks are even or odd, so that a mixture would show."""
    with job(**DP2) as pg:
        model = Layers(pg)
        while time.time() < start:
            time.sleep(0.001)
        for number in range(ROUNDS):
            iteration = first + step * number
            megapg.save_checkpoint(
                root,
                iteration,
                model=model.fill(10 * iteration + first),
                pg_collection=pg,
                keep=keep,
                extra={"job": first, "round": number},
                timeout=PATIENT,
            )


def load_each(root, iterations):
    with job(**DP2) as pg:
        model = Layers(pg)
        loaded = [load(root, model.fill(9999), iteration=i) for i in iterations[:0]]
        for iteration in iterations:
            loaded = load(root, model.fill(9999), iteration=iteration)
            assert model.mark() == 10 * iteration + loaded.extra["job"]
    return True


@pytest.mark.parametrize(
    ("step", "others", "keep"),
    [(1, 1, None), (2, 2, None), (2, 2, 2), (0, 0, 1)],
    ids=["overlapping", "different", "different, keep", "the same, keep"],
)
def test_two_jobs_save_into_one_directory(forge, tmp_path, step, others, keep):
    start = time.time() + 2
    jobs = [
        forge.start(partial(save_rounds, str(tmp_path), first, each, keep, start))
        for first, each in ((1, step), (2, others))
    ]
    for each in jobs:
        for end in each.ends():
            end.get()
    assert at_rest(tmp_path)
    found = [info.iteration for info in megapg.list_checkpoints(tmp_path)]
    saved = {first + step * number for first in (1, 2) for number in range(ROUNDS)}
    if keep is None:
        assert set(found) == saved
    else:
        assert len(found) >= keep
        assert saved.issuperset(found)
        assert max(found) == max(saved)
    assert megapg.latest(tmp_path).iteration in found
    assert all(forge.results(partial(load_each, str(tmp_path), found)))
