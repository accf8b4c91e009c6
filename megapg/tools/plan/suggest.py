"""Suggestions: the layouts of a world size that fit into memory and lose the least time.

Every layout is first judged by the least that it can hold and send. Only a layout that may be among
the first is measured.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapg.errors import LayoutError, PlanError
from megapg.layout import DEFAULT_ORDER, ParallelLayout
from megapg.tools.plan.architecture import split
from megapg.tools.plan.cluster import FULL, Cluster
from megapg.tools.plan.least import least, look_at
from megapg.tools.plan.lost import Lost, time_lost
from megapg.tools.plan.measure import measure
from megapg.tools.plan.models import Model
from megapg.tools.plan.nccl import of_stages
from megapg.tools.plan.repeats import Known
from megapg.tools.plan.training import Job, Recompute, Training, default_samples

_PIECE = 4096  # tokens that context parallelism leaves to a rank, at least
_CHUNKS = 8  # of a rank, at most
_LARGER = (2, 4, 8, 16, 32, 64)  # times the world size, tried if no layout fits


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits.

    Attributes:
        layout: the layout.
        training: a step of the job, with the layout's microbatches and recomputation.
        lost: the time that the step loses.
        share: share of a GPU's memory that the fullest rank holds.
    """

    layout: ParallelLayout
    training: Training
    lost: Lost
    share: float

    @property
    def key(self) -> tuple[float, ...]:
        """The order of suggestions: those that leave memory free first, and then by time.

        Layouts of equal time are ordered by their sizes.
        """
        return _key(self.layout, self.lost, self.share)


@dataclass(frozen=True)
class Suggestions:
    """The first layouts of a world size.

    Attributes:
        found: the layouts, the best first.
        samples: samples of a step: the global batch, equal for all layouts.
        active: number of parameters that a token is multiplied with.
        arithmetic: ``6 * active * tokens / (ranks * bf16_tflops)``, in seconds.
        considered: number of layouts that the model can have.
        measured: number of layouts that were measured.
        complete: True if no other layout can be built and fits.
        recomputed: False if recomputation was not tried, as the model can't be asked for it.
    """

    found: tuple[Suggestion, ...]
    samples: int
    active: int
    arithmetic: float
    considered: int
    measured: int
    complete: bool
    recomputed: bool

    def place_of(self, layout: ParallelLayout) -> int | None:
        """Return the place of a layout, from 1; None if it is not among those found."""
        return next((n for n, each in enumerate(self.found, 1) if each.layout == layout), None)


