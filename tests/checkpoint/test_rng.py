"""Capture, restore, seeding and forks of random streams, against Megatron-core's own numbers."""

import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from resuming import distributed
from streams import draw, plain

import megapg
from megapg import rng
from megapg.errors import (
    CheckpointMismatchError,
    NoCollectionError,
    StaleGroupError,
    UnsupportedOptionError,
)
from megapg.megatron import forbid_global_reads, published
from megapg.rng import capture_rng_state, fork_rng, restore_rng_state, seed_all
from megapg.testing import fake_collection, megatron_on_cpu

pytestmark = pytest.mark.contract

STREAMS = (rng.DATA_STREAM, rng.TENSOR_STREAM, rng.EXPERT_STREAM)


@pytest.fixture(autouse=True)
def fresh_tracker():
    initialize_rng_tracker(force_reset=True)
    yield
    initialize_rng_tracker(force_reset=True)


def now():
    return plain(rng._captured())


# -- real ranks --------------------------------------------------------------------------------


def seed_as_megatron(seed, dp_rank, pp_rank):
    seed = seed + 100 * pp_rank + 10 * dp_rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)  # reads its ranks from the globals


def on_real_ranks(sizes):
    warnings.simplefilter("ignore")
    found = {}
    with megatron_on_cpu(), megapg.session(timeout=60, **sizes) as session:
        pg = session.groups
        for random_init in (False, True):
            with published(pg):
                dp_rank = parallel_state.get_data_parallel_rank() if random_init else 0
                seed_as_megatron(1234, dp_rank, pg.rank("pp"))
            theirs = now()
            for generator in (random, np.random):
                generator.seed(99)
            torch.manual_seed(99)
            with forbid_global_reads():
                seed_all(1234, pg, data_parallel_random_init=random_init)
            assert now() == theirs
            assert get_cuda_rng_tracker().seeds_ == {
                torch.Generator().set_state(state).initial_seed()
                for state in get_cuda_rng_tracker().get_states().values()
            }

            draw()
            records = capture_rng_state(pg, data_parallel_random_init=random_init)
            kept, first = plain(records), draw()
            draw()
            restore_rng_state(records, pg, data_parallel_random_init=random_init)
            assert draw() == first
            restore_rng_state(records, pg, data_parallel_random_init=random_init)
            assert draw() == first, "restoring must not use up the records"
            assert plain(records) == kept
            found[random_init] = (first, kept)

            before = now()
            with pytest.raises(CheckpointMismatchError, match="data_parallel_random_init"):
                restore_rng_state(records, pg, data_parallel_random_init=not random_init)
            assert now() == before
        place = {name: pg.rank(name) for name in ("tp", "pp", "dp", "ep", "expt_tp", "expt_dp")}
    with pytest.raises(StaleGroupError, match="capture_rng_state"):
        capture_rng_state(pg)
    return place, found


def test_seeds_are_megatrons_and_every_rank_draws_again_what_it_drew():
    everyone = distributed(partial(on_real_ranks, {"tp": 2, "pp": 2, "ep": 2}), 8)
    for random_init, same, tensor, expert in ((False, 2, 4, 6), (True, 4, 8, 8)):
        dp = ("dp",) if random_init else ()
        # Two pp and two ep ranks give three expert seeds: Megatron adds 100 for either.
        for stream, axes, different in (
            *((name, ("pp",), same) for name in ("python", "numpy", "torch", rng.DATA_STREAM)),
            (rng.TENSOR_STREAM, ("pp", "tp"), tensor),
            (rng.EXPERT_STREAM, ("pp", "ep", "expt_tp"), expert),
        ):
            drawn = {}
            for place, found in everyone:
                at = tuple(place[axis] for axis in (*axes, *dp))
                drawn.setdefault(at, set()).add(found[random_init][0][stream])
            assert all(len(numbers) == 1 for numbers in drawn.values())
            assert len(set.union(*drawn.values())) == different
    for place, found in everyone:
        records = found[True][1]
        assert len(found[False][1]) == 1
        assert len(records) == 2
        for other, theirs in everyone:
            if all(other[axis] == place[axis] for axis in ("tp", "pp")):
                assert theirs[True][1] == records
        assert records[0] != records[1]


# -- one process -------------------------------------------------------------------------------


def test_a_record_has_megatrons_keys_and_outlives_the_streams_without_the_kit_too():
    with fake_collection(tp=2, pp=2, rank=3) as pg:
        seed_all(7, pg)
        (record,) = capture_rng_state(pg)
        kept = plain(record)
        assert type(record) is dict
        assert set(record) == {
            "random_rng_state",
            "np_rng_state",
            "torch_rng_state",
            "cuda_rng_state",
            "rng_tracker_states",
        }
        assert set(record["rng_tracker_states"]) == set(STREAMS)
        assert record["torch_rng_state"].dtype == torch.uint8
        torch.rand(5), random.random(), np.random.rand()
        assert plain(record) == kept != now()
        restore_rng_state([record], pg)
        assert now() == kept
        with megatron_on_cpu():
            assert now() == kept
            draw()
            restore_rng_state([record], pg)
            assert now() == kept


