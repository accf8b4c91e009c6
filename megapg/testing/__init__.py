"""For tests of code on Megatron-core: real ranks on one host, fake ranks in one process, no GPU.

* :func:`run_distributed` runs a function in real processes with gloo;
* :func:`megatron_on_cpu` lets Megatron-core train without CUDA;
* :func:`fake_collection` gives a collection of any layout in one process;
* :func:`refuse_closed_groups` turns the use of a closed group into an error.
"""

from megapg.testing.cpu import megatron_on_cpu
from megapg.testing.distributed import Ranks, run_distributed
from megapg.testing.fake import fake_collection
from megapg.testing.strict import refuse_closed_groups

__all__ = [
    "Ranks",
    "fake_collection",
    "megatron_on_cpu",
    "refuse_closed_groups",
    "run_distributed",
]
