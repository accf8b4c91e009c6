"""Starts the guard when a second layout appears, and stops it when that has gone."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Literal, TypeAlias, cast, get_args

from megapg.errors import UnsupportedOptionError, WrongGroupError, WrongGroupWarning
from megapg.launch.environment import overridden
from megapg.megatron.core import globals_of_core
from megapg.megatron.watching.alive import differing, layouts
from megapg.megatron.watching.changes import report_changes
from megapg.megatron.watching.hook import Resolved, attach, detach
from megapg.megatron.watching.judge import Judge
from megapg.ownership.closing import on_open_or_close, open_owners

GuardMode: TypeAlias = Literal["error", "warn", "off"]
"""What the guard does about a read that it refuses."""

VARIABLE = "MEGAPG_GUARD"
_MARK = "__megapg_guard__"  # where the guard lives in parallel_state: no state of our own
_looking = threading.RLock()


@contextlib.contextmanager
def guard(mode: GuardMode) -> Iterator[None]:
    """Set what the guard does while the block runs.

    The guard is on by default. It runs while this process has two layouts with different ranks: two
    open sessions, or a session and globals that other code initialised. A read of the globals is
    refused if the nearest function on the stack that was given a group was given one with other
    ranks. Outside of ``published()``, a read is also refused if no function was given a group.
    The block sets the environment variable ``MEGAPG_GUARD``, for all threads of this process and
    for processes that start meanwhile.

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


def mode_now() -> GuardMode:
    """Return what ``MEGAPG_GUARD`` says.

    Raises:
        UnsupportedOptionError: it names no mode.
    """
    return _check(os.environ.get(VARIABLE) or "error", f"the environment variable {VARIABLE}")


def judge_now() -> Judge | None:
    """Return a judge of reads, also with ``MEGAPG_GUARD=off``; None while the layouts agree."""
    state = globals_of_core()
    if _MARK in state:
        return cast("_Guard", state[_MARK]).judge
    fields = differing(layouts()) if open_owners() and state else frozenset[str]()
    return Judge(fields) if fields else None


def look() -> None:
    """Start or stop the guard, as the layouts of this process demand."""
    with _looking:
        mode = mode_now() if open_owners() else "off"
        wanted = mode != "off"
        report_changes(look if wanted else None)
        state = cast("dict[str, object]", globals_of_core())
        fields = differing(layouts()) if wanted and state else frozenset[str]()
        running = cast("_Guard | None", state.get(_MARK))
        if running is not None and (not fields or running.mode != mode):
            del state[_MARK]
            detach(running)
            running = None
        if running is not None:
            running.judge.fields = fields
        elif fields:
            state[_MARK] = started = _Guard(Judge(fields), mode)
            attach(started, last=True)


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


on_open_or_close(look)
