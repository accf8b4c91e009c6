"""Reading ``.metadata``, a bare pickle, safely: :func:`parse_metadata`.

The unpickler builds stand-ins. They are checked part by part and copied into torch's own classes.
"""

from __future__ import annotations

import dataclasses
import io
import pathlib
import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO, TypeVar, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from megapg.checkpoint.pickles import (
    Called,
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

    The result has every field that a reader needs: ``state_dict_metadata``, ``storage_data``,
    ``planner_data``, ``storage_meta`` and ``version``. The save plans that Megatron-core adds for
    its own savers (``all_local_plans``) are left out.

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
_Tensor, _Bytes, _Chunk, _Index, _Place, _Whole, _Origin = (
    Sealed(name, (StandIn,), {})
    for name in ("_Tensor", "_Bytes", "_Chunk", "_Index", "_Place", "_Whole", "_Origin")
)


class _MemoryFormat(Called):
    pass


class _Properties(StandIn):
    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unused(StandIn):
    """A save plan, which no reader needs."""

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


class _Layout(StandIn):
    def __new__(cls, name: str) -> torch.layout:  # type: ignore[misc]
        return _LAYOUTS[name]


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}

_DCP = "torch.distributed.checkpoint"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # the module in torch < 2.3

_STAND_INS: Mapping[tuple[str, str], type] = {
    (f"{_DCP}.metadata", "Metadata"): _Whole,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _Tensor,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _Bytes,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "StorageMeta"): _Origin,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    (_SHARDED, "TensorProperties"): _Properties,
    (_SHARDED, "MEM_FORMAT_ENCODING"): _MemoryFormat,
    (f"{_DCP}.filesystem", "_StorageInfo"): _Place,
    (f"{_DCP}.filesystem", "_StoragePrefix"): _Unused,
    (_MCORE, "MCoreMetadata"): _Whole,
    (_MCORE, "MCoreSavePlan"): _Unused,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Layout,
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
    return _made(
        Metadata,
        state_dict_metadata={checked(key, str): _entry(each, key) for key, each in entries.items()},
        planner_data=_planner_data(fields.get("planner_data")),
        storage_data=None
        if places is None
        else {_index(at): _place(place) for at, place in checked(places, dict).items()},
        storage_meta=_origin(fields.get("storage_meta")),
        version=_optional(fields.get("version"), str),
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
    dtype, layout, requires_grad, memory_format, pin_memory, *more = checked(found.state, tuple)
    if type(memory_format) is not _MemoryFormat:
        raise ValueError("a tensor's memory format is none")
    return _made(
        TensorProperties,
        dtype=checked(dtype, torch.dtype),
        layout=checked(layout, torch.layout),
        requires_grad=checked(requires_grad, bool),
        memory_format=_MEMORY_FORMATS[memory_format.arguments],
        pin_memory=checked(pin_memory, bool),
        strides=_optional(more[0], tuple) if more else None,
    )


_MEMORY_FORMATS: dict[tuple[object, ...], torch.memory_format] = {
    (0,): torch.contiguous_format,
    (1,): torch.channels_last,
    (2,): torch.preserve_format,
}


def _index(found: object) -> MetadataIndex:
    fields = _fields(found, _Index)
    return MetadataIndex(
        checked(fields["fqn"], str),
        _optional(fields.get("offset"), torch.Size),
        _optional(fields.get("index"), int),
    )


def _place(found: object) -> StorageInfo:
    fields = _fields(found, _Place)
    offset, length = checked(fields["offset"], int), checked(fields["length"], int)
    if offset < 0 or length < 0:
        raise ValueError(f"a shard lies at offset {offset} with length {length}")
    transforms = fields.get("transform_descriptors")
    return _made(
        StorageInfo,
        relative_path=checked(fields["relative_path"], str),
        offset=offset,
        length=length,
        transform_descriptors=None
        if transforms is None
        else [checked(name, str) for name in checked(transforms, list)],
    )


def _planner_data(found: object) -> dict[str, tuple[str | int, ...]] | None:
    """Return the path of each key in the nested state dict, as torch's own planner writes it."""
    if found is None:
        return None
    return {
        checked(key, str): tuple(
            step if type(step) is int else checked(step, str) for step in checked(path, tuple)
        )
        for key, path in checked(found, dict).items()
    }


def _origin(found: object) -> StorageMeta | None:
    if found is None:
        return None
    fields = _fields(found, _Origin)
    return _made(
        StorageMeta,
        checkpoint_id=_optional(fields.get("checkpoint_id"), str),
        save_id=_optional(fields.get("save_id"), str),
        load_id=_optional(fields.get("load_id"), str),
        modules=[checked(name, str) for name in checked(fields.get("modules", []), list)],
    )


def _made(kind: type[T], **values: object) -> T:
    """Return an object of one of torch's classes, without values that this release has no field
    for.
    """
    known = {each.name for each in dataclasses.fields(cast("type[Any]", kind))}
    return kind(**{name: value for name, value in values.items() if name in known})


def _optional(value: object, kind: type[T]) -> T | None:
    return None if value is None else checked(value, kind)
