"""Reading the contents of a checkpoint safely, without tensors, a GPU or a process group.

:func:`read_contents` reads a directory's ``.metadata`` and common state once and returns a
:class:`Contents`. The loader works from it too. So ``.metadata`` is never opened with torch's own
reader, which runs any code in it.
"""

from __future__ import annotations

import argparse
import os
import re
import types
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megapg.checkpoint import archive
from megapg.checkpoint.directory import (
    COMMON_FILE,
    FORMAT,
    FORMAT_FILE,
    INDEX_FILE,
    RELEASE,
    iteration_of,
)
from megapg.checkpoint.entries import EntryReader, check_places, checksums_of, entries_of, inside
from megapg.checkpoint.files import LARGEST_JSON, LARGEST_PICKLE, broken, parse_json, read_small
from megapg.checkpoint.manifest import Manifest, partial_of, read_manifest
from megapg.checkpoint.safe_metadata import parse_metadata
from megapg.checkpoint.safe_torch import load_safely
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointError,
    CheckpointNotFoundError,
    LayoutError,
)
from megapg.layout import DEFAULT_ORDER, ParallelLayout

COMMON_KEY = "common_state/shard_0_1"
"""The byte entry in which Megatron-core keeps the common state since 0.19, instead of the file."""

NAME_ONE = "Name the directory of one checkpoint, such as checkpoints/iter_0000123."
"""A hint for error messages."""

_OF_MEGATRON = re.compile(r"/shard_[\d.]+_[\d.]+$")  # Megatron-core's object names


@dataclass(frozen=True)
class Contents:
    """One checkpoint directory, as its small files describe it.

    Attributes:
        path: the directory.
        metadata: of torch's distributed checkpoint: every key with its shape, type and shards, and
            the place of each shard.
        common: the values that Megatron-core stores once for all ranks: iteration, ``args``,
            parameter groups and so on. Empty for a checkpoint that torch wrote without
            Megatron-core.
        about: megapg's notes about the save; empty if another program wrote the checkpoint.
        manifest: the manifest that shards are compared with as they are read; None if there is
            none.
        check: whether shards are checked as they are read.
    """

    path: Path
    metadata: Metadata
    common: Mapping[str, object]
    about: Mapping[str, object] = field(default_factory=dict)
    manifest: Manifest | None = None
    check: bool = False

    def keys(self) -> tuple[str, ...]:
        """Every key, of tensors and byte entries alike, in the order of the save."""
        return tuple(self.metadata.state_dict_metadata)

    @property
    def partial(self) -> frozenset[str]:
        """The keys of tensors that some layers do not have: adapters, states of frozen layers."""
        return partial_of(self.about)

    @property
    def content_metadata(self) -> Mapping[str, object] | None:
        """Megatron-core's description of how the state was cut (``distrib_optim_sharding_type``,
        ...).

        None if the save recorded none.
        """
        found = self.common.get("content_metadata")
        return found if isinstance(found, dict) else None

    @property
    def iteration(self) -> int | None:
        """The training iteration that was saved; None if it was not recorded."""
        for found in (self.common.get("iteration"), self.about.get("iteration")):
            if type(found) is int:
                return found
        return None

    def saved_layout(self) -> ParallelLayout | None:
        """Return the parallel layout of the job that saved; None if it was not recorded.

        The layout comes from megapg's notes, else from Megatron's ``args``. Ranks are counted from
        0 within the layout, wherever the layout was in its job.
        """
        noted = self.about.get("layout")
        if isinstance(noted, dict):
            return _layout(noted)
        return _layout_from_args(self.common.get("args"))

    def read_object(self, key: str) -> object:
        """Return a byte entry, for example ``"rng_state/shard_0.0_1.1"``.

        Megatron-core stores each object in a list of one. That list is removed.

        Raises:
            CheckpointError: there is no such key, or its entry is a tensor.
            BrokenCheckpointError: its file is missing, shorter than needed, or damaged.
            UnsafeCheckpointError: see :func:`load_safely`; or its file is outside of the directory.
        """
        saved = self.metadata.state_dict_metadata.get(key)
        if not isinstance(saved, BytesStorageMetadata):
            problem = "has no entry" if saved is None else "has a tensor, not a byte entry, for"
            raise CheckpointError(f"{self.path} {problem} {key!r}.")
        [entry] = entries_of(self.path, self.metadata, key)
        with closing(self.reader()) as reader:
            found = reader.load(entry)
        if isinstance(found, list) and len(found) == 1 and _OF_MEGATRON.search(key):
            return found[0]
        return found

    def reader(self) -> EntryReader:
        """Return a reader of the shards, with the same checks. The caller closes it."""
        return EntryReader(self.path, self._checksums, check=self.check)

    @cached_property
    def _checksums(self) -> Mapping[str, Mapping[int, str]] | None:
        if self.manifest is None:
            return None
        return checksums_of(self.path, self.metadata, self.manifest)


