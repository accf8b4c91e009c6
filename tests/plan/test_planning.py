"""Plans: clusters, how far groups reach, communicators, findings and JSON."""

import itertools
import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import commands as cli
import pytest
from schemas import check_schema

import megapg.tools.plan
from megapg.communicators.backends import BACKENDS
from megapg.communicators.needed import Recipe, communicators
from megapg.errors import PlanError, UnknownFieldError
from megapg.layout import ParallelLayout
from megapg.tools.plan import draw_svg, load_cluster, make_plan, presets
from megapg.tools.plan.spans import over_network, runs_of, text_of_ranks

PAGE = Path(__file__).parents[2] / "migration_guide" / "plan.md"
SCHEMA = json.loads(Path(megapg.tools.plan.__file__).with_name("schema.json").read_text())
LAYOUTS = [
    ParallelLayout(world_size=64, tp=4, pp=2, ep=8, expt_tp=1),
    ParallelLayout(world_size=96, tp=2, cp=2, pp=3, ep=4),
    ParallelLayout(world_size=48, tp=2, pp=2, order="tp-dp-cp-ep-pp", ranks=range(47, -1, -1)),
    ParallelLayout(world_size=32, cp=4, tp=2, optimizer_instances=2, hierarchical_cp=(2, 2)),
    ParallelLayout(world_size=32, tp=2, pp=4, embedding_ranks=lambda pipeline: pipeline[1:]),
    ParallelLayout(world_size=16, cp=8, hybrid_cp=True, ranks=range(4, 20)),
    ParallelLayout(world_size=1),
]


