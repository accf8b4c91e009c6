"""Save and load of a real Megatron-core GPT: resume bit for bit, and under other layouts."""

import os
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist
from resuming import RUN, Training, cut, sizes

import megapg
from megapg.testing import megatron_on_cpu, run_distributed

pytestmark = pytest.mark.contract

distributed = partial(
    run_distributed,
    deadline=280,
    preload=("megapg.demo.gpt", "megapg.checkpoint.save", "megapg.checkpoint.load"),
    env={"PYTHONWARNINGS": "ignore"},
)

MOE = {"experts": 4, "sequence_parallel": True}
SAVED, LAST = 3, 8
"""Saved after 3 steps; 5 more are compared."""


@contextmanager
def training(run, name, ranks=4, seed=None):
    """A job on the first ranks, which are its world; nothing on the others."""
    warnings.simplefilter("ignore")
    me = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if me < ranks:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(name, store), rank=me, world_size=ranks
        )
        with (
            megapg.session(timeout=60, **sizes(run)) as session,
            megapg.published(session.groups),
        ):
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
    """Each job without a stop, and again from its checkpoint; what both did after it."""
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
                replace(RUN, pp=2, vpp=2),
                replace(RUN, tp=2),
            ],
        ),
        (1, [RUN, replace(RUN, experts=2)]),
    ],
)
def test_a_resumed_run_is_the_run(ranks, runs, tmp_path):
    """Weights, master weights, moments, steps and five losses, with dropout on; every other one is
    saved in the background while the run goes on."""
    assert all(run.dropout for run in runs)
    for told in distributed(partial(resume_each, runs, ranks, str(tmp_path)), ranks):
        for whole, resumed in told:
            assert len(set(whole[0])) == LAST - SAVED
            assert whole == resumed


# -- other layouts ---------------------------------------------------------------------------------

PLAIN = replace(RUN, dropout=0.0)  # which would draw otherwise under another layout
RESHARDED = {
    # name: saved under, ranks of that, loaded under, ranks of that
    "tp2 -> tp1": (cut(PLAIN, tp=2), 2, cut(PLAIN), 1),
    "tp1 -> tp2": (cut(PLAIN), 1, cut(PLAIN, tp=2), 2),
    "pp2 -> pp1": (cut(PLAIN, pp=2), 2, cut(PLAIN), 1),
    "pp2 vpp2 -> pp2": (cut(PLAIN, pp=2, vpp=2), 2, cut(PLAIN, pp=2), 2),
    "tp2 pp2 -> tp4": (cut(PLAIN, tp=2, pp=2), 4, cut(PLAIN, tp=4), 4),
    "dp4 -> dp2": (cut(PLAIN, dp=4), 4, cut(PLAIN, dp=2), 2),
    "tp2 dp2 -> pp2 dp1": (cut(PLAIN, dp=2, tp=2), 4, cut(PLAIN, pp=2), 2),
}
SAME_STREAMS = ("pp2 vpp2 -> pp2", "dp4 -> dp2")
"""Where every rank finds its random streams: replicas of a dense model draw alike."""

TOLERANCE = 2e-6
"""Relative, of five losses: sums are taken in another order. Nothing else differs."""


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


def test_a_checkpoint_loads_under_another_layout(tmp_path):
    results = distributed(partial(reshard_each, list(RESHARDED.values()), str(tmp_path)), 4)
    for told in results:
        for name, (_, again, report) in zip(RESHARDED, told, strict=True):
            whole = results[0][list(RESHARDED).index(name)][0]
            if again is not None:
                assert again == pytest.approx(whole, rel=TOLERANCE), name
                assert report.exact is (name in SAME_STREAMS), name
