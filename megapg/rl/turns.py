"""Lets several models take turns in one process, each with its own groups and random streams.

Megatron-core has one set of globals and one set of random streams in a process. An engine that
reads them assumes that all models of its process have one layout.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Generator, Iterator
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megapg.errors import SessionError
from megapg.megatron import published
from megapg.rng import RandomStreams

if TYPE_CHECKING:
    from megapg.collection import ProcessGroupCollection
    from megapg.ownership.owner import Owner
    from megapg.ownership.session import Session

_EngineT = TypeVar("_EngineT")


class Turn:
    """Context in which one model has the process: its groups and its random streams. ::

        critic = megapg.Turn(session)
        with critic:
            engine = Engine(...)  # reads the globals and seeds the random streams
        with critic:
            engine.train_batch(batch)

    Inside, Megatron's globals show the groups of the session, as by :func:`megapg.published`. The
    random streams continue where the last turn ended: Python's, NumPy's, torch's, the device's and
    those of Megatron-core's tracker. Afterwards globals and streams are as before. Inside a turn,
    another turn of the same object changes nothing.

    Args:
        session: the owner of the groups. It may be suspended and resumed between turns.

    Raises:
        SessionError: on entry, if the session is suspended or closed.
        PublishedError: on entry, if another thread has a turn.
        UnsupportedVersionError: on entry, if Megatron-core is not installed.
    """

    def __init__(self, session: Owner) -> None:
        self.session = session
        self._streams = RandomStreams()
        self._open: list[contextlib.ExitStack] = []

    def __enter__(self) -> ProcessGroupCollection:
        groups = self.session.groups
        with contextlib.ExitStack() as entering:
            entering.enter_context(published(groups))
            if not self._open:
                entering.enter_context(self._streams.in_use())
            self._open.append(entering.pop_all())
        return groups

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.pop().__exit__(kind, error, traceback)


def on_session(engine: type[_EngineT], open_session: Callable[..., Session], /) -> type[_EngineT]:
    """Return a subclass of an engine that opens a session for each object. ::

        def open_session(config):
            return megapg.session(name=config.role, tp=config.tp, pp=config.pp)

        Engine = megapg.on_session(Engine, open_session)

    Use it for a class that reads Megatron's globals, and initialises them only if they are not
    initialised yet. Constructor and methods run in a :class:`Turn` of the object. A generator that
    a method returns, alone or in a tuple, also runs in turns. The object has two more attributes:
    ``session``, which the caller closes, and ``turn``, for code outside of the class. Properties,
    coroutines, class methods, static methods and the other special methods are unchanged.

    Args:
        engine: the class. It is not changed.
        open_session: called with the constructor's arguments, before the constructor. All ranks
            that construct the object call it.

    Raises:
        SessionError: on construction, if the class uses the name ``session`` or ``turn``.
    """
    constructor = cast("Callable[..., None]", engine.__init__)

    @functools.wraps(constructor)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as failed:
            session = failed.enter_context(open_session(*args, **kwargs))
            turn = Turn(session)
            mine = {"session": session, "turn": turn}
            for name, value in mine.items():
                _check_free(engine, hasattr(self, name), name)
                setattr(self, name, value)
            with turn:
                constructor(self, *args, **kwargs)
            for name, value in mine.items():
                _check_free(engine, getattr(self, name) is not value, name)
            failed.pop_all()

    namespace: dict[str, object] = {
        "__init__": construct,
        "__module__": engine.__module__,
        "__qualname__": engine.__qualname__,
        "__doc__": engine.__doc__,
    }
    for name in dir(engine):
        method = inspect.getattr_static(engine, name)
        plain = isinstance(method, FunctionType) and not inspect.iscoroutinefunction(method)
        if plain and not name.startswith("__"):
            namespace[name] = _in_turns(method)
    made = types.new_class(
        engine.__name__, (engine,), exec_body=lambda body: body.update(namespace)
    )
    return cast("type[_EngineT]", made)


def _check_free(engine: type, taken: bool, name: str) -> None:
    if taken:
        raise SessionError(
            f"on_session(): {engine.__qualname__} uses the attribute {name!r} itself. Rename it "
            "there, or put `with megapg.Turn(session):` around the calls of the class."
        )


def _in_turns(method: FunctionType) -> Callable[..., object]:
    @functools.wraps(method)
    def call(self: Any, *args: object, **kwargs: object) -> object:
        turn: Turn = self.turn
        with turn:
            result = method(self, *args, **kwargs)
        if type(result) is tuple:
            return tuple(_steps(each, turn) for each in result)
        return _steps(result, turn)

    return call


def _steps(result: object, turn: Turn) -> object:
    return _stepwise(result, turn) if isinstance(result, Generator) else result


def _stepwise(steps: Iterator[object], turn: Turn) -> Iterator[object]:
    while True:
        with turn:
            try:
                step = next(steps)
            except StopIteration:
                return
        yield step
