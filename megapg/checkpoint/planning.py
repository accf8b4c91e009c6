"""From Megatron's sharded state dict to what this rank writes or reads, and back.

The one door to the machinery of ``megatron.core.dist_checkpointing``: how sharded tensors, objects
and factories become items of a torch distributed checkpoint is Megatron's own code, so a file made
here is a file made there. What is left out of it are its collectives over WORLD.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch
from megatron.core.dist_checkpointing import dict_utils, mapping, state_dict_utils
from megatron.core.dist_checkpointing import utils as core_utils
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as core
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

from megapg.checkpoint.contents import broken, inside
from megapg.checkpoint.names import INDEX_FILE
from megapg.checkpoint.safe import load_safely, naming
from megapg.collection import ProcessGroup
from megapg.errors import CheckpointMismatchError, CheckpointSaveError

if TYPE_CHECKING:
    from megapg.checkpoint.contents import Contents

State: TypeAlias = dict[str, object]
"""A (nested) state dict; its leaves may be Megatron's sharded tensors, objects and factories."""

Item: TypeAlias = tuple[WriteItem, torch.Tensor | io.BytesIO]
"""One entry to write: what it is of the whole, and its data."""


def sharded_object(
    key: str,
    data: object,
    *,
    shape: tuple[int, ...],
    offset: tuple[int, ...],
    replica: int | tuple[int, ...] = 0,
) -> object:
    """A Python object that each of ``shape`` many places has one of; ``offset`` is ours."""
    return mapping.ShardedObject(key, data, shape, offset, replica)


# -- saving ----------------------------------------------------------------------------------------


def plan_save(state: State, share_among: ProcessGroup | None) -> tuple[list[Item], State]:
    """What this rank writes, and the common state, which the leader writes.

    Args:
        state: is used up.
        share_among: the ranks of this group, which hold the same replicas, write a part of them
            each (one exchange of names and shapes among them); None: the first one writes.

    Returns:
        The items hold the live tensors, not copies.
    """
    sharded, common = state_dict_utils.save_preprocess(state, False)
    if share_among is not None and share_among.size() > 1:
        shares = fully_parallel.determine_main_replica_uniform_distribution(sharded, share_among)
        fully_parallel.distribute_main_replicas_with_precomputed_distribution(
            sharded, share_among, shares
        )
    by_key, _, _ = core._replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = _save_planner()
    planner.set_up_planner(core.mcore_to_pyt_state_dict(by_key, False), is_coordinator=False)
    items = planner.create_local_plan().items
    return [(item, planner.resolve_data(item)) for item in items], common


def merge_plans(
    plans: Mapping[int, list[WriteItem]], places: Mapping[int, list[_StorageInfo]], name: str
) -> Metadata:
    """The metadata of the whole checkpoint from the items of all ranks and where they lie.

    Args:
        plans: rank -> its items.
        places: rank -> where each of them lies.
        name: of the checkpoint, for the record.

    Raises:
        CheckpointSaveError: shards overlap or are missing; each key is named.
    """
    problems = [*_overlaps(plans), *_missing_objects(plans)]
    if not problems:
        try:
            _, metadata = _save_planner().create_global_plan(
                [SavePlan(items=plans[rank]) for rank in sorted(plans)]
            )
        except (ValueError, AssertionError) as error:  # torch has logged which tensor
            problems.append(f"{error}; see the log for the tensors")
    if problems:
        raise CheckpointSaveError(
            f"the shards of the ranks make no whole: {'; '.join(problems[:8])}. The model was "
            "built from other groups than those passed here, or two layers share a name."
        )
    metadata.storage_data = {
        item.index: place
        for rank, items in plans.items()
        for item, place in zip(items, places[rank], strict=True)
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=name)
    found: Metadata = metadata
    return found


def _save_planner() -> core.MCoreSavePlanner:
    return core.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


def _overlaps(plans: Mapping[int, list[WriteItem]]) -> Iterator[str]:
    seen: dict[object, int] = {}
    for rank, items in plans.items():
        for item in items:
            first = seen.setdefault(item.index, rank)
            if first != rank:
                yield f"{item.index.fqn} is written by ranks {first} and {rank}"


