"""Writing and restoring random streams: the choice of this rank's records in a checkpoint.

A record looked up by its place only may belong to another rank: see
:mod:`~megapg.checkpoint.rng_keys`. Here a stream is restored on the rank that had it, or gets a
new seed.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megapg.checkpoint.rng_keys import AXES, KEY, Kind, Read, RngLayout
from megapg.collection import ProcessGroupCollection
from megapg.errors import RngStateWarning
from megapg.layout import Field, ParallelLayout
from megapg.rng import (
    EXPERT_SHARD_STREAM,
    EXPERT_STREAM,
    SHARD_STREAM,
    RngState,
    checked,
    replica_field,
    same_device,
    seeded_rng_state,
    stream,
)

_OWN: Mapping[str, tuple[str, tuple[Field, ...]]] = {
    EXPERT_STREAM: ("the experts", ("ep", "expt_tp")),
    SHARD_STREAM: ("the part of the weights", ("tp", "gtp_remat")),
    EXPERT_SHARD_STREAM: ("the part of the experts' weights", ("ep", "expt_tp", "expt_gtp_remat")),
}
"""Stream that differs between replicas of a pp and tp rank -> its part of the model, and axes."""

_SHARDED: Mapping[str, Field] = {SHARD_STREAM: "gtp_remat", EXPERT_SHARD_STREAM: "expt_gtp_remat"}
"""Streams that exist only if weights are sharded, with the axis."""


# -- writing -----------------------------------------------------------------------------------


def entries(
    records: list[RngState],
    pg: ProcessGroupCollection,
    layouts: Sequence[Kind] = ("per_rank", "per_tp_pp"),
    *,
    key: str = KEY,
) -> list[ShardedObject]:
    """Return this rank's entries for the records of :func:`megapg.capture_rng_state`, one per
    layout.

    They share a key, with prefix or module, and differ in shape. Megatron-core's readers accept
    that; the check of its ``save`` (``validate_access_integrity``) does not.
    """
    shape, place = _sizes(pg), _place(pg)
    made = []
    for layout in layouts:
        axes, replica = (3, 0) if layout == "per_rank" else (2, place[2])
        made.append(ShardedObject(key, records, shape[:axes], place[:axes], replica))
    return made


ALIKE = "replicas_draw_alike"
"""The key of megapg's notes with the result of :func:`drew_alike`."""


Drawn: TypeAlias = tuple[tuple[int, int], bytes]
"""The pipeline and tensor rank that a rank is a replica of, and a digest of its streams."""


def drawn(records: list[RngState], pg: ProcessGroupCollection) -> Drawn:
    """Return the place of this rank and a digest of its streams."""
    return _place(pg)[:2], _digest(records)


def drew_alike(streams: Iterable[Drawn]) -> bool:
    """True if the replicas of each pp and tp rank have equal streams, apart from the experts'."""
    found = set(streams)
    return len(found) == len({place for place, _ in found})


# -- what this rank gets -----------------------------------------------------------------------


@dataclass(frozen=True)
class RngReport:
    """The result of restoring the random streams of this rank.

    Attributes:
        exact: every stream continues where this rank's stream was at the save. If Megatron saved
            one record for all data-parallel replicas, this assumes Megatron's own seeding, where
            they draw the same numbers.
        reason: a sentence that says why.
    """

    exact: bool
    reason: str


