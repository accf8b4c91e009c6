"""A conversion sets sizes and ranks with ``set_*``, in a process without torch.distributed."""

from megatron.core import mpu

WORLD = 0
AMBIGUOUS = False


def program():
    shards = []
    mpu.set_tensor_model_parallel_world_size(2)
    for rank in range(2):
        mpu.set_tensor_model_parallel_rank(rank)
        size = mpu.get_tensor_model_parallel_world_size()
        shards.append((mpu.get_tensor_model_parallel_rank(), size))
    mpu.set_tensor_model_parallel_world_size(None)
    mpu.set_tensor_model_parallel_rank(None)
    assert shards == [(0, 2), (1, 2)]
