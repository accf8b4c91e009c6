"""Autograd functions that are given a collection run, forward and back, whoever applies them; those
that something else may notice are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trees import write

from megapg.megatron import forbid_global_reads, globals_policy, published
from megapg.migrate.config import Config
from megapg.migrate.edit.soundness import verify
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Why
from megapg.testing import fake_collection

CODE = """\
import torch
from megatron.core import mpu


def _scaled(x):
    return x * mpu.get_tensor_model_parallel_rank()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        return x * by * mpu.get_tensor_model_parallel_world_size()

    @staticmethod
    def backward(ctx, grad):
        return _scaled(grad) * mpu.get_tensor_model_parallel_world_size(), None


def scale(x):
    return Scale.apply(x, 5)


def use(model, x):
    return scale(x)
"""
FORWARD = "    def forward(ctx, x, by):\n"
RETURN = "        return _scaled(grad) * mpu.get_tensor_model_parallel_world_size(), None\n"
APPLIED = "    return Scale.apply(x, 5)\n"
STATIC = "    @staticmethod\n"
# What is in the way: in the source, what replaces what; or a test beside it.
IN_THE_WAY = {
    "a symbolic": (
        STATIC,
        f"{STATIC}    def symbolic(graph, x, by):\n        return x\n\n{STATIC}",
    ),
    "a setup_context": (STATIC, f"    setup_context = _scaled\n\n{STATIC}"),
    "a vmap": (STATIC, f"{STATIC}    def vmap(info, dims, x, by):\n        return x\n\n{STATIC}"),
    "a jvp": (STATIC, f"{STATIC}    def jvp(ctx, x, by):\n        return x\n\n{STATIC}"),
    "an apply": (STATIC, f"    apply = _scaled\n\n{STATIC}"),
    "any arguments": (FORWARD, "    def forward(ctx, x, by, *rest):\n"),
    "arguments by name": (FORWARD, "    def forward(ctx, x, by, *, z=1):\n"),
    "a collection already": (FORWARD, f"{FORWARD}        pg_collection = by\n"),
    "a decorator": (STATIC, f"    @torch.no_grad()\n{STATIC}"),
    "no static method": (STATIC, ""),
    "a class decorated": ("class Scale", "@print\nclass Scale"),
    "a context bound anew": (FORWARD, f"{FORWARD}        ctx = ctx or by\n"),
    "a count of the inputs": (RETURN, f"        a, b = ctx.needs_input_grad\n{RETURN}"),
    "gradients unseen": (RETURN, "        return tuple([_scaled(grad), None])\n"),
    "gradients unpacked": (RETURN, "        return *ctx.all(_scaled(grad)), None\n"),
    "a gradient too few": (RETURN, "        return (_scaled(grad),)\n"),
    "one gradient of two": (RETURN, "        return grad\n"),
    "no gradient": (RETURN, "        return _scaled(grad)\n"),
    "no end": (RETURN, f"        if ctx:\n    {RETURN}"),
    "apply by another name": (APPLIED, "    f = Scale.apply\n    return f(x, 5)\n"),
    "apply handed on": (APPLIED, "    return map(Scale.apply, [x], [5])\n"),
    "a list of arguments": (APPLIED, "    return Scale.apply(x, *[5])\n"),
    "arguments left out": (APPLIED, "    return Scale.apply(x)\n"),
    "forward called": (APPLIED, f"{APPLIED}\n\ndef g(x):\n    return Scale.forward(None, x, 5)\n"),
    "backward called": (APPLIED, f"{APPLIED}\n\ndef g(x):\n    return Scale.backward(None, x)\n"),
    "another name": (APPLIED, f"{APPLIED}\n\nOther = Scale\n"),
    "made by name": (APPLIED, f"{APPLIED}\n\ndef g(m):\n    return getattr(m, 'Scale')\n"),
    "a class made of it": (APPLIED, f"{APPLIED}\n\nclass Other(Scale):\n    pass\n"),
    "replaced": (APPLIED, f"{APPLIED}\n\nimport a\n\nsetattr(a, 'Scale', a.g)\n"),
}
PACKAGE = {"pyproject.toml": "", "pkg/__init__.py": "", "pkg/a.py": CODE}
BY_HAND = {
    "backward": "from pkg.a import Scale\n\n\ndef test():\n    Scale.backward(None, 1)\n",
    "forward": "from pkg import a\n\n\ndef test():\n    a.Scale.forward(None, 1, 2)\n",
    "a class": "from pkg.a import Scale\n\n\nclass Seen(Scale):\n    pass\n",
}


# Of one that takes one argument: what backward returns, and whether one gradient for certain.
RETURNED = {
    "        return grad\n": True,
    "        return (grad)\n": True,
    "        return None\n": True,
    "        return (grad,)\n": True,
    "        x, y = ctx.saved_tensors\n        x.mul_(y)\n        return x\n": True,
    "        x, y = ctx.saved_tensors\n        return x\n": False,
    "        x = ctx.all(grad)\n        x.count(1)\n        return x\n": False,
    "        x = ctx.one\n        x.mul_(grad)\n        x = (x,)\n        return x\n": False,
    "        from b import x\n\n        x.mul_(grad)\n        return x\n": False,
    "        return ctx.saved_tensors\n": False,
    "        return ctx.all(grad)\n": False,
    "        return\n": False,
    "        return ()\n": False,
    "        return (grad, *ctx.all(grad))\n": False,
}


def migrated(root: Path, files: Mapping[str, str]) -> str:
    found = migrate([write(root, files)], Config(root, versions=(16,)))
    assert [verify(each) for each in found.files] == [None] * len(found.files)
    return next(each.after.decode() for each in found.files if each.file.endswith("a.py"))


def grown(apply: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
    """What comes out, and what the gradient of what went in is then."""
    given = torch.tensor(1.0, requires_grad=True)
    out = apply(given)
    out.backward()
    assert given.grad is not None
    return out.item(), given.grad.item()


def test_it_runs_on_what_it_is_applied_to(tmp_path: Path) -> None:
    """Forward and back on a model's groups, and nothing is asked of the globals."""
    made: dict[str, Any] = {}
    exec(migrated(tmp_path, {"a.py": CODE}), made)
    with fake_collection(tp=4, world_size=8, rank=3) as pg, forbid_global_reads():
        model = SimpleNamespace(pg_collection=pg)
        assert grown(lambda one: made["use"](model, one)) == (20, 12)
        assert grown(lambda one: made["scale"](one, pg_collection=pg)) == (20, 12)


