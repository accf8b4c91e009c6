"""Any error at any point of opening a session frees the name and leaves nothing behind."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import megapg
from megapg import torch_private
from megapg.errors import RendezvousError
from megapg.testing import run_distributed

pytestmark = pytest.mark.torch

PACKAGE = str(Path(megapg.__file__).parent)
SOON, PATIENT = 4.0, 60.0  # seconds


class Broken(Exception):
    """An error that no caller expects."""


def opened_with(error, at, **arguments):
    """Open a session in which call number ``at`` inside megapg raises; return the error.

    Return None if there are fewer calls. Errors at the end of a generator are ignored, so they are
    not tested.
    """
    calls = 0

    def trace(frame, event, _):
        nonlocal calls
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and code.co_name not in ("<genexpr>", "__del__"):
            calls += 1
            if calls == at:
                sys.settrace(None)
                raise error

    sys.settrace(trace)
    try:
        opened = megapg.session(**arguments)
    except BaseException as raised:
        return raised
    finally:
        sys.settrace(None)
    opened.close()
    return None


def wherever_it_fails(of_the_caller, step):
    if of_the_caller:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    at, kept = 1, []  # as a debugger keeps errors and all their frames
    while raised := opened_with(KeyboardInterrupt() if at % 2 else Broken(), at, timeout=SOON):
        assert isinstance(raised, (KeyboardInterrupt, Broken)), (at, raised)
        kept.append(raised)
        assert not megapg.open_sessions(), at
        assert dist.is_initialized() is of_the_caller, at
        assert len(torch_private.known_groups()) == of_the_caller, at
        with megapg.session(timeout=SOON) as again:
            assert again.groups.size("tp") == 1
        at += step
    assert len(kept) > 20
    return len(kept)


@pytest.mark.parametrize("of_the_caller", [True, False])
def test_wherever_it_fails(of_the_caller):
    (failures,) = run_distributed(partial(wherever_it_fails, of_the_caller, 13), 1, deadline=250)
    assert failures > 20


def on_two_ranks():
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo")

    def both_open():
        dist.barrier()
        with megapg.session(tp=2, timeout=PATIENT) as session:
            dist.barrier(group=session.groups.tp)

    both_open()
    if me == 0:
        with pytest.raises(RendezvousError, match="Missing: rank 1"):
            megapg.session(tp=2, timeout=SOON)
    both_open()
    # If gloo connects when a group is created, a rank can hang there until the timeout.
    lazy = torch_private.gloo_can_be_lazy()
    # Waits make calls as well, so a late call may come after the last meeting of the ranks.
    for at in (40, 400) if lazy else ():
        for error in (KeyboardInterrupt, Broken):
            if me == 0:
                assert isinstance(opened_with(error(), at, tp=2, timeout=SOON), error)
            else:
                with pytest.raises(RendezvousError, match="rank 0"):
                    megapg.session(tp=2, timeout=SOON)
            assert len(torch_private.known_groups()) == 1, at
            both_open()
    return True


def test_on_two_ranks():
    assert run_distributed(on_two_ranks, 2, deadline=250) == [True, True]
