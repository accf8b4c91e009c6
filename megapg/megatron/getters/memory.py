"""Scratch memory that calls of the same name share."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, cast

import torch

from megapg.collection import ProcessGroupCollection
from megapg.megatron.getters.asking import is_of_globals, view_of
from megapg.megatron.reading.global_groups import GlobalGroups
from megapg.megatron.tables import MEMORY_BUFFER

__all__ = ["MemoryBuffer", "memory_buffer", "owners_buffer", "shares_globals_buffer"]


class MemoryBuffer(Protocol):
    """Megatron-core's ``GlobalMemoryBuffer``: tensors by name, allocated once and reused."""

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> torch.Tensor:
        """A tensor of that shape, on memory that the next caller with the same name gets too."""


def memory_buffer(pg: ProcessGroupCollection) -> MemoryBuffer:
    """For ``get_global_memory_buffer()``: scratch memory that calls of the same name share.

    There is one for each owner of groups, made when it is first asked for: two models on two
    sessions never meet in one buffer. :class:`~megapg.megatron.GlobalGroups` has the global one,
    and so have borrowed groups that are the globals'.

    Raises:
        MissingGlobalGroupError: the globals have none.
        StaleGroupError: the session behind ``pg`` has ended.
    """
    if shares_globals_buffer(pg):
        return cast(MemoryBuffer, view_of(pg).ask("get_global_memory_buffer"))
    pg.lease.check("memory_buffer()")
    return owners_buffer(pg)


def shares_globals_buffer(pg: ProcessGroupCollection) -> bool:
    """Whether :func:`memory_buffer` gives the global one. To find out is no read of it."""
    return isinstance(pg, GlobalGroups) or (pg.layout is None and is_of_globals(pg, "tp"))


def owners_buffer(pg: ProcessGroupCollection) -> MemoryBuffer:
    """The one that goes with the owner of these groups, made when it is first asked for."""
    buffer = pg.lease.scratch.get(MEMORY_BUFFER)
    if buffer is None:
        core = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer
        made = core()
        # By a proxy: with a circle of references the memory would wait for the collector.
        made.get_tensor = partial(_ordinary_tensor, partial(core.get_tensor, weakref.proxy(made)))
        buffer = pg.lease.scratch.setdefault(MEMORY_BUFFER, made)  # one, whoever came first
    return cast(MemoryBuffer, buffer)


def _ordinary_tensor(
    get_tensor: Callable[..., torch.Tensor], *args: object, **kwargs: object
) -> torch.Tensor:
    """One that serves generating and training, whichever asks for it first.

    What is allocated under ``inference_mode`` can't be part of a backward pass ever after. An
    ordinary tensor may be written to in both modes.
    """
    with torch.inference_mode(False):
        return get_tensor(*args, **kwargs)
