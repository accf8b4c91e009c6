"""Unpickling what strangers wrote: only names on a list, and none of them can run code.

A checkpoint has two kinds of pickles. ``.metadata`` is a bare one, which
:func:`parse_metadata` reads with stand-ins: the unpickler never sees a class of torch, so the worst
a hostile file can do is to fill a stand-in with nonsense. What it then built is checked part by
part and copied into torch's own classes. ``common.pt`` and the byte entries are files of
``torch.save``; :func:`load_safely` reads them with torch's ``weights_only``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import pickle
import pickletools
import pkgutil
import re
import signal
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import BinaryIO, ClassVar, Never, TypeAlias, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megapg.errors import BrokenCheckpointError, MegapgError, UnsafeCheckpointError

T = TypeVar("T")

# --- .metadata ------------------------------------------------------------------------------------


def parse_metadata(data: bytes, what: str) -> Metadata:
    """The metadata of a torch distributed checkpoint, from the bytes of its ``.metadata``.

    Everything a reader needs is there: ``state_dict_metadata``, ``storage_data``, ``planner_data``,
    ``storage_meta`` and ``version``. The save plans that Megatron-core adds for its own savers
    (``all_local_plans``) are left out.

    Args:
        data: the whole file.
        what: the file's name, for messages.

    Raises:
        UnsafeCheckpointError: it names something that no metadata needs; nothing of it was run.
        BrokenCheckpointError: it is no pickle, or not one of a checkpoint's metadata.
    """
    try:
        _check_bounds(data)
        return _metadata(_Unpickler(io.BytesIO(data), what).load())
    except UnsafeCheckpointError:
        raise
    except Exception as error:  # what a damaged pickle raises is anybody's guess
        raise _damaged(what, error) from error


def _check_bounds(data: bytes) -> None:
    """Walk over the opcodes without doing any, to see that all stay within the file.

    C's unpickler takes memory for whatever number in its memo a pickle names, and one wrong bit
    makes four bytes of text such a number: tens of gigabytes, which ends the process.
    """
    at, code = 0, b""
    while code != b".":
        if run := _PLAIN.match(data, at):
            at = run.end()
        code, at = data[at : at + 1], at + 1
        size = _SIZES.get(code)
        if size is None:
            raise ValueError(f"it has no opcode {code!r}" if code else "it ends early")
        if size == pickletools.UP_TO_NEWLINE:
            start = at
            for _ in range(2 if code in b"ci" else 1):
                at = data.index(b"\n", at) + 1
            number = int(data[start:at]) if code == b"p" else 0
        elif size < 0:
            width = _WIDTHS[size]
            number = 0
            at += width + int.from_bytes(data[at : at + width], "little")
        else:
            number = int.from_bytes(data[at : at + size], "little")
            at += size
        if at > len(data):
            raise ValueError("it ends early")
        if number > len(data):
            raise ValueError("it names an item that it can't have")
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes after its end")


_SIZES = {op.code.encode("latin-1"): op.arg.n if op.arg else 0 for op in pickletools.opcodes}
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _plain_opcodes() -> re.Pattern[bytes]:
    """A run of opcodes whose arguments have a known size and need no look: most of a file."""
    by_size: dict[int, bytes] = defaultdict(bytes)
    for code, size in _SIZES.items():
        if size >= 0 and code not in (b".", b"r"):
            by_size[size] += code
    kinds = [b"[%s].{%d}" % (re.escape(codes), size) for size, codes in sorted(by_size.items())]
    return re.compile(b"(?:%s)*+" % b"|".join(kinds), re.DOTALL)


_PLAIN = _plain_opcodes()


class _Sealed(type):
    """A class whose attributes can't be set, which a pickle may try with those it was given."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__}.{name} can't be set")


class _StandIn(metaclass=_Sealed):
    """Takes the fields that a pickled object of torch had; means nothing by itself."""


class _Tensor(_StandIn):
    pass


class _Bytes(_StandIn):
    pass


class _Chunk(_StandIn):
    pass


