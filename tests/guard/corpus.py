"""Runs the programs of the corpus: all of one kind and world size in the same ranks."""

import ast
import contextlib
import importlib
import math
import os
import random
import traceback
import warnings
from collections import defaultdict
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import layouts
import numpy as np
import torch
import torch.distributed as dist
from layouts import TIMEOUT, layouts_kept
from megatron.core.tensor_parallel import get_cuda_rng_tracker

import megapg
from megapg.megatron import parallel_state
from megapg.megatron.core import core_version
from megapg.megatron.guarding.switch import judge_now
from megapg.megatron.watching import hook
from megapg.ownership import closing
from megapg.testing import Ranks, megatron_on_cpu

HERE = Path(__file__).parent
OUT_OF_STEP = 60.0
"""Seconds that a rank waits for the others between two programs."""


def names(kind):
    """Every program of a kind: ``wrong``, ``sound`` or ``limits``."""
    return sorted(path.stem for path in (HERE / kind).glob("*.py"))


def applies(kind, name):
    """True if the program is for the installed core. Reads the file without importing it."""
    cores = constant(kind, name, "CORES", ())
    installed = ".".join(map(str, core_version()[:2]))
    return not cores or installed in cores


@cache
def constant(kind, name, wanted, default=None):
    """A constant at the top of a program."""
    for node in ast.parse((HERE / kind / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == wanted:
            return ast.literal_eval(node.value)
    return default


def in_ranks(kinds, parts=2):
    """Run every program of these kinds, and return kind and name -> what each rank has to report.

    Programs of one world size share their ranks. The ranks of all world sizes run at once.
    """
    by_world = defaultdict(list)
    for kind in kinds:
        for name in names(kind):
            if applies(kind, name):
                by_world[constant(kind, name, "WORLD")].append((kind, name))
    with contextlib.ExitStack() as stack:
        running = []
        for world, programs in sorted(by_world.items(), reverse=True):
            count = parts if world == 2 else 1
            for part in filter(None, (programs[start::count] for start in range(count))):
                run = Ranks(
                    partial(run_all, part, world),
                    world or 1,
                    deadline=280,
                    preload=("settled", "corpus"),
                )
                running.append(stack.enter_context(run))
        reports = {}
        for run in running:
            for rank, report in enumerate(run.results()):
                for program, outcome in report.items():
                    reports.setdefault(program, {})[rank] = outcome
    return reports


# -- in a rank -------------------------------------------------------------------------------------


def run_all(programs, world):
    """Run the programs one after another in this rank; for world 0 without torch.distributed."""
    warnings.simplefilter("ignore")
    store = None
    if world:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        store = dist.PrefixStore("corpus", dist.distributed_c10d._get_default_store())
    reports = {}
    with megatron_on_cpu():
        for turn, (kind, name) in enumerate(programs):
            if store is not None:
                meet(store, turn)
            reports[kind, name] = RUNS[kind](name)
            clear()
    return reports


def wrong(name):
    """The outcomes of a wrong program without the guard, of what was meant, and with the guard."""
    with layouts_kept():
        return {
            "silent": outcome("wrong", name, "program", "off"),
            "meant": outcome("wrong", name, "meant"),
            "guarded": outcome("wrong", name, "program"),
        }


def limit(name):
    """The outcomes of a program that the guard judges wrongly today."""
    if constant("limits", name, "REFUSED"):
        return {"guarded": outcome("limits", name, "program")}
    with layouts_kept():
        return {
            "guarded": outcome("limits", name, "program"),
            "meant": outcome("limits", name, "meant"),
        }


def sound(name):
    """The outcome of a sound program with the guard, and what the guard did meanwhile."""
    with activity() as seen:
        return {"guarded": outcome("sound", name, "program"), "seen": seen}


RUNS = {"wrong": wrong, "sound": sound, "limits": limit}


class Activity:
    """Counts reads, and those that the guard judged; True if the guard was ever active."""

    def __init__(self):
        self.reads, self.judged, self.active = 0, 0, False

    def read(self, *_):
        self.look()
        self.reads += 1
        self.judged += judge_now() is not None

    def resolved(self, _):
        pass

    def look(self):
        self.active = self.active or judge_now() is not None


@contextmanager
def activity():
    """Watch the guard while the block runs."""
    seen = Activity()
    closing.on_open_or_close(seen.look)
    layouts.ON_GLOBALS.append(seen.look)
    try:
        with hook.listening(seen):
            yield seen
    finally:
        closing._LISTENERS.remove(seen.look)
        layouts.ON_GLOBALS.remove(seen.look)


def outcome(kind, name, function, mode="error"):
    """Run a function of a program from a fixed state: its value, or the error that it raises."""
    seed_everything()
    try:
        program = importlib.import_module(f"{kind}.{name}")
        with megapg.guard(mode):
            return {"value": getattr(program, function)(), "error": None}
    except Exception as error:
        return {
            "value": None,
            "error": type(error).__name__,
            "message": str(error),
            "trace": "".join(traceback.format_exception(error)),
        }


def seed_everything():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    get_cuda_rng_tracker().reset()
    get_cuda_rng_tracker().add("model-parallel-rng", 1)
    get_cuda_rng_tracker().add("expert-parallel-rng", 2)


def clear():
    """Forget what a program that failed has left in the process."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()


def meet(store, turn):
    """Wait for the other ranks, so that a program which fails on one rank delays no other."""
    store.set(f"{turn}/{os.environ['RANK']}", "")
    everyone = [f"{turn}/{rank}" for rank in range(dist.get_world_size())]
    store.wait(everyone, TIMEOUT * (OUT_OF_STEP / TIMEOUT.total_seconds()))


# -- what the tests ask ----------------------------------------------------------------------------


def same(one, other):
    """True if two results are equal; numbers that a float rounds apart count as equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7)
    return one == other


@cache
def functions(file):
    """The functions of a source file: name, first line, last line."""
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    unnamed = {ast.Lambda: "<lambda>", ast.GeneratorExp: "<genexpr>"}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, *unnamed)
    return [
        (getattr(node, "name", unnamed.get(type(node))), node.lineno, node.end_lineno)
        for node in nodes
        if isinstance(node, kinds)
    ]


def functions_at(file, line):
    """The names of the functions around a line of a source file."""
    return [name for name, first, last in functions(file) if first <= line <= last]