def record_for_this_rank(
    layouts: Sequence[RngLayout],
    read: Read,
    pg: ProcessGroupCollection,
    *,
    saved: ParallelLayout | None = None,
    alike: bool | None = None,
    iteration: int = 0,
    stacklevel: int = 2,
) -> tuple[RngState, RngReport]:
    """Return the record to restore here, by ``restore_rng_state([record], pg)``. No communication.

    A rank gets its own streams of the save. If the checkpoint does not have them, the rank gets
    fresh streams, from a seed made of the checkpoint's content. They are the same at every load,
    differ between ranks as :func:`megapg.seed_all` makes them, and equal no other rank's.

    * All streams are fresh if sizes changed (pp, tp, ep, expt_tp, for per_rank also dp_cp, with
      ``data_parallel_random_init`` also dp and cp), or the kind of device did.
    * All streams are fresh if there is one record for all data-parallel replicas and the save noted
      that they drew differently. Only the first replica, which wrote the record, is exact.
    * If the record was taken on a rank with other experts, ``expert-parallel-rng`` is fresh. It is
      equal on the ranks that share experts. All other streams are exact. The same holds for the
      streams of sharded weights (GTP).

    No live stream is changed. The record is checked to fit the generators and the tracker here.

    Args:
        layouts: the result of ``rng_keys.detect()``; the first that fits is read.
        read: loads one entry.
        pg: the groups, from :func:`megapg.checkpoint.team.groups_for`.
        saved: the layout of the run that saved. If None, the layout of ``pg`` is assumed.
        alike: whether the data-parallel replicas drew alike; None if the save did not note it.
        iteration: of the checkpoint; goes into fresh seeds.
        stacklevel: the caller that the warning names, as for ``warnings.warn``.

    Warns:
        RngStateWarning: the streams are not exact.

    Raises:
        BrokenCheckpointError, CheckpointMismatchError: a record is invalid or does not fit.
    """
    record, report = _Search(layouts, read, pg, saved, alike, iteration).decide()
    if not report.exact:
        warnings.warn(f"{report.reason}.", RngStateWarning, stacklevel=stacklevel)
    return record, report


