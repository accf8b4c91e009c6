"""Which kinds of groups a name is about: a field of a collection, or a getter."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

from megapg.migrate.find.sites import Site
from megapg.migrate.python.methods import kept
from megapg.migrate.python.scopes import last_name
from megapg.upstream.mapping import (
    GROUP_PARAMETERS,
    TAKING_A_GROUP,
    GroupArgument,
    Replacement,
)

# What asks for state of the job is answered alike wherever it is asked.
_OF_THE_JOB = re.compile(r"initiali[sz]e|virtual|split_rank")
_WORDS = {
    **dict.fromkeys(("mp", "get_model_parallel"), ("tp", "pp")),
    **dict.fromkeys(("tp", "tensor"), ("tp",)),
    **dict.fromkeys(("pp", "pipeline", "embd", "embedding"), ("pp",)),
    **dict.fromkeys(("dp", "data"), ("dp",)),
    **dict.fromkeys(("cp", "context"), ("cp",)),
    **dict.fromkeys(("ep", "expt", "expert"), ("ep",)),
}
AXES = frozenset(axis for axes in _WORDS.values() for axis in axes)
"""All kinds."""
_A_WORD = re.compile(rf"(?:\A|(?<=_))(?:{'|'.join(_WORDS)})(?=_|\Z)")


@kept
def asked_about(site: Site) -> frozenset[str]:
    """The axes that a use is about, by its getter and by the fields that serve it: its arguments
    may say that it is about more than its name does.
    """
    needs = site.answer.needs if isinstance(site.answer, Replacement) else ()
    return axes_of(site.name).union(*map(axes_of, needs))


def axes_of(name: str) -> frozenset[str]:
    """The axes that the groups span which a field, or a getter, is about."""
    if _OF_THE_JOB.search(name):
        return frozenset()
    found = named_in(name)
    return found - {"tp", "dp"} if "ep" in found else found


def named_in(name: str) -> frozenset[str]:
    """The axes that a field, or a getter, names, also where what they span with experts is a
    group of its own.
    """
    return frozenset(axis for word in _A_WORD.findall(name) for axis in _WORDS[word])


def is_of_a_group(name: str) -> bool:
    """Whether a getter, be it a fork's own, is one of a group, its size or ranks, by its name."""
    return name.startswith("get_") and name.endswith(("_group", "_rank", "_ranks", "_world_size"))


def group_argument(node: ast.AST | None) -> GroupArgument | None:
    """How the group would be passed to what takes the globals' tensor parallel group, where a call
    passes none; None of any other node.
    """
    if not isinstance(node, ast.Call):
        return None
    found = TAKING_A_GROUP.get(last_name(node.func))
    named = {each.arg for each in node.keywords}
    passes = {None, "group", *GROUP_PARAMETERS} & named
    return None if found is None or passes or len(node.args) > found.after else found


def takes_group(node: ast.AST | None, versions: Collection[int]) -> bool:
    """Whether a call that passes no group could pass one in all of some versions."""
    found = group_argument(node)
    return found is not None and all(each >= found.since for each in versions)


@kept
def is_argument(node: ast.AST, function: ast.AST) -> bool:
    """Whether a function hands something on to what it calls."""
    return any(
        node in (*each.args, *(keyword.value for keyword in each.keywords))
        for each in ast.walk(function)
        if isinstance(each, ast.Call)
    )
