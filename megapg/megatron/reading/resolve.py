"""The collection that a function works with: its argument, else Megatron's globals.

Existing code can change one function at a time. A function that calls :func:`resolve` takes a
``pg_collection`` from callers that have a collection, and still works for the others.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, cast, get_args

import torch.distributed as dist
from typing_extensions import override

from megapg.collection import ProcessGroupCollection
from megapg.errors import (
    ForeignGroupError,
    GlobalGroupsWarning,
    LaunchError,
    MissingGlobalGroupError,
    NoCollectionError,
    NoGlobalGroupsError,
    UnknownFieldError,
    UnsupportedOptionError,
)
from megapg.launch import detect
from megapg.launch.environment import overridden
from megapg.layout import FIELDS, GroupName
from megapg.megatron.convert import as_collection
from megapg.megatron.core import MegatronCollection, parameters_of
from megapg.megatron.reading.global_groups import GlobalGroups, initialised, put_there
from megapg.megatron.watching import hook

if TYPE_CHECKING:
    from types import CodeType, FrameType

P = ParamSpec("P")
R = TypeVar("R")

GlobalsPolicy: TypeAlias = Literal["warn", "error", "silent"]
"""What happens if a function has to take its groups from the globals."""

POLICY_VARIABLE = "MEGAPG_GLOBALS"


def resolve(
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
    *,
    needs: Sequence[GroupName] = (),
    owner: str | None = None,
) -> ProcessGroupCollection:
    """Return the collection to work with, in a function that takes ``pg_collection=None``.

    Call this at the top of the function. A collection that was passed is checked and returned. If
    None was passed, the result is a :class:`GlobalGroups`, which calls Megatron's own getter at
    each read. The first read issues a :class:`~megapg.errors.GlobalGroupsWarning`, once per place
    that calls the function without a collection. The environment variable ``MEGAPG_GLOBALS``
    (``warn``, ``error`` or ``silent``) changes this, and :func:`globals_policy` changes it for a
    block.

    There is no warning if no value is read. There is also none if the globals are not initialised
    and the getter is Megatron's own. Some getters return 0 without torch.distributed, which counts
    as no value.

    Args:
        pg_collection: the function's argument. May also be a collection of Megatron-core's class.
        needs: the fields that the function reads. A collection that was passed must have them now.
            The globals are checked at each read.
        owner: the function's name, for messages. Default: the name of the calling function.

    Raises:
        MissingGroupError: the collection lacks a field of ``needs``.
        StaleGroupError: the session of the collection has closed or suspended its groups.
        ForeignGroupError: the groups were destroyed or belong to another process, or
            ``pg_collection`` is no collection.
        UnsupportedOptionError: ``MEGAPG_GLOBALS`` has an unknown value.

    If None was passed, a read of the result raises:
        NoGlobalGroupsError: the getter fails with an AssertionError because the globals are not
            initialised. The error is an ``AssertionError`` and a ``MissingGroupError`` as well.
        MissingGlobalGroupError: the globals are initialised without that group.
        NoCollectionError: ``MEGAPG_GLOBALS`` forbids the globals, and they have a value: they are
            initialised, or the getter was replaced, or its value was set.
    """
    if pg_collection is None:
        return _fall_back(needs, owner, sys._getframe(1))
    if not isinstance(pg_collection, ProcessGroupCollection):
        pg_collection = _adopt(pg_collection, owner or _name(sys._getframe(1)))
    if not pg_collection.holds(needs):
        check_names(needs)
        pg_collection.require(*needs, owner=owner or _name(sys._getframe(1)))
    watching = hook.active()
    if watching is not None:
        frame = sys._getframe(1)
        name, caller = owner or _name(frame), _call_site(frame)
        answer = hook.Resolved(name, pg_collection, tuple(needs), caller, _home(frame))
        watching.resolved(answer)
    return pg_collection


def was_passed(pg_collection: object) -> bool:
    """True if a collection was passed, not None or a :class:`GlobalGroups`.

    For constructors that store the collection. Without a collection, the object gets no additional
    attribute::

        if megapg.was_passed(pg_collection):
            self.pg_collection = pg_collection
    """
    return pg_collection is not None and not isinstance(pg_collection, GlobalGroups)


def require_groups(pg: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return ``pg``, a result of :func:`resolve`, unless it reads globals without groups.

    For functions that can't work with the numbers that getters return before initialisation.

    Raises:
        NoGlobalGroupsError: ``pg`` reads the globals, which are not initialised.
    """
    if isinstance(pg, StandIn) and not initialised():
        raise pg._missing("")
    return pg


