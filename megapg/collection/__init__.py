"""The value that carries live process groups: :class:`ProcessGroupCollection`.

It has Megatron-core's field names, so it works wherever Megatron-core takes a ``pg_collection``. It
is frozen: a model's groups can't change. Megatron mixes three meanings of "no group", which the
collection keeps apart:

* a **group** that this rank is in;
* **None** if Megatron means "this rank is outside" (``embd``, ``pos_embd``) or "not configured"
  (``hcp``, ``inter_dist_opt``, the all-gather twins; in borrowed groups also the GTP family);
* **absent**: the attribute does not exist, ``hasattr`` is false, it is not in ``vars()``, and
  reading it raises :class:`~megapg.errors.MissingGroupError`.

The collection never creates or destroys groups: the session does. When the session closes its
groups or makes them again, every read of a field raises :class:`~megapg.errors.StaleGroupError`,
in ``hasattr`` too. Ranks, sizes and :meth:`~ProcessGroupCollection.describe` stay readable.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, TypedDict, Unpack, cast

import torch.distributed as dist
from typing_extensions import override

from megapg.collection.lease import LIVE
from megapg.collection.lease import Lease as Lease
from megapg.collection.lease import LeaseState as LeaseState
from megapg.collection.membership import Membership as Membership
from megapg.collection.membership import ProcessGroup as ProcessGroup
from megapg.collection.membership import check_registered
from megapg.collection.membership import membership as membership
from megapg.errors import ForeignGroupError, MissingGroupError, UnknownFieldError, did_you_mean
from megapg.layout import FIELDS, Field, GroupName, ParallelLayout
from megapg.layout.fields import TABLE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OPTIONAL_FIELDS = frozenset(field for field, row in TABLE.items() if row.may_be_none)
"""Fields that may hold None, because None has a meaning there. See the module's docstring."""


class Groups(TypedDict, total=False):
    """Groups by field, as :meth:`ProcessGroupCollection.from_groups` takes them."""

    tp: ProcessGroup
    pp: ProcessGroup
    mp: ProcessGroup
    embd: ProcessGroup | None
    pos_embd: ProcessGroup | None
    cp: ProcessGroup
    tp_cp: ProcessGroup
    hcp: Sequence[ProcessGroup] | None
    ep: ProcessGroup
    expt_tp: ProcessGroup
    tp_ep: ProcessGroup
    tp_ep_pp: ProcessGroup
    tp_ep_pp_with_egtp_remat: ProcessGroup
    tp_dp: ProcessGroup
    tp_dp_cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    dp_cp_ag: ProcessGroup | None
    dp_cp_gtp_remat: ProcessGroup
    gtp_remat: ProcessGroup | None
    expt_gtp_remat: ProcessGroup | None
    expt_dp: ProcessGroup
    expt_dp_ag: ProcessGroup | None
    expt_dp_gtp_remat: ProcessGroup
    intra_dp_cp: ProcessGroup
    intra_expt_dp: ProcessGroup
    inter_dist_opt: ProcessGroup | None
    intra_dist_opt: ProcessGroup


