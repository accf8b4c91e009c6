"""Safe reading of checkpoint contents: real files of both writers, and hostile files."""

from __future__ import annotations

import contextlib
import copyreg
import io
import os
import pickle
import shutil
import struct
import threading
import tracemalloc
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import checkpoint_samples as samples
import numpy as np
import pytest
import torch
from damage import placed, rewrite
from torch.distributed.checkpoint import metadata as of_torch

from megapg.checkpoint.contents import Contents, read_contents
from megapg.checkpoint.safe_metadata import parse_metadata
from megapg.checkpoint.safe_torch import load_safely
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    UnsafeCheckpointError,
)
from megapg.layout import ParallelLayout

MODULE = "torch.distributed.checkpoint.metadata"


# --- real files -----------------------------------------------------------------------------------


@pytest.mark.contract
def test_a_checkpoint_of_megatron_core() -> None:
    contents = read_contents(samples.by_megatron() / "iter_0000005")
    assert {"weight", "bias", "half.0", "half.1"} < set(contents.keys())
    weight = contents.metadata.state_dict_metadata["weight"]
    assert tuple(weight.size) == (8, 8)
    assert sorted(tuple(chunk.offsets) for chunk in weight.chunks) == [(0, 0), (4, 0)]
    assert contents.iteration == contents.common["iteration"] == 5
    assert contents.content_metadata == samples.CONTENT
    args = contents.common["args"]
    assert isinstance(args, Namespace)
    assert {name: getattr(args, name) for name in samples.ARGS} == samples.ARGS
    assert contents.saved_layout() == ParallelLayout(world_size=2, tp=2)
    for rank in range(2):
        (record,) = contents.read_object(f"rng_state/shard_0.{rank}_1.2")
        assert record.keys() == samples.random_streams().keys()
        assert record["np_rng_state"][1].dtype == np.uint32
        assert torch.is_tensor(record["torch_rng_state"])


@pytest.mark.contract
@pytest.mark.parametrize("sample", ["megatron", "torch"])
def test_the_metadata_is_what_torch_reads(sample: str) -> None:
    path = samples.by_torch() if sample == "torch" else samples.by_megatron() / "iter_0000005"
    data = (path / ".metadata").read_bytes()
    ours, theirs = parse_metadata(data, ".metadata"), pickle.loads(data)
    assert type(ours) is of_torch.Metadata
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert ours.storage_data == theirs.storage_data


def test_a_checkpoint_of_torch_alone() -> None:
    contents = read_contents(samples.by_torch())
    assert contents.common == {}
    assert contents.iteration is contents.saved_layout() is contents.content_metadata is None
    assert contents.read_object("optimizer.step") == 3


def test_every_dtype() -> None:
    entries = {
        str(dtype): of_torch.TensorStorageMetadata(
            of_torch.TensorProperties(dtype),
            torch.Size((2,)),
            [of_torch.ChunkStorageMetadata(torch.Size((0,)), torch.Size((2,)))],
        )
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    }
    assert len(entries) > 15
    for protocol in range(2, 6):
        read = parse_metadata(pickle.dumps(of_torch.Metadata(OrderedDict(entries)), protocol), "x")
        assert read.state_dict_metadata == entries


def test_metadata_of_older_writers() -> None:
    """Test dummy classes of old Megatron-core and the former module of TensorProperties."""
    data = (samples.by_megatron() / "iter_0000005" / ".metadata").read_bytes()
    whole = pickle.loads(data)
    plain = pickle.dumps(whole, 2)
    theirs = "megatron.core.dist_checkpointing.strategies.torch"
    sharded = "torch.distributed._shard.sharded_tensor.metadata"
    old = plain.replace(f"c{MODULE}\nMetadata\n".encode(), f"c{theirs}\nMCoreMetadata\n".encode())
    old = old.replace(
        f"c{MODULE}\nTensorProperties\n".encode(), f"c{sharded}\nTensorProperties\n".encode()
    )
    old = old.replace(
        f"c{MODULE}\n_MEM_FORMAT_ENCODING\n".encode(), f"c{sharded}\nMEM_FORMAT_ENCODING\n".encode()
    )
    old = old.replace(
        b"ctorch.distributed.checkpoint.planner\nSavePlan\n", f"c{theirs}\nMCoreSavePlan\n".encode()
    )
    assert old.count(theirs.encode()) == 2
    assert old.count(sharded.encode()) == 2
    assert parse_metadata(old, "x").state_dict_metadata == whole.state_dict_metadata