@dataclass
class _Search:
    """One run of :func:`record_for_this_rank`, with its arguments."""

    _layouts: Sequence[RngLayout]
    _read: Read
    _pg: ProcessGroupCollection
    _saved: ParallelLayout | None
    _alike: bool | None
    _iteration: int

    def __post_init__(self) -> None:
        fitting = (layout for layout in self._layouts if not self._changes(layout))
        self._layout = next(fitting, self._layouts[0])
        self._place = _place(self._pg)

    def decide(self) -> tuple[RngState, RngReport]:
        layout, pg = self._layout, self._pg
        if changes := self._changes(layout):
            return self._afresh(f"{layout.key} was saved with other sizes: {changes}")
        full = next((each for each in self._layouts if each.kind == "per_rank"), None)
        if layout.kind != "per_rank" and full is not None and full.sizes[:2] == layout.sizes[:2]:
            # Another layout tells whether the ranks of a pp and tp rank drew alike, apart from
            # experts.
            at = [(*self._place[:2], rank) for rank in range(full.sizes[2])]
            if len({_digest(full.read(self._read, each)) for each in at}) > 1:
                return self._afresh(
                    f"{layout.key}: data-parallel ranks drew differently, and now they are others"
                )
        replica = layout.kind == "per_tp_pp" and self._place[2] > 0
        if replica and self._alike is False and full is None:
            return self._afresh(
                f"{layout.key} has the record of the first data-parallel rank alone, and this one, "
                f"{replica_field(pg)} rank {self._place[2]}, drew differently"
            )
        records = layout.read(self._read, self._place)
        index = self._index(len(records))
        if index is None:
            return self._afresh(
                f"{layout.key} has the records of {len(records)} data-parallel ranks in each "
                f"entry, and now dp={pg.size('dp')} and dp_cp={pg.size('dp_cp')}"
            )
        record = records[index]
        if isinstance(record, Mapping) and not same_device(record):
            return self._afresh(f"{layout.key} was saved on another kind of device")
        lacking = self._lacking(record)
        if isinstance(record, Mapping) and lacking:
            record = {**record, "rng_tracker_states": {**_streams(record), **lacking}}
        mine = checked(record, layout.key)
        streams, lost = mine["rng_tracker_states"], [*lacking]
        for name in [name for name in _OWN if name in streams and name not in lacking]:
            tp = self._tp_with_my(_OWN[name][1], index, len(records))
            if tp is None:
                streams[name] = self._fresh()["rng_tracker_states"][name]
                lost.append(name)
            elif tp != pg.rank("tp"):
                pp, _, number = self._place
                theirs = checked(layout.read(self._read, (pp, tp, number))[index], layout.key)
                streams[name] = theirs["rng_tracker_states"][name]
        if not lost:
            return mine, RngReport(True, self._exact())
        names = " and ".join(lost)
        reason = (
            f"{layout.key} {self._why(lost, lacking)}; {names} "
            f"{'starts' if len(lost) == 1 else 'start'} afresh, every other stream is exact"
        )
        return mine, RngReport(False, reason)

    def _why(self, lost: Sequence[str], lacking: Collection[str]) -> str:
        """Return why these streams are lost. Those in ``lacking`` are not in the checkpoint."""
        whys = ["was saved by a run that sharded no weights"] if lacking else []
        others = [name for name in lost if name not in lacking]
        if others:
            what = " and ".join(_OWN[name][0] for name in others)
            axes = dict.fromkeys(axis for name in others for axis in _OWN[name][1])
            place = ", ".join(f"{axis} rank {_rank(self._pg, axis)}" for axis in axes)
            whys.append(
                f"has no record from a rank with {what} of this one ({place}), as only one of each "
                "pp and tp rank was saved"
            )
        return " and ".join(whys)

    def _lacking(self, record: object) -> dict[str, torch.Tensor]:
        """Return fresh streams of sharded weights if the run that saved had none."""
        if not isinstance(record, Mapping) or not isinstance(_streams(record), Mapping):
            return {}
        here = [name for name, axis in _SHARDED.items() if _size(self._pg, axis) > 1]
        lacking = [name for name in here if name not in _streams(record)]
        if not lacking:
            return {}  # the first rank's record is not read
        fresh = self._fresh()["rng_tracker_states"]
        return {name: fresh[name] for name in lacking}

    def _exact(self) -> str:
        if self._layout.kind == "per_rank":
            return f"{self._layout.key} has a record of every rank"
        of_each = f"{self._layout.key} has a record of each pp and tp rank"
        if self._alike is None:
            return f"{of_each}, whose replicas draw alike unless the program made them differ"
        return f"{of_each}, " + (
            "whose replicas drew alike" if self._alike else "and this one wrote it"
        )

    def _changes(self, layout: RngLayout) -> str:
        """Return the sizes that changed, as in ``"pp 2 -> 1, tp 2 -> 4"``; empty if none."""
        pg, saved = self._pg, self._saved
        then = dict(zip(AXES, layout.sizes, strict=False))
        now = dict(zip(AXES, _sizes(pg), strict=True))
        if saved is not None and _fits(layout, saved):
            more: tuple[Field, ...] = ("ep", "expt_tp", "gtp_remat", "expt_gtp_remat")
            then |= {axis: getattr(saved, axis) for axis in more}
            now |= {axis: _size(pg, axis) for axis in more}
        return ", ".join(
            f"{axis} {then[axis]} -> {now[axis]}" for axis in then if then[axis] != now[axis]
        )

    def _index(self, count: int) -> int | None:
        """Return the index of this rank's record in a list; None if there is none."""
        pg, saved = self._pg, self._saved
        dp, dp_cp = pg.size("dp"), pg.size("dp_cp")
        if count == 1:
            return 0
        if saved is not None and (saved.dp, saved.dp * saved.cp) != (dp, dp_cp):
            return None
        if replica_field(pg) != "dp_cp":
            return self._place[2] if count == pg.size(replica_field(pg)) and dp == dp_cp else None
        if count == dp:
            return pg.rank("dp")
        # Megatron-Bridge's list. If the saved cp is unknown, it is taken as that of another dp.
        return pg.rank("dp_cp") if count == dp_cp and saved is not None else None

    def _tp_with_my(self, axes: Sequence[Field], index: int, count: int) -> int | None:
        """Return a tp rank whose records come from ranks with this rank's place along ``axes``.

        This rank's own tp rank is preferred. Experts are not cut along the dense grid's axes. So
        the record of this rank's other streams may have other experts, and that of another tp rank
        the same.
        """
        layout, pg = self._layout, self._pg
        pp, tp, number = self._place
        known = (
            grid for grid in (self._saved, pg.layout) if grid is not None and _fits(layout, grid)
        )
        grid = next(known, None)
        if grid is None:  # borrowed groups
            whole = all(_size(pg, axis) == 1 for axis in ("ep", "gtp_remat", "expt_gtp_remat"))
            alike = whole and pg.size("expt_tp") == layout.sizes[1]
            return tp if alike or layout.kind == "per_rank" else None
        mine = tuple(_rank(pg, axis) for axis in axes)
        for other in sorted(range(layout.sizes[1]), key=lambda each: each != tp):
            ranks = _taken_on(layout, grid, (pp, other, number), index, count)
            places = map(grid.coordinates, ranks)
            if {tuple(getattr(at, axis) for axis in axes) for at in places} == {mine}:
                return other
        return None

    def _afresh(self, why: str) -> tuple[RngState, RngReport]:
        record = checked(self._fresh(), self._layout.key)
        return record, RngReport(False, f"{why}; every stream starts afresh")

    def _fresh(self) -> RngState:
        """Return new streams for this rank, seeded from records that all ranks read: the first
        rank's.
        """
        records = self._layout.read(self._read, (0, 0, 0))
        content = hashlib.sha256(str(self._iteration).encode())
        for piece in _bytes(records):
            content.update(piece)
        record = seeded_rng_state(
            _seed(content.digest()), self._pg, data_parallel_random_init=len(records) > 1
        )
        first = records[0]
        states = first.get("rng_tracker_states") if isinstance(first, Mapping) else None
        for name in states if isinstance(states, Mapping) else ():
            if name not in record["rng_tracker_states"]:  # a stream that the user added
                own = hashlib.sha256(content.digest() + repr((name, self._place[:2])).encode())
                record["rng_tracker_states"][name] = stream(_seed(own.digest()))
        return record


