"""``rebind``: every reference to an old group is replaced or reported."""

import functools
import gc
import re
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from stepwise import build, distributed, step, weights
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import megapg
from megapg.collection import ProcessGroupCollection
from megapg.errors import SessionError
from megapg.megatron import parallel_state, published, to_megatron
from megapg.megatron.tables import GROUP_GLOBALS
from megapg.ownership.rebind import Rebound, Replacements, rebind
from megapg.testing import megatron_on_cpu, run_distributed
from megapg.tools.demo.job import GPTRun

APART = ("tp", "pp", "cp", "dp")


def groups_of_field(pg):
    held = {field: group for field, group in vars(pg).items() if group is not None}
    levels = {f"hcp.{i}": group for i, group in enumerate(held.pop("hcp", ()))}
    return {**held, **levels, **pg.extras}


def replacements_of(old, new):
    """Return the replacements of a session that re-creates its groups."""
    replacements = Replacements()
    successors = groups_of_field(new)
    for field, group in groups_of_field(old).items():
        replacements.add(weakref.ref(group), successors[field])
    replacements.add(weakref.ref(old), new)
    return replacements


# -- a real training run ---------------------------------------------------------------------------

DENSE = GPTRun(steps=4, layers=2, hidden=32, seq_length=32, num_microbatches=2, tp=2)
EXPERTS = replace(DENSE, tp=1, pp=2, layers=4, ep=2, experts=4, dispatcher="alltoall")


def sizes(run):
    return {"tp": run.tp, "pp": run.pp, "ep": run.ep}


def undisturbed(run):
    with megapg.session(name="only", timeout=60, **sizes(run)) as session:
        job = build(run, session.groups)
        losses = [step(run, number, job, session.groups) for number in range(run.steps)]
        return losses, weights(job, session.groups)


def moved(run):
    """Train two steps on the groups of one session, and two on those of another."""
    gc.unfreeze()  # settled.py may have frozen objects that hold groups
    with megapg.session(name="second", timeout=60, **sizes(run)) as second:
        first = megapg.session(name="first", timeout=60, **sizes(run))
        job = build(run, first.groups)
        losses = [step(run, number, job, first.groups) for number in (0, 1)]
        replacements = replacements_of(first.groups, second.groups)
        first.close()
        rebound = rebind(job, replacements)
        losses.append(step(run, 2, job, second.groups))
        held = first.live_references()
        again = rebind(job, replacements)
        losses.append(step(run, 3, job, second.groups))
        survivors = len(replacements.alive())  # also finds objects that the collector does not see
        return losses, weights(job, second.groups), rebound, held, again, survivors


def resumed(run):
    """Suspend after each step, with one ``published`` block around the whole run."""
    with megapg.session(timeout=60, **sizes(run)) as session, published(session.groups):
        job = build(run, session.groups)
        losses = []
        for number in range(run.steps):
            losses.append(step(run, number, job, session.groups))
            session.suspend("recreate")
            assert not parallel_state.model_parallel_is_initialized()
            session.resume()
            rebound = session.rebind(*job)
            assert rebound.complete, str(rebound)
            assert not rebound.left
        assert parallel_state.get_pipeline_model_parallel_group() is session.groups.pp
        return losses, weights(job, session.groups)


def both(runs):
    warnings.simplefilter("ignore")
    with megatron_on_cpu():
        return [(undisturbed(run), resumed(run), moved(run)) for run in runs]


@pytest.mark.contract
def test_a_model_trains_on_with_new_groups_bit_for_bit():
    everyone = distributed(partial(both, [DENSE, EXPERTS]), 4)
    for compared in everyone:
        for expected, after_resumes, (*moved_on, rebound, held, again, survivors) in compared:
            losses, digest = expected
            assert len(set(losses)) == 4
            assert after_resumes == (losses, digest)
            assert moved_on == [losses, digest]
            assert rebound.complete, str(rebound)
            assert rebound.by_name["tp_group"] > 10
            attention = "list[0].module.decoder.layers.0.self_attention"
            assert {f"{attention}.tp_group", f"{attention}.pg_collection"} <= set(rebound.replaced)
            assert not held
            assert not survivors
            assert again.complete
            assert not again.replaced


