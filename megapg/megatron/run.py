"""Run an unchanged training script of Megatron's on groups of a session. ::

    torchrun --nproc-per-node 8 -m megapg.megatron.run pretrain_gpt.py ...

It runs under torchrun, ``srun``, ``mpirun`` or alone, and sets the variables that Megatron reads
from those of the launcher. The script parses its own arguments and initialises Megatron itself. Its
call of ``parallel_state.initialize_model_parallel`` opens a session with the same arguments
(:func:`~megapg.megatron.drop_in.standing_in`). A fork's own arguments and its choice of embedding
ranks still apply. The ranks wait ``--distributed-timeout-minutes`` for each other. Each rank ends
its groups alone when the script ends there, as without megapg.

At the end rank 0 prints the cost of the groups. With ``--on-globals`` before the script, Megatron
makes its own groups, and rank 0 prints their cost.

Exit codes: the script's; and 2, with one line on each rank, if it can't start: no such script,
arguments that Megatron refuses, sizes that form no layout, or contradictory variables of the
launcher.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megapg import torch_private
from megapg.errors import LaunchError, LayoutError, UnsupportedOptionError, UnsupportedVersionError
from megapg.launch import detect
from megapg.megatron.core import parallel_state_module
from megapg.megatron.drop_in import standing_in

_USAGE = "usage: python -m megapg.megatron.run [--on-globals] SCRIPT [arguments of the script]"
_MAKES_GROUPS = "initialize_model_parallel"
_CHECKS = ("megatron.training.arguments", "megatron.training.yaml_arguments")


def main(arguments: Sequence[str]) -> None:
    """Run the script ``arguments[0]`` with the arguments that follow."""
    if list(arguments[:1]) in (["-h"], ["--help"]):
        print(_USAGE, inspect.cleandoc(__doc__ or ""), sep="\n\n")
        return
    on_globals = list(arguments[:1]) == ["--on-globals"]
    arguments = arguments[on_globals:]
    if not arguments:
        _refuse(_USAGE)
    if arguments[0].startswith("-"):
        _refuse(f"there is no option {arguments[0]!r}. {_USAGE}")
    script = Path(arguments[0])
    if not script.is_file():
        _refuse(f"there is no script {str(script)!r} in {os.getcwd()}. {_USAGE}")
    try:
        with detect().exported():
            _run(script, arguments, on_globals)
    except (LaunchError, LayoutError, UnsupportedOptionError, UnsupportedVersionError) as error:
        _refuse(str(error))
    except (AssertionError, ValueError) as error:
        if refused := _refused_by_megatron(error):
            _refuse(refused)
        raise


def _run(script: Path, arguments: Sequence[str], on_globals: bool) -> None:
    # As `python SCRIPT` sets them. The script's folder may contain Megatron, so it comes first.
    sys.argv = list(arguments)
    sys.path[0] = str(script.resolve().parent)

    with contextlib.nullcontext() if on_globals else standing_in(), _accounted():
        runpy.run_path(str(script), run_name="__main__")


@contextlib.contextmanager
def _accounted() -> Iterator[None]:
    """Print on rank 0 the time that making the groups took, and the resources added since."""
    state = vars(parallel_state_module())
    make = state[_MAKES_GROUPS]
    said: list[str] = []

    @functools.wraps(make)
    def timed(*sizes: object, **options: object) -> object:
        before, start = _held(), time.perf_counter()
        made = make(*sizes, **options)
        said[:] = [f"{time.perf_counter() - start:.2f} s", _more(before)]
        at_the_end.append(before)
        return made

    at_the_end: list[Mapping[str, int]] = []
    state[_MAKES_GROUPS] = timed
    finished = False
    try:
        try:
            yield
        except SystemExit as end:  # Megatron's --exit-interval raises it
            finished = not end.code
            raise
        finished = True
    finally:
        state[_MAKES_GROUPS] = make
        if finished and said and os.environ["RANK"] == "0":
            took, then = said
            print(
                f"megapg: {_MAKES_GROUPS} took {took} and added {then}; "
                f"at the end of the script there are {_more(at_the_end[-1])} more than before it.",
                file=sys.stderr,
            )


def _held() -> Mapping[str, int]:
    """Return counts of this process's resources; the last two on Linux only."""
    held = {"communicators": len(torch_private.known_groups())}
    for what, folder in (("threads", "/proc/self/task"), ("descriptors", "/proc/self/fd")):
        if os.path.isdir(folder):
            held[what] = len(os.listdir(folder))
    return held


def _more(before: Mapping[str, int]) -> str:
    return ", ".join(f"{count - before[what]} {what}" for what, count in _held().items())


def _refused_by_megatron(error: BaseException) -> str:
    """Return the problem found by Megatron's checks of its arguments; empty for other errors."""
    frames = list(traceback.walk_tb(error.__traceback__))
    frame, line = frames[-1]
    if frame.f_globals.get("__name__") not in _CHECKS:
        return ""
    # Some of its assertions have no message: use their source line.
    source = traceback.extract_tb(error.__traceback__)[-1].line
    return f"{str(error) or source} ({frame.f_globals['__name__']}, line {line})"


def _refuse(message: str) -> NoReturn:
    rank = os.environ.get("RANK")
    print(f"error{f' on rank {rank}' if rank else ''}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
