"""Ray as a launcher: a rank, and a place to meet, for each of several actors.

>>> import megapg.rl.ray
>>> launches = megapg.rl.ray.launches(actors)
>>> ray.get([actor.train.remote(launch) for actor, launch in zip(actors, launches)])

``train`` opens ``megapg.session(layout, launch=launch)``. If a framework sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT in its actors itself, the session reads those and needs no ``launch=``.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import ray
from ray.actor import ActorHandle

from megapg.errors import LaunchError
from megapg.launch import Launch
from megapg.launch.environment import Variables
from megapg.launch.ray_actor import RayActor

__all__ = ["launches"]

_T = TypeVar("_T")


class _Place(NamedTuple):
    """The process of an actor."""

    node: str  # Ray's id of it
    address: str
    host: str
    device: int | None


def launches(actors: Sequence[ActorHandle], *, timeout: float = 60.0) -> list[Launch]:
    """Return a launch for each actor, in the order of ``actors``.

    Ranks count node by node, so the actors of a node are neighbours. If ``tp`` is the innermost
    dimension of the layout, tensor parallelism stays on a node. Nodes, and the actors of each node,
    keep the order of ``actors``. Rank 0 binds a free port now and keeps it until its session opens.

    If Ray restarts an actor, call this again, and open the session on all actors again with the new
    launches. An actor can belong to one list of launches after another.

    Args:
        actors: handles of actors of any class. Each runs a short function for this.
        timeout: seconds for all actors to answer. An actor answers after it has been scheduled or
            restarted, its constructor has returned, and it has done the calls before this one.

    Raises:
        LaunchError: an actor is dead or did not answer, or does not see the GPU that Ray gave it;
            names the actors by their index in ``actors``.
        ValueError: there are no actors.
    """
    if not actors:
        raise ValueError("launches() needs at least one actor")
    places = _ask(actors, _describe, timeout)
    nodes = list(dict.fromkeys(place.node for place in places))
    order = sorted(range(len(actors)), key=lambda index: nodes.index(places[index].node))
    [(port, descriptor)] = _ask([actors[order[0]]], _bind, timeout)
    job = f"ray {uuid.uuid4()}"
    made: dict[int, Launch] = {}
    for rank, index in enumerate(order):
        place = places[index]
        here = [each for each in order if places[each].node == place.node]
        made[index] = Launch(
            launcher="Ray",
            rank=rank,
            world_size=len(actors),
            local_rank=here.index(index) if place.device is None else place.device,
            local_world_size=len(here),
            address=places[order[0]].address,
            port=port,
            socket=descriptor if rank == 0 else None,
            job=job,
            hosts=tuple(places[each].host for each in order),
            origin="a port that rank 0's actor bound",
        )
    return [made[index] for index in range(len(actors))]


def _describe(actor: object) -> _Place:
    """Runs in each actor."""
    here = RayActor.here()
    assert here is not None
    return _Place(here.node, here.address, socket.gethostname(), here.device(Variables(os.environ)))


def _bind(actor: object) -> tuple[int, int]:
    """Bind a free port, in the actor of rank 0. Return it, and the descriptor of its socket."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    bound = socket.socket(family)
    if family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    bound.bind(("", 0))
    return bound.getsockname()[1], bound.detach()


def _ask(
    actors: Sequence[ActorHandle], function: Callable[[object], _T], timeout: float
) -> list[_T]:
    """Return the result of a function that runs in each actor, also if Ray restarts the actor."""
    retried = [actor.__ray_call__.options(max_task_retries=-1) for actor in actors]
    calls = [call.remote(function) for call in retried]
    answered, late = ray.wait(calls, num_returns=len(calls), timeout=timeout)
    for call in late:
        ray.cancel(call)
    answers: list[_T] = []
    problems: dict[int, str] = {}
    for index, call in enumerate(calls):
        if call not in answered:
            problems[index] = f"did not answer within {timeout:g} s"
            continue
        try:
            answers.append(ray.get(call))
        except ray.exceptions.RayTaskError as error:
            problems[index] = f"failed: {error.cause}"
        except ray.exceptions.RayError as error:  # it is dead, or can't be scheduled
            problems[index] = f"can't run ({str(error).strip().splitlines()[-1]})"
    if problems:
        raise LaunchError(
            "not every actor can be given a rank: "
            + "; ".join(f"actors[{index}] {problem}" for index, problem in problems.items())
            + ". An actor that is busy or not scheduled yet does not answer: see `ray status`."
        )
    return answers
