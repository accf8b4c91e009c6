"""The collection that a model carries: for functions that have a model and no collection.

Megatron-core keeps on its modules what they were built with, under ``pg_collection``, and training
code wraps these modules: for mixed precision, for data parallelism, in lists of pipeline chunks.
:func:`groups_of` finds it again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from megapg.collection import ProcessGroupCollection
from megapg.errors import MegapgError
from megapg.megatron import hook
from megapg.megatron.adapted import as_collection
from megapg.megatron.resolve import (
    check_names,
    let_globals_serve,
    policy_now,
    resolve,
)
from megapg.megatron.view import GlobalGroups, initialised
from megapg.migrate.mapping import COLLECTION_NAMES, MODEL_ATTRIBUTES

if TYPE_CHECKING:
    from types import FrameType

_NOTHING: Mapping[str, object] = MappingProxyType({})


def groups_of(owner: object, *needs: str) -> ProcessGroupCollection:
    """The collection that ``owner`` carries: a model, or what holds one.

    ``owner`` may be a model, a wrapper around one (``.module`` or ``.model``: data parallelism,
    mixed precision, Lightning), a list of pipeline chunks, any object with a ``pg_collection``, or
    a collection. It is searched from the outside in: its own ``pg_collection``, then what it
    wraps, then its submodules in order; the answer is the first collection found that has all
    fields of ``needs``, since the inner modules of Megatron-core keep just the fields they use. ::

        def total(model, norm):
            tp = megapg.groups_of(model, "tp").tp
            torch.distributed.all_reduce(norm, group=tp)

    Where a model holds two models of different layouts, ask for the groups of the one you mean.

    Megatron-core's own collections are adapted, once each. Of properties and ``__getattr__`` only
    those are run that may give a collection; a property ``model`` may load one from disk.

    Where nothing is found, or ``owner`` is None, the answer is a :class:`GlobalGroups`, as
    :func:`resolve` gives it: with a :class:`~megapg.errors.GlobalGroupsWarning` once per place,
    and as ``MEGAPG_GLOBALS`` allows. Unlike there, the globals need not be initialised until a
    field is read, so that the call can stand in front of the test whether they are.

    The search costs a microsecond or so where the model itself carries a collection, and grows
    with the number of modules where none does: in a loop, call it once before.

    Args:
        owner: the model.
        *needs: the fields that will be read.

    Raises:
        MissingGroupError: ``owner`` is a collection and lacks a field of ``needs``.
        NoCollectionError: nothing was found, and ``MEGAPG_GLOBALS`` forbids the globals, which
            are initialised.
        StaleGroupError: the session behind what was found has closed or suspended its groups.
        ForeignGroupError: its groups were destroyed or are of another process.
        UnknownFieldError: a name in ``needs`` is no field.
        UnsupportedOptionError: ``MEGAPG_GLOBALS`` is set to something unknown.
    """
    itself = as_collection(owner)
    if itself is not None:
        return resolve(itself, needs=needs, owner="groups_of")
    partial = None
    for carried in _carried(owner):
        pg = as_collection(carried)
        if pg is None:
            continue
        if not pg.holds(needs):
            if _lacking(pg, needs):
                partial = partial or pg
                continue
            pg.require(*needs, owner=f"groups_of({_name(owner)})")
        watching = hook.active()
        if watching is not None:
            frame = sys._getframe(1)
            watching.resolved(_name(owner), pg, needs, frame, _home(frame))
        return pg
    return _fall_back(owner, needs, partial, sys._getframe(1))


class _Unserved(GlobalGroups):
    """The globals, handed out before anybody has initialised them."""

    __slots__ = ("_lack",)

    if TYPE_CHECKING:
        _lack: str

    def __init__(self, lack: str) -> None:
        super().__init__()
        object.__setattr__(self, "_lack", lack)

    def _absent(self, owner: str, missing: Sequence[str]) -> str:
        return f"{self._lack}. {super()._absent('groups_of', missing)}"


def _fall_back(
    owner: object, needs: tuple[str, ...], partial: ProcessGroupCollection | None, frame: FrameType
) -> GlobalGroups:
    check_names(needs)
    policy = policy_now()
    name = _name(owner)
    wanted = f" with {', '.join(needs)}" if needs else ""
    if partial is not None:
        wanted += f" (but one without {', '.join(_lacking(partial, needs))})"
    asked = f"{frame.f_code.co_qualname} asks groups_of() for"
    lack = f"{name} carries no collection{wanted}, which {asked}"
    if not initialised():
        return _Unserved(lack)
    return let_globals_serve(
        name,
        needs,
        lack=lack,
        advice=_advice(owner),
        policy=policy,
        caller=frame,
        module=_home(frame),
    )


def _carried(owner: object) -> Iterator[object]:
    """What may be a collection, from the outside in, whatever is odd about ``owner``."""
    seen: set[int] = set()
    to_ask: dict[type, tuple[str, ...]] = {}  # a model has many modules of few classes
    waiting = [owner]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if issubclass(kind, (list, tuple)):
            waiting.extend(reversed(cast("Sequence[object]", each)))
            continue
        plain, submodules, wrapped = _opened(each)
        for name in COLLECTION_NAMES:
            if name in plain:
                yield plain[name]
        if kind not in to_ask:
            # What torch's own __getattr__ finds, and costs, is found among the submodules.
            torch_s = submodules is not None
            to_ask[kind] = tuple(
                n for n in COLLECTION_NAMES if not torch_s or _asked(kind, n) is not None
            )
        for name in to_ask[kind]:
            yield _asked(each, name)
        if submodules:
            waiting.extend(reversed(submodules.values()))
        waiting.extend(wrapped)


def _opened(
    thing: object,
) -> tuple[Mapping[str, object], dict[str, object] | None, list[object]]:
    """What can be seen of it without anybody's code being run: its attributes; the submodules
    if it is torch's, which are kept apart from these; what it wraps, the first to look at last.
    """
    try:
        plain: object = thing.__dict__
    except Exception:  # it has none, or computes one and fails
        return _NOTHING, None, []
    if not isinstance(plain, (dict, MappingProxyType)):
        return _NOTHING, None, []
    submodules = plain.get("_modules")
    if not isinstance(submodules, dict):
        submodules = None
    wrapped = []
    for name in MODEL_ATTRIBUTES:
        inside = plain.get(name)
        if inside is None and submodules:
            inside = submodules.get(name)
        if inside is not None:
            wrapped.append(inside)
    return plain, submodules, wrapped


def _asked(thing: object, name: str) -> object:
    """The attribute, by way of properties and ``__getattr__``; None where that does not work."""
    try:
        return getattr(thing, name, None)
    except MegapgError:  # such as a forbidden read of the globals
        raise
    except Exception:
        return None


def _lacking(pg: ProcessGroupCollection, needs: Sequence[str]) -> list[str]:
    held = vars(pg)
    return [name for name in needs if name not in held and name not in pg.extras]


def _innermost(owner: object) -> type:
    """Class of the model that ``owner`` is or wraps."""
    seen: set[int] = set()
    while id(owner) not in seen:
        seen.add(id(owner))
        if issubclass(type(owner), (list, tuple)):
            inside = cast("Sequence[object]", owner)[:1]
        else:
            inside = _opened(owner)[2]
        owner = inside[-1] if inside else owner
    return type(owner)


def _name(owner: object) -> str:
    return "None" if owner is None else _innermost(owner).__qualname__


def _advice(owner: object) -> str:
    kind = _innermost(owner)
    if kind.__module__ == "builtins":
        return "Pass groups_of() a model that carries one, or a collection"
    code = getattr(getattr(kind, "__init__", None), "__code__", None)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    if "pg_collection" in names:
        return f"Write {kind.__qualname__}(..., pg_collection=pg) where that is made"
    return f"Set the attribute pg_collection of {kind.__qualname__} where that is made"


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
