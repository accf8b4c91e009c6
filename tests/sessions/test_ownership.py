"""A session closes only the WORLD and groups that it owns, for every owner and every ending.

The same two real ranks play each row of the table, one row after the other. After each row the test
checks which WORLD exists, and whether WORLD and its groups still work. It also checks torch's
registry, threads and descriptors.
"""

import contextlib
import gc
import itertools
import os
import time
from datetime import timedelta
from typing import NamedTuple

import psutil
import pytest
import torch
import torch.distributed as dist
from asking import me

import megapg
from megapg.collection import LeaseState
from megapg.errors import RendezvousError, TeardownError
from megapg.testing import run_distributed

WORLD_BY = ("the caller", "the session", "another session")
GROUPS_BY = ("the session alone", "the caller too")
ENDINGS = ("success", "exception", "re-init", "destroyed")
INSIDE = ("nothing", "a nested session")


class Row(NamedTuple):
    world_by: str
    groups_by: str
    ending: str
    inside: str


TABLE = [Row(*row) for row in itertools.product(WORLD_BY, GROUPS_BY, ENDINGS, INSIDE)]


class BodyError(Exception):
    """An error of the session's body on one rank."""


def works(group=None):
    total = torch.tensor([me() + 1.0])
    dist.all_reduce(total, group=group)
    return total.item() == 3.0


def registry():
    return dist.distributed_c10d._world.pg_map


def made_by_the_caller(store, name):
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=me(),
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    return dist.group.WORLD


def a_group_of_the_caller(row):
    return dist.new_group([0, 1]) if row.groups_by == "the caller too" else None


def body(row, session, store, name):
    """Run the user's code inside the session; return the WORLD and the user's group at its end."""
    theirs = a_group_of_the_caller(row)
    assert theirs is None or works(theirs)
    assert works()
    assert works(session.groups.pp)
    if row.ending in ("re-init", "destroyed"):
        works()  # meets the other rank: WORLD must not go while that rank uses it
        dist.destroy_process_group()
        theirs = None
    if row.ending == "re-init":
        made_by_the_caller(store, f"{name}, again")
        theirs = a_group_of_the_caller(row)
    return dist.group.WORLD, theirs


def nested(row):
    if row.inside == "nothing":
        return contextlib.nullcontext()
    return megapg.session(tp=2, name="nested", timeout=60)


def play(row, store, name):
    outer = None
    if row.world_by == "the caller":
        made_by_the_caller(store, name)
    if row.world_by == "another session":
        outer = megapg.session(tp=2, name="outer", timeout=60)
    world = dist.group.WORLD
    session = megapg.session(pp=2, timeout=60)
    assert session.owns_world == (row.world_by == "the session")
    lease = session.groups.lease
    beside = a_group_of_the_caller(row)  # the body creates another one later
    failing = row.ending == "exception" and me() == 1
    expected = contextlib.nullcontext()
    if row.ending == "exception":  # the other rank gets the error when it closes
        error = BodyError if failing else RendezvousError
        expected = pytest.raises(error, match="" if failing else "rank 1: BodyError")
    with expected, session, nested(row):
        world_at_the_end, theirs = body(row, session, store, name)
        if failing:
            raise BodyError
    assert session.closed
    assert lease.state is LeaseState.CLOSED
    del session

    # Check which groups exist now.
    gone = row.world_by == "the session" and row.ending in ("success", "exception")
    if row.ending == "re-init":
        world = world_at_the_end
    if gone or row.ending == "destroyed":
        world = None
    assert dist.is_initialized() == (world is not None)
    assert dist.group.WORLD is world
    kept = 0
    if world is not None:
        assert works()
        groups = [group for group in (beside, theirs) if group in registry()]
        expected = {"re-init": [theirs]}.get(row.ending, [beside, theirs])
        assert groups == (expected if row.groups_by == "the caller too" else [])
        assert all(map(works, groups))
        kept = 1 + len(groups)
    if outer is not None:
        if row.ending in ("success", "exception"):
            assert outer.owns_world
            assert works(outer.groups.tp)
            kept += len(outer.describe()["communicators"])
        else:
            assert not outer.owns_world
    assert len(registry()) == kept, (len(registry()), kept)

    # A fresh session works and restores the previous state. Every session on a destroyed WORLD is
    # closed by then.
    fresh_one_works(world, kept)
    if outer is not None:
        assert outer.closed == (row.ending in ("re-init", "destroyed"))
        outer.close()
        world, kept = (world, kept) if row.ending == "re-init" else (None, 0)
        fresh_one_works(world, kept)
    if dist.is_initialized():
        assert works()
        dist.destroy_process_group()
    assert len(registry()) == 0


def fresh_one_works(world, kept):
    with megapg.session(tp=2, timeout=60) as again:
        assert works(again.groups.tp)
    assert dist.group.WORLD is world
    assert len(registry()) == kept


def usage(limit=(0, 0)):
    """Return the threads and descriptors, once within the limit or unchanged."""
    gc.collect()
    process = psutil.Process()
    until = time.monotonic() + 10
    before = None
    while True:
        now = process.num_threads(), process.num_fds()
        within = now[0] <= limit[0] and now[1] <= limit[1]
        if within or now == before or time.monotonic() > until:
            return now
        before = now
        time.sleep(0.1)


def play_all():
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for number, row in enumerate(TABLE[:2]):  # opens the things that stay open by design
        play(row, store, f"first {number}")
    with megapg.session(timeout=60):
        pass
    gc.collect()
    gc.freeze()  # keeps existing objects out of later collections, which makes them fast
    limit = usage()
    left = {}
    for number, row in enumerate(TABLE):
        try:
            play(row, store, str(number))
        except BaseException as error:
            raise AssertionError(f"{row}: {error!r}") from error
        left[row] = usage(limit)
    return limit, left


def test_every_row_of_the_ownership_table():
    assert len(TABLE) == 48
    for (threads, descriptors), left in run_distributed(play_all, 2, deadline=200):
        assert list(left) == TABLE
        for row, (threads_left, descriptors_left) in left.items():
            assert threads_left <= threads, (row, threads_left, threads)
            assert descriptors_left <= descriptors, (row, descriptors_left, descriptors)


def test_a_listener_that_fails_keeps_nothing_open(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    session = megapg.session()
    session.groups.lease.at_end.append(lambda: 1 / 0)
    with pytest.raises(TeardownError, match="ZeroDivisionError"):
        session.close()
    assert not dist.is_initialized()
    assert len(registry()) == 0
    session.close()
    assert session.closed
