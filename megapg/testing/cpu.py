"""Lets Megatron-core train on a CPU with gloo.

Megatron-core assumes CUDA in some dozens of places. :func:`megatron_on_cpu` handles each of them
inside a ``with`` block: it replaces attributes of torch and of Megatron-core, and restores the old
ones at the end.

``PATCHES`` lists them. A row has the place, the replacement, and the upstream file that needs it.
If the installed Megatron-core or torch lacks the attribute of a row, that is an error, unless the
row is marked ``optional``. So a change upstream makes the kit fail, instead of doing half its job.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from megapg import torch_private
from megapg.megatron.core import core_version

__all__ = ["megatron_on_cpu"]

_CPU = torch.device("cpu")
_ABSENT = object()


@contextlib.contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run Megatron-core on the CPU inside the ``with`` block.

    Enter it on every rank, before the first Megatron-core module is built, and leave it after the
    last backward pass and optimizer step. The process groups must be gloo ones. Blocks nest, and
    each leaves every attribute as it was, also after an exception.

    Everything runs on the CPU even if there is a CUDA device: ``torch.cuda.is_available()`` returns
    False inside. TransformerEngine and Apex must not be installed, as their kernels take only CUDA
    tensors and Megatron-core picks them at import.

    The kit does not cover CUDA graphs, offloading, context parallelism and grouped GEMM. They fail
    with the error that torch or Megatron-core gives on a machine without CUDA.

    The CPU generator serves as the CUDA generator, so its state is not restored at the end. All
    threads of the process see the patched attributes. ``device="cuda"`` works in the thread that
    entered, and in the backward passes it starts.

    Raises:
        UnsupportedVersionError: Megatron-core is older than 0.16, or not installed.
        AttributeError: the installed Megatron-core or torch lacks a name the kit replaces.
    """
    core_version()
    # Owners first: a Megatron-core imported while patched would keep patched names.
    owners = [pkgutil.resolve_name(patch.owner) for patch in PATCHES]
    with contextlib.ExitStack() as undo:
        for owner, patch in zip(owners, PATCHES, strict=True):
            _apply(undo, owner, patch)
        rng_log = logging.getLogger("megatron.core.tensor_parallel.random")
        # A new object each time: a logger holds an object once, so the end of an inner block would
        # remove the outer block's filter.
        quiet = functools.partial(_is_not_the_rng_alarm)
        rng_log.addFilter(quiet)
        undo.callback(rng_log.removeFilter, quiet)
        # jit.py: jit_fuser is torch.compile, which on a CPU needs a C++ compiler and a minute.
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(_CudaMeansCpu())
        yield


@dataclass(frozen=True)
class _Patch:
    """Replace ``name`` of ``owner`` by ``make(old value)``."""

    owner: str  # "package.module" or "package.module:Class"
    name: str
    make: Callable[[Any], Any]
    optional: bool = False  # True: some supported version lacks it


def _apply(undo: contextlib.ExitStack, owner: Any, patch: _Patch) -> None:
    """Put one patch in place and register its removal."""
    # vars(), not getattr(): a staticmethod has to come back as the staticmethod it was.
    old = vars(owner).get(patch.name, _ABSENT)
    if old is _ABSENT:
        if not patch.optional:
            raise AttributeError(
                f"megatron_on_cpu: {patch.owner} has no attribute {patch.name!r}: this version "
                "of Megatron-core or torch is not known to the CPU kit"
            )
        undo.callback(delattr, owner, patch.name)
    else:
        undo.callback(setattr, owner, patch.name, old)
    setattr(owner, patch.name, patch.make(old))


def _always(value: Any) -> Callable[[Any], Any]:
    """Return a replacement that does not depend on the old value."""
    return lambda _old: value


# --- what the patches put in place --------------------------------------------------------


class _NoStream:
    """Replaces a CUDA stream or event. On a CPU all work is done when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _done(self, *args: object) -> None:
        pass

    wait = wait_event = wait_stream = record = synchronize = _done

    def record_event(self, event: _NoStream | None = None) -> _NoStream:
        return event or _NoStream()

    def query(self) -> bool:
        return True


def _no_op(*args: object, **kwargs: object) -> None:
    pass


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    if graph_safe:
        raise RuntimeError("megatron_on_cpu: graph-safe RNG states need a CUDA device")
    torch.default_generator.set_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _is_not_the_rng_alarm(record: logging.LogRecord) -> bool:
    """Drop the tracker's warning about a used CPU generator: here the tracker uses it itself."""
    return "CPU RNG state changed" not in record.getMessage()


