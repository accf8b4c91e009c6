"""``count_traffic`` counts every collective of a rank, by field, with its bytes."""

import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import TransformerConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode

import megapg
from megapg import torch_private
from megapg.megatron import published
from megapg.testing import (
    count_traffic,
    fake_collection,
    megatron_on_cpu,
    run_distributed,
)
from megapg.testing.traffic import Collective, Traffic

pytestmark = [pytest.mark.torch, pytest.mark.contract]

FOUR, EIGHT = 16, 32  # bytes of the tensors below


def four(device="cpu"):
    return torch.ones(4, device=device)


def two(device="cpu"):
    return torch.ones(2, device=device)


# Name -> a call with a group of two ranks, its collective, and its bytes.
CALLS = {
    "all_reduce": (lambda g, d: dist.all_reduce(four(d), group=g), "all_reduce", FOUR),
    "of_16_bits": (lambda g, d: dist.all_reduce(four(d).bfloat16(), group=g), "all_reduce", 8),
    "empty": (lambda g, d: dist.all_reduce(four(d)[:0], group=g), "all_reduce", 0),
    "asynchronous": (
        lambda g, d: dist.all_reduce(four(d), group=g, async_op=True).wait(),
        "all_reduce",
        FOUR,
    ),
    "broadcast": (lambda g, d: dist.broadcast(four(d), 0, group=g), "broadcast", FOUR),
    "reduce": (lambda g, d: dist.reduce(four(d), 0, group=g), "reduce", FOUR),
    "all_gather": (
        lambda g, d: dist.all_gather([four(d), four(d)], four(d), group=g),
        "all_gather",
        EIGHT,
    ),
    "all_gather_into_tensor": (
        lambda g, d: dist.all_gather_into_tensor(torch.ones(8, device=d), four(d), group=g),
        "all_gather",
        EIGHT,
    ),
    "reduce_scatter": (
        lambda g, d: dist.reduce_scatter(two(d), [two(d), two(d)], group=g),
        "reduce_scatter",
        FOUR,
    ),
    "reduce_scatter_tensor": (
        lambda g, d: dist.reduce_scatter_tensor(two(d), four(d), group=g),
        "reduce_scatter",
        FOUR,
    ),
    "all_to_all": (
        lambda g, d: dist.all_to_all([two(d), two(d)], [two(d), two(d)], group=g),
        "all_to_all",
        FOUR,
    ),
    "all_to_all_single": (
        lambda g, d: dist.all_to_all_single(four(d), four(d), group=g),
        "all_to_all",
        FOUR,
    ),
    "gather": (
        lambda g, d: dist.gather(
            four(d), [four(d), four(d)] if g.rank() == 0 else None, 0, group=g
        ),
        "gather",
        EIGHT,
    ),
    "scatter": (
        lambda g, d: dist.scatter(two(d), [two(d), two(d)] if g.rank() == 0 else None, 0, group=g),
        "scatter",
        FOUR,
    ),
    "barrier": (lambda g, d: dist.barrier(group=g), "barrier", 0),
    "functional_all_reduce": (
        lambda g, d: functional.all_reduce(four(d), "sum", g) + 1,
        "all_reduce",
        FOUR,
    ),
    "functional_all_gather": (
        lambda g, d: functional.all_gather_tensor(four(d), 0, g) + 1,
        "all_gather",
        EIGHT,
    ),
    "functional_reduce_scatter": (
        lambda g, d: functional.reduce_scatter_tensor(four(d), "sum", 0, g) + 1,
        "reduce_scatter",
        FOUR,
    ),
    "functional_all_to_all": (
        lambda g, d: functional.all_to_all_single(four(d), None, None, g) + 1,
        "all_to_all",
        FOUR,
    ),
    "functional_broadcast": (
        lambda g, d: functional.broadcast(four(d), 0, g) + 1,
        "broadcast",
        FOUR,
    ),
}


NEW_ON_GLOO = {"reduce_scatter", "all_to_all"}


def counted(pg, call):
    with count_traffic(pg) as traffic:
        call()
    return [(row.field, row.collective, row.count, row.bytes) for row in traffic.rows]


TAKES_META = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta")
NO_META = pytest.mark.skipif(not TAKES_META, reason="this torch has no collectives on meta")


@pytest.mark.parametrize("device", ["cpu", pytest.param("meta", marks=NO_META)])
@pytest.mark.parametrize("name", CALLS)
def test_one_call_on_fake_groups(name, device):
    call, collective, nbytes = CALLS[name]
    with fake_collection(tp=2, world_size=4) as pg:
        assert counted(pg, partial(call, pg.tp, device)) == [("tp", collective, 1, nbytes)]


