"""Every known format of random-stream records: a rank gets its own streams back, or fresh ones."""

import io
import itertools
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from resuming import distributed
from streams import draw, plain

import megapg
from megapg.checkpoint.load import load_checkpoint
from megapg.checkpoint.rng_entries import entries, record_for_this_rank
from megapg.checkpoint.rng_keys import RngLayout, detect
from megapg.checkpoint.save import save_checkpoint
from megapg.checkpoint.team import groups_for
from megapg.collection import ProcessGroupCollection
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointMismatchError,
    MissingGroupError,
    RngStateWarning,
)
from megapg.layout import ParallelLayout
from megapg.megatron import parallel_state
from megapg.rng import (
    EXPERT_SHARD_STREAM,
    EXPERT_STREAM,
    SHARD_STREAM,
    TENSOR_STREAM,
    capture_rng_state,
    replica_field,
    restore_rng_state,
    seed_all,
    seeded_rng_state,
)
from megapg.testing import fake_collection, megatron_on_cpu

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def fresh_tracker():
    initialize_rng_tracker(force_reset=True)
    yield
    initialize_rng_tracker(force_reset=True)


def streams_of(record):
    """Return stream -> state, in a form that compares and hashes."""
    outside = {name: state for name, state in record.items() if name != "rng_tracker_states"}
    return {
        name: plain(state) for name, state in {**outside, **record["rng_tracker_states"]}.items()
    }


def load(layouts, read, pg, **about):
    """Return the record and the report; check the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record, report = record_for_this_rank(layouts, read, pg, **about)
    said = [str(each.message) for each in caught if each.category is RngStateWarning]
    assert said == ([] if report.exact else [f"{report.reason}."])
    return record, report


# -- real checkpoints, real ranks --------------------------------------------------------------


def reader(directory):
    """Return the keys, and a reader of entries as in load_checkpoint() with an allow-list."""
    storage = dcp.FileSystemReader(directory)
    metadata = storage.read_metadata()
    places = {index.fqn: place for index, place in metadata.storage_data.items()}

    def read(key):
        place = places[key]
        data = (directory / place.relative_path).read_bytes()
        piece = data[place.offset : place.offset + place.length]
        value = torch.load(io.BytesIO(piece), weights_only=False)
        # Megatron-core wraps an object in a list of length one.
        return value[0] if isinstance(value, list) else value

    return list(metadata.state_dict_metadata), read


def save_and_load(directory):
    """Write the mapping of the fsdp_dtensor format on four ranks, and read the records back."""
    warnings.simplefilter("ignore")
    with megatron_on_cpu(), megapg.session(timeout=60, tp=2, ep=2) as session:
        pg = session.groups
        seed_all(1234, pg)
        records = capture_rng_state(pg)
        first = draw()
        mapping = {f"({pg.rank('pp')}, {pg.rank('tp')})": records}
        dcp.save({"rng_state": mapping}, checkpoint_id=directory)
        keys, read = reader(directory)
        record, report = load(detect(keys), read, pg, saved=session.layout)
        restore_rng_state([record], pg)
        return first, draw(), report


@pytest.mark.slow
def test_a_mapping_of_megatron_fsdp_gives_each_rank_its_own_streams_back(tmp_path):
    """Only the experts' stream is fresh, since a piece may be from a rank with other experts."""
    everyone = distributed(partial(save_and_load, tmp_path), 4)
    had = {first[EXPERT_STREAM] for first, *_ in everyone}
    for first, drawn, report in everyone:
        assert not report.exact
        assert drawn.pop(EXPERT_STREAM) not in had
        assert drawn == {n: value for n, value in first.items() if n != EXPERT_STREAM}


# -- every rank of many layouts, in one process ------------------------------------------------

