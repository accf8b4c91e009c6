"""Train the demo's GPT step by step, so that tests can change the groups in between."""

import contextlib
from functools import partial
from pathlib import Path

from megapg.megatron import published
from megapg.testing import run_distributed

TEXT = Path(__file__).read_bytes()

distributed = partial(
    run_distributed,
    deadline=280,
    preload=("megapg.tools.demo.gpt",),
    env={"PYTHONWARNINGS": "ignore"},
)
"""On ranks that train."""


def build(run, pg=None):
    """Build chunks, optimizer and schedule; on Megatron's globals if there is no collection."""
    from megapg.tools.demo import gpt

    pp_group, _ = gpt._pipeline_and_data_groups(pg)
    gpt._seed(run.seed + 100 * pp_group.rank(), pg)
    chunks = gpt.build_chunks(run, pg, pp_group)
    optimizer = gpt.build_optimizer(run, chunks, pg)
    return chunks, optimizer, gpt.schedule(run, chunks, pg)


def step(run, number, job, pg=None):
    """Return the job's mean loss of a step."""
    from megapg.tools.demo import gpt

    chunks, optimizer, forward_backward = job
    pp_group, dp_group = gpt._pipeline_and_data_groups(pg)
    with showing(pg):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [gpt._batches(run, TEXT, number, dp_group) for _ in chunks]
        reported = forward_backward(data_iterator=batches if run.vpp else batches[0])
        optimizer.step()
        return gpt.mean_over_job(reported, pp_group, dp_group)


def weights(job, pg=None):
    from megapg.tools.demo import gpt

    with showing(pg):
        job[0][0].start_param_sync(force_sync=True)
    digest = gpt._digest(job[0])
    gpt.let_go(job[0])
    return digest


def showing(pg):
    return contextlib.nullcontext() if pg is None else published(pg)
