"""Compare a migrated Megatron-core with the installed one: the trained bits, and the reads.

A copy of the installed Megatron-core is migrated in place and put in front of the installed one.
The demo's training then runs on both, on the groups of a session and on the globals. Every loss,
every weight and the loss after a checkpoint must be equal to the last bit. Traces count the reads
of globals on both sides. CPU time is compared in turns.

``python -m benchmarks.behaviour`` runs this alone and names the functions that fall back.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

import megapg
from benchmarks.table import Table
from megapg.demo.job import Checkpoints, GPTRun, TrainingResult, library_text
from megapg.errors import NoCollectionError, RankFailedError, WrongGroupError
from megapg.megatron import GlobalRead, trace_global_reads
from megapg.migrate.config import Config, parse_versions
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Migration
from megapg.migrate.write import write_files
from megapg.testing import megatron_on_cpu
from megapg.testing.distributed import run_distributed

WORLD = 4
REPEATS = 3
STEPS = 4 + REPEATS  # import each tree, train on each, then time both in turns
CORE = "megatron.core"

_TIMEOUT = timedelta(seconds=120)
QUIET = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_DENSE = GPTRun(tp=2, pp=2)
_EXPERTS = GPTRun(tp=2, ep=2, experts=4, sequence_parallel=True)
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


CASES = (
    Case("dense, tp2 pp2, session", _DENSE, save_in="dense"),
    Case("the same, resumed", _DENSE, resume_from="dense"),
    Case("the same on globals", _DENSE, session=False),
    Case("the same on globals, resumed", _DENSE, session=False, resume_from="dense"),
    Case("the same, the globals being tp2 alone", _DENSE, globals_=replace(_DENSE, pp=1)),
    Case("the same, the globals being dp alone", _DENSE, globals_=replace(_DENSE, tp=1, pp=1)),
    Case("interleaved, tp2 pp2 vpp2, session", replace(_DENSE, vpp=2)),
    Case("the same on globals", replace(_DENSE, vpp=2), session=False),
    Case(
        "recomputed, tp2 pp2 sp, session", replace(_DENSE, recompute=True, sequence_parallel=True)
    ),
    Case("experts, tp2 ep2, session", _EXPERTS, save_in="experts"),
    Case("the same, resumed", _EXPERTS, resume_from="experts"),
    Case("the same on globals", _EXPERTS, session=False),
    Case("the same, the globals being tp2 alone", _EXPERTS, globals_=replace(_EXPERTS, ep=1)),
    Case("experts by all-to-all, session", replace(_EXPERTS, dispatcher="alltoall")),
)
_TIMED = Case("timed", replace(_DENSE, steps=10))


@dataclass(frozen=True)
class Trained:
    """One case on one rank.

    Attributes:
        result: losses and weights; without times, so that equal runs are equal.
        cpu: seconds of CPU time of this rank.
        looking_up: seconds of it in resolve() and groups_of().
        reads: reads of globals, with the look-ups that read them.
        error: name of the error that ended the run, as the globals have other groups.
    """

    result: TrainingResult | None
    cpu: float
    looking_up: float
    reads: tuple[GlobalRead, ...]
    error: str = ""


@dataclass(frozen=True)
class Contrast:
    """One case on the installed core and on the migrated one, on all ranks."""

    case: Case
    installed: tuple[Trained, ...]
    migrated: tuple[Trained, ...]

    @property
    def equal(self) -> bool:
        """True if both cores give the same results on every rank, to the last bit."""
        before = [(each.result, each.error) for each in self.installed]
        return [(each.result, each.error) for each in self.migrated] == before

    @property
    def new_fallbacks(self) -> Counter[str]:
        """Count the calls of functions that read the globals only after the migration."""
        before = {read.function for each in self.installed for read in each.reads}
        return Counter(
            {
                who: count
                for who, count in fallbacks(self.migrated).items()
                if not before & set(who.split(" for "))
            }
        )


@dataclass(frozen=True)
class Behaviour:
    """The results.

    Attributes:
        contrasts: the cases.
        cpu: CPU time of the migrated core by that of the installed one, for each repeat of a case.
        looking_up: the share of look-ups in this time, for each repeat.
        imported: number of modules that can be imported from the migrated core.
        lost: modules that can be imported only from the installed core.
        rewritten: number of uses of the globals that were rewritten.
        left: number of uses that were not rewritten.
    """

    contrasts: tuple[Contrast, ...]
    cpu: tuple[float, ...]
    looking_up: tuple[float, ...]
    imported: int
    lost: tuple[str, ...]
    rewritten: int
    left: int

    @property
    def led_astray(self) -> list[Case]:
        """Return the cases in which globals of another layout change the migrated core's result."""
        return self._led_astray(lambda each: each.migrated)

    @property
    def led_astray_before(self) -> list[Case]:
        """Return the same cases for the installed core."""
        return self._led_astray(lambda each: each.installed)

    def _led_astray(self, side: Callable[[Contrast], tuple[Trained, ...]]) -> list[Case]:
        alone = {each.case.run: each for each in self.contrasts if _is_whole(each.case)}
        return [
            each.case
            for each in self.contrasts
            if each.case.globals_ is not None
            and not any(trained.error for trained in side(each))
            and _lessons(side(each)) != _lessons(side(alone[each.case.run]))
        ]


