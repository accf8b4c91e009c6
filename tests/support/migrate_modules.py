"""Random packages that use Megatron's globals in every way there is, the same for the same seed.

They run: every function is a deterministic one of whole numbers that returns what it read and what
the functions that it called returned, so that a package can be run before a migration and after.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "fuzzed"
_FOLDER = Path(__file__).parents[1] / "codemod" / "cases" / "fuzz"
_NEW_FSTRINGS = _TYPE_PARAMETERS = sys.version_info >= (3, 12)


@dataclass(frozen=True)
class Driver:
    """Something to evaluate, with the names of one module.

    Attributes:
        module: dotted name.
        expression: of a whole number, or of a tuple of such.
        guarded: whether it is defined where the globals are not initialised, too.
    """

    module: str
    expression: str
    guarded: bool


@dataclass(frozen=True)
class Package:
    """A package and what to run of it.

    Attributes:
        seed: what it was made from.
        files: relative name -> bytes.
        drivers: what to evaluate.
        modules: how many of the files are made up; the others are the same every time.
        overrides: whether it sets ranks or patches getters for a while.
    """

    seed: int
    files: Mapping[str, bytes]
    drivers: tuple[Driver, ...]
    modules: int
    overrides: bool


def _texts(name: str) -> tuple[str, ...]:
    """The texts of a file, each below a line of ``===``."""
    return tuple((_FOLDER / f"{name}.txt").read_text()[4:-1].split("\n===\n"))


def make_package(seed: int) -> Package:
    """The package of a seed."""
    return _Maker(seed).make()


# -- reads -----------------------------------------------------------------------------------------

_DATA = (
    "",
    "with_context_parallel=True",
    "with_context_parallel=False",
    "True",
    "with_context_parallel=True, partial_data_parallel=True",
    "with_context_parallel=«flag»",
)


def _reads(axis: str, of: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Getters without arguments."""
    return tuple((f"get_{axis}_{each}", ("",)) for each in of.split())


_NUMBERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *_reads("tensor_model_parallel", "rank world_size src_rank"),
    *_reads("pipeline_model_parallel", "rank world_size first_rank last_rank next_rank prev_rank"),
    *_reads("context_parallel", "rank world_size"),
    ("get_data_parallel_rank", _DATA),
    ("get_data_parallel_world_size", _DATA),
    ("get_data_parallel_src_rank", ("", "with_context_parallel=True")),
    *_reads("model_parallel", "src_rank"),
    *_reads("expert_model_parallel", "rank world_size"),
    *_reads("expert_tensor_parallel", "rank world_size"),
    ("get_expert_data_parallel_rank", ("", "partial_expert_data_parallel=True")),
    *_reads("expert_data_parallel", "world_size"),
    *_reads("tensor_and_context_parallel", "rank world_size"),
    *_reads("expert_tensor_and_model_parallel", "rank world_size"),
)
_TESTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("is_pipeline_first_stage", ("", "ignore_virtual=True")),
    ("is_pipeline_last_stage", ("", "ignore_virtual=True", "True")),
    ("is_pipeline_last_stage", ("ignore_virtual=False, vp_stage=1", "False, 0")),
    ("is_pipeline_first_stage", ("vp_stage=0, ignore_virtual=False", "ignore_virtual=«flag»")),
    ("is_rank_in_embedding_group", ("", "ignore_virtual=True", "ignore_virtual=False, vp_stage=0")),
    ("is_rank_in_position_embedding_group", ("",)),
    ("is_initialized", ("",)),
    ("model_parallel_is_initialized", ("",)),
)
_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("get_tensor_model_parallel_group", ("", "check_initialized=False", "False")),
    ("get_pipeline_model_parallel_group", ("",)),
    ("get_model_parallel_group", ("", "check_initialized=True")),
    ("get_context_parallel_group", ("", "check_initialized=«flag»")),
    ("get_data_parallel_group", _DATA),
    ("get_expert_model_parallel_group", ("",)),
    ("get_expert_tensor_parallel_group", ("",)),
    ("get_expert_data_parallel_group", ("", "partial_expert_data_parallel=True")),
    ("get_expert_tensor_and_model_parallel_group", ("",)),
    ("get_expert_tensor_model_pipeline_parallel_group", ("",)),
    ("get_tensor_and_context_parallel_group", ("",)),
    ("get_tensor_and_data_parallel_group", ("", "with_context_parallel=True")),
    (
        "get_amax_reduction_group",
        ("", "with_context_parallel=True", "True, True", "with_context_parallel=«flag»"),
    ),
)
_PRIVATE = ("_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP")

