"""Stock Megatron-core training under ``published``: parallel_state never initialised, same bits.

The model code gets no collection at all here, so every group it uses is one it reads from the
globals; ``test_training.py`` has the runs that pass one.
"""

import os
import re
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

import megapg
from megapg.demo.job import GPTRun
from megapg.megatron import parallel_state, published, trace_global_reads
from megapg.testing import megatron_on_cpu, run_distributed

pytestmark = pytest.mark.contract

TEXT = Path(__file__).read_bytes()
SHORT = GPTRun(steps=2, layers=4, hidden=32, seq_length=32, num_microbatches=2, recompute=True)
EXPERTS = {"experts": 4, "ep": 2}

distributed = partial(
    run_distributed,
    deadline=200,
    preload=("megapg.demo.gpt",),
    env={"PYTHONWARNINGS": "ignore"},
)


def sizes(run):
    return {"tp": run.tp, "pp": run.pp, "ep": run.ep}


def state():
    return {n: v for n, v in vars(parallel_state).items() if re.match(r"_[A-Z]", n)}


def train_on_globals(run, name):
    """As a program without megapg does it."""
    from megapg.demo.gpt import train

    warnings.simplefilter("ignore")  # Megatron-core's, about what a CPU lacks
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        expert_model_parallel_size=run.ep,
        create_gloo_process_groups=False,
    )
    with megatron_on_cpu():
        result = train(run, TEXT, None)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return result.losses, result.weights_sha256


def train_published(run):
    """Stock code and, on the same groups, code that passes them on."""
    from megapg.demo.gpt import train

    warnings.simplefilter("ignore")
    before = state()
    results = []
    with megatron_on_cpu(), megapg.session(timeout=60, **sizes(run)) as session:
        for passed in (None, session.groups):
            with published(session.groups), trace_global_reads(session=session.groups) as trace:
                result = train(run, TEXT, passed)
            results.append((result.losses, result.weights_sha256))
            assert {read.answered_by for read in trace.reads} == {"session"}
            after = state()
            assert after.keys() == before.keys()
            assert all(after[name] is before[name] for name in before)
            assert not parallel_state.is_initialized()
    return results


def both_ways(runs):
    return [
        (*train_published(run), train_on_globals(run, f"globals {number}"))
        for number, run in enumerate(runs)
    ]


def test_a_stock_training_run_reads_everything_from_what_is_published():
    dense = replace(SHORT, tp=2, pp=2)
    moe = replace(dense, sequence_parallel=True, **EXPERTS)
    for compared in distributed(partial(both_ways, [dense, moe]), 8):
        for stock, passed, on_globals in compared:
            assert len(stock[0]) == 2
            assert stock == passed == on_globals


# -- two models ------------------------------------------------------------------------------------

TENSOR_PARALLEL = replace(SHORT, tp=2, steps=3)
PIPELINED = replace(SHORT, pp=2, steps=3, seed=4321, **EXPERTS)


class RandomStreams:
    """What belongs to one model, and Megatron-core keeps once for the process.

    Its tracker of the streams for dropout and initialisation, and torch's own generator (on a GPU
    torch.cuda's as well). Whoever trains two models takes turns with them as with the groups.
    """

    def __init__(self):
        self.kept = None

    @contextmanager
    def in_use(self):
        if self.kept is not None:
            torch.set_rng_state(self.kept[0])
            get_cuda_rng_tracker().set_states(self.kept[1])
        yield
        self.kept = torch.get_rng_state(), get_cuda_rng_tracker().get_states()


def steps_of(run):
    """``megapg.demo.gpt.train`` on the globals, cut into its steps; at last its weights."""
    from megapg.demo import gpt

    pp_group, dp_group = gpt._pipeline_and_data_groups(None)
    gpt._seed(run.seed + 100 * pp_group.rank(), None)
    chunks = gpt._build_chunks(run, None, pp_group)
    optimizer = gpt._build_optimizer(run, chunks, None)
    forward_backward = gpt._schedule(run, chunks, None)
    yield None
    for step in range(run.steps):
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        reported = forward_backward(data_iterator=gpt._batches(run, TEXT, step, dp_group))
        optimizer.step()
        yield gpt._mean_over_job(reported, pp_group, dp_group)
    chunks[0].start_param_sync(force_sync=True)
    weights = gpt._digest(chunks)
    gpt._let_go(chunks)
    yield weights


def two_models():
    warnings.simplefilter("ignore")
    before = state()
    runs = [TENSOR_PARALLEL, PIPELINED]
    told = [[], []]
    with (
        megatron_on_cpu(),
        megapg.session(name="first", timeout=60, **sizes(runs[0])) as first,
        megapg.session(name="second", timeout=60, **sizes(runs[1])) as second,
    ):
        groups = [first.groups, second.groups]
        streams = [RandomStreams(), RandomStreams()]
        models = [steps_of(run) for run in runs]
        for _ in range(1 + runs[0].steps + 1):
            for which in (0, 1):
                with published(groups[which]), streams[which].in_use():
                    told[which].append(next(models[which]))
            assert not parallel_state.is_initialized()
    after = state()
    assert all(after[name] is before[name] for name in before)
    return [(tuple(losses), weights) for _, *losses, weights in told]


def test_two_models_in_one_process_train_as_in_two():
    together = distributed(two_models, 4)
    for which, run in enumerate((TENSOR_PARALLEL, PIPELINED)):
        alone = distributed(partial(train_on_globals, run, "alone"), 4)
        assert [both[which] for both in together] == alone
        assert len(set(alone[0][0])) == 3
