"""The slices of tensors that a rank holds, as plain data. Needs only the standard library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from megapg.errors import RefitError

if TYPE_CHECKING:
    import torch


VERSION = 1
"""Version of the JSON form."""


@dataclass(frozen=True)
class Slice:
    """One box of one tensor, as a rank holds it.

    A parameter that Megatron-core cuts in several places gives several slices. Example: the first
    linear layer of SwiGLU under tensor parallelism gives a slice of each half.

    Attributes:
        name: name of the whole tensor. For a Megatron-core model this is the key in a checkpoint:
            one name for all layers, whose number is the first axis.
        shape: shape of the whole tensor.
        dtype: type of the elements, as ``"bfloat16"``.
        itemsize: bytes of an element.
        offset: position of the box in the whole tensor.
        extent: shape of the box.
        replica: Megatron-core's replica id. All numbers of the main replica are 0.
        parameter: name of the parameter or buffer on this rank.
        resizable: True if other layouts may pad the tensor to another shape, as the vocabulary.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    replica: tuple[int, ...] = (0,)
    parameter: str = ""
    resizable: bool = False


@dataclass(frozen=True)
class Slices:
    """The slices of one rank, and the live tensors that hold them.

    Two objects are equal if they describe the same slices. The JSON form has no tensors.

    Attributes:
        described: the slices.
        live: for each slice, a function that returns the tensor of its extent: a view of the
            live parameter. Empty after :meth:`from_json`.
        prepare: is called before the tensors are read.
    """

    described: tuple[Slice, ...]
    live: tuple[Callable[[], torch.Tensor], ...] = field(default=(), repr=False, compare=False)
    prepare: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> str:
        """Return the slices as a JSON object with the keys ``version`` and ``slices``."""
        return json.dumps({"version": VERSION, "slices": [asdict(each) for each in self.described]})

    @classmethod
    def from_json(cls, text: str) -> Slices:
        """Return the slices that :meth:`to_json` wrote, without tensors.

        Raises:
            RefitError: the text has another version or form.
        """
        try:
            read = json.loads(text)
            version, rows = read["version"], read["slices"]
            described = tuple(map(_slice, rows)) if version == VERSION else ()
        except (ValueError, TypeError, KeyError) as error:
            raise RefitError(f"this is no JSON form of slices: {error!r}.") from error
        if version != VERSION:
            raise RefitError(
                f"the slices have version {version}, and this megapg reads {VERSION}. Use the same "
                "megapg on both sides."
            )
        return cls(described)


def _slice(row: Mapping[str, object]) -> Slice:
    return Slice(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})  # type: ignore[arg-type]


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the type of the elements without the prefix ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse tensors whose memory is not their elements.

    Raises:
        RefitError: names the tensor and its type.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.is_meta:
        kind = "a meta tensor" if tensor.is_meta else f"a {type(tensor).__name__}"
        raise RefitError(f"{name} is {kind}; a refit moves plain tensors with elements.")
