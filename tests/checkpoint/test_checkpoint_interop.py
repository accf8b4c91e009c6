"""Megatron and megapg load each other's checkpoints, bit for bit on every rank.

``megatron_training.py`` implements Megatron's side. It uses the real
``megatron.training.checkpointing`` if the installed Megatron-core has it, else
``megatron.core.dist_checkpointing``.
"""

import contextlib
import gc
import json
import logging
import re
import warnings
from argparse import Namespace
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fused_adam import fused
from megatron.core import dist_checkpointing
from resuming import whole_tensors
from stepwise import distributed
from streams import draw
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megapg
from megapg.checkpoint.verify import verify
from megapg.errors import RankFailedError, RngStateWarning
from megapg.testing import megatron_on_cpu
from megapg.tools.demo.job import GPTRun

pytestmark = pytest.mark.contract

SMALL = GPTRun(layers=2, hidden=32, seq_length=16, num_microbatches=1)
VPP = {"pp": 2, "vpp": 2, "layers": 4, "num_microbatches": 2}
STEPS = 2  # before the save, and again after it
ITERATION = f"iter_{STEPS:07d}"
TRACKER = "latest_checkpointed_iteration.txt"
# the case that also loads a release; its optimizer has separate master weights
WITH_RELEASE = "dp2 bf16"
EXPERT_STREAM = "expert-parallel-rng"


def job(distributed_optimizer=True, **given):
    """Split mixed arguments into those of ``GPTRun`` and those of ``megatron_training.Job``."""
    mine = {"sharding", "bf16", "data_parallel_random_init", "fully_parallel", "fused"}
    mine &= given.keys()
    told = {name: given.pop(name) for name in mine}
    return {**given}, {"distributed_optimizer": distributed_optimizer, **told}


JOBS = {
    2: {
        "tp2": job(tp=2),
        "ep2": job(ep=2, experts=4),
        "tp2 ep2 expt_tp1": job(tp=2, ep=2, expt_tp=1, experts=4, sequence_parallel=True),
        "dp2 bf16": job(bf16=True),
        "dp2 random init": job(data_parallel_random_init=True, sharding="dp_reshardable"),
        "dp2 bf16 plain optimizer": job(distributed_optimizer=False, bf16=True),
        # with the stand-ins of the fused optimizers:
        "dp2 bf16 te": job(bf16=True, fused="te"),
        "tp2 apex by buckets": job(tp=2, fused="apex", sharding="dp_reshardable"),
        "ep2 apex": job(ep=2, experts=4, fused="apex"),
        "dp2 bf16 te plain optimizer": job(distributed_optimizer=False, bf16=True, fused="te"),
    },
    4: {
        "tp2 pp2": job(tp=2, pp=2),
        "tp2 pp2 vpp2": job(tp=2, **VPP),
        "tp2 ep2": job(tp=2, ep=2, experts=4, sequence_parallel=True),
        "pp2 dp2 bf16 random init": job(pp=2, bf16=True, data_parallel_random_init=True),
        "tp2 dp2 one writer": job(tp=2, sharding="dp_reshardable", fully_parallel=False),
    },
    8: {
        "tp2 pp2 vpp2 dp2": job(tp=2, bf16=True, **VPP),
        "tp2 pp2 ep2": job(tp=2, pp=2, ep=2, experts=4, sequence_parallel=True),
    },
}
# No case of two ranks covers these: all ways to cut a model at once, and the choice of writer.
OF_FOUR = {"tp2 pp2 vpp2", "tp2 dp2 one writer"}


def is_slow(world_size, name):
    return world_size > 2 and name not in OF_FOUR


CASES = [
    pytest.param(
        world_size, name, id=name, marks=[pytest.mark.slow] if is_slow(world_size, name) else []
    )
    for world_size, jobs in JOBS.items()
    for name in jobs
]
every_case = pytest.mark.parametrize(("world_size", "name"), CASES)


# -- in the ranks ----------------------------------------------------------------------------------


