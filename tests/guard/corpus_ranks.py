"""One rank of the corpus: runs programs one after another, and reports the result of each."""

import datetime
import importlib.util
import os
import random
import sys
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from functools import cache

import layouts
import numpy as np
import torch
import torch.distributed as dist
from corpus import HERE, constant
from layouts import TIMEOUT, layouts_kept
from megatron.core.tensor_parallel import get_cuda_rng_tracker

import megapg
from megapg.megatron import parallel_state
from megapg.megatron.watching import hook
from megapg.megatron.watching.guard import fields_that_differ
from megapg.ownership import closing
from megapg.testing import megatron_on_cpu

OUT_OF_STEP = 60.0
"""Seconds that a rank waits for the others between two programs."""


def run_all(programs, world):
    """Run the programs one after another in this rank; for world 0 without torch.distributed."""
    warnings.simplefilter("ignore")
    store = None
    if world:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        store = dist.PrefixStore("corpus", dist.distributed_c10d._get_default_store())
    reports = {}
    for turn, (kind, name) in enumerate(programs):
        if store is not None:
            meet(store, turn)
        with nullcontext() if constant(kind, name, "WITHOUT_KIT") else megatron_on_cpu():
            reports[kind, name] = RUNS[kind](name)
            clear()
    return reports


def wrong(name):
    """Run a wrong program without and with the guard, and run the intended program."""
    with layouts_kept():
        return {
            "silent": outcome("wrong", name, "program", "off"),
            "meant": outcome("wrong", name, "meant"),
            "guarded": outcome("wrong", name, "program"),
        }


def limit(name):
    """Run a program that the guard currently misjudges."""
    if constant("limits", name, "REFUSED"):
        return {"guarded": outcome("limits", name, "program")}
    with layouts_kept():
        return {
            "guarded": outcome("limits", name, "program"),
            "meant": outcome("limits", name, "meant"),
        }


def sound(name):
    """Run a sound program with the guard, and record the guard's activity."""
    with activity() as seen:
        return {"guarded": outcome("sound", name, "program"), "seen": seen}


RUNS = {"wrong": wrong, "sound": sound, "limits": limit}


class Activity:
    """Number of reads and of judged reads; ``active`` is True if the guard was ever active."""

    def __init__(self):
        self.reads, self.judged, self.active = 0, 0, False

    def read(self, *_):
        self.look()
        self.reads += 1
        self.judged += bool(fields_that_differ())

    def resolved(self, _):
        pass

    def look(self):
        self.active = self.active or bool(fields_that_differ())


@contextmanager
def activity():
    """Record the guard's activity while the block runs."""
    seen = Activity()
    closing.on_open_or_close(opened=seen.look, closed=seen.look)
    layouts.ON_GLOBALS.append(seen.look)
    try:
        with hook.listening(seen):
            yield seen
    finally:
        closing._LISTENERS.remove((seen.look, seen.look))
        layouts.ON_GLOBALS.remove(seen.look)


def outcome(kind, name, function, mode="error"):
    """Run a function of a program from a fixed state; return its value or its error."""
    try:
        seed_everything(kit=not constant(kind, name, "WITHOUT_KIT"))
        with megapg.guard(mode):
            return {"value": run(loaded(kind, name), function), "error": None}
    except Exception as error:
        return {
            "value": None,
            "error": type(error).__name__,
            "message": str(error),
            "trace": "".join(traceback.format_exception(error)),
        }


def run(program, function):
    """Call a function of a program with the collections of its layouts."""
    if not hasattr(program, "LAYOUTS"):
        return getattr(program, function)()
    with layouts.opened(**program.LAYOUTS) as collections:
        if hasattr(program, function):
            return getattr(program, function)(*collections)
        with megapg.published(collections[0]):
            return program.program(*collections[:1] * len(collections))


@cache
def loaded(kind, name):
    """Load the module of a program by its path, because programs are not on ``sys.path``."""
    module = f"corpus_{kind}_{name}"
    spec = importlib.util.spec_from_file_location(module, HERE / kind / f"{name}.py")
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


def seed_everything(kit=True):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    if kit:  # Megatron-core's tracker needs CUDA
        get_cuda_rng_tracker().reset()
        get_cuda_rng_tracker().add("model-parallel-rng", 1)
        get_cuda_rng_tracker().add("expert-parallel-rng", 2)


def clear():
    """Remove state that a failed program has left in the process."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()


def meet(store, turn):
    """Wait for the other ranks, so that a program which fails on one rank delays no other."""
    store.set(f"{turn}/{os.environ['RANK']}", "")
    everyone = [f"{turn}/{rank}" for rank in range(dist.get_world_size())]
    store.wait(everyone, datetime.timedelta(seconds=OUT_OF_STEP))
