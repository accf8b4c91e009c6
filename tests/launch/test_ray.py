"""Ray as a launcher: actors on two nodes of a real cluster, in frameworks' environments too."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from ports import free_port
from processes import captured

from megapg.errors import LaunchError
from megapg.launch import Launch

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import (  # noqa: E402
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from ray_trainer import SOON, Trainer  # noqa: E402

import megapg.rl.ray  # noqa: E402

pytestmark = pytest.mark.ray

GRACE = 20.0  # seconds that a loaded machine may take beyond a deadline
NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@pytest.fixture(scope="module")
def nodes():
    """Start a cluster of two nodes with four pretended GPUs each; return the ids of the nodes."""
    size = {"num_cpus": 4, "num_gpus": 4, "object_store_memory": 80 * 2**20}
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # conftest hides all GPUs
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield from _cluster(size)


def _cluster(size):
    cluster = Cluster(initialize_head=True, head_node_args=size)
    try:
        cluster.add_node(**size)
        path = os.pathsep.join(filter(None, sys.path))
        ray.init(
            cluster.address,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
        )
        yield [node["NodeID"] for node in ray.nodes()]
    finally:
        ray.shutdown()
        cluster.shutdown()


def start_on(node, *, variables=None, environment=None, **options):
    """Start an actor on a node of this id, with variables of Ray's and of its constructor."""
    options.setdefault("scheduling_strategy", NodeAffinitySchedulingStrategy(node, soft=False))
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    options.setdefault("num_cpus", 0.1)
    return ray.remote(Trainer).options(**options).remote(**(environment or {}))


@pytest.fixture
def start(nodes):
    """Return a function that starts an actor on a node; they are killed at the end."""
    with contextlib.ExitStack() as started:

        def start(node, **options):
            actor = start_on(nodes[node], **options)
            started.callback(ray.kill, actor)
            return actor

        yield start


@pytest.fixture(scope="module")
def three(nodes):
    """Three actors on two nodes, which Ray restarts. It takes seconds to start an actor."""
    actors = [start_on(nodes[node], max_restarts=-1) for node in (0, 1, 0)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def everywhere(actors, method, *arguments, **more):
    return ray.get([getattr(actor, method).remote(*arguments, **more) for actor in actors])


def open_all(actors, launches, **more):
    return ray.get([a.open.remote(each, **more) for a, each in zip(actors, launches, strict=True)])


# -- on the driver ---------------------------------------------------------------------------------


def test_each_actor_gets_a_launch(start):
    """Ranks count node by node, whatever the order of the actors, and tensor parallelism stays."""
    actors = [start(node) for node in (1, 0, 1, 0)]
    launches = megapg.rl.ray.launches(actors)
    assert [launch.rank for launch in launches] == [0, 2, 1, 3]
    assert [launch.local_rank for launch in launches] == [0, 0, 1, 1]
    assert {launch.local_world_size for launch in launches} == {2}
    assert len({(launch.address, launch.port, launch.job) for launch in launches}) == 1
    assert [launch.socket is not None for launch in launches] == [True, False, False, False]
    assert launches[0].hosts == (socket.gethostname(),) * 4

    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("", launches[0].port))  # rank 0 keeps it
    open_all(actors, launches)
    assert everywhere(actors, "ranks", "tp") == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert everywhere(actors, "step") == [1.0, 5.0, 1.0, 5.0]

    lost, *others = actors
    ray.kill(lost)  # rank 0, for good
    again = megapg.rl.ray.launches(others)
    assert {launch.job for launch in again}.isdisjoint({launches[0].job})
    open_all(others, again, tp=3)
    assert everywhere(others, "step") == [3.0] * 3


