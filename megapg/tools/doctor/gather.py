"""Gathers the ranks' accounts at rank 0, over the store. No process group is made."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megapg.errors import RendezvousError
from megapg.launch import Launch
from megapg.tools.doctor.account import Account
from megapg.tools.doctor.across import Gathering

if TYPE_CHECKING:
    from megapg.rendezvous.store import Store

_GRACE = 10.0  # seconds that ranks wait for each other beyond the timeout


def hold(
    launch: Launch, account: Account, timeout: float, judge: Callable[[Gathering], int]
) -> int:
    """Gather the accounts of all ranks, and call ``judge`` with them on rank 0.

    ``judge`` returns the exit code, which is the same on every rank that came.

    Raises:
        RendezvousError: this is not rank 0, and rank 0 can't be reached or does not answer.
        ImportError: this is not rank 0, and torch can't be imported.
    """
    if launch.world_size == 1:
        return judge(Gathering(launch, (account,)))
    others = [rank for rank in range(launch.world_size) if rank != launch.rank]
    try:
        from megapg.rendezvous.job_store import job_store

        store = job_store(launch, timeout).view("doctor")
    except (ImportError, RendezvousError) as error:
        if launch.rank != 0:
            raise
        return judge(Gathering(launch, (account,), tuple(others), str(error)))
    with store.until(time.monotonic() + timeout + _GRACE, f"rank {launch.rank}"):
        if launch.rank != 0:
            return _tell_rank_0(store, launch, account, timeout)
        gathering = _gather(store, launch, account, others, timeout)
        came = [rank for rank in others if rank not in gathering.missing]
        code = judge(gathering)
        with contextlib.suppress(RendezvousError):  # the others get an error of their own
            store.set("verdict", str(code))
            # This process may host the store, so it stays until the others have read the verdict.
            _those_with(store, "heard", came, _GRACE)
        return code


def _gather(
    store: Store, launch: Launch, account: Account, others: Sequence[int], timeout: float
) -> Gathering:
    accounts, problem = [account], ""
    try:
        for rank in _those_with(store, "account", others, timeout):
            accounts.append(Account.from_json(store.get(f"account/{rank}")))
    except RendezvousError as error:  # rank 0 reports the accounts it has
        problem = str(error)
    came = [each.rank for each in accounts]
    missing = tuple(rank for rank in others if rank not in came)
    return Gathering(launch, tuple(accounts), missing, problem)


def _tell_rank_0(store: Store, launch: Launch, account: Account, timeout: float) -> int:
    store.set(f"account/{launch.rank}", account.to_json())
    patience = timeout + _GRACE
    # In large jobs every rank polls less often, to spare the store.
    if not _until(lambda: store.check(["verdict"]), patience, 0.05 + launch.world_size / 5000):
        raise RendezvousError(
            f"rank 0 did not answer rank {launch.rank} on {account.host} within {patience:g} s: "
            "look at its output.",
            (0,),
        )
    code = int(store.get("verdict"))
    store.set(f"heard/{launch.rank}", "")
    return code


def _those_with(store: Store, key: str, ranks: Sequence[int], timeout: float) -> list[int]:
    """Return the ranks that have set their key, when all have or the timeout has passed."""
    keys = {rank: f"{key}/{rank}" for rank in ranks}
    # One query for all of them; separate ones only at the end.
    if not keys or _until(lambda: store.check(list(keys.values())), timeout):
        return list(keys)
    return [rank for rank, name in keys.items() if store.check([name])]


def _until(done: Callable[[], bool], timeout: float, pause: float = 0.05) -> bool:
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True
