"""A script for the tests of launchers: ``launch_script.py NAME`` runs one function below."""

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import megapg
from megapg.errors import LaunchError, RendezvousError
from megapg.launch import detect
from megapg.launch.environment import overridden

SOON = 4.0
"""Seconds that a rank waits for one that won't come."""


def train():
    """Open a session, sum over its group and close it, three times; print the result."""
    launch = detect()
    for generation in (1, 2, 3):
        with megapg.session(timeout=60) as session:
            total = torch.tensor([session.rank + 1.0])
            dist.all_reduce(total, group=session.groups.dp)
            assert session.generation == generation
            assert session.groups.dp.size() == launch.world_size
            assert os.environ.get("TORCHELASTIC_RUN_ID") or "RANK" not in os.environ
    said = {
        "rank": session.rank,
        "of": launch.world_size,
        "total": total.item(),
        "by": launch.launcher,
        "at": f"{launch.address}:{launch.port}",
        "job": launch.job,
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def refused():
    """Open a session outside of a task, and print the error."""
    try:
        megapg.session(timeout=60)
    except LaunchError as error:
        sys.stdout.write(json.dumps({"refused": str(error)}) + "\n")


def troubles():
    """Provoke errors one by one in the same processes, four tasks on two nodes; see the test."""
    launch = detect()
    sys.modules["hostlist"] = None  # as if it were not installed: then scontrol is used
    assert detect() == launch
    del sys.modules["hostlist"]
    steps = Steps(Path(os.environ["SLURM_CONF"]).parent, launch.rank, launch.world_size)
    opened = {"timeout": SOON, "backend": "gloo"}

    with overridden({"RANK": "0", "WORLD_SIZE": "1"}):
        steps.fail("mixture", lambda: megapg.session(**opened))
    with overridden({"SLURM_STEP_NODELIST": "n[1-3]"}):
        steps.fail("too many nodes", lambda: megapg.session(**opened))
    with overridden({"SLURM_STEP_NODELIST": "absent[1-2]"}):
        steps.fail("unknown nodes", lambda: megapg.session(**opened))
    with overridden({"MASTER_PORT": ""}):
        steps.fail("no port", lambda: megapg.session(**opened))
    # A network for documentation, without hosts, as a wrong MASTER_ADDR.
    with overridden({"MASTER_ADDR": "198.51.100.7"}):
        steps.fail("wrong address", lambda: megapg.session(**opened))

    steps.wait("others are tried")
    if launch.rank != 3:
        steps.fail("missing rank", lambda: megapg.session(**opened))
    steps.wait("it was missed")
    if launch.rank == 3:
        steps.fail("late rank", lambda: megapg.session(**opened))
    steps.wait("it was late")

    with megapg.session(tp=2, timeout=60) as session:
        total = torch.ones(1)
        dist.all_reduce(total, group=session.groups.tp)
        steps.said["afterwards"] = total.item()
    steps.write()


class Steps:
    """Records what happened on one rank, and waits for the other ranks by files."""

    def __init__(self, folder, rank, ranks):
        self.said = {"host": os.environ["SLURMD_NODENAME"], "name": socket.gethostname()}
        self._folder, self._rank, self._ranks = Path(folder), rank, ranks

    def fail(self, step, do):
        started = time.monotonic()
        try:
            do().close()
        except (LaunchError, RendezvousError) as error:
            self.said[step] = {
                "kind": type(error).__name__,
                "text": str(error),
                "missing": list(getattr(error, "missing", [])),
                "seconds": time.monotonic() - started,
            }

    def wait(self, step):
        (self._folder / f"{step}.{self._rank}").touch()
        deadline = time.monotonic() + 120
        while len(list(self._folder.glob(f"{step}.*"))) < self._ranks:
            assert time.monotonic() < deadline, step
            time.sleep(0.02)

    def write(self):
        (self._folder / f"rank{self._rank}.json").write_text(json.dumps(self.said))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
