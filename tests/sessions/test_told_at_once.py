"""One rank has bad input: the others get the reason long before their timeout.

Each wait has a timeout of a minute, so a rank that gets no reason waits that long.
"""

import itertools
import os
import re
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

import megapg
from megapg import CommunicatorOptions
from megapg.errors import MegapgError, RendezvousError, SessionError
from megapg.megatron import adopt, parallel_state
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


MINUTE = timedelta(minutes=1)
WRONG = [
    ({"timeout": -1}, "timeout=-1: give the seconds to wait, a finite number above 0"),
    ({"timeout": "60"}, "timeout='60': give the seconds"),
    ({"collective_timeout": 600}, "collective_timeout=600: give a datetime.timedelta"),
    ({"collective_timeout": timedelta(0)}, "give a datetime.timedelta above 0"),
    ({"collective_timeout": {"pp": 5}}, "collective_timeout: pp is 5: give a datetime.timedelta"),
    ({"collective_timeout": {"tensor": MINUTE}}, "'tensor' is no field of this session"),
    ({"collective_timeout": {"dp_cp_ag": MINUTE}}, "that takes all_gather_groups=True"),
    ({"collective_timeout": {"gloo.dp": MINUTE}}, "'gloo.dp' is no field of this session"),
    ({"backend": "carrier pigeon"}, "backend='carrier pigeon'"),
    ({"name": 5}, "name=5: give the session a name"),
    ({"name": None}, "name=None: give the session a name"),
    ({"name": ""}, "name='': give the session a name"),
    ({"gloo": "dp_cp"}, "gloo='dp_cp': give the fields in a tuple, ('dp_cp',)"),
    ({"dedicated": "tp"}, "dedicated='tp': give the fields in a tuple, ('tp',)"),
    ({"dedicated": ("tensor",)}, "'tensor' is no field"),
    ({"dedicated": ("dp_cp_ag",)}, "takes all_gather_groups=True"),
    ({"options": {"dp_cp": {"max_ctas": 8}}}, "give megapg.CommunicatorOptions(max_ctas=8)"),
    ({"options": {"tp": CommunicatorOptions(max_ctas=8)}}, "tp: max_ctas=8 are NCCL settings"),
    ({"tensor_model_parallel_size": 2}, "session() has no tensor_model_parallel_size; the sizes"),
    ({"tp": 3}, "does not divide by tp=3"),
    ({"layout": megapg.ParallelLayout(world_size=2), "tp": 2}, "give a layout, or the sizes"),
]


def wrong_arguments():
    me = int(os.environ["RANK"])
    together = in_step(2)
    for world_exists in (False, True):
        for culprit in (0, 1):
            for arguments, message in WRONG:
                if me == culprit:
                    with soon(MegapgError, re.escape(message)):
                        megapg.session(**{"timeout": LONG, **arguments})
                else:
                    with soon(RendezvousError, re.escape(message)) as caught:
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
    parallel_state.initialize_model_parallel(1, 1)
    if me == 1:
        with soon(SessionError, "timeout=0: give the seconds"):
            adopt(timeout=0)
    else:
        with soon(RendezvousError, "rank 1 .*timeout=0: give the seconds"):
            adopt(timeout=LONG)
    together()  # so that a rank that calls again is not taken for a late rank
    with adopt(timeout=LONG):
        pass
    dist.destroy_process_group()
    return True


@pytest.mark.smoke
def test_an_argument_that_is_wrong_on_one_rank():
    assert run_distributed(wrong_arguments, 2) == [True] * 2


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
