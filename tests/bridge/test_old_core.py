"""A Megatron-core without injection: its globals are resolved, and sessions are refused."""

import re
import sys
import textwrap
from unittest import mock

import pytest
from old_core import run_on_old_core
from trees import write

import megapg
from megapg.errors import UnsupportedVersionError
from megapg.megatron import session_arguments
from megapg.megatron.core import core_version, installed_version

THERE = """
    import sys

    import pytest
    import torch

    import megapg
    from megapg.errors import UnsupportedVersionError
    from megapg.megatron import (
        core_version, parallel_state, published, session_arguments, to_megatron
    )
    from megapg.megatron.core import collection_class, installed_version
    from megapg.testing import fake_collection, megatron_on_cpu

    assert installed_version() == (0, 12, 0), installed_version()
    assert parallel_state.get_tensor_model_parallel_rank
    with fake_collection(tp=2) as pg:
        model = torch.nn.Linear(2, 2)
        injected = (
            lambda: to_megatron(pg),
            lambda: published(pg).__enter__(),
            lambda: megapg.seed_all(1, pg),
            lambda: megapg.save_checkpoint("here", 1, model=model, pg_collection=pg),
            lambda: megapg.load_checkpoint("here", model=model, pg_collection=pg),
            lambda: megatron_on_cpu().__enter__(),
        )
        for ask in (core_version, collection_class, session_arguments, *injected):
            try:
                ask()
            except UnsupportedVersionError as error:
                print(error)
    tests = [f"tests/bridge/test_{name}.py" for name in ("getters", "resolve", "shim")]
    alone = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", "not real_ranks"]
    sys.exit(pytest.main([*alone, *tests]))
"""


@pytest.fixture(scope="module")
def printed():
    """Run one interpreter that can import only the old core; return its output."""
    return run_on_old_core("-c", textwrap.dedent(THERE))


def test_the_view_and_the_helpers_hold_there_too(printed):
    """Run the tests of both on that core."""
    assert int(re.search(r"(\d+) passed", printed)[1]) >= 30, printed


def test_injection_is_refused_with_the_versions_that_can(printed):
    assert printed.count("Megatron-core 0.12.0 can't run on injected groups") == 9
    assert printed.count("0.16.0 is the oldest that can. pip install") == 9


def test_a_core_older_than_any_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("megatron.core.package_info.MINOR", 11)
    for ask in (installed_version, core_version, session_arguments, megapg.from_parallel_state):
        with pytest.raises(UnsupportedVersionError, match=r"0\.11\.\d+ is older.*0\.12\.0 is the"):
            ask()


@pytest.mark.parametrize(
    ("version", "line", "said"),
    [
        ("0, 9, 0", "import nowhere", "Megatron-core 0.9.0 is older than any"),
        ("0, 9, 0", "[].nothing", "Megatron-core 0.9.0 is older than any"),
        ("0, 16, 0", "import nowhere", "0.16.0 is here and can't be imported: .*'nowhere'"),
    ],
)
def test_a_core_that_can_not_be_imported_is_not_said_to_be_absent(
    version, line, said, tmp_path, monkeypatch
):
    """The import fails as with an old fork and a newer torch, or if a package is missing."""
    info = f"MAJOR, MINOR, PATCH = {version}"
    write(tmp_path / "megatron" / "core", {"__init__.py": line, "package_info.py": info})
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        for name in [each for each in sys.modules if each.partition(".")[0] == "megatron"]:
            del sys.modules[name]
        for ask in (installed_version, session_arguments):
            with pytest.raises(UnsupportedVersionError, match=said):
                ask()


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"__init__.py": "[].nothing", "package_info.py": "MAJOR = MINOR"}, AttributeError),
        ({"__init__.py": "import nowhere", "package_info.py": ""}, ModuleNotFoundError),
        ({"__init__.py": ""}, UnsupportedVersionError),
        ({"__init__.py": "", "package_info.py": "MAJOR = 0"}, UnsupportedVersionError),
        ({"__init__.py": "", "package_info.py": "MAJOR = MINOR"}, NameError),
    ],
)
def test_one_whose_version_can_not_be_read_either_says_so_itself(
    files, error, tmp_path, monkeypatch
):
    write(tmp_path / "megatron" / "core", files)
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(sys.modules):
        for name in [each for each in sys.modules if each.partition(".")[0] == "megatron"]:
            del sys.modules[name]
        with pytest.raises(error):
            installed_version()