def resolves(
    *, needs: Sequence[GroupName] = (), owner: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that its keyword-only ``pg_collection`` is a :func:`resolve` result.

    The function always receives a collection. If you declare the parameter without a default, the
    type checker finds every caller that passes none, and these callers still work at run time::

        @resolves(needs=("tp", "pp"))
        def build(config: Config, *, pg_collection: ProcessGroupCollection) -> Model: ...

    Args:
        needs: see :func:`resolve`.
        owner: the function's name, for messages. Default: its qualified name.

    Raises:
        TypeError: the function has no keyword-only ``pg_collection``.
        UnknownFieldError: a name in ``needs`` is no field.
    """
    check_names(needs)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = owner or function.__qualname__
        parameter = inspect.signature(function).parameters.get("pg_collection")
        if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise TypeError(
                f"@resolves on {name}: it needs a keyword-only parameter pg_collection, as in "
                f"def {function.__name__}(..., *, pg_collection). Where that can't be, call "
                "resolve(pg_collection) in the function."
            )

        @functools.wraps(function)
        def resolved(*args: P.args, **kwargs: P.kwargs) -> R:
            # resolve() must be called in this frame, whose caller is the caller of the function.
            passed = cast("ProcessGroupCollection | None", kwargs.get("pg_collection"))
            kwargs["pg_collection"] = resolve(passed, needs=needs, owner=name)
            return function(*args, **kwargs)

        return resolved

    return decorate


@contextlib.contextmanager
def globals_policy(policy: GlobalsPolicy) -> Iterator[None]:
    """Set what :func:`resolve` does about the globals while the block runs.

    This sets the environment variable ``MEGAPG_GLOBALS``, and restores its old value at the end.
    The policy holds for every thread of the process, such as those of the backward pass, and for
    processes started in the block. Blocks may nest. Blocks of two threads must not overlap.

    Args:
        policy: ``"warn"``, ``"error"`` or ``"silent"``.

    Raises:
        UnsupportedOptionError: the policy is none of the three.
    """
    _check_policy(policy, "globals_policy()")
    with overridden({POLICY_VARIABLE: policy}):
        yield


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Place:
    """Code position of a frame. Keeping the frame itself would keep its variables alive."""

    f_code: CodeType
    f_lasti: int
    f_lineno: int
    f_globals: dict[str, Any]

    @classmethod
    def of(cls, frame: FrameType) -> Place:
        """Return the current position of ``frame``."""
        return cls(frame.f_code, frame.f_lasti, frame.f_lineno, frame.f_globals)


def policy_now() -> GlobalsPolicy:
    """Return the policy in ``MEGAPG_GLOBALS``.

    Raises:
        UnsupportedOptionError: the value is no policy.
    """
    policy = os.environ.get(POLICY_VARIABLE) or "warn"
    return _check_policy(policy, f"the environment variable {POLICY_VARIABLE}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Wanted:
    """The needs of a function that has no collection and has to use the globals."""

    owner: str  # the function or model without a collection
    needs: tuple[str, ...]  # the fields that are needed
    lack: str  # a sentence that says what is missing, without its full stop
    advice: str  # a sentence that says what to write, likewise, with ``$pg`` for the collection
    caller: Place  # the place to change, or the best place to start looking
    module: str  # of the function that falls back

    def missing(self, text: str) -> MissingGlobalGroupError:
        """Return the error for a group that the globals lack too; ``text`` gives details."""
        return MissingGlobalGroupError(f"{self.lack}. {text}")

    def check(self) -> None:
        """Raise if the globals have a value that must not be used under any policy."""


class NotGiven(Wanted):
    """The needs of a function that was called without ``pg_collection``."""

    __slots__ = ()

    @override
    def missing(self, text: str) -> MissingGlobalGroupError:
        """Return the error. If the globals are not initialised, it says what to pass."""
        if initialised():
            return super().missing(text)
        sizes = ", ".join(f"{axis}=..." for axis in ("tp", "pp", "cp", "ep") if axis in self.needs)
        advice = self.advice.replace("$pg", "session.groups")
        return NoGlobalGroupsError(
            f"{self.lack} at {_place(self.caller)}, and megatron.core.parallel_state is not "
            f"initialised either. {advice}, inside "
            f"`with megapg.session({sizes or 'tp=..., pp=...'}) as session:`."
        )


def let_globals_serve(wanted: Wanted, policy: GlobalsPolicy) -> None:
    """Report the use of the globals to listeners, and warn if the policy asks for it.

    Raises:
        NoCollectionError: the policy or ``wanted.check()`` forbids the globals.
    """
    lack, advice, caller = wanted.lack, wanted.advice.replace("$pg", "pg"), wanted.caller
    wanted.check()
    if policy == "error":
        raise NoCollectionError(
            f"{lack} at {_place(caller)}, and the globals may not serve it: "
            f"{POLICY_VARIABLE}=error. {advice}; `pg = megapg.from_parallel_state()` "
            "holds the same groups where no session made them."
        )
    watching = hook.active()
    if watching is not None:
        # A Place has all attributes of a frame that listeners use.
        frame = cast("FrameType", caller)
        watching.resolved(hook.Resolved(wanted.owner, None, wanted.needs, frame, wanted.module))
    if policy == "warn":
        _warn(f"{lack}, so it takes them from megatron.core.parallel_state. {advice}.", caller)


def check_names(needs: Sequence[GroupName]) -> None:
    """Raise an UnknownFieldError unless each name is a field, or an extra such as ``gloo.dp``."""
    if isinstance(needs, str):
        raise UnknownFieldError(f"needs={needs!r}: give the fields in a tuple, ({needs!r},).")
    for name in needs:
        if name not in FIELDS and not name.startswith(("gloo.", "hybrid.")):
            raise UnknownFieldError.of(name, FIELDS, where=f"needs={needs!r}: ")


class StandIn(GlobalGroups):
    """The globals in place of a missing collection. The first use warns or raises."""

    __slots__ = ("_said", "_wanted")

    if TYPE_CHECKING:
        _said: bool
        _wanted: Wanted

    def __init__(self, wanted: Wanted) -> None:
        super().__init__()
        object.__setattr__(self, "_wanted", wanted)
        object.__setattr__(self, "_said", False)

    @override
    def _announce(self, answer: object = None, getter: Callable[..., object] | None = None) -> None:
        if self._said:
            return
        # A rank of 0 is falsy, like the 0 of a getter before initialisation.
        if answer or initialised() or (getter is not None and put_there(getter)):
            let_globals_serve(self._wanted, policy_now())
            object.__setattr__(self, "_said", True)

    @override
    def _missing(self, text: str) -> MissingGlobalGroupError:
        return self._wanted.missing(text)


def _fall_back(needs: Sequence[GroupName], owner: str | None, frame: FrameType) -> GlobalGroups:
    check_names(needs)
    if policy_now() == "silent" and initialised() and hook.active() is None:
        return GlobalGroups()  # its reads need no text for a warning or a listener
    takes_it = owner is not None or "pg_collection" in parameters_of(frame.f_code)
    owner = owner or _name(frame)
    fields = f"the process groups {', '.join(needs)}" if needs else "process groups"
    wanted = NotGiven(
        owner,
        tuple(needs),
        lack=f"{owner} needs {fields} and was called without pg_collection",
        advice=_advice(frame, owner, takes_it=takes_it),
        caller=Place.of(_call_site(frame)),
        module=_home(frame),
    )
    return StandIn(wanted)


def _advice(frame: FrameType, owner: str, *, takes_it: bool) -> str:
    # Users do not change Megatron-core's source.
    if takes_it and _home(_call_site(frame)).startswith("megatron."):
        return (
            f"Where you hand {owner} over, bind it: functools.partial({owner}, pg_collection=$pg)"
        )
    if takes_it:
        return f"Write {owner}(..., pg_collection=$pg) there"
    if "pg_collection" in frame.f_code.co_freevars:  # of the enclosing function
        return f"Write {owner.rpartition('.<locals>')[0]}(..., pg_collection=$pg)"
    return f"Give {owner} a keyword-only parameter pg_collection, and pass $pg there"


def _adopt(passed: object, owner: str) -> ProcessGroupCollection:
    ours = as_collection(passed)
    if ours is not None:
        return ours
    single = isinstance(passed, dist.ProcessGroup)
    raise ForeignGroupError(
        f"{owner}: pg_collection is {passed!r}, a {type(passed).__module__}."
        f"{type(passed).__qualname__}. Pass session.groups, or a collection of groups you have: "
        f"ProcessGroupCollection.from_groups({'tp=group' if single else 'tp=...'})."
    )


def _check_policy(policy: str, where: str) -> GlobalsPolicy:
    known = get_args(GlobalsPolicy)
    if policy not in known:
        raise UnsupportedOptionError(
            f"{where}: {policy!r} is no policy for reads of the globals; say {', '.join(known)}."
        )
    return cast("GlobalsPolicy", policy)


def _name(frame: FrameType) -> str:
    return frame.f_code.co_qualname


def _place(frame: FrameType | Place) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _home(frame: FrameType) -> str:
    """Return the module of the function that calls ``resolve``, or that ``resolves`` decorates."""
    decorated = frame.f_locals.get("function") if frame.f_globals is globals() else None
    return str(decorated.__module__ if decorated else frame.f_globals.get("__name__", ""))


def _call_site(frame: FrameType) -> FrameType:
    """Return the frame that called the function in ``frame``, skipping frames of torch."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back
    return caller or frame


def _warns_here() -> bool:
    """True on the first rank of a node, and where a filter asks for errors or for every warning."""
    for action, _, category, *_ in warnings.filters:
        if action in ("error", "always") and issubclass(GlobalGroupsWarning, category):
            return True
    try:
        return not detect(address_of=str).local_rank
    except LaunchError:
        return True


def _warn(message: str, caller: FrameType | Place) -> None:
    if not _warns_here():
        return
    # warnings.warn() needs a stacklevel, but only the frame is known here.
    warnings.warn_explicit(
        message,
        GlobalGroupsWarning,
        filename=caller.f_code.co_filename,
        lineno=caller.f_lineno,
        module=caller.f_globals.get("__name__"),
        registry=caller.f_globals.setdefault("__warningregistry__", {}),
    )
