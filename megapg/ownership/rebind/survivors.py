"""Find the holders of old groups that the walk did not reach."""

from __future__ import annotations

import gc
import types

import torch.distributed as dist

from megapg.collection import ProcessGroupCollection
from megapg.communicators.plan import shortened
from megapg.ownership.holders import holders
from megapg.ownership.rebind.successors import Replacements


def survivors(
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
            within |= {id(group) for group in (*vars(old).values(), *old.extras.values(), *levels)}
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
