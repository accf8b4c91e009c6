"""Real Megatron-core GPTs on a session's groups, equal bit for bit to the same runs on globals.

Stock code gets no collection, so it reads every group from the globals. There ``published``
answers, and ``parallel_state`` is never initialised.
"""

import math
import re
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from on_globals import on_globals
from resuming import distributed, sizes, training
from stepwise import TEXT, build, step, weights

import megapg
from megapg.errors import WrongGroupError
from megapg.megatron import parallel_state, published, trace_global_reads
from megapg.testing import megatron_on_cpu
from megapg.tools.demo import gpt
from megapg.tools.demo.job import GPTRun

pytestmark = pytest.mark.torch

SHORT = GPTRun(steps=3, layers=2, hidden=32, seq_length=32, num_microbatches=2)
EXPERTS = {"experts": 4, "ep": 2}
WIDE = replace(SHORT, tp=2, pp=2, steps=2, recompute=True)

RUNS = {
    1: [SHORT, replace(SHORT, experts=2)],
    2: [
        replace(SHORT, pp=2),
        replace(SHORT),  # data parallel
        replace(SHORT, pp=2, vpp=2, layers=4),
        replace(SHORT, tp=2, sequence_parallel=True),
        replace(SHORT, tp=2, recompute=True),
        replace(SHORT, dispatcher="alltoall", **EXPERTS),
    ],
    4: [
        replace(SHORT, tp=2, pp=2),
        replace(SHORT, tp=2, sequence_parallel=True, **EXPERTS),
        replace(SHORT, pp=2, vpp=2, layers=4, steps=2),  # and dp=2
    ],
    8: [WIDE, replace(WIDE, sequence_parallel=True, **EXPERTS)],
}


def state():
    return {n: v for n, v in vars(parallel_state).items() if re.match(r"_[A-Z]", n)}


def train_on_globals(run, name):
    with on_globals(run, name):
        return gpt.train(run, TEXT, None)


def train_published(run, *, stock):
    """Train with the groups passed, and if ``stock`` also without them."""
    warnings.simplefilter("ignore")
    before, results = state(), []
    with megatron_on_cpu(), megapg.session(timeout=60, **sizes(run)) as session:
        for passed in (None, session.groups) if stock else (session.groups,):
            with published(session.groups), trace_global_reads(session=session.groups) as trace:
                results.append(gpt.train(run, TEXT, passed))
            answered = {read.answered_by for read in trace.reads}
            assert answered == {"session"} if stock else answered <= {"session"}
            after = state()
            assert after.keys() == before.keys()
            assert all(after[name] is before[name] for name in before)
            assert not parallel_state.is_initialized()
    return results


def both_ways(runs, stock):
    return [
        [*train_published(run, stock=stock), train_on_globals(run, f"globals {number}")]
        for number, run in enumerate(runs)
    ]


@pytest.mark.contract
@pytest.mark.parametrize("world_size", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_losses_and_weights_equal_the_globals_run_bit_for_bit(world_size):
    """Some runs also use stock code, which reads everything from the published groups."""
    runs, stock = RUNS[world_size], world_size in (2, 8)
    everyone = distributed(partial(both_ways, runs, stock), world_size)
    for compared in everyone:
        for run, results in zip(runs, compared, strict=True):
            assert len(results) == 2 + stock
            theirs = results[-1]
            assert len(theirs.losses) == run.steps
            assert all(math.isfinite(loss) for loss in theirs.losses), run
            for ours in results[:-1]:
                assert [loss.hex() for loss in ours.losses] == [x.hex() for x in theirs.losses], run
                assert ours.weights_sha256 == theirs.weights_sha256, run
    # All ranks report the same loss, and training changes the loss.
    for results in zip(*everyone, strict=True):
        assert len({result[0].losses for result in results}) == 1
        assert len(set(results[0][0].losses)) > 1


def wrong_grid():
    run = replace(SHORT, tp=2, steps=1, dropout=0.0)
    right = train_on_globals(run, "right").losses[0]
    with (
        on_globals(replace(run, tp=1), "wrong"),  # a layout of other code
        megapg.session(tp=2, name="mine", timeout=30) as session,
    ):
        with pytest.raises(WrongGroupError):
            gpt.train(run, TEXT, session.groups)
        with megapg.guard("off"):
            silent = gpt.train(run, TEXT, session.groups).losses[0]
        with published(session.groups):
            cured = gpt.train(run, TEXT, session.groups).losses[0]
    return right, silent, cured


@pytest.mark.smoke
def test_the_silent_wrong_grid_of_the_readme():
    """With tp=2 groups and tp=1 globals the guard raises, and published() corrects the loss.

    Without the guard the loss is wrong and there is no error.
    """
    for right, silent, cured in distributed(wrong_grid, 2):
        assert abs(silent - right) > 0.1
        assert cured.hex() == right.hex()


# -- two models ------------------------------------------------------------------------------------

TENSOR_PARALLEL = replace(SHORT, tp=2, recompute=True)
PIPELINED = replace(SHORT, pp=2, seed=4321, recompute=True, **EXPERTS)


def steps_of(run):
    """Run the demo's ``train`` on the globals step by step; yield the weights at the end."""
    job = build(run)
    yield None
    for number in range(run.steps):
        yield step(run, number, job)
    yield weights(job)


def two_models():
    """Return losses and weights of two models, trained in turns and each alone."""
    warnings.simplefilter("ignore")
    runs = [TENSOR_PARALLEL, PIPELINED]
    alone = [train_on_globals(run, f"alone {number}") for number, run in enumerate(runs)]
    before = state()
    told = [[], []]
    with (
        megatron_on_cpu(),
        megapg.session(name="first", timeout=60, **sizes(runs[0])) as first,
        megapg.session(name="second", timeout=60, **sizes(runs[1])) as second,
    ):
        turns = [megapg.Turn(first), megapg.Turn(second)]
        models = [steps_of(run) for run in runs]
        for _ in range(1 + runs[0].steps + 1):
            for which in (0, 1):
                with turns[which]:
                    told[which].append(next(models[which]))
            assert not parallel_state.is_initialized()
    after = state()
    assert all(after[name] is before[name] for name in before)
    together = [(tuple(losses), weights) for _, *losses, weights in told]
    return together, [(each.losses, each.weights_sha256) for each in alone]


@pytest.mark.contract
def test_two_models_in_one_process_train_as_in_two():
    for together, alone in distributed(two_models, 4):
        assert together == alone
        assert [len(set(losses)) for losses, _ in together] == [3, 3]


def generate_then_train():
    """Compare a step after a forward pass in inference mode with a step of a job without one."""
    run = replace(SHORT, tp=2, sequence_parallel=True)
    losses = []
    for generates in (True, False):
        with training(run) as job:
            if generates:
                words = torch.arange(run.seq_length).unsqueeze(0)
                with torch.inference_mode():
                    job.chunks[0].eval()(words, words, None)
                job.chunks[0].train()
            losses.append(job.steps(0, 2))
    return losses


def test_who_generates_trains_on_as_if_nothing_had_been():
    for generated, never in distributed(generate_then_train, 2):
        assert generated == never
