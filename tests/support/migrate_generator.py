"""Random packages that read Megatron's globals; the same package for the same seed.

Each definition is a template of ``cases/generated.txt`` with holes: ``«N»`` a new name, ``«r»`` a
read, ``«x»`` an expression with reads, ``«i»`` a number, ``«c»`` a call of an earlier definition,
``«c:model»`` a call that passes the named variable on. The ``>>>`` lines show how other code calls
the definition. In these lines, ``«model»``, ``«pg»`` and ``«tp»`` stand for the caller's values.
Every definition returns the answers of its reads and of its calls.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from migrate_cases import sections, with_names

PACKAGE = "fuzzed"
_HEADER = """\
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools

import torch
"""
_KIT = """
import torch.distributed as dist


def ranks(group):
    return tuple(dist.get_process_group_ranks(group))
"""
_COMPAT = "from megatron.core import mpu\nfrom megatron.core.parallel_state import *\n"
# How a module gets the globals, and how it then writes a getter.
_STYLES = (
    ("from megatron.core import mpu", "mpu.{}"),
    ("from megatron.core import parallel_state as ps, mpu", "ps.{}"),
    (
        "import megatron.core.parallel_state\nfrom megatron.core import mpu",
        "megatron.core.parallel_state.{}",
    ),
    ("from .compat import mpu", "mpu.{}"),
    (f"from {PACKAGE} import compat\nfrom {PACKAGE}.compat import mpu", "compat.{}"),
    ("from megatron.core.parallel_state import *\nfrom megatron.core import mpu", "{}"),
)
_READS = (
    *("TP_RANK()", "TP_SIZE()", "PP_RANK()", "PP_SIZE()", "CP_SIZE()", "DP_RANK()", "DP_SIZE()"),
    *("DP_SIZE(with_context_parallel=True)", "get_expert_model_parallel_rank()"),
    *("FIRST(ignore_virtual=True)", "DP_RANK(with_context_parallel=bool(1))"),
    *("get_pipeline_model_parallel_next_rank()", "get_context_parallel_rank()"),
)
_GROUPS = ("TP_GROUP()", "DP_GROUP()", "get_model_parallel_group()", "TP_GROUP(False)")
_EXPRESSIONS = (
    *("«r»", "«r»", "(«r», «r»)", "«r» + «r»", "[«r» for _ in range(2)]", "-«r» if «r» else «r»"),
    *("f'{«r»} {«r»:>3}'", 'f"{«r»!r}"', "{«r»: «r»}", "(lambda: «r»)()", "sorted({«r», «r»})"),
    *("(«r» or «r», «r» and «r»)", "ranks(«g»)", "(«g» is not None, «g».size(), «g».rank())"),
)


@dataclass(frozen=True)
class Driver:
    """An expression over the names of a module. It may use ``model``, ``pg`` and ``tp``."""

    module: str
    expression: str
    why_wrong: str  # set if its answers are known to be wrong when groups are passed


@dataclass(frozen=True)
class Package:
    """A package and what to evaluate."""

    seed: int
    files: Mapping[str, str]  # by path below the root
    drivers: tuple[Driver, ...]


def make_package(seed: int, modules: int = 3, units: int = 5) -> Package:
    """Return the package of a seed."""
    return _Maker(seed).make(modules, units)


@dataclass(frozen=True)
class _Defined:
    """A definition that others can call."""

    module: str
    name: str  # the name that the call begins with
    call: str
    why_wrong: str


class _Maker:
    def __init__(self, seed: int) -> None:
        self._seed, self._random = seed, random.Random(seed)
        self._defined: list[_Defined] = []
        self._imports: set[str] = set()
        self._module, self._style, self._count, self._why = "", "mpu.{}", 0, ""

    def make(self, modules: int, units: int) -> Package:
        files = {"__init__.py": "", "kit.py": _KIT, "compat.py": _COMPAT}
        drivers: list[Driver] = []
        templates = list(sections("generated.txt"))
        for number in range(modules):
            self._module, self._imports = f"m{number}", set()
            imports, self._style = self._random.choice(_STYLES)
            parts = []
            for heading, text in self._random.choices(templates, k=units):
                self._why = heading.partition(" XFAIL ")[2]
                body, calls = self._unit(text)
                parts.append(body)
                drivers += [Driver(f"{PACKAGE}.{self._module}", each, self._why) for each in calls]
            head = f"{_HEADER}{imports}\nfrom .kit import ranks\n" + "\n".join(self._imports)
            files[f"{self._module}.py"] = with_names(head + "\n\n\n" + "\n\n".join(parts))
        below = {f"{PACKAGE}/{name}": text for name, text in files.items()}
        return Package(self._seed, below, tuple(drivers))

    def _unit(self, text: str) -> tuple[str, list[str]]:
        """Return a definition, and the calls of it."""
        for hole in "NMOP":
            if f"«{hole}»" in text:
                self._count += 1
                letter = self._random.choice(("f", "make", "get_", "X"))
                text = text.replace(f"«{hole}»", f"{letter}{self._count}")
        body, *calls = re.split(r"^>>> ", text, flags=re.MULTILINE)
        body = self._filled(body)
        calls = [self._filled(each).strip() for each in calls]
        for call in calls:
            name = re.search(r"(?:f|make|get_|X)\d+", call)
            assert name is not None, call
            self._defined.append(_Defined(self._module, name[0], call, self._why))
        return body, [self._known(call, "model", "pg", "tp") for call in calls]

    def _filled(self, text: str) -> str:
        """Fill the holes that are not for the caller."""
        hole = re.compile(r"«(x|r|g|i|c)(?::([\w.]+))?»")
        while found := hole.search(text):
            text = text[: found.start()] + self._fill(*found.groups()) + text[found.end() :]
        return text

    def _fill(self, hole: str, variable: str | None) -> str:
        choose = self._random.choice
        if hole == "i":
            return str(self._random.randint(0, 9))
        if hole == "x":
            return choose(_EXPRESSIONS)
        if hole == "c":
            return self._call(variable)
        read = choose(_READS if hole == "r" else _GROUPS)
        return self._style.format(read)

    def _call(self, variable: str | None) -> str:
        """Return a call of a definition from this or another module."""
        if not self._defined:
            return "0"
        chosen = self._random.choice(self._defined)
        call, name, self._why = chosen.call, chosen.name, self._why or chosen.why_wrong
        if chosen.module != self._module:
            line, written = self._random.choice(
                (
                    (f"from .{chosen.module} import {name}", name),
                    (f"from . import {chosen.module}", f"{chosen.module}.{name}"),
                    (
                        f"import {PACKAGE}.{chosen.module} as the_{chosen.module}",
                        f"the_{chosen.module}.{name}",
                    ),
                    (f"from .{chosen.module} import {name} as other_{name}", f"other_{name}"),
                )
            )
            self._imports.add(line)
            call = re.sub(rf"\b{name}\b", written, call)
        model = variable if variable and variable != "pg" else "None"
        pg = "pg_collection" if variable == "pg" else "None"
        return self._known(call, model, pg, self._style.format("TP_GROUP()"))

    @staticmethod
    def _known(call: str, model: str, pg: str, tp: str) -> str:
        return call.replace("«model»", model).replace("«pg»", pg).replace("«tp»", tp)
