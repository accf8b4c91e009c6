"""Settings and test order of the whole run."""

import os
import signal
from contextlib import ExitStack

import pytest
from quick import is_quick

from megapg.testing import preloaded

# A shell that starts the run in the background makes it and its children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests use ranks on CPUs, and more ranks than a machine has GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# torch's store looks up a name for the address of every client, in its only server thread. If a
# name server drops a request, this thread and all ranks of a test wait for the resolver's five
# seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")


# Long files start first, longest first, with the slow tests before them. Shorter files may run in
# any order, but a long file at the end would run alone. Files that compute and files that wait for
# deadlines alternate: three of a kind leave a core idle.
LONG = (
    *("test_planning", "test_upstream_tests", "test_examples", "test_pretrain", "test_suggest"),
    *("test_checkpoint_faults", "test_migrated_trainer", "test_suspend_training", "test_models"),
    *("test_warm_up", "test_checkpoint", "test_measure", "test_checkpoint_interop"),
    *("test_frozen_store", "test_demo", "test_parity", "test_run_distributed", "test_rendezvous"),
    "test_corpus",
    *("test_joint_work", "test_launchers", "test_failures", "test_training", "test_bad_input"),
    *("test_types", "test_suspend_failures", "test_session", "test_told_at_once", "test_doctor"),
    *("test_checkpoint_options", "test_signals", "test_name_is_free", "test_checkpoint_commit"),
    *("test_checkpoint_integrity", "test_check", "test_rebind", "test_dropped_sessions"),
    *("test_vendored_equivalence", "test_adopt", "test_architecture", "test_old_core"),
    *("test_wrong_group", "test_cli", "test_fuzz", "test_vendored", "test_rng_records"),
    *("test_readme", "test_odd_files", "test_programs", "test_runtime", "test_equivalence"),
    "test_drop_in",
)


def pytest_configure(config: pytest.Config) -> None:
    """Import common modules once for all runs and for all workers of xdist."""
    if hasattr(config, "workerinput") or config.option.collectonly or config.option.help:
        return
    stack = ExitStack()
    config.add_cleanup(stack.close)
    stack.enter_context(preloaded("settled"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``, which ``make test-quick`` passes."""
    parser.addoption("--quick", action="store_true", help="unit tests and those marked smoke")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first; with ``--quick``, keep unit tests and smoke tests only."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))
    if config.getoption("--quick"):
        left = [item for item in items if not _is_quick(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if _is_quick(item)]


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("smoke"):
        return True
    test = item.nodeid.split("::")[1].partition("[")[0]
    marked = any(map(item.get_closest_marker, ("slow", "ray")))
    return not marked and is_quick(item.path, test)
