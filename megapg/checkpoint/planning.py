"""Converts Megatron's sharded state dict to the entries that this rank writes or reads, and back.

``megatron.core.dist_checkpointing`` turns sharded tensors, objects and factories into items of a
torch distributed checkpoint, so the files have Megatron's format. Only its collectives over WORLD
are left out.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import torch
from megatron.core.dist_checkpointing import dict_utils, mapping, state_dict_utils
from megatron.core.dist_checkpointing import utils as core_utils
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.dist_checkpointing.strategies import torch as core
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megapg.checkpoint.entries import (
    Entry,
    absent_layers,
    check_ends,
    count_of,
    entries_of,
    flaw,
    is_of_optimizer,
    weight_of,
)
from megapg.collection import ProcessGroup
from megapg.errors import CheckpointMismatchError, CheckpointSaveError
from megapg.torch_private import StorageInfo

if TYPE_CHECKING:
    from megapg.checkpoint.contents import Contents

State: TypeAlias = dict[str, object]
"""A (nested) state dict; its leaves may be Megatron's sharded tensors, objects and factories."""

Item: TypeAlias = tuple[WriteItem, torch.Tensor | io.BytesIO]
"""One entry to write: its description and its data."""


# -- saving ----------------------------------------------------------------------------------------


def plan_save(state: State, share_among: ProcessGroup | None) -> tuple[list[Item], State]:
    """Return the entries that this rank writes, and the common state, which the leader writes.

    The entries refer to the tensors of ``state`` without a copy. ``state`` is changed, and must not
    be used again. The ranks of the group ``share_among`` hold the same replicas and write a part of
    them each, after one exchange of names and shapes. If it is None, the first rank writes them.
    """
    sharded, common = state_dict_utils.save_preprocess(state, False)
    if share_among is not None and share_among.size() > 1:
        shares = fully_parallel.determine_main_replica_uniform_distribution(sharded, share_among)
        fully_parallel.distribute_main_replicas_with_precomputed_distribution(
            sharded, share_among, shares
        )
    items, objects = list[Item](), defaultdict[str, list[object]](list)
    for leaf in dict_utils.nested_values(sharded):
        if not mapping.is_main_replica(leaf.replica_id):
            continue
        if isinstance(leaf, mapping.ShardedTensor):
            data = leaf.data.detach()[(None,) * leaf.prepend_axis_num]
            items.append(shard(leaf.key, leaf.global_shape, leaf.global_offset, data))
        else:
            objects[leaf.unique_key].append(leaf.data)
    for key, values in objects.items():
        buffer = io.BytesIO()
        torch.save(values, buffer)
        items.append((WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), buffer))
    return items, common


def shard(key: str, shape: Sequence[int], offset: Sequence[int], data: torch.Tensor) -> Item:
    """Return the entry of ``data``, a part of a tensor of this shape that starts at ``offset``."""
    offsets = torch.Size(offset)
    about = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=data.shape),
        properties=TensorProperties(dtype=data.dtype),
        size=torch.Size(shape),
    )
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=about), data


def merge_plans(
    plans: Mapping[int, list[WriteItem]],
    places: Mapping[int, list[StorageInfo]],
    name: str,
    *,
    weights: Set[str] = frozenset(),
    trained: Mapping[str, int] = MappingProxyType({}),
) -> Metadata:
    """Return the metadata of the checkpoint ``name`` from the items of each rank and their places.

    Args:
        plans: rank -> its entries.
        places: rank -> the places of these entries.
        weights: keys that some rank must have written.
        trained: key of a weight -> the number of its elements that are trained. The optimizer's
            state has that many, and those of a whole tensor if the key is absent.

    Raises:
        CheckpointSaveError: shards overlap or are missing, so a load would fail.
    """
    problems = [*_overlaps(plans), *_missing_objects(plans)]
    if not problems:
        try:
            _, metadata = create_default_global_save_plan(
                [SavePlan(items=plans[rank]) for rank in sorted(plans)]
            )
            problems = [*_flaws(metadata, weights, trained)]
        except (ValueError, AssertionError) as error:  # tensors with other numbers of axes
            problems = [f"they do not fit together: {error!r}"]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointSaveError(
            f"the shards of the ranks make no whole: {'; '.join(problems[:8])}{more}. The model "
            "was built from other groups than those passed here, or two layers share a name."
        )
    metadata.storage_data = {
        item.index: place
        for rank, items in plans.items()
        for item, place in zip(items, places[rank], strict=True)
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=name)
    return metadata


