"""Run the examples of the migration guide."""

import contextlib
import io
import json
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
from commands import megapg

from megapg.megatron.core import installed_version
from megapg.testing import run_distributed

GUIDE = (Path(__file__).parents[2] / "migration_guide" / "by-hand.md").read_text()
# name -> source; the first line of each block has the name.
FILES = {
    re.match(r"# (\w+\.py)", block)[1]: block
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.S)
}
ON_TWO_RANKS = [name for name, source in FILES.items() if "on two ranks" in source.split("\n")[0]]


@pytest.fixture
def directory(tmp_path):
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    return tmp_path


def test_all_examples_are_here():
    assert [*FILES] == ["where_you_are.py", "see.py", "publish.py", "moved.py", *ON_TWO_RANKS[2:]]
    assert ON_TWO_RANKS[2:] == ["resolve.py", "at_hand.py", "pass.py", "shadow.py", "forbid.py"]


def test_what_check_says_of_the_first_example(directory):
    (command, ratchet) = re.findall(r"^\$ megapg (check .+)$", GUIDE, re.M)

    def check(arguments):
        return megapg(*arguments.split(), at=directory, NO_COLOR="1")

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
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    said = {}
    for name in ON_TWO_RANKS:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(name, run_name="__main__")
        said[name] = printed.getvalue()
    return said


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
