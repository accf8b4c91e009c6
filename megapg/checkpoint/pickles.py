"""Unpickling untrusted files without running code or touching anything outside of the file.

The unpickler sees stand-ins instead of torch's classes, so a hostile file can at worst fill a
stand-in with nonsense. Each part of the result is checked afterwards.
"""

from __future__ import annotations

import pathlib
import pickletools
import re
from collections import defaultdict
from typing import Never, TypeVar

from typing_extensions import override

from megapg.errors import BrokenCheckpointError, UnsafeCheckpointError

T = TypeVar("T")


def check_bounds(data: bytes) -> None:
    """Walk over the opcodes without executing any, and check that all stay within the file.

    C's unpickler allocates memory for any memo number that a pickle names. A single flipped bit can
    turn four bytes of text into such a number: tens of gigabytes, which kill the process.

    Raises:
        ValueError: an opcode is unknown, or an argument leads out of the file.
    """
    at, code = 0, b""
    while code != b".":
        if run := _PLAIN.match(data, at):
            at = run.end()
        code, at = data[at : at + 1], at + 1
        size = _SIZES.get(code)
        if size is None:
            raise ValueError(f"it has no opcode {code!r}" if code else "it ends early")
        if size == pickletools.UP_TO_NEWLINE:
            start = at
            for _ in range(2 if code in b"ci" else 1):
                at = data.index(b"\n", at) + 1
            number = int(data[start:at]) if code == b"p" else 0
        elif size < 0:
            width = _WIDTHS[size]
            number = 0
            at += width + int.from_bytes(data[at : at + width], "little")
        else:
            number = int.from_bytes(data[at : at + size], "little")
            at += size
        if at > len(data):
            raise ValueError("it ends early")
        if number > len(data):
            raise ValueError("it names an item that it can't have")
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes after its end")


_SIZES = {op.code.encode("latin-1"): op.arg.n if op.arg else 0 for op in pickletools.opcodes}
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _plain_opcodes() -> re.Pattern[bytes]:
    """Return a pattern for a run of opcodes with arguments of known size: most of a file."""
    by_size: dict[int, bytes] = defaultdict(bytes)
    for code, size in _SIZES.items():
        if size >= 0 and code not in (b".", b"r"):
            by_size[size] += code
    kinds = [b"[%s].{%d}" % (re.escape(codes), size) for size, codes in sorted(by_size.items())]
    return re.compile(b"(?:%s)*+" % b"|".join(kinds), re.DOTALL)


_PLAIN = _plain_opcodes()


class Sealed(type):
    """A class whose attributes can't be set, because a pickle may try to."""

    @override
    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(f"{cls.__name__}.{name} can't be set")


class StandIn(metaclass=Sealed):
    """Takes the fields of a pickled torch object and has no behaviour."""


class Called(StandIn):
    """The result of a call in a pickle; only the arguments are kept."""

    arguments: tuple[object, ...]

    def __new__(cls, *arguments: object) -> Called:
        self = super().__new__(cls)
        self.arguments = arguments
        return self


class Dict(StandIn):
    """An ``OrderedDict``."""

    def __new__(cls) -> dict[object, object]:  # type: ignore[misc]
        return {}


def checked(value: object, kind: type[T]) -> T:
    """Return the value if its type is exactly ``kind``.

    Raises:
        ValueError: it is of another type.
    """
    # Not isinstance(): True is no length, and no valid value is of a subclass.
    if type(value) is not kind:
        raise ValueError(f"found {type(value).__name__} where {kind.__name__} is expected")
    return value


def refuse(what: str, name: str, error: Exception | None = None) -> Never:
    """Raise :class:`UnsafeCheckpointError`: a file names something that no checkpoint needs."""
    raise UnsafeCheckpointError(
        f"{what} wants {name}, which no checkpoint needs and which may run code. Nothing of it was "
        "used. Don't load this checkpoint; if you know who wrote it, have it saved without that."
    ) from error


def damaged(what: str, error: Exception) -> BrokenCheckpointError:
    """Return the error for a file that could not be read; ``error`` is the reason."""
    said = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
    reason = f"{type(error).__name__}: {said:.150}" if said else type(error).__name__
    return BrokenCheckpointError(
        f"{what} can't be read ({reason}). The file is damaged or of something else; take it from "
        "a copy, or use an older checkpoint.",
        [f"{pathlib.PurePath(what).name}: can't be read ({reason})"],
    )
