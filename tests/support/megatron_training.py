"""A training job as ``megatron.training`` runs it, with Megatron's own checkpoints.

The interop tests use this job as the other side: model, optimizer, scheduler, arguments and
checkpoints are Megatron's. If the installed Megatron-core contains ``megatron.training`` (0.17 and
later), the real ``save_checkpoint`` and ``load_checkpoint`` are called. The wheel of 0.16 has none,
so there ``megatron.core.dist_checkpointing`` is called as in a training script.

Everything runs inside a rank, in ``megatron_on_cpu()`` and ``published(pg)``.
"""

import contextlib
import hashlib
import importlib.util
import io
import random
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from resuming import megatron_saves_alone, sizes

from megapg.tools.demo import gpt
from megapg.tools.demo.job import VOCABULARY, GPTRun

HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None

TEXT = bytes(random.Random("text").choices(range(VOCABULARY), k=4096))
SAMPLES = 1000  # length of the schedule; much more than a test trains


@dataclass(frozen=True)
class Job:
    """A case of the matrix: the training, and Megatron's checkpoint options."""

    run: GPTRun
    distributed_optimizer: bool = True
    sharding: str = "fully_reshardable"
    bf16: bool = False
    data_parallel_random_init: bool = False
    fully_parallel: bool = True
    fused: str = ""  # a stand-in of ``fused_adam.fused``

    @property
    def sizes(self):
        """Return the arguments of ``megapg.session``."""
        return sizes(self.run)


