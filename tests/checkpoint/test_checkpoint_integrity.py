"""A load returns the data as saved, or every rank refuses the checkpoint.

The tests flip bits in real checkpoints of megapg and of Megatron-core, exchange files between
checkpoints, and write hostile small files.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import random
import shutil
import signal
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from damage import flip, rewrite
from resuming import RUN, cut, distributed, megatron_saves_alone, published_groups, training
from test_checkpoint_directory import saved
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from two_layers import Layers
from xxhash import xxh3_64, xxh3_128

import megapg
from megapg.checkpoint import archive, optimizer, rng_entries
from megapg.checkpoint.commit import Partial
from megapg.checkpoint.contents import layout_of_checkpoint, read_contents
from megapg.checkpoint.directory import TRACKER, find, latest, list_checkpoints
from megapg.checkpoint.entries import end_of, flaw
from megapg.checkpoint.manifest import MANIFEST_FILE, read_manifest, sum_of, write_manifest
from megapg.checkpoint.optimizer_pieces import boxes
from megapg.checkpoint.planning import shard
from megapg.checkpoint.state import model_state
from megapg.checkpoint.verify import verify
from megapg.checkpoint.writer import write_items
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointSaveError,
    MegapgError,
    UnsafeCheckpointError,
)
from megapg.rng import capture_rng_state

SMALL = {"hidden": 16, "heads": 2, "seq_length": 8}


# ---- archives ------------------------------------------------------------------------------------


def packed(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return bytearray(buffer.getvalue())


def used(members):
    return {name: bytes(data) for name, data in members.items()}


@pytest.mark.parametrize(
    "value", [torch.arange(6.0), torch.ones(1100), {"a": [1, torch.ones(3)], "b": "x"}]
)
def test_every_bit_of_an_archive(value):
    """A flipped bit is refused or changes nothing that a load uses."""
    data = packed(value)
    whole = used(archive.members(memoryview(data), check=True))
    assert whole["byteorder"] == b"little"
    assert "data.pkl" in whole
    refused = 0
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        try:
            assert used(archive.members(memoryview(data), check=True)) == whole, bit
        except ValueError:
            refused += 1
        data[bit // 8] ^= 1 << bit % 8
    assert 8 * sum(map(len, whole.values())) < refused < 8 * len(data)


def test_the_checksums_of_a_shard_cover_every_byte(tmp_path):
    """Entries lie one after the other. Their checksums and that of the file are of the disk."""
    items = [shard(str(n), (n,), (0,), torch.arange(float(n))) for n in (0, 3, 2**20 + 7)]
    items.append((WriteItem(MetadataIndex("x"), WriteItemType.BYTE_IO), io.BytesIO(b"x" * 99)))
    places, sums = write_items(tmp_path, 0, items, lambda: None, contextlib.nullcontext)
    [(name, known)] = sums.items()
    data = (tmp_path / name).read_bytes()
    assert [place.offset for place in places] == [0, *map(end_of, places[:-1])]
    assert known.size == end_of(places[-1]) == len(data)
    assert known.digest == xxh3_128(data).hexdigest()
    entries = [xxh3_64(data[place.offset : end_of(place)]).hexdigest() for place in places]
    assert [*known.entries] == entries


def test_an_error_during_a_write_is_raised_as_it_is(tmp_path):
    """torch.save itself would report an unfinished archive. ``progress`` raises if a rank fails."""
    calls = itertools.count(1)

    def progress():
        if next(calls) == 4:  # in the middle of the tensor
            raise LookupError("another rank failed")

    items = [shard("a", (2**20,), (0,), torch.ones(2**20))]
    with pytest.raises(LookupError, match="another rank failed"):
        write_items(tmp_path, 0, items, progress, contextlib.nullcontext)


def test_numbers_of_64_bits():
    """Give an archive the 64-bit directory of an archive beyond 4 GiB."""
    data = packed(torch.arange(3.0))
    start = data.rindex(b"PK\6\6")
    entry = data.index(b"PK\1\2")
    # the member's offset, 0
    extra = (1).to_bytes(2, "little") + (8).to_bytes(2, "little") + bytes(8)
    name = int.from_bytes(data[entry + 28 : entry + 30], "little")
    data[entry + 30 : entry + 32] = len(extra).to_bytes(2, "little")
    data[entry + 42 : entry + 46] = b"\xff" * 4
    data[entry + 46 + name : entry + 46 + name] = extra
    start += len(extra)
    size = int.from_bytes(data[start + 40 : start + 48], "little") + len(extra)
    data[start + 40 : start + 48] = size.to_bytes(8, "little")
    assert "data.pkl" in archive.members(memoryview(data), check=True)
    data[entry + 46 + name] = 2  # another kind of field
    with pytest.raises(ValueError, match="lacks a number"):
        archive.members(memoryview(data), check=True)


# ---- single bits, in whole jobs ------------------------------------------------------------------


def save_with_megatron(job, root, iteration):
    """Save without a manifest, as a training script does that calls Megatron-core directly."""
    from megatron.core import dist_checkpointing

    metadata = optimizer.content_metadata(job.optimizer)
    live = optimizer.with_groups(metadata, job.pg)
    state = model_state(job.chunks, live)
    state["optimizer"] = job.optimizer.sharded_state_dict(state, is_loading=False, metadata=live)
    [state["rng_state"]] = rng_entries.entries(capture_rng_state(job.pg), job.pg, ("per_tp_pp",))
    path = Path(root, f"iter_{iteration:07d}")
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        Path(root, TRACKER).write_text(str(iteration))
    dist.barrier()
    common = {"checkpoint_version": 3.0, "iteration": iteration, "extra": 7}
    megatron_saves_alone()
    dist_checkpointing.save({**state, **common}, str(path), content_metadata=metadata)
    dist.barrier()


def spoil(job):
    """Overwrite the job's state, so that anything that a load skips shows."""
    with torch.no_grad():
        for chunk in job.chunks:
            for parameter in chunk.parameters():
                parameter.fill_(3)
        for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
            for parameter, state in part.optimizer.state.items():
                parameter.data.fill_(4)
                for tensor in state.values():
                    tensor.fill_(5)
    torch.manual_seed(99)


