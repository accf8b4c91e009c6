"""The result of a health check of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from megapg.communicators.warm_up import Opened


@dataclass(frozen=True)
class HealthReport:
    """The result of a successful check: every rank responded. ``str()`` is for people.

    Attributes:
        owner: the owner of the groups.
        reason: the reason that the caller gave.
        ranks: the global ranks that responded.
        seconds: the duration, including the wait for the other ranks.
        communicators: the communicators that responded, in the order of the check, each with its
            own ``seconds``. Empty unless requested.
    """

    owner: str
    reason: str
    ranks: tuple[int, ...]
    seconds: float
    communicators: tuple[Opened, ...] = ()

    @override
    def __str__(self) -> str:
        lines = [
            f"{self.owner}: {len(self.ranks)} rank{'s' if len(self.ranks) != 1 else ''} answered "
            f"within {self.seconds:.3f} s" + (f" ({self.reason})" if self.reason else "")
        ]
        lines += [f"  {'+'.join(c.fields)}: {c.seconds:.3f} s" for c in self.communicators]
        return "\n".join(lines)