def _is_whole(case: Case) -> bool:
    return case.session and case.globals_ is None and not case.resume_from


def _lessons(trained: Sequence[Trained]) -> list[tuple[object, ...]]:
    results = (each.result for each in trained)
    return [(result.losses, result.weights_sha256) for result in results if result]


def run(on_progress: Callable[[], None] = lambda: None) -> Behaviour:
    """Migrate the core, train on both cores, and compare.

    Args:
        on_progress: called ``STEPS`` times.
    """
    with migrated_core() as (tree, migration):
        trees = (None, tree)
        modules = []
        for each in trees:
            modules.append(importable(each))
            on_progress()
        trained = []
        for each in trees:
            trained.append(train(each, CASES))
            on_progress()
        ratios, shares = [], []
        for _ in range(REPEATS):
            before, after = (train(each, (_TIMED,), traced=False)[_TIMED] for each in trees)
            cpu = sum(t.cpu for t in after)
            ratios.append(cpu / sum(t.cpu for t in before))
            shares.append(sum(t.looking_up for t in after) / cpu)
            on_progress()
    return Behaviour(
        contrasts=tuple(Contrast(case, *(each[case] for each in trained)) for case in CASES),
        cpu=tuple(ratios),
        looking_up=tuple(shares),
        imported=len(modules[1]),
        lost=tuple(sorted(modules[0] - modules[1])),
        rewritten=len(migration.served),
        left=len(migration.left),
    )


# -- the migrated core -----------------------------------------------------------------------------


@contextlib.contextmanager
def migrated_core() -> Iterator[tuple[Path, Migration]]:
    """Yield a folder for importing the migrated core, and the migration."""
    with tempfile.TemporaryDirectory(prefix="megapg-bench-") as folder:
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


def train(
    tree: Path | None, cases: Sequence[Case], *, traced: bool = True
) -> dict[Case, tuple[Trained, ...]]:
    """Train on the core in ``tree``, or on the installed one; return all ranks of each case.

    Args:
        tree: a folder of :func:`migrated_core`, or None.
        cases: run in this order, so that one may resume from another's checkpoint.
        traced: list the reads of globals; else only measure time.
    """
    core = installed_core() if tree is None else tree / "megatron" / "core"
    together = tuple(case for case in cases if case.globals_ is None)
    alone = [(case,) for case in cases if case.globals_ is not None]  # a guard may end these
    trained: dict[Case, tuple[Trained, ...]] = {}
    with first_on_the_path(tree), tempfile.TemporaryDirectory(prefix="megapg-bench-") as folder:
        for several in (together, *alone):
            try:
                ranks = run_distributed(
                    partial(_train_all, core, several, Path(folder), traced),
                    WORLD,
                    deadline=60 + 40 * len(several),
                    preload=("megapg.demo.gpt",),
                    env=QUIET,
                )
            except RankFailedError as error:
                loud = error.subgroup((WrongGroupError, NoCollectionError))
                if several == together or loud is None:
                    raise
                name = type(loud.exceptions[0]).__name__
                trained[several[0]] = (Trained(None, 0.0, 0.0, (), error=name),)
            else:
                trained |= {case: tuple(rank[case] for rank in ranks) for case in several}
    return {case: trained[case] for case in cases}


def _train_all(
    core: Path, cases: Sequence[Case], folder: Path, traced: bool
) -> dict[Case, Trained]:
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    trained = train_on_this_rank(core, cases, folder, traced=traced)
    dist.destroy_process_group()
    return trained


def train_on_this_rank(
    core: Path, cases: Sequence[Case], folder: Path, *, traced: bool = True
) -> dict[Case, Trained]:
    """Train in a process with a WORLD.

    Args:
        core: folder from which the core must have been imported.
        cases: see :func:`train`.
        folder: for checkpoints, the same on every rank.
        traced: see :func:`train`.
    """
    warnings.simplefilter("ignore")
    _check_core(core)
    text = library_text()
    return {case: _train(case, text, folder, traced) for case in cases}


def _train(case: Case, text: bytes, folder: Path, traced: bool) -> Trained:
    from megapg.demo import gpt
    from megapg.megatron import parallel_state

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
        trace = stack.enter_context(trace_global_reads()) if traced else None
        clock = _Clock() if traced else stack.enter_context(_clock())  # it hides the caller
        start = time.process_time()
        result = gpt.train(case.run, text, pg, checkpoints=checkpoints)
        cpu = time.process_time() - start
        del pg
    gc.collect()
    return Trained(replace(result, seconds=0.0), cpu, clock.seconds, trace.reads if trace else ())


