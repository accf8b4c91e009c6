"""Check the imports and names in the package against ARCHITECTURE.md."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import megapg
from tools import figures

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megapg"

# part of megapg -> (its floor, the highest floor it may import). A part is a module or a
# subpackage. The modules of a part may import each other.
FLOORS = {
    "errors": (0, -1),
    "layout": (0, -1),
    "upstream": (0, 0),  # its tables have the fields of a layout
    "torch_private": (0, -1),
    "migrate": (1, 0),  # runs without torch
    "collection": (1, 0),
    "launch": (1, 0),
    "rendezvous": (2, 1),
    "communicators": (3, 2),
    "ownership": (4, 3),
    "megatron": (5, 4),
    "rng": (6, 5),
    "checkpoint": (7, 6),
    # The border: what follows is on top of the framework, and the framework imports none of it.
    "rl": (8, 7),
    "testing": (9, 9),  # beside tools: `testing.parity` is there
    "tools": (9, 9),
}
# Every part may import the exceptions, as may the parts on the same floor.
FOR_ALL = "errors"
STDLIB_ONLY = ("errors", "layout", "upstream")
FIRST_FLOOR_WITH_MEGATRON = 5

PARALLEL_STATE = ("megatron.core.parallel_state", "megatron.core.mpu")


# --- imports --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported name: ``from a import b`` is ``a.b``, which may be a module."""

    file: Path
    line: int
    name: str

    @property
    def root(self) -> str:
        return self.name.partition(".")[0]

    @property
    def part(self) -> str:
        """Return the part of megapg that the name is in; '' for megapg's own metadata."""
        _, _, rest = self.name.partition(".")
        first = rest.partition(".")[0]
        # A name that the package re-exports counts as its original.
        return megapg._HOMES.get(first, f"megapg.{first}").split(".")[1]

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.name}"


@cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))))


def imports_of(file: Path) -> Iterator[Import]:
    """Yield all imports in the file, also those inside functions and under TYPE_CHECKING."""
    package = file.relative_to(ROOT).parent.parts
    for node in nodes_of(file):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            called = called.id if isinstance(called, ast.Name) else called
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names = [node.args[0].value]
        for name in names:
            yield Import(file, getattr(node, "lineno", 0), name)


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def files_of_megapg() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def said(imports: list[Import]) -> str:
    return "\n".join(map(str, imports))


# Modules that use torch's stores, and why. Other modules use megapg's store, with deadlines.
STORES = {
    "rendezvous/store.py": "the one place that calls them",
    "rendezvous/job_store.py": "opens the store of a new WORLD",
    "rendezvous/shared_store.py": "hosts a store for several jobs",
    "communicators/world.py": "a fake WORLD has one",
    "torch_private/__init__.py": "finds the store of the caller's WORLD",
    "communicators/addresses.py": "keeps what gloo writes in this process",
    "testing/_guard.py": "the parent of ranks, not a rank",
    "testing/distributed.py": "the parent of ranks, not a rank",
}
TORCHS = {"TCPStore", "HashStore", "FileStore", "PrefixStore", "_get_default_store"}


def test_one_place_talks_to_the_store() -> None:
    found = set()
    for file in files_of_megapg():
        for node in nodes_of(file):
            named = {getattr(node, "attr", None), getattr(node, "id", None)}
            named |= {
                name.name for name in getattr(node, "names", ()) if isinstance(name, ast.alias)
            }
            if named & TORCHS:
                found.add(file.relative_to(PACKAGE).as_posix())
    assert found == set(STORES)


def test_every_part_has_a_floor() -> None:
    parts = {part_of(file) for file in files_of_megapg()} - {"__init__", "__main__"}
    assert parts <= set(FLOORS), "new part: give it a floor here and in the design"
    assert set(STDLIB_ONLY) <= parts, "the scan looks in the wrong place"


def too_high(part: str, found: Import) -> bool:
    if part in ("__init__", "__main__"):  # imports every part, lazily
        return False
    if found.root != "megapg" or found.part in (part, FOR_ALL, "__version__"):
        return False
    # A name in no part (`import megapg`, which is everything) counts as the top floor.
    return FLOORS.get(found.part, (9, 9))[0] > FLOORS[part][1]


