"""A small, real Megatron-core GPT training run, used by the demo and the tests.

Model, pipeline schedule, optimizer and gradient exchange are Megatron-core's own; nothing is
simulated. The same job runs in two ways: with a process-group collection, or with the globals of
``parallel_state``. Both give the same bits. See :func:`train`.

It runs on GPUs without changes, and on a CPU inside :func:`megapg.testing.cpu.megatron_on_cpu`.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megapg import load_checkpoint, save_checkpoint
from megapg.collection import ProcessGroup, ProcessGroupCollection
from megapg.megatron import parallel_state, schedule_collection
from megapg.tools.demo.job import VOCABULARY, Checkpoints, GPTRun, TrainingResult


def train(
    run: GPTRun,
    text: bytes,
    pg_collection: ProcessGroupCollection | None,
    on_step: Callable[[int, float, int], None] | None = None,
    checkpoints: Checkpoints | None = None,
) -> TrainingResult:
    """Train a GPT on ``text``. Every rank of the job calls it.

    The samples of a step depend only on the seed and on their place in the global batch. Layouts
    with the same global batch get the same data.

    Args:
        run: the job. Its sizes are those of the groups.
        text: the training text, longer than ``run.seq_length`` bytes; the same on every rank.
        pg_collection: the groups. Publish them around this call, because Megatron-core still reads
            some from ``parallel_state`` (the unfused cross entropy, the memory buffer). None: take
            every group from ``parallel_state``.
        on_step: called after each step with the step's number from 0, its mean loss, and the tokens
            trained on so far.
        checkpoints: the directory to save to or to resume from.

    Raises:
        ValueError: ``text`` is too short.
    """
    if len(text) <= run.seq_length:
        raise ValueError(f"text has {len(text)} bytes, needs more than {run.seq_length}")
    pp_group, dp_group = _pipeline_and_data_groups(pg_collection)
    _seed(run.seed + 100 * pp_group.rank(), pg_collection)
    chunks = build_chunks(run, pg_collection, pp_group)
    optimizer = build_optimizer(run, chunks, pg_collection)
    forward_backward = schedule(run, chunks, pg_collection)

    def mean_loss(step: int, *, forward_only: bool = False) -> float:
        # Every chunk of this stage reads the same microbatches separately.
        batches = [_batches(run, text, step, dp_group) for _ in chunks]
        reported = forward_backward(
            data_iterator=batches if run.vpp else batches[0], forward_only=forward_only
        )
        if not forward_only:
            optimizer.step()
        return mean_over_job(reported, pp_group, dp_group)

    def without_dropout(step: int) -> float:
        for chunk in chunks:
            chunk.eval()
        loss = mean_loss(step, forward_only=True)
        for chunk in chunks:
            chunk.train()
        return loss

    first, at_checkpoint = 0, None
    if checkpoints is not None and checkpoints.resume:
        first = load_checkpoint(
            checkpoints.directory, model=chunks, optimizer=optimizer, pg_collection=pg_collection
        ).iteration
        at_checkpoint = without_dropout(first)
    tokens = run.seq_length * run.micro_batch_size * run.num_microbatches * dp_group.size()
    losses: list[float] = []
    start = time.perf_counter()
    for step in range(first, run.steps):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(mean_loss(step))
        if on_step is not None:
            on_step(step, losses[-1], (step + 1) * tokens)
        if checkpoints is not None and checkpoints.save_after == step + 1:
            save_checkpoint(
                checkpoints.directory,
                step + 1,
                model=chunks,
                optimizer=optimizer,
                pg_collection=pg_collection,
                asynchronous=True,
            )
            at_checkpoint = without_dropout(step + 1)
    seconds = time.perf_counter() - start

    for chunk in chunks:
        # The optimizer leaves the gathering of other ranks' shards to the next forward pass.
        chunk.start_param_sync(force_sync=True)
    result = TrainingResult(
        losses=tuple(losses),
        weights_sha256=_digest(chunks),
        tokens=run.steps * tokens,
        seconds=seconds,
        parameters=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
        at_checkpoint=at_checkpoint,
    )
    let_go(chunks)
    return result


def _pipeline_and_data_groups(
    pg_collection: ProcessGroupCollection | None,
) -> tuple[ProcessGroup, ProcessGroup]:
    if pg_collection is not None:
        return pg_collection.pp, pg_collection.dp
    return (
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
    )


def _seed(seed: int, pg_collection: ProcessGroupCollection | None) -> None:
    """Seed as ``megatron.training``'s ``_set_random_seed``; missing ranks come from the globals."""
    ranks = {}
    if pg_collection is not None:
        ranks = {
            "tp_rank": pg_collection.rank("tp"),
            "ep_rank": pg_collection.rank("ep"),
            "etp_rank": pg_collection.rank("expt_tp"),
        }
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, **ranks)


def transformer_config(run: GPTRun) -> Any:
    return TransformerConfig(
        num_layers=run.layers,
        hidden_size=run.hidden,
        num_attention_heads=run.heads,
        hidden_dropout=run.dropout,
        attention_dropout=run.dropout,
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.vpp,
        expert_model_parallel_size=run.ep,
        expert_tensor_parallel_size=run.expt_tp,
        sequence_parallel=run.sequence_parallel,
        # Megatron-core refuses tensor-parallel experts with a bias.
        add_bias_linear=run.experts is None,
        pipeline_dtype=torch.float32,
        num_moe_experts=run.experts,
        moe_token_dispatcher_type=run.dispatcher,
        # A module global would keep the balancing losses, and so the groups, after the run.
        moe_router_load_balancing_type="none",
        recompute_granularity="full" if run.recompute else None,
        recompute_method="uniform" if run.recompute else None,
        recompute_num_layers=1 if run.recompute else None,
        masked_softmax_fusion=False,
        # With two interleaved stages, batched p2p pairs messages wrongly on gloo: no error, and a
        # wrong loss. Without interleaving the schedule refuses to overlap.
        overlap_p2p_comm=run.vpp is not None,
        batch_p2p_comm=run.vpp is None,
    )


