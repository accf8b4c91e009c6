"""The traffic of real training steps on gloo ranks equals formulas, in count and bytes."""

from collections import Counter
from functools import cache

import pytest
from real_step import Case, real_steps

pytestmark = pytest.mark.contract

QUICK = [
    # tensor and sequence parallelism
    Case(2, tp=2),
    Case(2, tp=2, sequence_parallel=True),
    Case(2, tp=2, sequence_parallel=True, recompute="full"),
    Case(2, tp=2, recompute="selective", microbatches=3),
    # pipelines
    Case(2, pp=2, microbatches=4),
    Case(2, pp=2, microbatches=2, tied=False, recompute="full"),
    Case(2, pp=2, vpp=2, microbatches=4),
    # data parallelism
    Case(2),
    Case(2, distributed_optimizer=False),
    Case(2, bf16=False, micro_batch_size=2),
    # parts of a sequence
    Case(2, cp=2),
    Case(2, cp=2, recompute="selective"),
    # experts
    Case(2, ep=2, experts=4),
    Case(2, ep=2, experts=4, dispatcher="allgather", tied=False),
]
LARGE = [
    Case(4, tp=4, microbatches=2),
    Case(4, tp=2, cp=2),
    Case(4, tp=2, cp=2, sequence_parallel=True, recompute="full"),
    Case(4, cp=2, pp=2, microbatches=2),
    Case(4, tp=2, tied=False, recompute="selective"),
    Case(4, pp=4, microbatches=4, learned_positions=True),
    Case(4, pp=4, vpp=2, layers=8, microbatches=4, tied=False),
    Case(8, tp=2, pp=2, microbatches=2),
    Case(8, tp=2, pp=2, sequence_parallel=True, microbatches=2, distributed_optimizer=False),
    Case(4, ep=4, experts=8, recompute="full"),
    Case(4, ep=4, experts=4, top_k=1, dispatcher="allgather", distributed_optimizer=False),
    Case(4, ep=2, pp=2, experts=4, microbatches=2),
    *(
        Case(4, tp=2, sequence_parallel=True, ep=2, experts=4, expt_tp=expt_tp, dispatcher=which)
        for expt_tp in (1, 2)
        for which in ("alltoall", "allgather")
    ),
]


@cache
def steps(*cases):
    return real_steps(cases)


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_traffic_of_two_ranks(number):
    check(QUICK[number], steps(*QUICK)[QUICK[number]])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LARGE)))
def test_traffic_of_more_ranks(number):
    check(LARGE[number], steps(*LARGE)[LARGE[number]])


def check(case, ranks):
    """Compare the rows of every rank with the formulas for its stage."""
    for rank, rows in enumerate(ranks):
        stage = rank // (case.world_size // case.pp)
        names = {name: row.field for row in rows for name in (row.field, *row.fields)}
        counts, bytes_ = Counter(), Counter()
        for field, collective, count, nbytes in flows(case, stage):
            counts[names.get(field, field), collective] += count
            bytes_[names.get(field, field), collective] += nbytes
        assert {(row.field, row.collective): row.count for row in rows} == +counts
        assert {(row.field, row.collective): row.bytes for row in rows} == +bytes_


# --- the formulas ---------------------------------------------------------------------------------


def flows(case, stage):
    """Yield field, collective, count and bytes for a rank of a pipeline stage."""
    yield from tensor_parallel(case, stage)
    yield from context_parallel(case)
    yield from pipeline(case, stage)
    if case.experts:
        yield from dispatch(case)
    yield from gradients(case, stage)


def times(count, nbytes):
    return count, count * nbytes


def layers_of(case):
    return case.layers // case.pp


def tokens_of(case):
    """Number of tokens of a microbatch that the ranks of tp have together."""
    return case.seq_length // case.cp * case.micro_batch_size


def activation(case):
    """Bytes of the hidden states of these tokens between two layers."""
    return tokens_of(case) * case.hidden * case.dtype.itemsize


def tensor_parallel(case, stage):
    first, last = stage == 0, stage == case.pp - 1
    many, whole, layers = case.microbatches, activation(case), layers_of(case)
    if last:  # the largest logit, the logit of the label, and the sum of the exponentials
        yield "tp", "all_reduce", *times(3 * many, tokens_of(case) * 4)
    if case.tp == 1:
        return
    blocks = 1 if case.experts else 2  # the attention, and the MLP unless it has experts
    again = 2 if case.recompute == "full" else 1
    if not case.sequence_parallel:
        count = first + blocks * layers * (again + 1) + last
        yield "tp", "all_reduce", *times(many * count, whole)
        return
    # Each backward pass of a block gathers the input again, and the gradient of the output.
    gathers = first + blocks * layers * (again + 2) + 2 * last
    scatters = first + blocks * layers * (again + 1) + last
    yield "tp", "all_gather", *times(many * gathers, whole)
    yield "tp", "reduce_scatter", *times(many * scatters, whole)
    # Gradients of norms, of biases after a reduction, and of the router.
    h = case.hidden
    of_layer = 4 * h + (case.experts * h if case.experts else 2 * h)
    yield "tp", "all_reduce", *times(1, 4 * (layers * of_layer + 2 * h * last))


