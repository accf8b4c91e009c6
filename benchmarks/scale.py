"""What ranks ask of the store at start-up, suspend, resume, a save and close: up to 131,072 of them.

:mod:`benchmarks.simulated` runs every rank's rendezvous. What a session calls of it, and in which
order, is written down in :class:`Steps`; real ranks on gloo show that it is so, as they count the
same (:func:`real`).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from benchmarks.simulated import Costs, Phase, Simulation, Tally
from megapg.communicators.backends import BACKENDS
from megapg.communicators.plan import Recipe
from megapg.layout import ParallelLayout
from megapg.ownership import offload
from megapg.ownership.validate import settings
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.joint_work import JointWork
from megapg.rendezvous.rendezvous import Rendezvous

WORLDS = (1_024, 16_384, 131_072)
_TIMEOUT = 36_000.0  # nobody gives up: how long it takes is what is asked


class Steps:
    """Every rank of a session, and what its session does over the store in each phase.

    Args:
        layout: of the session, which spans the world.
    """

    def __init__(self, layout: ParallelLayout, costs: Costs | None = None) -> None:
        self.simulation = Simulation(len(layout.ranks), costs)
        self._layout, everyone = layout, layout.ranks
        recipe = Recipe("nccl", BACKENDS["nccl"].lanes, {}, frozenset(), all_gather_groups=False)
        self._settings = settings(layout, recipe, timedelta(minutes=10))
        stores = self._stores = [self.simulation.store() for _ in everyone]
        self._worlds = [Rendezvous(s, "WORLD", rank, everyone) for rank, s in enumerate(stores)]
        self._sessions: dict[int, Coordinator] = {}
        self._teams = [
            JointWork(s, "checkpoint save", r, everyone, timeout=_TIMEOUT)
            for r, s in enumerate(stores)
        ]

    def phases(self) -> Iterator[tuple[str, Phase]]:
        """Name and outcome of each, in the order in which a job would do them."""
        for name, part in (
            ("start-up", self._start),
            ("suspend()", self._suspend),
            ("resume()", self._resume),
            ("suspend(how='recreate')", self._let_go),
            ("resume() after it", self._make_anew),
            ("checkpoint, begin to end", self._save),
            ("close()", self._close),
        ):
            yield name, self.simulation.phase(part)

    def _start(self, rank: int) -> None:
        world = self._worlds[rank]
        world.meet({"backend": "gloo", "network": "left alone"}, timeout=_TIMEOUT)
        world.confirm(None, timeout=_TIMEOUT)
        self._open(rank)

    def _open(self, rank: int) -> None:
        everyone = self._layout.ranks
        session = Coordinator(self._stores[rank], "default", rank, everyone)
        self._sessions[rank] = session
        session.meet(self._settings, timeout=_TIMEOUT)
        session.confirm(None, timeout=_TIMEOUT)

    def _exchange(self, rank: int, *topics: str) -> None:
        for topic in topics:
            said = offload.wish(None, dict.fromkeys(offload.WAYS, "")) if not topic else ""
            self._sessions[rank].exchange(topic, said, timeout=_TIMEOUT)

    def _suspend(self, rank: int) -> None:
        before, after = "suspend(), before the release", "suspend(), after the release"
        self._exchange(rank, "", before, after)

    def _resume(self, rank: int) -> None:
        self._exchange(rank, "resume()", "resume(), the groups", "resume(), the callbacks")

    def _let_go(self, rank: int) -> None:
        self._suspend(rank)
        self._sessions[rank].part(None, timeout=_TIMEOUT)

    def _make_anew(self, rank: int) -> None:
        self._open(rank)
        self._exchange(rank, "resume(), the callbacks")

    def _save(self, rank: int) -> None:
        with self._teams[rank].begin({"iteration": "1"}) as team:
            team.agree("arguments", wait=False)
            team.agree("model", wait=False)
            team.agree("state")
            team.agree("in hand")
            team.announce("directory", b"/checkpoints/iter_0000001")
            team.heed()
            team.collect("written", bytes(1000), final=True)
            if team.leading:
                team.heed()
            team.announce("published", b"")

    def _close(self, rank: int) -> None:
        self._sessions[rank].part(None, timeout=_TIMEOUT)
        self._worlds[rank].part(None, timeout=_TIMEOUT)
