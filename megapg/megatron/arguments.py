"""Converts the arguments of ``initialize_model_parallel`` to those of :func:`megapg.session`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import ALL_GATHER_FIELDS
from megapg.errors import UnsupportedOptionError
from megapg.layout import EmbeddingRanks, Field, Fields
from megapg.megatron.core import core_version, parallel_state_module
from megapg.megatron.tables import NCCL_NAMES, NCCL_NAMES_OF_ONE_INSTANCE
from megapg.ownership.opening import LayoutSizes


class SessionArguments(LayoutSizes, total=False):
    """The arguments of :func:`megapg.session` that have a counterpart in Megatron's function."""

    collective_timeout: timedelta
    all_gather_groups: bool
    gloo: Fields
    options: Mapping[Field, CommunicatorOptions]


class MegatronArguments(TypedDict, total=False):
    """The arguments of ``initialize_model_parallel``, of every core that runs on sessions."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    pipeline_model_parallel_comm_backend: str | None
    use_sharp: bool
    context_parallel_size: int
    hierarchical_context_parallel_sizes: list[int] | None
    hybrid_context_parallel: bool
    expert_model_parallel_size: int
    gtp_remat_size: int
    expert_gtp_remat_size: int
    num_distributed_optimizer_instances: int
    expert_tensor_parallel_size: int | None
    nccl_communicator_config_path: str | None
    distributed_timeout_minutes: int
    order: str
    get_embedding_ranks: EmbeddingRanks | None
    get_position_embedding_ranks: EmbeddingRanks | None
    create_gloo_process_groups: bool
    high_priority_stream_groups: list[str] | None
    sharp_enabled_group: str | None
    create_all_gather_group: bool | None
    rank_offset: int
    local_world_size: int | None


# argument -> the name of the session's argument
_RENAMED = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "expt_tp",
    "gtp_remat_size": "gtp_remat",
    "expert_gtp_remat_size": "expt_gtp_remat",
    "num_distributed_optimizer_instances": "optimizer_instances",
    "order": "order",
    "get_embedding_ranks": "embedding_ranks",
    "get_position_embedding_ranks": "position_embedding_ranks",
    "create_all_gather_group": "all_gather_groups",
    "hybrid_context_parallel": "hybrid_cp",
}

_GLOO_FIELDS: Fields = ("dp", "dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp")

# argument -> why a value other than its default is refused
_REFUSED = {
    "pipeline_model_parallel_comm_backend": (
        "a session makes all of its groups on one backend. Make the pipeline group yourself and "
        "pass it with ProcessGroupCollection.from_groups(pp=...)"
    ),
    "use_sharp": (
        "NCCL gives SHARP to one communicator only, the first that is used while "
        "NCCL_COLLNET_ENABLE=1; leave it out, and set that variable around the first collective on "
        "session.groups.dp"
    ),
    "sharp_enabled_group": "see use_sharp",
}


def session_arguments(**arguments: Unpack[MegatronArguments]) -> SessionArguments:
    """Return the arguments of :func:`megapg.session` equivalent to those of
    ``initialize_model_parallel``.

    It takes that function's arguments by name. To migrate, write
    ``megapg.session(**session_arguments(tensor_model_parallel_size=2, ...))``. Gloo companions are
    made only with ``create_gloo_process_groups=True``: little code needs them, and each has a cost.

    Raises:
        UnsupportedOptionError: an argument that a session can't honour, with the reason, or one
            that the installed Megatron-core does not have.
    """
    core_version()  # older versions can't run on injected groups
    defaults = parameters_of_core()
    made: dict[str, object] = {}
    given: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in defaults:
            raise UnsupportedOptionError(
                f"{name} is no argument of the installed core's initialize_model_parallel."
            )
        if name == "create_gloo_process_groups" and value:
            made["gloo"] = _gloo_fields(arguments)
        if value == defaults[name]:
            continue
        if name in _REFUSED:
            raise UnsupportedOptionError(f"{name}={value!r}: {_REFUSED[name]}.")
        if name not in MegatronArguments.__annotations__:
            raise UnsupportedOptionError(
                f"{name}={value!r}: no argument of NVIDIA's that megapg knows, so a session would "
                "pass it over. Leave it out, and do what it asks for once the session is open."
            )
        if name in _RENAMED:
            made[_RENAMED[name]] = value
        else:
            given[name] = value
    if "hierarchical_context_parallel_sizes" in given:
        made["hierarchical_cp"] = tuple(given["hierarchical_context_parallel_sizes"])
    # Always set: a session's own default is WORLD's timeout, not Megatron's.
    minutes = given.get("distributed_timeout_minutes", defaults["distributed_timeout_minutes"])
    made["collective_timeout"] = timedelta(minutes=minutes)
    if "local_world_size" in given:
        first = given.get("rank_offset", 0)
        made["ranks"] = range(first, first + given["local_world_size"])
    elif "rank_offset" in given:
        raise UnsupportedOptionError(
            f"rank_offset={given['rank_offset']!r} needs local_world_size: a session lives on a "
            "known set of ranks."
        )
    path = given.get("nccl_communicator_config_path")
    settings = _read_nccl_file(Path(path)) if path else {}
    for name in given.get("high_priority_stream_groups", ()):
        _check_name(name, "high_priority_stream_groups")
        settings.setdefault(name, {})["is_high_priority_stream"] = True
    if options := _options(settings, made):
        made["options"] = options
    return cast(SessionArguments, made)


def _gloo_fields(arguments: MegatronArguments) -> Fields:
    """Return the fields for which Megatron makes gloo groups: none whose ranks shard weights."""
    if arguments.get("gtp_remat_size", 1) > 1:
        return ()
    of_experts = arguments.get("expert_gtp_remat_size", 1) == 1
    return tuple(field for field in _GLOO_FIELDS if of_experts or "expt" not in field)


def _options(
    settings: Mapping[str, dict[str, Any]], made: Mapping[str, object]
) -> dict[str, CommunicatorOptions]:
    """Return the options by field, for the fields that a session with the arguments ``made`` makes.

    A session refuses options for any other field; Megatron ignores them.
    """
    names = dict(NCCL_NAMES)
    left_out: set[str] = set()
    if not made.get("hierarchical_cp"):
        left_out |= {"hcp"}
    if not made.get("all_gather_groups"):
        left_out |= ALL_GATHER_FIELDS
    if "optimizer_instances" not in made:
        left_out |= {"inter_dist_opt"}
        for name, whole in NCCL_NAMES_OF_ONE_INSTANCE.items():
            names[whole] += names.pop(name)
    return {
        field: CommunicatorOptions(**values)
        for name, values in settings.items()
        for field in names.get(name, ())
        if field not in left_out
    }


def parameters_of_core() -> dict[str, Any]:
    """Return the parameters of the core's ``initialize_model_parallel``, with their defaults."""
    initialise: Callable[..., None] = parallel_state_module().initialize_model_parallel
    parameters = inspect.signature(initialise).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def _read_nccl_file(path: Path) -> dict[str, dict[str, Any]]:
    """Return Megatron's name of a communicator -> its settings."""
    try:
        import yaml
    except ImportError as error:
        raise UnsupportedOptionError(
            f"{path} is YAML, which needs PyYAML: pip install 'megapg[nccl-config]'."
        ) from error
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UnsupportedOptionError(f"NCCL configuration {path} can't be read: {error}") from error
    if content is None:  # an empty file
        return {}
    if not isinstance(content, dict):
        raise UnsupportedOptionError(
            f"{path}: a {type(content).__name__} at the top; an NCCL configuration maps names of "
            "communicators to their settings, as in `dp_cp: {max_ctas: 8}`."
        )
    known = set(CommunicatorOptions.__dataclass_fields__)
    for name, settings in content.items():
        _check_name(name, str(path))
        if not isinstance(settings, dict):
            raise UnsupportedOptionError(
                f"{path}: {name} is {settings!r}, not a mapping of settings such as "
                f"`{name}: {{max_ctas: 8}}`."
            )
        if unknown := set(settings) - known:
            raise UnsupportedOptionError(
                f"{path}: {name} has {', '.join(sorted(map(str, unknown)))}; known are "
                f"{', '.join(sorted(known))}."
            )
    return {name: dict(settings) for name, settings in content.items()}


def _check_name(name: str, where: str) -> None:
    if name not in NCCL_NAMES:
        raise UnsupportedOptionError(
            f"{where}: {name!r} is no communicator; known are {', '.join(sorted(NCCL_NAMES))}."
        )
