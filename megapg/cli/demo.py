"""The command line: ``megapg demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megapg.cli.console import add_to, refuse
from megapg.demo.job import VOCABULARY, GPTRun
from megapg.errors import LayoutError, MegapgError, RankFailedError
from megapg.layout import ParallelLayout

app = typer.Typer()


def _group(title: str, text: str, **limits: int) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(help=text, rich_help_panel=title, **limits)  # type: ignore[arg-type]
    return option


_LAYOUT, _MODEL, _TRAINING = "Layout", "Model", "Training"


@add_to(app)
def demo(
    world_size: Annotated[int, _group(_LAYOUT, "Ranks to start on this machine.", min=1)] = 4,
    tp: Annotated[
        int | None, _group(_LAYOUT, "Tensor parallel size. [default: 2 if it fits]", min=1)
    ] = None,
    pp: Annotated[
        int | None, _group(_LAYOUT, "Pipeline parallel size. [default: 2 if it fits]", min=1)
    ] = None,
    vpp: Annotated[
        int | None, _group(_LAYOUT, "Virtual pipeline: model chunks per rank, with pp > 1.", min=1)
    ] = None,
    cp: Annotated[int, _group(_LAYOUT, "Context parallel size; only 1 runs on CPU.", min=1)] = 1,
    ep: Annotated[int, _group(_LAYOUT, "Expert parallel size; needs --experts.", min=1)] = 1,
    expt_tp: Annotated[
        int | None, _group(_LAYOUT, "Tensor parallel size inside an expert. [default: tp]", min=1)
    ] = None,
    experts: Annotated[
        int | None, _group(_MODEL, "Experts per layer (MoE); a dense model without it.", min=1)
    ] = None,
    layers: Annotated[int, _group(_MODEL, "Transformer layers.", min=1)] = 4,
    hidden: Annotated[int, _group(_MODEL, "Width of the model.", min=4)] = 64,
    heads: Annotated[int, _group(_MODEL, "Attention heads.", min=1)] = 4,
    seq_length: Annotated[int, _group(_MODEL, "Bytes in a sample.", min=2)] = 64,
    sequence_parallel: Annotated[
        bool, _group(_MODEL, "Sequence parallelism; always on for experts with tp > 1.")
    ] = False,
    recompute: Annotated[
        bool, _group(_MODEL, "Recompute activations in the backward pass.")
    ] = False,
    steps: Annotated[int, _group(_TRAINING, "Optimizer steps.", min=1)] = 30,
    micro_batch_size: Annotated[int, _group(_TRAINING, "Samples in a microbatch.", min=1)] = 2,
    microbatches: Annotated[
        int, _group(_TRAINING, "Microbatches per step and data parallel rank.", min=1)
    ] = 4,
    seed: Annotated[int, _group(_TRAINING, "Seed of weights, dropout and data.", min=1)] = 1234,
    data: Annotated[
        list[Path] | None,
        _group(
            _TRAINING,
            "File or directory to train on; may be given more than once. "
            "[default: the Python standard library's sources]",
        ),
    ] = None,
    deadline: Annotated[
        int, _group(_TRAINING, "Seconds that each of the two runs may take.", min=1)
    ] = 600,
) -> None:
    """Train a real Megatron-core GPT on CPU ranks, on groups that a session made.

    Trains it a second time on Megatron's own globals, compares the two bit by bit, lists what
    Megatron-core read from its globals all the same, and checks that nothing is left behind.
    Exit code 0: every row of the verdict holds; 1: one does not, or a rank failed; 2: the
    arguments don't fit together.
    """
    console = Console()
    try:
        from megapg.demo.show import show
        from megapg.demo.text import read_text
    except ImportError as error:
        refuse(
            f"{error}. The demo needs torch and Megatron-core: "
            "pip install 'megapg[torch,megatron]'."
        )
    try:
        if cp > 1:
            refuse(
                "--cp: Megatron-core's attention has context parallelism with TransformerEngine "
                "only, which needs a GPU. Groups with cp > 1 work; only this model can't use them."
            )
        layout = _layout(world_size, tp, pp, vpp, ep, expt_tp)
        run = GPTRun(
            tp=layout.tp,
            pp=layout.pp,
            vpp=vpp,
            ep=ep,
            expt_tp=expt_tp,
            experts=experts,
            # Megatron-core requires it for experts with tensor parallelism.
            sequence_parallel=layout.tp > 1 and (sequence_parallel or experts is not None),
            layers=layers,
            hidden=hidden,
            heads=heads,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            num_microbatches=microbatches,
            steps=steps,
            seed=seed,
            recompute=recompute,
        )
        _check_model(run)
        text = read_text(data or [], at_least=seq_length + 1)
        good = show(console, layout, run, text, deadline)
    except RankFailedError as error:
        console.print(f"[bold red]failed[/] {error}", highlight=False, markup=True)
        raise typer.Exit(1) from error
    except MegapgError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        console.print("\nstopped; no process is left", style="yellow")
        raise typer.Exit(130) from None
    raise typer.Exit(0 if good else 1)


def _layout(
    world_size: int, tp: int | None, pp: int | None, vpp: int | None, ep: int, expt_tp: int | None
) -> ParallelLayout:
    """Return the requested layout; open sizes are 2 if that fits, else 1."""
    error: LayoutError | None = None
    for tensor in (2, 1) if tp is None else (tp,):
        for pipeline in (2, 1) if pp is None else (pp,):
            try:
                return ParallelLayout(
                    world_size=world_size,
                    tp=tensor,
                    pp=pipeline,
                    vpp=vpp,
                    ep=ep,
                    expt_tp=expt_tp or 0,
                )
            except LayoutError as problem:
                error = error or problem
    raise error or LayoutError("no sizes to try")


def _check_model(run: GPTRun) -> None:
    """Refuse a model that Megatron-core would refuse deep inside every rank."""
    if run.ep > 1 and run.experts is None:
        refuse(f"--ep {run.ep} spreads experts over ranks: give --experts, a multiple of {run.ep}.")
    if run.experts is not None:
        _divides("--experts", run.experts, f"--ep {run.ep}", run.ep)
    _divides("--hidden", run.hidden, f"--heads {run.heads}", run.heads)
    if (width := run.hidden // run.heads) % 2:
        refuse(
            f"--hidden {run.hidden} / --heads {run.heads} = {width}: a head's width must be even, "
            "for the rotary position embedding."
        )
    _divides("--heads", run.heads, f"--tp {run.tp}", run.tp)
    _divides("the vocabulary of", VOCABULARY, f"--tp {run.tp}", run.tp)
    if run.experts is not None and run.expt_tp:
        _divides("4 times --hidden,", 4 * run.hidden, f"--expt-tp {run.expt_tp}", run.expt_tp)
    stages = f"the {run.pp * (run.vpp or 1)} stages of the pipeline, --pp {run.pp}"
    if run.vpp:
        stages += f" x --vpp {run.vpp}"
        _divides("--microbatches", run.num_microbatches, f"--pp {run.pp}, with --vpp", run.pp)
    _divides("--layers", run.layers, stages, run.pp * (run.vpp or 1))
    if run.sequence_parallel:
        why = f"--tp {run.tp}, with sequence parallelism"
        _divides("--seq-length", run.seq_length, why, run.tp)


def _divides(option: str, whole: int, name: str, part: int) -> None:
    if whole % part:
        arithmetic = f"{whole} = {whole // part} x {part} + {whole % part}"
        refuse(f"{option} {whole} does not divide by {name}: {arithmetic}.")
