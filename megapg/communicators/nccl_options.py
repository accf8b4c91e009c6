"""A communicator's options in the forms that torch's NCCL and torchcomms take."""

from __future__ import annotations

import torch.distributed as dist

from megapg.communicators.communicator_options import CommunicatorOptions
from megapg.errors import UnsupportedOptionError


def _given_to_nccl(where: str, options: CommunicatorOptions) -> dict[str, bool | int | str]:
    if options.net_name is not None and options.net_name.lower() not in ("ib", "socket"):
        raise UnsupportedOptionError(
            f"{where}: net_name={options.net_name!r}; NCCL has 'IB' and 'Socket'."
        )
    return options.given()


def nccl_options(where: str, options: CommunicatorOptions) -> dist.ProcessGroupNCCL.Options | None:
    """Return the options as torch's; None if all are the defaults.

    Raises:
        UnsupportedOptionError: NCCL has no such network, or torch no NCCL.
    """
    given = _given_to_nccl(where, options)
    if not given:
        return None
    if not dist.is_nccl_available():
        raise UnsupportedOptionError(f"{where}: this torch was built without NCCL.")
    made = dist.ProcessGroupNCCL.Options(
        is_high_priority_stream=bool(given.pop("is_high_priority_stream", False))
    )
    for name, value in given.items():
        setattr(made.config, name, value)
    return made


def torchcomms_hints(where: str, options: CommunicatorOptions) -> dict[str, str] | None:
    """Return the options as torchcomms spells NCCL's configuration."""
    given = _given_to_nccl(where, options)
    spelled = {name: str(value).lower() for name, value in given.items() if name != "net_name"}
    return {**spelled, **({"netName": options.net_name} if options.net_name else {})} or None