def loaded(job, root, **options):
    """Return everything that a load restores, or the error of this rank."""
    spoil(job)
    try:
        found = job.load(root, **options)
    except MegapgError as error:
        return error
    streams = torch.get_rng_state().numpy().tobytes() if found.rng is not None else None
    return job.digest(), found.iteration, repr(sorted(found.extra.items())), streams


def chosen(root, count, seed):
    """Choose ``count`` tuples (file, byte, bit): half in shards, half in the small files."""
    choice = random.Random(seed)
    [path] = Path(root).glob("iter_*")
    files = [*path.iterdir(), Path(root, TRACKER)]
    shards = sorted(file for file in files if file.suffix == ".distcp")
    others = sorted(set(files) - set(shards))
    for number in range(count):
        file = choice.choice(shards) if number % 2 else others[number // 2 % len(others)]
        yield file, choice.randrange(file.stat().st_size), choice.randrange(8)


def load_flipped(root, run, by, count, seed):
    """Return the result of each flip: (file, byte, bit, error or None, True if all is as saved)."""
    told = []
    with training(run) as job:
        job.steps(0, 1)
        if by == "megapg":
            job.save(root, 7, extra={"note": torch.arange(5)})
        else:
            save_with_megatron(job, root, 7)
        right = loaded(job, root)
        assert not isinstance(right, MegapgError), right
        for file, byte, bit in chosen(root, count, seed):
            if dist.get_rank() == 0:
                flip(file, byte, bit)
            dist.barrier()
            found = loaded(job, root)
            dist.barrier()
            if dist.get_rank() == 0:
                flip(file, byte, bit)
            error = found if isinstance(found, MegapgError) else None
            told.append((file.name, byte, bit, error, found == right))
            dist.barrier()
        assert loaded(job, root) == right
    return told


LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}}


