"""Tensors without content, so that a model of any size fits on this host.

The rules of the parent package hold here.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from megapg.torch_private import BACKWARD
from megapg.torch_private.meta_results import run_on_meta

_META = torch.device("meta")
_MOST = 1 << 21  # elements of a tensor whose content is kept


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Create every tensor of the block on the meta device, whatever device is asked for.

    Enter the block inside :func:`megapg.testing.megatron_on_cpu`, and with fake process groups.

    Shapes can depend on content: the router of a mixture of experts decides how many tokens an
    expert gets. So small tensors keep their content if it is known. Constants are known, and
    results of known content. The indices of ``topk`` count as known, and are evenly distributed. An
    unknown number reads as 0.

    Collectives of objects return equal objects for all ranks.

    Public: ``torch.device("meta")``, which leaves tensors with a device and content alone.
    """
    owner, name = pkgutil.resolve_name(BACKWARD[0]), BACKWARD[1]
    backward = _backward_inside_the_mode(getattr(owner, name))
    with (
        mock.patch.object(dist, "all_gather_object", _gather_objects),
        mock.patch.object(owner, name, backward),
        _Functions(),
        _Weightless(),  # type: ignore[no-untyped-call]
    ):
        yield


def _backward_inside_the_mode(run: Callable[..., object]) -> Callable[..., object]:
    """Run the autograd engine with the mode on, which torch switches off for ``backward()``."""

    def inside(*args: object, **kwargs: object) -> object:
        with _Functions():
            return run(*args, **kwargs)

    return inside


def _gather_objects(
    found: list[Any], mine: object, group: dist.ProcessGroup | None = None, **options: Any
) -> None:
    """Replace ``all_gather_object``, by which Megatron-core's optimizer compares its parameters."""
    found[:] = [mine] * len(found)


class _Functions(TorchFunctionMode):
    """Replaces functions that work below the operators.

    Megatron-core's optimizer asks for the type of a tensor, and makes a tensor of others. Its
    dispatcher of tokens makes arrays.
    """

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.type and len(args) == 1 and args[0].device == _META:
            kind = args[0].dtype
            name = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}
            return f"torch.cuda.{name.get(kind, 'Double')}Tensor"
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            args = (_mapped(torch.Tensor.item, args[0]), *args[1:])
        if func is F.dropout:
            return _dropout(*args, **(kwargs or {}))
        if func is torch.Tensor.numpy and (content := _known(args[0])) is not None:
            args = (content, *args[1:])
        return func(*args, **(kwargs or {}))


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Drop values by the kernel of a GPU, which keeps one byte for each value."""
    return torch.native_dropout(tensor, p, training)[0] if training and p else tensor


class _Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on the meta device, and on the known content as well."""

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        facts = _facts(func)
        if facts.name.startswith("c10d."):
            return _communicate(facts.name, func, args, kwargs)
        given = list(_tensors((*args, *kwargs.values())))
        if given and all(each.device != _META for each in given):
            return func(*args, **kwargs)
        if facts.name == "aten._local_scalar_dense":
            known = _known(given[0])
            return torch.zeros((), dtype=given[0].dtype).item() if known is None else known.item()
        if facts.name == "aten._to_copy" and str(kwargs.get("device")) == "cpu":
            known = _known(given[0])
            if known is not None:
                return known.to(kwargs.get("dtype") or known.dtype, copy=True)
        masks = [each for each in given[1:] if each.dtype in (torch.bool, torch.uint8)]
        if masks if facts.name == "aten.index" else facts.dynamic:
            return _dynamic(func, args, kwargs, given, masks or given)
        meta = _on_meta(func, args, kwargs)
        if facts.name == "aten.topk":
            _evenly(meta[1], args, kwargs)
        else:
            _follow(func, args, kwargs, given, meta)
        return meta


@dataclass(frozen=True)
class _Facts:
    """The properties of an operator.

    Attributes:
        name: such as ``aten.add``.
        device: True if it takes a device.
        writes: True if it writes into an argument.
        dynamic: True if the shape of its result depends on content.
        random: True if its result is random.
        constant: True if the content of its result does not depend on that of its arguments.
    """

    name: str
    device: bool
    writes: bool
    dynamic: bool
    random: bool
    constant: bool


_CONSTANTS = re.compile(r"aten\.(arange|scalar_tensor|(new_)?(full|ones|zeros)(_like)?)$")