def test_seeding_again_drops_streams_that_others_added():
    with fake_collection() as pg, megatron_on_cpu():
        seed_all(7, pg)
        get_cuda_rng_tracker().add("mine", 5)
        seed_all(7, pg)
        assert set(get_cuda_rng_tracker().get_states()) == set(STREAMS)
        get_cuda_rng_tracker().add("mine", 5)
        with pytest.raises(Exception, match="already exists"):  # Megatron tracks the seeds
            get_cuda_rng_tracker().add("other", 7)


@pytest.mark.parametrize("seed", [0, -1, 2**32 - 100])
def test_a_seed_out_of_range_is_refused_before_anything_is_seeded(seed):
    with fake_collection(pp=2, rank=1) as pg:
        before = now()
        with pytest.raises(UnsupportedOptionError, match=f"seed={seed} .* both must be from 1"):
            seed_all(seed, pg)
        assert now() == before
        seed_all(2**32 - 101, pg)  # the largest seed, NumPy's


@pytest.mark.parametrize(
    "call",
    [
        lambda: capture_rng_state(None),
        lambda: restore_rng_state([], None),
        lambda: seed_all(1, None),
    ],
)
def test_without_a_collection_the_globals_must_serve(call):
    with pytest.raises(NoCollectionError, match=r"_rng_state|seed_all"):
        call()


@pytest.mark.skipif(
    not hasattr(parallel_state, "get_gtp_weight_remat_group"), reason="this core shards no weights"
)
def test_ranks_that_shard_weights_are_seeded_as_megatron_seeds_them():
    sizes = {"tp": 2, "gtp_remat": 2, "expt_gtp_remat": 2}
    assert distributed(partial(on_real_ranks, sizes), 8)  # each rank compares


def test_ranks_that_shard_weights_draw_values_of_their_own():
    for rank in range(2):
        with fake_collection(world_size=2, gtp_remat=2, expt_gtp_remat=2, rank=rank) as pg:
            seed_all(1, pg)
        found = get_cuda_rng_tracker().seeds_
        assert {1 + 2718 + 65536 * (1 + rank), 1 + 1024 + 32768 + 65536 * (1 + rank)} < found
    with (
        fake_collection(world_size=4, gtp_remat=2, cp=2) as pg,
        pytest.raises(UnsupportedOptionError, match="Leave one of the three out"),
    ):
        seed_all(1, pg, data_parallel_random_init=True)


# -- checks before a stream is changed ---------------------------------------------------------


def without(key):
    return lambda record: {name: value for name, value in record.items() if name != key}


def replaced(**values):
    return lambda record: {**record, **values}


def tracked(**values):
    return lambda record: {
        **record,
        "rng_tracker_states": {**record["rng_tracker_states"], **values},
    }


BAD = [
    (without("np_rng_state"), "without np_rng_state"),
    (without("rng_tracker_states"), "without rng_tracker_states"),
    (lambda record: None, "a NoneType without cuda_rng_state, np_rng_state, random_rng_state"),
    (replaced(random_rng_state=(3, (1, 2), None)), "random_rng_state"),
    (replaced(random_rng_state=None), "random_rng_state"),
    (replaced(np_rng_state=("MT19937", [1, 2], 0)), "np_rng_state"),
    (replaced(np_rng_state={}), "np_rng_state"),
    (replaced(torch_rng_state=torch.zeros(16, dtype=torch.uint8)), "torch_rng_state.*16 bytes"),
    (replaced(torch_rng_state=b"abc"), "torch_rng_state, a bytes"),
    (replaced(cuda_rng_state=torch.zeros(16, dtype=torch.uint8)), "cuda_rng_state.*cpu plays"),
    (replaced(rng_tracker_states={}), f"streams none; .* also has {', '.join(STREAMS)}"),
    (replaced(rng_tracker_states=None), "rng_tracker_states, a NoneType"),
    (
        replaced(rng_tracker_states={rng.TENSOR_STREAM: torch.get_rng_state()}),
        f"also has {rng.DATA_STREAM}, {rng.EXPERT_STREAM}",
    ),
    (tracked(more=torch.ones(3)), r"rng_tracker_states\['more'\], a Tensor of 3 bytes"),
    (tracked(more="x"), r"rng_tracker_states\['more'\], a str"),
]