def flips_of(root, layout, by, count, seed):
    run = cut(RUN, **SMALL, **LAYOUTS[layout])
    ranks = distributed(partial(load_flipped, str(root), run, by, count, seed), 2, deadline=500)
    refused = 0
    for flipped in zip(*ranks, strict=True):
        name, byte, bit, *_ = flipped[0]
        where = f"bit {bit} of byte {byte} of {name} ({layout}, by {by})"
        errors = [error for *_, error, _ in flipped]
        assert all(errors) or all(right for *_, right in flipped), f"{where}: {errors}"
        if all(errors):
            refused += 1
            # Without a manifest, a changed key looks like a missing key.
            renamed = name == ".metadata" and "is missing" in str(errors)
            assert name in str(errors) or name == TRACKER or renamed, f"{where}: {errors}"
            if name.endswith(".distcp"):
                assert all(type(error) is BrokenCheckpointError for error in errors), where
                assert "in its entry '" in str(errors), where
    return refused


@pytest.mark.contract
@pytest.mark.parametrize("by", ["megapg", "Megatron-core"])
def test_flipped_bits(tmp_path, by):
    assert flips_of(tmp_path / "here", "tp2", by, 20, seed=1) > 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "by", "seed"),
    [("tp2", "megapg", 2), ("pp2", "megapg", 3), ("dp2", "megapg", 4), ("tp2", "Megatron-core", 5)],
)
def test_a_hundred_flipped_bits_each(tmp_path, layout, by, seed):
    assert flips_of(tmp_path / "here", layout, by, 100, seed) > 50


# ---- checkpoints of megapg 0.2 -------------------------------------------------------------------


def unpacked(root):
    """Unpack a checkpoint of megapg 0.2, whose manifest has the SHA-256 of each shard."""
    shutil.unpack_archive(Path(__file__).with_name("saved_by_0_2.tar.xz"), root, filter="data")
    return Path(root, "iter_0000005")


def load_old(root):
    file, told = Path(root, "iter_0000005", "__0_0.distcp"), []
    with published_groups() as pg:
        for damaged in (False, True):
            if damaged and dist.get_rank() == 0:
                values = Layers(pg).fill(3).first.weight.detach()[0].numpy().tobytes()
                flip(file, file.read_bytes().index(values))
            dist.barrier()
            for check in (None, True):
                model = Layers(pg).fill(9)
                try:
                    megapg.load_checkpoint(root, model=model, pg_collection=pg, verify=check)
                    told.append(model.mark())
                except BrokenCheckpointError as error:
                    told.append(str(error))
    return told


def test_a_checkpoint_of_0_2_loads(tmp_path):
    unpacked(tmp_path)
    for sound, verified, *refused in distributed(partial(load_old, str(tmp_path)), 2):
        assert (sound, verified) == (3, 3)
        assert "__0_0.distcp is damaged in its entry 'first.weight'" in refused[0]
        assert "__0_0.distcp: has changed: its checksum is another" in refused[1]


def test_a_checkpoint_of_0_2_is_verified(tmp_path):
    path = unpacked(tmp_path)
    assert {file.algorithm for file in read_manifest(path).files.values()} == {"sha256"}
    assert verify(path).good
    for file in sorted(read_manifest(path).files):
        flip(path / file, 70)
        assert verify(path).problems == (f"{file}: has changed: its checksum is another",)
        flip(path / file, 70)


# ---- files that do not belong together -----------------------------------------------------------


def manifest_as_of_megatron(path):
    """Write a manifest with correct sums of every file and no entries."""
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    sums = {file.name: sum_of(file) for file in path.iterdir() if file.is_file()}
    write_manifest(path, sums, {})


def copy_a_shard(ours, theirs):
    ours = sorted(ours.glob("*.distcp"))[0]
    theirs /= ours.name
    assert ours.stat().st_size == theirs.stat().st_size
    assert ours.read_bytes() != theirs.read_bytes()
    shutil.copy(theirs, ours)


