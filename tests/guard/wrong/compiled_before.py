"""A function was compiled while one layout was alive, and runs for a second one."""

import torch
from layouts import globals_of, open_session
from megatron.core import mpu

READER = "scaled"
GIVEN = "run"
WITHOUT_KIT = True


def scaled(values):
    return values * mpu.get_tensor_model_parallel_world_size()


def run(pg_collection, compiled):
    assert pg_collection.size("tp") == 2
    return compiled(torch.ones(2)).tolist()


def program():
    compiled = torch.compile(scaled, backend="eager")
    with globals_of(tp=1):
        compiled(torch.ones(2))
        with open_session(tp=2) as session:
            found = run(session.groups, compiled)
    torch.compiler.reset()
    return found


def meant():
    with globals_of(tp=1), open_session(tp=2) as session:
        return [1.0 * session.groups.size("tp")] * 2
