"""Options of a save and a load other than the path and the iteration."""

import logging
import os
import shutil
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import steps
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from resuming import RUN, Schedule, Training, distributed, published_groups, training

import megapg
from megapg.checkpoint.commit import Partial
from megapg.checkpoint.contents import read_contents
from megapg.checkpoint.load_steps import _RANK_EXTRA, _rank_extra
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    RngStateWarning,
)
from megapg.layout import ParallelLayout

pytestmark = pytest.mark.contract

# -- how long ranks wait for each other ------------------------------------------------------------


def patience(root):
    """Rank 1 does not call; return the seconds after which each call of rank 0 gave up."""
    told = []
    steps.Steps().together()
    with published_groups(tp=2, timeout=4) as pg:
        job = Training(replace(RUN, tp=2), pg)
        job.save(root, 1)
        calls = [partial(job.save, root, 2), partial(job.load, root)]
        for call in calls if dist.get_rank() == 0 else []:
            started = time.monotonic()
            with pytest.raises(CheckpointError, match="rank 1"):
                call(timeout=None)
            told.append(time.monotonic() - started)
        dist.barrier()
        job.let_go()
    return told


def test_the_sessions_timeout_is_that_of_its_checkpoints(tmp_path):
    told, _ = distributed(partial(patience, str(tmp_path)), 2)
    assert len(told) == 2
    assert all(4 <= seconds < 60 for seconds in told)


def wrong_patience(root):
    """Rank 1 passes an invalid timeout: rank 0 gets the reason long before its own timeout."""
    me, steps_taken = int(os.environ["RANK"]), steps.Steps()
    with published_groups(tp=2, timeout=60) as pg:
        job = Training(replace(RUN, tp=2), pg)
        job.save(root, 1)
        for call in (partial(job.save, root, 2), partial(job.load, root)):
            for wrong in (-1, 0, "x", float("nan")):
                steps_taken.together()
                started = time.monotonic()
                with pytest.raises(CheckpointError, match=f"timeout={wrong!r}: give the seconds"):
                    call(timeout=wrong if me == 1 else None)
                assert time.monotonic() - started < 30
        dist.barrier()
        job.load(root)
        job.let_go()
    return True


def test_a_timeout_that_is_none_is_told_to_the_others(tmp_path):
    assert distributed(partial(wrong_patience, str(tmp_path)), 2) == [True] * 2


# -- what a load restores and reports --------------------------------------------------------------


class Loader:
    """The position of a data loader, which differs between ranks."""

    def __init__(self, rank):
        self.state = {"rank": rank, "seen": torch.arange(rank + 1), "epoch": (rank, "x")}

    def same(self, other):
        return (
            other["rank"] == self.state["rank"]
            and torch.equal(other["seen"], self.state["seen"])
            and other["epoch"] == self.state["epoch"]
        )


def parts(root):
    rank = int(os.environ["RANK"])
    loader = Loader(rank)
    with training(replace(RUN, tp=2)) as job:
        job.steps(0, 2)
        job.save(root, 2, scheduler=Schedule(2), rank_extra=loader.state)
        weights, moments = job.digest()
        job.steps(2, 3)
        changed = job.digest()[1]
        rates = [dict(group, params=None) for group in job.optimizer.param_groups]
        torch.manual_seed(rank)

        # Each part is loaded separately.
        schedule = Schedule(7)
        loaded = job.load(root, scheduler=schedule, load_optimizer=False, rng=False)
        told = schedule.step, loaded.rng, loaded.unexpected, loaded.fallback
        assert told == (2, None, (), "")
        assert job.digest()[0] == weights
        # the weights are loaded, the moments are not
        assert job.digest()[1] not in (moments, changed)
        assert [dict(group, params=None) for group in job.optimizer.param_groups] == rates
        schedule = Schedule(7)
        loaded = job.load(root, scheduler=schedule, load_scheduler=False)
        assert (schedule.step, loaded.rng.exact) == (7, True)
        assert job.digest() == (weights, moments)
        assert (loader.same(loaded.rank_extra), loaded.rank_extra_lost) == (True, "")

        # A rank without data passes an empty dict; a rank that passes nothing gets an error.
        job.save(root, 3, rank_extra={} if rank else {"only": "the first"})
        assert job.load(root).rank_extra == ({} if rank else {"only": "the first"})
        with pytest.raises(CheckpointSaveError, match="rank_extra"):
            job.save(root, 4, rank_extra=None if rank else {})
        with pytest.raises(CheckpointSaveError, match="loads safely"):
            job.save(root, 4, rank_extra={"loader": loader} if rank else {})
        with pytest.raises(CheckpointError, match="Megatron uses rank_extra"):
            job.save(root, 4, extra={"rank_extra": 1})

        # The checkpoint holds more than the model has, on any rank.
        gpt = unwrap_model(job.chunks)[0]
        gpt.head = torch.nn.Linear(4, 2)
        model = {"model": job.chunks, "pg_collection": job.pg, "timeout": 60}
        megapg.save_checkpoint(root, 5, **model)
        del gpt.head
        loaded = megapg.load_checkpoint(root, iteration=5, **model)
        assert sorted(loaded.unexpected) == ["head.bias", "head.weight"]
        # Unused optimizer keys are reported only if the optimizer is loaded.
        assert megapg.load_checkpoint(root, iteration=2, **model).unexpected == ()
    with training(replace(RUN, pp=2)) as job:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", RngStateWarning)
            loaded = job.load(root, iteration=2)
        [warning] = [each for each in told if each.category is RngStateWarning]
        # the file whose line calls load_checkpoint
        assert Path(warning.filename).name == "resuming.py"
        assert loaded.rank_extra is None
        assert "tp2" in loaded.rank_extra_lost
        assert "pp2" in loaded.rank_extra_lost


