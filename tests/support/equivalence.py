"""Compare Megatron-core's own getters with the replacements that the codemod writes.

The comparison covers every function and private variable of ``parallel_state`` that the codemod's
table maps in the imported core, with every combination of arguments, on ranks of every grid below.
The getter reads real globals. The replacement gets each of these in place of the globals:

* the globals, as ``megapg.resolve(None)`` returns them;
* None, if the call tests for a collection;
* the groups of a session of the same layout;
* a collection with only the fields that the table says the expression reads.

As a program, the module prints the numbers as JSON for the first core on the path.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch.distributed as dist
from configurations import Configuration, every_stage, last_stage_first
from megatron.core import parallel_state
from recording import functions, recorded_megatron

from megapg import ProcessGroupCollection
from megapg.errors import LayoutError, MissingGroupError, UnsupportedOptionError
from megapg.megatron import getters
from megapg.megatron.core import installed_version
from megapg.megatron.reading.global_groups import GlobalGroups
from megapg.megatron.tables import GLOO_GLOBALS
from megapg.ownership.opening import fake_session
from megapg.upstream.expressions import replacement
from megapg.upstream.mapping import (
    OF_SEVERAL_PIPELINES,
    PRIVATE,
    SEVERAL_PIPELINES,
    Argument,
    Replacement,
    Takes,
)
from megapg.upstream.signatures import VERSIONS

MINOR = installed_version()[1]
MANY = tuple(VERSIONS)[-8:]
GLOO_FIELDS = [name.removeprefix("gloo.") for name in GLOO_GLOBALS.values()]

# -- the calls -------------------------------------------------------------------------------------

# Values of an argument by parameter name: literals, and names that are bound at run time only.
VALUES: Mapping[str, Sequence[str]] = {
    "vp_stage": ("None", "0", "1", "2", "one"),
    "rank": ("None", "0", "1", "3", "one"),
    "group_size": ("2", "3", "4", "8", "16", "two"),
}
FLAG = ("False", "True", "off", "on")
BOUND = {"off": False, "on": True, "one": 1, "two": 2}


@dataclass(frozen=True)
class Question:
    """A read of the globals, and its replacement by the codemod."""

    text: str
    name: str
    written: Replacement
    theirs: CodeType = field(repr=False, compare=False)
    ours: CodeType = field(repr=False, compare=False)


def questions() -> list[Question]:
    """Return every read that the table maps, for this core and for several versions.

    A replacement for several versions counts only if it differs and the call works in this core.
    """
    found = [
        question
        for name, function in functions().items()
        for arguments in _calls(function)
        if (here := _question(name, arguments, [MINOR]))
        for question in (here, _question(name, arguments, MANY))
        if question
    ]
    held = [name for name in vars(parallel_state) if name in PRIVATE]
    found += [question for name in held if (question := _question(name, None, [MINOR]))]
    return list(dict.fromkeys(found))


def _question(
    name: str, arguments: Sequence[Argument] | None, versions: Sequence[int]
) -> Question | None:
    answer = replacement(name, arguments or (), versions)
    if not isinstance(answer, Replacement):
        return None
    given = [f"{a.keyword}={a.text}" if a.keyword else a.text for a in arguments or ()]
    text = name if arguments is None else f"{name}({', '.join(given)})"
    theirs, ours = (
        compile(written, text, "eval") for written in (f"parallel_state.{text}", answer.expression)
    )
    return Question(text, name, answer, theirs, ours)


def _calls(function: Any) -> Iterator[Sequence[Argument]]:
    """Yield the arguments by keyword in every combination, by position, and in a dictionary."""
    parameters = list(inspect.signature(function).parameters.values())
    takes = {p.name: _values(p) for p in parameters}
    if not all(takes.values()):
        return
    for chosen in itertools.product(*(["", *values] for values in takes.values())):
        given = {name: text for name, text in zip(takes, chosen, strict=True) if text}
        yield [Argument(text, name) for name, text in given.items()]
        if given:
            pairs = ", ".join(f"{name!r}: {text}" for name, text in given.items())
            yield [Argument(f"**{{{pairs}}}")]
    for count in range(1, len(takes) + 1):
        for chosen in itertools.product(*list(takes.values())[:count]):
            yield [Argument(text) for text in chosen]


def _values(parameter: inspect.Parameter) -> Sequence[str]:
    return VALUES.get(parameter.name, FLAG if isinstance(parameter.default, bool) else ())


# -- the grids -------------------------------------------------------------------------------------


SOME = (0, 3, 6, 9, 15)
GRIDS: Mapping[Configuration, Sequence[int]] = {
    Configuration(world_size=1): [0],
    Configuration(world_size=8, tp=2, pp=2): range(8),
    Configuration(world_size=8, tp=2, pp=4, vpp=3): range(8),
    Configuration(world_size=8, tp=2, cp=2, ep=4, expt_tp=1): range(8),
    Configuration(world_size=8, pp=2, vpp=1, cp=2): [0, 2, 7],
    Configuration(world_size=8, pp=2, vpp=1, cp=2, optimizer_instances=2): range(8),
    Configuration(world_size=12, tp=2, pp=3, vpp=2, embedding_ranks=last_stage_first): [0, 4, 11],
    Configuration(world_size=12, pp=4, vpp=2, embedding_ranks=every_stage): [0, 4, 11],
    Configuration(world_size=16, tp=2, pp=2, ep=4, expt_tp=1): [0, 5, 15],
    Configuration(world_size=16, tp=2, cp=4, hierarchical_cp=(2, 2)): SOME,
    Configuration(world_size=16, tp=4, pp=2, ep=2, expt_tp=2, vpp=2): SOME,
    Configuration(world_size=16, pp=2, vpp=2, ep=2, optimizer_instances=2): SOME,
    Configuration(
        world_size=16, tp=2, cp=2, ep=2, order="tp-ep-dp-pp-cp", optimizer_instances=4
    ): SOME,
    Configuration(world_size=16, tp=2, pp=4, vpp=2, embedding_ranks=last_stage_first): SOME,
    Configuration(world_size=16, pp=8, embedding_ranks=every_stage): SOME,
}

# Arguments of initialize_model_parallel() that no session has, in cores that take them. Only the
# globals are compared.
ALONE: Sequence[tuple[Configuration, Mapping[str, object]]] = (
    (Configuration(world_size=8, tp=2), {"create_all_gather_group": True}),
    (Configuration(world_size=8, pp=4), {"pipeline_model_parallel_split_rank": 2}),
    (
        Configuration(world_size=8, tp=2, pp=2),
        {"encoder_tensor_model_parallel_size": 2, "encoder_pipeline_model_parallel_size": 2},
    ),
)

# Globals that no field can hold. Here a replacement may raise if the getter does not, but a wrong
# answer is still an error.
BEYOND: Sequence[tuple[Configuration, Mapping[str, object]]] = (
    (  # a rank of the encoder is in two pipelines
        Configuration(world_size=10, tp=2, pp=2),
        {"encoder_tensor_model_parallel_size": 1, "encoder_pipeline_model_parallel_size": 1},
    ),
    (  # there are two data parallel groups
        Configuration(world_size=8, tp=2),
        {"gtp_remat_size": 2, "expert_gtp_remat_size": 2},
    ),
)


def takes(**arguments: object) -> bool:
    """True if this core's initialize_model_parallel() has parameters of these names."""
    return set(arguments) <= set(
        inspect.signature(parallel_state.initialize_model_parallel).parameters
    )


