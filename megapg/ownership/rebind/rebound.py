"""Putting new groups in, from one end to the other, and what is told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megapg.ownership.rebind.successors import Replacements
from megapg.ownership.rebind.survivors import survivors
from megapg.ownership.rebind.walk import Walk

_SHOWN = 3  # paths in the text of a result


@dataclass(frozen=True)
class Rebound:
    """What :func:`rebind` did. ``str()`` of it is the text for a log.

    Attributes:
        replaced: the path of every reference that now leads to a new group or collection, such as
            ``DistributedDataParallel.module.decoder.layers.0.mlp.tp_group``.
        left: ``path: reason`` for every reference to an old one, or to its name, that was found
            on the way and could not be replaced.
        elsewhere: ``group: holder`` for what still holds an old one and was not on the way.
        unseen: the old ones that live on though nothing in sight holds them: a local variable, the
            graph of the last step, which goes with the next, or what ``gc.freeze()`` has hidden.
        by_name: how many references were replaced, by the attribute or key that leads to them.
    """

    replaced: tuple[str, ...]
    left: tuple[str, ...]
    elsewhere: tuple[str, ...]
    unseen: tuple[str, ...]
    by_name: Mapping[str, int] = field(compare=False)

    @property
    def complete(self) -> bool:
        """Whether nothing in sight leads to an old group any more."""
        return not self.left and not self.elsewhere

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
    """Put the new groups and collections in wherever ``objects`` lead to old ones.

    It follows attributes (in slots and of tensors, too), containers, partials, bound methods,
    closures, defaults and weak references, and writes to them without running any code of their
    owners. What can't be changed (a tuple, a bound method, a collection of borrowed groups) is made
    anew and put where it was. Modules, classes, tensors' values, sessions and loggers are not
    entered, and so what only they hold is found ``elsewhere``.

    Values worked out from a group stay as they are: rank and size do not change when a session
    re-creates its groups. What torch or a library made of an old group (a DeviceMesh that is
    not of ``pg.mesh()``, torch's own DDP, a CUDA graph), and strings that name one, are told of and
    left. FSDP2 asks the group that it holds, so that it gets the new one.

    Call it on every rank, between steps: nothing of ``objects`` may be in use. It costs time in
    proportion to the number of objects, and a look through the whole process where an old group
    survives.

    Args:
        objects: models, optimizers, schedules, and whatever else holds groups.
        replacements: what to replace by what.
    """
    if not replacements:
        return Rebound((), (), (), (), {})
    walk = Walk(replacements)
    walk.over(objects)
    by_name = Counter(path.name() for path in walk.replaced)
    replaced = tuple(map(str, walk.replaced))
    left = tuple(f"{path}: {why}" for path, why in walk.left)
    known = walk.holders
    del walk  # holds what it has seen
    elsewhere, unseen = survivors(replacements, known)
    return Rebound(replaced, left, elsewhere, unseen, dict(by_name.most_common()))


def _first(paths: Sequence[str]) -> list[str]:
    shown = [f"  {path}" for path in paths[:_SHOWN]]
    more = len(paths) - len(shown)
    return [*shown, f"  ... and {more} more"] if more else shown
