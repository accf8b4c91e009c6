"""What went wrong on which rank, as the ranks tell each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# Among the ranks that have a problem: the store, where no rank hosts it.
THE_STORE = -1
# What a rank says that has ended its groups alone, with nothing wrong: nobody need wait for it.
ALONE = "ended its groups alone"


def told(problems: Mapping[int, str]) -> str:
    """rank -> what went wrong there, for people."""
    return listed(
        (text if rank == THE_STORE else f"rank {rank}: {text}").rstrip(".: ")
        for rank, text in sorted(problems.items())
    )


def listed(lines: Iterable[str]) -> str:
    """The first eight of them, and how many more there are."""
    lines = list(lines)
    more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
    return "; ".join(lines[:8]) + more


def culprits(problems: Mapping[int, str]) -> list[int]:
    """The ranks to blame: not those that say of a communicator that another rank broke it."""
    ranks = sorted(rank for rank in problems if rank != THE_STORE)
    return [rank for rank in ranks if not of_a_communicator(problems[rank])] or ranks


def of_a_communicator(said: str) -> bool:
    """Whether a rank said in :func:`brief` that a communicator failed, which names no rank."""
    kind, _, text = said.partition(": ")
    return kind == "DistBackendError" or (kind == "RuntimeError" and "/gloo/" in text)


def brief(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}"
    return said if len(said) <= 500 else f"{said[:500]} ..."