def _missing_objects(plans: Mapping[int, list[WriteItem]]) -> Iterator[str]:
    """Objects are numbered by their keys: ``name/shard_<offset>_<shape>``."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for items in plans.values():
        for item in items:
            name, shard, rest = item.index.fqn.rpartition("/shard_")
            if shard and item.tensor_data is None:
                found[name, rest.partition("_")[2]] += 1
    for (name, shape), count in found.items():
        whole = 1
        for size in shape.split("."):
            whole *= int(size)
        if count != whole:
            yield f"{name} has {count} of {whole} parts"


# -- loading ---------------------------------------------------------------------------------------


class Loading:
    """What this rank wants of a checkpoint: checked when this is made, read by :meth:`read`.

    Args:
        state: as the model and the optimizer make it for loading.
        contents: the checkpoint.
        strict: refuse where the checkpoint lacks something; otherwise that stays as it is.

    Attributes:
        missing: keys that the checkpoint lacks.
        resized: key -> its shape in the checkpoint, where Megatron lets it differ: a vocabulary is
            padded otherwise for another tensor parallel size.

    Raises:
        CheckpointMismatchError: keys or global shapes that do not fit; they are named.
        BrokenCheckpointError: a file is missing or too short.
    """

    def __init__(self, state: State, contents: Contents, *, strict: bool) -> None:
        core_utils.force_all_tensors_to_non_fp8(state)
        sharded, self._local, self._factories = state_dict_utils.load_preprocess(state)
        sharded, _ = core_utils.extract_sharded_base(sharded)
        self._contents = contents
        self.missing = _check(sharded, contents.metadata, strict)
        if self.missing:
            sharded, _ = dict_utils.extract_matching_values(
                sharded, lambda leaf: _key(leaf) not in self.missing
            )
        _check_files(sharded, contents)
        self._sharded: State = sharded
        self.resized = _resized(sharded, contents.metadata)

    def read(self, common: State, progress: Callable[[int, int], None]) -> State:
        """Read it, into the very tensors that the state held.

        Args:
            common: what is not sharded; the rest is merged into it.
            progress: called with the bytes read so far and those to read in all.

        Raises:
            BrokenCheckpointError, UnsafeCheckpointError: naming the file.
        """
        by_key, flat, renamed = core._replace_state_dict_keys_with_sharded_keys(self._sharded)
        leaves = list(dict_utils.nested_values(self._sharded))
        tensors = [leaf for leaf in leaves if isinstance(leaf, mapping.ShardedTensor)]
        torch_state = core.mcore_to_pyt_state_dict(by_key, True)
        size = sum(leaf.data.numel() * leaf.data.element_size() for leaf in tensors)
        planner = _LoadPlanner(
            lambda done: progress(done, size),
            allow_shape_mismatch_sharded_tensors={
                leaf.key: leaf for leaf in tensors if leaf.allow_shape_mismatch
            },
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        planner.set_up_planner(torch_state, self._contents.metadata, is_coordinator=False)
        reader = FileSystemReader(self._contents.path)
        reader.set_up_storage_reader(self._contents.metadata, is_coordinator=False)
        for file, items in self._by_file(planner.create_local_plan()).items():
            with naming(inside(self._contents.path, file)):
                reader.read_data(LoadPlan(items), planner).wait()
        lists = {key: core._unwrap_pyt_sharded_tensor(value) for key, value in torch_state.items()}
        found = core._replace_sharded_keys_with_state_dict_keys(lists, flat, renamed)
        core._restore_dict_types(found, self._sharded)
        dict_utils.merge(common, self._local)
        dict_utils.merge(common, found)
        merged: State = mapping.apply_factory_merges(common, self._factories)
        return merged

    def _by_file(self, plan: LoadPlan) -> dict[str, list[ReadItem]]:
        where = self._contents.metadata.storage_data
        files: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            files[where[item.storage_index].relative_path].append(item)
        for items in files.values():  # disks and networks like to be read forwards
            items.sort(key=lambda item: where[item.storage_index].offset)
        return files


class _LoadPlanner(core.MCoreLoadPlanner):  # type: ignore[misc]  # Megatron-core has no types
    """Megatron's planner; byte entries go through the allow-list, and it tells how far it is."""

    def __init__(self, progress: Callable[[int], None], **options: object) -> None:
        super().__init__(**options)
        self._progress, self._done = progress, 0

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.state_dict[key] = load_safely(value, key)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self._done += tensor.numel() * tensor.element_size()
        self._progress(self._done)


def _key(leaf: object) -> str:
    return str(leaf.unique_key if isinstance(leaf, mapping.ShardedObject) else leaf.key)  # type: ignore[attr-defined]


def _check(sharded: State, metadata: Metadata, strict: bool) -> set[str]:
    """Keys that the checkpoint lacks, if that is allowed; everything else must fit."""
    missing, wrong = set(), list[str]()
    for leaf in dict_utils.nested_values(sharded):
        key = _key(leaf)
        saved = metadata.state_dict_metadata.get(key)
        if saved is None:
            missing.add(key)
        elif isinstance(saved, BytesStorageMetadata) != isinstance(leaf, mapping.ShardedObject):
            wrong.append(f"{key} is no {'tensor' if hasattr(leaf, 'dtype') else 'object'} there")
        elif (
            isinstance(saved, TensorStorageMetadata)
            and not leaf.allow_shape_mismatch
            and tuple(saved.size) != tuple(leaf.global_shape)
        ):
            wrong.append(f"{key} has shape {tuple(saved.size)}, here {tuple(leaf.global_shape)}")
    lenient = bool(missing) and not wrong
    if missing and strict:
        wrong += [f"{key} is missing" for key in sorted(missing)]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointMismatchError(
            f"the checkpoint does not fit the model: {'; '.join(wrong[:8])}{more}. Nothing was "
            "loaded. Build the model with the sizes that were saved (`megapg checkpoint inspect`)"
            + (", or pass strict=False to leave what is missing as it is." if lenient else ".")
        )
    return missing


def _resized(sharded: State, metadata: Metadata) -> dict[str, tuple[int, ...]]:
    found = {}
    for leaf in dict_utils.nested_values(sharded):
        if isinstance(leaf, mapping.ShardedTensor) and leaf.allow_shape_mismatch:
            saved = metadata.state_dict_metadata[leaf.key]
            if isinstance(saved, TensorStorageMetadata) and saved.size != leaf.global_shape:
                found[leaf.key] = tuple(saved.size)
    return found


def _check_files(sharded: State, contents: Contents) -> None:
    """Before anything is read: whether all that is wanted has a place, in a file that has it."""
    where = contents.metadata.storage_data or {}
    ends: dict[str, int] = {}
    for key in {_key(leaf) for leaf in dict_utils.nested_values(sharded)}:
        saved = contents.metadata.state_dict_metadata[key]
        shards = saved.chunks if isinstance(saved, TensorStorageMetadata) else [None]
        for shard in shards:
            place = where.get(MetadataIndex(key, None if shard is None else shard.offsets))
            if place is None:
                raise broken(contents.path / INDEX_FILE, f"does not say where {key} lies")
            end = place.offset + place.length
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in ends.items():
        file = inside(contents.path, name)
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            raise broken(file, "is missing")
        if size < end:
            raise broken(file, f"has {size} bytes, {end} are needed")
