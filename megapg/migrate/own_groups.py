"""Modules of a project that define Megatron's getters for groups of their own.

Megatron-DeepSpeed, GPT-NeoX and their children have such a module, ``megatron/mpu``. The getters of
``megatron.core.parallel_state`` do not know its groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from megapg.migrate.migration import OwnGroups
from megapg.migrate.project import OWN_MODULE, PARALLEL_STATE, Project, is_test
from megapg.upstream.signatures import SIGNATURES

_DEFINES = re.compile(rb"^def get_\w+_group\b", re.MULTILINE)
_FEW = 2  # a module with fewer getters of groups may only wrap some


def find_own_groups(project: Project) -> Iterator[OwnGroups]:
    """Yield the modules of a project that hold groups of their own."""
    for path in project.mentioning(_DEFINES):
        name = project.files[path]
        if is_test(name) or f"/{name}".endswith(OWN_MODULE):
            continue
        table = project.table(path)
        getters = sorted(g for g in table.functions if g in SIGNATURES and g.endswith("_group"))
        imports = chain.from_iterable(table.imports.values())
        asks = any(project.meaning(each, path).name.startswith(PARALLEL_STATE) for each in imports)
        if len(getters) >= _FEW and not asks:
            module = project.module(path)
            yield OwnGroups(name, module, _wrapper(project, path, module), getters)


def _wrapper(project: Project, path: Path, module: str) -> str:
    """Return the package of a module if it imports names of the module, else the module."""
    package = path.parent / "__init__.py"
    if path == package or package not in project.files:
        return module
    table = project.table(package)
    names = {*table.stars, *(each.rpartition(".")[0] for each in chain(*table.imports.values()))}
    return project.module(package) if module in names else module
