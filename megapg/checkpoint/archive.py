"""The archives of ``torch.save``, read strictly: what is used of one is as it was written.

One is a zip file whose members are stored as they are. The directory at its end has name, place,
length and CRC-32 of each. A seal stands for all bytes of one, and tells it from every other; it is
several times as fast as a CRC-32. Where nobody took one, the CRC-32s inside show a bit that changed
in a member.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

PIECE = 2**19
"""Bytes to read, and to seal, at once: few enough to be in the processor's cache still."""

_HEADER = struct.Struct("<4s5H3L2H")  # before a member
_ENTRY = struct.Struct("<4s6H3L5H2L")  # of a member in the directory
_LONG_END = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")  # of the long end
_END = struct.Struct("<4s4H2LH")
_ROW, _COLUMNS = 512, 513  # 64-bit words
_HUGE = 2**32 - 1  # where a number of 64 bits stands elsewhere


class _Member(NamedTuple):
    name: str
    data: memoryview
    crc: int


def sealed(piece: memoryview, before: int = 0) -> int:
    """The seal of bytes, a checksum of what they are and of their order.

    Of every piece, each 512 words of 64 bits beside each other are added up, and each 513th word
    is. A CRC-32 of the sums, in their order, is the seal. Whatever changes in up to three words, or
    within 4 KiB, changes a sum. What changes places does too, although a sum knows no order, as the
    two lengths have no divisor in common.

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
    """The seal of what comes in parts of any length."""

    def __init__(self) -> None:
        self._before = 0
        self._rest = bytearray()  # less than a piece

    def update(self, data: memoryview) -> None:
        """Go on with more bytes."""
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
        """The seal of all that came so far."""
        return sealed(memoryview(self._rest), self._before)


def check(archive: memoryview) -> dict[str, memoryview]:
    """As :func:`members`, if they are as they were, by the CRC-32s inside; else ValueError. An
    archive without (``torch.serialization.set_crc32_options(False)``) goes unchecked.
    """
    found = list(_members(archive))
    for member in found if any(member.crc for member in found) else ():
        if zlib.crc32(member.data) != member.crc:
            raise ValueError(f"the checksum of {member.name} is another")
    return {member.name: member.data for member in found}


def members(archive: memoryview) -> dict[str, memoryview]:
    """The members by name, without the folder that all are in.

    ValueError: it is not as ``torch.save`` writes them; says what is wrong.
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
    """The numbers; those that were too large for 32 bits from the field for them."""
    if _HUGE not in numbers:
        return numbers
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            large = iter(struct.iter_unpack("<Q", extra[4 : 4 + size - size % 8]))
            return [next(large, (_HUGE,))[0] if n == _HUGE else n for n in numbers]
        extra = extra[4 + size :]
    raise ValueError("its directory lacks a number")
