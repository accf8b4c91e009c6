"""What most ranks import, for the interpreter from which they are forked; there it stays.

The collector passes over it in every rank, and writes nothing on the pages that they share. To look
through torch and Megatron-core takes it a quarter of a second, and many a test has it look several
times. But a rank that asks who holds something is not told of these modules, either: a test about
that calls ``gc.unfreeze()`` first.
"""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-core's, about what a CPU lacks

    import psutil  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed  # noqa: F401

    import megapg.megatron
    from megapg.megatron.core import installed_version

    if installed_version() >= (0, 16):  # on an older one nothing is trained
        import megapg.demo.gpt  # noqa: F401

gc.collect()
gc.freeze()
