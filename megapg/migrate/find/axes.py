"""Which kinds of groups a name is about: a field of a collection, or a getter."""

from __future__ import annotations

import re

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


def axes_of(name: str) -> frozenset[str]:
    """The axes that the groups span which a field, or a getter, is about."""
    if _OF_THE_JOB.search(name):
        return frozenset()
    found = frozenset(axis for axis, words in _AXES.items() if words.search(name))
    return found - {"tp", "dp"} if "ep" in found else found