LAYOUTS = [
    ParallelLayout(world_size=4, tp=2),
    ParallelLayout(world_size=8, tp=2, pp=2, cp=2),
    ParallelLayout(world_size=8, tp=2, pp=2, ep=2),
    ParallelLayout(world_size=8, tp=2, ep=4, expt_tp=1),
    ParallelLayout(world_size=8, tp=2, ep=2, expt_tp=1),
    ParallelLayout(world_size=8, tp=1, ep=2, expt_tp=4),
    ParallelLayout(world_size=6, tp=2, ep=3, expt_tp=1),
    ParallelLayout(world_size=8, tp=2, cp=2, ep=4, expt_tp=1),
    ParallelLayout(world_size=8, tp=2, pp=2, ep=2, expt_tp=1, order="tp-cp-ep-pp-dp"),
    ParallelLayout(world_size=8, tp=2, cp=2, ep=2, order="ep-dp-tp-cp-pp"),
    ParallelLayout(world_size=4, tp=2, ep=2, ranks=(2, 3, 8, 9)),
    ParallelLayout(world_size=8, tp=2, gtp_remat=2),
    ParallelLayout(world_size=8, tp=2, gtp_remat=4, ep=2, expt_gtp_remat=2),
    ParallelLayout(world_size=8, pp=2, ep=2, expt_gtp_remat=2),
]
OWN = {
    EXPERT_STREAM: ("pp", "ep", "expt_tp"),
    SHARD_STREAM: ("pp", "tp", "gtp_remat"),
    EXPERT_SHARD_STREAM: ("pp", "ep", "expt_tp", "expt_gtp_remat"),
}


def sizes_of(layout):
    names = ("tp", "pp", "cp", "ep", "expt_tp", "order", "ranks", "gtp_remat", "expt_gtp_remat")
    return {name: getattr(layout, name) for name in names}


def seeded_apart(layout):
    return "dp" if layout.gtp_remat == 1 else "dp_cp_gtp_remat"


class Run:
    """The records and entries of a run, whose ranks are simulated one after the other."""

    def __init__(self, layout, random_init=False):
        self.layout = layout
        self.random_init = random_init
        self.records = {rank: self.record_of(rank) for rank in layout.ranks}
        self.entries = {}
        for rank in layout.ranks:
            with self.playing(rank) as pg:
                own = [self.records[each] for each in pg.ranks(seeded_apart(self.layout))]
                mine = own if random_init else [self.records[rank]]
                for entry in entries(mine, pg):
                    if entry.replica_id == 0:
                        shape = ".".join(map(str, entry.global_shape))
                        offset = ".".join(map(str, entry.global_offset))
                        key = f"{entry.key}/shard_{offset}_{shape}"
                        assert key not in self.entries
                        self.entries[key] = entry.data

    def playing(self, rank):
        return fake_collection(rank, **sizes_of(self.layout))

    def record_of(self, rank):
        with self.playing(rank) as pg:
            return seeded_rng_state(4321, pg, data_parallel_random_init=self.random_init)

    def only(self, axes):
        return [key for key in self.entries if key.split("_")[-1].count(".") == axes - 1]


def loaded(run, layout, keys, known=True, **about):
    """Return rank -> (record, report) of a run of ``layout`` that loads these entries."""
    found = {}
    for rank in layout.ranks:
        with fake_collection(rank, **sizes_of(layout)) as pg:
            saved = run.layout if known else None
            found[rank] = load(detect(keys), run.entries.__getitem__, pg, saved=saved, **about)
    return found


@pytest.mark.parametrize("random_init", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(list(sizes_of(layout).values())))
def test_a_stream_is_restored_on_the_rank_that_had_it_or_is_nobodys(layout, random_init):
    run = Run(layout, random_init)
    had = {rank: streams_of(record) for rank, record in run.records.items()}
    everything = {state for streams in had.values() for state in streams.values()}

    for known in (True, False):
        for _, report in loaded(run, layout, run.only(3), known).values():
            assert report.exact
        for keys in (run.only(3), [*run.entries]):
            found = loaded(run, layout, keys, known)
            assert {r: streams_of(record) for r, (record, _) in found.items()} == had

        found = loaded(run, layout, run.only(2), known)
        shared = {}
        for rank, (record, report) in found.items():
            streams, mine, at = streams_of(record), had[rank], layout.coordinates(rank)
            assert streams.keys() == mine.keys()
            others = layout.members(seeded_apart(layout), rank)
            number = others.index(rank) if random_init else 0
            writer = layout.members(replica_field(layout), rank)[0]
            if random_init:
                writer = layout.members(seeded_apart(layout), writer)[number]
            there = layout.coordinates(writer)
            for name, state in streams.items():
                axes = OWN.get(name, ())
                place = tuple(getattr(at, axis) for axis in axes)
                if name not in OWN or place == tuple(getattr(there, axis) for axis in axes):
                    assert state == mine[name], name
                if name in OWN:
                    assert (state == mine[name]) or state not in everything
                    shared.setdefault((name, place, number), set()).add(state)
            assert report.exact is (streams == mine)
            for name in OWN.keys() & streams.keys():
                assert (name in report.reason) is (streams[name] != mine[name])
        assert all(len(each) == 1 for each in shared.values())
        if layout.ep == layout.gtp_remat == 1 and layout.expt_tp == layout.tp:
            assert all(report.exact for _, report in found.values())


