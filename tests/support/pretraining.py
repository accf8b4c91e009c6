"""Run ``pretrain`` of ``megatron.training`` on a CPU, with command line arguments.

Everything runs inside a rank of ``run_distributed``.
"""

import contextlib
import hashlib
import io
import os
import random
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from asking import registered

from megapg.megatron import parallel_state
from megapg.testing import megatron_on_cpu

SCRIPT = Path(__file__).with_name("pretrain_gpt.py")

LINE = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --position-embedding-type rope --no-rope-fusion
    --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --lr 0.01 --min-lr 0.001
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 1,0,0 --num-workers 0
    --eval-iters 0 --eval-interval 100 --log-interval 100 --ckpt-format torch_dist
    --transformer-impl local --attention-backend unfused --distributed-backend gloo
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-persist-layer-norm
""".split()  # noqa: SIM905


def words(**arguments):
    """Return ``tensor_model_parallel_size=2, sequence_parallel=True`` as command line arguments."""
    line = []
    for name, value in arguments.items():
        line += [f"--{name.replace('_', '-')}", *([] if value is True else [f"{value}"])]
    return line


@contextlib.contextmanager
def told(line):
    """Set the command line of a script."""
    with mock.patch.object(sys, "argv", [str(SCRIPT), *LINE, *line]):
        yield


@contextlib.contextmanager
def a_gpu_that_is_none():
    """Replace the GPU and compiler calls of ``megatron.training`` and Megatron-core."""
    from megatron.core import rerun_state_machine
    from megatron.training import initialize, training
    from megatron_training import torchs_adam

    load = training.load_checkpoint

    def load_with_torchs_adam(model, optimizer, *args, **kwargs):
        with torchs_adam(optimizer):
            return load(model, optimizer, *args, **kwargs)

    gpu = SimpleNamespace(major=10, minor=0, name="none")
    start = partial(training.initialize_megatron, allow_no_cuda=True)
    with (
        megatron_on_cpu(),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "set_device"),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
        mock.patch.object(initialize, "_compile_dependencies", dist.barrier),
        mock.patch.object(training, "initialize_megatron", start),
        mock.patch.object(training, "load_checkpoint", load_with_torchs_adam),
        mock.patch.object(training, "report_theoretical_memory"),
        mock.patch.dict(os.environ),
        contextlib.redirect_stdout(io.StringIO()),  # hundreds of lines
    ):
        # Megatron keeps the choice of another test's model in the environment.
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            os.environ.pop(name, None)
        try:
            yield
        finally:
            forget(training, rerun_state_machine)


def forget(training, rerun_state_machine):
    """Reset the state that a process with one training never resets."""
    from megatron.training import global_vars

    global_vars.destroy_global_vars()
    training.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    parallel_state.destroy_model_parallel()


class Seen:
    """Results of a run: losses, weights and groups."""

    def __init__(self):
        self.losses, self.weights, self.groups, self.embedding = [], {}, 0, None

    def trained(self):
        return {"losses": self.losses, "weights": self.weights, "embedding": self.embedding}


@contextlib.contextmanager
def watched():
    """Record ``pretrain`` inside the block in a :class:`Seen`."""
    from megatron.training import training

    seen, step, build = Seen(), training.train_step, training.setup_model_and_optimizer
    built = []

    def train_step(*args, **kwargs):
        found = step(*args, **kwargs)
        seen.losses.append({name: float(value) for name, value in found[0].items()})
        seen.groups = registered()
        group = parallel_state._EMBEDDING_GROUP
        seen.embedding = group and dist.get_process_group_ranks(group)
        seen.weights = {
            f"{index}.{name}": hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()
            for index, chunk in enumerate(built)
            for name, p in chunk.named_parameters()
        }
        return found

    def setup(*args, **kwargs):
        found = build(*args, **kwargs)
        built.extend(found[0])
        return found

    with (
        mock.patch.object(training, "train_step", train_step),
        mock.patch.object(training, "setup_model_and_optimizer", setup),
    ):
        yield seen
    built.clear()


@contextlib.contextmanager
def run():
    """Prepare a run: WORLD and the same random streams at its start, and a reset at its end."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = registered()
    with a_gpu_that_is_none(), watched() as seen:
        yield seen
    seen.made, seen.left = seen.groups - before, registered() - before


def on_globals(line, script=SCRIPT):
    """Run the unchanged script on Megatron's own groups."""
    with run() as seen, told(line):
        runpy.run_path(str(script), run_name="__main__")
    return seen


def run_by_megapg(line, script=SCRIPT):
    """Run the unchanged script by ``python -m megapg.megatron.run``."""
    from megapg.megatron.run import main

    with run() as seen, mock.patch.object(sys, "path", list(sys.path)), told(()):
        main([str(script), *LINE, *line])
    return seen


def on_a_session(line, lines, script=SCRIPT):
    """Run the script with ``lines`` in place of the call of ``pretrain``."""
    head, _, _ = script.read_text().partition("    pretrain(\n")
    with run() as seen, told(line):
        exec(
            compile(f"import megapg\n{head}{lines}", "changed.py", "exec"), {"__name__": "__main__"}
        )
    return seen
