"""What the page "Find a wrong group" shows, run as it stands there."""

import contextlib
import io
import os
import re
import runpy
from functools import partial
from pathlib import Path

import pytest

from megapg.testing import run_distributed

PAGE = (Path(__file__).parents[2] / "migration_guide" / "wrong-group.md").read_text()
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
SHOWN = re.findall(r"```text\n(.*?)```", PAGE, re.S)

pytestmark = pytest.mark.contract


def as_script(script):
    os.chdir(script.parent)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue().replace(str(script), script.name)


def test_the_error_is_the_one_on_the_page(tmp_path):
    script = tmp_path / "evaluate.py"
    script.write_text(SCRIPTS[0])
    for rank, printed in enumerate(run_distributed(partial(as_script, script), 2, deadline=120)):
        shown = SHOWN[0].replace("ranks (0,)", f"ranks ({rank},)")
        assert printed.split() == shown.split()
