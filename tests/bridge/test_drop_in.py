"""Megatron's two functions on top of a session, and a session from Megatron's parsed arguments."""

import contextlib
import inspect
import io
import os
import re
import runpy
import sys
from argparse import Namespace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from asking import registered, works
from recording import fake_world, restored_parallel_state

import megapg
from megapg.errors import LaunchError, LayoutError, SessionError, UnsupportedOptionError
from megapg.layout import ParallelLayout
from megapg.megatron import drop_in, from_args, parallel_state
from megapg.megatron.arguments import parameters_of_core
from megapg.ownership.opening import open_sessions
from megapg.testing import _ranks, run_distributed

pytestmark = pytest.mark.contract

initialize = megapg.megatron.initialize_model_parallel
destroy = megapg.megatron.destroy_model_parallel


@pytest.fixture
def world():
    """Play one of eight ranks, and check that the test leaves no session or group open."""
    with restored_parallel_state():
        # destroy() ends Megatron's list of all its groups.
        parallel_state._global_process_group_list = None
        state = dict(vars(parallel_state))
        with fake_world(3, 8):
            yield
            assert not open_sessions()
            assert registered() == 1
        assert vars(parallel_state) == state


# -- initialize_model_parallel and destroy_model_parallel ------------------------------------------


def test_it_takes_megatrons_arguments_and_ends_what_it_made(world):
    for _ in range(2):
        session = initialize(2, 2, 2, expert_model_parallel_size=2, distributed_timeout_minutes=7)
        assert session.layout == ParallelLayout(world_size=8, tp=2, pp=2, vpp=2, ep=2)
        assert set(session.describe()["collective_timeouts"].values()) == {7 * 60}
        assert session.describe()["start_up_timeout"] == 7 * 60  # a rank may be this late
        assert parallel_state.model_parallel_is_initialized()
        assert parallel_state.get_tensor_model_parallel_group() is session.groups.tp
        assert parallel_state.get_virtual_pipeline_model_parallel_world_size() == 2
        assert parallel_state.get_data_parallel_group_gloo() is session.groups.extras["gloo.dp"]
        destroy()
        assert session.closed
        assert registered() == 1
        assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.parametrize("before", ["suspended", "closed"])
def test_it_ends_a_session_that_gives_no_groups(world, before):
    session = initialize(2, create_gloo_process_groups=False)
    if before == "suspended":
        session.suspend("recreate")
    else:
        session.close()
    destroy()
    assert session.closed
    assert not parallel_state.model_parallel_is_initialized()


def test_gloo_companions_are_made_unless_megatron_would_make_none(world):
    session = initialize(create_gloo_process_groups=False)
    with pytest.raises(AssertionError):
        parallel_state.get_data_parallel_group_gloo()
    assert not session.groups.extras
    destroy()


def test_the_second_call_is_refused_and_names_the_way_out(world):
    initialize(2)
    with pytest.raises(SessionError, match=r"destroy_model_parallel\(\) first"):
        initialize(4)
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    destroy()
    initialize(4)
    assert parallel_state.get_tensor_model_parallel_world_size() == 4
    destroy()
    destroy()


def test_what_does_not_fit_leaves_nothing(world):
    for arguments, error in (
        ({"tensor_model_parallel_size": 3}, LayoutError),
        ({"use_sharp": True}, UnsupportedOptionError),
        ({"tensor_parallel_size": 2}, TypeError),
    ):
        with pytest.raises(error):
            initialize(**arguments)
        assert not open_sessions()
        assert not parallel_state.model_parallel_is_initialized()


def test_groups_that_megatron_made_are_left_to_megatron(world):
    with restored_parallel_state():
        parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
        theirs = registered()
        destroy()
        assert not parallel_state.model_parallel_is_initialized()
        assert registered() == theirs  # not registered any more, as after Megatron's own function
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def test_a_script_that_calls_megatrons_gets_a_session(world):
    theirs = parallel_state.initialize_model_parallel
    with drop_in.standing_in():
        now = parallel_state.initialize_model_parallel
        assert inspect.signature(now) == inspect.signature(theirs)
        now(2)
        (session,) = open_sessions()
        parallel_state.destroy_model_parallel()
        assert session.closed
        parallel_state.initialize_model_parallel(4)
        (session,) = open_sessions()
    assert session.closed
    assert parallel_state.initialize_model_parallel is theirs
    with pytest.raises(ZeroDivisionError):
        fail_as_a_script_may()
    assert parallel_state.initialize_model_parallel is theirs