def save_and_load_each_others(root, jobs):
    """Run the cases one after the other; return this rank's state before and after each load."""
    from megatron_training import Job

    warnings.simplefilter("ignore")  # Megatron-core warns about features that a CPU lacks
    logging.disable(logging.WARNING)
    gc.freeze()  # each save and load runs the garbage collector
    found = {}
    for name, (run, told) in jobs.items():
        what = Job(replace(SMALL, **run), **told)
        with (
            megatron_on_cpu(),
            fused(what.fused) if what.fused else contextlib.nullcontext(),
            megapg.session(timeout=60, **what.sizes) as session,
            megapg.published(session.groups) as pg,
        ):
            found[name] = every_way(root / name, what, pg)
            if name == WITH_RELEASE:
                found["release"] = releases(root / "release", what, pg)
    return found


def every_way(root, what, pg):
    import megatron_training as megatron

    training = megatron.Training(what, pg, seed=11)
    for _ in range(STEPS):
        training.step()
    found = {"before": before_saving(training)}
    megatron.save(training, root / "megatron")
    save(training, root / "megapg")
    found["uninterrupted"] = observe(training)
    for reader, read in (("megatron", megatron.load), ("megapg", load)):
        for writer in ("megatron", "megapg"):
            training = megatron.Training(what, pg, seed=99)
            fresh = training.state()
            read(training, root / writer)
            found[f"{reader} from {writer}"] = observe(training)
            found[f"{reader} from {writer}"]["fresh"] = fresh
            found[f"{reader} from {writer}"]["rng"] = training.told
    found["place"] = tuple(pg.rank(axis) for axis in ("pp", "tp", "dp_cp"))
    found["experts"] = tuple(pg.rank(axis) for axis in ("pp", "ep", "expt_tp"))
    return found


def releases(root, what, pg):
    import megatron_training as megatron

    training = megatron.Training(what, pg, seed=11)
    training.step()
    megatron.save(training, root / "megatron", release=True)
    save(training, root / "megapg", release=True)
    found = {"released": training.state()}
    for reader, read in (("megatron", megatron.load), ("megapg", load)):
        for writer in ("megatron", "megapg"):
            training = megatron.Training(what, pg, seed=99)
            scheduler = training.scheduler.state_dict()
            read(training, root / writer)
            found[f"{reader} from {writer}"] = training.state()
            assert training.iteration == 0
            assert training.scheduler.state_dict() == scheduler
            training.let_go()
    return found


def before_saving(training):
    """Return everything that a load restores: the state, and the next values of each stream."""
    import megatron_training as megatron

    state, streams = training.state(), megatron.streams()
    drawn = draw()
    megatron.set_streams(streams)
    return {"state": state, "draws": drawn}


def observe(training):
    """Return the state, the next draws and the following steps of the training."""

    seen = {"state": training.state(), "draws": draw()}
    seen["losses"] = [training.step().hex() for _ in range(STEPS)]
    seen["later"] = training.state()
    training.let_go()
    return seen


def save(training, root, release=False):
    megapg.save_checkpoint(
        root,
        training.iteration,
        model=training.chunks,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        pg_collection=training.pg,
        args=training.args,
        num_floating_point_operations=training.operations,
        optimizer_sharding=training.job.sharding,
        data_parallel_random_init=training.job.data_parallel_random_init,
        fully_parallel=training.job.fully_parallel,
        release=release,
    )


def load(training, root):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RngStateWarning)
        loaded = megapg.load_checkpoint(
            root,
            model=training.chunks,
            optimizer=training.optimizer,
            scheduler=training.scheduler,
            pg_collection=training.pg,
        )
    training.iteration = loaded.iteration
    training.operations = loaded.num_floating_point_operations
    training.args.consumed_train_samples = loaded.args.consumed_train_samples
    training.args.consumed_valid_samples = loaded.args.consumed_valid_samples
    if loaded.rng is not None:  # a release has no random streams
        said = [str(w.message) for w in warned if w.category is RngStateWarning]
        training.told = loaded.rng.exact, loaded.rng.reason, said


# -- results of the ranks --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return ``ran(world_size, name)``: the directory and all ranks' results, computed once."""
    runs = {}

    def run(world_size, slow):
        """Run all slow cases of this size, or all other cases."""
        root = tmp_path_factory.mktemp(f"world{world_size}")
        jobs = {n: job for n, job in JOBS[world_size].items() if is_slow(world_size, n) is slow}
        return root, distributed(partial(save_and_load_each_others, root, jobs), world_size)

    def once(world_size, name):
        which = world_size, is_slow(world_size, name)
        if which not in runs:
            try:
                runs[which] = run(*which)
            except RankFailedError as error:
                runs[which] = error
        if isinstance(runs[which], RankFailedError):
            raise runs[which]
        return runs[which]

    return once