# -- kinds of references ---------------------------------------------------------------------------


class Change:
    """Old groups, their replacements, and a way to call :func:`rebind`."""

    def __init__(self, old, core, new):
        self.old, self.core, self.new = old, core, new
        self.replacements = replacements_of(old, new)

    def over(self, *things):
        rebound = rebind(things, self.replacements)
        mine = "the collection: a test_rebind.Change, as old"
        assert mine in rebound.elsewhere
        return replace(rebound, elsewhere=tuple(x for x in rebound.elsewhere if x != mine))


@pytest.fixture
def change():
    with megapg.session(name="new", timeout=30, dedicated=APART) as new:
        with megapg.session(name="old", timeout=30, dedicated=APART) as session:
            found = [Change(session.groups, to_megatron(session.groups), new.groups)]
        yield found.pop()


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def method(self):
        return self


class Slotted:
    __slots__ = ("group", "unset")

    def __init__(self, group):
        self.group = group


class SlottedToo(Slotted):
    __slots__ = ("more",)


Pair = namedtuple("Pair", "group weight")


class Named(tuple):  # has a __dict__
    pass


def test_attributes_containers_and_what_is_made_anew(change):
    old, new = change.old, change.new
    layer = nn.Linear(2, 2)
    layer.tp_group, layer.pg_collection = vars(old)["tp"], old
    layer.weight.shared_by = vars(old)["dp"]  # as Megatron marks its parameters
    layer.weight.register_hook(partial(print, vars(old)["cp"]))
    accumulator = layer.weight.expand_as(layer.weight).grad_fn.next_functions[0][0]
    hook = partial(print, vars(old)["dp"])
    accumulator.register_hook(hook)  # as Megatron's DDP does
    slotted = SlottedToo(vars(old)["tp"])
    slotted.more = [vars(old)["pp"]]
    core = change.core
    del change.core
    things = Plain(
        model=nn.ModuleList([nn.Sequential(layer)]),
        every_layer=[layer],  # a shorter path, but not the one to report
        slotted=slotted,
        core=core,
        accumulator=accumulator,
        number=3,
        by_name=OrderedDict(tp=vars(old)["tp"], dp=vars(old)["dp"]),
        by_group={vars(old)["tp"]: 1, (vars(old)["dp"], "x"): [vars(old)["pp"]], 7: 8},
        nested=(1, ("a", (vars(old)["cp"],)), Pair(vars(old)["tp"], 0.5)),
        some={vars(old)["tp"], 4},
        some_frozen=frozenset({vars(old)["tp"], 4}),
        recent=deque([vars(old)["tp"], vars(old)["dp"]], maxlen=2),
        lazily=defaultdict(partial(list, (vars(old)["tp"],)), {1: vars(old)["pp"]}),
        untouched=(1, (2, 3), new.tp),
    )
    untouched = things.untouched
    rebound = change.over(things)
    assert not rebound.left
    assert not rebound.elsewhere
    assert rebound.complete
    assert layer.tp_group is new.tp
    assert layer.pg_collection is new
    assert layer.weight.shared_by is new.dp
    assert [hook.args for hook in layer.weight._backward_hooks.values()] == [(new.cp,)]
    assert hook.args == (new.dp,)
    assert slotted.group is new.tp
    assert slotted.more == [new.pp]
    assert core.tp is new.tp
    assert core.dp is new.dp
    assert core.hcp is None
    assert list(things.by_name.items()) == [("tp", new.tp), ("dp", new.dp)]
    assert list(things.by_group.items()) == [(new.tp, 1), ((new.dp, "x"), [new.pp]), (7, 8)]
    assert things.nested == (1, ("a", (new.cp,)), Pair(new.tp, 0.5))
    assert type(things.nested[2]) is Pair
    assert things.some == things.some_frozen == {new.tp, 4}
    assert things.recent == deque([new.tp, new.dp])
    assert things.recent.maxlen == 2
    assert things.lazily[1] is new.pp
    assert things.lazily[2] == [new.tp]
    assert things.untouched is untouched
    for path in (
        "Plain.model.0.0.tp_group",
        "Plain.model.0.0.pg_collection",
        "Plain.slotted.more[0]",
        "Plain.core.tp",
        "Plain.by_name['tp']",
        "Plain.by_group[key a ProcessGroup]",
        "Plain.by_group[key a tuple][0]",
        "Plain.nested[1][1][0]",
        "Plain.nested[2].group",
        "Plain.lazily.default_factory.args[0][0]",
    ):
        assert path in rebound.replaced
    assert rebound.by_name["tp_group"] == 1
    assert rebound.by_name["tp"] == 2
    assert len(rebound.replaced) == sum(rebound.by_name.values())
    assert str(rebound).startswith(f"replaced {len(rebound.replaced)} references: ")
    again = change.over(things)
    assert again.complete
    assert not again.replaced
    assert str(again) == "replaced 0 references"