# -- the comparison --------------------------------------------------------------------------------

RAISED = "raised"
REFUSALS = (
    *(AssertionError, KeyError),  # Megatron's
    *(MissingGroupError, LayoutError, UnsupportedOptionError),
)


@dataclass
class Tally:
    """The result.

    Attributes:
        version: of Megatron-core.
        questions: number of different reads.
        answered: number of equal answers, by the replacement of the globals.
        raised: number of comparisons in which both sides raise.
        refused: number of replacements that raise because no field can hold the answer.
        mismatches: all other comparisons.
        names: functions and variables with at least one answer.
        unanswered: functions and variables without an answer.
        empty: private variables that were None somewhere in spite of groups.
    """

    version: str = ".".join(map(str, installed_version()))
    questions: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    raised: int = 0
    refused: int = 0
    mismatches: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    unanswered: set[str] = field(default_factory=set)
    empty: set[str] = field(default_factory=set)

    @property
    def comparisons(self) -> int:
        """Return the number of all comparisons."""
        return self.answered.total() + self.raised + self.refused + len(self.mismatches)

    def compare(
        self,
        question: Question,
        kind: str,
        where: str,
        expected: object,
        got: object,
        *,
        beyond: bool = False,
    ) -> None:
        """Record one comparison."""
        if beyond and got == RAISED != expected:
            self.refused += 1
        elif expected != got:
            self.mismatches.append(
                f"{where}, {kind}: {question.text} is {expected}, "
                f"{question.written.expression} is {got}"
            )
        elif expected == RAISED:
            self.raised += 1
        else:
            self.answered[kind] += 1
            self.names.add(question.name)