# -- expressions -----------------------------------------------------------------------------------

# In all templates a word in «» is a hole:
#   r, b, g  a read: a number, a truth, a group        e  an expression of reads
#   a        a read, or an expression in parentheses   i  a whole number without reads
#   fr       a read that stands in an f-string
#   cf       a call that stands in an f-string
#   c        a call of another function                f  an f-string with reads
#   s        statements, where there is `out`          N, M, O  names of its own
# An upper-case E, R or C is where the module runs when it is imported.
_ANYWHERE = _texts("anywhere")
# Not where a name can't be bound, as in a comprehension's iterable or a class body's.
_WALRUS = ("(w := «e») + w", "(w := «r»)", "[w := «a», w][1]")
_SEVERAL_LINES = _texts("several_lines")
_FSTRINGS = _texts("fstrings")
_LONG_FSTRINGS = (
    "f«t»\n é {«x»}\n  {«x»:>3} {{ }}\n«t»",
    "f«t»{\n    «x»\n}«t»",
    "f«t»'{«x»}' \"{«x»!s}\" «t»",
)
_NEWER_FSTRINGS = _texts("newer_fstrings")

# -- statements ------------------------------------------------------------------------------------

_STATEMENTS = _texts("statements")
_IN_ASYNC = (
    "out.append(await «N»2(«e»))",
    "async with Context(«e») as «N»:\n    out.append(«N» + «e»)",
    "async for «N» in counting(«e» % 3):\n    out.append(«N» + «e»)",
    "out.append([«N» + «e» async for «N» in counting(2) if «b»])",
)

# -- functions and classes -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Unit:
    """Something at the top of a module, and how it is used: with ``«N»`` and ``«i»``."""

    text: str
    uses: tuple[str, ...] = ()
    guarded: bool = False


def _units(name: str) -> tuple[_Unit, ...]:
    """Each is a text, and below it lines that begin with ``>>>``: how it is used."""
    found = []
    for text in _texts(name):
        body, *below = text.split("\n>>> ")
        uses = tuple(use for use in below if use != "guarded")
        found.append(_Unit(body, uses, guarded=len(uses) < len(below)))
    return tuple(found)


_UNITS = _units("units")
_NEW_UNITS = _units("new_units")
_AUTOGRAD_UNITS = _units("autograd_units")
# Seeds from here on also take what was added later; those below make what they always made.
LATER = 900_000_000
_OVERRIDING = ("set_tensor_model_parallel_rank", "= lambda: 77")

# -- modules ---------------------------------------------------------------------------------------

_KIT = "\n" + (_FOLDER / "kit.txt").read_text()

