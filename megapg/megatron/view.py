"""Megatron's globals in the form of a collection: what :func:`~megapg.megatron.resolve` falls back
to.

Nothing is read before it is asked for. Code on the way to injection calls ``resolve`` at the top
of a function, where the globals may be initialised in part, later, or not be needed on the path
that this call takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch.distributed as dist

from megapg.collection import (
    OPTIONAL_FIELDS,
    Lease,
    Membership,
    ProcessGroup,
    ProcessGroupCollection,
    membership,
)
from megapg.errors import MissingGlobalGroupError, MissingGroupError, UnknownFieldError
from megapg.layout import FIELDS
from megapg.megatron import hook
from megapg.megatron.core import globals_of_core
from megapg.megatron.tables import GLOO_GLOBALS, GROUP_GLOBALS, HYBRID_GROUPS

# field -> the global that it is read from: the first of those that hold it.
_GLOBALS: Mapping[str, str] = {field: name for name, field in reversed([*GROUP_GLOBALS.items()])}
_GLOO_GLOBALS: Mapping[str, str] = {name: variable for variable, name in GLOO_GLOBALS.items()}

# field -> the globals that, where set, answer for this rank's index and for the size: what
# set_tensor_model_parallel_rank() and the like leave behind. Offline tools set them without groups.
_DATA = ("_MPU_DATA_PARALLEL_RANK", "_MPU_DATA_PARALLEL_WORLD_SIZE")
_OVERRIDES: Mapping[str, tuple[str, str]] = {
    "tp": ("_MPU_TENSOR_MODEL_PARALLEL_RANK", "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE"),
    "pp": ("_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"),
    "ep": ("_MPU_EXPERT_MODEL_PARALLEL_RANK", "_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE"),
    "expt_tp": ("_MPU_EXPERT_TENSOR_PARALLEL_RANK", "_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE"),
    **dict.fromkeys(("dp", "dp_cp", "dp_cp_ag", "dp_cp_gtp_remat", "intra_dp_cp"), _DATA),
}

# Any of these set means that somebody initialised parallel_state, if only in part. They are what
# destroy_model_parallel() resets for certain: it forgets a good many of the others.
_SIGNS = (
    *(_GLOBALS[field] for field in ("tp", "pp", "dp")),
    *_OVERRIDES["tp"],
    *_OVERRIDES["pp"],
)

# field or extra -> the getter that would have read it, for messages. Fields that may be None are
# never missing.
_GETTERS: Mapping[str, str] = {
    "tp": "get_tensor_model_parallel_group()",
    "pp": "get_pipeline_model_parallel_group()",
    "mp": "get_model_parallel_group()",
    "cp": "get_context_parallel_group()",
    "tp_cp": "get_tensor_and_context_parallel_group()",
    "ep": "get_expert_model_parallel_group()",
    "expt_tp": "get_expert_tensor_parallel_group()",
    "tp_ep": "get_expert_tensor_and_model_parallel_group()",
    "tp_ep_pp": "get_expert_tensor_model_pipeline_parallel_group()",
    "tp_ep_pp_with_egtp_remat": (
        "get_expert_tensor_model_pipeline_parallel_group(with_egtp_remat=True)"
    ),
    "tp_dp": "get_tensor_and_data_parallel_group()",
    "tp_dp_cp": "get_tensor_and_data_parallel_group(with_context_parallel=True)",
    "dp": "get_data_parallel_group()",
    "dp_cp": "get_data_parallel_group(with_context_parallel=True)",
    "dp_cp_gtp_remat": "get_data_parallel_group(with_context_parallel=True, with_gtp_remat=True)",
    "expt_dp": "get_expert_data_parallel_group()",
    "expt_dp_gtp_remat": "get_expert_data_parallel_group(with_gtp_remat=True)",
    "intra_dp_cp": (
        "get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)"
    ),
    "intra_expt_dp": "get_expert_data_parallel_group(partial_expert_data_parallel=True)",
    "intra_dist_opt": "get_intra_distributed_optimizer_instance_group()",
}


class GlobalGroups(ProcessGroupCollection):
    """The groups that ``megatron.core.parallel_state`` holds at the moment they are asked for.

    It takes the place of a collection wherever one goes. Each field reads its one global when it
    is asked for, and never any other; what a rank or size was set to by ``set_*`` of
    ``parallel_state`` comes first, as in Megatron's getters. A field whose global is unset is
    absent, and reading it raises :class:`~megapg.errors.MissingGlobalGroupError` naming the getter:
    a ``MissingGroupError`` that is an ``AssertionError`` too, as is what the getter raises, so that
    ``except AssertionError`` around the one works around the other.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({}, {}, Lease(owner="megatron.core.parallel_state"))

    def _announce(self) -> None:
        """Called before each read by way of this view. There is nothing to say here; a view that
        :func:`~megapg.megatron.groups_of` gave says only now that the globals serve.
        """

    def read(self, name: str) -> object:
        """What the private global ``name``, which no field holds, has now; None if it is unset."""
        self._announce()
        hook.report(name)
        return globals_of_core().get(name)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> ProcessGroup | tuple[ProcessGroup, ...] | None:
            if name not in FIELDS:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            self._announce()
            if name in _GLOBALS:
                hook.report(_GLOBALS[name])
            found = value_in_globals(name)
            if found is None and name not in OPTIONAL_FIELDS:
                raise MissingGlobalGroupError(self._absent(type(self).__name__, [name]))
            return found

    # vars() is how Megatron-core 0.19 asks what is present. Never what attributes come from: those
    # pass __getattr__, one global each.
    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        self._announce()
        return _held_fields()

    def rank(self, field: str) -> int:
        """This rank's index in the group of ``field``, or what it was set to.

        Of a rank in several pipelines, up to Megatron-core 0.13, its index in each.

        Raises:
            MissingGlobalGroupError: its global is unset; or the index is not the same in each.
        """
        self._announce()
        given = _override(field, 0)
        if given is not None:
            hook.report(_OVERRIDES[field][0])
            return given
        several = several_pipelines() if field == "pp" else None
        if several is None:
            return super().rank(field)
        return _common(field, [group.rank() for group in several])

    def size(self, field: str) -> int:
        """Number of ranks in the group of ``field``, or what it was set to.

        Of a rank in several pipelines, up to Megatron-core 0.13, the size of each.

        Raises:
            MissingGlobalGroupError: its global is unset; or the size is not the same for each.
        """
        self._announce()
        given = _override(field, 1)
        if given is not None:
            hook.report(_OVERRIDES[field][1])
            return given
        several = several_pipelines() if field == "pp" else None
        if several is None:
            return super().size(field)
        return _common(field, [group.size() for group in several])

    def require(self, *fields: str, owner: str = "require()") -> ProcessGroupCollection:
        """The same check as of any collection; what is missing is missing in the globals.

        Raises:
            MissingGlobalGroupError: a field is absent; every absent one is named.
            UnknownFieldError: a name is no field.
            ForeignGroupError: a group was destroyed, or lives in the process that this one was
                forked from.
        """
        try:
            return super().require(*fields, owner=owner)
        except MissingGroupError as error:
            raise MissingGlobalGroupError(str(error)) from None

    def holds(self, fields: Sequence[str]) -> bool:
        """True: each global is looked at when it is read."""
        return True

    @property
    def extras(self) -> Mapping[str, ProcessGroup]:
        """The gloo companions and hybrid groups that ``initialize_model_parallel`` made."""
        self._announce()
        held = globals_of_core()
        found = {name: held.get(variable) for name, variable in _GLOO_GLOBALS.items()}
        hybrid = held.get(HYBRID_GROUPS)
        if isinstance(hybrid, dict):
            found |= {f"hybrid.{size}": group for size, group in hybrid.items()}
        return MappingProxyType(
            {name: group for name, group in found.items() if isinstance(group, dist.ProcessGroup)}
        )

    def __reduce_ex__(self, protocol: object) -> tuple[type[GlobalGroups], tuple[()]]:  # type: ignore[override]
        self._announce()
        return GlobalGroups, ()  # on the other side the globals are those there

    def __repr__(self) -> str:  # of no consequence: debuggers call it
        held = [field for field, value in _held_fields().items() if value is not None]
        return f"<GlobalGroups: {', '.join(held) or 'nothing'} of megatron.core.parallel_state>"

    def _member(self, field: str) -> Membership:
        self._announce()
        name, _, level = field.partition(".")
        hook.report(_GLOBALS.get(name) or _GLOO_GLOBALS.get(field) or HYBRID_GROUPS)
        group = value_in_globals(name) if name in FIELDS else self.extras.get(field)
        if isinstance(group, tuple) and level:
            group = group[int(level)]
        if not isinstance(group, dist.ProcessGroup):
            raise self._no_such(field)
        return membership(field, group)

    def _no_such(self, name: str) -> MissingGroupError | UnknownFieldError:
        arguments = {
            "gloo": "create_gloo_process_groups=True",
            "hybrid": "hybrid_context_parallel=True",
        }
        argument = arguments.get(name.partition(".")[0])
        if argument is None:
            error = super()._no_such(name)
            missing = isinstance(error, MissingGroupError)
            return MissingGlobalGroupError(str(error)) if missing else error
        have = ", ".join(self.extras) or "none"
        return MissingGlobalGroupError(
            f"there is no group {name!r} among the globals (of this kind: {have}). Call "
            f"initialize_model_parallel({argument}) before, or pass pg_collection=session.groups."
        )

    def _absent(self, owner: str, missing: Sequence[str]) -> str:
        getters = ", ".join(_GETTERS[field] for field in missing)
        several = any(isinstance(_held(field), list) for field in missing)
        why = (
            "is in several such groups, which no field can hold" if several else "has no such group"
        )
        return (
            f"{owner}: no {', '.join(missing)} among the globals: this rank {why} in "
            f"megatron.core.parallel_state, where {getters} would look. Call "
            "initialize_model_parallel() before, or pass pg_collection=session.groups."
        )