def plain(value: object) -> object:
    """Return a value that outlives the groups, with its type; groups become their ranks."""
    if isinstance(value, dist.ProcessGroup):
        return "group", tuple(dist.get_process_group_ranks(value))
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(plain, value))
    if value is None or isinstance(value, int | str):
        return type(value).__name__, value
    return type(value).__name__  # a buffer: each owner of groups has its own


def asked(code: CodeType, pg: ProcessGroupCollection | None = None) -> object:
    """Return the answer; all refusals are equal."""
    scope = {"parallel_state": parallel_state, "getters": getters, "pg": pg, **BOUND}
    try:
        return plain(eval(code, scope))
    except REFUSALS:
        return RAISED


def prove() -> Tally:
    """Compare everything on the installed core."""
    tally, asking = Tally(), questions()
    tally.questions = len(asking)
    for grid, ranks in GRIDS.items():
        for rank in ranks:
            compare_on(tally, asking, grid, rank)
    for grid, more in (*ALONE, *BEYOND):
        if takes(**more):
            for rank in range(grid.world_size):
                with recorded_megatron(rank, grid.world_size):
                    grid.initialize_megatron(**more)
                    where, beyond = f"{grid} {more} rank {rank}", (grid, more) in BEYOND
                    expected = _of_globals(tally, asking, where, beyond=beyond)
                    if not beyond:
                        _of_their_groups(tally, expected, where)
                    if MINOR in SEVERAL_PIPELINES:
                        _of_several(tally, where)
    with recorded_megatron(5, 16):
        Configuration(world_size=16, tp=4, pp=4).initialize_megatron()
        for name in list(vars(parallel_state)):
            if name.startswith("set_") and name.endswith(("parallel_rank", "world_size")):
                getattr(parallel_state, name)(2 if name.endswith("size") else 1)
        _of_globals(tally, asking, "ranks and sizes as set", beyond=True)
    with recorded_megatron(0, 8):
        soft = [q for q in asking if q.written.takes in (Takes.LAZY, Takes.OPTIONAL)]
        _of_globals(tally, soft, "nothing initialised")
    tally.unanswered = {question.name for question in asking} - tally.names
    return tally


