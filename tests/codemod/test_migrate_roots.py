"""Why nobody passes a collection to what turns to the globals, and that it says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from trees import write
from typer.testing import CliRunner

from megapg.cli.app import app
from megapg.migrate.config import Config
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Why

_READ = "mpu.get_tensor_model_parallel_rank()"
_F = f"def f():\n    return {_READ}\n"
_OF_A = f"    def f(self):\n        return {_READ}\n"

WHYS = {
    Why.UNCALLED: _F,
    Why.HANDED_ON: f"{_F}\n\ndef g(run):\n    run(f)\n",
    Why.MODULE_LEVEL: f"{_F}\n\nf()\n",
    Why.HAS_GROUPS: f"{_F}\n\ndef g(model):\n    f(**model.x)\n",
    Why.MAY_BE_NONE: f"def f(pg_collection=None):\n    return {_READ}\n",
    Why.LAMBDA: f"f = lambda: {_READ}\n",
    Why.INSIDE: f"import library\n\n\ndef f():\n    def g(self):\n        return {_READ}\n\n"
    "    library.Loader.g = g\n",
    Why.ANY_KEYWORD: f"def f(**kwargs):\n    return {_READ}\n",
    Why.DECORATED: f"import functools\n\n\n@functools.cache\n{_F}",
    Why.SEVERAL: f"{_F}\n\n{_F}",
    Why.NAMED_SO: f"def f():\n    pg_collection = {_READ}\n    return pg_collection\n",
    Why.INSPECTED: f"import torch\n\n\n{_F}\n\ng = torch.jit.script(f)\n",
    Why.NO_CONSTRUCTOR: f"class A:\n{_OF_A}",
    Why.METHOD: "class A:\n    def __init__(self):\n        self.x = 1\n\n    @classmethod\n"
    f"{_OF_A.replace('self', 'cls')}",
    Why.BASE_OUTSIDE: f"import library\n\n\nclass A(library.Base):\n    def __init__(self):\n"
    f"        self.x = {_READ}\n",
    Why.AUTOGRAD: "import torch\n\n\nclass A(torch.autograd.Function):\n    @staticmethod\n"
    f"    def forward(ctx, *xs):\n        return xs[0] * {_READ}\n\n\ndef g(x):\n    A.apply(x)\n",
    Why.CLASS_DECORATED: "import library\n\n\n@library.remote\nclass A:\n    def __init__(self):\n"
    f"        self.x = {_READ}\n",
    Why.MAKES_GROUPS: f"def h():\n    mpu.initialize_model_parallel()\n    g()\n\n\n"
    f"def g():\n    h()\n    return {_READ}\n",
    Why.FAKES: f"{_F}\n\ndef g():\n    mpu.set_tensor_model_parallel_rank(0)\n    f()\n",
}


@pytest.mark.parametrize("why", WHYS, ids=lambda why: why.name.lower())
def test_why_a_function_turns_to_the_globals(tmp_path: Path, why: Why) -> None:
    write(tmp_path, {"a.py": f"from megatron.core import mpu\n\n\n{WHYS[why]}"})
    found = migrate([tmp_path], Config(tmp_path, versions=(16,)))
    assert {each.why for each in found.served} == {why}
    assert {root.why for root in found.roots} == {why}


def test_it_is_said_on_the_screen(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "a.py": f"from megatron.core import mpu\n\n\n{_F}"})
    asked = ["explain", f"{tmp_path / 'a.py'}:5", "--from-core", "0.16"]
    said = CliRunner().invoke(app, asked)
    assert said.exit_code == 0, said.output
    assert "where its callers end: nobody calls it" in said.output
    said = CliRunner().invoke(app, ["migrate", str(tmp_path), "--from-core", "0.16"])
    assert "nobody calls it" in said.output
