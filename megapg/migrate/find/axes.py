"""Which kinds of groups a name is about: a field of a collection, or a getter."""

from __future__ import annotations

import re

from megapg.migrate.find.sites import Site
from megapg.upstream.mapping import Replacement

# What asks for state of the job is answered alike wherever it is asked.
_OF_THE_JOB = re.compile(r"initiali[sz]e|virtual|split_rank")
_WORDS = {
    "tp": "tp|mp|tensor|get_model_parallel",
    "pp": "pp|mp|pipeline|embd|embedding|get_model_parallel",
    "dp": "dp|data",
    "cp": "cp|context",
    "ep": "ep|expt|expert",
}
_AXES = {axis: re.compile(rf"(?:\A|_)(?:{words})(?:_|\Z)") for axis, words in _WORDS.items()}


def asked_about(site: Site) -> frozenset[str]:
    """The axes that a use is about, by its getter, or else by the fields that serve it."""
    needs = site.answer.needs if isinstance(site.answer, Replacement) else ()
    return axes_of(site.name) or frozenset[str]().union(*map(axes_of, needs))


def axes_of(name: str) -> frozenset[str]:
    """The axes that the groups span which a field, or a getter, is about."""
    if _OF_THE_JOB.search(name):
        return frozenset()
    found = frozenset(axis for axis, words in _AXES.items() if words.search(name))
    return found - {"tp", "dp"} if "ep" in found else found
