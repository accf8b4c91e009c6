"""The private parts of torch that megapg uses work as documented on this torch."""

import ast
import os
import sys
import threading
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import megapg
from megapg import torch_private
from megapg.errors import UnsupportedVersionError
from megapg.layout import ParallelLayout
from megapg.ownership.opening import fake_session
from megapg.rendezvous import sockets
from megapg.testing import fake_collection, run_distributed
from megapg.torch_private import collectives, meshes

pytestmark = [pytest.mark.contract, pytest.mark.torch]

CPU = torch.device("cpu")
ABORTS = hasattr(dist.ProcessGroup, "abort")  # on any backend; else on NCCL only


def made(name, seconds=30.0, store=None):
    wanted = torch_private.NewGroup(
        (0, 1), "gloo", f"megapg/{name}", f"what {name} is for", timedelta(seconds=seconds)
    )
    store = store or dist.PrefixStore(name, torch_private.default_store())
    return torch_private.new_group(wanted, dist.get_rank(), store)


def tables():
    """Return the sizes of torch's own tables of groups."""
    return {
        name: len(getattr(c10d._world, name))
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_to_tag", "tags_to_pg")
    }


def test_what_others_objects_hold_is_where_it_is_looked_for():
    part = torch.nn.Linear(1, 1)
    assert vars(torch.nn.Sequential(part))[torch_private.SUBMODULES] == {"0": part}
    assert [getattr(part.weight, name) for name in torch_private.HOOKS_OF_TENSORS] == [None, None]
    hook = part.weight.register_hook(print)
    hooks = [getattr(part.weight, name) for name in torch_private.HOOKS_OF_TENSORS]
    assert list(hooks[0].values()) == [print]
    hook.remove()
    for prefix, name in (
        (torch_private.FSDP_MIXES_IN, "_get_device_from_mesh"),
        (torch_private.FSDP_ASKS, "FSDPMeshInfo"),
    ):
        assert hasattr(import_module(prefix.removesuffix(".")), name)
    module, name = torch_private.BACKWARD
    assert callable(getattr(import_module(module), name))


def of_two_ranks():
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    me, world, before = dist.get_rank(), dist.group.WORLD, tables()
    count = c10d._world.group_count

    group = made("first", seconds=17)
    assert group.group_name == "megapg/first"
    assert group.group_desc == "what first is for"
    assert dist.get_process_group_ranks(group) == [0, 1]
    assert dist.get_rank(group) == me
    # torch did not count this group, so members alone may create it
    assert c10d._world.group_count == count
    value = torch.tensor(me + 1)
    dist.all_reduce(value, group=group)
    assert value.item() == 3

    assert torch_private.known_groups() == [world, group]
    assert torch_private.knows(group)
    assert torch_private.devices_of(group)
    assert torch_private.timeout_of(group) in (timedelta(seconds=17), None)
    assert torch_private.timeout_of(world) in (timedelta(seconds=40), None)
    assert torch_private.default_timeout("gloo") == timedelta(minutes=30)
    if dist.is_nccl_available():
        assert torch_private.default_timeout("nccl") == timedelta(minutes=10)
    assert isinstance(torch_private.backend_on(group, CPU), torch_private.CommunicatorBackend)
    assert not torch_private.never_connected(torch_private.backend_on(group, CPU))
    torch_private.describe(group, "another thing")
    assert group.group_desc == "another thing"
    registers = {id(table) for table in torch_private.tables()}
    assert {id(c10d._world.pg_map), id(c10d._world.pg_names)} <= registers

    heard = []
    with torch_private.asked_before_collectives(heard.append):
        dist.barrier(group=group)
        dist.all_reduce(torch.zeros(1), group=group)
    dist.barrier(group=group)
    assert heard == [group] * 2

    torch_private.destroy(group)
    assert not torch_private.knows(group)
    assert torch_private.known_groups() == [world]
    assert tables() == before

    # The name is free again, and so are the group's keys in the store.
    again = made("first", store=dist.PrefixStore("again", torch_private.default_store()))
    torch_private.abort(again)
    assert torch_private.knows(again) is not ABORTS
    if torch_private.knows(again):
        torch_private.destroy(again)
    assert tables() == before

    called_off = made("called off")
    torch_private.call_off(called_off)  # gloo shows no further effect
    assert torch_private.knows(called_off)
    store, key = torch_private.default_store(), "said"
    store.set(f"{key}/{me}", "here")
    other = torch_private.another_connection(store)
    assert other.get(f"{key}/{1 - me}") == b"here"
    if torch_private.lists_keys(store):
        assert f"{key}/{me}" in store.list_keys()
    other.get("done") if me else store.set("done", "")
    torch_private.abort(world)
    assert torch_private.known_groups() == ([] if ABORTS else [world, called_off])
    assert dist.is_initialized() is not ABORTS
    return True