@pytest.fixture
def found(ran, world_size, name):
    return [rank[name] for rank in ran(world_size, name)[1]]


@pytest.fixture
def written(ran, world_size, name):
    root = ran(world_size, name)[0] / name
    return root / "megatron", root / "megapg"


def differences(one, other):
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def check_restored(found, way):
    """Check that everything except the random streams is restored."""
    for rank, told in enumerate(found):
        kept, restored = told["uninterrupted"], told[way]
        assert not differences(kept["state"], restored["state"]), (rank, way)
        assert kept["losses"] == restored["losses"], (rank, way)
        assert not differences(kept["later"], restored["later"]), (rank, way)


def without_own_record(found):
    """Return ranks whose expert stream is in no record by (pp, tp): first replicas alone save."""
    kept = {told["experts"] for told in found if told["place"][2] == 0}
    return {rank for rank, told in enumerate(found) if told["experts"] not in kept}


@every_case
def test_these_cases_can_tell(found, name):
    for told in found:
        state = told["uninterrupted"]["state"]
        assert state == told["before"]["state"]  # neither save changes the state
        assert told["before"]["draws"] == told["uninterrupted"]["draws"]
        for way in ("megatron", "megapg"):
            fresh = told[f"megapg from {way}"]["fresh"]
            assert fresh.keys() <= state.keys()  # Adam's state appears at its first step
            weights = {k for k in fresh if k.endswith("word_embeddings.weight") or ".main" in k}
            assert weights
            assert weights - differences(fresh, state) <= {k for k in weights if "norm" in k}
        assert state["iteration"] == STEPS
        assert len(set(told["uninterrupted"]["losses"])) == STEPS
        counted = [v for k, v in state.items() if k.endswith(".step")]
        assert counted
    assert len({tuple(told["uninterrupted"]["losses"]) for told in found}) == 1


@every_case
def test_megatron_restores_its_own(found):
    """This is the control: a difference here comes from Megatron."""
    check_restored(found, "megatron from megatron")
    check_megatrons_streams(found, "megatron from megatron")


@every_case
def test_megatron_loads_what_megapg_saved(found):
    check_restored(found, "megatron from megapg")
    check_megatrons_streams(found, "megatron from megapg")


def check_megatrons_streams(found, way):
    """Megatron reads the record by (pp, tp), so some ranks get another rank's expert stream."""
    first = {told["place"][:2]: told for told in found if told["place"][2] == 0}
    for rank, told in enumerate(found):
        differ = differences(told["before"]["draws"], told[way]["draws"])
        if told["experts"] == first[told["place"][:2]]["experts"]:
            assert not differ, (rank, way)
        else:
            assert differ == {EXPERT_STREAM}, (rank, way)
            others = first[told["place"][:2]]["before"]["draws"]
            assert told[way]["draws"][EXPERT_STREAM] == others[EXPERT_STREAM]


@every_case
def test_megapg_loads_what_megatron_saved(found):
    way = "megapg from megatron"
    check_restored(found, way)
    lost = without_own_record(found)
    for rank, told in enumerate(found):
        differ = differences(told["before"]["draws"], told[way]["draws"])
        exact, reason, warned = told[way]["rng"]
        assert exact is (rank not in lost)
        assert differ == ({EXPERT_STREAM} if rank in lost else set()), rank
        assert warned == ([f"{reason}."] if rank in lost else [])
        if rank not in lost:
            continue
        # A stream that can't be restored is new, and the same for the same experts.
        fresh = told[way]["draws"][EXPERT_STREAM]
        for other in found:
            assert fresh != other["before"]["draws"][EXPERT_STREAM], rank
            same = fresh == other[way]["draws"][EXPERT_STREAM]
            assert same is (told["experts"] == other["experts"]), rank


@every_case
def test_megapg_loads_what_megapg_saved(found):
    way = "megapg from megapg"
    check_restored(found, way)
    for told in found:
        assert told["before"]["draws"] == told[way]["draws"]
        assert told[way]["rng"][0] is True
        assert not told[way]["rng"][2]


