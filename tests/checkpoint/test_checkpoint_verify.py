"""Every kind of damage to a real checkpoint is found, and the file is named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import checkpoint_samples as samples
import numpy as np
import pytest
import torch
from damage import flip, instead, placed, rewrite, without_sums
from test_checkpoint_contents import Runs, saved
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from xxhash import xxh3_128

from megapg.checkpoint import manifest
from megapg.checkpoint.contents import COMMON_KEY, read_contents
from megapg.checkpoint.entries import entries_of
from megapg.checkpoint.manifest import FileSum, sum_of, write_manifest
from megapg.checkpoint.verify import Report, verify
from megapg.errors import BrokenCheckpointError, CheckpointError, CheckpointNotFoundError

MANIFEST = "integrity.json"


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A checkpoint with a manifest."""
    return shutil.copytree(samples.with_manifest() / "iter_0000005", tmp_path / "iter_0000005")


@pytest.fixture
def unknown(known: Path) -> Path:
    """The same checkpoint without a manifest."""
    (known / MANIFEST).unlink()
    return known


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"\0" * 7)


KINDS: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: os.truncate(path, 0),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte less": lambda path: os.truncate(path, path.stat().st_size - 1),
    "first bit": lambda path: flip(path, 0),
    "middle bit": lambda path: flip(path, path.stat().st_size // 2),
    "last bit": lambda path: flip(path, -1),
    "appended": append,
    "removed": Path.unlink,
    "a directory": instead(Path.mkdir),
}
SAID = {
    "emptied": "truncated",
    "halved": "truncated",
    "one byte less": "truncated",
    "appended": "bytes and had",
    "removed": "missing",
    "a directory": "missing",
}
FILES = [*samples.SHARDS, ".metadata", "common.pt", "metadata.json"]


def present(path: Path, file: str) -> Path:
    if not (path / file).exists():
        assert file == "common.pt"
        pytest.skip("this Megatron-core has its common state in a shard")
    return path / file


def only_problem(report: Report, file: str) -> str:
    assert not report.good
    (line,) = report.problems
    assert line.startswith(f"{file}: "), report.problems
    return line


@pytest.mark.contract
@pytest.mark.parametrize("manifest", [True, False])
def test_what_is_whole_is_good(manifest: bool, known: Path) -> None:
    if not manifest:
        (known / MANIFEST).unlink()
    seen: list[tuple[int, int]] = []
    report = verify(known, on_progress=lambda done, total: seen.append((done, total)))
    assert report == Report(known, (), manifest, report.files, report.size)
    assert report.files == len(list(known.iterdir())) - manifest
    assert report.size == sum(f.stat().st_size for f in known.iterdir() if f.name != MANIFEST)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (report.size, report.size)
    assert {total for _, total in seen} == {report.size}


def test_a_checkpoint_of_torch_alone_is_good() -> None:
    report = verify(samples.by_torch())
    assert report.good
    assert not report.manifest


@pytest.mark.contract
def test_a_manifest_of_megatron_core(tmp_path: Path) -> None:
    """Megatron-core's manifest has no sizes, and Megatron-core accepts megapg's manifest."""
    from megatron.core.dist_checkpointing import validation

    if not hasattr(validation, "verify_integrity_manifest"):
        pytest.skip("this Megatron-core has no manifest")
    path = shutil.copytree(
        samples.by_megatron(verify_integrity=True) / "iter_0000005", tmp_path / "a"
    )
    assert "sizes" not in json.loads((path / MANIFEST).read_text())
    assert verify(path) == Report(
        path, (), True, *[getattr(verify(path), n) for n in ("files", "size")]
    )
    flip(path / "__1_0.distcp", 300)
    assert "has changed" in only_problem(verify(path), "__1_0.distcp")

    ours = shutil.copytree(samples.with_manifest() / "iter_0000005", tmp_path / "ours")
    validation._verify_integrity_manifest_impl(str(ours))
    flip(ours / "__1_0.distcp", 300)  # Megatron-core does not check megapg's shards
    validation._verify_integrity_manifest_impl(str(ours))
    flip(ours / "metadata.json", 10)
    with pytest.raises(Exception, match=r"metadata\.json"):
        validation._verify_integrity_manifest_impl(str(ours))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_damage_against_the_manifest(file: str, kind: str, known: Path) -> None:
    KINDS[kind](present(known, file))
    line = only_problem(verify(known), file)
    assert SAID.get(kind, "changed") in line


# In metadata.json and .metadata a bit may change a word that is stored only once.
SELF_TOLD = [
    (file, kind)
    for file in FILES
    for kind in KINDS
    if not (kind == "middle bit" and file in (".metadata", "metadata.json", "common.pt"))
]


