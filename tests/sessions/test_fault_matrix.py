"""Every fault on every rank in every phase: no rank hangs, and survivors name the failed rank.

Each cell is one job of four ranks on one session. One rank is missing, late, killed, frozen or
raises. ``pytest -s tests/sessions/test_fault_matrix.py`` prints the table.
"""

import itertools
import os
import signal
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_driver import Forge
from two_layers import Layers

import megapg
from megapg.errors import MegapgError
from megapg.testing import megatron_on_cpu

FAULTS = ("missing", "late", "killed", "frozen", "raising")
PHASES = (
    "start",
    "first collective",
    "later collective",
    "suspend",
    "resume",
    "save wait",
    "close",
)
# role -> (victim, host of the store)
ROLES = {
    "rank 0": (0, "outside"),
    "another": (2, "outside"),
    "the store's host": (0, "rank 0"),
    "beside the host": (2, "rank 0"),
}
RANKS = 4
# Here gloo tries to connect for longer than a failed host of the store stays for the others.
TOO_LATE = ("beside the host", "first collective")

# Timeouts of megapg and of collectives, in seconds.
SOON = 3.0
COLLECTIVE = timedelta(seconds=3)
# Delay of the late rank after the others.
LATE = 3 * SOON
# Longest time in seconds from the fault to a survivor's error. A collective on new connections
# waits five times its timeout (gloo). Closing waits once more for the other ranks and for their
# errors. BUSY allows for a busy machine.
WAITS = {"first collective": 5 * COLLECTIVE.total_seconds()}
CLOSING, BUSY = 2 * SOON + 6.0, 20.0
# Seconds after which a hanging rank is killed.
DEADLINE = 75.0
AT_A_TIME = 4
# Number of cells that may run a second time, alone. With other jobs running, a healthy rank may get
# no processor for longer than ``SOON``. More failing cells than this are no accident.
AGAIN = 4


@pytest.fixture(scope="module")
def forge():
    with Forge(__name__) as forge:
        yield forge


# ---- functions that the ranks run ----------------------------------------------------------------


@dataclass
class Heard:
    """The end of a rank: class and text of the error, time taken, ranks named."""

    kind: str
    text: str
    took: float
    ours: bool
    blamed: tuple = ()


class Mine(Exception):
    """The error that a victim raises."""


class Rank:
    """One rank of a cell; the victim fails in the phase of the cell."""

    def __init__(self, fault, phase, victim, folder):
        self.fault, self.phase, self.folder = fault, phase, folder
        self.rank = int(os.environ["RANK"])
        self.struck = self.rank == victim
        self.since = time.monotonic()

    def run(self):
        warnings.simplefilter("ignore")
        if self.struck:
            Path(self.folder, "victim").write_text(str(os.getpid()))
        self.all_are_here()
        try:
            self.body()
            return Heard("", "", time.monotonic() - self.since, False)
        except Exception as error:
            took = time.monotonic() - self.since
            ours = isinstance(error, MegapgError)
            return Heard(type(error).__name__, told(error), took, ours, blamed(error))
        finally:
            self.end()

    def all_are_here(self):
        """Wait for all ranks: on a busy machine a late start is not a fault."""
        Path(self.folder, f"here {self.rank}").touch()
        deadline = time.monotonic() + DEADLINE / 2
        while len(list(Path(self.folder).glob("here *"))) < RANKS and time.monotonic() < deadline:
            time.sleep(0.01)
        self.since = time.monotonic()

    def body(self):
        self.reach("start")
        with megapg.session(timeout=SOON, collective_timeout=COLLECTIVE) as session:
            self.reach("first collective")
            self.collective(session)
            self.collective(session)
            self.reach("later collective")
            self.collective(session)
            self.reach("suspend")
            session.suspend("recreate")
            self.reach("resume")
            session.resume()
            self.save(session)
            self.collective(session)
            self.reach("close")

    def reach(self, phase, *, strike=True):
        if phase != self.phase:
            return
        self.since = time.monotonic()
        if self.struck and strike:
            self.fail()

    def fail(self):
        Path(self.folder, "struck").touch()
        if self.fault == "missing":
            time.sleep(DEADLINE)
        elif self.fault == "late":
            time.sleep(LATE)
        elif self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise Mine("of my own")

    def collective(self, session):
        value = torch.ones(1)
        dist.all_reduce(value, group=session.groups.dp_cp)
        assert value.item() == RANKS

    def save(self, session):
        """Save a checkpoint in the background.

        Depending on the fault, the victim does not call, or its disk fails while the others wait.
        """
        comes = self.fault not in ("missing", "late")
        with megatron_on_cpu(), megapg.published(session.groups):
            model = Layers(session.groups).fill(1)
            self.reach("save wait", strike=not comes)
            if self.struck and comes and self.phase == "save wait":
                os.fsync = lambda descriptor: self.fail()
            megapg.save_checkpoint(
                Path(self.folder, "checkpoints"),
                1,
                model=model,
                pg_collection=session.groups,
                asynchronous=True,
            ).wait()

    def end(self):
        """Let the last survivor kill a victim that sleeps or is frozen."""
        Path(self.folder, f"ended {self.rank}").touch()
        others = len(list(Path(self.folder).glob("ended *"))) == RANKS - 1 and not self.struck
        if others and self.fault in ("missing", "frozen"):
            os.kill(int(Path(self.folder, "victim").read_text()), signal.SIGKILL)