def making_groups_beside():
    """Count the groups in each phase, with those that Megatron's own functions made."""
    dist.init_process_group("gloo")
    session = initialize(2, create_gloo_process_groups=False)
    ours = registered()
    beside = [parallel_state.create_group([0, 1], backend="gloo")]
    makes_twins = getattr(parallel_state, "create_all_gather_groups", None)
    if makes_twins is not None:
        beside += filter(None, makes_twins())
    counted = [registered() == ours + len(beside)]
    session.suspend("recreate")
    beside.append(parallel_state.create_group([0, 1], backend="gloo"))
    session.resume()
    beside.append(parallel_state.create_group([0, 1], backend="gloo"))
    counted.append(registered() == ours + len(beside))
    assert [works(each, each.size()) for each in beside] == [True] * len(beside)
    assert all(each in parallel_state._global_process_group_list for each in beside)
    assert works(parallel_state.get_tensor_model_parallel_group())
    destroy()
    counted.append(registered() == 1)
    with drop_in.standing_in():
        parallel_state.initialize_model_parallel(2)
        assert works(parallel_state.create_group([0, 1]))
    counted.append(registered() == 1)
    with megapg.session(tp=2) as session, megapg.published(session.groups):
        session.suspend("recreate")
        assert works(parallel_state.create_group([0, 1], backend="gloo"))
        session.close()
        counted.append(registered() == 1)
    return counted


def test_groups_that_megatrons_functions_make_beside_end_with_it():
    assert run_distributed(making_groups_beside, 2, deadline=100) == [[True] * 5] * 2


def fail_as_a_script_may():
    with drop_in.standing_in():
        parallel_state.initialize_model_parallel(4)
        raise ZeroDivisionError


# -- session_from_args -----------------------------------------------------------------------------

ARGS = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "world_size": 8,
    "distributed_backend": "nccl",  # differs from the backend of WORLD
    "distributed_timeout_minutes": 10,
    "use_tp_pp_dp_mapping": False,
}


def test_a_session_has_what_the_arguments_say(world):
    args = Namespace(**ARGS, virtual_pipeline_model_parallel_size=2, use_gloo_process_groups=True)
    with megapg.megatron.session_from_args(args) as session:
        assert session.layout == ParallelLayout(world_size=8, tp=2, pp=2, vpp=2)
        assert set(session.describe()["collective_timeouts"].values()) == {600}
        assert session.describe()["start_up_timeout"] == 600
        assert "gloo.intra_dp_cp" in session.groups.extras
    plain = Namespace(**{**ARGS, "use_tp_pp_dp_mapping": True, "create_all_gather_group": True})
    with megapg.megatron.session_from_args(
        plain, get_embedding_ranks=lambda ranks: ranks[:1]
    ) as session:
        assert session.layout.order == "tp-cp-ep-pp-dp"
        assert session.layout.members("embd", 0) == (0,)
        assert "dp_cp_ag" in session.groups.present()
        assert not session.groups.extras


def test_every_parameter_of_this_core_can_be_an_argument(monkeypatch):
    """A parameter that a core adds may have its own or another name."""
    given = {}

    def noted(**arguments):
        given.update(arguments)
        return {"collective_timeout": timedelta(minutes=1)}

    monkeypatch.setattr(from_args, "detect", lambda: SimpleNamespace(world_size=8))
    monkeypatch.setattr(from_args, "session_arguments", noted)
    monkeypatch.setattr(from_args, "session", lambda **_: None)
    for parameter in parameters_of_core():
        if parameter == "order" or parameter.startswith("get_"):
            continue
        name = parameter.replace("create_gloo", "enable_gloo").replace("gtp_", "gtp_weight_")
        value = object()
        megapg.megatron.session_from_args(Namespace(**{**ARGS, name: value}))
        assert given[parameter] is value, name


def test_arguments_that_were_parsed_for_other_ranks_are_refused(world):
    with pytest.raises(LaunchError, match="world_size=1, and there are 8 ranks"):
        megapg.megatron.session_from_args(Namespace(**{**ARGS, "world_size": 1}))
    with pytest.raises(UnsupportedOptionError, match="no tensor_model_parallel_size"):
        megapg.megatron.session_from_args(Namespace(tp=2))
    with pytest.raises(UnsupportedOptionError, match="has no stages for encoders"):
        megapg.megatron.session_from_args(
            Namespace(**{**ARGS, "pipeline_model_parallel_split_rank": 2})
        )


# -- python -m megapg.megatron.run -----------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "migration_guide" / "pretrain.md").read_text()
SIZE = "--tensor-model-parallel-size"
SCRIPT = r"""
import sys
from megatron.core import mpu
from megatron.core.parallel_state import destroy_model_parallel, get_tensor_model_parallel_rank
import beside
import torch.distributed as dist

dist.init_process_group("gloo")
mpu.initialize_model_parallel(tensor_model_parallel_size=int(sys.argv[2]))
rank = get_tensor_model_parallel_rank()
sys.stdout.write(f"{__name__} {dist.get_world_size()} {rank}\n")  # in one piece
sys.stdout.flush()
dist.barrier()  # or one might end while the other still connects
if sys.argv[3:]:
    destroy_model_parallel()
    raise SystemExit(int(sys.argv[3]))
"""
COST = re.compile(
    r"megapg: initialize_model_parallel took \S+ s and added (\d+) communicators, (\d+) th"
)


