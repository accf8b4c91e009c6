"""Questions that a rank asks in many tests."""

import os

import torch
import torch.distributed as dist


def me():
    return int(os.environ["RANK"])


def registered():
    """Return the number of groups that torch knows in this process."""
    return len(dist.distributed_c10d._world.pg_map)


def works(group, ranks=2):
    """True if a collective on a group of this many ranks has the right result."""
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item() == ranks
