"""Weights from a trainer into a rollout: megapg.Refit, Megatron-core's resharding, and a broadcast.

All contestants move the weights of the same models in the same processes. They take turns. The
clock stops when the slowest rank has finished. Each contestant runs once before, to make its plan.
Peak memory is the growth of a process's resident memory during one run, on the rank where it grows
most.

The broadcast is that of frameworks. All ranks of a trainer's group gather one parameter. One of
them broadcasts it to the rollout. The rollout's ranks cut their parts from it.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.resharding import refit as core_refit
from megatron.core.resharding import swap_model_weights
from megatron.core.resharding.copy_services.nccl_copy_service import NCCLCopyService
from megatron.core.transformer import TransformerConfig

import megapg
from megapg.layout import ParallelLayout
from megapg.megatron import core_version, for_resharding
from megapg.rl.refit.moves import find_moves, overlap, volume
from megapg.testing import megatron_on_cpu
from megapg.testing.distributed import run_distributed

MEGAPG, CORE, BROADCAST = "megapg.Refit", "megatron.core.resharding", "gather and broadcast"
REPEATS = 5
BUCKET = 16 << 20


@dataclass(frozen=True)
class Trial:
    """Two layouts.

    Attributes:
        name: for the table.
        train: sizes of the trainer's groups.
        trains: number of the trainer's ranks, which come first.
        serve: sizes of the rollout's groups.
        serves: number of the rollout's ranks, which come last.
        world: number of all ranks; fewer than both together: some train and serve.
        experts: number of experts.
    """

    name: str
    train: Mapping[str, int]
    trains: int
    serve: Mapping[str, int]
    serves: int
    world: int
    experts: int | None = None

    @property
    def apart(self) -> bool:
        """True if no rank trains and serves."""
        return self.trains + self.serves == self.world


TRIALS = (
    Trial("tp2 to pp2, other ranks", {"tp": 2}, 2, {"pp": 2}, 2, 4),
    Trial("ep2 to tp2, other ranks", {"ep": 2}, 2, {"tp": 2}, 2, 4, experts=4),
    Trial("tp2 to pp2, same ranks", {"tp": 2}, 2, {"pp": 2}, 2, 2),
    Trial("dp2 to tp4, two ranks shared", {}, 2, {"tp": 4}, 4, 4),
)


@dataclass(frozen=True)
class Outcome:
    """The figures of one contestant on one rank, in the order of the repeats.

    Attributes:
        first: seconds of the first run, with its plan.
        seconds: of each later run.
        memory: bytes by which the process grew at most.
        received: bytes that arrived from other ranks in one run.
        least: bytes that have to arrive.
    """

    first: float
    seconds: tuple[float, ...]
    memory: int
    received: int
    least: int


def run(trial: Trial, *, quick: bool = False) -> dict[str, list[Outcome]]:
    """Return contestant -> the outcome on each rank."""
    return_values = run_distributed(
        partial(_rank, trial, quick),
        trial.world,
        deadline=300.0,
        preload=("torch", "torch.distributed", "megatron.core.models.gpt"),
    )
    return {name: [each[name] for each in return_values] for name in return_values[0]}


def _build(trial: Trial, pg: megapg.ProcessGroupCollection, quick: bool) -> Any:
    stage, stages = pg.rank("pp"), pg.size("pp")
    hidden = 64 if quick else 768
    config = TransformerConfig(
        num_layers=4 if quick or trial.experts else 8,
        hidden_size=hidden,
        num_attention_heads=8,
        ffn_hidden_size=2 * hidden if trial.experts else 3 * hidden,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        num_moe_experts=trial.experts,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=pg.size("tp"),
        pipeline_model_parallel_size=stages,
        expert_model_parallel_size=pg.size("ep"),
        expert_tensor_parallel_size=pg.size("expt_tp"),
    )
    megapg.seed_all(1, pg)
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=trial.experts, normalization="RMSNorm"),
        512 if quick else 16384,
        16,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pg_collection=pg,
    )


class _Rank:
    """The models of one rank, and the ways to move the weights."""

    def __init__(
        self, trial: Trial, train: Any, serve: Any, group: dist.ProcessGroup, quick: bool
    ) -> None:
        self.trial, self.group = trial, group
        self.train, self.serve = train, serve
        self.trained = _build(trial, train, quick) if train else None
        self.served = _build(trial, serve, quick) if serve else None
        self.gives = megapg.slices_of(self.trained, pg_collection=train) if train else None
        self.takes = megapg.slices_of(self.served, pg_collection=serve) if serve else None
        self._refit: megapg.Refit | None = None
        self._service: _Counting | None = None
        self._broadcast: _Broadcast | None = None

    def least(self) -> int:
        """Return the bytes of this rank's targets that are not in its sources."""
        least = 0
        for each in self.takes.described if self.takes else ():
            held = [
                both
                for own in (self.gives.described if self.gives else ())
                if own.name == each.name
                and (both := overlap((own.offset, own.extent), (each.offset, each.extent)))
            ]
            boxes = set(held)  # a replica on the same rank counts once
            least += each.itemsize * (volume((each.offset, each.extent)) - sum(map(volume, boxes)))
        return least

    def megapg(self) -> int:
        if self._refit is None:
            self._refit = megapg.Refit(
                dist.group.WORLD, gives=self.gives, takes=self.takes, bucket_bytes=BUCKET
            )
        return self._refit.run().received

    def core(self) -> int:
        if self._service is None:
            self._service = _Counting()
            self._sides = [
                None if each is None else for_resharding(each)
                for each in (self.trained, self.served)
            ]
        self._service.received = 0
        swap_model_weights(*self._sides, self._service)
        return self._service.received

    def broadcast(self) -> int:
        if self._broadcast is None:
            self._broadcast = _Broadcast(self)
        return self._broadcast.run()


