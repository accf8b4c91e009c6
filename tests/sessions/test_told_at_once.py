"""One rank has bad input: the others get the reason long before their timeout.

Each wait has a timeout of a minute, so a rank that gets no reason waits that long.
"""

import itertools
import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from at_once import at_once

import megapg
from megapg.errors import MegapgError, RendezvousError, SessionError
from megapg.megatron import adopt
from megapg.rendezvous import rendezvous
from megapg.testing import run_distributed

LONG, SOON = 60.0, 30.0  # seconds: timeout of the ranks, and deadline for the error


@contextmanager
def soon(error, match):
    started = time.monotonic()
    with pytest.raises(error, match=match) as caught:
        yield caught
    assert time.monotonic() - started < SOON


def in_step(size):
    """Return a barrier over a separate connection."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    turns = itertools.count()

    def together():
        key, deadline = f"step {next(turns)}", time.monotonic() + SOON
        store.add(key, 1)
        while store.add(key, 0) < size:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return together


def in_another_thread(**arguments):
    """Return the error of ``session()`` in another thread."""
    raised = []

    def call():
        try:
            megapg.session(**arguments)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise raised[0]


WRONG = {
    "timeout": ({"timeout": -1.0}, "timeout=-1.0: give the seconds"),
    "kind of timeout": ({"timeout": "60"}, "timeout='60': give the seconds"),
    "collective_timeout": (
        {"timeout": LONG, "collective_timeout": timedelta(0)},
        "collective_timeout=.*above 0",
    ),
    "backend": ({"timeout": LONG, "backend": "carrier pigeon"}, "backend='carrier pigeon'"),
    "name": ({"timeout": LONG, "name": 5}, "name=5: give the session a name"),
    "no name": ({"timeout": LONG, "name": None}, "name=None: give the session a name"),
    "layout and sizes": (
        {"timeout": LONG, "layout": megapg.ParallelLayout(world_size=2), "tp": 2},
        "give a layout, or the sizes",
    ),
}


def wrong_arguments():
    me = int(os.environ["RANK"])
    together = in_step(2)
    for world_exists in (False, True):
        for culprit in (0, 1):
            for arguments, message in WRONG.values():
                if me == culprit:
                    with soon((MegapgError, ValueError), message):
                        megapg.session(**arguments)
                else:
                    with soon(RendezvousError, message) as caught:
                        megapg.session(timeout=LONG)
                    assert caught.value.missing == (culprit,)
                together()
            if me == culprit:
                with soon(SessionError, "main thread"):
                    in_another_thread(handle_signals=True, timeout=LONG)
            else:
                with soon(RendezvousError, "main thread"):
                    megapg.session(timeout=LONG)
            together()
        if not world_exists:
            dist.init_process_group("gloo")
    with megapg.session(timeout=LONG):  # all call again, without an error
        pass
    dist.destroy_process_group()
    return True


@pytest.mark.smoke
def test_an_argument_that_is_wrong_on_one_rank():
    assert run_distributed(wrong_arguments, 2) == [True] * 2


def wrong_after_a_try_alone():
    """The culprit has one attempt more than the other rank; its error must still count.

    After the error was read once, it must not count again, whichever rank returns first.
    """
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for culprit, later in itertools.product((0, 1), repeat=2):
        name = f"after rank {culprit}, rank {later} comes back later"
        if me == culprit:
            with soon(RendezvousError, f"rank {1 - me} .*never arrived"):
                megapg.session(name=name, timeout=0.5)
            with soon(SessionError, "timeout=-1.0: give the seconds"):
                megapg.session(name=name, timeout=-1.0)
        dist.barrier()
        if me != culprit:
            with soon(RendezvousError, "timeout=-1.0: give the seconds") as caught:
                megapg.session(name=name, timeout=LONG)
            assert caught.value.missing == (culprit,)
        dist.barrier()
        if me == later:
            time.sleep(1.0)  # the other rank may read this rank's last message meanwhile
        with megapg.session(name=name, timeout=LONG):
            pass
    dist.destroy_process_group()
    return True


def test_an_argument_that_is_wrong_on_a_rank_that_had_tried_alone():
    assert run_distributed(wrong_after_a_try_alone, 2) == [True] * 2


def wrong_adoption():
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    if dist.get_rank() == 1:
        with soon(SessionError, "timeout=0: give the seconds"):
            adopt(timeout=0)
    else:
        with soon(RendezvousError, "rank 1 .*timeout=0: give the seconds"):
            adopt(timeout=LONG)
    dist.barrier()  # so that a rank that calls again is not taken for a late rank
    with adopt(timeout=LONG):
        pass
    dist.destroy_process_group()
    return True


def test_an_adoption_that_is_wrong_on_one_rank():
    assert run_distributed(wrong_adoption, 2) == [True] * 2


def two_names():
    dist.init_process_group("gloo")
    me = dist.get_rank()
    for odd in range(4):
        mine = f"actor {odd}" if me == odd else f"critic {odd}"
        with soon(RendezvousError, f"name is .*{mine}") as caught:
            megapg.session(name=mine, timeout=LONG)
        assert f"'actor {odd}'" in str(caught.value) or f"actor {odd} on rank {odd}" in str(
            caught.value
        )
        dist.barrier()
    # Two sessions over parts of the job: a rank that opens the other session first is only late.
    if me < 2:
        with megapg.session(name="left", ranks=(0, 1), timeout=LONG):
            if me == 1:
                with megapg.session(name="middle", ranks=(1, 2), timeout=LONG):
                    pass
    elif me == 2:
        with megapg.session(name="middle", ranks=(1, 2), timeout=LONG):
            pass
    dist.destroy_process_group()
    return True


def test_two_names_for_one_session():
    assert run_distributed(two_names, 4) == [True] * 4


def one_rank_twice(ranks, far, late):
    """Start one process too many, each with the rank given in ``ranks``."""
    if far:  # as on another host, where the process can't be checked
        rendezvous.runs_here = lambda hello: False
    process = int(os.environ["RANK"])
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(ranks[process])
    twin = max(ranks, key=ranks.count)
    if process == late:
        time.sleep(1.0)
    with soon(RendezvousError, f"two processes came as rank {twin}: process") as caught:
        megapg.session(timeout=LONG)
    assert caught.value.missing == (twin,)
    return True


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("ranks", [(0, 1, 1), (0, 0, 1), (0, 2, 2)])
def test_one_rank_as_two_processes(ranks, far):
    with at_once(
        {late: (partial(one_rank_twice, ranks, far, late), 3) for late in range(3)}
    ) as jobs:
        assert [job.result() for job in jobs.values()] == [[True] * 3] * 3


def one_too_many(late):
    """The last process starts when the store of ``run_distributed`` lists all others as open."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    process = int(os.environ["RANK"])
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    if process == 3:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1"
        if late:
            store.wait([f"open {rank}" for rank in range(3)])
    try:
        with megapg.session(timeout=LONG):
            store.set(f"open {process}", "")
            store.wait(["refused"])
    except RendezvousError as error:
        return "refused" if "two processes came as rank 1" in str(error) else str(error)
    finally:
        if process in (1, 3):
            store.set("refused", "")
    return "open"


@pytest.mark.parametrize("late", [False, True])
def test_a_process_too_many(late):
    """If the other ranks have met already, they continue and only the extra process is refused."""
    said = run_distributed(partial(one_too_many, late), 4)
    if late:
        assert said == ["open", "open", "open", "refused"]
    else:
        assert said.count("refused") in (1, 4)
        assert said[0] == said[2]