def compare_on(tally: Tally, asking: Sequence[Question], grid: Configuration, rank: int) -> None:
    """Compare one rank of a grid with everything that may replace the globals."""
    where = f"{grid} rank {rank}"
    hybrid = {"hybrid_context_parallel": True}
    hybrid = hybrid if takes(**hybrid) and grid.world_size == 16 else {}
    with recorded_megatron(rank, grid.world_size):
        grid.initialize_megatron(**hybrid)
        expected = _of_globals(tally, asking, where)
        _of_their_groups(tally, expected, where)
        current_chunk = MINOR < 13 and grid.vpp is not None
        for chunk in range(grid.vpp) if current_chunk else ():
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
            at_chunk = _of_globals(tally, asking, f"{where} chunk {chunk}")
            _of_their_groups(tally, at_chunk, f"{where} chunk {chunk}")
    with fake_session(grid.layout(hybrid_cp=bool(hybrid)), rank, gloo=GLOO_FIELDS) as session:
        borrowed: dict[tuple[str, ...], ProcessGroupCollection] = {}
        for question, answer in expected.items():
            written = question.written
            if written.takes in (Takes.GLOBALS, Takes.JOB) and current_chunk:
                continue  # only the globals know the current chunk
            got = asked(question.ours, session.groups)
            tally.compare(question, "session", where, answer, got)
            if written.takes in (Takes.GLOBALS, Takes.JOB):
                continue
            # Any group proves that there are groups.
            names = ("tp",) if written.takes is Takes.OPTIONAL else written.needs
            if names not in borrowed:
                held = {name: getattr(session.groups, name) for name in names}
                borrowed[names] = ProcessGroupCollection.from_groups(**held)
            got = asked(question.ours, borrowed[names])
            tally.compare(question, "needs alone", where, answer, got)


def _of_their_groups(tally: Tally, expected: Mapping[Question, object], where: str) -> None:
    """Compare the job's values from the globals with those from a collection of their groups."""
    view = GlobalGroups()
    for question, answer in expected.items():
        needs = question.written.needs
        if question.written.takes is Takes.JOB and all(hasattr(view, name) for name in needs):
            pg = ProcessGroupCollection.from_groups(**{name: getattr(view, name) for name in needs})
            tally.compare(question, "their groups", where, answer, asked(question.ours, pg))


def _of_several(tally: Tally, where: str) -> None:
    """Compare the helpers that return a list to a rank in several pipelines with the getters."""
    for name, helper in OF_SEVERAL_PIPELINES.items():
        written = Replacement(f"$getters.{helper}($pg)")
        theirs, ours = (
            compile(text, name, "eval") for text in (f"parallel_state.{name}()", written.expression)
        )
        question = Question(f"{name}()", name, written, theirs, ours)
        answer, got = asked(theirs), asked(ours, GlobalGroups())
        tally.compare(question, "or several", where, answer, got)


def _of_globals(
    tally: Tally, asking: Sequence[Question], where: str, *, beyond: bool = False
) -> Mapping[Question, object]:
    """Compare with the view of the globals; return the getters' answers."""
    view, said = GlobalGroups(), {}
    for question in asking:
        answer = asked(question.theirs)
        raises = question.written.caution and question.written.takes is not Takes.LAZY
        if raises and answer == plain(None):
            tally.empty.add(question.name)
            continue  # see the caution
        said[question] = answer
        got = asked(question.ours, view)
        tally.compare(question, "globals", where, answer, got, beyond=beyond)
        if question.written.takes is Takes.OPTIONAL:
            tally.compare(question, "nothing passed", where, answer, asked(question.ours))
    return said


def numbers() -> dict[str, object]:
    """Return the numbers of :func:`prove`, for a report."""
    tally = prove()
    return {
        "version": tally.version,
        "names": len(tally.names),
        "questions": tally.questions,
        "comparisons": tally.comparisons,
        "answered": dict(tally.answered),
        "both raise": tally.raised,
        "refused": tally.refused,
        "mismatches": tally.mismatches,
        "unanswered": sorted(tally.unanswered),
        "empty": sorted(tally.empty),
    }


if __name__ == "__main__":
    print(json.dumps(numbers()))