def _on_the_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace ``maybe_move_tensor_to_cpu``, which ignores ``as_numpy`` for tensors on the CPU."""
    return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value


def _norm_with_sequence_parallel(old: Any) -> Any:
    """Build the torch norm as the fused norms are built under sequence parallelism.

    It computes the same, and marks its parameters. finalize_model_grads.py sums the gradients of
    marked parameters over the tensor-parallel group.
    """

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = old.__func__(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    return staticmethod(new)


def _uneven_all_gather(old: Any) -> Any:
    """Gather pieces of unequal size as NCCL does, with a broadcast for each."""

    def all_gather(pieces: Any, piece: Any, group: Any = None, async_op: bool = False) -> Any:
        if async_op or len({other.shape for other in pieces}) == 1:
            return old(pieces, piece, group, async_op)
        pieces[dist.get_rank(group)].copy_(piece)
        for source, other in enumerate(pieces):
            dist.broadcast(other, group=group, group_src=source)
        return None

    return all_gather


def _reduce_scatter(old: Any) -> Any:
    """Sum and scatter pieces, also uneven ones, with a reduction each if gloo can't."""
    gloo_can = torch_private.version() >= (2, 13)

    def reduce_scatter(
        result: Any, pieces: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any
    ) -> Any:
        if kwargs or (gloo_can and len({piece.shape for piece in pieces}) == 1):
            return old(result, pieces, op, group, **kwargs)
        for target, piece in enumerate(pieces):
            summed = piece.clone()
            dist.reduce(summed, op=op, group=group, group_dst=target)
            if target == dist.get_rank(group):
                result.copy_(summed)
        return None

    return reduce_scatter


def _backward_inside_the_mode(old: Any) -> Any:
    """Run the autograd engine with the mode on.

    torch switches a mode off while the mode handles a call. ``backward()`` is such a call, so the
    code below it would run without the mode.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with _CudaMeansCpu():
            return old(*args, **kwargs)

    return run


class _GlooForNccl:
    """Replaces ``torch.distributed`` in a module that asks for NCCL by name."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        if name.startswith("new_"):
            return lambda *args, backend: found(*args, backend="gloo")
        return found


_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe"