def made_apart(rank, store, name="apart"):
    wanted = torch_private.NewGroup(range(2), "gloo", name, "two jobs", timedelta(seconds=20))
    return torch_private.new_group_apart(wanted, rank, store)


def of_two_jobs():
    me = int(os.environ["RANK"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=40))
    group = made_apart(me, store)
    assert store.check([torch_private.key_in_gloo("apart", rank) for rank in range(2)])
    assert not store.check([torch_private.key_in_gloo("apart", 2)])
    assert (group.rank(), group.size(), group.group_name) == (me, 2, "apart")
    assert dist.get_process_group_ranks(group) == [0, 1]
    everyone = [None, None]
    dist.all_gather_object(everyone, me, group=group)
    assert everyone == [0, 1]
    value = torch.tensor(me)
    dist.broadcast(value, group_src=1, group=group)
    assert value.item() == 1
    dist.broadcast(value, src=0, group=group)  # torch takes it for a rank of the group
    peer = {"group": group, "group_peer": 1 - me}
    swaps = [dist.P2POp(dist.isend, value, **peer), dist.P2POp(dist.irecv, value + 0, **peer)]
    for work in dist.batch_isend_irecv(swaps):
        work.wait()
    dist.barrier(group=group)
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.get_rank(group)  # it asks WORLD, on every torch
    for call in (_scatter, _broadcast_object):
        if torch_version() >= (2, 13):
            call(group)
        elif torch_version() < (2, 7):
            with pytest.raises(ValueError, match="Default process group"):
                call(group)
    torch_private.destroy(group)
    assert set(tables().values()) == {0}

    # WORLD has one rank here, and is bound to a device from which torch would split the group.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world, before = dist.group.WORLD, tables()
    world.bound_device_id = torch.device("cuda", 0)
    splits, c10d._get_split_source = c10d._get_split_source, None  # torch calls it to split
    again = made_apart(me, store, "again")
    c10d._get_split_source = splits
    assert world.bound_device_id == torch.device("cuda", 0)
    world.bound_device_id = None
    assert dist.get_rank(again) == 0  # the rank in WORLD, which a user must not take for another
    assert again.rank() == me
    dist.all_reduce(value, group=again)
    torch_private.destroy(again)
    assert tables() == before
    dist.destroy_process_group()
    return True


def _scatter(group):
    values = [torch.zeros(1), torch.ones(1)] if group.rank() == 0 else None
    dist.scatter(torch.zeros(1), values, group_src=0, group=group)


def _broadcast_object(group):
    dist.broadcast_object_list([group.rank()], group_src=1, group=group)


def test_a_group_of_ranks_that_are_not_worlds():
    assert run_distributed(of_two_jobs, 2) == [True] * 2


