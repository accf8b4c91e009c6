"""What a checkpoint needs to know of a collection: who takes part, and how the model is cut."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator

import torch.distributed as dist

from megapg.collection import ProcessGroupCollection
from megapg.communicators.world import current_world
from megapg.errors import (
    CheckpointError,
    LayoutError,
    MissingGroupError,
    RendezvousError,
    SessionError,
)
from megapg.layout import Field, ParallelLayout
from megapg.ownership.validate import check_waits
from megapg.rendezvous.joint_work import JointWork
from megapg.rendezvous.problems import brief
from megapg.rendezvous.store import StoreError

_TIMEOUT = 300.0
"""Seconds of silence after which a rank is given up, with groups that no session owns."""

_SIZES = (
    *("world_size", "tp", "pp", "cp", "ep", "expt_tp", "gtp_remat", "expt_gtp_remat"),
    *("vpp", "order", "optimizer_instances"),
)

# The orders that Megatron has: its default, and that of --use-tp-pp-dp-mapping.
_ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")


def joint_work(
    pg: ProcessGroupCollection, name: str, timeout: float | None, *, background: bool = False
) -> JointWork:
    """Work together with all ranks of the collection's layout; of WORLD where it has none.

    ``timeout``: see :class:`~megapg.rendezvous.joint_work.JointWork`; None is that of the session.
    In the ``background`` it goes on in a thread, which takes a connection to the store of its own:
    somebody else may wait for a key on the other one, and hold it.

    Raises:
        CheckpointError: ``timeout`` is no number of seconds above 0; the other ranks hear of it.
    """
    given = timeout
    if timeout is None:
        timeout = _TIMEOUT if pg.lease.timeout is None else pg.lease.timeout
    world = current_world()
    ranks = range(world.size) if pg.layout is None else pg.layout.ranks
    store = world.store
    if background:
        with contextlib.suppress(StoreError):  # too busy for one more: the old one will do
            store = store.clone()
    # Collections of one process may work at the same time, and so may those of disjoint ranks.
    who = zlib.crc32(repr((pg.lease.owner, list(ranks))).encode())
    team = JointWork(store, f"checkpoint {name} {who:08x}", world.rank, ranks, timeout=timeout)
    if given is not None:
        try:
            check_waits(given)
        except SessionError as error:
            team.decline(error)
            raise CheckpointError(str(error)) from None
    return team


@contextlib.contextmanager
def exchanging(what: str, team: JointWork) -> Iterator[None]:
    """Around code of Megatron's with collectives in it, which can't say that a rank died.

    A rank that raises in here leaves the others in a collective, until it ends or that times out.

    Raises:
        OthersFailedError, RendezvousError: in place of torch's plain error.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
            raise
        team.heed()
        raise RendezvousError(
            f"exchanging {what} failed ({brief(error)}). If that is a lost connection, another "
            "rank died: look at the logs of all."
        ) from error


def layout_of(pg: ProcessGroupCollection) -> ParallelLayout | None:
    """The collection's layout; of borrowed groups the one that explains them, if one does."""
    if pg.layout is not None:
        return pg.layout
    try:
        tp, pp, cp, ep, expt_tp = (pg.size(field) for field in ("tp", "pp", "cp", "ep", "expt_tp"))
        me, world = dist.get_rank(), dist.get_world_size()
        for order in _ORDERS:
            layout = ParallelLayout(
                world_size=world, tp=tp, pp=pp, cp=cp, ep=ep, expt_tp=expt_tp, order=order
            )
            fields: tuple[Field, ...] = ("tp", "pp", "cp", "ep", "expt_tp", "dp", "dp_cp")
            if all(pg.ranks(field) == layout.members(field, me) for field in fields):
                return layout
    except (LayoutError, MissingGroupError):
        pass
    return None


def sizes_of(layout: ParallelLayout) -> dict[str, object]:
    """What a manifest notes of a layout: the arguments of one that cuts a model alike."""
    return {
        **{name: getattr(layout, name) for name in _SIZES},
        "hierarchical_cp": list(layout.hierarchical_cp),
    }