@dataclass(frozen=True, init=False, eq=False, repr=False)
class ProcessGroupCollection:
    """Frozen process groups of one layout, as this rank sees them.

    Made by :func:`megapg.session`, by :meth:`from_groups`, or by the adapters in
    :mod:`megapg.megatron`. Equality and hash use the identity of the groups. ``copy`` and
    ``deepcopy`` return the same object, so models that hold a collection can be copied. Pickling
    raises, since a process group lives in one process. Keep collections out of configs that go
    through ``dataclasses.asdict``: torch groups can't be copied. :meth:`describe` returns plain
    data.
    """

    tp: ProcessGroup
    pp: ProcessGroup
    mp: ProcessGroup
    embd: ProcessGroup | None
    pos_embd: ProcessGroup | None
    cp: ProcessGroup
    tp_cp: ProcessGroup
    hcp: tuple[ProcessGroup, ...] | None
    ep: ProcessGroup
    expt_tp: ProcessGroup
    tp_ep: ProcessGroup
    tp_ep_pp: ProcessGroup
    tp_ep_pp_with_egtp_remat: ProcessGroup
    tp_dp: ProcessGroup
    tp_dp_cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    dp_cp_ag: ProcessGroup | None
    dp_cp_gtp_remat: ProcessGroup
    gtp_remat: ProcessGroup | None
    expt_gtp_remat: ProcessGroup | None
    expt_dp: ProcessGroup
    expt_dp_ag: ProcessGroup | None
    expt_dp_gtp_remat: ProcessGroup
    intra_dp_cp: ProcessGroup
    intra_expt_dp: ProcessGroup
    inter_dist_opt: ProcessGroup | None
    intra_dist_opt: ProcessGroup

    # Other attributes are slots, so that vars() holds only the present fields. Megatron-core 0.19
    # tests presence with vars(), 0.16 with hasattr().
    __slots__ = ("__dict__", "__weakref__", "_extras", "_lease", "_members", "_witness", "layout")

    if TYPE_CHECKING:
        _extras: dict[str, ProcessGroup]
        _lease: Lease
        _members: dict[str, Membership]
        _witness: ProcessGroup | None
        layout: ParallelLayout | None

    def __init__(
        self,
        groups: Mapping[str, ProcessGroup | Sequence[ProcessGroup] | None],
        members: Mapping[str, Membership],
        lease: Lease,
        layout: ParallelLayout | None = None,
        extras: Mapping[str, ProcessGroup] = MappingProxyType({}),
    ) -> None:
        """Create a collection. For owners and adapters; other code calls :meth:`from_groups`.

        Args:
            groups: field -> group, None, or for ``hcp`` the groups of its levels.
            members: field -> this rank's membership, for every group; ``hcp.0``... for levels.
            lease: shared with the owner, which ends it.
            layout: the layout of the groups, if known.
            extras: name -> group, for groups without a field; see :attr:`extras`.
        """
        for field, group in groups.items():
            _check_field(field, group)
            vars(self)[field] = tuple(group) if isinstance(group, Sequence) else group
        object.__setattr__(self, "_members", dict(members))
        object.__setattr__(self, "_lease", lease)
        object.__setattr__(self, "layout", layout)
        if type(self) is ProcessGroupCollection:
            _watch(self, lease)
        single = (group for group in groups.values() if isinstance(group, dist.ProcessGroup))
        object.__setattr__(self, "_witness", next(single, None))
        object.__setattr__(self, "_extras", dict(extras))

    @classmethod
    def from_groups(cls, **groups: Unpack[Groups]) -> ProcessGroupCollection:
        """Create a collection of groups that you made. megapg never closes them.

        Args:
            **groups: field -> group, for example ``tp=group``. Pass None only if it has a meaning
                (see the module's docstring). ``hcp`` takes the list of its levels.

        Raises:
            UnknownFieldError: a name is no field.
            ForeignGroupError: a value is no live group that this rank is in.
        """
        given = cast("dict[str, ProcessGroup | Sequence[ProcessGroup] | None]", groups)
        members = {}
        for field, group in given.items():
            _check_field(field, group)
            if isinstance(group, Sequence):
                for level, inner in enumerate(group):
                    members[f"{field}.{level}"] = membership(f"{field}.{level}", inner)
            elif group is not None:
                members[field] = membership(field, group)
        return cls(given, members, Lease(owner="groups passed to from_groups()"))

    def rank(self, field: GroupName) -> int:
        """Return this rank's index in the group of ``field``, from 0.

        Raises:
            MissingGroupError: the collection has no such group.
        """
        return self._member(field).rank

    def size(self, field: GroupName) -> int:
        """Return the number of ranks in the group of ``field``; see :meth:`rank`."""
        return len(self._member(field).ranks)

    def ranks(self, field: GroupName) -> tuple[int, ...]:
        """Return the global ranks of the group of ``field``, in its order; see :meth:`rank`."""
        return self._member(field).ranks

    def present(self) -> tuple[Field, ...]:
        """Return the names of the fields of this collection, including those that hold None."""
        held = vars(self)
        return tuple(field for field in FIELDS if field in held)

    def describe(self) -> dict[str, list[int] | list[list[int]] | None]:
        """Return field -> global ranks, or None, for logs and JSON; for ``hcp`` a list of lists."""
        plain: dict[str, list[int] | list[list[int]] | None] = {}
        for field, value in self._in_order():
            if isinstance(value, tuple):
                plain[field] = [list(self._member(f"{field}.{i}").ranks) for i in range(len(value))]
            else:
                plain[field] = None if value is None else list(self._member(field).ranks)
        return plain

    def require(self, *fields: GroupName, owner: str = "require()") -> ProcessGroupCollection:
        """Check that this collection holds live groups for ``fields``, and return it.

        Args:
            *fields: names that must be present. A field that may be None passes as None. Without
                names, every present field must be live.
            owner: the caller, for the message.

        Raises:
            MissingGroupError: fields are absent; the error names all of them.
            UnknownFieldError: a name is no field.
            StaleGroupError: the owner closed or suspended the groups.
            ForeignGroupError: other code destroyed a group, or this process was forked.
        """
        self._lease.check(owner)
        held = self._present(fields or FIELDS)
        for field in fields or held:
            if field not in held and field not in self.extras:
                missing = [name for name in fields if name in FIELDS and name not in held]
                if missing:
                    raise self._missing(self._absent(owner, missing))
                raise self._no_such(field)
            group = held[field] if field in held else self.extras[field]
            for each in group if isinstance(group, tuple) else (group,):
                if each is not None:
                    check_registered(owner, field, each)
        return self

    def _in_order(self) -> list[tuple[str, object]]:
        held = vars(self)  # only once: a view of the globals computes every field
        return [(field, held[field]) for field in FIELDS if field in held]

    def _present(self, fields: Sequence[str]) -> Mapping[str, object]:
        """Return field -> group, for at least the given fields."""
        return vars(self)

    def holds(self, fields: Sequence[GroupName]) -> bool:
        """True if ``require(*fields)`` would pass. Takes a microsecond, for use at every call.

        Notices the end of WORLD, but not that other code has destroyed a single group.
        """
        lease = self._lease
        if lease.state is not LIVE or lease.pid != os.getpid():
            return False
        held = self.__dict__  # half the cost of vars()
        for field in fields:
            if field not in held:
                return False
        try:  # WORLD's end is the end of all groups, so one is enough
            return self._witness is None or dist.get_global_rank(self._witness, 0) >= 0
        except (KeyError, ValueError, RuntimeError):
            return False

    def mesh(self, *fields: Field, device_type: str = "") -> DeviceMesh:
        """Return a mesh over these groups for FSDP2, DTensor, torchtitan or DCP. Creates no group.

        ``pg.mesh("dp_cp", "tp")["tp"].get_group() is pg.tp``. A slice has the group of its field,
        even if it is flattened, or taken by a field's name: ``mesh["dp_cp"]`` of ``pg.mesh("dp",
        "cp", "tp")``. A slice without an existing group raises. The mesh ends with the groups, and
        differs from any mesh of another session.

        Args:
            *fields: the dimensions, outermost first, in any order that forms a grid.
            device_type: the device type of the tensors. Default: ``cuda`` if the groups use NCCL,
                else ``cpu``.

        Raises:
            MissingGroupError: a field has no group here.
            StaleGroupError: the owner closed or suspended the groups.
            LayoutError: the fields form no grid, with the reason.
            UnsupportedVersionError: this torch's meshes create their own groups.
        """
        from megapg.collection.mesh import mesh_of

        return mesh_of(self, fields, device_type)

    @property
    def extras(self) -> Mapping[str, ProcessGroup]:
        """Groups that the session made on request and for which Megatron has no field.

        ``gloo.dp_cp`` and others with ``session(gloo=("dp_cp", ...))``; ``hybrid.2`` and its
        multiples with ``session(hybrid_cp=True)``. :meth:`rank`, :meth:`size` and :meth:`ranks`
        take these names as well. Equality ignores extras.
        """
        return MappingProxyType(self._extras)

    @property
    def lease(self) -> Lease:
        """The lease: the owner of the groups, and whether they may be used."""
        return self._lease

    if not TYPE_CHECKING:  # hidden from type checkers, which then know the fields

        def __getattr__(self, name: str) -> NoReturn:
            # Called only if normal lookup fails: for an absent field, or a name that is no field.
            if name in FIELDS:
                raise self._missing(self._absent(type(self).__name__, [name]))
            raise _no_attribute(type(self).__name__, name)

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessGroupCollection):
            return NotImplemented
        return _identity(self) == _identity(other)

    @override
    def __hash__(self) -> int:
        return hash(_identity(self))

    def __copy__(self) -> ProcessGroupCollection:
        return self

    def __deepcopy__(self, memo: object) -> ProcessGroupCollection:
        return self

    @override
    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a ProcessGroupCollection can't be pickled: its groups live in this process. Send "
            "`pg.describe()`, or the ParallelLayout, and open a session on the other side."
        )

    @override
    def __repr__(self) -> str:
        """Show fields by communicator, each with this rank's index and the group's size."""
        state = "" if self._lease.state is LeaseState.LIVE else f" {self._lease.state.value}"
        shared: dict[object, list[str]] = {}
        for field in self.present():
            groups = groups_behind(self, field)
            key = tuple(map(id, groups)) if groups else None
            shared.setdefault(key, []).append(field)
        nothing = shared.pop(None, [])
        parts = [f"{' '.join(fields)} = {_place(self, fields[0])}" for fields in shared.values()]
        parts += [f"{' '.join(nothing)} = None"] if nothing else []
        return f"<{type(self).__name__}{state}: {'; '.join(parts) or 'empty'}>"

    def _member(self, field: str) -> Membership:
        if (found := self._members.get(field)) is None:
            raise self._no_such(field)
        return found

    def _no_such(self, name: str) -> MissingGroupError | UnknownFieldError:
        kind, _, which = name.partition(".")
        if kind in ("gloo", "hybrid"):
            asked = f'gloo=("{which}",)' if kind == "gloo" else "hybrid_cp=True"
            have = ", ".join(self.extras) or "none"
            return self._missing(
                f"there is no group {name!r} here (extras: {have}); open the session with {asked}."
            )
        if name not in FIELDS:
            return UnknownFieldError.of(name, FIELDS)
        if name in vars(self):
            why = "has levels: ask for hcp.0, hcp.1, ..." if vars(self)[name] else "is None here"
            return self._missing(f"{name} {why}; {self!r}")
        return self._missing(self._absent(type(self).__name__, [name]))

    def _missing(self, text: str) -> MissingGroupError:
        return MissingGroupError(text)

    def _absent(self, owner: str, missing: Sequence[str]) -> str:
        have = ", ".join(self.present()) or "nothing"
        return (
            f"{owner}: this collection has no {', '.join(missing)}; it has {have}. Open a "
            "session (it makes every field), or pass the group: "
            f"ProcessGroupCollection.from_groups({missing[0]}=...)."
        )