def _fits(layout: RngLayout, grid: ParallelLayout) -> bool:
    """True if the saved layout is that of these records.

    A checkpoint of several modules notes one layout, which may be another module's.
    """
    sizes = (grid.pp, grid.tp, grid.dp * grid.cp * grid.gtp_remat)
    return sizes[: len(layout.sizes)] == layout.sizes


def _taken_on(
    layout: RngLayout, grid: ParallelLayout, at: tuple[int, int, int], index: int, count: int
) -> Sequence[int]:
    """Return the global ranks of the saving run that a record can be from."""
    rank, all_replicas = grid.ranks[0], replica_field(grid)
    place = at if layout.kind == "per_rank" else (*at[:2], 0)
    for axis, coordinate in zip((*AXES[:2], all_replicas), place, strict=True):
        rank = grid.members(axis, rank)[coordinate]
    writers = grid.members(all_replicas, rank) if layout.kind == "fsdp_dtensor" else (rank,)
    if count == 1:
        return writers
    listed = "dp" if count == grid.dp and all_replicas == "dp_cp" else all_replicas
    return [grid.members(listed, each)[index] for each in writers]


def _streams(record: Mapping[str, object]) -> Mapping[str, object]:
    """Return the tracker's streams, also if they are no mapping."""
    return cast("Mapping[str, object]", record.get("rng_tracker_states"))


def _size(pg: ProcessGroupCollection, axis: Field) -> int:
    """Return the size along an axis; 1 if the collection does not have it."""
    return 1 if getattr(pg, axis, None) is None else pg.size(axis)


def _rank(pg: ProcessGroupCollection, axis: Field) -> int:
    return 0 if getattr(pg, axis, None) is None else pg.rank(axis)


def _digest(records: Sequence[object]) -> bytes:
    content = hashlib.sha256()
    for record in records:
        if isinstance(record, Mapping):
            streams = dict(record.get("rng_tracker_states") or {})
            for own in _OWN:
                streams.pop(own, None)
            record = {**record, "rng_tracker_states": streams}
        for piece in _bytes(record):
            content.update(piece)
    return content.digest()


def _seed(digest: bytes) -> int:
    return 1 + int.from_bytes(digest[:8], "big") % 2**31


def _bytes(value: object) -> Iterable[bytes]:
    """Yield the content of a record, independent of how it was stored."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            yield repr(name).encode()
            yield from _bytes(value[name])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _bytes(each)
    else:
        yield repr(value).encode()


def _sizes(pg: ProcessGroupCollection) -> tuple[int, int, int]:
    return pg.size("pp"), pg.size("tp"), pg.size(replica_field(pg))


def _place(pg: ProcessGroupCollection) -> tuple[int, int, int]:
    return pg.rank("pp"), pg.rank("tp"), pg.rank(replica_field(pg))
