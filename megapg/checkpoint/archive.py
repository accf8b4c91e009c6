"""A strict reader of the archives that ``torch.save`` writes.

An archive is a zip file with uncompressed members. The directory at its end has the name, offset,
length and CRC-32 of each member. A seal is megapg's checksum over all bytes of an archive;
computing it is several times as fast as a CRC-32. If no seal was taken, the CRC-32s inside the
archive show a changed bit in a member.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PIECE = 2**19
"""Bytes to read and to checksum at a time; a piece still fits into the processor's cache."""

_HEADER = struct.Struct("<4s5H3L2H")  # before a member
_ENTRY = struct.Struct("<4s6H3L5H2L")  # of a member in the directory
_LONG_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")  # zip64: the place of _LONG_END
_END = struct.Struct("<4s4H2LH")
_ROW, _COLUMNS = 512, 513  # 64-bit words
_HUGE = 2**32 - 1  # the 64-bit value is in the zip64 field


class _Member(NamedTuple):
    name: str
    data: memoryview
    crc: int


def sealed(piece: memoryview, before: int = 0) -> int:
    """Return the seal of some bytes: a checksum of their values and their order.

    Each piece is taken as 64-bit words. Sums are taken over each run of 512 words, and over the
    words that lie 513 apart. The seal is the CRC-32 of the sums, in order. A change in up to three
    words, or within 4 KiB, changes a sum. An exchange of words does too, because 512 and 513 have
    no common divisor.

    Args:
        piece: of :data:`PIECE` bytes, unless it is the last.
        before: the seal of the pieces before it.
    """
    whole = len(piece) - len(piece) % (8 * _ROW)
    if whole:
        words = np.frombuffer(piece[:whole], "<u8")
        rows = np.add.reduce(words.reshape(-1, _ROW), axis=1)
        end = len(words) - len(words) % _COLUMNS
        columns = np.add.reduce(words[:end].reshape(-1, _COLUMNS), axis=0)
        columns[: len(words) - end] += words[end:]
        before = zlib.crc32(columns, zlib.crc32(rows, before))
    return zlib.crc32(piece[whole:], before)


class Seal:
    """Computes the seal of data that arrives in parts of any length."""

    def __init__(self) -> None:
        self._before = 0
        self._rest = bytearray()  # less than a piece

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        if self._rest:
            missing = PIECE - len(self._rest)
            self._rest += data[:missing]
            data = data[missing:]
            if len(self._rest) < PIECE:
                return
            self._before = sealed(memoryview(self._rest), self._before)
        whole = len(data) - len(data) % PIECE
        for at in range(0, whole, PIECE):
            self._before = sealed(data[at : at + PIECE], self._before)
        self._rest = bytearray(data[whole:])

    def number(self) -> int:
        """Return the seal of all bytes added so far."""
        return sealed(memoryview(self._rest), self._before)


def check(archive: memoryview) -> dict[str, memoryview]:
    """Return the members as :func:`members` does, after checking their CRC-32s.

    An archive without CRC-32s (``torch.serialization.set_crc32_options(False)``) is not checked.

    Raises:
        ValueError: a CRC-32 does not match, or the archive is malformed.
    """
    found = list(_members(archive))
    for member in found if any(member.crc for member in found) else ():
        if zlib.crc32(member.data) != member.crc:
            raise ValueError(f"the checksum of {member.name} is another")
    return {member.name: member.data for member in found}


def members(archive: memoryview) -> dict[str, memoryview]:
    """Return the members by name, without the common top folder.

    Raises:
        ValueError: the archive differs from those of ``torch.save``; the text gives the reason.
    """
    return {member.name: member.data for member in _members(archive)}


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
