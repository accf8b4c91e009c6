"""The records of random streams in a checkpoint. Needs no Megatron-core.

Megatron's writers differ in how many ranks share a record:

* **per rank**: ``rng_state/shard_{pp}.{tp}.{dp_cp}_{sizes}``, written by Megatron-core's main
  branch, megapg, and Megatron-Bridge with expert parallelism;
* **per tp and pp**: ``rng_state/shard_{pp}.{tp}_{sizes}``, written by Megatron-core up to 0.19, and
  Megatron-Bridge without expert parallelism: the record of dp_cp rank 0 only. Its data-parallel
  replicas draw the same numbers from every stream except the experts'. So it is exact for ranks
  that have the same experts;
* **fsdp_dtensor**: ``rng_state.({pp}, {tp}).{n}.{key}``, a mapping that torch's distributed
  checkpoint flattens. Any rank of the dp_cp group may have written a piece, and different pieces
  may come from different ranks.

The key may have a prefix (Megatron's ``rng_state_key_prefix``), or a module's name at its end
(Megatron-Bridge's ``rng_state.vision``). With ``data_parallel_random_init`` an entry holds a list
with the records of a whole dp group (Megatron-Bridge: of a dp_cp group).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megapg.errors import BrokenCheckpointError, CheckpointMismatchError
from megapg.layout import Field

Kind: TypeAlias = Literal["per_rank", "per_tp_pp", "fsdp_dtensor"]
Read: TypeAlias = Callable[[str], object]
"""Loads one entry of a checkpoint by its key, safely. Some entries of fsdp_dtensor are tensors."""

KEY = "rng_state"
AXES: tuple[Field, ...] = ("pp", "tp", "dp_cp")
_N = r"\d{1,9}"  # Python refuses to parse longer numbers that a file can hold
_PLACE = rf"{_N}(?:\.{_N}){{1,2}}"
_SHARD = re.compile(rf"(?P<key>[^/]*{KEY}(\.[^/]+)?)/shard_(?P<at>{_PLACE})_(?P<of>{_PLACE})")
_PIECE = re.compile(rf"{KEY}\.\((?P<at>{_N}, {_N})\)\.(?P<n>{_N})\.(?P<name>.+)")


@dataclass(frozen=True)
class RngLayout:
    """One layout of records in a checkpoint.

    Attributes:
        kind: see the module's docstring.
        key: with prefix and module, as on disk.
        sizes: pp, tp and, for per_rank, dp_cp of the run that saved.
        pieces: for fsdp_dtensor, every key on disk. Empty for the others, which have one key per
            entry.
    """

    kind: Kind
    key: str
    sizes: tuple[int, ...]
    pieces: tuple[str, ...] = ()

    def read(self, read: Read, at: Sequence[int]) -> list[object]:
        """Return the list of records of one place: pp, tp and, for per_rank, dp_cp rank.

        Further numbers are ignored.

        Raises:
            BrokenCheckpointError: the entry is no list of records.
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
    """Return the layouts of records in a checkpoint with these keys, the most detailed first.

    The result is often empty. The ``prefix`` comes before ``rng_state``, and ``""`` is no prefix.
    The ``module`` comes after it, as in Megatron-Bridge.

    Raises:
        CheckpointMismatchError: there are several prefixes or modules and none was named, or the
            named one is missing.
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
    chosen = _chosen(names, prefix, module)
    found = [
        RngLayout("per_rank" if len(sizes) == 3 else "per_tp_pp", key, _whole(key, sizes, places))
        for (key, sizes), places in shards.items()
        if key == chosen
    ]
    if pieces and chosen == KEY:
        places = set(pieces.values())
        sizes = tuple(max(axis) + 1 for axis in zip(*places, strict=True))
        found.append(
            RngLayout("fsdp_dtensor", KEY, _whole(KEY, sizes, places), tuple(sorted(pieces)))
        )
    kinds: list[Kind] = ["per_rank", "per_tp_pp", "fsdp_dtensor"]
    return tuple(sorted(found, key=lambda layout: kinds.index(layout.kind)))


def _chosen(names: Sequence[str], prefix: str | None, module: str | None) -> str:
    have = f"this checkpoint has random streams under {', '.join(names)}"
    if prefix is None and module is None:
        if len(names) > 1:
            raise CheckpointMismatchError(
                f"{have}. Say which are this model's, by the prefix before {KEY} or the module "
                "after it."
            )
        return names[0]
    name = f"{prefix or ''}{KEY}{f'.{module}' if module else ''}"
    if name not in names:
        raise CheckpointMismatchError(
            f"{have}, and none under {name}. Name another prefix or module, or load without "
            "random streams (rng=False)."
        )
    return name


def _whole(key: str, sizes: tuple[int, ...], places: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Return ``sizes``, after checking that every place has a record."""
    total = math.prod(sizes)
    # Sizes come from a file, so no memory may grow with them.
    missing = (at for at in (_unravel(n, sizes) for n in range(total)) if at not in places)
    some = list(itertools.islice(missing, 4))
    if some or len(places) != total:
        named = ", ".join(map(str, some)) + (", ..." if len(some) == 4 else "")
        raise BrokenCheckpointError(
            f"{key} has {len(places)} records of random streams, and should have {total}: one for "
            f"each {', '.join(AXES[: len(sizes)])} rank. Missing: {named or 'none'}. Load without "
            "random streams, or from another checkpoint."
        )
    return sizes


def _unravel(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        place.append(digit)
    return tuple(reversed(place))


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _numbers(text: str, separator: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(separator))
