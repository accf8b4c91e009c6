"""An actor that trains a little on a session, for the tests on Ray."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import megapg
from megapg.launch import detect

SOON = 4.0  # seconds


class Layer(nn.Module):
    """Sums its weight over a tensor-parallel group, which it keeps like Megatron-core's modules."""

    def __init__(self, pg):
        super().__init__()
        self.tp_group = pg.tp
        self.weight = nn.Parameter(torch.full((1,), float(dist.get_rank())))

    def forward(self):
        total = self.weight.detach().clone()
        dist.all_reduce(total, group=self.tp_group)
        return total.item()


class Trainer:
    """Each method runs on all ranks at the same time."""

    def __init__(self, **environment):
        # What frameworks set in the actor's constructor.
        os.environ.update(environment)
        self.session = self.model = None

    def where(self):
        return os.getpid(), socket.gethostname()

    def detected(self):
        """Return the launch that the session would take from the environment, or the error."""
        try:
            return detect()
        except megapg.MegapgError as error:
            return error

    def open(self, launch=None, *, tp=2, timeout=60.0):
        """Open a session, as a new generation if there was one. True if a model was kept."""
        lost = self.session
        if lost is not None:
            lost.close(RuntimeError("a worker was lost"))
        self.session = megapg.session(
            tp=tp, launch=launch, timeout=timeout, collective_timeout=timedelta(seconds=SOON)
        )
        self.session._timeout = SOON
        if lost is None or lost.layout != self.session.layout:
            self.model = Layer(self.session.groups)
            return False
        return bool(self.session.rebind(self.model, of=lost).replaced)

    def step(self):
        """Return the sum of the ranks in this rank's tensor-parallel group."""
        return self.model()

    def ranks(self, field):
        return self.session.groups.ranks(field)

    def guarded(self, name, *arguments, **more):
        """Run a method; return its error as text, or None."""
        try:
            getattr(self, name)(*arguments, **more)
        except Exception as error:
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        return None

    def check(self):
        self.session.check(SOON, "a test")

    def suspend(self):
        self.session.suspend()

    def close(self):
        self.session.close()
