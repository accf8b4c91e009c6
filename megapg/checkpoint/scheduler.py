"""The scheduler's state, restored exactly as it was saved or not at all.

Loading uses the scheduler's own ``load_state_dict``. Megatron-core's adds the saved steps to the
steps it has taken, and may fail half-way. Besides itself, a scheduler changes the learning rate and
weight decay in its optimizer's parameter groups. So a load is first tried and undone
(:func:`check`), before anything else is changed. :func:`restore` then does it for good.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim.lr_scheduler import LRScheduler

from megapg.checkpoint.state import Stateful
from megapg.errors import CheckpointMismatchError

_COUNTER = "num_steps"
"""The attribute and state key of the step counter in Megatron-core's scheduler and copies of it."""


def check(scheduler: Stateful, saved: Mapping[str, object]) -> None:
    """Check that the scheduler accepts this state. The scheduler is unchanged afterwards.

    Raises:
        CheckpointMismatchError: it refuses the state, or two loads of it give different results.
    """
    with _undone(scheduler):
        try:
            restore(scheduler, saved)
            once = copy.deepcopy(scheduler.state_dict())
            restore(scheduler, saved)
            twice = scheduler.state_dict()
        except Exception as error:
            said = f"{type(error).__name__}: {error}".rstrip(".: ")
            raise CheckpointMismatchError(
                f"the scheduler does not take the state that was saved ({said}). Build it as it "
                "was, or pass load_scheduler=False. Nothing was changed."
            ) from error
        moved = sorted(name for name in twice if not _equal(once.get(name), twice[name]))
        if moved:
            raise CheckpointMismatchError(
                f"{type(scheduler).__name__}.load_state_dict adds what it loads to what is there: "
                f"{', '.join(moved)} differs after every load of the same state. Let it set the "
                "values, or pass load_scheduler=False. Nothing was changed."
            )


def restore(scheduler: Stateful, saved: Mapping[str, object]) -> None:
    """Load this state into the scheduler, and the matching values into its optimizer's groups.

    Args:
        scheduler: in any state.
        saved: its ``state_dict()`` at the save; it is copied.
    """
    for each in filter(_is_stateful, _parts(scheduler)):
        state = saved if each is scheduler else each.state_dict()
        if _COUNTER in state and type(getattr(each, _COUNTER, None)) is int:
            setattr(each, _COUNTER, 0)
    scheduler.load_state_dict(copy.deepcopy(dict(saved)))
    outer = _outermost(scheduler)
    for each in outer:
        if sum(other.optimizer is each.optimizer for other in outer) > 1:
            continue  # only the scheduler knows which of them is active
        if isinstance(each, OptimizerParamScheduler):
            each.step(0)  # it set the groups before it had loaded the weight decay
        else:
            # torch's leave the groups to the optimizer's own state, which may not have been loaded.
            groups = each.optimizer.param_groups
            for group, rate in zip(groups, each.get_last_lr(), strict=False):
                _set(group, "lr", rate)


def _outermost(scheduler: Stateful) -> list[Any]:
    """Return the schedulers of Megatron-core and torch that are not part of another of them."""
    kinds = (OptimizerParamScheduler, LRScheduler)
    known = [each for each in _parts(scheduler) if isinstance(each, kinds)]
    inner = {id(part) for each in known for part in _parts(vars(each))}
    return [each for each in known if id(each) not in inner]


def _set(group: dict[str, Any], name: str, value: object) -> None:
    live = group.get(name)
    if isinstance(live, torch.Tensor):  # captured by a CUDA graph, so filled in place
        live.copy_(torch.as_tensor(value))
    else:
        group[name] = value


# -- undoing ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _undone(scheduler: Stateful) -> Iterator[None]:
    put_back = [each for part in _parts(scheduler) for each in _memory(part)]
    try:
        yield
    finally:
        for each in put_back:
            each()


def _parts(value: Any, seen: dict[int, object] | None = None) -> Iterator[Any]:
    """Yield every object that a load may change: ``value``, its attributes, their items and so on.

    Objects without state are left out. Of an optimizer only the values of its groups are included.
    """
    seen = {} if seen is None else seen
    inner: Iterable[Any] = ()
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set):
        inner = list(value)
    elif _is_optimizer(value):
        inner = [group[name] for group in value.param_groups for name in group if name != "params"]
    elif _is_stateful(value):
        inner = [vars(value)] if hasattr(value, "__dict__") else []
    elif not isinstance(value, torch.Tensor | np.ndarray):
        return
    if id(value) not in seen:
        seen[id(value)] = value
        yield value
        for each in inner:
            yield from _parts(each, seen)


def _is_stateful(value: object) -> bool:
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, torch.nn.Module | type)
        and not _is_optimizer(value)
    )


def _is_optimizer(value: object) -> bool:
    return not isinstance(value, type) and hasattr(value, "param_groups")


def _memory(part: Any) -> Iterator[Callable[[], object]]:
    """Yield functions that restore a part to its present value, in place."""
    if isinstance(part, torch.Tensor):
        yield partial(part.detach().copy_, part.detach().clone())
    elif isinstance(part, np.ndarray):
        yield partial(np.copyto, part, part.copy())
    elif isinstance(part, dict | list | set):
        yield partial(_refill, part, copy.copy(part))
    elif _is_optimizer(part):
        for group in part.param_groups:
            yield partial(_refill, group, copy.copy(group))
    elif not isinstance(part, tuple) and not hasattr(part, "__dict__"):
        yield partial(restore, part, copy.deepcopy(part.state_dict()))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, torch.Tensor | np.ndarray) or isinstance(other, torch.Tensor | np.ndarray):
        return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)
    return one is other or bool(one == other) or (one != one and other != other)
