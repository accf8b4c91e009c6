"""torch's private names, and workarounds for what older supported releases lack.

This module is for groups, backends and stores, and :mod:`meshes` for meshes. No other module uses
private names. Each function names the public call that would replace it. The contract tests check
each function on the oldest and on the newest torch.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megapg.errors import UnsupportedVersionError

# Options of one communicator: torch's for NCCL, or hints for torchcomms.
Options: TypeAlias = "dist.ProcessGroupNCCL.Options | Mapping[str, str]"

OLDEST = (2, 6)
"""The oldest supported torch."""

_TWO_NUMBERS = re.compile(r"(\d+)\.(\d+)")

# Public: none; torch names the class of its backends for C++ extensions only.
CommunicatorBackend: TypeAlias = dist._Backend
"""The backend of a group on one kind of device: torch's NCCL, its gloo."""


def check_version() -> None:
    """Raise unless this torch can create the requested groups.

    Raises:
        UnsupportedVersionError: torch is too old, or torchcomms is requested and not installed.
    """
    if _torchcomms_wanted() and not _torchcomms_there():
        raise UnsupportedVersionError(
            "TORCH_DISTRIBUTED_USE_TORCHCOMMS asks for torchcomms, which this torch can't import "
            "(the package index has but an empty one), and torch would silently go on without. "
            "Install it, or unset the variable; whatever it holds but 0 means yes to torch."
        )
    if version() < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedVersionError(
            f"torch {torch.__version__} is installed, and megapg needs {oldest} or newer to make "
            f"process groups: pip install 'torch>={oldest}', or a container that has one."
        )


def version() -> tuple[float, ...]:
    """Return the version of this torch; infinity if it is unknown.

    Public: ``torch.__version__``, as text.
    """
    found = _TWO_NUMBERS.match(torch.__version__)
    return tuple(map(int, found.groups())) if found is not None else (math.inf,)


# -- groups ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NewGroup:
    """A group to create.

    Attributes:
        ranks: its global ranks, in order.
        backend: as torch names it.
        name: its name in torch's registry.
        description: its purpose, for logs.
        timeout: the timeout of its collectives.
        options: the options of its communicator.
    """

    ranks: Sequence[int]
    backend: str
    name: str
    description: str
    timeout: timedelta
    options: Options | None = None

    @property
    def places(self) -> dict[int, int]:
        """Global rank -> rank in the group."""
        return {rank: place for place, rank in enumerate(self.ranks)}


def new_group(wanted: NewGroup, rank: int, store: dist.Store) -> dist.ProcessGroup:
    """Create a group under the given name. Only its members call this.

    Public: ``dist.new_group(use_local_synchronization=True)``, once the caller may name the group.
    """
    return _create(wanted, wanted.ranks.index(rank), list(wanted.ranks), store)


def new_group_apart(wanted: NewGroup, rank: int, store: dist.Store) -> dist.ProcessGroup:
    """Create a group whose ranks are not WORLD's, as SGLang's ``init_custom_process_group`` does.

    WORLD need not exist. torch takes the ranks of the group for global ranks, so ``src=`` and
    ``dst=`` are ranks in the group. Only the members call this, and all of them pass the same name:
    it is part of the keys in the store.

    Args:
        wanted: the group. Its ranks count from 0.
        rank: the rank of this process in the group.
        store: shared by the members.

    Public: none.
    """
    with _world_unbound():
        return _create(wanted, rank, [], store)


def _create(
    wanted: NewGroup, place: int, global_ranks: list[int], store: dist.Store
) -> dist.ProcessGroup:
    """Create a group, in which this process has the rank ``place``.

    Public: none.
    """
    made = c10d._new_process_group_helper(
        len(wanted.ranks),
        place,
        global_ranks,
        dist.Backend(wanted.backend),
        store,
        as_name(wanted.name),
        backend_options=wanted.options,
        timeout=wanted.timeout,
        group_desc=wanted.description,
    )
    group = cast("dist.ProcessGroup", made[0])
    c10d._world.pg_group_ranks[group] = wanted.places
    part_in_peace(group)
    return group


