"""Create WORLD and ``parallel_state`` as a program without megapg does."""

import os
import warnings
from contextlib import contextmanager

import torch.distributed as dist

from megapg import torch_private
from megapg.megatron import parallel_state
from megapg.testing import megatron_on_cpu


@contextmanager
def on_globals(run, name):
    """Context with WORLD and the globals of a run. ``name`` is new in the process."""
    with world(name):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=run.tp,
            pipeline_model_parallel_size=run.pp,
            virtual_pipeline_model_parallel_size=run.vpp,
            expert_model_parallel_size=run.ep,
            expert_tensor_parallel_size=run.expt_tp,
            create_gloo_process_groups=False,
        )
        with megatron_on_cpu():
            yield


@contextmanager
def world(name):
    """Context with WORLD. At its end the globals are destroyed, if the block initialised them."""
    warnings.simplefilter("ignore")  # Megatron-core warns about features that a CPU lacks
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    yield
    parallel_state.destroy_model_parallel()
    for group in torch_private.known_groups():  # otherwise torch sometimes hangs or aborts
        torch_private.part_in_peace(group)
    del group
    dist.destroy_process_group()
