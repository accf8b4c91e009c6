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

import megapg.tools.plan
from megapg.errors import PlanError
from megapg.layout import ParallelLayout
from megapg.tools.cli.plan_screen import show
from megapg.tools.plan import Flow, Job, StageCost, Training, load_cluster, make_plan
from megapg.tools.plan.bars import text_of_bytes, text_of_range
from megapg.tools.plan.cures import find_in_training
from megapg.tools.plan.page import to_html
from megapg.tools.plan.svg import to_svg

SCHEMA = json.loads(Path(megapg.tools.plan.__file__).with_name("schema.json").read_text())
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


# --- terminal -------------------------------------------------------------------------------------


def bars_in(text):
    """Return the letters of each bar, by the stages."""
    return dict(re.findall(r"^  (stages? [\d-]+) +([PGOAC|]+ *\|?)\s*$", text, re.M))


def test_the_terminal_needs_80_columns_and_no_colour():
    text = printed(plan_of(training_of([40, 30, 20, 20])))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "\x1b" not in text
    rows = [line.split() for line in text.partition("total")[2].splitlines()[1:4]]
    assert [" ".join(row) for row in rows] == [
        "0 4.0 GB 8.0 GB 12.0 GB 40.0 GB 3.0-5.0 GB 69.0 GB",
        "1 4.0 GB 8.0 GB 12.0 GB 30.0 GB 3.0-5.0 GB 59.0 GB",
        "2-3 4.0 GB 8.0 GB 12.0 GB 20.0 GB 3.0-5.0 GB 49.0 GB",
    ]
    words = " ".join(text.split())
    assert "Stage 0 is the fullest: 69.0 GB, 86% of the 80 GB of a GPU." in words
    assert "A step has 32 samples of 8,192 tokens, 16 microbatches of 1 for each of dp=2." in words
    assert "Adam with fp32 state (distributed optimizer), recomputation: selective." in words


def test_a_bar_is_as_long_as_its_bytes():
    bars = bars_in(printed(plan_of(training_of([40, 30, 20, 20]))))
    assert bars.keys() == {"stage 0", "stage 1", "stages 2-3"}
    for name, total in (("stage 0", 69), ("stage 1", 59), ("stages 2-3", 49)):
        assert len(bars[name]) == 55  # 54 columns are the memory of a GPU
        parts = {letter: bars[name].count(letter) / 54 * 80 for letter in "PGOAC"}
        assert sum(parts.values()) == pytest.approx(total, abs=1)
        sizes = (4, 8, 12, total - 29, 5)
        assert [*parts.values()] == pytest.approx(sizes, abs=1.6)


def test_a_bar_over_the_memory_of_a_gpu_crosses_its_edge():
    text = printed(plan_of(training_of([60, 50, 40, 10])))
    bars = bars_in(text)
    assert {bar.index("|") for bar in bars.values()} == {round(54 * 80 / 89)}
    assert re.search(r"A\|A*C+", bars["stage 0"])
    assert bars["stage 3"].endswith("C" + " " * 25 + "|")
    assert "89.0 GB, 111% of the 80 GB of a GPU" in text


def test_many_stages_are_folded_and_the_fullest_is_kept():
    layout = ParallelLayout(world_size=64, pp=64)
    activations = [*range(64, 24, -1), 70, *range(23, 0, -1)]
    plan = plan_of(training_of(activations), layout)
    text = printed(plan)
    assert [*bars_in(text)] == [f"stage {n}" for n in (*range(8), 40, *range(60, 64))]
    assert text.count("32 stages") == 2  # 8 to 39, in the table and in the bars
    assert text.count("19 stages") == 2  # 41 to 59
    assert to_svg(plan.picture(), plan.memory).count('class="bar"') == 13


def test_the_traffic_is_that_of_the_stage_of_the_rank():
    other = (Flow("embd", "all_reduce", 1, 10**6, 1.0), *FLOWS)
    training = training_of([40, 30, 20, 20])
    last = replace(training.stages[3], flows=other)
    training = replace(training, stages=(*training.stages[:3], last))
    first, text = printed(plan_of(training)), printed(plan_of(training, rank=63))
    rows = re.findall(r"^  (\w+) +(\w+) +([\d,]+) +([\d.]+ \w+) +(\d+%)", text, re.M)
    assert rows == [
        ("tp", "all_reduce", "1,284", "172 GB", "0%"),
        ("dp_cp", "reduce_scatter_tensor", "1", "4.0 GB", "50%"),
        ("pp", "send", "16", "2.0 GB", "100%"),
        ("embd", "all_reduce", "1", "1.0 MB", "100%"),
    ]
    assert "Traffic of rank 63 in one step" in text
    assert "bytes  over the network" in text
    total = re.search(r"^  total +([\d.]+ \w+) +(\d+%)", text, re.M)
    assert total.groups() == ("178 GB", "2%")
    assert "embd   all_reduce" not in first