def key_in_gloo(name: str, rank: int) -> str:
    """Return the key under which a rank of :func:`new_group_apart` on gloo writes its address.

    It is a key of the store that the members share.

    Public: none.
    """
    return f"{name}//cpu//0/{rank}"


@contextlib.contextmanager
def _world_unbound() -> Iterator[None]:
    """Context in which WORLD has no device, so that torch splits no communicator from it.

    Public: none.
    """
    world = dist.group.WORLD
    device = None if world is None else world.bound_device_id
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def part_in_peace(group: dist.ProcessGroup) -> None:
    """Have a gloo group's threads end after Python has released the group, wherever that happens.

    A gloo backend waits for its threads when it is destroyed. If one of these threads drops the
    last reference (through a tensor whose graph knows the group, or a callback), it waits for
    itself: it hangs or ends the process. Before torch 2.8, Python also destroys a group with the
    GIL held, which threads need to drop a tensor. The finalizer keeps the backends a little longer,
    and drops them without the GIL in one of Python's threads.

    Public: none.
    """
    if gloo := [backend_on(group, device) for device in _devices_with(group, "gloo")]:
        weakref.finalize(group, _let_go, gloo).atexit = False


def _let_go(backends: list[CommunicatorBackend]) -> None:
    """Drop backends in a Python thread. If this thread is none, start a new one.

    Public: none.
    """
    if threading.get_ident() not in {each.ident for each in threading.enumerate()}:
        _thread.start_new_thread(backends.clear, ())


def can_split() -> bool:
    """True if one call of every rank splits a family of groups from WORLD, under given names.

    Public: ``dist.split_group``, once the caller may name the group. It names a group by a count of
    this process's groups, so ranks in different families name it differently.
    """
    made = getattr(dist.ProcessGroup, "split_group", None)
    return made is not None and "device_types" in (made.__doc__ or "")


def splits_in_order() -> bool:
    """True if groups of :func:`split_world` keep the given order; torch before 2.14 sorts ranks.

    Public: none.
    """
    return can_split() and not on_torchcomms() and version() >= (2, 14)


def libuv_takes_a_socket() -> bool:
    """Return True if a TCPStore on libuv can listen on a socket that is bound already.

    Public: ``TCPStore(master_listen_fd=..., use_libuv=...)``.
    """
    return version() >= (2, 8)


def split_world(wanted: NewGroup, rank: int) -> dist.ProcessGroup | None:
    """Split a group from WORLD's communicator. Every rank of WORLD calls it at the same time.

    Args:
        wanted: this rank's group of a family. If this rank is in none, any other of them.
        rank: this rank.

    Returns:
        The group; None if this rank is in none.

    Public: see :func:`can_split`.
    """
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    devices = _devices_with(world, wanted.backend)
    if on_torchcomms() and rank not in wanted.ranks:  # its split takes members only
        for device in devices:
            _torchcomm(world, device).split([], wanted.name)
        return None
    options = wanted.options
    if isinstance(options, Mapping):
        return _split_with_hints(wanted, rank, devices, options)
    if options is None and "nccl" in wanted.backend and not on_torchcomms():
        options = dist.ProcessGroupNCCL.Options()  # otherwise torch takes WORLD's
    group: dist.ProcessGroup | None = world.split_group(
        list(wanted.ranks),
        timeout=wanted.timeout,
        opts=options,
        group_name=as_name(wanted.name),
        group_desc=wanted.description,
        device_types=devices,
    )
    if rank not in wanted.ranks or group is None:
        return None
    for device in devices:
        if on_torchcomms():
            c10d._world.comms.append(_torchcomm(group, device))
        elif version() < (2, 14):  # since 2.14 they begin at 0
            backend_on(group, device)._set_sequence_number_for_group()
    _register(group, wanted)
    return group


