"""Process groups: those that a function was passed, else those of Megatron-core's globals.

``resolve(pg_collection)`` takes what was passed, and ``groups_of(model)`` what a model carries: a
``ProcessGroupCollection`` of Megatron-core. Where there is none, the getters of
``megatron.core.parallel_state`` answer, each called when its value is asked for. A group is
``pg.tp``; ``pg.size("tp")``, ``pg.rank("tp")`` and ``pg.ranks("tp")`` are its numbers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

# Field -> the middle of the names of its getters, and the flags that choose its group.
_FIELDS = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "mp": "model_parallel",
    "embd": "embedding",
    "pos_embd": "position_embedding",
    "cp": "context_parallel",
    "tp_cp": "tensor_and_context_parallel",
    "hcp": "hierarchical_context_parallel",
    "ep": "expert_model_parallel",
    "expt_tp": "expert_tensor_parallel",
    "tp_ep": "expert_tensor_and_model_parallel",
    "tp_ep_pp": "expert_tensor_model_pipeline_parallel",
    "tp_ep_pp_with_egtp_remat": "expert_tensor_model_pipeline_parallel with_egtp_remat",
    "tp_dp": "tensor_and_data_parallel",
    "tp_dp_cp": "tensor_and_data_parallel with_context_parallel",
    "dp": "data_parallel",
    "dp_cp": "data_parallel with_context_parallel",
    "dp_cp_ag": "data_parallel with_context_parallel independent_all_gather",
    "dp_cp_gtp_remat": "data_parallel with_context_parallel with_gtp_remat",
    "intra_dp_cp": "data_parallel with_context_parallel partial_data_parallel",
    "expt_dp": "expert_data_parallel",
    "expt_dp_gtp_remat": "expert_data_parallel with_gtp_remat",
    "intra_expt_dp": "expert_data_parallel partial_expert_data_parallel",
    "inter_dist_opt": "inter_distributed_optimizer_instance",
    "intra_dist_opt": "intra_distributed_optimizer_instance",
    "gtp_remat": "gtp_weight_remat",
    "expt_gtp_remat": "expert_gtp_weight_remat",
}
# A rank may have no such group; then the field is None.
_OPTIONAL = {"embd", "pos_embd", "hcp", "inter_dist_opt", "dp_cp_ag", "gtp_remat", "expt_gtp_remat"}
# What Megatron-core calls its classes; the last two up to 0.14.
_COLLECTIONS = ("ProcessGroupCollection", "ModelCommProcessGroups", "GradCommProcessGroups")
# Under what wrappers, trainers and engines keep a model; the last is asked first.
_WRAPPED = ("unwrapped_models", "wrapped_models", "model_chunks", "models", "model", "module")


class MissingGroupError(AttributeError, AssertionError):
    """There is no such group: Megatron-core's getters raise an ``AssertionError`` there."""


class ProcessGroupCollection:
    """The groups of the collection that was passed; where that is None, those of the globals."""

    layout: None = None  # a collection of Megatron-core has none

    def __init__(self, passed: object = None, part: object = None) -> None:
        self.passed = passed
        self._part = part  # what was found, and lacks what is asked for

    def _check(self) -> None:
        """Raise where the globals stand in for what has groups of other ranks than they have."""
        for field in _FIELDS if self._part is not None else ():
            if _are_apart(self._part, resolve(), field):
                raise RuntimeError(
                    "the collection of a model lacks a group, and the globals may not stand in: "
                    f"their {field} has other ranks. Give the model a collection with all groups."
                )
        self._part = None

    def __getattr__(self, field: str) -> Any:
        """The group of a field."""
        if field not in _FIELDS:
            raise AttributeError(f"{type(self).__name__} has no attribute {field!r}")
        found, is_there = getattr(self.passed, field, None), hasattr(self.passed, field)
        if self.passed is None:
            self._check()
            getter, is_there = _getter(field, "groups" if field == "hcp" else "group"), True
            with contextlib.suppress(AssertionError):
                found = None if getter is None else getter()
        if isinstance(found, list) and field == "hcp":
            found = tuple(found) or None
        if is_there and (found is not None or field in _OPTIONAL):
            return found
        raise self._missing(field)

    def size(self, field: str) -> int:
        """How many ranks are in the group of a field."""
        return cast(int, self._number(field, "world_size", lambda group: group.size()))

    def rank(self, field: str) -> int:
        """The index of this rank in the group of a field."""
        return cast(int, self._number(field, "rank", lambda group: group.rank()))

    def ranks(self, field: str) -> tuple[int, ...]:
        """The global ranks in the group of a field, in its order."""
        of_group = importlib.import_module("torch.distributed").get_process_group_ranks
        return tuple(self._number(field, "global_ranks", of_group))

    def _number(self, field: str, ending: str, of_group: Callable[[Any], Any]) -> Any:
        if self.passed is None and (getter := _getter(field, ending)) is not None:
            self._check()
            return getter()
        group = getattr(self, field)
        if group is None or isinstance(group, (list, tuple)):
            raise self._missing(field)
        return of_group(group)

    def _missing(self, field: str) -> MissingGroupError:
        passed = f"the {type(self.passed).__qualname__} passed as pg_collection"
        asked = "megatron.core.parallel_state" if self.passed is None else passed
        return MissingGroupError(
            f"{asked} has no group {field}, or several. "
            "Call initialize_model_parallel() before, or pass a collection that has it, such as "
            f'ProcessGroupCollection.use_mpu_process_groups(["{field}"]) of Megatron-core.'
        )