@dataclass
class _Clock:
    seconds: float = 0.0

    def around(self, look_up: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return look_up(*args, **named)
            finally:
                self.seconds += time.thread_time() - start

        return timed


@contextlib.contextmanager
def _clock() -> Iterator[_Clock]:
    """Measure the time of look-ups. Migrated code finds them in the package at each call."""
    clock = _Clock()
    with (
        mock.patch.object(megapg, "resolve", clock.around(megapg.resolve)),
        mock.patch.object(megapg, "groups_of", clock.around(megapg.groups_of)),
    ):
        yield clock


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


def fallbacks(trained: Sequence[Trained]) -> Counter[str]:
    """Count the look-ups that read the globals for lack of a collection: "function for owner"."""
    found: Counter[str] = Counter()
    for each in trained:
        for read in each.reads:
            if read.getter == _FELL_BACK:
                whom = read.replacement.rpartition(" of ")[2]
                found[f"{read.function} for {whom}"] += read.count
    return found


def tables(found: Behaviour) -> list[Table]:
    """Return the tables of the report."""
    return [_verdicts(found), _cases(found), _fallbacks(found)]


def _verdicts(found: Behaviour) -> Table:
    equal = sum(each.equal for each in found.contrasts)
    injected = [each for each in found.contrasts if each.case.session]
    astray, astray_before = len(found.led_astray), len(found.led_astray_before)
    before = sum(reads(each.installed) for each in injected)
    after = sum(reads(each.migrated) for each in injected)
    share = statistics.median(found.looking_up)
    return Table(
        "Megatron-core, migrated, in place of the installed one",
        ("", "found", "wanted", ""),
        (
            (
                "runs that are equal to the last bit",
                f"{equal} of {len(found.contrasts)}",
                "all",
                "met" if equal == len(found.contrasts) else "MISSED",
            ),
            (
                "runs on sessions that globals of another layout change, by those before",
                f"{astray} / {astray_before}",
                "no more",
                "met" if astray <= astray_before else "MISSED",
            ),
            (
                "modules that can no longer be imported",
                f"{len(found.lost)} (of {found.imported + len(found.lost)})",
                "0",
                "MISSED" if found.lost else "met",
            ),
            _fewer("reads of globals on sessions, by those before", after, before),
            _fewer(
                "places that read them, by those before",
                sum(places(each.migrated) for each in injected),
                sum(places(each.installed) for each in injected),
            ),
            (
                "functions that turn to the globals and did not before, on sessions",
                f"{len(_new(injected)):,}",
                "0",
                "MISSED" if _new(injected) else "met",
            ),
            ("CPU time of a training run that goes into look-ups", f"{share:.1%}", "-", "-"),
        ),
        (
            f"{found.rewritten} uses in the core are rewritten and {found.left} left. Equal are "
            "the loss of every step, every weight of every rank, and the loss after a checkpoint. "
            "A look-up that turned to the globals and the read by way of it are one read. CPU time "
            "of the whole run, all ranks together, by that before, for each repeat (noise): "
            f"{', '.join(f'{each:.2f}' for each in found.cpu)}.",
            *(f"No longer imported: {name}." for name in found.lost),
        ),
    )


def _fewer(what: str, after: int, before: int) -> tuple[str, ...]:
    return what, f"{after:,} / {before:,}", "fewer", "met" if after < before else "MISSED"


def _new(contrasts: Sequence[Contrast]) -> Counter[str]:
    return sum((each.new_fallbacks for each in contrasts), Counter())


def _cases(found: Behaviour) -> Table:
    return Table(
        "The same training on the installed core and on the migrated one",
        ("", "equal", "places", "migrated", "reads", "migrated", "turned to globals", "new ones"),
        tuple(
            (
                each.case.what,
                _ending(each),
                f"{places(each.installed):,}",
                f"{places(each.migrated):,}",
                f"{reads(each.installed):,}",
                f"{reads(each.migrated):,}",
                f"{fallbacks(each.migrated).total():,}",
                f"{each.new_fallbacks.total():,}",
            )
            for each in found.contrasts
        ),
        (
            "Places are lines that read a global. Reads are of all ranks together. Turned to "
            "globals: look-ups by resolve() and groups_of() that found no collection, the latter "
            "where something was read then; the reads that follow are among the reads. New ones "
            "are by functions that read nothing before.",
        ),
    )


def _ending(contrast: Contrast) -> str:
    before, after = contrast.installed[0].error, contrast.migrated[0].error
    if before or after:
        return f"{before or 'no error'} / {after or 'no error'}"
    return "yes" if contrast.equal else "NO"


def _fallbacks(found: Behaviour) -> Table:
    injected = [each for each in found.contrasts if each.case.session]
    every = sum((fallbacks(each.migrated) for each in injected), Counter())
    new = _new(injected)
    return Table(
        "Who turns to the globals although a session's groups were passed",
        ("", "look-ups", "new"),
        tuple(
            (who, f"{count:,}", "new" if who in new else "-")
            for who, count in sorted(every.items(), key=lambda row: (-row[1], row[0]))
        ),
    )


def main() -> None:
    """Run the comparison and print the tables."""
    console = Console()
    warnings.simplefilter("ignore")
    with Progress(console=console) as progress:
        task = progress.add_task("behaviour", total=STEPS)
        found = run(partial(progress.advance, task))
    for table in tables(found):
        table.print(console)


if __name__ == "__main__":
    main()
