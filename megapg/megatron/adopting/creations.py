"""How the groups in ``parallel_state`` were made, as far as this can be found out later.

torch has the ranks, the backends, the timeout and the description of a group, and the options of
NCCL. :func:`record_initialize` adds the arguments of the call. Any other parameter is listed as
unknown, never guessed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import MappingProxyType, ModuleType

import torch.distributed as dist

from megapg import torch_private
from megapg.communicators.backends import backend_for
from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.communicators.needed import Communicator
from megapg.communicators.world import World
from megapg.errors import UnsupportedOptionError
from megapg.megatron.adopting.variables import names_of_groups
from megapg.megatron.core import parallel_state_module

# Set while groups with SHARP are made: initialize_model_parallel(use_sharp=True).
_SHARP = "NCCL_COLLNET_ENABLE"


@dataclass(frozen=True)
class Creation:
    """How one group was made."""

    # Ranks, options and backend of the group. Its fields are the collection's fields and names of
    # extras, else global variables, else its description.
    communicator: Communicator
    timeout: timedelta | None  # of its collectives, at present; None if unknown
    description: str  # torch's description in logs
    # parameters that are unknown, or that a new group could not be given
    unknown: tuple[str, ...] = ()

    @property
    def served(self) -> str:
        """The fields, extras or variables that hold the group."""
        return "+".join(self.communicator.fields)

    def describe(self) -> dict[str, object]:
        """Return plain data for logs and JSON; the timeout in seconds."""
        return {
            "ranks": list(self.communicator.ranks),
            "backend": self.communicator.backend,
            "timeout": self.timeout and self.timeout.total_seconds(),
            "description": self.description,
            "options": self.communicator.options.given(),
            "unknown": list(self.unknown),
        }


@dataclass(frozen=True)
class Call:
    """One call of ``parallel_state.create_group``."""

    arguments: Mapping[str, object]  # by name, with defaults
    # the environment variable NCCL_COLLNET_ENABLE, which enables SHARP, at that time
    collnet: str | None


@dataclass
class Recording:
    """The result of :func:`record_initialize`.

    Attributes:
        arguments: of ``initialize_model_parallel``, by name, with defaults; None if it was called
            by a name that was bound before the block.
        calls: the calls that made the groups, in order; also of groups without this rank.
    """

    arguments: Mapping[str, object] | None = None
    calls: list[Call] = field(default_factory=list)
    _made: weakref.WeakKeyDictionary[dist.ProcessGroup, Call] = field(
        default_factory=weakref.WeakKeyDictionary, repr=False
    )

    def call_for(self, group: dist.ProcessGroup) -> Call | None:
        """Return the call that made ``group``; None if it was made outside of the block."""
        return self._made.get(group)


@contextlib.contextmanager
def record_initialize() -> Iterator[Recording]:
    """Record how groups are made inside the block, for :func:`~megapg.megatron.adopt`. ::

        with record_initialize() as record:
            parallel_state.initialize_model_parallel(2, 2)
        owner = adopt(record)

    Inside the block two functions of ``parallel_state`` are wrapped. ``create_group`` makes every
    group of Megatron-core, whatever name the caller has for ``initialize_model_parallel``. The
    latter is wrapped for its arguments. torch is not changed.
    """
    module = parallel_state_module()
    record = Recording()

    def made(call: Mapping[str, object], result: object) -> None:
        record.calls.append(Call(call, os.environ.get(_SHARP)))
        if isinstance(result, dist.ProcessGroup):
            record._made[result] = record.calls[-1]

    def initialised(call: Mapping[str, object], _: object) -> None:
        record.arguments = call

    with (
        _observed(module, "create_group", made),
        _observed(module, "initialize_model_parallel", initialised),
    ):
        yield record


def creations(
    module: ModuleType, groups: Iterable[dist.ProcessGroup], record: Recording
) -> dict[dist.ProcessGroup, Creation]:
    """Return how each of ``groups`` was made. All members of a group get the same label for it."""
    names = names_of_groups(module)
    found: dict[dist.ProcessGroup, Creation] = {}
    seen: Counter[str] = Counter()
    for group in groups:
        creation = _creation(group, names.get(group, ()), record.call_for(group))
        communicator = creation.communicator
        seen[communicator.label] += 1
        if (number := seen[communicator.label]) > 1:  # its description is not unique
            fields = (f"{communicator.fields[0]} {number}", *communicator.fields[1:])
            creation = replace(creation, communicator=replace(communicator, fields=fields))
        found[group] = creation
    return found


def unknown_of(made: Iterable[Creation]) -> dict[str, tuple[str, ...]]:
    """Return name of a group -> the unknown parameters of its creation."""
    return {known.served: known.unknown for known in made if known.unknown}


def why_not_anew(world: World, made: Collection[Creation], allow_unknown: bool) -> str:
    """Return why the groups can't be recreated; empty if they can."""
    for known in made:
        try:
            row = backend_for(known.communicator.backend)
            row.options(known.served, known.communicator.options)
        except UnsupportedOptionError as error:
            return str(error)
        if world.splits(known.communicator.backend):
            return "WORLD is bound to a device, where groups can only be split from it"
    if allow_unknown or not (unknown := unknown_of(made)):
        return ""
    whose: dict[str, list[str]] = {}
    for name, parameters in unknown.items():
        for parameter in parameters:
            whose.setdefault(parameter, []).append(name)
    lines = [
        f"{parameter} of {', '.join(names[:3])}{' and more' if len(names) > 3 else ''}"
        for parameter, names in whose.items()
    ]
    return (
        f"nobody can tell {'; nor '.join(lines)}. Make the groups inside record_initialize(), "
        "or have the defaults with allow_unknown=True"
    )


