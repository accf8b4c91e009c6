"""Raises an error for every read of Megatron's globals, to prove that none is left."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from megapg.errors import GlobalReadError
from megapg.megatron.core import parallel_state_module
from megapg.megatron.watching.advice import replacement
from megapg.megatron.watching.hook import Resolved, listening

if TYPE_CHECKING:
    from types import FrameType


@contextlib.contextmanager
def forbid_global_reads(allow: tuple[str, ...] | list[str] = ()) -> Iterator[None]:
    """Raise an error in every function that reads ``parallel_state`` inside the block.

    The reads are those that :func:`~megapg.megatron.trace_global_reads` records, in all threads. A
    trace may run at the same time, and records the forbidden reads too.

    Args:
        allow: modules that may read, each with its submodules. "megatron.core" allows the reads
            that Megatron-core makes whatever it is given. Publish the collection for those.

    Raises:
        GlobalReadError: at the read; the message has its place and the replacement.
    """
    if isinstance(cast("object", allow), str):
        raise TypeError(f"allow={allow!r}: give a list of modules, such as [{allow!r}].")
    with listening(_Ban(tuple(allow)), last=True):
        yield


def is_below(module: str, prefixes: Sequence[str]) -> bool:
    """True if ``module`` is one of ``prefixes`` or a submodule of one."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


@dataclass(frozen=True, eq=False)
class _Ban:
    """A listener that raises unless the reader's module is allowed to read."""

    allow: tuple[str, ...]

    def read(self, name: str, arguments: Mapping[str, object], caller: FrameType) -> None:
        instead = replacement(name, arguments).write or "what your own collection holds"
        module = caller.f_globals.get("__name__", "")
        self._check(
            module, caller, f"reads {_spelled(name, arguments)}", f"Write {instead} instead"
        )

    def resolved(self, answer: Resolved) -> None:
        if answer.explicit is None:
            owner, needs = answer.owner, answer.needs
            fields = f" with {', '.join(needs)}" if needs else ""
            # Megatron's schedules call the user's forward step: the function that falls back
            # counts.
            self._check(
                answer.module,
                answer.caller,
                f"calls {owner} without pg_collection, which so reads the globals",
                f"Pass it a collection{fields}: {owner}(..., pg_collection=pg), or "
                "functools.partial of it where others call it",
            )

    def _check(self, module: str, caller: FrameType, what: str, advice: str) -> None:
        if is_below(module, self.allow):
            return
        raise GlobalReadError(
            f"{caller.f_code.co_filename}:{caller.f_lineno}: {caller.f_code.co_qualname} {what} "
            f"of megatron.core.parallel_state, which is forbidden here. {advice}, or let the "
            f"module go on for now: forbid_global_reads(allow=[{module!r}])."
        )


def _spelled(name: str, arguments: Mapping[str, object]) -> str:
    """Return the read as the caller wrote it, without arguments that equal the default."""
    if name[0] == "_":
        return name
    getter = vars(parallel_state_module()).get(name)
    if getter is None:  # megapg's own access to the globals
        return f"{name}()"
    parameters = inspect.signature(getter).parameters
    given = [
        f"{key}={value!r}"
        for key, value in arguments.items()
        if value is not parameters[key].default
    ]
    return f"{name}({', '.join(given)})"
