"""The settings of a run: ``[tool.megapg]`` in ``pyproject.toml``, and options of the commands."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.upstream.signatures import VERSIONS

_KEYS = ("exclude", "wrappers", "from-core", "runtime")
_ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_RUNTIME = re.compile(r"megapg|vendored(?::([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*))?")
_VENDORED_NAME = "process_groups"
_SUPPORTED = tuple(version for version in VERSIONS if version >= 12)
_UNKNOWN_SOURCE = "the project pins no version"
_VERSION = re.compile(r"\s*(?:core_v|v)?0\.(\d+)(?:\.\w+)*\s*\Z")
_REQUIREMENT = re.compile(
    r"megatron[-_.]core\s*(?:\[[^\]]*\])?\s*\(?((?:[=<>~!]=?=?\s*[\w.*]+\s*,?\s*)+)"
)
_CLAUSE = re.compile(r"(===?|~=|!=|>=|<=|<|>)\s*0\.(\d+)(\.[\w.*]+)?")
_BRANCH = re.compile(r"\bcore_[rv]0\.(\d+)\b")  # a branch or tag of Megatron-LM
_REQUIREMENT_FILES = (
    *("pyproject.toml", "setup.py", "setup.cfg", "requirements*.txt", ".gitmodules"),
    *("requirements/**/*.txt", "requirements/**/*.sh", "docker/**/*Dockerfile*", "*Dockerfile*"),
)
_CORE_IN_TREE = "megatron/core/package_info.py"
_MINOR = re.compile(r"^MINOR *= *(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Config:
    """The settings of a run."""

    root: Path  # of the project; file names in reports are relative to it
    exclude: tuple[str, ...] = ()  # patterns for these names
    wrappers: tuple[str, ...] = ()  # dotted names of modules that stand for ``parallel_state``
    thread_from: tuple[str, ...] = ()  # functions or classes that get the parameter in any case
    versions: tuple[int, ...] = _SUPPORTED  # minor versions of Megatron-core that may run the code
    versions_from: str = _UNKNOWN_SOURCE  # the file or option that names these versions
    # The module that replaces megapg: a name, or with its package. Empty to import megapg.
    vendored: str = ""


def load_config(
    start: Path,
    from_core: str | None = None,
    wrappers: Sequence[str] = (),
    runtime: str | None = None,
    thread_from: Sequence[str] = (),
) -> Config:
    """Return the settings of the project that a file or folder belongs to.

    ``from_core`` and ``runtime`` override the project's settings, ``wrappers`` are added to them.

    Raises:
        UnsupportedOptionError: for an unknown setting or version.
    """
    root = project_root(start)
    file = root / "pyproject.toml"
    table = _table(file)
    if unknown := set(table) - set(_KEYS):
        raise UnsupportedOptionError(
            f"{file}: [tool.megapg] has unknown keys: {', '.join(sorted(unknown))}. "
            f"The keys are {', '.join(_KEYS)}."
        )
    in_file = table.get("from-core")
    if in_file is not None and not isinstance(in_file, str):
        raise UnsupportedOptionError(f'{file}: from-core is a string, such as "0.16".')
    if from_core is not None:
        versions, source = parse_versions(from_core), "--from-core"
    elif in_file:
        versions, source = parse_versions(in_file), "[tool.megapg] from-core"
    else:
        versions, source = _core_in_tree(root) or _pinned(root) or (_SUPPORTED, _UNKNOWN_SOURCE)
    return Config(
        root=root,
        exclude=_strings(table, "exclude", file),
        wrappers=(*_strings(table, "wrappers", file), *wrappers),
        thread_from=tuple(thread_from),
        versions=versions,
        versions_from=source,
        vendored=parse_runtime(table.get("runtime", "megapg") if runtime is None else runtime),
    )


def parse_runtime(text: object) -> str:
    """Return the name in ``vendored:NAME``, which may have its package; empty for ``megapg``.

    Raises:
        UnsupportedOptionError: for any other text.
    """
    found = _RUNTIME.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise UnsupportedOptionError(
            f"no runtime {text!r}: use megapg, vendored, vendored:NAME or vendored:PACKAGE.NAME. "
            f"With vendored, each package gets its own module {_VENDORED_NAME}.py, or NAME.py."
        )
    return "" if found[0] == "megapg" else found[1] or _VENDORED_NAME


def parse_versions(text: str) -> tuple[int, ...]:
    """Return the minor versions of ``0.16``, ``0.16.1`` or ``0.12-0.16``.

    Raises:
        UnsupportedOptionError: for any other text, or for versions that megapg does not know.
    """
    ends = [_VERSION.match(end) for end in text.split("-")]
    if len(ends) <= 2 and all(ends):
        numbers = [int(end[1]) for end in ends if end]
        if found := tuple(v for v in VERSIONS if numbers[0] <= v <= numbers[-1]):
            return found
    raise UnsupportedOptionError(
        f"no Megatron-core version {text!r}: use one from 0.{VERSIONS[0]} to 0.{VERSIONS[-1]}, "
        "such as 0.16, or a range, such as 0.12-0.16."
    )


def project_root(start: Path) -> Path:
    """Return the nearest folder upwards that looks like a root, else the folder itself."""
    start = Path(os.path.abspath(start))  # keeps links, unlike resolve()
    folder = start if start.is_dir() else start.parent
    folders = (folder, *folder.parents)
    return next((f for f in folders if any((f / mark).exists() for mark in _ROOT_MARKS)), folder)


def _table(file: Path) -> Mapping[str, object]:
    try:
        whole = tomllib.loads(file.read_text(encoding="utf-8"))
        table: object = whole.get("tool", {}).get("megapg")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnsupportedOptionError(f"{file} can't be read: {error}") from error
    return table if isinstance(table, dict) else {}


def _strings(table: Mapping[str, object], key: str, file: Path) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UnsupportedOptionError(f"{file}: {key} in [tool.megapg] is a list of strings.")
    return tuple(value)


def _core_in_tree(root: Path) -> tuple[tuple[int, ...], str] | None:
    """The version of the Megatron-core in the tree, or the nearest that the table knows."""
    for file in chain(*(sorted(root.glob(up + _CORE_IN_TREE)) for up in ("", "*/", "*/*/"))):
        if match := _MINOR.search(_text(file)):
            minor = min(max(int(match[1]), VERSIONS[0]), VERSIONS[-1])
            return (minor,), f"{file.relative_to(root)}: 0.{match[1]}"
    return None


def _pinned(root: Path) -> tuple[tuple[int, ...], str] | None:
    """The versions that the project's requirements allow, from all files together."""
    versions: set[int] = set()
    sources: dict[str, None] = {}
    files = (file for pattern in _REQUIREMENT_FILES for file in sorted(root.glob(pattern)))
    for allowed, source in chain.from_iterable(map(_pins, files)):
        versions |= allowed
        sources[source] = None
    return (tuple(sorted(versions)), "; ".join(sources)) if versions else None


def _pins(file: Path) -> Iterator[tuple[set[int], str]]:
    text = _text(file)
    for requirement in _REQUIREMENT.finditer(text):
        clauses = _CLAUSE.findall(requirement[1])
        allowed = {v for v in VERSIONS if clauses and all(_allows(v, *each) for each in clauses)}
        if allowed:
            yield allowed, f"{file.name}: megatron-core{requirement[1].strip().rstrip(',')}"
    for branch in _BRANCH.finditer(text):
        if int(branch[1]) in VERSIONS:
            yield {int(branch[1])}, f"{file.name}: {branch[0]}"


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _allows(version: int, operator: str, minor: str, patch: str) -> bool:
    """True if a patch release of the minor version satisfies the clause."""
    number = int(minor)
    if operator in ("==", "===") or (operator == "~=" and patch):
        return version == number
    if operator in (">=", ">", "~="):
        return version >= number
    if operator == "<":  # "<0.16.1" allows 0.16.0
        return version < number or (version == number and not (patch or ".0").startswith(".0"))
    return operator == "!=" or version <= number
