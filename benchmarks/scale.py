"""Count the store calls of up to 16,384 ranks: start-up, suspend, resume, save and close.

:mod:`benchmarks.simulated` runs every rank's rendezvous. :class:`Steps` lists the calls of a
session in order. Real ranks on gloo count the same (:func:`real`), which checks this list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast
from unittest import mock

import megapg
from benchmarks.simulated import Costs, Phase, Simulation, Tally
from benchmarks.table import Options, Table
from megapg.communicators.addresses import AddressBook
from megapg.communicators.backends import BACKENDS
from megapg.communicators.needed import Recipe, communicators, created_fields
from megapg.layout import GroupName, ParallelLayout
from megapg.ownership import suspension
from megapg.ownership.validate import settings
from megapg.rendezvous.coordinator import Coordinator
from megapg.rendezvous.joint_work import JointWork
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.rendezvous.store import Store
from megapg.testing import run_distributed

_WRITES = ("set", "multi_set", "add", "delete_key")
_TIMEOUT = 36_000.0  # no rank gives up, as the duration is the result


def _recipe(backend: str) -> Recipe:
    return Recipe(backend, BACKENDS[backend].lanes, {}, frozenset(), all_gather_groups=False)


class Steps:
    """All ranks of a session, and their store calls in each phase.

    Args:
        layout: of the session, which spans the world.
        backend: on gloo, ranks also exchange the addresses of their communicators.
        costs: of calls to the store.
    """

    def __init__(
        self, layout: ParallelLayout, backend: str = "nccl", costs: Costs | None = None
    ) -> None:
        self.simulation = Simulation(len(layout.ranks), costs)
        self._layout, everyone = layout, layout.ranks
        self._recipe = _recipe(backend)
        self._settings = settings(layout, self._recipe, timedelta(minutes=10))
        stores = self._stores = [self.simulation.store() for _ in everyone]
        self._worlds = [Rendezvous(s, "WORLD", rank, everyone) for rank, s in enumerate(stores)]
        self._sessions: dict[int, Coordinator] = {}
        self._teams = [
            JointWork(s, "checkpoint save", r, everyone, timeout=_TIMEOUT)
            for r, s in enumerate(stores)
        ]

    def phases(self, *names: str) -> Iterator[tuple[str, Phase]]:
        """Yield name and outcome of these phases, or of all, in the order of a job."""
        parts = {
            "start-up": self._start,
            "suspend()": self._suspend,
            "resume()": self._resume,
            "suspend(how='recreate')": self._let_go,
            "resume() after it": self._make_anew,
            "save_checkpoint()": self._save,
            "close()": self._close,
        }
        for name in names or parts:
            yield name, self.simulation.phase(parts[name])

    def _start(self, rank: int) -> None:
        world = self._worlds[rank]
        world.meet({"backend": self._recipe.backend, "network": "left alone"}, timeout=_TIMEOUT)
        world.confirm(None, timeout=_TIMEOUT)
        self._open(rank)

    def _open(self, rank: int) -> None:
        everyone = self._layout.ranks
        session = Coordinator(self._stores[rank], "default", rank, everyone)
        self._sessions[rank] = session
        shared = session.meet(self._settings, timeout=_TIMEOUT).store
        book = AddressBook(shared, timedelta(minutes=10))
        if self._recipe.backend == "gloo":
            for communicator in communicators(self._layout, self._recipe, rank):
                book.store_for(communicator)
        session.confirm(None, timeout=_TIMEOUT, telling=book.mine(rank))
        book.fill_in(rank)

    def _exchange(self, rank: int, *topics: str) -> None:
        for topic in topics:
            said = suspension.wish(None, dict.fromkeys(suspension.WAYS, "")) if not topic else ""
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


# -- real ranks ------------------------------------------------------------------------------------

PHASES = ("start-up", "suspend(how='recreate')", "resume() after it", "close()")
"""Those that real ranks on gloo go through, too."""


def real(world_size: int) -> dict[str, list[Tally]]:
    """Return phase -> the store calls of each of ``world_size`` real ranks on gloo."""
    by_rank = run_distributed(
        _real_phases, world_size, deadline=60 + 5 * world_size, preload=["benchmarks.scale"]
    )
    return {name: [each[at] for each in by_rank] for at, name in enumerate(PHASES)}


def _real_phases() -> list[Tally]:
    """Count megapg's store calls on a rank, without torch's own calls."""
    tallies = [Tally() for _ in PHASES]
    asked, tally = Store._call, tallies[0]

    def counted(store: Store, call: Callable[..., object], *arguments: object) -> object:
        answer = asked(store, call, *arguments)
        name = call.__name__
        keys = arguments[0] if arguments else ()
        writes = name in _WRITES and (name != "add" or arguments[1] != 0)
        found = answer is not False and answer != b"nothing"
        if name == "compare_set":
            writes = arguments[1] != arguments[2] and answer == str(arguments[2]).encode()
        if isinstance(keys, str) and keys.isdecimal():  # a list of waiting ranks
            writes = False
        named = 1 if isinstance(keys, str) else len(cast("Sequence[str]", keys))
        tally.count(named, 0, found=found or name == "delete_key", writes=writes)
        return answer

    with mock.patch.object(Store, "_call", counted):
        session = megapg.session(name="default", timeout=120)
        tally = tallies[1]
        session.suspend("recreate")
        tally = tallies[2]
        session.resume()
        tally = tallies[3]
        session.close()
    return tallies


# -- results ---------------------------------------------------------------------------------------

# World size -> simulated phases; empty for all phases.
SIMULATED: Mapping[int, tuple[str, ...]] = {
    64: (),
    1_024: (),
    16_384: ("start-up", "save_checkpoint()", "close()"),
}
QUICK = (64, 1_024)
REAL = (64, 128)


@dataclass
class Findings:
    """The findings of one run.

    Attributes:
        simulated: world size -> phase -> the simulated cost.
        real: number of real ranks -> phase -> the calls of each rank.
        played: the same for as many simulated ranks.
    """

    simulated: dict[int, dict[str, Phase]]
    real: dict[int, dict[str, list[Tally]]]
    played: dict[int, dict[str, Phase]]


def run(*, quick: bool = False) -> Findings:
    """Simulate, and count real ranks."""
    simulated = {
        size: dict(Steps(layout_of(size)).phases(*SIMULATED[size]))
        for size in (QUICK if quick else SIMULATED)
    }
    sizes = (8,) if quick else REAL
    return Findings(
        simulated,
        {size: real(size) for size in sizes},
        {
            size: dict(Steps(ParallelLayout(world_size=size), "gloo").phases(*PHASES))
            for size in sizes
        },
    )


def layout_of(size: int) -> ParallelLayout:
    """Return the layout to simulate."""
    return ParallelLayout(world_size=size, tp=8, pp=8)


def same(real: Sequence[Tally], played: Phase, phase: str) -> bool:
    """True if each real rank wrote as often as its simulated one.

    The number of reads depends on which ranks are late. At the end, the leader also deletes torch's
    keys in the store, so its writes are not compared.
    """
    first = 1 if phase in ("close()", "suspend(how='recreate')") else 0
    ours = [each.writes for each in played.ranks[first:]]
    return ours == [each.writes for each in real[first:]]


def tables(given: Options) -> list[Table]:
    """Return the tables."""
    findings = run(quick=given.quick)
    return [_calls(findings), _checked(findings)]


def _calls(findings: Findings) -> Table:
    rows = []
    for size, phases in findings.simulated.items():
        for name, phase in phases.items():
            leader, others = phase.ranks[0], slice(1, None)
            rows.append(
                (
                    f"{size:,}: {name}",
                    f"{phase.most('calls', others):,.0f}",
                    f"{leader.calls:,}",
                    f"{leader.keys:,}",
                    f"{phase.most('bytes', others) / 1e3:,.1f}",
                    f"{leader.bytes / 1e6:,.2f}",
                    f"{phase.total('bytes') / 1e6:,.1f}",
                    f"{phase.most('depth'):,.0f}",
                    f"{phase.busy:,.1f}",
                    f"{phase.most('ended'):,.1f}",
                )
            )
    costs = Costs()
    return Table(
        "Calls to the store with many ranks, simulated",
        (
            "ranks: phase",
            "calls, a rank",
            "the leader's",
            "its keys",
            "kB, a rank",
            "MB, the leader",
            "MB, all",
            "depth",
            "store at work, s",
            "over after, s",
        ),
        tuple(rows),
        (
            "Each rank runs the real rendezvous against a store in memory, with a simulated clock "
            f"({costs.way * 1e6:.0f} us a round trip, {costs.call * 1e6:.0f} us a call, "
            f'{costs.key * 1e6:.1f} us a key). "A rank" is the rank with the most calls apart from '
            'the leader; "depth" is the longest chain of calls that wait for each other.',
        ),
    )


def _checked(findings: Findings) -> Table:
    rows = tuple(
        (
            f"{size} ranks: {name}",
            _spread(each.writes for each in ranks[1:]),
            _spread(each.writes for each in played.ranks[1:]),
            "the same on every rank" if same(ranks, played, name) else "DIFFERENT",
            _spread(each.calls for each in ranks[1:]),
            _spread(each.calls for each in played.ranks[1:]),
            f"{ranks[0].calls} / {played.ranks[0].calls}",
        )
        for size, found in findings.real.items()
        for name, ranks in found.items()
        for played in [findings.played[size][name]]
    )
    return Table(
        "Calls to the store, real and simulated",
        ("", "writes, real", "simulated", "", "calls, real", "simulated", "the leader's, both"),
        rows,
        (
            "The number of reads depends on which rank is late; the number of writes does not. At "
            "the end the leader also deletes the keys that torch left, and these writes are not "
            "compared.",
        ),
    )


def _spread(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def group_calls(layout: ParallelLayout) -> tuple[int, int, int, int]:
    """Count fields, and the first rank's calls: bound to a device, split by family, unbound."""
    recipe = _recipe("nccl")
    mine = communicators(layout, recipe, layout.ranks[0])
    families = [cast("GroupName", each.fields[0]) for each in mine]
    everyone = sum(1 for family in families for _ in layout.partition(family))
    return len(created_fields(layout, recipe)), everyone, len(families), len(mine)