def partial_keys(metadata: Metadata) -> list[str]:
    """Return the keys of tensors that some layers do not have."""
    return [
        key
        for key, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata) and absent_layers(tensor)
    ]


def _flaws(metadata: Metadata, weights: Set[str], trained: Mapping[str, int]) -> Iterator[str]:
    """Yield what a load would miss, or find twice."""
    with_state: set[str] = set()
    layers = defaultdict[int, set[int]](set)  # number of layers -> those that some tensor has
    lacking: dict[str, tuple[int, frozenset[int]]] = {}
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        weight = weight_of(key)
        with_state.add(weight)
        if problem := flaw(tensor, partial=True):
            yield f"the shards of {key} {problem}"
            if weight and count_of(tensor) == trained.get(weight):
                yield "only a part of each layer trains: use optimizer_sharding='dp_reshardable'"
        elif weight in trained and count_of(tensor) != trained[weight]:
            yield f"{key} has {count_of(tensor)} elements, and {trained[weight]} are trained"
        elif absent := frozenset() if weight in trained else absent_layers(tensor):
            lacking[key] = tensor.size[0], absent
    counts = {count for count, _ in lacking.values()}
    for tensor in metadata.state_dict_metadata.values():
        if isinstance(tensor, TensorStorageMetadata) and counts.intersection(tensor.size[:1]):
            layers[tensor.size[0]] |= {
                layer
                for chunk in tensor.chunks
                for layer in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
            }
    for key, (count, absent) in lacking.items():
        if lost := sorted(absent - layers[count]):  # no layer without an adapter: no layer at all
            yield f"the shards of {key} leave layer {lost[0]} out, as those of all other tensors do"
    for key in sorted(weights - metadata.state_dict_metadata.keys()):
        yield f"{key} is written by no rank"
    for key in sorted(trained.keys() - with_state) if with_state - {""} else ():
        yield f"the optimizer's state of {key} is written by no rank"


def _overlaps(plans: Mapping[int, list[WriteItem]]) -> Iterator[str]:
    seen: dict[object, int] = {}
    for rank, items in plans.items():
        for item in items:
            first = seen.setdefault(item.index, rank)
            if first != rank:
                yield f"{item.index.fqn} is written by ranks {first} and {rank}"


def _missing_objects(plans: Mapping[int, list[WriteItem]]) -> Iterator[str]:
    """Yield the objects with missing parts. Their keys are ``name/shard_<offset>_<shape>``."""
    found: dict[tuple[str, str], int] = defaultdict(int)
    for items in plans.values():
        for item in items:
            name, shard, rest = item.index.fqn.rpartition("/shard_")
            if shard and item.tensor_data is None:
                found[name, rest.partition("_")[2]] += 1
    for (name, shape), count in found.items():
        whole = math.prod(map(int, shape.split(".")))
        if count != whole:
            yield f"{name} has {count} of {whole} parts"


# -- loading ---------------------------------------------------------------------------------------


