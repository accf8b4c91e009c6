"""Megatron-core's functions outside of ``parallel_state`` that answer with the globals.

They return a group, a rank, a truth value or a collection, and read the globals if they are passed
no group. Tests compare the table with the sources of each core from 0.16 on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapg.upstream.mapping import Argument


@dataclass(frozen=True)
class Helper:
    """One such function.

    Attributes:
        place: its module, and its class if it has one, below ``megatron.core``.
        instead: what to write instead, with ``pg`` as the collection.
        parameter: with a value for this parameter, the function reads no globals; empty if there
            is none.
        position: of the parameter.
    """

    place: str
    instead: str
    parameter: str = ""
    position: int = 0

    def reads_globals(self, arguments: Sequence[Argument]) -> bool:
        """True if a call with these arguments reads the globals for certain."""
        for position, argument in enumerate(arguments):
            if argument.starred:
                return False
            keyword = argument.keyword or ("" if position != self.position else self.parameter)
            if self.parameter and keyword == self.parameter:
                return argument.text.strip() == "None"
        return True


CORE = "megatron.core."
_COLLECTION = "process_groups_config.ProcessGroupCollection"
_INFERENCE = "inference.communication_utils"
_LAYERS = "tensor_parallel.layers"

HELPERS_OF_CORE: Mapping[str, Helper] = {
    f"{helper.place}.{name}": helper
    for name, helper in (
        (
            "get_tensor_model_parallel_group_if_none",
            Helper("utils", "pg.tp, or pg.expt_tp for is_expert=True", "tp_group"),
        ),
        ("use_mpu_process_groups", Helper(_COLLECTION, "pg")),
        (
            "setup_process_groups_for_optimizer",
            Helper(_COLLECTION, "pg as its first argument", "pg_collection"),
        ),
        (
            "setup_process_groups_for_ddp",
            Helper(_COLLECTION, "pg as its first argument", "pg_collection"),
        ),
        ("get_default_pg_collection", Helper("transformer.moe.moe_utils", "pg")),
        (
            "ensure_metadata_has_dp_cp_group",
            Helper("transformer.utils", '{"dp_cp_group": pg.dp_cp} as its argument', "metadata"),
        ),
        (
            "mtp_on_this_rank",
            Helper(
                "transformer.multi_token_prediction",
                'pg.ranks("pp")[pg.rank("pp")] in get_mtp_ranks(list(pg.ranks("pp")), config)',
            ),
        ),
        (
            "param_is_not_tensor_parallel_duplicate",
            Helper(_LAYERS, "tp_group=pg.tp", "tp_group", 1),
        ),
        (
            "param_is_not_gtp_duplicate",
            Helper(_LAYERS, 'pg.rank("gtp_remat") == 0, of an expert pg.rank("expt_gtp_remat")'),
        ),
        ("is_pipeline_first_stage", Helper(_INFERENCE, "pg.pp as its argument", "pp_group")),
        ("is_pipeline_last_stage", Helper(_INFERENCE, "pg.pp as its argument", "pp_group")),
    )
}
"""Dotted name below ``megatron.core`` -> the function."""

NAMES = frozenset(name.rpartition(".")[2] for name in HELPERS_OF_CORE)
