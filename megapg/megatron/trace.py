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
    from types import CodeType, FrameType, ModuleType

    from megapg.collection import ProcessGroupCollection

_HOOK = "__megapg_read__"
_UNANSWERED = "nothing: not initialised"
_installing = threading.Lock()


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
    are seen as well; on exit each getter is exactly what it was. Traces may overlap, and end in
    any order: each records what happens while it runs.

    Args:
        **known: collections by name, to say which of them the globals held at each read.
    """
    module = parallel_state_module()
    mine = _Listener(known)
    with _installing:
        hook = vars(module).get(_HOOK)
        if hook is None:
            hook = _Hook(module)
            hook.install()
        hook.listeners = (*hook.listeners, mine)
    try:
        yield mine.trace
    finally:
        with _installing:
            hook.listeners = tuple(other for other in hook.listeners if other is not mine)
            if not hook.listeners:
                hook.uninstall()


@dataclass(frozen=True, eq=False)
class _Listener:
    """One running trace."""

    known: Mapping[str, ProcessGroupCollection]
    trace: Trace = field(default_factory=Trace)


class _Hook:
    """What the getters report to while at least one trace runs. It lives in ``parallel_state``.

    There is one for all traces: a second one would find the reporting code where the getters' own
    should be, and take that for the original.
    """

    def __init__(self, module: ModuleType) -> None:
        self.listeners: tuple[_Listener, ...] = ()  # replaced, never changed: other threads read it
        self._state = vars(module)
        self._getters = {
            name: function
            for name, function in self._state.items()
            if isinstance(function, FunctionType) and _is_getter(name, function, module.__name__)
        }
        self._originals = {name: _twin(getter) for name, getter in self._getters.items()}

    def __call__(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        caller = sys._getframe(2)
        if caller.f_globals is not self._state:  # a getter that calls a getter is one read
            for listener in self.listeners:
                listener.trace._add(_describe(name, caller, self._state, listener.known))
        return self._originals[name](*args, **kwargs)

    def install(self) -> None:
        self._state[_HOOK] = self
        try:
            for name, getter in self._getters.items():
                getter.__code__ = _reporting_code(name)
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        for name, getter in self._getters.items():
            getter.__code__ = self._originals[name].__code__
        del self._state[_HOOK]


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
