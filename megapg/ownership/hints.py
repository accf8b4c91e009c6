"""Notes on errors of Megatron-core and torch for which a step of megapg's is missing."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

_BEGIN = "megapg: "
# Text of the error; the module that raises it; the note. {open} names the open owners.
_HINTS = (
    (
        r"not initialized|not been initialized",
        "megatron.core.parallel_state",
        "Megatron's globals hold no groups. {open}: run this inside `with megapg.published(pg):`"
        ", where pg is the collection of the model. Code that takes pg_collection= needs no globals"
        ": pass pg there.",
    ),
    (
        r"cuda rng state (model|expert|data)-parallel-rng is not added",
        "",
        "Megatron-core has no random streams yet: call `megapg.seed_all(seed, pg)` before you "
        "build the model.",
    ),
    (
        r"<(ProcessGroupCollection|Session|JointGroup)\b|ProcessGroupCollection\.(size|rank)\(\)",
        "torch.distributed",
        "torch takes one process group here, not an object that holds groups. Pass a field: "
        "group=pg.tp, group=session.groups.tp, or group=joint.group.",
    ),
)


def has_note(error: BaseException) -> bool:
    """True if megapg has explained this error already."""
    return any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ()))


def note(error: BaseException, text: str) -> None:
    """Add a note to an error that megapg has not explained yet."""
    if not has_note(error):
        error.add_note(_BEGIN + text)


def explain(error: BaseException, titles: Sequence[str]) -> None:
    """Add the missing step to an error, given the titles of the owners that are open."""
    if not titles or has_note(error):
        return
    are = f"{' and '.join(titles)} {'is' if len(titles) == 1 else 'are'} open"
    for pattern, module, text in _HINTS:
        if re.search(pattern, str(error)) and _raised_in(error).startswith(module):
            note(error, text.format(open=are))


def _raised_in(error: BaseException) -> str:
    """Return the name of the module that raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""
