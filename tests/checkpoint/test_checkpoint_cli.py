"""``megapg checkpoint ls | inspect | verify``: output, JSON and exit codes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
import torch
from damage import flip
from processes import captured
from test_checkpoint_contents import Runs
from typer.testing import CliRunner

from megapg.tools.cli.checkpoint import app


def run(*arguments: object, width: int = 80) -> Any:
    return CliRunner(env={"COLUMNS": str(width), "TERM": "dumb", "NO_COLOR": "1"}).invoke(
        app, [str(argument) for argument in arguments]
    )


def told(*arguments: object, code: int = 0) -> object:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints: 5 with a manifest, 4 without, 7 incomplete, 6 interrupted. The latest is 5."""
    root = tmp_path / "checkpoints"
    shutil.copytree(samples.with_manifest(), root)
    shutil.copytree(samples.by_megatron(4) / "iter_0000004", root / "iter_0000004")
    shutil.copytree(samples.by_megatron() / "iter_0000005", root / "iter_0000007")
    (root / "iter_0000007" / "metadata.json").unlink()
    (root / ".iter_0000006.partial-0a1b").mkdir()
    return root


@pytest.mark.contract
def test_ls(root: Path) -> None:
    found = told("ls", root)
    assert [(row["iteration"], row["complete"], row["latest"]) for row in found] == [
        (4, True, False),
        (5, True, True),
        (6, False, False),
        (7, False, False),
    ]
    assert [row["layout"] and row["layout"]["tp"] for row in found] == [2, 2, None, None]
    assert found[1]["size"] == sum(f.stat().st_size for f in (root / "iter_0000005").iterdir())
    assert found[2]["problem"]
    lines = run("ls", root).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    (latest,) = [line for line in lines if line.startswith("*")]
    assert latest.split()[1:3] == ["5", "complete"]
    assert "2 ranks tp2" in latest


def test_ls_of_little(tmp_path: Path, root: Path) -> None:
    assert told("ls", tmp_path / "checkpoints" / "iter_0000005") == []
    empty = tmp_path / "empty"
    empty.mkdir()
    assert told("ls", empty) == []
    assert "no checkpoints" in run("ls", empty).stdout
    # An unreadable checkpoint does not keep the others from the list.
    (root / "iter_0000004" / ".metadata").write_bytes(b"garbage")
    assert [row["problem"] for row in told("ls", root)][:2] == ["damaged", ""]


@pytest.mark.contract
def test_inspect(root: Path) -> None:
    found = told("inspect", root)
    assert found["path"] == str(root / "iter_0000005")
    assert found["iteration"] == 5
    assert found["world_size"] == found["layout"]["world_size"] == found["layout"]["tp"] == 2
    assert found["content_metadata"] == samples.CONTENT
    assert found["random_streams"] == [{"kind": "per_tp_pp", "key": "rng_state", "sizes": [1, 2]}]
    assert {"args", "iteration"} <= set(found["common"])
    tensors = {row.pop("key"): row for row in found["tensors"]}
    assert tensors["weight"] == {
        "shape": [8, 8],
        "dtype": "float32",
        "shards": 2,
        "cut": "2x1",
        "bytes": 256,
    }
    assert tensors["half.1"] == {
        "shape": [3],
        "dtype": "bfloat16",
        "shards": 1,
        "cut": "whole",
        "bytes": 6,
    }
    objects = {row["key"]: row["entries"] for row in found["objects"]}
    assert objects["rng_state"] == 2
    assert found["totals"]["tensors"] == 4
    assert found["totals"]["shards"] == 5
    assert found["totals"]["tensor_bytes"] == 256 + 32 + 6 + 6
    assert told("inspect", root / "iter_0000004")["path"].endswith("iter_0000004")

    lines = run("inspect", root).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    (weight,) = [line for line in lines if line.startswith("weight")]
    assert weight.split() == ["weight", "8x8", "float32", "2x1", "256", "bytes"]
    assert any("dp_reshardable" in line for line in lines)


def test_inspect_shortens_long_lists(tmp_path: Path) -> None:
    name = "decoder.layers.self_attention.linear_qkv.some_rather_long_name_of_a_weight"
    state = {f"{name}.{n}": torch.ones(2, 3) for n in range(30)}
    path = samples.save_plain(tmp_path / "plain", {**state, "step": 3})
    short, whole = run("inspect", path).stdout, run("inspect", path, "--all").stdout
    assert "... and 10 more; --all lists them" in short
    assert "more" not in whole
    assert short.count("2x3") == 20
    assert whole.count("2x3") == 30
    for text in (short, whole):
        assert max(map(len, text.splitlines())) <= 80
    assert len(told("inspect", path)["tensors"]) == 30
    # A long name is wrapped, never cut.
    assert f"{name}.29" in run("inspect", path, "--all", width=200).stdout
    assert "…" not in whole


