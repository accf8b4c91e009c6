"""The users' tests: patches of getters become fake collections before anything else is planned."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from megapg.migrate.imports import Imports
from megapg.migrate.index import Index
from megapg.migrate.migration import Edit, How, Served, applied
from megapg.migrate.patches import PatchPlan, plan_patches
from megapg.migrate.sites import Kind, Site
from megapg.migrate.source import Source

_PATCHES = frozenset({Kind.PATCHED, Kind.STRING})


def patch_plans(index: Index) -> dict[Path, PatchPlan]:
    """For each file that patches something in the globals what is to become of it."""
    sites: dict[Path, list[Site]] = defaultdict(list)
    for located in index.located:
        sites[located.path].append(located.site)
    plans = {}
    for path, found in sites.items():
        looked = index.look(path)
        if looked is not None and any(site.kind in _PATCHES and not site.keep for site in found):
            conftests = [(source, sites.get(at, ())) for at, source in _conftests(index, path)]
            plans[path] = plan_patches(*looked, found, conftests)
    return plans


def with_fakes(source: Source, plan: PatchPlan, imports: Imports) -> bytes | None:
    """The file with the edits of its plan; None where megapg can't be imported by its name."""
    if not plan.edits or imports.megapg() != "megapg":
        return None
    return source.encoded(applied(source.text, [*plan.edits, *imports.edits((), "*")]))


def served_by_fakes(plan: PatchPlan) -> Iterator[Served]:
    """The patches that went."""
    return (Served(site, How.FAKE, "megapg.testing.fake_collection(...)") for site in plan.served)


def by_lines(before: str, after: str) -> tuple[Edit, ...]:
    """The difference between two texts as edits of whole lines."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line))
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return tuple(
        Edit(starts[i], starts[j], "".join(new[k:m]), "patch")
        for tag, i, j, k, m in matcher.get_opcodes()
        if tag != "equal"
    )


def _conftests(index: Index, path: Path) -> Iterator[tuple[Path, Source]]:
    for folder in path.parents:
        looked = index.look(folder / "conftest.py") if folder / "conftest.py" in index else None
        if looked is not None and folder / "conftest.py" != path:
            yield folder / "conftest.py", looked[0]