def test_parts_of_a_checkpoint(tmp_path):
    distributed(partial(parts, str(tmp_path)), 2)


def fewer(root):
    with training(RUN) as job:
        loaded = job.load(root)
        return loaded.rank_extra, loaded.rank_extra_lost, loaded.unexpected


def more(root):
    with training(RUN) as job:
        job.save(root, 1, rank_extra=[dist.get_rank()])


def test_another_number_of_ranks(tmp_path):
    distributed(partial(more, str(tmp_path)), 2)
    [(found, lost, unexpected)] = distributed(partial(fewer, str(tmp_path)), 1)
    assert (found, unexpected) == (None, ())
    assert lost == "it was saved by 2 ranks, and now they are 1"


# -- random streams --------------------------------------------------------------------------------


def one_record_for_all(root):
    """Save one record for all, with replicas that draw alike and with a replica that does not."""
    rank = int(os.environ["RANK"])
    told = []
    with training(RUN) as job:
        for number, alike in enumerate([True, False], 1):
            megapg.seed_all(5, job.pg)
            torch.rand(1 if alike else 1 + rank)
            job.save(root, number, rng_layout="per_tp_pp")
            expected = torch.rand(3)
            report = job.load(root).rng
            told.append((report.exact, torch.equal(torch.rand(3), expected), report.reason))
    return told


def test_one_record_for_all_replicas_is_exact_where_it_is(tmp_path):
    first, second = distributed(partial(one_record_for_all, str(tmp_path)), 2)
    for alike in (first[0], second[0], first[1]):
        assert alike[:2] == (True, True)
    assert second[1][:2] == (False, False)
    assert "dp_cp rank 1, drew differently; every stream starts afresh" in second[1][2]


# -- a job that saves while another loads ----------------------------------------------------------


def next_checkpoint(root, iteration):
    """Publish a checkpoint with keep=1, as another job's save into the same directory does."""
    another = Partial.begin(root, iteration=iteration)
    prepared = root / "prepared" / f"iter_{iteration:07d}"
    shutil.copytree(prepared, another.path, dirs_exist_ok=True)
    another.publish(keep=1)


