"""A strict reader of the archives that ``torch.save`` writes.

An archive is a zip file with uncompressed members. The directory at its end has the name, offset,
length and CRC-32 of each member.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = struct.Struct("<4s5H3L2H")  # before a member
_ENTRY = struct.Struct("<4s6H3L5H2L")  # of a member in the directory
_LONG_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")  # zip64: the place of _LONG_END
_END = struct.Struct("<4s4H2LH")
_HUGE = 2**32 - 1  # the 64-bit value is in the zip64 field


class _Member(NamedTuple):
    name: str
    data: memoryview
    crc: int


def members(archive: memoryview, *, check: bool) -> dict[str, memoryview]:
    """Return the members by name, without the common top folder. Check their CRC-32s on request.

    An archive without CRC-32s (``torch.serialization.set_crc32_options(False)``) is not checked.

    Raises:
        ValueError: a CRC-32 does not match, or the archive differs from those of ``torch.save``.
            The text gives the reason.
    """
    found = list(_members(archive))
    for member in found if check and any(member.crc for member in found) else ():
        if zlib.crc32(member.data) != member.crc:
            raise ValueError(f"the checksum of {member.name} is another")
    return {member.name: member.data for member in found}


def _members(archive: memoryview) -> Iterator[_Member]:
    stop = len(archive) - _END.size
    *_, count, size, claimed, comment = _unpacked(_END, archive, stop, b"PK\5\6")
    if comment:
        raise ValueError("it does not end where it should")
    locator = stop - _LOCATOR.size
    if locator >= 0 and bytes(archive[locator : locator + 4]) == b"PK\6\7":
        stop = locator - _LONG_END.size
        *_, count, size, claimed = _unpacked(_LONG_END, archive, stop, b"PK\6\6")
    if size > stop:
        raise ValueError("its directory has another length")
    directory = at = stop - size
    if claimed != directory:
        raise ValueError("it does not begin where it should")
    names = set[str]()
    for _ in range(count):
        entry = _unpacked(_ENTRY, archive, at, b"PK\1\2")
        (*_, flags, method, _, _, crc, stored, size, name, extra, comment, _, _, _, start) = entry
        at += _ENTRY.size
        path = bytes(archive[at : at + name])
        more = archive[at + name : at + name + extra]
        at += name + extra + comment
        size, stored, start = _long([size, stored, start], more)
        if flags & 1 or method or stored != size:
            raise ValueError("a member of it is compressed or encrypted")
        (*_, named, padding) = _unpacked(_HEADER, archive, start, b"PK\3\4")
        start += _HEADER.size
        data = start + named + padding
        if bytes(archive[start : start + named]) != path or data + size > directory:
            raise ValueError("its directory does not fit its members")
        short = path.partition(b"/")[2].decode()
        if short in names:
            raise ValueError(f"it has {short} twice")
        names.add(short)
        yield _Member(short, archive[data : data + size], crc)
    if at != stop:
        raise ValueError("its directory has another length")


def _unpacked(form: struct.Struct, data: memoryview, at: int, signature: bytes) -> tuple[int, ...]:
    if not 0 <= at <= len(data) - form.size:
        raise ValueError("it is shorter than it should be")
    fields = form.unpack_from(data, at)
    if fields[0] != signature:
        raise ValueError("it is no archive, or a part of it lies elsewhere")
    return fields


def _long(numbers: list[int], extra: memoryview) -> list[int]:
    """Return the numbers, with those too large for 32 bits taken from the zip64 field."""
    if _HUGE not in numbers:
        return numbers
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            large = iter(struct.iter_unpack("<Q", extra[4 : 4 + size - size % 8]))
            return [next(large, (_HUGE,))[0] if n == _HUGE else n for n in numbers]
        extra = extra[4 + size :]
    raise ValueError("its directory lacks a number")
