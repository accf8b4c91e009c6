"""The names of groups as types, so that a type checker finds wrong names."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Literal, TypeAlias, get_args

Field: TypeAlias = (
    # of the dense grid
    Literal["tp", "pp", "mp", "cp", "tp_cp", "dp", "dp_cp", "dp_cp_ag", "dp_cp_gtp_remat"]
    | Literal["tp_dp", "tp_dp_cp", "gtp_remat"]
    # of the expert grid
    | Literal["ep", "expt_tp", "tp_ep", "tp_ep_pp", "tp_ep_pp_with_egtp_remat", "expt_dp"]
    | Literal["expt_dp_ag", "expt_dp_gtp_remat", "expt_gtp_remat", "intra_expt_dp"]
    | Literal["inter_dist_opt", "intra_dist_opt"]
    # of neither alone
    | Literal["embd", "pos_embd", "intra_dp_cp", "hcp"]
)
"""A field of a collection."""

Fields: TypeAlias = Sequence[Field] | Set[Field]
"""Several fields, in a tuple, a list or a set."""

FIELDS: tuple[Field, ...] = tuple(name for part in get_args(Field) for name in get_args(part))
"""Every field a collection can hold. ``hcp`` is a list of groups: its levels are ``hcp.0``, ..."""

_Level: TypeAlias = Literal["hcp.0", "hcp.1", "hcp.2", "hcp.3"]
_Companion: TypeAlias = (
    Literal["gloo.tp", "gloo.pp", "gloo.mp", "gloo.cp", "gloo.tp_cp", "gloo.dp", "gloo.dp_cp"]
    | Literal[
        "gloo.dp_cp_ag", "gloo.dp_cp_gtp_remat", "gloo.tp_dp", "gloo.tp_dp_cp", "gloo.gtp_remat"
    ]
    | Literal[
        "gloo.ep", "gloo.expt_tp", "gloo.tp_ep", "gloo.tp_ep_pp", "gloo.tp_ep_pp_with_egtp_remat"
    ]
    | Literal["gloo.expt_dp", "gloo.expt_dp_ag", "gloo.expt_dp_gtp_remat", "gloo.expt_gtp_remat"]
    | Literal["gloo.intra_expt_dp", "gloo.inter_dist_opt", "gloo.intra_dist_opt"]
    | Literal["gloo.embd", "gloo.pos_embd", "gloo.intra_dp_cp"]
)
_Hybrid: TypeAlias = (
    Literal["hybrid.2", "hybrid.4", "hybrid.8", "hybrid.16", "hybrid.32"]
    | Literal["hybrid.64", "hybrid.128", "hybrid.256", "hybrid.512", "hybrid.1024"]
)

GroupName: TypeAlias = Field | _Level | _Companion | _Hybrid
"""A field, a level of ``hcp``, or a group of ``pg.extras``. Where a name is put together at run
time, as in ``f"hcp.{level}"``, say ``cast(GroupName, ...)``.
"""
