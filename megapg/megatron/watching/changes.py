"""Reports when code initialises or destroys Megatron's globals.

While a session is open, a wrapper runs around the code of ``initialize_model_parallel``, of
``destroy_model_parallel`` and of the ``set_*`` functions. Names that were bound before run the
wrapper too. Getters are left alone, so a training step pays nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import cast

from typing_extensions import override

from megapg.megatron.core import GLOBALS
from megapg.megatron.marks import CHANGES, PUBLISHED
from megapg.megatron.watching.replaced_code import calling_instead, twin, unwrapped

_CHANGES = ("initialize_model_parallel", "destroy_model_parallel", "set_")
# Schedules call these for each microbatch, and they name no group.
_NO_GROUP = "virtual_pipeline"


@dataclass
class _Watch:
    on_change: Callable[[], None] | None  # None: put everything back
    wrapped: dict[FunctionType, tuple[CodeType, CodeType]]  # the function's own code, the wrapper's
    set_at: str = ""


def report_changes(on_change: Callable[[], None] | None) -> None:
    """Call ``on_change()`` after each change of the globals; None ends that.

    The import of ``parallel_state`` counts as a change, if it is not imported yet.
    """
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Import)]
    module = loaded()
    if module is not None:
        watch = vars(module).setdefault(CHANGES, _Watch(None, {}))
        watch.on_change = on_change
        settle(module)
    elif on_change is not None:
        sys.meta_path.insert(0, _Import(on_change))


def loaded() -> ModuleType | None:
    """Return ``parallel_state``; None while it is being imported, and if it is no module."""
    module = sys.modules.get(GLOBALS)
    if not isinstance(module, ModuleType):
        return None
    # Another thread that imports the module holds a lock, and may wait for the guard's.
    importing = getattr(module.__spec__, "_initializing", False)
    return None if importing and CHANGES not in vars(module) else module


def settle(module: ModuleType) -> None:
    """Wrap the functions, or unwrap them, as was last asked for.

    ``published()`` replaces the code of the same functions, so nothing is touched inside it. It
    calls this at its end.
    """
    state = vars(module)
    watch: _Watch | None = state.get(CHANGES)
    if watch is None or PUBLISHED in state:
        return
    for function, (own, wrapper) in list(watch.wrapped.items()):
        if watch.on_change is None or function.__code__ is not wrapper:
            if function.__code__ is wrapper:
                function.__code__ = own
            del watch.wrapped[function]
    if watch.on_change is None:
        del state[CHANGES]
        return
    for name, value in list(state.items()):
        if name.startswith(_CHANGES) and _NO_GROUP not in name and callable(value):
            found = unwrapped(value, module)
            if found is not None and found not in watch.wrapped:
                own = found.__code__
                found.__code__ = calling_instead(found, _reporter(found, watch))
                watch.wrapped[found] = own, found.__code__


def set_at(state: Mapping[str, object]) -> str:
    """Return the file and line that last changed the globals; empty if the change was not seen."""
    watch = cast("_Watch | None", state.get(CHANGES))
    return watch.set_at if watch is not None else ""


def _reporter(function: FunctionType, watch: _Watch) -> Callable[[dict[str, object]], object]:
    original = twin(function)

    def run(arguments: dict[str, object]) -> object:
        try:
            return original(**arguments)
        finally:
            caller = sys._getframe(1).f_back
            if caller is not None:
                watch.set_at = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            if watch.on_change is not None:
                watch.on_change()

    return run


class _Import(importlib.abc.MetaPathFinder):
    """Waits for the import of ``parallel_state``, once."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    @override
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != GLOBALS:
            return None
        sys.meta_path[:] = [each for each in sys.meta_path if each is not self]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._on_change)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module with its own loader, and reports that it is there."""

    def __init__(self, own: importlib.abc.Loader, on_change: Callable[[], None]) -> None:
        self._own, self._on_change = own, on_change

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    @override
    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        vars(module)[CHANGES] = _Watch(None, {})  # to recognise the module as imported
        self._on_change()
