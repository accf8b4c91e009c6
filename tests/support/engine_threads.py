"""Work done by autograd's own threads, as a GPU's backward does it."""

import threading

import torch


def started_by_python() -> set[int]:
    """The threads of Python's own. Whoever asks in another one which it is enters that in Python's
    list as a stand-in, and the engine uses its threads again.
    """
    return {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }


class Nested(torch.autograd.Function):
    """A backward inside a backward; past 60 of them the engine goes on in threads of its own."""

    @staticmethod
    def forward(ctx, x, depth, work):
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                leaf = torch.ones(1, requires_grad=True)
                Nested.apply(leaf, ctx.depth - 1, ctx.work).backward()
        else:
            ctx.work()
        return gradient, None, None
