"""Starts the guard when a second layout appears, and stops it when one layout is left."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from megapg.errors import UnsupportedOptionError, WrongGroupError, WrongGroupWarning
from megapg.launch.environment import overridden
from megapg.megatron.core import globals_of_core
from megapg.megatron.marks import GUARD
from megapg.megatron.watching.changes import loaded, report_changes
from megapg.ownership.closing import on_open_or_close, open_owners

if TYPE_CHECKING:
    from megapg.megatron.watching.contradiction import Judge
    from megapg.megatron.watching.hook import Resolved

GuardMode: TypeAlias = Literal["error", "warn", "off"]
"""What the guard does about a read that it refuses."""

VARIABLE = "MEGAPG_GUARD"
_looking = threading.RLock()


@contextlib.contextmanager
def guard(mode: GuardMode) -> Iterator[None]:
    """Set what the guard does while the block runs.

    The guard is on by default. It runs while this process has two layouts with different ranks: two
    open sessions, or a session and globals that other code initialised. A read of the globals is
    refused if the nearest function on the stack that was given a group was given one with other
    ranks. Outside of ``published()``, a read is also refused if no function was given a group.
    The block sets the environment variable ``MEGAPG_GUARD``, for all threads of this process and
    for processes that start meanwhile. Without ``with`` nothing happens.

    Args:
        mode: ``"error"`` raises :class:`~megapg.errors.WrongGroupError`, ``"warn"`` warns with
            :class:`~megapg.errors.WrongGroupWarning` once per place, ``"off"`` does nothing.

    Raises:
        UnsupportedOptionError: another mode.
    """
    _check(mode, "guard()")
    try:
        with overridden({VARIABLE: mode}):
            look()
            yield
    finally:
        look()


def fields_that_differ() -> frozenset[str]:
    """Return the fields on which the layouts of this process differ, whatever the mode."""
    guarding = cast("_Guard | None", globals_of_core().get(GUARD))
    if guarding is not None:
        return guarding.judge.fields
    if os.environ.get(VARIABLE) != "off":
        return frozenset()
    return _differing() if open_owners() else frozenset()


def _differing() -> frozenset[str]:
    from megapg.megatron.watching.alive import differing, layouts  # needs what publishes

    return differing(layouts())


def look() -> None:
    """Start or stop the guard, as the layouts of this process demand."""
    with _looking:
        mode = _mode() if open_owners() else "off"
        report_changes(look if mode != "off" else None)
        module = loaded()
        state = {} if module is None else vars(module)
        fields = _differing() if mode != "off" and state else frozenset[str]()
        running = cast("_Guard | None", state.get(GUARD))
        if running is not None and (not fields or running.mode != mode):
            _stop(running, state)
            running = None
        if running is not None:
            running.judge.fields = fields
        elif fields:
            state[GUARD] = _start(fields, mode, module)


def _start(fields: frozenset[str], mode: GuardMode, module: ModuleType | None) -> _Guard:
    # Loaded with the second layout: most processes have one.
    from megapg.megatron.watching.contradiction import Judge
    from megapg.megatron.watching.hook import attach

    started = _Guard(Judge(fields), mode)
    attach(started, last=True, module=module)
    return started


def _stop(running: _Guard, state: dict[str, object]) -> None:
    from megapg.megatron.watching.hook import detach

    detach(running)
    del state[GUARD]


def _mode() -> GuardMode:
    """Return the mode; ``"error"`` if the environment names none, which a session refuses."""
    mode = os.environ.get(VARIABLE)
    return cast("GuardMode", mode) if mode in get_args(GuardMode) else "error"


def _opened() -> None:
    _check(os.environ.get(VARIABLE) or "error", f"the environment variable {VARIABLE}")
    look()


@dataclass(frozen=True, eq=False)
class _Guard:
    """Listens to reads, and refuses those that contradict what their code was given."""

    judge: Judge
    mode: GuardMode

    def read(self, name: str, arguments: Mapping[str, object], caller: FrameType) -> None:
        wrong = self.judge.judge(name, arguments, caller)
        if wrong is None:
            return
        if self.mode == "error":
            raise WrongGroupError(str(wrong))
        warnings.warn_explicit(
            str(wrong),
            WrongGroupWarning,
            caller.f_code.co_filename,
            caller.f_lineno,
            registry=caller.f_globals.setdefault("__warningregistry__", {}),
        )

    def resolved(self, answer: Resolved) -> None:
        """Do nothing. The hook reports each read of the globals as well."""


def _check(mode: str, where: str) -> GuardMode:
    if mode not in get_args(GuardMode):
        raise UnsupportedOptionError(
            f"{where}: {mode!r} is no mode of the guard; use {', '.join(get_args(GuardMode))}."
        )
    return cast("GuardMode", mode)


on_open_or_close(opened=_opened, closed=look)
look()  # for owners that were opened before this import
