"""Check that the documentation site has every page and every public name. `make docs` builds it."""

import importlib
import inspect
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megapg"
REFERENCE = {page.name: page.read_text() for page in sorted((ROOT / "docs/reference").glob("*.md"))}
DOCUMENTED = re.findall(r"^::: ([\w.]+)$", "\n".join(REFERENCE.values()), re.M)
# Packages that no user imports; their names are public through another package.
INTERNAL = {"megapg.tools.cli", "megapg.ownership.rebind"}


class Settings(yaml.SafeLoader):
    """Read mkdocs.yml, which has tags of Python and of MkDocs."""


Settings.add_multi_constructor("", lambda loader, tag, node: None)


def pages_of(entry: object) -> Iterator[str]:
    """Yield the pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from pages_of(each)


def public_packages() -> list[str]:
    """Return the packages whose ``__init__`` has an ``__all__``."""
    return [
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in sorted(PACKAGE.rglob("__init__.py"))
        if re.search(r"^__all__", file.read_text(), re.M)
    ]


def object_at(path: str) -> object:
    """Return the module, or the attribute of a module, at a dotted path."""
    home, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(home), name, None) if home else None
    return importlib.import_module(path) if found is None else found


def test_the_navigation_has_every_page() -> None:
    given = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)
    pages = [*ROOT.glob("*.md"), *(ROOT / "migration_guide").rglob("*.md")]
    pages += [*(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks/RESULTS.md"]
    assert sorted(pages_of(given["nav"])) == sorted(
        page.relative_to(ROOT).as_posix() for page in pages
    )


def test_the_reference_is_found() -> None:
    assert {"megapg", "megapg.megatron", "megapg.testing", *INTERNAL} < {*public_packages()}
    assert len(DOCUMENTED) == len(set(DOCUMENTED)) > 80


@pytest.mark.parametrize("package", sorted({*public_packages()} - INTERNAL))
def test_the_reference_has_every_public_name(package: str) -> None:
    if package in DOCUMENTED:
        return
    # megapg.rl.ray can't be imported without Ray. No package lists its names.
    shown = [object_at(path) for path in DOCUMENTED if not path.startswith("megapg.rl.ray.")]
    of_modules = [vars(each).values() for each in shown if inspect.ismodule(each)]
    known = {id(each) for each in chain(shown, *of_modules)}
    home = importlib.import_module(package)
    lacking = [name for name in home.__all__ if id(getattr(home, name)) not in known]
    assert not lacking, f"name them in a page of docs/reference: {lacking}"