# --- groups and communicators ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["H100-8", "GB200-NVL72"])
def test_the_reach_of_groups_is_that_of_every_group(layout, name):
    cluster = load_cluster(name)
    rank = layout.ranks[-1]
    for span in make_plan(layout, cluster, rank=rank).spans:
        groups = [*layout.partition(span.field)]
        assert (span.size, span.count) == (max(map(len, groups)), len(groups))
        for crossed, size in ((span.nodes, cluster.node_size), (span.domains, cluster.domain_size)):
            counts = [len({each // size for each in group}) for group in groups]
            assert crossed == (min(counts), max(counts)), span.field
        assert span.ranks == layout.members(span.field, rank)
        assert (span.link == "NVLink") == (span.size > 1 and span.domains == (1, 1))
        assert (span.link == "network") == (span.nodes[1] > 1 and span.domains[1] > 1)


def test_the_share_over_the_network_is_that_of_counted_messages():
    layout, cluster = LAYOUTS[0], load_cluster("H100-8")
    for field in ("tp", "ep", "dp_cp"):
        for group in layout.partition(field):
            ring = [*zip(group, [*group[1:], group[0]], strict=True)]
            pairs = [*itertools.permutations(group, 2)]
            for collective, messages in (("all_reduce", ring), ("all_to_all", pairs)):
                crossing = sum(a // 8 != b // 8 for a, b in messages) / len(messages)
                found = over_network(layout, cluster, collective, group, stage=0)
                assert found == pytest.approx(crossing), (field, group, collective)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_communicators_are_those_of_a_session_on_nccl(layout):
    settings = Recipe("nccl", BACKENDS["nccl"].lanes, {}, frozenset(), all_gather_groups=False)
    plans = [make_plan(layout, rank=rank) for rank in layout.ranks]
    made = [communicators(layout, settings, plan.rank) for plan in plans]
    assert [[*plan.communicators] for plan in plans] == made
    for plan, own in zip(plans, made, strict=True):
        stage = layout.members("pp", plan.rank).index(plan.rank)
        (counted,) = [each for each in plan.stages if stage in each.stages]
        connected = sum(len(each.ranks) > 1 for each in own)
        assert (counted.count, counted.connected) == (len(own), connected)
        assert counted.memory == (connected * 388 * 2**20, connected * 688 * 10**6)


def test_ranks_are_written_as_runs():
    written = {
        (5,): "5",
        (0, 1, 2, 3): "0-3",
        (0, 8): "0, 8",
        (0, 8, 16, 24, 32): "0, 8, ... 32",
        (0, 1, 8, 9): "0-1, 8-9",
        (0, 1, 8, 9, 16, 17): "0-1, 8-9, ...",
        (3, 2, 1, 0): "3, 2, ... 0",
    }
    assert {ranks: text_of_ranks(ranks) for ranks in written} == written
    for ranks in written:
        runs = [range(a, b + (1 if step > 0 else -1), step) for a, b, step in runs_of(ranks)]
        assert [rank for run in runs for rank in run] == [*ranks]


# --- clusters -------------------------------------------------------------------------------------


def test_every_number_of_a_preset_has_a_source():
    assert presets() == ["A100-8", "B200-8", "GB200-NVL72", "H100-8", "H200-8"]
    for name in presets():
        cluster = load_cluster(f"64x{name}")
        assert (cluster.name, cluster.nodes) == (name, 64)
        for number in cluster.quantities.values():
            assert re.match("NVIDIA .*(Guide|Datasheet)", number.source)


MINE = """
name = "mine"
gpus_per_node = 4
nvlink_domain = {value = 2, source = "the machine room"}
memory_gb = 24
nvlink_gb_s = 56.25
network_gb_s = 12.5
"""


def test_a_file_is_a_cluster(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    cluster = load_cluster(f"2x{file}")
    assert (cluster.name, cluster.nodes, cluster.node_size) == ("mine", 2, 4)
    assert cluster.nvlink_domain.source == "the machine room"
    assert cluster.memory_gb.source == "mine.toml"
    plan = make_plan(ParallelLayout(world_size=8, tp=4), cluster)
    assert plan.spans[0].link == "node"  # NVLink connects two of the four GPUs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINE.replace("mine", "").replace("memory_gb", "memory"), "unknown keys memory;"),
        (MINE.replace("memory_gb = 24", ""), "memory_gb missing"),
        (MINE.replace("= 24", "= -24"), "memory_gb = -24; write a number above 0"),
        (MINE.replace("node = 4", "node = 4.5"), "gpus_per_node = 4.5; write a whole number"),
        (MINE.replace("node = 4", "node = 3"), "one has to divide by the other"),
        (MINE + "nodes = 0", "nodes=0"),
        ("name =", "Invalid value"),
    ],
)
def test_a_file_with_an_error_is_refused(tmp_path, text, message):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        load_cluster(str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "error", "message"),
    [
        (lambda layout: make_plan(layout, "H100"), PlanError, "H100-8, H200-8, or a TOML file"),
        (lambda layout: make_plan(layout, "0xH100-8"), PlanError, "a whole number from 1"),
        (lambda layout: make_plan(layout, "none.toml"), PlanError, "none.toml"),
        (lambda layout: make_plan(layout, "1xH100-8"), PlanError, "Use 2xH100-8."),
        (lambda layout: make_plan(layout, rank=16), PlanError, "rank 16 is not in the layout"),
        (lambda layout: draw_svg(layout, rank=-1), PlanError, "rank -1 is not in the layout"),
        (lambda layout: draw_svg(layout, fields=["dp-cp"]), UnknownFieldError, "mean 'dp_cp'"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(plan, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        plan(ParallelLayout(world_size=16))
    assert not [*tmp_path.iterdir()]


# --- findings -------------------------------------------------------------------------------------


def options_of(text):
    """Return the changes of a layout that a cure names."""
    named = re.findall(r"--([a-z-]+) ([\w-]+)", text)
    return {
        name.replace("-", "_"): int(value) if value.isdigit() else value for name, value in named
    }


@pytest.mark.parametrize(
    ("sizes", "cluster", "code", "cure"),
    [
        ({"world_size": 64, "tp": 16, "pp": 2}, "H100-8", "tp-leaves-nvlink", "--tp 8 --pp 4"),
        ({"world_size": 48, "tp": 6}, "H100-8", "tp-leaves-nvlink", "--tp 4 keeps"),
        (
            {"world_size": 64, "tp": 8, "order": "dp-tp-cp-ep-pp"},
            *("H100-8", "tp-leaves-nvlink", "--order tp-"),
        ),
        ({"world_size": 64, "tp": 8, "ep": 8}, "H100-8", "ep-leaves-nvlink", "--expt-tp 1"),
        (
            {"world_size": 64, "tp": 2, "ep": 4, "order": "tp-dp-cp-ep-pp"},
            *("H100-8", "ep-leaves-nvlink", "--order tp-cp-ep-"),
        ),
        ({"world_size": 64, "ep": 64}, "H100-8", None, None),  # no order keeps 64 ranks inside
        ({"world_size": 64, "tp": 16, "ep": 4}, "GB200-NVL72", None, None),
        ({"world_size": 64, "tp": 4, "pp": 2, "ep": 8, "expt_tp": 1}, "H100-8", None, None),
    ],
)
def test_a_finding_has_a_cure_that_works(sizes, cluster, code, cure):
    layout = ParallelLayout(**sizes)
    findings = make_plan(layout, cluster).findings
    assert [each.code for each in findings] == ([code] if code else [])
    for each in findings:
        assert cure in each.cure
        changes = options_of(each.cure)
        if "tp" in changes:
            changes["expt_tp"] = changes["tp"]
        assert not make_plan(replace(layout, **changes), cluster).findings


# --- the command ----------------------------------------------------------------------------------


def plan_json(tmp_path, *arguments):
    done = cli.megapg("plan", *arguments, "--json", at=tmp_path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_json_is_that_of_the_schema(tmp_path):
    words = "--world-size 512 --tp 8 --pp 8 --ep 8 --cluster 64xH100-8 --rank 77"
    found = plan_json(tmp_path, *words.split())
    check_schema(found, SCHEMA)
    for change in ({"rank": "0"}, {"fields": [{"field": "tp"}]}, {"mood": "fine"}):
        with pytest.raises((AssertionError, KeyError)):
            check_schema(found | change, SCHEMA)
    fields = {each["field"]: each for each in found["fields"]}
    assert fields["pp"]["ranks"] == {"count": 8, "runs": [[13, 461, 64]]}
    assert (fields["pp"]["nodes"], fields["pp"]["link"]) == ([8, 8], "network")
    assert found["cluster"]["nodes"] == 64
    assert [each["code"] for each in found["findings"]] == ["ep-leaves-nvlink"]
    nodes = [each["node"] for each in found["grid"]["drawn"]]
    assert found["grid"]["groups"]["tp"] == [[node] * 8 for node in nodes]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--world-size 6 --tp 4", "Nearest that fit"),
        ("--world-size 16 --cluster 1xH100-8", "Use 2xH100-8"),
        ("--world-size 16 --cluster 4xH100-8", "Use 2xH100-8, or --world-size 32."),
        ("--world-size 16 --cluster 8xh100-4", "Did you mean H100-8? Write NODESxNAME-GPUS"),
        ("--world-size 16 --field dp-cp", "did you mean 'dp_cp'"),
        ("--world-size 16 --svg none/plan.svg", "none/plan.svg: No such file"),
    ],
)
def test_what_does_not_fit_exits_with_2(arguments, message, tmp_path):
    done = cli.megapg("plan", *arguments.split(), at=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.decode()


def test_a_large_world_takes_two_cpu_seconds_and_no_torch(tmp_path):
    code = (
        "import sys; from megapg.tools.cli import app; import typer;"
        "typer.main.get_command(app)(standalone_mode=False); assert 'torch' not in sys.modules"
    )
    words = "plan --world-size 131072 --tp 8 --pp 16 --ep 8 --expt-tp 1 --cluster 16384xH100-8"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code, *words.split()], check=True, capture_output=True, timeout=120
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


_GPT3 = """
import resource, time
from megapg.layout import ParallelLayout
from megapg.tools.plan import load_cluster
from megapg.tools.plan.measure import measure
from megapg.tools.plan.models import find_model
from megapg.tools.plan.training import Job

imports = time.process_time()
layout = ParallelLayout(world_size=16384, tp=8, pp=8)
job = Job(model="gpt3-175b", seq_length=2048, microbatches=16)
measure(layout, load_cluster("H100-8"), find_model("gpt3-175b"), job)
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(imports, time.process_time() - imports, most)
"""


@pytest.mark.slow
def test_a_model_of_175_billion_costs_little_more_than_imports():
    """With the imports, which take 4.5 CPU seconds on a quiet machine, it is under 10 seconds."""
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _GPT3], check=True, capture_output=True, text=True
    )
    imports, counting, mib = map(float, made.stdout.split()[-3:])
    assert counting < 1.2 * imports
    assert mib < 1024


# --- the guide ------------------------------------------------------------------------------------


@pytest.mark.timeout(1200)  # one command looks for layouts, which takes minutes
def test_the_page_shows_what_the_command_prints(tmp_path, monkeypatch):
    """A line of the page that is cut here has ``...`` at its end, or is in a shell's block."""
    page = PAGE.read_text()
    programs = re.findall(r"```python\n(.*?)```", page, re.S)
    for program in programs:
        if file := re.match(r"# (\w+\.py)\n", program):
            (tmp_path / file[1]).write_text(program)
    commands = {}
    for command, _ in re.findall(r"\$ megapg (plan .*)\n([^`]*)```", page):
        done = cli.megapg(*command.split(), at=tmp_path, timeout=500, COLUMNS="130")
        commands[command] = re.sub(r" +$", "", done.stdout.decode(), flags=re.M)
    printed = {line for text in commands.values() for line in text.splitlines()}
    for block in re.findall(r"```text\n(.*?)```", page, re.S):
        for line in block.splitlines():
            start = line.removesuffix(" ...")
            assert any(each == line or each.startswith(start + " ") for each in printed), line
    for command, output in re.findall(r"\$ megapg (plan .*)\n([^`]*)```", page):
        lines = [
            r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n"
            for line in output.splitlines()
        ]
        assert re.fullmatch("".join(lines), commands[command]), command
    monkeypatch.chdir(tmp_path)
    for program in programs:
        exec(program, {})
    assert (tmp_path / "plan.svg").exists()
    (tmp_path / "mine.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.S)[1])
    assert load_cluster("64xmine.toml").network_gb_s.source == "our network team"
