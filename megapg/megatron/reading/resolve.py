"""The collection that a function works with: the one it was passed, else Megatron's globals.

Existing code moves over one function at a time. A function that calls :func:`resolve` takes a
``pg_collection`` from callers that have one, and goes on working for callers that have not moved.
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
    MissingGlobalGroupError,
    NoCollectionError,
    NoGlobalGroupsError,
    UnknownFieldError,
    UnsupportedOptionError,
)
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
"""What happens where a function has to take its groups from the globals."""

POLICY_VARIABLE = "MEGAPG_GLOBALS"


def resolve(
    pg_collection: ProcessGroupCollection | MegatronCollection | None,
    *,
    needs: Sequence[GroupName] = (),
    owner: str | None = None,
) -> ProcessGroupCollection:
    """The collection to work with, at the top of a function that takes ``pg_collection=None``.

    What was passed is checked and returned. Where nothing was, the answer is a
    :class:`GlobalGroups`: it asks Megatron's own getters, each when its value is asked for, and at
    the first of them there is a :class:`~megapg.errors.GlobalGroupsWarning`, once per place that
    called the function so. The environment variable ``MEGAPG_GLOBALS`` (``warn``, ``error`` or
    ``silent``) decides about that, and :func:`globals_policy` for a block. Where nothing is read,
    or the globals are not initialised and nobody has replaced what answers, nothing is said. The
    zeros that Megatron's own give in a process without torch.distributed are nobody's answer.

    Args:
        pg_collection: what the function was passed. Megatron-core's own collection is taken too.
        needs: the fields that the function reads. An explicit collection must have them now; of
            the globals, each is looked at when it is read.
        owner: the function's name, for messages; found out unless given.

    Raises:
        MissingGroupError: the collection passed lacks a field of ``needs``.
        StaleGroupError: the session behind it has closed or suspended its groups.
        ForeignGroupError: its groups were destroyed or are of another process, or what was passed
            is no collection.
        UnsupportedOptionError: ``MEGAPG_GLOBALS`` is set to something else.

    What a read raises where nothing was passed:
        NoGlobalGroupsError: the getter fails with an AssertionError, as the globals are not
            initialised. The error is an ``AssertionError`` as well, and a ``MissingGroupError``.
        MissingGlobalGroupError: they are initialised without that group.
        NoCollectionError: the globals are initialised, or somebody has set or replaced what the
            getter asks, and they are not allowed.
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
    """True if a collection was passed: not None, and not the globals in place of one.

    A constructor keeps what it was passed with this, so that its object has no attribute more if
    nothing was::

        if megapg.was_passed(pg_collection):
            self.pg_collection = pg_collection
    """
    return pg_collection is not None and not isinstance(pg_collection, GlobalGroups)


def require_groups(pg: ProcessGroupCollection) -> ProcessGroupCollection:
    """What :func:`resolve` gave, for a function that has no use for the numbers that getters answer
    where nothing is initialised: there it raises a NoGlobalGroupsError.
    """
    if isinstance(pg, StandIn) and not initialised():
        raise pg._missing("")
    return pg


