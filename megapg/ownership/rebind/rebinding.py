"""The function :func:`rebind`, its result, and the search for holders that the walk missed."""

from __future__ import annotations

import gc
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from typing_extensions import override

from megapg.collection import ProcessGroupCollection
from megapg.communicators.needed import shortened
from megapg.ownership.holders import holders
from megapg.ownership.rebind.replacements import Replacements
from megapg.ownership.rebind.walk import Walk

_SHOWN = 3  # paths in the text of a result


@dataclass(frozen=True)
class Rebound:
    """The result of :func:`rebind`. ``str()`` is the text for a log.

    Attributes:
        replaced: the path of every reference that now leads to a new group or collection, such as
            ``DistributedDataParallel.module.decoder.layers.0.mlp.tp_group``.
        left: ``path: reason`` for every reference to an old object, or to its name, that was found
            and could not be replaced.
        elsewhere: ``group: holder`` for every holder of an old object that the walk did not reach.
        unseen: old objects that are alive without a known holder: a local variable, the autograd
            graph of the last step (freed by the next step), or objects hidden by ``gc.freeze()``.
        by_name: attribute or key -> number of references replaced.
    """

    replaced: tuple[str, ...]
    left: tuple[str, ...]
    elsewhere: tuple[str, ...]
    unseen: tuple[str, ...]
    by_name: Mapping[str, int] = field(compare=False)

    @property
    def complete(self) -> bool:
        """True if no known reference leads to an old group."""
        return not self.left and not self.elsewhere

    @override
    def __str__(self) -> str:
        names = ", ".join(f"{name} {count}" for name, count in self.by_name.items())
        count = len(self.replaced)
        noun = "reference" if count == 1 else "references"
        lines = [f"replaced {count} {noun}" + (f": {names}" if names else "")]
        lines += _first(self.replaced)
        for what, found in (("not replaced", self.left), ("held elsewhere", self.elsewhere)):
            if found:
                lines += [f"{what}: {len(found)}", *(f"  {line}" for line in found)]
        if self.unseen:
            lines.append(
                "held by nothing in sight, such as a local variable or the last step's graph, "
                f"yet alive: {', '.join(self.unseen)}"
            )
        return "\n".join(lines)


def rebind(objects: Sequence[object], replacements: Replacements) -> Rebound:
    """Replace old groups and collections with the new ones wherever ``objects`` lead to them.

    The walk follows attributes (also slots, and attributes of tensors), containers, partials, bound
    methods, closures, defaults and weak references. It writes to them without running their
    classes' code. Immutable values (a tuple, a bound method, a collection of borrowed groups) are
    replaced by a copy. Modules, classes, tensors' values, sessions and loggers are not entered. If
    only these hold an old group, it is listed in ``elsewhere``.

    Values computed from a group are kept: rank and size do not change when a session re-creates its
    groups. Objects that torch or a library made from an old group (a DeviceMesh that is not of
    ``pg.mesh()``, torch's own DDP, a CUDA graph), and strings that name a group, are reported and
    kept. FSDP2 reads the group that it holds at each use, so it gets the new one.

    Call it on every rank, between steps: ``objects`` must not be in use. The cost is proportional
    to the number of objects. If an old group survives, the whole process is searched for its
    holders.

    Args:
        objects: models, optimizers, schedules, and other objects that hold groups.
        replacements: maps each old object to the new one.
    """
    if not replacements:
        return Rebound((), (), (), (), {})
    walk = Walk(replacements)
    walk.over(objects)
    by_name = Counter(path.name() for path in walk.replaced)
    replaced = tuple(map(str, walk.replaced))
    left = tuple(f"{path}: {why}" for path, why in walk.left)
    known = walk.holders
    del walk  # it holds every object that it visited
    elsewhere, unseen = _survivors(replacements, known)
    return Rebound(replaced, left, elsewhere, unseen, dict(by_name.most_common()))


def _first(paths: Sequence[str]) -> list[str]:
    shown = [f"  {path}" for path in paths[:_SHOWN]]
    more = len(paths) - len(shown)
    return [*shown, f"  ... and {more} more"] if more else shown


def _survivors(
    replacements: Replacements, reported: set[int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Find holders of old objects, and old objects that have no known holder.

    Args:
        replacements: the old objects.
        reported: ids of holders that are reported already.
    """
    if not replacements.alive():
        return (), ()
    gc.collect()  # drop garbage in reference cycles first
    alive = replacements.alive()
    own, within = {id(alive)}, set()
    for old in alive:
        if isinstance(old, ProcessGroupCollection):  # a collection holds its groups
            inner = [value for value in vars(old).values() if isinstance(value, tuple)]
            own |= {id(old), id(vars(old)), id(old._extras), *map(id, inner)}
            levels = (level for levels in inner for level in levels)
            within |= {id(group) for group in (*vars(old).values(), *old._extras.values(), *levels)}
            del inner
    held: set[int] = set()
    known: set[int] = set()
    # One call for all, as each call scans every object of the process.
    for by in gc.get_referrers(*alive):
        if id(by) not in own and type(by) is not types.FrameType:
            (known if id(by) in reported else held).update(map(id, gc.get_referents(by)))
    elsewhere = [
        f"{_label(old)}: {line}"
        for old in alive
        if id(old) in held
        for line in holders(old, own | reported)
    ]
    unseen = [_label(old) for old in alive if id(old) not in held | known | within]
    return tuple(elsewhere), tuple(unseen)


def _label(old: object) -> str:
    if not isinstance(old, dist.ProcessGroup):
        return "the collection"
    return shortened(str(old.group_desc).rpartition(": ")[2].split("+"))
