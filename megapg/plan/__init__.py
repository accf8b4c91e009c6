"""Plans: what a layout looks like on a cluster, before there is a GPU.

``overview`` puts a plan together. ``cluster`` describes the machines, ``spans`` how far groups
reach, ``nccl`` the communicators, and ``findings`` the problems. ``picture`` is the grid of ranks,
which ``screen``, ``svg`` and ``page`` draw.
"""

from megapg.plan.cluster import Cluster, Quantity, load_cluster, presets
from megapg.plan.findings import Finding
from megapg.plan.overview import Plan, draw_svg, make_plan
from megapg.plan.picture import Panel, Picture
from megapg.plan.spans import Span

__all__ = [
    "Cluster",
    "Finding",
    "Panel",
    "Picture",
    "Plan",
    "Quantity",
    "Span",
    "draw_svg",
    "load_cluster",
    "make_plan",
    "presets",
]
