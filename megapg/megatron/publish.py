"""Makes ``parallel_state`` return the groups of a collection inside a block.

Megatron-core reads its globals in places that no argument can reach (the memory buffer, the unfused
cross entropy, ...), and so does user code that is not migrated. Inside ``with published(pg)`` all
of them see ``pg``. Afterwards every global is exactly as before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, NoReturn, cast

from megapg.collection import (
    Lease,
    LeaseState,
    ProcessGroup,
    ProcessGroupCollection,
    groups_behind,
)
from megapg.errors import ForeignGroupError, PublishedError, UnsupportedOptionError
from megapg.layout import Field
from megapg.megatron import missing
from megapg.megatron.core import core_version, parallel_state_module
from megapg.megatron.getters.memory import owners_buffer, shares_globals_buffer
from megapg.megatron.marks import PUBLISHED
from megapg.megatron.tables import (
    GLOO_GLOBALS,
    GROUP_LIST,
    HYBRID_GROUPS,
    MEMORY_BUFFER,
    OWNERS_CALLS,
    VIRTUAL_PIPELINE_RANK,
    VIRTUAL_PIPELINE_SIZE,
    group_globals,
)
from megapg.megatron.watching.changes import settle
from megapg.megatron.watching.replaced_code import calling_instead
from megapg.megatron.watching.stack import Running, running
from megapg.upstream.mapping import RANK_GLOBALS

if TYPE_CHECKING:
    from types import CodeType, ModuleType

_STATE = re.compile(rf"_[A-Z]|{GROUP_LIST}$")  # the names of parallel_state's variables


@contextlib.contextmanager
def published(pg: ProcessGroupCollection) -> Iterator[ProcessGroupCollection]:
    """Make every getter of ``parallel_state`` return the groups of ``pg`` inside the block.

    This holds in all threads of the process, and so in backward passes. Blocks nest, and the
    innermost one counts. On exit, also after an exception, the module's state is exactly as before,
    even if ``set_*`` was called meanwhile.

    A field that ``pg`` lacks is None in the globals, so its getter raises "not initialized". The
    virtual pipeline's size and rank come from the layout. A collection of borrowed groups has no
    layout, and leaves them unchanged. The memory buffer is
    :func:`~megapg.megatron.getters.memory_buffer` of ``pg``, the same in every block. Clearing it
    clears the buffer that Megatron-core's layers use.

    The functions that set and end the globals' groups (``initialize_*``, ``destroy_*``) raise
    inside, because the groups are their session's. If the session closes inside, the getters raise
    "not initialized" from then on. If it recreates its groups, they return the new ones.

    ``create_group`` and its callers (``create_all_gather_groups``) make torch groups inside, on
    every rank of WORLD, for the caller to use. They end when the session closes. They stay if the
    session recreates its own groups.

    Megatron-core's random streams (``get_cuda_rng_tracker()``) are not in ``parallel_state``. Two
    models that take turns in one process must swap its states with the groups.

    Args:
        pg: the groups, of any layout, whatever ``parallel_state`` holds.

    Raises:
        ForeignGroupError: ``pg`` is no collection of megapg's.
        StaleGroupError: the session of ``pg`` has ended.
        PublishedError: another thread is inside such a block.
        UnsupportedOptionError: weights are sharded (``gtp_remat``), and this core has no such
            groups, or also has context parallelism.
    """
    if not isinstance(pg, ProcessGroupCollection):
        raise ForeignGroupError(
            f"published() was given {pg!r}; it takes a ProcessGroupCollection: session.groups, or "
            "megapg.from_megatron(...) of the core's own."
        )
    core_version()  # the globals of older versions were never compared with a layout's groups
    pg.require(owner="published()")
    module = parallel_state_module()
    _check_globals_for(pg, module)
    # setdefault: two threads may come at once, and one of them must find the other's.
    publishing: _Publishing = vars(module).setdefault(
        PUBLISHED, _Publishing(module, pg.lease.owner)
    )
    block = publishing.open(pg)
    # The block must not keep groups alive that their session has replaced meanwhile.
    passed = [pg]
    del pg
    try:
        yield passed.pop()
    except AssertionError as error:  # a getter of the core raises it if there is no group
        missing.explain(error, module, block.lease)
        raise
    finally:
        publishing.close(block)


def _check_globals_for(pg: ProcessGroupCollection, module: ModuleType) -> None:
    layout = pg.layout
    if layout is None or layout.gtp_remat == layout.expt_gtp_remat == 1:
        return
    sizes = f"gtp_remat={layout.gtp_remat}, expt_gtp_remat={layout.expt_gtp_remat}"
    if not hasattr(module, "get_gtp_weight_remat_group"):
        raise UnsupportedOptionError(
            f"published(): {sizes}, and this Megatron-core shards no weights; 0.19 is the first."
        )
    if "" in group_globals(layout).values():
        raise UnsupportedOptionError(
            f"published(): {sizes} with cp={layout.cp}: Megatron's globals hold the ranks of dp "
            "and gtp_remat as one group then, which no field of a collection does. Pass the "
            "collection to the model instead."
        )


def is_published(module: ModuleType) -> bool:
    """True if the globals of ``parallel_state`` show a published collection at the moment."""
    return PUBLISHED in vars(module)


def hidden_by_published(state: Mapping[str, object]) -> Mapping[str, object]:
    """Return the globals without the values that ``published()`` blocks show.

    Args:
        state: the namespace of ``parallel_state``.
    """
    publishing = cast("_Publishing | None", state.get(PUBLISHED))
    return state if publishing is None else publishing.hidden()


def innermost(state: Mapping[str, object]) -> tuple[str, Running] | None:
    """Return the owner of the groups that ``published()`` shows, and the frames that entered it.

    None outside of such blocks.
    """
    publishing = cast("_Publishing | None", state.get(PUBLISHED))
    return None if publishing is None else publishing.shown


@dataclass(eq=False)
class _Block:
    """One ``with published(pg)`` that has been entered."""

    lease: Lease
    before: dict[str, object]
    numbers: dict[str, int]  # values that ``set_*`` had set when the groups ended
    follow: Callable[[ProcessGroupCollection], None] | None = None
    note: Callable[[], None] | None = None
    listed: int = sys.maxsize  # length of Megatron's list of all groups after publishing
    left: bool = False
    running: Running = dataclasses.field(default_factory=running)


class _Publishing:
    """The open blocks of one thread, innermost last. At most one exists; it is stored in the
    module.

    Blocks may be left in any order. A value that a block has replaced is restored when the blocks
    inside it are left.
    """

    def __init__(self, module: ModuleType, first: str) -> None:
        self._state = vars(module)
        self._module = module
        self._first = first
        # the owner of the shown groups, and the frames that entered their block
        self.shown: tuple[str, Running] | None = None
        self._thread = threading.current_thread()
        self._blocks: list[_Block] = []
        self._codes: list[tuple[FunctionType, CodeType]] = []

    def open(self, pg: ProcessGroupCollection) -> _Block:
        here = threading.current_thread()
        if here is not self._thread:
            raise PublishedError(
                f"published() in thread {here.name!r}: thread {self._thread.name!r} has published "
                f"the groups of {self._first} already, and parallel_state is one for the whole "
                "process. Publish in one thread at a time; what runs in the others takes its "
                "groups as arguments (pg_collection=...)."
            )
        before = _variables(self._state)
        block = _Block(pg.lease, before, {})
        self._blocks.append(block)
        try:
            self._show(block, _answers(pg, before), self._state)
            self._listen(block)
            self.shown = block.lease.owner, block.running
            if not self._codes:
                self._refuse_owners_calls()
        except BaseException:
            self.close(block)
            raise
        return block

    def close(self, block: _Block) -> None:
        block.left = True
        while self._blocks and self._blocks[-1].left:
            self._leave(self._blocks.pop())
        last = self._blocks[-1] if self._blocks else None
        self.shown = None if last is None else (last.lease.owner, last.running)
        if last is None:
            for function, code in reversed(self._codes):
                function.__code__ = code
            del self._state[PUBLISHED]
            settle(self._module)

    def hidden(self) -> Mapping[str, object]:
        """Return the globals without the values that the blocks show."""
        return self._blocks[0].before if self._blocks else self._state

    def _show(self, block: _Block, answers: Mapping[str, object], where: dict[str, object]) -> None:
        where.update(answers)
        block.listed = len(_groups_listed(where))

    def _note_made(self, block: _Block, answers: Mapping[str, object]) -> None:
        """Add groups that Megatron's functions made in the block to those that the session ends."""
        block.lease.extra_groups += filter(None, _groups_listed(answers)[block.listed :])
        block.listed = 1  # a list that is made again begins with WORLD

    def _note_shown(self, block: _Block) -> None:
        """Note groups made while the session was suspended or lost. Called as it closes."""
        answers = self._answers_of(block)
        self._note_made(block, answers)
        if GROUP_LIST in answers:
            answers[GROUP_LIST] = None  # no dead group is returned

    def _leave(self, block: _Block) -> None:
        self._note_made(block, self._state)
        for name in [name for name in _variables(self._state) if name not in block.before]:
            del self._state[name]
        self._state.update(block.before)
        self._listen_no_more(block)

    def _listen(self, block: _Block) -> None:
        block.follow = partial(self._follow, block)
        block.note = partial(self._note_shown, block)
        block.lease.at_end.append(self._hide_ended)
        block.lease.find_extra_groups.append(block.note)
        block.lease.at_succession.append(block.follow)

    def _listen_no_more(self, block: _Block) -> None:
        if block.follow is not None and block.note is not None:
            block.lease.at_end.remove(self._hide_ended)
            block.lease.find_extra_groups.remove(block.note)
            block.lease.at_succession.remove(block.follow)
            block.follow = block.note = None

    def _hide_ended(self) -> None:
        """Hide the groups of ended sessions. A dead group must not be returned by a getter."""
        for block in self._blocks:
            if block.lease.state in (LeaseState.CLOSED, LeaseState.FAILED):
                answers = self._answers_of(block)
                self._note_made(block, answers)
                held = _variables(answers)
                block.numbers |= {name: n for name, n in held.items() if isinstance(n, int)}
                answers.update({**dict.fromkeys(held), HYBRID_GROUPS: {}})

    def _follow(self, block: _Block, successor: ProcessGroupCollection) -> None:
        """Show the new groups of a session. The layout is the same, so values of ``set_*`` stay
        right.
        """
        self._listen_no_more(block)
        block.lease = successor.lease
        shown = self._answers_of(block)
        self._note_made(block, shown)
        self._show(block, {**_answers(successor, block.before), **block.numbers}, shown)
        block.numbers.clear()
        self._listen(block)

    def _answers_of(self, block: _Block) -> dict[str, object]:
        """Return where the block's values are: in the module, or saved by the block inside it."""
        inner = self._blocks[self._blocks.index(block) + 1 :]
        return inner[0].before if inner else self._state

    def _refuse_owners_calls(self) -> None:
        """Make the functions themselves raise, so that names bound earlier raise too."""
        for name, value in list(self._state.items()):
            if name.startswith(tuple(OWNERS_CALLS)) and callable(value):
                function = inspect.unwrap(value)  # a user's wrapper may stay
                if (
                    isinstance(function, FunctionType)
                    and function.__module__ == self._module.__name__
                ):
                    code = function.__code__
                    if not code.co_freevars:  # not a wrapper that hides its function
                        self._codes.append((function, code))
                        run = partial(_refuse, function.__name__)
                        function.__code__ = calling_instead(function, run)


