"""The options of a communicator.

:mod:`megapg.megatron.arguments` reads them from Megatron's file, and
:mod:`megapg.communicators.nccl_options` passes them to torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class CommunicatorOptions:
    """NCCL settings of one field's communicator; None leaves NCCL's own default.

    The names and meanings are those of Megatron-core's NCCL configuration file.

    Attributes:
        is_high_priority_stream: run the communication kernels on a high-priority CUDA stream.
        cga_cluster_size: thread-block clusters a kernel may use (0 to 8).
        min_ctas: fewest thread blocks a kernel uses.
        max_ctas: most thread blocks a kernel uses.
        net_name: network module, ``"IB"`` or ``"Socket"``.
    """

    is_high_priority_stream: bool = False
    cga_cluster_size: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    net_name: str | None = None

    def given(self) -> dict[str, bool | int | str]:
        """Return the settings that differ from the defaults."""
        return {
            f.name: v for f in fields(self) if (v := getattr(self, f.name)) not in (None, False)
        }