def test_it_runs_as_torch_decorates_it_with_further_gradients(tmp_path: Path) -> None:
    code = CODE.replace(FORWARD, f"    @amp.custom_fwd(device_type='cpu')\n{FORWARD}")
    code = code.replace("(ctx, grad):", "(ctx, grad, *_):").replace(
        "    def backward", "    @amp.custom_bwd(device_type='cpu')\n    def backward"
    )
    made: dict[str, Any] = {}
    exec(migrated(tmp_path, {"a.py": f"from torch import amp\n{code}"}), made)
    with fake_collection(tp=4, world_size=8, rank=3) as pg, forbid_global_reads():
        assert grown(lambda one: made["scale"](one, pg_collection=pg)) == (20, 12)


@pytest.mark.parametrize("returned", ["rest", "(grad, *rest)", "grad"])
def test_what_is_behind_the_named_gradients_may_be_many(tmp_path: Path, returned: str) -> None:
    code = (
        "import torch\nfrom megatron.core import mpu\n\n\nclass F(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n"
        "        return x * mpu.get_tensor_model_parallel_rank()\n\n    @staticmethod\n"
        f"    def backward(ctx, grad, *rest):\n        return {returned}\n\n\n"
        "def f(model, x):\n    return F.apply(x)\n"
    )
    assert ("F.apply(x, " in migrated(tmp_path, {"a.py": code})) is (returned == "grad")


