"""What the objects of a class are asked, and what the methods of that class call: both of one
carrier.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from trees import write

from megapg.migrate.config import Config
from megapg.migrate.engine import migrate

REDUCING = """
import torch
from megatron.core import mpu


def _reduce(x):
    torch.distributed.all_reduce(x, group=mpu.get_tensor_model_parallel_group())
    return x


class Reduce(torch.autograd.Function):
    @staticmethod
    def symbolic(graph, x):
        return _reduce(x)

    @staticmethod
    def forward(ctx, x):
        return _reduce(x)

    @staticmethod
    def backward(ctx, g):
        return g


def reduce_from(x):
    return Reduce.apply(x)
"""
EMBEDDING = """
import torch
from megatron.core import mpu
from p.reducing import reduce_from


class Embedding(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.size = mpu.get_tensor_model_parallel_world_size()
        self.weight = torch.empty(n // self.size)

    def forward(self, x):
        return reduce_from(x)
"""


def migrated(root: Path, files: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The new texts, and what is said of callees."""
    write(root, {f"p/{name}": text.lstrip() for name, text in {"__init__.py": "", **files}.items()})
    found = migrate([root], Config(root, versions=(16,)))
    said = [f"{each.function}: {each.callee} {each.what}: {each.instead}" for each in found.callees]
    return {each.file[2:]: each.after.decode() for each in found.files}, said


def test_a_class_falls_back_whose_reduction_cant_be_handed_the_group(tmp_path: Path) -> None:
    new, said = migrated(tmp_path, {"reducing.py": REDUCING, "emb.py": EMBEDDING})
    assert 'self.size = megapg.resolve(None).size("tp")' in new["emb.py"]
    assert not said


def test_what_it_can_be_handed_is_handed_on(tmp_path: Path) -> None:
    reducing = REDUCING.replace("def symbolic(graph, x)", "def of_no_use(x)")
    new, said = migrated(tmp_path, {"reducing.py": reducing, "emb.py": EMBEDDING})
    assert 'reduce_from(x, pg_collection=megapg.groups_of(self, "tp"))' in new["emb.py"]
    assert not said


def test_one_that_had_a_collection_is_reported(tmp_path: Path) -> None:
    embedding = EMBEDDING.replace("self, n)", "self, n, pg_collection)").replace(
        "self.size = ", "self.pg_collection = pg_collection\n        self.size = "
    )
    _, said = migrated(tmp_path, {"reducing.py": REDUCING, "emb.py": embedding})
    assert [each.partition(": have")[0] for each in said] == ["Embedding.forward: reduce_from tp"]


BUILDER = """
from megatron.core import mpu
from p.train import get_model


def shard(data):
    return data[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


class Builder:
    def __init__(self):
        self.load()
        self.is_main = mpu.get_data_parallel_rank() == 0

    def load(self):
        model = get_model()
        self.KEPT = [model]
        self.data = shard([1, 2])
"""
TRAIN = "from p.net import Net\n\n\ndef get_model():\n    return Net()\n"
NET = "import torch\n\n\nclass Net(torch.nn.Module):\n    pass\n"


@pytest.mark.parametrize(
    ("kept", "asked", "handed"),
    [
        ("model", "groups_of(self, 'dp')", ", pg_collection=megapg.groups_of(self, 'dp')"),
        ("other", "resolve(None)", ""),  # the object has no model that others could ask
    ],
)
def test_what_sets_an_object_up_asks_what_the_others_ask(
    tmp_path: Path, kept: str, asked: str, handed: str
) -> None:
    files = {"train.py": TRAIN, "net.py": NET, "build.py": BUILDER.replace("KEPT", kept)}
    new, _ = migrated(tmp_path, files)
    text = new["build.py"].replace('"', "'")
    assert f"self.is_main = megapg.{asked}.rank('dp') == 0" in text
    assert f"self.data = shard([1, 2]{handed})" in text


EVALUATION = """
import torch
from megatron.core import mpu


def build_loader(data):
    return data[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]


def provider(data):
    shard = build_loader(data) if mpu.get_data_parallel_world_size() > 1 else data

    def metrics(model):
        return answers(model, shard)

    return metrics


def answers(model, data):
    total = torch.tensor([float(model(each)) for each in data])
    torch.distributed.all_reduce(total, group=mpu.get_data_parallel_group())
    return total
"""
# One that is handed the model only, and has no collection.
OTHER = "\n\ndef once(model, data):\n    return answers(model, data)\n"


def test_what_is_passed_a_model_asks_the_collection_of_its_caller(tmp_path: Path) -> None:
    new, said = migrated(tmp_path, {"evalu.py": EVALUATION + OTHER})
    text = new["evalu.py"]
    assert "return answers(model, shard, pg_collection=pg_collection)" in text
    assert "all_reduce(total, group=megapg.resolve(pg_collection).dp)" in text
    assert 'return answers(model, data, pg_collection=megapg.groups_of(model, "dp"))' in text
    assert not said


@pytest.mark.parametrize("other", ["by_name = {'a': answers}\n", "def all(*a): answers(*a)\n"])
def test_where_a_caller_can_pass_nothing_it_asks_the_model(tmp_path: Path, other: str) -> None:
    new, _ = migrated(tmp_path, {"evalu.py": f"{EVALUATION}\n\n{other}"})
    assert 'groups_of(model, "dp").dp' in new["evalu.py"]


def test_without_such_a_caller_it_asks_the_model(tmp_path: Path) -> None:
    text = EVALUATION.replace(
        "build_loader(data) if mpu.get_data_parallel_world_size() > 1 else data", "data"
    )
    new, _ = migrated(tmp_path, {"evalu.py": text})
    assert 'all_reduce(total, group=megapg.groups_of(model, "dp").dp)' in new["evalu.py"]


ATTENTION = """
from megatron.core import mpu


class Attention:
    def __init__(self, config, **kwargs):
        self.heads = config.heads // mpu.get_tensor_model_parallel_world_size()


class Dense:
    def __init__(self, config, **kwargs):
        self.width = config.width
"""
SPECIFIED = """
from megatron.core.transformer.spec_utils import ModuleSpec
from p.attention import Attention, Dense
from p.layer import LayerSubmodules

MOE = True
LAYER = LayerSubmodules(
    attention=ModuleSpec(module=Attention),
    mlp=Dense,
    router=Attention if MOE else Dense,
    unused=Attention,
)
"""
LAYER = """
from dataclasses import dataclass

from megatron.core import mpu
from megatron.core.transformer.spec_utils import build_module


@dataclass
class LayerSubmodules:
    attention: type
    mlp: type
    router: type


class Layer:
    def __init__(self, config, submodules, pg_collection=None):
        self.pg_collection = pg_collection
        self.attention = build_module(submodules.attention, config)
        self.mlp = build_module(submodules.mlp, config)
        self.router = build_module(submodules.router, config=config)

    def place(self):
        return mpu.get_tensor_model_parallel_rank()


class Last(Layer):
    def __init__(self, config, submodules, pg_collection=None):
        super().__init__(config, submodules, pg_collection=pg_collection)
"""


def test_parts_that_are_built_by_a_specification_are_named(tmp_path: Path) -> None:
    files = {"attention.py": ATTENTION, "specs.py": SPECIFIED, "layer.py": LAYER}
    _, said = migrated(tmp_path, files)
    takes = "have it take pg_collection, hand it on to there, and pass it pg_collection"
    assert said == [f"Layer.__init__: Attention tp: {takes}"] * 2
