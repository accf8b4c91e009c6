"""Save and load of a real Megatron-core GPT, bit for bit in one layout and across layouts."""

import os
import time
import warnings
from argparse import Namespace
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import megatron_training
import pytest
import torch
import torch.distributed as dist
from resuming import RUN, Schedule, Training, cut, distributed, equal, sizes, weights

import megapg
from megapg import ProcessGroupCollection
from megapg.checkpoint.contents import read_contents
from megapg.checkpoint.load import LoadedCheckpoint
from megapg.checkpoint.writer import write_items
from megapg.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    GlobalGroupsWarning,
    NoCollectionError,
)
from megapg.megatron import globals_policy
from megapg.testing import megatron_on_cpu

pytestmark = [pytest.mark.contract, pytest.mark.torch]

MOE = {"experts": 4, "sequence_parallel": True}
VPP = {"pp": 2, "vpp": 2, "layers": 4}
SAVED, LAST = 2, 7
"""The run saves after 2 steps and compares 5 more."""


@contextmanager
def training(run, name, ranks=4, seed=None):
    """Yield a job whose world is the first ranks; yield None on the other ranks."""
    warnings.simplefilter("ignore")
    me = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if me < ranks:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=me, world_size=ranks
        )
        with megapg.session(timeout=60, **sizes(run)) as session, megapg.published(session.groups):
            job = Training(run, session.groups, seed)
            yield job
            job.let_go()
        dist.destroy_process_group()
    else:
        yield None
    store.add(f"left {name}", 1)
    while store.add(f"left {name}", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)


# -- the same layout -------------------------------------------------------------------------------


def resume_each(runs, ranks, root):
    """Run each job without a stop and again from its checkpoint; return the results of both."""
    told = []
    with megatron_on_cpu():
        for number, run in enumerate(runs):
            where = f"{root}/{number}"
            with training(run, f"first {number}", ranks) as job:
                job.steps(0, SAVED)
                save = job.save(where, SAVED, asynchronous=number % 2 == 1)
                whole = job.steps(SAVED, LAST), job.digest()
                assert save.wait().iteration == SAVED
            with training(run, f"second {number}", ranks, seed=4321) as job:
                loaded = job.load(where)
                assert (loaded.iteration, loaded.rng.exact, loaded.missing) == (SAVED, True, ())
                told.append((whole, (job.steps(SAVED, LAST), job.digest())))
    return told


@pytest.mark.parametrize(
    ("ranks", "runs"),
    [
        (
            4,
            [
                replace(RUN, tp=2, pp=2),
                replace(RUN, tp=2, ep=2, **MOE),
                replace(RUN, **VPP),
                replace(RUN, tp=2),
            ],
        ),
        (1, [RUN, replace(RUN, experts=2)]),
    ],
)
def test_a_resumed_run_is_the_run(ranks, runs, tmp_path):
    """Weights, master weights, moments, steps and five losses are equal, with dropout on.

    Every other run saves in the background while training continues.
    """
    assert all(run.dropout for run in runs)
    for told in distributed(partial(resume_each, runs, ranks, str(tmp_path)), ranks):
        for whole, resumed in told:
            assert len(set(whole[0])) == LAST - SAVED
            assert whole == resumed


# -- other layouts ---------------------------------------------------------------------------------

PLAIN = replace(RUN, dropout=0.0)  # dropout draws differ between layouts
RESHARDED = {
    # name: saved layout, its number of ranks, loaded layout, its number of ranks
    "tp2 -> tp1": (cut(PLAIN, tp=2), 2, cut(PLAIN), 1),
    "tp1 -> tp2": (cut(PLAIN), 1, cut(PLAIN, tp=2), 2),
    "pp2 -> pp1": (cut(PLAIN, pp=2), 2, cut(PLAIN), 1),
    "pp2 vpp2 -> pp2": (cut(PLAIN, **VPP), 2, cut(PLAIN, pp=2, layers=4), 2),
    "tp2 pp2 -> tp4": (cut(PLAIN, tp=2, pp=2), 4, cut(PLAIN, tp=4), 4),
    "dp4 -> dp2": (cut(PLAIN, dp=4, batch=4), 4, cut(PLAIN, dp=2, batch=4), 2),
    "tp2 dp2 -> pp2 dp1": (cut(PLAIN, dp=2, tp=2), 4, cut(PLAIN, pp=2), 2),
    "ep2 -> ep1": (cut(PLAIN, dp=2, ep=2, experts=4), 2, cut(PLAIN, dp=2, experts=4), 2),
    "ep1 -> ep2": (cut(PLAIN, dp=2, experts=4), 2, cut(PLAIN, dp=2, ep=2, experts=4), 2),
}
# Other cases cover the opposite direction, or parts of these.
SLOW = {"tp1 -> tp2", "pp2 -> pp1", "tp2 dp2 -> pp2 dp1", "ep1 -> ep2"}
SAME_STREAMS = ("pp2 vpp2 -> pp2", "dp4 -> dp2")
"""Cases in which every rank finds its random streams: replicas of a dense model draw alike."""