def test_sharded_weights_get_fresh_streams_of_a_run_without_them():
    layout = ParallelLayout(world_size=8, tp=2, gtp_remat=2)
    run = Run(ParallelLayout(world_size=8, tp=2))
    for known in (True, False):
        found = loaded(run, layout, [*run.entries], known)
        shards = {}
        for rank, (record, report) in found.items():
            assert not report.exact
            streams, mine = streams_of(record), streams_of(run.records[rank])
            at = layout.coordinates(rank)
            shards.setdefault((at.tp, at.gtp_remat), set()).add(streams.pop(SHARD_STREAM))
            if known:
                assert "gtp_remat 1 -> 2" in report.reason
            else:  # Megatron's entry has as many replicas and may be of this layout
                assert report.reason == (
                    "rng_state was saved by a run that sharded no weights; gtp-remat-rng starts "
                    "afresh, every other stream is exact"
                )
                assert streams == mine
        assert [len(each) for each in shards.values()] == [1] * 4
        assert len(set.union(*shards.values())) == 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(list(sizes_of(layout).values())))
def test_no_record_is_read_but_a_ranks_own_where_there_is_one(layout):
    run = Run(layout)
    for rank in layout.ranks:
        with run.playing(rank) as pg:
            own = ".".join(map(str, entries([], pg, ("per_rank",))[0].global_offset))
            there = {key: data for key, data in run.entries.items() if f"_{own}_" in key}
            assert load(detect(run.only(3)), there.__getitem__, pg)[1].exact


def test_a_save_takes_the_ranks_that_share_out_sharded_weights_before_anything_is_written(tmp_path):
    def given(pg, but=()):
        fields = ("tp", "pp", "dp", "dp_cp", "ep", "expt_tp", "gtp_remat", "dp_cp_gtp_remat")
        groups = {name: getattr(pg, name) for name in fields if name not in but}
        return ProcessGroupCollection.from_groups(**groups)

    with fake_collection(world_size=4, gtp_remat=2) as pg:
        assert groups_for(given(pg), "save_checkpoint")
        lacking = given(pg, but=("dp_cp_gtp_remat",))
        with pytest.raises(MissingGroupError, match=r"save_checkpoint.*dp_cp_gtp_remat"):
            save_checkpoint(tmp_path, 1, model=[], pg_collection=lacking)
        with pytest.raises(MissingGroupError, match=r"load_checkpoint.*dp_cp_gtp_remat"):
            load_checkpoint(tmp_path, model=[], pg_collection=lacking)
    assert not [*tmp_path.iterdir()]
    with fake_collection(world_size=4) as pg:
        assert groups_for(given(pg, but=("dp_cp_gtp_remat",)), "save_checkpoint")


def test_experts_of_the_last_ranks_start_afresh_and_the_reason_says_whose():
    layout = ParallelLayout(world_size=8, tp=2, pp=2, ep=2)
    run = Run(layout)
    found = loaded(run, layout, run.only(2))
    exact = [rank for rank, (_, report) in found.items() if report.exact]
    assert exact == [0, 1, 4, 5]
    assert "ep rank 1, expt_tp rank 0" in found[2][1].reason
    assert EXPERT_STREAM in found[2][1].reason


def test_experts_are_found_in_the_record_of_another_tensor_rank():
    # Rank 3 has the experts of rank 0, but takes its other streams from the record of rank 1.
    layout = ParallelLayout(world_size=6, tp=2, ep=3, expt_tp=1)
    run = Run(layout)
    found = loaded(run, layout, run.only(2))
    assert {rank for rank, (_, report) in found.items() if report.exact} == {0, 1, 3, 4}
    mine = found[3][0]["rng_tracker_states"]
    assert mine[EXPERT_STREAM].equal(run.records[0]["rng_tracker_states"][EXPERT_STREAM])
    assert mine[TENSOR_STREAM].equal(run.records[1]["rng_tracker_states"][TENSOR_STREAM])


