"""A training job that can stop at any step and continue, for the tests of checkpoints."""

import hashlib
import inspect
import queue
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import stepwise
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies import filesystem_async

import megapg
from megapg.testing import megatron_on_cpu
from megapg.tools.demo import gpt
from megapg.tools.demo.job import GPTRun

RUN = GPTRun(layers=2, hidden=32, seq_length=32, num_microbatches=2, steps=0)

distributed = partial(
    stepwise.distributed,
    preload=("megapg.tools.demo.gpt", "megapg.checkpoint.save", "megapg.checkpoint.load"),
)


def megatron_saves_alone():
    """Keep the results of Megatron-core's writing in this process.

    Megatron-core uses another process for them, which imports torch. A synchronous save does not
    need that process.
    """
    filesystem_async._results_queue = queue.Queue()


@contextmanager
def published_groups(**sizes):
    """Publish a session's groups for Megatron-core without CUDA."""
    warnings.simplefilter("ignore")  # about features that need a GPU
    with (
        megatron_on_cpu(),
        megapg.session(**{"timeout": 60, **sizes}) as session,
        megapg.published(session.groups) as pg,
    ):
        yield pg


@contextmanager
def training(run, seed=None, **options):
    """Yield a :class:`Training` on groups of a new session."""
    with published_groups(**sizes(run), **options) as pg:
        job = Training(run, pg, seed)
        try:
            yield job
        finally:
            job.let_go()


class Training:
    """One rank's model, optimizer and schedule. ``seed`` chooses the weights."""

    def __init__(self, run, pg, seed=None):
        self.run, self.pg = run, pg
        self._job = stepwise.build(replace(run, seed=seed or run.seed), pg)
        self.chunks, self.optimizer, _ = self._job

    def steps(self, first, last):
        """Return the mean loss of each step from ``first`` to before ``last``."""
        return [stepwise.step(self.run, each, self._job, self.pg) for each in range(first, last)]

    def digest(self):
        """Return digests of the weights and of the optimizer's state."""
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)
        return gpt._digest(self.chunks), self._optimizer_digest()

    def _optimizer_digest(self):
        digest = hashlib.sha256()
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = part.optimizer
            for group in inner.param_groups:
                for parameter in group["params"]:
                    digest.update(parameter.detach().numpy().tobytes())
                    state = inner.state[parameter]
                    for name in sorted(state):
                        digest.update(name.encode() + state[name].numpy().tobytes())
        return digest.hexdigest()

    def save(self, directory, iteration, **options):
        """Save everything with ``megapg.save_checkpoint``."""
        return megapg.save_checkpoint(
            directory,
            iteration,
            model=self.chunks,
            optimizer=self.optimizer,
            pg_collection=self.pg,
            **{"timeout": 60, **options},
        )

    def load(self, directory, **options):
        """Load everything with ``megapg.load_checkpoint``."""
        return megapg.load_checkpoint(
            directory,
            model=self.chunks,
            optimizer=self.optimizer,
            pg_collection=self.pg,
            **{"timeout": 60, **options},
        )

    def let_go(self):
        """Release the model, which would keep the groups alive."""
        gpt.let_go(self.chunks)


class Schedule:
    """A scheduler that counts, and calls ``on_load`` at each load."""

    def __init__(self, step=0, on_load=lambda: None):
        self.step, self.on_load = step, on_load

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.on_load()
        self.step = state["step"]


def sizes(run):
    """Return the arguments of ``megapg.session``."""
    return {
        "tp": run.tp,
        "pp": run.pp,
        "vpp": run.vpp,
        "ep": run.ep,
        "expt_tp": run.expt_tp or run.tp,
    }


def cut(run, dp=1, batch=2, **changes):
    """Return the same job under another layout, with the same global batch."""
    return replace(run, **changes, num_microbatches=batch // dp)


def weights(chunks):
    """Return name -> a copy, to find out if a failed load has changed a weight."""
    return {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def equal(first, second):
    """True if two results of :func:`weights` are the same, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def whole_tensors(path):
    """Return every tensor of a checkpoint, from torch's own reader. Missing parts are NaN."""
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.full(entry.size, torch.nan).to(entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "size")
    }
    alone = {"no_dist": True} if "no_dist" in inspect.signature(dcp.load).parameters else {}
    dcp.load(state, storage_reader=reader, **alone)
    return state