def told(error):
    """Return the error with its notes and its inner errors, as text."""
    lines = [str(error), *getattr(error, "__notes__", ())]
    return "\n".join([*lines, *map(told, getattr(error, "exceptions", ()))])


def blamed(error):
    """Return the ranks that the error and its inner errors name."""
    inside = map(blamed, getattr(error, "exceptions", ()))
    return tuple(sorted({*getattr(error, "missing", ()), *itertools.chain.from_iterable(inside)}))


def play(fault, phase, victim, folder):
    return Rank(fault, phase, victim, folder).run()


# ---- the table -----------------------------------------------------------------------------------


def judged(fault, role, phase, ends):
    """Return the problems in the ends of a cell's ranks, and the longest time of a rank."""
    wrong, longest, victim = [], 0.0, ROLES[role][0]
    bound = WAITS.get(phase, SOON) + CLOSING + BUSY
    for rank, end in enumerate(ends):
        struck = rank == victim
        if struck and fault in ("missing", "killed", "frozen"):
            assert end.signal == signal.SIGKILL, end
            continue
        heard = end.value
        if heard is None:
            what = (
                f"was killed after {DEADLINE:g} s: {end.stack}" if end.signal else repr(end.error)
            )
            wrong.append(f"rank {rank} {what}")
            continue
        took = heard.took - (LATE if struck and fault == "late" else 0.0)
        longest = max(longest, took)
        if took > bound:
            wrong.append(f"rank {rank} took {took:.1f} s: {heard}")
        if not heard.kind:
            wrong.append(f"rank {rank} heard nothing")
        elif (role, phase) == TOO_LATE and "the store that rank 0 hosts" in heard.text:
            continue
        elif not struck and f"rank {victim}" not in heard.text.lower():
            wrong.append(f"rank {rank} does not name rank {victim}: {heard}")
        elif not struck and {*heard.blamed} - {victim}:
            wrong.append(f"rank {rank} blames others: {heard}")
    return wrong, longest


def started(forge, fault, role, phase, tmp_path):
    """Start the job of a cell; return it with the folder of its ranks."""
    victim, store = ROLES[role]
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    job = partial(play, fault, phase, victim, folder)
    return forge.start(job, RANKS, deadline=DEADLINE, store=store), folder


def troubles(fault, role, phase, job):
    """Return the problems of a finished job, and the longest time of a rank."""
    running, folder = job
    ends = running.ends()
    if not (folder / "struck").exists():
        return [f"there was trouble before the fault: {ends}"], 0.0
    return judged(fault, role, phase, ends)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_fault_in_every_phase(forge, tmp_path):
    cells = list(itertools.product(FAULTS, ROLES, PHASES))
    only = os.environ.get("MATRIX", "")  # for example "frozen" or "killed/rank 0/close"
    cells = [cell for cell in cells if "/".join(cell).startswith(only)]
    assert cells, f"MATRIX={only}: no cell is called so"
    table, failures, again = {}, [], []
    for start in range(0, len(cells), AT_A_TIME):
        jobs = [started(forge, *cell, tmp_path) for cell in cells[start : start + AT_A_TIME]]
        for cell, job in zip(cells[start:], jobs, strict=False):
            wrong, longest = troubles(*cell, job)
            if wrong and len(again) < AGAIN:
                again.append(f"{', '.join(cell)} went again: {wrong[0]}")
                wrong, longest = troubles(*cell, started(forge, *cell, tmp_path))
            table[cell] = f"{longest:.1f}{' !' if wrong else ''}"
            failures += [f"{', '.join(cell)}: {line}" for line in wrong]
    print_table(table)
    print("\n".join(again))
    assert not failures, "\n".join([*again, *failures])


def print_table(table):
    """Print seconds from the fault to the last survivor's error; "!" marks a cell that failed."""
    print(f"\n{'':26}" + "".join(f"{phase:>17}" for phase in PHASES))
    for fault, role in itertools.product(FAULTS, ROLES):
        row = [table.get((fault, role, phase), "") for phase in PHASES]
        print(f"{fault:8} {role:17}" + "".join(f"{text:>17}" for text in row))
