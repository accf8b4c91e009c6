"""One set of sizes, for megapg and for Megatron-core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state

from megapg.layout import DEFAULT_ORDER, ParallelLayout

EmbeddingRanks = Callable[..., list[int]]


def last_stage_first(pipeline: list[int], split: int | None = None) -> list[int]:
    return pipeline[:0:-1] + pipeline[:1]


def every_stage(pipeline: list[int], split: int | None = None) -> list[int]:
    return pipeline


def middle_stage(pipeline: list[int]) -> list[int]:
    return [pipeline[len(pipeline) // 2]]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One set of arguments, for megapg and for upstream; None means the default."""

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expt_tp: int | None = None
    order: str = DEFAULT_ORDER
    optimizer_instances: int = 1
    hierarchical_cp: tuple[int, ...] = ()
    embedding_ranks: EmbeddingRanks | None = None
    position_embedding_ranks: EmbeddingRanks | None = None
    vpp: int | None = None
    hybrid_cp: bool = False
    gtp_remat: int = 1
    expt_gtp_remat: int = 1

    def layout(self, **more: Any) -> ParallelLayout:
        given_values = {k: v for k, v in vars(self).items() if v is not None}
        return ParallelLayout(**{**given_values, **more})

    def initialize_megatron(self, **more: Any) -> None:
        if self.hybrid_cp:  # not in every core
            more["hybrid_context_parallel"] = True
        if self.gtp_remat > 1:
            more["gtp_remat_size"] = self.gtp_remat
        if self.expt_gtp_remat > 1:
            more["expert_gtp_remat_size"] = self.expt_gtp_remat
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp,
            context_parallel_size=self.cp,
            hierarchical_context_parallel_sizes=list(self.hierarchical_cp) or None,
            expert_model_parallel_size=self.ep,
            num_distributed_optimizer_instances=self.optimizer_instances,
            expert_tensor_parallel_size=self.expt_tp,
            order=self.order,
            get_embedding_ranks=self.embedding_ranks,
            get_position_embedding_ranks=self.position_embedding_ranks,
            **more,
        )
