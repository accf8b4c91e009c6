"""The random streams of this process: capture, restore, seed and fork them.

There are five kinds: Python's, NumPy's, torch's on the CPU, torch's on the device, and the named
streams of Megatron-core's tracker. A record of them is a plain dict with Megatron's keys, which can
be saved in a checkpoint.

Without CUDA, the CPU generator stands for the device's, as under
:func:`megapg.testing.megatron_on_cpu`.
"""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, TypedDict

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megapg.collection import ProcessGroupCollection
from megapg.errors import CheckpointMismatchError, UnsupportedOptionError
from megapg.layout import Field, ParallelLayout
from megapg.megatron.core import MegatronCollection, core_version, installed_version
from megapg.megatron.reading.resolve import require_groups, resolve

# Names on disk, as in Megatron's tracker and record.
DATA_STREAM = "data-parallel-rng"
TENSOR_STREAM = "model-parallel-rng"
EXPERT_STREAM = "expert-parallel-rng"
SHARD_STREAM = "gtp-remat-rng"
EXPERT_SHARD_STREAM = "egtp-remat-rng"

_MAX_SEED = 2**32 - 1  # NumPy's


class RngState(TypedDict):
    """Every random stream of one process, under the keys of Megatron's record.

    The tensors are one-dimensional uint8 on the CPU. A device's state has 16 bytes for a GPU, and
    about 5000 if the CPU generator stands for it.
    """

    random_rng_state: tuple[object, ...]
    np_rng_state: dict[str, object] | tuple[str, NDArray[np.uint32], int, int, float]
    torch_rng_state: torch.Tensor
    cuda_rng_state: torch.Tensor
    rng_tracker_states: dict[str, torch.Tensor]


def capture_rng_state(
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
    *,
    data_parallel_random_init: bool = False,
) -> list[RngState]:
    """Return the random streams of this rank as Megatron's list of records.

    The list has one record. With ``data_parallel_random_init`` it has one for each rank of the dp
    group, in the group's order, and every rank of the group must call this. If weights are sharded
    (gtp_remat), the group is that of all ranks with different batches. Streams of a tracker made
    for CUDA graphs become tensors. Mirrors ``get_rng_state`` of
    ``megatron/training/checkpointing.py``.

    Args:
        pg_collection: the groups; None takes Megatron's globals, see :func:`megapg.resolve`.
        data_parallel_random_init: True if data-parallel ranks were seeded differently.

    Raises:
        StaleGroupError, MissingGroupError, NoCollectionError: see :func:`megapg.resolve`.
        UnsupportedVersionError: Megatron-core is not installed.
    """
    needs: tuple[Field, ...] = ("dp",) if data_parallel_random_init else ()
    pg = require_groups(resolve(pg_collection, needs=needs, owner="capture_rng_state"))
    record = _captured()
    seeded_apart = _seeded_apart(pg, "capture_rng_state") if data_parallel_random_init else "dp"
    if not data_parallel_random_init or pg.size(seeded_apart) == 1:
        return [record]
    records = [record] * pg.size(seeded_apart)
    dist.all_gather_object(records, record, group=getattr(pg, seeded_apart))
    return records


def restore_rng_state(
    records: Sequence[RngState],
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
    *,
    data_parallel_random_init: bool = False,
) -> None:
    """Restore the streams that :func:`capture_rng_state` returned. No communication.

    Checks everything before it changes a stream.

    Args:
        records: one record, or with ``data_parallel_random_init`` one of each dp rank.
        pg_collection: the groups; None takes Megatron's globals, see :func:`megapg.resolve`.
        data_parallel_random_init: as for the capture.

    Raises:
        CheckpointMismatchError: the number of records is wrong. Or this rank's record lacks a key,
            or a stream that Megatron's tracker has here. Or a state does not fit its generator.
        UnsupportedOptionError: the tracker is made for CUDA graphs, and CUDA is not available.
        StaleGroupError, MissingGroupError, NoCollectionError: see :func:`megapg.resolve`.
    """
    needs: tuple[Field, ...] = ("dp",) if data_parallel_random_init else ()
    pg = require_groups(resolve(pg_collection, needs=needs, owner="restore_rng_state"))
    seeded_apart = _seeded_apart(pg, "restore_rng_state") if data_parallel_random_init else "dp"
    expected = pg.size(seeded_apart) if data_parallel_random_init else 1
    if len(records) != expected:
        why = f"{seeded_apart}={expected} with" if data_parallel_random_init else "without"
        raise CheckpointMismatchError(
            f"restore_rng_state: {len(records)} records where there should be {expected} ({why} "
            "data_parallel_random_init). Pass the list that capture_rng_state() returned, with "
            "the same data_parallel_random_init and dp size."
        )
    mine = pg.rank(seeded_apart) if data_parallel_random_init else 0
    _put_back(checked(records[mine], "restore_rng_state"))


