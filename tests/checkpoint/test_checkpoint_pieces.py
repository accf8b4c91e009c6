"""The distributed optimizer's state in pieces: the same tensors on disk as when gathered."""

import itertools
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from resuming import RUN, Training, distributed, published_groups, training, whole_tensors
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megapg.checkpoint import optimizer_pieces as pieces
from megapg.checkpoint.contents import read_metadata
from megapg.checkpoint.optimizer import with_groups
from megapg.checkpoint.planning import merge_plans, shard
from megapg.checkpoint.state import model_state
from megapg.errors import CheckpointSaveError
from megapg.tools.demo import gpt

pytestmark = pytest.mark.contract


# -- boxes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (7,), (1, 5), (4, 6), (3, 1, 4), (2, 3, 4, 2), (5, 0)])
def test_a_range_is_the_boxes_that_it_is_cut_into(shape):
    """Every range of every shape is covered exactly, in as few boxes as possible."""
    size = int(np.prod(shape))
    flat = np.arange(size).reshape(shape)
    for first in range(size + 1):
        for last in range(first, size + 1):
            found = []
            for number, (offset, extent) in enumerate(pieces.boxes(shape, first, last), 1):
                assert number <= max(1, 2 * len(shape) - 1)
                where = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
                assert flat[where].shape == extent
                found += flat[where].ravel().tolist()
            assert sorted(found) == list(range(first, last))


# -- one parameter, cut by any number of ranks -----------------------------------------------------


def whole(key="w", shape=(6, 5), prepended=0):
    offsets = [(axis, 1, 3) for axis in range(prepended)] + [(prepended, 1, 2)]
    return ShardedTensor.from_rank_offsets(
        key, torch.randn(shape), *offsets, replica_id=(0, 0, 0), prepend_axis_num=prepended
    )


def columns(place):
    """Return a factory whose tensors are views with gaps."""

    def build(key, data, replica_id, flattened_range):
        return {
            name: ShardedTensor.from_rank_offsets(f"{key}.{name}", part, replica_id=replica_id)
            for name, part in zip("ab", data.split([2, 3], dim=1), strict=True)
        }

    return ShardedTensorFactory("w", place.data, build, None, (0, 0, 0))


def mixed(place):
    """Return a factory that builds a new tensor from the parameter."""

    def build(key, data, replica_id, flattened_range):
        return [ShardedTensor.from_rank_offsets(key, data * 2, replica_id=replica_id)]

    return ShardedTensorFactory("w", place.data, build, None, (0, 0, 0))


PLACES = {
    "plain": whole,
    "flat": partial(whole, shape=(8,)),
    "of a stack of layers": partial(whole, prepended=1),
    "three axes": partial(whole, shape=(4, 3, 5)),
    "gated": lambda: apply_swiglu_sharded_factory(whole(), ()),
    "gated, of a stack of layers": lambda: apply_swiglu_sharded_factory(
        whole(prepended=1), ((0, 1, 3),)
    ),
    "columns": lambda: columns(whole()),
}


def written(place, name, state, cuts):
    """Return key -> tensor as the ranks write it, one part each; check that no element repeats."""
    found = {}
    for start, end in itertools.pairwise(cuts):
        mine = state.flatten()[start:end].clone()
        for item, data in pieces.items_of(place, {f"optimizer.state.{name}.": mine}, start, end):
            tensor = found.setdefault(item.index.fqn, torch.full(item.tensor_data.size, torch.nan))
            chunk = item.tensor_data.chunk
            assert data.shape == chunk.sizes
            where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert tensor[where].isnan().all()
            tensor[where] = data
    return found


@pytest.mark.parametrize("kind", PLACES)
def test_the_pieces_of_a_parameter_are_the_parameter(kind):
    draw = random.Random(5)
    place = PLACES[kind]()
    shape = place.data.shape
    state = torch.randn(shape)
    build = replace(place, key=f"optimizer.state.exp_avg.{place.key}", data=state)
    leaves = list(nested_values({"": build.build()})) if hasattr(build, "build") else [build]
    expected = {}
    for leaf in leaves:
        tensor = expected.setdefault(leaf.key, torch.full(leaf.global_shape, torch.nan))
        tensor[leaf.global_slice()] = leaf.data
    for ranks in (1, 2, 3, 7):
        inner = sorted(draw.randint(0, state.numel()) for _ in range(ranks - 1))
        found = written(place, "exp_avg", state, [0, *inner, state.numel()])
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key].nan_to_num(7.0), tensor.nan_to_num(7.0)), (kind, ranks)


