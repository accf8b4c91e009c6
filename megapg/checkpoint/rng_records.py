"""Random streams to write, and to restore: which records of a checkpoint are this rank's.

A record asked for by its place alone may be another rank's: see
:mod:`~megapg.checkpoint.rng_layouts`. Here a stream is restored on the rank that had it, or is
started afresh.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megapg.checkpoint.rng_layouts import AXES, KEY, Kind, Read, RngLayout
from megapg.collection import ProcessGroupCollection
from megapg.errors import RngStateWarning, UnsupportedOptionError
from megapg.layout import Field, ParallelLayout
from megapg.rng import EXPERT_STREAM, RngState, checked, same_device, seeded_rng_state, stream

NEEDS: tuple[Field, ...] = ("tp", "pp", "dp", "dp_cp", "ep", "expt_tp")
"""Fields of a collection that this module reads."""


# -- writing -----------------------------------------------------------------------------------


def entries(
    records: list[RngState],
    pg: ProcessGroupCollection,
    layouts: Sequence[Kind] = ("per_rank", "per_tp_pp"),
    *,
    key: str = KEY,
) -> list[ShardedObject]:
    """This rank's entries of what :func:`megapg.capture_rng_state` returned, one of each layout.

    They share a key, with prefix or module, and differ in shape, which Megatron-core's readers take
    and the check of its ``save`` (``validate_access_integrity``) does not.

    Raises:
        UnsupportedOptionError: a layout that is not written, or groups with GTP, whose ranks have
            no place in any layout.
    """
    if getattr(pg, "gtp_remat", None) is not None and pg.size("gtp_remat") > 1:
        raise UnsupportedOptionError(
            "random streams of groups with GTP weight rematerialisation can't be saved: the "
            "formats have no place for its ranks. Save without them."
        )
    shape, place = _sizes(pg), _place(pg)
    made = []
    for layout in layouts:
        if layout not in ("per_rank", "per_tp_pp"):
            raise UnsupportedOptionError(
                f"RNG layout {layout!r} can't be written; say 'per_rank' or 'per_tp_pp'."
            )
        axes, replica = (3, 0) if layout == "per_rank" else (2, place[2])
        made.append(ShardedObject(key, records, shape[:axes], place[:axes], replica))
    return made


ALIKE = "replicas_draw_alike"
"""Where megapg notes what :func:`drew_alike` found, for one record to stand for several ranks."""


Drawn: TypeAlias = tuple[tuple[int, int], bytes]
"""Of which pipeline and tensor rank a rank is a replica, and where its streams are."""


def drawn(records: list[RngState], pg: ProcessGroupCollection) -> Drawn:
    """This rank's."""
    return _place(pg)[:2], _digest(records)


def drew_alike(streams: Iterable[Drawn]) -> bool:
    """Whether the replicas of each pipeline and tensor rank are at one point, experts apart."""
    found = set(streams)
    return len(found) == len({place for place, _ in found})


# -- what this rank gets -----------------------------------------------------------------------


