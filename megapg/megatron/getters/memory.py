"""Scratch memory that calls with the same name share."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, cast

import torch

from megapg.collection import ProcessGroupCollection
from megapg.megatron.getters.asking import ask, is_the_globals
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
        """Return a tensor of that shape; the next call with the same name gets the same memory."""


def memory_buffer(pg: ProcessGroupCollection) -> MemoryBuffer:
    """Return ``get_global_memory_buffer()``: scratch memory that calls with the same name share.

    There is one buffer for each owner of groups, made at its first use. So two models on two
    sessions never share one. :class:`~megapg.megatron.GlobalGroups` has the global one, and so have
    borrowed groups that are the globals'.

    Raises:
        MissingGlobalGroupError: the globals have none.
        StaleGroupError: the session of ``pg`` has ended.
    """
    if shares_globals_buffer(pg):
        return cast(MemoryBuffer, ask(pg, "get_global_memory_buffer"))
    pg.lease.check("memory_buffer()")
    return owners_buffer(pg)


def shares_globals_buffer(pg: ProcessGroupCollection) -> bool:
    """True if :func:`memory_buffer` returns the global one. The test does not count as a read of
    it.
    """
    return is_the_globals(pg, "tp")


def owners_buffer(pg: ProcessGroupCollection) -> MemoryBuffer:
    """Return the buffer of the owner of these groups, made at its first use."""
    buffer = pg.lease.scratch.get(MEMORY_BUFFER)
    if buffer is None:
        core = importlib.import_module("megatron.core.utils").GlobalMemoryBuffer
        made = core()
        # A proxy: with a reference cycle, the memory would wait for the garbage collector.
        made.get_tensor = partial(_ordinary_tensor, partial(core.get_tensor, weakref.proxy(made)))
        buffer = pg.lease.scratch.setdefault(MEMORY_BUFFER, made)  # the first thread's
    return cast(MemoryBuffer, buffer)


def _ordinary_tensor(
    get_tensor: Callable[..., torch.Tensor], *args: object, **kwargs: object
) -> torch.Tensor:
    """Return a tensor that serves both generation and training, whichever uses it first.

    A tensor allocated under ``inference_mode`` can never be part of a backward pass. An ordinary
    tensor may be written to in both modes.
    """
    with torch.inference_mode(False):
        return get_tensor(*args, **kwargs)
