"""The collection that a model carries: for functions that have a model and no collection.

Megatron-core keeps on its modules what they were built with, under ``pg_collection``, and training
code wraps these modules: for mixed precision, for data parallelism, in lists of pipeline chunks.
:func:`groups_of` finds it again.
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
from megapg.torch_private import SUBMODULES
from megapg.upstream.mapping import COLLECTION_NAMES, MODEL_ATTRIBUTES

if TYPE_CHECKING:
    from types import FrameType

_NOTHING: Mapping[str, object] = MappingProxyType({})
# What is looked into as well, but only where it is a module: others use the name for other things.
_MAY_BE_MODULES = ("net",)
_TELLING = frozenset((*COLLECTION_NAMES, *MODEL_ATTRIBUTES, *_MAY_BE_MODULES))

# Modules of the core that keep groups of the collection that they were built with, and not that:
# where their classes are -> attribute -> its field. The same in every core, as far as it has them.
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
# Layers keep the one group that they were given, of tensor parallelism. Inside of a model they are
# not looked at: they may be experts, or be given any group.
_LAYERS, _EXTENSIONS = "megatron.core.tensor_parallel.", "megatron.core.extensions."
_OF_LAYERS = ("_tp_group", "tp_group")


def groups_of(owner: object, *needs: GroupName) -> ProcessGroupCollection:
    """The collection that ``owner`` carries: a model, or what holds one.

    ``owner`` may be a model, a wrapper around one (``.module`` or ``.model``: data parallelism,
    mixed precision, Lightning; ``.net`` where that is a module), a list of pipeline chunks, any
    object with a ``pg_collection``, or a collection. It is searched from the outside in: its own
    ``pg_collection``, then what it wraps, then its submodules in order; the answer is the first
    collection found that has all fields of ``needs``, since the inner modules of Megatron-core
    keep just the fields they use. Where submodules have different groups for one of these, as an
    encoder and a decoder of different layouts do, none of them answers for the whole model.
    Its experts, MoE layers and routers keep single groups (``ep_group``, say) in place of one, and
    answer with these where they have all of ``needs``. Last, a module that is asked itself answers
    with what it was built with, where it shows: a parallel linear or an embedding with its
    ``tp_group``, any with the collection that its ``config`` has, unless that is of other groups
    than its own. ::

        def total(model, norm):
            tp = megapg.groups_of(model, "tp").tp
            torch.distributed.all_reduce(norm, group=tp)

    Of a model that holds models of different layouts ask for the groups of the one you mean, or
    set the ``pg_collection`` of the whole.
    A :class:`GlobalGroups` that something carries (a trainer, say, that kept what this gave before
    there was a model) is what the globals stood in for, not a collection: the search goes on.

    Megatron-core's own collections are converted, once each. Of properties and ``__getattr__`` only
    those are run that may give a collection; a property ``model`` may load one from disk.

    Where nothing is found, or submodules differ, or ``owner`` is None, the answer is a
    :class:`GlobalGroups`, as :func:`resolve` gives it: with a
    :class:`~megapg.errors.GlobalGroupsWarning` once per place, and as ``MEGAPG_GLOBALS`` allows.
    As there, all that waits until a field is read, its rank or its size, and is then said of the
    place that called this: the call can stand in front of the test whether the globals are
    initialised, and be an argument of what may not need it. Where nothing is read nothing has
    happened. One that is carried, the outermost, is passed on instead, and tells of the place that
    first asked for it.

    The search costs a microsecond or so where the model itself carries a collection, and grows
    with the number of modules where it does not: in a loop, call it once before.

    Args:
        owner: the model.
        *needs: the fields that will be read.

    Raises:
        MissingGroupError: ``owner`` is a collection and lacks a field of ``needs``.
        StaleGroupError: the session behind what was found has closed or suspended its groups.
        ForeignGroupError: its groups were destroyed or are of another process.
        UnknownFieldError: a name in ``needs`` is no field.

    What a read raises where nothing was found:
        NoCollectionError: ``MEGAPG_GLOBALS`` forbids the globals, which serve; or they may not,
            since a collection is carried that has not all of ``needs``, and for another field other
            ranks than they have.
        MissingGlobalGroupError: the getter fails with an AssertionError. The error is one too, and
            a ``MissingGroupError``.
        UnsupportedOptionError: ``MEGAPG_GLOBALS`` is set to something unknown.
    """
    itself = as_collection(owner)
    if itself is not None:
        return resolve(itself, needs=needs, owner="groups_of")
    found = partial = stand_in = None
    answering: set[int] = set()  # submodules, for what is inside of them as well
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
        else:  # what is found further in belongs to what was passed over, as far as both tell
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
    """What a model carries a part of: the globals serve the whole where that part is theirs. Else
    two questions about one model, of which it can answer one, would be answered by two layouts.
    """

    part: ProcessGroupCollection

    @override
    def check(self) -> None:
        """Raise a NoCollectionError where the globals have other ranks for what is carried."""
        other = _apart(self.part, value_in_globals)
        if other:
            raise NoCollectionError(
                f"{self.lack}. The globals may not stand in: their {', '.join(other)} has other "
                f"ranks. Give that collection {', '.join(self.needs)}, too."
            )


def _apart(one: ProcessGroupCollection, other: Callable[[str], object]) -> list[str]:
    """The fields of a collection for which another one, of fields, has a group of other ranks."""
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
    """What a model of class ``kind`` does not carry, and ``caller`` asks for.

    ``but`` is what it carries in place of that, such as ``partial``. The model itself may have to
    go before what is made of this.
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
    """What may be a collection, with the module that has it, from the outside in, whatever is odd
    about ``owner``; nothing from inside of the modules in ``answering``.
    """
    seen = {id(None)}
    quiet: set[type] = set()  # torch's modules that compute none: a model has many of few classes
    single: dict[type, Mapping[str, str]] = {}  # what those of the core keep group by group
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
            # What torch's own __getattr__ finds, and costs, is found among the submodules.
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
    """What shows of the groups that a module without a collection was built with."""
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
        stands_in = isinstance(pg, GlobalGroups)  # to compare with it would be a read
        if pg is None or (own and not stands_in and getattr(pg, field, group) is not group):
            continue
        yield pg