class Training:
    """One rank's part of a job. ``seed`` chooses the weights, so a restored job has another.

    Attributes:
        chunks: the model, one DDP wrapper for each virtual pipeline stage.
        args: ``args`` of ``megatron.training``; saved with every checkpoint.
        iteration, operations: the progress.
        told: the load's report about random streams, if it gives one.
    """

    def __init__(self, job, pg, seed):
        self.job, self.pg = job, pg
        seed_everything(seed, pg, job.data_parallel_random_init)
        self.chunks = build_chunks(job, pg)
        self.optimizer = build_optimizer(job, self.chunks, pg)
        self.args = arguments(job, pg)
        self.scheduler = build_scheduler(self.optimizer, self.args)
        self.iteration, self.operations = 0, 0
        self.told = None
        self._forward_backward = gpt.schedule(job.run, self.chunks, pg)

    def step(self):
        """Run one step; return the job's mean loss."""
        run, pg = self.job.run, self.pg
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [gpt._batches(run, TEXT, self.iteration, pg.dp) for _ in self.chunks]
        reported = self._forward_backward(data_iterator=batches if run.vpp else batches[0])
        self.optimizer.step()
        self.scheduler.step(increment=self.args.global_batch_size)
        self.iteration += 1
        self.operations += 1_000_003 * self.args.global_batch_size
        self.args.consumed_train_samples += self.args.global_batch_size
        return gpt.mean_over_job(reported, pg.pp, pg.dp)

    def state(self):
        """Return name -> value of all that a checkpoint must restore, tensors as digests."""
        # The optimizer leaves it to the next forward pass to gather the other ranks' shards.
        if self.job.distributed_optimizer:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        state = {
            f"model{index}.{name}": digest(tensor)
            for index, chunk in enumerate(self.chunks)
            for name, tensor in chunk.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        for index, adam in enumerate(torch_optimizers(self.optimizer)):
            for number, group in enumerate(adam.param_groups):
                place = f"optimizer{index}.group{number}"
                # Only a restored optimizer of upstream has "step" and "default_config" in its
                # groups.
                left_by_load = ("params", "default_config") + ("step",) * (not self.job.fused)
                state |= {f"{place}.{k}": v for k, v in group.items() if k not in left_by_load}
                for order, parameter in enumerate(group["params"]):
                    state[f"{place}.{order}.main"] = digest(parameter)
                    for key, value in adam.state.get(parameter, {}).items():
                        state[f"{place}.{order}.{key}"] = digest(value)
        state |= {f"scheduler.{k}": v for k, v in self.scheduler.state_dict().items()}
        state |= {
            "iteration": self.iteration,
            "operations": self.operations,
            "consumed": self.args.consumed_train_samples,
            "consumed_valid": self.args.consumed_valid_samples,
        }
        return state

    def let_go(self):
        gpt.let_go(self.chunks)


def streams():
    """Return the state of every random stream of this process, in Megatron's format."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def set_streams(record):
    random.setstate(record["random_rng_state"])
    np.random.set_state(record["np_rng_state"])
    torch.set_rng_state(record["torch_rng_state"])
    torch.cuda.set_rng_state(record["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(record["rng_tracker_states"])


def digest(value):
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"


# -- construction ----------------------------------------------------------------------------------


def seed_everything(seed, pg, data_parallel_random_init):
    """Seed as ``megatron.training.initialize`` does."""
    seed += 100 * pg.rank("pp") + (10 * pg.rank("dp") if data_parallel_random_init else 0)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, tp_rank=pg.rank("tp"), ep_rank=pg.rank("ep"), etp_rank=pg.rank("expt_tp")
    )


def build_chunks(job, pg):
    run = job.run
    config = gpt.transformer_config(run)
    if job.bf16:
        half = torch.bfloat16
        config = replace(config, bf16=True, params_dtype=half, pipeline_dtype=half)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=job.distributed_optimizer, grad_reduce_in_fp32=True
    )
    stages = run.vpp or 1
    chunks = []
    for stage in range(stages):
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=run.experts),
            vocab_size=VOCABULARY,
            max_sequence_length=run.seq_length,
            pre_process=pg.rank("pp") == 0 and stage == 0,
            post_process=pg.rank("pp") == pg.pp.size() - 1 and stage == stages - 1,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            pg_collection=pg,
            vp_stage=stage if run.vpp else None,
        )
        if job.bf16:
            model = Float16Module(config, model)
        chunks.append(
            DistributedDataParallel(
                config, ddp_config, model, disable_bucketing=stage > 0, pg_collection=pg
            )
        )
        if job.data_parallel_random_init:
            chunks[-1].broadcast_params()
    config.no_sync_func = [c.no_sync for c in chunks] if run.vpp else chunks[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def build_optimizer(job, chunks, pg):
    config = OptimizerConfig(
        optimizer="adam",
        lr=job.run.lr,
        min_lr=job.run.lr / 10,
        weight_decay=0.01,
        clip_grad=1.0,
        bf16=job.bf16,
        params_dtype=torch.bfloat16 if job.bf16 else torch.float32,
        use_distributed_optimizer=job.distributed_optimizer,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=pg)


def build_scheduler(optimizer, args):
    """Return a scheduler whose rate changes every step, so that a lost count shows at once."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.min_lr,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=3 * args.global_batch_size,
        lr_decay_steps=SAMPLES,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.02,
        wd_incr_steps=SAMPLES,
        wd_incr_style="linear",
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )


def torch_optimizers(optimizer):
    """Return the torch optimizers inside one of Megatron-core's, in order."""
    return [part.optimizer for part in parts(optimizer) if not part.is_stub_optimizer]


def parts(optimizer):
    return getattr(optimizer, "chained_optimizers", [optimizer])


# -- arguments -------------------------------------------------------------------------------------


