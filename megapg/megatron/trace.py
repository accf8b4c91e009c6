"""Who still reads Megatron's globals: every read, with its place in the source."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from megapg.megatron.core import parallel_state_module
from megapg.megatron.hook import listening
from megapg.megatron.replacements import Replacement, replacement

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from rich.table import Table

    from megapg.collection import ProcessGroupCollection

_UNANSWERED = "nothing: not initialised"
_OTHER = "other globals"

# Enough to tell collections apart: two layouts that share all three share the rest.
_TELLING = (
    ("_TENSOR_MODEL_PARALLEL_GROUP", "tp"),
    ("_PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
    ("_DATA_PARALLEL_GROUP", "dp"),
)


@dataclass(frozen=True)
class GlobalRead:
    """One place that read a global, and how often.

    Attributes:
        getter: the function of ``parallel_state`` that was called, the private global that was
            read, or ``resolve`` where that fell back to the globals.
        file: source file of the reader.
        line: line number there.
        function: the reading function.
        field: the collection field that would have served; empty where there is none.
        answered_by: name of the collection whose groups the globals held at that moment.
        module: the reading module; for ``resolve``, that of the function that fell back.
        replacement: what to write there instead; empty where megapg knows nothing.
        count: number of reads.
    """

    getter: str
    file: str
    line: int
    function: str
    field: str
    answered_by: str
    module: str = ""
    replacement: str = ""
    count: int = 1


class Trace:
    """The reads seen so far; complete when the block has ended."""

    def __init__(self) -> None:
        self._sites: dict[tuple[object, ...], _Site] = {}
        self._lock = threading.Lock()  # backward reads from autograd's threads

    @property
    def reads(self) -> tuple[GlobalRead, ...]:
        """Every place, by file and line."""
        counts: dict[GlobalRead, int] = {}
        with self._lock:
            for site in self._sites.values():  # a line may hold the same read twice
                counts[site.read] = counts.get(site.read, 0) + site.count
        found = [replace(read, count=count) for read, count in counts.items()]
        return tuple(sorted(found, key=lambda read: (read.file, read.line, read.getter)))

    def table(self) -> Table:
        """The reads for the terminal, the most frequent first."""
        from rich.table import Table

        table = Table(title="reads of Megatron's globals", title_justify="left", pad_edge=False)
        for heading in ("place", "function", "reads", "write instead", "answered by", "count"):
            table.add_column(
                heading, justify="right" if heading == "count" else "left", overflow="fold"
            )
        for read in sorted(self.reads, key=lambda read: -read.count):
            place = f"{read.module}:{read.line}"
            table.add_row(
                place,
                read.function,
                read.getter,
                read.replacement,
                read.answered_by,
                f"{read.count:,}",
            )
        return table

    def to_json(self) -> str:
        """The reads as a JSON list of objects with the attributes of :class:`GlobalRead`."""
        return json.dumps([asdict(read) for read in self.reads], indent=1)


@contextlib.contextmanager
def trace_global_reads(**known: ProcessGroupCollection) -> Iterator[Trace]:
    """Record every read of ``parallel_state`` while the block runs, in all threads.

    That is every call of a getter, also through names bound by ``from ... import`` long before;
    every private global read off the module (``parallel_state._DATA_PARALLEL_GROUP``, and
    ``from ... import`` of one while the block runs: what was bound before is an ordinary variable
    by now, and not seen); every :func:`~megapg.megatron.resolve` that was passed nothing; and what
    :class:`~megapg.megatron.GlobalGroups`, ``from_parallel_state`` and the getters of the bridge
    read for their caller. On exit each function and the module are exactly what they were. Traces
    may overlap, and end in any order: each records what happens while it runs.

    Args:
        **known: collections by name, to say which of them the globals held at each read.
    """
    trace = Trace()
    with listening(_Recorder(trace, known, vars(parallel_state_module()))):
        yield trace


@dataclass
class _Site:
    """One instruction that reads, and how often it did."""

    read: GlobalRead
    code: CodeType  # held, so that its id stays its own
    count: int = 0


class _Recorder:
    """Listens for one trace. What a site is gets worked out once; after that it is counted."""

    def __init__(
        self,
        trace: Trace,
        known: Mapping[str, ProcessGroupCollection],
        state: Mapping[str, object],
    ) -> None:
        self._trace, self._state = trace, state
        self._known = [
            (label, [(name, vars(pg).get(field)) for name, field in _TELLING])
            for label, pg in known.items()
        ]

    def read(self, name: str, arguments: Mapping[str, object], caller: FrameType) -> None:
        self._count(name, arguments, caller, None)

    def resolved(
        self,
        owner: str,
        explicit: ProcessGroupCollection | None,
        needs: tuple[str, ...],
        caller: FrameType,
        module: str,
    ) -> None:
        if explicit is None:
            instead = Replacement(", ".join(needs), f"pg_collection= in the call of {owner}")
            self._count("resolve", {"needs": needs}, caller, instead, module)

    def _count(
        self,
        name: str,
        arguments: Mapping[str, object],
        caller: FrameType,
        instead: Replacement | None,
        module: str = "",
    ) -> None:
        code, trace = caller.f_code, self._trace
        answered_by = self._answered_by()
        # By identity: to hash a code object is to hash all of its parts.
        key = (id(code), caller.f_lasti, name, answered_by, *map(_hashable, arguments.values()))
        with trace._lock:
            site = trace._sites.get(key)
            if site is None:
                instead = instead or replacement(name, arguments)
                site = _Site(_describe(name, caller, instead, answered_by, module), code)
                trace._sites[key] = site
            site.count += 1

    def _answered_by(self) -> str:
        state = self._state
        if state["_TENSOR_MODEL_PARALLEL_GROUP"] is None:
            return _UNANSWERED
        for label, groups in self._known:
            if all(state[name] is group for name, group in groups):
                return label
        return _OTHER


def _hashable(argument: object) -> object:
    try:
        hash(argument)
    except TypeError:
        return repr(argument)
    return argument


def _describe(
    name: str, caller: FrameType, instead: Replacement, answered_by: str, module: str
) -> GlobalRead:
    return GlobalRead(
        getter=name,
        file=caller.f_code.co_filename,
        line=caller.f_lineno,
        function=caller.f_code.co_qualname,
        field=instead.field,
        answered_by=answered_by,
        module=module or caller.f_globals.get("__name__", ""),
        replacement=instead.write,
    )