def _creation(group: dist.ProcessGroup, names: Iterable[str], call: Call | None) -> Creation:
    timeout = torch_private.timeout_of(group)
    options = CommunicatorOptions()
    unknown: list[str] = []
    config = dist.get_backend_config(group)
    kinds = dict(part.split(":") for part in config.split(","))
    if timeout is None and call is not None:
        given = call.arguments.get("timeout")
        timeout = given if isinstance(given, timedelta) else None
    if timeout is None and set(kinds.values()) != {"fake"}:
        unknown.append("timeout")
    for device in torch_private.devices_of(group):
        match kinds.get(device.type):
            case "gloo" | "fake":
                pass  # they have no options
            case "nccl":
                options, unknowable = _nccl_options(torch_private.backend_on(group, device), call)
                unknown += unknowable
            case _ if call is None or call.arguments.get("pg_options") is not None:
                unknown.append("pg_options")
    communicator = Communicator(
        fields=tuple(names) or (group.group_desc,),
        ranks=tuple(dist.get_process_group_ranks(group)),
        options=options,
        # One backend on every device has a plain name; otherwise the device map matters.
        backend=config if len({*kinds.values()}) > 1 else next(iter(kinds.values())),
    )
    return Creation(communicator, timeout, group.group_desc, tuple(dict.fromkeys(unknown)))


def _nccl_options(
    backend: torch_private.CommunicatorBackend, call: Call | None
) -> tuple[CommunicatorOptions, list[str]]:
    """Return the options of an NCCL communicator, and the names of those that are unknown."""
    unknown = []
    if call is None or call.collnet not in (None, "0"):
        unknown.append(_SHARP)
    if call is None:
        asked: object = getattr(backend, "options", None)
    else:
        asked = call.arguments.get("pg_options")
        if asked is None:
            return CommunicatorOptions(), unknown
    config = getattr(asked, "config", None)
    if config is None:
        return CommunicatorOptions(), [*unknown, "pg_options"]
    usual = getattr(type(asked)(), "config", None)
    given = {
        name: value
        for name in dir(config)
        if not name.startswith("_") and not callable(value := getattr(config, name))
        if value != getattr(usual, name)
    }
    known = {
        name: given.pop(name) for name in CommunicatorOptions.__dataclass_fields__ & given.keys()
    }
    unknown += [f"pg_options.config.{name}" for name in given]
    high = bool(getattr(asked, "is_high_priority_stream", False))
    return CommunicatorOptions(is_high_priority_stream=high, **known), unknown


@contextlib.contextmanager
def _observed(
    module: ModuleType, name: str, tell: Callable[[Mapping[str, object], object], None]
) -> Iterator[None]:
    """Call ``tell`` after every call of the module's function inside the block."""
    function = getattr(module, name)
    signature = inspect.signature(function)

    @functools.wraps(function)
    def observed(*args: object, **kwargs: object) -> object:
        result = function(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        tell(MappingProxyType(dict(call.arguments)), result)
        return result

    setattr(module, name, observed)
    try:
        yield
    finally:
        setattr(module, name, function)
