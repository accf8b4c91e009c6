"""A layout on ranks in a custom order: groups, meshes and checkpoints follow the order."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from asking import me
from resuming import RUN, Training, distributed, published_groups, replace, sizes
from torch.distributed.tensor import Shard, distribute_tensor

import megapg
from megapg.errors import LayoutMismatchError, UnsupportedVersionError
from megapg.layout import ParallelLayout
from megapg.testing import run_distributed
from megapg.torch_private.meshes import can_mesh

ORDER = [3, 1, 0, 2]


def follows(pg, order, **sizes_of_it):
    """Check that each group has the members of the plain layout, mapped through ``order``."""
    place, plain = order.index(me()), ParallelLayout(world_size=len(order), **sizes_of_it)
    for field in pg.present():
        group = getattr(pg, field)
        if not isinstance(group, dist.ProcessGroup):
            assert group is None
            continue
        expected = [order[at] for at in plain.members(field, place)]
        assert list(pg.ranks(field)) == expected == dist.get_process_group_ranks(group), field
        assert pg.rank(field) == group.rank() == expected.index(me())
        assert pg.size(field) == group.size() == len(expected)
        assert dist.get_global_rank(group, 0) == expected[0]
        heard = [torch.zeros(1) for _ in expected]
        dist.all_gather(heard, torch.tensor([float(me())]), group=group)
        assert [int(each) for each in heard] == expected, field
    assert pg.layout.coordinates(me()) == plain.coordinates(place)


def meshes(pg):
    mesh = pg.mesh("dp_cp", "tp")
    assert mesh.mesh.tolist() == [[3, 1], [0, 2]]
    assert mesh["tp"].get_group() is pg.tp
    assert mesh.get_local_rank("tp") == pg.rank("tp")
    assert pg.mesh("dp", "tp")["tp_dp"].get_group() is pg.tp_dp
    whole = torch.arange(8.0).view(4, 2)
    part = distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)
    assert torch.equal(part.to_local(), whole.chunk(2)[pg.rank("tp")])
    assert torch.equal(part.full_tensor(), whole)
    for found in (
        megapg.from_mesh(mesh, tp="tp", dp="dp_cp"),
        megapg.from_mesh(pg.mesh("tp", "dp"), tp="tp", dp="dp"),
    ):
        assert (found.tp, found.dp) == (pg.tp, pg.dp_cp)
        for rank in ORDER:
            for field in ("tp", "dp"):
                assert found.layout.members(field, rank) == pg.layout.members(field, rank)


def groups():
    with megapg.session(ranks=ORDER, tp=2, gloo=("dp",), warm_up=True, timeout=30) as session:
        follows(session.groups, ORDER, tp=2)
        assert list(session.layout.ranks) == ORDER
        companion = session.groups.extras["gloo.dp"]
        assert dist.get_process_group_ranks(companion) == list(session.groups.ranks("dp"))
        try:
            meshes(session.groups)
        except UnsupportedVersionError:  # with this torch a mesh creates groups
            assert not can_mesh()
        session.suspend()
        session.resume()
        follows(session.groups, ORDER, tp=2)
        session.check()
        # Another layout at the same time, on two of the ranks in reverse order.
        if me() in (1, 3):
            with megapg.session(ranks=(3, 1), pp=2, name="part", timeout=30) as part:
                follows(part.groups, [3, 1], pp=2)
                assert dist.get_process_group_ranks(part.groups.pp) == [3, 1]
        mine = ORDER if me() else [*reversed(ORDER)]
        with pytest.raises(LayoutMismatchError) as caught:
            megapg.session(ranks=mine, tp=2, name="two orders", timeout=30)
        assert caught.value.differences["ranks"][3] == "(3, 1, 0, 2)"
    with megapg.session(ranks=range(3, -1, -1), pp=4, timeout=30) as session:
        assert dist.get_process_group_ranks(session.groups.pp) == [3, 2, 1, 0]
        follows(session.groups, [3, 2, 1, 0], pp=4)
        assert (session.groups.embd is None) is (me() in (1, 2))
    return True


@pytest.mark.torch
def test_groups_and_meshes_have_the_order_of_the_layout():
    assert run_distributed(groups, 4) == [True] * 4


def trained(run, root):
    """Train with ranks in order, in another order, and from the checkpoint of the latter."""
    told = []
    for name, order in (("plain", range(4)), ("turned", ORDER)):
        with published_groups(**sizes(run), ranks=order, name=name) as pg:
            job, place = Training(run, pg), list(order).index(me())
            losses = job.steps(0, 2)
            if name == "turned":
                job.save(root, 2, rank_extra={"place": place})
            told.append((place, losses, job.steps(2, 4), job.digest()))
            job.let_go()
    for name, order in (("again", ORDER), ("back", range(4))):
        with published_groups(**sizes(run), ranks=order, name=name) as pg:
            job, place = Training(run, pg, seed=4321), list(order).index(me())
            loaded = job.load(root)
            assert loaded.rng.exact
            assert loaded.missing == ()
            assert loaded.rank_extra == {"place": place}
            told.append((place, job.steps(2, 4), job.digest()))
            job.let_go()
    return told


def test_training_and_checkpoints_go_by_the_place_in_the_layout(tmp_path):
    """Each place computes the same bits on any rank."""
    run = replace(RUN, tp=2, pp=2)
    plain, *others = zip(*distributed(partial(trained, run, str(tmp_path)), 4), strict=True)
    by_place = {place: rest for place, *rest in plain}
    assert len({str(rest) for rest in by_place.values()}) > 1
    for told in others:
        assert sorted(place for place, *_ in told) == [0, 1, 2, 3]
        for place, *rest in told:
            assert rest == by_place[place][-len(rest) :]
