"""Checks of one rank: a table of small functions, and a table of single variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from megapg.launch.network import GLOO_NAMES, NCCL_NAMES, PROBLEMS
from megapg.tools.doctor.account import Finding, Level
from megapg.tools.doctor.rows import GUARD
from megapg.tools.doctor.survey import Facts

Check: TypeAlias = Callable[[Facts], Iterator[Finding]]

_YES = frozenset({"1", "y", "yes", "t", "true", "on"})
_HIDING = ("", "-1", "NoDevFiles", "none", "void")  # in CUDA_VISIBLE_DEVICES, by hand or by SLURM
_BLACKWELL = (10, 0)  # compute capability


def examine(facts: Facts) -> tuple[Finding, ...]:
    """Run every check; the worst findings come first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: list(Level).index(finding.level)))


# --- single variables -----------------------------------------------------------------------------


def _always(facts: Facts) -> bool:
    return True


def _on_gpus(facts: Facts) -> bool:
    return bool(facts.devices)


def _on_a_fast_network(facts: Facts) -> bool:
    return any(port.active for port in facts.rdma_ports)


def _records_flights(facts: Facts) -> bool:
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    return any((facts.variable(name) or "0") != "0" for name in sizes)


def _suspends_otherwise(facts: Facts) -> bool:
    return "NCCL_CUMEM_ENABLE" in facts.offload.get("suspend", "")


def _cannot_suspend_anyway(facts: Facts) -> bool:
    return bool(facts.offload.get("suspend")) and not _suspends_otherwise(facts)


def _no(value: str) -> bool:
    return value == "0"


@dataclass(frozen=True)
class Rule:
    """A value of an environment variable that causes a problem."""

    names: tuple[str, ...]  # the variable, and older names that are still read
    wrong: Callable[[str], bool]  # True if the value causes the problem
    consequence: str  # the consequence
    remedy: str = "Unset {name}."  # the remedy; ``{name}`` stands for the variable
    level: Level = Level.WARNING  # the severity
    where: Callable[[Facts], bool] = _always  # True if it matters on this machine


# The effects of values are from torch's "ProcessGroupNCCL Environment Variables", the chapter
# "Environment Variables" of NCCL's user guide, and torch/utils/_config_module.py.
RULES = (
    Rule(
        ("MEGAPG_GUARD",),
        lambda value: value not in ("", *GUARD),
        f"the guard has no such mode, so no session opens; the modes are {', '.join(GUARD)}",
        "Set {name}=error, or unset it.",
        Level.ERROR,
    ),
    Rule(
        ("MEGAPG_GUARD",),
        lambda value: value == "off",
        "in a process with two layouts, the globals may answer with a group of the wrong one",
        'Unset {name}, and use megapg.guard("off") around the code that needs it.',
    ),
    Rule(
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS",),
        lambda value: value not in ("", "0", "1"),
        "torch knows 0 and 1 only: any other text, even 'False', turns torchcomms on",
        "Set {name}=0 to turn it off, or 1 to turn it on.",
        Level.ERROR,
    ),
    Rule(
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS",),
        lambda value: value == "1",
        "torchcomms is not installed, and torch silently continues without it",
        "Install torchcomms, or unset {name}.",
        where=lambda facts: not facts.version("torchcomms"),
    ),
    Rule(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        _no,
        "torch does not end a collective that failed or whose peer died, so the job hangs",
        "Unset {name}; torch's default (3) ends the process.",
    ),
    Rule(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        lambda value: value in ("1", "2"),
        "communicators are aborted at a timeout, which can cut the flight recorder's dump short",
        "Set {name}=3, torch's default; torchrun sets 1 if you set nothing.",
        where=_records_flights,
    ),
    Rule(
        ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
        lambda value: value.lower() in _YES,
        "every wait for a collective blocks the CPU",
    ),
    Rule(
        ("NCCL_CUMEM_ENABLE",),
        _no,
        "NCCL can't suspend communicators in place, so session.suspend() re-creates them",
        where=_suspends_otherwise,
    ),
    Rule(
        ("NCCL_CUMEM_ENABLE",),
        _no,
        "NCCL can't suspend communicators in place, not even on machines with a GPU",
        level=Level.NOTE,
        where=_cannot_suspend_anyway,
    ),
    Rule(
        ("NCCL_IB_DISABLE",),
        lambda value: value not in ("", "0"),
        "NCCL uses TCP, although this host has InfiniBand or RoCE",
        where=_on_a_fast_network,
    ),
    Rule(
        ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"),
        lambda value: value not in ("", "0"),
        "the GPUs of a host use slower paths than NVLink, PCIe or shared memory",
        where=_on_gpus,
    ),
    Rule(
        ("CUDA_LAUNCH_BLOCKING",),
        lambda value: value not in ("", "0"),
        "the CPU waits for every kernel, so nothing overlaps",
        "Unset {name}, unless you debug a kernel.",
        where=_on_gpus,
    ),
    Rule(
        ("TORCH_DISTRIBUTED_DEBUG",),
        lambda value: value.upper() == "DETAIL",
        "every group gets a second group that checks each collective, at a cost of time and memory",
        "Unset {name}, unless you debug collectives.",
    ),
    Rule(
        ("NCCL_DEBUG",),
        lambda value: value.upper() in ("INFO", "TRACE"),
        "NCCL writes a lot to every rank's output",
        "Set {name}=WARN when you are done.",
        Level.NOTE,
        where=_on_gpus,
    ),
)


