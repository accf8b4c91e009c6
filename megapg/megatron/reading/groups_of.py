"""Finds the collection that a model carries, for functions that have a model and no collection.

Megatron-core's modules keep the collection that they were built with as ``pg_collection``. Training
code wraps these modules for mixed precision and data parallelism, and puts pipeline chunks into
lists. :func:`groups_of` searches through the wrappers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from typing_extensions import override

from megapg.collection import Groups, ProcessGroupCollection
from megapg.collection.membership import known_ranks
from megapg.errors import MegapgError, NoCollectionError
from megapg.layout import GroupName
from megapg.megatron.convert import as_collection
from megapg.megatron.core import parameters_of
from megapg.megatron.reading.global_groups import GlobalGroups, value_in_globals
from megapg.megatron.reading.resolve import Place, StandIn, Wanted, check_names, resolve
from megapg.megatron.watching import hook
from megapg.ownership.owner import Owner
from megapg.torch_private import SUBMODULES
from megapg.upstream.mapping import COLLECTION_NAMES, MODEL_ATTRIBUTES

if TYPE_CHECKING:
    from types import FrameType

_NOTHING: Mapping[str, object] = MappingProxyType({})
# Attributes that hold a model only if the value is a module: others use the name for other things.
_MAY_BE_MODULES = ("net",)
_TELLING = frozenset((*COLLECTION_NAMES, *MODEL_ATTRIBUTES, *_MAY_BE_MODULES))

# Megatron-core's modules that keep single groups instead of their collection: the module of their
# classes -> attribute -> field. The names are the same in all versions that have them.
_MOE = "megatron.core.transformer.moe"
_SINGLE_GROUPS: Mapping[str, Mapping[str, str]] = {
    f"{_MOE}.experts": {"ep_group": "ep", "tp_group": "expt_tp", "dp_group": "expt_dp"},
    f"{_MOE}.moe_layer": {"ep_group": "ep", "attn_tp_group": "tp", "tp_group": "tp"},
    f"{_MOE}.router": {
        "tp_group": "tp",
        "cp_group": "cp",
        "tp_cp_group": "tp_cp",
        "tp_dp_cp_group": "tp_dp_cp",
    },
}
# Layers keep only their tensor parallel group. The search skips layers inside of a model: they may
# be experts, or have any group.
_LAYERS, _EXTENSIONS = "megatron.core.tensor_parallel.", "megatron.core.extensions."
_OF_LAYERS = ("_tp_group", "tp_group")


def groups_of(owner: object, *needs: GroupName) -> ProcessGroupCollection:
    """Return the collection that ``owner`` carries: a model, or an object that holds a model.

    ``owner`` may be:

    * a model;
    * a wrapper around a model (``.module`` or ``.model``: data parallelism, mixed precision,
      Lightning; ``.net`` if it is a module);
    * a list of pipeline chunks;
    * any object with a ``pg_collection``;
    * a collection, or a session.

    The search goes from the outside in: the owner's own ``pg_collection``, then the object that it
    wraps, then its submodules in order. The result is the first collection that has all fields of
    ``needs``, because inner modules of Megatron-core keep only the fields that they use. Submodules
    may differ for a field of ``needs``, such as an encoder and a decoder of different layouts. Then
    no submodule's collection is used for the whole model.

    Experts, MoE layers and routers keep single groups (for example ``ep_group``) instead of a
    collection. These groups are used if they cover all of ``needs``. Last, the search uses the
    groups that ``owner`` itself was built with. A parallel linear layer or an embedding has a
    ``tp_group``, and any module may have a collection in its ``config``. That collection is not
    used if its groups differ from the module's own. ::

        def total(model, norm):
            tp = megapg.groups_of(model, "tp").tp
            torch.distributed.all_reduce(norm, group=tp)

    If a model holds models of different layouts, pass the one whose groups you want, or set the
    ``pg_collection`` of the whole model.

    Megatron-core's own collections are converted, once each. Properties and ``__getattr__`` are run
    only for names of collections. A property ``model`` could load one from disk.

    If nothing is found, or if submodules differ, or if ``owner`` is None, the result is a
    :class:`GlobalGroups`, as in :func:`resolve`. The first read of a field, a rank or a size
    issues a :class:`~megapg.errors.GlobalGroupsWarning`, once per place that calls this function,
    or raises, as ``MEGAPG_GLOBALS`` says. Before that, nothing happens. You can call this before
    you test whether the globals are initialised, and pass the result to code that may not use it.

    A :class:`GlobalGroups` that an object carries is not a collection, and the search goes on. A
    trainer may keep one from a call before it had a model. If no collection is found, the
    outermost of these is returned, and its warning names the place that first called for it.

    The search takes about a microsecond if the model itself carries a collection. Otherwise the
    time grows with the number of modules: call this once, outside of loops.

    Args:
        owner: the model.
        *needs: the fields that will be read.

    Raises:
        MissingGroupError: ``owner`` is a collection and lacks a field of ``needs``.
        StaleGroupError: the session of the collection has closed or suspended its groups.
        ForeignGroupError: the groups were destroyed or belong to another process.
        UnknownFieldError: a name in ``needs`` is no field.

    If nothing was found, a read of the result raises:
        NoCollectionError: ``MEGAPG_GLOBALS`` forbids the globals, which have a value. Or ``owner``
            carries a collection that lacks a field of ``needs``, and that has other ranks for
            another field than the globals.
        MissingGlobalGroupError: the getter fails with an AssertionError. The error is an
            ``AssertionError`` and a ``MissingGroupError`` as well.
        UnsupportedOptionError: ``MEGAPG_GLOBALS`` has an unknown value.
    """
    if issubclass(type(owner), Owner):  # by type(): isinstance() may run the owner's own code
        owner = cast("Owner", owner).groups
    itself = as_collection(owner)
    if itself is not None:
        return resolve(itself, needs=needs, owner="groups_of")
    found = partial = stand_in = None
    answering: set[int] = set()  # submodules whose collections also hold for the modules inside
    for holder, carried in _carried(owner, needs, answering):
        pg = as_collection(carried)
        if pg is None:
            continue
        if isinstance(pg, GlobalGroups):
            stand_in = stand_in or pg
            continue
        if not pg.holds(needs):
            if _lacking(pg, needs):
                partial = partial or pg
                continue
            pg.require(*needs, owner=f"groups_of({_name(_innermost(owner))})")
        if found is not None:
            differing = _differing(found, pg, needs)
        else:  # a collection further in extends the partial one, unless their groups differ
            differing = _apart(partial, vars(pg).get) if partial is not None else []
        if differing:
            but = f"several, of different {', '.join(differing)}"
            return StandIn(_wanted(_innermost(owner), needs, but, sys._getframe(1), partial))
        found = found or pg
        if any(holder is each for each in _inwards(owner)):
            break
        answering.add(id(holder))
    if found is not None:
        watching = hook.active()
        if watching is not None:
            frame = sys._getframe(1)
            name = _name(_innermost(owner))
            watching.resolved(hook.Resolved(name, found, needs, frame, _home(frame)))
        return found
    check_names(needs)
    if stand_in is not None:
        return stand_in
    but = f"one without {', '.join(_lacking(partial, needs))}" if partial is not None else ""
    return StandIn(_wanted(_innermost(owner), needs, but, sys._getframe(1), partial))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Partial(Wanted):
    """The needs of a function whose model carries a collection without some of these fields.

    The globals may stand in only if their ranks are those of the collection. Otherwise two calls
    for one model would get groups of two layouts.
    """

    part: ProcessGroupCollection

    @override
    def check(self) -> None:
        """Raise a NoCollectionError if the globals have other ranks than the model's collection."""
        other = _apart(self.part, value_in_globals)
        if other:
            raise NoCollectionError(
                f"{self.lack}. The globals may not stand in: their {', '.join(other)} has other "
                f"ranks. Give that collection {', '.join(self.needs)}, too."
            )


