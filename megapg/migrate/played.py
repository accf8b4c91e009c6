"""What patched getters say together: the rank of a layout that answers all of it."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from megapg.errors import LayoutError
from megapg.layout import ParallelLayout
from megapg.migrate.mapping import Argument, Replacement, replacement
from megapg.migrate.signatures import VERSIONS, signature


class Answer(NamedTuple):
    """What a patched getter answers."""

    name: str
    value: object


class Played(NamedTuple):
    """A rank of a layout: the arguments of ``fake_collection``."""

    sizes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.sizes)


_INITIALISED = {
    "is_initialized": True,
    "model_parallel_is_initialized": True,
    "is_unitialized": False,
}
_STAGES = ("is_pipeline_first_stage", "is_pipeline_last_stage")
_VIRTUAL = "get_virtual_pipeline_model_parallel_world_size"
_NEIGHBOURS = {"first": None, "last": None, "next": 1, "prev": -1}
_NEIGHBOUR = re.compile(r"get_pipeline_model_parallel_(first|last|next|prev)_rank\Z")
_AXES = ("tp", "pp", "cp", "ep", "expt_tp")
_LARGEST = 512  # ranks of a layout: tests play small ones, and each is asked


@cache
def asks_of(name: str) -> frozenset[tuple[str, str]]:
    """What a getter may ask of which field, whatever flags it is called with, in any version."""
    found = set()
    for version in VERSIONS:
        parameters = signature(name, version)
        flags = [each.name for each in parameters or () if each.default in ("True", "False")]
        for chosen in itertools.product(("True", "False"), repeat=len(flags)):
            given = [Argument(value, flag) for flag, value in zip(flags, chosen, strict=True)]
            answer = replacement(name, given, (version,))
            if isinstance(answer, Replacement) and answer.field:
                found.add((answer.asks, answer.field))
    return frozenset(found)


def is_expressible(answer: Answer) -> bool:
    """Whether a layout can say such a thing at all."""
    name, value = answer
    if name in _INITIALISED:
        return value is _INITIALISED[name]
    if name in _STAGES:
        return isinstance(value, bool)
    if name == _VIRTUAL and value is None:
        return True
    asks = {asked for asked, _ in asks_of(name)}
    if asks == {"ranks"}:
        return isinstance(value, list) and all(type(each) is int for each in value)
    numbers = asks <= {"rank", "size", "first"} if asks else name == _VIRTUAL
    return type(value) is int and (numbers or _NEIGHBOUR.match(name) is not None)


def played(answers: Iterable[Answer]) -> Played | None:
    """The smallest layout, and the lowest rank in it, that answer all of it; None if none does."""
    wanted = frozenset((name, repr(value)) for name, value in answers)
    return _played(wanted)


@cache
def _played(wanted: frozenset[tuple[str, str]]) -> Played | None:
    answers = [Answer(name, ast.literal_eval(value)) for name, value in sorted(wanted)]
    virtual = [answer for answer in answers if answer.name == _VIRTUAL]
    staged = any(answer.name in _STAGES for answer in answers)
    if staged and any(answer.value is not None for answer in virtual):
        return None  # of which model chunk?
    chunks = next((answer.value for answer in virtual), None)
    pools = [_pool(axis, answers) for axis in (*_AXES, "dp")]
    layouts = []
    for sizes in itertools.product(*pools):
        if (layout := _layout(*sizes, chunks=chunks)) is not None:
            layouts.append((layout.world_size, sum(map(bool, sizes)), sizes, layout))
    for _, _, sizes, layout in sorted(layouts, key=lambda each: each[:3]):
        for rank in range(layout.world_size):
            if all(_answers(layout, rank, answer) for answer in answers):
                return _written(sizes, layout, rank)
    return None


def _pool(axis: str, answers: Sequence[Answer]) -> list[int]:
    """Sizes to try for an axis; 0 for what follows from the others."""
    tried = {0} if axis in ("expt_tp", "dp") else {1}
    for name, value in answers:
        if axis == "pp" and (name in (*_STAGES, _VIRTUAL) or _NEIGHBOUR.match(name)):
            tried |= {1, 2, 3}
        if type(value) is not int:
            continue
        if name == f"get_{_LONG[axis]}_world_size":
            return [value]
        of_the_job = _NEIGHBOUR.match(name) or any(asks == "first" for asks, _ in asks_of(name))
        if of_the_job:  # a global rank, so whatever comes to more ranks than that may do
            tried |= {2, max(value, 1), value + 1}
        for asks, of in asks_of(name):
            if axis in (of, *of.split("_")):
                sizes = range(1, min(value, _LARGEST) + 1)
                tried |= {n for n in sizes if value % n == 0} if asks == "size" else {1, value + 1}
    return sorted(tried)


_LONG = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "expt_tp": "expert_tensor_parallel",
    "dp": "data_parallel",
}


def _smallest(tp: int, pp: int, cp: int, ep: int, expt_tp: int) -> int:
    return math.lcm(tp * pp * cp, (expt_tp or tp) * ep * pp)  # as fake_collection() has it


def _layout(
    tp: int, pp: int, cp: int, ep: int, expt_tp: int, dp: int, *, chunks: object
) -> ParallelLayout | None:
    world = tp * pp * cp * dp or _smallest(tp, pp, cp, ep, expt_tp)
    if not 0 < world <= _LARGEST:
        return None
    vpp = chunks if isinstance(chunks, int) else None
    try:
        return ParallelLayout(
            world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=expt_tp, vpp=vpp
        )
    except LayoutError:
        return None


def _written(sizes: tuple[int, ...], layout: ParallelLayout, rank: int) -> Played:
    axes = dict(zip(_AXES, sizes, strict=False))
    said = {axis: size for axis, size in axes.items() if size > (axis != "expt_tp")}
    if axes["expt_tp"] == layout.tp:
        said.pop("expt_tp", None)
    if layout.vpp is not None:
        said["vpp"] = layout.vpp
    if layout.world_size != _smallest(**axes):
        said["world_size"] = layout.world_size
    if rank:
        said["rank"] = rank
    return Played(tuple(said.items()))


def _answers(layout: ParallelLayout, rank: int, answer: Answer) -> bool:
    name, value = answer
    if name in _INITIALISED:
        return value is _INITIALISED[name]
    if name == _VIRTUAL:
        return layout.vpp == value
    pipeline = layout.members("pp", rank)
    if name in _STAGES:
        return (rank == pipeline[0 if "first" in name else -1]) is value
    if neighbour := _NEIGHBOUR.match(name):
        which, step = neighbour[1], _NEIGHBOURS[neighbour[1]]
        at = pipeline.index(rank) + step if step else 0 if which == "first" else -1
        return pipeline[at % len(pipeline)] == value
    return all(_has(layout, rank, asks, of, value) for asks, of in asks_of(name))


def _has(layout: ParallelLayout, rank: int, asks: str, of: str, value: object) -> bool:
    if of not in layout.families:
        return False
    members = layout.members(of, rank)
    if asks == "size":
        return len(members) == value
    if asks == "rank":
        return rank in members and members.index(rank) == value
    return members[:1] == (value,) if asks == "first" else list(members) == value