class OnceReading(logging.Handler):
    """A log handler that calls a function when the first rank is about to read."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def emit(self, record):
        if record.getMessage().startswith("loading iter_"):
            self.call()


def racing(root):
    """Replace the latest checkpoint at two points of a load, then remove it repeatedly."""
    root = Path(root)
    rank = int(os.environ["RANK"])
    with training(replace(RUN, tp=2)) as job:
        job.steps(0, 1)
        job.save(root, 1, scheduler=Schedule(1))
        for iteration in range(2, 16):
            job.save(root / "prepared", iteration, scheduler=Schedule(iteration))
    with training(RUN, seed=99) as job:  # another layout, so that the log reports the reading
        turns = []

        def replace_it(number):
            if rank == 0 and not turns:
                turns.append(number)
                next_checkpoint(root, number)

        # A replacement while the ranks look at the contents.
        loaded = job.load(root, scheduler=Schedule(0, lambda: replace_it(2)))
        assert (loaded.path.name, loaded.fallback) == ("iter_0000002", "")

        # A replacement while the ranks read the checkpoint.
        turns.clear()
        handler = OnceReading(lambda: replace_it(3))
        logger = logging.getLogger("megapg.checkpoint.load_steps")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        loaded = job.load(root)
        assert loaded.path.name == "iter_0000003"
        # A replacement by a checkpoint of the same name.
        turns.clear()
        handler.call = lambda: replace_it(3)
        loaded = job.load(root)
        assert loaded.path.name == "iter_0000003"
        logger.removeHandler(handler)
        dist.barrier()
        with pytest.raises(BrokenCheckpointError):  # the load does not retry without end
            job.load(root, scheduler=Schedule(0, partial(always, root, rank)))
        assert not (root / "iter_0000003").exists()
        # A broken checkpoint is reported at once.
        dist.barrier()
        if rank == 0:
            (megapg.latest(root).path / "__1_0.distcp").unlink()
        dist.barrier()
        with pytest.raises(BrokenCheckpointError, match=r"__1_0\.distcp"):
            job.load(root)


def always(root, rank):
    if rank == 0:
        next_checkpoint(root, megapg.latest(root).iteration + 1)


def test_the_latest_changes_while_it_is_loaded(tmp_path):
    distributed(partial(racing, str(tmp_path)), 2)


def troubled(root):
    """Two ranks fail to load at once, in different ways, and do not wait for each other."""
    root, rank, waiting = Path(root), int(os.environ["RANK"]), steps.Steps()
    kinds = {
        "broken": BrokenCheckpointError,
        "no fit": CheckpointMismatchError,
        "a bug": KeyError,
        "Ctrl-C": KeyboardInterrupt,
    }
    with training(replace(RUN, tp=2)) as job:
        for iteration in (1, 2, 3):
            job.save(root / "prepared" if iteration > 1 else root, iteration)

        @contextmanager
        def failing(*both, then=lambda: None):
            """Make each rank fail once when it looks at the contents."""
            left = [kinds[both[rank]]("this is a test")]

            def read(*args, **options):
                if not left:
                    return read_contents(*args, **options)
                dist.barrier()  # so that each rank fails independently
                if rank == 0:
                    then()
                raise left.pop()

            with mock.patch("megapg.checkpoint.load_steps.read_contents", read):
                yield

        for both in (
            *(("broken", "no fit"), ("no fit", "broken"), ("broken", "broken")),
            *(("a bug", "broken"), ("broken", "a bug"), ("Ctrl-C", "no fit")),
        ):
            started = time.monotonic()
            with failing(*both), pytest.raises(kinds[both[rank]], match="a test"):
                job.load(root)
            assert time.monotonic() - started < 20, both
            dist.barrier()

        # Rank 0 reports nothing in time. Rank 1 gives up and does not wait for rank 0's reply.
        def late(*args, **options):
            if rank == 0:
                waiting.hear("given up", [1])
            return read_contents(*args, **options)

        started = time.monotonic()
        with (
            mock.patch("megapg.checkpoint.load_steps.read_contents", late),
            pytest.raises(CheckpointError, match="rank 0: no sign of life for 6 s"),
        ):
            job.load(root, timeout=6)
        assert rank == 0 or time.monotonic() - started < 11.5
        waiting.say("given up")
        dist.barrier()
        # Both ranks try again if a new checkpoint exists, whatever each of them has seen.
        for number, both in ((2, ("broken", "no fit")), (3, ("no fit", "broken"))):
            with failing(*both, then=partial(next_checkpoint, root, number)):
                assert job.load(root).path.name == f"iter_000000{number}"


def test_ranks_that_fail_in_different_ways_part_at_once(tmp_path):
    distributed(partial(troubled, str(tmp_path)), 2)


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        (None, {"world_size": 2}, "the layout that it was saved under is not known"),
        ({"world_size": 2}, None, "the layout that these groups make is not known"),
        ({"world_size": 2, "tp": 2}, {"world_size": 2}, "saved under tp2"),
    ],
)
def test_what_a_rank_kept_is_its_own_or_nobodys(saved, now, said):
    keys = dict.fromkeys([f"{_RANK_EXTRA}0_2", f"{_RANK_EXTRA}1_2"])
    layouts = [sizes and ParallelLayout(**sizes) for sizes in (saved, now)]
    contents = SimpleNamespace(
        metadata=SimpleNamespace(state_dict_metadata=keys),
        saved_layout=lambda: layouts[0],
        path=Path("x"),
    )
    team = SimpleNamespace(place=(0, 2), leading=False)
    kept, lost = _rank_extra(contents, layouts[1], team)
    assert kept is None
    assert said in lost


def fallen_back(root):
    root = Path(root)
    with training(replace(RUN, tp=2)) as job:
        job.save(root, 1)
        job.save(root, 2)
        if dist.get_rank() == 0:
            (root / "iter_0000002" / "metadata.json").unlink()
        dist.barrier()
        loaded = job.load(root)
        return loaded.iteration, loaded.fallback


@pytest.mark.smoke
def test_falling_back_to_an_older_one_is_said_on_all_ranks(tmp_path):
    told = distributed(partial(fallen_back, str(tmp_path)), 2)
    assert told[0] == told[1]
    iteration, why = told[0]
    assert iteration == 1
    assert "names iter_0000002, which has no metadata.json" in why
