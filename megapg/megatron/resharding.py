"""Prepares models for Megatron-core's resharding (``megatron.core.resharding``).

Resharding works with a session's collection, so it copies weights between the models of two
sessions. But it matches parameters by name, and can number experts of only one kind across ranks:
those of Transformer Engine's grouped GEMM (``linear_fc1.weight3``). It takes ``local_experts.1`` to
be the same expert on every rank. So it copies the wrong one, or finds none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from megapg.errors import UnsupportedOptionError
from megapg.megatron.core import core_version

# Attributes in which Megatron-core keeps what it found out about a model: the sizes of its groups,
# its tensors, and in 0.16 the plan.
_KEPT = ("_refit_config_tuple", "_refit_tensor_cache", "_cached_reshard_plan")
_OF_AN_EXPERT = re.compile(r"\blocal_experts\.(\d+)\.(.+)\.(weight|bias)$")


class NumberedExperts:
    """A view of a model whose experts have the names of grouped GEMM, with the same parameters."""

    # No other attribute is passed on. Upstream caches plans and tables of names on the models, and
    # a cache on the model itself may have the other names.
    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config
        self.named_modules = model.named_modules

    @property
    def pg_collection(self) -> Any:
        """The model's collection, read each time, since a rebound model has another."""
        return self._model.pg_collection

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As of a module, with the index of an expert appended to ``weight`` or ``bias``."""
        for name, parameter in self._model.named_parameters(recurse=recurse):
            yield _numbered(name), parameter


def for_resharding(model: torch.nn.Module) -> torch.nn.Module | NumberedExperts:
    """Return the object to pass to Megatron-core's ``swap_model_weights`` instead of ``model``.

    This is the unwrapped model, unless its experts are separate modules (``SequentialMLP``: the
    local spec, and any without grouped GEMM). Then it is a view of the model, whose experts
    upstream can number across ranks. Megatron-core 0.16 caches its plan on the target: pass the
    same view again, and the plan is made once.

    Args:
        model: one model, wrapped or not. Upstream would take only the first of a list of chunks.

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
        # Upstream assumes that an unsplit parameter is equal on all ranks of the *dense* dp group,
        # over which the experts are spread. `allreduce` is False on experts under expert
        # parallelism.
        split = getattr(parameter, "tensor_model_parallel", False)
        if not split and not getattr(parameter, "allreduce", True):
            raise UnsupportedOptionError(
                f"for_resharding(): {name}: Megatron-core's resharding would take this from the "
                "wrong expert, as tensor parallelism does not split it. Build the experts without "
                "biases (add_bias_linear=False), or go by way of a checkpoint."
            )
    return NumberedExperts(core) if of_experts else core


def forget_resharding(*models: torch.nn.Module | NumberedExperts | None) -> None:
    """Make Megatron-core forget the plans, services and sizes of its resharding.

    Call it on every rank before ``swap_model_weights`` if groups were made again, or if models of
    equal sizes have other ranks. Megatron-core keeps plans by the sizes of groups, services by
    backend with the group of their first use, and the sizes on the models.

    Args:
        *models: the models, or what :func:`for_resharding` returned; None for a model that this
            rank lacks. Attributes that Megatron-core set on them are deleted.

    Raises:
        UnsupportedVersionError: Megatron-core is not installed, or older than 0.16.
    """
    core_version()
    from megatron.core.resharding import refit
    from megatron.core.utils import unwrap_model

    getattr(refit, "clear_all_caches", refit.clear_service_cache)()  # 0.16 has services alone
    for model in models:
        if model is not None:
            core = model._model if isinstance(model, NumberedExperts) else unwrap_model(model)
            for holder in (model, core):
                for name in _KEPT:
                    vars(holder).pop(name, None)


def _numbered(name: str) -> str:
    return _OF_AN_EXPERT.sub(r"\2.\3\1", name)
