"""Counts the collectives that a rank calls, and their bytes, for assertions in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from typing_extensions import override

from megapg.collection import ProcessGroupCollection, groups_behind
from megapg.torch_private.collectives import Call, watched

__all__ = ["Collective", "Traffic", "count_traffic"]


@dataclass(frozen=True, order=True)
class Collective:
    """The calls of one collective on one group.

    Attributes:
        field: the first field of the collection that has the group. For a group that the collection
            lacks, its description in torch, such as ``default_pg`` for WORLD.
        collective: its name, such as ``all_reduce``; see :func:`count_traffic`.
        count: number of calls.
        bytes: bytes of all calls; see :func:`count_traffic`.
        size: number of ranks in the group.
        fields: every field of the collection that has the group.
    """

    field: str
    collective: str
    count: int
    bytes: int
    size: int
    fields: tuple[str, ...]


class Traffic:
    """The collectives that this rank has called so far in a block of :func:`count_traffic`."""

    def __init__(self) -> None:
        # (field, collective, size, fields) -> number of calls, bytes
        self._calls: dict[tuple[str, str, int, tuple[str, ...]], tuple[int, int]] = {}

    @property
    def rows(self) -> tuple[Collective, ...]:
        """One row for each group and collective, sorted. Rows are plain data, and can be pickled.

        If all ranks call the same, all have equal rows.
        """
        return tuple(
            Collective(field, collective, count, nbytes, size, fields)
            for (field, collective, size, fields), (count, nbytes) in sorted(self._calls.items())
        )

    def count(self, field: str | None = None, collective: str | None = None) -> int:
        """Return the number of calls.

        Args:
            field: only on the group of this field. Calls on this group for another field that
                shares it are counted as well.
            collective: only this one, such as ``"all_reduce"``.
        """
        return sum(row.count for row in self._rows_of(field, collective))

    def bytes(self, field: str | None = None, collective: str | None = None) -> int:
        """Return the bytes of all calls. The arguments are those of :meth:`count`."""
        return sum(row.bytes for row in self._rows_of(field, collective))

    def _rows_of(self, field: str | None, collective: str | None) -> list[Collective]:
        return [
            row
            for row in self.rows
            if (field is None or field in (row.field, *row.fields))
            and collective in (None, row.collective)
        ]

    def _add(self, call: Call, fields: tuple[str, ...]) -> None:
        name = fields[0] if fields else _description(call.group)
        key = (name, call.collective, call.group.size(), fields)
        count, nbytes = self._calls.get(key, (0, 0))
        self._calls[key] = (count + 1, nbytes + call.bytes)

    @override
    def __str__(self) -> str:
        """Return a table with a line for each row."""
        lines = [("field", "ranks", "collective", "calls", "bytes", "also the group of")]
        for row in self.rows:
            others = " ".join(row.fields[1:4]) + (" ..." if len(row.fields) > 4 else "")
            numbers = f"{row.count:,}", f"{row.bytes:,}"
            lines.append((row.field, f"{row.size}", row.collective, *numbers, others))
        a, b, c, d, e = (max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1])
        return "\n".join(
            f"{v:<{a}}  {w:>{b}}  {x:<{c}}  {y:>{d}}  {z:>{e}}  {others}".rstrip()
            for v, w, x, y, z, others in lines
        )


@contextlib.contextmanager
def count_traffic(pg: ProcessGroupCollection) -> Iterator[Traffic]:
    """Count the collectives that this rank calls in the block, by group and collective.

    The block counts all calls of torch.distributed in this thread, and in backward passes that
    start in the block. Asynchronous calls, ``batch_isend_irecv``, hooks, DTensor and functional
    collectives are included. An object collective is counted as the collectives of tensors that it
    calls. Groups may be real or fake, and tensors on any device. Blocks nest.

    The bytes of a call are those of its whole buffer, which do not depend on the algorithm:

    * ``all_reduce``, ``broadcast``, ``reduce``, ``send``, ``recv``: the tensor;
    * ``all_gather``, ``gather``: what is gathered, from all ranks of the group;
    * ``reduce_scatter``, ``scatter``: the input for all ranks of the group;
    * ``all_to_all``: the input, with the part that stays on this rank;
    * ``barrier``: none.

    Fields with the same ranks may share one group, so a row can serve several fields. Groups of one
    rank are counted too. A field of ``session(dedicated=...)`` has a separate group.

    Args:
        pg: the groups to name. Other groups are counted by their description.
    """
    traffic, fields_of = Traffic(), _fields_by_group(pg)
    with watched(lambda call: traffic._add(call, fields_of.get(call.group, ()))):
        yield traffic


def _fields_by_group(pg: ProcessGroupCollection) -> Mapping[dist.ProcessGroup, tuple[str, ...]]:
    """Return group -> the fields that have it, in the collection's order."""
    found: dict[dist.ProcessGroup, tuple[str, ...]] = {}
    named: list[tuple[str, dist.ProcessGroup]] = []
    for field in pg.present():
        groups = groups_behind(pg, field)
        levels = [f"hcp.{level}" for level in range(len(groups))] if field == "hcp" else [field]
        named += zip(levels, groups, strict=False)  # no group if the field is None
    for name, group in (*named, *pg.extras.items()):
        found[group] = (*found.get(group, ()), name)
    return found


def _description(group: dist.ProcessGroup) -> str:
    known = group.group_desc not in ("", "undefined")
    return group.group_desc if known else group.group_name