def _split_with_hints(
    wanted: NewGroup, rank: int, devices: Sequence[torch.device], hints: Mapping[str, str]
) -> dist.ProcessGroup:
    """Do the work of :func:`split_world` on torchcomms. torch passes no hints to a split.

    Public: none.
    """
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    store = dist.PrefixStore(wanted.name, world.get_group_store())
    group = dist.ProcessGroup(store, wanted.ranks.index(rank), len(wanted.ranks))
    kinds = dict(part.split(":") for part in dist.get_backend_config(world).split(","))
    for device in devices:
        made = _torchcomm(world, device).split(
            list(wanted.ranks), wanted.name, hints=dict(hints), timeout=wanted.timeout
        )
        kind = dist.Backend.backend_type_map[kinds[device.type]]
        group._set_default_backend(kind)
        group._register_backend(device, kind, cast("Any", c10d)._BackendWrapper(made))
        c10d._world.comms.append(made)
    group._set_group_name(as_name(wanted.name))
    describe(group, wanted.description)
    _register(group, wanted)
    return group


def _register(group: dist.ProcessGroup, wanted: NewGroup) -> None:
    """Register in torch a group that was split from WORLD.

    Public: none.
    """
    group.bound_device_id = cast("dist.ProcessGroup", dist.group.WORLD).bound_device_id
    c10d._register_pg_in_world(
        group,
        backend_name=dist.Backend(wanted.backend),
        store=group.get_group_store(),
        group_name=as_name(wanted.name),
        backend_config=str(c10d.BackendConfig(dist.Backend(wanted.backend))),
        rank_mapping=wanted.places,
    )
    part_in_peace(group)


