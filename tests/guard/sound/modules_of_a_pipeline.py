"""A vision module and a language model keep their groups in Megatron-core's own collection."""

from megatron.core import mpu

import megapg
from megapg.megatron import to_modules

LAYOUTS = {"first": {"tp": 2}, "second": {}}
CORES = ("0.17", "0.18", "0.19")


class Mimo:
    def __init__(self, collections):
        self.pg_collection = collections

    def sizes(self):
        return [self.size(name) for name in ("vision", "language")]

    def size(self, name):
        with megapg.published(self.pg_collection[name]):
            return tensor_size()


def tensor_size():
    return mpu.get_tensor_model_parallel_world_size()


def program(vision, language):
    modules = to_modules({"vision": vision, "language": language}, "language")
    assert Mimo(modules).sizes() == [2, 1]
