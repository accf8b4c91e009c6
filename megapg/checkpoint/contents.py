"""What a checkpoint holds, read without its tensors, a GPU or a process group, and safely.

:func:`read_contents` reads a directory's ``.metadata`` and common state once; the
:class:`Contents` it gives answers everything else, and is what the loader works from, so that
nobody opens ``.metadata`` a second time with torch's own reader, which runs whatever it says.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import pathlib
import re
import stat
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megapg.checkpoint.names import COMMON_FILE, FORMAT_FILE, INDEX_FILE, MANIFEST_FILE
from megapg.checkpoint.safe import load_safely, naming, parse_metadata
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    LayoutError,
    UnsafeCheckpointError,
)
from megapg.layout import DEFAULT_ORDER, ParallelLayout

__all__ = [
    "Contents",
    "layout_of_checkpoint",
    "load_safely",
    "naming",
    "parse_metadata",
    "read_contents",
]

COMMON_KEY = "common_state/shard_0_1"
"""Where Megatron-core keeps the common state since 0.19, as a byte entry, instead of the file."""

_OF_MEGATRON = re.compile(r"/shard_[\d.]+_[\d.]+$")  # how it names its objects


@dataclass(frozen=True)
class Contents:
    """One checkpoint directory, as its small files describe it.

    Attributes:
        path: the directory.
        metadata: of torch's distributed checkpoint: every key, its shape, type and shards, and
            where each shard lies.
        common: what Megatron-core keeps once for all ranks: iteration, ``args``, parameter groups
            and so on. Empty for a checkpoint that torch wrote without Megatron-core.
        about: what megapg noted about the save: ``iteration``, ``layout`` and ``version``. Empty
            where something else wrote the checkpoint.
    """

    path: Path
    metadata: Metadata
    common: Mapping[str, object]
    about: Mapping[str, object] = field(default_factory=dict)

    def keys(self) -> tuple[str, ...]:
        """Every key, of tensors and byte entries alike, in the order of the save."""
        return tuple(self.metadata.state_dict_metadata)

    @property
    def content_metadata(self) -> Mapping[str, object] | None:
        """How the state was cut, in Megatron-core's words (``distrib_optim_sharding_type``, ...);
        None where the save did not say.
        """
        found = self.common.get("content_metadata")
        return found if isinstance(found, dict) else None

    @property
    def iteration(self) -> int | None:
        """The training iteration that was saved; None where nothing says."""
        for found in (self.common.get("iteration"), self.about.get("iteration")):
            if type(found) is int:
                return found
        return None

    def saved_layout(self) -> ParallelLayout | None:
        """The parallel layout of the job that saved; None where nothing says.

        From what megapg noted, else from Megatron's ``args``. Ranks are counted from 0 within the
        layout, wherever in its job it was.
        """
        noted = self.about.get("layout")
        if isinstance(noted, dict):
            return _layout(noted)
        return _layout_from_args(self.common.get("args"))

    def read_object(self, key: str) -> object:
        """A byte entry, for example ``"rng_state/shard_0.0_1.1"``, without the list of one that
        Megatron-core puts around each of its objects on disk.

        Raises:
            CheckpointError: there is no such key, or it is a tensor's.
            BrokenCheckpointError: its file is missing, shorter than needed, or damaged.
            UnsafeCheckpointError: see :func:`load_safely`; or its file would lie elsewhere.
        """
        entry = self.metadata.state_dict_metadata.get(key)
        if not isinstance(entry, BytesStorageMetadata):
            problem = "has no entry" if entry is None else "has a tensor, not a byte entry, for"
            near = difflib.get_close_matches(key, self._byte_keys, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise CheckpointError(f"{self.path} {problem} {key!r}.{hint}")
        place = self._places.get(MetadataIndex(key))
        if place is None:
            raise broken(self.path / INDEX_FILE, f"does not say where the entry {key!r} lies")
        if place.transform_descriptors:
            raise CheckpointError(
                f"{self.path}: {key!r} was written through {', '.join(place.transform_descriptors)}"
                ", which megapg does not read. Load it with torch's own reader."
            )
        data, file = read_range(self.path, place), self.path / place.relative_path
        try:
            found = load_safely(data, f"{file}, in its entry {key!r},")
        except BrokenCheckpointError as error:
            raise broken(file, f"is damaged in its entry {key!r}") from error
        if isinstance(found, list) and len(found) == 1 and _OF_MEGATRON.search(key):
            return found[0]
        return found

    @property
    def _byte_keys(self) -> list[str]:
        entries = self.metadata.state_dict_metadata.items()
        return [key for key, entry in entries if isinstance(entry, BytesStorageMetadata)]

    @cached_property
    def _places(self) -> Mapping[MetadataIndex, _StorageInfo]:
        return self.metadata.storage_data or {}


def read_contents(path: str | os.PathLike[str]) -> Contents:
    """Read what a checkpoint directory holds, without its tensors.

    Args:
        path: the directory of one checkpoint, for example ``checkpoints/iter_0000123``.

    Raises:
        CheckpointNotFoundError: there is no such directory, or it is no checkpoint of the
            ``torch_dist`` format.
        BrokenCheckpointError: its metadata or common state is missing or damaged.
        UnsafeCheckpointError: either would run code; nothing of it was run.
    """
    path = Path(path)
    metadata = read_metadata(path)
    return Contents(path, metadata, read_common(path, metadata), _about(path))


def layout_of_checkpoint(path: Path) -> ParallelLayout | None:
    """As :meth:`Contents.saved_layout`, and raises as :func:`read_contents`; where the manifest
    tells, nothing else is read, and nothing of it is checked.
    """
    noted = _about(path).get("layout")
    layout = _layout(noted) if isinstance(noted, dict) else None
    return layout or read_contents(path).saved_layout()


def read_metadata(path: Path) -> Metadata:
    """The ``.metadata`` of a checkpoint directory; raises as :func:`read_contents`."""
    file = path / INDEX_FILE
    if not file.exists():
        if not path.is_dir():
            raise CheckpointNotFoundError(
                f"{path} is not there. Name the directory of one checkpoint, such as "
                "checkpoints/iter_0000123."
            )
        if not (path / FORMAT_FILE).exists() and not any(path.glob("*.distcp")):
            raise CheckpointNotFoundError(
                f"{path} is no checkpoint of the torch_dist format: it has no {INDEX_FILE}. "
                "Name the directory of one checkpoint, such as checkpoints/iter_0000123."
            )
        raise broken(file, "is missing")
    with open_regular(file) as stream:
        metadata = parse_metadata(stream.read(), str(file))
    for name in {place.relative_path for place in (metadata.storage_data or {}).values()}:
        inside(path, name)
    return metadata


def read_common(path: Path, metadata: Metadata) -> Mapping[str, object]:
    """The common state of a checkpoint directory; raises as :func:`read_contents`."""
    file = path / COMMON_FILE
    if file.exists():
        with open_regular(file) as stream:
            common = load_safely(stream, str(file))
    elif COMMON_KEY in metadata.state_dict_metadata:
        file = path / COMMON_KEY
        common = Contents(path, metadata, {}).read_object(COMMON_KEY)
    elif (path / FORMAT_FILE).exists():
        raise broken(file, f"is missing, and there is no entry {COMMON_KEY!r} instead")
    else:
        return {}  # of torch's distributed checkpoint without Megatron-core
    if not isinstance(common, dict):
        raise broken(file, f"holds no state but {type(common).__name__}")
    return common


def read_range(path: Path, place: _StorageInfo) -> bytes:
    """The bytes of one entry; raises as :meth:`Contents.read_object`."""
    file = inside(path, place.relative_path)
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if place.offset + place.length > size:
            raise broken(file, f"has {size} bytes, {place.offset + place.length} are needed")
        stream.seek(place.offset)
        return stream.read(place.length)


def inside(path: Path, name: str) -> Path:
    """The file of a name that ``.metadata`` gives.

    Raises:
        UnsafeCheckpointError: the name leads out of the directory.
    """
    pure = pathlib.PurePosixPath(name)
    if not name or "\0" in name or pure.is_absolute() or ".." in pure.parts:
        raise UnsafeCheckpointError(
            f"{path / INDEX_FILE} says that data lies in {name!r}, outside of the checkpoint. "
            "Nothing of it was read. Don't load this checkpoint."
        )
    return path / pure


def open_regular(file: Path) -> BinaryIO:
    """Open a file of a checkpoint to read; what is no regular file would block or never end.

    Raises:
        BrokenCheckpointError: it is missing, can't be read, or is no regular file.
    """
    try:
        # Non-blocking, as opening a pipe waits for a writer.
        stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError as error:
        raise broken(file, "is missing") from error
    except OSError as error:
        raise broken(file, f"can't be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise broken(file, "is no regular file")
    return stream


def broken(file: Path, problem: str) -> BrokenCheckpointError:
    """The error for one file; ``problem`` goes on after its name."""
    return BrokenCheckpointError(
        f"{file} {problem}. Take it from a copy, or use an older checkpoint.",
        [f"{file.name}: {problem}"],
    )


def _about(path: Path) -> Mapping[str, object]:
    """megapg's part of the manifest, which is only a note here: verify() says if it is damaged."""
    try:
        with open_regular(path / MANIFEST_FILE) as stream:
            found = json.load(stream)
    except (BrokenCheckpointError, ValueError, RecursionError):
        return {}
    about = found.get("megapg") if isinstance(found, dict) else None
    return about if isinstance(about, dict) else {}