def test_a_rank_without_traffic_says_so():
    plan = plan_of(training_of([3], flows=()), ParallelLayout(world_size=1))
    text = printed(plan)
    assert "None: each group of the rank has one rank." in text
    assert "A rank holds 32.0 GB, 40% of the 80 GB of a GPU." in text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12_340_000, "12.3 MB")),
        *(
            (99_960_000, "100 MB"),
            (999_960, "1.0 MB"),
            (123 * GB, "123 GB"),
            (5_000 * GB, "5,000 GB"),
        ),
    ],
)
def test_bytes_for_people(size, text):
    assert text_of_bytes(size) == text


def test_a_range_has_its_unit_once():
    assert text_of_range(3 * GB, 5 * GB) == "3.0-5.0 GB"
    assert text_of_range(300 * 10**6, 5 * GB) == "300 MB-5.0 GB"
    assert text_of_range(0, 0) == "0 B"


# --- SVG and HTML ---------------------------------------------------------------------------------


def test_the_svg_has_a_bar_for_each_stage():
    plan = plan_of(training_of([60, 30, 20, 20]))
    root = ElementTree.fromstring(to_svg(plan.picture(), plan.memory))
    width, height = map(float, root.get("viewBox").split()[2:])
    bars = [each for each in root.iter(f"{SVG}g") if each.get("class") == "bar"]
    assert [bar.get("data-stage") for bar in bars] == ["0", "1", "2-3"]
    for bar, total in zip(bars, (89, 59, 49), strict=True):
        texts = [each.text for each in bar.iter(f"{SVG}text")]
        assert texts == [bar.findtext(f"{SVG}text"), *"PGOAC", f"{total}.0 GB"]
        boxes = [float(each.get("width")) for each in bar.iter(f"{SVG}rect")]
        sizes = (4, 8, 12, total - 29, 5)
        assert [box / sum(boxes) for box in boxes] == pytest.approx(
            [n / total for n in sizes], 0.01
        )
        titles = [each.text for each in bar.iter(f"{SVG}title")]
        assert titles[:2] == ["parameters: 4.0 GB", "gradients: 8.0 GB"]
        ends = [float(each.get("x")) + float(each.get("width")) for each in bar.iter(f"{SVG}rect")]
        assert max(ends) + 50 < width - 40
    assert "80 GB of a GPU" in [each.text for each in root.iter(f"{SVG}text")]
    assert height < 2200
    text = to_svg(plan.picture(), plan.memory)
    assert not re.search(r"<script|<image|href|url\(|@import|\son\w+=", text)


def test_the_page_has_the_bars_and_the_traffic():
    plan = plan_of(training_of([40, 30, 20, 20]), rank=5)
    page = to_html(plan, plan.picture())
    assert page.count('class="bar"') == 3
    assert "<h2>Traffic of rank 5 in one step</h2>" in page
    row = "<td>tp</td><td>all_reduce</td><td>1,284</td><td>172 GB</td><td>0%</td>"
    assert row in page
    assert "<td>total</td><td></td><td></td><td>178 GB</td><td>2%</td>" in page
    assert "<th>over the network</th>" in page
    assert "{{" not in page
    without = to_html(make_plan(LAYOUT), plan.picture())
    assert "Traffic" not in without
    assert 'class="bar"' not in without


# --- JSON -----------------------------------------------------------------------------------------