def _no_attribute(kind: str, name: str) -> AttributeError:
    if hasattr(dist.ProcessGroup, name):
        what = ": a process group has. Pass one group: group=pg.tp."
    else:
        meant = "" if name.startswith("_") else did_you_mean(name, FIELDS)
        what = f"; {meant}" if meant else ""
    return AttributeError(f"{kind} has no attribute {name!r}{what}")


# id -> collection, for _after_fork(). Holds weak references.
_OF_THIS_PROCESS: weakref.WeakValueDictionary[int, ProcessGroupCollection] = (
    weakref.WeakValueDictionary()
)


class _Ended(ProcessGroupCollection):
    """A collection whose lease has ended, or one in a forked child: every read of a field raises.

    torch lets a destroyed gloo group answer, and a group of the parent process would hang. Ranks
    and sizes are plain numbers and can still be read. A live collection has no such check to pay.
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattribute__(self, name: str) -> object:
            if name in FIELDS or name == "extras":
                object.__getattribute__(self, "_lease").check(f"pg.{name}")
            return object.__getattribute__(self, name)


_Ended.__name__ = ProcessGroupCollection.__name__  # for messages


def _watch(pg: ProcessGroupCollection, lease: Lease) -> None:
    """Have every read of a field raise after the end of the lease, and after a fork."""
    known = weakref.ref(pg)
    _OF_THIS_PROCESS[id(pg)] = pg
    lease.collections.append(lambda: _end(known()))


def _end(pg: ProcessGroupCollection | None) -> None:
    if pg is not None:
        object.__setattr__(pg, "__class__", _Ended)


def _after_fork() -> None:
    for pg in list(_OF_THIS_PROCESS.values()):
        _end(pg)


os.register_at_fork(after_in_child=_after_fork)


def groups_behind(pg: ProcessGroupCollection, field: str) -> tuple[ProcessGroup, ...]:
    """Return the groups of a present field: none for None, several for hcp."""
    value: ProcessGroup | tuple[ProcessGroup, ...] | None = vars(pg)[field]
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _place(pg: ProcessGroupCollection, field: str) -> str:
    value = vars(pg)[field]
    levels = range(len(value)) if isinstance(value, tuple) else ()
    known = map(pg._member, [f"{field}.{level}" for level in levels] or [field])
    return " and ".join(f"rank {member.rank} of {len(member.ranks)}" for member in known)


def _identity(pg: ProcessGroupCollection) -> tuple[tuple[str, object], ...]:
    def key(value: object) -> object:
        return tuple(map(id, value)) if isinstance(value, tuple) else id(value)

    return tuple((field, key(value)) for field, value in pg._in_order())


def _check_field(field: str, group: object) -> None:
    if field not in FIELDS:
        raise UnknownFieldError.of(field, FIELDS)
    if group is None:
        if field not in OPTIONAL_FIELDS:
            raise ForeignGroupError(
                f"{field}=None: torch takes None for WORLD, so it can't stand for 'no group' here. "
                "Leave the field out."
            )
        return
    for level in group if isinstance(group, Sequence) and field == "hcp" else (group,):
        if not isinstance(level, dist.ProcessGroup):
            what = "the non-member mark" if level == dist.GroupMember.NON_GROUP_MEMBER else level
            raise ForeignGroupError(f"{field}: {what!r} is no process group of this rank.")