class _Index(_StandIn):
    pass


class _Place(_StandIn):
    pass


class _Whole(_StandIn):
    pass


class _Origin(_StandIn):
    pass


class _Called(_StandIn):
    """What was made by calling something; only the arguments are kept."""

    arguments: tuple[object, ...]

    def __new__(cls, *arguments: object) -> _Called:
        self = super().__new__(cls)
        self.arguments = arguments
        return self


class _MemoryFormat(_Called):
    pass


class _Properties(_StandIn):
    state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Unused(_StandIn):
    """Of no use to a reader: the plans of the save."""

    def __new__(cls, *arguments: object) -> _Unused:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _Size(_StandIn):
    def __new__(cls, sizes: tuple[int, ...] = ()) -> torch.Size:  # type: ignore[misc]
        return torch.Size(sizes)


class _Path(_StandIn):
    def __new__(cls, *parts: str) -> str:  # type: ignore[misc]
        return str(pathlib.PurePosixPath(*parts))


class _Layout(_StandIn):
    def __new__(cls, name: str) -> torch.layout:  # type: ignore[misc]
        return _LAYOUTS[name]


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}

_DCP = "torch.distributed.checkpoint"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where torch < 2.3 had them

_STAND_INS: dict[tuple[str, str], type] = {
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
    (f"{_DCP}.planner", "SavePlan"): _Unused,
    (f"{_DCP}.planner", "WriteItem"): _Unused,
    (f"{_DCP}.planner", "WriteItemType"): _Unused,
    (f"{_DCP}.planner", "TensorWriteData"): _Unused,
    (f"{_DCP}.planner", "BytesIOWriteData"): _Unused,
    (_MCORE, "MCoreMetadata"): _Whole,
    (_MCORE, "MCoreSavePlan"): _Unused,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Layout,
    ("pathlib", "PosixPath"): _Path,
    ("pathlib._local", "PosixPath"): _Path,  # Python 3.13
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, what: str) -> None:
        super().__init__(file)
        self._what = what

    def find_class(self, module: str, name: str) -> object:
        known = _STAND_INS.get((module, name))
        if known is not None:
            return known
        if module == "collections" and name == "OrderedDict":
            return _Dict
        # In vars(): getattr() on torch would import modules for some names.
        value = vars(torch).get(name) if module == "torch" else None
        if not isinstance(value, torch.dtype):
            _refuse(self._what, f"{module}.{name}")
        return value

    def persistent_load(self, pid: object) -> object:
        raise UnsafeCheckpointError(
            f"{self._what} asks for an object that lies outside of it, {pid!r:.60}; no checkpoint "
            "does. Nothing of it was used. Don't load this checkpoint."
        )


class _Dict(_StandIn):
    def __new__(cls) -> dict[object, object]:  # type: ignore[misc]
        return {}


# What follows raises whatever comes first on a stand-in that is not filled as torch fills it.


def _metadata(found: object) -> Metadata:
    fields = _fields(found, _Whole)
    entries = _check(fields["state_dict_metadata"], dict)
    places = fields.get("storage_data")
    return Metadata(
        {_check(key, str): _entry(entry, key) for key, entry in entries.items()},
        planner_data=_planner_data(fields.get("planner_data")),
        storage_data=None
        if places is None
        else {_index(at): _place(place) for at, place in _check(places, dict).items()},
        storage_meta=_origin(fields.get("storage_meta")),
        version=_optional(fields.get("version"), str),
    )


def _fields(found: object, kind: type) -> dict[str, object]:
    if type(found) is not kind:
        raise ValueError(f"found {type(found).__name__} where {kind.__name__} is expected")
    return vars(found)


def _entry(found: object, key: str) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(found) is _Bytes:
        return BytesStorageMetadata()
    fields = _fields(found, _Tensor)
    size = _check(fields["size"], torch.Size)
    chunks = [_chunk(chunk) for chunk in _check(fields["chunks"], list)]
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
            min(offset, length) >= 0 and offset + length <= whole
            for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        if not inside:
            raise ValueError(f"{key!r} has a shard outside of its global shape {tuple(size)}")
    return TensorStorageMetadata(_properties(fields["properties"]), size, chunks)