def _field_of_layer(
    kind: type, plain: Mapping[str, object], config: Mapping[str, object], group: object
) -> str:
    """Of which field a layer of the core was given the group; empty where that is not certain."""
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
    # Those of Transformer Engine don't say. They are told of no parallelism where Megatron-core
    # sees to it: for experts that are divided, and where weights are not. Other experts are left.
    divided = plain.get("parallel_mode") in ("column", "row")
    size = cast("dist.ProcessGroup", group).size()
    return "tp" if divided and size == config.get("tensor_model_parallel_size") else ""


def _opened(value: object) -> tuple[Mapping[str, object], dict[str, object] | None]:
    """What can be seen of it without anybody's code being run: its attributes; and the submodules
    if it is torch's, which are kept apart from these.
    """
    try:
        plain: object = value.__dict__
    except Exception:  # it has none, or computes one and fails
        return _NOTHING, None
    if not isinstance(plain, (dict, MappingProxyType)):
        return _NOTHING, None
    submodules = plain.get(SUBMODULES)
    return plain, submodules if isinstance(submodules, dict) else None


def _wrapped(plain: Mapping[str, object], submodules: dict[str, object] | None) -> list[object]:
    """What an object with these attributes wraps, the first to look at last."""
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
    """Whether it is torch's, as far as that can be told without anybody's code being run."""
    return _opened(value)[1] is not None


def _single_groups(kind: type) -> Mapping[str, str]:
    """The attributes in which a class of the core keeps single groups, and their fields."""
    return {
        attribute: field
        for each in kind.__mro__
        for attribute, field in _SINGLE_GROUPS.get(each.__module__, {}).items()
    }


def _kept_singly(
    plain: Mapping[str, object], fields: Mapping[str, str], needs: Sequence[GroupName]
) -> dict[str, dist.ProcessGroup]:
    """The needed fields for which an object with these attributes has a group."""
    return {
        field: cast("dist.ProcessGroup", plain[attribute])
        for attribute, field in fields.items()
        if field in needs and issubclass(type(plain.get(attribute)), dist.ProcessGroup)
    }


def _asked(value: object, name: str) -> object:
    """The attribute, by way of properties and ``__getattr__``; None where that does not work."""
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
    """The needed fields for which two collections have different groups; of all that both have,
    where nothing is needed.
    """
    both = [{**vars(each), **each.extras} for each in (one, other)]
    names = needs or both[0].keys() & both[1].keys()
    return sorted(name for name in names if both[0].get(name) != both[1].get(name))


def _innermost(owner: object) -> type:
    """Class of the model that ``owner`` is or wraps."""
    *_, model = _inwards(owner)
    return type(model)


def _inwards(owner: object) -> Iterator[object]:
    """``owner``, what it wraps, what that wraps, and so on to the model."""
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
