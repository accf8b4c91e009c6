"""A real training step of a small Megatron-core GPT on gloo ranks, and the traffic of each rank.

The step is that of ``megatron.training`` with its defaults: the pipeline schedule, the gradient
exchange of ``finalize_model_grads``, and the optimizer's step with gradient clipping. Nothing
overlaps, so each buffer of gradients is one bucket.

The communication of scripts is left out. ``pretrain_gpt.py`` broadcasts the batch over tp and
averages the loss over dp. The training loop reduces two numbers over mp: the success of the step
and the norm of the gradients.
"""

import functools
import re
import warnings
from collections import defaultdict
from dataclasses import dataclass

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.utils._python_dispatch import TorchDispatchMode

import megapg
from megapg.megatron import published, schedule_collection
from megapg.testing import count_traffic, megatron_on_cpu, run_distributed
from megapg.tools.demo import gpt
from megapg.tools.plan.fused import FlashLikeAttention


@dataclass(frozen=True)
class Case:
    """A layout, a model, and a job.

    With context parallelism, the attention is that of published models: Megatron-core's own needs
    TransformerEngine then.
    The flex dispatcher is missing, because it needs DeepEP's kernels.

    ``trains`` is a pattern of the names of the parameters that are trained.
    """

    world_size: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    expt_tp: int | None = None
    sequence_parallel: bool = False

    layers: int = 4
    hidden: int = 16
    heads: int = 4
    vocabulary: int = 64
    tied: bool = True
    learned_positions: bool = False
    experts: int | None = None
    top_k: int = 2
    dispatcher: str = "alltoall"
    bf16: bool = True
    dropout: float = 0.1
    adapters: bool = False
    trains: str = ""

    seq_length: int = 16
    micro_batch_size: int = 1
    microbatches: int = 1
    recompute: str = "none"
    distributed_optimizer: bool = True

    @property
    def sizes(self):
        """Return the arguments of a layout, without the world's size."""
        return {name: getattr(self, name) for name in ("tp", "cp", "pp", "vpp", "ep", "expt_tp")}

    @property
    def dtype(self):
        return torch.bfloat16 if self.bf16 else torch.float32


def transformer_config(case):
    """Return Megatron-core's configuration of the model, without the functions of a training."""
    recompute = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }
    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.expt_tp,
        sequence_parallel=case.sequence_parallel,
        add_bias_linear=case.experts is None,  # refused for experts with tensor parallelism
        bf16=case.bf16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        num_moe_experts=case.experts,
        moe_router_topk=case.top_k,
        moe_router_pre_softmax=case.top_k == 1,  # required then
        moe_token_dispatcher_type=case.dispatcher,
        # A module global would keep the balancing losses, and so the groups, after the run.
        moe_router_load_balancing_type="none",
        masked_softmax_fusion=False,
        # As megatron.training sets them.
        overlap_p2p_comm=case.vpp is not None,
        batch_p2p_comm=case.vpp is None,
        **recompute[case.recompute],
    )


def build(case, pg, vp_stage=None, config=None):
    """Return one chunk of this rank's model, not wrapped."""
    stage, last = vp_stage or 0, (case.vpp or 1) - 1
    layer = get_gpt_layer_local_spec(num_experts=case.experts)
    if case.cp > 1:
        layer.submodules.self_attention.submodules.core_attention = FlashLikeAttention
    model = GPTModel(
        config or transformer_config(case),
        layer,
        vocab_size=case.vocabulary,
        max_sequence_length=case.seq_length,
        pre_process=pg.rank("pp") == 0 and stage == 0,
        post_process=pg.rank("pp") == case.pp - 1 and stage == last,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="learned_absolute" if case.learned_positions else "rope",
        pg_collection=pg,
        vp_stage=vp_stage,
    )
    for layer in model.decoder.layers if case.adapters else ():
        _adapt(layer.self_attention.linear_qkv, case.hidden)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(case.trains, name) is not None)
    return model


def _adapt(linear, hidden):
    """Add an adapter of low rank to the output of a linear layer."""
    linear.adapter = torch.nn.Sequential(
        torch.nn.Linear(hidden, 2, bias=False), torch.nn.Linear(2, linear.output_size, bias=False)
    )
    linear.register_forward_hook(
        lambda module, given, made: (made[0] + module.adapter(given[0]), *made[1:])
    )