def _chunk(found: object) -> ChunkStorageMetadata:
    fields = _fields(found, _Chunk)
    return ChunkStorageMetadata(
        _check(fields["offsets"], torch.Size), _check(fields["sizes"], torch.Size)
    )


def _properties(found: object) -> TensorProperties:
    if type(found) is not _Properties:
        raise ValueError(f"found {type(found).__name__} where a tensor's properties are expected")
    dtype, layout, requires_grad, memory_format, pin_memory = _check(found.state, tuple)
    if type(memory_format) is not _MemoryFormat:
        raise ValueError("a tensor's memory format is none")
    return TensorProperties(
        _check(dtype, torch.dtype),
        _check(layout, torch.layout),
        _check(requires_grad, bool),
        _MEMORY_FORMATS[memory_format.arguments],
        _check(pin_memory, bool),
    )


_MEMORY_FORMATS: dict[tuple[object, ...], torch.memory_format] = {
    (0,): torch.contiguous_format,
    (1,): torch.channels_last,
    (2,): torch.preserve_format,
}


def _index(found: object) -> MetadataIndex:
    fields = _fields(found, _Index)
    return MetadataIndex(
        _check(fields["fqn"], str),
        _optional(fields.get("offset"), torch.Size),
        _optional(fields.get("index"), int),
    )


def _place(found: object) -> _StorageInfo:
    fields = _fields(found, _Place)
    offset, length = _check(fields["offset"], int), _check(fields["length"], int)
    if offset < 0 or length < 0:
        raise ValueError(f"a shard lies at offset {offset} with length {length}")
    transforms = fields.get("transform_descriptors")
    return _StorageInfo(
        _check(fields["relative_path"], str),
        offset,
        length,
        None if transforms is None else [_check(name, str) for name in _check(transforms, list)],
    )


def _planner_data(found: object) -> dict[str, tuple[str | int, ...]] | None:
    """Where each key sat in the nested state dict, as torch's own planner writes it."""
    if found is None:
        return None
    return {
        _check(key, str): tuple(
            step if type(step) is int else _check(step, str) for step in _check(path, tuple)
        )
        for key, path in _check(found, dict).items()
    }


def _origin(found: object) -> StorageMeta | None:
    if found is None:
        return None
    fields = _fields(found, _Origin)
    return StorageMeta(
        _optional(fields.get("checkpoint_id"), str),
        _optional(fields.get("save_id"), str),
        _optional(fields.get("load_id"), str),
        [_check(name, str) for name in _check(fields.get("modules", []), list)],
    )


def _check(value: object, kind: type[T]) -> T:
    # Not isinstance(): True is no length, and nothing here is ever of a subclass.
    if type(value) is not kind:
        raise ValueError(f"found {type(value).__name__} where {kind.__name__} is expected")
    return value


def _optional(value: object, kind: type[T]) -> T | None:
    return None if value is None else _check(value, kind)


# --- what torch.save wrote ------------------------------------------------------------------------


def load_safely(data: bytes | BinaryIO, what: str) -> object:
    """What ``torch.save`` wrote, with tensors on the CPU, if it holds only what a checkpoint needs.

    That is what torch itself takes with ``weights_only=True``, and what Megatron-core adds for its
    common state (``megatron/core/safe_globals.py``): namespaces, NumPy arrays of numbers as in
    NumPy's random state, paths, signals, generators, and classes of its own. Where megatron.core is
    not imported, objects of those classes come as stand-ins that print their name and value, so
    that a checkpoint can be looked at without it. torch's own list is as before afterwards.

    Args:
        data: the file's bytes, or the file at its beginning.
        what: its name, for messages.

    Raises:
        UnsafeCheckpointError: it names anything else; nothing of it was run.
        BrokenCheckpointError: it is damaged.
    """
    file = io.BytesIO(data) if isinstance(data, bytes) else data
    with naming(what), _listed(_safe_globals()):
        return torch.load(file, map_location="cpu", weights_only=True)