def copy_common(ours, theirs):
    shutil.copy(theirs / "common.pt", ours / "common.pt")


def swap_directories(ours, theirs):
    between = ours.with_name("between")
    ours.rename(between)
    theirs.rename(ours)
    between.rename(theirs)


def swap_directories_without_manifests(ours, theirs):
    swap_directories(ours, theirs)
    for path in (ours, theirs):
        (path / MANIFEST_FILE).unlink()


def link_a_directory(ours, theirs):
    """Link a directory of the checkpoint to shards in another place."""
    away = ours.parent / "away"
    away.mkdir()
    for file in ours.glob("*.distcp"):
        file.rename(away / file.name)
    (ours / "sub").symlink_to(away)

    def change(whole):
        for place in whole.storage_data.values():
            place.relative_path = f"sub/{place.relative_path}"

    rewrite(ours, change)
    (ours / MANIFEST_FILE).unlink()


def a_tensor_of_two(whole):
    """Return the key of a weight of which two ranks have one half each."""
    return next(
        key
        for key, entry in whole.state_dict_metadata.items()
        if not key.startswith("optimizer") and len(getattr(entry, "chunks", ())) == 2
    )


def half_a_chunk(ours, theirs):
    def change(whole):
        chunks = whole.state_dict_metadata[a_tensor_of_two(whole)].chunks
        sizes = chunks[0].sizes
        chunks[0] = ChunkStorageMetadata(chunks[0].offsets, torch.Size([sizes[0] // 2, *sizes[1:]]))

    rewrite(ours, change)
    manifest_as_of_megatron(ours)


def one_chunk_less(ours, theirs):
    def change(whole):
        key = a_tensor_of_two(whole)
        gone = whole.state_dict_metadata[key].chunks.pop()
        del whole.storage_data[MetadataIndex(key, gone.offsets)]

    rewrite(ours, change)
    manifest_as_of_megatron(ours)


def no_chunks(ours, theirs):
    rewrite(ours, lambda whole: whole.state_dict_metadata[a_tensor_of_two(whole)].chunks.clear())
    manifest_as_of_megatron(ours)


def two_entries_swapped(ours, theirs):
    """Swap the places of two chunks of one tensor, as a flipped bit in a file name could."""

    def change(whole):
        places = defaultdict(list)
        for index, place in whole.storage_data.items():
            places[index.fqn].append(place)
        one, other = next(
            halves
            for halves in places.values()
            if len(halves) == len({half.relative_path for half in halves}) == 2
        )
        other.relative_path = one.relative_path

    rewrite(ours, change)
    (ours / MANIFEST_FILE).unlink()


def truncated(ours, theirs):
    os.truncate(ours / "__1_0.distcp", 1000)


def removed(ours, theirs):
    (ours / "__1_0.distcp").unlink()


class Hostile:
    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self._mark),)


def hostile(ours, theirs):
    (ours / ".metadata").write_bytes(pickle.dumps(Hostile(ours / "ran")))
    (ours / MANIFEST_FILE).unlink()


LIES = {
    truncated: ("__1_0.distcp", "has a __1_0.distcp of 1000 bytes"),
    removed: ("__1_0.distcp", "has no __1_0.distcp"),
    hostile: (".metadata", "wants posix.mkdir"),
    copy_a_shard: ("__0_0.distcp", "checksum is another"),
    copy_common: ("common.pt", "checksum is another"),
    swap_directories: ("iter_0000001", "holds iteration 2"),
    swap_directories_without_manifests: ("iter_0000001", "holds iteration 2"),
    link_a_directory: (".metadata", "link on the way"),
    half_a_chunk: (".metadata", "leave a part of it out"),
    one_chunk_less: (".metadata", "leave a part of it out"),
    no_chunks: (".metadata", "leave a part of it out"),
    two_entries_swapped: (".metadata", "says that entries of __0_0.distcp overlap"),
}


def load_lies(template):
    told = []
    with training(cut(RUN, **SMALL, tp=2)) as job:
        for iteration in (1, 2):
            job.steps(iteration, iteration + 1)
            job.save(template, iteration)
        before = job.digest()
        for lie in LIES:
            root = Path(f"{template} {lie.__name__}")
            if dist.get_rank() == 0:
                shutil.copytree(template, root)
                lie(root / "iter_0000001", root / "iter_0000002")
            dist.barrier()
            try:
                job.load(root, iteration=1)
                error = None
            except MegapgError as caught:
                error = caught
            told.append((error, job.digest() == before))
            if not told[-1][1]:
                job.load(template)
                assert job.digest() == before
        lie = f"{template} {copy_a_shard.__name__}"
        with pytest.raises(BrokenCheckpointError, match=r"__0_0\.distcp: has changed"):
            job.load(lie, iteration=1, verify=True)
        assert job.digest() == before
        assert job.load(lie, iteration=1, verify=False).iteration == 1
        assert job.digest() != before
    return told


def test_what_does_not_belong_together(tmp_path):
    """A load refuses the checkpoint on every rank, and verify reports the problem."""
    template = tmp_path / "whole"
    for told in distributed(partial(load_lies, str(template)), 2):
        for (lie, (file, text)), (error, untouched) in zip(LIES.items(), told, strict=True):
            unsafe = lie in (link_a_directory, hostile)
            kind = UnsafeCheckpointError if unsafe else BrokenCheckpointError
            assert type(error) is kind, f"{lie.__name__}: {error!r}"
            assert file in str(error), lie.__name__
            assert text in str(error), lie.__name__
            assert untouched or lie is copy_a_shard, lie.__name__
    for lie in LIES:
        report = verify(Path(f"{template} {lie.__name__}", "iter_0000001"))
        assert not report.good, lie.__name__
    assert verify(template / "iter_0000001").good
    assert not list(tmp_path.glob("*/*/ran"))


@pytest.mark.parametrize(
    ("size", "chunks", "wrong"),
    [
        ((4,), [((0,), (4,))], ""),
        ((), [((), ())], ""),
        ((), [], "leave"),
        ((0, 3), [], ""),
        ((4,), [((0,), (4,)), ((4,), (0,))], ""),
        ((4,), [((0,), (2,)), ((0,), (2,))], "overlap"),
        ((4,), [((0,), (4,)), ((1,), (1,))], "overlap"),
        ((4,), [((0,), (3,))], "leave"),
    ],
)
def test_chunks_that_make_no_whole(size, chunks, wrong):
    found = as_torch_has_it(size, chunks)
    assert flaw(found).startswith(wrong)
    assert bool(flaw(found)) is bool(wrong)


def as_torch_has_it(size, chunks):
    return TensorStorageMetadata(
        TensorProperties(torch.float32),
        torch.Size(size),
        [ChunkStorageMetadata(torch.Size(at), torch.Size(of)) for at, of in chunks],
    )


def halved(choice, at, of, depth):
    """Cut a box in two at a random place, and cut each part again."""
    axis = choice.randrange(len(of))
    if depth == 0 or of[axis] < 2:
        return [(at, of)]
    cut = choice.randrange(1, of[axis])
    parts = []
    for start, length in ((0, cut), (cut, of[axis] - cut)):
        part = list(at), list(of)
        part[0][axis] += start
        part[1][axis] = length
        parts += halved(choice, *part, depth - 1)
    return parts


def test_chunks_at_random():
    """The check agrees with counting the elements; half of the cases move a chunk onto another."""
    choice, right = random.Random(0), 0
    for number in range(400):
        size = [choice.randrange(1, 5) for _ in range(choice.randrange(1, 4))]
        chunks = halved(choice, [0] * len(size), size, choice.randrange(6))
        choice.shuffle(chunks)
        if number % 2:
            at, of = choice.choice(chunks)
            chunks[0] = [choice.randrange(n - k + 1) for n, k in zip(size, of, strict=True)], of
        seen = torch.zeros(size)
        for at, of in chunks:
            seen[tuple(slice(a, a + n) for a, n in zip(at, of, strict=True))] += 1
        whole = bool((seen == 1).all())
        assert (not flaw(as_torch_has_it(size, chunks))) is whole, (size, chunks)
        right += whole
    assert 200 <= right < 350


def test_chunks_of_many_ranks_take_no_time():
    """Check a stacked key as Megatron-core writes it: layers and 8 tensor-parallel ranks.

    Each tensor-parallel part holds the boxes of 64 data-parallel ranks. Every rank checks every key
    before a load.
    """
    rows, columns, ranks = 4096, 1024, 64
    cuts = [rows * columns * n // ranks + 7 * (0 < n < ranks) for n in range(ranks + 1)]
    chunks = [
        ((layer, part * rows + row, column), (1, *of))
        for layer in range(4)
        for part in range(8)
        for start, end in pairwise(cuts)
        for (row, column), of in boxes((rows, columns), start, end)
    ]
    tensor = as_torch_has_it((4, 8 * rows, columns), chunks)
    started = time.process_time()
    assert flaw(tensor) == ""
    assert time.process_time() - started < 2
    tensor.chunks[-1] = ChunkStorageMetadata(torch.Size((3, 0, 0)), tensor.chunks[-1].sizes)
    assert flaw(tensor) == "overlap"


# ---- hostile small files -------------------------------------------------------------------------


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(100 * 2**30)


def text(content):
    return lambda path: path.write_text(content)


HOSTILE = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nothing")),
    "a directory": Path.mkdir,
    "100 GiB": sparse,
    "empty": text(""),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "nested": text("[" * 1_000_000),
    "objects": text('{"a":' * 200_000),
}
SMALL_FILES = [MANIFEST_FILE, "metadata.json", ".metadata", "common.pt", TRACKER]


@pytest.fixture
def soon():
    """Fail a test that hangs."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(20)
    yield
    signal.alarm(0)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("file", SMALL_FILES)
def test_a_hostile_file_in_an_old_checkpoint(tmp_path, file, kind):
    """Listing, finding the latest, the next save and the clean-up still work."""
    for iteration in (100, 200, 300):
        saved(tmp_path / f"iter_{iteration:07d}")
    old = tmp_path / "iter_0000100"
    (tmp_path / TRACKER).write_text("300")
    hostile = tmp_path / TRACKER if file == TRACKER else old / file
    hostile.unlink(missing_ok=True)
    HOSTILE[kind](hostile)
    assert [info.iteration for info in list_checkpoints(tmp_path)] == [100, 200, 300]
    assert all(info.complete for info in list_checkpoints(tmp_path)[1:])
    assert latest(tmp_path).iteration == 300
    for look in (
        lambda: layout_of_checkpoint(old),
        lambda: read_contents(old),
        lambda: read_contents(old, check=True),
        lambda: read_manifest(old),
    ):
        with contextlib.suppress(MegapgError):
            look()
    verify(old)
    assert file == TRACKER or not verify(old).good
    partial = Partial.begin(tmp_path, iteration=400)
    saved(partial.path)
    in_the_way = file == TRACKER and kind == "a directory"
    with pytest.raises(CheckpointSaveError) if in_the_way else contextlib.nullcontext():
        partial.publish(keep=2)
    left = [info.iteration for info in list_checkpoints(tmp_path) if info.complete]
    assert left[-2:] == [300, 400]
    assert latest(tmp_path).iteration == 400


@pytest.mark.parametrize("file", [MANIFEST_FILE, "metadata.json"])
def test_a_hostile_file_in_the_latest(tmp_path, file, caplog):
    for iteration in (100, 200):
        saved(tmp_path / f"iter_{iteration:07d}")
    (tmp_path / TRACKER).write_text("200")
    (tmp_path / "iter_0000200" / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "iter_0000200" / file)
    found = find(tmp_path, "iter_0000200")
    assert not found.complete
    assert found.problem in (f"has a {file} that is no regular file", f"has an empty {file}")
    assert latest(tmp_path).iteration == 100
    assert "iter_0000200" in caplog.text
