"""A collection that reads Megatron's globals, the fallback of :func:`~megapg.megatron.resolve`.

A global is read only when its value is accessed. Functions call ``resolve`` at their top, where the
globals may not be fully initialised yet, or may not be needed by this call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from typing_extensions import override

from megapg.collection import (
    OPTIONAL_FIELDS,
    Lease,
    Membership,
    ProcessGroup,
    ProcessGroupCollection,
    membership,
)
from megapg.errors import (
    MissingGlobalGroupError,
    MissingGroupError,
    UnknownFieldError,
    UnsupportedVersionError,
)
from megapg.layout import FIELDS, GroupName
from megapg.megatron.core import (
    globals_of_core,
    modules_at_hand,
    parallel_state_module,
    parameters_of,
)
from megapg.megatron.tables import ALWAYS_SET, GETTERS, HOLDS, HYBRID_GROUPS
from megapg.megatron.watching import hook

_Getter = Callable[..., object]

# If one of these is set, parallel_state is initialised, at least in part. Many other globals do not
# show this, because destroy_model_parallel() does not reset them.
_SIGNS = (
    *ALWAYS_SET,
    *("_MPU_TENSOR_MODEL_PARALLEL_RANK", "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE"),
    *("_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"),
)

_GLOO = tuple(name for name in GETTERS if name.startswith("gloo."))
_ABSENT = object()
_LISTED = ("hcp", "pp")  # Megatron-core itself may hold lists: of levels, of several pipelines


class GlobalGroups(ProcessGroupCollection):
    """The groups that ``megatron.core.parallel_state`` has at the time of each access.

    Accepted wherever a collection is. Each group, rank and size comes from its getter in
    ``parallel_state``. The getter is looked up by name and called at each access, so the result is
    that of a direct call. This includes values from ``set_*``, mocks of a getter, stubs of the
    module, and defaults before initialisation.

    A field is absent if its getter fails with an ``AssertionError``. Reading the field then raises
    :class:`~megapg.errors.MissingGlobalGroupError`, which is both a ``MissingGroupError`` and an
    ``AssertionError``: an ``except AssertionError`` that was written for the getter still works.
    Other errors of a getter are not changed.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({}, {}, Lease(owner="megatron.core.parallel_state"))

    def ask(self, name: str, **arguments: object) -> object:
        """Call the function ``name`` of ``parallel_state`` and return its result.

        Raises:
            MissingGlobalGroupError: it fails with an AssertionError, or there is no such function.
        """
        getter = getter_at_hand(name)
        try:
            if getter is not None:
                return self._call(getter, arguments)
            why = "this Megatron-core has no such function"
        except AssertionError as error:
            why = str(error) or "it failed"
        raise self._missing(
            f"the globals don't answer {name}() of megatron.core.parallel_state: {why}. "
            "Call initialize_model_parallel() before, or pass pg_collection=session.groups."
        )

    def read(self, name: str) -> object:
        """Return the value of a private global that has no getter; None if it is unset."""
        value = held_now(name)
        self._announce(value)
        hook.report(name)
        return value

    def group(self, name: GroupName) -> object:
        """Return the group of a field or an extra; for ``hcp`` a tuple of groups.

        None if the globals have no such group and the field may be None.

        Raises:
            MissingGlobalGroupError: the globals have no such group, or a value that no field can
                hold.
        """
        found = self._held(name, self._call)
        if found is not _ABSENT:
            return found
        if name in FIELDS:
            raise self._missing(self._absent("GlobalGroups", [name]))
        raise self._no_such(name)

    @override
    def rank(self, field: GroupName) -> int:
        """Return this rank's index in the group of ``field``, from ``parallel_state``'s getter.

        Up to Megatron-core 0.13, a rank can be in several pipelines. The result is then its index
        in each of them, and that of :meth:`size` is the size of each. If torch.distributed is not
        initialised, some getters return 0.

        Raises:
            MissingGlobalGroupError: there is no such group.
        """
        return cast(int, self._number(field, "rank"))

    @override
    def size(self, field: GroupName) -> int:
        """Return the number of ranks in the group of ``field``, likewise."""
        return cast(int, self._number(field, "size"))

    @override
    def ranks(self, field: GroupName) -> tuple[int, ...]:
        """Return the global ranks of the group of ``field``, in the group's order, likewise."""
        return tuple(cast(Sequence[int], self._number(field, "ranks")))

    @override
    def holds(self, fields: Sequence[GroupName]) -> bool:
        """Always True: each field is looked up when it is read."""
        return True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name not in FIELDS:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return self.group(name)

    # Megatron-core 0.19 finds present fields with vars(). Attributes do not come from here, but
    # from __getattr__, with one call of a getter each.
    @property
    @override
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        return self._present(FIELDS)

    @property
    @override
    def extras(self) -> Mapping[str, ProcessGroup]:
        """The gloo and hybrid groups that ``initialize_model_parallel`` created."""
        found = {name: self._held(name, _quietly) for name in _GLOO}
        hybrid = held_now(HYBRID_GROUPS)
        if isinstance(hybrid, dict):
            found |= {f"hybrid.{size}": group for size, group in hybrid.items()}
        groups = {n: group for n, group in found.items() if isinstance(group, dist.ProcessGroup)}
        self._announce(groups)
        return MappingProxyType(groups)

    @override
    def __reduce_ex__(self, protocol: object) -> tuple[type[GlobalGroups], tuple[()]]:  # type: ignore[override]
        self._announce()
        return GlobalGroups, ()  # reads the globals of the process that unpickles it

    @override
    def __repr__(self) -> str:  # no errors and no warnings: debuggers call it
        now = self._held_of(FIELDS, _harmlessly) if modules_at_hand() else {}
        held = [field for field, value in now.items() if value is not None]
        return f"<GlobalGroups: {', '.join(held) or 'nothing'} of megatron.core.parallel_state>"

    # -- reads of the globals -----------------------------------------------------------------

    def _announce(self, answer: object = None, getter: _Getter | None = None) -> None:
        """Do nothing. A subclass warns here, because only now the globals are really used.

        Called after each read of the globals, before the reader gets the value.

        Args:
            answer: the value; None if the read failed. After several reads, true if one of them
                found a group.
            getter: the getter that was called, if only one was.
        """

    def _call(self, getter: _Getter, arguments: Mapping[str, object]) -> object:
        answer = None
        try:
            answer = getter(**arguments)
            return answer
        finally:  # a failed read is reported too
            self._announce(answer, getter)
            hook.report_call(getter, arguments)

    def _number(self, field: str, what: str) -> object:
        """Return ``what`` of a field from its getter, or from the group if there is no getter."""
        question = _question(field, what)
        if question is None:
            return getattr(super(), what)(field)
        try:
            return self._call(*question)
        except AssertionError as error:
            raise self._missing(self._absent("GlobalGroups", [field])) from error

    def _held(self, name: str, call: Callable[[_Getter, Mapping[str, object]], object]) -> object:
        """Return the group of a field or an extra; ``_ABSENT`` if no field can hold the value."""
        nothing = None if name in OPTIONAL_FIELDS else _ABSENT
        question = _question(name, "group")
        try:
            found = nothing if question is None else call(*question)
        except AssertionError:
            return nothing
        if not isinstance(found, list) or name not in _LISTED:
            return found  # other lists come from a fork of Megatron-core, whose code expects them
        # 0.12 has an empty list if there are no levels.
        return tuple(found) or None if name == "hcp" else _ABSENT

    @override
    def _present(self, fields: Sequence[str]) -> dict[str, object]:
        found = self._held_of([field for field in fields if field in FIELDS], _quietly)
        self._announce(any(value is not None for value in found.values()))
        return found

    def _held_of(
        self, fields: Sequence[str], call: Callable[[_Getter, Mapping[str, object]], object]
    ) -> dict[str, object]:
        """Return the fields that the globals have now, with their values."""
        found = {field: self._held(field, call) for field in fields}
        return {
            field: value
            for field, value in found.items()
            if value is not _ABSENT and not isinstance(value, list)
        }

    @override
    def _member(self, field: str) -> Membership:
        name, _, level = field.partition(".")
        if name == "hybrid":
            hook.report(HYBRID_GROUPS)
            group: object = self.extras.get(field)
        else:
            group = self.group(cast("GroupName", name if name in FIELDS else field))
        if isinstance(group, tuple) and level:
            group = group[int(level)]
        if not isinstance(group, dist.ProcessGroup):
            raise self._no_such(field)
        return membership(field, group)

    # -- errors for missing groups ------------------------------------------------------------

    @override
    def _missing(self, text: str) -> MissingGlobalGroupError:
        return MissingGlobalGroupError(text)

    @override
    def _no_such(self, name: str) -> MissingGroupError | UnknownFieldError:
        arguments = {
            "gloo": "create_gloo_process_groups=True",
            "hybrid": "hybrid_context_parallel=True",
        }
        argument = arguments.get(name.partition(".")[0])
        if argument is None:
            return super()._no_such(name)
        have = ", ".join(self.extras) or "none"
        return self._missing(
            f"there is no group {name!r} among the globals (of this kind: {have}). Call "
            f"initialize_model_parallel({argument}) before, or pass pg_collection=session.groups."
        )

    @override
    def _absent(self, owner: str, missing: Sequence[str]) -> str:
        if without := [field for field in missing if field in FIELDS and field not in GETTERS]:
            return (
                f"{owner}: no {', '.join(missing)} among the globals: no Megatron-core has a "
                f"getter for {', '.join(without)}. Pass pg_collection=session.groups."
            )
        getters = ", ".join(_spelled(field) for field in missing)
        several = "pp" in missing and several_pipelines() is not None
        why = (
            "is in several such groups, which no field can hold" if several else "has no such group"
        )
        return (
            f"{owner}: no {', '.join(missing)} among the globals: this rank {why} in "
            f"megatron.core.parallel_state, by {getters}. Call initialize_model_parallel() before, "
            "or pass pg_collection=session.groups."
        )


