"""Calls whose arguments decide what is asked of the globals behind them."""

from __future__ import annotations

from pathlib import Path

from trees import write

from megapg.migrate.config import Config
from megapg.migrate.engine import migrate

FOR_WANT_OF_A_SIZE = """\
from megatron.core import mpu


def scale(x, size=None, **kwargs):
    if size is None:
        size = mpu.get_context_parallel_world_size()
    return x * size


def hands_on(x, *, size=None, **kwargs):
    return scale(x, size)


def is_passed_it(model, x, size):
    return scale(x, size), hands_on(x, size=2), mpu.get_context_parallel_rank()


def is_passed_none(model, x):
    return scale(x, None), mpu.get_context_parallel_rank()


def leaves_it_out(model, x):
    return hands_on(x), mpu.get_context_parallel_rank()


def of_one(x, size=1, **kwargs):
    return scale(x, size)


def has_a_size(model, x):
    return of_one(x), mpu.get_context_parallel_rank()


def loss(model, size=None, is_last=None):
    if size is None and is_last is None:
        size = mpu.get_context_parallel_world_size()
    return model(size, is_last)


def by_way(model, size=None):
    return loss(model, size)


def of_the_globals(first, **kwargs):
    size = mpu.get_context_parallel_world_size()
    return size, loss(first, size), by_way(first, size), loss(first, is_last=False)


def lacks_it(first, **kwargs):
    return by_way(first, None), mpu.get_context_parallel_world_size()
"""


def test_what_is_asked_only_for_want_of_an_argument_is_not_where_that_is_passed(
    tmp_path: Path,
) -> None:
    files = {"a.py": FOR_WANT_OF_A_SIZE}
    found = migrate([write(tmp_path, files)], Config(tmp_path, versions=(16,))).callees
    assert [(each.function, each.callee) for each in found] == [
        ("is_passed_none", "scale"),
        ("leaves_it_out", "hands_on"),
        ("lacks_it", "by_way"),
    ]


BY_WAY_OF_OTHERS = """\
import torch
from megatron.core import mpu


def parts():
    return mpu.get_tensor_model_parallel_world_size()


def by_way():
    return parts()


class Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.distributed.all_reduce(x, group=mpu.get_tensor_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def reduced(*given):
    return Reduced.apply(*given)


class Layer(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n // by_way()

    def forward(self, x):
        return reduced(x)


class Model(torch.nn.Module):
    def __init__(self, n, pg_collection=None):
        super().__init__()
        self.layer = Layer(n)
        self.rank = mpu.get_tensor_model_parallel_rank()
"""


def test_an_object_goes_with_what_functions_answer_for_it(tmp_path: Path) -> None:
    """Its size would come of what it was passed, and its collectives would run on the globals'."""
    files = {"a.py": BY_WAY_OF_OTHERS}
    found = migrate([write(tmp_path, files)], Config(tmp_path, versions=(16,)))
    (file,) = found.files
    after = file.after.decode()
    assert "    def __init__(self, n):\n" in after
    assert "        self.n = n // by_way()\n" in after
    (callee,) = found.callees
    assert (callee.function, callee.callee, callee.what) == ("Model.__init__", "Layer", "tp")


APPLIED = """\
import megapg
import torch
from megatron.core import mpu


def gathered(x, group=None, sizes=None):
    if group is None:
        group = mpu.get_tensor_model_parallel_group()
    return x, group, sizes


class Gathered(torch.autograd.Function):
    @staticmethod
    def symbolic(graph, x, group=None, sizes=None):
        return gathered(x, group, sizes)

    @staticmethod
    def forward(ctx, x, group=None, sizes=None):
        return gathered(x, group, sizes)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


def gather(x, group=None, sizes=None):
    return Gathered.apply(x, group, sizes)


def passes_it(model, x):
    pg = megapg.groups_of(model, "tp")
    return gather(x, pg.tp), Gathered.apply(x, pg.tp)


def lacks_it(model, x):
    pg = megapg.groups_of(model, "tp")
    return gather(x), Gathered.apply(x, None), pg.rank("tp")
"""


def test_what_an_autograd_function_is_applied_to_decides_it_too(tmp_path: Path) -> None:
    found = migrate([write(tmp_path, {"a.py": APPLIED})], Config(tmp_path, versions=(16,))).callees
    assert [(each.function, each.callee, each.instead) for each in found] == [
        ("lacks_it", "gather", 'pass it group=megapg.groups_of(model, "tp").tp'),
        ("lacks_it", "Gathered.forward", 'pass it group=megapg.groups_of(model, "tp").tp'),
    ]


BOUND_LATER = {
    "loss.py": """\
from functools import partial

from megatron.core import mpu


def log_probs(x, *, args):
    return x * mpu.get_context_parallel_world_size()


def values(x, *, args, **given):
    return x, mpu.get_context_parallel_rank()


def asks_nothing(x, *, args):
    return x


def takes_one(x, *, args, pg_collection=None):
    return x, mpu.get_context_parallel_rank()


def policy(x, *, args, **given):
    return x, mpu.get_context_parallel_world_size()


def chosen(model, x):
    match model.kind:
        case "policy":
            func = policy
        case "value":
            func = values
        case _:
            func = asks_nothing
    return func(x, args=1), mpu.get_context_parallel_rank()


def forward_only(f, model, schedule):
    def step(data, model):
        rank = mpu.get_context_parallel_rank()
        given = {"args": rank}
        return model(data), partial(f, **given)

    return schedule(step)


def passes_it(f, model):
    rank = mpu.get_context_parallel_rank()
    given = {"args": rank}
    given["pg_collection"] = model.pg_collection
    return partial(f, **given), partial(f, pg_collection=model.pg_collection)
""",
    "actor.py": """\
from functools import partial

from loss import asks_nothing, forward_only, log_probs, passes_it, takes_one, values
from megatron.core import mpu


def computes(model, schedule):
    rank = mpu.get_context_parallel_rank()
    passes_it(takes_one, model)
    forward_only(asks_nothing, model, schedule)
    forward_only(partial(takes_one, pg_collection=model.pg_collection), model, schedule)
    return rank, forward_only(log_probs, model, schedule)


def computes_values(model, schedule):
    return forward_only(values, model, schedule), forward_only(takes_one, model, schedule)
""",
}


def test_what_is_bound_by_a_parameter_is_followed(tmp_path: Path) -> None:
    """And each of the functions that a name may stand for is named."""
    tree = write(tmp_path, BOUND_LATER)
    found = migrate([tree], Config(tmp_path, versions=(16,))).callees
    assert [(each.function, each.callee) for each in found] == [
        ("computes", "log_probs"),
        ("chosen", "values"),
        ("chosen", "policy"),
        ("forward_only", "log_probs"),
        ("forward_only", "values"),
        ("forward_only", "takes_one"),
    ]
    assert found[-1].instead == 'pass it pg_collection=megapg.groups_of(model, "cp")'
