"""Who holds an object: the lines that help to find what keeps a group's sockets open."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import CellType, FrameType, FunctionType, ModuleType

from torch.distributed import distributed_c10d as c10d


def holders(target: object, known: set[int]) -> Iterator[str]:
    """Describe what refers to ``target``: by class and attribute, or by key. Asks the collector.

    Frames, torch's own tables of groups, and what is in ``known`` are left out. A dict or a tuple
    with nothing but groups and plain values in it goes unseen: the collector does not track it.

    Args:
        target: the object.
        known: ids of referrers that are nobody's business.
    """
    for holder in gc.get_referrers(target):
        if isinstance(holder, FrameType) or id(holder) in known or id(holder) in _tables():
            continue
        names = _names(holder, target)
        if isinstance(holder, dict):
            owner = next((o for o in gc.get_referrers(holder) if _is_dict_of(holder, o)), None)
            yield _attribute(owner, names) if owner is not None else f"a dict, under {names}"
        elif isinstance(holder, CellType):
            yield _closure(holder)
        else:
            yield _attribute(holder, names) if names else f"a {_kind(holder)}"


def _tables() -> set[int]:
    """Ids of the containers in which torch registers groups."""
    # By type, since isinstance() asks the value, and one of torch's then warns of itself.
    values = [*vars(c10d).values(), *vars(c10d._world).values()]
    tables = [value for value in values if issubclass(type(value), (dict, list))]
    inner = [v for table in tables if isinstance(table, dict) for v in table.values()]
    return {id(table) for table in (*tables, *inner)}


def _names(holder: object, target: object) -> str:
    held = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return ", ".join(str(name) for name, value in held.items() if value is target)


def _is_dict_of(held: object, owner: object) -> bool:
    if isinstance(owner, type):  # shows a view of it
        return any(part is held for part in gc.get_referents(owner))
    return getattr(owner, "__dict__", None) is held


def _attribute(owner: object, names: str) -> str:
    name = f"a {_kind(owner)}"
    if isinstance(owner, ModuleType):
        name = owner.__name__
    elif isinstance(owner, type):
        name = f"{owner.__module__}.{owner.__qualname__}"
    return f"{name}, as {names}"


def _closure(cell: CellType) -> str:
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if isinstance(closure, tuple) else ():
            if isinstance(function, FunctionType) and id(function.__closure__) == id(closure):
                # By identity: cells are equal where what is in them says so, or raises.
                named = zip(function.__code__.co_freevars, closure, strict=True)
                name = next(name for name, each in named if each is cell)
                return f"the closure of {function.__module__}.{function.__qualname__}, as {name}"
    return "a local variable that functions share"


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