BEFORE = ParallelLayout(world_size=8, tp=2, pp=2, ep=2)
CHANGES = [
    ({"tp": 4, "pp": 1}, 3, "pp 2 -> 1, tp 2 -> 4, expt_tp 2 -> 4"),
    ({"tp": 1}, 2, "tp 2 -> 1, expt_tp 2 -> 1"),
    ({"tp": 1, "expt_tp": 2}, 3, "tp 2 -> 1, dp_cp 2 -> 4"),
    ({"ep": 1}, 3, "ep 2 -> 1"),
    ({"ep": 1}, 2, "ep 2 -> 1"),
    ({"ep": 4, "expt_tp": 1}, 2, "ep 2 -> 4, expt_tp 2 -> 1"),
    ({"world_size": 16}, 3, "dp_cp 2 -> 4"),
]


@pytest.mark.parametrize(("change", "axes", "named"), CHANGES)
def test_another_layout_gets_fresh_streams_that_are_the_same_at_every_load(change, axes, named):
    run, layout = Run(BEFORE), replace(BEFORE, **{"expt_tp": 0, "ranks": (), **change})
    had = {state for record in run.records.values() for state in streams_of(record).values()}
    first = loaded(run, layout, run.only(axes), iteration=5)
    other = loaded(run, layout, run.only(axes), iteration=6)
    tensors = {}
    for rank, (record, report) in first.items():
        assert not report.exact
        assert f"saved with other sizes: {named}; every stream starts afresh" in report.reason
        streams = streams_of(record)
        assert had.isdisjoint(streams.values())
        assert not set(streams.values()) & set(streams_of(other[rank][0]).values())
        at = layout.coordinates(rank)
        tensors.setdefault((at.pp, at.tp), set()).add(streams[TENSOR_STREAM])
    assert all(len(each) == 1 for each in tensors.values())
    assert len(set.union(*tensors.values())) == len(tensors)
    again = loaded(run, layout, run.only(axes), iteration=5)
    assert all(streams_of(again[rank][0]) == streams_of(first[rank][0]) for rank in first)


@pytest.mark.parametrize("world_size", [2, 8])
def test_data_parallel_replicas_come_and_go_where_their_streams_are_one(world_size):
    run = Run(ParallelLayout(world_size=4, tp=2))
    layout = ParallelLayout(world_size=world_size, tp=2)
    of_tp = [streams_of(run.records[rank]) for rank in (0, 1)]
    for keys in (run.only(2), [*run.entries]):  # with both, the load takes the entry that fits
        for rank, (record, report) in loaded(run, layout, keys).items():
            assert report.exact
            assert streams_of(record) == of_tp[rank % 2]
    assert not any(report.exact for _, report in loaded(run, layout, run.only(3)).values())


def test_data_parallel_streams_of_their_own_are_fresh_where_dp_or_cp_changes():
    run = Run(ParallelLayout(world_size=4, tp=2), random_init=True)
    for other in ({"world_size": 8}, {"world_size": 4, "cp": 2}, {"world_size": 2}):
        found = loaded(run, ParallelLayout(tp=2, **other), run.only(2))
        assert not any(report.exact for _, report in found.values())
    layout = ParallelLayout(world_size=8, tp=2)
    found = loaded(run, layout, run.only(2))
    assert "records of 2 data-parallel ranks in each entry, and now dp=4" in found[0][1].reason
    assert len({streams_of(record)["torch_rng_state"] for record, _ in found.values()}) == 4


def test_megatron_bridges_list_of_a_whole_dp_cp_group():
    layout = ParallelLayout(world_size=8, tp=2, cp=2)
    run = Run(layout, random_init=True)
    for key in run.only(2):
        tp = int(key.removeprefix("rng_state/shard_0.")[0])
        run.entries[key] = [run.records[rank] for rank in layout.members("dp_cp", tp)]
    found = loaded(run, layout, run.only(2))
    assert all(report.exact for _, report in found.values())
    assert all(
        streams_of(record) == streams_of(run.records[rank]) for rank, (record, _) in found.items()
    )
    # The cp of the saved run is unknown, and its dp may have been four.
    assert not any(r.exact for _, r in loaded(run, layout, run.only(2), known=False).values())


