"""The functions that ``megapg migrate --runtime vendored`` copies into a project."""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from recording import initialised_megatron, recorded_megatron
from trees import write
from typer.testing import CliRunner
from vendored import EVERYTHING, copied

from megapg.megatron import getters
from megapg.megatron.vendored.process_groups import MissingGroupError, groups_of, resolve
from megapg.migrate.runtime import text_of
from megapg.testing import megatron_on_cpu, run_distributed
from megapg.tools.cli.migrate import app
from megapg.upstream.mapping import OF_SEVERAL_PIPELINES

NAME = "process_groups.py"


@pytest.mark.parametrize("names", [[], EVERYTHING], ids=["least", "most"])
def test_it_is_typed_and_formatted(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / NAME).write_text(text_of(names))
    ast.parse(text_of(names), feature_version=(3, 8))
    settings = Path(__file__).parents[2] / "pyproject.toml"
    types = ["mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache"]
    for command in (
        *([types] if names else []),  # the rest is a part of it
        ["ruff", "check", "--config", settings],
        ["ruff", "format", "--check", "--config", settings],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command, tmp_path / NAME], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_it_imports_neither_torch_nor_megatron(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text_of(EVERYTHING))
    code = (
        "import process_groups as p, sys; print(sorted({n.partition('.')[0] for n in sys.modules}"
        " & {'torch', 'megatron', 'megapg'}), p.is_initialized(None), p.resolve().passed)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "[] False None\n"


class Core:
    """A collection like Megatron-core's own."""

    def __init__(self, **groups: object) -> None:
        vars(self).update(groups)


Core.__name__ = Core.__qualname__ = "ProcessGroupCollection"


class Group:
    """A group of two ranks."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 1


def test_what_is_passed_is_asked_and_nothing_else() -> None:
    group = Group()
    pg = resolve(Core(tp=group, embd=None))
    assert resolve(pg) is pg
    assert (pg.tp, pg.size("tp"), pg.rank("tp"), pg.embd) == (group, 2, 1, None)
    for read_it in (lambda: pg.dp, lambda: pg.size("dp"), lambda: pg.pos_embd):
        with pytest.raises(MissingGroupError, match="the ProcessGroupCollection passed as pg_coll"):
            read_it()
    assert not hasattr(pg, "pos_embd")
    with pytest.raises(MissingGroupError, match="has no group embd"):
        pg.size("embd")
    with pytest.raises(AttributeError, match="no attribute 'tensor'"):
        pg.tensor  # noqa: B018


@pytest.mark.contract
def test_where_nothing_is_initialised_the_error_is_an_assertion_as_megatrons() -> None:
    with recorded_megatron(0, 2):
        pg = resolve(None)
        for read_it in (lambda: pg.tp, lambda: pg.size("tp"), lambda: pg.ranks("mp")):
            with pytest.raises(AssertionError):
                read_it()
        assert getattr(pg, "tp", None) is None
        assert not copied().is_initialized(None)


class Wrapper:
    def __init__(self, module: object) -> None:
        self.module = module


class Failing:
    """Has a property that must not be called."""

    @property
    def model(self) -> object:
        raise RuntimeError("loads from disk")


def test_a_model_is_searched_from_the_outside_in() -> None:
    tp, dp = Group(), Group()
    inner, outer = torch.nn.Linear(1, 1), torch.nn.Sequential()
    vars(inner)["pg_collection"] = Core(tp=tp, dp=dp)
    outer.append(inner)
    vars(outer)["pg_collection"] = Core(tp=tp)
    wrapped: Any = [Wrapper(Wrapper(outer))]
    assert groups_of(wrapped, "tp").passed is vars(outer)["pg_collection"]
    assert groups_of(wrapped, "dp").passed is vars(inner)["pg_collection"]
    assert groups_of(wrapped, "ep").passed is None
    assert groups_of(Core(tp=tp), "dp").passed is not None
    for nothing in (None, Failing(), 3, resolve(None)):
        assert groups_of(nothing, "tp").passed is None
    both, other = torch.nn.ModuleList([outer, torch.nn.Linear(1, 1)]), Group()
    vars(both[1])["pg_collection"] = Core(tp=other, dp=dp)
    for needs in (("tp",), ()):  # the models have different groups
        assert groups_of(both, *needs).passed is None
    assert groups_of(both, "dp").passed is vars(inner)["pg_collection"]
    assert groups_of([*both], "tp").passed is vars(outer)["pg_collection"]  # two chunks
    holding = Wrapper(outer)
    vars(holding)["pg_collection"] = resolve(None)  # stored before there was a model
    assert groups_of(holding, "tp").passed is vars(outer)["pg_collection"]


def test_a_part_of_another_layout_is_not_completed_by_the_globals() -> None:
    holder = SimpleNamespace()
    with initialised_megatron(3, 8, 2):
        tp = dist.new_group([0, 1, 2, 3])
        holder.pg_collection = Core(tp=tp)
        view = groups_of(holder, "tp", "dp")  # nothing is read yet
        for ask in (lambda: view.dp, lambda: view.rank("tp"), lambda: view.size("dp")):
            with pytest.raises(RuntimeError, match="their tp has other ranks"):
                ask()
        inside = SimpleNamespace(pg_collection=Core(tp=dist.new_group([2, 3]), dp=tp))
        holder.module = inside  # also with another layout
        with pytest.raises(RuntimeError, match="their tp has other ranks"):
            _ = groups_of(holder, "dp").dp
        for same in (tp, dist.new_group([0, 1, 2, 3])):
            inside.pg_collection = Core(tp=same, dp=tp)
            assert groups_of(holder, "dp").passed is inside.pg_collection
        del holder.module
        holder.pg_collection = Core(tp=dist.new_group([2, 3]))  # the same ranks as in the globals
        assert groups_of(holder, "dp").ranks("dp") == (1, 3, 5, 7)
        dist.new_group([1, 2])  # torch reports this group's ranks for NON_GROUP_MEMBER
        for nothing in (None, dist.GroupMember.NON_GROUP_MEMBER, tp):
            if nothing is tp:
                dist.destroy_process_group(tp)
            holder.pg_collection = Core(tp=nothing)
            assert groups_of(holder, "dp").ranks("dp") == (1, 3, 5, 7)


GATHERS = """\
import torch
import torch.distributed as dist
from megatron.core import mpu


def gathered(value):
    shape = [value.size(0) * mpu.get_tensor_model_parallel_world_size(), value.size(1)]
    found = mpu.get_global_memory_buffer().get_tensor(shape, value.dtype, "mpu")
    dist.all_gather_into_tensor(found, value, group=mpu.get_tensor_model_parallel_group())
    return found
"""


def generate_then_train(root: Path) -> list[float]:
    """Run a layer with sequence parallelism in both modes on one buffer."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    sys.path.insert(0, str(root))
    work = importlib.import_module("trainer.work")
    dist.init_process_group("gloo")
    pg = ProcessGroupCollection()
    pg.tp = dist.group.WORLD
    part = torch.full((1, 2), float(dist.get_rank() + 1))
    weight = torch.ones(2, requires_grad=True)
    with megatron_on_cpu():
        with torch.inference_mode():
            work.gathered(part, pg_collection=pg)
        (work.gathered(part, pg_collection=pg) @ weight).sum().backward()
    dist.destroy_process_group()
    assert weight.grad is not None
    return list(weight.grad.tolist())


@pytest.mark.contract
def test_who_generates_trains_on_in_the_same_buffer(tmp_path: Path) -> None:
    write(tmp_path, {"pyproject.toml": "", "trainer/__init__.py": "", "trainer/work.py": GATHERS})
    options = ["--runtime", "vendored", "--from-core", "0.16-0.17", "--write", "--allow-dirty"]
    result = CliRunner().invoke(app, ["migrate", str(tmp_path), *options])
    assert result.exit_code == 0, result.output
    assert not any("import megapg" in file.read_text() for file in tmp_path.rglob("*.py"))
    found = run_distributed(functools.partial(generate_then_train, tmp_path), 2)
    assert found == [[3.0, 3.0]] * 2


@pytest.mark.contract
def test_every_getter_that_is_written_is_there() -> None:
    own = {"MemoryBuffer", "MissingHybridGroupError", "owners_buffer", "shares_globals_buffer"}
    own |= {*OF_SEVERAL_PIPELINES.values()}  # for code that is changed by hand
    assert {name for name in getters.__all__ if name not in own} <= set(EVERYTHING)
    assert importlib.util.find_spec("megatron.core") is not None
    assert copied().__doc__


def test_stages_of_a_module_without_virtual_pipelines() -> None:
    """A fork's module may know stages, and no model chunks."""
    own = ModuleType("fork_mpu")
    vars(own).update(
        is_pipeline_first_stage=lambda: "asked", get_pipeline_model_parallel_group=lambda: None
    )
    copy = ModuleType("fork_groups")
    with mock.patch.dict(sys.modules, {"fork_mpu": own, "fork_groups": copy}):
        exec(text_of(["is_pipeline_first_stage", "hierarchical_groups"], "fork_mpu"), vars(copy))
        passed = copy.resolve(Core(pp=Group(), hcp=None))
        assert copy.is_pipeline_first_stage(passed) is False  # rank 1
        assert copy.hierarchical_groups(passed, check_initialized=False) is None
        assert copy.is_pipeline_first_stage(copy.resolve()) == "asked"