def read_contents(path: str | os.PathLike[str], *, check: bool = False) -> Contents:
    """Read the description of a checkpoint directory, without its tensors.

    Args:
        path: the directory of one checkpoint, for example ``checkpoints/iter_0000123``.
        check: check these files now, and shards when they are read. They are compared with the
            manifest, or with the checksums inside the files if there is no manifest.

    Raises:
        CheckpointNotFoundError: there is no such directory, or it is no checkpoint of the
            ``torch_dist`` format.
        BrokenCheckpointError: its metadata or common state is missing or damaged. With ``check``
            also: its manifest is damaged, or it holds another iteration than its directory name
            says.
        UnsafeCheckpointError: a file would run code; nothing of it was run.
    """
    path = Path(path)
    manifest = read_manifest(path) if check else None
    metadata = read_metadata(path, manifest)
    if not check:
        return Contents(path, metadata, read_common(path, metadata), _about(path))
    if manifest is None:
        check_places(path, metadata)
    form = path / FORMAT_FILE
    if form.exists() or (manifest and FORMAT_FILE in manifest.files):
        data = _small(form, LARGEST_JSON, manifest)
        if problem := wrong_format(parse_json(form, data)):
            raise broken(form, problem)
    common = read_common(path, metadata, manifest, check=True)
    if problem := wrong_name(path, common):
        raise broken(path, problem)
    about = manifest.about if manifest else {}
    return Contents(path, metadata, common, about, manifest, check=True)


def layout_of_checkpoint(path: Path) -> ParallelLayout | None:
    """Return the layout as :meth:`Contents.saved_layout`; raises as :func:`read_contents`.

    If the manifest records the layout, nothing else is read or checked.
    """
    noted = _about(path).get("layout")
    layout = _layout(noted) if isinstance(noted, dict) else None
    return layout or read_contents(path).saved_layout()


def read_metadata(path: Path, manifest: Manifest | None = None) -> Metadata:
    """Read ``.metadata`` and compare it with the manifest; raises as :func:`read_contents`."""
    _check_there(path)
    file = path / INDEX_FILE
    metadata = parse_metadata(_small(file, LARGEST_PICKLE, manifest), str(file))
    for name in {place.relative_path for place in (metadata.storage_data or {}).values()}:
        inside(path, name)
    return metadata


def read_common(
    path: Path, metadata: Metadata, manifest: Manifest | None = None, *, check: bool = False
) -> Mapping[str, object]:
    """Read the common state of a checkpoint, and check it on request.

    Raises as :func:`read_contents`.
    """
    file = path / COMMON_FILE
    if manifest is not None and (file.exists() or COMMON_FILE in manifest.files):
        common = load_safely(manifest.read(COMMON_FILE, LARGEST_PICKLE), str(file))
    elif file.exists():
        data = read_small(file, LARGEST_PICKLE)
        if check:
            try:
                archive.members(memoryview(data), check=True)
            except ValueError as error:
                raise broken(file, f"is damaged: {error}") from error
        common = load_safely(data, str(file))
    elif COMMON_KEY in metadata.state_dict_metadata:
        file = path / COMMON_KEY
        common = Contents(path, metadata, {}, {}, manifest, check=check).read_object(COMMON_KEY)
    elif (path / FORMAT_FILE).exists():
        raise broken(file, f"is missing, and there is no entry {COMMON_KEY!r} instead")
    else:
        return {}  # written by torch without Megatron-core
    if not isinstance(common, dict):
        raise broken(file, f"holds no state but {type(common).__name__}")
    return common


