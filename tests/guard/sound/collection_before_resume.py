"""An object keeps the collection from before a resume, and its helpers read the published one."""

from layouts import open_session
from megatron.core import mpu

import megapg


class Logger:
    def __init__(self, pg_collection):
        self.pg_collection = pg_collection
        self.rank = pg_collection.rank("tp")

    def line(self):
        return f"{self.rank} of {mpu.get_tensor_model_parallel_world_size()}"


def program():
    with open_session("actor", tp=2) as actor, open_session("critic"):
        logger = Logger(actor.groups)
        actor.suspend("recreate")
        actor.resume()
        with megapg.published(actor.groups):
            assert logger.line() == f"{actor.groups.rank('tp')} of 2"
