"""``megapg.testing.parity``: start the ranks of each layout, and compare their results."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from megapg.errors import ParityInputError, RankFailedError
from megapg.launch.environment import overridden
from megapg.launch.process import ranks_said
from megapg.testing import _ranks
from megapg.testing._guard import preloaded
from megapg.testing.distributed import run_distributed
from megapg.tools.parity.cases import LayoutCase, Named, Setting, named, parse_layout
from megapg.tools.parity.comparison import (
    CHECKS,
    REFERENCE,
    Build,
    Held,
    Job,
    Sample,
    Step,
    read,
)
from megapg.tools.parity.judge import Judge, disagreement
from megapg.tools.parity.parity_report import Cell, LayoutReport, ParityReport

Precision: TypeAlias = Literal["float64", "float32"]
Progress: TypeAlias = Callable[[str], None]

TOLERANCE: Mapping[Precision, float] = {"float64": 1e-10, "float32": 1e-3}

_LEAST_SAMPLES = 4
# More ranks than a machine may have GPUs. On a CPU, Megatron-core prints warnings on each rank.
ON_CPUS = {
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# By name: the ranks need Megatron-core, which takes seconds to import, and this process does not.
_RUN_RANK = Named(f"{__package__}.trial", "run_rank")
_MODELS = f"{__package__}.built_in"
_BUILT_IN: Mapping[str, Named | None] = {  # name -> its step, if not the default
    "gpt": None,
    "moe": None,
    "t5": Named(_MODELS, "t5_step"),
}
_PRELOAD = (_RUN_RANK.place,)


def parity(
    build: Build | str,
    layouts: Iterable[str | Mapping[str, Setting]],
    *,
    step: Step | str | None = None,
    sample: Sample | str | None = None,
    options: Mapping[str, object] | None = None,
    precision: Precision | None = None,
    seq_length: int | None = None,
    vocab_size: int | None = None,
    global_sizes: Mapping[str, int] | None = None,
    deadline: float = 180.0,
    progress: Progress | None = None,
) -> ParityReport:
    """Check that a model computes in each layout what it computes on one rank. ::

        def build(pg):
            return GPTModel(config_for(pg), ..., pg_collection=pg)

        def test_layouts_agree():
            parity(build, ["tp=2", "pp=2", "tp=2 ep=2 dp=2"]).check()

    One rank builds the model and saves its weights. Every layout loads them, runs the same global
    batch through Megatron-core's schedule, and trains two steps with Adam, without and with the
    distributed optimizer. All ranks are processes on this host's CPUs, on gloo. Compared are the
    loss of each sample, every gradient, the gradient norm, the weights and the replicas.

    Args:
        build: makes the model from a collection: ``build(pg)``. In a layout with ``vpp`` it is
            called once per chunk as ``build(pg, vp_stage=...)`` if it has that parameter; if not,
            it returns the list of chunks. Or the name of a built-in model (``"gpt"``, ``"moe"``,
            ``"t5"``), or ``"train.py:build"``.
        layouts: sizes, such as ``"tp=2 pp=2"``. The world size is their product, times ``dp=``.
            Every setting of :func:`megapg.session` is a size here: ``"dp=4
            optimizer_instances=2"``, ``"tp=2 pp=2 order=tp-cp-ep-pp-dp"``. The embedding groups
            take the numbers of stages: ``"pp=3 embedding_ranks=0-1"``. Other words are passed to
            ``build``, in this layout only: ``"tp=2 sequence_parallel"``. Settings of the model
            belong into ``options``.
        step: ``step(model, batch, pg)`` runs one chunk on one sample. It returns the loss on the
            last pipeline stage, and the model's output before it. Default: next-token loss.
        sample: ``sample(n)`` makes sample n of the global batch. Default: random tokens.
        options: keyword arguments for ``build`` in every layout and on one rank.
        precision: default is float64, and float32 if the model does not run in float64.
        seq_length: tokens in a sample. Default: 16, or ``model.max_sequence_length`` if less.
        vocab_size: number of tokens to choose from. Default: ``model.vocab_size``, or 64.
        global_sizes: sizes of the groups in Megatron's globals, such as ``{"tp": 1}``. They show
            code that reads the globals instead of ``pg``. Default: the layout's groups.
        deadline: seconds for each layout.
        progress: called with a line of text as the comparison goes on.

    Raises:
        ParityInputError: the layouts, the model or the step can't be compared.
    """
    say = progress or _say_nothing
    if isinstance(build, str):
        build, step = _found(build, step)
    cases = [parse_layout(layout) for layout in layouts]
    if not cases:
        raise ParityInputError("give at least one layout, such as 'tp=2'.")
    for case in cases:
        case.globals_of(global_sizes or {})
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megapg-parity-"))
        if _ranks.PRELOADED not in os.environ:
            stack.enter_context(overridden(ON_CPUS))
            stack.enter_context(preloaded(*_PRELOAD))
        job = Job(
            build=build,
            step=_function(step),
            sample=_function(sample),
            directory=folder,
            double=precision != "float32",
            samples=_samples(cases),
            seq_length=seq_length or 0,
            vocab_size=vocab_size or 0,
            global_sizes=global_sizes,
            options=dict(options or {}),
            collective_timeout=min(60.0, deadline / 2),
        )
        job, reference, notes = _reference(job, precision, deadline, say)
        chosen: Precision = "float64" if job.double else "float32"
        judge = Judge(reference, TOLERANCE[chosen])
        reports = [_compare(job, each, cases, judge, deadline, say) for each in range(len(cases))]
    for case, report in zip(cases, reports, strict=True):
        if case.options and not report.agrees:
            notes.append(
                f"{case.text}: {', '.join(case.options)} went to build in this layout and not on "
                "one rank, so the two models may differ. Set what changes the model in build, or "
                "by options= of parity()."
            )
    losses = reference.losses.values()
    loss = sum(losses) / len(losses)
    return ParityReport(chosen, judge.tolerance, job.samples, loss, tuple(reports), tuple(notes))


def _say_nothing(line: str) -> None:
    pass


def _found(text: str, step: Step | str | None) -> tuple[Build, Step | str | None]:
    """Return the build function that a text names, and its step."""
    if text in _BUILT_IN:
        return Named(_MODELS, text), step or _BUILT_IN[text]
    return named(text), step


def _function(given: object) -> Any:
    return named(given) if isinstance(given, str) else given


def _samples(cases: Sequence[LayoutCase]) -> int:
    """Return a size of the global batch that every layout divides."""
    shares = [case.dp * (case.layout.pp if case.layout.vpp else 1) for case in cases]
    least = math.lcm(*shares)
    return least * -(-_LEAST_SAMPLES // least)


def _reference(
    job: Job, precision: Precision | None, deadline: float, say: Progress
) -> tuple[Job, Held, list[str]]:
    """Run one rank. If float64 fails and the caller did not ask for it, run in float32."""
    notes: list[str] = []
    case = parse_layout({})
    say("one rank")
    try:
        _run(job, case, None, deadline)
    except RankFailedError as error:
        if precision is not None or any(
            isinstance(failure, TimeoutError) for failure in error.failures.values()
        ):
            raise _refused(error) from error
        job = replace(job, double=False)
        say("one rank, in float32")
        try:
            _run(job, case, None, deadline)
        except RankFailedError as second:
            raise _refused(second) from second
        notes.append(f"compared in float32, since float64 failed: {_summary(error)}")
    held = read(Path(job.directory, REFERENCE), 0)
    tolerance = TOLERANCE["float64" if job.double else "float32"]
    different = next(disagreement(held, tolerance), "")
    if different:
        raise ParityInputError(
            f"one rank differs from itself with equal weights on equal data: {different}. "
            "Turn off what is random in the step and in build, or seed it by the sample."
        )
    return job, held, notes


def _compare(
    job: Job, number: int, cases: Sequence[LayoutCase], judge: Judge, deadline: float, say: Progress
) -> LayoutReport:
    case, reads = cases[number], tuple[str, ...]()
    say(f"{case.text}: {case.world_size} ranks ({number + 1} of {len(cases)})")
    started = time.monotonic()
    try:
        _run(job, case, number, deadline)
    except RankFailedError as error:
        if any(isinstance(failure, ParityInputError) for failure in error.failures.values()):
            raise _refused(error) from error
        cells = tuple(
            Cell(check, "failed", text="" if number else _summary(error))
            for number, check in enumerate(CHECKS)
        )
    else:
        folder = Path(job.directory, str(number))
        held = [read(folder, rank) for rank in range(case.world_size)]
        cells = judge.judge(case, held)
        reads = tuple(sorted({place for each in held for place in each.reads}))
    return LayoutReport(case.text, case.world_size, time.monotonic() - started, cells, reads)


def _run(job: Job, case: LayoutCase, number: int | None, deadline: float) -> None:
    work = partial(_RUN_RANK, job, case, number)
    try:
        run_distributed(work, case.world_size, deadline=deadline, preload=_PRELOAD)
    except TypeError as error:
        raise ParityInputError(f"build and step run in other processes: {error}") from error


def _refused(error: RankFailedError) -> ParityInputError:
    """Turn the error of a rank into an error about the input."""
    found = [f for f in error.failures.values() if isinstance(f, ParityInputError)]
    found.sort(key=lambda each: _lost_another_rank(str(each)))
    return found[0] if found else ParityInputError(f"one rank: {_summary(error)}")


def _lost_another_rank(text: str) -> bool:
    """True if an error says only that another rank went away, whose own error says why."""
    return any(words in text for words in ("Timed out", "onnection", "/gloo/"))


def _summary(error: RankFailedError) -> str:
    """Return the errors of the ranks, without those that other errors caused."""
    by_kind: dict[int, dict[str, list[int]]] = {}
    for rank, failure in error.failures.items():
        text = str(failure).strip().partition("\n")[0][:300]
        kind = 2 if _lost_another_rank(text) else 1 if isinstance(failure, TimeoutError) else 0
        where = next((n for n in getattr(failure, "__notes__", ()) if n.startswith("\n  ")), "")
        line = f"{type(failure).__name__}: {text}{where}"
        by_kind.setdefault(kind, {}).setdefault(line, []).append(rank)
    found = by_kind[min(by_kind)].items()
    return "; ".join(f"{ranks_said(ranks)}: {line}" for line, ranks in found)