def _apart(one: ProcessGroupCollection, other: Callable[[str], object]) -> list[str]:
    """Return the fields of a collection for which ``other`` returns a group of other ranks."""
    groups = ((name, group, other(name)) for name, group in vars(one).items())
    both = ((name, known_ranks(a), known_ranks(b)) for name, a, b in groups if a is not b)
    return sorted(
        name for name, of_one, of_other in both if of_one and of_other not in ((), of_one)
    )


def _wanted(
    kind: type,
    needs: tuple[GroupName, ...],
    but: str,
    caller: FrameType,
    partial: ProcessGroupCollection | None = None,
) -> Wanted:
    """Describe the collection that ``caller`` needs and a model of class ``kind`` does not carry.

    ``but`` names the model's collections that can't be used, such as ``partial``. The result may
    outlive the model, so this takes only the model's class.
    """
    site, wanted = Place.of(caller), f" with {', '.join(needs)}" if needs else ""
    wanted += f" (but {but})" if but else ""
    asked = f"{site.f_code.co_qualname} asks groups_of() for"
    lack = f"{_name(kind)} carries no collection{wanted}, which {asked}"
    said = _name(kind), needs, lack, _advice(kind), site, _home(site)
    return Wanted(*said) if partial is None else _Partial(*said, partial)


