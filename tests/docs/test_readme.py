"""Run the examples of the README."""

import contextlib
import io
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import commands as cli
import pytest
from processes import captured
from typer.testing import CliRunner

from megapg.cli import app
from megapg.errors import RankFailedError, WrongGroupError
from megapg.megatron import core_version
from megapg.testing import run_distributed

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
SESSIONS = (ROOT / "migration_guide" / "sessions.md").read_text()
BLOCKS_OF_SESSIONS = re.findall(r"```python\n(.*?)```", SESSIONS, re.S)
OF_CHECKPOINTS = (ROOT / "migration_guide" / "checkpoints.md").read_text()
BLOCKS_OF_CHECKPOINTS = re.findall(r"```python\n(.*?)```", OF_CHECKPOINTS, re.S)
OF_WRONG_GROUPS = (ROOT / "migration_guide" / "wrong-group.md").read_text()
WRONG_LOSS = re.findall(r"```python\n(.*?)```", OF_WRONG_GROUPS, re.S)[1]


def on_two_ranks(tmp_path, source):
    """Return what both ranks print; they have imported torch and Megatron-core already."""
    script = tmp_path / "example.py"
    script.write_text(source)
    return "".join(run_distributed(partial(as_script, script), 2, deadline=200))


def as_script(script):
    os.chdir(script.parent)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(script), run_name="__main__")
    return said.getvalue()


def test_there_are_as_many_examples_as_tests_here():
    assert (len(BLOCKS), len(BLOCKS_OF_SESSIONS), len(BLOCKS_OF_CHECKPOINTS)) == (4, 3, 2)


@pytest.mark.contract
def test_the_bug_is_an_error_without_published(tmp_path):
    """The losses are those of the table, which has the figures of Megatron-core 0.16.1."""
    shown = "    with megapg.published(pg):"
    assert shown in WRONG_LOSS
    without = {
        line: re.sub(f"{re.escape(shown)}.*", f"    {line}:", WRONG_LOSS)
        for line in ('with megapg.guard("off")', "if True")
    }
    for source, row in zip((WRONG_LOSS, without['with megapg.guard("off")']), (0, 1), strict=True):
        losses = sorted(re.findall(r"loss (\d\.\d{5})", on_two_ranks(tmp_path, source)))
        assert len(losses) == 2
        if core_version() == (0, 16, 1):  # 0.19 passes the group to its cross-entropy
            assert losses == sorted(re.findall(r"\d\.\d{5}", README)[2 * row : 2 * row + 2])
    if core_version() >= (0, 19):
        assert len(set(re.findall(r"loss (.*)", on_two_ranks(tmp_path, without["if True"])))) == 1
        return
    with pytest.raises(RankFailedError) as caught:
        on_two_ranks(tmp_path, without["if True"])
    assert set(caught.value.failures) == {0, 1}
    for failure in caught.value.failures.values():
        assert isinstance(failure, WrongGroupError)
        for part in ("asks parallel_state.get_tensor_model_parallel_", "was given self."):
            assert part in str(failure)


@pytest.mark.contract
def test_the_training_example(tmp_path):
    """The ranks start as with torchrun; test_launchers.py uses torchrun."""
    said = re.findall(
        r"rank (\d) of tp group \(0, 1\): loss (\d\.\d{4})", on_two_ranks(tmp_path, BLOCKS[0])
    )
    assert sorted(rank for rank, _ in said) == ["0", "1"]
    assert len({loss for _, loss in said}) == 1
    assert (tmp_path / "checkpoints" / "iter_0000001" / "integrity.json").exists()


def test_two_models_example(tmp_path):
    said = re.findall(r"tp (\d), pp (\d) and (\d)", on_two_ranks(tmp_path, BLOCKS[1]))
    assert said == [("2", "2", "1")] * 2


