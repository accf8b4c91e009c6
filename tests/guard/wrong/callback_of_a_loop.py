"""A loop has its collection, and the callback that it runs asks the globals for the last stage."""

from megatron.core import mpu

LAYOUTS = {"globals": {"pp": 2}, "mine": {}}
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


def program(pg):
    return fit(2, pg, [log_on_last_stage])