PATCHES: tuple[_Patch, ...] = (
    # param_and_grad_buffer.py, optimizer.py, p2p_communication.py, mappings.py: device=...
    _Patch("torch.cuda", "current_device", _always(lambda: _CPU)),
    # utils.py, moe/moe_logging.py: they have code for machines without CUDA
    _Patch("torch.cuda", "is_available", _always(lambda: False)),
    # p2p_communication.py (batched p2p), dist_checkpointing/strategies/filesystem_async.py
    _Patch("torch.cuda", "synchronize", _always(_no_op)),
    # distributed_data_parallel.py, moe/token_dispatcher.py, moe/shared_experts.py
    _Patch("torch.cuda", "Stream", _always(_NoStream)),
    # moe/token_dispatcher.py (d2h_event), dist_checkpointing/strategies/async_utils.py
    _Patch("torch.cuda", "Event", _always(_NoStream)),
    # param_and_grad_buffer.py (0.19), moe/token_dispatcher.py, moe/shared_experts.py
    _Patch("torch.cuda", "current_stream", _always(_NoStream)),
    # param_and_grad_buffer.py (0.16)
    _Patch("torch.cuda", "default_stream", _always(_NoStream)),
    # param_and_grad_buffer.py, moe/token_dispatcher.py: "with torch.cuda.stream(...)"
    _Patch("torch.cuda", "stream", _always(contextlib.nullcontext)),
    # tensor_parallel/random.py: CudaRNGStatesTracker.add, rerun_state_machine.py
    _Patch("torch.cuda", "get_rng_state", _always(_get_rng_state)),
    _Patch("torch.cuda", "set_rng_state", _always(_set_rng_state)),
    # tensor_parallel/random.py: _get_cuda_rng_state reaches through torch.cuda.random
    _Patch("torch.cuda.random", "get_rng_state", _always(_get_rng_state)),
    _Patch("torch.cuda.random", "set_rng_state", _always(_set_rng_state)),
    # tensor_parallel/random.py: model_parallel_cuda_manual_seed, CudaRNGStatesTracker.add
    _Patch("torch.cuda", "manual_seed", _always(_manual_seed)),
    # tensor_parallel/random.py: CudaRNGStatesTracker.fork queues it for a CUDA that never comes
    _Patch(_RANDOM, "_set_cuda_rng_state", _always(_set_rng_state)),
    # tensor_parallel/random.py CheckpointFunction.backward, layers.py (sequence parallel)
    _Patch(*torch_private.BACKWARD, _backward_inside_the_mode),
    # tensor_parallel/mappings.py: _gather_along_first_dim, _reduce_scatter_along_first_dim with
    # split sizes (alltoall dispatcher with expert tensor parallelism); gloo wants equal ones
    _Patch("torch.distributed", "all_gather", _uneven_all_gather),
    _Patch("torch.distributed", "reduce_scatter", _reduce_scatter),
    # bridge_communicator.py: new_group(..., backend='nccl'), between modules of one pipeline
    _Patch("megatron.core.pipeline_parallel.bridge_communicator", "dist", _always(_GlooForNccl())),
    # transformer/torch_norm.py: "sequence parallel not supported by torch LayerNorm"
    _Patch(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm",
        "__new__",
        _norm_with_sequence_parallel,
    ),
    # transformer/multi_latent_attention.py: 0.16 says True without TransformerEngine, and fails
    _Patch("megatron.core.transformer.multi_latent_attention", "HAVE_TE", _always(False)),
    # moe/moe_utils.py: RouterGatingLinearFunction; 0.16 leaves it undefined without TE
    _Patch(f"{_MOE}.moe_utils", "te_general_gemm", _always(None), optional=True),
    # moe/token_dispatcher.py: alltoall split sizes stay tensors when they were never on CUDA
    _Patch(f"{_MOE}.token_dispatcher", "maybe_move_tensor_to_cpu", _always(_on_the_host)),
    # moe/token_dispatcher.py, moe/shared_experts.py: streams are kept on the class, made on demand.
    # A stream made inside must not be found afterwards, nor one from before inside.
    _Patch(
        f"{_MOE}.token_dispatcher:MoEAlltoAllTokenDispatcher", "cuda_dtoh_stream", _always(None)
    ),
    _Patch(f"{_MOE}.shared_experts:SharedExpertMLP", "stream", _always(None)),
)


# --- device="cuda", Tensor.cuda(), Tensor.to("cuda"), Tensor.type() -------------------------

_NAMES_DEVICES = frozenset((str, torch.device))


def _on_cpu(value: Any) -> Any:
    """Return the CPU for a value that names a CUDA device, else the value itself."""
    named = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
    return _CPU if named else value


def _type_name(tensor: torch.Tensor, *dtype: Any, **kwargs: Any) -> Any:
    """Return ``Tensor.type()``, with a CUDA type for callers in Megatron-core's optimizer.

    distrib_optimizer.py, optimizer.py and clip_grads.py sort parameters by these names and refuse
    all others.
    """
    name = tensor.type(*dtype, **kwargs)
    asking = sys._getframe(2).f_globals.get("__name__", "")
    if isinstance(name, str) and asking.startswith("megatron.core.optimizer."):
        return name.replace("torch.", "torch.cuda.", 1)
    return name


def _device(*args: Any, **kwargs: Any) -> Any:
    """Return ``torch.device()``, with the CPU for ``f"cuda:{torch.cuda.current_device()}"``.

    mcore_fsdp_adapter.py and megatron_fsdp.py write that; the CPU is the current device here.
    ROLL's code for a CPU writes "cpu" in place of "cuda".
    """
    current = ("cuda:cpu", "cpu:cpu")
    return torch.device(*("cpu" if each in current else each for each in args), **kwargs)


_SPECIAL: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.cuda: lambda tensor, *args, **kwargs: tensor,  # language_module.py, optimizer.py
    torch.Tensor.type: _type_name,
    torch.device: _device,  # moe/token_dispatcher.py; translated when a tensor is made
}


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces CUDA devices by the CPU in the arguments of every torch function."""

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SPECIAL:
            return _SPECIAL[func](*args, **kwargs)
        if isinstance(kwargs.get("device"), int):  # an index means a CUDA device
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):  # rope_utils.py, with context parallelism
            kwargs["pin_memory"] = False
        if not _NAMES_DEVICES.isdisjoint(map(type, args)):  # in few calls
            args = tuple(map(_on_cpu, args))
        if kwargs:
            kwargs = {name: _on_cpu(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)
