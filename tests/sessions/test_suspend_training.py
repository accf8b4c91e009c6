"""A real Megatron-core GPT keeps training through many cycles of suspend() and resume()."""

import gc
import time
import warnings
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch.distributed as dist
from stepwise import build, distributed, step, weights

import megapg
from megapg.testing import megatron_on_cpu
from megapg.tools.demo.job import GPTRun

TINY = {"hidden": 16, "heads": 2, "seq_length": 16, "micro_batch_size": 1, "num_microbatches": 2}

# pp=4 has embedding groups that overlap the pipelines: the first and the last stage share weights.
RUNS = {4: GPTRun(pp=4, layers=4, **TINY), 8: GPTRun(tp=2, pp=2, layers=2, **TINY)}


def usage(me, first=None):
    """Return the resources in use, once the threads are back at the first number."""
    gc.collect()
    until = time.monotonic() + 10
    while first and me.num_threads() > first["threads"] and time.monotonic() < until:
        time.sleep(0.05)
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "names": len(dist.distributed_c10d._world.pg_names),
        "tags": len(dist.distributed_c10d._world.tags_to_pg),
        "threads": me.num_threads(),
        "fds": me.num_fds(),
        "rss": me.memory_info().rss,
    }


def without_a_break(run):
    with megapg.session(name="steady", timeout=60, tp=run.tp, pp=run.pp) as session:
        pg = session.groups
        job = build(run, pg)
        losses = [step(run, number, job, pg) for number in range(run.steps)]
        return losses, weights(job, pg)


def with_breaks(run):
    me = psutil.Process()
    rebound, seen = [], []
    with megapg.session(name="broken", timeout=60, tp=run.tp, pp=run.pp) as session:
        job = build(run, session.groups)
        session.on_resume(lambda groups: rebound.append(session.rebind(job)))
        losses = []
        for number in range(run.steps):
            losses.append(step(run, number, job, session.groups))
            report = session.suspend()
            session.resume()
            assert report.how == "recreate"
            if number % 10 == 4:
                seen.append(usage(me, seen[0] if seen else None))
        return losses, weights(job, session.groups), rebound, seen


def both(run):
    warnings.simplefilter("ignore")
    with megatron_on_cpu():
        return without_a_break(run), with_breaks(run)


@pytest.mark.parametrize(
    ("world_size", "cycles"),
    [(4, 15), *(pytest.param(size, 105, marks=pytest.mark.slow) for size in RUNS)],
)
def test_a_gpt_trains_on_through_many_cycles_bit_for_bit(world_size, cycles):
    run = replace(RUNS[world_size], steps=cycles)
    everyone = distributed(partial(both, run), world_size)
    for rank, (steady, (losses, digest, rebound, seen)) in enumerate(everyone):
        assert (losses, digest) == steady
        assert len(set(losses)) == run.steps  # every step changes the loss
        assert len(rebound) == run.steps
        assert all(each.replaced and each.complete for each in rebound), str(rebound[-1])
        first, last = seen[0], seen[-1]
        print(f"rank {rank} of {world_size}, after 5 and after {cycles} cycles: {first} {last}")
        for what in ("groups", "names", "tags"):  # torch's registry
            assert last[what] == first[what], seen
        assert last["threads"] <= first["threads"]
        assert last["fds"] <= first["fds"] + 2, seen  # a socket may still be closing
        assert last["rss"] <= first["rss"] + cycles * 80_000, seen
