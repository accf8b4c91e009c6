"""A stand-in for torchcomms over gloo: the part that torch 2.13 calls.

The package index has only an empty torchcomms. As in the real one, ``TORCHCOMM_RANK`` and
``TORCHCOMM_SIZE`` identify a rank, and a store serves one communicator. A split takes either its
members or an empty list.
"""

import os
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo


class Comm:
    """One communicator.

    ``splits`` lists the splits that this process asked for, ``hints`` their hints.
    """

    splits, hints = [], []

    def __init__(self, backend, name, store=None):
        self.backend, self.name, self.store = backend, name, store

    def split(self, ranks, name, hints=None, timeout=None):
        rank = self.backend.rank()
        assert not ranks or rank in ranks, "a rank that is no member names members"
        Comm.splits.append((tuple(ranks), name))
        if not ranks:
            return None
        Comm.hints.append(hints)
        return Comm((PrefixStore(name, self.store), ranks.index(rank), len(ranks)), name)

    def finalize(self):
        pass


class _BackendWrapper(ProcessGroupGloo):
    def __init__(self, comm):
        store, rank, size = comm.backend
        super().__init__(store, rank, size, timedelta(seconds=60))
        comm.backend = self
        self.comm = comm

    def get_comm(self):
        return self.comm

    def split(self, *arguments):
        raise AssertionError("torch splits in C++, which does not come by here")


def new_comm(backend, device, name, store, hints):
    assert (backend, hints) == ("gloo", {"persistent_store": "true"})
    assert store.add("communicators", 1) <= int(os.environ["TORCHCOMM_SIZE"]), "one store, two"
    rank, size = int(os.environ["TORCHCOMM_RANK"]), int(os.environ["TORCHCOMM_SIZE"])
    return Comm((store, rank, size), name, store)


# C++ turns a split into a plain gloo backend, whose communicator torch reads as well.
ProcessGroupGloo.get_comm = lambda backend: Comm(backend, "split")
