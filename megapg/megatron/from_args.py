"""Opens a session with the arguments that ``megatron.training`` has parsed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import cast

import torch.distributed as dist

from megapg.errors import LaunchError, UnsupportedOptionError
from megapg.launch import detect
from megapg.layout import EmbeddingRanks
from megapg.megatron.arguments import MegatronArguments, parameters_of_core, session_arguments
from megapg.ownership.opening import session
from megapg.ownership.session import Session

# parameter of initialize_model_parallel -> names of the argument, in one core or another
_NAMES: Mapping[str, tuple[str, ...]] = {
    "create_gloo_process_groups": ("use_gloo_process_groups", "enable_gloo_process_groups"),
    "gtp_remat_size": ("gtp_weight_remat_size",),
    "expert_gtp_remat_size": ("expert_gtp_weight_remat_size",),
}


def session_from_args(
    args: Namespace,
    *,
    get_embedding_ranks: EmbeddingRanks | None = None,
    get_position_embedding_ranks: EmbeddingRanks | None = None,
) -> Session:
    """Open the session equivalent to Megatron's initialisation of a training script. ::

        args = parse_and_validate_args()
        with session_from_args(args, get_embedding_ranks=get_embedding_ranks) as session:
            with megapg.published(session.groups) as pg:
                pretrain(..., pg_collection=pg, skip_model_parallel_init=True)

    Sizes, order, timeout, gloo companions and NCCL settings are those of the arguments. So are the
    groups for overlapping all-gathers: ``pretrain`` makes none if it is passed a collection.

    Args:
        args: the result of Megatron's ``validate_args``, or of a fork's parser.
        get_embedding_ranks: the function that the script passes to ``pretrain``; needed by models
            with untied embeddings or multi-token prediction.
        get_position_embedding_ranks: likewise.

    Raises:
        LaunchError: the arguments were parsed for another number of ranks than there are.
        UnsupportedOptionError: an argument that a session can't honour, with the reason.
        LayoutError, RendezvousError: as :func:`megapg.session`.
    """
    given = vars(args)
    if "tensor_model_parallel_size" not in given:
        raise UnsupportedOptionError(
            "session_from_args(): these are not the arguments of megatron.training; they have no "
            "tensor_model_parallel_size. megapg.session(**session_arguments(...)) takes sizes."
        )
    if given.get("pipeline_model_parallel_split_rank"):
        raise UnsupportedOptionError(
            "session_from_args(): pipeline_model_parallel_split_rank="
            f"{args.pipeline_model_parallel_split_rank}; Megatron-core has no stages for encoders "
            "since 0.14, and a session has none. Leave it out, or stay on the globals."
        )
    ranks = dist.get_world_size() if dist.is_initialized() else detect().world_size
    if given.get("world_size", ranks) != ranks:
        raise LaunchError(
            f"session_from_args(): the arguments say world_size={args.world_size}, and there are "
            f"{ranks} ranks. Megatron's parser takes it from WORLD_SIZE, which torchrun sets; "
            "elsewhere parse inside of `with megapg.launch.detect().exported():`."
        )
    found: dict[str, object] = {
        "get_embedding_ranks": get_embedding_ranks,
        "get_position_embedding_ranks": get_position_embedding_ranks,
        "order": "tp-cp-ep-pp-dp" if given.get("use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp",
    }
    for parameter in parameters_of_core():
        for name in _NAMES.get(parameter, (parameter,)):
            if name in given:
                found[parameter] = given[name]
    arguments = session_arguments(**cast("MegatronArguments", found))
    if given.get("create_all_gather_group"):  # no parameter since 0.18
        arguments["all_gather_groups"] = True
    backend = None if dist.is_initialized() else given.get("distributed_backend")
    wait = arguments["collective_timeout"].total_seconds()  # a rank may be late by as much
    return session(backend=backend, timeout=wait, **arguments)