@pytest.mark.parametrize(("spoil", "named"), BAD, ids=[named for _, named in BAD])
def test_a_record_that_does_not_fit_is_named_and_nothing_is_changed(spoil, named):
    with fake_collection() as pg:
        seed_all(7, pg)
        (record,) = capture_rng_state(pg)
        torch.rand(1), random.random(), np.random.rand()
        before = now()
        with pytest.raises(CheckpointMismatchError, match=f"restore_rng_state: .*{named}"):
            restore_rng_state([spoil(record)], pg)
        assert now() == before


def test_a_record_may_bring_streams_that_the_tracker_has_not_yet():
    with fake_collection() as pg, megatron_on_cpu():
        seed_all(7, pg)
        get_cuda_rng_tracker().add("mine", 5)
        (record,) = capture_rng_state(pg)
        first = draw()
        initialize_rng_tracker(force_reset=True)
        restore_rng_state([record], pg)
        assert draw() == first


def test_streams_that_were_never_seeded_are_none():
    with fake_collection() as pg:
        (record,) = capture_rng_state(pg)
        assert record["rng_tracker_states"] == {}
        torch.rand(1)
        restore_rng_state([record], pg)
        assert now() == plain(record)
        assert not get_cuda_rng_tracker().is_initialized()


# -- trackers made for CUDA graphs -------------------------------------------------------------


def test_generators_of_a_tracker_are_captured_as_tensors_and_restored_in_place():
    live = {name: torch.Generator().manual_seed(n) for n, name in enumerate(STREAMS)}
    get_cuda_rng_tracker().set_states(dict(live))
    with fake_collection() as pg:
        (record,) = capture_rng_state(pg)
        assert all(type(state) is torch.Tensor for state in record["rng_tracker_states"].values())
        first = {name: torch.rand(3, generator=each).tolist() for name, each in live.items()}
        restore_rng_state([record], pg)
        assert get_cuda_rng_tracker().get_states() == live
        assert first == {n: torch.rand(3, generator=each).tolist() for n, each in live.items()}
        restore_rng_state([{**record, "rng_tracker_states": dict(live)}], pg)  # Megatron's format
        restore_rng_state([record], pg)
        with fork_rng():
            torch.rand(3, generator=live[STREAMS[0]])
            get_cuda_rng_tracker().set_states({})
        assert get_cuda_rng_tracker().get_states() == live
        assert now() == plain(record)


def test_streams_for_cuda_graphs_are_refused_where_there_is_no_cuda():
    with fake_collection() as pg:
        seed_all(7, pg)
        records = capture_rng_state(pg)
        initialize_rng_tracker(force_reset=True)
        get_cuda_rng_tracker().use_cudagraphable_rng = True  # creating such a tracker needs CUDA
        before = now()
        with pytest.raises(UnsupportedOptionError, match=r"seed_all: .*CUDA graphs"):
            seed_all(7, pg)
        torch.rand(1)
        with pytest.raises(UnsupportedOptionError, match=r"restore_rng_state: .*CUDA graphs"):
            restore_rng_state(records, pg)
        torch.set_rng_state(records[0]["torch_rng_state"])
        assert now() == before


# -- fork --------------------------------------------------------------------------------------


def use_everything(pg):
    draw()
    seed_all(99, pg)
    get_cuda_rng_tracker().add("evaluation", 5)
    draw()
    return ()


def test_fork_puts_every_stream_back():
    with fake_collection() as pg, megatron_on_cpu():
        seed_all(7, pg)
        draw()
        before, seeds = now(), set(get_cuda_rng_tracker().seeds_)
        for _ in range(2):  # the second fork can use the seeds of the first
            with fork_rng():
                assert now() == before
                use_everything(pg)
                assert now() != before
            assert now() == before
            assert get_cuda_rng_tracker().seeds_ == seeds
        with pytest.raises(ZeroDivisionError), fork_rng():
            1 / len(use_everything(pg))
        assert now() == before
        with fork_rng():
            draw()
            inner = now()
            with fork_rng():
                use_everything(pg)
            assert now() == inner
        assert now() == before


def test_fork_leaves_a_tracker_that_was_never_seeded_so():
    with fake_collection() as pg, megatron_on_cpu():
        before = now()
        with fork_rng():
            use_everything(pg)
        assert now() == before
        assert not get_cuda_rng_tracker().is_initialized()
        seed_all(5, pg)


def test_fork_inside_a_fork_of_the_tracker():
    with fake_collection() as pg, megatron_on_cpu():
        seed_all(7, pg)
        with get_cuda_rng_tracker().fork():
            expected = torch.rand(3).tolist()
        seed_all(7, pg)
        with get_cuda_rng_tracker().fork():
            with fork_rng():
                torch.rand(7)
                with get_cuda_rng_tracker().fork(rng.EXPERT_STREAM):
                    torch.rand(7)
            assert torch.rand(3).tolist() == expected
        initialize_rng_tracker(force_reset=True)
