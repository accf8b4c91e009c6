"""How a project wants its files written: what it tells its formatter, linter and import sorter."""

from __future__ import annotations

import ast
import configparser
import os
import re
import string
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megapg.migrate.python.methods import kept
from megapg.migrate.python.sorting import SECTIONS, THIRD_PARTY, Order
from megapg.migrate.python.source import Source

_Table = Mapping[str, object]
# Where each tool looks, and in which table of it.
_RUFF = ((".ruff.toml", ()), ("ruff.toml", ()), ("pyproject.toml", ("tool", "ruff")))
_BLACK = (("pyproject.toml", ("tool", "black")),)
_ISORT = (
    (".isort.cfg", ("settings",)),
    (".isort.cfg", ("isort",)),
    ("pyproject.toml", ("tool", "isort")),
    ("setup.cfg", ("isort",)),
    ("setup.cfg", ("tool:isort",)),
    ("tox.ini", ("isort",)),
)
# The ruff that puts the message of a long assertion into parentheses, and what is asserted not.
_SPLITS_MESSAGES = (0, 9)
_FLAKE8 = ((".flake8", ("flake8",)), ("setup.cfg", ("flake8",)), ("tox.ini", ("flake8",)))
_PYLINT = (
    *((".pylintrc", (name,)) for name in ("FORMAT", "MASTER", "MAIN")),
    *(("pylintrc", (name,)) for name in ("FORMAT", "MASTER", "MAIN")),
    ("pyproject.toml", ("tool", "pylint", "format")),
)
# The names of sections that isort has.
_SECTION_NAMES = {"stdlib": "standard-library", "thirdparty": "third-party"} | {
    "firstparty": "first-party",
    "localfolder": "local-folder",
}


def quote_of(source: Source, style: Style) -> str:
    """The quote that a file is to have around strings: the one that is asked for, else its own."""
    return style.quote or _quote_in(source)


@kept
def _quote_in(source: Source) -> str:
    """A single quote where all strings of a file that may have either, two or more, have it."""
    single = 0
    waiting: list[ast.AST] = [source.tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr):
            continue  # of what is in it older Pythons don't know the place
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            begin, end = source.extent(node)
            literal = source.text[begin:end].lstrip(string.ascii_letters)
            if not literal.startswith(('"""', "'''")) and not {"'", '"'} & {*literal[1:-1]}:
                if literal[:1] != "'":
                    return '"'
                single += 1
    return "'" if single > 1 else '"'


@dataclass(frozen=True)
class Style:
    """How the files of a folder are to be written."""

    order: Order  # of imports
    is_sorted: bool = False  # whether the project sorts them
    is_formatted: bool = False  # whether there are settings of a formatter
    is_linted: bool = False  # whether there are settings of a linter
    line_length: int | None = None  # of the formatter, or else the linter; None where nothing says
    quote: str = ""  # that is asked for; empty where nothing says
    magic_comma: bool = True  # whether a comma at the end keeps a line each
    splits_message: bool = False  # whether the message of a long assertion is in parentheses


class Styles:
    """The styles of a project's folders.

    Args:
        root: of the project.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, path: Path) -> Style:
        """The style of a file."""
        return self._of(path.parent)

    @kept
    def _of(self, folder: Path) -> Style:
        ruff, isort = self._table(folder, _RUFF), self._table(folder, _ISORT)
        black = self._table(folder, _BLACK)
        is_by_ruff = self._runs("ruff-format") and not self._runs("black")
        if is_by_ruff:  # then settings of black are left from before, or for an editor
            black, ruff = None, ruff or {}
        flake8, pylint = self._table(folder, _FLAKE8), self._table(folder, _PYLINT)
        lint = {**ruff, **_below(ruff, "lint")} if ruff is not None else {}
        chosen = {*_strings(lint, "select"), *_strings(lint, "extend-select")}
        sorts = not chosen.isdisjoint(("I", "I0", "I00", "I001", "ALL"))
        if isort is not None and not sorts:
            order = _of_isort(isort, self._root)
        else:
            order = _of_ruff(_below(lint, "isort"), ruff or {}, self._root)
        lengths = [
            (black, "line-length", 88),
            (ruff, "line-length", 88),
            (flake8, "max-line-length", 79),
            (pylint, "max-line-length", 100),
        ]
        written = _below(ruff or {}, "format")
        hooked = re.search(r"/ruff-pre-commit\W+rev\W+v?([\d.]+)", self._hooks)
        wanted = hooked[1] if hooked else str((ruff or {}).get("required-version", ""))
        version = re.match(r"(?:==)?(\d+)\.(\d+)", wanted)
        is_old = version is not None and (int(version[1]), int(version[2])) < _SPLITS_MESSAGES
        quotes = str(written.get("quote-style", ""))
        normalizes = black is not None and not _is_set(black, "skip-string-normalization")
        normalized = '"' if normalizes or is_by_ruff else ""
        inline = str(_below(lint, "flake8-quotes").get("inline-quotes", ""))
        return Style(
            order,
            is_sorted=sorts or isort is not None,
            is_formatted=black is not None or ruff is not None,
            is_linted=flake8 is not None or ruff is not None,
            line_length=next((_number(t, key, n) for t, key, n in lengths if t is not None), None),
            quote={"single": "'", "double": '"'}.get(inline or quotes, normalized),
            magic_comma=not any(
                _is_set(t, "skip-magic-trailing-comma") for t in (black or {}, written)
            ),
            splits_message=black is None and ruff is not None and not is_old,
        )

    @cached_property
    def _hooks(self) -> str:
        """The hooks of pre-commit that the project has; empty where it has none."""
        try:
            return (self._root / ".pre-commit-config.yaml").read_text("utf-8", "replace")
        except OSError:
            return ""

    def _runs(self, hook: str) -> bool:
        """Whether a hook of that name is run before a commit."""
        return re.search(rf"(?m)^[-\s]*id:\s*{hook}\s*(#|$)", self._hooks) is not None

    def _table(
        self, folder: Path, places: Iterable[tuple[str, tuple[str, ...]]]
    ) -> dict[str, object] | None:
        """What the nearest of some files says in its table, with a dash in each name."""
        for each in self._upwards(folder):
            for name, table in places:
                found = _read(each / name, table)
                if found is not None:
                    return _extended(found, each / name) if places is _RUFF else found
        return None

    def _upwards(self, folder: Path) -> Iterator[Path]:
        """The folder and those around it, up to the root of the project, or of its repository."""
        above = [self._root, *self._root.parents]
        end = next((each for each in above if (each / ".git").exists()), self._root)
        for each in (folder, *folder.parents):
            yield each
            if each == end:
                return


def _extended(table: dict[str, object], file: Path) -> dict[str, object]:
    """A table of ruff's with what it does not say itself, but a file does that it extends; each
    folder of sources is one of the file that names it, and by default of the first.
    """
    table.setdefault("src", [".", "src"])
    seen: set[Path] = set()
    found: dict[str, object] = {}
    while table and file not in seen:
        seen.add(file)
        if "src" in table:
            table["src"] = [str(file.parent / each) for each in _strings(table, "src")]
        found = _merged(table, found)
        file = Path(os.path.normpath(file.parent / str(table.get("extend", ""))))
        base = next((_read(file, place) for name, place in _RUFF if name == file.name), None)
        table = base or {}
    return found


def _merged(base: _Table, own: _Table) -> dict[str, object]:
    """Two tables, and those in them, in one; what both say is said by the second."""
    merged = {**base, **own}
    for name in base.keys() & own.keys():
        if isinstance(base[name], dict) and isinstance(own[name], dict):
            merged[name] = _merged(_below(base, name), _below(own, name))
    return merged


def _read(file: Path, table: tuple[str, ...]) -> dict[str, object] | None:
    """A table of a file; None where there is none that can be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found: object = None
    if file.suffix == ".toml":
        with suppress(tomllib.TOMLDecodeError):
            found = tomllib.loads(text)
        for name in table:
            found = found.get(name) if isinstance(found, dict) else None
    else:
        parser = configparser.RawConfigParser(strict=False)
        with suppress(configparser.Error):
            parser.read_string(text)
        found = dict(parser[table[0]]) if table[0] in parser else None
    if not isinstance(found, dict):
        return None
    return {str(name).replace("_", "-"): value for name, value in found.items()}


