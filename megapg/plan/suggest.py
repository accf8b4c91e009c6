"""Suggestions: the layouts of a world size that fit into memory and lose the least time.

Every layout is first judged by the least that it can hold and send. Only a layout that may be among
the first is measured.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import operator
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapg.errors import LayoutError, PlanError
from megapg.layout import ParallelLayout
from megapg.plan.cluster import Cluster
from megapg.plan.least import least, look_at
from megapg.plan.measure import measure
from megapg.plan.models import Model
from megapg.plan.nccl import of_stages
from megapg.plan.training import Job, Recompute, StageCost, Training

_TOKENS = 4 * 2**20  # of a step
_PIECE = 4096  # tokens that context parallelism leaves to a rank, at least
_CHUNKS = 8  # of a rank, at most
# Times a buffer that a rank of a ring sends, as its group grows. A message is received meanwhile.
_SENT = {"all_reduce": 2.0, "recv": 0.0, "barrier": 0.0}
_LARGER = (2, 4, 8, 16, 32, 64)  # times the world size, tried if no layout fits


@dataclass(frozen=True)
class Lost:
    """The time of a step without the model's arithmetic, if nothing overlaps. Links are at peak.

    Attributes:
        network_bytes: bytes that a rank sends over the network.
        nvlink_bytes: bytes that a rank sends over NVLink.
        traffic: ``network_bytes / network_gb_s + nvlink_bytes / nvlink_gb_s``, in seconds.
        bubble: share of the arithmetic's time that the pipeline waits:
            ``(pp - 1) / (microbatches * vpp)``.
        seconds: those of traffic, of the bubble, and of the layers that are computed again: a third
            of the arithmetic's time if all are.
    """

    network_bytes: float
    nvlink_bytes: float
    traffic: float
    bubble: float
    seconds: float


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits, and the time that its slowest stage loses."""

    layout: ParallelLayout
    training: Training
    lost: Lost

    @property
    def key(self) -> tuple[float, ...]:
        """What suggestions are sorted by: the time, and of equal times the smaller sizes."""
        return _key(self.layout, self.lost)


@dataclass(frozen=True)
class Suggestions:
    """The first layouts of a world size.

    Attributes:
        found: the layouts, the best first.
        samples: samples of a step: the global batch, equal for all layouts.
        arithmetic: ``6 * active weights * tokens / (ranks * bf16_tflops)``, in seconds.
        considered: number of layouts that the model can have.
        measured: number of layouts that were measured.
    """

    found: tuple[Suggestion, ...]
    samples: int
    arithmetic: float
    considered: int
    measured: int

    def place_of(self, layout: ParallelLayout) -> int | None:
        """Return the place of a layout, from 1; None if it is not among those found."""
        return next((n for n, each in enumerate(self.found, 1) if each.layout == layout), None)


def default_samples(world_size: int, seq_length: int) -> int:
    """Return the samples of a step of at least four million tokens.

    The number is the odd part of the world size times a power of two, so that many data parallel
    sizes divide it.
    """
    odd = world_size // (world_size & -world_size)
    return odd << max(0, math.ceil(math.log2(_TOKENS / (seq_length * odd))))