_STANDARD = (
    "import abc, contextlib, copy, dataclasses, enum, functools, typing",
    "import abc\nimport contextlib\nimport copy\nimport dataclasses\nimport enum\n"
    "import functools\nimport typing",
)
_FROM_KIT = (
    "from {dots}kit import (\n    Context,\n    Fake,\n    apply,  # f(x)\n    collection,\n"
    "    counting,\n    fixed,\n    registered,\n    registering,\n    run,\n    wrapping,\n)"
)
# import statement -> how a getter is spelled behind it. Where the statement has NAMES, they are
# imported one by one.
_IMPORTS = (
    ("from megatron.core import parallel_state", "parallel_state"),
    ("from megatron.core import parallel_state", "parallel_state"),
    ("from megatron.core import mpu", "mpu"),
    ("from megatron.core import mpu", "mpu"),
    ("from megatron.core import parallel_state as ps", "ps"),
    ("from megatron.core import mpu as _mpu, parallel_state as _ps", "_mpu"),
    ("import megatron.core.parallel_state as mcore_ps", "mcore_ps"),
    ("import megatron.core.parallel_state", "megatron.core.parallel_state"),
    ("import os, megatron.core.parallel_state as ps1, sys", "ps1"),
    ("import os; from megatron.core import mpu as ps2; import sys", "ps2"),
    ("import megatron.core as mc", "mc.mpu"),
    ("from megatron import core", "core.parallel_state"),
    ("from megatron.core import (\n    mpu,  # the old name\n)", "mpu"),
    ("from megatron.core import (mpu,\n    parallel_state as ps3)", "ps3"),
    ("from megatron.core import \\\n    parallel_state", "parallel_state"),
    ("try:\n    from megatron.core import mpu\nexcept ImportError:\n    mpu = None", "mpu"),
    (
        "try:\n    from megatron.core import mpu\n    HAVE = True\n"
        "except ImportError:\n    HAVE = False",
        "mpu",
    ),
    ("try: from megatron.core import mpu\nexcept ImportError: pass", "mpu"),
    ("if True: from megatron.core import mpu as ps6", "ps6"),
    ("from megatron.core import mpu, tensor_parallel", "mpu"),
    ("import megapg\nfrom megatron.core import mpu", "mpu"),
    ("from megapg import resolve\nfrom megatron.core import mpu", "mpu"),
    ("import megapg as getters\nfrom megatron.core import mpu", "mpu"),
    ("if typing.TYPE_CHECKING:\n    import megapg\nfrom megatron.core import mpu", "mpu"),
    (
        "try:\n    import megapg\nexcept ImportError:\n    megapg = None\n"
        "from megatron.core import mpu",
        "mpu",
    ),
    ("from megatron.core import mpu  # noqa: F401", "mpu"),
    ("__all__ = ['mpu']\nfrom megatron.core import mpu", "mpu"),
    ("try:\n    from megatron.core import mpu as ps4\nexcept ImportError: ps4 = None", "ps4"),
    ("if True:\n    from megatron.core import parallel_state as ps5", "ps5"),
    ("from megatron.core import mpu\nalias = mpu", "alias"),
    ("from megatron.core import mpu\nalias2 = mpu if mpu is not None else None", "alias2"),
    ("from megatron.core.parallel_state import *", ""),
    ("from megatron.core.parallel_state import NAMES", "NAMES"),
    ("from megatron.core.parallel_state import NAMES", "NAMES"),
    ("if typing.TYPE_CHECKING:\n    from megatron.core import parallel_state", "LAZY"),
    ("", "LAZY"),
)
_LAZY = (
    ("from megatron.core import parallel_state", "parallel_state"),
    ("from megatron.core import mpu", "mpu"),
    ("import megatron.core.parallel_state as lazy_ps", "lazy_ps"),
    ("from megatron.core import mpu as m, parallel_state", "m"),
)


class _Module:
    """A module in the making."""

    def __init__(self, parts: tuple[str, ...], lazy: bool) -> None:
        self.parts = parts
        self.header: list[str] = []
        self.units: list[str] = []
        self.roots: list[str] = []  # names that stand for parallel_state
        self.singles: dict[str, str] = {}  # getters imported one by one
        self.imported: dict[str, str] = {}  # dotted name of a function -> its name here
        self.lazy = lazy
        self.lenders: list[_Module] = []  # modules that getters are imported from
        self.borrowed: dict[str, str] = {}

    @property
    def name(self) -> str:
        return ".".join((PACKAGE, *self.parts))

    @property
    def dots(self) -> str:
        return "." * len(self.parts)

    def relative(self, other: _Module) -> str:
        """How to say the other one in ``from ... import``."""
        return self.dots + ".".join(other.parts)


@dataclass(frozen=True)
class _Use:
    """How something at the top of a module is used."""

    home: _Module
    name: str
    text: str  # with «N» and «i», and «S» for the name alone
    cost: int
    guarded: bool
    here_only: bool = False  # it has other names of its module, too


class _Scope:
    """Where an expression stands."""

    def __init__(self, module: _Module, guarded: bool, names: Mapping[str, str]) -> None:
        self.module, self.guarded, self.names = module, guarded, dict(names)
        self.flat = False  # nothing that takes several lines, and no strings
        self.at_import = False
        self.no_walrus = False
        self.lazy = ""  # what an import in the function makes of parallel_state
        self.depth = 0
        self.cost = 1


