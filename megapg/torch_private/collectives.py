"""torch's private operators behind its collectives. The rules of the parent package hold here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        collective: its name, such as ``all_reduce``. Variants of a collective have one name.
        group: the process group.
        bytes: bytes of the whole buffer; see :func:`megapg.testing.count_traffic`.
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
            group = self._group(func, args)
            nbytes = 0 if found.buffer is None else self._bytes(args[found.buffer])
            times = group.size() if found.of_each_rank else 1
            self._on_call(Call(found.collective, group, nbytes * times))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _group(func: Any, args: Sequence[Any]) -> dist.ProcessGroup:
        """Return the process group among the arguments of a collective's operator.

        Functional collectives get the group's name, or the group itself.
        """
        names = [argument.name for argument in func._schema.arguments]
        value = args[names.index("process_group" if "process_group" in names else "group_name")]
        if isinstance(value, str):
            value = vars(c10d)["_resolve_process_group"](value)
        return value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)

    @classmethod
    def _bytes(cls, value: Any) -> int:
        """Return the bytes of a tensor, or of all tensors in nested lists."""
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(map(cls._bytes, value))


class _Operator(NamedTuple):
    """A collective, and the argument of its operator that has the whole buffer.

    Attributes:
        buffer: index of the argument; None if there is no buffer.
        of_each_rank: True if the argument has the part of one rank.
    """

    collective: str
    buffer: int | None
    of_each_rank: bool = False


# Operators of c10d take the output first, and those of _c10d_functional take the input first.
_OPERATORS: Mapping[str, _Operator] = {
    "c10d.allreduce_": _Operator("all_reduce", 0),
    "c10d.allreduce_coalesced_": _Operator("all_reduce", 0),
    "c10d.broadcast_": _Operator("broadcast", 0),
    "c10d.reduce_": _Operator("reduce", 0),
    "c10d._allgather_base_": _Operator("all_gather", 0),
    "c10d.allgather_": _Operator("all_gather", 0),
    "c10d.allgather_coalesced_": _Operator("all_gather", 0),
    "c10d.allgather_into_tensor_coalesced_": _Operator("all_gather", 0),
    "c10d._reduce_scatter_base_": _Operator("reduce_scatter", 1),
    "c10d.reduce_scatter_": _Operator("reduce_scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": _Operator("reduce_scatter", 1),
    "c10d.alltoall_base_": _Operator("all_to_all", 1),
    "c10d.alltoall_": _Operator("all_to_all", 1),
    "c10d.gather_": _Operator("gather", 1, of_each_rank=True),
    "c10d.scatter_": _Operator("scatter", 0, of_each_rank=True),
    "c10d.send": _Operator("send", 0),
    "c10d.recv_": _Operator("recv", 0),
    "c10d.recv_any_source_": _Operator("recv", 0),
    "c10d.barrier": _Operator("barrier", None),
    "c10d.monitored_barrier_": _Operator("barrier", None),
    "_c10d_functional.all_reduce": _Operator("all_reduce", 0),
    "_c10d_functional.all_reduce_": _Operator("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced": _Operator("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced_": _Operator("all_reduce", 0),
    "_c10d_functional.broadcast": _Operator("broadcast", 0),
    "_c10d_functional.broadcast_": _Operator("broadcast", 0),
    "_c10d_functional.all_gather_into_tensor": _Operator("all_gather", 0, of_each_rank=True),
    "_c10d_functional.all_gather_into_tensor_out": _Operator("all_gather", 0, of_each_rank=True),
    "_c10d_functional.all_gather_into_tensor_coalesced": _Operator(
        "all_gather", 0, of_each_rank=True
    ),
    "_c10d_functional.reduce_scatter_tensor": _Operator("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_out": _Operator("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_coalesced": _Operator("reduce_scatter", 0),
    "_c10d_functional.all_to_all_single": _Operator("all_to_all", 0),
    "_c10d_functional.isend": _Operator("send", 0),
    "_c10d_functional.irecv": _Operator("recv", 0),
}
