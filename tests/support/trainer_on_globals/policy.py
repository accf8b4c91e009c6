"""A policy that learns from a text, with Megatron-core's model, schedule and optimizer."""

from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
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
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from .data import mean_over_data, my_samples
from .losses import entropy

WIDTH, LENGTH, WORDS = 32, 16, 64


class Policy:
    """A model with its optimizer, trained a step at a time."""

    def __init__(self, experts=None):
        seed = 1234 + 100 * mpu.get_pipeline_model_parallel_rank()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(
            seed,
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            ep_rank=mpu.get_expert_model_parallel_rank(),
            etp_rank=mpu.get_expert_tensor_parallel_rank(),
        )
        groups = ProcessGroupCollection(
            tp=mpu.get_tensor_model_parallel_group(),
            pp=mpu.get_pipeline_model_parallel_group(),
            cp=mpu.get_context_parallel_group(),
            mp=mpu.get_model_parallel_group(),
            tp_cp=mpu.get_tensor_and_context_parallel_group(),
            tp_dp_cp=mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
            embd=mpu.get_embedding_group(check_initialized=False),
            pos_embd=mpu.get_position_embedding_group(check_initialized=False),
            dp=mpu.get_data_parallel_group(),
            dp_cp=mpu.get_data_parallel_group(with_context_parallel=True),
            intra_dp_cp=mpu.get_data_parallel_group(
                with_context_parallel=True, partial_data_parallel=True
            ),
            ep=mpu.get_expert_model_parallel_group(),
            expt_tp=mpu.get_expert_tensor_parallel_group(),
            tp_ep=mpu.get_expert_tensor_and_model_parallel_group(),
            tp_ep_pp=mpu.get_expert_tensor_model_pipeline_parallel_group(),
            expt_dp=mpu.get_expert_data_parallel_group(),
            intra_expt_dp=mpu.get_expert_data_parallel_group(partial_expert_data_parallel=True),
            intra_dist_opt=mpu.get_intra_distributed_optimizer_instance_group(),
        )
        self.config = TransformerConfig(
            num_layers=2,
            hidden_size=WIDTH,
            num_attention_heads=4,
            tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
            pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
            expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
            sequence_parallel=experts is not None,
            num_moe_experts=experts,
            moe_router_load_balancing_type="none",
            add_bias_linear=experts is None,
            pipeline_dtype=torch.float32,
            masked_softmax_fusion=False,
            cross_entropy_loss_fusion=True,
            cross_entropy_fusion_impl="native",
            batch_p2p_comm=True,
        )
        model = GPTModel(
            self.config,
            get_gpt_layer_local_spec(num_experts=experts),
            vocab_size=WORDS,
            max_sequence_length=LENGTH,
            pre_process=mpu.get_pipeline_model_parallel_rank() == 0,
            post_process=mpu.is_pipeline_last_stage(),
            position_embedding_type="rope",
            pg_collection=groups,
        ).cuda()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(self.config, ddp, model, pg_collection=groups)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True),
            [self.model],
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
        self.forward_backward = partial(
            get_forward_backward_func(pp_size=self.config.pipeline_model_parallel_size),
            p2p_communicator=P2PCommunicator(groups.pp, self.config),
            pg_collection=groups,
        )

    def step(self, number):
        """Train on one batch; return the mean loss and the mean entropy of the whole job."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = my_samples(number, LENGTH, WORDS)
        reported = self.forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        self.optimizer.step()
        found = torch.zeros(2, dtype=torch.float64)
        if mpu.is_pipeline_last_stage():
            found = torch.stack(reported).double().mean(0)
        last = mpu.get_pipeline_model_parallel_last_rank()
        dist.broadcast(found, last, group=mpu.get_pipeline_model_parallel_group())
        return mean_over_data(found).tolist()

    def forward_step(self, batches, model):
        tokens, labels, positions = next(batches)
        logits = model(tokens, positions, None)
        return logits, partial(self.loss, labels)

    def loss(self, labels, logits):
        loss, spread = entropy(logits, labels)
        return loss, torch.stack([loss.detach().clone(), spread])