@pytest.mark.contract
def test_the_checkpoint_example_and_the_commands_on_what_it_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = on_two_ranks(tmp_path, BLOCKS_OF_CHECKPOINTS[1])
    assert said.count("saved iter_0000010") == 2
    assert sorted(re.findall(r"rank (\d) goes on from step 10: .*?(tp 2 -> 1)", said)) == [
        ("0", "tp 2 -> 1"),
        ("1", "tp 2 -> 1"),
    ]
    commands = re.findall(r"`megapg (checkpoint \w+ checkpoints)`", README)
    assert len(commands) == 2
    for command in commands:
        assert "10" in megapg(command)[1]


@pytest.mark.contract
def test_the_training_script_of_the_page_on_checkpoints(tmp_path):
    said = [on_two_ranks(tmp_path, BLOCKS_OF_CHECKPOINTS[0]) for _ in range(2)]
    steps = [sorted(set(re.findall(r"rank 0 step (\d) loss \d\.\d{4}", each))) for each in said]
    assert steps == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")) == [
        "iter_0000006",
        "iter_0000008",
    ]


def test_the_example_of_suspending(tmp_path):
    said = on_two_ranks(tmp_path, BLOCKS_OF_SESSIONS[0])
    assert said.count("2 communicators suspended by recreate") == 2
    assert said.count("  Layer.tp_group") == 2
    assert sorted(re.findall(r"rank (\d) goes on: 2", said)) == ["0", "1"]


@pytest.mark.contract
def test_the_example_of_weights_from_one_session_to_another(tmp_path):
    said = on_two_ranks(tmp_path, BLOCKS_OF_SESSIONS[1])
    assert sorted(re.findall(r"rank (\d) serves stage (\d)", said)) == [("0", "0"), ("1", "1")]


@pytest.mark.contract
def test_the_example_of_groups_of_megatrons(tmp_path):
    said = on_two_ranks(tmp_path, BLOCKS_OF_SESSIONS[2])
    assert said.count("tp (0, 1)") == 6
    assert sorted(re.findall(r"generation (\d) closed", said)) == ["1", "1", "2", "2", "3", "3"]


def test_the_doctor_as_shown():
    assert "$ megapg doctor\n" in SESSIONS
    code, said = megapg("doctor")
    assert code in (0, 1), said
    assert "a single process" in said


def megapg(command):
    ended = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    return ended.exit_code, ended.output


def test_unit_test_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(BLOCKS[2])
    as_script(tmp_path / "example.py")


def test_real_ranks_example(tmp_path):
    (tmp_path / "example.py").write_text(BLOCKS[3])
    done = captured([sys.executable, "example.py"], timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_commands_and_the_error_are_real():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for target in re.findall(r"^\$ make (\S+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    # test_bad_input.py checks this message on real ranks, here it has the README's values.
    from megapg.rendezvous.rendezvous import _mismatch

    came = {"0": "1", "1": "2", "2": "1", "3": "1"}
    shown = _mismatch("default", {"tp": came, "expt_tp": came})
    assert f"LayoutMismatchError: {shown}" in README


def test_the_codemods_commands(tmp_path):
    commands = re.findall(r"^\$ megapg ((?:check|migrate) .*)$", README, re.M)
    assert [command.split()[0] for command in commands] == ["check", "migrate", "migrate"]
    file = tmp_path / "src" / "place.py"
    file.parent.mkdir()
    file.write_text(
        "from megatron.core import mpu\n\n\ndef rank():\n"
        "    return mpu.get_tensor_model_parallel_rank()\n"
    )
    me = ("-c", "user.name=me", "-c", "user.email=me@home")
    for step in (("init", "-q"), ("add", "src"), ("commit", "-q", "-m", "Before")):
        captured(["git", *me, *step], cwd=tmp_path, check=True)

    check, dry, write = (cli.megapg(*command.split(), at=tmp_path) for command in commands)
    assert check.returncode == 1
    assert b'pg.rank("tp")' in check.stdout
    assert dry.returncode == 1
    assert b'+    pg = megapg.resolve(pg_collection)\n+    return pg.rank("tp")\n' in dry.stdout
    assert write.returncode == 0
    assert "mpu" not in file.read_text()