def variables(facts: Facts) -> Iterator[Finding]:
    """Yield the findings of the table of rules above."""
    for rule in RULES:
        for name in rule.names:
            value = facts.variable(name)
            if value is not None and rule.wrong(value) and rule.where(facts):
                what = f"{name}={value}: {rule.consequence}."
                yield Finding(name.lower(), rule.level, what, rule.remedy.format(name=name))


# --- more than one variable -----------------------------------------------------------------------


def launch(facts: Facts) -> Iterator[Finding]:
    """The launcher's variables do not identify this process."""
    if facts.launch_problem:
        remedy = "Correct the environment, or start with torchrun, srun or mpirun."
        yield Finding("launch", Level.ERROR, facts.launch_problem, remedy)


def interface_names(facts: Facts) -> Iterator[Finding]:
    """The interfaces chosen for NCCL or gloo do not exist, or are in the other library's format."""
    found = {each.name: each for each in facts.interfaces}
    forms = {NCCL_NAMES: "=NAME for an exact name", GLOO_NAMES: "plain names, with commas"}
    for name, problem_of in PROBLEMS.items():
        value = facts.variable(name)
        if value and (problem := problem_of(value, found)):
            remedy = f"Set {name} to an interface that is up ({forms[name]}), or unset it."
            yield Finding(name.lower(), Level.ERROR, f"{name}={value}: {problem}.", remedy)


def software(facts: Facts) -> Iterator[Finding]:
    """A package is missing, or too old for megapg."""
    if facts.torch_problem:
        what = f"torch {facts.torch_problem}. There are no process groups without it."
        remedy = "Install a torch that fits this machine, or pip install 'megapg[torch]'."
        yield Finding("torch", Level.ERROR, what, remedy)
    elif facts.version("torch") < (2, 6):
        what = f"torch {facts.versions['torch']} is older than megapg works with."
        yield Finding("torch", Level.ERROR, what, "Install torch 2.6 or newer.")
    core = facts.version("Megatron-core")
    if core and core < (0, 16):
        yield Finding(
            "megatron_core",
            Level.WARNING,
            f"Megatron-core {'.'.join(map(str, core))} reads its globals unconditionally: it can't "
            "run on groups that are passed to it.",
            "Install 0.16 or newer, or stay with resolve() and published().",
        )
    if core and not facts.version("einops"):
        what = "einops is not installed; Megatron-core imports it without declaring it."
        yield Finding("einops", Level.WARNING, what, "pip install 'megapg[megatron]'")


