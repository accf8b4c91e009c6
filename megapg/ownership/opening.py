"""Open process groups: :func:`session` meets the other ranks and makes the groups of a layout.

The session closes what it opened. It leaves alone what was open before: a WORLD that the caller
initialised, and groups that other code made.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TypedDict, Unpack, cast

import torch.distributed as dist

from megapg.communicators.backends import backend_for
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import Recipe
from megapg.communicators.world import World, create_world, current_world, fake_world, refuse
from megapg.errors import SessionError
from megapg.launch import Launch
from megapg.launch.signals import NoSignals, Signals
from megapg.layout import EmbeddingRanks, Field, Fields, GroupName, ParallelLayout
from megapg.ownership.closing import close_lost, open_owners
from megapg.ownership.session import Session
from megapg.ownership.validate import check_kinds, check_recipe, check_waits
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.torch_private import check_version

_DEFAULT = "default"


class LayoutSizes(TypedDict, total=False):
    """The arguments of :class:`~megapg.layout.ParallelLayout`, except for the world's size."""

    tp: int
    pp: int
    cp: int
    ep: int
    expt_tp: int
    gtp_remat: int
    expt_gtp_remat: int
    order: str
    optimizer_instances: int
    hierarchical_cp: tuple[int, ...]
    embedding_ranks: EmbeddingRanks
    position_embedding_ranks: EmbeddingRanks
    vpp: int | None
    hybrid_cp: bool
    ranks: Sequence[int]


def session(
    layout: ParallelLayout | None = None,
    *,
    name: str = _DEFAULT,
    timeout: float = 60.0,
    collective_timeout: timedelta | Mapping[GroupName, timedelta] | None = None,
    backend: str | None = None,
    options: Mapping[Field, CommunicatorOptions] | None = None,
    dedicated: Fields = (),
    all_gather_groups: bool = False,
    gloo: Fields = (),
    warm_up: bool = False,
    handle_signals: bool = False,
    launch: Launch | None = None,
    network: str | Sequence[str] | None = None,
    **sizes: Unpack[LayoutSizes],
) -> Session:
    """Open the process groups of one layout. Every rank of the layout calls this with equal values.

    Starts torch.distributed unless it is initialised already. Rank and address come from torchrun,
    SLURM's ``srun`` or Open MPI (see :func:`megapg.launch.detect`); without a launcher, this
    process is the only rank. Use the session as a context manager, or call :meth:`Session.close`.

    Args:
        layout: the layout. If you give sizes instead (``tp=2, pp=2``), the layout spans WORLD.
        name: distinguishes sessions that are open at the same time in one process.
        timeout: seconds that megapg waits for the other ranks here, in :meth:`Session.close`, and
            in :meth:`Session.suspend` and :meth:`Session.resume`. Does not affect collectives.
        collective_timeout: timeout of collectives on the groups, and on WORLD if the session makes
            it. Default: WORLD's own. Or a mapping field -> timeout, ``{"pp":
            timedelta(minutes=5)}``: other fields have WORLD's timeout, and fields with different
            timeouts share no communicator.
        backend: ``"gloo"``, ``"nccl"`` or a device map such as ``"cpu:gloo,cuda:nccl"``. Default:
            WORLD's backend. For a new WORLD, NCCL if CUDA is available.
        options: field -> NCCL settings of the field's communicator.
        dedicated: fields that share their communicator with no other field.
        all_gather_groups: also make ``dp_cp_ag`` and ``expt_dp_ag``, twins of ``dp_cp`` and
            ``expt_dp`` with separate communicators, so that all-gathers overlap reductions. gloo
            has no such overlap, so there both twins share one communicator, unless you set
            ``dedicated=("dp_cp_ag",)``.
        gloo: fields that also get a gloo group, for objects and tensors on the CPU:
            ``gloo=("dp_cp",)`` makes ``groups.extras["gloo.dp_cp"]``.
        warm_up: connect every communicator now instead of at its first use; see
            :meth:`Session.warm_up`.
        handle_signals: close the session in order on SIGTERM and Ctrl-C. SIGTERM raises
            :class:`~megapg.launch.signals.SignalExit` in the main thread (uncaught, it ends the
            process with status 143), and Ctrl-C raises ``KeyboardInterrupt``. The session must be
            opened in the main thread. Existing signal handlers are called first and restored at the
            end. A rank stuck inside a collective notifies the others and exits within half a
            minute.
        launch: rank, world size and address, instead of the launcher's environment. Only if
            torch.distributed is not initialised.
        network: the network interfaces: ``"auto"`` for InfiniBand or RoCE if present, or names such
            as ``"ib0"``. Default: NCCL and gloo choose. Environment variables that the user has set
            are kept; see :func:`megapg.launch.choose_network`. Only if torch.distributed is not
            initialised.
        **sizes: see :class:`~megapg.layout.ParallelLayout`.

    Raises:
        UnsupportedVersionError: torch is older than 2.6.
        LaunchError: the environment does not give this process's rank, or contradicts itself.
        LayoutError: the sizes do not fit WORLD.
        SessionError: a session of that name is open in this process; or ``handle_signals`` outside
            the main thread.
        RendezvousError: a rank did not arrive in time (``missing`` names it), or has another layout
            (:class:`~megapg.errors.LayoutMismatchError`). Every rank that arrived gets the error,
            and nothing stays open.
    """
    check_version()
    fields_options = cast("Mapping[str, CommunicatorOptions]", options or {})
    waits = cast("timedelta | Mapping[str, timedelta] | None", collective_timeout)
    if not dist.is_available():
        raise SessionError(
            "this torch was built without torch.distributed, so there are no process groups."
        )
    signals, world, opened = NoSignals(), None, None
    try:
        with _telling_the_others(name, launch):
            check_waits(timeout, waits)
            _check_start(layout, sizes, launch, network)
            if backend is not None:
                backend_for(backend)
            if handle_signals:
                signals = Signals()
        close_lost()
        if any(each.name == name for each in open_sessions()):
            gc.collect()  # the old session may be garbage in a reference cycle
        everywhere = waits if isinstance(waits, timedelta) else None
        timeouts = {} if waits is None or isinstance(waits, timedelta) else waits
        make_world = partial(
            create_world,
            backend=backend,
            timeout=timeout,
            collective_timeout=everywhere,
            launch=launch,
            network=network,
        )
        if dist.is_initialized():
            world = current_world()
            if backend is not None:
                world.backend = backend
        else:
            world = make_world()
        with _telling_the_others(name, launch):
            check_kinds(name, fields_options, dedicated, gloo, sizes, LayoutSizes.__annotations__)
            if layout is None:
                layout = ParallelLayout(
                    world_size=len(sizes.get("ranks") or range(world.size)), **sizes
                )
            recipe = Recipe(
                backend=world.backend,
                lanes=backend_for(world.backend).lanes,
                options=dict(fields_options),
                dedicated=frozenset(dedicated),
                all_gather_groups=all_gather_groups,
                gloo=frozenset(gloo),
                timeouts=dict(timeouts),
            )
            check_recipe(recipe, world, layout)
        opened = Session(
            layout,
            world,
            recipe,
            name=name,
            timeout=timeout,
            collective_timeout=everywhere or world.timeout,
            make_world=make_world,
            signals=signals,
        )
        if warm_up:
            opened.warm_up()
        return opened
    except BaseException as error:  # the caller has nothing to close yet
        with contextlib.ExitStack() as all_of_it:
            all_of_it.callback(signals.close)
            if world is not None:
                all_of_it.callback(world.close, abort=error, timeout=0)
            if opened is not None:
                opened.__exit__(type(error), error, error.__traceback__)
        raise