TOLERANCE = 2e-6
"""Relative tolerance of five losses, because sums run in another order. All else is equal."""


def reshard_each(cases, root):
    told = []
    with megatron_on_cpu():
        for number, (saved, first, loaded, second) in enumerate(cases):
            where = f"{root}/{number}"
            whole = again = report = None
            with training(saved, f"first {number}", first) as job:
                if job is not None:
                    job.steps(0, SAVED)
                    job.save(where, SAVED)
                    whole = job.steps(SAVED, LAST)
            with training(loaded, f"second {number}", second, seed=4321) as job:
                if job is not None:
                    report = job.load(where).rng
                    again = job.steps(SAVED, LAST)
            told.append((whole, again, report))
    return told


@pytest.mark.parametrize(
    "names", [RESHARDED.keys() - SLOW, pytest.param(SLOW, marks=pytest.mark.slow)], ids=len
)
def test_a_checkpoint_loads_under_another_layout(names, tmp_path):
    cases = {name: case for name, case in RESHARDED.items() if name in names}
    results = distributed(partial(reshard_each, list(cases.values()), str(tmp_path)), 4)
    for told in results:
        for name, (_, again, report) in zip(cases, told, strict=True):
            whole = results[0][list(cases).index(name)][0]
            if again is not None:
                assert again == pytest.approx(whole, rel=TOLERANCE), name
                assert report.exact is (name in SAME_STREAMS), name


# -- the rest of the arguments ---------------------------------------------------------------------


