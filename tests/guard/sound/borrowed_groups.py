"""A collection of groups that the user made is passed and published, beside other globals."""

import torch
import torch.distributed as dist
from layouts import globals_of, open_session
from megatron.core import mpu
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

import megapg


def program():
    with globals_of(), open_session(tp=2):
        both, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in (0, 1)]
        me = dist.get_rank()
        mine = megapg.ProcessGroupCollection.from_groups(tp=both, dp=alone[me], pp=alone[me])
        whole = gather_from_tensor_model_parallel_region(torch.full((1, 1), me), group=mine.tp)
        assert whole.tolist() == [[0, 1]]
        with megapg.published(mine):
            assert mpu.get_tensor_model_parallel_world_size() == 2
        for group in (both, alone[me]):
            dist.destroy_process_group(group)