def decorated(function, group):
    @functools.wraps(function)
    def inner(default=group, *, keyword=group):
        return group, default, keyword

    return inner


def defaulting(group):
    return lambda group=group: group


def test_what_is_bound_to_functions(change):
    old, new = change.old, change.new
    holder = Plain(group=vars(old)["tp"])

    def local():
        return both, late

    def other():
        nonlocal both
        return both

    both = vars(old)["dp"]
    things = {
        "partial": partial(local, vars(old)["tp"], group=vars(old)["dp"]),
        "of a method": partial(holder.method, (vars(old)["pp"],)),
        "decorated": decorated(local, vars(old)["cp"]),
        "closure": other,
        "bound": holder.method,
        "of the group": vars(old)["tp"].size,
        "of the collection": old.rank,
        "lambda": defaulting(vars(old)["tp"]),
        "in place": holder.__dict__.get,
    }
    rebound = change.over(things)
    assert not rebound.left
    assert things["partial"].args == (new.tp,)
    assert things["partial"].keywords == {"group": new.dp}
    assert things["of a method"].args == ((new.pp,),)
    assert holder.group is new.tp
    assert things["decorated"]() == (new.cp,) * 3
    assert things["closure"]() is both is new.dp
    assert things["bound"]() is holder
    assert things["of the group"].__self__ is new.tp
    assert things["of the collection"].__self__ is new
    assert things["lambda"]() is new.tp
    assert (
        "dict['closure'].both" in rebound.replaced
        or "dict['partial'].func.both" in rebound.replaced
    )
    late = None
    assert local() == (new.dp, None)


def test_weak_references_and_collections_of_borrowed_groups(change):
    old, new = change.old, change.new
    gone = []
    borrowed = ProcessGroupCollection.from_groups(tp=new.tp)
    vars(borrowed)["dp"] = vars(old)[
        "dp"
    ]  # as from_groups(dp=vars(old)["dp"]) made it while the group was open
    things = Plain(
        one=weakref.ref(vars(old)["tp"]),
        told=weakref.ref(old, gone.append),
        key=weakref.WeakKeyDictionary({vars(old)["tp"]: vars(old)["dp"], vars(old)["dp"]: 2}),
        value=weakref.WeakValueDictionary({"tp": vars(old)["tp"]}),
        every=weakref.WeakSet([vars(old)["tp"]]),
        borrowed=borrowed,
        twice=[borrowed],
    )
    target = Plain(group=vars(old)["pp"])
    things.to_target = weakref.ref(target)
    rebound = change.over(things)
    assert not rebound.left
    assert things.one() is new.tp
    assert things.told() is new
    assert things.told.__callback__ == gone.append
    assert dict(things.key) == {new.tp: new.dp, new.dp: 2}
    assert dict(things.value) == {"tp": new.tp}
    assert set(things.every) == {new.tp}
    assert target.group is new.pp
    assert things.borrowed is things.twice[0] is not borrowed
    assert things.borrowed.dp is new.dp
    assert things.borrowed.tp is new.tp
    assert things.borrowed.lease is borrowed.lease
    assert borrowed.dp is vars(old)["dp"]  # a frozen collection stays unchanged
    assert "Plain.borrowed.dp" in rebound.replaced
    assert "Plain.twice[0]" in rebound.replaced


