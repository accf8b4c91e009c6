"""After a rank was killed or stopped, the others name it, and the collective they were in."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
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