@dataclass(frozen=True)
class RngReport:
    """How faithful the random streams of this rank are.

    Attributes:
        exact: every stream goes on where this rank's was when the checkpoint was saved. Of
            Megatron's checkpoints with one record for all data-parallel replicas, that takes
            them to draw alike, as under Megatron's own seeding.
        reason: in a sentence, why or why not.
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
    """The record to restore here, by ``restore_rng_state([record], pg)``. No communication.

    What this rank had when it saved is what it gets. Where the checkpoint can't tell, it gets
    fresh streams instead, from a seed made of the checkpoint's content: the same at every load, as
    different between ranks as :func:`megapg.seed_all` makes them, and nobody else's.

    * The sizes are other ones (pp, tp, ep, expt_tp, of per_rank also dp_cp, with
      ``data_parallel_random_init`` also dp and cp), or the device is of another kind: every stream
      is fresh.
    * There is one record for all data-parallel replicas, and the save noted that they drew
      differently: every stream is fresh, but on the first of them, which wrote it.
    * The record was taken on a rank with other experts: ``expert-parallel-rng`` is fresh, equal on
      the ranks that share experts, and all others are exact.

    Nothing live is touched, and the record is known to fit the generators and the tracker here.

    Args:
        layouts: what ``rng_layouts.detect()`` found; the first that fits is read.
        read: loads one entry.
        pg: the groups, with the fields in ``NEEDS``.
        saved: the layout of the run that saved, where it is known. Without it, it is taken to be
            that of ``pg``.
        alike: whether the data-parallel replicas drew alike, where the save noted it.
        iteration: of the checkpoint; goes into fresh seeds.
        stacklevel: whose line the warning names, as for ``warnings.warn``.

    Warns:
        RngStateWarning: not exact.

    Raises:
        BrokenCheckpointError, CheckpointMismatchError: records that are none, or that do not fit.
    """
    record, report = _Search(layouts, read, pg, saved, alike, iteration).decide()
    if not report.exact:
        warnings.warn(f"{report.reason}.", RngStateWarning, stacklevel=stacklevel)
    return record, report


@dataclass
class _Search:
    """One run of :func:`record_for_this_rank`; the arguments are its."""

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
            # Whether one record stands for all of a pp and tp rank can be told. Experts apart.
            at = [(*self._place[:2], rank) for rank in range(full.sizes[2])]
            if len({_digest(full.read(self._read, each)) for each in at}) > 1:
                return self._afresh(
                    f"{layout.key}: data-parallel ranks drew differently, and now they are others"
                )
        replica = layout.kind == "per_tp_pp" and self._place[2] > 0
        if replica and self._alike is False and full is None:
            return self._afresh(
                f"{layout.key} has the record of the first data-parallel rank alone, and this one, "
                f"dp_cp rank {self._place[2]}, drew differently"
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
        mine = checked(record, layout.key)
        streams = mine["rng_tracker_states"]
        tp = self._tp_with_my_experts(index, len(records))
        if EXPERT_STREAM not in streams or tp == pg.rank("tp"):
            return mine, RngReport(True, self._exact())
        if tp is not None:
            pp, _, dp_cp = self._place
            theirs = checked(layout.read(self._read, (pp, tp, dp_cp))[index], layout.key)
            streams[EXPERT_STREAM] = theirs["rng_tracker_states"][EXPERT_STREAM]
            return mine, RngReport(True, self._exact())
        streams[EXPERT_STREAM] = self._fresh()["rng_tracker_states"][EXPERT_STREAM]
        reason = (
            f"{layout.key} has no record from a rank with the experts of this one (ep rank "
            f"{pg.rank('ep')}, expt_tp rank {pg.rank('expt_tp')}), as only one of each pp and tp "
            f"rank was saved; {EXPERT_STREAM} starts afresh, every other stream is exact"
        )
        return mine, RngReport(False, reason)

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
        """``"pp 2 -> 1, tp 2 -> 4"``: what makes the records those of other ranks."""
        pg, saved = self._pg, self._saved
        then = dict(zip(AXES, layout.sizes, strict=False))
        now = dict(zip(AXES, _sizes(pg), strict=True))
        if saved is not None and _fits(layout, saved):
            then |= {"ep": saved.ep, "expt_tp": saved.expt_tp}
            now |= {"ep": pg.size("ep"), "expt_tp": pg.size("expt_tp")}
        return ", ".join(
            f"{axis} {then[axis]} -> {now[axis]}" for axis in then if then[axis] != now[axis]
        )

    def _index(self, count: int) -> int | None:
        """Which record of a list is this rank's, if any."""
        pg, saved = self._pg, self._saved
        dp, dp_cp = pg.size("dp"), pg.size("dp_cp")
        if count == 1:
            return 0
        if saved is not None and (saved.dp, saved.dp * saved.cp) != (dp, dp_cp):
            return None
        if count == dp:
            return pg.rank("dp")
        # Megatron-Bridge's list: as that of another dp, where nobody knows the cp.
        return pg.rank("dp_cp") if count == dp_cp and saved is not None else None

    def _tp_with_my_experts(self, index: int, count: int) -> int | None:
        """The tp rank whose records were taken on ranks with this rank's experts; ours if possible.

        Experts are not cut along the dense grid's axes: the record that this rank takes its other
        streams from may be of other experts, and that of another tp rank of the same.
        """
        layout, pg = self._layout, self._pg
        pp, tp, dp_cp = self._place
        known = (
            grid for grid in (self._saved, pg.layout) if grid is not None and _fits(layout, grid)
        )
        grid = next(known, None)
        if grid is None:  # borrowed groups
            alike = pg.size("ep") == 1 and pg.size("expt_tp") == layout.sizes[1]
            return tp if alike or layout.kind == "per_rank" else None
        mine = pg.rank("ep"), pg.rank("expt_tp")
        for other in sorted(range(layout.sizes[1]), key=lambda each: each != tp):
            ranks = _taken_on(layout, grid, (pp, other, dp_cp), index, count)
            if {(at.ep, at.expt_tp) for at in map(grid.coordinates, ranks)} == {mine}:
                return other
        return None

    def _afresh(self, why: str) -> tuple[RngState, RngReport]:
        record = checked(self._fresh(), self._layout.key)
        return record, RngReport(False, f"{why}; every stream starts afresh")

    def _fresh(self) -> RngState:
        """New streams for this rank, from what every rank reads alike: the first rank's records."""
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
            if name not in record["rng_tracker_states"]:  # one that the user added
                own = hashlib.sha256(content.digest() + repr((name, self._place[:2])).encode())
                record["rng_tracker_states"][name] = stream(_seed(own.digest()))
        return record


def _fits(layout: RngLayout, grid: ParallelLayout) -> bool:
    """A checkpoint of several modules names one layout, which need not be that of this one."""
    return (grid.pp, grid.tp, grid.dp * grid.cp)[: len(layout.sizes)] == layout.sizes


def _taken_on(
    layout: RngLayout, grid: ParallelLayout, at: tuple[int, int, int], index: int, count: int
) -> Sequence[int]:
    """Global ranks of the saving run that a record can be from."""
    rank = grid.ranks[0]
    place = at if layout.kind == "per_rank" else (*at[:2], 0)
    for axis, coordinate in zip(AXES, place, strict=True):
        rank = grid.members(axis, rank)[coordinate]
    writers = grid.members("dp_cp", rank) if layout.kind == "fsdp_dtensor" else (rank,)
    if count == 1:
        return writers
    return [grid.members("dp" if count == grid.dp else "dp_cp", each)[index] for each in writers]


def _digest(records: Sequence[object]) -> bytes:
    content = hashlib.sha256()
    for record in records:
        if isinstance(record, Mapping):
            streams = dict(record.get("rng_tracker_states") or {})
            streams.pop(EXPERT_STREAM, None)
            record = {**record, "rng_tracker_states": streams}
        for piece in _bytes(record):
            content.update(piece)
    return content.digest()


def _seed(digest: bytes) -> int:
    return 1 + int.from_bytes(digest[:8], "big") % 2**31


def _bytes(value: object) -> Iterable[bytes]:
    """A record's content, whatever it went through on its way to the disk and back."""
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
    return pg.size("pp"), pg.size("tp"), pg.size("dp_cp")


def _place(pg: ProcessGroupCollection) -> tuple[int, int, int]:
    return pg.rank("pp"), pg.rank("tp"), pg.rank("dp_cp")