@contextlib.contextmanager
def naming(what: str | os.PathLike[str]) -> Iterator[None]:
    """Read a file of ``torch.save`` in the block: errors of torch become those of megapg.

    Args:
        what: the file's name, for messages.

    Raises:
        UnsafeCheckpointError: torch refused a name that is not on its list.
        BrokenCheckpointError: anything else went wrong.
    """
    try:
        yield
    except MegapgError:  # of ours: others may have failed while this rank was reading
        raise
    except Exception as error:  # what a damaged file raises is anybody's guess
        if refused := _REFUSALS.search(str(error)):
            name = next(group for group in refused.groups() if group)
            _refuse(str(what), name.rstrip("."), error)
        raise _damaged(str(what), error) from error


_REFUSALS = re.compile(
    r"GLOBAL (\S+)|unrecognized function (.+)|, but got (<(?:class|function|built-in).+)|"
    r"(TorchScript) archive|(persistent_load) "
)


def _refuse(what: str, name: str, error: Exception | None = None) -> Never:
    raise UnsafeCheckpointError(
        f"{what} wants {name}, which no checkpoint needs and which may run code. Nothing of it was "
        "used. Don't load this checkpoint; if you know who wrote it, have it saved without that."
    ) from error


def _damaged(what: str, error: Exception) -> BrokenCheckpointError:
    said = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    reason = f"{type(error).__name__}: {said:.150}" if said else type(error).__name__
    return BrokenCheckpointError(
        f"{what} can't be read ({reason}). The file is damaged or of something else; take it from "
        "a copy, or use an older checkpoint.",
        [f"{pathlib.PurePath(what).name}: can't be read ({reason})"],
    )


_Global: TypeAlias = tuple[Callable[..., object], str]


class _Foreign:
    """An object of a class of Megatron-core, which is not imported here."""

    name: ClassVar[str]

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, getattr(self, 'arguments', ())))})"


_CLASSES_OF_MEGATRON = (
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
)


def _safe_globals() -> list[_Global]:
    classes = [
        argparse.Namespace,
        types.SimpleNamespace,
        io.BytesIO,
        signal.Signals,
        torch._C.Generator,
    ]
    found: list[_Global] = [(kind, f"{kind.__module__}.{kind.__qualname__}") for kind in classes]
    found += [(pathlib.PosixPath, f"{home}.PosixPath") for home in ("pathlib", "pathlib._local")]
    return [*found, *_numpy_globals(), *map(_of_megatron, _CLASSES_OF_MEGATRON)]


def _numpy_globals() -> list[_Global]:
    """What an array of numbers takes; without the object type, whose elements are pickles."""
    try:
        import numpy
        from numpy._core.multiarray import _reconstruct
    except ImportError:
        return []
    kinds = {type(numpy.dtype(code)) for code in (*numpy.typecodes["AllInteger"], *"?efd")}
    return [
        (numpy.ndarray, "numpy.ndarray"),
        (numpy.dtype, "numpy.dtype"),
        *((kind, f"numpy.dtypes.{kind.__name__}") for kind in kinds),
        # NumPy 2 moved the module.
        *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    ]


def _of_megatron(name: str) -> _Global:
    if "megatron.core" in sys.modules:
        with contextlib.suppress(AttributeError, ImportError):  # some are of newer versions
            return pkgutil.resolve_name(name), name
    return type(name.rpartition(".")[2], (_Foreign,), {"name": name}), name


_LIST_OF_TORCH = threading.Lock()


@contextlib.contextmanager
def _listed(names: list[_Global]) -> Iterator[None]:
    """Put names on torch's list of safe globals for a block; those that are there stay there.

    The list is the process's, and torch's own block would take off what others had put on.
    """
    with _LIST_OF_TORCH:
        before = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([name for name in names if name not in before]):
            yield