def build_chunks(
    run: GPTRun, pg_collection: ProcessGroupCollection | None, pp_group: ProcessGroup
) -> list[Any]:
    """Return this stage's model chunks, one without interleaving, wrapped for data parallelism."""
    config = transformer_config(run)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    chunks = []
    for stage in range(run.vpp or 1):
        model = build_model(run, config, pg_collection, pp_group, stage)
        chunks.append(
            DistributedDataParallel(
                config,
                ddp_config,
                model.cuda(),
                disable_bucketing=stage > 0,
                pg_collection=pg_collection,
            )
        )
    # Gradients are reduced during the last microbatch's backward pass, not before.
    config.no_sync_func = [c.no_sync for c in chunks] if run.vpp else chunks[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def build_model(
    run: GPTRun,
    config: Any,
    pg_collection: ProcessGroupCollection | None,
    pp_group: ProcessGroup,
    stage: int = 0,
) -> Any:
    """Return one chunk of this pipeline rank, on the CPU."""
    first, last = pp_group.rank() == 0, pp_group.rank() == pp_group.size() - 1
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=run.experts),
        vocab_size=VOCABULARY,
        max_sequence_length=run.seq_length,
        pre_process=first and stage == 0,
        post_process=last and stage == (run.vpp or 1) - 1,
        share_embeddings_and_output_weights=run.tied,
        position_embedding_type="rope",
        pg_collection=pg_collection,
        vp_stage=stage if run.vpp else None,
    )


def build_optimizer(
    run: GPTRun, chunks: list[Any], pg_collection: ProcessGroupCollection | None
) -> Any:
    config = OptimizerConfig(
        optimizer="adam", lr=run.lr, use_distributed_optimizer=True, overlap_param_gather=True
    )
    # The gloo groups serve an old checkpoint format, and Megatron-core refuses a collection with
    # them.
    return get_megatron_optimizer(
        config, chunks, use_gloo_process_groups=False, pg_collection=pg_collection
    )


def schedule(
    run: GPTRun,
    chunks: list[Any],
    pg_collection: ProcessGroupCollection | None,
    forward_step: Callable[..., object] | None = None,
) -> Callable[..., list[torch.Tensor]]:
    """Return Megatron-core's schedule for this layout, to call with a step's ``data_iterator``.

    ``forward_step`` is Megatron-core's ``forward_step_func``. Default: the mean loss of the next
    token.
    """
    if pg_collection is None:
        forward_backward = get_forward_backward_func()
        groups = {}
    else:
        forward_backward = get_forward_backward_func(pp_size=run.pp, vp_size=run.vpp)
        groups = {
            "pg_collection": schedule_collection(pg_collection),
            "p2p_communicator": P2PCommunicator(pg_collection.pp, chunks[0].config),
        }
    return partial(
        forward_backward,
        forward_step_func=forward_step or _forward_step,
        model=chunks,
        num_microbatches=run.num_microbatches,
        seq_length=run.seq_length,
        micro_batch_size=run.micro_batch_size,
        **groups,
    )


def _forward_step(batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    tokens, labels, positions = next(batches)
    output = model(tokens, positions, None, labels=labels)
    return output, _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    loss = losses.mean()
    return loss, loss.detach().clone()  # the schedule scales the first one in place


def _batches(
    run: GPTRun, text: bytes, step: int, dp_group: ProcessGroup
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield tokens, labels and positions of this rank's microbatches in one step."""
    positions = torch.arange(run.seq_length, device="cuda").expand(run.micro_batch_size, -1)
    for microbatch in range(run.num_microbatches):
        place = microbatch * dp_group.size() + dp_group.rank()
        choose = random.Random(f"{run.seed}/{step}/{place}")
        starts = [choose.randrange(len(text) - run.seq_length) for _ in range(run.micro_batch_size)]
        windows = torch.tensor(
            [list(text[start : start + run.seq_length + 1]) for start in starts], device="cuda"
        )
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), positions


def mean_over_job(
    reported: list[torch.Tensor], pp_group: ProcessGroup, dp_group: ProcessGroup
) -> float:
    """Return the mean over microbatches and data-parallel ranks, on every rank.

    Only the last pipeline stage reports losses, so a sum over the pipeline distributes them.
    """
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    if reported:
        total += torch.stack(reported).double().mean()
    dist.all_reduce(total, group=pp_group)
    dist.all_reduce(total, group=dp_group)
    return total.item() / dp_group.size()


def _digest(chunks: list[Any]) -> str:
    digest = hashlib.sha256()
    for index, chunk in enumerate(chunks):
        for name, parameter in sorted(chunk.named_parameters()):
            digest.update(f"{index}.{name}".encode())
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def let_go(chunks: list[Any]) -> None:
    """Clear the references that keep a Megatron-core model, and its groups, alive.

    There is a class-wide cache. There are also cycles that the garbage collector can't see, because
    they lead through autograd. Autograd's hooks hold the wrapper, and the wrapper holds the model.
    A token dispatcher in the model holds the last graph, whose nodes hold the hooks.
    """
    for chunk in chunks:
        vars(chunk).clear()
    RotaryEmbedding.forward.cache_clear()
