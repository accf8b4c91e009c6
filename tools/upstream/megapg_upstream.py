"""A pytest plugin for a rank of upstream's unit tests, which chooses the source of the groups.

Upstream's tests get groups from ``Utils`` in ``tests/unit_tests/test_utilities.py``, which calls
``initialize_model_parallel``. On a session, that call opens a session and publishes it; all else is
unchanged. Without a GPU, both ways use gloo and megapg's CPU kit.

Nothing is downloaded: Python resolves no host but this one. Upstream's conftest continues without
data.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

import megapg
from megapg.megatron import parallel_state, session_arguments
from megapg.testing import megatron_on_cpu

_FIRST = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)


_HERE = (None, "", "localhost", "::1", "0.0.0.0", socket.gethostname())
_find_address = socket.getaddrinfo


def _find_address_here(host: Any, *arguments: Any, **named: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    if name in _HERE or name.startswith("127."):
        return _find_address(host, *arguments, **named)
    raise OSError(f"{name} is not asked: make test-upstream downloads nothing")


def _downloads_nothing(*_: Any, **__: Any) -> None:
    raise OSError("make test-upstream downloads nothing")


socket.getaddrinfo = _find_address_here
# The module needs a package that may be missing.
_DOWNLOADS = "tests.test_utils.python_scripts.download_unit_tests_dataset"
sys.modules[_DOWNLOADS] = types.ModuleType(_DOWNLOADS)
vars(sys.modules[_DOWNLOADS])["download_and_extract_asset"] = _downloads_nothing


class Groups:
    """Replacements of ``Utils``' functions in one process.

    Args:
        utils: upstream's class.
    """

    def __init__(self, utils: Any) -> None:
        self._utils = utils
        self._open = contextlib.ExitStack()

    def initialize_distributed(self) -> None:
        """Do the same as upstream, on gloo."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self._utils.inited = True

    def initialize_model_parallel(self, *sizes: Any, **named: Any) -> None:
        """Do the same as upstream, on a session."""
        self._open.close()
        parallel_state.destroy_model_parallel()
        self._utils.initialize_distributed()
        named |= dict(zip(_FIRST, sizes, strict=False))
        # Upstream's function makes these by default, and its tests rely on them.
        named.setdefault("create_gloo_process_groups", True)
        session = self._open.enter_context(megapg.session(**session_arguments(**named)))
        self._open.enter_context(megapg.published(session.groups))

    def destroy_model_parallel(self) -> None:
        """Do the same as upstream."""
        if self._utils.inited:
            dist.barrier()
            self._open.close()
            parallel_state.destroy_model_parallel()
            self._utils.inited = False


@pytest.fixture(scope="session", autouse=True)
def upstreams_groups() -> Iterator[None]:
    """Replace functions of upstream's ``Utils`` for this run."""
    utils = importlib.import_module("tests.unit_tests.test_utilities").Utils
    groups = Groups(utils)
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            utils.initialize_distributed = staticmethod(groups.initialize_distributed)
            stack.enter_context(megatron_on_cpu())
            # Upstream compares the version with numbers, also without Transformer Engine.
            none = mock.patch("megatron.core.utils._te_version", Version("0"))
            stack.enter_context(none)
        if os.environ.get("MEGAPG_UPSTREAM_ON_A_SESSION"):
            utils.initialize_model_parallel = staticmethod(groups.initialize_model_parallel)
            utils.destroy_model_parallel = staticmethod(groups.destroy_model_parallel)
        yield
