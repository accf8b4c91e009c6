"""The demo's GPT, one training step at a time: something may happen to the groups in between."""

from pathlib import Path

from megapg.megatron import published

TEXT = Path(__file__).read_bytes()


def build(run, pg):
    from megapg.demo import gpt

    gpt._seed(run.seed + 100 * pg.rank("pp"), pg)
    chunks = gpt._build_chunks(run, pg, pg.pp)
    optimizer = gpt._build_optimizer(run, chunks, pg)
    return chunks, optimizer, gpt._schedule(run, chunks, pg)


def step(run, number, job, pg):
    from megapg.demo import gpt

    chunks, optimizer, forward_backward = job
    with published(pg):
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        reported = forward_backward(data_iterator=gpt._batches(run, TEXT, number, pg.dp))
        optimizer.step()
        return gpt._mean_over_job(reported, pg.pp, pg.dp)


def weights(job, pg):
    from megapg.demo import gpt

    with published(pg):
        job[0][0].start_param_sync(force_sync=True)
    digest = gpt._digest(job[0])
    gpt._let_go(job[0])
    return digest
