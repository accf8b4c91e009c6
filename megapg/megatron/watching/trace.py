"""Records every read of Megatron's globals, with its place in the source."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from megapg.megatron.core import parallel_state_module
from megapg.megatron.tables import ALWAYS_SET
from megapg.megatron.watching.advice import Replacement, replacement
from megapg.megatron.watching.contradiction import Judge
from megapg.megatron.watching.guard import fields_that_differ
from megapg.megatron.watching.hook import Resolved, listening

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from rich.table import Table

    from megapg.collection import ProcessGroupCollection

_UNANSWERED = "nothing: not initialised"
_OTHER = "other globals"


@dataclass(frozen=True)
class GlobalRead:
    """A place that read a global, with the number of reads.

    Attributes:
        getter: the function of ``parallel_state`` that was called, the private global that was
            read, or ``resolve`` if it fell back to the globals.
        file: source file of the reader.
        line: line number there.
        function: the reading function.
        field: the collection field to use instead; empty if there is none.
        answered_by: name of the collection whose groups the globals held at that moment.
        module: the reading module; for ``resolve``, that of the function that fell back.
        replacement: the expression to write instead; empty if megapg knows none.
        refused: the reason if the guard refuses this read; else empty. See :func:`megapg.guard`.
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
    refused: str = ""
    count: int = 1


class Trace:
    """The recorded reads, complete when the block has ended."""

    def __init__(self) -> None:
        self._sites: dict[tuple[object, ...], _Site] = {}
        # Backward reads from autograd's threads, and a finaliser may read during a read.
        self._lock = threading.RLock()

    @property
    def reads(self) -> tuple[GlobalRead, ...]:
        """Every reading place, by file and line."""
        with self._lock:  # a line may hold the same read twice
            return summed(replace(site.read, count=site.count) for site in self._sites.values())

    @override
    def __repr__(self) -> str:
        reads = self.reads
        return f"<Trace: {sum(each.count for each in reads):,} reads from {len(reads)} places>"

    @override
    def __str__(self) -> str:
        """Return one line for each reading place, the most frequent first."""
        lines = [
            f"  {read.module}:{read.line} ({read.function}) reads {read.getter}, "
            f"{read.count:,} times" + f": write {read.replacement}" * bool(read.replacement)
            for read in sorted(self.reads, key=lambda read: -read.count)
        ]
        return "\n".join([repr(self), *lines])

    def table(self) -> Table:
        """Return the reads as a table for the terminal, the most frequent first."""
        headings = ("place", "function", "reads", "write instead", "answered by", "count")
        table = empty_table("reads of Megatron's globals", headings)
        for read in sorted(self.reads, key=lambda read: -read.count):
            answer = f"{read.answered_by}; refused by the guard" * bool(read.refused)
            what = (read.function, read.getter, read.replacement, answer or read.answered_by)
            table.add_row(f"{read.module}:{read.line}", *what, f"{read.count:,}")
        return table

    def to_json(self) -> str:
        """Return the reads as a JSON list of objects with the attributes of :class:`GlobalRead`."""
        return json.dumps([asdict(read) for read in self.reads], indent=1)


def summed(reads: Iterable[GlobalRead]) -> tuple[GlobalRead, ...]:
    """Return one read for each place, with the total count, by file and line."""
    counts: Counter[GlobalRead] = Counter()
    for read in reads:
        counts[replace(read, count=0)] += read.count
    found = [replace(place, count=count) for place, count in counts.items()]
    return tuple(sorted(found, key=lambda read: (read.file, read.line, read.getter)))


def empty_table(title: str, headings: Sequence[str]) -> Table:
    """Return a table for the terminal, whose last column holds numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", pad_edge=False)
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading == headings[-1] else "left"
        table.add_column(heading, justify=justify, overflow="fold")
    return table


@contextlib.contextmanager
def trace_global_reads(**known: ProcessGroupCollection) -> Iterator[Trace]:
    """Record every read of ``parallel_state`` inside the block, in all threads.

    Recorded are:

    * every call of a getter, also through names that were bound earlier with ``from ... import``;
    * every read of a private global as an attribute of the module
      (``parallel_state._DATA_PARALLEL_GROUP``, or ``from ... import`` of it inside the block). A
      value that was bound before is an ordinary variable, and its use is not recorded;
    * every :func:`~megapg.megatron.resolve` without a collection;
    * every read that :class:`~megapg.megatron.GlobalGroups`, ``from_parallel_state`` and the
      getters of the bridge make for their caller.

    On exit each function and the module are exactly as before. Traces may overlap, and end in any
    order.

    Args:
        **known: collections by name, to report which of them the globals held at each read.
    """
    trace = Trace()
    with listening(_Recorder(trace, known, vars(parallel_state_module()))):
        yield trace


@dataclass
class _Site:
    """One instruction that reads, with the number of its reads."""

    read: GlobalRead
    code: CodeType  # kept, so that its id stays its own
    count: int = 0


class _Recorder:
    """The listener of one trace. A site is described once and then counted."""

    def __init__(
        self, trace: Trace, known: Mapping[str, ProcessGroupCollection], state: Mapping[str, object]
    ) -> None:
        self._trace, self._state, self._judge = trace, state, Judge(frozenset())
        # Enough to distinguish collections: two layouts that share all three share the rest.
        self._known = [
            (label, [(name, vars(pg).get(field)) for name, field in ALWAYS_SET.items()])
            for label, pg in known.items()
        ]

    def resolved(self, answer: Resolved) -> None:
        if answer.explicit is None:
            write = f"pg_collection= in the call of {answer.owner}"
            instead = Replacement(", ".join(answer.needs), write)
            self.read("resolve", {"needs": answer.needs}, answer.caller, instead, answer.module)

    def read(
        self,
        name: str,
        arguments: Mapping[str, object],
        caller: FrameType,
        instead: Replacement | None = None,
        module: str = "",
    ) -> None:
        code, trace = caller.f_code, self._trace
        answered_by = self._answered_by()
        refused = "" if instead else self._refused(name, arguments, caller)
        # Keyed by id: hashing a code object hashes all of its parts.
        place = (id(code), caller.f_lasti, name, answered_by, refused)
        key = (*place, *map(_hashable, arguments.values()))
        with trace._lock:
            site = trace._sites.get(key)
            if site is None:
                instead = instead or replacement(name, arguments)
                read = GlobalRead(
                    getter=name,
                    file=code.co_filename,
                    line=caller.f_lineno,
                    function=code.co_qualname,
                    field=instead.field,
                    answered_by=answered_by,
                    module=module or caller.f_globals.get("__name__", ""),
                    replacement=instead.write,
                    refused=refused,
                )
                site = trace._sites[key] = _Site(read, code)
            site.count += 1

    def _refused(self, name: str, arguments: Mapping[str, object], caller: FrameType) -> str:
        self._judge.fields = fields_that_differ()
        wrong = self._judge.judge(name, arguments, caller) if self._judge.fields else None
        return "" if wrong is None else str(wrong)

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
