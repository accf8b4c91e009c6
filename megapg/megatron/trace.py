"""Who still reads Megatron's globals: every read, with its place in the source."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import TYPE_CHECKING

from megapg.megatron.core import parallel_state_module
from megapg.megatron.tables import GETTER_FIELDS, GETTER_SUFFIXES

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from megapg.collection import ProcessGroupCollection

_HOOK = "__megapg_read__"
_UNANSWERED = "nothing: not initialised"


@dataclass(frozen=True)
class GlobalRead:
    """One place that read a global, and how often.

    Attributes:
        getter: the function of ``parallel_state`` that was called.
        file: source file of the caller.
        line: line number there.
        function: the calling function.
        field: the collection field that would have served; empty where there is none.
        answered_by: name of the collection whose groups the globals held at that moment.
        count: number of reads.
    """

    getter: str
    file: str
    line: int
    function: str
    field: str
    answered_by: str
    count: int = 1


@dataclass
class Trace:
    """The reads seen so far; complete when the block has ended."""

    _counts: dict[GlobalRead, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def reads(self) -> tuple[GlobalRead, ...]:
        """Every place, by file and line."""
        found = [replace(read, count=count) for read, count in self._counts.items()]
        return tuple(sorted(found, key=lambda read: (read.file, read.line, read.getter)))

    def _add(self, read: GlobalRead) -> None:
        with self._lock:  # backward reads from autograd's threads
            self._counts[read] = self._counts.get(read, 0) + 1


@contextlib.contextmanager
def trace_global_reads(**known: ProcessGroupCollection) -> Iterator[Trace]:
    """Record every call of a ``parallel_state`` getter while the block runs, in all threads.

    The getters themselves are made to report, so names bound by ``from ... import`` long before
    are seen as well; on exit each getter is exactly what it was.

    Args:
        **known: collections by name, to say which of them the globals held at each read.
    """
    module = parallel_state_module()
    state = vars(module)
    trace = Trace()
    originals: dict[str, FunctionType] = {}

    def read(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        caller = sys._getframe(2)
        if caller.f_globals is not state:  # a getter that calls a getter is one read
            trace._add(_describe(name, caller, state, known))
        return originals[name](*args, **kwargs)

    swapped: list[tuple[FunctionType, CodeType]] = []
    for name, function in list(state.items()):
        if isinstance(function, FunctionType) and _is_getter(name, function, module.__name__):
            originals[name] = _twin(function)
            swapped.append((function, function.__code__))
    state[_HOOK] = read
    try:
        for function, _ in swapped:
            function.__code__ = _reporting_code(function.__name__)
        yield trace
    finally:
        for function, code in swapped:
            function.__code__ = code
        del state[_HOOK]


def _is_getter(name: str, function: FunctionType, module: str) -> bool:
    readers = ("get_", "is_", "has_", "model_parallel_is_initialized")
    return name.startswith(readers) and function.__module__ == module


def _twin(function: FunctionType) -> FunctionType:
    """The function as it is now, under its own code, unaffected by what is done to the original."""
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _reporting_code(name: str) -> CodeType:
    source = f"def {name}(*args, **kwargs):\n    return {_HOOK}({name!r}, args, kwargs)\n"
    scope: dict[str, Callable[..., object]] = {}
    exec(compile(source, "<megapg trace>", "exec"), scope)  # names come from parallel_state
    return scope[name].__code__


def _describe(
    name: str,
    caller: FrameType,
    state: Mapping[str, object],
    known: Mapping[str, ProcessGroupCollection],
) -> GlobalRead:
    answered_by = _UNANSWERED
    if state["_TENSOR_MODEL_PARALLEL_GROUP"] is not None:
        answered_by = next(
            (label for label, pg in known.items() if _holds(state, pg)), "other globals"
        )
    return GlobalRead(
        getter=name,
        file=caller.f_code.co_filename,
        line=caller.f_lineno,
        function=caller.f_code.co_qualname,
        field=_field(name),
        answered_by=answered_by,
    )


def _holds(state: Mapping[str, object], pg: ProcessGroupCollection) -> bool:
    return all(
        state[name] is vars(pg).get(field)
        for name, field in (
            ("_TENSOR_MODEL_PARALLEL_GROUP", "tp"),
            ("_PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
            ("_DATA_PARALLEL_GROUP", "dp"),
        )
    )


def _field(getter: str) -> str:
    middle = getter.removeprefix("get_")
    for suffix in sorted(GETTER_SUFFIXES, key=len, reverse=True):
        if middle.removesuffix(suffix) in GETTER_FIELDS:
            return GETTER_FIELDS[middle.removesuffix(suffix)]
    return GETTER_FIELDS.get(middle, "")
