"""Models as Megatron-core's resharding (``megatron.core.resharding``) has to be given them.

It asks a collection for nothing that a session's lacks, and so copies weights between the models of
two sessions as it is. But it matches parameters by name, and knows one way only to number experts:
that of Transformer Engine's grouped GEMM (``linear_fc1.weight3``), which it counts on from rank to
rank. ``local_experts.1`` it takes to be the same expert on every rank: it copies the wrong one, or
finds none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from megapg.errors import UnsupportedOptionError
from megapg.megatron.core import core_version

_OF_AN_EXPERT = re.compile(r"\blocal_experts\.(\d+)\.(.+)\.(weight|bias)$")


class NumberedExperts:
    """A model whose experts have the names that grouped GEMM gives them: the same parameters."""

    # Nothing else is passed on: upstream keeps plans and tables of names on the models it is given,
    # and those of the model itself, where it was given that before, have the other names.
    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config
        self.named_modules = model.named_modules

    @property
    def pg_collection(self) -> Any:
        """The model's; asked each time, since a rebound model has another."""
        return self._model.pg_collection

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As of a module, with the index of an expert behind ``weight`` or ``bias``."""
        for name, parameter in self._model.named_parameters(recurse=recurse):
            yield _numbered(name), parameter


def for_resharding(model: torch.nn.Module) -> torch.nn.Module | NumberedExperts:
    """What to pass to Megatron-core's ``swap_model_weights`` in place of ``model``.

    That is the model itself, out of its wrappers, unless its experts are modules of their own
    (``SequentialMLP``: the local spec, and any without grouped GEMM). Then it is a view of the
    model, whose experts upstream can number through all ranks. Megatron-core 0.16 keeps its plan on
    the target it was passed: pass the same view again, and the plan is made once.

    Args:
        model: one, wrapped or not; no list of chunks, of which upstream would take the first only.

    Raises:
        UnsupportedOptionError: experts on several ranks have biases that tensor parallelism does
            not split. Megatron-core would take these from the wrong expert.
        UnsupportedVersionError: Megatron-core is not installed, or older than 0.16.
    """
    core_version()
    from megatron.core.utils import unwrap_model

    core = unwrap_model(model)
    of_experts = [(name, each) for name, each in core.named_parameters() if _numbered(name) != name]
    for name, parameter in of_experts:
        # Upstream takes what is not split to be the same on all ranks of the *dense* dp group, over
        # which the experts are spread. `allreduce` is False on experts under expert parallelism.
        split = getattr(parameter, "tensor_model_parallel", False)
        if not split and not getattr(parameter, "allreduce", True):
            raise UnsupportedOptionError(
                f"for_resharding(): {name}: Megatron-core's resharding would take this from the "
                "wrong expert, as tensor parallelism does not split it. Build the experts without "
                "biases (add_bias_linear=False), or go by way of a checkpoint."
            )
    return NumberedExperts(core) if of_experts else core


def _numbered(name: str) -> str:
    return _OF_AN_EXPERT.sub(r"\2.\3\1", name)