def resolves(
    *, needs: Sequence[GroupName] = (), owner: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """The decorator form of :func:`resolve`, for a function whose ``pg_collection`` is
    keyword-only: it always receives a collection.

    Declare the parameter without a default, and the type checker points at every caller that has
    not moved, while at run time they go on working::

        @resolves(needs=("tp", "pp"))
        def build(config: Config, *, pg_collection: ProcessGroupCollection) -> Model: ...

    Args:
        needs: see :func:`resolve`.
        owner: the function's name, for messages; its qualified name unless given.

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
            # In this frame, as resolve() is in that of the function: it looks for the caller.
            passed = cast("ProcessGroupCollection | None", kwargs.get("pg_collection"))
            kwargs["pg_collection"] = resolve(passed, needs=needs, owner=name)
            return function(*args, **kwargs)

        return resolved

    return decorate


@contextlib.contextmanager
def globals_policy(policy: GlobalsPolicy) -> Iterator[None]:
    """What :func:`resolve` does about the globals while the block runs.

    It sets the environment variable ``MEGAPG_GLOBALS``, so it holds for every thread of the
    process (backward runs in others) and for processes started meanwhile; afterwards the variable
    is what it was. Blocks nest; those of two threads must not overlap.

    Args:
        policy: ``"warn"``, ``"error"`` or ``"silent"``.

    Raises:
        UnsupportedOptionError: none of the three.
    """
    _check_policy(policy, "globals_policy()")
    with overridden({POLICY_VARIABLE: policy}):
        yield


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Place:
    """What can be kept of a frame, by its names; a frame keeps the models in its variables."""

    f_code: CodeType
    f_lasti: int
    f_lineno: int
    f_globals: dict[str, Any]

    @classmethod
    def of(cls, frame: FrameType) -> Place:
        """Where ``frame`` stands now."""
        return cls(frame.f_code, frame.f_lasti, frame.f_lineno, frame.f_globals)


def policy_now() -> GlobalsPolicy:
    """What ``MEGAPG_GLOBALS`` says; an UnsupportedOptionError if that is nothing known."""
    policy = os.environ.get(POLICY_VARIABLE) or "warn"
    return _check_policy(policy, f"the environment variable {POLICY_VARIABLE}")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Wanted:
    """What somebody needs and was not given, so that the globals have to serve."""

    owner: str  # what was given no collection
    needs: tuple[str, ...]  # the fields that are asked for
    lack: str  # that as a sentence, without its end
    advice: str  # what to write instead, likewise, with ``$pg`` for the collection
    caller: Place  # where that is to be changed, or is best looked for
    module: str  # of the function that falls back

    def missing(self, text: str) -> MissingGlobalGroupError:
        """The error where the globals have nothing either, of which ``text`` says more."""
        return MissingGlobalGroupError(f"{self.lack}. {text}")

    def check(self) -> None:
        """Raise where the globals, which have an answer, may not serve whatever the policy."""


class NotGiven(Wanted):
    """What a function needs that was called without ``pg_collection``."""

    __slots__ = ()

    @override
    def missing(self, text: str) -> MissingGlobalGroupError:
        """The error, which says what to pass."""
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
    """Let the globals serve, or raise what ``wanted`` has to say, or a NoCollectionError by the
    policy; who listens is told.
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
        # Listeners ask for nothing of a frame that a place does not have.
        frame = cast("FrameType", caller)
        watching.resolved(hook.Resolved(wanted.owner, None, wanted.needs, frame, wanted.module))
    if policy == "warn":
        _warn(f"{lack}, so it takes them from megatron.core.parallel_state. {advice}.", caller)


def check_names(needs: Sequence[GroupName]) -> None:
    """Raise an UnknownFieldError unless each is a field, or an extra such as ``gloo.dp``."""
    if isinstance(needs, str):
        raise UnknownFieldError(f"needs={needs!r}: give the fields in a tuple, ({needs!r},).")
    for name in needs:
        if name not in FIELDS and not name.startswith(("gloo.", "hybrid.")):
            raise UnknownFieldError.of(name, FIELDS, where=f"needs={needs!r}: ")


class StandIn(GlobalGroups):
    """The globals in place of what somebody did not pass; that they serve is said when they do."""

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
        # By its number alone rank 0 looks as where there is nothing.
        if answer or initialised() or (getter is not None and put_there(getter)):
            let_globals_serve(self._wanted, policy_now())
            object.__setattr__(self, "_said", True)

    @override
    def _missing(self, text: str) -> MissingGlobalGroupError:
        return self._wanted.missing(text)


def _fall_back(needs: Sequence[GroupName], owner: str | None, frame: FrameType) -> GlobalGroups:
    check_names(needs)
    if policy_now() == "silent" and initialised() and hook.active() is None:
        return GlobalGroups()  # without a word that nobody reads
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
    # Megatron's own source is no place to write at.
    if takes_it and _home(_call_site(frame)).startswith("megatron."):
        return (
            f"Where you hand {owner} over, bind it: functools.partial({owner}, pg_collection=$pg)"
        )
    if takes_it:
        return f"Write {owner}(..., pg_collection=$pg) there"
    if "pg_collection" in frame.f_code.co_freevars:  # of the function around
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
    """The module of the function that resolves, which may run in the decorator's frame."""
    decorated = frame.f_locals.get("function") if frame.f_globals is globals() else None
    return str(decorated.__module__ if decorated else frame.f_globals.get("__name__", ""))


def _call_site(frame: FrameType) -> FrameType:
    """Who called the function that runs in ``frame``; torch's own machinery is passed over."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__", "").startswith("torch."):
        caller = caller.f_back
    return caller or frame


def _warn(message: str, caller: FrameType | Place) -> None:
    # What warnings.warn() does with a stacklevel; here the frame is known and its level is not.
    warnings.warn_explicit(
        message,
        GlobalGroupsWarning,
        filename=caller.f_code.co_filename,
        lineno=caller.f_lineno,
        module=caller.f_globals.get("__name__"),
        registry=caller.f_globals.setdefault("__warningregistry__", {}),
    )
