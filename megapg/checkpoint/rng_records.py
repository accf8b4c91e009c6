"""Which records of random streams a checkpoint has, and which of them are this rank's.

Megatron's writers disagree about how many ranks share a record, so a record asked for by its place
alone may be another rank's. Here a stream is restored on the rank that had it, or started afresh.

* **per rank**: ``rng_state/shard_{pp}.{tp}.{dp_cp}_{sizes}``, Megatron-core's main branch,
  megapg's, and Megatron-Bridge's with expert parallelism;
* **per tp and pp**: ``rng_state/shard_{pp}.{tp}_{sizes}``, Megatron-core up to 0.19, and
  Megatron-Bridge's without expert parallelism: the record of dp_cp rank 0 alone. Its data-parallel
  replicas draw alike from every stream but the experts', so it is exact for ranks that have the
  same experts;
* **fsdp_dtensor**: ``rng_state.({pp}, {tp}).{n}.{key}``, the mapping that torch's distributed
  checkpoint takes apart. Each piece was written by some rank of the dp_cp group, and not even all
  by the same one.

The key has a prefix (Megatron's ``rng_state_key_prefix``) or a module's name after it
(Megatron-Bridge's ``rng_state.vision``). With ``data_parallel_random_init`` an entry holds a list
of the records of a whole dp group (Megatron-Bridge: of a dp_cp group).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from megapg.collection import ProcessGroupCollection
from megapg.errors import (
    BrokenCheckpointError,
    CheckpointMismatchError,
    RngStateWarning,
    UnsupportedOptionError,
)
from megapg.layout import ParallelLayout
from megapg.rng import EXPERT_STREAM, RngState, checked, same_device, seeded_rng_state, stream

Kind: TypeAlias = Literal["per_rank", "per_tp_pp", "fsdp_dtensor"]
Read: TypeAlias = Callable[[str], object]
"""Loads one entry of a checkpoint by its key, safely. Of fsdp_dtensor some are tensors."""

NEEDS = ("tp", "pp", "dp", "dp_cp", "ep", "expt_tp")
"""Fields of a collection that this module reads."""

KEY = "rng_state"
_AXES = ("pp", "tp", "dp_cp")
_N = r"\d{1,9}"  # Python refuses to read the longest numbers a file can hold
_PLACE = rf"{_N}(?:\.{_N}){{1,2}}"
_SHARD = re.compile(rf"(?P<key>[^/]*{KEY}(\.[^/]+)?)/shard_(?P<at>{_PLACE})_(?P<of>{_PLACE})")
_PIECE = re.compile(rf"{KEY}\.\((?P<at>{_N}, {_N})\)\.(?P<n>{_N})\.(?P<name>.+)")


# -- writing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RngEntry:
    """What a ``ShardedObject`` of Megatron-core is made of. It is written where replica_id is 0."""

    key: str
    data: list[RngState]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int


def entries(
    records: list[RngState],
    pg: ProcessGroupCollection,
    layouts: Sequence[Kind] = ("per_rank", "per_tp_pp"),
    *,
    key: str = KEY,
) -> list[RngEntry]:
    """This rank's entries, one of each layout, with the keys that Megatron gives them.

    Entries of two layouts share a key and differ in shape, which Megatron-core's readers take and
    the check of its ``save`` (``validate_access_integrity``) does not.

    Args:
        records: what :func:`megapg.capture_rng_state` returned.
        pg: the groups.
        layouts: which; ``fsdp_dtensor`` is only read.
        key: with prefix or module.

    Raises:
        UnsupportedOptionError: a layout that is not written, or groups with GTP, whose ranks have
            no place in any layout.
    """
    shape, place = _sizes(pg), _place(pg)
    if getattr(pg, "gtp_remat", None) is not None and pg.size("gtp_remat") > 1:
        raise UnsupportedOptionError(
            "random streams of groups with GTP weight rematerialisation can't be saved: the "
            "formats have no place for its ranks. Save without them."
        )
    made = []
    for layout in layouts:
        if layout == "per_rank":
            made.append(RngEntry(key, records, shape, place, 0))
        elif layout == "per_tp_pp":
            made.append(RngEntry(key, records, shape[:2], place[:2], place[2]))
        else:
            raise UnsupportedOptionError(
                f"RNG layout {layout!r} can't be written; say 'per_rank' or 'per_tp_pp'."
            )
    return made


# -- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RngLayout:
    """One layout of records that a checkpoint has.

    Attributes:
        kind: see the module's docstring.
        key: with prefix and module, as on disk.
        sizes: pp, tp and, of per_rank, dp_cp of the run that saved.
        pieces: of fsdp_dtensor, every key on disk; empty for the others, which have one an entry.
    """

    kind: Kind
    key: str
    sizes: tuple[int, ...]
    pieces: tuple[str, ...] = ()

    def read(self, read: Read, at: Sequence[int]) -> list[object]:
        """The list of records of one place: pp, tp and, of per_rank, dp_cp rank; others ignored.

        Raises:
            BrokenCheckpointError: what is there is no list of records.
        """
        at = tuple(at)[: len(self.sizes)]
        if self.kind == "fsdp_dtensor":
            return self._assemble(read, at)
        key = f"{self.key}/shard_{_dotted(at)}_{_dotted(self.sizes)}"
        found = read(key)
        if not isinstance(found, list) or not found:
            raise BrokenCheckpointError(
                f"{key} is no list of records of random streams but a {type(found).__name__}. "
                "Load without random streams (rng=False), or from another checkpoint."
            )
        return found

    def _assemble(self, read: Read, at: tuple[int, ...]) -> list[object]:
        records: dict[int, dict[str, object]] = {}
        for piece in self.pieces:
            match = _PIECE.fullmatch(piece)
            if match is None or match["at"] != ", ".join(map(str, at)):
                continue
            record = records.setdefault(int(match["n"]), {"rng_tracker_states": {}})
            name, _, tracked = match["name"].partition(".")
            states = record["rng_tracker_states"]
            if tracked and isinstance(states, dict):
                states[tracked] = read(piece)
            else:
                record[name] = read(piece)
        return [records[n] for n in sorted(records)]


def detect(
    keys: Iterable[str], *, prefix: str | None = None, module: str | None = None
) -> tuple[RngLayout, ...]:
    """The layouts of records that a checkpoint has, the one that says most first; often none.

    Args:
        keys: of ``.metadata``.
        prefix: before ``rng_state``; ``""`` for none.
        module: after it, Megatron-Bridge's way.

    Raises:
        CheckpointMismatchError: there are several prefixes or modules and none was named, or the
            one named is not there.
        BrokenCheckpointError: records of some ranks are missing.
    """
    shards: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
    pieces: dict[str, tuple[int, ...]] = {}
    for key in keys:
        if (match := _SHARD.fullmatch(key)) is not None:
            name = (match["key"], _numbers(match["of"], "."))
            shards.setdefault(name, set()).add(_numbers(match["at"], "."))
        elif (match := _PIECE.fullmatch(key)) is not None:
            pieces[key] = _numbers(match["at"], ", ")
    names = sorted({key for key, _ in shards} | ({KEY} if pieces else set()))
    if not names:
        return ()
    wanted = _wanted(names, prefix, module)
    found = [
        RngLayout("per_rank" if len(sizes) == 3 else "per_tp_pp", key, _whole(key, sizes, places))
        for (key, sizes), places in shards.items()
        if key == wanted
    ]
    if pieces and wanted == KEY:
        places = set(pieces.values())
        sizes = tuple(max(axis) + 1 for axis in zip(*places, strict=True))
        found.append(
            RngLayout("fsdp_dtensor", KEY, _whole(KEY, sizes, places), tuple(sorted(pieces)))
        )
    kinds: list[Kind] = ["per_rank", "per_tp_pp", "fsdp_dtensor"]
    return tuple(sorted(found, key=lambda layout: kinds.index(layout.kind)))


def _wanted(names: Sequence[str], prefix: str | None, module: str | None) -> str:
    have = f"this checkpoint has random streams under {', '.join(names)}"
    if prefix is None and module is None:
        if len(names) > 1:
            raise CheckpointMismatchError(
                f"{have}. Say which are this model's, by the prefix before {KEY} or the module "
                "after it."
            )
        return names[0]
    wanted = f"{prefix or ''}{KEY}{f'.{module}' if module else ''}"
    if wanted not in names:
        raise CheckpointMismatchError(
            f"{have}, and none under {wanted}. Name another prefix or module, or load without "
            "random streams (rng=False)."
        )
    return wanted


def _whole(key: str, sizes: tuple[int, ...], places: set[tuple[int, ...]]) -> tuple[int, ...]:
    """``sizes``, where there is a record of every place."""
    total = math.prod(sizes)
    # Sizes come from a file: nothing may grow with them.
    missing = (at for at in (_unravel(n, sizes) for n in range(total)) if at not in places)
    some = list(itertools.islice(missing, 4))
    if some or len(places) != total:
        named = ", ".join(map(str, some)) + (", ..." if len(some) == 4 else "")
        raise BrokenCheckpointError(
            f"{key} has {len(places)} records of random streams, and should have {total}: one for "
            f"each {', '.join(_AXES[: len(sizes)])} rank. Missing: {named or 'none'}. Load without "
            "random streams, or from another checkpoint."
        )
    return sizes


def _unravel(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        place.append(digit)
    return tuple(reversed(place))


# -- what this rank gets -----------------------------------------------------------------------


@dataclass(frozen=True)
class RngReport:
    """How faithful the random streams of this rank are.

    Attributes:
        exact: every stream goes on where this rank's was when the checkpoint was saved.
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
    * The record was taken on a rank with other experts: ``expert-parallel-rng`` is fresh, equal on
      the ranks that share experts, and all others are exact.

    Nothing live is touched, and the record is known to fit the generators and the tracker here.

    Args:
        layouts: what :func:`detect` found; the first that fits is read.
        read: loads one entry.
        pg: the groups, with the fields in ``NEEDS``.
        saved: the layout of the run that saved, where it is known. Without it, it is taken to be
            that of ``pg``.
        iteration: of the checkpoint; goes into fresh seeds.
        stacklevel: whose line the warning names, as for ``warnings.warn``.

    Warns:
        RngStateWarning: not exact.

    Raises:
        BrokenCheckpointError, CheckpointMismatchError: records that are none, or that do not fit.
    """
    record, report = _decide(layouts, read, pg, saved, iteration)
    if not report.exact:
        warnings.warn(f"{report.reason}.", RngStateWarning, stacklevel=stacklevel)
    return record, report


def _decide(
    layouts: Sequence[RngLayout],
    read: Read,
    pg: ProcessGroupCollection,
    saved: ParallelLayout | None,
    iteration: int,
) -> tuple[RngState, RngReport]:
    layout = next((each for each in layouts if not _changes(each, pg, saved)), layouts[0])
    changes = _changes(layout, pg, saved)
    if changes:
        reason = f"{layout.key} was saved with other sizes: {changes}"
        return _afresh(layout, read, pg, iteration, reason)
    if not _alike(layouts, layout, read, pg):
        reason = f"{layout.key}: data-parallel ranks drew differently, and now they are others"
        return _afresh(layout, read, pg, iteration, reason)
    records = layout.read(read, _place(pg))
    index = _index(len(records), pg, saved)
    if index is None:
        reason = (
            f"{layout.key} has the records of {len(records)} data-parallel ranks in each entry, "
            f"and now dp={pg.size('dp')} and dp_cp={pg.size('dp_cp')}"
        )
        return _afresh(layout, read, pg, iteration, reason)
    record = records[index]
    if isinstance(record, Mapping) and not same_device(record):
        reason = f"{layout.key} was saved on another kind of device"
        return _afresh(layout, read, pg, iteration, reason)
    mine = checked(record, layout.key)
    streams = mine["rng_tracker_states"]
    tp = _tp_with_my_experts(layout, _grid(layout, saved, pg), pg, index, len(records))
    if EXPERT_STREAM not in streams or tp == pg.rank("tp"):
        return mine, RngReport(True, _exact(layout))
    if tp is not None:
        pp, _, dp_cp = _place(pg)
        theirs = checked(layout.read(read, (pp, tp, dp_cp))[index], layout.key)
        streams[EXPERT_STREAM] = theirs["rng_tracker_states"][EXPERT_STREAM]
        return mine, RngReport(True, _exact(layout))
    fresh = _fresh(layout, read, pg, iteration)
    streams[EXPERT_STREAM] = fresh["rng_tracker_states"][EXPERT_STREAM]
    reason = (
        f"{layout.key} has no record from a rank with the experts of this one (ep rank "
        f"{pg.rank('ep')}, expt_tp rank {pg.rank('expt_tp')}), as only one of each pp and tp rank "
        f"was saved; {EXPERT_STREAM} starts afresh, every other stream is exact"
    )
    return mine, RngReport(False, reason)


def _alike(
    layouts: Sequence[RngLayout], chosen: RngLayout, read: Read, pg: ProcessGroupCollection
) -> bool:
    """Whether one record for each pp and tp rank stands for all of them, where that can be told:
    from the record of every rank, if the checkpoint has those too. Experts apart.
    """
    full = next((layout for layout in layouts if layout.kind == "per_rank"), None)
    if chosen.kind == "per_rank" or full is None or full.sizes[:2] != chosen.sizes[:2]:
        return True
    pp, tp, _ = _place(pg)
    return len({_digest(full.read(read, (pp, tp, rank))) for rank in range(full.sizes[2])}) == 1


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


def _exact(layout: RngLayout) -> str:
    if layout.kind == "per_rank":
        return f"{layout.key} has a record of every rank"
    return f"{layout.key} has a record of each pp and tp rank, whose replicas draw alike"


def _changes(layout: RngLayout, pg: ProcessGroupCollection, saved: ParallelLayout | None) -> str:
    """``"pp 2 -> 1, tp 2 -> 4"``: what makes the records those of other ranks."""
    then = dict(zip(_AXES, layout.sizes, strict=False))
    now = dict(zip(_AXES, _sizes(pg), strict=True))
    if saved is not None and _fits(layout, saved):
        then |= {"ep": saved.ep, "expt_tp": saved.expt_tp}
        now |= {"ep": pg.size("ep"), "expt_tp": pg.size("expt_tp")}
    return ", ".join(
        f"{axis} {then[axis]} -> {now[axis]}" for axis in then if then[axis] != now[axis]
    )


def _fits(layout: RngLayout, grid: ParallelLayout) -> bool:
    """A checkpoint of several modules names one layout, which need not be that of this one."""
    return (grid.pp, grid.tp, grid.dp * grid.cp)[: len(layout.sizes)] == layout.sizes


def _grid(
    layout: RngLayout, saved: ParallelLayout | None, pg: ProcessGroupCollection
) -> ParallelLayout | None:
    candidates = (saved, pg.layout)
    return next((each for each in candidates if each is not None and _fits(layout, each)), None)


def _index(count: int, pg: ProcessGroupCollection, saved: ParallelLayout | None) -> int | None:
    """Which record of a list is this rank's, if any."""
    dp, dp_cp = pg.size("dp"), pg.size("dp_cp")
    if count == 1:
        return 0
    if saved is not None and (saved.dp, saved.dp * saved.cp) != (dp, dp_cp):
        return None
    if count == dp:
        return pg.rank("dp")
    # Megatron-Bridge's list. It can't be told from that of another dp where nobody knows the cp.
    return pg.rank("dp_cp") if count == dp_cp and saved is not None else None


