"""A real Megatron-core GPT on a session's groups, held bit for bit to the same run on globals."""

import math
import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import megapg
from megapg.demo.job import GPTRun
from megapg.megatron import parallel_state, trace_global_reads
from megapg.testing import megatron_on_cpu, run_distributed

TEXT = Path(__file__).read_bytes()
SHORT = GPTRun(steps=3, layers=4, hidden=32, seq_length=32, num_microbatches=2)

RUNS = {
    1: [SHORT, replace(SHORT, experts=2)],
    2: [
        replace(SHORT, tp=2),
        replace(SHORT, pp=2),
        replace(SHORT),  # data parallel
        replace(SHORT, pp=2, vpp=2),
        replace(SHORT, tp=2, sequence_parallel=True),
        replace(SHORT, tp=2, recompute=True),
        replace(SHORT, experts=4, ep=2),
        replace(SHORT, experts=4, ep=2, dispatcher="alltoall"),
    ],
    4: [
        replace(SHORT, tp=2, pp=2),
        replace(SHORT, tp=2, ep=2, experts=4, sequence_parallel=True),
        replace(
            SHORT, tp=2, ep=2, experts=4, sequence_parallel=True, dispatcher="alltoall", steps=2
        ),
        replace(SHORT, pp=2, vpp=2, steps=2),  # and dp=2
    ],
    8: [
        replace(SHORT, tp=2, pp=2, steps=2),
        replace(SHORT, tp=2, pp=2, ep=2, experts=4, sequence_parallel=True, steps=2),
    ],
}


def sizes(run):
    return {
        "tp": run.tp,
        "pp": run.pp,
        "vpp": run.vpp,
        "ep": run.ep,
        "expt_tp": run.expt_tp or run.tp,
    }


def initialise_globals(run, name):
    """WORLD and ``parallel_state`` as a program without megapg makes them."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.vpp,
        expert_model_parallel_size=run.ep,
        expert_tensor_parallel_size=run.expt_tp,
        create_gloo_process_groups=False,
    )


def both_ways(runs):
    from megapg.demo.gpt import train

    warnings.simplefilter("ignore")  # Megatron-core's, about what a CPU lacks
    compared = []
    for number, run in enumerate(runs):
        with megatron_on_cpu(), megapg.session(timeout=30, **sizes(run)) as session:
            pg = session.groups
            with megapg.published(pg), trace_global_reads(session=pg) as trace:
                ours = train(run, TEXT, pg)
        initialise_globals(run, f"globals {number}")
        with megatron_on_cpu():
            theirs = train(run, TEXT, None)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        answered = {read.answered_by for read in trace.reads}
        compared.append((run, ours, theirs, answered))
    return compared


@pytest.mark.contract
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_losses_and_weights_equal_the_globals_run_bit_for_bit(world_size):
    everyone = run_distributed(
        partial(both_ways, RUNS[world_size]),
        world_size,
        deadline=280,
        preload=("megapg.demo.gpt",),
        env={"PYTHONWARNINGS": "ignore"},
    )
    for compared in everyone:
        for run, ours, theirs, answered in compared:
            assert len(ours.losses) == run.steps
            assert all(math.isfinite(loss) for loss in ours.losses), run
            for mine, other in zip(ours.losses, theirs.losses, strict=True):
                assert mine.hex() == other.hex(), run
            assert ours.weights_sha256 == theirs.weights_sha256, run
            assert answered <= {"session"}, run
    # Every rank reports the one loss of the job, and training moves it.
    for results in zip(*everyone, strict=True):
        assert len({result[1].losses for result in results}) == 1
        assert len(set(results[0][1].losses)) > 1


def wrong_grid():
    from megapg.demo.gpt import train

    warnings.simplefilter("ignore")
    run = replace(SHORT, tp=2, steps=1, dropout=0.0)
    with megatron_on_cpu():
        initialise_globals(run, "right")
        right = train(run, TEXT, None).losses[0]
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

        initialise_globals(replace(run, tp=1), "wrong")  # somebody else's layout
        with megapg.session(tp=2, name="mine", timeout=30) as session:
            silent = train(run, TEXT, session.groups).losses[0]
            with megapg.published(session.groups):
                cured = train(run, TEXT, session.groups).losses[0]
        dist.destroy_process_group()
    return right, silent, cured


def test_the_silent_wrong_grid_of_the_readme():
    """Groups with tp=2 while the globals say tp=1: no error, a wrong loss; published() cures."""
    for right, silent, cured in run_distributed(
        wrong_grid,
        2,
        deadline=120,
        preload=("megapg.demo.gpt",),
        env={"PYTHONWARNINGS": "ignore"},
    ):
        assert abs(silent - right) > 0.1
        assert cured.hex() == right.hex()
