"""The pytest plugin, in separate pytest runs."""

import re
import textwrap
from pathlib import Path

import pytest

import megapg
from megapg.megatron import parallel_state  # imports Megatron-core once instead of in every run
from megapg.megatron.core import installed_version
from megapg.testing import fake_collection
from megapg.testing.isolation import Before, put_back

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.contract

# Since 0.19 these counts include ranks that share weights by generalised tensor parallelism.
GTP = installed_version() >= (0, 19)
DP_SIZE = "getters.data_size(pg)" if GTP else 'pg.size("dp")'
DP_RANK = "getters.data_rank(pg)" if GTP else 'pg.rank("dp")'

USER_CODE = """
from megatron.core import parallel_state

def mean(loss):
    return loss / parallel_state.get_data_parallel_world_size()
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Return a function that runs pytest with the plugin on the given files.

    The run uses this process, which has imported Megatron-core, or a fresh process.
    """
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("PYTHONPATH", str(Path(megapg.__file__).parents[1]))

    def run(*options, fresh=False, **files):
        for name, text in files.items():
            pytester.makepyfile(**{name: textwrap.dedent(text)})
        go = pytester.runpytest_subprocess if fresh else pytester.runpytest_inprocess
        return go("-p", "megapg.testing.plugin", *options)

    return run


def test_fixture_isolation_and_summary(run):
    result = run(
        "-v",
        user_code=USER_CODE,
        test_it="""
            import pytest
            import torch.distributed as dist
            from megapg.errors import StaleGroupError
            from megapg.megatron import parallel_state, published
            from user_code import mean

            before = dict(vars(parallel_state))
            code = parallel_state.get_data_parallel_world_size.__code__

            @pytest.fixture(scope="module")
            def shared():
                parallel_state._MPU_DATA_PARALLEL_RANK = 5
                yield
                parallel_state._MPU_DATA_PARALLEL_RANK = None

            def test_collection(megapg_collection):
                pg = megapg_collection(tp=2, pp=2, world_size=8, rank=3)
                assert pg.ranks("tp") == (2, 3)
                with published(pg):
                    assert mean(4.0) == 2.0
                again = megapg_collection(1, tp=2)
                assert again.rank("tp") == 1
                with pytest.raises(StaleGroupError, match="closed"):
                    pg.require("tp")

            def test_closed():
                assert not dist.is_initialized()

            def test_leaves_globals(monkeypatch):
                dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
                parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
                parallel_state._HYBRID_DP_CP_GROUPS[3] = "left"
                parallel_state._NEW = 1
                del parallel_state._MPU_DATA_PARALLEL_RANK
                monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_RANK", 1)
                assert mean(4.0) == 2.0

            def test_finds_none():
                assert not dist.is_initialized()
                assert dict(vars(parallel_state)).keys() - before.keys() == {"__megapg_read__"}
                for name, value in before.items():
                    assert vars(parallel_state)[name] is value, name
                assert parallel_state._HYBRID_DP_CP_GROUPS == {}

            def test_of_a_wider_fixture(shared):
                assert parallel_state.get_data_parallel_rank() == 5
                parallel_state._MPU_DATA_PARALLEL_RANK = 6

            def test_shares_it(shared):
                assert parallel_state.get_data_parallel_rank() == 5

            class TestWorld:
                @pytest.fixture(scope="class")
                def world(self):
                    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
                    yield
                    dist.destroy_process_group()

                def test_groups_go(self, world):
                    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
                    assert len(dist.distributed_c10d._world.pg_map) > 5

                def test_world_stays(self, world):
                    assert len(dist.distributed_c10d._world.pg_map) < 5
                    assert not parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        """,
    )
    result.assert_outcomes(passed=8, errors=1)  # WORLD is open after test_leaves_globals
    summary = result.stdout.str().partition("Megatron's globals (megapg)")[2]
    place = r"user_code:\d+ reads get_data_parallel_world_size, 2 times: write "
    assert re.search(place + re.escape(DP_SIZE), summary)
    assert summary.count(f"get_data_parallel_rank, 1 times: write {DP_RANK}") == 2
    # monkeypatch reads this variable to restore it
    assert "_MPU_TENSOR_MODEL_PARALLEL_RANK" not in summary
    assert "test_it.py::test_leaves_globals left " in summary
    assert " process groups in parallel_state and WORLD behind; closed" in summary
    assert "::TestWorld::test_groups_go left " in summary
    assert "test_collection left" not in summary


FORBIDDEN = """
    import pytest
    from megapg.megatron import published
    from megapg.testing import fake_collection

    @pytest.fixture
    def in_fixture():
        from user_code import mean
        mean(1.0)

    @pytest.fixture
    def pg():
        with fake_collection(tp=2) as pg, published(pg):
            yield pg

    def test_reads(pg):
        from user_code import mean  # imports Megatron-core no earlier than here
        mean(1.0)

    def test_fixture_reads(pg, in_fixture):
        pass

    def test_patches(pg, monkeypatch):
        from megatron.core import parallel_state
        monkeypatch.setattr(parallel_state, "_MPU_DATA_PARALLEL_RANK", 3)

    def test_megatron_reads(pg):
        from megatron.core.utils import get_tensor_model_parallel_group_if_none
        assert get_tensor_model_parallel_group_if_none(None) is pg.tp
"""


