"""A fork puts groups into the private globals by hand: nothing reports a second layout."""

import torch.distributed as dist
from layouts import open_session
from megatron.core import mpu

from megapg.megatron import parallel_state


def columns(width, pg_collection):
    assert pg_collection.size("tp") == 2
    return width // mpu.get_tensor_model_parallel_world_size()


def program():
    alone = [dist.new_group([rank]) for rank in (0, 1)][dist.get_rank()]
    with open_session(tp=2) as session:
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = alone
        width = columns(8, session.groups)
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = None
    dist.destroy_process_group(alone)
    return width


def meant():
    with open_session(tp=2) as session:
        return 8 // session.groups.size("tp")
