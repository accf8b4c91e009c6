"""Compares the groups that code passes as arguments with those in the globals.

Half-way through a migration the same groups travel twice, as arguments and in the globals. If the
two differ, nothing raises: the program computes with the wrong ranks. This module compares each
call that is passed a group with the globals.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import torch.distributed as dist

from megapg.collection.membership import known_ranks
from megapg.errors import SessionError
from megapg.layout import FIELDS
from megapg.layout.fields import GROUP_GLOBALS
from megapg.megatron.core import BRIDGE, parallel_state_module, parameters_of
from megapg.megatron.reading.global_groups import GlobalGroups
from megapg.megatron.tables import HYBRID_GROUPS
from megapg.megatron.watching.advice import COLLECTION_PARAMETER, EXPERT_FLAG, TP_GROUP_OF_EXPERTS
from megapg.megatron.watching.forbid import is_below
from megapg.megatron.watching.hook import Resolved, listening
from megapg.megatron.watching.trace import empty_table
from megapg.upstream.mapping import GROUP_PARAMETERS

if TYPE_CHECKING:
    from rich.table import Table

Ranks = tuple[int, ...]

# Calls inside the bridge handle collections and do not replace reads of the globals.
_BRIDGE = (BRIDGE,)
# A module's arguments pass through torch on their way from the caller.
_GO_BETWEEN = ("torch",)


@dataclass(frozen=True)
class Disagreement:
    """A call site that passes another group than the one in the globals, with the number of calls.

    Attributes:
        function: the function that was passed the group, or the owner that resolved it.
        file: source file of the call.
        line: line number there.
        field: the collection field in question; if a parameter takes several, joined by "/".
        passed: global ranks of the group that was passed; empty for one that torch has destroyed.
        in_globals: global ranks of the group in ``parallel_state``; empty if it has none.
        count: number of calls.
    """

    function: str
    file: str
    line: int
    field: str
    passed: Ranks
    in_globals: Ranks
    count: int = 1


class Comparison:
    """The result of a comparison, complete when the block has ended.

    Attributes:
        compared: number of groups compared with the globals. Zero means that nothing was proven.
    """

    def __init__(self) -> None:
        self.compared = 0
        self._found: dict[Disagreement, int] = {}
        self._lock = threading.Lock()

    @property
    def disagreements(self) -> tuple[Disagreement, ...]:
        """Every call site that differs, by file and line; empty if arguments and globals agree."""
        with self._lock:
            found = [replace(place, count=count) for place, count in self._found.items()]
        return tuple(sorted(found, key=lambda place: (place.file, place.line, place.field)))

    def table(self) -> Table:
        """Return the disagreements as a table for the terminal."""
        title = f"groups passed other than in the globals ({self.compared:,} compared)"
        headings = ("call", "function", "field", "passed", "in the globals", "count")
        table = empty_table(title, headings)
        for place in self.disagreements:
            table.add_row(
                f"{place.file}:{place.line}",
                place.function,
                place.field,
                _spelled(place.passed, "a destroyed group"),
                _spelled(place.in_globals, "none"),
                f"{place.count:,}",
            )
        return table


@contextlib.contextmanager
def compare_with_globals() -> Iterator[Comparison]:
    """Compare every group that is passed inside the block with the one in ``parallel_state``.

    Three kinds of arguments of Python functions are compared: ``pg_collection``, ``<field>_group``
    and the few other names that Megatron-core has for groups. So are the collections passed to
    :func:`~megapg.megatron.resolve`. Equal means the same ranks in the same order. Nothing is
    compared while ``parallel_state`` is not initialised.

    Calls are observed with Python's profiling hook, in the calling thread and in threads that
    ``threading`` starts during the block. Threads of the autograd engine (backward on a GPU) run no
    such hook, so only their calls of ``resolve`` are compared. The hook makes Python several times
    slower: use it in a test of some steps, not in production.

    The levels of ``hcp`` and a collection's extras are not compared.

    Raises:
        SessionError: a profiler is running, this one included, or was started inside the block.
            Python supports only one.
    """
    if sys.getprofile() is not None or threading.getprofile() is not None:
        running = sys.getprofile() or threading.getprofile()
        raise SessionError(
            f"compare_with_globals(): a profiler is running ({running!r}), and Python has room "
            "for one. End it first, or compare in a run of its own."
        )
    comparison = Comparison()
    watch = _Watch(comparison, vars(parallel_state_module()))
    with listening(watch):
        threading.setprofile(watch.profile)
        sys.setprofile(watch.profile)
        try:
            yield comparison
        finally:
            interrupted = sys.getprofile() != watch.profile
            watch.over = True  # threads started in the block still have the hook
            if not interrupted:
                sys.setprofile(None)
            threading.setprofile(None)
    if interrupted:
        raise SessionError(
            "compare_with_globals(): a profiler was started inside the block and took its place, "
            "so what came after was not compared. Profile in a run of its own."
        )


class _Watch:
    """Observes calls and compares. The parameters to compare are found once per function."""

    def __init__(self, comparison: Comparison, state: Mapping[str, object]) -> None:
        self.over = False
        self._comparison, self._state = comparison, state
        # Keyed by id, with the code to keep it alive: hashing a code object hashes all of its
        # parts.
        self._watched: dict[int, tuple[CodeType, tuple[str, ...]]] = {}
        self._globals: dict[str, list[str]] = {}
        for name, field in GROUP_GLOBALS.items():
            if name in state:
                self._globals.setdefault(field, []).append(name)

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self.over:
            sys.setprofile(None)
        elif event == "call":
            code = frame.f_code
            known = self._watched.get(id(code))
            if known is None:
                known = self._watched[id(code)] = (code, _watched_parameters(frame))
            if known[1]:
                self._compare_call(frame, known[1])

    def read(self, name: str, arguments: Mapping[str, object], caller: FrameType) -> None:
        """Do nothing: a read of the globals can't disagree with them."""

    def resolved(self, answer: Resolved) -> None:
        pg = answer.explicit
        if pg is None or isinstance(pg, GlobalGroups) or not self._initialised():
            return
        for field in answer.needs or pg.present():
            self._compare(vars(pg).get(field), (field,), answer.owner, answer.caller)

    def _initialised(self) -> bool:
        return self._state["_TENSOR_MODEL_PARALLEL_GROUP"] is not None

    def _compare_call(self, frame: FrameType, parameters: tuple[str, ...]) -> None:
        caller = frame.f_back
        if not self._initialised():
            return
        if caller is not None and is_below(caller.f_globals.get("__name__", ""), _BRIDGE):
            return  # called by @resolves, which has reported it
        values, function = frame.f_locals, frame.f_code.co_qualname
        for parameter in parameters:
            value = values.get(parameter)  # a resumed generator may have deleted it
            if parameter != COLLECTION_PARAMETER:
                fields = GROUP_PARAMETERS[parameter]
                if parameter == "tp_group" and values.get(EXPERT_FLAG):
                    fields = TP_GROUP_OF_EXPERTS
                self._compare(value, fields, function, caller)
                continue
            if isinstance(value, GlobalGroups):  # the globals themselves
                continue
            for field, group in getattr(value, "__dict__", {}).items():
                if field in FIELDS:
                    self._compare(group, (field,), function, caller)

    def _compare(
        self, group: object, fields: tuple[str, ...], function: str, caller: FrameType | None
    ) -> None:
        state = self._state
        if not isinstance(group, dist.ProcessGroup):  # no group, or a test's stand-in
            return
        if fields == ("cp",) and state.get(HYBRID_GROUPS):  # one of many, chosen for each batch
            return
        names = [name for field in fields for name in self._globals.get(field, ())]
        if not names:  # this core has no global for the field
            return
        comparison = self._comparison
        if any(state[name] is group for name in names):
            with comparison._lock:
                comparison.compared += 1
            return
        passed = known_ranks(group)
        in_globals = [known_ranks(state[name]) for name in names]
        with comparison._lock:
            comparison.compared += 1
            if passed and passed in in_globals:
                return
            while caller and is_below(caller.f_globals.get("__name__", ""), _GO_BETWEEN):
                caller = caller.f_back
            place = Disagreement(
                function=function,
                file=caller.f_code.co_filename if caller else "",
                line=caller.f_lineno if caller else 0,
                field="/".join(fields),
                passed=passed,
                in_globals=in_globals[0],
            )
            comparison._found[place] = comparison._found.get(place, 0) + 1


def _watched_parameters(frame: FrameType) -> tuple[str, ...]:
    if is_below(frame.f_globals.get("__name__", ""), _BRIDGE):
        return ()
    watched = (COLLECTION_PARAMETER, *GROUP_PARAMETERS)
    return tuple(name for name in parameters_of(frame.f_code) if name in watched)


def _spelled(ranks: Ranks, nothing: str) -> str:
    return " ".join(map(str, ranks)) or nothing
