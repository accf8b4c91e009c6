"""Record the outputs of modules, to find the first module that goes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from megatron.core.utils import unwrap_model


class Outputs:
    """The outputs of the modules that have parameters of their own, as forward passes run.

    Attributes:
        found: name of the module's first parameter, and number of the sample -> output, in the
            order in which the modules ran.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.found: dict[tuple[str, int], torch.Tensor] = {}
        self._sample: int | None = None  # None: not in a forward pass, or in its recomputation
        self._hooks = []
        plain = unwrap_model(list(chunks))
        for number, chunk in enumerate(plain):
            prefix = f"chunk {number}: " if len(plain) > 1 else ""
            for name, module in chunk.named_modules():
                own = next(iter(module.named_parameters(recurse=False)), None)
                if own is not None and getattr(own[1], "allreduce", True):
                    full = prefix + ".".join(filter(None, (name, own[0])))
                    self._hooks.append(module.register_forward_hook(partial(self._keep, full)))

    def _keep(self, name: str, module: object, inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if self._sample is not None and isinstance(first, torch.Tensor):
            self.found.setdefault((name, self._sample), first.detach().clone())

    @contextlib.contextmanager
    def at(self, sample: int) -> Iterator[None]:
        """Record the outputs of the block's forward pass for this sample."""
        self._sample = sample
        try:
            yield
        finally:
            self._sample = None

    def stop(self) -> None:
        """Record nothing more."""
        for hook in self._hooks:
            hook.remove()
