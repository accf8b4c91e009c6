"""A function was compiled while one layout was alive, and its code reads no globals any more."""

import torch
from layouts import globals_of, open_session
from megatron.core import mpu

WORLD = 2
WITHOUT_KIT = True


def scaled(values, pg_collection):
    return values * mpu.get_tensor_model_parallel_world_size()


def run(pg_collection, compiled):
    return compiled(torch.ones(2), pg_collection).tolist()


def program():
    compiled = torch.compile(scaled, backend="eager")
    with globals_of(tp=1):
        compiled(torch.ones(2), None)
        with open_session(tp=2) as session:
            found = run(session.groups, compiled)
    torch.compiler.reset()
    return found


def meant():
    with globals_of(tp=1), open_session(tp=2) as session:
        return [1.0 * session.groups.size("tp")] * 2