class _Counting(NCCLCopyService):
    """Megatron-core's service, over gloo, with a count of bytes."""

    received = 0

    def submit_recv(self, dest_tensor: Any, src_rank: int, *args: Any, **kwargs: Any) -> None:
        self.received += dest_tensor.nbytes * (src_rank != self.rank)
        super().submit_recv(dest_tensor, src_rank, *args, **kwargs)


class _Broadcast:
    """Each parameter whole on the trainer's ranks, then on those of the rollout."""

    def __init__(self, rank: _Rank) -> None:
        self._rank, self._own = rank, dist.get_rank()
        everyone: list[Any] = [None] * dist.get_world_size()
        mine = (rank.gives.described if rank.gives else (), _cut(rank.trained))
        dist.all_gather_object(everyone, mine)
        self._trains = range(rank.trial.trains)
        # If the trainer does not cut a parameter, only the first rank's copy counts.
        given = [
            [each for each in slices if number == 0 or each.parameter in cut]
            for number, (slices, cut) in enumerate(everyone)
        ]
        self._slices = [slices for slices, _ in everyone]
        self._names = list(dict.fromkeys(each.parameter for each in self._slices[0]))
        self._cuts: set[str] = everyone[0][1]
        taken: list[Any] = [()] * len(given)
        if rank.takes:
            taken[self._own] = rank.takes.described
        self._moves: dict[str, list[Any]] = {}
        for move in find_moves(given, taken):
            name = given[move.sender][move.given].parameter
            self._moves.setdefault(name, []).append((move, given[move.sender][move.given]))
        # Frameworks make such a group of the first trainer and the rollout.
        wanted = sorted({0, *range(rank.trial.world - rank.trial.serves, rank.trial.world)})
        self._others = dist.new_group(wanted)
        self._gathers = dist.new_group([*self._trains])
        self._in = self._own in wanted

    @torch.no_grad()
    def run(self) -> int:
        received = 0
        state = {} if self._rank.trained is None else dict(self._rank.trained.named_parameters())
        shapes = self._shapes()
        for name in self._names:
            count = len(self._trains) if name in self._cuts else 1
            whole = None
            if self._own in self._trains:
                # The parameter of each rank has the same place, under the first rank's name.
                mine = state[name].detach().contiguous()
                if count > 1:
                    parts = [torch.empty_like(mine) for _ in range(count)]
                    dist.all_gather(parts, mine, group=self._gathers)
                    whole = torch.stack(parts)
                    received += mine.nbytes * (count - 1)
                else:
                    whole = mine[None]
            if not self._in:
                continue
            if self._own != 0:
                whole = torch.empty(count, *shapes[name])
                received += whole.nbytes
            assert whole is not None
            dist.broadcast(whole, 0, group=self._others)
            self._take(name, whole)
        return received

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter on a trainer's rank, from its slices."""
        found: dict[str, tuple[int, ...]] = {}
        for each in self._slices[0]:
            axes = 2 if len(each.extent) > 1 and each.extent[-2] > 1 else 1
            shape = each.extent[-axes:]
            rows = found[each.parameter][0] if each.parameter in found else 0
            found[each.parameter] = (rows + shape[0], *shape[1:])
        return found

    def _take(self, name: str, whole: torch.Tensor) -> None:
        for move, described in self._moves.get(name, ()):
            shard = whole[move.sender if len(whole) > 1 else 0]
            rows = [each for each in self._slices[move.sender] if each.parameter == name]
            axes = shard.dim()
            first = sum(each.extent[-axes] for each in rows[: rows.index(described)])
            at = list(move.given_offset[-axes:])
            at[0] += first
            size = move.shape[-axes:]
            box = shard[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))]
            takes = self._rank.takes
            assert takes is not None
            target = takes.live[move.taken]()
            place = zip(move.taken_offset, move.shape, strict=True)
            target[tuple(slice(a, a + n) for a, n in place)].copy_(box.view(move.shape))


