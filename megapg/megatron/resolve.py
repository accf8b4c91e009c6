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

from megapg.collection import ProcessGroupCollection
from megapg.errors import (
    ForeignGroupError,
    GlobalGroupsWarning,
    NoCollectionError,
    NoGlobalGroupsError,
    UnknownFieldError,
    UnsupportedOptionError,
)
from megapg.layout import FIELDS
from megapg.megatron import hook
from megapg.megatron.adapted import as_collection
from megapg.megatron.core import MegatronCollection
from megapg.megatron.view import GlobalGroups, initialised

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
    needs: Sequence[str] = (),
    owner: str | None = None,
) -> ProcessGroupCollection:
    """The collection to work with, at the top of a function that takes ``pg_collection=None``.

    What was passed is checked and returned. Where nothing was, the answer is a
    :class:`GlobalGroups`: Megatron's globals, each read only when its field is asked for, with a
    :class:`~megapg.errors.GlobalGroupsWarning` once per place that called the function so. The
    environment variable ``MEGAPG_GLOBALS`` (``warn``, ``error`` or ``silent``) decides about that,
    and :func:`globals_policy` for a block.

    Args:
        pg_collection: what the function was passed. Megatron-core's own collection is taken too.
        needs: the fields that the function reads. An explicit collection must have them now; of
            the globals, each is looked at when it is read.
        owner: the function's name, for messages; found out unless given.

    Raises:
        NoGlobalGroupsError: nothing was passed, and the globals are not initialised. It is an
            ``AssertionError`` as well, which is what Megatron's getters raise then.
        NoCollectionError: nothing was passed, and the globals are not allowed. The error above is
            one too.
        MissingGroupError: the collection passed lacks a field of ``needs``.
        StaleGroupError: the session behind it has closed or suspended its groups.
        ForeignGroupError: its groups were destroyed or are of another process, or what was passed
            is no collection.
        UnsupportedOptionError: ``MEGAPG_GLOBALS`` is set to something else.
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
        watching.resolved(
            owner or _name(frame), pg_collection, tuple(needs), _call_site(frame), _home(frame)
        )
    return pg_collection


def resolves(
    *, needs: Sequence[str] = (), owner: str | None = None
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
            passed = kwargs.get("pg_collection")
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
    before = os.environ.get(POLICY_VARIABLE)
    os.environ[POLICY_VARIABLE] = policy
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(POLICY_VARIABLE, None)
        else:
            os.environ[POLICY_VARIABLE] = before


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A call that ran: of its frame, by the names there, what can be kept. A frame that is kept
    keeps the models in its variables.
    """

    f_code: CodeType
    f_lasti: int
    f_lineno: int
    f_globals: dict[str, Any]

    @classmethod
    def of(cls, frame: FrameType) -> Place:
        """Where ``frame`` stands now."""
        return cls(frame.f_code, frame.f_lasti, frame.f_lineno, frame.f_globals)


def policy_now() -> GlobalsPolicy:
    """What ``MEGAPG_GLOBALS`` says.

    Raises:
        UnsupportedOptionError: nothing that is known.
    """
    policy = os.environ.get(POLICY_VARIABLE) or "warn"
    return _check_policy(policy, f"the environment variable {POLICY_VARIABLE}")


def let_globals_serve(
    owner: str,
    needs: Sequence[str],
    *,
    lack: str,
    advice: str,
    policy: GlobalsPolicy,
    caller: FrameType | Place,
    module: str,
) -> None:
    """Let the globals serve, as far as the policy goes; who listens is told.

    Args:
        owner: what was given no collection.
        needs: the fields that are asked for.
        lack: that as a sentence, without its end.
        advice: what to write instead, likewise.
        policy: see :func:`policy_now`.
        caller: where that is to be changed, or is best looked for.
        module: of the function that falls back.

    Raises:
        NoCollectionError: they must not.
    """
    if policy == "error":
        raise NoCollectionError(
            f"{lack} at {_place(caller)}, and the globals may not serve it: "
            f"{POLICY_VARIABLE}=error. {advice}; `pg = megapg.from_parallel_state()` "
            "holds the same groups where no session made them."
        )
    watching = hook.active()
    if watching is not None:
        # Listeners ask for nothing of a frame that a place does not have.
        watching.resolved(owner, None, tuple(needs), cast("FrameType", caller), module)
    if policy == "warn":
        _warn(f"{lack}, so it takes them from megatron.core.parallel_state. {advice}.", caller)


def check_names(needs: Sequence[str]) -> None:
    """Raise unless each is a field, or an extra such as ``gloo.dp``.

    Raises:
        UnknownFieldError: one is not.
    """
    if isinstance(needs, str):
        raise UnknownFieldError(f"needs={needs!r}: give the fields in a tuple, ({needs!r},).")
    for name in needs:
        if name not in FIELDS and not name.startswith(("gloo.", "hybrid.")):
            raise UnknownFieldError(
                f"needs={needs!r}: {name!r} is no field; the fields are {', '.join(FIELDS)}."
            )


def _fall_back(needs: Sequence[str], owner: str | None, frame: FrameType) -> GlobalGroups:
    check_names(needs)
    policy = policy_now()
    takes_it = owner is not None or "pg_collection" in _parameters(frame)
    owner = owner or _name(frame)
    caller = _call_site(frame)
    wanted = f"the process groups {', '.join(needs)}" if needs else "process groups"
    lack = f"{owner} needs {wanted} and was called without pg_collection"
    if not initialised():
        sizes = ", ".join(f"{axis}=..." for axis in ("tp", "pp", "cp", "ep") if axis in needs)
        raise NoGlobalGroupsError(
            f"{lack} at {_place(caller)}, and megatron.core.parallel_state is not initialised "
            f"either. {_advice(frame, owner, 'session.groups', takes_it=takes_it)}, inside "
            f"`with megapg.session({sizes or 'tp=..., pp=...'}) as session:`."
        )
    let_globals_serve(
        owner,
        needs,
        lack=lack,
        advice=_advice(frame, owner, "pg", takes_it=takes_it),
        policy=policy,
        caller=caller,
        module=_home(frame),
    )
    return GlobalGroups()


def _advice(frame: FrameType, owner: str, passing: str, *, takes_it: bool) -> str:
    if takes_it:
        return f"Write {owner}(..., pg_collection={passing}) there"
    if "pg_collection" in frame.f_code.co_freevars:  # of the function around
        return f"Write {owner.rpartition('.<locals>')[0]}(..., pg_collection={passing})"
    return f"Give {owner} a keyword-only parameter pg_collection, and pass {passing} there"


def _parameters(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


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
    """Who called the function that runs in ``frame``; torch's own machinery, such as that which
    calls forward(), is passed over.
    """
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