def of_four_ranks():
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    me, before = dist.get_rank(), tables()
    for round_ in ("first", "again"):  # names counted by torch would repeat and give old addresses
        halves = ((0, 1), (2, 3))[me // 2]
        groups = {ranks: split(ranks, f"{round_} {ranks}") for ranks in (halves, (1, 2))}
        assert (groups[1, 2] is None) is (me in (0, 3))
        for ranks, group in groups.items():
            if group is None:
                continue
            assert group.group_name == f"megapg/{round_} {ranks}"
            assert dist.get_process_group_ranks(group) == list(ranks)
            assert dist.get_backend(group) == "gloo"
            assert torch_private.timeout_of(group) == timedelta(seconds=17)
            value = torch.tensor(me)
            dist.all_reduce(value, group=group)
            assert value.item() == sum(ranks)
        dist.barrier()
        in_order = split((3, 1, 0, 2), f"{round_} in order")
        # otherwise torch sorts the ranks
        place = (2, 1, 3, 0)[me] if torch_private.splits_in_order() else me
        assert in_order.rank() == place
        groups[3, 1, 0, 2] = in_order
        for group in filter(None, groups.values()):
            torch_private.destroy(group)
        assert tables() == before
    dist.barrier()
    return True


def split(ranks, name):
    wanted = torch_private.NewGroup(
        ranks, "gloo", f"megapg/{name}", "a half", timedelta(seconds=17)
    )
    return torch_private.split_world(wanted, dist.get_rank())


@pytest.mark.skipif(not torch_private.can_split(), reason="this torch can't split under a name")
def test_groups_that_are_split_from_world_by_all_ranks_together():
    assert run_distributed(of_four_ranks, 4) == [True] * 4


def test_groups_and_stores():
    assert run_distributed(of_two_ranks, 2) == [True] * 2


class Reduced(torch.autograd.Function):
    """An autograd function with the group on its context, as in Megatron-core."""

    @staticmethod
    def forward(ctx, value, group):
        ctx.group, summed = group, value.clone()
        dist.all_reduce(summed, group=group)
        return summed


def last_dropped_by_its_own_threads():
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    me, before = dist.get_rank(), threads()
    group, heard = made("heard of"), []
    if me:
        time.sleep(0.3)  # so that one of gloo's threads runs the other rank's callback
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    work.get_future().then(lambda _, group=group: heard.append(threading.get_ident()))
    torch_private.destroy(group)
    del group, work
    ends(lambda: heard)
    assert me or heard != [threading.get_ident()]
    # on a busy machine about one in fifteen is dropped together with the tensor
    for round_ in range(100):
        group = made(f"{round_}")
        Reduced.apply(torch.ones(1, requires_grad=True), group)
        torch_private.destroy(group)
        del group
    ends(lambda: threads() <= before)
    # A group ends while its threads still release the tensors of its collectives.
    for round_ in range(60):
        groups = [made(f"{round_} {each}") for each in "abc"]
        for group in groups:
            dist.all_reduce(torch.ones(1), group=group)
        while groups:
            torch_private.destroy(groups.pop())
    return True


def threads():
    return len(os.listdir("/proc/self/task"))


def ends(come):
    until = time.monotonic() + 20
    while not come():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted on Linux")
def test_a_group_that_its_own_threads_are_the_last_to_drop_ends_too():
    """Without the workaround, the first such group aborts and later groups leave threads behind."""
    assert run_distributed(last_dropped_by_its_own_threads, 2) == [True] * 2


def test_only_the_warnings_of_torchs_store_are_not_printed(capfd, monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    with torch_private.without_store_warnings():
        os.write(2, b"before\n")
        sockets.hang_up(server.port)
        with pytest.raises(RuntimeError):
            client.get("key")
        os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"
    monkeypatch.setattr(sys, "stderr", None)
    with torch_private.without_store_warnings():
        os.write(2, b"as it is\n")
    assert capfd.readouterr().err == "as it is\n"


def test_what_this_torch_can():
    """The features depend on the release: the oldest has none of them, and 2.13 has all."""
    can = {torch_private.can_suspend(), torch_private.lists_keys(dist.HashStore())}
    if torch_version() < (2, 7):
        assert can == {False}
        assert not torch_private.gloo_can_be_lazy()
    if torch_version() >= (2, 13):
        assert can == {True}
        assert torch_private.gloo_can_be_lazy()


def torch_version():
    return tuple(map(int, torch.__version__.split(".")[:2]))


def test_the_fake_backend():
    torch_private.register_fake_backend()
    with fake_collection(tp=2, pp=4, rank=5) as pg:
        assert pg.ranks("tp") == (4, 5)


def test_where_an_entry_of_a_checkpoint_is():
    place = torch_private.StorageInfo("file", 3, 5)
    assert (place.relative_path, place.offset, place.length) == ("file", 3, 5)
    with pytest.raises(AttributeError, match="no attribute 'Storage'"):
        _ = torch_private.Storage


@pytest.mark.parametrize("open_one", ["session", "fake_session", "adopt"])
def test_an_older_torch_is_refused(open_one, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu124")
    how = {
        "session": lambda: megapg.session(tp=2),
        "fake_session": lambda: fake_session(ParallelLayout(world_size=2), 0),
        "adopt": lambda: megapg.megatron.adopt(None),
    }
    with pytest.raises(
        UnsupportedVersionError, match=r"torch 2\.5\.1\+cu124 is installed.*needs 2\.6 or newer"
    ):
        how[open_one]()
    assert not dist.is_initialized()


@pytest.mark.parametrize("version", ["2.6.0a0+ecf3bae40a.nv25.01", "2.10.0", "3.0", "of my own"])
def test_no_other_torch_is(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    torch_private.check_version()


def test_the_oldest_torch_is_the_one_that_is_asked_for():
    asked = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    assert f'"torch>={".".join(map(str, torch_private.OLDEST))}"' in asked


def test_each_function_says_what_would_take_its_place():
    files = (torch_private.__file__, collectives.__file__, meshes.__file__)
    nodes = [node for file in files for node in ast.parse(Path(file).read_text()).body]
    # A class is covered by the docstring of the function that creates its objects.
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    silent = [
        each.name
        for each in functions
        if "Public: " not in (ast.get_docstring(each) or "")
        and each.name not in ("check_version", "_tag_removed")
    ]
    assert len(functions) > 15
    assert not silent


def test_meshes_are_had_where_torch_lays_them_out_as_ours_do():
    layout = getattr(import_module("torch.distributed.device_mesh"), "_MeshLayout", None)
    assert meshes.can_mesh() is hasattr(layout, "collapse")


# Operators with a group that are not counted. Those of autograd call counted ones. torch.compile
# alone calls the other.
NOT_COUNTED = {
    "_c10d_functional_autograd.all_gather_into_tensor",
    "_c10d_functional_autograd.all_to_all_single",
    "_c10d_functional_autograd.reduce_scatter_tensor",
    "_c10d_functional.batch_p2p_ops",
}


def test_every_operator_with_a_group_is_known():
    operators = {
        schema.name.replace("::", ".")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.partition("::")[0] in ("c10d", "_c10d_functional")
        or schema.name.startswith("_c10d_functional_autograd")
        if {"process_group", "group_name"} & {each.name for each in schema.arguments}
    }
    assert len(operators) > 30
    assert operators - NOT_COUNTED <= collectives._OPERATORS.keys()


def test_calls_of_collectives_are_watched():
    calls = []
    with fake_collection(tp=2) as pg:
        with collectives.watched(calls.append):
            dist.all_reduce(torch.zeros(4), group=pg.tp)
            dist.gather(torch.zeros(4), [torch.zeros(4)] * 2, 0, group=pg.tp)
        dist.barrier(group=pg.tp)
        assert calls == [
            collectives.Call("all_reduce", pg.tp, 16),
            collectives.Call("gather", pg.tp, 32),
        ]