def test_names_do_not_draw_on_the_terminal(tmp_path: Path) -> None:
    state = {"\x1b]0;mine\x07\x1b[31mred": torch.ones(1), "[bold]x[/bold]": 1}
    path = samples.save_plain(tmp_path / "plain", state)
    shown = run("inspect", path).stdout
    assert "\x1b" not in shown
    assert r"\x1b]0;mine\x07\x1b[31mred" in shown
    assert "[bold]x[/bold]" in shown


@pytest.mark.contract
def test_verify(root: Path) -> None:
    shutil.rmtree(root / "iter_0000007")
    result = run("verify", root)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["good", "iter_0000004:"],
        ["good", "iter_0000005:"],
    ]
    assert "no manifest" in lines[0]
    assert "no manifest" not in lines[1]

    flip(root / "iter_0000005" / "__1_0.distcp", 1000, bit=0)
    result = run("verify", root)
    assert result.exit_code == 1
    assert "bad iter_0000005" in result.stdout.replace("  ", " ")
    assert any(line.strip().startswith("__1_0.distcp: ") for line in result.stdout.splitlines())
    found = told("verify", root, code=1)
    assert [row["good"] for row in found] == [True, False]
    assert found[1]["problems"][0].startswith("__1_0.distcp: ")
    assert "damaged entries: " in result.stdout
    assert "the weights " in result.stdout
    assert found[1]["entries"]
    assert told("verify", root / "iter_0000004")[0]["good"]


@pytest.mark.contract
def test_a_copy_keeps_the_time_of_the_save(root: Path, tmp_path: Path) -> None:
    def times(where: Path) -> list[str]:
        return [row["saved_at"] for row in told("ls", where)][:2]

    before = times(root)
    for iteration in (4, 5):
        os.utime(root / f"iter_000000{iteration}" / "metadata.json", (10**9, 10**9))
    without_manifest, with_manifest = times(root)
    assert without_manifest.startswith("2001-09-09")
    assert with_manifest == before[1]


def test_what_does_not_exist_is_said(tmp_path: Path) -> None:
    for command in ("ls", "inspect", "verify"):
        assert run(command, tmp_path / "nope").stderr.strip().endswith("nope does not exist.")


def test_verify_names_what_is_incomplete(root: Path) -> None:
    result = run("verify", root)
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if "iter_0000007" in line]
    assert line.startswith("incomplete")
    assert "iter_0000006" not in result.stdout  # an interrupted save is not a checkpoint
    assert [row["good"] for row in told("verify", root, code=1)] == [True, True, False]


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_what_can_not_be_read_is_one_sentence_and_exit_code_2(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    where = [tmp_path / "nothing", tmp_path / "file"]
    if command != "ls":
        where += [tmp_path, tmp_path / "iter_0000001"]
    for path in where:
        result = run(command, path)
        assert result.exit_code == 2, result.output
        assert isinstance(result.exception, SystemExit)
        assert result.stderr.startswith("error ")
        assert str(path) in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert result.stdout == ""


def test_a_hostile_checkpoint(root: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    data = pickle.dumps(Runs(os.system, f"touch {canary}"))
    (root / "iter_0000004" / ".metadata").write_bytes(data)
    result = run("inspect", root / "iter_0000004")
    assert result.exit_code == 2
    assert "posix.system" in result.stderr
    assert run("verify", root / "iter_0000004").exit_code == 1
    assert run("ls", root).exit_code == 0
    assert not canary.exists()


@pytest.mark.parametrize("command", [None, "ls", "inspect", "verify"])
def test_help_teaches(command: str | None) -> None:
    result = run(*([command] if command else []), "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    if command:
        for word in ("Exit code 0", "Example: megapg checkpoint", "--json"):
            assert word in result.stdout


def test_arguments_that_make_no_sense() -> None:
    assert run("verify").exit_code == 2
    assert run("inspect", "a", "b").exit_code == 2
    assert run("nothing").exit_code == 2


WITHOUT_MEGATRON = """
import sys

from megapg.tools.cli.checkpoint import app

assert "torch" not in sys.modules
root, codes = sys.argv[1], []
whole = f"{root}/iter_0000004"
for arguments in (["inspect", whole, "--json"], ["verify", f"{root}/iter_0000005"]):
    try:
        app(arguments)
    except SystemExit as end:
        codes.append(end.code)
print(codes)

from megapg.checkpoint.contents import read_contents

print(read_contents(whole).common["args"].attention_backend)
assert not any(name.startswith("megatron") for name in sys.modules)
"""


@pytest.mark.contract
def test_in_a_process_of_its_own_without_megatron(root: Path) -> None:
    flipped = root / "iter_0000005" / "__0_0.distcp"
    flipped.write_bytes(flipped.read_bytes()[:-1])
    ran = captured(
        [sys.executable, "-c", WITHOUT_MEGATRON, str(root)],
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    inspected, *verified, codes, backend = ran.stdout.splitlines()
    assert json.loads(inspected)["iteration"] == 4
    assert any("__0_0.distcp: " in line for line in verified)
    assert codes == "[0, 1]"
    assert "Traceback" not in ran.stderr
    # The enum of Megatron-core appears by name.
    assert backend.startswith("megatron.core.transformer.enums.AttnBackend(")
