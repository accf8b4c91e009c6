"""Where the report says to pass a collection, and ``--thread-from``, which begins there."""

from __future__ import annotations

from pathlib import Path

import pytest
from trees import write
from typer.testing import CliRunner, Result

from megapg.cli.migrate import app
from megapg.migrate.config import load_config
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Migration

GROUPS = """\
from megatron.core import mpu


def rank():
    return mpu.get_tensor_model_parallel_rank()


def size():
    return mpu.get_tensor_model_parallel_world_size()


class Gather:
    def __init__(self):
        self.first = rank() == 0

    def group(self):
        return mpu.get_data_parallel_group()
"""
TRAIN = """\
from groups import Gather, rank, size


def step():
    return rank() + size()


def evaluate():
    return size()


def train():
    gather = Gather()
    return step(), gather


if __name__ == "__main__":
    train()
    train()
"""
TESTS = "from groups import size\n\n\ndef test_size():\n    assert size() == 1\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {"groups.py": GROUPS, "train.py": TRAIN, "tests/test_groups.py": TESTS}
    write(tmp_path, {"pyproject.toml": "", **files})
    return tmp_path


def run(tree: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["migrate", str(tree), "--from-core", "0.16", *options])


def starts(tree: Path) -> list[tuple[str, tuple[str, ...], int]]:
    found: Migration = migrate([tree], load_config(tree, "0.16"))
    return [(each.function, each.places, each.serves) for each in found.starts]


def test_each_start_counts_what_it_alone_would_end(tree: Path) -> None:
    # rank() is called by step() and by Gather: one of these alone would end nothing of it.
    assert starts(tree) == [
        ("size", ("train.py:5", "train.py:9"), 1),
        ("Gather", ("train.py:13",), 1),
    ]
    (tree / "train.py").write_text(TRAIN.replace("return rank() + size()", "return size()"))
    assert starts(tree)[0] == ("Gather", ("train.py:13",), 2)
    (tree / "train.py").unlink()
    assert ("size", (), 1) in starts(tree)
    # What is in a test, and who calls it there, is not told.
    helper = (
        "from megatron.core import mpu\n\n\ndef mine():\n    return mpu.get_data_parallel_rank()\n"
    )
    (tree / "tests" / "helper.py").write_text(helper)
    assert [function for function, _, _ in starts(tree)] == ["Gather", "size"]


def test_the_report_names_them(tree: Path) -> None:
    printed = run(tree).stderr
    assert "pass pg_collection= here, and so many uses no longer turn to the globals" in printed
    (row,) = (line for line in printed.splitlines() if "size (groups.py:8)" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][1:] == [
        "1",
        "train.py:5, train.py:9",
    ]


def test_thread_from_hands_the_collection_to_all_that_is_called(tree: Path) -> None:
    result = run(tree, "--thread-from", "train", "--write")
    assert result.exit_code == 0, result.output
    text = (tree / "train.py").read_text()
    assert "def train(*, pg_collection=None):\n    gather = Gather(pg_collection=" in text
    assert "return step(pg_collection=pg_collection), gather" in text
    assert "return rank(pg_collection=pg_collection) + size(pg_collection=pg_collection)" in text
    assert "def evaluate():\n    return size()" in text
    # What is left to be done by hand.
    assert text.endswith('if __name__ == "__main__":\n    train()\n    train()\n')


def test_what_it_leaves_is_one_place(tree: Path) -> None:
    for name in ("groups.py", "train.py"):
        path = tree / name
        path.write_text(path.read_text().replace("def evaluate():\n    return size()\n\n\n", ""))
    config = load_config(tree, "0.16")
    found = migrate([tree], type(config)(**{**vars(config), "thread_from": ("train",)}))
    assert [(each.function, each.places, each.serves) for each in found.starts] == [
        ("train", ("train.py:14", "train.py:15"), 3)
    ]


@pytest.mark.parametrize("name", ["nothing", "Gather.group", "tests"])
def test_a_function_that_can_hand_nothing_on_is_refused(tree: Path, name: str) -> None:
    result = run(tree, "--thread-from", name)
    assert result.exit_code == 2
    assert f"--thread-from {name}: no function or class of that qualified name" in result.stderr
