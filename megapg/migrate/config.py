"""``[tool.megapg]`` of a project's ``pyproject.toml``, and which Megatron-core it runs on."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megapg.errors import UnsupportedOptionError
from megapg.upstream.signatures import VERSIONS

_KEYS = ("exclude", "wrappers", "from-core", "runtime")
_RUNTIME = re.compile(r"megapg|vendored(?::([A-Za-z_]\w*))?")
_VENDORED_AS = "process_groups"
_MINOR = re.compile(r"\s*(?:core_v|v)?0\.(\d+)(?:\.\w+)*\s*\Z")
_PIN = re.compile(r"megatron[-_.]core\s*(?:\[[^\]]*\])?\s*\(?((?:[=<>~!]=?=?\s*[\w.*]+\s*,?\s*)+)")
_CLAUSE = re.compile(r"(===?|~=|!=|>=|<=|<|>)\s*0\.(\d+)(\.[\w.*]+)?")
# A branch or tag of NVIDIA's repository, or of a fork that names them alike.
_BRANCH = re.compile(r"\bcore_[rv]0\.(\d+)\b")
_WHERE_PINS_ARE = (
    *("pyproject.toml", "setup.py", "setup.cfg", "requirements*.txt", ".gitmodules"),
    *("requirements/**/*.txt", "requirements/**/*.sh", "docker/**/*Dockerfile*", "*Dockerfile*"),
)
_OWN_CORE = "megatron/core/package_info.py"
_OF_OWN_CORE = re.compile(r"^MINOR *= *(\d+)", re.MULTILINE)
_NOTHING = "nothing says which"
_RUNS_MEGAPG = tuple(version for version in VERSIONS if version >= 12)


@dataclass(frozen=True)
class Config:
    """What a run is told."""

    root: Path  # of the project; names in reports are relative to it
    exclude: tuple[str, ...] = ()  # patterns on those names
    wrappers: tuple[str, ...] = ()  # dotted names of modules that stand for ``parallel_state``
    # Qualified names of functions, or classes, that take a collection though nobody passes one yet,
    # and hand it to all that they call.
    thread_from: tuple[str, ...] = ()
    # Minor numbers of the Megatron-core versions that may run the code.
    versions: tuple[int, ...] = _RUNS_MEGAPG
    versions_from: str = _NOTHING  # where these come from, for the report
    # The file by which the tree's own core is older than any that what is written runs beside, and
    # what it says; empty where there is none.
    old_core: str = ""
    # The name of the module that each package gets in place of megapg; empty where megapg is
    # imported.
    vendored: str = ""


def load_config(
    start: Path,
    from_core: str | None = None,
    wrappers: Sequence[str] = (),
    runtime: str | None = None,
) -> Config:
    """The configuration for the project around a path.

    Args:
        start: a file or directory; the project's root is the nearest directory upwards with a
            ``pyproject.toml``, ``setup.py``, ``setup.cfg`` or ``.git``, else this one.
        from_core: overrides what the project says, as ``0.16`` or ``0.12-0.16``.
        wrappers: go with those that the project names.
        runtime: overrides what the project says, as ``megapg`` or ``vendored``.

    Raises:
        UnsupportedOptionError: a setting that is not known, or a version that is none.
    """
    root = project_root(start)
    file = root / "pyproject.toml"
    table = _table(file)
    if unknown := set(table) - set(_KEYS):
        raise UnsupportedOptionError(
            f"{file}: [tool.megapg] has {', '.join(sorted(unknown))}; there are {', '.join(_KEYS)}."
        )
    said = table.get("from-core")
    if from_core is None and said is not None:
        if not isinstance(said, str):
            raise UnsupportedOptionError(f'{file}: from-core is a string, such as "0.16".')
        from_core, origin = said, "[tool.megapg] from-core"
    else:
        origin = "--from-core"
    own = _of_own_core(root)
    if from_core is not None:
        versions = parse_versions(from_core)
    else:
        versions, origin = own or _pinned(root) or (_RUNS_MEGAPG, _NOTHING)
    return Config(
        root=root,
        exclude=_strings(table, "exclude", file),
        wrappers=(*_strings(table, "wrappers", file), *wrappers),
        versions=versions,
        versions_from=origin,
        old_core=own[1] if own is not None and own[0][0] < _RUNS_MEGAPG[0] else "",
        vendored=parse_runtime(table.get("runtime", "megapg") if runtime is None else runtime),
    )


def parse_runtime(text: object) -> str:
    """The name of the module from ``vendored`` or ``vendored:NAME``; empty from ``megapg``.

    Raises:
        UnsupportedOptionError: it is none of these.
    """
    found = _RUNTIME.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise UnsupportedOptionError(
            f"no runtime {text!r}: say megapg, which the rewritten files import then, or vendored, "
            f"for a module {_VENDORED_AS}.py of each package's own; vendored:NAME gives it another "
            "name."
        )
    return "" if found[0] == "megapg" else found[1] or _VENDORED_AS


def parse_versions(text: str) -> tuple[int, ...]:
    """Minor numbers from ``0.16``, ``0.16.1`` or ``0.12-0.16``.

    Raises:
        UnsupportedOptionError: it is neither, or of no version that is known.
    """
    ends = [_MINOR.match(end) for end in text.split("-")]
    if 1 <= len(ends) <= 2 and all(ends):
        numbers = [int(end[1]) for end in ends if end]
        found = tuple(v for v in VERSIONS if numbers[0] <= v <= numbers[-1])
        if found:
            return found
    raise UnsupportedOptionError(
        f"no Megatron-core version {text!r}: give one from 0.{VERSIONS[0]} to 0.{VERSIONS[-1]}, "
        "such as 0.16, or two with a dash between them, 0.12-0.16."
    )


def project_root(start: Path) -> Path:
    """The root of the project around a path, as :func:`load_config` has it."""
    start = Path(os.path.abspath(start))  # without "..", as names of files are
    here = start if start.is_dir() else start.parent
    marks = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
    for folder in (here, *here.parents):
        if any((folder / mark).exists() for mark in marks):
            return folder
    return here


def _table(file: Path) -> Mapping[str, object]:
    try:
        whole = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnsupportedOptionError(f"{file} can't be read: {error}") from error
    table = whole.get("tool", {}).get("megapg", {})
    return table if isinstance(table, dict) else {}


def _strings(table: Mapping[str, object], key: str, file: Path) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UnsupportedOptionError(f"{file}: {key} in [tool.megapg] is a list of strings.")
    return tuple(value)


def _of_own_core(root: Path) -> tuple[tuple[int, ...], str] | None:
    """The version of the Megatron-core that is part of the tree."""
    for folder in ("", "*/", "*/*/"):
        for file in sorted(root.glob(folder + _OWN_CORE)):
            if said := _OF_OWN_CORE.search(_text(file)):
                found, name = int(said[1]), file.relative_to(root)
                nearest = min(max(found, VERSIONS[0]), VERSIONS[-1])
                instead = f" says 0.{found}" if nearest != found else ""
                return (nearest,), f"{name}{instead}"
    return None


def _pinned(root: Path) -> tuple[tuple[int, ...], str] | None:
    """The versions that the project's requirements admit, all of them together."""
    admitted: set[int] = set()
    origins = []
    for pattern in _WHERE_PINS_ARE:
        for file in sorted(root.glob(pattern)):
            text = _text(file)
            for pin in _PIN.finditer(text):
                clauses = _CLAUSE.findall(pin[1])
                versions = {v for v in VERSIONS if clauses and _admits(v, clauses)}
                if versions:
                    admitted |= versions
                    origins.append(f"{file.name}: megatron-core{pin[1].strip().rstrip(',')}")
            for branch in _BRANCH.finditer(text):
                if int(branch[1]) in VERSIONS:
                    admitted.add(int(branch[1]))
                    origins.append(f"{file.name}: {branch[0]}")
    if not admitted:
        return None
    return tuple(sorted(admitted)), "; ".join(dict.fromkeys(origins))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _admits(version: int, clauses: Sequence[tuple[str, str, str]]) -> bool:
    """Whether some patch release of a minor version fits."""
    for operator, minor, patch in clauses:
        number, of_first = int(minor), (patch or ".0").startswith(".0")
        fits = {
            "==": version == number,
            "===": version == number,
            "~=": version == number if patch else version >= number,
            "!=": True,
            ">=": version >= number,
            ">": version >= number,
            "<=": version <= number,
            "<": version < number or (version == number and not of_first),
        }[operator]
        if not fits:
            return False
    return True
