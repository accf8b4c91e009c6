"""An actor of Ray: its node, and the accelerator that Ray gave it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Self

from megapg.errors import LaunchError
from megapg.launch.environment import Variables

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class RayActor:
    """The actor that this process runs.

    Attributes:
        node: Ray's id of its node.
        address: address of the node.
        gpus: the ids of the GPUs that Ray gave it; empty if it asked for none.
    """

    node: str
    address: str
    gpus: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Self | None:
        """Return the actor that this process runs; None in a driver, in a task and without Ray."""
        ray = sys.modules.get("ray")  # each process of Ray has imported it
        if ray is None or not ray.is_initialized():
            return None
        context = ray.get_runtime_context()
        if context.get_actor_id() is None:
            return None
        gpus = context.get_accelerator_ids().get("GPU", ())
        address = ray.util.get_node_ip_address()
        return cls(context.get_node_id(), address, tuple(map(str, gpus)))

    def device(self, variables: Variables) -> int | None:
        """Return the index of its first GPU, as torch counts them; None if Ray gave it none.

        Ray usually shows an actor only its own GPUs. With ``RAY_EXPERIMENTAL_NOSET_*`` the actor
        sees all GPUs of the node, or those that the framework chose.

        Raises:
            LaunchError: the actor can't see the GPU that Ray gave it.
        """
        if not self.gpus:
            return None
        visible = [name.strip() for name in variables.plain(_VISIBLE).split(",") if name.strip()]
        if not visible and self.gpus[0].isdecimal():
            return int(self.gpus[0])
        if self.gpus[0] in visible:
            return visible.index(self.gpus[0])
        raise LaunchError(
            f"Ray gave this actor GPU {self.gpus[0]}, but {_VISIBLE}={','.join(visible)!r} does "
            f"not show it. Leave {_VISIBLE} to Ray, or let it name the GPUs of the node; or pass "
            "the session a launch= with the local_rank= that is meant."
        )

    def refuse_alone(self) -> None:
        """Raise a LaunchError: nothing says which rank this actor is."""
        raise LaunchError(
            f"this process is a Ray actor on {self.address}, and no variable says which rank it "
            "is: each actor would train alone. On the driver, megapg.rl.ray.launches(actors) makes "
            "a launch for each; pass it as launch=. Or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT in each. If alone is meant, pass launch=megapg.Launch.alone()."
        )