class Loading:
    """The part of a checkpoint that this rank needs. It is checked here, and read by :meth:`read`.

    Args:
        state: the state of the model and the optimizer, made for loading.
        contents: the checkpoint.
        strict: refuse a checkpoint that lacks a key. If False, that part of the state stays as it
            is.
        vocabularies: the sizes of the model's vocabularies; empty if they are not known.

    Attributes:
        keys: those that this rank reads.
        missing: keys that the checkpoint lacks.
        resized: key -> its shape in the checkpoint, for tensors that may differ in shape. An
            example is a vocabulary, whose padding depends on the tensor parallel size.

    Raises:
        CheckpointMismatchError: keys or global shapes that do not fit; they are named.
        BrokenCheckpointError: a file is missing or too short.
    """

    def __init__(
        self,
        state: State,
        contents: Contents,
        *,
        strict: bool,
        vocabularies: Set[int] = frozenset(),
    ) -> None:
        core_utils.force_all_tensors_to_non_fp8(state)
        sharded, self._local, self._factories = state_dict_utils.load_preprocess(state)
        sharded, _ = core_utils.extract_sharded_base(sharded)
        self._contents = contents
        self.missing, self.resized = _check(
            sharded, contents, strict=strict, vocabularies=vocabularies
        )
        if self.missing:
            sharded, _ = dict_utils.extract_matching_values(
                sharded, lambda leaf: _key(leaf) not in self.missing
            )
        self._sharded: State = sharded
        self.keys = frozenset(map(_key, dict_utils.nested_values(sharded)))
        path, metadata = contents.path, contents.metadata
        self._entries = {
            key: entries_of(path, metadata, key, partial=contents.partial) for key in self.keys
        }
        check_ends(path, chain.from_iterable(self._entries.values()))

    def read(self, common: State, progress: Callable[[int, int], None]) -> State:
        """Read into the tensors of the state, and merge them into ``common``.

        ``progress`` gets the number of bytes read so far, and the total.

        Raises:
            BrokenCheckpointError, UnsafeCheckpointError: with the file and the key.
        """
        by_key, flat, renamed = core._replace_state_dict_keys_with_sharded_keys(self._sharded)
        found: dict[str, object] = {}
        reads: list[_Read] = []
        for key, leaves in by_key.items():
            if isinstance(leaves[0], mapping.ShardedTensor):
                found[key] = [_memory(leaf) for leaf in leaves]
                reads += self._reads(key, leaves)
            else:
                reads.append(_Read(self._entries[key][0]))
        total = sum(piece.to.nbytes for each in reads for piece in each.pieces)
        done = 0
        # Disks and networks read faster in ascending order.
        reads.sort(key=lambda each: (each.entry.place.relative_path, each.entry.place.offset))
        with contextlib.closing(self._contents.reader()) as reader:
            for each in reads:
                if each.entry.chunk is None:
                    found[each.entry.key] = reader.load(each.entry)
                    continue
                saved = reader.tensor(each.entry)
                for piece in each.pieces:
                    piece.to.copy_(_part(saved, piece.start, piece.to.shape))
                    done += piece.to.nbytes
                progress(done, total)
        state = core._replace_sharded_keys_with_state_dict_keys(found, flat, renamed)
        core._restore_dict_types(state, self._sharded)
        dict_utils.merge(common, self._local)
        dict_utils.merge(common, state)
        merged: State = mapping.apply_factory_merges(common, self._factories)
        return merged

    def _reads(self, key: str, leaves: list[mapping.ShardedTensor]) -> Iterator[_Read]:
        """Yield each saved chunk of a tensor that is needed, with the target of each part."""
        saved = self._contents.metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)  # _check() has made sure of it
        pieces: dict[torch.Size, list[_Piece]] = defaultdict(list)
        entries = {entry.chunk.offsets: entry for entry in self._entries[key] if entry.chunk}
        others: list[torch.Tensor] = []
        cut: list[ChunkStorageMetadata] = []
        for leaf in leaves:
            offsets = torch.Size(leaf.global_offset)
            to = leaf.data[(None,) * leaf.prepend_axis_num]
            entry = entries.get(offsets)
            if entry and entry.chunk and entry.chunk.sizes == to.shape:  # cut as on disk
                pieces[offsets].append(_Piece((0,) * to.dim(), to))
            else:
                others.append(to)
                cut.append(ChunkStorageMetadata(offsets, to.shape))
        for item in create_read_items_for_chunk_list(key, saved, cut):
            offsets = item.storage_index.offset or torch.Size()
            target = _part(others[item.dest_index.index or 0], item.dest_offsets, item.lengths)
            pieces[offsets].append(_Piece(item.storage_offsets, target))
        for offsets, of_chunk in pieces.items():
            yield _Read(entries[offsets], of_chunk)


@dataclass(frozen=True)
class _Piece:
    """A part of a saved chunk."""

    start: Sequence[int]  # in the chunk
    to: torch.Tensor  # the target, of the same shape


@dataclass(frozen=True)
class _Read:
    """An entry to read, and the targets of its parts; none for an object."""

    entry: Entry
    pieces: Sequence[_Piece] = ()


def _memory(leaf: mapping.ShardedTensor) -> torch.Tensor:
    """Return the tensor that a sharded tensor is read into.

    It is allocated if necessary, and filled with zeros if the checkpoint may have fewer elements.
    """
    if leaf.data is None:
        leaf.init_data(torch.device("cpu"))
    data: torch.Tensor = leaf.data.detach()
    leaf.data = data.zero_() if leaf.allow_shape_mismatch else data
    return data


