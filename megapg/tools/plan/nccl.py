"""The NCCL communicators that a session makes for each rank, and the memory that they may take."""

from __future__ import annotations

from dataclasses import dataclass

from megapg.communicators.lanes import NCCL_LANES
from megapg.communicators.needed import Communicator, Recipe, communicators
from megapg.layout import ParallelLayout


@dataclass(frozen=True)
class Measurement:
    """Memory that one NCCL communicator was seen to hold on a GPU after its first collective."""

    bytes: int
    source: str


# NCCL documents no formula. The memory grows with the channels, and so with the speed of the links.
# It does not grow with the number of nodes beyond two (NVIDIA/nccl#986).
MEASURED = (
    Measurement(388 * 2**20, "megapg, benchmarks/RESULTS.md: H200, NCCL 2.28.9, one rank"),
    Measurement(544 * 10**6, "NVIDIA/nccl#964: four A100 with NVLink, two ranks"),
    Measurement(576 * 2**20, "sgl-project/sglang#30908: GB200, NCCL 2.30.4"),
    Measurement(688 * 10**6, "NVIDIA/nccl#964: four A100 with NVLink, three or four ranks"),
)


@dataclass(frozen=True)
class Stages:
    """Pipeline stages whose ranks have equally many communicators.

    Attributes:
        stages: their numbers.
        count: communicators of a rank, without WORLD.
        connected: those of more than one rank. The others never communicate.
    """

    stages: tuple[int, ...]
    count: int
    connected: int

    @property
    def memory(self) -> tuple[int, int]:
        """Least and most bytes on a GPU once every communicator has been used."""
        sizes = [each.bytes for each in MEASURED]
        return self.connected * min(sizes), self.connected * max(sizes)


def of_rank(layout: ParallelLayout, rank: int) -> list[Communicator]:
    """Return the communicators of a rank: those that ``megapg.session(backend="nccl")`` makes.

    If the caller has bound WORLD to a device, a rank may have more, of a single rank each.
    """
    recipe = Recipe("nccl", NCCL_LANES, {}, frozenset(), all_gather_groups=False)
    return communicators(layout, recipe, rank)


def of_stages(layout: ParallelLayout, rank: int) -> list[Stages]:
    """Return the numbers of communicators of each stage of the rank's pipeline.

    Stages differ only in the groups of embeddings. Ranks of one stage have equal numbers.
    """
    pipeline = layout.members("pp", rank)
    counts: dict[tuple[int, ...], tuple[int, int]] = {}
    alike: dict[tuple[int, int], list[int]] = {}
    for stage, member in enumerate(pipeline):
        embeddings = tuple(len(layout.members(field, member)) for field in ("embd", "pos_embd"))
        if embeddings not in counts:
            made = of_rank(layout, member)
            counts[embeddings] = len(made), sum(len(each.ranks) > 1 for each in made)
        alike.setdefault(counts[embeddings], []).append(stage)
    return [Stages(tuple(stages), *counted) for counted, stages in alike.items()]