def _variables(state: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in dict(state).items() if _STATE.match(name)}


def _groups_listed(answers: Mapping[str, object]) -> list[ProcessGroup | None]:
    """Return all groups that Megatron lists, None for WORLD. A fork may have no such list."""
    return cast("list[ProcessGroup | None] | None", answers.get(GROUP_LIST)) or []


def _refuse(name: str, arguments: object) -> NoReturn:
    """Raise PublishedError for a call of the function ``name`` of ``parallel_state``."""
    advice = next(text for prefix, text in OWNERS_CALLS.items() if name.startswith(prefix))
    raise PublishedError(
        f"parallel_state.{name}() inside published(): the globals hold groups that belong to "
        f"their session. {advice}"
    )


def _answers(pg: ProcessGroupCollection, before: dict[str, object]) -> dict[str, object]:
    # All other names must not answer: the _MPU_ overrides, the symmetric buffer, ...
    answers: dict[str, object] = dict.fromkeys(before)
    groups = {**vars(pg), **pg.extras}
    for name, field in {**group_globals(pg.layout), **GLOO_GLOBALS}.items():
        value = groups.get(field)
        answers[name] = list(value) if isinstance(value, tuple) else value
    for name, field in RANK_GLOBALS.items():
        if groups.get(field) is not None:
            answers[name] = _ranks(pg, cast("Field", field), before.get(name))
    hybrid = [name for name in pg.extras if name.startswith("hybrid.")]
    answers[HYBRID_GROUPS] = {int(name.removeprefix("hybrid.")): groups[name] for name in hybrid}
    every = [group for field in pg.present() for group in groups_behind(pg, field)]
    every += [*pg.extras.values(), *pg.lease.extra_groups]
    answers[GROUP_LIST] = [None, *dict.fromkeys(every)]
    shared = before.get(MEMORY_BUFFER) if shares_globals_buffer(pg) else None
    answers[MEMORY_BUFFER] = owners_buffer(pg) if shared is None else shared
    if pg.layout is None:  # borrowed groups have none, so the globals' values stay
        for name in (VIRTUAL_PIPELINE_SIZE, VIRTUAL_PIPELINE_RANK):
            answers[name] = before.get(name)
    elif pg.layout.vpp is not None:
        answers[VIRTUAL_PIPELINE_SIZE] = pg.layout.vpp
        answers[VIRTUAL_PIPELINE_RANK] = 0
    return {name: value for name, value in answers.items() if name in before}


def _ranks(pg: ProcessGroupCollection, field: Field, before: object) -> list[int]:
    """Return the ranks as Megatron lists them: embedding ranks in the order of their choice."""
    ranks = list(pg.ranks(field))
    if pg.layout is None:  # a group has no such order; the globals may still have it
        return [*before] if isinstance(before, list) and sorted(before) == sorted(ranks) else ranks
    if field == "embd":
        return list(pg.layout.embedding_ranks(list(pg.ranks("pp"))))
    if field == "pos_embd":
        return list(pg.layout.position_embedding_ranks(list(pg.ranks("pp"))))
    return ranks
