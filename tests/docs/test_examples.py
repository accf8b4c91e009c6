"""Run the examples of the README and of the guide's pages.

test_guide.py runs the commands of the pages about the codemod.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path

import commands as cli
import pytest
from processes import captured
from typer.testing import CliRunner

from megapg.errors import RankFailedError, WrongGroupError
from megapg.megatron import core_version
from megapg.megatron.core import installed_version
from megapg.testing import run_distributed
from megapg.tools.cli import app
from megapg.torch_private.meshes import can_mesh

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def shown(page, language="python"):
    """Return the blocks of a page in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


BLOCKS = shown("README.md")
OF_SESSIONS = shown("migration_guide/sessions.md")
OF_CHECKPOINTS = shown("migration_guide/checkpoints.md")
OF_WRONG_GROUPS = shown("migration_guide/wrong-group.md")
OF_TRAINING = shown("migration_guide/train.md")
OF_TENSOR_TYPES = shown("migration_guide/tensor-types.md")
# The first line of each block on the page "By hand" has its name.
BY_HAND = {
    re.match(r"# (\w+\.py)", block)[1]: block for block in shown("migration_guide/by-hand.md")
}
ON_TWO_RANKS = [name for name, source in BY_HAND.items() if "on two ranks" in source.split("\n")[0]]


def as_script(script, *arguments):
    """Run a program in this process, and return what it prints."""
    os.chdir(script.parent)
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue().replace(str(script), script.name)


def on_ranks(tmp_path, source, world_size=2, name="example.py", arguments=()):
    """Return what each rank prints; the ranks have imported torch and Megatron-core already."""
    script = tmp_path / name
    script.write_text(source)
    return run_distributed(partial(as_script, script, *arguments), world_size, deadline=200)


def on_two_ranks(tmp_path, source):
    return "".join(on_ranks(tmp_path, source))


def test_there_are_as_many_examples_as_tests_here():
    pages = (BLOCKS, OF_SESSIONS, OF_CHECKPOINTS, OF_WRONG_GROUPS, OF_TENSOR_TYPES)
    assert [len(page) for page in (*pages, OF_TRAINING)] == [4, 3, 3, 5, 1, 1]
    assert [*BY_HAND] == ["where_you_are.py", "see.py", "publish.py", "moved.py", *ON_TWO_RANKS[2:]]
    assert ON_TWO_RANKS[2:] == ["resolve.py", "at_hand.py", "pass.py", "shadow.py", "forbid.py"]


# --- the README, and the pages about sessions and checkpoints -------------------------------------


@pytest.mark.contract
def test_the_bug_is_an_error_without_published(tmp_path):
    """The losses are those of the table, which has the figures of Megatron-core 0.16.1."""
    published = "    with megapg.published(pg):"
    assert published in OF_WRONG_GROUPS[1]
    without = {
        line: re.sub(f"{re.escape(published)}.*", f"    {line}:", OF_WRONG_GROUPS[1])
        for line in ('with megapg.guard("off")', "if True")
    }
    for source, row in zip(
        (OF_WRONG_GROUPS[1], without['with megapg.guard("off")']), (0, 1), strict=True
    ):
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
    said = on_two_ranks(tmp_path, OF_CHECKPOINTS[1])
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
def test_the_program_of_the_page_on_training_goes_on_in_another_layout(tmp_path):
    (source,) = OF_TRAINING
    assert len(source.splitlines()) <= 100
    commands = re.findall(
        r"small_gpt\.py (.*)", "".join(shown("migration_guide/train.md", "console"))
    )
    assert commands == ["2 2 4", "1 2 4"]

    def losses(folder, arguments):
        folder.mkdir(exist_ok=True)
        said = on_ranks(folder, source, 4, "small_gpt.py", arguments.split())
        found = [re.findall(r"step (\d), loss (\d\.\d{4})", each) for each in said]
        assert found[1:] == found[:1] * 3
        return {int(step): float(loss) for step, loss in found[0]}

    first, second = (losses(tmp_path / "resumed", command) for command in commands)
    whole = losses(tmp_path / "whole", "2 2 8")
    assert [*first, *second] == [*whole] == [*range(8)]
    assert {**first, **second} == pytest.approx(whole, abs=2e-4)
    assert whole[7] < whole[4] < whole[0]


@pytest.mark.contract
def test_the_training_script_of_the_page_on_checkpoints(tmp_path):
    said = [on_two_ranks(tmp_path, OF_CHECKPOINTS[0]) for _ in range(2)]
    steps = [sorted(set(re.findall(r"rank 0 step (\d) loss \d\.\d{4}", each))) for each in said]
    assert steps == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*")) == [
        "iter_0000006",
        "iter_0000008",
    ]
    (converted,) = on_ranks(tmp_path, OF_CHECKPOINTS[2], 1)
    assert converted == "iteration 8 is in the folder one-rank\n"
    (row,) = json.loads(megapg(f"checkpoint ls {tmp_path / 'one-rank'} --json")[1])
    assert row["layout"]["world_size"] == 1


def test_the_example_of_suspending(tmp_path):
    said = on_two_ranks(tmp_path, OF_SESSIONS[0])
    assert said.count("2 communicators suspended by recreate") == 2
    assert said.count("  Layer.tp_group") == 2
    assert sorted(re.findall(r"rank (\d) goes on: 2", said)) == ["0", "1"]


@pytest.mark.contract
def test_the_example_of_weights_from_one_session_to_another(tmp_path):
    said = on_two_ranks(tmp_path, OF_SESSIONS[1])
    assert sorted(re.findall(r"rank (\d) serves stage (\d)", said)) == [("0", "0"), ("1", "1")]