def suggest(
    world_size: int,
    cluster: Cluster,
    model: Model,
    job: Job,
    *,
    samples: int | None = None,
    given: Mapping[str, Any] | None = None,
    recompute: Sequence[Recompute] = ("selective", "full"),
    first: int | None = 10,
    until: ParallelLayout | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Suggestions:
    """Return the layouts that fit, by the time that they lose.

    Args:
        world_size: number of ranks.
        cluster: the machines.
        model: the model.
        job: what is trained. Each layout gets its own microbatches and recomputation.
        samples: samples of a step. Default: see :func:`default_samples`.
        given: settings of :class:`megapg.ParallelLayout` that all layouts have.
        recompute: what to try, until it fits.
        first: number of layouts to return; None for all.
        until: go on until this layout has a place, too.
        say: called with a line of progress.

    Raises:
        PlanError: no layout fits, or the cluster has no ``bf16_tflops``.
    """
    if cluster.bf16_tflops is None:
        raise PlanError(
            f"{cluster.name} has no bf16_tflops: the dense bfloat16 arithmetic of a GPU, in 10^12 "
            "operations a second. Suggestions compare it with the time of traffic."
        )
    samples = samples or default_samples(world_size, job.seq_length)
    jobs = tuple(replace(job, recompute=each) for each in recompute)
    search = _Search(world_size, cluster, model, jobs, samples, given or {})
    found = search.run(first, until, say)
    if not found:
        raise PlanError(search.why_not())
    return Suggestions(found, samples, search.arithmetic, search.considered, search.measured)


_Waiting = tuple[tuple[float, ...], ParallelLayout, int, int]  # microbatches, place among the jobs


class _Search:
    """Measures layouts in the order of the least time that they can lose."""

    def __init__(
        self,
        world_size: int,
        cluster: Cluster,
        model: Model,
        jobs: tuple[Job, ...],
        samples: int,
        given: Mapping[str, Any],
    ) -> None:
        assert cluster.bf16_tflops is not None
        self._world, self._cluster, self._model = world_size, cluster, model
        self._jobs, self._samples, self._given = jobs, samples, given
        self._shape = look_at(model, jobs[0])
        tokens = samples * jobs[0].seq_length
        peak = world_size * cluster.bf16_tflops.value * 1e12
        self.arithmetic = 6 * self._shape.active * tokens / peak
        self.considered = self.measured = 0
        self._room = cluster.memory_gb.value * 1e9
        self._nearest: tuple[int, str] | None = None

    def run(
        self, first: int | None, until: ParallelLayout | None, say: Callable[[str], None]
    ) -> tuple[Suggestion, ...]:
        """Measure layouts until no other one can be among the first."""
        layouts = [*self._layouts(self._world)]
        self.considered = len(layouts)
        waiting = [each for layout in layouts if (each := self._judged(*layout))]
        heapq.heapify(waiting)
        found: list[Suggestion] = []
        while waiting:
            key, layout, microbatches, at = heapq.heappop(waiting)
            placed = until is None or until in (each.layout for each in found)
            if placed and first and len(found) >= first and key > found[first - 1].key:
                break
            say(f"{self.measured} layouts measured, at most {len(waiting) + 1} to go")
            job = replace(self._jobs[at], microbatches=microbatches)
            try:
                training = measure(layout, self._cluster, self._model, job)
            except PlanError:  # the layers cannot be divided like this
                continue
            self.measured += 1
            if self._fits(layout, job, training.fullest.total):
                lost = self._lost(layout, job, training.stages)
                insort(found, Suggestion(layout, training, lost), key=lambda each: each.key)
            elif again := self._judged(layout, microbatches, at + 1):
                heapq.heappush(waiting, again)
        return tuple(found[:first] if until is None else found)

    def _layouts(self, world_size: int) -> Iterator[tuple[ParallelLayout, int]]:
        """Yield the layouts that the model can have, with the number of microbatches."""
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        shape, job = self._shape, self._jobs[0]
        sizes: dict[str, Iterable[int | None]] = {
            "tp": [n for n in divisors if shape.heads % n == 0 and n <= self._cluster.domain_size],
            "pp": [n for n in divisors if n <= shape.layers],
            "cp": [n for n in divisors if n <= max(1, job.seq_length // _PIECE)],
            "ep": [n for n in divisors if max(shape.experts, 1) % n == 0],
            "expt_tp": (0, 1) if shape.experts else (0,),
            "vpp": (None, *range(2, _CHUNKS + 1)),
        }
        sizes |= {name: (value,) for name, value in self._given.items()}
        seen = set()
        for values in itertools.product(*sizes.values()):
            with contextlib.suppress(LayoutError):
                named: dict[str, Any] = dict(zip(sizes, values, strict=True))
                layout = ParallelLayout(world_size=world_size, **named)
                microbatches, rest = divmod(self._samples, layout.dp * job.micro_batch_size)
                whole = microbatches and not rest and job.seq_length % (2 * layout.cp) == 0
                if layout.vpp:  # The ends of a pipeline may count as layers.
                    over = -shape.layers % (layout.pp * layout.vpp)
                    whole = whole and microbatches % layout.pp == 0 and over in (0, 2)
                if whole and layout not in seen:
                    seen.add(layout)
                    yield layout, microbatches

    def _judged(self, layout: ParallelLayout, microbatches: int, at: int = 0) -> _Waiting | None:
        """Return a layout with the first job from ``at`` that may fit; None if none does."""
        for place in range(at, len(self._jobs)):
            job = replace(self._jobs[place], microbatches=microbatches)
            cost = least(layout, job, self._shape)
            communicators = min(each.memory[1] for each in of_stages(layout, layout.ranks[0]))
            if self._fits(layout, job, cost.total + communicators):
                lost = self._lost(layout, job, [cost])
                return _key(layout, lost), layout, microbatches, place
        return None

    def _fits(self, layout: ParallelLayout, job: Job, held: int) -> bool:
        """True if the memory suffices. Remember the layout that needs least."""
        options = text_of_options(layout, job)
        self._nearest = min(self._nearest or (held, options), (held, options))
        return held <= self._room

    def why_not(self) -> str:
        """Say which layout comes nearest, and how many ranks might be enough."""
        if self._nearest is None:
            return (
                f"no layout of {self._world} ranks has these sizes and divides the model and "
                f"{self._samples} samples into microbatches of {self._jobs[0].micro_batch_size}."
            )
        held, options = self._nearest
        lacks = (held - self._room) / 2**30
        text = f"no layout fits. The nearest lacks {lacks:,.1f} GiB, at least: {options}."
        for factor in _LARGER:
            if any(self._judged(*each) for each in self._layouts(self._world * factor)):
                return f"{text} --world-size {self._world * factor} may be enough."
        return text

    def _lost(self, layout: ParallelLayout, job: Job, stages: Sequence[StageCost]) -> Lost:
        """Return the time that the slowest stage loses."""
        network, nvlink = max((self._sent(layout, stage) for stage in stages), key=self._seconds)
        traffic = self._seconds((network, nvlink))
        bubble = (layout.pp - 1) / (job.microbatches * (layout.vpp or 1))
        again = (job.recompute == "full") / 3
        seconds = traffic + self.arithmetic * (again + bubble * (1 + again))
        return Lost(network, nvlink, traffic, bubble, seconds)

    def _seconds(self, sent: tuple[float, float]) -> float:
        network, nvlink = self._cluster.network_gb_s.value, self._cluster.nvlink_gb_s.value
        return sent[0] / (network * 1e9) + sent[1] / (nvlink * 1e9)

    def _sent(self, layout: ParallelLayout, stage: StageCost) -> tuple[float, float]:
        """Return the bytes that a rank sends over the network and over NVLink."""
        block = max(self._cluster.node_size, self._cluster.domain_size)
        network = nvlink = 0.0
        for flow in stage.flows:
            group = layout.members(flow.field, stage.rank)
            sent = flow.bytes * _SENT.get(flow.collective, 1.0)
            if flow.collective not in ("send", "recv"):
                sent *= (len(group) - 1) / len(group)
            blocks = [rank // block for rank in group]
            if flow.collective == "all_to_all":
                same = sum(n * (n - 1) for n in Counter(blocks).values())
                share = 1 - same / max(1, len(group) * (len(group) - 1))
            else:
                share = sum(map(operator.ne, blocks, blocks[1:] + blocks[:1])) / len(group)
            network += sent * share
            nvlink += sent * (1 - share)
        return network, nvlink


def _key(layout: ParallelLayout, lost: Lost) -> tuple[float, ...]:
    sizes = (layout.tp, layout.pp, layout.vpp or 1, layout.cp, layout.ep, layout.expt_tp)
    return (lost.seconds, *sizes)


def text_of_options(layout: ParallelLayout, job: Job) -> str:
    """Return a layout and its job as options of ``megapg plan``."""
    names = ("tp", "pp", "vpp", "cp", "ep", "expt_tp")
    sizes = {name: getattr(layout, name) or 1 for name in names}
    if layout.expt_tp == layout.tp:
        del sizes["expt_tp"]
    given = [
        f"--{name.replace('_', '-')} {size}"
        for name, size in sizes.items()
        if size > 1 or name == "expt_tp"
    ]
    return " ".join([*given, f"--recompute {job.recompute}"])
