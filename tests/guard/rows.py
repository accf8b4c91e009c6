"""A data set for the corpus. It imports only torch, because a spawned worker imports this file."""

from torch.utils.data import Dataset, get_worker_info


class Rows(Dataset):
    """The rows of one data parallel rank; their numbers identify the rank."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __len__(self):
        return 2

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return self.rank + self.size * index
