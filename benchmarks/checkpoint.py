"""The tables about checkpoints. :mod:`benchmarks.checkpoint_trials` measures."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import checkpoint_trials as trials
from benchmarks.checkpoint_trials import Standings
from benchmarks.table import Options, Table, verdict


def tables(given: Options) -> list[Table]:
    """Return the tables for all world sizes."""
    worlds = trials.WORLDS[:1] if given.quick else trials.WORLDS
    repeats = 1 if given.quick else trials.REPEATS
    found = [trials.run(size, repeats, quick=given.quick) for size in worlds]
    return [_checkpoint_verdicts(found), _checkpoint_times(found)]


def _checkpoint_verdicts(standings: Sequence[Standings]) -> Table:
    rows = []
    for world in standings:
        for compared in trials.COMPARISONS:
            ratio, cpu = world.ratio(compared), world.ratio(compared, "cpu")
            rows.append(
                (
                    f"world {world.world_size}: {compared.what}",
                    f"{ratio.median:.2f}",
                    f"{ratio.low:.2f} to {ratio.high:.2f}",
                    f"{cpu.median:.2f}",
                    *verdict(ratio.median, compared.target),
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
        for contestant in trials.CONTESTANTS:
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
            f"Medians of {len(standings[0].of(trials.MEGAPG))} repeats. First calls ran in "
            "the order of the table, in one process. torch DCP saves each rank's own state, which "
            "loads only in the same layout.",
        ),
    )
