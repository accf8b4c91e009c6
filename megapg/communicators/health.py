"""What a health check of all ranks found."""

from __future__ import annotations

from dataclasses import dataclass

from megapg.communicators.warm_up import Opened


@dataclass(frozen=True)
class HealthReport:
    """Every rank was there and well. ``str()`` is for people.

    Attributes:
        owner: whose ranks.
        reason: what the check was for, as given.
        ranks: the global ranks that answered.
        seconds: how long it took, with the wait for the other ranks.
        communicators: those that answered, in the order in which they were asked; ``seconds`` of
            each is its own. Empty unless that was asked for.
    """

    owner: str
    reason: str
    ranks: tuple[int, ...]
    seconds: float
    communicators: tuple[Opened, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.owner}: {len(self.ranks)} rank{'s' if len(self.ranks) != 1 else ''} answered "
            f"within {self.seconds:.3f} s" + (f" ({self.reason})" if self.reason else "")
        ]
        lines += [f"  {'+'.join(c.fields)}: {c.seconds:.3f} s" for c in self.communicators]
        return "\n".join(lines)