def _torchcomm(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the torchcomms communicator of a group.

    Public: none.
    """
    return cast("Any", backend_on(group, device)).get_comm()


def _devices_with(group: dist.ProcessGroup, backend: str) -> list[torch.device]:
    """Return the devices for which a group has a backend of these names, such as ``"nccl"``.

    If devices share a backend, return one of them: torch would split the backend once per device,
    twice under one name.

    Public: ``dist.split_group`` with ``backend=``.
    """
    named = {part.rpartition(":")[2] for part in backend.split(",")}
    kinds = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    devices = [each for each in devices_of(group) if kinds.get(each.type) in named]
    return list({backend_on(group, each): each for each in devices}.values())


def on_torchcomms() -> bool:
    """True if torch creates its communicators with torchcomms.

    Public: none.
    """
    return _torchcomms_wanted() and _torchcomms_there()


def _torchcomms_wanted() -> bool:
    """True if the user requests torchcomms. torch takes any value but 0 for yes, even ``False``.

    Public: ``torch.distributed.config.use_torchcomms``, which older releases lack.
    """
    return bool(getattr(getattr(dist, "config", None), "use_torchcomms", False))


def _torchcomms_there() -> bool:
    """True if torch could import torchcomms.

    Public: none.
    """
    return bool(vars(c10d).get("_TORCHCOMM_AVAILABLE"))


def as_name(name: str) -> c10d.GroupName:
    """Convert a name to torch's type for names. At run time this is a string.

    Public: none.
    """
    return cast("Callable[[str], c10d.GroupName]", getattr(c10d, "GroupName", str))(name)


def describe(group: dist.ProcessGroup, description: str) -> None:
    """Set the description of a group for logs and flight recorders.

    Public: ``dist.new_group(group_desc=...)``, which sets it at creation.
    """
    group._set_group_desc(description)


def known_groups() -> list[dist.ProcessGroup]:
    """Return the groups that torch knows in this process, with WORLD, in order of creation.

    Public: none.
    """
    return list(c10d._world.pg_map)


def knows(group: dist.ProcessGroup) -> bool:
    """True if torch still knows the group. A destroyed gloo group answers other calls as before.

    Public: ``dist.get_process_group_ranks``, which raises; its cost grows with the group.
    """
    return group in c10d._world.pg_map


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group.

    Public: ``dist.destroy_process_group``, which leaves empty lists under the tags of the group.
    """
    part_in_peace(group)
    with _tag_removed(group):
        dist.destroy_process_group(group)


def abort(group: dist.ProcessGroup) -> None:
    """Have torch forget a group without waiting for running work; for WORLD, all groups.

    Before 2.7 torch can't abort gloo groups, and still knows the group.

    Public: ``ProcessGroup.abort()`` and then ``dist.destroy_process_group``.
    """
    part_in_peace(group)
    if hasattr(group, "abort") or "nccl" in dist.get_backend_config(group):
        with _tag_removed(group):
            c10d._abort_process_group(group)


@contextlib.contextmanager
def _tag_removed(group: dist.ProcessGroup) -> Iterator[None]:
    tag = c10d._world.pg_to_tag.get(group, "")
    yield
    for each in (tag, ""):  # torch lists each group under both
        if not c10d._world.tags_to_pg.get(each):
            c10d._world.tags_to_pg.pop(each, None)


def call_off(group: dist.ProcessGroup) -> None:
    """Abort the running work of a group, from any thread. torch still knows the group.

    gloo's running work goes on until it times out.

    Public: ``ProcessGroup.abort()``, which 2.6 does not have.
    """
    getattr(group, "abort", lambda: vars(c10d)["_abort_backend"](group))()


def tables() -> list[object]:
    """Return the containers in which torch registers groups.

    Public: none.
    """
    return [*vars(c10d).values(), *vars(c10d._world).values()]


@contextlib.contextmanager
def asked_before_collectives(check: Callable[[object], None]) -> Iterator[None]:
    """Call ``check`` with the group before each collective in the block. It may raise.

    Public: none.
    """
    ask = c10d._rank_not_in_group  # every collective of torch calls this first

    def check_and_ask(group: dist.ProcessGroup | None) -> bool:
        check(group)
        return ask(group)

    c10d._rank_not_in_group = check_and_ask
    try:
        yield
    finally:
        c10d._rank_not_in_group = ask


def register_fake_backend() -> None:
    """Register torch's fake backend, with which one process plays a rank of many.

    Public: none.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (for what it registers)


# -- backends --------------------------------------------------------------------------------------


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the kinds of devices for which the group has a backend.

    Public: ``dist.get_backend_config``, as text.
    """
    return list(group._device_types)


def backend_on(group: dist.ProcessGroup, device: torch.device) -> CommunicatorBackend:
    """Return the backend of a group for a device.

    Public: ``ProcessGroup.get_backend``, since 2.15.
    """
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return the current timeout of collectives on the group; None if no backend reports it.

    Public: none; ``dist.get_pg_timeout`` returns the timeout at creation.
    """
    every = [getattr(backend_on(group, each), "options", None) for each in devices_of(group)]
    timeouts = [each for options in every if (each := getattr(options, "_timeout", None))]
    return max(timeouts, default=None)


def default_timeout(backend: str) -> timedelta:
    """Return the default timeout of collectives on a backend.

    Public: ``dist.default_pg_timeout``, which is not NCCL's.
    """
    return c10d._get_default_timeout(dist.Backend(backend))


def never_connected(backend: object) -> bool:
    """True if an NCCL backend has no communicator yet; False if it does not report this.

    Public: none.
    """
    initialized = getattr(backend, "_is_initialized", None)
    return initialized is not None and not initialized()


def can_suspend() -> bool:
    """True if torch can suspend a communicator, which it can since 2.13.

    Public: none.
    """
    return hasattr(dist._Backend, "suspend")


def gloo_can_be_lazy() -> bool:
    """True if ``TORCH_GLOO_LAZY_INIT`` makes gloo connect ranks when they first communicate.

    Public: none; 2.6 does not know the variable.
    """
    return "lazy_init" in (dist.ProcessGroupGloo.create_device.__doc__ or "")


# -- attributes and classes of torch's objects -----------------------------------------------------

NOT_COMPILED = {
    "_torchdynamo_disable": True,
    "_torchdynamo_disable_msg": "megapg reports this read of Megatron's globals; "
    'megapg.guard("off") lets it be compiled',
}
"""Attributes of a function that tell ``torch.compile`` to call it and not to compile it.

Public: ``torch.compiler.disable``, which wraps the function. Other modules already refer to it.
"""

SUBMODULES = "_modules"
"""The attribute in which a module keeps its submodules.

Public: ``torch.nn.Module.named_children``, which runs the module's own code.
"""

HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes in which a tensor keeps its hooks for backward.

Public: none.
"""

FSDP_MIXES_IN = "torch.distributed.fsdp._fully_shard._fsdp_init."
"""The module of the classes that FSDP2 mixes into modules' classes.

Public: none.
"""

FSDP_ASKS = "torch.distributed.fsdp._fully_shard._fsdp_common."
"""The module of FSDP2's classes that get their groups from a mesh at each use.

Public: none.
"""

BACKWARD = ("torch.autograd", "_engine_run_backward")
"""Module and name of the function that runs every backward pass.

Public: none.
"""


# -- stores ----------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    """Return the store of WORLD.

    Public: ``ProcessGroup.get_group_store``, in some releases since 2.13.
    """
    return c10d._get_default_store()


def lists_keys(store: dist.Store) -> bool:
    """True if the store has ``list_keys``, which is public.

    Public: ``list_keys``, once every supported release has it.
    """
    return hasattr(store, "list_keys")


def another_connection(store: dist.Store) -> dist.Store:
    """Open another connection to a store. Older releases can't: they return the same store.

    Public: ``Store.clone``.
    """
    clone: Callable[[], dist.Store] | None = getattr(store, "clone", None)
    return store if clone is None else clone()


# A warning of torch's store, with its C++ stack and the empty line after it.
_STORE_WARNINGS = re.compile(
    rb"^.*\[[WE]\d.*TCPStore\.cpp.*\n(?:(?:Exception raised from|frame #|<omitting).*\n)*\n?", re.M
)


@contextlib.contextmanager
def without_store_warnings() -> Iterator[None]:
    """Context in which torch does not print that calls of a TCPStore fail, with C++ stacks.

    All other text that this process writes to its standard error is printed after the block.

    Public: ``TORCH_CPP_LOG_LEVEL``, which torch reads once, when it is imported.
    """
    with contextlib.ExitStack() as undo:
        try:
            sys.stderr.flush()
            before = os.dup(2)
            undo.callback(os.close, before)
            said = undo.enter_context(tempfile.TemporaryFile())
        except (AttributeError, OSError, ValueError):  # there is no standard error
            yield
            return
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            said.seek(0)
            with open(2, "wb", closefd=False) as real:
                real.write(_STORE_WARNINGS.sub(b"", said.read()))


# -- checkpoints -----------------------------------------------------------------------------------


def transforms_of(place: StorageInfo) -> Sequence[str]:
    """Return how the bytes of an entry were transformed on disk, for example compressed.

    Public: none; releases before 2.7 have no transforms.
    """
    found: Sequence[str] | None = getattr(place, "transform_descriptors", None)
    return found or ()


if TYPE_CHECKING:
    from torch.distributed.checkpoint import filesystem

    StorageInfo: TypeAlias = filesystem._StorageInfo
else:

    def __getattr__(name: str) -> object:
        """``StorageInfo``: where in a checkpoint's files an entry is. Importing it takes a second.

        Public: none, though every file of metadata names the class.
        """
        if name != "StorageInfo":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        return _StorageInfo
