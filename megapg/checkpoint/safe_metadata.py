"""Reading ``.metadata``, a bare pickle, safely: :func:`parse_metadata`.

The unpickler builds stand-ins. They are checked part by part and copied into torch's own classes.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Mapping
from typing import BinaryIO, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from megapg.checkpoint.pickles import (
    Dict,
    Sealed,
    StandIn,
    check_bounds,
    checked,
    damaged,
    refuse,
)
from megapg.errors import UnsafeCheckpointError
from megapg.torch_private import StorageInfo

T = TypeVar("T")


def parse_metadata(data: bytes, what: str) -> Metadata:
    """Return the metadata of a torch distributed checkpoint, from the bytes of its ``.metadata``.

    The result has what megapg reads: the sizes, chunks and types in ``state_dict_metadata``, and
    ``storage_data``. All else is left out: the plans of savers, other properties of tensors.

    Args:
        data: the whole file.
        what: the file's name, for messages.

    Raises:
        UnsafeCheckpointError: it names something that no metadata needs; nothing of it was run.
        BrokenCheckpointError: it is no pickle, or not one of a checkpoint's metadata.
    """
    try:
        check_bounds(data)
        return _metadata(_Unpickler(io.BytesIO(data), what).load())
    except UnsafeCheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise damaged(what, error) from error


_Bytes: type
_Tensor, _Bytes, _Chunk, _Index, _Place, _Whole = (
    Sealed(name, (StandIn,), {})
    for name in ("_Tensor", "_Bytes", "_Chunk", "_Index", "_Place", "_Whole")
)


class _Properties(StandIn):
    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unused(StandIn):
    """A save plan, a layout or another value that no reader needs."""

    def __new__(cls, *arguments: object) -> _Unused:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _Size(StandIn):
    def __new__(cls, sizes: tuple[int, ...] = ()) -> torch.Size:  # type: ignore[misc]
        return torch.Size(sizes)


class _Path(StandIn):
    def __new__(cls, *parts: str) -> str:  # type: ignore[misc]
        return str(pathlib.PurePosixPath(*parts))


_DCP = "torch.distributed.checkpoint"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # the module in torch < 2.3

_STAND_INS: Mapping[tuple[str, str], type] = {
    (f"{_DCP}.metadata", "Metadata"): _Whole,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "StorageMeta"): _Unused,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Unused,
    (_SHARDED, "TensorProperties"): _Properties,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _Unused,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Place,
    (f"{_DCP}.filesystem", "_StoragePrefix"): _Unused,
    (_MCORE, "MCoreMetadata"): _Whole,
    (_MCORE, "MCoreSavePlan"): _Unused,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Unused,
    ("pathlib", "PosixPath"): _Path,
    ("pathlib._local", "PosixPath"): _Path,  # Python 3.13
    ("collections", "OrderedDict"): Dict,
} | {
    (f"{_DCP}.planner", name): _Unused
    for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, what: str) -> None:
        super().__init__(file)
        self._what = what

    @override
    def find_class(self, module: str, name: str) -> object:
        known = _STAND_INS.get((module, name))
        if known is not None:
            return known
        # In vars(): getattr() on torch would import modules for some names.
        value = vars(torch).get(name) if module == "torch" else None
        if not isinstance(value, torch.dtype):
            refuse(self._what, f"{module}.{name}")
        return value

    @override
    def persistent_load(self, pid: object) -> object:
        raise UnsafeCheckpointError(
            f"{self._what} asks for an object that lies outside of it, {pid!r:.60}; no checkpoint "
            "does. Nothing of it was used. Don't load this checkpoint."
        )


# The functions below raise any error if torch did not fill a stand-in.


def _metadata(found: object) -> Metadata:
    fields = _fields(found, _Whole)
    entries = checked(fields["state_dict_metadata"], dict)
    places = fields.get("storage_data")
    return Metadata(
        {checked(key, str): _entry(each, key) for key, each in entries.items()},
        storage_data=None
        if places is None
        else {_index(at): _place(place) for at, place in checked(places, dict).items()},
    )


def _fields(found: object, kind: type) -> dict[str, object]:
    checked(found, kind)
    return vars(found)


def _entry(found: object, key: str) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(found) is _Bytes:
        return BytesStorageMetadata()
    fields = _fields(found, _Tensor)
    size = checked(fields["size"], torch.Size)
    chunks = [
        ChunkStorageMetadata(
            checked(chunk["offsets"], torch.Size), checked(chunk["sizes"], torch.Size)
        )
        for chunk in (_fields(found, _Chunk) for found in checked(fields["chunks"], list))
    ]
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
            min(offset, length) >= 0 and offset + length <= whole
            for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        if not inside:
            raise ValueError(f"{key!r} has a shard outside of its global shape {tuple(size)}")
    return TensorStorageMetadata(_properties(fields["properties"]), size, chunks)


def _properties(found: object) -> TensorProperties:
    if type(found) is not _Properties:
        raise ValueError(f"found {type(found).__name__} where a tensor's properties are expected")
    dtype, *_ = checked(found.state, tuple)
    return TensorProperties(checked(dtype, torch.dtype))


def _index(found: object) -> MetadataIndex:
    fields = _fields(found, _Index)
    return MetadataIndex(checked(fields["fqn"], str), _optional(fields.get("offset"), torch.Size))


def _place(found: object) -> StorageInfo:
    fields = _fields(found, _Place)
    offset, length = checked(fields["offset"], int), checked(fields["length"], int)
    if offset < 0 or length < 0:
        raise ValueError(f"a shard lies at offset {offset} with length {length}")
    place = StorageInfo(checked(fields["relative_path"], str), offset, length)
    if (transforms := fields.get("transform_descriptors")) is not None:
        place.transform_descriptors = [checked(name, str) for name in checked(transforms, list)]
    return place


def _optional(value: object, kind: type[T]) -> T | None:
    return None if value is None else checked(value, kind)
