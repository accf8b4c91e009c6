"""One method of a trainer asks the globals; the trainer has a collection (as in llm-jp)."""

import torch
import torch.distributed as dist
from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "token_count"
GIVEN = "token_count"


class Trainer:
    def __init__(self, pg_collection):
        self.pg_collection = pg_collection

    def token_count(self, tokens):
        count = torch.tensor(float(tokens))
        dist.all_reduce(count, group=mpu.get_data_parallel_group(with_context_parallel=True))
        return count.item()


def program(pg):
    return Trainer(pg).token_count(10)
