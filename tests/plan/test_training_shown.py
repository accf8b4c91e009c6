"""Plans of a model: what the terminal, SVG, HTML, JSON and the findings show of a step."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import commands as cli
import pytest
from rich.console import Console
from schemas import check_schema

import megapg.plan
from megapg.cli.plan_screen import show
from megapg.layout import ParallelLayout
from megapg.plan import Flow, Job, StageCost, Training, load_cluster, make_plan
from megapg.plan.bars import memory_of, text_of_bytes, text_of_range
from megapg.plan.cures import find_in_training
from megapg.plan.page import to_html
from megapg.plan.svg import to_svg

SCHEMA = json.loads(Path(megapg.plan.__file__).with_name("schema.json").read_text())
SVG = "{http://www.w3.org/2000/svg}"
GB = 10**9
LAYOUT = ParallelLayout(world_size=64, tp=8, pp=4)
JOB = Job(model="llama3-70b", seq_length=8192, microbatches=16, recompute="selective")
FLOWS = (
    Flow("tp", "all_reduce", 1284, 172 * GB, 0.0),
    Flow("pp", "send", 16, 2 * GB, 1.0),
    Flow("dp_cp", "reduce_scatter_tensor", 1, 4 * GB, 0.5),
)


def training_of(activations, job=JOB, parts=(4, 8, 12, (3, 5)), flows=FLOWS):
    """Return a step whose stages have these activations, in GB."""
    parameters, gradients, optimizer, communicators = parts
    low, high = communicators
    return Training(
        job,
        70_553_706_496,
        tuple(
            StageCost(
                *(stage, stage * 16, 2_204_803_328, parameters * GB, gradients * GB),
                *(optimizer * GB, most * GB, (low * GB, high * GB), flows),
            )
            for stage, most in enumerate(activations)
        ),
    )


def plan_of(training, layout=LAYOUT, cluster="H100-8", rank=None):
    plan = make_plan(layout, cluster, rank=rank)
    return replace(plan, training=training)


def printed(plan):
    out = io.StringIO()
    show(plan, plan.picture(), Console(file=out, width=80, color_system=None))
    return out.getvalue()
if __name__ == "__main__":
    p=plan_of(training_of([40,30,20,20]))
    print(printed(p))
    Path("/tmp/show/plan.svg").write_text(to_svg(p.picture(), p.memory))
    Path("/tmp/show/plan.html").write_text(to_html(p, p.picture()))
    print(printed(plan_of(training_of(range(70,40,-1)))))
