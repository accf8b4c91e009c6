"""Reading files of ``torch.save`` safely: ``common.pt`` and the entries of shards."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import pathlib
import pickle
import pkgutil
import re
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from typing_extensions import override

from megapg.checkpoint.pickles import Called, Dict, check_bounds, checked, damaged, refuse


def load_safely(data: bytes, what: str) -> object:
    """Load a file of ``torch.save``, with tensors on the CPU, if it holds only what a checkpoint
    needs.

    Allowed are the types that torch takes with ``weights_only=True``, and those that Megatron-core
    adds for its common state (``megatron/core/safe_globals.py``): namespaces, NumPy arrays of
    numbers as in NumPy's random state, paths, signals, generators, and some of its own classes. If
    megatron.core is not imported, objects of those classes become stand-ins that print their name
    and value. So a checkpoint can be inspected without Megatron-core. torch's own list of safe
    globals is restored afterwards.

    Args:
        data: the file's bytes.
        what: its name, for messages.

    Raises:
        UnsafeCheckpointError: it names anything else; nothing of it was run.
        BrokenCheckpointError: it is damaged.
    """
    try:
        with _listed(_safe_globals("megatron.core" in sys.modules)):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        if refused := _REFUSALS.search(str(error)):
            name = next(group for group in refused.groups() if group)
            refuse(what, name.rstrip("."), error)
        raise damaged(what, error) from error


_REFUSALS = re.compile(
    r"GLOBAL (\S+)|unrecognized function (.+)|, but got (<(?:class|function|built-in).+)|"
    r"(TorchScript) archive|(persistent_load) "
)


_Global: TypeAlias = tuple[Callable[..., object], str]


class _Foreign:
    """An object of a class of Megatron-core, which is not imported here."""

    name: ClassVar[str]

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    @override
    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, getattr(self, 'arguments', ())))})"


_CLASSES_OF_MEGATRON = (
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
)


@functools.cache  # resolving names in modules takes longer than reading a small object
def _safe_globals(with_megatron: bool) -> tuple[_Global, ...]:
    classes = [
        argparse.Namespace,
        types.SimpleNamespace,
        io.BytesIO,
        signal.Signals,
        torch.Generator,
    ]
    found: list[_Global] = [(kind, f"{kind.__module__}.{kind.__qualname__}") for kind in classes]
    found += [(pathlib.PosixPath, f"{home}.PosixPath") for home in ("pathlib", "pathlib._local")]
    of_megatron = [_of_megatron(name, with_megatron) for name in _CLASSES_OF_MEGATRON]
    return (*found, *_numpy_globals(), *of_megatron)


def _numpy_globals() -> list[_Global]:
    """Return the names for an array of numbers, without the object type, whose elements are
    pickles.
    """
    try:
        import numpy
        from numpy._core.multiarray import _reconstruct
    except ImportError:
        return []
    kinds = {type(numpy.dtype(code)) for code in (*numpy.typecodes["AllInteger"], *"?efd")}
    return [
        (numpy.ndarray, "numpy.ndarray"),
        (numpy.dtype, "numpy.dtype"),
        *((kind, f"numpy.dtypes.{kind.__name__}") for kind in kinds),
        # NumPy 2 moved the module.
        *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    ]


def _of_megatron(name: str, known: bool) -> _Global:
    if known:
        with contextlib.suppress(AttributeError, ImportError):  # some exist in newer versions only
            return pkgutil.resolve_name(name), name
    return type(name.rpartition(".")[2], (_Foreign,), {"name": name}), name


_LIST_OF_TORCH = threading.Lock()


@contextlib.contextmanager
def _listed(names: Sequence[_Global]) -> Iterator[None]:
    """Put names on torch's list of safe globals for a block; those already there stay.

    The list is global, and torch's own block would remove names that others had added.
    """
    with _LIST_OF_TORCH:
        before = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([name for name in names if name not in before]):
            yield


# -- a tensor --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorForm:
    """A plain tensor without its numbers.

    Attributes:
        dtype: of the numbers.
        storage: the name of the archive member with the numbers.
        bytes: size of that member.
        size: the shape.
        stride: in elements, one for each dimension.
        offset: of the first element.
    """

    dtype: torch.dtype
    storage: str
    bytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def parse_tensor_form(data: bytes) -> TensorForm | None:
    """Return the form of a tensor, from the ``data.pkl`` of an archive of ``torch.save``.

    None if it is no plain tensor, damaged or hostile. Then :func:`load_safely` raises the right
    error. This function exists because it takes a tenth of the time.
    """
    if len(data) > _LONGEST_FORM:
        return None
    try:
        check_bounds(data)
        found = _TensorUnpickler(io.BytesIO(data)).load()
        if type(found) is not _Rebuilt:
            return None
        storage, *form, _, hooks = found.arguments
        if type(storage) is not _Storage or hooks:
            return None
        kind, dtype, name, _, count = storage.arguments
        offset = _natural(form[0])
        size, stride = (tuple(map(_natural, checked(part, tuple))) for part in form[1:])
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if kind != "storage" or (0 not in size and offset + last >= _natural(count)):
            return None
        dtype = checked(dtype, torch.dtype)
        width = dtype.itemsize
        return TensorForm(dtype, checked(name, str), _natural(count) * width, size, stride, offset)
    except Exception:  # a damaged pickle may raise anything
        return None


_LONGEST_FORM = 4096  # bytes


def _natural(value: object) -> int:
    number = checked(value, int)
    if number < 0:
        raise ValueError(f"{number} is no size")
    return number


class _Rebuilt(Called):
    pass


class _Storage(Called):
    pass


_OF_A_TENSOR = {
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuilt,
    ("collections", "OrderedDict"): Dict,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "ShortStorage"): torch.int16,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "BoolStorage"): torch.bool,
}


class _TensorUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> object:
        return _OF_A_TENSOR[module, name]

    @override
    def persistent_load(self, pid: object) -> object:
        return _Storage(*checked(pid, tuple))
