"""Reports reads of Megatron's globals to listeners.

All listeners share one hook: a second hook would take the reporting code of the first for the
getters' own code. :mod:`megapg.megatron.marks` says where the hook is stored. Two kinds
of reads are reported:

* A call of a getter. The getter runs other code with the same signature, so calls by names that
  were bound earlier with ``from ... import`` are reported as well, in every thread.
* A read of a private global as an attribute of the module. The module gets a class that reports it.
  A value that was bound earlier with ``from ... import _X`` is not reported, and neither is
  ``vars(parallel_state)``.

:func:`~megapg.megatron.resolve` reports as well, and so does other code of the bridge that reads
globals for its caller.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, FunctionType, MappingProxyType, ModuleType
from typing import Protocol

from typing_extensions import override

from megapg.collection import ProcessGroupCollection
from megapg.megatron.core import BRIDGE, parallel_state_module
from megapg.megatron.marks import READS
from megapg.megatron.watching.advice import NOT_READS
from megapg.megatron.watching.replaced_code import calling_instead, twin, unwrapped
from megapg.torch_private import NOT_COMPILED

_READERS = ("get_", "is_", "has_", "model_parallel_is_initialized")
# The view of the globals is a collection.
_BRIDGE = (f"{BRIDGE}.", ProcessGroupCollection.__module__)
_installing = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """The result of ``resolve`` or ``groups_of`` for ``caller``."""

    owner: str  # the function that needs a collection
    # the collection that was passed or found; None if the globals are used
    explicit: ProcessGroupCollection | None
    needs: tuple[str, ...]  # the fields that are needed
    caller: FrameType  # the frame that can change that
    module: str  # of the function that falls back


class Listener(Protocol):
    """A receiver of reads. It is called in the reading thread, before the read returns."""

    def read(self, name: str, arguments: Mapping[str, object], caller: FrameType) -> None:
        """``caller`` calls a getter, with all of its arguments, or reads a private global."""

    def resolved(self, answer: Resolved) -> None:
        """A caller gets a collection, or the globals instead."""


class Hook:
    """Gets reports from getters, module and ``resolve`` while there is at least one listener."""

    def __init__(self, module: ModuleType) -> None:
        self.listeners: tuple[Listener, ...] = ()  # replaced, never changed: other threads read it
        self._module, self._class = module, type(module)
        self._state = vars(module)
        self._getters = [
            (function, function.__code__)
            for name, value in list(self._state.items())  # another thread may be publishing
            if name.startswith(_READERS) and name not in NOT_READS
            for function in [unwrapped(value, module)]
            if function is not None
        ]

    def resolved(self, answer: Resolved) -> None:
        """Call :meth:`Listener.resolved` of all listeners."""
        for listener in self.listeners:
            listener.resolved(answer)

    def tell(self, name: str, arguments: Mapping[str, object], reader: FrameType) -> None:
        """Call :meth:`Listener.read` of all listeners."""
        for listener in self.listeners:
            listener.read(name, arguments, reader)

    def watches(self, getter: Callable[..., object]) -> bool:
        """True if calls of this very function are reported."""
        return any(function is getter for function, _ in self._getters)

    def install(self) -> None:
        self._state[READS] = self
        try:
            for getter, _ in self._getters:
                getter.__code__ = calling_instead(getter, self._reporter(getter))
                vars(getter).update(NOT_COMPILED)
            self._module.__class__ = self._watching_class()
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        self._module.__class__ = self._class
        for getter, code in self._getters:
            getter.__code__ = code
            for name in NOT_COMPILED:
                vars(getter).pop(name, None)
        del self._state[READS]

    def _reporter(self, getter: FunctionType) -> Callable[[dict[str, object]], object]:
        name, original, state, tell = getter.__name__, twin(getter), self._state, self.tell

        def report(arguments: dict[str, object]) -> object:
            frame = sys._getframe(1)
            caller = frame.f_back  # None: called from C, in a thread or a callback
            if caller is None:
                tell(name, arguments, frame)
            # A getter that calls a getter is one read, and the bridge reports its own calls.
            elif caller.f_globals is not state and not _is_bridge(caller):
                tell(name, arguments, caller)
            return original(**arguments)

        return report

    def _watching_class(self) -> type[ModuleType]:
        state, tell, plain = self._state, self.tell, self._class.__getattribute__

        class Watched(self._class):  # type: ignore[misc, name-defined]
            @override
            def __getattribute__(self, name: str) -> object:
                if name[:1] == "_" and name[1:2].isupper() and name in state:
                    tell(name, {}, sys._getframe(1))
                return plain(self, name)  # super() would fail if the hook is removed meanwhile

        return Watched


@contextlib.contextmanager
def listening(listener: Listener, *, last: bool = False) -> Iterator[None]:
    """Report every read inside the block to ``listener``, in all threads.

    Blocks may overlap and end in any order. When the last one has ended, ``parallel_state`` is
    exactly as before. A listener that raises should be ``last``, so that the others get the read
    too.
    """
    attach(listener, last=last)
    try:
        yield
    finally:
        detach(listener)


def attach(listener: Listener, *, last: bool = False, module: ModuleType | None = None) -> None:
    """Report every read to ``listener`` from now on; see :func:`listening`.

    Args:
        listener: as there.
        last: as there.
        module: ``parallel_state``. Default: it is imported, which may wait for other threads.
    """
    if module is None:
        module = parallel_state_module()
    with _installing:
        hook = active()
        if hook is None:
            hook = Hook(module)
            hook.install()
        hook.listeners = (*hook.listeners, listener) if last else (listener, *hook.listeners)


def detach(listener: Listener) -> None:
    """Undo :func:`attach`, if it is not undone."""
    with _installing:
        hook = active()
        if hook is not None:
            hook.listeners = tuple(other for other in hook.listeners if other is not listener)
            if not hook.listeners:
                hook.uninstall()


def report(name: str, arguments: Mapping[str, object] = MappingProxyType({})) -> None:
    """Report a read that the bridge makes for a caller outside of it.

    ``name`` is a private global, a getter with all of its arguments, or the function that makes
    several reads.
    """
    hook = active()
    if hook is not None:
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_bridge(frame):
            frame = frame.f_back
        hook.tell(name, arguments, frame)


def report_call(getter: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Report a getter that the bridge has called, like any call of it.

    A function that replaces a getter reads no globals. If it calls the getter, the getter reports
    that itself.
    """
    hook = active()
    if hook is not None and hook.watches(getter):
        bound = inspect.signature(getter).bind(**arguments)
        bound.apply_defaults()
        report(getter.__name__, bound.arguments)


def _is_bridge(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_BRIDGE)


def active() -> Hook | None:
    """Return the running hook, or None."""
    module = sys.modules.get("megatron.core.parallel_state")
    return None if module is None else vars(module).get(READS)
