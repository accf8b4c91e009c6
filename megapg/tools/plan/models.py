"""The models that a plan can be made for: published ones, and those of the user.

A published model is a small TOML file in the folder ``architectures``. The user can write such a
file, or name the function that builds the model.

Published models are built of Megatron-core's local layers, which need no TransformerEngine. Their
attention keeps what FlashAttention keeps, as in real trainings. ``recompute="selective"`` computes
the attention core again, so it saves next to nothing here. Experts get equal numbers of tokens
(capacity factor 1). Weights differ from those of TransformerEngine's layers in one place: the down
projections of latent attention are split over tp, and not copied. DeepSeek-V3 is built without its
module for multi-token prediction.

A user's function is not changed. Megatron-core's local attention keeps the scores of all pairs
of tokens, unless ``recompute`` is ``selective`` or ``full``.
"""

from __future__ import annotations

import contextlib
import sys
import tomllib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megapg.errors import ParityInputError, PlanError
from megapg.tools.parity.cases import Named, named
from megapg.tools.plan.cluster import did_you_mean
from megapg.tools.plan.training import Job

if TYPE_CHECKING:
    from torch import nn

    from megapg.collection import ProcessGroupCollection

_PRESETS = Path(__file__).with_name("architectures")
_KEYS = {"source", "seq_length", "split", "first_dense_layers", "model", "config"}
NEEDS = "A plan of a model needs torch and Megatron-core: pip install 'megapg[torch,megatron]'."
NO_RECOMPUTE = "the function has no parameter recompute"
ADD_RECOMPUTE = "Add recompute='none' to its parameters and pass it on to the config"
_LENGTH = 4096  # of the samples of a user's function that does not say


class Builder(Protocol):
    """Builds one chunk of a model."""

    def __call__(
        self, pg: ProcessGroupCollection, vp_stage: int | None = None, *, job: Job
    ) -> nn.Module:
        """Return the chunk that a rank holds in a virtual pipeline stage."""


@dataclass(frozen=True)
class Model:
    """A model that a plan can be made for.

    Attributes:
        name: as the user wrote it.
        seq_length: tokens of a sample, unless the user gives another number.
        build: builds one chunk of a rank, inside ``megapg.testing.megatron_on_cpu()``.
        source: where the numbers were published; empty for a function.
        split: how layers are divided that stages do not divide; None if a function decides.
        recomputes: True if a plan can ask for recomputation.
    """

    name: str
    seq_length: int
    build: Builder
    source: str = ""
    split: str | None = None
    recomputes: bool = True


def model_names() -> list[str]:
    """Return the names of the published models."""
    return sorted(file.stem for file in _PRESETS.glob("*.toml"))


def find_model(name: str) -> Model:
    """Return the model that ``name`` names.

    Args:
        name: one of ``model_names``, a TOML file like theirs, ``FILE.py:FUNCTION`` or
            ``MODULE:FUNCTION``. The function is one that :func:`megapg.testing.parity` takes:
            ``build(pg)``. It also gets ``vp_stage``, ``recompute`` and ``seq_length`` if it has
            these parameters.

    Raises:
        PlanError: there is no such model, or the file or module has an error.
    """
    if ":" in name:
        return _of_function(name)
    file = Path(name) if name.endswith(".toml") else _PRESETS / f"{name}.toml"
    if not name.endswith(".toml") and name not in model_names():
        raise PlanError(
            f"--model {name}: there is no such model.{did_you_mean(name, model_names())} Name one "
            f"of {', '.join(model_names())}, a TOML file, FILE.py:FUNCTION or MODULE:FUNCTION."
        )
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"--model {name}: {error}") from None
    return describe_model(name, found, file.name)


def describe_model(name: str, numbers: Mapping[str, Any], place: str = "") -> Model:
    """Return the model of these numbers.

    Args:
        name: what to call the model.
        numbers: the content of a file of ``architectures``.
        place: where the numbers are from, if they do not say.

    Raises:
        PlanError: a key is missing or unknown.
    """
    wrong = (numbers.keys() - _KEYS) | ({"seq_length", "model", "config"} - numbers.keys())
    if wrong:
        raise PlanError(
            f"--model {name}: {', '.join(sorted(wrong))} missing or unknown; the keys are "
            f"{', '.join(sorted(_KEYS))}."
        )
    length = numbers["seq_length"]
    if not isinstance(length, int):
        raise PlanError(f"--model {name}: seq_length is {length!r}. Write a number of tokens.")
    build = partial(_build, name, numbers)
    source, split = numbers.get("source", place), numbers.get("split", "")
    return Model(name, length, build, source, split)