def arguments(job, pg):
    """Return the global ``args`` of ``megatron.training``, which it saves."""
    run = job.run
    replicas = pg.dp.size()
    words = {
        "num-layers": run.layers,
        "hidden-size": run.hidden,
        "num-attention-heads": run.heads,
        "seq-length": run.seq_length,
        "max-position-embeddings": run.seq_length,
        "position-embedding-type": "rope",
        "micro-batch-size": run.micro_batch_size,
        "global-batch-size": run.micro_batch_size * run.num_microbatches * replicas,
        "tensor-model-parallel-size": run.tp,
        "pipeline-model-parallel-size": run.pp,
        "expert-model-parallel-size": run.ep,
        "expert-tensor-parallel-size": run.expt_tp or run.tp,
        "lr": run.lr,
        "min-lr": run.lr / 10,
        "seed": run.seed,
    }
    if run.vpp:
        words["num-virtual-stages-per-pipeline-rank"] = run.vpp
    if run.experts:
        words["num-experts"] = run.experts
    flags = {
        "sequence-parallel": run.sequence_parallel,
        "use-distributed-optimizer": job.distributed_optimizer,
        "data-parallel-random-init": job.data_parallel_random_init,
        "dist-ckpt-optim-fully-reshardable": job.sharding == "fully_reshardable",
        "bf16": job.bf16,
    }
    if HAS_TRAINING:
        args = parsed_arguments(words, flags)
    else:
        both = {**words, **flags, "world-size": torch.distributed.get_world_size()}
        args = Namespace(**{name.replace("-", "_"): value for name, value in both.items()})
        args.data_parallel_size = replicas
    args.ckpt_fully_parallel_save = args.ckpt_fully_parallel_load = job.fully_parallel
    args.consumed_train_samples, args.skipped_train_samples = 0, 0
    args.consumed_valid_samples = 17
    return args


def parsed_arguments(words, flags):
    """Return arguments from Megatron's parser and its checks, as for a command line."""
    from megatron.training.arguments import parse_args, validate_args

    line = [part for name, value in words.items() for part in (f"--{name}", str(value))]
    line += [f"--{name}" for name, on in flags.items() if on]
    line += ["--train-iters", "100", "--ckpt-format", "torch_dist", "--verify-integrity"]
    line += ["--transformer-impl", "local", "--attention-backend", "unfused"]
    # The checks read properties of the GPU, but no saved value depends on them.
    gpu = SimpleNamespace(major=10, minor=0, name="none")
    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *line]),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        contextlib.redirect_stdout(io.StringIO()),  # hundreds of lines
    ):
        args = parse_args()
        validate_args(args)
    return args


# -- Megatron's checkpoints ------------------------------------------------------------------------


def save(training, root, release=False):
    """Save as Megatron does. Every rank calls it."""
    megatron_saves_alone()
    (save_with_training if HAS_TRAINING else save_with_core)(training, root, release)


def load(training, root):
    """Load as Megatron does. Every rank calls it."""
    fused = training.job.fused
    with torch.no_grad() if fused else torchs_adam(training.optimizer):
        (load_with_training if HAS_TRAINING else load_with_core)(training, root)


@contextlib.contextmanager
def torchs_adam(optimizer):
    """Make torch's Adam ready for Megatron's load, without TransformerEngine and Apex.

    Megatron's distributed optimizer reads a step count before there is one. Later it gives all
    parameters one tensor as "step", and then looks for a "step" among each parameter's loaded
    tensors.
    """
    distributed = [
        part
        for part in parts(optimizer)
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer
    ]
    for part in distributed:
        part._init_optimizer_states_with_dummy_values()

    def forget_steps(adam):  # the groups have the loaded count, too
        for state in adam.state.values():
            state.pop("step")

    hooks = [
        part.optimizer.register_load_state_dict_post_hook(forget_steps) for part in distributed
    ]
    with torch.no_grad():
        yield
    for hook, part in zip(hooks, distributed, strict=True):
        hook.remove()
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                state.setdefault("step", torch.tensor(float(group.get("step", 0))))


