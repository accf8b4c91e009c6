"""Damage to files and file systems, temporary or lasting."""

from __future__ import annotations

import contextlib
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import captured


def flip(file: Path, at: int, bit: int = 2) -> None:
    """Flip a bit of one byte in place; the file keeps its size."""
    at %= file.stat().st_size
    with file.open("rb+") as stream:
        stream.seek(at)
        [was] = stream.read(1)
        stream.seek(at)
        stream.write(bytes([was ^ 1 << bit]))


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that replaces a file by another thing."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def rewrite(path: Path, change: Callable[..., object]) -> None:
    """Change the content of a checkpoint's ``.metadata``."""
    whole = pickle.loads((path / ".metadata").read_bytes())
    change(whole)
    (path / ".metadata").write_bytes(pickle.dumps(whole))


def placed(key: str = "weight", **changes: object) -> Callable[..., None]:
    """Return a change for :func:`rewrite` that moves an entry to another place."""

    def change(whole: Any) -> None:
        places = whole.storage_data.items()
        vars(next(at for index, at in places if index.fqn == key)).update(changes)

    return change


@contextlib.contextmanager
def mounted(*arguments: str) -> Iterator[Path]:
    """Mount a file system for the block; skip the test if mounting is not permitted."""
    if shutil.which("mount") is None:
        pytest.skip("there is no mount here")
    done = captured(["mount", *arguments])
    if done.returncode:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield Path(arguments[-1])
    finally:
        subprocess.run(["umount", "--lazy", arguments[-1]], check=True)


@contextlib.contextmanager
def without_sums() -> Iterator[None]:
    """Make torch save without checksums."""
    import torch

    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)
