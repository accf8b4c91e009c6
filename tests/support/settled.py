"""Imports that most ranks need, for the interpreter that forks them, hidden from the collector.

The garbage collector skips these modules in every rank, and does not write to the shared pages.
Without the freeze, each collection takes a quarter of a second, and many tests run several. But
``gc.get_referrers()`` does not see these modules either, so a test that needs it calls
``gc.unfreeze()`` first.
"""

import gc
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about features that need a GPU

    import psutil  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed  # noqa: F401

    import megapg.megatron
    from megapg.megatron.core import installed_version

    if installed_version() >= (0, 16):  # no training on older cores
        import megapg.tools.demo.gpt  # noqa: F401

gc.collect()
gc.freeze()
