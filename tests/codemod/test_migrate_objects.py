"""What the objects of a class are asked, and what the methods of that class call: both of one
carrier.
"""

from __future__ import annotations

from pathlib import Path

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