def test_cycles_and_depth(change):
    old, new = change.old, change.new
    first = last = Plain(group=vars(old)["tp"])
    for _ in range(20_000):
        last.next = Plain(group=vars(old)["tp"], back=last)
        last = last.next
    last.next = first
    last.ring = ([last.ring] if hasattr(last, "ring") else [], vars(old)["dp"])
    last.ring[0].append(last.ring)
    deep = (vars(old)["tp"],)
    for _ in range(20_000):
        deep = (deep,)
    rebound = change.over(first, [deep], Plain(module=nn.Module()))
    assert len(rebound.replaced) == 20_001 + 1 + 1 + 1  # the ring, the list in it, deep
    assert last.group is new.tp
    assert last.next is first
    assert last.ring[1] is new.dp
    assert last.ring[0][0] is last.ring
    assert rebound.replaced[0] == "Plain#1.group"
    assert "..." + ".next" * 49 + ".group" in rebound.replaced


@dataclass(frozen=True)
class Frozen:
    group: object
    more: list


class Proxy:
    """A proxy that fails on any attribute access."""

    def __init__(self, group):
        object.__setattr__(self, "group", group)

    def __getattribute__(self, name):
        raise AssertionError(f"asked for {name}")

    __setattr__ = __getattribute__


class Locked(Plain):
    def __setattr__(self, name, value):
        raise AssertionError("not to be set")

    @property
    def group(self):
        raise AssertionError("not to be asked")


@functools.lru_cache
def cached(group, number):
    return number


def test_what_cannot_be_replaced_is_told_of(change):
    old, new = change.old, change.new
    del change.core  # holds old groups, too

    def generator(group):
        yield group

    running = generator(vars(old)["tp"])
    next(running)
    cached(vars(old)["tp"], 1)
    named = Named((vars(old)["tp"], 1))
    named.group = vars(old)["dp"]
    mesh = DeviceMesh.from_group(new.tp, "cpu")
    sharded = nn.Linear(2, 2)  # torch changes its class, but not its attributes
    sharded.tp_group = vars(old)["tp"]
    fully_shard(sharded, mesh=mesh)
    mesh._pg_registry = {"name": vars(old)["tp"]}
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.process_group = vars(old)["dp"]
    wrapper.module = Plain(group=vars(old)["dp"])  # the wrapped object belongs to the user
    things = Plain(
        frozen=Frozen(vars(old)["tp"], [vars(old)["tp"]]),
        running=running,
        cached=cached,
        named=named,
        mesh=mesh,
        wrapper=wrapper,
        sharded=sharded,
        name=vars(old)["tp"].group_name,
        iterator=iter([vars(old)["cp"]]),
        proxy=Proxy(vars(old)["tp"]),
        locked=Locked(group=vars(old)["tp"]),
    )
    rebound = change.over(things, vars(old)["tp"], (vars(old)["dp"],))
    left = dict(line.split(": ", 1) for line in rebound.left)
    in_cache = {path for path in left if path.startswith("Plain.cached<")}
    assert {left.pop(path) for path in in_cache} == {"a cache; call its cache_clear()"}
    assert left.keys() == {
        "ProcessGroup",
        "tuple[0]",
        "Plain.frozen.group",
        "Plain.running<ProcessGroup>",
        "Plain.named[0]",
        "Plain.mesh._pg_registry['name']",
        "Plain.wrapper.process_group",
        "Plain.name",
    }
    assert "frozen dataclass" in left["Plain.frozen.group"]
    assert "generator can't be changed" in left["Plain.running<ProcessGroup>"]
    assert "Named can't be changed" in left["Plain.named[0]"]
    assert "DeviceMesh keeps what it made of the group" in left["Plain.mesh._pg_registry['name']"]
    assert "DistributedDataParallel keeps" in left["Plain.wrapper.process_group"]
    assert "is the name of an old group" in left["Plain.name"]
    assert "rebind() itself" in left["ProcessGroup"]
    assert not rebound.elsewhere  # nothing is reported twice
    assert not rebound.unseen
    # All other references are replaced, and no user code has run.
    assert things.frozen.more == [new.tp]
    assert named.group is new.dp
    assert wrapper.module.group is new.dp
    assert sharded.tp_group is new.tp
    assert object.__getattribute__(things.proxy, "group") is new.tp
    assert vars(things.locked)["group"] is new.tp
    assert next(things.iterator) is new.cp
    assert not rebound.complete
    text = str(rebound)
    assert f"not replaced: {len(rebound.left)}\n" in text
    assert all(f"  {line}" in text for line in rebound.left)
    cached.cache_clear()