def test_the_json_is_that_of_the_schema():
    plan = plan_of(training_of([40, 30, 20, 20]))
    found = json.loads(json.dumps(plan.as_json()))
    check_schema(found, SCHEMA)
    step = found["training"]
    assert step["job"] == {
        "model": "llama3-70b",
        "seq_length": 8192,
        "micro_batch_size": 1,
        "microbatches": 16,
        "recompute": "selective",
        "distributed_optimizer": True,
    }
    assert (step["weights"], step["fullest"]) == (70_553_706_496, 0)
    assert [stage["total"] for stage in step["stages"]] == [69 * GB, 59 * GB, 49 * GB, 49 * GB]
    assert step["stages"][1]["rank"] == 16
    assert step["stages"][0]["flows"][0] == {
        "field": "tp",
        "collective": "all_reduce",
        "count": 1284,
        "bytes": 172 * GB,
        "crossing": 0.0,
    }
    with pytest.raises(AssertionError):
        check_schema(found | {"training": step | {"mood": "fine"}}, SCHEMA)
    without = json.loads(json.dumps(make_plan(LAYOUT).as_json()))
    assert without["training"] is None
    check_schema(without, SCHEMA)


# --- findings -------------------------------------------------------------------------------------


def findings_of(training, measure, layout=LAYOUT, known=()):
    return find_in_training(layout, load_cluster("H100-8"), training, measure, known)


def never(job):
    raise AssertionError("nothing is counted again")


def test_a_step_that_fits_evenly_has_no_finding():
    assert findings_of(training_of([40, 38, 36, 34]), never) == []


def recorded(*answers):
    """Return a function that counts, its calls, and the answers by turns."""
    calls, left = [], [*answers]

    def measure(job):
        calls.append(job)
        if isinstance(left[0], Exception):
            raise left.pop(0)
        return left.pop(0)

    return measure, calls


def test_out_of_memory_names_the_first_change_that_fits():
    full = training_of([60] * 4)
    measure, calls = recorded(training_of([20] * 4))
    (found,) = findings_of(full, measure)
    assert found.code == "out-of-memory"
    assert found.what == "out of memory: a rank of stage 0 holds 89.0 GB, and a GPU has 80 GB."
    assert found.cure == "--recompute full fits. The fullest rank then holds 49.0 GB."
    assert calls == [replace(JOB, recompute="full")]


def test_the_distributed_optimizer_is_tried_first():
    job = replace(JOB, distributed_optimizer=False)
    full = training_of([40] * 4, job, (4, 8, 40, (3, 5)))
    measure, calls = recorded(training_of([40] * 4))
    (found,) = findings_of(full, measure)
    assert found.cure == "A distributed optimizer fits. The fullest rank then holds 69.0 GB."
    assert calls == [JOB]


def test_a_gpu_that_is_nearly_full_is_a_finding():
    assert findings_of(training_of([43] * 4), never) == []
    measure, _ = recorded(training_of([20] * 4))
    (found,) = findings_of(training_of([44] * 4), measure)
    assert found.code == "little-memory"
    assert "little memory: a rank of stage 0 holds 73.0 GB, and a GPU has 80 GB." in found.what
    assert found.cure == (
        "--recompute full takes less than 90%. The fullest rank then holds 49.0 GB."
    )
    measure, _ = recorded(training_of([43.5] * 4))  # fits, and leaves as little
    (found,) = findings_of(training_of([44] * 4), measure)
    assert "--suggest" in found.cure


@pytest.mark.parametrize("answer", [training_of([70] * 4), PlanError("recompute")])
def test_suggestions_are_named_if_no_change_fits(answer):
    measure, calls = recorded(answer)
    (found,) = findings_of(training_of([80] * 4), measure)
    assert found.cure == (
        "--suggest lists the layouts that fit, or the world size that may be enough."
    )
    assert len(calls) == 1


def test_uneven_stages_have_more_parameters():
    training = training_of([42, 20, 20, 5])  # as the first stages start more microbatches
    assert findings_of(training, never) == []
    first, *others = training.stages
    larger = replace(first, weights=2 * first.weights)
    (found,) = findings_of(replace(training, stages=(larger, *others)), never)
    assert found.code == "uneven-stages"
    assert "stage 0 has 60% more parameters than the mean" in found.what
    assert "pipeline_model_parallel_layout" in found.cure


def test_communicators_that_take_more_than_gradients():
    training = training_of([40] * 4, parts=(1, 2, 3, (3, 5)))
    (found,) = findings_of(training, never)
    assert found.code == "communicators-over-gradients"
    assert "take at least 3.0 GB, and its gradients 2.0 GB" in found.what
    assert "max_ctas" in found.cure
    # It is certain only if the least is more.
    assert findings_of(training_of([40] * 4, parts=(1, 4, 3, (3, 5))), never) == []


