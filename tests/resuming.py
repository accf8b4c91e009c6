"""A training job that can stop at any step and go on, for the tests of checkpoints."""

import hashlib
import warnings
from dataclasses import replace
from pathlib import Path

import torch

import megapg
from megapg.demo import gpt
from megapg.demo.job import GPTRun

TEXT = Path(__file__).read_bytes()
RUN = GPTRun(layers=4, hidden=32, seq_length=32, num_microbatches=4, steps=0)


class Training:
    """One rank's model, optimizer and schedule. ``seed`` decides about the weights."""

    def __init__(self, run, pg, seed=None):
        warnings.simplefilter("ignore")
        self.run, self.pg = run, pg
        gpt._seed((seed or run.seed) + 100 * pg.rank("pp"), pg)
        self.chunks = gpt._build_chunks(run, pg, pg.pp)
        self.optimizer = gpt._build_optimizer(run, self.chunks, pg)
        self._forward_backward = gpt._schedule(run, self.chunks, pg)

    def steps(self, first, last):
        """Mean loss of each step from ``first`` to before ``last``."""
        return [self._step(number) for number in range(first, last)]

    def _step(self, number):
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [gpt._batches(self.run, TEXT, number, self.pg.dp) for _ in self.chunks]
        reported = self._forward_backward(data_iterator=batches if self.run.vpp else batches[0])
        self.optimizer.step()
        return gpt._mean_over_job(reported, self.pg.pp, self.pg.dp)

    def digest(self):
        """Of the weights and of all that the optimizer knows of them."""
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
        """``megapg.save_checkpoint`` of all there is."""
        return megapg.save_checkpoint(
            directory,
            iteration,
            model=self.chunks,
            optimizer=self.optimizer,
            pg_collection=self.pg,
            **{"timeout": 60, **options},
        )

    def load(self, directory, **options):
        """``megapg.load_checkpoint`` of all there is."""
        return megapg.load_checkpoint(
            directory,
            model=self.chunks,
            optimizer=self.optimizer,
            pg_collection=self.pg,
            **{"timeout": 60, **options},
        )

    def let_go(self):
        """Or the groups live on with the model."""
        gpt._let_go(self.chunks)


def sizes(run):
    """The arguments of ``megapg.session``."""
    return {
        "tp": run.tp,
        "pp": run.pp,
        "vpp": run.vpp,
        "ep": run.ep,
        "expt_tp": run.expt_tp or run.tp,
    }


def cut(run, dp=1, **changes):
    """The same job under another layout, with the same global batch of 4 times ``dp`` samples."""
    return replace(run, **changes, num_microbatches=4 // dp)


def weights(chunks):
    """Name -> a copy, to see whether a failed load has touched anything."""
    return {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def equal(first, second):
    """Whether two results of :func:`weights` are the same, bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
