"""A singleton of ranks that the first caller makes from the globals, inside a load of a model."""

from megatron.core import mpu

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}
READER = "__init__"
GIVEN = "load_checkpoint"


class Ranks:
    made = None

    def __init__(self):
        self.tensor = mpu.get_tensor_model_parallel_rank()

    @classmethod
    def get(cls):
        cls.made = cls.made or cls()
        return cls.made


def load_checkpoint(model, pg_collection):
    Ranks.made = None  # a process loads once; this one runs several times
    return f"{model}/mp_rank_{Ranks.get().tensor:02d}"


def program(pg):
    return load_checkpoint("policy", pg)
