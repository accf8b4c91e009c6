"""The first half of a save: what this rank saves, gathered with collectives."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megapg.checkpoint import optimizer as optimizers
from megapg.checkpoint import rng_entries
from megapg.checkpoint.background import Saves
from megapg.checkpoint.can_reshard import OptimizerSharding
from megapg.checkpoint.commit import check_keep
from megapg.checkpoint.directory import (
    COMMON_FILE,
)
from megapg.checkpoint.optimizer_pieces import Weights, weights_of
from megapg.checkpoint.param_groups import leaves_of
from megapg.checkpoint.planning import Item, State, plan_save
from megapg.checkpoint.rng_keys import Kind
from megapg.checkpoint.save_write import Write, serialised
from megapg.checkpoint.state import (
    CHECKPOINT_VERSION,
    RANK_EXTRA,
    MegatronOptimizer,
    Stateful,
    check_extra,
    check_groups,
    check_key,
    chunks_of,
    gather_parameters,
    model_state,
    not_gathered,
    prepare_parameters,
    showing,
)
from megapg.checkpoint.team import exchanging, layout_of
from megapg.checkpoint.writer import Memory
from megapg.collection import ProcessGroupCollection
from megapg.errors import CheckpointError
from megapg.rendezvous.joint_work import JointWork
from megapg.rng import capture_rng_state, replica_field

RngRecords: TypeAlias = Literal["both", "per_rank", "per_tp_pp"]
"""The records of random streams to write: one for every rank (Megatron's main branch since #6858),
one for each tensor and pipeline rank (read by Megatron-core up to 0.19), or both.
"""

_LAYOUTS: Mapping[RngRecords, tuple[Kind, ...]] = {
    "both": ("per_rank", "per_tp_pp"),
    "per_rank": ("per_rank",),
    "per_tp_pp": ("per_tp_pp",),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The arguments of :func:`megapg.save_checkpoint`."""

    root: Path
    iteration: int
    model: Sequence[torch.nn.Module] | torch.nn.Module
    optimizer: MegatronOptimizer | None
    scheduler: Stateful | None
    pg: ProcessGroupCollection
    shown: ProcessGroupCollection | None  # published to the model; None if no groups were passed
    args: Namespace | Mapping[str, object] | None
    extra: Mapping[str, object]
    rank_extra: object
    num_floating_point_operations: float
    optimizer_sharding: OptimizerSharding
    rng_layout: RngRecords
    rng_key: str
    data_parallel_random_init: bool
    fully_parallel: bool
    release: bool
    keep: int | None
    retain_every: int | None
    in_flight: int

    @property
    def title(self) -> str:
        """The title of the save, for errors."""
        which = "a release" if self.release else f"iteration {self.iteration}"
        return f"saving {which} to {self.root}"

    def settings(self) -> dict[str, str]:
        """Return the arguments that must be equal on all ranks."""
        settings = {
            "directory": self.root,
            "iteration": self.iteration,
            "release": self.release,
            "optimizer": "none" if self.optimizer is None else "given",
            "optimizer_sharding": self.optimizer_sharding,
            "rank_extra": "none" if self.rank_extra is None else "given",
            "data_parallel_random_init": self.data_parallel_random_init,
            "fully_parallel": self.fully_parallel,
        }
        return {name: str(value) for name, value in settings.items()}

    def check(self) -> None:
        """Raise a CheckpointError for arguments that make no sense."""
        check_extra(self.extra)
        iteration = self.iteration
        if self.in_flight < 1:
            raise CheckpointError(
                f"in_flight={self.in_flight}: how many may be under way, 1 or more."
            )
        if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
            raise CheckpointError(f"iteration={iteration!r}: give the number of steps, 0 or more.")
        check_keep(self.keep, self.retain_every)
        check_key(self.rng_key)
        if self.rng_layout not in _LAYOUTS:
            raise CheckpointError(
                f"rng_layout={self.rng_layout!r}: give one of {', '.join(_LAYOUTS)}."
            )


class SaveState:
    """The state of one rank, gathered in the steps of a protocol. Each step ends with a meeting.

    Brackets have the topics of the meetings. The ranks wait in a meeting only if a collective
    follows: a rank that fails near a collective leaves the others in it.

    1. Before this object: the ranks compare their arguments.
    2. :meth:`check`: arguments and weights are checked (``arguments``).
    3. :meth:`describe`: the weights, and the state that is equal on all ranks (``model``).
    4. :meth:`collect`: optimizer, random streams, this rank's own state (``state``).
    5. :meth:`share`: the ranks agree who writes what, and copy it (``in hand``).

    The steps from 6 on are those of :class:`~megapg.checkpoint.save_write.Write`.
    """

    def __init__(self, asked: Asked, team: JointWork) -> None:
        self._asked, self._team = asked, team

    def check(self) -> None:
        """Check the arguments, and find the weights that no rank has whole."""
        asked = self._asked
        self._chunks = chunks_of(asked.model)
        check_groups(self._chunks, asked.pg)
        asked.check()
        self._metadata = optimizers.content_metadata(
            asked.optimizer, sharding=asked.optimizer_sharding
        )
        self._live = optimizers.with_groups(self._metadata, asked.pg)
        prepare_parameters(asked.optimizer)
        self._model = model_state(self._chunks, self._live, asked.shown)
        self._late = not_gathered(self._chunks)
        cut = (
            weights_of(leaves_of(asked.optimizer), self._late, self._model) if self._late else None
        )
        self._weights = cut
        self._team.agree("arguments", wait=self._must_gather)

    @property
    def _must_gather(self) -> bool:
        return bool(self._late) and self._weights is None

    def describe(self) -> None:
        """Collect weights and common state, and have the optimizer checked."""
        asked, team = self._asked, self._team
        if self._must_gather:
            with exchanging("parameters", team):
                gather_parameters(self._late)
            self._model = model_state(self._chunks, self._live, asked.shown)
        if self._weights is None:
            self._weights = Weights([], frozenset(), self._model)
        self._state: State = {
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": asked.iteration,
            "num_floating_point_operations_so_far": asked.num_floating_point_operations,
            "content_metadata": self._metadata,
            **asked.extra,
            **self._weights.rest,
        }
        if (args := asked.args) is not None:
            self._state["args"] = Namespace(**args) if isinstance(args, Mapping) else args
        if asked.scheduler is not None:
            self._state["opt_param_scheduler"] = asked.scheduler.state_dict()
        optimizers.check(asked.optimizer, self._metadata)
        self._trained = optimizers.trained(asked.optimizer, self._model, self._metadata)
        self._gathers = optimizers.gathers(asked.optimizer, self._model, self._live)
        team.agree("model", wait=self._gathers or asked.data_parallel_random_init)

    def collect(self) -> None:
        """Collect the optimizer's state, random streams, and this rank's own state."""
        asked, team = self._asked, self._team
        self._pieces: list[Item] = []
        if asked.optimizer is not None:
            with exchanging("the optimizer's state", team), showing(asked.shown):
                self._state["optimizer"], self._pieces = optimizers.saved_state(
                    asked.optimizer, self._model, self._live, gather=self._gathers
                )
        with exchanging("random streams", team):
            records = capture_rng_state(
                asked.pg, data_parallel_random_init=asked.data_parallel_random_init
            )
        streams = rng_entries.entries(
            records, asked.pg, _LAYOUTS[asked.rng_layout], key=asked.rng_key
        )
        self._state |= {f"rng_state {number}": entry for number, entry in enumerate(streams)}
        self._drawn = rng_entries.drawn(records, asked.pg)
        if asked.rank_extra is not None:
            serialised(asked.rank_extra, "rank_extra", "rank_extra")
            number, ranks = team.place
            self._state["rank_extra"] = ShardedObject(
                RANK_EXTRA, asked.rank_extra, (ranks,), (number,)
            )
        team.agree("state")

    def share(self, saves: Saves, *, copied: bool) -> Write:
        """Agree on who writes what, and return this rank's part, copied if it is to be kept."""
        asked, team, weights = self._asked, self._team, self._weights
        assert weights is not None  # since describe()
        with exchanging("names of tensors", team):
            sharing = getattr(asked.pg, replica_field(asked.pg)) if asked.fully_parallel else None
            items, common = plan_save(self._state, sharing)
        items += weights.items + self._pieces
        memory = None
        if copied:
            memory = saves.memory.pop() if saves.memory else Memory()
            items = memory.copies(items)
        known = serialised(common.get("optimizer", {}), "the optimizer's state", COMMON_FILE)
        write = Write(
            what=asked.title,
            team=team,
            root=asked.root,
            iteration=asked.iteration,
            release=asked.release,
            keep=asked.keep,
            retain_every=asked.retain_every,
            items=items,
            expected=weights.keys,
            trained=self._trained,
            optimizer=known,
            common=serialised(common, "args, extra or the scheduler's state", COMMON_FILE)
            if team.leading
            else b"",
            layout=layout_of(asked.pg),
            streams=self._drawn,
            after=saves.newest,
            memory=memory,
            unused=saves.memory,
        )
        team.agree("in hand")  # all ranks begin to write, or none
        return write