# --- two ranks ------------------------------------------------------------------------------------


def on_two_ranks():
    warnings.simplefilter("ignore")
    with megapg.session(tp=2, timeout=60) as session:
        pg = session.groups
        for name, (call, collective, nbytes) in CALLS.items():
            if name in NEW_ON_GLOO and torch_private.version() < (2, 13):
                continue
            assert counted(pg, partial(call, pg.tp, "cpu")) == [("tp", collective, 1, nbytes)]
        coalesced(pg)
        objects(pg)
        backward_and_hooks(pg)
        groups_outside(pg)
        return point_to_point(pg), columns_and_rows(pg), tensors_with_placements(pg)


def coalesced(pg):
    def reduce_two():
        with dist._coalescing_manager(group=pg.tp):
            dist.all_reduce(four(), group=pg.tp)
            dist.all_reduce(two(), group=pg.tp)

    assert counted(pg, reduce_two) == [("tp", "all_reduce", 1, 24)]  # one call of the backend


def objects(pg):
    """An object is gathered as its size and its bytes."""
    found = counted(pg, lambda: dist.all_gather_object([None, None], "text", group=pg.tp))
    pickled = len(pickle.dumps("text"))
    ((field, collective, count, nbytes),) = found
    assert (field, collective, count) == ("tp", "all_gather", 2)
    assert nbytes == 2 * (8 + pickled)


def backward_and_hooks(pg):
    """The reducer of torch's DDP runs in C++, in hooks of the backward pass."""
    model = DistributedDataParallel(torch.nn.Linear(8, 3), process_group=pg.tp)
    with count_traffic(pg) as traffic:
        model(torch.ones(2, 8)).sum().backward()
    assert traffic.count("tp", "all_reduce") == 1
    assert traffic.bytes("tp", "all_reduce") == 4 * (8 * 3 + 3)


def groups_outside(pg):
    ours = dist.new_group([0, 1], group_desc="ours")
    nameless = dist.new_group([0, 1])
    for group, name in (
        (ours, "ours"),
        (nameless, nameless.group_name),
        (None, "default_pg"),
    ):
        found = counted(pg, lambda group=group: dist.all_reduce(four(), group=group))
        assert found == [(name, "all_reduce", 1, FOUR)]


def point_to_point(pg):
    other = 1 - dist.get_rank()
    with count_traffic(pg) as traffic:
        if other:
            dist.send(four(), other, group=pg.tp)
            dist.recv(two(), other, group=pg.tp)
        else:
            dist.recv(four(), group=pg.tp)  # from any rank
            dist.send(two(), other, group=pg.tp)
        swaps = [
            dist.P2POp(dist.isend, four(), other, group=pg.tp),
            dist.P2POp(dist.irecv, four(), other, group=pg.tp),
        ]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()
    return traffic.rows


