"""Migrate a copy of the installed Megatron-core, and train on either of the two.

The copy is put in front of the installed Megatron-core. The demo's training then runs on both, on
the groups of a session and on the globals. Traces count the reads of globals on both sides.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import megapg
from megapg.megatron import trace_global_reads
from megapg.megatron.watching.trace import GlobalRead
from megapg.migrate.config import Config, parse_versions
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Migration
from megapg.migrate.write import write_files
from megapg.testing import megatron_on_cpu
from megapg.testing.distributed import run_distributed
from megapg.tools.demo.job import Checkpoints, GPTRun, TrainingResult, library_text

WORLD = 4
CORE = "megatron.core"

_TIMEOUT = timedelta(seconds=120)
QUIET = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_FELL_BACK = "resolve"  # name of a look-up that read the globals, in a trace


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        what: description of the case.
        run: the job.
        session: train on the groups of a session, which are published too; else on the globals.
        globals_: layout of the globals. If set, the session's groups are not published.
        save_in: folder for a checkpoint half way through.
        resume_from: folder of the checkpoint to resume from.
    """

    what: str
    run: GPTRun
    session: bool = True
    globals_: GPTRun | None = None
    save_in: str = ""
    resume_from: str = ""


@dataclass(frozen=True)
class Trained:
    """The losses and weights of one case on one rank, and its reads of globals."""

    result: TrainingResult
    reads: tuple[GlobalRead, ...]


@dataclass(frozen=True)
class Contrast:
    """One case on the installed core and on the migrated one, on all ranks."""

    case: Case
    installed: tuple[Trained, ...]
    migrated: tuple[Trained, ...]

    @property
    def equal(self) -> bool:
        """True if both cores give the same results on every rank, to the last bit."""
        return [each.result for each in self.migrated] == [each.result for each in self.installed]


# -- the migrated core -----------------------------------------------------------------------------


@contextlib.contextmanager
def migrated_core() -> Iterator[tuple[Path, Migration]]:
    """Yield a folder for importing the migrated core, and the migration."""
    with tempfile.TemporaryDirectory(prefix="megapg-test-") as folder:
        # The folder has no __init__.py above the core, so that a core that is first on the path
        # shadows the other.
        core = Path(folder) / "megatron" / "core"
        shutil.copytree(installed_core(), core, ignore=shutil.ignore_patterns("__pycache__"))
        version = importlib.metadata.version("megatron-core")
        config = Config(Path(folder), versions=parse_versions(".".join(version.split(".")[:2])))
        migration = migrate([core], config)
        problems = write_files(migration.files)
        if problems:
            raise RuntimeError(f"{problems[0].file}: {problems[0].message}")
        yield Path(folder), migration


def installed_core() -> Path:
    """Return the folder of the installed Megatron-core, without importing it."""
    spec = importlib.util.find_spec("megatron")
    places = (
        [Path(place) / "core" for place in spec.submodule_search_locations or ()] if spec else []
    )
    return next(place for place in places if place.is_dir())


@contextlib.contextmanager
def first_on_the_path(tree: Path | None) -> Iterator[None]:
    """Import from ``tree`` first, here and in ranks, which inherit the path."""
    if tree is None:
        yield
        return
    sys.path.insert(0, str(tree))
    try:
        yield
    finally:
        sys.path.remove(str(tree))


def importable(tree: Path | None) -> frozenset[str]:
    """Return the modules of the core that a separate process can import."""
    core = installed_core() if tree is None else tree / "megatron" / "core"
    with first_on_the_path(tree):
        return run_distributed(partial(_importable, core), 1, deadline=500, env=QUIET)[0]


def _importable(core: Path) -> frozenset[str]:
    logging.disable(logging.WARNING)  # about missing packages
    found = set()
    for file in sorted(core.rglob("*.py")):
        inside = file.relative_to(core).with_suffix("").parts
        name = ".".join([CORE, *inside]).removesuffix(".__init__")
        with contextlib.suppress(Exception):  # some modules need missing packages
            importlib.import_module(name)
            found.add(name)
    _check_core(core)
    return frozenset(found)


def _check_core(core: Path) -> None:
    place = importlib.import_module(CORE).__file__
    if place is None or Path(place).parent.resolve() != core.resolve():
        raise RuntimeError(f"{CORE} is {place}, and should be in {core}")


# -- training --------------------------------------------------------------------------------------


def train_on_this_rank(core: Path, cases: Sequence[Case], folder: Path) -> dict[Case, Trained]:
    """Train in a process with a WORLD.

    Args:
        core: folder from which the core must have been imported.
        cases: run in this order, so that a case may resume from the checkpoint of an earlier one.
        folder: for checkpoints, the same on every rank.
    """
    warnings.simplefilter("ignore")
    _check_core(core)
    text = library_text()
    return {case: _train(case, text, folder) for case in cases}


def _train(case: Case, text: bytes, folder: Path) -> Trained:
    from megapg.megatron import parallel_state
    from megapg.tools.demo import gpt

    checkpoints = None
    if case.save_in or case.resume_from:
        checkpoints = Checkpoints(
            str(folder / (case.save_in or case.resume_from)),
            save_after=case.run.steps // 2 if case.save_in else None,
            resume=bool(case.resume_from),
        )
    others = case.globals_ if case.session else case.run
    with contextlib.ExitStack() as stack:
        if others is not None:
            parallel_state.initialize_model_parallel(**_sizes(others))
            stack.callback(parallel_state.destroy_model_parallel)
        stack.enter_context(megatron_on_cpu())
        pg = None
        if case.session:
            pg = stack.enter_context(_session(case.run)).groups
            if others is None:
                stack.enter_context(megapg.published(pg))
        trace = stack.enter_context(trace_global_reads())
        result = gpt.train(case.run, text, pg, checkpoints=checkpoints)
        del pg
    gc.collect()
    return Trained(replace(result, seconds=0.0), trace.reads)  # equal runs are equal


def _session(run: GPTRun) -> Any:
    return megapg.session(
        tp=run.tp,
        pp=run.pp,
        vpp=run.vpp,
        ep=run.ep,
        expt_tp=run.expt_tp or run.tp,
        collective_timeout=_TIMEOUT,
    )


def _sizes(run: GPTRun) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "virtual_pipeline_model_parallel_size": run.vpp,
        "expert_model_parallel_size": run.ep,
        "expert_tensor_parallel_size": run.expt_tp,
        "create_gloo_process_groups": False,
    }


# -- reads -----------------------------------------------------------------------------------------


def places(trained: Sequence[Trained]) -> int:
    """Return the number of distinct lines that read a global."""
    return len({(read.file, read.line) for read in _reads(trained)})


def reads(trained: Sequence[Trained]) -> int:
    """Return the number of reads of a global on all ranks."""
    return sum(read.count for read in _reads(trained))


def _reads(trained: Sequence[Trained]) -> Iterator[GlobalRead]:
    """Leave out look-ups that read the globals, as the reads themselves are listed."""
    return (read for each in trained for read in each.reads if read.getter != _FELL_BACK)
