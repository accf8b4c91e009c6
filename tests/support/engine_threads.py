"""Run code on autograd's own threads, as the backward pass of a GPU does."""

import threading

import torch


def started_by_python() -> set[int]:
    """Return the threads that Python started.

    ``threading.current_thread()`` in another thread adds a stand-in to Python's list, and the
    engine uses its threads again.
    """
    return {
        thread.ident
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }


class Nested(torch.autograd.Function):
    """A backward pass inside a backward pass; from depth 60 the engine uses its own threads."""

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