@pytest.mark.parametrize(("file", "kind"), SELF_TOLD)
def test_damage_without_a_manifest(file: str, kind: str, unknown: Path) -> None:
    KINDS[kind](present(unknown, file))
    report = verify(unknown)
    assert not report.manifest
    assert not report.good
    assert report.problems[0].startswith(f"{file}: "), report.problems


@pytest.mark.parametrize("file", samples.SHARDS)
def test_one_bit_of_a_weight_without_a_manifest(file: str, unknown: Path) -> None:
    value = np.float32(samples.VALUE).tobytes()
    flip(unknown / file, (unknown / file).read_bytes().index(value))
    line = only_problem(verify(unknown), file)
    assert "is damaged in its entry 'weight': the checksum of data/0 is another" in line


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [samples.SHARDS, (".metadata", "metadata.json")],
)
def test_swapped_files(one: str, other: str, known: Path) -> None:
    swap(known / one, known / other)
    report = verify(known)
    assert set(report.problems) == {
        f"{one}: was swapped with {other}",
        f"{other}: was swapped with {one}",
    }


def test_a_shard_that_is_a_copy_of_another(known: Path) -> None:
    shutil.copy(known / "__0_0.distcp", known / "__1_0.distcp")
    line = only_problem(verify(known), "__1_0.distcp")
    assert line == "__1_0.distcp: holds the contents of __0_0.distcp"


def test_swapped_shards_without_a_manifest(unknown: Path, tmp_path: Path) -> None:
    """A shard of another form is found. A swap of shards of equal form needs the manifest."""
    other = samples.save_plain(tmp_path / "plain", {"weight": torch.ones(3), "bias": 2})
    shutil.copy(other / "__0_0.distcp", unknown / "__1_0.distcp")
    only_problem(verify(unknown), "__1_0.distcp")
    swap(unknown / "__0_0.distcp", unknown / "__1_0.distcp")
    assert verify(unknown).problems[0].startswith("__0_0.distcp: ")


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("name", ["__2_0.distcp", "copy.distcp"])
def test_a_shard_too_many(manifest: bool, name: str, known: Path) -> None:
    shutil.copy(known / "__0_0.distcp", known / name)
    if not manifest:
        (known / MANIFEST).unlink()
    assert "not of this checkpoint" in only_problem(verify(known), name)


def test_a_common_state_slipped_in(known: Path) -> None:
    """It would be read instead of the common state that Megatron-core 0.19 has in a shard."""
    (known / "common.pt").unlink(missing_ok=True)
    (known / MANIFEST).unlink()
    write_manifest(known, samples.sums_of(known), {})
    (known / "common.pt").write_bytes(saved({"iteration": 7}))
    assert "does not list it" in only_problem(verify(known), "common.pt")


def test_what_does_not_belong_to_a_checkpoint_is_left_alone(known: Path) -> None:
    (known / "README").write_text("ours")
    (known / "modelopt_state").mkdir()
    (known / "modelopt_state" / "x.distcp").touch()
    assert verify(known).good


def edit(file: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


MANIFEST_DAMAGE: dict[str, Callable[[Path], object]] = {
    **{kind: KINDS[kind] for kind in ("emptied", "halved", "one byte less", "a directory")},
    "no text": lambda file: file.write_bytes(b"\xff\xfe\0"),
    "too deep": lambda file: file.write_text("[" * 200_000),
    "a bit": lambda file: flip(file, 100),
    "a sum": lambda file: edit(file, lambda c: c["files"].update({".metadata": "0" * 64})),
    "a size": lambda file: edit(file, lambda c: c["sizes"].update({".metadata": 1})),
    "a line less": lambda file: edit(file, lambda c: c["files"].pop(".metadata")),
    "a line more": lambda file: edit(file, lambda c: c["files"].update({"x": "0" * 64})),
    "the note": lambda file: edit(file, lambda c: c["megapg"].update({"iteration": 6})),
    "a shard's sum": lambda file: edit(file, lambda c: c["shards"].popitem()),
    "no checksum": lambda file: edit(file, lambda c: c.pop("checksum")),
    "other algorithm": lambda file: edit(file, lambda c: c.update({"algorithm": "md5"})),
    "a pipe": instead(os.mkfifo),
}


@pytest.mark.parametrize("kind", MANIFEST_DAMAGE)
def test_a_damaged_manifest(kind: str, known: Path) -> None:
    MANIFEST_DAMAGE[kind](known / MANIFEST)
    report = verify(known)
    only_problem(report, MANIFEST)
    assert not report.manifest


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        '{"algorithm": 3}',
        '{"files": {"a": 1}}',
        '{"files": {"../x": "0"}}',
        '{"files": {"..": "0"}}',
        '{"files": {"\\ud800": "0"}}',
        '{"files": {}, "sizes": []}',
        '{"files": {}, "sizes": {"x": 1}}',
        '{"files": {"a": "0"}, "sizes": {"a": Infinity}}',
        '{"files": {"a": "0"}, "sizes": {"a": %s}}' % ("9" * 9999),
        '{"files": {}, "shards": {"a": {"xxh3_128": 7, "xxh3_64": ""}}}',
        '{"files": {}, "shards": {"a": {"xxh3_128": "0", "xxh3_64": "0"}}}',
    ],
)
def test_a_manifest_that_makes_no_sense(text: str, known: Path) -> None:
    (known / MANIFEST).write_text(text)
    only_problem(verify(known), MANIFEST)


