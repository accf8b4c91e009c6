"""Reads the programs of the corpus, and runs them: one kind and world size in the same ranks.

The tests import this file, so it imports neither torch nor Megatron-core.
"""

import ast
import contextlib
import math
from collections import defaultdict
from functools import cache, partial
from pathlib import Path

from megapg.megatron.core import installed_version
from megapg.testing.distributed import Ranks

HERE = Path(__file__).parent
PRELOAD = ("settled", "corpus_ranks")


def names(kind):
    """Return the name of every program of a kind: ``wrong``, ``sound`` or ``limits``."""
    return sorted(path.stem for path in (HERE / kind).glob("*.py"))


def applies(kind, name):
    """True if the program is for the installed core; reads the file without importing it."""
    cores = constant(kind, name, "CORES", ())
    installed = ".".join(map(str, installed_version()[:2]))
    return not cores or installed in cores


@cache
def constant(kind, name, wanted, default=None):
    """Return the value of a constant at the top of a program."""
    for node in ast.parse((HERE / kind / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == wanted:
            return ast.literal_eval(node.value)
    return default


def in_ranks(kinds, parts=3):
    """Run every program of these kinds; return (kind, name) -> each rank's report.

    Programs of one world size share their ranks. The ranks of all world sizes run at once.
    """
    by_world = defaultdict(list)
    for kind in kinds:
        for name in names(kind):
            if applies(kind, name):
                by_world[constant(kind, name, "WORLD", 2)].append((kind, name))
    with contextlib.ExitStack() as stack:
        running = []
        for world, programs in sorted(by_world.items(), reverse=True):
            count = parts if world == 2 else 1
            for part in filter(None, (programs[start::count] for start in range(count))):
                run = Ranks(
                    partial(run_all, part, world),
                    world or 1,
                    deadline=280,
                    preload=PRELOAD,
                )
                running.append(stack.enter_context(run))
        reports = {}
        for run in running:
            for rank, report in enumerate(run.results()):
                for program, outcome in report.items():
                    reports.setdefault(program, {})[rank] = outcome
    return reports


def run_all(programs, world):
    """Run the programs in this rank."""
    import corpus_ranks

    return corpus_ranks.run_all(programs, world)


# -- functions for the tests -----------------------------------------------------------------------


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
    """Return the functions of a source file: name, first line, last line."""
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    unnamed = {ast.Lambda: "<lambda>", ast.GeneratorExp: "<genexpr>"}
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, *unnamed)
    return [
        (getattr(node, "name", unnamed.get(type(node))), node.lineno, node.end_lineno)
        for node in nodes
        if isinstance(node, kinds)
    ]


def functions_at(file, line):
    """Return the names of the functions around a line of a source file."""
    return [name for name, first, last in functions(file) if first <= line <= last]