def suggest(
    world_size: int,
    cluster: Cluster,
    model: Model,
    job: Job,
    *,
    samples: int | None = None,
    given: Mapping[str, Any] | None = None,
    recompute: Sequence[Recompute] = (),
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
        samples: samples of a step. Default: see :func:`megapg.tools.plan.training.default_samples`.
        given: settings of :class:`megapg.ParallelLayout` that all layouts have.
        recompute: what to try, until it fits and leaves memory free. Default: none, then full.
            Selective comes between them for the user's models, which may be unable to recompute.
            Published models have it anyway, as FlashAttention.
        first: number of layouts to return; None for all.
        until: go on until this layout has a place, and return all layouts found. A layout that the
            search does not consider is ignored.
        say: called with a line of progress.

    Raises:
        PlanError: no layout fits, or the cluster has no ``bf16_tflops``.
    """
    if cluster.bf16_tflops is None:
        raise PlanError(
            f"{cluster.name} has no bf16_tflops: the dense bfloat16 arithmetic of a GPU, in 10^12 "
            "operations a second. Suggestions compare it with the time of traffic."
        )
    ladder = recompute or _ladder(model)
    jobs = [replace(job, recompute=each) for each in ladder]
    samples = samples or default_samples(world_size, job.seq_length)
    peak = world_size * cluster.bf16_tflops.value * 1e12
    search = _Search(world_size, cluster, model, jobs, samples, given or {}, peak)
    found = search.run(first, until, say)
    return Suggestions(
        tuple(found),
        samples,
        search.shape.active,
        search.arithmetic,
        search.considered,
        search.measured,
        search.complete,
        model.recomputes or bool(recompute),
    )


def _ladder(model: Model) -> tuple[Recompute, ...]:
    if not model.recomputes:
        return ("none",)
    return ("none", "full") if model.source else ("none", "selective", "full")


_Waiting = tuple[tuple[float, ...], ParallelLayout, int, int]  # microbatches, place in the jobs


class _Search:
    """Measures layouts in the order of the least time that they can lose."""

    def __init__(
        self,
        world_size: int,
        cluster: Cluster,
        model: Model,
        jobs: Sequence[Job],
        samples: int,
        given: Mapping[str, Any],
        peak: float,
    ) -> None:
        self._world, self._cluster, self._model = world_size, cluster, model
        self._jobs, self._samples, self._given = jobs, samples, given
        self._room = cluster.memory_gb.value * 1e9
        self._nearest: tuple[float, str] = (math.inf, "")
        self._known = Known()
        self.shape = look_at(model, jobs[0])
        self.arithmetic = 6 * self.shape.active * samples * jobs[0].seq_length / peak
        self.considered = self.measured = 0
        self.complete = True

    def run(
        self, first: int | None, until: ParallelLayout | None, say: Callable[[str], None]
    ) -> list[Suggestion]:
        """Measure layouts until no other one can be among the first."""
        layouts = [*self._layouts(self._world)]
        self.considered = len(layouts)
        until = next((layout for layout, _ in layouts if layout == until), None)
        waiting = [each for layout in layouts if (each := self._judged(*layout))]
        heapq.heapify(waiting)
        found: list[Suggestion] = []
        refused: PlanError | None = None
        while waiting:
            key, layout, microbatches, place = heapq.heappop(waiting)
            enough = first and found[first - 1 : first] and key > found[first - 1].key
            if enough and (until is None or until in (each.layout for each in found)):
                self.complete = False
                break
            say(f"{self.measured} layouts measured, at most {len(waiting) + 1} to go")
            job = replace(self._jobs[place], microbatches=microbatches)
            try:
                training = measure(layout, self._cluster, self._model, job, known=self._known)
            except PlanError as error:  # the layers cannot be divided like this
                refused = error
                continue
            self.measured += 1
            held = training.fullest.total
            if self._fits(layout, job, held):
                lost = time_lost(layout, self._cluster, job, training.stages, self.arithmetic)
                _put(found, Suggestion(layout, training, lost, held / self._room))
            again = self._judged(layout, microbatches, place + 1)
            if held > FULL * self._room and again:
                heapq.heappush(waiting, again)
        if not found:
            raise refused if refused and not self.measured else PlanError(self._why_not())
        shown = found if until else found[:first]
        self.complete &= len(shown) == len(found)
        return shown

    def _layouts(self, world_size: int) -> Iterator[tuple[ParallelLayout, int]]:
        """Yield the layouts that the model can have, with the number of microbatches."""
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        shape, job = self.shape, self._jobs[0]
        sizes: dict[str, Iterable[int | None]] = {
            "tp": [n for n in divisors if shape.heads % n == 0 and n <= self._cluster.domain_size],
            "pp": [n for n in divisors if n <= shape.layers],
            "cp": [n for n in divisors if n <= max(1, job.seq_length // _PIECE)],
            "ep": [n for n in divisors if max(shape.experts, 1) % n == 0],
            "expt_tp": (0, 1) if shape.experts else (0,),  # 0: as tp
            "vpp": (None, *range(2, _CHUNKS + 1)),
        }
        sizes |= {name: (value,) for name, value in self._given.items()}
        seen = set()
        for values in itertools.product(*sizes.values()):
            with contextlib.suppress(LayoutError):
                named: dict[str, Any] = dict(zip(sizes, values, strict=True))
                layout = ParallelLayout(world_size=world_size, **named)
                microbatches, rest = divmod(self._samples, layout.dp * job.micro_batch_size)
                if layout not in seen and microbatches and not rest:
                    seen.add(layout)
                    if self._divides(layout, microbatches):
                        yield layout, microbatches

    def _divides(self, layout: ParallelLayout, microbatches: int) -> bool:
        """True if tokens can be divided among cp and tp, and microbatches and layers among vpp.

        If ep is 1, Megatron-core reduces gradients of experts like those of dense layers, which is
        wrong unless expt_tp is tp.
        """
        if self._jobs[0].seq_length % (2 * layout.cp * layout.tp):
            return False
        if self.shape.experts and layout.ep == 1 and layout.expt_tp != layout.tp:
            return False
        if layout.vpp and microbatches % layout.pp:
            return False
        how = "ends count as layers" if self._model.split is None else self._model.split
        if self._model.split is not None or layout.vpp:
            with contextlib.suppress(PlanError):
                return split(self.shape.layers, layout.pp, layout.vpp or 1, how) is not None
            return False
        return True

    def _judged(self, layout: ParallelLayout, microbatches: int, place: int = 0) -> _Waiting | None:
        """Return a layout with the first job from ``place`` that may fit; None if none does."""
        communicators = min(each.memory[1] for each in of_stages(layout, layout.ranks[0]))
        for at in range(place, len(self._jobs)):
            job = replace(self._jobs[at], microbatches=microbatches)
            cost = least(layout, job, self.shape)
            if self._fits(layout, job, cost.total + communicators):
                lost = time_lost(layout, self._cluster, job, [cost], self.arithmetic)
                return _key(layout, lost, cost.total / self._room), layout, microbatches, at
        return None

    def _fits(self, layout: ParallelLayout, job: Job, held: int) -> bool:
        """True if the memory is enough. Remember the layout that lacks least."""
        if self._room < held < self._nearest[0]:
            self._nearest = held, text_of_options(layout, job)
        return held <= self._room

    def _why_not(self) -> str:
        """Say which layout comes nearest, and how many ranks might be enough."""
        held, options = self._nearest
        if not options:
            return (
                f"--world-size {self._world}: no layout has these sizes, divides the model, and "
                f"divides {self._samples} samples into microbatches."
            )
        lacks = (held - self._room) / 1e9
        text = f"no layout fits. The nearest one lacks {lacks:,.1f} GB or more: {options}."
        for factor in _LARGER:
            if any(self._judged(*each) for each in self._layouts(self._world * factor)):
                return f"{text} --world-size {self._world * factor} may be enough."
        return text


def _put(found: list[Suggestion], made: Suggestion) -> None:
    """Put a suggestion into its place, unless the layout has a better one of less recomputation."""
    known = next((each for each in found if each.layout == made.layout), None)
    if known is None or made.key < known.key:
        found[:] = (each for each in found if each is not known)
        insort(found, made, key=lambda each: each.key)


def _key(layout: ParallelLayout, lost: Lost, share: float) -> tuple[float, ...]:
    sizes = (layout.tp, layout.pp, layout.vpp or 1, layout.cp, layout.ep, layout.expt_tp)
    return (share > FULL, lost.seconds, *sizes)


def text_of_options(layout: ParallelLayout, job: Job) -> str:
    """Return a layout and its recomputation as options of ``megapg plan``."""
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "ep")}
    options = [f"--{name} {size}" for name, size in sizes.items() if size and size > 1]
    if layout.expt_tp != layout.tp:
        options.append(f"--expt-tp {layout.expt_tp}")
    if layout.order != DEFAULT_ORDER:
        options.append(f"--order {layout.order}")
    if layout.optimizer_instances > 1:
        options.append(f"--optimizer-instances {layout.optimizer_instances}")
    return " ".join([*options, f"--recompute {job.recompute}"])
