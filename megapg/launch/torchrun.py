"""``torchrun``, and other launchers built on torch's elastic agent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from megapg.launch.environment import Variables
from megapg.launch.launcher import Launcher, Place
from megapg.launch.process import Launch

_MARK = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Torchrun(Launcher):
    """``torchrun``, and other launchers built on torch's elastic agent."""

    name = "torchrun"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    also = (_MARK, "MASTER_ADDR", "MASTER_PORT")

    @classmethod
    @override
    def detect(cls, variables: Variables) -> Self | None:
        # Without the mark, the other variables may have been set by hand.
        return super().detect(variables) if _MARK in variables else None

    @override
    def launch(self, place: Place) -> Launch:
        return Launch(
            launcher=self.name,
            rank=self.rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            local_world_size=self.variables.maybe("LOCAL_WORLD_SIZE"),
            address=place.address or "",
            port=place.port or 0,
            hosted=self.variables.text("TORCHELASTIC_USE_AGENT_STORE", "False") == "True",
            attempt=self.variables.number("TORCHELASTIC_RESTART_COUNT", 0),
            job=f"torchrun {self.variables.text(_MARK)}",
            origin="MASTER_ADDR, MASTER_PORT from torchrun",
        )
