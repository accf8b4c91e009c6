"""What holds for the whole run of the tests."""

import os
import signal

import pytest
from quick import is_quick

from megapg.testing import preloaded

# A shell that starts the run in the background has it ignore Ctrl-C, and so all its children.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch's store looks up a name for the address of everyone who connects, in the one thread that
# serves all of them. Where a name server loses one question in thirty, that thread stands still for
# the resolver's five seconds, and with it all ranks of a test.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")


def pytest_configure(config: pytest.Config) -> None:
    """Import what most ranks need once for all runs, and for all workers of xdist."""
    if not hasattr(config, "workerinput"):
        modules = ("pytest", "psutil", "torch.distributed", "megapg.megatron", "megapg.demo.gpt")
        interpreter = preloaded(*modules, "settled")
        interpreter.__enter__()
        config.add_cleanup(lambda: interpreter.__exit__(None, None, None))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--quick``: what ``make test-quick`` runs."""
    parser.addoption("--quick", action="store_true", help="unit tests and those marked smoke")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, if asked to, what starts processes and is no smoke test."""
    if config.getoption("--quick"):
        left = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if _is_quick(item)]


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("smoke"):
        return True
    test = item.nodeid.split("::")[1].partition("[")[0]
    return not item.get_closest_marker("slow") and is_quick(item.path, test)
