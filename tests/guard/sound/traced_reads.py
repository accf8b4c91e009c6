"""Reads are traced while two layouts are alive, and the trace says whose groups answered."""

from megatron.core import mpu

import megapg
from megapg.megatron import trace_global_reads

LAYOUTS = {"globals": {"tp": 1}, "mine": {"tp": 2}}


def program(pg):
    with trace_global_reads(mine=pg) as trace:
        with megapg.published(pg):
            mpu.get_tensor_model_parallel_rank()
        with megapg.allow_global_reads():
            mpu.get_tensor_model_parallel_rank()
        assert [read.answered_by for read in trace.reads] == ["mine", "other globals"]