@pytest.mark.parametrize("writer", ["megatron", "megapg"])
@pytest.mark.parametrize("reader", ["megatron", "megapg"])
def test_a_release_brings_the_weights_and_nothing_else(ran, reader, writer):
    root, ranks = ran(2, WITH_RELEASE)
    assert (root / "release" / writer / TRACKER).read_text() == "release"
    for rank in ranks:
        released, loaded = rank["release"]["released"], rank["release"][f"{reader} from {writer}"]
        weights = {key for key in released if key.startswith("model")}
        assert weights
        assert not weights & differences(released, loaded)
        # The master weights are rebuilt from the rounded weights.
        main = {key: value for key, value in loaded.items() if key.endswith(".main")}
        assert main.keys() & differences(released, loaded)
        also = rank["release"]["megatron from megatron"]
        assert main == {key: also[key] for key in main}


# -- the files -------------------------------------------------------------------------------------


@every_case
def test_the_same_tensors_and_objects_are_on_disk(written, world_size):
    theirs, ours = (described(root / ITERATION) for root in written)
    not_ours = {
        key for key in theirs if key.startswith(("common_state/", "rerun_state_machine_state/"))
    }
    per_rank = {key for key in ours if re.fullmatch(r"rng_state/shard_\d+\.\d+\.\d+_.*", key)}
    assert len(per_rank) == world_size
    assert ours.keys() - per_rank == theirs.keys() - not_ours
    for key in ours.keys() - per_rank:
        if ours[key] is not None and key.startswith("optimizer.state."):  # in pieces, not gathered
            *same, cut = ours[key]
            assert same == list(theirs[key][:2]), key
            assert is_whole(same[0], cut), key
        else:
            assert ours[key] == theirs[key], key


def is_whole(shape, cut):
    """True if the boxes cover every element once."""
    covered = np.zeros(shape, np.int8)
    for offset, size in cut:
        covered[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
    return bool((covered == 1).all())


@every_case
def test_the_same_values_are_on_disk(written):
    theirs, ours = (whole_tensors(root / ITERATION) for root in written)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        if "bucket_idx" not in key:  # the gaps between its parameters hold uninitialised memory
            assert torch.equal(tensor, theirs[key]), key
            assert not tensor.isnan().any(), key


def described(directory):
    """Return key -> (global shape, type, cut) of a tensor; None for an object."""
    entries = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        key: (
            tuple(entry.size),
            entry.properties.dtype,
            sorted((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks),
        )
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in entries.items()
    }


@every_case
def test_the_common_state_is_the_same(written):
    theirs, ours = (common_state(root / ITERATION) for root in written)
    theirs.pop("rerun_state_machine", None)
    assert ours.keys() == theirs.keys()
    assert isinstance(ours["args"], Namespace)
    one, other = vars(ours.pop("args")), vars(theirs.pop("args"))
    assert differences(one, other) <= {"save"}
    assert ours == theirs


def common_state(directory):
    """Read the common state: the file ``common.pt``, or since 0.19 an entry in a shard."""
    if (directory / "common.pt").exists():
        # Megatron-core registers the needed classes at import.
        return torch.load(directory / "common.pt", weights_only=True)
    return dist_checkpointing.load_common_state_dict(str(directory))


@every_case
def test_the_small_files_are_the_same(written):
    theirs, ours = written
    assert (ours / TRACKER).read_text() == (theirs / TRACKER).read_text() == str(STEPS)
    form, our_form = (
        json.loads((root / ITERATION / "metadata.json").read_text()) for root in written
    )
    # Megatron-core 0.16 also requires the last two; 0.19 neither writes nor reads them.
    assert our_form == {**form, "common_backend": "torch", "common_backend_version": 1}
    assert {path.name for path in ours.iterdir()} == {ITERATION, TRACKER, ".megapg.lock"}
    names = {path.name for path in (ours / ITERATION).iterdir()}
    shards = {name for name in names if re.fullmatch(r"__\d+_\d+\.distcp", name)}
    assert names - shards == {".metadata", "common.pt", "metadata.json", "integrity.json"}


@every_case
def test_both_pass_verification(written):
    for root in written:
        assert not verify(root / ITERATION).problems
