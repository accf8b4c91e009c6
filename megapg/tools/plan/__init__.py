"""Plans: what a layout looks like on a cluster, before there is a GPU.

``overview`` puts a plan together. ``cluster`` describes the machines, ``spans`` how far groups
reach, ``nccl`` the communicators, and ``findings`` the problems. ``picture`` is the grid of ranks,
which ``screen``, ``svg`` and ``page`` draw. ``training`` is a step of a model, ``bars`` its memory
for people, and ``cures`` its problems. ``suggest`` searches for layouts: ``least`` bounds what a
layout holds and sends, and ``lost`` is the time that a step loses.
"""

from megapg.tools.plan.cluster import Cluster, Quantity, load_cluster, presets
from megapg.tools.plan.findings import Finding
from megapg.tools.plan.overview import Plan, draw_svg, make_plan
from megapg.tools.plan.picture import Panel, Picture
from megapg.tools.plan.spans import Span
from megapg.tools.plan.training import Flow, Job, StageCost, Training

__all__ = [
    "Cluster",
    "Finding",
    "Flow",
    "Job",
    "Panel",
    "Picture",
    "Plan",
    "Quantity",
    "Span",
    "StageCost",
    "Training",
    "draw_svg",
    "load_cluster",
    "make_plan",
    "presets",
]
