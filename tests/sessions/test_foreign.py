"""A joint group with processes that do not use megapg: SGLang's and vLLM's own functions."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fault_driver import Forge

import megapg
from megapg.errors import RendezvousError
from megapg.rl.joint_meeting import Invitation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CLIENT = Path(__file__).parents[1] / "support" / "foreign_client.py"
SIZES = {"trainer": 2, "rollout": 2}
# Seconds for the imports of a foreign process, on a busy machine.
STARTING = 60.0


def unpacked(project, version):
    corpora = pytest.importorskip("benchmarks.corpora", reason="benchmarks/ is not here")
    try:
        return corpora.Wheel(project, version, python="3.11").tree()
    except RuntimeError as error:
        pytest.skip(f"offline: {error}")


@pytest.fixture(scope="module")
def forge():
    with Forge(__name__) as forge:
        yield forge


@pytest.fixture
def address():
    with megapg.SharedStore("127.0.0.1") as store:
        yield store.address


class Foreign:
    """Foreign processes, in which SGLang's or vLLM's own functions run."""

    def __init__(self, kind, tree, ranks, **env):
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(CLIENT), kind, str(tree), str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **env},
            )
            for rank in range(ranks)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()

    def invite(self, invitation):
        for process in self.processes:
            process.stdin.write(json.dumps(dataclasses.asdict(invitation)) + "\n")
            process.stdin.flush()

    def said(self):
        return [json.loads(process.stdout.readline()) for process in self.processes]


def as_sglang_does(joint):
    """Do the collectives of the foreign processes."""
    weight = torch.tensor([1.0, 2.0, 3.0]) * joint.generation
    dist.broadcast(weight, group_src=0, group=joint.group)
    total = torch.tensor(float(joint.rank))
    dist.all_reduce(total, group=joint.group)
    return total.item()


def trainer(address, tree):
    """Run one of two trainer ranks. Rank 0 also starts the foreign processes."""
    rank = int(os.environ["RANK"])
    with Foreign("sglang", tree, 2 if rank == 0 else 0) as rollout:
        options = {"timeout": STARTING, "collective_timeout": timedelta(seconds=5)}
        with megapg.joint_group(
            "weights",
            side="trainer",
            rank=rank,
            sizes=SIZES,
            store=address,
            foreign={"rollout": rollout.invite},
            **options,
        ) as joint:
            found = [as_sglang_does(joint), rollout.said()]
            joint.check()
            joint.renew()
            found += [as_sglang_does(joint), rollout.said()]
            for process in rollout.processes:
                process.kill()
            since = time.monotonic()
            with pytest.raises(RuntimeError):
                as_sglang_does(joint)
            assert time.monotonic() - since < 60.0
            joint.check()  # the trainers are all here
        return found


def test_sglang_joins_as_it_is(forge, address):
    tree = unpacked("sglang", "0.5.23")
    first, second = forge.results(partial(trainer, address, tree), 2, deadline=240.0)
    assert first == [
        6.0,
        [[[1.0, 2.0, 3.0], 6.0]] * 2,
        6.0,
        [[[2.0, 4.0, 6.0], 6.0]] * 2,
    ]
    assert second == [6.0, [], 6.0, []]


def waits_in_vain(address, tree):
    """Return the missing ranks if one of two comes, and then if none comes."""
    rank = int(os.environ["RANK"])
    missing = []
    with Foreign("sglang", tree, 1 if rank == 0 else 0) as rollout:
        for timeout, invite in ((20.0, rollout.invite), (5.0, lambda invitation: None)):
            with pytest.raises(RendezvousError, match="side 'rollout' rank 1") as caught:
                megapg.joint_group(
                    "weights",
                    side="trainer",
                    rank=rank,
                    sizes=SIZES,
                    store=address,
                    timeout=timeout,
                    foreign={"rollout": invite},
                )
            assert " did not come to the store" in str(caught.value)
            missing.append(caught.value.missing)
    return missing


def test_a_missing_foreign_rank_is_named(forge, address):
    tree = unpacked("sglang", "0.5.23")
    ends = forge.results(partial(waits_in_vain, address, tree), 2, deadline=120.0)
    assert ends == [[(3,), (2, 3)]] * 2


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="its compiled packages are for 3.11")
def test_vllm_exchanges_objects_over_a_shared_store(address):
    """vLLM's group holds no torch group: it exchanges objects over a store, which may be ours."""
    tree = unpacked("vllm", "0.33.0")
    imported = ("pyzmq", "27.3.0"), ("regex", "2026.11.19"), ("urllib3", "2.8.0")
    needed = [str(unpacked(*each)) for each in imported]
    host, _, port = address.removeprefix("tcp://").partition(":")
    invitation = Invitation(host, int(port), 0, 3, "", "")
    with Foreign("vllm", tree, 3, PYTHONPATH=os.pathsep.join(needed)) as ranks:
        ranks.invite(invitation)
        assert ranks.said() == [["from rank 0", [0, 1, 2], False]] * 3
