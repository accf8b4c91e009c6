"""Run ``megapg demo`` as a user does."""

import contextlib
import importlib.util
import os
import re
import signal
import site
import subprocess
import sys
import time
import uuid
import venv
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from processes import captured
from typer.testing import CliRunner

import megapg
from megapg.megatron.core import installed_version
from megapg.megatron.watching.trace import GlobalRead
from megapg.testing import run_distributed
from megapg.tools.cli import app
from megapg.tools.demo import ranks
from megapg.tools.demo.job import GPTRun, TrainingResult
from megapg.tools.demo.ranks import RankReport, Usage
from megapg.tools.demo.rl_verdict import Left, Refitted, Story, judge_rl
from megapg.tools.demo.rl_workers import State
from megapg.tools.demo.verdict import judge, judge_resumed

DEMO = [sys.executable, "-m", "megapg", "demo"]
SMALL = "--steps 3 --layers 2 --microbatches 2"


def in_process(arguments):
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["demo", *arguments.split()])


@pytest.fixture
def on_a_checkout(tmp_path):
    """Return a function that runs megapg with Megatron-core from a checkout on PYTHONPATH.

    There is no metadata of it: an environment with links to all other packages is made.
    """
    (core,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    (tmp_path / "checkout" / "megatron").mkdir(parents=True)
    (tmp_path / "checkout" / "megatron" / "core").symlink_to(core)
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for each in [each for path in site.getsitepackages() for each in Path(path).iterdir()]:
        if not each.name.startswith("megatron") and not (packages / each.name).exists():
            (packages / each.name).symlink_to(each)
    python = tmp_path / "env" / "bin" / "python"
    paths = os.pathsep.join(map(str, (tmp_path / "checkout", Path(megapg.__file__).parents[1])))

    def run(*arguments):
        env = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "140", "OMP_NUM_THREADS": "1"}
        return captured([python, "-m", "megapg", *arguments], timeout=280, env=env, cwd=tmp_path)

    return run


@pytest.mark.contract
def test_two_ranks_hold_every_row_on_a_checkout(on_a_checkout):
    done = on_a_checkout("demo", *SMALL.split(), "--world-size", "2")
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "on 2 CPU ranks" in shown
    assert "1,048,576 bytes of text" in shown
    assert "cross_entropy.py" in shown or "dot_product_attention.py" in shown
    verdict = shown.partition("verdict")[2]
    assert verdict.count("yes") == 10
    assert "6 of 6 equal" in verdict
    assert "2 of 2 ranks" in verdict
    words = " ".join(verdict.split())
    assert "resumed as dp alone: the same loss" in words
    assert "2 of 2 layouts" in words
    picture = done.stdout.partition("the same layout on GPUs: ")[2]
    assert picture.startswith("megapg plan --world-size 2 --tp 2\n")
    assert picture.endswith("   0    0  0\n")


@pytest.mark.contract
def test_a_plan_of_a_model_on_a_checkout(on_a_checkout, tmp_path):
    (tmp_path / "small.toml").write_text(
        "seq_length = 64\n[model]\nvocab_size = 256\n"
        "[config]\nnum_layers = 1\nhidden_size = 64\nnum_attention_heads = 4\n"
    )
    done = on_a_checkout("plan", "--world-size", "1", "--model", "small.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    version = ".".join(map(str, installed_version()))
    assert f"Megatron-core {version} builds" in " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--experts 4 --ep 2 --expt-tp 1"])
def test_eight_ranks(options):
    ended = in_process(f"--world-size 8 --steps 3 {options}")
    assert ended.exit_code == 0, ended.output
    assert "on 8 CPU ranks" in ended.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cp 2", "No such option"),
        ("--tp 2 --steps 3 rl", "`megapg demo rl` does not take --tp, --steps"),
        ("--tp 3", "does not divide by tp=3"),
        ("--ep 2", "give --experts"),
        ("--experts 3 --ep 2", "--experts 3 does not divide by --ep 2: 3 = 1 x 2 + 1"),
        ("--experts 4 --ep 0", "Invalid value for '--ep'"),
        ("--experts 0", "Invalid value for '--experts'"),
        ("--world-size 3 --tp 3", "attention heads: 4 does not divide by --tp 3"),
        ("--layers 3", "--layers 3 does not divide by the 2 stages of the pipeline, --pp 2"),
        ("--layers 6 --vpp 2", "the 4 stages of the pipeline, --pp 2 x --vpp 2"),
        ("--vpp 2 --microbatches 3", "--microbatches 3 does not divide by --pp 2"),
        (
            "--world-size 3 --experts 2 --expt-tp 3",
            "FFN hidden size: 256 does not divide by --expt-tp 3",
        ),
    ],
)
def test_arguments_that_do_not_fit_exit_with_2(arguments, message):
    ended = in_process(arguments)
    assert ended.exit_code == 2, ended.output
    assert message in " ".join(ended.output.split())