def test_a_manifest_too_large_to_be_read(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "LARGEST_JSON", 100)
    before = (known / MANIFEST).read_bytes()
    with pytest.raises(CheckpointError, match="too many shards"):
        write_manifest(known, samples.sums_of(known), {})
    assert (known / MANIFEST).read_bytes() == before


SHARD = "__1_0.distcp"


@pytest.mark.contract
@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("name", ["weight", "rng_state"])
def test_the_damaged_entry_is_named(name: str, manifest: bool, known: Path) -> None:
    if not manifest:
        (known / MANIFEST).unlink()
    assert verify(known).entries == ()
    metadata = read_contents(known, check=False).metadata
    (place,) = (
        entry.place
        for key in metadata.state_dict_metadata
        if key.startswith(name)
        for entry in entries_of(known, metadata, key)
        if entry.place.relative_path == SHARD
    )
    first = np.float32(samples.VALUE).tobytes()  # without a manifest, padding is not compared
    data = (known / SHARD).read_bytes()
    middle = place.offset + place.length // 2
    flip(known / SHARD, data.index(first, place.offset) if name == "weight" else middle)
    report = verify(known)
    (damaged,) = report.entries
    assert damaged.partition("/")[0] == name
    assert report.weights == (name == "rng_state")
    os.truncate(known / SHARD, place.offset)
    report = verify(known)
    assert damaged in report.entries
    if manifest:  # a load does not take an incomplete checkpoint
        assert not report.weights


def test_a_manifest_with_other_entries(unknown: Path) -> None:
    sums = samples.sums_of(unknown)
    write_manifest(unknown, {**sums, SHARD: replace(sums[SHARD], entries=())}, {})
    with pytest.raises(BrokenCheckpointError, match=r"entries and had 0"):
        read_contents(unknown, check=True).reader()


def test_a_manifest_without_a_shard(unknown: Path) -> None:
    sums = samples.sums_of(unknown)
    del sums[SHARD]
    write_manifest(unknown, sums, {})
    contents = read_contents(unknown, check=True)
    keys = contents.metadata.state_dict_metadata
    entries = [entry for key in keys for entry in entries_of(unknown, contents.metadata, key)]
    entry = next(entry for entry in entries if entry.place.relative_path == SHARD)
    refused = pytest.raises(BrokenCheckpointError, match="the manifest does not list it")
    with contextlib.closing(contents.reader()) as reader, refused:
        reader.load(entry)


def test_files_are_read_though_the_manifest_is_damaged(known: Path) -> None:
    os.truncate(known / MANIFEST, 10)
    os.truncate(known / "__1_0.distcp", 10)
    named = [line.partition(":")[0] for line in verify(known).problems]
    assert named == ["__1_0.distcp", MANIFEST]


def test_every_damaged_file_has_its_line(known: Path) -> None:
    files = sorted(file.name for file in known.iterdir() if file.name != MANIFEST)
    for file in files:
        flip(known / file, 10)
    assert [line.partition(":")[0] for line in verify(known).problems] == files


# --- contents of .metadata ------------------------------------------------------------------------


CLAIMS = {
    "beyond the file": (placed(length=1 << 40), ".distcp: has"),
    "in no file": (placed(relative_path="__9_9.distcp"), "__9_9.distcp: is missing"),
    "outside": (placed(relative_path="../x"), ".metadata: is not safe"),
    "nowhere": (lambda whole: whole.storage_data.clear(), ".metadata: does not say where"),
    "for nobody": (
        lambda whole: whole.state_dict_metadata.pop("bias"),
        ".metadata: says where shards lie",
    ),
    "too large": (
        lambda whole: setattr(whole.state_dict_metadata["bias"].properties, "dtype", torch.float64),
        "'bias' has torch.float32, and torch.float64 was saved",
    ),
    "elsewhere in the file": (placed(offset=1), ".distcp: "),
}