def _question(name: str, what: str) -> tuple[_Getter, Mapping[str, object]] | None:
    """Return the getter for ``what`` of a field or an extra, with its arguments; or None."""
    getters = GETTERS.get(name)
    getter = getter_at_hand(getattr(getters, what)) if getters else None
    arguments = _fitting(getter, getters.flags) if getters and getter else None
    return None if getter is None or arguments is None else (getter, arguments)


def initialised() -> bool:
    """True if ``parallel_state`` is initialised, at least in part."""
    states = [*map(vars, modules_at_hand())]
    return any(state.get(name) is not None for state in states for name in _SIGNS)


def put_there(getter: _Getter) -> bool:
    """True if the getter was replaced, or if a rank or a size was set with ``set_*``."""
    if getattr(getter, "__globals__", None) is not globals_of_core():
        return True
    state = globals_of_core().items()
    return any(name.startswith("_MPU_") and value is not None for name, value in state)


def getter_at_hand(name: str) -> _Getter | None:
    """Return the function that ``parallel_state`` has under the name now, or None.

    Imports Megatron-core if it is not imported: only a getter knows its value before
    initialisation.
    """
    modules = modules_at_hand()
    if not modules:
        try:
            modules = [parallel_state_module()]
        except UnsupportedVersionError:
            return None
    found = (getattr(module, name, None) for module in modules)
    return next((getter for getter in found if getter is not None), None)


