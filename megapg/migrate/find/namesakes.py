"""Packages of a project that are called as Megatron's module was before there was a core.

Old trees brought their own: ``megatron/mpu`` of Megatron-LM before 3.0 and of what was forked from
it, ``mpu`` of what was copied from it. No Megatron-core has their groups.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_NAMES = ("megatron.mpu", "mpu")
_CORE = re.compile(
    rb"^[ \t]*(?:from|import)[ \t]+megatron\.core\b"
    rb"|^[ \t]*from[ \t]+megatron[ \t]+import\b(?:[^#\n(]*|[ \t]*\([^)]*)\bcore\b",
    re.MULTILINE,
)
_GETTERS = re.compile(rb"\bdef get_\w*parallel_(?:rank|world_size|group)\b")


@dataclass(frozen=True)
class Namesake:
    """A package of the project, or a module, that is not Megatron-core's."""

    name: str  # dotted, as it is imported
    path: Path  # where it is


def find_namesakes(
    files: Collection[Path], root: Path, texts: Iterable[bytes], wrappers: Collection[str]
) -> tuple[Namesake, ...]:
    """The packages of a project that are called so where nothing in it has to do with a core.

    Args:
        files: the project's Python files, without its tests.
        root: of the project; what lies beside the files counts, up to there.
        texts: what is in them, and in the other Python files of the project, without its tests.
        wrappers: dotted names that stand for Megatron-core's module all the same.
    """
    folders = list(_folders(files, root))
    found: dict[str, Namesake] = {}
    for folder in folders:
        for name in _NAMES:
            if name not in found and name not in wrappers:
                path = _is_there(folder, name)
                if path is not None and _has_getters(path):
                    found[name] = Namesake(name, path)
    if not found or any((folder / "megatron" / "core").is_dir() for folder in folders):
        return ()
    return () if any(map(_CORE.search, texts)) else tuple(found.values())


def _folders(files: Iterable[Path], root: Path) -> Iterator[Path]:
    """Those with a file somewhere below, each once, the outer ones of a file last."""
    seen = set()
    for file in files:
        for folder in file.parents:
            if folder in seen:
                break
            seen.add(folder)
            yield folder
            if folder == root:
                break


def _is_there(folder: Path, name: str) -> Path | None:
    """The package, or module, of that name in a folder from which it can be imported."""
    if (folder / "__init__.py").exists():
        return None
    whole = folder.joinpath(*name.split("."))
    if (whole / "__init__.py").is_file():
        return whole
    module = whole.with_suffix(".py")
    return module if module.is_file() else None


def _has_getters(path: Path) -> bool:
    """Whether it defines what Megatron's module has."""
    for file in [path] if path.is_file() else sorted(path.glob("*.py")):
        try:
            if _GETTERS.search(file.read_bytes()):
                return True
        except OSError:
            continue
    return False