def resolve(pg_collection: object = None) -> ProcessGroupCollection:
    """The groups to work with: those that were passed, else those of Megatron-core's globals."""
    if isinstance(pg_collection, ProcessGroupCollection):
        return pg_collection
    return ProcessGroupCollection(pg_collection)


def was_passed(pg_collection: object) -> bool:
    """True if a collection was passed: not None, and not the globals in place of one."""
    return getattr(pg_collection, "passed", pg_collection) is not None


def groups_of(owner: object, *needs: str) -> ProcessGroupCollection:
    """The groups that a model carries: the first collection in it, from the outside in, that has
    the fields ``needs``; else those of Megatron-core's globals, as where its submodules have
    different groups. ``owner`` may also be what wraps a model, a list of these, or a collection.
    """
    if _is_collection(owner):
        return resolve(owner)
    found = part = None
    waiting, seen = [(owner, False)], {id(None)}
    while waiting:
        each, is_inside = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        carried = _carried(each)
        pg = next((pg for pg in carried if all(hasattr(pg, field) for field in needs)), None)
        if pg is not None:
            of_part = [] if found else [field for field in _FIELDS if _are_apart(part, pg, field)]
            if of_part or _differ(found, pg, needs):
                return ProcessGroupCollection(None, part)
            if not is_inside:
                return pg
            found = found or pg
            continue
        part = part or next(iter(carried), None)
        held = getattr(each, "__dict__", {})
        submodules = held.get("_modules") or {}
        chunks = each if isinstance(each, (list, tuple)) else ()
        waiting += [(inside, True) for inside in reversed(submodules.values())]
        waiting += [(chunk, is_inside) for chunk in reversed(chunks)]
        waiting += [(held.get(n, submodules.get(n)), is_inside) for n in _WRAPPED]
    return found or ProcessGroupCollection(None, part)


def _are_apart(one: object, other: object, field: str) -> bool:
    """Whether two have groups for a field that torch knows, of other ranks."""
    groups = [getattr(each, field, None) for each in (one, other)]
    torch_s = importlib.import_module("torch.distributed")
    if groups[0] is groups[1] or not all(isinstance(e, torch_s.ProcessGroup) for e in groups):
        return False
    with contextlib.suppress(KeyError, ValueError, RuntimeError):
        ranks, others = map(torch_s.get_process_group_ranks, groups)
        return bool(ranks != others)
    return False


def _differ(one: object, other: object, fields: Sequence[str]) -> bool:
    both = [e for e in fields or _FIELDS if hasattr(one, e) and hasattr(other, e)]
    return any(getattr(one, e) != getattr(other, e) for e in both)


def _carried(module: object) -> list[ProcessGroupCollection]:
    """The collections that an object itself has."""
    held = getattr(module, "__dict__", {})
    names = ("pg_collection", "_pg_collection", "model_comm_pgs", "grad_comm_pgs")
    found = (getattr(module, n, None) if hasattr(type(module), n) else held.get(n) for n in names)
    return [resolve(pg) for pg in found if _is_collection(pg)]


def _is_collection(value: object) -> bool:
    names = {each.__name__ for each in type(value).__mro__}
    return not names.isdisjoint(_COLLECTIONS) and getattr(value, "passed", value) is not None


def _globals() -> Any:
    """Megatron-core's globals, imported when they are asked."""
    return importlib.import_module("megatron.core").parallel_state  # megapg: keep


def _getter(field: str, ending: str) -> Callable[[], Any] | None:
    """The getter of a field, with the flags for its group; None where the core has none."""
    middle, *flags = _FIELDS[field].split()
    getter = getattr(_globals(), f"get_{middle}_{ending}", None)
    if getter is None or not _takes(getter, *flags):
        return None
    given = dict.fromkeys(flags, True)
    if "with_gtp_remat" in inspect.signature(getter).parameters:  # it is True unless given
        given.setdefault("with_gtp_remat", False)
    return functools.partial(getter, **given)


def _takes(getter: Callable[..., Any], *names: str) -> bool:
    parameters = inspect.signature(getter).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or parameters.keys() >= {*names}
