"""A data loader starts a worker that uses the rank and size that were read from the collection."""

from rows import Rows
from torch.utils.data import DataLoader

LAYOUTS = {"globals": {"tp": 2}, "mine": {}}


def program(pg):
    rows = Rows(pg.rank("dp"), pg.size("dp"))
    for start in ("fork", "spawn"):
        loader = DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context=start)
        assert next(iter(loader)).tolist() == [pg.rank("dp"), pg.rank("dp") + 2]