class Elsewhere:
    group = None


def test_what_is_held_elsewhere_is_told_of(change):
    old, new = change.old, change.new
    del change.core  # holds old groups, too
    model, forgotten = Plain(group=vars(old)["tp"]), Plain(group=vars(old)["tp"], pg=old)
    Elsewhere.group = vars(old)["dp"]
    shared, another = (
        vars(old)["cp"],
        torch.ones(2),
    )  # objects that must not be compared for equality

    def hook():
        return another, shared

    garbage = Plain(group=vars(old)["tp"])
    garbage.itself = garbage
    gc.collect()
    del garbage
    rebound = change.over(model)
    assert model.group is new.tp
    here = __name__
    assert sorted(rebound.elsewhere) == [
        f"cp: the closure of {here}.{hook.__qualname__}, as shared",
        f"dp: {here}.Elsewhere, as group",
        f"the collection: a {here}.Plain, as pg",
        f"tp: a {here}.Plain, as group",
    ]
    assert "held elsewhere: 4" in str(rebound)
    Elsewhere.group = shared = None
    assert change.over(forgotten).complete


def test_what_is_frozen_and_held_elsewhere_is_told_of(change):
    Elsewhere.group = vars(change.old)["dp"]
    del change.core, change.old
    gc.freeze()
    try:
        rebound = rebind([], change.replacements)
    finally:
        gc.unfreeze()
    assert not rebound.elsewhere
    assert rebound.unseen == ("dp",)
    Elsewhere.group = None


def test_what_lives_on_in_a_local_variable_is_told_of(change):
    held = vars(change.old)["tp"]
    del change.core
    model = Plain(pg=change.old, group=held)
    rebound = rebind([model, vars(change)], change.replacements)
    assert change.old is model.pg is change.new
    assert model.group is change.new.tp
    assert rebound.complete
    assert rebound.unseen == ("tp",)
    assert str(rebound).endswith(" yet alive: tp")
    del held
    assert not rebind([], change.replacements).unseen


def test_other_sessions_and_modules_are_not_entered(change):
    old, new = change.old, change.new
    module = types.ModuleType("a_module")
    module.group = vars(old)["tp"]

    class Holder:
        group = vars(old)["dp"]

    with megapg.session(name="other", timeout=30) as other:
        other.note = vars(old)["tp"]
        globals()["_held"] = vars(old)["tp"]
        things = Plain(module=module, kind=Holder, session=other, lease=old.lease, new=new)
        things.namespace = globals()
        rebound = change.over(things)
        assert not rebound.replaced
        assert not rebound.left
        assert module.group is vars(old)["tp"]
        assert Holder.group is vars(old)["dp"]
        assert other.note is vars(old)["tp"]
        assert globals().pop("_held") is vars(old)["tp"]
        del other.note
    assert things.new is new


