"""Who started this process: its rank, how many there are, and where they meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megapg.errors import LaunchError

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """What a launcher said about this process.

    Attributes:
        launcher: its name, for messages.
        rank: global rank of this process.
        world_size: number of processes.
        local_rank: index of this process on its host: the accelerator it uses.
        address: host where the ranks meet; empty for a process alone.
        port: TCP port there.
        hosted: the launcher runs the store, so that no rank has to.
        attempt: how often the launcher has started this job again, from 0.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    hosted: bool = False
    attempt: int = 0


def detect(environment: Mapping[str, str] = os.environ) -> Launch:
    """Read the launch from torchrun's variables; none of them set means a process alone.

    Raises:
        LaunchError: some of the variables are set and some are not, or one is no number.
    """
    given = [name for name in _TORCHRUN if name in environment]
    if not given:
        return Launch("a single process")
    if missing := [name for name in _TORCHRUN if name not in environment]:
        raise LaunchError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}. Start with "
            "torchrun, or set all four, or none for a single process."
        )
    launch = Launch(
        launcher="torchrun",
        rank=_number(environment, "RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", default="0"),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(environment, "TORCHELASTIC_RESTART_COUNT", default="0"),
    )
    if not 0 <= launch.rank < launch.world_size:
        raise LaunchError(f"RANK={launch.rank} is not within WORLD_SIZE={launch.world_size}.")
    return launch


def _number(environment: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environment[name] if default is None else environment.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{name}={text!r} is no whole number.") from None
