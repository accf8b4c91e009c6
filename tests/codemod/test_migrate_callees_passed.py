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
