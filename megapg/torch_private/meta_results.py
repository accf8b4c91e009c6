"""Results of operators on the meta device, repeated for arguments of the same shapes.

torch finds most shapes in Python, which takes longer than all the rest of a step without weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_META = torch.device("meta")
_MOST = 1 << 16  # results that are kept
_TORCHS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_VALUES = (bool, int, float, complex, str, type(None), *_TORCHS)


class _Shape(NamedTuple):
    """All that an operator sees of a meta tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Value(NamedTuple):
    """An argument that is no tensor. 1, 1.0 and True are different values."""

    kind: type
    value: object


_EMPTY, _PART = torch.ops.aten.empty_strided.default, torch.ops.aten.as_strided.default
_ITSELF = _Value(object, "the first argument")


def run_on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on meta tensors, or repeat what it did for arguments of the same shapes.

    Results that share memory with an argument are never repeated.
    """
    made = None
    if _repeats(func):
        with contextlib.suppress(_UnknownValueError):
            named = tuple((name, _frozen(value)) for name, value in kwargs.items())
            made = _made(func, _frozen(args), named, torch.get_default_dtype())
    if made is None:
        return func(*args, **kwargs)
    return args[0] if made is _ITSELF else _thawed(made)


class _UnknownValueError(Exception):
    """An argument is described neither by a shape nor by a value."""


@functools.cache
def _repeats(func: Any) -> bool:
    """True unless an operator returns a view or changes the shape of an argument."""
    views = (each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
    return not any(views) and torch.Tag.inplace_view not in func.tags


@functools.lru_cache(_MOST)
def _made(func: Any, args: Any, kwargs: Sequence[tuple[str, Any]], default: torch.dtype) -> Any:
    """Return a description of an operator's results; None if they share memory.

    The default type is that of the results of some operators.
    """
    given = _thawed(args)
    named = {name: _thawed(value) for name, value in kwargs}
    memory = _memory((given, list(named.values())))
    result = func(*given, **named)
    if given and result is given[0]:
        return _ITSELF
    made = _frozen(result)
    own, again = _memory(result), _memory(_thawed(made))
    whole = [size for _, size in own] == [size for _, size in again]
    numbers = [number for number, _ in (*memory, *own)]
    return made if whole and len({*numbers}) == len(numbers) else None


def _memory(value: Any) -> list[tuple[int, int]]:
    """Return a number and the bytes of the storage of each tensor."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return [(StorageWeakRef(storage).cdata, storage.nbytes())]  # type: ignore[no-untyped-call]
    several = value if isinstance(value, list | tuple) else ()
    return [each for part in several for each in _memory(part)]


def _frozen(value: Any) -> Any:
    """Return a hashable description of a value with tensors."""
    if isinstance(value, torch.Tensor):
        return _Shape(value.shape, value.stride(), int(value.storage_offset()), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(_frozen(each) for each in value)
    if not isinstance(value, _VALUES):
        raise _UnknownValueError
    return _Value(type(value), value)


def _thawed(value: Any) -> Any:
    """Return the value of a description, with new tensors."""
    if isinstance(value, _Value):
        return value.value
    if isinstance(value, _Shape):
        empty = _EMPTY(value.size, value.stride, dtype=value.dtype, device=_META)
        return _PART(empty, value.size, value.stride, value.offset) if value.offset else empty
    return tuple(_thawed(each) for each in value)
