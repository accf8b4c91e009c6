"""What one process knows about itself and its machine. Nothing here judges."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
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
    memory: int  # bytes in all
    uuid: str  # tells it from all others


@dataclass(frozen=True)
class Facts:
    """What one process knows."""

    host: str  # this host's name
    launch: Launch  # what the launcher said; a process alone where that can't be told
    host_address: str = ""  # what that name resolves to here; empty where it does not
    launch_problem: str = ""  # why it can't be told; empty where it can
    # software -> version, for what is installed
    versions: Mapping[str, str] = field(default_factory=dict)
    torch_problem: str = ""  # why torch can't be used; empty where it can
    devices: tuple[Device, ...] = ()  # accelerators, in the order of their indices
    # why accelerators can't be used; empty where they can, or there are none
    device_problem: str = ""
    driver: str = ""  # version of NVIDIA's kernel driver; empty where it is not loaded
    interfaces: tuple[Interface, ...] = ()  # network interfaces
    rdma_ports: tuple[RdmaPort, ...] = ()  # ports of RDMA devices
    automatic: str = ""  # what ``network="auto"`` would choose here, and why
    # way of ``session.suspend()`` -> why this machine can't take it; empty where it can
    offload: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # the variables that matter
    locked_memory: int | None = None  # bytes that the process may lock; None for no limit
    shared_memory: int | None = None  # bytes of ``/dev/shm``; None where there is none

    def version(self, name: str) -> Version:
        """The numbers of a version, ``(2, 13, 0)``; empty where it is not installed."""
        return _numbers(self.versions.get(name, ""))

    def variable(self, name: str) -> str | None:
        """An environment variable; None where it is not set."""
        return self.environment.get(name)

    @property
    def device(self) -> str:
        """The accelerator that this rank would take; empty where there is none for it."""
        # Some sites show each process its own device only, as the first.
        index = 0 if len(self.devices) == 1 else self.launch.local_rank
        if index is None or index >= len(self.devices):
            return ""
        return self.devices[index].uuid


def collect(environment: Mapping[str, str] = os.environ) -> Facts:
    """Look at this process and its machine."""
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
    if core := _megatron_core():
        yield "Megatron-core", core
    for name, distribution in _OTHERS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(distribution)


def _nccl() -> str:
    """The NCCL that is loaded; torch itself only tells the one it was built with."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        code = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(code)) == 0:
            return f"{code.value // 10_000}.{code.value // 100 % 100}.{code.value % 100}"
    with contextlib.suppress(AttributeError, RuntimeError):
        told = importlib.import_module("torch.cuda.nccl").version()
        return ".".join(str(part) for part in told)
    return ""


def _megatron_core() -> str:
    """Version of the Megatron-core that would be imported, without the seconds that takes."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        found = importlib.util.find_spec("megatron.core")
        for folder in (found and found.submodule_search_locations) or ():
            spec = importlib.util.spec_from_file_location(
                "_megatron_core_package_info", Path(folder, "package_info.py")
            )
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return str(module.__version__)
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
    except (ImportError, OSError) as error:  # a library that it was built with is not here
        return f"is installed but can't be imported: {error}"
    return ""


def _offload(devices: Sequence[Device]) -> dict[str, str]:
    from megapg.ownership.offload import WAYS, cannot_suspend

    obstacle = cannot_suspend(["nccl"]) if devices else "there is no NVIDIA GPU here"
    return {way: obstacle if way == "suspend" else "" for way in WAYS}


def _automatic(environment: Mapping[str, str]) -> str:
    network = choose_network(environment=environment)
    names = ", ".join(interface.name for interface in network.interfaces)
    return f"{names or 'nothing'}: {network.why}"


def _driver() -> str:
    with contextlib.suppress(OSError):
        told = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"\d+\.\d+[.\d]*", told)
        return found[0] if found else "of unknown version"
    return ""


def _resolved(name: str) -> str:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(name, None)[0][4][0])
    return ""


def _numbers(version: str) -> Version:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
