"""A loop has its collection, and the callback that it runs asks the globals for the last stage."""

from layouts import session_and_globals
from megatron.core import mpu

import megapg

WORLD = 2
READER = "log_on_last_stage"
GIVEN = "fit"


def log_on_last_stage(step, written):
    if mpu.is_pipeline_last_stage():
        written.append(step)


def fit(steps, pg_collection, callbacks):
    written = [pg_collection.size("pp")]
    for step in range(steps):
        for callback in callbacks:
            callback(step, written)
    return written


def program():
    with session_and_globals({"pp": 2}) as pg:
        return fit(2, pg, [log_on_last_stage])


def meant():
    with session_and_globals({"pp": 2}) as pg, megapg.published(pg):
        return fit(2, pg, [log_on_last_stage])