def arguments(root):
    """Save and load everything except the optimizer, on two ranks."""
    with megatron_on_cpu(), training(replace(RUN, tp=2), "arguments", 2) as job:
        model = {"model": job.chunks, "pg_collection": job.pg, "timeout": 60}
        before = weights(job.chunks)
        save = megapg.save_checkpoint(
            root,
            1,
            scheduler=Schedule(17),
            args={"hidden_size": 32},
            extra={"tokenizer": "bytes", "seen": {"samples": 40}, "mean": torch.tensor([0.5])},
            num_floating_point_operations=1.5e18,
            **model,
        )
        assert save.done
        assert save.wait().path.name == "iter_0000001"
        forget(job.chunks)
        schedule = Schedule(0)
        loaded = megapg.load_checkpoint(root, scheduler=schedule, **model)
        assert equal(weights(job.chunks), before)
        assert (loaded.iteration, loaded.release, schedule.step) == (1, False, 17)
        assert (loaded.args.hidden_size, loaded.num_floating_point_operations) == (32, 1.5e18)
        assert loaded.extra.keys() == {"tokenizer", "seen", "mean"}
        assert loaded.extra["seen"] == {"samples": 40}
        assert loaded.extra["mean"].item() == 0.5

        # Choice of the checkpoint to load, and of the checkpoints to keep.
        for iteration in (2, 3, 4):
            megapg.save_checkpoint(root, iteration, keep=2, **model)
        assert [info.iteration for info in megapg.list_checkpoints(root)] == [3, 4]
        assert megapg.latest(root).iteration == 4
        assert megapg.load_checkpoint(root, iteration=3, **model).iteration == 3
        assert megapg.load_checkpoint(f"{root}/iter_0000003", **model).iteration == 3
        release = megapg.save_checkpoint(root, 5, release=True, keep=1, **model).wait()
        assert release.release
        assert release.path.name == "release"
        loaded = megapg.load_checkpoint(root, optimizer=job.optimizer, **model)
        assert (loaded.release, loaded.iteration, loaded.rng) == (True, 0, None)

        # Random streams under another key, and with the older layout only.
        elsewhere = f"{root}/elsewhere"
        megapg.save_checkpoint(
            elsewhere, 1, rng_key="rng_state.critic", rng_layout="per_tp_pp", **model
        )
        expected = torch.rand(3)
        again = megapg.load_checkpoint(elsewhere, rng_key="rng_state.critic", **model)
        assert again.rng.exact
        assert torch.equal(torch.rand(3), expected)
        with pytest.raises(CheckpointMismatchError, match=r"rng_state\.critic"):
            megapg.load_checkpoint(elsewhere, rng_key="rng_state.actor", **model)

        # Without groups, the call reads the globals and warns.
        del model["pg_collection"]
        with pytest.warns(GlobalGroupsWarning, match="save_checkpoint"):
            megapg.save_checkpoint(root, 6, **model)
        with pytest.warns(GlobalGroupsWarning, match="load_checkpoint"):
            assert megapg.load_checkpoint(root, iteration=6, **model).iteration == 6
        with globals_policy("error"), pytest.raises(NoCollectionError, match="save_checkpoint"):
            megapg.save_checkpoint(root, 7, **model)
        with (
            globals_policy("silent"),
            pytest.raises(CheckpointError, match="asynchronous=True needs pg_collection="),
        ):
            megapg.save_checkpoint(root, 7, asynchronous=True, **model)
        borrowed = megapg.from_parallel_state()
        megapg.save_checkpoint(root, 7, pg_collection=borrowed, asynchronous=True, **model).wait()
        assert read_contents(f"{root}/iter_0000007").saved_layout().tp == 2

        # A mismatch is named and changes nothing.
        model["pg_collection"] = job.pg
        kept = weights(job.chunks)
        with pytest.raises(CheckpointMismatchError, match="has no optimizer state"):
            job.load(root, iteration=6)
        with pytest.raises(CheckpointMismatchError, match="has no scheduler state"):
            megapg.load_checkpoint(root, scheduler=schedule, **model)
        for wrong, said in (
            ({"extra": {"model": 1}}, "Megatron uses model"),
            ({"extra": {"rng_state 0": 1}}, "Megatron uses rng_state 0"),
            ({"keep": 0}, "keep=0"),
            ({"in_flight": 0}, "in_flight=0"),
            ({"rng_key": "critic"}, "rng_key='critic'"),
            ({"rng_layout": "mine"}, "rng_layout='mine'"),
            ({"model": job.optimizer}, "ChainedOptimizer has no sharded_state_dict"),
            ({"model": torch.nn.Linear(1, 1)}, "Linear has no sharded_state_dict"),
        ):
            with pytest.raises(CheckpointError, match=said):
                megapg.save_checkpoint(root, 8, **{**model, **wrong})
        with pytest.raises(CheckpointError, match="iteration=-1"):
            megapg.save_checkpoint(root, -1, **model)
        with pytest.raises(CheckpointNotFoundError, match="not that of step 7"):
            megapg.load_checkpoint(f"{root}/iter_0000006", iteration=7, **model)
        with pytest.raises(CheckpointNotFoundError, match="there is no directory"):
            megapg.load_checkpoint(f"{root}/nowhere", **model)
        alone = ProcessGroupCollection.from_groups(
            **dict.fromkeys(("tp", "pp", "dp", "dp_cp", "ep", "expt_tp"), job.pg.dp)
        )
        with pytest.raises(CheckpointError, match=r"built with tp group \[0, 1\]"):
            megapg.save_checkpoint(root, 8, **{**model, "pg_collection": alone})
        with pytest.raises(CheckpointNotFoundError, match="iter_0000006, iter_0000007"):
            megapg.load_checkpoint(root, iteration=99, **model)
        assert equal(weights(job.chunks), kept)
        return [info.path.name for info in megapg.list_checkpoints(root)]


def forget(chunks):
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.zero_()


def test_every_argument(tmp_path):
    names = distributed(partial(arguments, str(tmp_path)), 2)
    assert names[0] == names[1]
    assert {"release", "iter_0000007"} <= set(names[0])


# -- for fine-tuning -------------------------------------------------------------------------------


