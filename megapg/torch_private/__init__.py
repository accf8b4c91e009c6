"""What megapg takes from torch without a promise: names that are private, and what older releases
that are supported lack: of groups, backends and stores here, of meshes in :mod:`meshes`. No other
module does either.

Each function says which public call would take its place. The contract tests hold each of them to
what it says here, on the oldest and on the newest torch.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megapg.errors import UnsupportedVersionError

# What one communicator is asked for: of torch's NCCL, or hints for torchcomms.
Options: TypeAlias = "dist.ProcessGroupNCCL.Options | Mapping[str, str]"

OLDEST = (2, 6)
"""The first torch on which sessions open."""

_TWO_NUMBERS = re.compile(r"(\d+)\.(\d+)")

# Public: none; torch names the class of its backends for C++ extensions only.
CommunicatorBackend: TypeAlias = dist._Backend
"""What stands behind a group on one kind of device: torch's NCCL, its gloo."""


def check_version() -> None:
    """Raise unless this torch is one on which groups can be made as they were asked for.

    Raises:
        UnsupportedVersionError: it is too old, or torchcomms was asked for and is not there.
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
    """Of this torch, as far as it tells; else that of none yet.

    Public: ``torch.__version__``, as text.
    """
    found = _TWO_NUMBERS.match(torch.__version__)
    return tuple(map(int, found.groups())) if found is not None else (math.inf,)


# -- groups ----------------------------------------------------------------------------------------


def new_group(
    ranks: Sequence[int],
    rank: int,
    *,
    backend: str,
    store: dist.Store,
    name: str,
    description: str,
    timeout: timedelta,
    options: Options | None,
) -> dist.ProcessGroup:
    """Make a group by its members alone, under a name of its own.

    Public: ``dist.new_group(use_local_synchronization=True)``, once the caller may name the group.
    """
    made = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        list(ranks),
        dist.Backend(backend),
        store,
        as_name(name),
        backend_options=options,
        timeout=timeout,
        group_desc=description,
    )
    group = cast("dist.ProcessGroup", made[0])
    c10d._world.pg_group_ranks[group] = {each: index for index, each in enumerate(ranks)}
    part_in_peace(group)
    return group


def part_in_peace(group: dist.ProcessGroup) -> None:
    """Have a gloo group's threads end once Python has let go of the group, wherever that is.

    A gloo backend that goes waits for its threads. One of those may be the last to drop the group:
    with a tensor whose graph knows it, or with a callback. It waits for itself then, forever, or
    ends the process. And before torch 2.8 Python drops a group with its lock held, which threads
    wait for where they drop a tensor. What Python has by itself goes later, without the lock, and
    in a thread of Python's.

    Public: none.
    """
    if gloo := [backend_on(group, device) for device in _devices_with(group, "gloo")]:
        weakref.finalize(group, _let_go, gloo).atexit = False


def _let_go(backends: list[CommunicatorBackend]) -> None:
    """Drop these in a thread of Python's: where this is none, in a new one.

    Public: none.
    """
    if threading.get_ident() not in {each.ident for each in threading.enumerate()}:
        _thread.start_new_thread(backends.clear, ())


def can_split() -> bool:
    """Whether one call of every rank splits a family of groups from WORLD, under names of ours.

    Public: ``dist.split_group``, once the caller may name the group: it counts the groups of this
    process to name one, so that ranks which are in different families name it differently.
    """
    made = getattr(dist.ProcessGroup, "split_group", None)
    return made is not None and "device_types" in (made.__doc__ or "")


def splits_in_order() -> bool:
    """Whether the groups of :func:`split_world` have their ranks in the order given; torch before
    2.14 sorts them, and of torchcomms nothing is promised.

    Public: none that asks.
    """
    return can_split() and not on_torchcomms() and version() >= (2, 14)


def split_world(
    ranks: Sequence[int],
    rank: int,
    *,
    backend: str,
    name: str,
    description: str,
    timeout: timedelta,
    options: Options | None,
) -> dist.ProcessGroup | None:
    """Split a group from WORLD's own communicator. Every rank of WORLD calls it, at the same time.

    Args:
        ranks: of the group that this rank is in; where it is in none, of any that others make.

    Returns:
        The group; None where this rank is in none.

    Public: as of :func:`can_split`.
    """
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    devices = _devices_with(world, backend)
    if on_torchcomms() and rank not in ranks:  # its split takes nobody who is not a member
        for device in devices:
            _torchcomm(world, device).split([], name)
        return None
    if isinstance(options, Mapping):
        return _split_with_hints(
            ranks,
            rank,
            devices,
            backend=backend,
            name=name,
            description=description,
            timeout=timeout,
            hints=options,
        )
    if options is None and "nccl" in backend and not on_torchcomms():
        options = dist.ProcessGroupNCCL.Options()  # not WORLD's
    group: dist.ProcessGroup | None = world.split_group(
        list(ranks),
        timeout=timeout,
        opts=options,
        group_name=as_name(name),
        group_desc=description,
        device_types=devices,
    )
    if rank not in ranks or group is None:
        return None
    for device in devices:
        if on_torchcomms():
            c10d._world.comms.append(_torchcomm(group, device))
        elif version() < (2, 14):  # from then on they begin at 0 by themselves
            backend_on(group, device)._set_sequence_number_for_group()
    _register(group, ranks, backend=backend, name=name)
    return group


def _split_with_hints(
    ranks: Sequence[int],
    rank: int,
    devices: Sequence[torch.device],
    *,
    backend: str,
    name: str,
    description: str,
    timeout: timedelta,
    hints: Mapping[str, str],
) -> dist.ProcessGroup:
    """As :func:`split_world` on torchcomms, whose hints torch does not pass on to a split.

    Public: none.
    """
    world = cast("dist.ProcessGroup", dist.group.WORLD)
    store = dist.PrefixStore(name, world.get_group_store())
    group = dist.ProcessGroup(store, ranks.index(rank), len(ranks))
    kinds = dict(part.split(":") for part in dist.get_backend_config(world).split(","))
    for device in devices:
        made = _torchcomm(world, device).split(
            list(ranks), name, hints=dict(hints), timeout=timeout
        )
        kind = dist.Backend.backend_type_map[kinds[device.type]]
        group._set_default_backend(kind)
        group._register_backend(device, kind, cast("Any", c10d)._BackendWrapper(made))
        c10d._world.comms.append(made)
    group._set_group_name(as_name(name))
    describe(group, description)
    _register(group, ranks, backend=backend, name=name)
    return group


def _register(group: dist.ProcessGroup, ranks: Sequence[int], *, backend: str, name: str) -> None:
    """Have torch know a group that was split from WORLD.

    Public: none.
    """
    group.bound_device_id = cast("dist.ProcessGroup", dist.group.WORLD).bound_device_id
    c10d._register_pg_in_world(
        group,
        backend_name=dist.Backend(backend),
        store=group.get_group_store(),
        group_name=as_name(name),
        backend_config=str(c10d.BackendConfig(dist.Backend(backend))),
        rank_mapping={each: index for index, each in enumerate(ranks)},
    )
    part_in_peace(group)


def _torchcomm(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The communicator behind a group on torchcomms.

    Public: none.
    """
    return cast("Any", backend_on(group, device)).get_comm()