def held_now(name: str) -> object:
    """Return the value of the private global ``name``, or None. The read is not reported."""
    found = (vars(module).get(name) for module in modules_at_hand())
    return next((value for value in found if value is not None), None)


def value_in_globals(field: str) -> ProcessGroup | None:
    """Return the group in the field's private global; None if the value is no group.

    The read is not reported: it only serves to compare groups.
    """
    held = held_now(HOLDS.get(field, ""))
    return held if isinstance(held, dist.ProcessGroup) else None


def several_pipelines() -> Sequence[ProcessGroup] | None:
    """Return the groups of a rank in several pipelines, else None. The read is not reported."""
    held = held_now(HOLDS["pp"])
    return held if isinstance(held, list) else None


def _quietly(getter: _Getter, arguments: Mapping[str, object]) -> object:
    return getter(**arguments)


def _harmlessly(getter: _Getter, arguments: Mapping[str, object]) -> object:
    try:
        return getter(**arguments)
    except Exception as error:
        raise AssertionError from error  # the field counts as absent


def takes(getter: _Getter, names: Iterable[str]) -> bool:
    """True if the getter takes arguments of these names, or if its signature is unknown."""
    parameters = _parameters(getter) if names else None
    return parameters is None or all(name in parameters for name in names)


def _fitting(getter: _Getter, flags: Mapping[str, bool]) -> Mapping[str, object] | None:
    """Return the flags that ``getter`` takes; None if it does not take one that is True.

    A getter that takes any argument, such as a mock, gets only the True ones: its signature does
    not show whether it knows the others.
    """
    if not flags:
        return flags
    parameters = _parameters(getter)
    if parameters is None:
        return {name: True for name, value in flags.items() if value}
    fitting = {}
    for name, value in flags.items():
        if name in parameters:
            fitting[name] = value
        elif value:
            return None
    return fitting


def _parameters(getter: _Getter) -> Sequence[str] | None:
    """Return the names of the getter's parameters; None if it takes any or is no Python code."""
    code = getattr(getter, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
        code = getattr(inspect.unwrap(getter), "__code__", None)
        if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
            return None
    return parameters_of(code)


def _spelled(field: str) -> str:
    getters = GETTERS[field]
    flags = ", ".join(f"{name}=True" for name, value in getters.flags.items() if value)
    return f"{getters.group}({flags})"