def test_what_a_factory_computes_is_not_cut():
    assert pieces._tensors(mixed(whole())) is None


# -- real jobs -------------------------------------------------------------------------------------


def both_ways(runs, root):
    """Save each job in pieces and gathered, and resume from both."""
    counts = []
    for number, run in enumerate(runs):
        with training(run) as job:
            job.steps(0, 2)
            where = f"{root}/{number}"
            job.save(f"{where} pieces", 2)
            with mock.patch.object(pieces, "can_be_cut", return_value=False):
                job.save(f"{where} gathered", 2)
            one, other = (f"{where} {way}/iter_0000002" for way in ("pieces", "gathered"))
            if torch.distributed.get_rank() == 0:
                cut, gathered = whole_tensors(one), whole_tensors(other)
                assert cut.keys() == gathered.keys()
                for key, tensor in cut.items():
                    assert torch.equal(tensor, gathered[key]), key
                    assert not tensor.isnan().any(), key
                counts.append((chunks(one), chunks(other)))
            digest = job.digest()
            for way in ("pieces", "gathered"):
                again = Training(run, job.pg, seed=77)
                again.load(f"{where} {way}")
                assert again.digest() == digest
                again.let_go()
    return counts


def chunks(path):
    entries = read_metadata(Path(path)).state_dict_metadata.values()
    return sum(len(entry.chunks) for entry in entries if hasattr(entry, "chunks"))


def test_the_same_tensors_as_when_they_are_gathered(tmp_path):
    small = replace(RUN, hidden=24, heads=2)
    runs = [
        replace(small, tp=2),
        small,
        replace(small, tp=2, ep=2, experts=4, sequence_parallel=True),
        replace(small, pp=2),
    ]
    counts, *_ = distributed(partial(both_ways, runs, str(tmp_path)), 4)
    assert counts[0][0] > counts[0][1]
    for cut, gathered in counts:
        # The count grows with the boundaries between ranks, not with the parameters.
        assert gathered <= cut <= 1.4 * gathered


ODD = replace(RUN, hidden=24, heads=2)


class Odd(gpt.GPTModel):
    """A model that has a parameter without elements."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decoder.final_layernorm.nothing = torch.nn.Parameter(torch.empty(0))


class Wrapped(torch.Tensor):
    """A tensor subclass, whose memory can be anywhere."""


def odd_weights(root):
    """Return the pieces of weights that are not gathered, some of which are unusual."""
    with published_groups() as pg:
        job = Training(ODD, pg)
        metadata = with_groups({}, pg)

        def written(**more):
            leaves = job.optimizer.chained_optimizers
            return pieces.weights_of(leaves, job.chunks, model_state(job.chunks, metadata) | more)

        def beside(data):
            return ShardedTensor.from_rank_offsets("beside", data)

        weight = next(job.chunks[0].parameters()).detach()
        assert written(beside=beside(torch.ones(2))).rest["beside"].key == "beside"
        assert written(beside=beside(weight.view(-1)[:2])) is None
        assert written(beside=beside(torch.ones(2).as_subclass(Wrapped))) is None
        assert written().keys == {
            leaf.key
            for leaf in nested_values(model_state(job.chunks, metadata))
            if isinstance(leaf, ShardedTensor) and torch.distributed.get_rank() == 0
        }
        job.let_go()
        with mock.patch.object(gpt, "GPTModel", Odd):
            job = Training(ODD, pg)
        assert written() is None
        job.steps(0, 1)
        job.save(root, 1)
        assert "decoder.final_layernorm.nothing" in whole_tensors(f"{root}/iter_0000001")
        job.load(root)
        job.let_go()


def test_what_can_not_be_written_in_pieces_is_gathered(tmp_path):
    distributed(partial(odd_weights, str(tmp_path)), 2)


def test_a_weight_that_nobody_wrote_is_named():
    item, _ = shard("a", (2,), (0,), torch.ones(2))
    place = _StorageInfo("__0_0.distcp", 0, 8)
    with pytest.raises(CheckpointSaveError, match="b is written by no rank"):
        merge_plans({0: [item]}, {0: [place]}, "iter_0000001", weights={"a", "b"})