def _carried(
    owner: object, needs: Sequence[GroupName], answering: Collection[int]
) -> Iterator[tuple[object, object]]:
    """Yield each module with a value that may be a collection, from the outside in.

    Unusual objects do not stop the search. Modules inside of those in ``answering`` are skipped.
    """
    seen = {id(None)}
    # Torch modules of these classes compute no collection. A model has many modules of few classes.
    quiet: set[type] = set()
    single: dict[type, Mapping[str, str]] = {}  # class -> the attributes with single groups
    waiting = [owner]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if kind in quiet:
            plain: Mapping[str, object] = each.__dict__
            submodules = cast("dict[str, object] | None", plain.get(SUBMODULES))
        elif issubclass(kind, (list, tuple)):
            waiting.extend(reversed(cast("Sequence[object]", each)))
            continue
        else:
            plain, submodules = _opened(each)
        telling = not plain.keys().isdisjoint(_TELLING)
        if telling:
            for name in COLLECTION_NAMES:
                if name in plain:
                    yield each, plain[name]
        if kind not in quiet:
            # Skip torch's __getattr__: it is slow, and the search visits submodules anyway.
            torch_s = submodules is not None
            asked = [n for n in COLLECTION_NAMES if not torch_s or _asked(kind, n) is not None]
            for name in asked:
                yield each, _asked(each, name)
            if torch_s and not asked:
                quiet.add(kind)
            if torch_s and (fields := _single_groups(kind)):
                single[kind] = fields
        if kind in single:
            kept = _kept_singly(plain, single[kind], needs)
            if kept:
                yield each, ProcessGroupCollection.from_groups(**cast("Groups", kept))
        if id(each) in answering:
            continue
        if submodules:
            waiting.extend(reversed(submodules.values()))
            telling = telling or not submodules.keys().isdisjoint(_TELLING)
        if telling:
            waiting.extend(_wrapped(plain, submodules))
    for each in _inwards(owner):
        yield from ((each, carried) for carried in _built_with(each, needs))


def _built_with(module: object, needs: Sequence[GroupName]) -> Iterator[object]:
    """Yield collections of the groups that a module was built with, if its attributes show them."""
    plain, submodules = _opened(module)
    config, _ = _opened(plain.get("config"))
    if submodules is None:
        return
    group = next((plain[name] for name in _OF_LAYERS if plain.get(name) is not None), None)
    field = _field_of_layer(type(module), plain, config, group)
    own = {field: cast("dist.ProcessGroup", group)} if field else {}
    if field in needs:
        yield ProcessGroupCollection.from_groups(**cast("Groups", own))
    for name in COLLECTION_NAMES:
        pg = as_collection(config.get(name))
        stands_in = isinstance(pg, GlobalGroups)  # a comparison would read the globals
        if pg is None or (own and not stands_in and getattr(pg, field, group) is not group):
            continue
        yield pg


def _field_of_layer(
    kind: type, plain: Mapping[str, object], config: Mapping[str, object], group: object
) -> str:
    """Return the field of the group that a layer of the core has; empty if uncertain."""
    homes = [each.__module__ for each in kind.__mro__]
    extends = any(home.startswith(_EXTENSIONS) for home in homes)
    if not (extends or any(home.startswith(_LAYERS) for home in homes)):
        return ""
    if not issubclass(type(group), dist.ProcessGroup):
        return ""
    if "is_expert" in plain:
        return "expt_tp" if plain["is_expert"] else "tp"
    if not extends:
        return "tp"
    # Transformer Engine's layers have no is_expert. Megatron-core gives them no parallel mode for
    # divided experts and for undivided weights. The size excludes the other experts.
    divided = plain.get("parallel_mode") in ("column", "row")
    size = cast("dist.ProcessGroup", group).size()
    return "tp" if divided and size == config.get("tensor_model_parallel_size") else ""