def _small(file: Path, limit: int, manifest: Manifest | None) -> bytes:
    """Read a small file, and compare it with the manifest if there is one."""
    return manifest.read(file.name, limit) if manifest else read_small(file, limit)


def wrong_format(form: object) -> str:
    """Return the problem with the format named in ``metadata.json``; empty if there is none."""
    backend = form.get("sharded_backend") if isinstance(form, dict) else None
    return "" if backend == FORMAT else f"names the format {backend!r:.40}, not {FORMAT!r}"


def wrong_name(path: Path, common: Mapping[str, object]) -> str:
    """Return how the contents contradict the directory's name, as in "holds iteration 5", or ""."""
    saved = common.get("iteration")
    if path.name == RELEASE or type(saved) is not int or iteration_of(path.name) in (None, saved):
        return ""
    return f"holds iteration {saved}, but its directory is called {path.name}"


def _check_there(path: Path) -> None:
    file = path / INDEX_FILE
    if file.exists():
        return
    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path} is not there. {NAME_ONE}")
    if not (path / FORMAT_FILE).exists() and not any(path.glob("*.distcp")):
        raise CheckpointNotFoundError(
            f"{path} is no checkpoint of the torch_dist format: it has no {INDEX_FILE}. {NAME_ONE}"
        )
    raise broken(file, "is missing")


def _about(path: Path) -> Mapping[str, object]:
    """Return megapg's notes from the manifest, or {} if it is damaged: verify() reports that."""
    try:
        manifest = read_manifest(path)
    except BrokenCheckpointError:
        return {}
    return manifest.about if manifest else {}


# --- the saved layout -----------------------------------------------------------------------------

_SIZES = (
    *("world_size", "tp", "pp", "cp", "ep", "expt_tp", "gtp_remat", "expt_gtp_remat"),
    "optimizer_instances",
)


def _layout(record: Mapping[str, object]) -> ParallelLayout | None:
    """Return the layout with these arguments; None if they are not valid."""
    sizes = {name: _size(record[name]) for name in _SIZES if record.get(name) is not None}
    levels = record.get("hierarchical_cp") or ()
    if "world_size" not in sizes or not isinstance(levels, list | tuple):
        return None
    vpp = record.get("vpp")
    try:
        return ParallelLayout(
            **sizes,  # type: ignore[arg-type]  # all are whole numbers
            order=str(record.get("order") or DEFAULT_ORDER),
            vpp=None if vpp is None else _size(vpp),
            hierarchical_cp=tuple(map(_size, levels)),
        )
    except LayoutError:
        return None


def _size(value: object) -> int:
    """Return a size, or -1, which every layout refuses, if the value is not a whole number."""
    return value if type(value) is int else -1


def _layout_from_args(args: object) -> ParallelLayout | None:
    """Return the layout that ``megatron/training/initialize.py`` makes from the arguments."""
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
            "gtp_remat": get("gtp_weight_remat_size"),
            "expt_gtp_remat": get("expert_gtp_weight_remat_size"),
            "optimizer_instances": get("num_distributed_optimizer_instances"),
            "order": "tp-cp-ep-pp-dp" if get("use_tp_pp_dp_mapping") else DEFAULT_ORDER,
            "vpp": get("virtual_pipeline_model_parallel_size"),
            "hierarchical_cp": get("hierarchical_context_parallel_sizes"),
        }
    )
