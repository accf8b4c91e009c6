"""After a rank was killed or stopped, the others name it, and the collective they were in."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megapg
from megapg.testing import run_distributed

KILLED = """
import os, signal
import torch, torch.distributed as dist
import megapg

with megapg.session(tp=3, backend="gloo", handle_signals=True) as session:
    dist.all_reduce(torch.ones(1), group=session.groups.tp)
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(1), group=session.groups.tp)
"""


def test_a_rank_killed_under_torchrun_is_named_before_the_launcher_stops_the_others(
    tmp_path: Path,
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    ended = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode
    line = rf"session 'default': rank 1: has died \(process \d+ on {socket.gethostname()}\)\. "
    line += r"This rank was in all_reduce on tp, .* \(ranks 0, 1, 2\)"
    assert len(re.findall(line, ended.stderr)) == 2, ended.stderr


def stop_a_rank() -> str:
    with (
        pytest.raises(RuntimeError, match="Timed out") as failed,
        megapg.session(
            tp=2, backend="gloo", timeout=10, collective_timeout=timedelta(seconds=3)
        ) as session,
    ):
        stop_and_reduce(session, pids := [0, 0])
    if session.rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    return "\n".join(failed.value.__notes__)


def stop_and_reduce(session: megapg.Session, pids: list[int]) -> None:
    dist.all_gather_object(pids, os.getpid(), group=session.groups.tp)
    if session.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1), group=session.groups.tp)


def stopped() -> str:
    try:
        return stop_a_rank()
    except AssertionError:  # the rank that was stopped loses its connection instead
        return ""


def test_a_stopped_rank_and_the_field_are_named_when_a_collective_times_out() -> None:
    notes = run_distributed(stopped, 2, deadline=90)[0]
    assert "session 'default': in all_reduce on tp, " in notes
    assert "(ranks 0, 1)" in notes
    assert re.search(r"rank 1: not a word \(process \d+ on \S+\): is stopped \(SIGSTOP\)", notes)


def stand_apart() -> str:
    with (
        pytest.raises(RuntimeError) as failed,
        megapg.session(
            tp=2, pp=2, backend="gloo", timeout=10, collective_timeout=timedelta(seconds=3)
        ) as session,
    ):
        wait_for_one_in_another_group(session)
    return "\n".join(failed.value.__notes__)


def wait_for_one_in_another_group(session: megapg.Session) -> None:
    """Rank 0 waits for 1, 1 for 3, 3 for 2 and 2 for 0, from the same moment.

    The first collectives connect the groups: gloo waits 15 s for a connection, not 3.
    """
    for each in (session.groups.tp, session.groups.pp):
        dist.all_reduce(torch.ones(1), group=each)
    dist.barrier()
    group = session.groups.tp if session.rank in (0, 3) else session.groups.pp
    dist.all_reduce(torch.ones(1), group=group)


def test_ranks_that_wait_for_each_other_are_told_where_the_others_stand() -> None:
    notes = run_distributed(stand_apart, 4, deadline=90)
    assert re.search(r"other ranks: .*rank 1: .*in all_reduce on pp", notes[0]), notes[0]
    assert re.search(r"other ranks: .*rank 0: .*in all_reduce on tp", notes[1]), notes[1]


def busy() -> str:
    with (
        pytest.raises(RuntimeError) as failed,
        megapg.session(
            tp=2, backend="gloo", timeout=10, collective_timeout=timedelta(seconds=2)
        ) as session,
    ):
        reduce_late(session)
    return "\n".join(failed.value.__notes__)


def reduce_late(session: megapg.Session) -> None:
    dist.all_reduce(torch.ones(1), group=session.groups.tp)
    if session.rank == 1:
        time.sleep(8)  # a data loader that hangs
    dist.all_reduce(torch.ones(1), group=session.groups.tp)


def test_of_a_rank_that_is_still_at_work_the_process_is_named() -> None:
    notes = run_distributed(busy, 2, deadline=90)[0]
    assert re.search(r"rank 1: not a word .*py-spy dump --pid \d+", notes), notes