def test_ctrl_c_leaves_no_process():
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*DEMO, "--steps", "100000", "--world-size", "2"],
        env={**os.environ, "MEGAPG_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def marked():
        found = []
        for other in psutil.process_iter():
            try:
                if other.environ().get("MEGAPG_TEST_MARK") == mark:
                    found.append(other)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    deadline = time.monotonic() + 180
    while len(marked()) < 5 and time.monotonic() < deadline:  # demo, interpreter, guard, 2 ranks
        time.sleep(0.1)
    assert len(marked()) >= 5
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert "no process is left" in output
    assert marked() == []


@pytest.mark.ray
def test_ctrl_c_leaves_nothing_of_a_cluster(tmp_path):
    absent = tmp_path / "absent"  # Ray's default folder, if Ray never ran on the machine
    process = psutil.Popen(
        [*DEMO, "rl"],
        env={**os.environ, "RAY_TMPDIR": str(absent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        found, actors = [], []
        deadline = time.monotonic() + 200  # Ray's first import is slow on a busy disk
        while len(actors) < 4 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
            with contextlib.suppress(psutil.NoSuchProcess):
                found = process.children(recursive=True)
                titles = ["".join(each.cmdline()) for each in found]
                actors = [each for each in titles if re.match("ray::(Trainer|Rollout)", each)]
        assert len(actors) == 4, titles
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "no process is left" in output
    _, alive = psutil.wait_procs(found, timeout=10)
    assert alive == []
    assert not absent.exists()


def test_rl_without_ray_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.exceptions", None)
    ended = in_process("rl")
    assert ended.exit_code == 2
    assert "pip install 'megapg[ray]'" in " ".join(ended.output.split())


READ = GlobalRead(
    "get_tensor_model_parallel_group", "a.py", 1, "f", "tp", "session", module="megatron.core.a"
)


def report(**changes):
    read = READ
    values = {
        "result": TrainingResult((5.0, 4.0), "abc", 10, 1.0, 7),
        "communicators": 4,
        "reads": (read,),
        "before": Usage(0, 1, 6),
        "after": Usage(0, 1, 6),
    }
    return RankReport(**{**values, **changes})


def test_each_row_of_the_verdict_can_fail():
    good = [report(), report()]
    assert all(row.held for row in judge(good, good, left_over=0))
    stranger = replace(READ, answered_by="other globals")
    ours = replace(READ, module="megatron.corelike")
    spoilt = {
        0: [report(), report(result=TrainingResult((5.0, 4.000001), "abc", 10, 1.0, 7))],
        1: [report(), report(result=TrainingResult((5.0, 4.0), "abd", 10, 1.0, 7))],
        2: [report(), report(communicators=5)],
        3: [report(), report(reads=(stranger,))],
        4: [report(), report(reads=(READ, ours))],
        5: [report(), report(after=Usage(0, 2, 6))],
    }
    for failing, session in spoilt.items():
        rows = judge(session, good, left_over=0)
        assert [index for index, row in enumerate(rows) if not row.held] == [failing]
    saw_nothing = [report(reads=()), report(reads=())]
    rows = judge(saw_nothing, good, left_over=0)
    assert [row.held for row in rows] == [True, True, True, False, False, True, True]
    assert not judge(good, good, left_over=1)[6].held


def result(losses, at_checkpoint, weights="abc"):
    return report(result=TrainingResult(losses, weights, 10, 1.0, 7, at_checkpoint))


def test_each_row_about_resuming_can_fail():
    whole = [result((5.0, 4.0, 3.0), 3.5)] * 2
    good = [result((3.0,), 3.5)] * 2
    recut = [result((3.01,), 3.500001)] * 2

    def held(resumed, recut):
        return [row.held for row in judge_resumed(whole, resumed, recut, "as dp2")]

    assert held(good, recut) == [True, True]
    assert held(good, []) == [True]
    for wrong in (
        result((3.0000001,), 3.5),
        result((3.0,), 3.5000001),
        result((3.0,), 3.5, "abd"),
        result((), 3.5),
    ):
        assert held([good[0], wrong], recut) == [False, True]
    for wrong in (result((3.0,), 3.5001), result((3.5,), 3.5), result((3.0,), None)):
        assert held(good, [wrong]) == [True, False]


TRAINERS = (State(10, 1, "w", "c0"), State(11, 1, "w", "c1"))


def rl_story(*, deaths=()):
    """Return the story of four steps; ``deaths`` may have "rollout" and "trainer"."""
    refits = []
    for step in range(5):
        trainers = [replace(each, actor=f"w{step}") for each in TRAINERS]
        rollouts = [State(process, 0, f"w{step}") for process in (20, 21)]
        if "rollout" in deaths and step >= 2:
            rollouts[1:] = [State(22, 0, f"w{step}")] if step >= 3 else []
        if "trainer" in deaths and step >= 4:
            trainers = [replace(trainers[0], opened=2), replace(trainers[1], process=12)]
        refits.append(Refitted(tuple(trainers), tuple(rollouts)))
    faults = {"error": "rank 1 on host did not come", "rebound": 90} if "trainer" in deaths else {}
    return Story([(4.0 - step, 1.0) for step in range(4)], refits, [0] * 8, **faults)


NOTHING = Left(0, 0, 0)


def rl_rows(faulty, left=NOTHING):
    """Return the numbers of the rows that do not hold."""
    rows = judge_rl(rl_story(), faulty, left)
    return [index for index, row in enumerate(rows) if not row.held]


def test_each_row_about_rl_can_fail():
    both = rl_story(deaths=("rollout", "trainer"))
    assert rl_rows(both) == []
    assert rl_rows(rl_story()) == [4, 5]
    assert rl_rows(rl_story(deaths=("rollout",))) == [5]
    assert rl_rows(rl_story(deaths=("trainer",))) == [4]

    def but(step, **workers):
        return replace(
            both,
            refits=[
                replace(each, **workers) if number == step else each
                for number, each in enumerate(both.refits)
            ],
        )

    trainers, rollouts = both.refits[4].trainers, both.refits[4].rollouts
    other = replace(trainers[1], critic="x")
    for failing, story in (
        (0, replace(both, losses=[*both.losses[:3], (1.0, 1.0000001)])),
        (0, replace(both, losses=both.losses[:3])),
        (1, but(4, trainers=(trainers[0], other))),
        (2, but(4, rollouts=(rollouts[0], replace(rollouts[1], actor="w3")))),
        (2, but(3, trainers=both.refits[2].trainers, rollouts=tuple(
            replace(each, actor="w2") for each in both.refits[3].rollouts))),
        (3, replace(both, suspended=[0] * 7 + [1])),
        (3, replace(both, suspended=[0] * 7)),
        (5, replace(both, error="rank 0 did not come")),
        (5, replace(both, rebound=0)),
        (5, but(4, trainers=(replace(trainers[0], opened=1), trainers[1]))),
        (6, replace(both, groups=1)),
    ):  # fmt: skip
        assert rl_rows(story) == [failing]
    # The trainers were restarted while a rollout was missing.
    again = tuple(replace(each, opened=2) for each in both.refits[3].trainers)
    assert 4 in rl_rows(but(3, trainers=again))
    for left in (Left(1, 0, 0), Left(0, 1, 0), Left(0, 0, 1)):
        assert rl_rows(both, left) == [6]


def trains_and_makes_groups(count):
    """Return a ``ranks._trainer`` whose training makes groups."""

    def train(*_):
        kept.extend(dist.new_group([0]) for _ in range(count))
        return report().result

    kept = []
    return lambda: train


def communicators_of(way, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_trainer", trains_and_makes_groups(count))
        return way(GPTRun(), b"", Path(os.devnull)).communicators


def count_both_ways():
    ways = (ranks.on_a_session, ranks.on_globals)
    return [[communicators_of(way, count) for count in (0, 2)] for way in ways]


def test_communicators_are_counted_at_one_point_of_both_runs():
    """Count after training, as Megatron-core makes some communicators at first use."""
    (result,) = run_distributed(count_both_ways, 1, deadline=120)
    for without, with_two_more in result:
        assert with_two_more == without + 2