# --- the saved layout -----------------------------------------------------------------------------

_SIZES = ("world_size", "tp", "pp", "cp", "ep", "expt_tp", "optimizer_instances")


def _layout(record: Mapping[str, object]) -> ParallelLayout | None:
    """The layout of these arguments; None if they don't form one."""
    sizes = {name: _size(record[name]) for name in _SIZES if record.get(name) is not None}
    levels = record.get("hierarchical_cp") or ()
    if "world_size" not in sizes or not isinstance(levels, list | tuple):
        return None
    vpp = record.get("vpp")
    try:
        return ParallelLayout(
            **sizes,  # type: ignore[arg-type]  # whole numbers, all of these
            order=str(record.get("order") or DEFAULT_ORDER),
            vpp=None if vpp is None else _size(vpp),
            hierarchical_cp=tuple(map(_size, levels)),
        )
    except LayoutError:
        return None


def _size(value: object) -> int:
    """A size; -1, which no layout takes, for what is none."""
    return value if type(value) is int else -1


def _layout_from_args(args: object) -> ParallelLayout | None:
    """As ``megatron/training/initialize.py`` makes its groups from the arguments."""
    if isinstance(args, argparse.Namespace | types.SimpleNamespace):
        args = vars(args)
    if not isinstance(args, dict) or "world_size" not in args:
        return None
    get = args.get
    return _layout(
        {
            "world_size": args["world_size"],
            "tp": get("tensor_model_parallel_size"),
            "pp": get("pipeline_model_parallel_size"),
            "cp": get("context_parallel_size"),
            "ep": get("expert_model_parallel_size"),
            "expt_tp": get("expert_tensor_parallel_size"),
            "optimizer_instances": get("num_distributed_optimizer_instances"),
            "order": "tp-cp-ep-pp-dp" if get("use_tp_pp_dp_mapping") else DEFAULT_ORDER,
            "vpp": get("virtual_pipeline_model_parallel_size"),
            "hierarchical_cp": get("hierarchical_context_parallel_sizes"),
        }
    )
