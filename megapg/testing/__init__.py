"""Tools for tests of code on Megatron-core: real ranks on one host, fake ranks in one process.

No GPU is needed.

* :func:`run_distributed` runs a function in real processes with gloo, and :func:`preloaded` makes
  many such runs faster;
* :func:`parity` compares the results of a model in other layouts with those of one rank;
* :func:`megatron_on_cpu` lets Megatron-core train without CUDA;
* :func:`fake_collection` gives a collection of any layout in one process;
* :func:`count_traffic` counts the collectives of a block, and their bytes;
* :func:`refuse_closed_groups` turns the use of a closed group into an error.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapg.testing.cpu import megatron_on_cpu
    from megapg.testing.distributed import preloaded, run_distributed
    from megapg.testing.fake import fake_collection
    from megapg.testing.strict import refuse_closed_groups
    from megapg.testing.traffic import count_traffic
    from megapg.tools.parity.entry import parity

# Loaded at first use: the pytest plugin in this package must cost nothing if it has no work.
_HOMES = {
    "count_traffic": "megapg.testing.traffic",
    "fake_collection": "megapg.testing.fake",
    "megatron_on_cpu": "megapg.testing.cpu",
    "parity": "megapg.tools.parity.entry",
    "preloaded": "megapg.testing._guard",
    "refuse_closed_groups": "megapg.testing.strict",
    "run_distributed": "megapg.testing.distributed",
}

__all__ = [
    "count_traffic",
    "fake_collection",
    "megatron_on_cpu",
    "parity",
    "preloaded",
    "refuse_closed_groups",
    "run_distributed",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOMES})
