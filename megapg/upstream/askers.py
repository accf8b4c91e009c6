"""Functions of Megatron-core and its training loop that read the globals for their caller.

The table also has the parameter that prevents the read. It leaves out:

* functions of the whole job, such as those that start it, or load and save its state;
* getters whose arguments choose the group;
* functions that communicate on the globals' tensor parallel group if they are passed none,
  :data:`~megapg.upstream.mapping.TAKING_A_GROUP`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megapg.upstream.mapping import GroupArgument


@dataclass(frozen=True)
class Asking:
    """A function that reads the globals.

    Attributes:
        packages: the packages that have or had it; the first one has it today.
        field: the collection field of the group that it reads.
        instead: the parameter for a group or a rank that prevents the read; None if it has none.
            ``after`` is 99 if the parameter is passed by name only.
        until: the first version, of 0, in which the function is missing or reads nothing.
    """

    packages: tuple[str, ...]
    field: str
    instead: GroupArgument | None = None
    until: int = 99


_TRAINING, _CORE = ("megatron.training", "megatron.utils"), ("megatron.core",)

ASKING: Mapping[str, Asking] = {
    "is_first_or_last_pipeline_stage": Asking(_TRAINING, "pp"),
    "calc_params_l2_norm": Asking(_TRAINING, "mp"),
    "average_losses_across_data_parallel_group": Asking(
        _TRAINING, "dp", GroupArgument("group", 1, 19)
    ),
    **{
        f"{of}_across_model_parallel_group": Asking(_TRAINING, "mp", GroupArgument("group", 1, 19))
        for of in ("reduce_max_stat", "logical_and")
    },
    **{name: Asking(_CORE, "pp") for name in ("mtp_on_this_rank", "get_mtp_num_layers_to_build")},
    "check_param_hashes_across_dp_replicas": Asking(_CORE, "dp"),
    "clip_qk": Asking(_CORE, "dp_cp"),
    **{
        name: Asking(_CORE, "pp", GroupArgument("pp_rank", 2, 16))
        for name in ("get_num_layers_to_build", "get_transformer_layer_offset")
    },
    "get_tensor_model_parallel_group_if_none": Asking(
        _CORE, "tp", GroupArgument("tp_group", 0, 12)
    ),
    "param_is_not_tensor_parallel_duplicate": Asking(_CORE, "tp", GroupArgument("tp_group", 1, 16)),
    "get_batch_on_this_tp_rank": Asking(_TRAINING, "mp", until=19),
    "get_batch_on_this_cp_rank": Asking(
        (*_CORE, *_TRAINING), "cp", GroupArgument("cp_group", 1, 16), until=19
    ),
    **{
        name: Asking(("megatron.core.pipeline_parallel",), "pp", until=15)
        for name in (
            *("recv_forward", "send_forward", "recv_backward", "send_backward"),
            *("send_forward_recv_backward", "send_backward_recv_forward"),
            *("send_forward_recv_forward", "send_backward_recv_backward"),
            "send_forward_backward_recv_forward_backward",
        )
    },
    "get_updated_expert_bias": Asking(_CORE, "tp_dp_cp", GroupArgument("tp_dp_cp_group", 3, 19)),
}
"""The functions, by name."""