class EvenRouting(TorchDispatchMode):
    """Routes the tokens of each rank to all experts evenly: choice j of token t to (t * k + j) % E.

    The bytes that ranks send do not depend on the weights then.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default:
            return found
        scores, (values, indices) = args[0], found
        tokens, k = indices.shape
        even = torch.arange(tokens * k, device=indices.device).view(tokens, k) % scores.shape[1]
        values.copy_(scores.gather(1, even))
        indices.copy_(even)
        return found


def trainer(case, pg):
    """Build the model and the optimizer, and return both and a function that trains a step.

    Call it in ``megatron_on_cpu()`` and ``published(pg)``.
    """
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(
        1, tp_rank=pg.rank("tp"), ep_rank=pg.rank("ep"), etp_rank=pg.rank("expt_tp")
    )
    config = transformer_config(case)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=case.distributed_optimizer, grad_reduce_in_fp32=case.bf16
    )
    chunks = []
    for stage in range(case.vpp or 1):
        model = build(case, pg, stage if case.vpp else None, config)
        if case.bf16:
            model = Float16Module(config, model)
        chunks.append(
            DistributedDataParallel(
                config, ddp_config, model, disable_bucketing=stage > 0, pg_collection=pg
            )
        )
    config.no_sync_func = [each.no_sync for each in chunks] if case.vpp else chunks[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            clip_grad=1.0,
            bf16=case.bf16,
            params_dtype=case.dtype,
            use_distributed_optimizer=case.distributed_optimizer,
        ),
        chunks,
        use_gloo_process_groups=False,
        pg_collection=pg,
    )
    config.grad_scale_func = optimizer.scale_loss
    schedule = functools.partial(
        get_forward_backward_func(pp_size=case.pp, vp_size=case.vpp),
        forward_step_func=gpt._forward_step,
        model=chunks,
        num_microbatches=case.microbatches,
        seq_length=case.seq_length,
        micro_batch_size=case.micro_batch_size,
        pg_collection=schedule_collection(pg),
        p2p_communicator=P2PCommunicator(pg.pp, config),
    )

    def step():
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        batches = [_batches(case) for _ in chunks]
        losses = schedule(data_iterator=batches if case.vpp else batches[0])
        success, norm, _ = optimizer.step()
        assert success
        assert norm > 0
        return losses

    return chunks, optimizer, step


def _batches(case):
    shape = case.micro_batch_size, case.seq_length // case.cp
    positions = torch.arange(shape[1]).expand(shape)
    for number in range(case.microbatches):
        draw = torch.Generator().manual_seed(number)
        tokens = torch.randint(case.vocabulary, shape, generator=draw)
        yield tokens, tokens.roll(-1, 1), positions


def count_step(case, pg):
    """Train in this rank, and return the rows of the second step's traffic.

    In the first step, Megatron-core 0.19 also asks all ranks for groups of parameters whose
    gradients it clips separately.
    """
    with published(pg), EvenRouting():
        chunks, _, step = trainer(case, pg)
        step()
        with count_traffic(pg) as traffic:
            losses = step()
        assert bool(losses) == (pg.rank("pp") == case.pp - 1)
        gpt.let_go(chunks)
    return traffic.rows


def _rank(cases):
    warnings.simplefilter("ignore")
    rows = []
    with megatron_on_cpu():
        for case in cases:
            with megapg.session(timeout=60, **case.sizes) as session:
                rows.append(count_step(case, session.groups))
    return rows


def real_steps(cases):
    """Return case -> the rows of each rank. Cases of one world size share their processes."""
    worlds = defaultdict(list)
    for case in cases:
        worlds[case.world_size].append(case)
    found = {}
    for world_size, together in worlds.items():
        ranks = run_distributed(
            functools.partial(_rank, together), world_size, deadline=280, preload=("settled",)
        )
        found |= dict(zip(together, zip(*ranks, strict=True), strict=True))
    return found


def real_step(case):
    """Return the rows of each rank in a real training step."""
    return real_steps([case])[case]