@pytest.mark.contract
def test_the_example_of_groups_of_megatrons(tmp_path):
    said = on_two_ranks(tmp_path, OF_SESSIONS[2])
    assert said.count("tp (0, 1)") == 6
    assert sorted(re.findall(r"generation (\d) closed", said)) == ["1", "1", "2", "2", "3", "3"]


def test_the_doctor_as_shown():
    assert "$ megapg doctor\n" in "".join(shown("migration_guide/sessions.md", "console"))
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


def test_the_error_is_real():
    # test_bad_input.py checks this message on real ranks, here it has the README's values.
    from megapg.rendezvous.different_settings import text_of
    from megapg.rendezvous.error_texts import BY_NUMBER

    came = {0: "1", 1: "2", 2: "1", 3: "1"}
    error = text_of("default", {"tp": came, "expt_tp": came}, BY_NUMBER)
    assert f"LayoutMismatchError: {error}" in README


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


# --- the pages "Find a wrong group" and "Types of tensors" ----------------------------------------

WRONG_GROUPS = "migration_guide/wrong-group.md"


@pytest.mark.contract
def test_the_error_is_the_one_on_the_page(tmp_path):
    error = shown(WRONG_GROUPS, "text")[0]
    for rank, printed in enumerate(on_ranks(tmp_path, OF_WRONG_GROUPS[0], name="evaluate.py")):
        expected = error.replace("ranks (0,)", f"ranks ({rank},)")
        assert printed.split() == expected.split()


@pytest.mark.contract
def test_parity_finds_the_group_of_the_page(tmp_path):
    """The table is on the page. With the correct group, all layouts agree."""
    script = tmp_path / "train.py"
    command = shlex.split(shown(WRONG_GROUPS, "console")[0].removeprefix("$ "))[1:]
    rows = [line.split() for line in shown(WRONG_GROUPS, "text")[1].splitlines()]
    for text, code in ((OF_WRONG_GROUPS[2], 1), (OF_WRONG_GROUPS[2].replace("pg.dp", "pg.tp"), 0)):
        script.write_text(text)
        ran = captured([sys.executable, "-m", "megapg", *command], cwd=tmp_path, timeout=240)
        assert ran.returncode == code, ran.stdout + ran.stderr
        printed = [line.split() for line in ran.stdout.splitlines()]
        if code and core_version() == (0, 16, 1):
            assert [row for row in rows if row in printed] == rows


@pytest.mark.contract
def test_parity_in_a_test(tmp_path):
    script = tmp_path / "agree.py"
    script.write_text(OF_WRONG_GROUPS[3])
    ran = captured([sys.executable, str(script)], cwd=tmp_path, timeout=240)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.contract
def test_the_traffic_of_a_model(tmp_path):
    (printed,) = on_ranks(tmp_path, OF_WRONG_GROUPS[4], world_size=1, name="traffic.py")
    table = shown(WRONG_GROUPS, "text")[-1]
    assert printed.split() == table.split()


@pytest.mark.contract
@pytest.mark.skipif(not can_mesh(), reason="meshes take torch 2.13")
def test_a_collection_is_the_mesh_of_the_type_checker(tmp_path):
    (printed,) = on_ranks(tmp_path, OF_TENSOR_TYPES[0], world_size=1, name="mlp.py")
    assert printed == shown("migration_guide/tensor-types.md", "text")[0]


# --- the page "By hand" ---------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    for name, source in BY_HAND.items():
        (tmp_path / name).write_text(source)
    return tmp_path


def test_what_check_says_of_the_first_example(directory):
    page = (ROOT / "migration_guide/by-hand.md").read_text()
    (command, ratchet) = re.findall(r"^\$ megapg (check .+)$", page, re.M)

    def check(arguments):
        return cli.megapg(*arguments.split(), at=directory, NO_COLOR="1")

    said = check(command)
    assert said.returncode == 1
    assert 'mpu.get_data_parallel_rank() -> pg.rank("dp")' in said.stdout.decode()
    assert (
        "mpu.get_data_parallel_group(with_context_parallel=True) -> pg.dp_cp"
        in said.stdout.decode()
    )
    assert check(ratchet).returncode == 0
    again = ratchet.replace(" --update-baseline", "")
    assert check(again).returncode == 0
    with (directory / "where_you_are.py").open("a") as file:
        file.write("\n\nprint(mpu.get_tensor_model_parallel_group())\n")
    assert check(again).returncode == 1


def what_stages_print(directory):
    """Run each example as a program on a rank; return its output."""
    sys.path.insert(0, str(directory))
    return {name: as_script(directory / name) for name in ON_TWO_RANKS}


@pytest.mark.contract
def test_every_stage_runs(directory):
    said, _ = run_distributed(partial(what_stages_print, directory), 2)
    assert [*said] == ON_TWO_RANKS

    reads = json.loads((directory / "reads.json").read_text())
    places = {(Path(read["file"]).name, read["function"], read["replacement"]) for read in reads}
    # From 0.19 on, it also counts ranks that share weights by generalised tensor parallelism.
    of_data = "getters.data_rank(pg)" if installed_version() >= (0, 19) else 'pg.rank("dp")'
    assert ("where_you_are.py", "my_share", of_data) in places
    assert ("where_you_are.py", "speaks", 'pg.rank("tp")') in places
    assert of_data[:12] in said["see.py"]  # the table breaks longer text
    assert "dp_cp" in said["shadow.py"]
    assert re.search(r"where_you_are\.py:\d+: my_share reads get_data_parallel_", said["forbid.py"])