def test_borrowed_groups_without_a_layout():
    run = Run(BEFORE)
    exact = []
    for rank, axes in itertools.product(BEFORE.ranks, (3, 2)):
        with run.playing(rank) as whole:
            fields = ("tp", "pp", "dp", "dp_cp", "ep", "expt_tp")
            pg = ProcessGroupCollection.from_groups(**{f: getattr(whole, f) for f in fields})
            layouts, read = detect(run.only(axes)), run.entries.__getitem__
            record, report = load(layouts, read, pg)
            assert report.exact is (axes == 3)
            if axes == 3:
                assert streams_of(record) == streams_of(run.records[rank])
            exact.append(load(layouts, read, pg, saved=BEFORE)[1].exact)
    assert exact.count(True) == 8 + 4


def test_streams_of_the_users_own():
    run = Run(BEFORE)
    for number, record in enumerate(run.records.values()):
        record["rng_tracker_states"]["mine"] = torch.Generator().manual_seed(number).get_state()
    kept = loaded(run, BEFORE, run.only(3))
    for rank, (record, _) in kept.items():
        assert streams_of(record) == streams_of(run.records[rank])
    layout = replace(BEFORE, tp=4, pp=1, expt_tp=4)
    fresh = loaded(run, layout, run.only(3))
    mine = {rank: streams_of(record)["mine"] for rank, (record, _) in fresh.items()}
    assert len(set(mine.values())) == 4
    assert mine[0] == mine[4]
    old = {streams_of(record)["mine"] for record in run.records.values()}
    assert old.isdisjoint(mine.values())


def test_streams_from_another_kind_of_device_are_not_forced_in():
    run = Run(ParallelLayout(world_size=1))
    (record,) = run.records.values()
    record["cuda_rng_state"] = torch.zeros(16, dtype=torch.uint8)
    record["rng_tracker_states"] = dict.fromkeys(record["rng_tracker_states"], torch.zeros(16))
    found = loaded(run, run.layout, [*run.entries])
    assert found[0][1].reason.startswith("rng_state was saved on another kind of device")


def test_what_is_no_record_is_named_by_its_key():
    run = Run(ParallelLayout(world_size=1))
    key = "rng_state/shard_0.0.0_1.1.1"
    for bad in (None, [], {}, "x"):
        run.entries[key] = bad
        with pytest.raises(BrokenCheckpointError, match=f"^{key} is no list of records"):
            loaded(run, run.layout, [key])
    for bad in ([1], [{}], [{"torch_rng_state": torch.zeros(3)}]):
        run.entries[key] = bad
        with pytest.raises(CheckpointMismatchError, match=r"^rng_state: .* is no record"):
            loaded(run, run.layout, [key])


# -- keys in a checkpoint ----------------------------------------------------------------------


def shards(key, *sizes):
    of = ".".join(map(str, sizes))
    places = itertools.product(*map(range, sizes))
    return [f"{key}/shard_{'.'.join(map(str, at))}_{of}" for at in places]


MODEL = [
    "decoder.weight",
    "common_state/shard_0_1",
    "optimizer.rng_state_x/shard_0.0_1.1",
    "rng_state/shard_0_1",
    f"rng_state/shard_0.0_{'9' * 5000}.1",
    "rng_state.0.torch_rng_state",
]


@pytest.mark.parametrize(
    ("keys", "named", "expected"),
    [
        (MODEL, {}, []),
        ([], {"prefix": "a."}, []),
        (shards("rng_state", 2, 3), {}, [("per_tp_pp", "rng_state", (2, 3))]),
        (shards("rng_state", 2, 3, 1), {}, [("per_rank", "rng_state", (2, 3, 1))]),
        (
            shards("rng_state", 2, 12) + shards("rng_state", 2, 12, 2),
            {},
            [("per_rank", "rng_state", (2, 12, 2)), ("per_tp_pp", "rng_state", (2, 12))],
        ),
        (shards("a.rng_state", 1, 2), {}, [("per_tp_pp", "a.rng_state", (1, 2))]),
        (shards("a.rng_state", 1, 2), {"prefix": "a."}, [("per_tp_pp", "a.rng_state", (1, 2))]),
        (
            shards("rng_state.vision", 1, 1) + shards("rng_state.language", 1, 2, 2),
            {"module": "language"},
            [("per_rank", "rng_state.language", (1, 2, 2))],
        ),
        (
            shards("rng_state", 1, 1) + shards("b.rng_state", 2, 2),
            {"prefix": ""},
            [("per_tp_pp", "rng_state", (1, 1))],
        ),
        (
            [f"rng_state.({p}, 0).0.{key}" for p in (0, 1) for key in ("x_state", "y.some.name")],
            {},
            [("fsdp_dtensor", "rng_state", (2, 1))],
        ),
    ],
)
def test_layouts_are_told_from_the_keys(keys, named, expected):
    found = detect([*MODEL, *keys], **named)
    assert [(each.kind, each.key, each.sizes) for each in found] == expected