def test_experts_that_a_model_does_not_have():
    layout = ParallelLayout(world_size=512, tp=8, pp=8, ep=8)
    known = make_plan(layout).findings
    assert [each.code for each in known] == ["ep-leaves-nvlink"]
    (found,) = findings_of(training_of([40] * 8), never, layout, known)
    assert (found.code, found.cure) == ("no-experts", "Leave out --ep 8.")
    flows = (*FLOWS, Flow("ep", "all_to_all_single", 8, GB, 1.0))
    (found,) = findings_of(training_of([40] * 8, flows=flows), never, layout, known)
    assert found.code == "ep-leaves-nvlink"


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--seq-length 64", "--seq-length: only with --model."),
        ("--micro-batch-size 1 --plain-optimizer", "--micro-batch-size, --plain-optimizer: only"),
        ("--microbatches 4 --recompute none", "--microbatches, --recompute: only with --model."),
        ("--model none", "there is no such model. Name one of deepseek-v3, gpt3-175b"),
        ("--model Llama3-8B", "there is no such model. Did you mean llama3-8b? Name one of"),
        ("--model none.py:build", "none.py"),
        ("--model llama3-8b --recompute some", "'some' is not one of"),
    ],
)
def test_what_does_not_exist_or_fit_exits_with_2(arguments, message, tmp_path):
    words = ["--world-size", "8", *arguments.split()]
    done = cli.megapg("plan", *words, at=tmp_path, COLUMNS="200")
    assert done.returncode == 2
    assert message in done.stderr.decode()


@pytest.mark.contract
def test_the_command_counts_a_step_of_a_model(tmp_path):
    words = "--world-size 64 --tp 4 --pp 2 --ep 2 --cluster 8xH100-8 --model llama3-8b"
    files = ("--svg", "plan.svg", "--html", "plan.html")
    done = cli.megapg("plan", *words.split(), "--rank", 5, "--json", *files, at=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"Falling back" not in done.stderr
    found = json.loads(done.stdout)
    check_schema(found, SCHEMA)
    step = found["training"]
    padded = 2 * 256 * 4096  # tp=4 divides the vocabulary into multiples of 128
    assert step["weights"] == 8_030_261_248 + padded
    assert sum(stage["weights"] * 4 for stage in step["stages"]) >= step["weights"]
    assert (step["job"]["seq_length"], step["job"]["microbatches"]) == (8192, 64)  # 512 samples
    for stage in step["stages"]:
        assert stage["parameters"] == 2 * stage["weights"]
        assert stage["gradients"] == 4 * stage["weights"]
    assert "no-experts" in [each["code"] for each in found["findings"]]
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert sum(each.get("class") == "bar" for each in root.iter(f"{SVG}g")) == 2
    assert "<h2>Traffic of rank 5 in one step</h2>" in (tmp_path / "plan.html").read_text()


def test_traffic_over_the_network_is_that_of_the_rank():
    """The groups of tp=6 on nodes of 8 GPUs: ranks 0-5 share a node, ranks 6-11 do not."""
    layout = ParallelLayout(world_size=24, tp=6)
    job = Job(model="gpt3-175b", seq_length=384, microbatches=1)
    crossing = {}
    for rank in (0, 6):
        flows = make_plan(layout, "H100-8", rank=rank, job=job).flows
        crossing[rank] = {flow.crossing for flow in flows if flow.field == "tp"}
    assert crossing == {0: {0}, 6: {2 / 6}}


@pytest.mark.contract
def test_a_cure_that_is_named_fits(tmp_path):
    words = "plan --world-size 64 --tp 4 --pp 2 --model llama3-70b --json"

    def codes(*more):
        done = cli.megapg(*words.split(), *more, at=tmp_path)
        found = json.loads(done.stdout)["findings"]
        return {each["code"]: each["cure"] for each in found}

    cure = codes()["out-of-memory"]
    assert cure.startswith("--recompute full fits.")
    assert "out-of-memory" not in codes("--recompute", "full")


def test_a_model_that_does_not_fit_the_layout_exits_with_2(tmp_path):
    words = "plan --world-size 56 --tp 7 --model llama3-8b"
    done = cli.megapg(*words.split(), at=tmp_path)
    assert done.returncode == 2
    assert "error --model llama3-8b: " in done.stderr.decode()
