"""Write trees of files, and read them back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write each file under its name, byte for byte."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def contents(root: Path) -> dict[str, bytes]:
    """Return every regular file, without following links."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