def _part(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for axis, (begin, length) in enumerate(zip(start, shape, strict=True)):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, begin, length)
    return tensor


def _key(leaf: object) -> str:
    return str(leaf.unique_key if isinstance(leaf, mapping.ShardedObject) else leaf.key)  # type: ignore[attr-defined]


def _check(
    sharded: State, contents: Contents, *, strict: bool, vocabularies: Set[int]
) -> tuple[set[str], dict[str, tuple[int, ...]]]:
    """Return the keys that the checkpoint lacks, and key -> saved shape of padded vocabularies.

    Raises:
        CheckpointMismatchError: another key does not fit, or with ``strict`` one is missing.
    """
    missing, resized = dict[str, str](), dict[str, tuple[int, ...]]()
    metadata, wrong = contents.metadata, list[str]()
    for leaf in dict_utils.nested_values(sharded):
        key = _key(leaf)
        saved = metadata.state_dict_metadata.get(key)
        if saved is None:
            missing[key] = f"{key} is missing"
        elif isinstance(saved, BytesStorageMetadata) != isinstance(leaf, mapping.ShardedObject):
            wrong.append(f"{key} is no {'tensor' if hasattr(leaf, 'dtype') else 'object'} there")
        elif isinstance(saved, TensorStorageMetadata):
            there, here = tuple(saved.size), tuple(leaf.global_shape)
            text = f"{key} has shape {there}, here {here}"
            if there == here:
                if key in contents.partial and not _covers(saved, leaf):
                    missing[key] = f"{key} lacks layers that the model has"
            elif not leaf.allow_shape_mismatch:
                wrong.append(text)
            elif _is_padding(there, here, vocabularies_of(metadata), vocabularies):
                resized[key] = there
            else:
                missing[key] = f"{text}: more than the padding of a vocabulary"
    of_optimizer = sorted(filter(is_of_optimizer, missing))
    lenient = bool(missing) and not wrong and not of_optimizer
    if of_optimizer and not wrong and (not strict or len(of_optimizer) == len(missing)):
        more = f" and {len(of_optimizer) - 3} more" if len(of_optimizer) > 3 else ""
        raise CheckpointMismatchError(
            "the checkpoint lacks part of the optimizer's state, as the model has or trains more "
            f"than was saved: {', '.join(of_optimizer[:3])}{more}. Load it with weights_only=True. "
            "Nothing was changed."
        )
    if missing and strict:
        wrong += [text for _, text in sorted(missing.items())]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointMismatchError(
            f"the checkpoint does not fit the model: {'; '.join(wrong[:8])}{more}. Nothing was "
            "loaded. Build the model with the sizes that were saved (`megapg checkpoint inspect`)"
            + (", or pass strict=False to leave what is missing as it is." if lenient else ".")
        )
    return set(missing), resized


def _covers(saved: TensorStorageMetadata, leaf: mapping.ShardedTensor) -> bool:
    """True if a saved tensor has all elements of a part. Frozen layers have no optimizer state."""
    if count_of(saved) == math.prod(saved.size):
        return True
    shape = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
    wanted = [ChunkStorageMetadata(torch.Size(leaf.global_offset), torch.Size(shape))]
    found = create_read_items_for_chunk_list(leaf.key, saved, wanted)
    return sum(math.prod(item.lengths) for item in found) == int(math.prod(shape))


def vocabularies_of(metadata: Metadata) -> set[int]:
    """Return the padded sizes of the saved vocabularies, by Megatron-core's name of embeddings."""
    return {
        tensor.size[0]
        for key, tensor in metadata.state_dict_metadata.items()
        if key.endswith("word_embeddings.weight") and isinstance(tensor, TensorStorageMetadata)
    }


def _is_padding(there: Sequence[int], here: Sequence[int], saved: Set[int], live: Set[int]) -> bool:
    """True if two shapes differ by the padding of a vocabulary, which depends on tp.

    A value head in the place of the output layer has other rows than the vocabulary. If the
    vocabularies are not known, padding may at most double one.

    Args:
        saved: the sizes of the saved vocabularies; empty if they are not known.
        live: those of the model.
    """
    return (
        tuple(there[1:]) == tuple(here[1:])
        and (not saved or there[0] in saved)
        and (not live or here[0] in live)
        and (bool(saved and live) or max(there[0], here[0]) < 2 * min(there[0], here[0]))
    )
