"""Compare explicit groups with the globals: the passed group, the callee and the global."""

import contextlib
import functools
import sys
import threading
import warnings
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from stepwise import distributed

import megapg
from megapg.collection import ProcessGroupCollection
from megapg.errors import SessionError
from megapg.megatron import parallel_state, published, to_megatron
from megapg.megatron.compare import compare_with_globals
from megapg.megatron.reading.resolve import globals_policy, resolve
from megapg.megatron.tables import GROUP_GLOBALS
from megapg.testing import fake_collection, megatron_on_cpu
from megapg.tools.demo.job import GPTRun

pytestmark = pytest.mark.contract


@pytest.fixture
def pg():
    with fake_collection(tp=2, pp=2, expt_tp=1, ep=2, world_size=8, rank=3) as collection:
        yield collection


@pytest.fixture
def wrong(pg):
    """Return groups of the same ranks with two fields exchanged."""
    return ProcessGroupCollection.from_groups(tp=pg.pp, pp=pg.pp, dp=pg.dp, expt_tp=pg.ep)


def takes_collection(model, pg_collection=None):
    return pg_collection


def takes_groups(*, tp_group=None, dp_group=None, cp_group=None, embd_group=None, group=None):
    return tp_group


def takes_expert_flag(tp_group, is_expert=False):
    return lambda: tp_group  # a cell variable, as in many forward functions


def found(comparison):
    return {
        (place.function, place.field, place.passed, place.in_globals): place.count
        for place in comparison.disagreements
    }


def test_agreement_is_silence_with_a_count(pg):
    again = dist.new_group(list(pg.ranks("tp")))  # the same ranks, another communicator
    with published(pg), compare_with_globals() as comparison:
        takes_collection(None, pg)
        takes_collection(None, pg_collection=to_megatron(pg))
        takes_groups(tp_group=pg.tp, dp_group=pg.dp_cp, cp_group=pg.cp, group=pg.pp)
        takes_groups(tp_group=again)
        takes_groups(tp_group=pg.expt_tp)  # experts are built from the same layers
        takes_expert_flag(pg.tp)
        takes_expert_flag(pg.expt_tp)  # the call passes no flag, as the cores do
        takes_expert_flag(pg.expt_tp, is_expert=True)
        takes_groups(tp_group=None, embd_group=None)
        takes_collection(None, None)
        takes_collection(None, object())
    assert comparison.disagreements == ()
    known = {field for name, field in GROUP_GLOBALS.items() if name in vars(parallel_state)}
    ours = {field for field in known if isinstance(getattr(pg, field), dist.ProcessGroup)}
    cores = ours & set(vars(to_megatron(pg)))
    assert comparison.compared == len(ours) + len(cores) + 8


def test_a_wrong_group_is_reported_with_its_place(pg, wrong):
    line = test_a_wrong_group_is_reported_with_its_place.__code__.co_firstlineno
    tp, pp, ep = pg.ranks("tp"), pg.ranks("pp"), pg.ranks("ep")
    with published(pg), compare_with_globals() as comparison:
        for _ in range(3):
            takes_collection(None, wrong)
        takes_groups(tp_group=pg.pp, embd_group=pg.embd)
        takes_expert_flag(pg.tp, is_expert=True)
    assert found(comparison) == {
        ("takes_collection", "tp", pp, tp): 3,
        ("takes_collection", "expt_tp", ep, (3,)): 3,
        ("takes_groups", "tp/expt_tp", pp, tp): 1,
        ("takes_expert_flag", "expt_tp", tp, (3,)): 1,
    }
    assert {place.file for place in comparison.disagreements} == {__file__}
    assert [place.line - line for place in comparison.disagreements] == [5, 5, 6, 7]
    assert f"{__file__}:{line + 6}" in render(comparison)
    assert " ".join(map(str, pp)) in render(comparison)


def test_order_counts_and_so_do_dead_and_missing_groups(pg):
    backwards = dist.new_group(list(pg.ranks("tp")))
    dist.distributed_c10d._world.pg_group_ranks[backwards] = {
        rank: index for index, rank in enumerate(reversed(pg.ranks("tp")))
    }
    dead = dist.new_group(list(pg.ranks("tp")))
    dist.destroy_process_group(dead)
    part = ProcessGroupCollection.from_groups(tp=pg.tp, pp=pg.pp, dp=pg.dp)
    with published(part), compare_with_globals() as comparison:
        takes_groups(tp_group=backwards)
        takes_groups(tp_group=dead)
        takes_groups(cp_group=pg.cp)
    tp = pg.ranks("tp")
    assert found(comparison) == {
        ("takes_groups", "tp/expt_tp", tp[::-1], tp): 1,
        ("takes_groups", "tp/expt_tp", (), tp): 1,
        ("takes_groups", "cp", pg.ranks("cp"), ()): 1,
    }
    assert "a destroyed group" in render(comparison)
    assert "none" in render(comparison)


