"""Collections from and to HyperCommGrid: the same groups and ranks, without new groups."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid

import megapg
from megapg import torch_private
from megapg.errors import LayoutError, StaleGroupError
from megapg.megatron import from_grid, to_grid
from megapg.testing import run_distributed

pytestmark = pytest.mark.contract

SIZES = {"tp": 2, "pp": 2, "ep": 2, "expt_tp": 1}
DENSE = {
    "tp": ["tp"],
    "cp": ["cp"],
    "dp": ["dp"],
    "pp": ["pp"],
    "mp": ["tp", "pp"],
    "tp_dp_cp": ["tp", "cp", "dp"],
    "dp_cp": ["cp", "dp"],
}
EXPERT = {"ep": ["ep"], "expt_tp": ["tp"], "expt_dp": ["dp"], "tp_ep_pp": ["tp", "ep", "pp"]}


def there_and_back():
    dist.init_process_group("gloo")
    with megapg.session(**SIZES) as session:
        pg = session.groups
        many = len(torch_private.known_groups())
        dense, expert = to_grid(pg)
        assert isinstance(dense, HyperCommGrid)
        for grid, fields in ((dense, DENSE), (expert, EXPERT)):
            for field, dims in fields.items():
                assert grid.get_pg(dims) is getattr(pg, field), field
                (mine,) = [e for e in grid._gen_rank_enum(ordered(grid, dims)) if pg_rank() in e]
                assert sorted(mine) == sorted(pg.ranks(field)), field
            with pytest.raises(KeyError, match="already been created"):
                grid.create_pg("pp" if grid is dense else "ep")
        again = from_grid(dense, expert)
        assert again.layout == pg.layout
        for field in (*DENSE, *EXPERT):
            assert getattr(again, field) is getattr(pg, field), field
        assert len(torch_private.known_groups()) == many
    with pytest.raises(StaleGroupError):
        to_grid(pg)

    # Grids that made their own groups, without the dimensions of size 1.
    dense = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"], backend="gloo")
    expert = HyperCommGrid([1, 2, 2, 2], ["tp", "ep", "dp", "pp"], backend="gloo")
    for grid, dims in ((dense, "tp"), (dense, "pp"), (expert, "ep")):
        grid.create_pg(dims)
    found = from_grid(dense, expert)
    assert {*found.present()} == {"tp", "pp", "ep", "tp_cp"}  # without cp, cp has size 1
    assert found.layout == megapg.layout.ParallelLayout(world_size=8, **SIZES)
    assert found.ranks("ep") == found.layout.members("ep", pg_rank())
    total = torch.ones(1)
    dist.all_reduce(total, group=found.ep)
    assert total == 2

    turned = from_grid(HyperCommGrid([2, 2, 2], ["cp", "tp", "pp"], backend="gloo"))
    assert list(turned.layout.partition("pp")) == [(at, at + 4) for at in range(4)]
    assert turned.layout.members("tp", 0) == (0, 2)
    other = HyperCommGrid([2, 2, 2], ["pp", "tp", "dp"], backend="gloo")
    with pytest.raises(LayoutError, match="ep has the ranks"):
        from_grid(other, expert)
    with pytest.raises(LayoutError, match="expert grid is over 4 ranks from rank 4"):
        from_grid(dense, HyperCommGrid([2, 2], ["ep", "pp"], rank_offset=4))
    with pytest.raises(LayoutError, match="the dense grid has vp=2"):
        from_grid(HyperCommGrid([2, 2, 2], ["vp", "tp", "dp"]))
    dist.destroy_process_group()
    return True


def ordered(grid, dims):
    return [name for name in reversed(grid.dim_names) if name in dims]


def pg_rank():
    return dist.get_rank()


def test_grids_and_sessions_have_the_same_groups():
    assert all(run_distributed(there_and_back, 8, deadline=120))
