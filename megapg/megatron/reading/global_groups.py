"""Megatron's globals in the form of a collection: what :func:`~megapg.megatron.resolve` falls back
to.

Nothing is read before it is asked for. Code on the way to injection calls ``resolve`` at the top
of a function, where the globals may be initialised in part, later, or not be needed on the path
that this call takes.
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
from megapg.megatron.tables import ALWAYS_SET, GETTERS, GROUP_GLOBALS, HYBRID_GROUPS
from megapg.megatron.watching import hook

_Getter = Callable[..., object]

# field -> the global that holds it: the first of those that do.
_GLOBALS: Mapping[str, str] = {field: name for name, field in reversed([*GROUP_GLOBALS.items()])}

# Any of these set means that somebody initialised parallel_state, if only in part. Of the others
# destroy_model_parallel() forgets a good many.
_SIGNS = (
    *ALWAYS_SET,
    *("_MPU_TENSOR_MODEL_PARALLEL_RANK", "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE"),
    *("_MPU_PIPELINE_MODEL_PARALLEL_RANK", "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"),
)

_GLOO = tuple(name for name in GETTERS if name.startswith("gloo."))
_ABSENT = object()
_LISTED = ("hcp", "pp")  # of what Megatron-core itself has lists: of levels, of several pipelines


class GlobalGroups(ProcessGroupCollection):
    """The groups that ``megatron.core.parallel_state`` has at the moment they are asked for.

    It takes the place of a collection wherever one goes. A group, a rank or a size is what the
    getter of ``parallel_state`` answers that was written for it. That function is called when the
    value is asked for, by its name in the module. So what it falls back to where nothing is
    initialised, what ``set_*`` has set, what a test has put in its place and a stub of the module
    mean what they mean to code that calls it itself.

    A field is absent where its getter fails with an ``AssertionError``. To read it raises
    :class:`~megapg.errors.MissingGlobalGroupError`: a ``MissingGroupError`` that is an
    ``AssertionError`` too, so that ``except AssertionError`` around the one works around the other.
    Other errors of a getter come through as they are.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__({}, {}, Lease(owner="megatron.core.parallel_state"))

    def ask(self, name: str, **arguments: object) -> object:
        """What the function ``name`` of ``parallel_state`` answers.

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
        """What the private global ``name``, which no getter gives, has now; None if it is unset."""
        value = held_now(name)
        self._announce(value)
        hook.report(name)
        return value

    def group(self, name: GroupName) -> object:
        """What the globals have for a field or an extra: for ``hcp`` a tuple; None where a field
        may be None and there is nothing.

        Raises:
            MissingGlobalGroupError: they have nothing, or what no field can hold.
        """
        found = self._held(name, self._call)
        if found is not _ABSENT:
            return found
        if name in FIELDS:
            raise self._missing(self._absent("GlobalGroups", [name]))
        raise self._no_such(name)

    @override
    def rank(self, field: GroupName) -> int:
        """This rank's index in the group of ``field``, as the getter of ``parallel_state`` has it.

        Of a rank in several pipelines, up to Megatron-core 0.13, its index in each (as of
        :meth:`size` the size of each). Where torch.distributed is not initialised some getters
        answer 0.

        Raises:
            MissingGlobalGroupError: there is no such group.
        """
        return cast(int, self._number(field, "rank"))

    @override
    def size(self, field: GroupName) -> int:
        """Number of ranks in the group of ``field``, likewise."""
        return cast(int, self._number(field, "size"))

    @override
    def ranks(self, field: GroupName) -> tuple[int, ...]:
        """Global ranks of the group of ``field``, in the group's order, likewise."""
        return tuple(cast(Sequence[int], self._number(field, "ranks")))

    @override
    def holds(self, fields: Sequence[GroupName]) -> bool:
        """True: the globals are asked for each when it is read."""
        return True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name not in FIELDS:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return self.group(name)

    # vars() is how Megatron-core 0.19 asks what is present. Never what attributes come from: those
    # pass __getattr__, one getter each.
    @property
    @override
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        return self._present(FIELDS)

    @property
    @override
    def extras(self) -> Mapping[str, ProcessGroup]:
        """The gloo companions and hybrid groups that ``initialize_model_parallel`` made."""
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
        return GlobalGroups, ()  # on the other side the globals are those there

    @override
    def __repr__(self) -> str:  # of no consequence: debuggers call it
        now = self._held_of(FIELDS, _harmlessly) if modules_at_hand() else {}
        held = [field for field, value in now.items() if value is not None]
        return f"<GlobalGroups: {', '.join(held) or 'nothing'} of megatron.core.parallel_state>"

    # -- how the globals are asked ------------------------------------------------------------

    def _announce(self, answer: object = None, getter: _Getter | None = None) -> None:
        """Called with what the globals answered, before it is given, and which getter that was.
        There is nothing to say here; one that stands in for what somebody did not pass says only
        now that they serve.
        """

    def _call(self, getter: _Getter, arguments: Mapping[str, object]) -> object:
        answer = None
        try:
            answer = getter(**arguments)
            return answer
        finally:  # a read is one whatever its answer
            self._announce(answer, getter)
            hook.report_call(getter, arguments)

    def _number(self, field: str, what: str) -> object:
        """``what`` of a field: of its getter, or of the group where there is none to ask."""
        question = _question(field, what)
        if question is None:
            return getattr(super(), what)(field)
        try:
            return self._call(*question)
        except AssertionError as error:
            raise self._missing(self._absent("GlobalGroups", [field])) from error

    def _held(self, name: str, call: Callable[[_Getter, Mapping[str, object]], object]) -> object:
        """What the globals have for a field or an extra; ``_ABSENT`` if no field can hold that."""
        nothing = None if name in OPTIONAL_FIELDS else _ABSENT
        question = _question(name, "group")
        try:
            found = nothing if question is None else call(*question)
        except AssertionError:
            return nothing
        if not isinstance(found, list) or name not in _LISTED:
            return found  # a list of another field is a fork's own, and its code takes that
        # 0.12 leaves an empty list where there are no levels.
        return tuple(found) or None if name == "hcp" else _ABSENT

    @override
    def _present(self, fields: Sequence[str]) -> dict[str, object]:
        found = self._held_of([field for field in fields if field in FIELDS], _quietly)
        self._announce(any(value is not None for value in found.values()))
        return found

    def _held_of(
        self, fields: Sequence[str], call: Callable[[_Getter, Mapping[str, object]], object]
    ) -> dict[str, object]:
        """Those of the fields that are present in the globals now, and what they hold."""
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

    # -- what is said where there is nothing --------------------------------------------------

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
    """The getter that answers ``what`` of a field or an extra, and its arguments; or None."""
    getters = GETTERS.get(name)
    getter = getter_at_hand(getattr(getters, what)) if getters else None
    arguments = _fitting(getter, getters.flags) if getters and getter else None
    return None if getter is None or arguments is None else (getter, arguments)