def render(comparison):
    shown = StringIO()
    Console(file=shown, width=250).print(comparison.table())
    return shown.getvalue()


def test_nothing_is_compared_without_globals(pg, wrong):
    with compare_with_globals() as comparison:
        takes_collection(None, wrong)
        takes_groups(tp_group=pg.pp)
    assert (comparison.compared, comparison.disagreements) == (0, ())


def test_groups_of_a_hybrid_layout_are_chosen_by_the_batch(pg, monkeypatch):
    with published(pg):
        monkeypatch.setattr(parallel_state, "_HYBRID_DP_CP_GROUPS", {2: pg.dp})
        with compare_with_globals() as comparison:
            takes_groups(cp_group=pg.dp)
    assert comparison.disagreements == ()


def build(pg_collection=None):
    return resolve(pg_collection, needs=("tp",), owner="the builder")


def late(collection):  # no parameter to watch
    return resolve(collection, needs=("tp", "pp"), owner="the late one")


def test_what_resolve_is_passed(pg, wrong):
    with published(pg), compare_with_globals() as comparison:
        late(wrong)
        late(pg)
        with globals_policy("silent"):
            late(None)
            build(build())  # the view agrees with the globals, and comparing does not read it
    tp, pp = pg.ranks("tp"), pg.ranks("pp")
    assert found(comparison) == {("the late one", "tp", pp, tp): 1}
    (place,) = comparison.disagreements
    assert place.line == test_what_resolve_is_passed.__code__.co_firstlineno + 2


class Layer(torch.nn.Module):
    def __init__(self, tp_group):
        super().__init__()
        self.tp_group = tp_group

    def forward(self, x, tp_group=None):
        return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        takes_groups(tp_group=ctx.group)
        return gradient, None


def test_modules_threads_and_backward(pg):
    """A call through torch counts as a call of torch's caller."""
    with published(pg), compare_with_globals() as comparison:
        layer = Layer(pg.pp)
        layer(torch.ones(1), tp_group=pg.pp)
        thread = threading.Thread(target=functools.partial(takes_groups, tp_group=pg.pp))
        thread.start()
        thread.join()
        Doubled.apply(torch.ones(1, requires_grad=True), pg.pp).backward()
    places = {place.function: place for place in comparison.disagreements}
    line = test_modules_threads_and_backward.__code__.co_firstlineno
    assert places["Layer.__init__"].line == line + 3
    assert places["Layer.forward"].line == line + 4
    by_file = [place.file for place in comparison.disagreements if place.function == "takes_groups"]
    assert sorted(by_file) == sorted([__file__, threading.__file__])
    assert len(comparison.disagreements) == 4


def test_the_profiling_hook_is_left_as_it_was(pg, wrong):
    go_on = threading.Event()
    left = []

    def outlives_the_block():
        go_on.wait(10)
        takes_groups(tp_group=pg.pp)
        left.append(sys.getprofile())

    with published(pg):
        with contextlib.suppress(ZeroDivisionError), compare_with_globals() as comparison:
            assert sys.getprofile() is not None
            thread = threading.Thread(target=outlives_the_block)
            thread.start()
            raise ZeroDivisionError
        assert sys.getprofile() is threading.getprofile() is None
        go_on.set()
        thread.join()
        takes_groups(tp_group=pg.pp)
    assert left == [None]
    assert comparison.disagreements == ()


def test_another_profiler_is_refused_and_left_alone():
    def profiler(frame, event, argument):
        pass

    for module in (sys, threading):
        module.setprofile(profiler)
        try:
            with pytest.raises(SessionError, match=r"a profiler is running \(<function .*profiler"):
                compare_with_globals().__enter__()
            assert module.getprofile() is profiler
        finally:
            module.setprofile(None)
    with (
        compare_with_globals(),
        pytest.raises(SessionError, match="room for one"),
        compare_with_globals(),
    ):
        pass


# -- a real training step --------------------------------------------------------------------

SIZES = {"steps": 1, "layers": 2, "hidden": 32, "seq_length": 32, "num_microbatches": 1}
GRID = {"tp": 2, "ep": 2, "expt_tp": 1, "experts": 4}
RUN = GPTRun(**SIZES, **GRID, recompute=True, sequence_parallel=True)


def training_compared():
    from megapg.tools.demo.gpt import train

    warnings.simplefilter("ignore")
    with (
        megatron_on_cpu(),
        megapg.session(tp=2, ep=2, expt_tp=1, timeout=30) as session,
        published(session.groups),
        compare_with_globals() as comparison,
    ):
        train(RUN, Path(__file__).read_bytes(), session.groups)
    return comparison.compared, comparison.disagreements


def test_training_agrees_with_its_own_groups():
    for compared, disagreements in distributed(training_compared, 2, deadline=200):
        assert disagreements == ()
        assert compared > 100
