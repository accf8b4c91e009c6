"""Explains which group a session lacks when a getter of ``parallel_state`` fails."""

from __future__ import annotations

import traceback
from types import ModuleType

from megapg.collection import Lease, LeaseState
from megapg.communicators.needed import ALL_GATHER_FIELDS, COMPANION
from megapg.megatron.tables import GETTERS
from megapg.ownership.hints import note
from megapg.upstream.signatures import SIGNATURES


def explain(error: AssertionError, module: ModuleType, lease: Lease) -> None:
    """Add to Megatron's error the argument of ``session()`` that makes the missing group.

    Without such an argument, the note says whose groups are published.
    """
    frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    if frame.f_globals is not vars(module) or lease.state is not LeaseState.LIVE:
        return
    asked = [
        (len(getters.flags), field)
        for field, getters in GETTERS.items()
        if getters.group == frame.f_code.co_name
        and all(frame.f_locals.get(name) == value for name, value in getters.flags.items())
    ]
    _, field = max(asked, default=(0, ""))
    base = field.removeprefix(COMPANION)
    if field.startswith(COMPANION):
        note(
            error,
            f"{lease.owner} has no gloo companion of {base}: open it with what "
            "megapg.megatron.session_from_args(args) takes from Megatron's arguments, or with "
            f"gloo=({base!r},), to which it may ask for more; --disable-gloo-process-groups does "
            "without.",
        )
    elif field in ALL_GATHER_FIELDS:
        note(error, f"{lease.owner} has no {field}: open it with all_gather_groups=True.")
    elif frame.f_code.co_name not in SIGNATURES:
        note(
            error,
            f"{lease.owner} sets nothing for {frame.f_code.co_name}, which none of NVIDIA's cores "
            "has: set in parallel_state what it reads, once the groups are published.",
        )
    else:
        note(error, f"{lease.owner} is published here. This rank has no such group in it.")
