"""Facts about one process and its machine, without judgement."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import megapg
from megapg.errors import LaunchError
from megapg.launch import Launch, detect
from megapg.launch.network import Interface, RdmaPort, choose_network, interfaces, rdma_ports

Version = tuple[int, ...]

_OTHERS = {
    "TransformerEngine": "transformer-engine",
    "torchcomms": "torchcomms",
    "einops": "einops",
}

_VARIABLES = re.compile(
    r"(MASTER|NCCL|GLOO|TORCH|TORCHELASTIC|TORCHCOMM|SLURM|SLURMD|OMPI|CUDA|MEGAPG)_"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|(NODE_RANK|OMP_NUM_THREADS)$"
    r"|(PMI|PALS|MV2|JSM|FLUX)_.*(RANK|RANKID|SIZE)$"
)
_SECRET = re.compile(r"TOKEN|JWT|SECRET|PASSWORD|CREDENTIAL|_KEY")


@dataclass(frozen=True)
class Device:
    """One accelerator that this process sees."""

    name: str  # the model
    capability: tuple[int, int]  # CUDA compute capability, ``(9, 0)``
    memory: int  # bytes in total
    uuid: str  # a unique identifier


@dataclass(frozen=True)
class Facts:
    """The facts about one process."""

    host: str  # this host's name
    launch: Launch  # the launcher's description; a single process if it is contradictory
    host_address: str = ""  # the address that this name resolves to; empty if there is none
    launch_problem: str = ""  # why the launch is unknown; empty if it is known
    # software -> version, of installed software
    versions: Mapping[str, str] = field(default_factory=dict)
    torch_problem: str = ""  # why torch can't be used; empty if it can
    devices: tuple[Device, ...] = ()  # accelerators, in the order of their indices
    # why accelerators can't be used; empty if they can, or there are none
    device_problem: str = ""
    driver: str = ""  # version of NVIDIA's kernel driver; empty if it is not loaded
    interfaces: tuple[Interface, ...] = ()  # network interfaces
    rdma_ports: tuple[RdmaPort, ...] = ()  # ports of RDMA devices
    automatic: str = ""  # the choice of ``network="auto"`` here, and its reason
    # way of ``session.suspend()`` -> why this machine can't take it; empty if it can
    offload: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # the relevant variables
    locked_memory: int | None = None  # bytes that the process may lock; None for no limit
    shared_memory: int | None = None  # bytes of ``/dev/shm``; None if there is none

    def version(self, name: str) -> Version:
        """Return the numbers of a version, ``(2, 13, 0)``; empty if it is not installed."""
        return _numbers(self.versions.get(name, ""))

    def variable(self, name: str) -> str | None:
        """Return an environment variable; None if it is not set."""
        return self.environment.get(name)

    @property
    def device(self) -> str:
        """The accelerator that this rank would use; empty if there is none for it."""
        # Some sites show each process only its own device, as the first.
        index = 0 if len(self.devices) == 1 else self.launch.local_rank
        if index is None or index >= len(self.devices):
            return ""
        return self.devices[index].uuid


def collect(environment: Mapping[str, str] = os.environ) -> Facts:
    """Collect the facts about this process and its machine."""
    launch, launch_problem = Launch("unknown"), ""
    try:
        launch = detect(environment)
    except LaunchError as error:
        launch_problem = str(error)
    torch_problem = _torch_problem()
    devices, device_problem = ((), "") if torch_problem else _devices()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shared = Path("/dev/shm")
    return Facts(
        host=socket.gethostname(),
        host_address=_resolved(socket.gethostname()),
        launch=launch,
        launch_problem=launch_problem,
        versions=dict(_versions(torch_problem)),
        torch_problem=torch_problem,
        devices=devices,
        device_problem=device_problem,
        driver=_driver(),
        interfaces=interfaces(),
        rdma_ports=rdma_ports(),
        automatic=_automatic(environment),
        offload={} if torch_problem else _offload(devices),
        environment={
            name: "(hidden)" if _SECRET.search(name) else value
            for name, value in sorted(environment.items())
            if _VARIABLES.match(name)
        },
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        shared_memory=shutil.disk_usage(shared).total if shared.is_dir() else None,
    )


def _versions(torch_problem: str) -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield "megapg", megapg.__version__
    if not torch_problem:
        import torch

        yield "torch", torch.__version__
        if torch.version.cuda:
            yield "CUDA", torch.version.cuda
        if nccl := _nccl():
            yield "NCCL", nccl
        from megapg.megatron.core import version_on_disk

        if core := version_on_disk():
            yield "Megatron-core", ".".join(map(str, core))
    for name, distribution in _OTHERS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(distribution)


def _nccl() -> str:
    """Return the version of the loaded NCCL; torch itself reports the version it was built with."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        code = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(code)) == 0:
            return f"{code.value // 10_000}.{code.value // 100 % 100}.{code.value % 100}"
    with contextlib.suppress(AttributeError, RuntimeError):
        found = importlib.import_module("torch.cuda.nccl").version()
        return ".".join(str(part) for part in found)
    return ""


def _devices() -> tuple[tuple[Device, ...], str]:
    import torch

    try:
        found = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return (), f"can't be used: {str(error).splitlines()[0]}"
    return tuple(
        Device(each.name, (each.major, each.minor), each.total_memory, str(each.uuid))
        for each in found
    ), ""


def _torch_problem() -> str:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        return f"is not installed ({error})"
    except (ImportError, OSError) as error:  # a library that it was built with is missing
        return f"is installed but can't be imported: {error}"
    return ""


def _offload(devices: Sequence[Device]) -> dict[str, str]:
    from megapg.ownership.suspension import WAYS, cannot_suspend

    obstacle = cannot_suspend(["nccl"]) if devices else "there is no NVIDIA GPU here"
    return {way: obstacle if way == "suspend" else "" for way in WAYS}


def _automatic(environment: Mapping[str, str]) -> str:
    network = choose_network(environment=environment)
    names = ", ".join(interface.name for interface in network.interfaces)
    return f"{names or 'nothing'}: {network.why}"


def _driver() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"\d+\.\d+[.\d]*", text)
        return found[0] if found else "of unknown version"
    return ""


def _resolved(name: str) -> str:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None)[0][4][0])
    return ""


def _numbers(version: str) -> Version:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