# Rule -> True if a module of that part may not have the import; "benchmarks" is a part here.
FORBIDDEN: dict[str, Callable[[str, Import], bool]] = {
    "each floor imports only floors below": too_high,
    "layout, errors and upstream need only the standard library": lambda part, found: (
        part in STDLIB_ONLY and found.root not in {*sys.stdlib_module_names, "megapg"}
    ),
    "migrate needs the standard library and LibCST": lambda part, found: (
        part == "migrate" and found.root not in {*sys.stdlib_module_names, "megapg", "libcst"}
    ),
    "only the command line knows the codemod": lambda part, found: (
        part not in ("migrate", "tools") and found.root == "megapg" and found.part == "migrate"
    ),
    "the lower floors do not know Megatron": lambda part, found: (
        found.root == "megatron" and FLOORS.get(part, (9, 9))[0] < FIRST_FLOOR_WITH_MEGATRON
    ),
    "only the bridge imports parallel_state": lambda part, found: (
        part not in ("megatron", "migrate")
        and any(f"{found.name}.".startswith(f"{name}.") for name in PARALLEL_STATE)
    ),
}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_no_import_breaks_the_rule(rule: str) -> None:
    places = [(part_of(file), file) for file in files_of_megapg()]
    if rule == "only the bridge imports parallel_state":
        places += [("benchmarks", file) for file in sorted((ROOT / "benchmarks").rglob("*.py"))]
    wrong = [
        found for part, file in places for found in imports_of(file) if FORBIDDEN[rule](part, found)
    ]
    assert not wrong, said(wrong)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from megatron.core import parallel_state", "megatron.core.parallel_state"),
        ("import importlib\nimportlib.import_module('megatron.core')", "megatron.core"),
        ("def f():\n    from . import session", "megapg.session"),
        (
            "from .communicators.needed import Communicator",
            "megapg.communicators.needed.Communicator",
        ),
    ],
)
def test_the_scan_sees_every_way_to_import(
    source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "megapg" / "some.py"
    file.parent.mkdir()
    file.write_text(source)
    assert expected in [found.name for found in imports_of(file)]


# --- private names of torch -----------------------------------------------------------------------

# Private names of torch's groups, backends and stores.
_HOLDERS = (distributed_c10d, dist.ProcessGroup, dist._Backend, dist.Store)
PRIVATE = {name for holder in _HOLDERS for name in dir(holder) if re.match("_[a-z]", name)}
PRIVATE -= {"_world"}  # its import is found; megapg's owners have this name, too
# Private names of more classes count in strings only, as subclasses may define such names.
_LOOKED_INTO = (torch.nn.Module, torch.Tensor, torch.autograd, torch.serialization, torch._utils)
PRIVATE_AS_TEXT = PRIVATE | {
    name
    for holder in _LOOKED_INTO
    for name in (*dir(holder), *vars(holder).get("__annotations__", ()))
    if re.match("_[a-z]", name)
}
PRIVATE_AS_TEXT -= {"_fields"}  # a method of named tuples


# Modules that have such names for another reason.
NAMES_THEM = {
    "torch_private/__init__.py",
    "torch_private/collectives.py",
    "torch_private/meshes.py",
    "torch_private/weightless.py",
    "megatron/vendored/process_groups.py",  # runs in projects without megapg
    "checkpoint/safe_metadata.py",  # names in files, for any installed torch
    "checkpoint/safe_torch.py",
}


def private_to_torch(source: str) -> set[str]:
    """Return the private names of torch in a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        dotted = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names if _is_private(each.name)}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{each.name}" for each in node.names}
            found |= set(filter(_is_private, names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.fullmatch(r"[a-zA-Z_][\w.]*", node.value)
            if text and (text[0] in PRIVATE_AS_TEXT or _is_private(text[0])):
                found.add(text[0])
        elif isinstance(node, ast.Attribute) and not dotted.startswith(("self.", "cls.")):
            found |= {node.attr} & PRIVATE or ({dotted} if _is_private(dotted) else set())
    return found


def _is_private(dotted: str) -> bool:
    home, *names = dotted.split(".")
    private = any(re.match("_[a-zA-Z]", each) or each == "distributed_c10d" for each in names)
    return home in ("torch", "dist") and private


def test_one_module_has_what_is_private_to_torch() -> None:
    found = {
        file.relative_to(PACKAGE).as_posix()
        for file in files_of_megapg()
        if private_to_torch(file.read_text(encoding="utf-8"))
    }
    assert found == NAMES_THEM


@pytest.mark.parametrize(
    "source",
    [
        "from torch.distributed import distributed_c10d as c10d",
        "import torch.distributed.distributed_c10d",
        "from torch._C._distributed_c10d import GroupName",
        "from torch.testing._internal.distributed import fake_pg",
        "def of(backend: dist._Backend) -> None: ...",
        "torch.distributed.distributed_c10d._world.pg_map",
        "group._get_backend(device)",
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "hasattr(group, '_get_backend')",
        "vars(module)['_modules']",
        "HOOKS = ('_backward_hooks',)",
        "importlib.import_module('torch._C._distributed_c10d')",
        "mock.patch('torch.distributed.distributed_c10d.barrier')",
    ],
)
def test_the_search_sees_what_is_private_to_torch(source: str) -> None:
    assert private_to_torch(source)
    assert not private_to_torch("dist.get_rank(group); self._get_backend(); torch.Generator")


# --- imports between folders ----------------------------------------------------------------------

# Folder -> the neighbouring folders that its modules may import.
ROOMS = {
    "megatron/watching": set(),
    "megatron/reading": {"megatron/watching"},
    "megatron/adopting": {"megatron/watching", "megatron/reading"},
    "ownership/rebind": set(),
    "migrate/report": set(),
}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    files = [file for file in files_of_megapg() if file.is_relative_to(PACKAGE / room)]
    assert files, "it moved: say where"
    floor = room.partition("/")[0]
    beside = {
        f"megapg.{floor}.{folder.name}": f"{floor}/{folder.name}"
        for folder in (PACKAGE / floor).iterdir()
        if (folder / "__init__.py").exists()
    }
    wrong = [
        found
        for file in files
        for found in imports_of(file)
        for module, other in beside.items()
        if f"{found.name}.".startswith(f"{module}.") and other not in {room, *ROOMS[room]}
    ]
    assert not wrong, said(wrong)


# A method of the collection makes a mesh, and the mesh's module makes a collection.
CIRCLE = {"megapg.collection", "megapg.collection.mesh"}


def test_no_circle_and_no_name_twice() -> None:
    assert set(figures.circles()) == CIRCLE
    assert figures.same_names() == []


# --- names of modules -----------------------------------------------------------------------------

# Modules that users import and that the codemod writes into user code.
PUBLIC = (
    *("megapg.layout", "megapg.collection", "megapg.launch", "megapg.errors", "megapg.testing"),
    *("megapg.megatron", "megapg.megatron.getters", "megapg.launch.signals", "megapg.checkpoint"),
    *("megapg.rng", "megapg.tools.plan"),
)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_import_paths_stay(module: str) -> None:
    assert importlib.import_module(module).__doc__


def test_no_string_names_a_module_of_ours() -> None:
    """No error would show the old name after a move. Public paths do not move."""
    wrong = []
    for file in files_of_megapg():
        homes = [
            node.value
            for node in nodes_of(file)
            # Another test checks the names in the tables of lazy imports.
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
        ]
        imported_on_use = {id(each) for home in homes for each in ast.walk(home)}
        for node in nodes_of(file):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in imported_on_use
                and _names_a_module(node.value)
            ):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.value!r}")
    assert not wrong, "\n".join(wrong)


def _names_a_module(text: str) -> bool:
    """True if the text is the path, or a prefix of paths, of a present or former module."""
    if not re.fullmatch(r"megapg(\.[a-z_]\w*)+\.?", text) or text in PUBLIC:
        return False
    home, _, name = text.partition("megapg.")[2].rpartition(".")
    home = f"megapg.{home}".rstrip(".")
    if home not in ("megapg", *PUBLIC):
        return True
    value = getattr(importlib.import_module(home), name, None)
    return value is None or inspect.ismodule(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("megapg.comms.", True),
        ("megapg.communicators.needed", True),
        ("megapg.megatron.watching", True),
        ("megapg.megatron.getters", False),
        ("megapg.resolve", False),
        ("megapg.megatron.resolve", False),
        ("call megapg.session()", False),
    ],
)
def test_the_search_tells_modules_from_functions(text: str, expected: bool) -> None:
    assert _names_a_module(text) is expected


# --- what users see -------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["megapg", *PUBLIC])
def test_every_public_name_is_documented(module: str) -> None:
    home = importlib.import_module(module)
    names = getattr(home, "__all__", None) or [
        name
        for name, value in vars(home).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    silent = []
    for name in names:
        value = getattr(home, name)
        if not inspect.getdoc(value):
            silent.append(name)
        if inspect.isclass(value) and value.__module__.startswith("megapg."):
            members = [each for each in vars(value) if not each.startswith("_")]
            silent += [
                f"{name}.{each}"
                for each in members
                if (callable(member := getattr(value, each)) or isinstance(member, property))
                and not inspect.getdoc(member)
            ]
    assert not silent, f"{module}: {', '.join(silent)}"


def test_only_the_package_is_in_the_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["megapg"]}


def test_the_map_of_the_house_is_right() -> None:
    """Check that each path exists, and that the picture has each part of the package."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:megapg|tests|tools|benchmarks)/[\w/.]+)`", text)
    assert len(paths) >= 20
    assert not [path for path in paths if not (ROOT / path).exists()]
    picture = text.split("```")[1]
    assert {part for part in FLOORS if not re.search(rf"\b{part}\b", picture)} == set()