def fine_tune(root):
    """Fine-tune in bf16, where the optimizer has its own master weights."""
    job = megatron_training.Job(replace(RUN, tp=2), bf16=True)
    with (
        megatron_on_cpu(),
        megapg.session(timeout=60, tp=2) as session,
        megapg.published(session.groups) as pg,
    ):
        teacher = megatron_training.Training(job, pg, seed=1)
        teacher.step()
        megapg.save_checkpoint(
            root, 2, model=teacher.chunks, optimizer=teacher.optimizer, pg_collection=pg
        )
        saved = weights(teacher.chunks)
        student = megatron_training.Training(job, pg, seed=2)
        model = {
            "model": student.chunks,
            "optimizer": student.optimizer,
            "pg_collection": pg,
            "timeout": 60,
        }
        torch.manual_seed(77)
        expected = torch.rand(3)
        torch.manual_seed(77)
        schedule = Schedule(3)
        loaded = megapg.load_checkpoint(root, scheduler=schedule, weights_only=True, **model)
        assert (loaded.iteration, loaded.rng, schedule.step) == (2, None, 3)
        assert torch.equal(torch.rand(3), expected)
        assert equal(weights(student.chunks), saved)
        # A step with zero rates changes nothing, but copies the master weights back.
        for group in student.optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0
        student.optimizer.step()
        for chunk in student.chunks:
            chunk.start_param_sync(force_sync=True)
        assert equal(weights(student.chunks), saved)
        assert megapg.load_checkpoint(root, rng=False, **model).rng is None


def test_fine_tuning_keeps_the_weights_that_were_loaded(tmp_path):
    distributed(partial(fine_tune, str(tmp_path)), 2)


# -- several saves ---------------------------------------------------------------------------------


def several(root):
    """Two sessions save at the same time; more saves follow a failed save."""
    with (
        megatron_on_cpu(),
        training(replace(RUN, tp=2), "several", 2) as job,
        megapg.session(name="critic", pp=2, timeout=60) as second,
        megapg.published(second.groups),
    ):
        critic = Training(replace(RUN, pp=2), second.groups)
        me = dist.get_rank()
        both = {"actor": job, "critic": critic}
        for round_ in (1, 2):
            saves = []
            for name, each in both.items():
                time.sleep((me + round_) % 2 * 0.7)
                saves.append(each.save(f"{root}/{name}", round_, asynchronous=True))
            for save in saves:
                assert save.wait(60).iteration == round_

        # Only the first rank sees this failure at once.
        for number in (3, 4, 5):
            unsafe = {"bad": lambda: None} if me == 0 else {"bad": 1}
            with pytest.raises(CheckpointSaveError, match=r"rank 0|loads safely"):
                job.save(f"{root}/actor", number, asynchronous=True, in_flight=2, extra=unsafe)
            save = job.save(f"{root}/actor", number, asynchronous=True, in_flight=2)
            if me == 0:
                save.wait(60)
        # Even if saves overlap, the tracker only moves forward.
        for number in range(6, 10):
            job.save(f"{root}/actor", number, asynchronous=True, in_flight=3)
        job.save(f"{root}/actor", 10)
        with mock.patch("megapg.checkpoint.save_write.write_items", slow_at_first(me)):
            first = job.save(f"{root}/actor", 11, asynchronous=True, in_flight=2)
            second = job.save(f"{root}/actor", 12, asynchronous=True, in_flight=2)
            first.wait(60)
            second.wait(60)
        assert megapg.latest(f"{root}/actor").iteration == 12
        assert len(megapg.list_checkpoints(f"{root}/actor")) == 12
        critic.let_go()


def slow_at_first(me):
    """Return a writer that is slow on the second rank, for the first of two saves."""
    delays = [2.0 if me == 1 else 0.0]

    def write(*args):
        time.sleep(delays.pop() if delays else 0.0)
        return write_items(*args)

    return write


def test_saves_at_the_same_time_and_after_failures(tmp_path):
    distributed(partial(several, str(tmp_path)), 2)


def test_what_was_loaded_prints_in_short_lines():
    loaded = LoadedCheckpoint(
        path=Path("ckpt/iter_0000010"),
        iteration=10,
        release=False,
        args=Namespace(**{f"option_{n}": n for n in range(100)}),
        extra={},
        num_floating_point_operations=0.0,
        missing=("bias", "weight"),
        unexpected=(),
        resized={},
        rng=None,
        rank_extra=None,
        rank_extra_lost="",
        fallback="iter_0000012 is damaged",
    )
    assert str(loaded).splitlines() == [
        "ckpt/iter_0000010: iteration 10",
        "  missing: bias, weight",
        "  fallback: iter_0000012 is damaged",
    ]
