"""Layouts for the corpus: sessions and Megatron's globals with different ranks in one process."""

import datetime
import tempfile
import warnings
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

import megapg
from megapg import torch_private
from megapg.megatron import parallel_state

TIMEOUT = datetime.timedelta(seconds=30)
"""Ends a collective that another rank never enters, so that the next program can run."""

_NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "expt_tp": "expert_tensor_parallel_size",
    "order": "order",
}

ON_GLOBALS = []
"""Called after :func:`globals_of` has initialised the globals."""

# (arguments -> yielded value of a layout, the stack that closes it), inside layouts_kept()
_kept = None


@contextmanager
def layouts_kept():
    """Keep every layout open until the block ends, and yield it again for equal arguments.

    A program runs several times, and most of its time is spent on opening and closing groups.
    """
    global _kept
    with ExitStack() as stack:
        _kept = {}, stack
        try:
            yield
        finally:
            _kept = None


@contextmanager
def session_and_globals(globals_sizes, /, **sizes):
    """Open a session after another program has initialised the globals with other sizes.

    Yields the collection of the session.
    """
    with _layout(_open_session_and_globals, globals_sizes, sizes) as pg:
        yield pg


@contextmanager
def session_then_globals(globals_sizes, /, **sizes):
    """Open a session; another program then initialises the globals with other sizes.

    Yields the collection of the session.
    """
    with _layout(_open_session_then_globals, globals_sizes, sizes) as pg:
        yield pg


@contextmanager
def two_sessions(first, second, /):
    """Open two sessions; the globals are not initialised. Yields both collections."""
    with _layout(_open_two_sessions, first, second) as both:
        yield both


@contextmanager
def globals_of(**sizes):
    """Initialise ``parallel_state``, and destroy its groups after the block."""
    before = set(torch_private.known_groups())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(
            **{_NAMES[name]: size for name, size in sizes.items()},
            create_gloo_process_groups=False,
            distributed_timeout_minutes=TIMEOUT.total_seconds() / 60,
        )
    for each in ON_GLOBALS:
        each()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        _destroy(set(torch_private.known_groups()) - before)


def open_session(name="mine", **sizes):
    """Open a session whose collectives end after :data:`TIMEOUT`."""
    return megapg.session(name=name, timeout=30, collective_timeout=TIMEOUT, **sizes)


@contextmanager
def shared_folder():
    """Make a folder on rank 0, for all ranks of WORLD, and delete it after the block."""
    with ExitStack() as stack:
        path = [None]
        if dist.get_rank() == 0:
            path = [stack.enter_context(tempfile.TemporaryDirectory())]
        dist.broadcast_object_list(path, 0)
        yield path[0]
        dist.barrier()


def _destroy(groups):
    for group in groups:
        torch_private.part_in_peace(group)
        dist.destroy_process_group(group)


@contextmanager
def _layout(opened, *arguments):
    if _kept is None:
        with opened(*arguments) as given:
            yield given
        return
    layouts, stack = _kept
    key = repr((opened.__name__, arguments))
    if key not in layouts:
        layouts[key] = stack.enter_context(opened(*arguments))
    yield layouts[key]


@contextmanager
def _open_session_and_globals(globals_sizes, sizes):
    with globals_of(**globals_sizes), open_session(**sizes) as session:
        yield session.groups


@contextmanager
def _open_session_then_globals(globals_sizes, sizes):
    with open_session(**sizes) as session, globals_of(**globals_sizes):
        yield session.groups


@contextmanager
def _open_two_sessions(first, second):
    with open_session("first", **first) as one, open_session("second", **second) as other:
        yield one.groups, other.groups