@pytest.mark.parametrize(
    ("keys", "named", "message"),
    [
        (
            shards("a.rng_state", 1, 1) + shards("b.rng_state", 1, 1),
            {},
            "under a.rng_state, b.rng_state. Say which",
        ),
        (shards("rng_state", 1, 1), {"prefix": "a."}, "under rng_state, and none under a.rng"),
        (shards("rng_state", 1, 1), {"module": "m"}, "and none under rng_state.m. Name"),
        ([f"rng_state.(0, 0).0.{key}" for key in "xy"], {"prefix": "a."}, "none under a.rng_state"),
    ],
)
def test_a_name_is_asked_for_where_several_fit_or_none_does(keys, named, message):
    with pytest.raises(CheckpointMismatchError) as caught:
        detect(keys, **named)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (shards("rng_state", 2, 2)[:-1], r"has 3 records .* should have 4.*ing: \(1, 1\)\. "),
        (shards("rng_state", 2, 2, 2)[1:], r"has 7 .* should have 8.*ing: \(0, 0, 0\)\. "),
        (["rng_state/shard_0.0_99999999.99999999"], r"has 1 .* have 9999999800000001.*, \.\.\.\. "),
        (["rng_state/shard_4.4_1.1"], r"has 1 .* should have 1.*ing: \(0, 0\)\. "),
        (["rng_state/shard_0.0_0.0"], r"has 1 .* should have 0.*ing: none\. "),
        (["rng_state/shard_0.0.0_1.1"], r"has 1 .* should have 1.*ing: \(0, 0\)\. "),
        (["rng_state.(1, 0).0.x"], r"has 1 .* should have 2.*ing: \(0, 0\)\. "),
    ],
)
def test_records_that_are_missing_are_named(keys, message):
    with pytest.raises(BrokenCheckpointError, match=f"^rng_state {message}"):
        detect(keys)


def test_pieces_of_a_mapping_are_put_together():
    layout = RngLayout(
        "fsdp_dtensor",
        "rng_state",
        (1, 2),
        (
            "rng_state.(0, 0).0.a",
            "rng_state.(0, 1).0.a",
            "rng_state.(0, 1).0.rng_tracker_states.with.dots",
            "rng_state.(0, 1).1.a",
        ),
    )
    assert layout.read(str.upper, (0, 1, 7)) == [
        {
            "rng_tracker_states": {"with.dots": layout.pieces[2].upper()},
            "a": "RNG_STATE.(0, 1).0.A",
        },
        {"rng_tracker_states": {}, "a": "RNG_STATE.(0, 1).1.A"},
    ]


# -- writing -----------------------------------------------------------------------------------


def test_entries_have_megatrons_keys_and_replicas():
    with fake_collection(world_size=8, rank=7, tp=2, pp=2) as pg:
        both = entries([], pg)
        assert [(e.key, e.global_shape, e.global_offset, e.replica_id) for e in both] == [
            ("rng_state", (2, 2, 2), (1, 1, 1), 0),
            ("rng_state", (2, 2), (1, 1), 1),
        ]


@pytest.mark.skipif(
    not hasattr(parallel_state, "get_gtp_weight_remat_group"), reason="this core shards no weights"
)
def test_ranks_that_shard_weights_have_the_place_that_megatron_gives_them():
    assert distributed(placed, 8)


def placed():
    warnings.simplefilter("ignore")
    with megatron_on_cpu(), megapg.session(tp=2, gtp_remat=2, timeout=60) as session:
        pg = session.groups
        with megapg.published(pg):
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            of_all = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        per_rank, older = entries([], pg)
        assert (per_rank.global_shape, per_rank.global_offset) == (
            (1, 2, of_all),
            (0, pg.rank("tp"), replica),
        )
        assert (older.global_shape, older.replica_id) == ((1, 2), replica)
    return True
