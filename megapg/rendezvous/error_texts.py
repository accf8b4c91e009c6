"""Errors by rank, as the ranks report them to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

# Stands for a rank in rank -> error: the store, if no rank hosts it.
THE_STORE = -1
# Reported by a rank that closed its groups alone, without an error. No rank need wait for it.
ALONE = "ended its groups alone"
# A message lists as many ranks.
LISTED = 8


class RankNames:
    """The names of ranks in messages: ``rank 3``."""

    def one(self, rank: int) -> str:
        """Return the name of a rank."""
        return f"rank {rank}"

    def several(self, ranks: Sequence[int]) -> str:
        """Return the names of the first ranks, and whether there are more."""
        return f"rank{'s' if len(ranks) > 1 else ''} {first(map(str, ranks))}"


BY_NUMBER = RankNames()


def told(problems: Mapping[int, str], names: RankNames = BY_NUMBER) -> str:
    """Format rank -> error for people."""
    return listed(
        (text if rank == THE_STORE else f"{names.one(rank)}: {text}").rstrip(".: ")
        for rank, text in sorted(problems.items())
    )


def first(names: Iterable[str]) -> str:
    """Join the first names, and say whether there are more."""
    names = list(names)
    return ", ".join(names[:LISTED]) + (" and more" if len(names) > LISTED else "")


def listed(lines: Iterable[str]) -> str:
    """Join the first lines, and say how many more there are."""
    lines = list(lines)
    more = f"; and {len(lines) - LISTED} more" if len(lines) > LISTED else ""
    return "; ".join(lines[:LISTED]) + more


def culprits(problems: Mapping[int, str]) -> list[int]:
    """Return the ranks to blame, without those whose communicator another rank broke."""
    ranks = sorted(rank for rank in problems if rank != THE_STORE)
    return [rank for rank in ranks if not of_a_communicator(problems[rank])] or ranks


def of_a_communicator(said: str) -> bool:
    """True if the text of :func:`brief` is an error of a communicator, which names no rank."""
    kind, _, text = said.partition(": ")
    return kind == "DistBackendError" or (kind == "RuntimeError" and "/gloo/" in text)


def brief(error: BaseException) -> str:
    return _cut(f"{type(error).__name__}: {error}")


def with_note(error: BaseException) -> str:
    """Return an error in short, with its first note, which names the place."""
    notes = getattr(error, "__notes__", ())
    return brief(error) + (f" ({_cut(notes[0].rstrip('.'))})" if notes else "")


def _cut(text: str) -> str:
    return text if len(text) <= 500 else f"{text[:500]} ..."