def context_parallel(case):
    """Yield the traffic of keys and values, which the backward pass gathers again."""
    if case.cp == 1:
        return
    both = 2 * case.microbatches * layers_of(case)
    whole = case.cp * activation(case) // case.tp
    forward = 1 if case.recompute == "none" else 2
    yield "cp", "all_gather", *times((forward + 1) * both, whole)
    yield "cp", "reduce_scatter", *times(both, whole)


def pipeline(case, stage):
    if case.pp == 1:
        return
    first, last = stage == 0, stage == case.pp - 1
    nbytes = activation(case) // (case.tp if case.sequence_parallel else 1)
    chunks, many = case.vpp or 1, case.microbatches
    # The first chunk of all sends no gradient, and the last chunk of all sends no output.
    count = many * (2 * chunks - first - last)
    # Two interleaved stages send one way over WORLD, so that both ways go on at once.
    send = recv = "pp"
    if case.pp == 2 and case.vpp:
        send, recv = ("pp", "default_pg") if first else ("default_pg", "pp")
    yield send, "send", *times(count, nbytes)
    yield recv, "recv", *times(count, nbytes)
    if case.tied and (first or last):
        yield "embd", "all_reduce", *times(1, 4 * case.vocabulary // case.tp * case.hidden)


def dispatch(case):
    """Yield the traffic of the experts' layers. Routing is even."""
    split = case.expt_tp or case.tp
    ranks, size = case.ep * split, case.dtype.itemsize
    tokens = case.seq_length * case.micro_batch_size // case.tp
    layers = layers_of(case) * case.microbatches
    forward = layers * (2 if case.recompute == "full" else 1)
    both = forward + layers
    if case.dispatcher == "allgather":
        states, scores = tokens * case.hidden * size, tokens * case.experts
        yield "tp_ep", "all_gather", *times(forward, ranks * scores)  # which experts
        yield "tp_ep", "all_gather", *times(forward, ranks * scores * size)  # probabilities
        yield "tp_ep", "all_gather", *times(both, ranks * states)
        yield "tp_ep", "reduce_scatter", *times(layers, ranks * scores * size)
        yield "tp_ep", "reduce_scatter", *times(both, ranks * states)
        return
    states, scores = tokens * case.top_k * case.hidden * size, tokens * case.top_k * size
    yield "tp_ep", "all_gather", *times(forward, ranks * case.experts * 8)  # tokens per expert
    yield "ep", "all_to_all", *times(2 * both, states)
    yield "ep", "all_to_all", *times(both, scores)
    if split > 1:
        yield "expt_tp", "all_gather", *times(both, split * states)
        yield "expt_tp", "all_gather", *times(forward, split * scores)
        yield "expt_tp", "reduce_scatter", *times(both, split * states)
        yield "expt_tp", "reduce_scatter", *times(layers, split * scores)


def gradients(case, stage):
    """Yield the traffic of gradients, of weights, and of the norm of the gradients."""
    chunks, experts = parameters(case, stage)
    if not case.distributed_optimizer:
        for buckets in chunks:
            yield "dp_cp", "all_reduce", 1, 4 * sum(map(sum, buckets))
        yield "mp", "all_reduce", 1, 4
        if experts:
            yield "expt_dp", "all_reduce", 1, 4 * sum(experts)
            yield "tp_ep_pp", "all_reduce", 1, 4
        return
    gathers = 2 if experts else 1  # each of the two optimizers gathers all weights
    for number, buckets in enumerate(chunks):
        count = 1 if number else len(buckets)  # one call for the buckets of later chunks
        padded = sum(map(bucket, buckets))
        yield "dp_cp", "reduce_scatter", count, 4 * padded
        yield "dp_cp", "all_gather", gathers * count, gathers * padded * case.dtype.itemsize
    if experts:
        yield "expt_dp", "reduce_scatter", 1, 4 * bucket(experts)
        yield "expt_dp", "all_gather", 2, 2 * bucket(experts) * case.dtype.itemsize
    yield "intra_dist_opt", "all_reduce", 1, 4


def bucket(sizes):
    """Return the length of a bucket: parameters start at multiples of 64, it ends at one of 128."""
    return -(-sum(-(-size // 64) * 64 for size in sizes) // 128) * 128


def parameters(case, stage):
    """Return the sizes of parameters: of each chunk's buckets, and of the experts."""
    h, t, first, last = case.hidden, case.tp, stage == 0, stage == case.pp - 1
    attention = [3 * h * h // t, h * h // t]
    mlp = [4 * h * h // t, 4 * h * h // t]
    biases = [3 * h // t, h, 4 * h // t, h]
    norms = [h] * 4
    embedding = case.vocabulary * h // t
    if case.experts:
        split, count = case.expt_tp or t, case.experts // case.ep
        experts = [4 * h * h // split] * 2 * count * layers_of(case)
        layer = [*attention, *norms, case.experts * h]
    else:
        experts, layer = [], [*attention, *mlp, *biases, *norms]
    ends = ([case.seq_length * h] if case.learned_positions and first else []) + [h] * 2 * last
    embeddings = [embedding] if case.pp == 1 and case.tied else [embedding] * (first + last)
    count = case.vpp or 1
    chunks = [[layer * (layers_of(case) // count)] for _ in range(count)]
    chunk = chunks[-1 if last else 0]
    chunk[0] += ends
    if case.tied and case.pp > 1 and case.distributed_optimizer and embeddings:
        chunk.append(embeddings)  # the shared weight has a separate bucket
    else:
        chunk[0] += embeddings
    return chunks, experts
