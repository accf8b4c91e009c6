"""A collection for unit tests in one process: any layout, any rank, no communication."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Unpack

from megapg.collection import ProcessGroupCollection
from megapg.layout import Fields, ParallelLayout
from megapg.ownership.opening import LayoutSizes, fake_session


@contextlib.contextmanager
def fake_collection(
    rank: int = 0, world_size: int = 0, *, gloo: Fields = (), **sizes: Unpack[LayoutSizes]
) -> Iterator[ProcessGroupCollection]:
    """Play one rank of a layout: ``with fake_collection(tp=2, rank=1) as pg: ...``.

    The groups are torch's *fake* process groups: they know their ranks and sizes, and collectives
    return at once without touching the data. They are for code that asks for its place rather than
    for numbers; :func:`~megapg.testing.run_distributed` runs real ranks.

    Blocks nest, for the layouts of two models in one process. All play the same rank, and the
    outermost has the most ranks: give it ``world_size`` if needed.

    Args:
        rank: global rank to play.
        world_size: number of ranks in the layout. Default: the smallest that fits the sizes.
        gloo: as :func:`megapg.session`'s; the companions are fake as well.
        **sizes: see :class:`~megapg.layout.ParallelLayout`.

    Raises:
        LayoutError: the sizes don't fit, or ``rank`` is not in the layout.
        SessionError: torch.distributed is initialised in this process, or another rank is played.
    """
    if not world_size:
        tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
        instances = sizes.get("optimizer_instances", 1)
        # The instances divide dp x cp of the dense grid, and the expert grid's dp alone.
        dense = tp * pp * math.lcm(sizes.get("cp", 1), instances)
        expert = (sizes.get("expt_tp") or tp) * sizes.get("ep", 1) * pp * instances
        world_size = len(sizes.get("ranks") or ()) or math.lcm(dense, expert)
    layout = ParallelLayout(world_size=world_size, **sizes)
    layout.coordinates(rank)  # refuses a rank outside the layout before anything is set up
    with fake_session(layout, rank, gloo=gloo) as session:
        yield session.groups