@pytest.mark.contract
def test_with_megatron_imported_its_classes_are_its() -> None:
    from megatron.core.transformer.enums import AttnBackend

    contents = read_contents(samples.by_megatron() / "iter_0000005")
    assert contents.common["args"].attention_backend is AttnBackend.auto


@pytest.mark.parametrize(
    ("args", "layout"),
    [
        (
            {
                "world_size": 16,
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "context_parallel_size": 2,
                "expert_model_parallel_size": 4,
                "expert_tensor_parallel_size": 1,
                "num_distributed_optimizer_instances": 2,
                "use_tp_pp_dp_mapping": True,
                "virtual_pipeline_model_parallel_size": 3,
            },
            ParallelLayout(
                world_size=16,
                tp=2,
                pp=2,
                cp=2,
                ep=4,
                expt_tp=1,
                optimizer_instances=2,
                order="tp-cp-ep-pp-dp",
                vpp=3,
            ),
        ),
        (
            {"world_size": 4, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": None},
            ParallelLayout(world_size=4, tp=2),
        ),
        (
            {
                "world_size": 8,
                "context_parallel_size": 4,
                "hierarchical_context_parallel_sizes": [2, 2],
            },
            ParallelLayout(world_size=8, cp=4, hierarchical_cp=(2, 2)),
        ),
        ({"world_size": 3, "tensor_model_parallel_size": 2}, None),  # not divisible
        ({"tensor_model_parallel_size": 2}, None),
        ({"world_size": "4"}, None),
        ({"world_size": 4, "tensor_model_parallel_size": 0.5}, None),
        ({"world_size": 4, "hierarchical_context_parallel_sizes": 7}, None),
    ],
)
def test_the_layout_from_the_arguments(args: dict[str, object], layout: object) -> None:
    for form in (args, Namespace(**args), SimpleNamespace(**args)):
        contents = Contents(Path(), of_torch.Metadata({}), {"args": form})
        assert contents.saved_layout() == layout


def test_the_layout_from_the_manifest_comes_first(tmp_path: Path) -> None:
    path = samples.with_manifest() / "iter_0000005"
    contents = read_contents(path)
    assert contents.about["version"] == "1.2.3"
    assert contents.saved_layout() == ParallelLayout(world_size=2, tp=2)
    about = {"layout": {"world_size": 8, "pp": 2, "tp": 2, "vpp": 2, "order": "tp-cp-ep-pp-dp"}}
    contents = Contents(path, contents.metadata, contents.common, about)
    assert contents.saved_layout() == ParallelLayout(
        world_size=8, pp=2, tp=2, vpp=2, order="tp-cp-ep-pp-dp"
    )
    for nonsense in ({}, {"world_size": None}, {"world_size": 4, "tp": 3}, {"world_size": []}):
        assert Contents(path, contents.metadata, {}, {"layout": nonsense}).saved_layout() is None


@pytest.mark.parametrize("manifest", ["", "[]", "{", '{"megapg": 3}', "[" * 100_000])
def test_a_damaged_manifest_does_not_keep_anyone_from_reading(manifest: str, copied: Path) -> None:
    (copied / "integrity.json").write_text(manifest)
    assert read_contents(copied).about == {}
    assert read_contents(copied).saved_layout() == ParallelLayout(world_size=2, tp=2)


# --- refused contents -----------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return shutil.copytree(samples.by_megatron() / "iter_0000005", tmp_path / "iter_0000005")


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A copy of the checkpoint with megapg's manifest."""
    return shutil.copytree(samples.with_manifest() / "iter_0000005", tmp_path / "iter_0000005")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that hostile code creates; it must not exist after the test."""
    return tmp_path / "canary"


class Runs:
    """An object whose pickle calls a function during loading."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> object:
        return self.call


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def called(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def entries_with(item: bytes) -> bytes:
    """Return the pickle of a Metadata in which ``item`` pushes the first key's entry."""
    whole = stack_global(MODULE, "Metadata") + b")\x81"
    return whole + b"}" + text("state_dict_metadata") + b"}" + text("a") + item + b"ssb"


def hostile(canary: Path) -> dict[str, tuple[bytes, str]]:
    """Return name -> (the opcodes between PROTO and STOP, the name that must be refused)."""
    command = f"touch {canary}"
    shell = text(command)
    system = stack_global("os", "system")
    return {
        "reduce": (called(system, shell), "os.system"),
        "GLOBAL opcode": (called(b"cposix\nsystem\n", shell), "posix.system"),
        "INST opcode": (b"(" + shell + b"iposix\nsystem\n", "posix.system"),
        "OBJ opcode": (b"(" + system + shell + b"o", "os.system"),
        "in an entry": (entries_with(called(system, shell)), "os.system"),
        "as a key": (b"}" + called(system, shell) + b"Ns", "os.system"),
        "as an argument of a class on the list": (
            called(stack_global("torch", "Size"), b"(" + called(system, shell) + b"t"),
            "os.system",
        ),
        "as a state": (
            stack_global(MODULE, "Metadata") + b")\x81" + called(system, shell) + b"b",
            "os.system",
        ),
        "a dotted name in a module on the list": (
            called(stack_global(MODULE, "os.system"), shell),
            f"{MODULE}.os.system",
        ),
        "a module on the list": (stack_global(MODULE, "os"), f"{MODULE}.os"),
        "a dotted name of torch": (
            called(stack_global("torch", "Size.__class__"), shell),
            "torch.Size.__class__",
        ),
        "a method of a class on the list": (
            stack_global(MODULE, "Metadata.__init__.__globals__"),
            "Metadata.__init__",
        ),
        "memoized strings": (
            text("system") + b"q\x00" + b"0" + text("os") + b"h\x00\x93(" + shell + b"tR",
            "os.system",
        ),
        "a persistent id": (b"Psomething\n", "outside of it"),
        "a computed persistent id": (text("x") + b"Q", "outside of it"),
    }


@pytest.mark.parametrize("name", hostile(Path()))
def test_a_hostile_metadata_is_refused_by_name(name: str, canary: Path, copied: Path) -> None:
    body, refused = hostile(canary)[name]
    (copied / ".metadata").write_bytes(b"\x80\x04" + body + b".")
    with pytest.raises(UnsafeCheckpointError) as caught:
        read_contents(copied)
    assert refused in str(caught.value)
    assert str(copied / ".metadata") in str(caught.value)
    assert not canary.exists()


def test_the_hostile_pickles_really_are(canary: Path) -> None:
    """The test above means something only if the plain unpickler runs the hostile calls."""
    for name in ("reduce", "GLOBAL opcode", "INST opcode", "in an entry", "as a state",
                 "a dotted name in a module on the list", "memoized strings"):  # fmt: skip
        body, _ = hostile(canary)[name]
        with contextlib.suppress(Exception):
            pickle.loads(b"\x80\x04" + body + b".")
        assert canary.exists(), name
        canary.unlink()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_hostile_objects_in_real_metadata(protocol: int, canary: Path) -> None:
    whole = of_torch.Metadata(
        {"a": of_torch.BytesStorageMetadata()}, planner_data={"x": Runs(os.mkdir, str(canary))}
    )
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        parse_metadata(pickle.dumps(whole, protocol), "x")
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["Metadata", "MetadataIndex", "TensorProperties"])
@pytest.mark.parametrize("value", [text("bad"), stack_global("torch", "Size")])
def test_classes_on_the_list_can_not_be_changed(kind: str, value: bytes) -> None:
    """BUILD on a class sets attributes of the class, which would persist after reading."""
    whole = stack_global(MODULE, kind)
    before = dict(vars(getattr(of_torch, kind)))
    for state in (
        b"}" + text("__setstate__") + value + b"s",
        b"N}" + text("__setstate__") + value + b"s\x86",
        b"N}" + text("marked") + value + b"s\x86",
        b"N}" + text("__class__") + value + b"s\x86",
    ):
        with pytest.raises(BrokenCheckpointError):
            parse_metadata(b"\x80\x04" + whole + state + b"b.", "x")
    assert dict(vars(getattr(of_torch, kind))) == before
    data = (samples.by_torch() / ".metadata").read_bytes()
    assert parse_metadata(data, "x").storage_data


@pytest.mark.parametrize(
    "state", [b"}" + text("_value_") + b"K\x07s", b"N}" + text("a") + b"Ns\x86"]
)
def test_a_dtype_can_not_be_changed(state: bytes) -> None:
    with pytest.raises(BrokenCheckpointError):
        parse_metadata(b"\x80\x04" + stack_global("torch", "float32") + state + b"b.", "x")


@pytest.mark.parametrize(
    "body",
    [
        b"N",
        b"}",
        text("metadata"),
        stack_global(MODULE, "Metadata"),
        stack_global(MODULE, "Metadata") + b")\x81",
        entries_with(b"N"),
        entries_with(text("tensor")),
        entries_with(stack_global(MODULE, "Metadata") + b")\x81"),
        entries_with(stack_global(MODULE, "TensorStorageMetadata") + b")\x81"),
        called(stack_global("torch", "Size"), text("ab")),
        called(stack_global("torch.serialization", "_get_layout"), text("torch.nothing")),
        called(stack_global(MODULE, "Metadata"), b"N"),
        b"(" * 1000,
        b"h\x09",
        b"\x82\x01",  # extension code
        b"\x8e" + struct.pack("<Q", 1 << 60),  # more bytes than the file has
        b"\x96" + struct.pack("<Q", 1 << 60),
        b"\x80\x63",
        b"",
    ],
)
def test_nonsense_is_damage(body: bytes) -> None:
    with pytest.raises(BrokenCheckpointError, match=r"some/\.metadata") as caught:
        parse_metadata(b"\x80\x04" + body + b".", "some/.metadata")
    assert caught.value.problems[0].startswith(".metadata: ")


def test_an_extension_code_is_refused_like_its_name(canary: Path) -> None:
    copyreg.add_extension("os", "system", 240)
    try:
        with pytest.raises(UnsafeCheckpointError, match=r"os\.system"):
            parse_metadata(b"\x80\x02\x82\xf0(" + text(f"touch {canary}") + b"tR.", "x")
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert not canary.exists()


def test_random_damage_of_the_metadata_never_escapes() -> None:
    data = (samples.by_torch() / ".metadata").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(1500):
        damaged = bytearray(data)
        for at in rng.integers(len(data), size=rng.integers(1, 4)):
            damaged[at] ^= 1 << int(rng.integers(8))
        try:
            parse_metadata(bytes(damaged), "x")
        except CheckpointError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize(
    "where",
    ["/etc/passwd", "../other/__0_0.distcp", "a/../../b", "", "\0", "\ud800.distcp", "a\n.distcp"],
)
def test_data_outside_of_the_directory_is_refused(where: str, copied: Path) -> None:
    def point_there(whole: of_torch.Metadata) -> None:
        next(iter(whole.storage_data.values())).relative_path = where

    rewrite(copied, point_there)
    with pytest.raises(UnsafeCheckpointError, match="outside of the checkpoint"):
        read_contents(copied)


class Gadget:
    def __setstate__(self, state: object) -> None:
        Path(str(state)).touch()


def saved(value: object, **options: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


class Scripted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def hostile_files(canary: Path) -> dict[str, tuple[bytes, str]]:
    gadget = Gadget()
    gadget.__dict__["path"] = str(canary)
    script = io.BytesIO()
    torch.jit.save(torch.jit.trace(Scripted(), torch.ones(1), check_trace=False), script)
    runs = Runs(os.system, f"touch {canary}")
    return {
        "the whole": (saved(runs), "system"),
        "nested": (saved({"args": [{"x": runs}]}), "system"),
        "in a namespace": (saved(Namespace(x=runs)), "system"),
        "in an array": (saved(np.array([runs], dtype=object)), "ObjectDType"),
        "a class": (saved(gadget), "Gadget"),
        "the format of before": (saved(runs, _use_new_zipfile_serialization=False), "system"),
        "TorchScript": (script.getvalue(), "TorchScript"),
        "a bare pickle": (pickle.dumps(runs, 2), "system"),
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("place", ["common.pt", "entry"])
@pytest.mark.parametrize(
    "name",
    ["the whole", "nested", "in a namespace", "in an array", "a class", "the format of before",
     "TorchScript", "a bare pickle"],
)  # fmt: skip
def test_hostile_objects_are_refused_by_name(
    name: str, place: str, canary: Path, copied: Path
) -> None:
    data, refused = hostile_files(canary)[name]
    if place == "common.pt":
        (copied / "common.pt").write_bytes(data)
        with pytest.raises(UnsafeCheckpointError) as caught:
            read_contents(copied)
        assert str(copied / "common.pt") in str(caught.value)
    else:
        (copied / "__7_0.distcp").write_bytes(b"-" * 10 + data)
        at = {"relative_path": "__7_0.distcp", "offset": 10, "length": len(data)}
        rewrite(copied, placed("rng_state/shard_0.1_1.2", **at))
        with pytest.raises(UnsafeCheckpointError) as caught:
            read_contents(copied).read_object("rng_state/shard_0.1_1.2")
        assert "__7_0.distcp" in str(caught.value)
        assert "rng_state/shard_0.1_1.2" in str(caught.value)
    assert refused in str(caught.value)
    assert not canary.exists()


def test_what_a_common_state_may_hold() -> None:
    import signal

    state = {
        "args": Namespace(a=1, b=[2.5, None, "x"], path=Path("some/where")),
        "simple": SimpleNamespace(a={1, 2}),
        "numpy": np.random.default_rng(0).bit_generator.state["state"]["state"] % 7,
        "array": np.arange(4, dtype=np.uint32),
        "floats": np.ones(3),
        "legacy": np.random.get_state(),
        "bytes": io.BytesIO(b"abc"),
        "signal": signal.SIGTERM,
        "ordered": OrderedDict(a=1),
        "generator": torch.Generator().manual_seed(3),
        "tensor": torch.ones(2),
        "complex": 1j,
        "dtype": torch.bfloat16,
    }
    read = load_safely(saved(state), "x")
    assert read["args"] == state["args"]
    assert read["simple"] == state["simple"]
    assert (read["array"] == state["array"]).all()
    assert (read["floats"] == state["floats"]).all()
    assert (read["legacy"][1] == state["legacy"][1]).all()
    assert read["bytes"].getvalue() == b"abc"
    assert read["signal"] is signal.SIGTERM
    assert read["ordered"] == {"a": 1}
    assert read["generator"].initial_seed() == 3
    assert read["dtype"] is torch.bfloat16


def test_the_list_of_torch_is_as_before() -> None:
    """Entries that other code added stay too, although torch's own context manager removes them."""
    data = saved({"args": Namespace(a=1), "path": Path("x"), "array": np.ones(2)})
    torch.serialization.add_safe_globals([Namespace])
    mine = [(Path, "pathlib.Mine"), (Namespace, "argparse.Namespace")]
    torch.serialization.add_safe_globals(mine)
    before = list(torch.serialization.get_safe_globals())
    try:
        load_safely(data, "x")
        with pytest.raises(UnsafeCheckpointError):
            load_safely(saved(Runs(os.system, "true")), "x")
        assert set(torch.serialization.get_safe_globals()) == set(before)
        # The same holds with several threads at once.
        failures: list[BaseException] = []

        def often() -> None:
            try:
                for _ in range(30):
                    load_safely(data, "x")
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=often) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert set(torch.serialization.get_safe_globals()) == set(before)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([x for x in before if x not in mine])


# --- missing or damaged files ---------------------------------------------------------------------


def test_what_is_not_there(tmp_path: Path, copied: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing is not there"):
        read_contents(tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of the torch_dist format"):
        read_contents(tmp_path)
    (copied / ".metadata").unlink()
    with pytest.raises(BrokenCheckpointError, match="is missing") as caught:
        read_contents(copied)
    assert caught.value.problems == (".metadata: is missing",)


def test_without_a_common_state(copied: Path) -> None:
    rewrite(copied, lambda whole: whole.state_dict_metadata.pop("common_state/shard_0_1", None))
    (copied / "common.pt").unlink(missing_ok=True)
    with pytest.raises(BrokenCheckpointError, match=r"common\.pt is missing"):
        read_contents(copied)


@pytest.mark.parametrize("data", [b"", b"PK", b"garbage", saved([1, 2])[:200], saved([1])])
def test_a_damaged_common_state(data: bytes, copied: Path) -> None:
    (copied / "common.pt").write_bytes(data)
    with pytest.raises(BrokenCheckpointError) as caught:
        read_contents(copied)
    assert caught.value.problems[0].startswith("common.pt: ")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "gone", [("common.pt",), ("metadata.json",), ("common.pt", "metadata.json")]
)
def test_what_the_manifest_lists_is_there(gone: tuple[str, ...], listed: Path) -> None:
    """Without both files, the directory would look like a checkpoint that torch alone wrote."""
    for file in gone:
        if not (listed / file).exists():
            pytest.skip("this Megatron-core has its common state in a shard")
        (listed / file).unlink()
    with pytest.raises(BrokenCheckpointError, match=f"{gone[-1]} is missing"):
        read_contents(listed, check=True)


@pytest.mark.parametrize("file", [".metadata", "common.pt", "metadata.json"])
def test_a_file_of_another_size_is_not_even_read(file: str, listed: Path) -> None:
    if not (listed / file).exists():
        pytest.skip("this Megatron-core has its common state in a shard")
    os.truncate(listed / file, 2**28)
    tracemalloc.start()
    try:
        with pytest.raises(BrokenCheckpointError, match=r"has 268435456 bytes and had \d+\."):
            read_contents(listed, check=True)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("file", [".metadata", "common.pt", "__1_0.distcp"])
@pytest.mark.timeout(60)
def test_a_pipe_instead_of_a_file_does_not_hang(file: str, copied: Path) -> None:
    (copied / file).unlink(missing_ok=True)
    os.mkfifo(copied / file)
    with pytest.raises(BrokenCheckpointError, match="no regular file"):
        read_contents(copied).read_object("rng_state/shard_0.1_1.2")


def test_entries_that_are_not_there(copied: Path) -> None:
    contents = read_contents(copied)
    with pytest.raises(CheckpointError, match=r"has no entry 'rng_state/shard_0.0_1.1'"):
        contents.read_object("rng_state/shard_0.0_1.1")
    with pytest.raises(CheckpointError, match="has a tensor"):
        contents.read_object("weight")
    os.truncate(copied / "__1_0.distcp", 100)
    with pytest.raises(BrokenCheckpointError, match=r"__1_0\.distcp has 100 bytes") as caught:
        contents.read_object("rng_state/shard_0.1_1.2")
    assert caught.value.problems[0].startswith("__1_0.distcp: ")
    (copied / "__1_0.distcp").unlink()
    with pytest.raises(BrokenCheckpointError, match=r"__1_0\.distcp is missing"):
        contents.read_object("rng_state/shard_0.1_1.2")


def test_an_entry_that_is_compressed_is_named(copied: Path) -> None:
    rewrite(copied, placed("rng_state/shard_0.1_1.2", transform_descriptors=["zstd"]))
    with pytest.raises(CheckpointError, match="zstd"):
        read_contents(copied).read_object("rng_state/shard_0.1_1.2")