def _build(
    name: str,
    numbers: Mapping[str, Any],
    pg: ProcessGroupCollection,
    vp_stage: int | None = None,
    *,
    job: Job,
) -> nn.Module:
    """Build a chunk of a published model."""
    try:
        from megapg.megatron import published
        from megapg.tools.plan.architecture import build
    except ImportError as error:
        raise PlanError(f"{NEEDS} ({error})") from None
    try:
        with published(pg):  # Megatron-core asks for the stage of a pipeline layout
            made: nn.Module = build(numbers, pg, vp_stage, job)
            return made
    except KeyError as error:
        raise PlanError(f"--model {name}: {error} is missing or unknown.") from None
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(_said(name, error)) from error


def _of_function(name: str) -> Model:
    """Return the model of a user's function."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            function = named(name)
            parameters = function.__signature__.parameters
    except ParityInputError as error:
        text = str(error).replace(", or one of gpt, moe and t5", ", or a published model")
        raise PlanError(f"--model {text}") from None
    except ModuleNotFoundError as error:
        needs = NEEDS if error.name in ("torch", "megatron", "megatron.core") else ""
        raise PlanError(f"--model {name}: {error}. {needs}".rstrip()) from error
    except (Exception, SystemExit) as error:
        raise PlanError(_said(name, error)) from error
    length = parameters["seq_length"].default if "seq_length" in parameters else None
    seq_length = length if isinstance(length, int) else _LENGTH
    build = partial(_call, name, function)
    return Model(name, seq_length, build, recomputes="recompute" in parameters)


def _call(
    name: str,
    function: Named,
    pg: ProcessGroupCollection,
    vp_stage: int | None = None,
    *,
    job: Job,
) -> nn.Module:
    """Build a chunk by a user's function."""
    from megatron.core.utils import unwrap_model
    from torch import nn

    from megapg.megatron import published

    parameters = function.__signature__.parameters
    offered = {"vp_stage": vp_stage, "recompute": job.recompute, "seq_length": job.seq_length}
    taken = {key: value for key, value in offered.items() if key in parameters}
    if job.recompute != "none" and "recompute" not in taken:
        raise PlanError(
            f"--model {name}: {NO_RECOMPUTE}, so the plan can't ask for {job.recompute!r}. "
            f"{ADD_RECOMPUTE}, or plan with --recompute none."
        )
    try:
        with (
            published(pg),
            contextlib.redirect_stdout(sys.stderr),
        ):  # JSON is on the standard output
            made = function(pg, **taken)
    except (Exception, SystemExit) as error:
        raise PlanError(_said(name, error)) from error
    several = isinstance(made, list | tuple) and len(made) > (vp_stage or 0)
    chunk = made[vp_stage or 0] if several else made
    if not isinstance(chunk, nn.Module) or not hasattr(unwrap_model(chunk), "config"):
        raise PlanError(
            f"--model {name}: the function returned {type(chunk).__name__}. Return a model of "
            "Megatron-core, or the list of a virtual pipeline's chunks."
        )
    if vp_stage is not None and not several and "vp_stage" not in taken:
        raise PlanError(
            f"--model {name}: the layout has virtual pipeline stages, and the function has no "
            "parameter vp_stage. Add one and build that chunk only, or return the list of chunks."
        )
    longest = getattr(chunk, "max_sequence_length", job.seq_length)
    if longest < job.seq_length:
        raise PlanError(
            f"--model {name}: samples have {job.seq_length} tokens, and the model takes "
            f"{longest}. Plan with --seq-length {longest}."
        )
    return chunk


def _said(name: str, error: BaseException) -> str:
    """Name an error of the user's code, and its line in the user's file."""
    frames = traceback.extract_tb(error.__traceback__)
    place, _, _ = name.rpartition(":")
    stem = Path(place).name if place.endswith(".py") else place.rpartition(".")[2] + ".py"
    own = [frame for frame in frames if Path(frame.filename).name == stem]
    line = f" at line {own[-1].lineno} of {place}" if own else ""
    text = " ".join(str(error).strip().partition("\n")[0].split())
    return f"--model {name}: {type(error).__name__}{line}{text and f': {text}'}"