@pytest.mark.parametrize("kind", CLAIMS)
def test_a_metadata_that_claims_what_is_not_so(kind: str, unknown: Path) -> None:
    change, expected = CLAIMS[kind]
    rewrite(unknown, change)
    report = verify(unknown)
    assert any(expected in line for line in report.problems), report.problems


def test_hostile_files_are_problems_and_nothing_runs(unknown: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = Runs(os.system, f"touch {canary}")
    data = saved([evil])
    (unknown / "common.pt").write_bytes(data)
    (unknown / "__7_0.distcp").write_bytes(data)

    at = {"relative_path": "__7_0.distcp", "offset": 0, "length": len(data)}
    rewrite(unknown, placed("rng_state/shard_0.1_1.2", **at))
    lines = [line for line in verify(unknown).problems if "is not safe to load" in line]
    assert [line.partition(":")[0] for line in lines] == ["__7_0.distcp", "common.pt"]
    (unknown / ".metadata").write_bytes(pickle.dumps(evil))
    assert ".metadata: is not safe to load" in verify(unknown).problems[0]
    assert not canary.exists()


def test_a_hostile_common_state_in_a_shard(unknown: Path, tmp_path: Path) -> None:
    """Megatron-core keeps the common state in a shard since 0.19. The manifest is consistent."""
    canary = tmp_path / "canary"
    data = saved([Runs(os.system, f"touch {canary}")])
    (unknown / "common.pt").unlink(missing_ok=True)
    (unknown / "__7_0.distcp").write_bytes(data)

    def point_at_it(whole: of_torch.Metadata) -> None:
        whole.state_dict_metadata[COMMON_KEY] = of_torch.BytesStorageMetadata()
        shard = _StorageInfo("__7_0.distcp", 0, len(data))
        whole.storage_data[of_torch.MetadataIndex(COMMON_KEY)] = shard

    rewrite(unknown, point_at_it)
    write_manifest(unknown, {file.name: sum_of(file) for file in unknown.iterdir()}, {})
    assert "is not safe to load" in verify(unknown).problems[0]
    assert verify(unknown).problems[0].startswith("__7_0.distcp: ")
    assert not canary.exists()


def test_shards_without_checksums_inside_are_no_damage(tmp_path: Path) -> None:
    with without_sums():
        path = samples.save_plain(tmp_path / "x", {"a": torch.ones(9)})
    assert verify(path).good


@pytest.mark.parametrize("manifest", [True, False])
def test_random_damage_never_escapes(manifest: bool, known: Path) -> None:
    if not manifest:
        (known / MANIFEST).unlink()
    files = sorted(known.iterdir())
    rng = np.random.default_rng(7)
    for _ in range(60):
        file = files[rng.integers(len(files))]
        data = file.read_bytes()
        damaged = bytearray(data)
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            damaged[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        problems = verify(known).problems
        if manifest and bytes(damaged) != data:
            assert len(problems) == 1
            assert problems[0].startswith(f"{file.name}: ")
        file.write_bytes(data)
    assert verify(known).good


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="No such file"):
        verify(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="has no files"):
        verify(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of the torch_dist format"):
        verify(tmp_path)


# --- writing the manifest -------------------------------------------------------------------------


def test_the_manifest_is_written_at_once_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sum_of(tmp_path / "a") == FileSum(
        3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    sums = {"a": sum_of(tmp_path / "a")}
    write_manifest(tmp_path, sums, {"iteration": 3})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", MANIFEST]
    content = json.loads((tmp_path / MANIFEST).read_text())
    assert content["algorithm"] == "sha256"
    assert content["files"] == {"a": sums["a"].digest}
    assert content["sizes"] == {"a": 3}
    assert content["megapg"].pop("saved_at") > 0
    assert content["megapg"] == {"iteration": 3}
    before = (tmp_path / MANIFEST).read_text()
    with pytest.raises(TypeError):
        write_manifest(tmp_path, sums, {"iteration": {1, 2}})
    assert (tmp_path / MANIFEST).read_text() == before


def test_sums_of_large_and_missing_files(tmp_path: Path) -> None:
    data = os.urandom((1 << 20) * 2 + 5)
    (tmp_path / "a").write_bytes(data)
    pieces: list[int] = []
    found = sum_of(tmp_path / "a", on_progress=pieces.append)
    assert found == FileSum(len(data), hashlib.sha256(data).hexdigest())
    assert sum_of(tmp_path / "a", "xxh3_128").digest == xxh3_128(data).hexdigest()
    assert sum(pieces) == len(data)
    with pytest.raises(BrokenCheckpointError, match="is missing"):
        sum_of(tmp_path / "b")
