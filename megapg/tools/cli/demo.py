"""The command line: ``megapg demo`` and ``megapg demo rl``."""

from __future__ import annotations

from typing import Annotated, Never

import typer
from rich.console import Console
from rich.text import Text

from megapg.errors import LayoutError, MegapgError, RankFailedError
from megapg.layout import ParallelLayout
from megapg.tools.cli.console import add_default_to, add_to, refuse
from megapg.tools.demo.job import GPTRun

app = typer.Typer()


def _option(panel: str, text: str, default: str | bool = True) -> typer.models.OptionInfo:
    return typer.Option(  # type: ignore[no-any-return]
        help=text, rich_help_panel=panel, min=1, metavar="N", show_default=default
    )


_LAYOUT, _TRAINING = "Layout", "Model and training"
_NEEDS = "The demo needs torch and Megatron-core: pip install 'megapg[torch,megatron]'."
_TWO = "2 if it fits, else 1"


@add_default_to(app)
def demo(
    context: typer.Context,
    world_size: Annotated[int, _option(_LAYOUT, "Ranks to start on this machine.")] = 4,
    tp: Annotated[int | None, _option(_LAYOUT, "Tensor parallel size.", _TWO)] = None,
    pp: Annotated[int | None, _option(_LAYOUT, "Pipeline parallel size.", _TWO)] = None,
    vpp: Annotated[
        int | None, _option(_LAYOUT, "Model chunks per rank (virtual pipeline); needs pp > 1.")
    ] = None,
    ep: Annotated[int, _option(_LAYOUT, "Expert parallel size; needs --experts.")] = 1,
    expt_tp: Annotated[
        int | None, _option(_LAYOUT, "Tensor parallel size of an expert.", "tp")
    ] = None,
    experts: Annotated[
        int | None, _option(_TRAINING, "Experts per layer (MoE).", "a dense model")
    ] = None,
    layers: Annotated[int, _option(_TRAINING, "Transformer layers.")] = 4,
    steps: Annotated[int, _option(_TRAINING, "Optimizer steps.")] = 30,
    microbatches: Annotated[
        int, _option(_TRAINING, "Microbatches per step and data parallel rank.")
    ] = 4,
    deadline: Annotated[int, _option(_TRAINING, "Seconds that each run may take.")] = 600,
) -> None:
    """Train a Megatron-core GPT on CPU ranks, with the groups of a session.

    The demo trains the same model again on Megatron's own globals, and compares the two runs bit by
    bit. It resumes from a checkpoint, also in another layout. It lists the globals that
    Megatron-core still read, and checks that no process or group is left.

    Context parallelism needs TransformerEngine and a GPU, so the demo has none.

    Exit code 0: every row of the verdict says yes. 1: a row says NO, or a rank failed. 2: the
    options don't fit together.
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    console = Console()
    try:
        from megapg.tools.demo.show import show
    except ImportError as error:
        refuse(f"{error}. {_NEEDS}")
    try:
        layout = _layout(world_size, tp, pp, vpp, ep, expt_tp)
        run = GPTRun(
            tp=layout.tp,
            pp=layout.pp,
            vpp=vpp,
            ep=ep,
            expt_tp=expt_tp,
            experts=experts,
            # Megatron-core requires it for experts with tensor parallelism.
            sequence_parallel=layout.tp > 1 and experts is not None,
            layers=layers,
            num_microbatches=microbatches,
            steps=steps,
        )
        _check_model(run)
        good = show(console, layout, run, deadline)
    except RankFailedError as error:
        console.print(f"[bold red]failed[/] {error}", highlight=False, markup=True)
        raise typer.Exit(1) from error
    except MegapgError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        _say_stopped(console)
    raise typer.Exit(0 if good else 1)


@add_to(app)
def rl() -> None:
    """Train an actor and a critic with rollouts, on a local Ray cluster, through two faults.

    Two trainers hold the actor with tp=2 and the critic with pp=2, on the groups of two sessions. A
    second job has two rollouts. Each holds the whole actor and writes samples. Each step gives them
    the actor's new weights over a joint group. Both sessions are suspended while the rollouts
    write.

    The demo trains twice. In the second run it kills a rollout and a trainer. The verdict compares
    losses and weights of the two runs bit by bit, and checks that nothing is left.

    It takes up to three minutes, and needs Ray: pip install 'megapg[ray]'.

    Exit code 0: every row of the verdict says yes. 1: a row says NO, or a worker failed.
    """
    console = Console()
    try:
        from ray.exceptions import RayError
    except ImportError as error:
        refuse(f"{error}. This demo needs Ray: pip install 'megapg[ray]'.")
    try:
        from megapg.tools.demo.rl import show_rl
    except ImportError as error:
        refuse(f"{error}. {_NEEDS}")
    try:
        good = show_rl(console)
    except (RayError, MegapgError) as error:
        console.print("[bold red]failed[/]", Text.from_ansi(str(error)), soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        _say_stopped(console)
    raise typer.Exit(0 if good else 1)


def _refuse_options(context: typer.Context) -> None:
    """Refuse options of the demo in front of another command, which would not see them."""
    given = [
        each.opts[0]
        for each in context.command.params
        if getattr(context.get_parameter_source(each.name or ""), "name", "") == "COMMANDLINE"
    ]
    if given:
        refuse(f"`megapg demo {context.invoked_subcommand}` does not take {', '.join(given)}.")


def _say_stopped(console: Console) -> Never:
    console.print("\nstopped; no process is left", style="yellow")
    raise typer.Exit(130) from None


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
    _divides("attention heads:", run.heads, f"--tp {run.tp}", run.tp)
    if run.experts is not None and run.expt_tp:
        _divides("FFN hidden size:", 4 * run.hidden, f"--expt-tp {run.expt_tp}", run.expt_tp)
    stages = f"the {run.pp * (run.vpp or 1)} stages of the pipeline, --pp {run.pp}"
    if run.vpp:
        stages += f" x --vpp {run.vpp}"
        _divides("--microbatches", run.num_microbatches, f"--pp {run.pp}, with --vpp", run.pp)
    _divides("--layers", run.layers, stages, run.pp * (run.vpp or 1))


def _divides(option: str, whole: int, name: str, part: int) -> None:
    if whole % part:
        arithmetic = f"{whole} = {whole // part} x {part} + {whole % part}"
        refuse(f"{option} {whole} does not divide by {name}: {arithmetic}.")
