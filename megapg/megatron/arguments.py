"""From the arguments of ``initialize_model_parallel`` to those of :func:`megapg.session`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict, cast

from megapg.comms.options import CommunicatorOptions
from megapg.errors import UnsupportedOptionError
from megapg.layout import EmbeddingRanks
from megapg.megatron.core import parallel_state_module
from megapg.megatron.tables import NCCL_NAMES


class SessionArguments(TypedDict, total=False):
    """What :func:`megapg.session` takes of what Megatron's function takes."""

    tp: int
    pp: int
    cp: int
    ep: int
    expt_tp: int
    order: str
    optimizer_instances: int
    hierarchical_cp: tuple[int, ...]
    embedding_ranks: EmbeddingRanks
    position_embedding_ranks: EmbeddingRanks
    vpp: int | None
    ranks: Sequence[int]
    collective_timeout: timedelta
    all_gather_groups: bool
    options: Mapping[str, CommunicatorOptions]


# argument -> the session's name for the same thing.
_RENAMED = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "expt_tp",
    "num_distributed_optimizer_instances": "optimizer_instances",
    "order": "order",
    "get_embedding_ranks": "embedding_ranks",
    "get_position_embedding_ranks": "position_embedding_ranks",
    "create_all_gather_group": "all_gather_groups",
}

_NO_GLOO = (
    "a session makes no gloo twins of its groups (Megatron refuses them with a collection). Pass "
    "create_gloo_process_groups=False, and use_gloo_process_groups=False to get_megatron_optimizer"
)

# argument -> why a value other than its default is refused.
_REFUSED = {
    "pipeline_model_parallel_comm_backend": (
        "a session makes all of its groups on one backend. Make the pipeline group yourself and "
        "pass it with ProcessGroupCollection.from_groups(pp=...)"
    ),
    "use_sharp": (
        "NCCL gives SHARP to one communicator only, the first that is used while "
        "NCCL_COLLNET_ENABLE=1; set that variable around the first collective on session.groups.dp"
    ),
    "sharp_enabled_group": "see use_sharp",
    "hybrid_context_parallel": "megapg has no field for groups by size yet",
    "gtp_remat_size": "generalised tensor parallelism is not supported yet",
    "expert_gtp_remat_size": "generalised tensor parallelism is not supported yet",
}


def session_arguments(**arguments: object) -> SessionArguments:
    """The arguments of :func:`megapg.session` that do what ``initialize_model_parallel`` would.

    Takes that function's arguments by name, so moving over is
    ``megapg.session(**session_arguments(tensor_model_parallel_size=2, ...))``.

    Raises:
        UnsupportedOptionError: an argument that a session can't honour, with the reason, or one
            that the installed Megatron-core does not have.
    """
    defaults = _defaults()
    made: dict[str, object] = {}
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in defaults:
            raise UnsupportedOptionError(
                f"{name} is no argument of the installed core's initialize_model_parallel."
            )
        if name == "create_gloo_process_groups" and value:
            raise UnsupportedOptionError(f"{name}=True: {_NO_GLOO}.")
        if value == defaults[name]:
            continue
        if name in _REFUSED:
            raise UnsupportedOptionError(f"{name}={value!r}: {_REFUSED[name]}.")
        if name in _RENAMED:
            made[_RENAMED[name]] = value
        else:
            given[name] = value
    if "hierarchical_context_parallel_sizes" in given:
        made["hierarchical_cp"] = tuple(given["hierarchical_context_parallel_sizes"])
    if "distributed_timeout_minutes" in given:
        made["collective_timeout"] = timedelta(minutes=given["distributed_timeout_minutes"])
    if "local_world_size" in given:
        first = given.get("rank_offset", 0)
        made["ranks"] = range(first, first + given["local_world_size"])
    if options := _options(
        given.get("nccl_communicator_config_path"), given.get("high_priority_stream_groups", ())
    ):
        made["options"] = options
    return cast(SessionArguments, made)


def _options(path: str | None, high_priority: Sequence[str]) -> dict[str, CommunicatorOptions]:
    settings = _read_nccl_file(Path(path)) if path else {}
    for name in high_priority:
        for field in _fields_of(name, "high_priority_stream_groups"):
            settings.setdefault(field, {})["is_high_priority_stream"] = True
    return {field: CommunicatorOptions(**values) for field, values in settings.items()}


def _defaults() -> dict[str, object]:
    initialise: Callable[..., None] = parallel_state_module().initialize_model_parallel
    parameters = inspect.signature(initialise).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _read_nccl_file(path: Path) -> dict[str, dict[str, Any]]:
    try:
        import yaml
    except ImportError as error:
        raise UnsupportedOptionError(
            f"{path} is YAML, which needs PyYAML: pip install 'megapg[nccl-config]'."
        ) from error
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UnsupportedOptionError(f"NCCL configuration {path} can't be read: {error}") from error
    known = set(CommunicatorOptions.__dataclass_fields__)
    options: dict[str, dict[str, Any]] = {}
    for name, settings in content.items():
        if unknown := set(settings) - known:
            raise UnsupportedOptionError(
                f"{path}: {name} has {', '.join(sorted(unknown))}; known are "
                f"{', '.join(sorted(known))}."
            )
        for field in _fields_of(name, str(path)):
            options[field] = dict(settings)
    return options


def _fields_of(name: str, where: str) -> tuple[str, ...]:
    if name not in NCCL_NAMES:
        raise UnsupportedOptionError(
            f"{where}: {name!r} is no communicator; known are {', '.join(sorted(NCCL_NAMES))}."
        )
    return NCCL_NAMES[name]
