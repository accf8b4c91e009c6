"""Every exception of megapg. Catch :class:`MegapgError` to catch them all.

Each error says what is wrong, where, and what to do about it. The classes let code distinguish the
cases. They also derive from the builtin that existing code expects (``ValueError``,
``AttributeError``, ``RuntimeError``). Errors about a group that Megatron's globals lack are
``AssertionError`` too, as from Megatron's getters, because existing code catches that.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Self


class MegapgError(Exception):
    """Base class of every exception raised by megapg."""


class LayoutError(MegapgError, ValueError):
    """The sizes, order or ranks given do not form a parallel layout."""


class UnknownStageError(MegapgError, AssertionError):
    """A stage of a virtual pipeline is queried without a model chunk.

    It is an ``AssertionError`` because Megatron's getters raise that in this case.
    """


class UnknownFieldError(MegapgError, ValueError):
    """A name is no field of a process-group collection."""

    @classmethod
    def of(cls, name: str, fields: Sequence[str], *, where: str = "") -> Self:
        """Return the error for ``name``, with the field that it most likely means.

        Args:
            name: what was asked for.
            fields: the names that exist.
            where: the beginning of the message.
        """
        meant = did_you_mean(name, fields) or f"the fields are {', '.join(fields)}."
        return cls(f"{where}{name!r} is no field; {meant}")


_WORDS = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp", "expert": "ep"}


def did_you_mean(name: str, fields: Sequence[str]) -> str:
    """Return "did you mean ...?" with the field that a name most likely means, or nothing.

    Understands Megatron's words as well, such as ``tensor`` and ``tensor_model_parallel_group``.
    """
    words = str(name).lower().split("_")
    short = [_WORDS.get(w, w) for w in words if w not in ("model", "parallel", "group")]
    close = difflib.get_close_matches("_".join(short) or "mp", fields, n=1)
    return f"did you mean {close[0]!r}?" if close else ""


class MissingGroupError(MegapgError, AttributeError):
    """A collection was asked for a group that it does not hold.

    It is an ``AttributeError`` because Megatron-core 0.16 tests presence with ``hasattr``.
    """


class MissingGlobalGroupError(MissingGroupError, AssertionError):
    """Megatron's globals, used instead of a collection, do not hold that group.

    It is an ``AssertionError`` as well because the globals' getters raise that.
    """


class StaleGroupError(MegapgError, RuntimeError):
    """The session that owns these groups has closed or suspended them.

    Raised by every field of a collection whose groups were closed or made again. It is no
    ``AttributeError``, so ``hasattr`` does not hide it. A module that copied a group still holds
    the closed group, which nothing refuses but ``megapg.testing.refuse_closed_groups``.
    """


class ForeignGroupError(MegapgError, ValueError):
    """A value is no live process group of this process and rank."""


class SessionError(MegapgError, RuntimeError):
    """A session was used out of turn: opened twice, used after close, name taken."""


class PublishedError(MegapgError, RuntimeError):
    """``parallel_state`` is in use by a published collection and its thread."""


class GlobalReadError(MegapgError, RuntimeError):
    """Code read Megatron's globals where that is forbidden."""


class WrongGroupError(MegapgError, RuntimeError):
    """Megatron's globals answer with a group of another layout than the reading code was given.

    It is no ``AssertionError``: handlers around Megatron's getters must not hide it.
    """


class WrongGroupWarning(UserWarning):
    """The warning in place of :class:`WrongGroupError`, with ``MEGAPG_GUARD=warn``."""


class NoCollectionError(MegapgError, RuntimeError):
    """A function needs process groups, was passed none, and can't or mustn't use the globals."""


class NoGlobalGroupsError(NoCollectionError, MissingGlobalGroupError):
    """A function needs process groups, was passed none, and the globals are not initialised.

    It is an ``AssertionError`` as well because the globals' getters raise that. If the globals are
    initialised but must not be used, the error is a plain :class:`NoCollectionError`: a handler
    around a getter must not hide it.
    """


class GlobalGroupsWarning(UserWarning):
    """A function that was passed no collection took its groups from ``parallel_state``.

    One rank of a node prints it. With a filter ``error`` or ``always`` every rank has it.
    """


class UnsupportedOptionError(MegapgError, ValueError):
    """This backend or this version does not support an option. Options are never ignored."""


class UnsupportedVersionError(MegapgError, ImportError):
    """The installed Megatron-core or torch (or the lack of one) cannot do what was asked."""


class LaunchError(MegapgError, RuntimeError):
    """The environment does not give this process's rank, or contradicts itself."""


class RendezvousError(MegapgError, RuntimeError):
    """The ranks could not meet in time.

    Attributes:
        missing: global ranks that did not arrive, in ascending order; empty if unknown.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(sorted(missing))


class LayoutMismatchError(RendezvousError):
    """The ranks met with different layouts or options.

    Attributes:
        differences: setting name -> {global rank: value}.
    """

    def __init__(
        self, message: str, differences: Mapping[str, Mapping[int, str]] | None = None
    ) -> None:
        super().__init__(message)
        self.differences = {name: dict(values) for name, values in (differences or {}).items()}


class TeardownError(MegapgError, ExceptionGroup[Exception]):
    """Some groups could not be closed; every one was attempted.

    Each inner exception has a note with the fields and ranks of the group.
    """


class UnsupportedOffloadError(MegapgError, RuntimeError):
    """Groups can't be suspended in the requested way, or the ranks requested different ways.

    Raised on every rank before any change: the groups stay as they were.
    """


class OffloadError(MegapgError, ExceptionGroup[Exception]):
    """Suspending or resuming failed, here or on another rank; the groups were aborted everywhere.

    Every remaining step was attempted. The inner exceptions name the fields and ranks of a group,
    or other ranks and their errors. The session has failed: close it, and open a new one.
    """


class RankFailedError(MegapgError, ExceptionGroup[Exception]):
    """One or more ranks of a ``run_distributed`` call failed.

    Attributes:
        failures: rank -> its exception.
        results: rank -> its result, for the ranks that finished.
    """

    failures: Mapping[int, BaseException]
    results: Mapping[int, object]


class CheckpointError(MegapgError, RuntimeError):
    """A checkpoint could not be saved, read or restored."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint at the given place."""


class BrokenCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, truncated or changed.

    Attributes:
        problems: one line per damaged file, which begins with the file's name.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class UnsafeCheckpointError(CheckpointError):
    """A file of a checkpoint would run code, or create objects that no checkpoint needs."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the model, or can't be cut for another layout.

    Raised before anything in memory is overwritten.
    """


class CheckpointSaveError(CheckpointError):
    """A checkpoint was not saved. The previous one is unchanged.

    Attributes:
        problems: global rank -> its error.
    """

    def __init__(self, message: str, problems: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.problems = dict(problems or {})


class RefitError(MegapgError, ValueError):
    """Weights can't be moved into another layout, or another rank failed while they moved."""


class ParityInputError(MegapgError, ValueError):
    """Layouts can't be compared: the layouts, the model or the step do not allow it."""


class ParityError(MegapgError, AssertionError):
    """A model's results in a layout differ from its results on one rank."""


class PlanError(MegapgError, ValueError):
    """A cluster, a model or a rank that a plan was asked for does not exist or does not fit."""


class RngStateWarning(UserWarning):
    """Random streams could not be restored exactly; fresh ones were derived instead."""
