"""The time that a training step loses to traffic, to the bubble and to recomputation, at least.

``megapg plan --suggest`` orders layouts by it, first by the bounds of
:mod:`megapg.tools.plan.least`, then by measured stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megapg.layout import ParallelLayout
from megapg.tools.plan.cluster import Cluster
from megapg.tools.plan.spans import kinds_of, over_network
from megapg.tools.plan.training import Job, StageCost

# In a ring of n ranks, each rank sends (n - 1) / n of the buffer's bytes, times this number.
# Received bytes are not counted, as another rank sends them.
_SENT = {"all_reduce": 2, "recv": 0, "barrier": 0}


@dataclass(frozen=True)
class Lost:
    """The time of a step without the model's arithmetic, if links are at peak and nothing overlaps.

    Attributes:
        network_bytes: bytes that a rank of the slowest stage sends over the network.
        nvlink_bytes: bytes that it sends over NVLink.
        traffic: ``network_bytes / network_gb_s + nvlink_bytes / nvlink_gb_s``, in seconds.
        bubble: share of the arithmetic's time that the pipeline waits:
            ``(pp - 1) / (microbatches * vpp)``.
        seconds: traffic, bubble and recomputation. Full recomputation takes a third of the
            arithmetic's time, and makes the bubble longer by a third.
    """

    network_bytes: float
    nvlink_bytes: float
    traffic: float
    bubble: float
    seconds: float


def time_lost(
    layout: ParallelLayout,
    cluster: Cluster,
    job: Job,
    stages: Sequence[StageCost],
    arithmetic: float,
) -> Lost:
    """Return the time that the slowest stage loses.

    Args:
        layout: the layout.
        cluster: the machines.
        job: what is trained.
        stages: their traffic.
        arithmetic: least seconds of a step's arithmetic.
    """

    def seconds(sent: tuple[float, float]) -> float:
        network, nvlink = cluster.network_gb_s.value, cluster.nvlink_gb_s.value
        return sent[0] / (network * 1e9) + sent[1] / (nvlink * 1e9)

    sent = max((_sent(layout, cluster, stage) for stage in stages), key=seconds)
    bubble = (layout.pp - 1) / (job.microbatches * (layout.vpp or 1))
    again = (job.recompute == "full") / 3
    total = seconds(sent) + arithmetic * (again + bubble * (1 + again))
    return Lost(*sent, seconds(sent), bubble, total)


def _sent(layout: ParallelLayout, cluster: Cluster, stage: StageCost) -> tuple[float, float]:
    """Return the bytes that a rank sends over the network and over NVLink.

    The groups of each field are those that cross most.
    """
    network = nvlink = 0.0
    block = max(cluster.node_size, cluster.domain_size)
    for flow in stage.flows:
        size = len(layout.members(flow.field, stage.rank))
        sent = float(flow.bytes * _SENT.get(flow.collective, 1))
        if flow.collective != "send":
            sent *= (size - 1) / size
        share = max(
            over_network(layout, cluster, flow.collective, group, stage.stage)
            for group in kinds_of(layout, flow.field, block)
        )
        network += sent * share
        nvlink += sent * (1 - share)
    return network, nvlink
