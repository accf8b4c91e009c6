"""Collect the pages of the site from the repository, and link the roles in docstrings.

MkDocs calls :func:`on_files` and :func:`on_post_page` as hooks. Griffe loads :class:`Roles` as an
extension. Every page keeps its path in the repository, so its links hold in both places.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = (
    *("*.md", "migration_guide/*.*", "benchmarks/*.md", "docs/**/*.*"),
    *(
        "megapg/tools/doctor/*.json",
        "megapg/tools/plan/*.json",
        "megapg/tools/plan/clusters/*.toml",
    ),
)

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)`")
_BLOCK = re.compile(r"(?: ::|(:):)\n\n((?:(?: {4}.*)?\n)*(?: {4}.*))")
# A page may name its own full address.
_ASSET = re.compile(
    r"<(?:script|img|source|iframe|link(?! rel=\"?(?:canonical|prev|next)))\b"
    r"[^>]*?\b(?:src|href)=\"?(?:https?:)?//[^\" >]+"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of the folder ``docs`` by those of the whole repository."""
    for file in list(files):
        if file.src_dir == config.docs_dir:
            files.remove(file)
    root = Path(config.config_file_path).parent
    for path in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads something from another host."""
    if found := _ASSET.search(output):
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0]}")
    return output


class Roles(griffe.Extension):
    """Turn the roles and literal blocks of docstrings into Markdown."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Show the value of a default that is a private constant of the module."""
        constants = func.module.attributes
        for parameter in func.parameters:
            name = str(parameter.default)
            if name.startswith("_") and name in constants:
                parameter.default = constants[name].value

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object, before griffe parses it."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value, lambda name: _path(obj, name))


def as_markdown(docstring: str, path_of: Callable[[str], str]) -> str:
    """Return the docstring with links for its roles, and fences around its literal blocks."""

    def linked(role: re.Match[str]) -> str:
        shown = role[2].rpartition(".")[2] if role[1] else role[2]
        return f'<autoref identifier="{path_of(role[2])}" optional><code>{shown}</code></autoref>'

    def fenced(block: re.Match[str]) -> str:
        return f"{block[1] or ''}\n\n```python\n{textwrap.dedent(block[2])}\n```"

    return _BLOCK.sub(fenced, _ROLE.sub(linked, docstring))


def _path(obj: griffe.Object, name: str) -> str:
    """Return the full path of a name in the scope of an object; the name itself if unknown."""
    first, dot, rest = name.partition(".")
    scope: griffe.Object | None = obj
    while scope is not None:
        members = scope.all_members if isinstance(scope, griffe.Class) else scope.members
        if member := members.get(first):
            public = member.is_alias and first in obj.package.members
            return (f"{obj.package.path}.{first}" if public else member.path) + dot + rest
        scope = scope.parent
    return name
