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

# (layouts -> their collections, the stack that closes them), inside layouts_kept()
_kept = None


@contextmanager
def layouts_kept():
    """Keep all layouts open until the block ends, and yield them again for equal sizes.

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
def opened(**layouts):
    """Open layouts in this order: ``globals``, and sessions of other names; each has its sizes.

    Yields the collections of the sessions.
    """
    if _kept is None:
        with _opened(layouts) as collections:
            yield collections
        return
    known, stack = _kept
    if repr(layouts) not in known:
        known[repr(layouts)] = stack.enter_context(_opened(layouts))
    yield known[repr(layouts)]


@contextmanager
def _opened(layouts):
    with ExitStack() as stack:
        found = []
        for name, sizes in layouts.items():
            if name == "globals":
                stack.enter_context(globals_of(**sizes))
            else:
                found.append(stack.enter_context(open_session(name, **sizes)).groups)
        yield found


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