def _devices_with(group: dist.ProcessGroup, backend: str) -> list[torch.device]:
    """The devices on which a group has what a backend string names, such as ``"nccl"``; one of
    those that share it: torch would split it once for each, twice under one name.

    Public: ``dist.split_group`` with ``backend=``.
    """
    named = {part.rpartition(":")[2] for part in backend.split(",")}
    kinds = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    devices = [each for each in devices_of(group) if kinds.get(each.type) in named]
    return list({backend_on(group, each): each for each in devices}.values())


def on_torchcomms() -> bool:
    """Whether torch makes its communicators with torchcomms.

    Public: none that asks.
    """
    return _torchcomms_wanted() and _torchcomms_there()


def _torchcomms_wanted() -> bool:
    """As torch reads its variable: whatever it holds but 0 means yes, ``False`` included.

    Public: ``torch.distributed.config.use_torchcomms``, which older releases lack.
    """
    return bool(getattr(getattr(dist, "config", None), "use_torchcomms", False))


def _torchcomms_there() -> bool:
    """Whether torch could import it.

    Public: none.
    """
    return bool(vars(c10d).get("_TORCHCOMM_AVAILABLE"))


def as_name(name: str) -> c10d.GroupName:
    """A name as torch's functions take it: of a type of its own in newer releases, which a checker
    alone tells from a string.

    Public: none.
    """
    return cast("Callable[[str], c10d.GroupName]", getattr(c10d, "GroupName", str))(name)


def describe(group: dist.ProcessGroup, description: str) -> None:
    """Say for logs and flight recorders what a group is for.

    Public: ``dist.new_group(group_desc=...)``, which says it as it makes the group.
    """
    group._set_group_desc(description)


def known_groups() -> list[dist.ProcessGroup]:
    """The groups that torch knows in this process, WORLD among them, as they were made.

    Public: none.
    """
    return list(c10d._world.pg_map)