def test_who_applies_it_as_before_has_the_globals(tmp_path: Path) -> None:
    """The None that is returned for the collection is dropped where none is passed."""
    made: dict[str, Any] = {}
    exec(migrated(tmp_path, {"a.py": CODE}), made)
    with fake_collection(tp=4, world_size=4, rank=3) as pg, published(pg), globals_policy("silent"):
        assert grown(lambda one: made["Scale"].apply(one, 2)) == (8, 12)
        assert grown(made["scale"]) == (20, 12)


def is_given_one(after: str) -> bool:
    return "Scale.apply(x, 5, " in after


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_it_stays_as_it_is_where_it_may_be_noticed(tmp_path: Path, what: str) -> None:
    assert is_given_one(migrated(tmp_path / "without", {"a.py": CODE}))
    assert CODE.count(IN_THE_WAY[what][0])
    after = migrated(tmp_path / "with", {"a.py": CODE.replace(*IN_THE_WAY[what], 1)})
    assert not is_given_one(after)
    assert "None, None" not in after
    assert "resolve(None)" in after


@pytest.mark.parametrize("what", BY_HAND)
def test_it_stays_as_it_is_where_a_test_calls_it_by_hand(tmp_path: Path, what: str) -> None:
    assert is_given_one(migrated(tmp_path / "without", PACKAGE))
    tests = {"tests/test_a.py": BY_HAND[what]}
    assert not is_given_one(migrated(tmp_path / "with", PACKAGE | tests))


def test_a_test_that_applies_it_changes_nothing(tmp_path: Path) -> None:
    applied = "from pkg import a\n\n\ndef test(x):\n    assert a.Scale.apply(x, 2) == 3\n"
    after = migrated(tmp_path / "both", PACKAGE | {"tests/test_a.py": applied})
    assert after == migrated(tmp_path / "alone", PACKAGE)
    assert is_given_one(after)


@pytest.mark.parametrize("returned", RETURNED)
def test_what_is_returned_is_one_gradient_for_certain(tmp_path: Path, returned: str) -> None:
    code = (
        "import torch\nfrom megatron.core import mpu\n\n\nclass F(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n"
        "        return x * mpu.get_tensor_model_parallel_rank()\n\n    @staticmethod\n"
        f"    def backward(ctx, grad):\n{returned}\n\ndef f(model, x):\n    return F.apply(x)\n"
    )
    after = migrated(tmp_path, {"a.py": code})
    assert ("F.apply(x, " in after) is (", None" in after) is RETURNED[returned]


def test_the_report_names_who_applies_one_and_passes_it_nothing(tmp_path: Path) -> None:
    """By hand, that is: whoever migrates by the tool has nothing then."""
    code = (
        "import megapg\nimport torch\nfrom megatron.core import mpu\n\n\n"
        "class F(torch.autograd.Function):\n    @staticmethod\n"
        "    def forward(ctx, x, pg_collection=None):\n"
        "        return x * megapg.resolve(pg_collection).rank('tp')\n\n\n"
        "def f(model, x):\n    pg = megapg.groups_of(model, 'tp')\n"
        "    return F.apply(x) * pg.rank('tp'), F.apply(x, pg)\n\n\n"
        "def g(model, x):\n    pg = megapg.groups_of(model, 'tp')\n"
        "    return F.apply(x, pg) * pg.rank('tp'), F.apply(*x) + mpu.get_nothing()\n"
    )
    found = migrate([write(tmp_path, {"a.py": code})], Config(tmp_path, versions=(16,)))
    assert [(each.function, each.what) for each in found.callees] == [("f", "tp")]


def test_why_one_turns_to_the_globals_is_why_its_callers_do(tmp_path: Path) -> None:
    asked = APPLIED.replace("5", "mpu.get_tensor_model_parallel_rank()")
    code = f"{CODE}\n\ndef uncalled(x):\n{asked}"
    found = migrate([write(tmp_path, {"a.py": code})], Config(tmp_path, versions=(16,)))
    assert {each.why for each in found.served} == {Why.UNCALLED}
