"""Runs Megatron-core in float64, to tell a wrong number from rounding.

Megatron-core asks for float32 in many places: parameters, the cross entropy, routers, buffers that
pipeline stages receive into. :func:`float64_for_float32` gives each of them float64.
"""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from megapg import torch_private

__all__ = ["float64_for_float32"]


@contextlib.contextmanager
def float64_for_float32() -> Iterator[None]:
    """Compute in float64 wherever the block's code asks torch for float32.

    Enter it inside :func:`megapg.testing.megatron_on_cpu`, before the model is built. Backward
    passes that start in the block are included. Other dtypes are left alone.
    """
    owner, name = torch_private.BACKWARD
    engine = pkgutil.resolve_name(owner)
    run: Callable[..., object] = getattr(engine, name)

    def run_in_mode(*args: object, **kwargs: object) -> object:
        with _Float64ForFloat32():
            return run(*args, **kwargs)

    default = torch.get_default_dtype()
    setattr(engine, name, run_in_mode)
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64ForFloat32():
            yield
    finally:
        torch.set_default_dtype(default)
        setattr(engine, name, run)


def _wider(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


class _Float64ForFloat32(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of every torch function."""

    @override
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is torch.Tensor.float and isinstance(args[0], torch.Tensor):
            return args[0].to(torch.float64, copy=True)  # as for weights of 16 bits
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            asking = sys._getframe(1).f_globals.get("__name__", "")
            if asking.startswith("megatron.core.optimizer."):  # it knows no DoubleTensor
                return "torch.cuda.FloatTensor"
        args = tuple(map(_wider, args))
        return func(*args, **{name: _wider(value) for name, value in (kwargs or {}).items()})