def knows(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group; a destroyed gloo group would answer as if it did.

    Public: ``dist.get_process_group_ranks``, which raises; its cost grows with the group.
    """
    return group in c10d._world.pg_map


def destroy(group: dist.ProcessGroup) -> None:
    """Destroy a group.

    Public: ``dist.destroy_process_group``, which leaves an empty list under the tag of the group.
    """
    part_in_peace(group)
    with _tag_removed(group):
        dist.destroy_process_group(group)


def abort(group: dist.ProcessGroup) -> None:
    """Have torch forget a group without a wait for work under way; of WORLD, all groups.

    Before 2.7 torch can't for gloo, and goes on knowing the group.

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
    if not c10d._world.tags_to_pg.get(tag):
        c10d._world.tags_to_pg.pop(tag, None)


def call_off(group: dist.ProcessGroup) -> None:
    """Fail the work under way on a group, from any thread; torch goes on knowing it.

    What is under way on gloo goes on until it times out all the same.

    Public: ``ProcessGroup.abort()``, which 2.6 does not have.
    """
    getattr(group, "abort", lambda: vars(c10d)["_abort_backend"](group))()


def tables() -> list[object]:
    """The containers in which torch registers groups.

    Public: none.
    """
    return [*vars(c10d).values(), *vars(c10d._world).values()]


@contextlib.contextmanager
def asked_before_collectives(check: Callable[[object], None]) -> Iterator[None]:
    """While the block runs, ``check`` hears of the group of each collective, and may raise.

    Public: none.
    """
    ask = c10d._rank_not_in_group  # every collective of torch asks this one question first

    def check_and_ask(group: dist.ProcessGroup | None) -> bool:
        check(group)
        return ask(group)

    c10d._rank_not_in_group = check_and_ask
    try:
        yield
    finally:
        c10d._rank_not_in_group = ask


def register_fake_backend() -> None:
    """Make torch's fake backend known, which has one process play a rank of many.

    Public: none.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (for what it registers)


# -- backends --------------------------------------------------------------------------------------


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """The kinds of devices that the group has a backend for.

    Public: ``dist.get_backend_config``, as text.
    """
    return list(group._device_types)


def backend_on(group: dist.ProcessGroup, device: torch.device) -> CommunicatorBackend:
    """The backend of a group for a device.

    Public: ``ProcessGroup.get_backend``, since 2.15.
    """
    return group._get_backend(device)


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """What collectives on the group wait at present; None where no backend of it tells.

    Public: none that asks; ``dist.get_pg_timeout`` has what was given.
    """
    every = [getattr(backend_on(group, each), "options", None) for each in devices_of(group)]
    timeouts = [each for options in every if (each := getattr(options, "_timeout", None))]
    return max(timeouts, default=None)


def default_timeout(backend: str) -> timedelta:
    """What collectives wait where nobody has said.

    Public: ``dist.default_pg_timeout``, which is not NCCL's.
    """
    return c10d._get_default_timeout(dist.Backend(backend))


def never_connected(backend: object) -> bool:
    """Whether an NCCL backend has no communicator yet; False where it does not tell.

    Public: none.
    """
    initialized = getattr(backend, "_is_initialized", None)
    return initialized is not None and not initialized()


def can_suspend() -> bool:
    """Whether torch can have a communicator give its memory back, which 2.13 began.

    Public: none that asks.
    """
    return hasattr(dist._Backend, "suspend")


def gloo_can_be_lazy() -> bool:
    """Whether ``TORCH_GLOO_LAZY_INIT`` has gloo connect each pair of ranks when they first talk.

    Public: none that asks; 2.6 does not know the variable.
    """
    return "lazy_init" in (dist.ProcessGroupGloo.create_device.__doc__ or "")


# -- what others' objects hold ---------------------------------------------------------------------

NOT_COMPILED = {
    "_torchdynamo_disable": True,
    "_torchdynamo_disable_msg": "megapg reports this read of Megatron's globals; "
    'megapg.guard("off") lets it be compiled',
}
"""Attributes of a function that ``torch.compile`` calls and does not compile.

Public: ``torch.compiler.disable``, which wraps the function. Other modules have bound it already.
"""

SUBMODULES = "_modules"
"""The attribute in which a module keeps its submodules.

Public: ``torch.nn.Module.named_children``, which runs the module's own code.
"""

HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes in which a tensor keeps what backward calls.

Public: none.
"""

FSDP_MIXES_IN = "torch.distributed.fsdp._fully_shard._fsdp_init."
"""Where the classes live that FSDP2 mixes into those of modules.

Public: none.
"""

FSDP_ASKS = "torch.distributed.fsdp._fully_shard._fsdp_common."
"""Where the classes of FSDP2 live that ask a mesh for its groups each time.

Public: none.
"""

BACKWARD = ("torch.autograd", "_engine_run_backward")
"""Module and function in which every backward pass runs.

Public: none.
"""


# -- stores ----------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    """The store behind WORLD.

    Public: ``ProcessGroup.get_group_store``, in some releases since 2.13.
    """
    return c10d._get_default_store()


def lists_keys(store: dist.Store) -> bool:
    """Whether the store has ``list_keys``, which is public.

    Public: the same, once it is there in every release that is supported.
    """
    return hasattr(store, "list_keys")


def another_connection(store: dist.Store) -> dist.Store:
    """One more connection to a store; the same where torch can't, which older releases can't.

    Public: ``Store.clone``.
    """
    clone: Callable[[], dist.Store] | None = getattr(store, "clone", None)
    return store if clone is None else clone()


# -- checkpoints -----------------------------------------------------------------------------------


def transforms_of(place: StorageInfo) -> Sequence[str]:
    """How the bytes of an entry were changed on their way to disk, compressed for example.

    Public: none; releases before 2.7 change none.
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