@functools.cache
def _facts(func: Any) -> _Facts:
    name = func._overloadpacket._qualified_op_name.replace("::", ".")
    return _Facts(
        name,
        any(argument.name == "device" for argument in func._schema.arguments),
        func._schema.is_mutable,
        torch.Tag.dynamic_output_shape in func.tags,
        torch.Tag.nondeterministic_seeded in func.tags,
        _CONSTANTS.match(name) is not None,
    )


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(change: Callable[[torch.Tensor], object], value: Any) -> Any:
    """Return a value with its tensors changed, also those in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, each) for each in value])
    return value


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the content of a tensor, or None if the content is unknown."""
    return vars(tensor).get("_content") if tensor.device == _META else tensor


def _keep(tensor: torch.Tensor, content: torch.Tensor | None) -> None:
    if content is None:
        vars(tensor).pop("_content", None)
    else:
        vars(tensor)["_content"] = content


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the meta device that keeps the content of a small real tensor."""
    if tensor.device == _META:
        return tensor
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
    _keep(meta, tensor if _small([tensor]) else None)
    return meta


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the meta device."""
    args = _mapped(_to_meta, args)
    kwargs = {name: _mapped(_to_meta, value) for name, value in kwargs.items()}
    if _facts(func).device:
        kwargs["device"] = _META
    kwargs.pop("pin_memory", None)
    return run_on_meta(func, args, kwargs)


def _follow(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[torch.Tensor],
    meta: Any,
) -> None:
    """Run an operator on known content, and keep the content of its results."""
    facts = _facts(func)
    known = facts.constant or (given and all(_known(each) is not None for each in given))
    if not known and not facts.writes:
        return
    made = list(_tensors([meta]))
    if facts.name == "aten.arange" and made[0].is_floating_point():
        return  # the angles of rotary embeddings are much work, and decide no shape
    if known and not facts.random and _small(made):
        contents = _tensors([_on_content(func, args, kwargs)])
        for each, content in zip(made, contents, strict=True):
            _keep(each, content)
    elif facts.writes:
        for each in made:  # the results are the tensors that were written
            _keep(each, None)


def _small(tensors: Sequence[torch.Tensor]) -> bool:
    return all(each.numel() <= _MOST for each in tensors)


def _on_content(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU, with zeros for unknown content."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        content = _known(tensor)
        if content is None:
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        return content

    args = _mapped(real, args)
    kwargs = {name: _mapped(real, value) for name, value in kwargs.items()}
    if _facts(func).device:
        kwargs["device"] = torch.device("cpu")
    return func(*args, **kwargs)


def _dynamic(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    given: Sequence[torch.Tensor],
    deciding: Sequence[torch.Tensor],
) -> Any:
    """Run an operator whose result has a shape that depends on the content of some tensors."""
    if any(_known(each) is None for each in deciding):
        raise NotImplementedError(f"{func}: the shape of the result depends on unknown content")
    results = _on_content(func, args, kwargs)
    known = all(_known(each) is not None for each in given)

    def hide(content: torch.Tensor) -> torch.Tensor:
        meta = torch.empty_like(content, device=_META)
        _keep(meta, content if known else None)
        return meta

    return _mapped(hide, results)


def _evenly(indices: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Choose the indices of ``topk`` so that every index is chosen equally often."""
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    size = args[0].shape[dim]
    rows = indices.movedim(dim, -1).shape
    if _small([indices]):
        chosen = torch.arange(indices.numel()).remainder(size).view(rows)
        _keep(indices, chosen.movedim(-1, dim).contiguous())


def _communicate(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a collective of fake groups without tensors. All ranks count as having equal content."""
    source = None
    if name in ("c10d._allgather_base_", "c10d.allgather_"):
        source = _known(next(_tensors(args[1:])))
    outputs = [] if name == "c10d.barrier" else list(_tensors(args[:1]))
    for each in outputs:
        times = each.numel() // max(1, source.numel()) if source is not None else 1
        content = None if source is None else torch.cat([source] * times).view(each.shape)
        _keep(each, content)
    empty = _mapped(lambda each: torch.empty(0, dtype=each.dtype), args)
    if name == "c10d.alltoall_base_":  # the sizes of the pieces do not fit any more
        empty = tuple([] if isinstance(each, list) else each for each in empty)
    return func(*empty, **kwargs)
