"""The memory of each pipeline stage as bars: the parts that text, SVG and HTML share."""

from __future__ import annotations

from dataclasses import dataclass

from megapg.layout import ParallelLayout
from megapg.tools.plan.cluster import Cluster
from megapg.tools.plan.training import StageCost, Training

PARTS = ("parameters", "gradients", "optimizer", "activations", "communicators")
LETTERS = "PGOAC"
_MOST, _FIRST, _LAST = 16, 8, 4  # bars


@dataclass(frozen=True)
class Bar:
    """A row of neighbouring pipeline stages with equal memory.

    Attributes:
        first: the number of the first stage.
        last: the number of the last stage.
        cost: the cost of a rank of each.
    """

    first: int
    last: int
    cost: StageCost

    @property
    def label(self) -> str:
        """The stages, such as ``1-6``."""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def name(self) -> str:
        """The stages, such as ``stages 1-6``."""
        return f"stage{'s' * (self.first < self.last)} {self.label}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each of ``PARTS``. Communicators count with the most that they take."""
        cost = self.cost
        held = (cost.parameters, cost.gradients, cost.optimizer, cost.activations)
        return *held, cost.communicators[1]


@dataclass(frozen=True)
class Memory:
    """The memory of a rank of each pipeline stage.

    Attributes:
        bars: the stages that are drawn, in order.
        limit: bytes of a GPU.
        gpu: the same for people, such as ``80 GB``.
        job: the model, and the size of a step.
        verdict: the fullest stage.
        assumptions: the way in which bytes were counted.
    """

    bars: tuple[Bar, ...]
    limit: int
    gpu: str
    job: str
    verdict: str
    assumptions: str

    @property
    def longest(self) -> int:
        """Bytes of the longest bar, or of a GPU."""
        return max(self.limit, *(bar.cost.total for bar in self.bars))

    def gap_before(self, bar: Bar) -> int:
        """Return the number of hidden stages before a bar."""
        return (
            bar.first
            - 1
            - max((each.last for each in self.bars if each.last < bar.first), default=-1)
        )


def memory_of(layout: ParallelLayout, cluster: Cluster, training: Training) -> Memory:
    """Return the memory of a job in a layout, for people."""
    job, fullest = training.job, training.fullest
    gpu = cluster.memory_gb.value
    samples = job.microbatches * job.micro_batch_size * layout.dp
    whose = f"Stage {fullest.stage} is the fullest:" if layout.pp > 1 else "A rank holds"
    return Memory(
        _bars(training),
        round(gpu * 10**9),
        f"{gpu:g} GB",
        f"{job.model}: {_text_of_count(training.weights)} parameters. A step has {samples:,} "
        f"samples of {job.seq_length:,} tokens, {job.microbatches:,} microbatches of "
        f"{job.micro_batch_size:,} for each of dp={layout.dp:,}.",
        f"{whose} {text_of_bytes(fullest.total)}, {fullest.total / (gpu * 10**9):.0%} of the "
        f"{gpu:g} GB of a GPU.",
        _assumptions(training),
    )


def _assumptions(training: Training) -> str:
    from megapg.megatron.core import version_text  # imports torch, which such a plan needs anyway

    job, stage = training.job, training.fullest
    bits = 8 * stage.parameters // max(1, stage.weights)
    kind = "distributed" if job.distributed_optimizer else "plain"
    experts = ", equally many tokens for each expert" * bool(training.fields & {"ep", "tp_ep"})
    return (
        f"Counted on the model that Megatron-core {version_text()} builds. Assumed: "
        f"parameters of {bits} bits, Adam with fp32 state ({kind} optimizer), recomputation: "
        f"{job.recompute}{experts}."
    )


def _bars(training: Training) -> tuple[Bar, ...]:
    bars: list[Bar] = []
    for cost in training.stages:
        bar = Bar(cost.stage, cost.stage, cost)
        if bars and (bars[-1].sizes, bars[-1].cost.communicators) == (
            bar.sizes,
            cost.communicators,
        ):
            bar = Bar(bars.pop().first, cost.stage, cost)
        bars.append(bar)
    if len(bars) <= _MOST:
        return tuple(bars)
    full = training.fullest.total
    ends = {*bars[:_FIRST], *bars[-_LAST:], next(bar for bar in bars if bar.cost.total == full)}
    return tuple(bar for bar in bars if bar in ends)


_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def text_of_bytes(size: int) -> str:
    """Return bytes for people: ``12.3 GB``. A GB is 10^9 bytes."""
    unit, scale = next((each for each in _UNITS if size >= 0.9995 * each[1]), ("B", 1))
    number = size / scale
    return f"{number:,.0f} {unit}" if scale == 1 or number >= 99.95 else f"{number:.1f} {unit}"


def text_of_range(low: int, high: int) -> str:
    """Return two numbers of bytes for people: ``3.7-6.2 GB``."""
    least, most = text_of_bytes(low), text_of_bytes(high)
    return most if low == high else f"{least.removesuffix(most[-3:])}-{most}"


def _text_of_count(number: int) -> str:
    for word, scale in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if number >= scale:
            return f"{number / scale:.1f} {word}"
    return f"{number:,}"
