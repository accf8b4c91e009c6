"""A process that uses SGLang's or vLLM's own functions to meet the ranks of a joint group.

It imports nothing of megapg. It reads one invitation in JSON per line, and prints what it received.

Usage: foreign_client.py sglang TREE RANK | vllm TREE RANK
"""

import ast
import importlib
import json
import sys
import types
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def function_of_sglang(tree):
    """Return the unmodified ``init_custom_process_group`` of a wheel.

    Its module imports the packages of a server (orjson, triton, Pillow and more). Only the function
    and the one global that it reads are taken from the file.
    """
    path = Path(tree, "sglang/srt/utils/common.py")
    wanted = ("torch_release", "init_custom_process_group")
    found = [
        node
        for node in ast.parse(path.read_text()).body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in wanted)
    ]
    assert len(found) == 2, found
    from packaging import version

    space = {"torch": torch, "pkg_version": version}
    exec(compile(ast.Module(found, []), str(path), "exec"), space)
    return space["init_custom_process_group"]


def modules_of_vllm(tree):
    """Return vLLM's modules of stateless groups and of NCCL.

    ``vllm.distributed`` itself imports the whole engine, so it is an empty package here.
    """
    sys.path.insert(0, str(tree))
    package = types.ModuleType("vllm.distributed")
    package.__path__ = [str(Path(tree, "vllm/distributed"))]
    sys.modules["vllm.distributed"] = package
    names = ("utils", "device_communicators.pynccl")
    return [importlib.import_module(f"vllm.distributed.{name}") for name in names]


def invitations():
    for line in sys.stdin:
        yield json.loads(line)


def sglang(tree, rank):
    init_custom_process_group = function_of_sglang(tree)
    for said in invitations():
        # as in sglang/srt/model_executor/model_runner_components/weight_updater.py
        group = init_custom_process_group(
            backend=said["backend"],
            init_method=f"tcp://{said['master_address']}:{said['master_port']}",
            timeout=timedelta(seconds=20),
            world_size=said["world_size"],
            rank=said["rank_offset"] + rank,
            group_name=said["group_name"],
        )
        weight = torch.zeros(3)
        dist.broadcast(weight, src=0, group=group)
        total = torch.tensor(float(group.rank()))
        dist.all_reduce(total, group=group)
        print(json.dumps([weight.tolist(), total.item()]), flush=True)
        dist.destroy_process_group(group)


def vllm(tree, rank):
    utils, pynccl = modules_of_vllm(tree)
    for said in invitations():
        place = said["master_address"], said["master_port"]
        number, size = said["rank_offset"] + rank, said["world_size"]
        if number == 0:  # create() would host another store
            store = dist.TCPStore(*place, timeout=timedelta(seconds=20))
            group = utils.StatelessProcessGroup(number, size, store)
        else:
            group = utils.StatelessProcessGroup.create(
                *place, rank=number, world_size=size, store_timeout=20
            )
        received = group.broadcast_obj("from rank 0" if number == 0 else None, src=0)
        everyone = group.all_gather_obj(group.rank)
        group.barrier(timeout=20.0)
        communicator = pynccl.PyNcclCommunicator(group, device="cpu")
        # Without a GPU, `self.nccl = NCCLLibrary(library_path)` of its constructor raises, so the
        # communicator is disabled before it exchanges the id of NCCL.
        exchanged = communicator.available or hasattr(communicator, "unique_id")
        print(json.dumps([received, everyone, exchanged]), flush=True)


if __name__ == "__main__":
    kind, tree, rank = sys.argv[1:]
    {"sglang": sglang, "vllm": vllm}[kind](tree, int(rank))