def _opened(value: object) -> tuple[Mapping[str, object], dict[str, object] | None]:
    """Return a value's attributes and, for a torch module, its submodules.

    Runs no code of the value. A torch module keeps its submodules apart from its attributes.
    """
    try:
        plain: object = value.__dict__
    except Exception:  # the value has no __dict__, or fails to compute it
        return _NOTHING, None
    if not isinstance(plain, (dict, MappingProxyType)):
        return _NOTHING, None
    submodules = plain.get(SUBMODULES)
    return plain, submodules if isinstance(submodules, dict) else None


def _wrapped(plain: Mapping[str, object], submodules: dict[str, object] | None) -> list[object]:
    """Return the objects that these attributes wrap; the last is to be searched first."""
    inside: object
    wrapped = [inside for name in _MAY_BE_MODULES if _is_module(inside := plain.get(name))]
    for name in MODEL_ATTRIBUTES:
        inside = plain.get(name)
        if inside is None and submodules:
            inside = submodules.get(name)
        if inside is not None:
            wrapped.append(inside)
    return wrapped


def _is_module(value: object) -> bool:
    """True if the value is a torch module. Runs no code of the value."""
    return _opened(value)[1] is not None


def _single_groups(kind: type) -> Mapping[str, str]:
    """Return the attributes in which a class of the core keeps single groups, with their fields."""
    return {
        attribute: field
        for each in kind.__mro__
        for attribute, field in _SINGLE_GROUPS.get(each.__module__, {}).items()
    }


def _kept_singly(
    plain: Mapping[str, object], fields: Mapping[str, str], needs: Sequence[GroupName]
) -> dict[str, dist.ProcessGroup]:
    """Return the groups of needed fields in an object's attributes."""
    return {
        field: cast("dist.ProcessGroup", plain[attribute])
        for attribute, field in fields.items()
        if field in needs and issubclass(type(plain.get(attribute)), dist.ProcessGroup)
    }


def _asked(value: object, name: str) -> object:
    """Return an attribute, also from properties and ``__getattr__``; None if that fails."""
    try:
        return getattr(value, name, None)
    except MegapgError:  # such as a forbidden read of the globals
        raise
    except Exception:
        return None


def _lacking(pg: ProcessGroupCollection, needs: Sequence[str]) -> list[str]:
    held = vars(pg)
    return [name for name in needs if name not in held and name not in pg.extras]


def _differing(
    one: ProcessGroupCollection, other: ProcessGroupCollection, needs: Sequence[str]
) -> list[str]:
    """Return the needed fields for which two collections have different groups.

    If ``needs`` is empty, all fields that both have are compared.
    """
    both = [{**vars(each), **each.extras} for each in (one, other)]
    names = needs or both[0].keys() & both[1].keys()
    return sorted(name for name in names if both[0].get(name) != both[1].get(name))


def _innermost(owner: object) -> type:
    """Return the class of the model that ``owner`` is or wraps."""
    *_, model = _inwards(owner)
    return type(model)


def _inwards(owner: object) -> Iterator[object]:
    """Yield ``owner``, the object that it wraps, and so on to the model."""
    seen: set[int] = set()
    while id(owner) not in seen:
        yield owner
        seen.add(id(owner))
        if issubclass(type(owner), (list, tuple)):
            inside = cast("Sequence[object]", owner)[:1]
        else:
            inside = _wrapped(*_opened(owner))
        owner = inside[-1] if inside else owner


def _name(kind: type) -> str:
    return "None" if kind is NoneType else kind.__qualname__


def _advice(kind: type) -> str:
    if kind.__module__ == "builtins":
        return "Pass groups_of() a model that carries one, or a collection"
    code = getattr(getattr(kind, "__init__", None), "__code__", None)
    if code and "pg_collection" in parameters_of(code):
        return f"Write {kind.__qualname__}(..., pg_collection=$pg) where that is made"
    return f"Set the attribute pg_collection of {kind.__qualname__} where that is made"


def _home(frame: FrameType | Place) -> str:
    return str(frame.f_globals.get("__name__", ""))
