"""Format the findings as tables, for the terminal and for a Markdown file."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

import megapg
from benchmarks import backends
from benchmarks import checkpoint as checkpoints
from benchmarks import layout as layouts
from benchmarks import migrate as migrations
from benchmarks import parity as parities
from benchmarks import scale as scales
from benchmarks.access import Reading
from benchmarks.bridge import Cost
from benchmarks.checkpoint import Standings
from benchmarks.creation import CREATE, STAGES, USE, Contest
from benchmarks.layout import Answer
from benchmarks.migrate import Outcome
from benchmarks.parity import Proof
from benchmarks.peers import BASELINE, FIELDS, SESSION
from benchmarks.table import Table

_BRIDGE = (
    "A function calls `resolve()` once, and then reads attributes. `resolve()` checks the fields, "
    "the session, the process and torch's own list of groups."
)
_STARTS = (
    "Each rank imports Megatron-core's GPT and does nothing else. The fork server of "
    "`run_distributed` imports it once for all ranks, `preloaded` once for all calls."
)


@dataclass
class Report:
    """All findings of one run; parts that were not measured are empty."""

    command: str
    repeats: int
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    contests: list[Contest] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    starts: list[Cost] = field(default_factory=list)
    standings: list[Standings] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    backends: bool = False
    scale: scales.Findings | None = None
    proofs: list[Proof] = field(default_factory=list)

    def tables(self) -> list[Table]:
        """Return the findings, creation first."""
        found = []
        if self.contests:
            found += [make(self.contests) for make in (_verdicts, _creation, _holdings)]
        if self.answers:
            found += [_layout_summary(self.answers), _layout(self.answers)]
        if self.readings:
            found.append(_access(self.readings))
        if self.costs:
            found.append(_costs("The bridge to the globals", self.costs, _BRIDGE))
        if self.starts:
            found.append(_costs("Ranks that have Megatron-core", self.starts, _STARTS))
        if self.backends:
            found.append(backends.table())
        if self.scale is not None:
            found += scales.tables(self.scale)
        if self.standings:
            found += [make(self.standings) for make in (_checkpoint_verdicts, _checkpoint_times)]
        if self.outcomes:
            found.append(migrations.table(self.outcomes))
        if self.proofs:
            found.append(parities.table(self.proofs))
        return found

    def markdown(self) -> str:
        """Return the whole file."""
        head = [
            "# Benchmark results",
            "",
            f"`{self.command}` wrote these tables on {datetime.date.today().isoformat()}.",
            "",
            f"- {', '.join(f'{name} {version}' for name, version in _versions().items())}",
            f"- {os.cpu_count()} cores, {_memory_gib():.0f} GiB of memory, all ranks on one host, "
            "gloo",
            f"- medians of {self.repeats} repeats unless a table says otherwise",
            f"- load average (one minute) {self.load:.1f} before the run",
            f"- {_gpus()}",
            "",
            "A ratio is megapg's cost divided by the peer's cost in the same run: below 1 megapg "
            "is cheaper. Absolute times are noisy, since the machine has fewer cores than ranks.",
            "",
        ]
        return "\n\n".join(["\n".join(head), *(table.markdown() for table in self.tables())]) + "\n"


def _versions() -> dict[str, str]:
    return {
        "megapg": megapg.__version__,
        "Megatron-core": importlib.metadata.version("megatron-core"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }


def _gpus() -> str:
    count = torch.cuda.device_count()
    if not count:
        return "no GPU; `make test-gpu` prints the tables of one"
    return f"{count} GPUs ({torch.cuda.get_device_name()}); `make test-gpu` has their tables"


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


# -- the tables ------------------------------------------------------------------------------------


def _verdicts(contests: Sequence[Contest]) -> Table:
    rows = []
    for contest in contests:
        low, high = contest.spread(CREATE)
        target = "-" if contest.target is None else f"at most {contest.target}"
        verdict = "-" if contest.target is None else "met" if contest.met else "MISSED"
        rows.append(
            (
                f"world {contest.world_size}, {contest.shape}",
                f"{contest.ratio(CREATE):.2f}",
                f"{low:.2f} to {high:.2f}",
                f"{contest.cpu_ratio(CREATE):.2f}",
                target,
                verdict,
                " / ".join(f"{each:.2f}" for each in contest.bare),
                f"{contest.ratio(USE):.2f}",
                f"{contest.floor:.2f}",
            )
        )
    return Table(
        f"Create every group: {SESSION.name} against {BASELINE.name}",
        (
            *("", "ratio", "within one repeat", "ratio of CPU time", "wanted", ""),
            *("floor, of both", "create and use", "its floor"),
        ),
        tuple(rows),
        (
            "The floor is the time that torch alone takes to make the session's communicators, as "
            'a ratio of wall and of CPU time. "Create and use" adds one all_reduce on each of the '
            f"{len(FIELDS)} fields; its floor is the share of that use in the peer's time.",
        ),
    )


def _creation(contests: Sequence[Contest]) -> Table:
    rows = []
    for contest in contests:
        for standing in contest.standings:
            peer = standing.contestant
            if peer is SESSION:
                continue
            seconds = contest.of(SESSION).seconds(USE), standing.seconds(USE)
            rows.append(
                (
                    f"{contest.world_size}, {contest.shape}",
                    peer.name,
                    *(f"{contest.ratio(stage, peer):.2f}" for stage in STAGES),
                    f"{contest.cpu_ratio(USE, peer):.2f}",
                    " / ".join(f"{each:.3f}" for each in seconds),
                )
            )
    return Table(
        f"{SESSION.name} against each peer",
        ("world, layout", "peer", *STAGES, f"CPU, {USE}", f"s, {USE} (noise)"),
        tuple(rows),
        (
            '"All pairs" adds an all_to_all on every field, since a session connects pairs at '
            "first use and the peers connect them at creation. Gloo twins are the second data "
            "parallel groups of `initialize_model_parallel`; `init_device_mesh` makes 4 fields and "
            f"the others {len(FIELDS)}.",
        ),
    )


def _holdings(contests: Sequence[Contest]) -> Table:
    counted = ("calls", "communicators", "threads", "descriptors")
    rows = tuple(
        (
            f"{contest.world_size}, {contest.shape}",
            standing.contestant.name,
            *(f"{standing.per_rank(quantity):.0f}" for quantity in counted),
            f"{standing.per_rank('memory') / 1024:.1f}",
        )
        for contest in contests
        for standing in contest.standings
    )
    return Table(
        "Resources of one rank",
        ("world, layout", "contestant", *counted, "memory in MiB"),
        rows,
        (
            "Medians over the ranks, after all pairs have exchanged data. Calls are the outermost "
            "calls of `new_group` and `split_group`; memory is the proportional set size.",
        ),
    )


def _layout_summary(answers: Sequence[Answer]) -> Table:
    rows = []
    for world_size in dict.fromkeys(answer.world_size for answer in answers):
        here = [answer for answer in answers if answer.world_size == world_size]
        ours, theirs = sum(a.ours for a in here), sum(a.theirs for a in here)
        worst = max(here, key=lambda answer: answer.ratio)
        rows.append(
            (
                f"{world_size:,} ranks",
                _one_in(ours / theirs),
                f"{_one_in(worst.ratio)} ({worst.field})",
                f"{sum(a.met for a in here)} of {len(here)}",
                f"{ours * 1e3:.2f} ms / {theirs:.2f} s",
            )
        )
    sizes = f"tp={layouts.TP} pp={layouts.PP} cp={layouts.CP} ep={layouts.EP}"
    return Table(
        f"ParallelLayout.members for one rank against RankGenerator.get_ranks, {sizes}",
        (
            "",
            "all families",
            "dearest family",
            f"families at most {_one_in(layouts.TARGET)}",
            "ours / theirs (noise)",
        ),
        tuple(rows),
        ("Both gave the same ranks for every family. `get_ranks` was timed once a family.",),
    )


def _layout(answers: Sequence[Answer]) -> Table:
    largest = max(answer.world_size for answer in answers)
    return Table(
        f"The same by family, {largest:,} ranks",
        (
            "family",
            "ranks in the group",
            "ratio",
            f"at most {_one_in(layouts.TARGET)}",
            "ours / theirs (noise)",
        ),
        tuple(
            (
                answer.field,
                f"{answer.group_size:,}",
                _one_in(answer.ratio),
                "yes" if answer.met else "NO",
                f"{answer.ours * 1e6:,.1f} us / {answer.theirs * 1e3:,.0f} ms",
            )
            for answer in answers
            if answer.world_size == largest
        ),
        (
            "`members()` returns a tuple, so large groups cost more. A layout keeps the ranks of "
            "intra_dist_opt, which is the whole world.",
        ),
    )


def _one_in(ratio: float) -> str:
    return f"1/{1 / ratio:,.0f}"


def _access(readings: Sequence[Reading]) -> Table:
    return Table(
        "Reading one value",
        ("", "megapg", "compared with", "ratio", "ns (noise)"),
        tuple(
            (
                reading.what,
                f"`{reading.ours}`",
                f"`{reading.theirs}`",
                f"{reading.ratio:.2f}",
                f"{reading.our_ns:.0f} / {reading.their_ns:.0f}",
            )
            for reading in readings
        ),
        (
            "Best of many rounds, in a world of one rank. The shim is `resolve(None)`: each read "
            "looks the getter up and calls it.",
        ),
    )


def _costs(title: str, costs: Sequence[Cost], note: str) -> Table:
    return Table(
        title,
        ("", "what", "compared with", "ratio", "wanted", "", "times (noise)"),
        tuple(
            (
                cost.what,
                f"`{cost.ours}`",
                f"`{cost.theirs}`",
                f"{cost.ratio:.2f}",
                "-" if cost.target is None else f"at most {cost.target:g}",
                "-" if cost.target is None else "met" if cost.met else "MISSED",
                cost.times,
            )
            for cost in costs
        ),
        (note,),
    )


def _checkpoint_verdicts(standings: Sequence[Standings]) -> Table:
    rows = []
    for world in standings:
        for compared in checkpoints.COMPARISONS:
            ratio, cpu = world.ratio(compared), world.ratio(compared, "cpu")
            met = compared.target is None or ratio.median <= compared.target
            rows.append(
                (
                    f"world {world.world_size}: {compared.what}",
                    f"{ratio.median:.2f}",
                    f"{ratio.low:.2f} to {ratio.high:.2f}",
                    f"{cpu.median:.2f}",
                    "-" if compared.target is None else f"at most {compared.target:g}",
                    "-" if compared.target is None else "met" if met else "MISSED",
                )
            )
    kinds = " and ".join(dict.fromkeys(world.file_system for world in standings))
    return Table(
        "A checkpoint: save_checkpoint and load_checkpoint against dist_checkpointing",
        ("", "ratio", "within one repeat", "ratio of CPU time", "wanted", ""),
        tuple(rows),
        (
            "tp=2; weights and Adam's moments in 32 bits, fully reshardable, on "
            f"{kinds}. CPU time includes all ranks, threads and helper processes until all files "
            "are on disk. Loaded files are in the page cache.",
        ),
    )


def _checkpoint_times(standings: Sequence[Standings]) -> Table:
    rows = []
    for world in standings:
        for contestant in checkpoints.CONTESTANTS:
            blocked, wall, cpu = (
                world.median(contestant, quantity) for quantity in ("blocked", "wall", "cpu")
            )
            rows.append(
                (
                    f"world {world.world_size}: {contestant.name}",
                    f"{blocked:.2f}",
                    f"{wall:.2f}",
                    f"{cpu:.2f}",
                    f"{world.first_call(contestant):.2f}",
                    f"{world.median(contestant, 'size') / 2**20:.1f}",
                )
            )
    return Table(
        "The same in seconds (noise) and bytes",
        ("", "until it returns", "until all is there", "CPU", "first call", "MiB"),
        tuple(rows),
        (
            f"Medians of {len(standings[0].of(checkpoints.MEGAPG))} repeats. First calls ran in "
            "the order of the table, in one process. torch DCP saves each rank's own state, which "
            "loads only in the same layout.",
        ),
    )
