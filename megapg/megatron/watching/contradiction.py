"""Compares one read of the globals with the groups that the reading code was given."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import cast

import torch.distributed as dist
from typing_extensions import override

from megapg.collection import ProcessGroupCollection
from megapg.layout import GroupName
from megapg.megatron.core import globals_of_core, parallel_state_module
from megapg.megatron.marks import ALLOWED
from megapg.megatron.publish import innermost
from megapg.megatron.tables import GLOO_GLOBALS, GROUP_IF_NONE, HOLDS, HYBRID_GROUPS, USED_IF
from megapg.megatron.watching.advice import replacement
from megapg.megatron.watching.alive import NUMBERS, Ranks, ranks_in_globals, ranks_of
from megapg.megatron.watching.changes import set_at
from megapg.megatron.watching.forbid import is_below
from megapg.megatron.watching.stack import SINGLE_GROUPS, Carried, Running, Search, running

# Reads that name no group, although a collection replaces them.
_NO_GROUP = frozenset(
    {"get_global_memory_buffer", "get_virtual_pipeline_model_parallel_world_size"}
)
_HYBRID = ("get_hybrid_data_context_parallel_groups", HYBRID_GROUPS)
_ENDS_IN_GROUP = ("_group", "_group_gloo", "_groups", "_GROUP", "_GROUPS")

_changing = threading.Lock()


@contextlib.contextmanager
def allow_global_reads() -> Iterator[None]:
    """Let code inside the block read the globals, although another layout is alive.

    Use it for code that means the globals, such as an old model that was built on them. It holds in
    all threads, as ``published()`` does: backward passes run in others. A function inside the block
    that is passed a group with other ranks than the globals have is still refused.

    Raises:
        UnsupportedVersionError: Megatron-core is not installed.
    """
    state = vars(parallel_state_module())
    block = running()
    with _changing:
        state[ALLOWED] = (*state.get(ALLOWED, ()), block)  # replaced: other threads read it
    try:
        yield
    finally:
        with _changing:
            rest = tuple(each for each in state.pop(ALLOWED) if each is not block)
            if rest:
                state[ALLOWED] = rest


@dataclass(frozen=True, slots=True, eq=False)
class Contradiction:
    """One read that the guard refuses.

    Attributes:
        reader: file, line and function of the read.
        read: the getter, or the private global.
        field: the field of the group.
        answer: the answer of the globals, in words.
        source: the code or the session that set the globals.
        given: the group of the nearest frame, in words. Empty if no frame carries a group.
    """

    reader: str
    read: str
    field: str
    answer: str
    source: str
    given: str

    @override
    def __str__(self) -> str:
        what = f"{self.reader} asks {self.read}: the globals answer {self.answer}, {self.source}"
        if self.given:
            ways = (
                "Pass the collection to the function that asks, or show it to the globals "
                "(`with megapg.published(pg):`). If the globals are meant,"
            )
            return f"{what}, but {self.given}. {ways} use `with megapg.allow_global_reads():`."
        return (
            f"{what}. This process has layouts with other ranks for {self.field}, and no function "
            "on the stack was given a group. Pass the collection to the function that asks, or "
            "show it to the globals (`with megapg.published(pg):`). If the globals are meant, use "
            "`with megapg.allow_global_reads():`."
        )


@dataclass(frozen=True, slots=True)
class _Question:
    """The field that a getter asks for, and the globals that answer."""

    field: str
    group: str  # the global that holds the group
    numbers: tuple[str, ...]  # the globals that set_*() sets, if they answer: size and rank


class Judge:
    """Judges reads while the layouts of this process differ for ``fields``."""

    def __init__(self, fields: frozenset[str]) -> None:
        self.fields = fields
        self._search = Search()
        self._questions: dict[tuple[object, ...], tuple[_Question, ...]] = {}

    def judge(
        self, name: str, arguments: Mapping[str, object], reader: FrameType
    ) -> Contradiction | None:
        """Return the contradiction of a read; None if there is none.

        Args:
            name: a getter of ``parallel_state``, or one of its private globals.
            arguments: all arguments of the getter.
            reader: the frame that reads.
        """
        try:
            questions = self._questions[name, *arguments.values()]
        except (KeyError, TypeError):
            questions = self._learn(name, arguments)
        for question in questions:
            if question.field in self.fields:
                wrong = self._compare(name, arguments, question, reader)
                if wrong is not None:
                    return wrong
        return None

    def _learn(self, name: str, arguments: Mapping[str, object]) -> tuple[_Question, ...]:
        questions: tuple[_Question, ...] = ()
        if name not in _NO_GROUP:
            fields = _fields(name, arguments)
            questions = tuple(
                _Question(
                    field,
                    HOLDS[field],
                    () if name.endswith(_ENDS_IN_GROUP) else NUMBERS.get(field, ()),
                )
                for field in fields
                if field in HOLDS
            )
        with contextlib.suppress(TypeError):  # an argument that has no hash
            self._questions[name, *arguments.values()] = questions
        return questions

    def _compare(
        self, name: str, arguments: Mapping[str, object], question: _Question, reader: FrameType
    ) -> Contradiction | None:
        state, field = globals_of_core(), question.field
        held = state.get(question.group)
        numbers = {
            what: value
            for what, each in zip(("size", "rank"), question.numbers, strict=False)
            if isinstance(value := state.get(each), int)
        }
        nothing = held is None and not numbers and ranks_in_globals(state, field) is None
        if nothing and arguments.get("check_initialized") is not False:
            return None  # the getter raises
        shown, allowed = innermost(state), cast("tuple[Running, ...]", state.get(ALLOWED, ()))
        stops = allowed if shown is None else (shown[1], *allowed)
        carried = self._search.nearest(reader, field, stops)
        if carried is None or (not carried and (stops or nothing)):
            return None
        if not numbers and held is not None and any(each.group is held for each in carried):
            return None
        answer = None if numbers else ranks_in_globals(state, field)
        if answer is None and held is not None and not numbers:
            return None  # torch has forgotten the group
        if any(_agrees(each, field, answer, numbers, state) for each in carried):
            return None
        if _never_used(reader):
            return None
        while reader.f_back is not None and is_below(_module(reader), ("megapg",)):
            reader = reader.f_back
        return Contradiction(
            reader=f"{_place(reader)}: {_function(reader)}",
            read=f"parallel_state.{name}" + ("" if name[0] == "_" else "()"),
            field=field,
            answer=_spelled(answer, numbers),
            source=_source(shown),
            given=_given(carried[0], field) if carried else "",
        )


def _fields(name: str, arguments: Mapping[str, object]) -> list[str]:
    """Return the fields that a getter, or a private global, answers for."""
    if name in GLOO_GLOBALS:
        found = GLOO_GLOBALS[name]
    elif name in _HYBRID:
        found = "dp_cp"  # which the hybrid groups divide
    else:
        found = replacement(name, arguments).field
    return found.removeprefix("gloo.").split(", ")


def _never_used(reader: FrameType) -> bool:
    """Return True if a function of Megatron-core asks for a group that it then does not use."""
    caller = reader.f_back
    if caller is None or reader.f_code.co_name != GROUP_IF_NONE:
        return False
    used_if = USED_IF.get((_module(caller), caller.f_code.co_name))
    return used_if is not None and not any(caller.f_locals.get(name, True) for name in used_if)


def _ranks(carried: Carried, field: str) -> Ranks | None:
    """Return the ranks of the group that a frame carries; None if torch has forgotten it."""
    if carried.group is None:
        return ()
    if isinstance(carried.holder, ProcessGroupCollection) and field != "hcp":
        return carried.holder.ranks(cast("GroupName", field))
    return ranks_of(carried.group)


def _agrees(
    carried: Carried,
    field: str,
    answer: Ranks | None,
    numbers: Mapping[str, int],
    state: Mapping[str, object],
) -> bool:
    """Return True if the group of a frame can be of the layout that answers."""
    ranks = _ranks(carried, field)
    if ranks is None:
        return True
    if not numbers and (not answer or not ranks):
        # None, "outside" and a group of one rank are alike: no collective has an effect.
        return len(ranks) < 2 and len(answer or ()) < 2
    if numbers:
        have = {"size": len(ranks), "rank": _index(ranks)}
        return all(have[what] == value for what, value in numbers.items())
    if ranks == answer:
        return True
    # One name may stand for groups of several fields: tp_group is the experts' at times.
    also = SINGLE_GROUPS.get(carried.single, ())
    return any(ranks == ranks_in_globals(state, other) for other in also if other != field)


def _index(ranks: Ranks) -> int:
    return ranks.index(dist.get_rank()) if ranks else -1


def _spelled(ranks: Ranks | None, numbers: Mapping[str, int]) -> str:
    if numbers:
        return " and ".join(f"{what} {value}" for what, value in numbers.items())
    return "None" if ranks is None else _of_ranks(ranks)


def _of_ranks(ranks: Ranks) -> str:
    return f"ranks {ranks}" if ranks else "no group for this rank"


def _source(shown: tuple[str, Running] | None) -> str:
    if shown is not None:
        return f"shown by published() of {shown[0]}"
    if globals_of_core().get("_TENSOR_MODEL_PARALLEL_GROUP") is None:
        return "which nobody has initialised"
    where = set_at(globals_of_core())
    return f"set at {where}" if where else "set by initialize_model_parallel()"


def _given(carried: Carried, field: str) -> str:
    with_ranks = _of_ranks(_ranks(carried, field) or ())
    what = (
        f"{carried.variable} = {with_ranks}"
        if carried.single
        else (f"{carried.variable} with {field} = {with_ranks}")
    )
    return f"{_function(carried.frame)} ({_place(carried.frame)}) was given {what}"


def _function(frame: FrameType) -> str:
    """Return the name of the function that runs, also from inside a comprehension."""
    return re.sub(r"(\.<locals>)?\.<(dict|list|set)comp>$", "", frame.f_code.co_qualname)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