def _cut(model: Any) -> set[str]:
    """Return the names of the parameters of which each rank of the trainer has another part."""
    if model is None:
        return set()
    expert_parallel = model.pg_collection.size("ep") > 1
    return {
        name
        for name, each in model.named_parameters()
        if (getattr(each, "tensor_model_parallel", False) and model.pg_collection.size("tp") > 1)
        or (expert_parallel and ".experts." in name)
    }


def _fill(model: Any, pg: megapg.ProcessGroupCollection) -> None:
    """Fill the model with values that differ between shards, and are the same on replicas."""
    cut = _cut(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shard = [pg.rank("tp"), pg.rank("ep")] if name in cut else []
            seed = zlib.crc32(repr((name, shard)).encode())
            parameter.uniform_(generator=torch.Generator().manual_seed(seed))


def _rank(trial: Trial, quick: bool) -> dict[str, Outcome]:
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trains = rank < trial.trains
    serves = rank >= trial.world - trial.serves
    with megatron_on_cpu():
        train = serve = None
        sessions = []
        if trains:
            layout = ParallelLayout(
                world_size=trial.trains, **trial.train, ranks=range(trial.trains)
            )
            sessions.append(megapg.session(layout, name="train"))
            train = sessions[-1].groups
        if serves:
            ranks = range(trial.world - trial.serves, trial.world)
            layout = ParallelLayout(world_size=trial.serves, **trial.serve, ranks=ranks)
            sessions.append(megapg.session(layout, name="serve"))
            serve = sessions[-1].groups
        found = _measured(_Rank(trial, train, serve, dist.group.WORLD, quick), quick)
        for session in reversed(sessions):
            session.close()
    getattr(core_refit, "clear_all_caches", lambda: None)()  # not in 0.16
    dist.destroy_process_group()
    return found


def _measured(rank: _Rank, quick: bool) -> dict[str, Outcome]:
    contestants: dict[str, Callable[[], int]] = {MEGAPG: rank.megapg, BROADCAST: rank.broadcast}
    if core_version() >= (0, 19) or not rank.trial.apart:
        contestants[CORE] = rank.core
    first, seconds = dict[str, float](), {name: list[float]() for name in contestants}
    memory, received = dict[str, int](), dict[str, int]()
    if rank.trained is not None:
        _fill(rank.trained, rank.train)
    reference: list[torch.Tensor] = []
    for name, move in contestants.items():
        if rank.served is not None:
            with torch.no_grad():
                for parameter in rank.served.parameters():
                    parameter.fill_(-1)
        first[name], received[name] = _timed(move)
        if rank.served is not None:  # all contestants must agree, bit for bit
            mine = [each.detach().clone() for each in rank.served.parameters()]
            reference = reference or mine
            for one, other in zip(mine, reference, strict=True):
                if not torch.equal(one, other) or (one == -1).any():
                    raise AssertionError(f"{name} left other weights than {MEGAPG}")
            del mine
    reference.clear()
    for _ in range(1 if quick else REPEATS):
        for name, move in contestants.items():
            _trim()
            before = _resident("VmRSS")
            taken, _ = _timed(move)
            memory[name] = max(memory.get(name, 0), _resident("VmHWM") - before)
            seconds[name].append(taken)
    least = rank.least()
    return {
        name: Outcome(first[name], tuple(seconds[name]), memory[name], received[name], least)
        for name in contestants
    }


def _timed(move: Callable[[], int]) -> tuple[float, int]:
    dist.barrier()
    started = time.perf_counter()
    received = move()
    dist.barrier()
    return time.perf_counter() - started, received


def _trim() -> None:
    """Give free memory back to the system, and forget the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def median(outcomes: Sequence[Outcome]) -> float:
    """Return the median of the seconds of the slowest rank in each repeat."""
    return statistics.median(map(max, zip(*(each.seconds for each in outcomes), strict=True)))
