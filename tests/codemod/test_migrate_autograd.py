"""Autograd functions that are given a collection run, forward and back, whoever applies them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trees import write

from megapg.megatron import published
from megapg.migrate.config import Config
from megapg.migrate.engine import migrate
from megapg.testing import fake_collection

_CODE = """\
import torch
from megatron.core import mpu


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by=1):
        return x * by * mpu.get_tensor_model_parallel_world_size()

    @staticmethod
    def backward(ctx, grad):
        return grad * mpu.get_tensor_model_parallel_rank(), None


def use(model, x):
    return Scale.apply(x, 5)
"""


def _grown(apply: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
    """What comes out, and what the gradient of what went in is then."""
    given = torch.tensor(1.0, requires_grad=True)
    out = apply(given)
    out.backward()
    assert given.grad is not None
    return out.item(), given.grad.item()


def test_it_runs_on_what_it_is_applied_to(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": _CODE})
    (file,) = migrate([tmp_path], Config(tmp_path, versions=(16,))).files
    made: dict[str, Any] = {}
    exec(compile(file.after, "a.py", "exec"), made)
    with fake_collection(tp=4, world_size=4, rank=3) as pg:
        model = torch.nn.Linear(1, 1)
        model.pg_collection = pg
        assert _grown(lambda one: made["use"](model, one)) == (20, 3)


@pytest.mark.filterwarnings("ignore::megapg.errors.GlobalGroupsWarning")
def test_who_applies_it_as_before_has_the_globals(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": _CODE})
    (file,) = migrate([tmp_path], Config(tmp_path, versions=(16,))).files
    made: dict[str, Any] = {}
    exec(compile(file.after, "a.py", "exec"), made)
    with fake_collection(tp=4, world_size=4, rank=3) as pg, published(pg):
        assert _grown(lambda one: made["Scale"].apply(one)) == (4, 3)
        assert _grown(lambda one: made["Scale"].apply(one, 2)) == (8, 3)