_HOLE = re.compile(r"«(\w+)(?::(\w+))?»")
_MOST = 60  # calls that a function comes to, with all that it calls


class _Maker:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.modules: list[_Module] = []
        self.uses: list[_Use] = []
        self.fresh = 0
        self.reads_at_import = self.random.random() < 0.6
        self.read_at_import = False
        self.overriding = self.random.random() < 0.1

    def make(self) -> Package:
        count = self.random.choice((1, 1, 2, 2, 3, 4, 5))
        for index in range(count):
            parts = ("sub", f"m{index}") if self.random.random() < 0.2 else (f"m{index}",)
            self.modules.append(self._module(parts))
        if count > 1 and self.random.random() < 0.3:
            self._across()
        files = {"__init__.py": self._init(), "kit.py": _KIT.lstrip().encode()}
        if any(len(module.parts) > 1 for module in self.modules):
            files["sub/__init__.py"] = b""
        for module in self.modules:
            files["/".join(module.parts) + ".py"] = self._bytes(module)
        drivers = [
            Driver(use.home.name, self._driven(use), use.guarded and not self.read_at_import)
            for use in self.uses
        ]
        text = b"".join(files.values()).decode("latin-1")
        overrides = any(word in text for word in _OVERRIDING)
        return Package(self.seed, files, tuple(drivers), count, overrides)

    def _driven(self, use: _Use) -> str:
        number = lambda match: str(self.random.randrange(1, 4))  # noqa: E731
        text = use.text.replace("«N»", use.name).replace("«S»", use.name)
        return re.sub("«i»", number, text).replace("«q»", "'")

    def _init(self) -> bytes:
        lines = ['"""A generated package."""']
        if self.random.random() < 0.2:
            lines += [f"from . import {self.modules[0].parts[0]}"]
        return "\n".join(lines).encode() + b"\n"

    # -- modules -----------------------------------------------------------------------------

    def _module(self, parts: tuple[str, ...]) -> _Module:
        module = _Module(parts, False)
        if self.random.random() < 0.4:
            module.header.append('"""Reads get_tensor_model_parallel_rank(), like others."""')
        if self.random.random() < 0.2:
            module.header.append("from __future__ import annotations")
        module.header += [self.random.choice(_STANDARD), "import torch"]
        module.header.append(_FROM_KIT.format(dots=module.dots))
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self._import(module)
        if self.random.random() < 0.1:
            name = self.random.choice(("pg", "getters", "megapg", "pg_collection", "model"))
            module.header.append(f"{name} = 5")
        for _ in range(self.random.choice((1, 2, 3, 4, 6, 9))):
            module.units.append(self._unit(module))
        return module

    def _import(self, module: _Module) -> None:
        others = [other for other in self.modules if other.roots]
        if others and self.random.random() < 0.3:
            other = self.random.choice(others)
            root = self.random.choice(other.roots)
            if root == "NAMES":
                module.lenders.append(other)
                module.roots.append(root)
            elif root == "":
                module.header.append(f"from {module.relative(other)} import *")
                module.roots.append(root)
            elif "." not in root and self.random.random() < 0.7:
                here = self.random.choice((root, f"{root}_again"))
                said = root if here == root else f"{root} as {here}"
                where = self.random.choice((module.relative(other), other.name))
                module.header.append(f"from {where} import {said}")
                module.roots.append(here)
            elif self.random.random() < 0.5:
                module.header.append(f"import {other.name} as other_{other.parts[-1]}")
                module.roots.append(f"other_{other.parts[-1]}.{root}")
            else:
                module.header.append(f"import {other.name}")
                module.roots.append(f"{other.name}.{root}")
            return
        statement, root = self.random.choice(_IMPORTS)
        if statement:
            module.header.append(statement)
        if root == "LAZY":
            module.lazy = True
        else:
            module.roots.append(root)

    def _across(self) -> None:
        """Two functions in two modules that call each other."""
        one, other = self.random.sample(self.modules, 2)
        self.fresh += 1
        ping, pong = f"ping{self.fresh}", f"pong{self.fresh}"
        for module, name, called, there in ((one, ping, pong, other), (other, pong, ping, one)):
            module.units.append(
                self._filled(
                    f"def {name}(n):\n    from {module.relative(there)} import {called}\n"
                    f"    if n <= 0:\n        return («e»,)\n    return («e», {called}(n - 1))",
                    _Scope(module, False, {}),
                )
            )
            self.uses.append(_Use(module, name, "«N»(3)", 4, False))

    def _bytes(self, module: _Module) -> bytes:
        if module.singles:
            names = [
                name if name == here else f"{name} as {here}"
                for name, here in module.singles.items()
            ]
            self.random.shuffle(names)
            listed = self.random.choice(
                (
                    ", ".join(names),
                    "(\n    " + ",\n    ".join(names) + ",\n)",
                    "(  # what is read\n    " + ",  # one\n    ".join(names) + "\n)",
                    "(" + ", ".join(names) + ")",
                )
            )
        header = [f"from megatron.core.parallel_state import {listed}"] if module.singles else []
        whole = [line for line in module.header if "NAMES" not in line]
        kit = next(i for i, line in enumerate(whole) if "kit import" in line)
        at = self.random.randrange(kit + 1, len(whole) + 1)
        text = "\n".join([*whole[:at], *header, *whole[at:]]) + "\n\n\n"
        between = self.random.choice(("\n\n\n", "\n\n\n", "\n", "\n\f\n", "\n\n# ---\n\n"))
        text += between.join(module.units) + "\n"
        return self._written(text)

    def _written(self, text: str) -> bytes:
        chance = self.random.random
        if chance() < 0.15:
            tab = self.random.choice(("\t", "  ", " "))
            text = re.sub(r"^(?:    )+", lambda match: tab * (len(match[0]) // 4), text, flags=re.M)
        if chance() < 0.1:
            text = text.rstrip("\n")
        elif chance() < 0.1:
            text += "\n\n# é the end\n"
        encoding, mark = "utf-8", b""
        if chance() < 0.08:
            encoding = "latin-1"
            text = "# -*- coding: latin-1 -*-\n# " + "é" * 3 + "\n" + text
        elif chance() < 0.08:
            mark = b"\xef\xbb\xbf"
        elif chance() < 0.1:
            text = "#!/usr/bin/env python\n" + text
        if chance() < 0.15:
            text = text.replace("\n", "\r\n")
        return mark + text.encode(encoding)

    # -- units -------------------------------------------------------------------------------

    def _unit(self, module: _Module) -> str:
        chance = self.random.random()
        if chance < 0.4:
            return self._function(module)
        units = _UNITS + _NEW_UNITS if _TYPE_PARAMETERS else _UNITS
        units += _AUTOGRAD_UNITS if self.seed >= LATER else ()
        while True:
            unit = self.random.choice(units)
            if any(word in unit.text for word in _OVERRIDING) and not self.overriding:
                continue
            if not self.reads_at_import and re.search("«[BE]»", unit.text):
                continue
            break
        names = self._names()
        scope = _Scope(module, unit.guarded, names)
        text = self._filled(unit.text, scope)
        for use in unit.uses:
            self._used(module, names, use, scope)
        return text

    def _used(self, module: _Module, names: Mapping[str, str], text: str, scope: _Scope) -> None:
        said = re.sub("«([MO])»", lambda match: names[match[1]], text)
        cost = scope.cost + 1
        here = said != text or re.search(r"«N»\w", text) is not None
        self.uses.append(_Use(module, names["N"], said, cost, scope.guarded, here))

    def _names(self) -> dict[str, str]:
        self.fresh += 1
        stem = self.random.choice(("f", "f", "f", "load", "é", "pgs", "get_rank_of"))
        names = {"N": f"{stem}{self.fresh}"}
        return {**names, "M": f"{names['N']}_m", "O": f"{names['N']}_o"}

    def _function(self, module: _Module) -> str:
        """A function with any signature and any statements."""
        names = self._names()
        scope = _Scope(module, False, names)
        parameters, arguments = self._signature(scope)
        lines = []
        if self.random.random() < 0.3:
            lines.append('"""It reads mpu.get_tensor_model_parallel_rank(), and more."""')
        if module.lazy or self.random.random() < 0.15:
            statement, scope.lazy = self.random.choice(_LAZY)
            lines.append(statement)
        if self.random.random() < 0.2:
            lines.append("# what is read")
        lines.append("out = []")
        for _ in range(self.random.choice((1, 2, 3, 5, 8))):
            lines.append(self._statement(scope))
        lines.append("return tuple(out)")
        body = "\n".join(lines)
        returns = self.random.choice(("", "", " -> tuple", " -> 'tuple[int, ...]'"))
        self._used(module, names, f"«N»({arguments})", scope)
        head = f"def {names['N']}({parameters}){returns}:"
        return head + "\n" + _indented(body, 1)

    def _signature(self, scope: _Scope) -> tuple[str, str]:
        pool = ["a", "b", "x", "n", "model", "pg", "megapg", "getters", "config", "ünit", "mod"]
        count = self.random.choice((0, 1, 1, 2, 3))
        names = self.random.sample(pool, count)
        parameters, arguments = [], []
        for name in names:
            note = self.random.choice(("", "", ": int", ": 'int'"))
            parameters.append(name + note)
            arguments.append(
                self.random.choice(("«i»", f"{name}=«i»")) if "=" in "".join(arguments) else "«i»"
            )
        arguments = [
            argument
            if "=" in argument or not any("=" in each for each in arguments[:i])
            else f"{names[i]}=«i»"
            for i, argument in enumerate(arguments)
        ]
        for name in self.random.sample(("d1", "d2"), self.random.choice((0, 0, 1, 2))):
            default = (
                self._filled("«E»", scope)
                if (self.reads_at_import and self.random.random() < 0.2)
                else "3"
            )
            scope.flat = False
            parameters.append(f"{name}={default}")
        kind = self.random.random()
        if kind < 0.1:
            parameters.append("*args")
        elif kind < 0.25:
            parameters += ["*", "key=1"]
        if self.random.random() < 0.1:
            parameters.append("**kwargs")
        elif count and kind > 0.9 and not any("=" in argument for argument in arguments):
            parameters.insert(count, "/")
        if not parameters:
            return self.random.choice(("", "", " ", "\n")), ""
        style = self.random.random()
        if style < 0.6:
            text = ", ".join(parameters)
        elif style < 0.7:
            text = "\n    " + ",\n    ".join(parameters) + ",\n"
        elif style < 0.8:
            text = "\n    " + ",\n    ".join(parameters) + "\n"
        elif style < 0.9:
            text = "\n    " + ",  # é\n    ".join(parameters) + "  # the last\n    # of all\n"
        else:
            text = ",\n      ".join(parameters)
        return text, ", ".join(arguments)

    # -- statements and expressions ----------------------------------------------------------

    def _statement(self, scope: _Scope) -> str:
        while True:
            template = self.random.choice(_STATEMENTS)
            # What comes after a return is dead, and one in ten functions having it is enough.
            if template.startswith("return") and self.random.random() < 0.9:
                continue
            if "def " in template and scope.depth > 1:
                continue
            break
        names = dict(scope.names)
        self.fresh += 1
        scope.names |= {"N": f"v{self.fresh}", "M": f"u{self.fresh}"}
        text = self._filled(template, scope)
        scope.names = names
        return text

    def _filled(self, template: str, scope: _Scope) -> str:
        """The template with its holes filled."""
        if "«s»" in template:
            template = "\n".join(
                self._with_statements(line, scope) for line in template.split("\n")
            )
        outer, inner = self.random.choice((('"', "'"), ("'", '"')))

        def fill(match: re.Match[str]) -> str:
            hole, which = match.groups()
            if hole == "q":
                return outer
            if hole == "p":
                return inner
            if hole in scope.names:
                return scope.names[hole]
            return self._hole(hole, which, scope)

        return _HOLE.sub(fill, template)

    def _with_statements(self, line: str, scope: _Scope) -> str:
        if "«s»" not in line and "«as»" not in line:
            return line
        indent = len(line) - len(line.lstrip())
        if "«as»" in line:
            return " " * indent + self.random.choice(_IN_ASYNC).replace("\n", "\n" + " " * indent)
        scope.depth += 1
        said = ["out = []"]
        said += [self._statement(scope) for _ in range(self.random.choice((1, 1, 2, 3)))]
        scope.depth -= 1
        said = [each for each in said if not each.startswith("return")]
        return _indented("\n".join(said), indent // 4)

    def _hole(self, hole: str, which: str | None, scope: _Scope) -> str:
        if hole in "EBRC" and len(hole) == 1:
            self.read_at_import = True
            scope.at_import = True
            text = self._hole(hole.lower(), which, scope)
            scope.at_import = False
            return text
        match hole:
            case "i":
                return str(self.random.randrange(1, 4))
            case "flag":
                return self.random.choice(("bool(1)", "1 > 2", "not 0"))
            case "r":
                return self._read(_NUMBERS, which, scope)
            case "fr":
                before, scope.flat = scope.flat, True
                text = self._read(_NUMBERS, which, scope)
                scope.flat = before
                return text
            case "b":
                return self._read(_TESTS, which, scope)
            case "g":
                return self._read(_GROUPS, which, scope)
            case "v":
                name = self.random.choice(_NUMBERS)[0]
                return self._spelled(name, scope)
            case "init":
                name = self.random.choice(("is_initialized", "model_parallel_is_initialized"))
                return self._spelled(name, scope)
            case "m" | "mod":
                return self._root(scope)
            case "private":
                return self.random.choice(_PRIVATE)
            case "a" | "x":
                if self.random.random() < 0.75 or scope.depth > 2:
                    return self._read(_NUMBERS, None, scope)
                return f"({self._expression(scope)})"
            case "e":
                if self.random.random() < 0.35:
                    return self._read(_NUMBERS, None, scope)
                return self._expression(scope)
            case "f":
                return self._fstring(scope)
            case "cf":
                before, scope.flat = scope.flat, True
                text = self._call(scope)
                scope.flat = before
                return text
            case "c":
                return self._call(scope)
        raise ValueError(hole)

    def _expression(self, scope: _Scope) -> str:
        choices = [*_ANYWHERE]
        if not (scope.at_import or scope.no_walrus):
            choices += _WALRUS
        if not scope.flat:
            choices += _SEVERAL_LINES
        while True:
            template = self.random.choice(choices)
            if scope.flat and ("«q»" in template or "«f»" in template):
                continue
            break
        scope.depth += 1
        # A name can't be bound in what a comprehension runs over, nor in a class body's.
        before, scope.no_walrus = scope.no_walrus, scope.no_walrus or "for " in template
        text = (
            self._read(_NUMBERS, None, scope) if scope.depth > 3 else self._filled(template, scope)
        )
        scope.no_walrus = before
        scope.depth -= 1
        if scope.depth and not text.startswith(("[", "(")) and " \\\n" in text:
            text = f"({text})"
        return text

    def _fstring(self, scope: _Scope) -> str:
        if scope.flat:
            return "str(" + self._read(_NUMBERS, None, scope) + ")"
        choices = [*_FSTRINGS, *_LONG_FSTRINGS]
        if _NEW_FSTRINGS:
            choices += _NEWER_FSTRINGS
        template = self.random.choice(choices)
        while "w :=" in template and (scope.at_import or scope.no_walrus):
            template = self.random.choice(choices)
        outer, inner = self.random.choice((('"', "'"), ("'", '"')))
        scope.flat = True
        scope.depth += 2
        template = template.replace("«q»", outer).replace("«p»", inner).replace("«t»", outer * 3)
        text = self._filled(template, scope)
        scope.depth -= 2
        scope.flat = False
        return text

    def _read(
        self, among: tuple[tuple[str, tuple[str, ...]], ...], which: str | None, scope: _Scope
    ) -> str:
        if which is None:
            name, variants = self.random.choice(among)
        else:
            name, variants = which, ("",)
        arguments = self.random.choice(variants)
        if arguments and self.random.random() < 0.3:
            arguments = variants[0]
        arguments = arguments.replace("«flag»", self._hole("flag", None, scope))
        return self._spelled(name, scope) + self._parentheses(arguments, scope)

    def _parentheses(self, arguments: str, scope: _Scope) -> str:
        chance = self.random.random()
        comma = "," if arguments else ""
        if chance < 0.8:
            return f"({arguments})"
        if scope.flat or chance < 0.9:
            return self.random.choice(
                (f"( {arguments} )", f"({arguments}{comma})", f" ({arguments})")
            )
        return self.random.choice(
            (
                f"(\n        {arguments}\n    )",
                f"(  # why\n        {arguments}{comma}  # because\n    )",
                f"(  # nothing else\n{arguments})",
            )
        )

    def _root(self, scope: _Scope) -> str:
        if scope.lazy and not scope.at_import:
            return scope.lazy
        roots = [root for root in scope.module.roots if root not in ("NAMES", "")]
        if not roots:
            statement, root = self.random.choice(_IMPORTS[:4])
            scope.module.header.append(statement)
            scope.module.roots.append(root)
            return root
        return self.random.choice(roots)

    def _spelled(self, name: str, scope: _Scope) -> str:
        if scope.lazy and not scope.at_import:
            root = scope.lazy
        elif not scope.module.roots:
            root = self._root(scope)
        else:
            root = self.random.choice(scope.module.roots)
        if root == "NAMES":
            if name in scope.module.borrowed:
                return scope.module.borrowed[name]
            for lender in scope.module.lenders:
                if name in lender.singles and name not in scope.module.singles:
                    here, where = f"lent_{name}", scope.module.relative(lender)
                    scope.module.header.append(
                        f"from {where} import {lender.singles[name]} as {here}"
                    )
                    return scope.module.borrowed.setdefault(name, here)
            alias = self.random.choice((name, name, name.removeprefix("get_")))
            return scope.module.singles.setdefault(name, alias)
        if root == "":
            return name
        if not scope.flat and self.random.random() < 0.03:
            return (
                f"({root})\\\n        .{name}" if self.random.random() < 0.5 else f"{root} . {name}"
            )
        return f"{root}.{name}"

    def _call(self, scope: _Scope) -> str:
        fitting = [
            use
            for use in self.uses
            if scope.cost + use.cost <= _MOST
            and (use.guarded or not scope.guarded)
            and (use.home is scope.module or not use.here_only)
            and not (scope.flat and "«q»" in use.text)
        ]
        if not fitting:
            return f"({self._hole('i', None, scope)})"
        use = self.random.choice(fitting)
        scope.cost += use.cost
        ref = use.name if use.home is scope.module else self._imported(use, scope)
        number = lambda match: (  # noqa: E731
            self._read(_NUMBERS, None, scope) + " % 3"
            if self.random.random() < 0.15 and not scope.guarded
            else str(self.random.randrange(1, 4))
        )
        text = use.text.replace("«N»", ref).replace("«S»", use.name)
        text = re.sub("«i»", number, text).replace("«q»", '"')
        return f"({text})"

    def _imported(self, use: _Use, scope: _Scope) -> str:
        module = scope.module
        key = f"{use.home.name}.{use.name}"
        if key not in module.imported:
            home = use.home
            style = self.random.random()
            if style < 0.5:
                where = self.random.choice((module.relative(home), home.name))
                module.header.append(f"from {where} import {use.name}")
                module.imported[key] = use.name
            elif style < 0.6:
                module.header.append(
                    f"from {module.relative(home)} import (\n    {use.name} as his_{use.name},\n)"
                )
                module.imported[key] = f"his_{use.name}"
            elif style < 0.8:
                module.header.append(f"import {home.name} as mod_{home.parts[-1]}")
                module.imported[key] = f"mod_{home.parts[-1]}.{use.name}"
            else:
                module.header.append(f"import {home.name}")
                module.imported[key] = key
        return module.imported[key]


def _indented(text: str, levels: int) -> str:
    """Every line further right; inside of brackets and strings that does no harm."""
    return "\n".join("    " * levels + line if line else line for line in text.split("\n"))
