"""Megatron's ``initialize_model_parallel`` and ``destroy_model_parallel``, with a session behind.

For a training loop that calls these two itself: one import changes. Every getter of
``parallel_state`` answers from the session's groups until they are destroyed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Unpack, cast

from megapg.errors import SessionError
from megapg.megatron.arguments import MegatronArguments, session_arguments
from megapg.megatron.core import parallel_state_module
from megapg.megatron.publish import published
from megapg.ownership.closing import leave
from megapg.ownership.opening import session
from megapg.ownership.session import Session

_NAME = "parallel_state"
_MARK = "__megapg_drop_in__"  # where the open session lives in parallel_state: no state of our own


def initialize_model_parallel(
    *sizes: int | None, **arguments: Unpack[MegatronArguments]
) -> Session:
    """As Megatron's function of this name, with the same arguments, but by a session.

    Makes one communicator where several groups have the same ranks. In the thread that calls this
    the globals show the session's groups (:func:`~megapg.megatron.published`), and stay so until
    :func:`destroy_model_parallel`. Every rank calls it, as it calls Megatron's. The one difference:
    torch.distributed may be uninitialised, and the session makes it then.

    Args:
        *sizes: the arguments of the installed core's function, in its order.
        **arguments: the same by name.

    Returns:
        The session, whose ``groups`` may be passed on as ``pg_collection``.

    Raises:
        TypeError: the installed core's function has no such argument.
        UnsupportedOptionError: an argument that a session can't honour, with the reason.
        SessionError: called twice, with no :func:`destroy_model_parallel` in between.
        LayoutError: the sizes do not fit together, or not the ranks there are.
    """
    state = vars(parallel_state_module())
    if _MARK in state:
        raise SessionError(
            "initialize_model_parallel(): the groups are there already. Call "
            "megapg.megatron.destroy_model_parallel() first, or open a second layout with "
            "megapg.session(..., name=...)."
        )
    given = inspect.signature(_megatrons("initialize_model_parallel")).bind(*sizes, **arguments)
    given.apply_defaults()  # Megatron makes gloo companions unless it is told not to
    minutes = cast("float", given.arguments["distributed_timeout_minutes"])
    # A rank may be as late as it may be to a collective.
    opened = session(name=_NAME, timeout=60.0 * minutes, **session_arguments(**given.arguments))
    with contextlib.ExitStack() as until_open:
        until_open.push(opened)
        showing = until_open.enter_context(contextlib.ExitStack())
        showing.enter_context(published(opened.groups))
        state[_MARK] = _Open(opened, showing)
        until_open.pop_all()
    return opened


def destroy_model_parallel() -> None:
    """Close the session of :func:`initialize_model_parallel`. Every rank calls it.

    Megatron's own forgets the groups and leaves 17 to 20 of them open; this leaves none. Groups
    that Megatron's function made are left to Megatron's. A second call does nothing.

    Raises:
        TeardownError: something could not end in order; it has ended all the same.
    """
    opened = _taken()
    if opened is None:
        _megatrons("destroy_model_parallel")()
        return
    opened.both().close()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """In the block, ``parallel_state``'s own two functions are those of this module.

    So a script that calls Megatron's gets a session, with no line changed. It must be imported
    inside: a name that was bound before is Megatron's. At the end the functions are put back, and
    what was opened inside is ended on this rank alone: the others may have gone before, or be at
    work for long. After an exception it is aborted. ``sys.exit()`` is the former, with another exit
    code the latter.
    """
    state = vars(parallel_state_module())
    ours = (initialize_model_parallel, destroy_model_parallel)
    before = {each.__name__: state[each.__name__] for each in ours}
    for each in ours:
        # Its signature is Megatron's, and `published` finds the original behind it.
        state[each.__name__] = functools.wraps(before[each.__name__])(functools.partial(each))
    try:
        yield
    except BaseException as error:
        state.update(before)
        if isinstance(error, SystemExit) and not error.code:
            _leave()
        elif (opened := _taken()) is not None:
            with opened.both():
                raise
        raise
    state.update(before)
    _leave()


def _leave() -> None:
    if (opened := _taken()) is not None:
        try:
            opened.showing.close()
        finally:
            leave(opened.session)


@dataclass(frozen=True)
class _Open:
    """What :func:`initialize_model_parallel` has opened."""

    session: Session
    showing: contextlib.ExitStack  # its groups in the globals

    def both(self) -> contextlib.ExitStack:
        """A stack whose end hides the groups and closes the session, even a suspended one."""
        stack = contextlib.ExitStack()
        stack.push(self.session)
        stack.push(self.showing)
        return stack


def _taken() -> _Open | None:
    taken: _Open | None = vars(parallel_state_module()).pop(_MARK, None)
    return taken


def _megatrons(name: str) -> Callable[..., None]:
    """The core's own function, also while one of ours stands in for it."""
    function: Callable[..., None] = inspect.unwrap(vars(parallel_state_module())[name])
    return function