def columns_and_rows(pg):
    """Run an MLP of Megatron-core forward and backward, with and without sequence parallelism."""
    rows = []
    for sequence_parallel in (False, True):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
        )
        with megatron_on_cpu(), published(pg):
            model_parallel_cuda_manual_seed(1, tp_rank=pg.rank("tp"), ep_rank=0, etp_rank=0)
            options = {"config": config, "bias": True, "skip_bias_add": False}
            options |= {"init_method": torch.nn.init.ones_, "tp_group": pg.tp}
            up = ColumnParallelLinear(8, 32, gather_output=False, **options)
            down = RowParallelLinear(32, 8, input_is_parallel=True, **options)
            x = torch.ones(6 // (2 if sequence_parallel else 1), 2, 8, requires_grad=True)
            with count_traffic(pg) as traffic:
                down(up(x)[0])[0].sum().backward()
        rows.append([(row.collective, row.count, row.bytes) for row in traffic.rows])
    return rows


def tensors_with_placements(pg):
    """DTensor calls functional collectives below its own operators."""
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    with count_traffic(pg) as traffic:
        tensor.redistribute(mesh, [Replicate()]).sum()
    return [(row.collective, row.count, row.bytes) for row in traffic.rows]


def test_two_real_ranks():
    ranks = run_distributed(on_two_ranks, 2, preload=("settled",))
    for rank, (between_two, layers, placements) in enumerate(ranks):
        receives, sends = between_two
        first, second = (FOUR, 8) if rank == 0 else (8, FOUR)
        assert (sends.collective, sends.count, sends.bytes) == ("send", 2, FOUR + first)
        assert (receives.collective, receives.count, receives.bytes) == ("recv", 2, FOUR + second)
        whole = 6 * 2 * 8 * 4  # bytes of the input on all ranks
        assert layers == [
            # the output in the forward pass, the gradient of the input in the backward pass
            [("all_reduce", 2, 2 * whole)],
            # The backward pass gathers the input again, and the gradient of the output.
            [("all_gather", 3, 3 * whole), ("reduce_scatter", 2, 2 * whole)],
        ]
        assert placements == [("all_gather", 1, 4 * 2 * 4)]


# --- rows -----------------------------------------------------------------------------------------


def test_fields_that_share_a_group():
    with fake_collection(tp=2, world_size=4) as pg, count_traffic(pg) as traffic:
        dist.all_reduce(four(), group=pg.dp)
        dist.all_reduce(four(), group=pg.expt_dp)
        dist.all_reduce(four(), group=pg.pp)
        shared = tuple(field for field in pg.present() if getattr(pg, field) is pg.dp)
    assert {"dp", "dp_cp", "expt_dp"} <= set(shared)
    dp, pp = traffic.rows
    assert dp == Collective("dp", "all_reduce", 2, 2 * FOUR, 2, shared)
    assert (pp.field, pp.size, pp.bytes) == ("pp", 1, FOUR)
    for field in ("dp", "expt_dp"):
        assert (traffic.count(field), traffic.bytes(field, "all_reduce")) == (2, 2 * FOUR)
    assert traffic.count("tp") == traffic.bytes("dp", "all_gather") == 0
    assert (traffic.count(), traffic.count(collective="all_reduce")) == (3, 3)
    assert traffic.bytes() == 3 * FOUR


def test_levels_and_extras_have_their_names():
    sizes = {"cp": 4, "hierarchical_cp": (2, 2), "world_size": 8, "gloo": ("dp",)}
    with fake_collection(**sizes) as pg, count_traffic(pg) as traffic:
        for group in (*pg.hcp, pg.extras["gloo.dp"]):
            dist.barrier(group=group)
    for name in ("hcp.0", "hcp.1", "gloo.dp"):
        assert traffic.count(name, "barrier") == 1


def test_rows_are_sorted_plain_data():
    with fake_collection(tp=2, world_size=4) as pg, count_traffic(pg) as traffic:
        dist.barrier(group=pg.tp)
        dist.all_reduce(four(), group=pg.tp)
        dist.all_reduce(four(), group=pg.dp)
        dist.all_reduce(four(), group=pg.tp)
    assert list(traffic.rows) == sorted(traffic.rows)
    assert [(row.field, row.collective) for row in traffic.rows] == [
        ("dp", "all_reduce"),
        ("tp", "all_reduce"),
        ("tp", "barrier"),
    ]
    assert pickle.loads(pickle.dumps(traffic.rows)) == traffic.rows
    heads, _, tensor_parallel, _ = str(traffic).splitlines()
    assert heads.split()[:5] == ["field", "ranks", "collective", "calls", "bytes"]
    assert tensor_parallel.split()[:5] == ["tp", "2", "all_reduce", "2", "32"]


def test_no_collective():
    with fake_collection(tp=2) as pg, count_traffic(pg) as traffic:
        four().add_(1)
    assert traffic.rows == ()
    assert traffic.bytes() == traffic.count("tp") == 0
    assert len(str(traffic).splitlines()) == 1


# --- blocks ---------------------------------------------------------------------------------------


def test_blocks_nest_and_end():
    with fake_collection(tp=2) as pg:
        with count_traffic(pg) as outer:
            dist.barrier(group=pg.tp)
            with count_traffic(pg) as inner:
                dist.barrier(group=pg.tp)
            assert (outer.count(), inner.count()) == (2, 1)
            dist.barrier(group=pg.tp)
        dist.barrier(group=pg.tp)
        assert (outer.count(), inner.count()) == (3, 1)
        assert isinstance(outer, Traffic)
    assert _get_current_dispatch_mode() is None


def test_exception_in_the_block():
    with fake_collection(tp=2) as pg:
        try:
            with count_traffic(pg) as traffic:
                dist.barrier(group=pg.tp)
                raise ZeroDivisionError
        except ZeroDivisionError:
            dist.barrier(group=pg.tp)
        assert traffic.count() == 1
    assert _get_current_dispatch_mode() is None
