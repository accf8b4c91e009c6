"""Run the real ``initialize_model_parallel`` in one process, and record the groups it makes.

torch's fake backend supplies WORLD and the groups, so one process can play any rank of any world.
The function is the installed one, unchanged. ``create_group``, which makes all of its groups, is
wrapped during a ``with`` block.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the fake backend

Recording = dict[str, list[tuple[int, ...]]]
"""Description of a group -> the ranks of each group created under it, in order of creation."""


def functions(names: str = "") -> dict[str, Callable[..., Any]]:
    """Return the functions that ``parallel_state`` defines, whose names match the start."""
    return {
        name: function
        for name, function in vars(parallel_state).items()
        if inspect.isfunction(function)
        and function.__module__ == parallel_state.__name__
        and re.match(names, name)
    }


READERS = functions(r"(get|is|has)_|model_parallel_is")


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Make a WORLD of ``world_size`` for the block, in which this process plays ``rank``."""
    assert not dist.is_initialized(), "something before this test left a WORLD behind"
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def restored_parallel_state() -> Iterator[None]:
    """Restore every module-level underscore name of ``parallel_state``, and remove new ones."""
    assert not parallel_state.model_parallel_is_initialized(), "a test before left globals behind"
    names = vars(parallel_state)
    before = {name: value for name, value in names.items() if _is_state(name)}
    # Some versions initialise these two by adding to the existing object.
    for name in ("_HYBRID_DP_CP_GROUPS", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"):
        if name in names:
            names[name] = copy.copy(names[name])
    try:
        yield
    finally:
        for name in [name for name in names if _is_state(name) and name not in before]:
            del names[name]
        names.update(before)


def _is_state(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@contextmanager
def recorded_megatron(rank: int, world_size: int) -> Iterator[Recording]:
    """Play ``rank`` within the block, and record the groups that Megatron-core makes."""
    recording: Recording = defaultdict(list)
    create_group, everyone = parallel_state.create_group, {*range(world_size)}

    def create_and_note(ranks: list[int], *, group_desc: str, **options: Any) -> object:
        recording[group_desc].append(tuple(sorted(ranks)))  # sorted, as torch will
        distinct = {*ranks}  # torch refuses repeated and unknown ranks
        if rank not in ranks and distinct <= everyone and 0 < len(distinct) == len(ranks):
            return dist.GroupMember.NON_GROUP_MEMBER  # torch's result, at a tenth of the cost
        # A gloo group would wait for the other ranks. A fake group knows its ranks as well.
        options.pop("backend", None)
        return create_group(ranks, group_desc=group_desc, **options)

    with (
        fake_world(rank, world_size),
        restored_parallel_state(),
        mock.patch.object(parallel_state, "create_group", create_and_note),
    ):
        yield recording


@contextmanager
def initialised_megatron(rank: int, world_size: int, *sizes: int, **more: Any) -> Iterator[None]:
    """As :func:`recorded_megatron`, with groups of these sizes."""
    with recorded_megatron(rank, world_size):
        parallel_state.initialize_model_parallel(*sizes, **more)
        yield
