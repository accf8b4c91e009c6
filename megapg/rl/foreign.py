"""The sides of a joint group whose processes do not use megapg.

They use SGLang's ``init_custom_process_group``. Many frameworks have copies of this function. It
creates the group in torch under a given name, over a store at a given address.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection

from megapg import torch_private
from megapg.errors import RendezvousError, SessionError
from megapg.rendezvous.store import Store
from megapg.rl.joint_meeting import Invitation, Meeting, Terms
from megapg.rl.sides import Sides

# Seconds between two looks for a foreign rank.
_PAUSE = 0.05


def check_foreign(sides: Sides, side: str, foreign: Collection[str]) -> None:
    """Raise unless these sides can be foreign.

    Raises:
        LayoutError: there is no such side.
        SessionError: it is the side of this process, or comes first.
    """
    for each in foreign:
        sides.ranks(each)
    if side in foreign:
        raise SessionError(f"foreign= has {side!r}, the side of this process.")
    if (first := next(iter(sides.sizes))) in foreign:
        raise SessionError(
            f"side {first!r} comes first and is foreign; its rank 0 would host a store of its own. "
            "List another side first in sizes=."
        )


def admit(terms: Terms, meeting: Meeting) -> tuple[str, Store]:
    """Invite the foreign sides, and wait for their ranks.

    Returns:
        The name of the group in torch, and its keys in the store, both as foreign ranks have them.

    Raises:
        RendezvousError: a foreign rank did not come in time.
    """
    if meeting.leads:  # another name for each attempt: the keys of a failed one may still exist
        meeting.store.set("attempt", secrets.token_hex(4))
    name = f"{terms.name}-{meeting.generation}-{meeting.store.get('attempt').decode()}"
    for side, invite in terms.foreign.items() if meeting.leads else ():
        first = meeting.sides.ranks(side)[0]
        invite(Invitation(*terms.address, first, meeting.sides.total, name, terms.backend))
    store = terms.store.view(name)
    if "gloo" in terms.backend:  # NCCL shows nothing in the store before its first collective
        _wait(terms, meeting, store, name)
    return name, store


def _wait(terms: Terms, meeting: Meeting, store: Store, name: str) -> None:
    waiting = [rank for side in terms.foreign for rank in meeting.sides.ranks(side)]
    deadline = time.monotonic() + terms.timeout
    while True:
        waiting = [r for r in waiting if not store.check([torch_private.key_in_gloo(name, r)])]
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise RendezvousError(
                f"{terms.title}: {meeting.sides.several(waiting)} did not come to "
                f"{terms.store.host.name} within {terms.timeout:g} s, under the group name "
                f"{name!r}. See whether the invitation reached that side, and look at its log.",
                waiting,
            )
        time.sleep(_PAUSE)