def initialised() -> bool:
    """Whether somebody has set up ``parallel_state``, be it in part."""
    states = [*map(vars, modules_at_hand())]
    return any(state.get(name) is not None for state in states for name in _SIGNS)


def put_there(getter: _Getter) -> bool:
    """Whether somebody had a part in a getter's answer: replaced it, or set a rank or a size."""
    if getattr(getter, "__globals__", None) is not globals_of_core():
        return True
    state = globals_of_core().items()
    return any(name.startswith("_MPU_") and value is not None for name, value in state)


def getter_at_hand(name: str) -> _Getter | None:
    """The function of ``parallel_state`` that code finds under the name now; None if there is none.

    Where nobody has imported Megatron-core it is imported: what a getter answers before anything is
    initialised only the getter knows.
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
    """What the private global ``name`` has now; None where there is none. Nobody is told."""
    found = (vars(module).get(name) for module in modules_at_hand())
    return next((value for value in found if value is not None), None)


def value_in_globals(field: str) -> ProcessGroup | None:
    """What the field's private global holds now; None also where that is no group. Nobody is told:
    it serves to find out whether a group is the globals' own.
    """
    held = held_now(_GLOBALS.get(field, ""))
    return held if isinstance(held, dist.ProcessGroup) else None


def several_pipelines() -> Sequence[ProcessGroup] | None:
    """Of a rank in several pipelines, which no field can hold, those. Nobody is told of it."""
    held = held_now(_GLOBALS["pp"])
    return held if isinstance(held, list) else None


def _quietly(getter: _Getter, arguments: Mapping[str, object]) -> object:
    return getter(**arguments)


def _harmlessly(getter: _Getter, arguments: Mapping[str, object]) -> object:
    try:
        return getter(**arguments)
    except Exception as error:
        raise AssertionError from error  # as where there is nothing


def takes(getter: _Getter, names: Iterable[str]) -> bool:
    """Whether a call may have arguments of these names, as far as that shows."""
    parameters = _parameters(getter) if names else None
    return parameters is None or all(name in parameters for name in names)


def _fitting(getter: _Getter, flags: Mapping[str, bool]) -> Mapping[str, object] | None:
    """Those of a field's arguments that ``getter`` takes; None where it lacks one that is True.

    Of one that takes any, such as a mock, it does not show whether it knows those that are False.
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
    """The names that it takes; None of one that takes any."""
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
