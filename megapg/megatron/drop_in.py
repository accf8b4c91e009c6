"""Megatron's ``initialize_model_parallel`` and ``destroy_model_parallel``, based on a session.

They are for a training loop that calls these two itself: change one import. Until the groups are
destroyed, every getter of ``parallel_state`` returns the session's groups.
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
from megapg.megatron.marks import DROP_IN
from megapg.megatron.publish import published
from megapg.ownership.closing import leave
from megapg.ownership.opening import session
from megapg.ownership.session import Session

_NAME = "parallel_state"


def initialize_model_parallel(
    *sizes: int | None, **arguments: Unpack[MegatronArguments]
) -> Session:
    """Open a session with the arguments of Megatron's function of this name.

    It makes one communicator for all groups with the same ranks. The calling thread publishes the
    session's groups (:func:`~megapg.megatron.published`) until :func:`destroy_model_parallel`.
    Every rank calls it, as it calls Megatron's. One difference: torch.distributed may be
    uninitialised, and the session then initialises it.

    Args:
        *sizes: the arguments of the installed core's function, in its order.
        **arguments: the same by name.

    Returns:
        The session. Its ``groups`` may be passed as ``pg_collection``.

    Raises:
        TypeError: the installed core's function has no such argument.
        UnsupportedOptionError: an argument that a session can't honour, with the reason.
        SessionError: called twice, without :func:`destroy_model_parallel` in between.
        LayoutError: the sizes do not fit together, or do not fit the number of ranks.
    """
    state = vars(parallel_state_module())
    if DROP_IN in state:
        raise SessionError(
            "initialize_model_parallel(): the groups are there already. Call "
            "megapg.megatron.destroy_model_parallel() first, or open a second layout with "
            "megapg.session(..., name=...)."
        )
    given = inspect.signature(_megatrons("initialize_model_parallel")).bind(*sizes, **arguments)
    given.apply_defaults()  # Megatron's default is to make gloo companions
    minutes = cast("float", given.arguments["distributed_timeout_minutes"])
    # A rank may be as late here as at a collective.
    opened = session(name=_NAME, timeout=60.0 * minutes, **session_arguments(**given.arguments))
    with contextlib.ExitStack() as until_open:
        until_open.push(opened)
        showing = until_open.enter_context(contextlib.ExitStack())
        showing.enter_context(published(opened.groups))
        state[DROP_IN] = _Open(opened, showing)
        until_open.pop_all()
    return opened


def destroy_model_parallel() -> None:
    """Close the session of :func:`initialize_model_parallel`. Every rank calls it.

    Megatron's own function forgets the groups and leaves 17 to 20 of them open; this one leaves
    none. Groups made by Megatron's function are left to Megatron's. A second call does nothing.

    Raises:
        TeardownError: something could not end in order; it has ended all the same.
    """
    opened = _pop_open()
    if opened is None:
        _megatrons("destroy_model_parallel")()
        return
    opened.both().close()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Replace ``parallel_state``'s own two functions with those of this module in the block.

    An unchanged script that calls Megatron's functions then gets a session. The script must be
    imported inside, because a name that was bound before refers to Megatron's function. At the end
    the functions are restored. A session that is still open is ended on this rank alone: the other
    ranks may have ended, or be busy for long. After an exception it is aborted. ``sys.exit()``
    counts as a normal end, with another exit code as an exception.
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
        elif (opened := _pop_open()) is not None:
            with opened.both():
                raise
        raise
    state.update(before)
    _leave()


def _leave() -> None:
    if (opened := _pop_open()) is not None:
        try:
            opened.showing.close()
        finally:
            leave(opened.session)


@dataclass(frozen=True)
class _Open:
    """The session that :func:`initialize_model_parallel` has opened."""

    session: Session
    showing: contextlib.ExitStack  # publishes its groups

    def both(self) -> contextlib.ExitStack:
        """Return a stack whose end hides the groups and closes the session, even if suspended."""
        stack = contextlib.ExitStack()
        stack.push(self.session)
        stack.push(self.showing)
        return stack


def _pop_open() -> _Open | None:
    found: _Open | None = vars(parallel_state_module()).pop(DROP_IN, None)
    return found


def _megatrons(name: str) -> Callable[..., None]:
    """Return the core's own function, even if it is replaced by this module's."""
    function: Callable[..., None] = inspect.unwrap(vars(parallel_state_module())[name])
    return function
