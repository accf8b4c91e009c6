"""A forked worker of a data loader reads the globals, which showed its groups before the fork."""

from megatron.core import mpu
from torch.utils.data import DataLoader, Dataset

import megapg

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}


class Rows(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return mpu.get_data_parallel_rank() + mpu.get_data_parallel_world_size() * index


def first_batch(pg_collection):
    loader = DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    return next(iter(loader)).tolist(), pg_collection.rank("dp")


def program(pg):
    with megapg.published(pg):
        rows, rank = first_batch(pg)
        assert rows == [rank, rank + 2]