def test_a_session_replaces_the_groups_of_a_closed_one():
    with megapg.session(timeout=30) as lost:
        held = Plain(tp=lost.groups.tp, pg=lost.groups)
    with megapg.session(timeout=30, dedicated=APART) as other:
        with pytest.raises(SessionError, match=r"no groups like the earlier .* same layout, ranks"):
            other.rebind(held, of=lost)
        assert not other.rebind(held).replaced
    with megapg.session(timeout=30) as fresh:
        assert len(fresh.rebind(held, of=lost).replaced) == 2
        assert held.tp is fresh.groups.tp
        assert held.pg is fresh.groups


def test_replacements_go_by_identity_and_keep_nothing_alive():
    class Handle:
        def __eq__(self, other):
            return True

        __hash__ = object.__hash__

    old, equal, new = Handle(), Handle(), Handle()
    replacements = Replacements()
    replacements.add(weakref.ref(old), new)
    assert replacements.get(old) is new
    assert replacements.get(equal) is None
    assert replacements.alive() == [old]
    gone = weakref.ref(old)
    del old
    assert gone() is None
    assert replacements.alive() == []
    others = [Handle() for _ in range(100)]  # one of them may have the same address
    assert all(replacements.get(other) is None for other in others)
    replacements.add(gone, new)
    assert isinstance(rebind([others], replacements), Rebound)


# -- published() -----------------------------------------------------------------------------------


def globals_are(pg):
    held = vars(parallel_state)
    return all(
        held[name] is getattr(pg, field)
        for name, field in GROUP_GLOBALS.items()
        if name in held and field != "hcp"
    )


def state():
    return {name: value for name, value in vars(parallel_state).items() if re.match("_[A-Z]", name)}


def published_follows():
    gc.unfreeze()  # settled.py may have frozen objects that hold groups
    before = state()
    with (
        megapg.session(pp=2, vpp=2, timeout=60) as session,
        megapg.session(name="other", timeout=60) as other,
    ):
        with published(session.groups) as pg:
            assert pg is session.groups
            held = [weakref.ref(pg), weakref.ref(pg.pp)]
            del pg
            parallel_state.set_virtual_pipeline_model_parallel_rank(1)
            for _ in range(2):
                session.suspend("recreate")
                assert not parallel_state.model_parallel_is_initialized()
                assert not any(isinstance(value, dist.ProcessGroup) for value in state().values())
                assert [reference() for reference in held] == [None, None]
                session.resume()
                assert globals_are(session.groups)
                assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
                assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1
                assert parallel_state._GLOBAL_MEMORY_BUFFER is not None
            total = torch.ones(1)
            dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
            assert total.item() == 2
            # Inside another block, the outer session still continues.
            with published(other.groups), published(other.groups):
                session.suspend("recreate")
                assert globals_are(other.groups)
                session.resume()
                assert globals_are(other.groups)
                other.suspend("recreate")
                assert not parallel_state.model_parallel_is_initialized()
                other.resume()
                assert globals_are(other.groups)
            assert globals_are(session.groups)
            assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 1
            # Leave the block while the groups are suspended.
            outer = published(other.groups)
            outer.__enter__()
            other.suspend("recreate")
            outer.__exit__(None, None, None)
            other.resume()
            assert globals_are(session.groups)
        after = state()
        assert after.keys() == before.keys()
        assert all(after[name] is before[name] for name in before)
        for each in (session, other):
            lease = each.groups.lease
            assert not lease.at_end
            assert not lease.at_succession
            assert not each.live_references()
    return True


@pytest.mark.contract
def test_a_publication_follows_its_session():
    assert (
        run_distributed(
            published_follows, 2, deadline=120, preload=("megapg.megatron", "megatron.core")
        )
        == [True] * 2
    )