def seed_all(
    seed: int,
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
    *,
    data_parallel_random_init: bool = False,
) -> None:
    """Seed every stream of this rank with the numbers that Megatron would use.

    ``seed + 100 * pp_rank``, with ``data_parallel_random_init`` also ``+ 10 * dp_rank``, for
    Python, NumPy, torch and the device; the tracker's streams add offsets by tp, ep and expt_tp
    rank. Streams of an earlier seeding, and streams that other code added, are removed. Mirrors
    ``_set_random_seed`` of ``megatron/training/initialize.py`` and
    ``model_parallel_cuda_manual_seed`` of ``megatron/core/tensor_parallel/random.py``. If a
    collection is passed, no global of ``parallel_state`` is read.

    Uses Megatron-core's current tracker. For another kind, call ``initialize_rng_tracker`` before.

    Args:
        seed: at least 1.
        pg_collection: the groups; None takes Megatron's globals, see :func:`megapg.resolve`.
        data_parallel_random_init: True to seed data-parallel ranks differently.

    Raises:
        UnsupportedOptionError: the seed is out of range, or the tracker is made for CUDA graphs
            and CUDA is not available.
        StaleGroupError, MissingGroupError, NoCollectionError: see :func:`megapg.resolve`.
    """
    dp = ("dp",) if data_parallel_random_init else ()
    pg = require_groups(
        resolve(pg_collection, needs=("tp", "pp", "ep", "expt_tp", *dp), owner="seed_all")
    )
    seeds = _seeds(seed, pg, data_parallel_random_init)
    record = _seeded(seeds)
    _refuse_graphs_on_cpu("seed_all")
    torch.manual_seed(seeds[DATA_STREAM])  # torch seeds all devices, the record has one
    _put_back(record)
    _tracker().seeds_ = set(seeds.values())


@contextlib.contextmanager
def fork_rng() -> Iterator[None]:
    """Context that restores every stream at its end, whatever the block does with the streams.

    Also after an exception, and if the block added or removed streams of the tracker.

    Raises:
        UnsupportedVersionError: Megatron-core is not installed.
    """
    before = _Streams()
    try:
        yield
    finally:
        before.put_back()


