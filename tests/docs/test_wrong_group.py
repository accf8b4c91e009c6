"""Run the examples of the pages "Find a wrong group" and "Types of tensors"."""

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
from processes import captured

from megapg.megatron import core_version
from megapg.testing import run_distributed
from megapg.torch_private.meshes import can_mesh

GUIDE = Path(__file__).parents[2] / "migration_guide"


def shown(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (GUIDE / page).read_text(), re.S)


SOURCE = shown("wrong-group.md", "python")[2]
pytestmark = pytest.mark.contract


def as_script(script):
    os.chdir(script.parent)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue().replace(str(script), script.name)


def test_the_error_is_the_one_on_the_page(tmp_path):
    script = tmp_path / "evaluate.py"
    script.write_text(shown("wrong-group.md", "python")[0])
    for rank, printed in enumerate(run_distributed(partial(as_script, script), 2, deadline=120)):
        expected = shown("wrong-group.md", "text")[0].replace("ranks (0,)", f"ranks ({rank},)")
        assert printed.split() == expected.split()


def test_parity_finds_the_group_of_the_page(tmp_path):
    """The table is on the page. With the correct group, all layouts agree."""
    script = tmp_path / "train.py"
    command = shlex.split(shown("wrong-group.md", "console")[0].removeprefix("$ "))[1:]
    rows = [line.split() for line in shown("wrong-group.md", "text")[1].splitlines()]
    for text, code in ((SOURCE, 1), (SOURCE.replace("pg.dp", "pg.tp"), 0)):
        script.write_text(text)
        ran = captured([sys.executable, "-m", "megapg", *command], cwd=tmp_path, timeout=240)
        assert ran.returncode == code, ran.stdout + ran.stderr
        printed = [line.split() for line in ran.stdout.splitlines()]
        if code and core_version() == (0, 16, 1):
            assert [row for row in rows if row in printed] == rows


def test_parity_in_a_test(tmp_path):
    script = tmp_path / "agree.py"
    script.write_text(shown("wrong-group.md", "python")[3])
    ran = captured([sys.executable, str(script)], cwd=tmp_path, timeout=240)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(not can_mesh(), reason="meshes take torch 2.13")
def test_a_collection_is_the_mesh_of_the_type_checker(tmp_path):
    script = tmp_path / "mlp.py"
    script.write_text(shown("tensor-types.md", "python")[0])
    (printed,) = run_distributed(partial(as_script, script), 1, deadline=120)
    assert printed == shown("tensor-types.md", "text")[0]