@contextlib.contextmanager
def training_globals(training):
    """Set Megatron's globals besides the groups, for one save or load."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import rerun_state_machine as rerun
    from megatron.training import checkpointing, global_vars

    args = training.args
    global_vars.set_args(args)
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode(args.rerun_mode))
    calculator.init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    try:
        yield checkpointing
    finally:
        calculator.destroy_num_microbatches_calculator()
        rerun.destroy_rerun_state_machine()
        global_vars.set_args(None)
        checkpointing._CHECKPOINT_VERSION = None


def save_with_training(training, root, release):
    training.args.save = str(root)
    with training_globals(training) as checkpointing:
        checkpointing.save_checkpoint(
            training.iteration,
            training.chunks,
            training.optimizer,
            training.scheduler,
            training.operations,
            release=release,
        )
    training.args.save = None


def load_with_training(training, root):
    training.args.load = str(root)
    with training_globals(training) as checkpointing:
        training.iteration, training.operations = checkpointing.load_checkpoint(
            training.chunks, training.optimizer, training.scheduler
        )
    training.args.load = None


# The following code replaces megatron.training for a wheel with only the core. It builds the state
# dict of save_checkpoint, passes it to dist_checkpointing, and writes the tracker.


def save_with_core(training, root, release):
    name = root / ("release" if release else f"iter_{training.iteration:07d}")
    name.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    metadata = content_metadata(training.job)
    state = sharded_state(training, metadata, is_loading=False) | {
        "args": training.args,
        "checkpoint_version": 3.0,
        "iteration": training.iteration,
        "num_floating_point_operations_so_far": training.operations,
    }
    strategy = get_default_save_sharded_strategy("torch_dist")
    if training.job.fully_parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy, training.pg.dp_cp)
    dist_checkpointing.save(state, str(name), strategy, content_metadata=metadata)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        tracked = "release" if release else str(training.iteration)
        (root / "latest_checkpointed_iteration.txt").write_text(tracked)
    torch.distributed.barrier()


def load_with_core(training, root):
    tracked = (root / "latest_checkpointed_iteration.txt").read_text()
    release = tracked == "release"
    name = str(root / (tracked if release else f"iter_{int(tracked):07d}"))
    metadata = dist_checkpointing.load_content_metadata(name)
    strategy = get_default_load_sharded_strategy(name)
    if training.job.fully_parallel:
        strategy = FullyParallelLoadStrategyWrapper(strategy, training.pg.dp_cp)
    wanted = sharded_state(training, metadata, is_loading=True)
    if release:
        wanted = {key: part for key, part in wanted.items() if key.startswith("model")}
    state = dist_checkpointing.load(wanted, name, strategy)
    for key, chunk in named(training.chunks):
        chunk.load_state_dict(state[key])
    training.args.consumed_train_samples = state["args"].consumed_train_samples
    training.args.consumed_valid_samples = state["args"].consumed_valid_samples
    training.operations = state["num_floating_point_operations_so_far"]
    if release:
        training.optimizer.reload_model_params()
        return
    training.iteration = state["iteration"]
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["opt_param_scheduler"])
    records = state["rng_state"]
    set_streams(records[training.pg.rank("dp") if training.job.data_parallel_random_init else 0])


def content_metadata(job):
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if job.distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = job.sharding
    if job.distributed_optimizer and job.sharding == "fully_reshardable":
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def sharded_state(training, metadata, is_loading):
    metadata = {**metadata, "dp_cp_group": training.pg.dp_cp}
    state = {
        key: chunk.sharded_state_dict(metadata=metadata)
        for key, chunk in named(unwrap_model(training.chunks))
    }
    state["optimizer"] = training.optimizer.sharded_state_dict(
        state, is_loading=is_loading, metadata=metadata
    )
    state["opt_param_scheduler"] = training.scheduler.state_dict()
    state["rng_state"] = rng_record(training)
    return state


def named(chunks):
    if len(chunks) == 1:
        return [("model", chunks[0])]
    return [(f"model{index}", chunk) for index, chunk in enumerate(chunks)]


def rng_record(training):
    """Return the record by (pp, tp) from each first replica, as in every release up to 0.19."""
    pg = training.pg
    records = [streams()]
    if training.job.data_parallel_random_init:
        everyone = [None] * pg.dp.size()
        torch.distributed.all_gather_object(everyone, records[0], group=pg.dp)
        records = everyone
    return ShardedObject(
        "rng_state",
        records,
        (pg.pp.size(), pg.tp.size()),
        (pg.rank("pp"), pg.rank("tp")),
        replica_id=pg.rank("dp_cp"),
    )