def _below(table: _Table, name: str) -> dict[str, object]:
    found = table.get(name)
    return {k.replace("_", "-"): v for k, v in found.items()} if isinstance(found, dict) else {}


def _strings(table: _Table, name: str) -> tuple[str, ...]:
    """A list, as TOML has it or on lines or between commas."""
    found = table.get(name)
    if isinstance(found, str):
        found = found.replace("\n", ",").split(",")
    return tuple(str(e).strip() for e in found if str(e).strip()) if isinstance(found, list) else ()


def _number(table: _Table, name: str, default: int) -> int:
    with suppress(ValueError):
        return int(str(table.get(name, default)).split("#")[0])
    return default


def _is_set(table: _Table, name: str, default: bool = False) -> bool:
    return str(table.get(name, default)).lower() in ("true", "1", "yes", "on")


def _section_of(name: str) -> str:
    lower = name.strip().lower()
    return _SECTION_NAMES.get(lower, lower)


def _of_isort(table: _Table, root: Path) -> Order:
    named = tuple(map(_section_of, _strings(table, "sections"))) or SECTIONS
    known = [
        (pattern, _section_of(key.removeprefix("known-").replace("-", "")))
        for key in table
        if key.startswith("known-")
        for pattern in _strings(table, key)
    ]
    within = _is_set(table, "force-sort-within-sections", table.get("profile") == "google")
    return Order(
        sections=() if _is_set(table, "no-sections") else named,
        known=tuple(known),
        default=_section_of(str(table.get("default-section", THIRD_PARTY))),
        roots=(root, root / "src"),
        from_first=_is_set(table, "from-first"),
        mixed=within,
        between_kinds=_number(table, "lines-between-types", 0),
        case_sensitive=_is_set(table, "case-sensitive"),
        joined=_joined(table),
    )


def _joined(table: _Table) -> int:
    """The width up to which isort has the names of an import on one line, without parentheses."""
    is_black = table.get("profile") == "black"
    hangs = str(table.get("multi-line-output", "")).upper() in ("3", "VERTICAL_HANGING_INDENT")
    stays = _is_set(table, "split-on-trailing-comma") or _is_set(table, "force-grid-wrap")
    return 0 if stays or not (is_black or hangs) else _number(table, "line-length", 88)


def _of_ruff(table: _Table, ruff: _Table, root: Path) -> Order:
    known = [
        (pattern, section)
        for section in SECTIONS
        for pattern in _strings(table, f"known-{section}")
    ]
    own = _below(table, "sections")
    known += [(pattern, name) for name in own for pattern in _strings(own, name)]
    sources = _strings(ruff, "src") or (".", "src")
    return Order(
        sections=()
        if _is_set(table, "no-sections")
        else _strings(table, "section-order") or SECTIONS,
        known=tuple(known),
        default=str(table.get("default-section", THIRD_PARTY)),
        roots=tuple(root / each for each in sources),
        from_first=_is_set(table, "from-first"),
        mixed=_is_set(table, "force-sort-within-sections"),
        between_kinds=_number(table, "lines-between-types", 0),
        case_sensitive=_is_set(table, "case-sensitive"),
    )
