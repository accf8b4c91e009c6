"""Run a session of four ranks on a stand-in for torchcomms."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torchcomms

import megapg
from megapg import torch_private
from megapg.communicators.needed import families
from megapg.errors import UnsupportedOptionError


def run() -> dict[str, object]:
    """Check the groups on this rank, and return the results."""
    with megapg.session(tp=2, pp=2, name="first") as session:
        pg, rank = session.groups, dist.get_rank()
        for field in ("tp", "pp", "dp", "mp", "embd", "pos_embd"):
            group = getattr(pg, field)
            if group is None:
                continue
            value = torch.tensor([float(rank)])
            dist.all_reduce(value, group=group)
            assert value.item() == sum(pg.ranks(field)), field
            assert group.group_name.startswith("megapg/first/1/"), group.group_name
        described = session.describe()
        made = families(session.layout, session._recipe)
        mine = [each.of(rank) for each in made]
        assert len(described["communicators"]) == len([each for each in mine if each is not None])
        # Apart from the splits in C++, only splits without this rank are recorded.
        assert len(torchcomms.Comm.splits) == mine.count(None)
        assert all(ranks == () for ranks, _ in torchcomms.Comm.splits)
        wanted = torch_private.NewGroup(
            (0, 1) if rank < 2 else (2, 3),
            "gloo",
            f"with hints {rank // 2}",
            "with hints",
            timedelta(seconds=60),
            {"max_ctas": "8"},
        )
        hinted = torch_private.split_world(wanted, rank)
        dist.all_reduce(value := torch.ones(1), group=hinted)
        assert value.item() == 2
        assert torchcomms.Comm.hints == [{"max_ctas": "8"}]
        assert torch_private.knows(hinted)
        torch_private.destroy(hinted)
        try:
            megapg.session(
                tp=2, pp=2, name="options", options={"tp": megapg.CommunicatorOptions(max_ctas=8)}
            )
            raise AssertionError("options were dropped")
        except UnsupportedOptionError as error:
            refused = str(error)
        try:
            megapg.session(ranks=[3, 1, 0, 2], tp=2, pp=2, name="order")
            raise AssertionError("the order was dropped")
        except UnsupportedOptionError as error:
            out_of_order = str(error)
        again = megapg.session(tp=2, name="again")
        value = torch.ones(1)
        dist.all_reduce(value, group=again.groups.dp)
        assert value.item() == 2
        again.close()
    assert not dist.is_initialized()
    return {
        "families": len(made),
        "mine": len(mine) - mine.count(None),
        "refused": refused,
        "out of order": out_of_order,
    }