class RandomStreams:
    """The random streams of one model in a process that has several models.

    Megatron-core has one set of streams in a process. If two models share the set, each draws other
    numbers than it draws alone.
    """

    def __init__(self) -> None:
        self._kept: _Streams | None = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which these streams are the process's. Blocks of one object do not nest.

        The first block begins with the process's streams, and its code seeds them. A later block
        continues where the last one ended. Each block restores the process's streams at its end.

        Raises:
            UnsupportedVersionError: Megatron-core is not installed.
        """
        with fork_rng():
            if self._kept is not None:
                self._kept.put_back()
            try:
                yield
            finally:
                self._kept = _Streams()


# -- for the checkpoint ------------------------------------------------------------------------


def replica_field(pg: ProcessGroupCollection | ParallelLayout) -> Field:
    """Return the field of all replicas of a pipeline and tensor rank.

    ``dp_cp``, or if weights are sharded (gtp_remat), the field that includes those ranks.
    """
    sharded = pg.gtp_remat > 1 if isinstance(pg, ParallelLayout) else _shards(pg, "gtp_remat")
    return "dp_cp_gtp_remat" if sharded else "dp_cp"


def seeded_rng_state(
    seed: int, pg: ProcessGroupCollection, *, data_parallel_random_init: bool = False
) -> RngState:
    """Return the state that :func:`seed_all` would set on this rank, without changing a stream.

    Raises:
        UnsupportedOptionError: the seed is out of range.
    """
    return _seeded(_seeds(seed, pg, data_parallel_random_init))


def stream(seed: int) -> torch.Tensor:
    """Return the state of a fresh generator of the device."""
    return torch.Generator(_device()).manual_seed(seed).get_state()


def same_device(record: Mapping[str, object]) -> bool:
    """True if the record was captured on the kind of device of this process."""
    state = record.get("cuda_rng_state")
    return not isinstance(state, torch.Tensor) or state.numel() == _device_state().numel()


def checked(record: object, owner: str) -> RngState:
    """Check that a record can be restored here, and return it.

    Raises:
        CheckpointMismatchError: it can't; the message begins with ``owner``.
        UnsupportedOptionError: the tracker is made for CUDA graphs, and CUDA is not available.
    """
    given: Mapping[str, object] = record if isinstance(record, Mapping) else {}
    missing = sorted(RngState.__required_keys__ - given.keys())
    if missing:
        raise CheckpointMismatchError(
            f"{owner}: a {type(record).__name__} without {', '.join(missing)} is no record of "
            "random streams. Nothing was changed. Pass what capture_rng_state() or Megatron's "
            "get_rng_state() returned."
        )
    python, numpy = random.Random(), np.random.RandomState()
    cpu, device = torch.Generator(), torch.Generator(_device())
    _try(owner, "random_rng_state", python.setstate, given["random_rng_state"])
    _try(owner, "np_rng_state", numpy.set_state, given["np_rng_state"])
    _try(owner, "torch_rng_state", cpu.set_state, given["torch_rng_state"])
    streams: dict[str, object] = {}
    _try(owner, "rng_tracker_states", streams.update, given["rng_tracker_states"])
    lacking = [name for name in _tracker().get_states() if name not in streams]
    if lacking:
        raise CheckpointMismatchError(
            f"{owner}: the record has the tracker streams {', '.join(streams) or 'none'}; the "
            f"tracker here also has {', '.join(lacking)}. Nothing was changed. Capture after "
            "seeding, or start these streams anew with seed_all()."
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, state in streams.items():
        plain = state.get_state() if isinstance(state, torch.Generator) else state
        _try(owner, f"rng_tracker_states[{name!r}]", device.set_state, plain)
        tensors[name] = device.get_state()
    if tensors:
        _refuse_graphs_on_cpu(owner)
    _try(owner, "cuda_rng_state", device.set_state, given["cuda_rng_state"])
    return {
        "random_rng_state": python.getstate(),
        "np_rng_state": numpy.get_state(),
        "torch_rng_state": cpu.get_state(),
        "cuda_rng_state": device.get_state(),
        "rng_tracker_states": tensors,
    }


def _try(owner: str, what: str, put: Callable[..., object], state: object) -> None:
    try:
        put(state)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, OverflowError) as error:
        size = f" of {state.numel()} bytes" if isinstance(state, torch.Tensor) else ""
        raise CheckpointMismatchError(
            f"{owner}: {what}, a {type(state).__name__}{size}, is no state for the generator here "
            f"({_device().type} plays the device): {error}. Nothing was changed."
        ) from error


# -- live streams ------------------------------------------------------------------------------


class _Streams:
    """Every stream of this process, as found when the object is made."""

    def __init__(self) -> None:
        tracker = _tracker()
        self._record = _captured()
        self._tracked, self._seeds = dict(tracker.get_states()), set(tracker.seeds_)

    def put_back(self) -> None:
        tracker = _tracker()
        # Restore the same objects, not only their states: CUDA graphs are bound to generators.
        if self._tracked:
            tracker.set_states(self._tracked)
        else:
            tracker.reset()
        tracker.seeds_ = set(self._seeds)
        _put_back(self._record)


def _captured() -> RngState:
    streams = _tracker().get_states()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": _device_state(),
        "rng_tracker_states": {
            name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
            for name, state in streams.items()
        },
    }


def _put_back(record: RngState) -> None:
    random.setstate(record["random_rng_state"])
    np.random.set_state(record["np_rng_state"])
    torch.set_rng_state(record["torch_rng_state"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(record["cuda_rng_state"])
    tracker, streams = _tracker(), record["rng_tracker_states"]
    if streams:
        live = tracker.get_states()
        tracker.set_states({n: _into(live.get(n), state) for n, state in streams.items()})


def _into(live: _Stream | None, state: torch.Tensor) -> _Stream:
    """Return the stream in this state, in the form that the tracker uses."""
    if isinstance(live, torch.Generator):
        live.set_state(state)
        return live
    core = _core()
    if _is_graph_safe(_tracker()):
        return core.convert_cuda_rng_state(state, to_graphable=True)
    return state


def _refuse_graphs_on_cpu(owner: str) -> None:
    tracker = _tracker()
    made = any(isinstance(state, torch.Generator) for state in tracker.get_states().values())
    if torch.cuda.is_available() or made or not _is_graph_safe(tracker):
        return
    raise UnsupportedOptionError(
        f"{owner}: Megatron-core's tracker was initialised for CUDA graphs "
        "(use_cudagraphable_rng or TransformerEngine's), and its streams can't be made without "
        "CUDA. Nothing was changed. Call initialize_rng_tracker() without it."
    )


def _seeds(seed: int, pg: ProcessGroupCollection, data_parallel_random_init: bool) -> _Seeds:
    """Return stream -> seed. Streams outside of the tracker have the seed of the data stream."""
    mine = seed + 100 * pg.rank("pp")
    if data_parallel_random_init:
        mine += 10 * pg.rank(_seeded_apart(pg, "seed_all"))
    if seed <= 0 or mine > _MAX_SEED:
        raise UnsupportedOptionError(
            f"seed_all: seed={seed} makes {mine} on this rank; both must be from 1 to {_MAX_SEED}."
        )
    seeds = {
        DATA_STREAM: mine,
        TENSOR_STREAM: mine + 2718 + pg.rank("tp"),
        EXPERT_STREAM: mine + 1024 + 100 * pg.rank("ep") + pg.rank("expt_tp"),
    }
    # Ranks that shard weights draw different initial values, too.
    if _shards(pg, "gtp_remat"):
        seeds[SHARD_STREAM] = seeds[TENSOR_STREAM] + 65536 * (1 + pg.rank("gtp_remat"))
    if _shards(pg, "expt_gtp_remat"):
        of_shard = 32768 + 65536 * (1 + pg.rank("expt_gtp_remat"))
        seeds[EXPERT_SHARD_STREAM] = seeds[EXPERT_STREAM] + of_shard
    return seeds


def _seeded_apart(pg: ProcessGroupCollection, owner: str) -> Field:
    """Return the field whose ranks ``data_parallel_random_init`` seeds differently."""
    if not _shards(pg, "gtp_remat"):
        return "dp"
    if pg.size("cp") > 1:
        raise UnsupportedOptionError(
            f"{owner}: data_parallel_random_init with gtp_remat and cp: no field has the ranks of "
            "dp and gtp_remat without those of cp. Leave one of the three out."
        )
    return "dp_cp_gtp_remat"


def _shards(pg: ProcessGroupCollection, field: Field) -> bool:
    return getattr(pg, field, None) is not None and pg.size(field) > 1


def _seeded(seeds: _Seeds) -> RngState:
    seed = seeds[DATA_STREAM]
    return {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": np.random.RandomState(seed).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
        "cuda_rng_state": stream(seed),
        "rng_tracker_states": {name: stream(each) for name, each in seeds.items()},
    }


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _device_state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


# -- Megatron-core, all versions ---------------------------------------------------------------

_Seeds: TypeAlias = dict[str, int]
_Stream: TypeAlias = torch.Tensor | torch.Generator
"""A tensor; a generator in a tracker made for CUDA graphs."""


class _Tracker(Protocol):
    """``CudaRNGStatesTracker``, Megatron-core's or TransformerEngine's."""

    seeds_: set[int]

    def get_states(self) -> Mapping[str, _Stream]: ...
    def set_states(self, states: dict[str, _Stream]) -> None: ...
    def reset(self) -> None: ...


class _Core(Protocol):
    """The functions used of ``megatron.core.tensor_parallel.random``."""

    def get_cuda_rng_tracker(self) -> _Tracker: ...
    def is_graph_safe_cuda_rng_tracker(self, tracker: _Tracker) -> bool: ...
    def convert_cuda_rng_state(self, state: _Stream, to_graphable: bool) -> _Stream: ...


def _core() -> _Core:
    installed_version()
    module: _Core = importlib.import_module("megatron.core.tensor_parallel.random")
    return module


def _is_graph_safe(tracker: _Tracker) -> bool:
    core_version()  # raises for older versions, which can't tell
    return _core().is_graph_safe_cuda_rng_tracker(tracker)


def _tracker() -> _Tracker:
    return _core().get_cuda_rng_tracker()