def devices(facts: Facts) -> Iterator[Finding]:
    """This rank has no accelerator to itself, or torch has no NCCL."""
    seen, local = facts.variable("CUDA_VISIBLE_DEVICES"), facts.launch.local_rank
    if facts.device_problem:
        remedy = "Check that nvidia-smi works, and that the driver is new enough for torch's CUDA."
        yield Finding("devices", Level.ERROR, f"The GPUs {facts.device_problem}.", remedy)
    elif facts.driver and not facts.devices and facts.version("torch"):
        causes = {
            f"CUDA_VISIBLE_DEVICES={seen!r} hides them": seen in _HIDING,
            "it was built without CUDA": not facts.version("CUDA"),
            f"the driver ({facts.driver}) may be too old for its CUDA": True,
        }
        cause = next(said for said, holds in causes.items() if holds)
        what = f"This host has NVIDIA's driver, but torch sees no GPU: {cause}."
        remedy = "Give the process its GPUs, and install a torch for CUDA that the driver can run."
        yield Finding("devices", Level.WARNING, what, remedy)
    if facts.devices and not facts.device and local is None:
        what = f"This rank sees {len(facts.devices)} GPUs, and its local rank is unknown."
        remedy = "Set LOCAL_RANK in each rank, counting from 0 on each host; or use torchrun."
        yield Finding("devices", Level.ERROR, what, remedy)
    elif facts.devices and not facts.device:
        yield Finding(
            "devices",
            Level.ERROR,
            f"Local rank {local} needs cuda:{local}, but this process sees {len(facts.devices)} "
            "GPUs" + (f" (CUDA_VISIBLE_DEVICES={seen})." if seen else "."),
            "Start no more ranks on a host than it has GPUs, and let every rank see all of them.",
        )
    if facts.devices and not facts.version("NCCL"):
        what = "This torch has no NCCL, so the GPUs can't communicate."
        yield Finding("nccl", Level.ERROR, what, "Install a build of torch for CUDA.")


def connections(facts: Facts) -> Iterator[Finding]:
    """CUDA_DEVICE_MAX_CONNECTIONS does not suit Megatron's tensor parallelism."""
    value = facts.variable("CUDA_DEVICE_MAX_CONNECTIONS")
    before_blackwell = [each for each in facts.devices if each.capability < _BLACKWELL]
    if before_blackwell and value != "1":
        yield Finding(
            "cuda_device_max_connections",
            Level.WARNING if facts.launch.world_size > 1 else Level.NOTE,
            f"CUDA_DEVICE_MAX_CONNECTIONS is {value or 'not set'}: with tp or cp > 1 on this GPU, "
            "Megatron overlaps communication with 1 only, and megatron.training refuses to start.",
            "Set CUDA_DEVICE_MAX_CONNECTIONS=1. With FSDP, set more than 1.",
        )


def limits(facts: Facts) -> Iterator[Finding]:
    """Limits of the process or the container prevent RDMA or NCCL's shared memory."""
    if facts.locked_memory is not None and _on_a_fast_network(facts):
        yield Finding(
            "locked_memory",
            Level.WARNING,
            f"A process may lock {facts.locked_memory // 1024} KiB of memory: RDMA registers more, "
            "and NCCL then fails with 'ibv_reg_mr failed: Cannot allocate memory'.",
            "ulimit -l unlimited; for a container --ulimit memlock=-1.",
        )
    if facts.shared_memory is not None and facts.shared_memory < 2**30 and len(facts.devices) > 1:
        yield Finding(
            "shared_memory",
            Level.WARNING,
            f"/dev/shm has {facts.shared_memory // 2**20} MiB: NCCL passes data between the GPUs "
            "of a host through it, and data loaders do too.",
            "Start the container with --shm-size=16g or --ipc=host.",
        )


CHECKS: tuple[Check, ...] = (
    launch,
    software,
    devices,
    interface_names,
    variables,
    connections,
    limits,
)
"""Every check of one rank. Checks that compare ranks are in :mod:`megapg.tools.doctor.across`."""