def test_placement_groups_and_gpus(start):
    """Actors with a GPU each, and actors that share one, in a placement group over two nodes."""
    group = placement_group([{"GPU": 2, "CPU": 2}] * 2, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    try:
        actors = []
        for bundle, gpus in ((0, 1), (1, 0.5), (0, 0.5), (1, 1)):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actors.append(start(0, num_gpus=gpus, scheduling_strategy=place))
        launches = megapg.rl.ray.launches(actors)
        assert [launch.rank for launch in launches] == [0, 2, 1, 3]
        # Ray shows each actor its own GPU only.
        assert [launch.local_rank for launch in launches] == [0] * 4
        open_all(actors, launches)
        assert everywhere(actors, "step") == [1.0, 5.0, 1.0, 5.0]
    finally:
        remove_placement_group(group)


def test_the_index_where_ray_hides_no_gpus(start):
    """With NOSET an actor sees the node's GPUs, and its index is that of the GPU Ray gave it."""
    actors = [start(0, num_gpus=1, variables=NOSET) for _ in range(3)]
    given = [launch.local_rank for launch in megapg.rl.ray.launches(actors)]
    first = lambda _: ray.get_runtime_context().get_accelerator_ids()["GPU"][0]  # noqa: E731
    assert given == list(map(int, ray.get([each.__ray_call__.remote(first) for each in actors])))


def test_actors_that_can_not_answer(start, three):
    dead, busy = start(0), start(0, scheduling_strategy="DEFAULT", num_gpus=5)
    ray.kill(dead)
    megapg.rl.ray.launches(three)  # they have started
    with pytest.raises(LaunchError) as failed:
        megapg.rl.ray.launches([three[0], dead, busy], timeout=5)
    assert "actors[0]" not in str(failed.value)
    assert "actors[1] can't run" in str(failed.value)
    assert "actors[2] did not answer within 5 s" in str(failed.value)
    with pytest.raises(ValueError, match="at least one"):
        megapg.rl.ray.launches([])


# -- in the actor ----------------------------------------------------------------------------------

PLACE = {"MASTER_ADDR": "127.0.0.1"}

# What each framework sets in an actor: Ray's options, runtime_env, and its constructor's variables.
# Two workers on one node; the index that is right for each.
FRAMEWORKS = {
    # verl/single_controller/ray/base.py: _create_worker
    "verl": (
        [
            {"num_gpus": 1, "variables": {"RAY_LOCAL_WORLD_SIZE": "2", "WG_BACKEND": "ray"}}
            for _ in range(2)
        ],
        {0: 0, 1: 0},
    ),
    # nemo_rl/distributed/worker_groups.py; LOCAL_RANK is the bundle
    "NeMo-RL": (
        [{"num_gpus": 1, "variables": {"LOCAL_RANK": str(bundle)}} for bundle in (2, 3)],
        {0: 0, 1: 0},
    ),
    # slime/ray/train_actor.py: the position of the GPU among those visible
    "slime": ([{"num_gpus": 1, "variables": NOSET} for _ in range(2)], "ids"),
    # roll/distributed/executor/cluster.py: a hundredth of a GPU for Ray, one visible GPU
    "ROLL": (
        [
            {
                "num_gpus": 0.01,
                "variables": {**NOSET, "CUDA_VISIBLE_DEVICES": gpu, "LOCAL_RANK": "0"},
            }
            for gpu in ("2", "3")
        ],
        {0: 0, 1: 0},
    ),
    # areal/infra/controller/train_controller.py
    "AReaL": (
        [{"num_gpus": 1, "environment": {"LOCAL_RANK": "0"}} for _ in range(2)],
        {0: 0, 1: 0},
    ),
    # swift/ray/megatron/worker_group.py: the node's GPUs visible, none asked of Ray
    "ms-swift": (
        [
            {
                "num_gpus": 0,
                "variables": {
                    **NOSET,
                    "CUDA_VISIBLE_DEVICES": "2,3",
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": "2",
                },
            }
            for local in range(2)
        ],
        {0: 0, 1: 1},
    ),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_environment_of_a_framework(framework, start):
    """The session needs no launch=, and takes the GPU that the framework means."""
    each, right = FRAMEWORKS[framework]
    place = {**PLACE, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    actors = []
    for rank, options in enumerate(each):
        environment = {**place, "RANK": str(rank), **options.get("environment", {})}
        actors.append(start(0, **{**options, "environment": environment}))
    found = everywhere(actors, "detected")
    assert all(isinstance(launch, Launch) for launch in found), found
    indices = {launch.rank: launch.local_rank for launch in found}
    if right == "ids":
        assert len(set(indices.values())) == 2
    else:
        assert indices == right
    everywhere(actors, "open")
    assert everywhere(actors, "step") == [1.0, 1.0]


def test_a_gpu_that_the_actor_does_not_see(start):
    environment = {**PLACE, "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "0"}
    environment["CUDA_VISIBLE_DEVICES"] = "8,9"
    actor = start(0, num_gpus=1, environment=environment)
    assert "CUDA_VISIBLE_DEVICES='8,9' does not show it" in str(ray.get(actor.detected.remote()))


def test_an_actor_without_a_rank_does_not_train_alone(start):
    actor = start(0)
    refused = str(ray.get(actor.detected.remote()))
    assert "megapg.rl.ray.launches(actors)" in refused
    assert "launch=megapg.Launch.alone()" in refused
    ray.get(actor.open.remote(Launch.alone(), tp=1))
    assert ray.get(actor.step.remote()) == 0.0


def test_a_task_and_the_driver_may_be_alone(nodes):
    @ray.remote
    def task():
        from megapg.launch import detect

        return detect().world_size

    assert ray.get(task.remote()) == 1
    from megapg.launch import detect

    assert detect().world_size == 1


# -- faults ----------------------------------------------------------------------------------------


def lose(actor, pid, how):
    if how == "killed":
        ray.kill(actor, no_restart=False)
    else:
        os.kill(pid, signal.SIGSTOP)


def until_restarted(actor, pid):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(ray.exceptions.RayActorError):
            if ray.get(actor.where.remote())[0] != pid:
                return
    pytest.fail(f"Ray did not restart {actor}")


@pytest.mark.parametrize(
    ("phase", "how", "rank"),
    [
        ("open", "killed", 2),
        ("step", "killed", 1),
        ("check", "killed", 0),
        ("suspend", "killed", 2),
        ("close", "killed", 1),
        ("step", "stopped", 2),
        ("close", "stopped", 0),
    ],
)
def test_an_actor_is_lost(phase, how, rank, three):
    """The others raise an error in bounded time, which names rank and host.

    Then Ray restarts the actor, all open a session again, and the others keep their models.
    """
    launches = megapg.rl.ray.launches(three)
    actors = [actor for _, actor in sorted(zip((e.rank for e in launches), three, strict=True))]
    open_all(three, launches, tp=3)
    assert everywhere(actors, "step") == [3.0] * 3
    others = [actor for actor in actors if actor is not actors[rank]]
    pid, _ = ray.get(actors[rank].where.remote())
    launches = megapg.rl.ray.launches(actors)
    lose(actors[rank], pid, how)
    began = time.monotonic()
    try:
        if phase == "open":
            for_others = [launch for launch in launches if launch.rank != rank]
            more = {"tp": 3, "timeout": SOON}
            pairs = zip(others, for_others, strict=True)
            errors = ray.get([a.guarded.remote("open", launch, **more) for a, launch in pairs])
        else:
            errors = everywhere(others, "guarded", phase)
        if phase == "step":  # the error of gloo names no rank
            assert all(errors)
            errors = everywhere(others, "guarded", "check")
    finally:
        if how == "stopped":
            os.kill(pid, signal.SIGKILL)
    assert time.monotonic() - began < 2 * SOON + GRACE
    for error in errors:
        assert re.search(rf"rank {rank}\b", error), error
        assert socket.gethostname() in error, error

    until_restarted(actors[rank], pid)
    kept = open_all(actors, megapg.rl.ray.launches(actors), tp=3)
    assert kept == [actor in others for actor in actors]
    assert everywhere(actors, "step") == [3.0] * 3


def test_a_restart_with_variables_of_a_framework(start):
    """All ranks meet at the same address and port again, also if rank 0 is restarted."""
    place = {**PLACE, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    each = [{**place, "RANK": str(rank)} for rank in range(2)]
    actors = [start(0, max_restarts=1, environment=environment) for environment in each]
    everywhere(actors, "open")
    assert everywhere(actors, "step") == [1.0, 1.0]
    pids = [pid for pid, _ in everywhere(actors, "where")]
    for killed in (1, 0):
        ray.kill(actors[killed], no_restart=False)
        until_restarted(actors[killed], pids[killed])
        assert everywhere(actors, "open") == [killed == 1, killed == 0]
        assert everywhere(actors, "step") == [1.0, 1.0]


# -- the guide -------------------------------------------------------------------------------------


def test_the_example_of_the_guide(nodes, tmp_path):
    page = Path(__file__).parents[2] / "migration_guide" / "rl-framework.md"
    shown = r"`train_on_ray.py`:\n\n```python\n(.*?)```"
    [script] = re.findall(shown, page.read_text(), re.S)
    (tmp_path / "train_on_ray.py").write_text(script)
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = captured([sys.executable, "train_on_ray.py"], timeout=200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"^sums: (.*)$", done.stdout, re.M) == ["[2.0, 2.0]"] * 4
