"""The groups and ranks that take part in a save or load, and the layout of the model."""

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
from megapg.megatron.core import MegatronCollection
from megapg.megatron.reading.resolve import require_groups, resolve
from megapg.ownership.validate import check_waits
from megapg.rendezvous.error_texts import brief
from megapg.rendezvous.joint_work import JointWork
from megapg.rendezvous.store import StoreError
from megapg.rng import replica_field

_TIMEOUT = 300.0
"""Seconds after which a silent rank counts as lost, for groups without a session."""

_SIZES = (
    *("world_size", "tp", "pp", "cp", "ep", "expt_tp", "gtp_remat", "expt_gtp_remat"),
    *("vpp", "order", "optimizer_instances"),
)

# Megatron's orders: its default, and that of --use-tp-pp-dp-mapping.
_ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")


_NEEDS: tuple[Field, ...] = ("tp", "pp", "dp", "dp_cp", "ep", "expt_tp")


def groups_for(
    pg_collection: ProcessGroupCollection | MegatronCollection | None, owner: str
) -> ProcessGroupCollection:
    """Return the groups of a save or load, with all the fields that it reads.

    Raises:
        MissingGroupError, StaleGroupError, NoCollectionError: see :func:`megapg.resolve`. If
            weights are sharded (gtp_remat), ``dp_cp_gtp_remat`` is needed too.
    """
    pg = require_groups(resolve(pg_collection, needs=_NEEDS, owner=owner))
    return pg.require(replica_field(pg), owner=owner)


def joint_work(
    pg: ProcessGroupCollection, name: str, timeout: float | None, *, background: bool = False
) -> JointWork:
    """Return the joint work of all ranks of the collection's layout, or of WORLD if it has none.

    ``timeout``: see :class:`~megapg.rendezvous.joint_work.JointWork`. Default: the session's.
    ``background`` work runs in a thread with its own connection to the store, because another
    thread may block the shared connection while it waits for a key.

    Raises:
        CheckpointError: ``timeout`` is no number of seconds above 0; the other ranks get the error
            too.
    """
    given = timeout
    if timeout is None:
        timeout = _TIMEOUT if pg.lease.timeout is None else pg.lease.timeout
    world = current_world()
    ranks = range(world.size) if pg.layout is None else pg.layout.ranks
    store = world.store
    if background:
        with contextlib.suppress(StoreError):  # then share the connection
            store = store.clone()
    # Several collections of one process may work at the same time, and so may disjoint ranks.
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
    """Convert errors of Megatron's collectives in the block, which do not say that a rank died.

    A rank that raises in the block leaves the others in a collective until it ends or times out.

    Raises:
        OthersFailedError, RendezvousError: instead of torch's plain error.
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
    """Return the collection's layout; for borrowed groups a layout that explains them, or None."""
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
    """Return the layout as a manifest notes it: arguments that cut a model in the same way."""
    return {
        **{name: getattr(layout, name) for name in _SIZES},
        "hierarchical_cp": list(layout.hierarchical_cp),
    }