def _tp_with_my_experts(
    layout: RngLayout,
    grid: ParallelLayout | None,
    pg: ProcessGroupCollection,
    index: int,
    count: int,
) -> int | None:
    """The tp rank whose records were taken on ranks with this rank's experts; ours if possible.

    Experts are not cut along the dense grid's axes: the record that this rank takes its other
    streams from may be of other experts, and that of another tp rank of the same.
    """
    pp, tp, dp_cp = _place(pg)
    if grid is None:  # borrowed groups
        alike = pg.size("ep") == 1 and pg.size("expt_tp") == layout.sizes[1]
        return tp if alike or layout.kind == "per_rank" else None
    mine = pg.rank("ep"), pg.rank("expt_tp")
    for other in sorted(range(layout.sizes[1]), key=lambda each: each != tp):
        ranks = _taken_on(layout, grid, (pp, other, dp_cp), index, count)
        if {(at.ep, at.expt_tp) for at in map(grid.coordinates, ranks)} == {mine}:
            return other
    return None


def _taken_on(
    layout: RngLayout, grid: ParallelLayout, at: tuple[int, int, int], index: int, count: int
) -> Sequence[int]:
    """Global ranks of the saving run that a record can be from."""
    rank = grid.ranks[0]
    place = at if layout.kind == "per_rank" else (*at[:2], 0)
    for axis, coordinate in zip(_AXES, place, strict=True):
        rank = grid.members(axis, rank)[coordinate]
    writers = grid.members("dp_cp", rank) if layout.kind == "fsdp_dtensor" else (rank,)
    if count == 1:
        return writers
    return [grid.members("dp" if count == grid.dp else "dp_cp", each)[index] for each in writers]


# -- fresh streams -----------------------------------------------------------------------------


def _afresh(
    layout: RngLayout, read: Read, pg: ProcessGroupCollection, iteration: int, why: str
) -> tuple[RngState, RngReport]:
    record = checked(_fresh(layout, read, pg, iteration), layout.key)
    return record, RngReport(False, f"{why}; every stream starts afresh")


def _fresh(layout: RngLayout, read: Read, pg: ProcessGroupCollection, iteration: int) -> RngState:
    """New streams for this rank, from what every rank reads alike: the first rank's records."""
    records = layout.read(read, (0, 0, 0))
    content = hashlib.sha256(str(iteration).encode())
    for piece in _bytes(records):
        content.update(piece)
    record = seeded_rng_state(
        _seed(content.digest()), pg, data_parallel_random_init=len(records) > 1
    )
    first = records[0]
    states = first.get("rng_tracker_states") if isinstance(first, Mapping) else None
    for name in states if isinstance(states, Mapping) else ():
        if name not in record["rng_tracker_states"]:  # one that the user added
            own = hashlib.sha256(content.digest() + repr((name, _place(pg)[:2])).encode())
            record["rng_tracker_states"][name] = stream(_seed(own.digest()))
    return record


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


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(separator))