def test_forbidding(run):
    files = {"user_code": USER_CODE, "test_it": FORBIDDEN}
    result = run("--megapg-forbid-globals", **files)
    result.assert_outcomes(passed=2, failed=1, errors=1)
    output = result.stdout.str()
    assert "GlobalReadError" in output
    assert "get_data_parallel_world_size() of megatron.core.parallel_state, which" in output
    assert f"Write {DP_SIZE} instead" in output
    assert "2 reads from 1 places; " in output
    assert " more in megatron.core" in output
    result = run("--megapg-forbid-globals", "--megapg-allow-globals=user_code", **files)
    result.assert_outcomes(passed=4)  # Megatron-core may always read the globals
    assert "more in megatron.core, user_code" in result.stdout.str()


def test_without_megatron_core_it_does_nothing_and_then_restores_its_import(run):
    result = run(
        fresh=True,
        test_it="""
            import sys

            def test_nothing():
                assert not [name for name in sys.modules if name.startswith(("megatron", "torch"))]

            def test_imports():
                import torch.distributed as dist
                from megatron.core import parallel_state
                dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
                parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)

            def test_after():
                import re
                import torch.distributed as dist
                from megatron.core import parallel_state
                assert not dist.is_initialized()
                state = {n: v for n, v in vars(parallel_state).items() if re.match("_[A-Z]", n)}
                assert {n for n, v in state.items() if v is not None} == {"_HYBRID_DP_CP_GROUPS"}
                assert state["_HYBRID_DP_CP_GROUPS"] == {}
        """,
    )
    result.assert_outcomes(passed=3, errors=1)
    assert "ERROR at teardown of test_imports" in result.stdout.str()
    assert "test_imports left " in result.stdout.str()
    assert "test_nothing left " not in result.stdout.str()


def test_a_jobs_world_is_left_alone(run, monkeypatch):
    """A job's ranks share WORLD from test to test; creating WORLD again would hang them."""
    monkeypatch.setenv("RANK", "0")
    result = run(
        test_it="""
            import torch.distributed as dist
            from megatron.core import parallel_state

            def test_makes_world():
                dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)

            def test_uses_it():
                assert dist.is_initialized()
                dist.destroy_process_group()
        """
    )
    result.assert_outcomes(passed=2)


LEAKS = """
import megapg
import torch.distributed as dist

class Kept:
    pass

def test_world():
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)

def test_after_world():
    assert not dist.is_initialized()
    Kept.session = megapg.session(name="kept")

def test_after_session():
    assert not dist.is_initialized()
    assert megapg.open_sessions() == ()
    with megapg.session(name="kept"):
        pass

def test_closed_use():
    Kept.session.groups
"""


def test_a_test_that_leaves_world_or_a_session_open_fails(run):
    result = run(test_it=LEAKS)
    result.assert_outcomes(passed=3, errors=2, failed=1)
    output = result.stdout.str()
    for name, what in (("world", "WORLD"), ("after_world", "session 'kept'")):
        assert f"ERROR at teardown of test_{name} " in output
        assert f"test_it.py::test_{name} left {what} open; closed now." in output
    # The error stands at the line of the test, without the frames of megapg.
    assert "SessionError" in output
    assert re.search(r"^> +Kept.session.groups$", output, re.M)
    assert "owner.py" not in output
    whole = run("--full-trace", "-k", "closed or after_world", test_it=LEAKS)
    assert "owner.py" in whole.stdout.str()


def test_the_help_says_what_it_is_for(run):
    output = " ".join(run("--help").stdout.str().split())
    assert "--megapg-allow-globals=MODULE" in output
    assert "says what to write instead" in output
    assert "as megatron.core may anyway" in output


def test_forbidding_without_megatron_core_is_an_error_of_use(run):
    result = run(
        "--megapg-forbid-globals",
        fresh=True,
        conftest="""
            import sys
            sys.modules["megatron.core.package_info"] = None  # as if it were not installed
        """,
        test_it="def test_nothing(): pass",
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--megapg-forbid-globals: this needs Megatron-core" in result.stderr.str()


def test_groups_and_lists_that_were_there_before_stay(monkeypatch):
    """A fixture of a wider scope may have opened a session that owns them."""
    shared = [None]
    monkeypatch.setattr(parallel_state, "_global_process_group_list", shared)
    with fake_collection(tp=2) as pg:
        before = Before.now()
        shared.append(pg.tp)
        monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", pg.tp)
        assert put_back(before) == ""
        assert pg.require("tp") is pg
    assert parallel_state._global_process_group_list is shared
    assert shared == [None]
    assert parallel_state._TENSOR_MODEL_PARALLEL_GROUP is None


def test_a_read_of_unset_globals_names_the_collection_of_the_fixture(run):
    result = run(
        test_it="""
            from megatron.core import parallel_state

            def test_read(megapg_collection):
                megapg_collection(tp=2)
                parallel_state.get_tensor_model_parallel_group()
        """
    )
    result.stdout.fnmatch_lines(["*fake_collection() is open: run this inside*"])
