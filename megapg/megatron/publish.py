"""Making Megatron's globals answer from a collection, for a while.

Some reads of ``parallel_state`` can't be reached by any argument: the memory buffer, the unfused
cross-entropy, code of the user that has not moved yet. Inside ``with published(pg)`` all of them
see ``pg``; afterwards every global is exactly what it was.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator

from megapg.collection import ProcessGroupCollection
from megapg.megatron.core import parallel_state_module
from megapg.megatron.tables import (
    GROUP_GLOBALS,
    HYBRID_GROUPS,
    MEMORY_BUFFER,
    RANK_GLOBALS,
    VIRTUAL_PIPELINE_RANK,
    VIRTUAL_PIPELINE_SIZE,
)

_STATE = re.compile(r"_[A-Z]")  # how parallel_state spells the variables that hold its state


@contextlib.contextmanager
def published(pg: ProcessGroupCollection) -> Iterator[ProcessGroupCollection]:
    """For the duration of the block every getter of ``parallel_state`` answers from ``pg``.

    Blocks nest; on exit, also after an exception, all of the module's state is what it was. A
    field that ``pg`` lacks is None in the globals, so its getter says "not initialized". The
    virtual pipeline's size and rank come from the layout; a collection of borrowed groups has
    none, and leaves them as they are.

    Raises:
        StaleGroupError: the session behind ``pg`` has ended.
    """
    pg.require(owner="published()")
    state = vars(parallel_state_module())
    before = {name: value for name, value in state.items() if _STATE.match(name)}
    state.update(_answers(pg, before))
    try:
        yield pg
    finally:
        for name in [name for name in state if _STATE.match(name) and name not in before]:
            del state[name]
        state.update(before)


def _answers(pg: ProcessGroupCollection, before: dict[str, object]) -> dict[str, object]:
    # Everything not named below must not answer: the _MPU_ overrides, gloo twins, hybrid groups.
    answers: dict[str, object] = dict.fromkeys(before)
    groups = vars(pg)
    for name, field in GROUP_GLOBALS.items():
        value = groups.get(field)
        answers[name] = list(value) if isinstance(value, tuple) else value
    for name, field in RANK_GLOBALS.items():
        answers[name] = list(pg.ranks(field)) if groups.get(field) is not None else None
    answers[HYBRID_GROUPS] = {}
    answers[MEMORY_BUFFER] = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer()
    if pg.layout is None:  # borrowed groups don't say, so what the globals say stands
        for name in (VIRTUAL_PIPELINE_SIZE, VIRTUAL_PIPELINE_RANK):
            answers[name] = before.get(name)
    elif pg.layout.vpp is not None:
        answers[VIRTUAL_PIPELINE_SIZE] = pg.layout.vpp
        answers[VIRTUAL_PIPELINE_RANK] = 0
    return {name: value for name, value in answers.items() if name in before}
