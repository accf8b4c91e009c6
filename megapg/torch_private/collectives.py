"""torch's private operators behind its collectives. The rules of the parent package hold here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

__all__ = ["Call", "watched"]


@dataclass(frozen=True)
class Call:
    """One call of a collective by this rank.

    Attributes:
        collective: its name, such as ``all_reduce``; variants of a collective have one name.
        group: the process group.
        bytes: bytes of the whole buffer, of all ranks of the group where they differ.
    """

    collective: str
    group: dist.ProcessGroup
    bytes: int


@contextlib.contextmanager
def watched(on_call: Callable[[Call], None]) -> Iterator[None]:
    """Call ``on_call`` before each collective of this thread, and of backward passes it starts.

    Public: none. ``torch.distributed.tensor.debug.CommDebugMode`` counts calls, without groups.
    """
    with _Watch(on_call):
        yield


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, collectives among them, and runs it."""

    supports_higher_order_operators = True

    def __init__(self, on_call: Callable[[Call], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_call = on_call

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor then calls operators on plain tensors
        found = _OPERATORS.get(str(getattr(func, "_overloadpacket", "")))
        if found is not None:
            collective, bytes_of = found
            group = _group(func, args)
            self._on_call(Call(collective, group, bytes_of(args, group.size())))
        return func(*args, **(kwargs or {}))


def _group(func: Any, args: Sequence[Any]) -> dist.ProcessGroup:
    """Return the process group among the arguments of a collective's operator.

    Functional collectives get the group's name, or the group itself.
    """
    names = [argument.name for argument in func._schema.arguments]
    value = args[names.index("process_group" if "process_group" in names else "group_name")]
    if isinstance(value, str):
        value = vars(c10d)["_resolve_process_group"](value)
    return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)


def _bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value))


_BytesOf: TypeAlias = Callable[[Sequence[Any], int], int]


def _nothing(args: Sequence[Any], size: int) -> int:
    return 0


def _first(args: Sequence[Any], size: int) -> int:
    return _bytes(args[0])


def _second(args: Sequence[Any], size: int) -> int:
    return _bytes(args[1])


def _first_of_each_rank(args: Sequence[Any], size: int) -> int:
    return _bytes(args[0]) * size


def _second_of_each_rank(args: Sequence[Any], size: int) -> int:
    return _bytes(args[1]) * size


# Operator -> the collective, and the bytes of a call by its arguments and the group's size. Most
# operators of c10d take the output first, and those of _c10d_functional take the input first.
_OPERATORS: Mapping[str, tuple[str, _BytesOf]] = {
    "c10d.allreduce_": ("all_reduce", _first),
    "c10d.allreduce_coalesced_": ("all_reduce", _first),
    "c10d.broadcast_": ("broadcast", _first),
    "c10d.reduce_": ("reduce", _first),
    "c10d._allgather_base_": ("all_gather", _first),
    "c10d.allgather_": ("all_gather", _first),
    "c10d.allgather_coalesced_": ("all_gather", _first),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", _first),
    "c10d._reduce_scatter_base_": ("reduce_scatter", _second),
    "c10d.reduce_scatter_": ("reduce_scatter", _second),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", _second),
    "c10d.alltoall_base_": ("all_to_all", _second),
    "c10d.alltoall_": ("all_to_all", _second),
    "c10d.gather_": ("gather", _second_of_each_rank),
    "c10d.scatter_": ("scatter", _first_of_each_rank),
    "c10d.send": ("send", _first),
    "c10d.recv_": ("recv", _first),
    "c10d.recv_any_source_": ("recv", _first),
    "c10d.barrier": ("barrier", _nothing),
    "c10d.monitored_barrier_": ("barrier", _nothing),
    "_c10d_functional.all_reduce": ("all_reduce", _first),
    "_c10d_functional.all_reduce_": ("all_reduce", _first),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", _first),
    "_c10d_functional.all_reduce_coalesced_": ("all_reduce", _first),
    "_c10d_functional.broadcast": ("broadcast", _first),
    "_c10d_functional.broadcast_": ("broadcast", _first),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", _first_of_each_rank),
    "_c10d_functional.all_gather_into_tensor_out": ("all_gather", _first_of_each_rank),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", _first_of_each_rank),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", _first),
    "_c10d_functional.reduce_scatter_tensor_out": ("reduce_scatter", _first),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", _first),
    "_c10d_functional.all_to_all_single": ("all_to_all", _first),
    "_c10d_functional.isend": ("send", _first),
    "_c10d_functional.irecv": ("recv", _first),
}