def initialised() -> bool:
    """Whether somebody has set up ``parallel_state``, be it in part."""
    held = globals_of_core()
    return any(held.get(name) is not None for name in _SIGNS)


def _held(field: str) -> object:
    return globals_of_core().get(_GLOBALS.get(field, ""))


def value_in_globals(field: str) -> ProcessGroup | tuple[ProcessGroup, ...] | None:
    """What the field's global holds now; None also where it holds what no field can. Nobody is
    told of it.
    """
    held = _held(field)
    if field == "hcp" and isinstance(held, list):
        return tuple(held) or None  # 0.12 leaves an empty list where there are no levels
    return held if isinstance(held, dist.ProcessGroup) else None


def several_pipelines() -> Sequence[ProcessGroup] | None:
    """Of a rank in several pipelines, which no field can hold, those. Nobody is told of it."""
    held = _held("pp")
    return held if isinstance(held, list) else None


def _common(field: str, numbers: Sequence[int]) -> int:
    """What all of a rank's pipelines have in common, as Megatron's getters assert."""
    hook.report(_GLOBALS[field])
    if len(set(numbers)) != 1:
        raise MissingGlobalGroupError(
            f"this rank is in {len(numbers)} pipelines that have no number in common: {numbers}. "
            "Megatron-core takes them to be of one size, with this rank at one place in all."
        )
    return numbers[0]


def _held_fields() -> dict[str, object]:
    """The fields that are present in the globals now, and what they hold. Nobody is told of it."""
    found = {field: value_in_globals(field) for field in FIELDS}
    return {f: value for f, value in found.items() if value is not None or f in OPTIONAL_FIELDS}


def _override(field: str, which: int) -> int | None:
    name = _OVERRIDES[field][which] if field in _OVERRIDES else ""
    value = globals_of_core().get(name)
    return value if isinstance(value, int) else None