@contextlib.contextmanager
def _telling_the_others(name: str, launch: Launch | None) -> Iterator[None]:
    """Report an error of the checks to the ranks that wait for this one."""
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            _decline(name, current_world(), error)
        else:
            refuse(error, launch)
        raise


def _decline(name: object, world: World, error: BaseException) -> None:
    """Tell the ranks that wait under this name why this rank does not come.

    If ``name`` is no text, use the default name, under which the others most likely wait.
    """
    where = name if isinstance(name, str) and name else _DEFAULT
    Rendezvous(world.store, where, world.rank, range(world.size)).decline(error)


def _check_start(
    layout: ParallelLayout | None,
    sizes: LayoutSizes,
    launch: Launch | None,
    network: str | Sequence[str] | None,
) -> None:
    if layout is not None and not isinstance(layout, ParallelLayout):
        raise SessionError(
            f"session({layout!r}): the argument is a ParallelLayout. Name sizes: session(tp=2)."
        )
    if layout is not None and sizes:
        raise SessionError(f"give a layout, or the sizes {', '.join(sizes)}, not both.")
    if launch is not None and dist.is_initialized():
        raise SessionError(
            "launch= says how to make WORLD, but torch.distributed is initialised already. Leave "
            "launch= out to use that WORLD, or open the session first."
        )
    if network is not None and dist.is_initialized():
        raise SessionError(
            "network= says how to make WORLD, but torch.distributed is initialised already. Leave "
            "network= out, open the session first, or initialise torch.distributed inside of "
            "megapg.launch.choose_network(...).applied()."
        )


def open_sessions() -> tuple[Session, ...]:
    """Return the sessions of this process that have not been closed, in the order of opening.

    Includes suspended and failed sessions.
    """
    return tuple(owner for owner in open_owners() if isinstance(owner, Session))


def fake_session(
    layout: ParallelLayout,
    rank: int,
    *,
    gloo: Fields = (),
    lanes: Mapping[str, str] | None = None,
) -> Session:
    """Open a session on torch's fake backend: one process plays ``rank``, without communication.

    Several may be open at a time, if they play the same rank.

    Args:
        layout: the layout.
        rank: the rank.
        gloo: fields that also get a gloo group.
        lanes: field -> lane. Fields on different lanes share no group. Default: all may share.

    Raises:
        SessionError: torch.distributed is initialised already, in another way.
    """
    check_version()
    taken = {session.name for session in open_sessions()}
    name = "pretend"
    while name in taken:
        name += " too"
    world = fake_world(rank, max(layout.ranks) + 1)
    recipe = Recipe(
        "fake", lanes or {}, {}, frozenset(), all_gather_groups=False, gloo=frozenset(gloo)
    )
    try:
        check_recipe(recipe, world, layout)
        return Session(
            layout,
            world,
            recipe,
            name=name,
            timeout=0,
            collective_timeout=world.timeout,
            title="fake_collection()" if len(taken) == 0 else f"fake_collection() {len(taken) + 1}",
        )
    except BaseException as error:
        world.close(abort=error, timeout=0)
        raise