@pytest.fixture
def script(tmp_path):
    (tmp_path / "pretrain_gpt.py").write_text(SCRIPT)
    (tmp_path / "beside.py").touch()
    return str(tmp_path / "pretrain_gpt.py")


def as_module(name, words):
    """Run ``python -m`` in a rank; return its exit code, stdout and stderr."""
    code = 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        sys.argv = [name, *words]
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code or 0
    return code, printed.getvalue(), said.getvalue()


def alone(*words, **environment):
    """Run the command in a process without a launcher."""
    (ran,) = run_distributed(partial(run_alone, words, environment), 1, deadline=100)
    return ran


def run_alone(words, environment):
    for variable in _ranks._environment(0, 1, 0):
        del os.environ[variable]
    os.environ.update(environment)
    return as_module("megapg.megatron.run", words)


def test_a_script_runs_as_it_is_and_its_exit_code_is_its_own(script):
    for wanted in (3, 0):  # --exit-interval ends a script with 0
        code, printed, said = alone(script, SIZE, "1", str(wanted))
        assert (code, printed) == (wanted, "__main__ 1 0\n")
        assert bool(COST.search(said)) == (wanted == 0)


def test_the_command_of_the_guide_and_what_it_says_of_the_cost(script):
    """The ranks start as with torchrun; test_launchers.py uses srun."""
    command = r"^\$ torchrun --nproc-per-node 8 -m (\S+) (.*) \.\.\.$"
    ((module, words),) = re.findall(command, PAGE, re.M)
    assert "`--on-globals` before the script" in PAGE
    costs = []
    for before in ((), ("--on-globals",)):
        arguments = [*before, *words.replace("pretrain_gpt.py", script).split()]
        ran = run_distributed(partial(as_module, module, arguments), 2, deadline=100)
        assert [each[:2] for each in ran] == [(0, "__main__ 2 0\n"), (0, "__main__ 2 1\n")]
        told = "".join(said for *_, said in ran)
        assert "still open" not in told
        ((communicators, threads),) = COST.findall(told)
        costs.append((int(communicators), int(threads)))
    ours, theirs = costs
    assert ours[0] * 4 < theirs[0]
    assert ours[1] * 4 < theirs[1]


ENDS_FIRST = r"""
import sys
import time
from pathlib import Path
import torch.distributed as dist
from megatron.core import parallel_state

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
dist.barrier()
exec(sys.argv[1])  # how it ends
"""
WAITS = "while not Path(sys.argv[2]).exists(): time.sleep(0.01)"


def ended(script, how, other_has_ended):
    """Run the script in this rank, and tell the other rank of its end."""
    mine = how[dist_rank()]
    outcome = as_module("megapg.megatron.run", [script, mine, other_has_ended])
    Path(other_has_ended).touch()
    return outcome[0], outcome[2], len(open_sessions()), registered()


def dist_rank():
    return int(os.environ["RANK"])


@pytest.mark.parametrize("first", ["pass", "sys.exit()", "dist.destroy_process_group()"])
def test_a_rank_that_ends_waits_for_no_other(tmp_path, first):
    """The second rank ends after the first one. If the first rank waited, both would hang."""
    script = tmp_path / "script.py"
    script.write_text(ENDS_FIRST)
    over = str(tmp_path / "over")
    ran = run_distributed(partial(ended, str(script), [first, WAITS], over), 2, deadline=60)
    for code, said, open_ones, groups in ran:
        assert code == 0
        assert open_ones == 0
        assert groups <= 1  # the script's WORLD
        assert not re.search("Error|Warning|still open|aborted", said), said


def test_what_can_not_start_is_said_in_a_line_with_exit_code_2(script):
    for words, environment, what in (
        ((), {}, "usage: python -m megapg.megatron.run [--on-globals] SCRIPT"),
        (("nowhere.py",), {}, "there is no script 'nowhere.py'"),
        (("--on-global", script), {}, "there is no option '--on-global'. usage: "),
        ((script, SIZE, "2"), {}, "tp=2"),
        ((script, SIZE, "1"), {"RANK": "1"}, "WORLD_SIZE"),
    ):
        code, _, said = alone(*words, **environment)
        assert code == 2, said
        (line,) = [each for each in said.splitlines() if each.startswith("error")]
        assert what in line
        assert "Traceback" not in said
    code, printed, _ = alone("--help")
    assert code == 0
    assert printed.startswith("usage: python -m megapg.megatron.run [--on-globals] SCRIPT")
    assert "Exit codes" in printed


def test_the_import_of_the_guide(world):
    (block,) = re.findall(r"```python\n(from megapg.*?)```", PAGE, re.S)
    exec(block, {})
