"""run_distributed: results, every way a rank can fail, and leftovers."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import rank_functions
from rank_functions import (
    ASKS_NVML,
    LIMIT,
    Rank,
    asked_whom,
    die_each_in_its_way,
    give_birth,
    hang_in_a_collective,
    large,
    leave_a_grandchild,
    leave_a_grandchild_in,
    leave_unpicklable,
    raise_in_one_while_others_wait,
    raise_or_sleep,
    rank,
    rank_of,
    sleep_long,
    surroundings,
    total,
    wait_for,
    where,
)

from megapg.errors import MegapgError, RankFailedError
from megapg.testing import distributed
from megapg.testing._ranks import PRELOADED
from megapg.testing.distributed import Ranks, preloaded, run_distributed

MARK = "MEGAPG_TEST_MARK"
ROOT = Path(__file__).parents[2]
SUPPORT = Path(rank_functions.__file__).parent
BUFFERED = {"PYTHONUNBUFFERED": ""}


# Helpers -----------------------------------------------------------------------------------------


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes of this machine that have ``mark`` in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.05)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def belongings() -> tuple[set[int], int, list[str]]:
    """Return the children (zombies included), threads and descriptors of this process."""
    me = psutil.Process()
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this listing is closed
            descriptors.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    threads = len(os.listdir("/proc/self/task"))
    return {child.pid for child in me.children(recursive=True)}, threads, sorted(descriptors)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a fresh interpreter for each run, unless a test uses a preloaded interpreter."""
    monkeypatch.delenv(PRELOADED, raising=False)


@pytest.fixture(scope="module")
def preloaded_at() -> Iterator[str]:
    """Yield the address of a preloaded interpreter that has imported torch."""
    with preloaded("torch", "torch.distributed"):
        yield os.environ[PRELOADED]


@pytest.fixture
def _preloaded(preloaded_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRELOADED, preloaded_at)


@pytest.fixture(params=["fresh", "preloaded"])
def _either_way(request: pytest.FixtureRequest) -> None:
    if request.param == "preloaded":
        request.getfixturevalue("_preloaded")


either_way = pytest.mark.usefixtures("_either_way")
run_without_torch = partial(run_distributed, preload=())


@pytest.fixture
def mark() -> Iterator[str]:
    value = uuid.uuid4().hex
    yield value
    for process in marked(value):  # a failing test must not disturb the next test
        process.kill()


def start_script(path: Path, mark: str, body: str, *arguments: str) -> subprocess.Popen[str]:
    path.write_text(textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env={**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, SUPPORT)))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=path.parent,
        start_new_session=True,
    )


SLEEPING_SCRIPT = """
    import os, sys, time
    from functools import partial
    from megapg.testing.distributed import Ranks

    def sleep(seconds):
        time.sleep(seconds)

    if __name__ == "__main__":
        try:
            with Ranks(partial(sleep, 300), 3, preload=()) as ranks:
                if "fork" in sys.argv and os.fork() == 0:
                    time.sleep(300)
                ranks.results()
        except KeyboardInterrupt:
            print("interrupted")
            sys.exit(9)
"""
SLEEPING_PROCESSES = 6  # the script, the guard, the launcher and three ranks


# Results -----------------------------------------------------------------------------------------


@either_way
def test_two_runs_at_once_give_their_results_in_rank_order() -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_distributed, partial(total, start), 2) for start in (0, 100)]
        assert [run.result() for run in runs] == [[(0, 1), (1, 1)], [(0, 201), (1, 201)]]


@either_way
def test_environment_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen = run_without_torch(surroundings, 2, env={"EXTRA": "1", "RANK": "7"})
    assert len({own["pid"] for own in seen} | {str(os.getpid())}) == 3
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    for number, own in enumerate(seen):
        expected = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "EXTRA": "1",
            "cwd": os.getcwd(),
            "stdin": "",
        }
        assert {name: own[name] for name in expected} == expected


@either_way
def test_large_results_and_output_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    assert [len(result) for result in run_without_torch(large, 2, env=BUFFERED)] == [3_000_000] * 2
    output = capfd.readouterr().out
    assert (output.count("unfinished line;"), output.count("line of C;")) == (2, 2)


MAIN_SCRIPT = """
    from dataclasses import dataclass
    from functools import partial
    from megapg.testing.distributed import run_distributed

    @dataclass
    class Point:
        x: int

    def move(point):
        return Point(point.x + 1)

    def nested(point):
        return run_distributed(partial(move, point), 2, preload=())

    if __name__ == "__main__":
        print(run_distributed(partial(move, Point(4)), 2, preload=()))
        print(run_distributed(partial(nested, Point(5)), 1))
"""
UNGUARDED_SCRIPT = """
    from megapg.testing.distributed import run_distributed

    def one():
        return 1

    run_distributed(one, 1, preload=(), deadline=30)
"""


def test_function_of_a_main_script(tmp_path: Path, mark: str) -> None:
    with start_script(tmp_path / "script.py", mark, MAIN_SCRIPT) as script:
        out, _ = script.communicate(timeout=60)
    assert (script.returncode, out) == (0, "[Point(x=5), Point(x=5)]\n[[Point(x=6), Point(x=6)]]\n")


def test_main_script_without_a_guard_is_refused(tmp_path: Path, mark: str) -> None:
    with start_script(tmp_path / "script.py", mark, UNGUARDED_SCRIPT) as script:
        out, _ = script.communicate(timeout=60)
    assert script.returncode == 1
    assert "under if __name__ == '__main__'" in out


def test_function_of_an_interactive_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ModuleType("__main__")  # without a file
    exec("def function(): pass", vars(session))
    monkeypatch.setitem(sys.modules, "__main__", session)
    with pytest.raises(TypeError, match="put it in a file"):
        Ranks(session.function, 1)
    Ranks(partial(len, "__name__ == '__main__'"), 2)  # names the module, but is not of it


# Failures ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_preloaded")
def test_exception_while_others_are_in_a_collective() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(raise_in_one_while_others_wait, 3, deadline=60)
    error = caught.value
    assert isinstance(error, MegapgError)
    assert set(error.failures) == {0, 1, 2}
    assert error.exceptions == tuple(error.failures.values())
    assert isinstance(error.failures[1], LookupError)
    assert error.failures[1].args == ("no such thing", 7)
    assert "in raise_in_one_while_others_wait" in error.failures[1].__notes__[0]
    assert "3 of 3 ranks failed, rank 1 first:" in str(error)
    assert "\n  rank 1: LookupError: ('no such thing', 7)" in str(error)
    assert "Connection" in str(error.failures[0])  # gloo noticed the failure before the deadline
    again = pickle.loads(pickle.dumps(error))
    assert set(again.failures) == {0, 1, 2}


def test_others_are_stopped_after_a_grace_period(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(distributed, "_GRACE_S", 1.0)
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 first") as caught:
        run_without_torch(partial(raise_or_sleep, tmp_path), 2, deadline=250)
    assert time.monotonic() - started < 60
    stopped = caught.value.failures[0]
    assert isinstance(stopped, TimeoutError)
    assert str(stopped).startswith("stopped 1 s after rank 1 failed, in sleep_long (")
    assert "in raise_or_sleep" in stopped.__notes__[0]


@either_way
def test_ranks_that_die(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_without_torch(die_each_in_its_way, 6, env=BUFFERED)
    failures = caught.value.failures
    assert {type(failure) for failure in failures.values()} == {ChildProcessError}
    assert str(failures[1]) == "exited with code 3 before it returned"
    assert str(failures[2]) == "killed by SIGKILL"
    assert str(failures[3]).startswith("killed by SIGABRT, in die_each_in_its_way (")
    assert str(failures[4]) == "exited with code 0 before it returned"
    assert caught.value.results == {0: 0, 5: 5}
    assert capfd.readouterr().out == "last words\n"


@pytest.mark.usefixtures("_preloaded")
def test_deadline_tells_where_each_rank_stood(tmp_path: Path) -> None:
    with Ranks(partial(hang_in_a_collective, tmp_path), 3, deadline=90) as ranks:
        wait_until(lambda: ranks.done() or ranks.running == {0, 1}, 80)
        wait_until(lambda: all((tmp_path / each).exists() for each in "01"), 80)
        ranks._expires = ranks._limit = time.monotonic() + 1.0  # expires now: all ranks hang
        with pytest.raises(RankFailedError) as caught:
            ranks.results()
    error = caught.value
    assert error.results == {2: "finished"}
    assert set(error.failures) == {0, 1}
    for number, function in ((0, "barrier"), (1, "sleep_long")):
        failure = error.failures[number]
        assert isinstance(failure, TimeoutError)
        assert str(failure).startswith(f"not finished at the deadline of 90 s, in {function} (")
        assert "in hang_in_a_collective" in failure.__notes__[0]
        assert f"rank {number}: TimeoutError: not finished" in str(error)
    assert "first" not in str(error)


def test_deadline_before_the_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankFailedError) as caught:
        run_distributed(rank, 2, deadline=6, preload=["slow_to_import"])
    assert "not yet started (preload=['slow_to_import'])" in str(caught.value.failures[1])
    assert "slow_to_import.py" in caught.value.failures[0].__notes__[0]


@pytest.mark.parametrize("told", [None, "0"])
def test_a_preload_leaves_cuda_to_the_ranks(
    told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without this variable torch asks CUDA for a GPU, after which no forked process can use CUDA.
    (tmp_path / "asks_for_a_gpu.py").write_text(
        f"import os\n\nASKS_NVML = os.environ.get({ASKS_NVML!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(ASKS_NVML, raising=False)
    env = {} if told is None else {ASKS_NVML: told}
    assert run_distributed(asked_whom, 1, preload=["asks_for_a_gpu"], env=env) == [("1", told)]


@either_way
def test_preload_that_fails() -> None:
    with pytest.raises(RankFailedError, match="rank 0 first") as caught:
        run_distributed(rank, 2, preload=["no_such_module"])
    assert isinstance(caught.value.failures[0], ModuleNotFoundError)
    assert str(caught.value.failures[1]) == "not started: no launcher"


def test_function_that_cannot_be_pickled() -> None:
    def local() -> None: ...

    before = belongings()
    for function in (lambda: 1, local, partial(rank_of, threading.Lock())):
        with pytest.raises(TypeError, match=r"functools\.partial over a module-level function"):
            run_distributed(function, 2)
    assert belongings() == before


def test_results_and_exceptions_that_cannot_be_pickled() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_without_torch(leave_unpicklable, 4)
    failures = caught.value.failures
    assert isinstance(failures[0], TypeError)
    assert "returned a _thread.lock that cannot be pickled" in str(failures[0])
    assert isinstance(failures[1], RuntimeError)
    assert str(failures[1]) == "Picky: 1 and 2"
    assert "in leave_unpicklable" in failures[1].__notes__[0]
    assert str(failures[2]) == "SystemExit: 4"
    assert caught.value.results == {3: "fine"}


@pytest.mark.parametrize(("world_size", "deadline"), [(0, 1.0), (1, 0.0), (1, float("inf"))])
def test_senseless_sizes(world_size: int, deadline: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        run_distributed(rank, world_size, deadline=deadline)


# Leftovers ---------------------------------------------------------------------------------------


def test_nothing_is_left_in_the_caller(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_GRACE_S", 0.5)
    run_without_torch(rank, 1)  # torch keeps a pipe open after the first store
    before = belongings()
    pids = run_without_torch(leave_a_grandchild, 2, env={MARK: mark})
    assert len(set(pids)) == 2
    assert gone(pids)
    assert (belongings(), marked(mark)) == (before, [])
    with pytest.raises(RankFailedError):
        run_without_torch(raise_or_sleep, 2, env={MARK: mark})
    assert (belongings(), marked(mark)) == (before, [])
    ranks = Ranks(sleep_long, 2, preload=(), env={MARK: mark})
    with pytest.raises(InterruptedError):
        leave_early(ranks, mark)
    assert (belongings(), marked(mark)) == (before, [])
    with pytest.raises(RuntimeError, match="with block"):
        ranks.results()


def leave_early(ranks: Ranks[None], mark: str) -> None:
    with ranks:
        wait_until(lambda: len(marked(mark)) == 4, 60)
        raise InterruptedError


def test_ctrl_c_leaves_no_process(tmp_path: Path, mark: str) -> None:
    with start_script(tmp_path / "script.py", mark, SLEEPING_SCRIPT) as script:
        wait_until(lambda: len(marked(mark)) == SLEEPING_PROCESSES, 60)
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        out, _ = script.communicate(timeout=30)
    assert (script.returncode, out) == (9, "interrupted\n")
    assert marked(mark) == []


def test_killed_caller_whose_fork_holds_the_pipes(tmp_path: Path, mark: str) -> None:
    script = start_script(tmp_path / "script.py", mark, SLEEPING_SCRIPT, "fork")
    wait_until(lambda: len(marked(mark)) == SLEEPING_PROCESSES + 1, 60)
    (fork,) = (child for child in psutil.Process(script.pid).children() if not child.children())
    with script:
        script.kill()
        wait_until(lambda: marked(mark) == [fork], 10)
        fork.kill()


def test_killed_guard_and_launcher_take_the_ranks_along(mark: str) -> None:
    for victim in ("guard", "launcher"):
        with Ranks(sleep_long, 2, preload=(), env={MARK: mark}) as ranks:
            wait_until(lambda: len(marked(mark)) == 4, 60)
            guard = next(p for p in marked(mark) if p.ppid() == os.getpid())
            (guard if victim == "guard" else guard.children()[0]).kill()
            with pytest.raises(RankFailedError, match="launcher"):
                ranks.results()
        wait_until(lambda: marked(mark) == [], 10)


# The handle --------------------------------------------------------------------------------------


def test_handle_follows_the_ranks(tmp_path: Path) -> None:
    ranks = Ranks(partial(wait_for, tmp_path), 3, preload=())
    with pytest.raises(RuntimeError, match="with block"):
        ranks.done()
    with ranks:
        assert not ranks.done()
        assert ranks.running == {0, 1, 2}
        (tmp_path / "0").touch()
        wait_until(lambda: ranks.done(timeout=0.05) or ranks.running == {1, 2}, 60)
        assert not ranks.done(timeout=0.2)
        for other in "12":
            (tmp_path / other).touch()
        assert ranks.done(timeout=60)
        assert ranks.running == frozenset()
    assert ranks.results() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="make another"), ranks:
        pass


# The preloaded interpreter -----------------------------------------------------------------------


def all_pids(file: Path) -> list[int]:
    """Return the pids of the ranks, launchers, guards and grandchildren, once all have started."""
    files = [file.with_suffix(f".{number}") for number in range(2)]
    wait_until(
        lambda: all(each.exists() and each.read_text().count(" ") == 3 for each in files), 60
    )
    return [int(pid) for each in files for pid in each.read_text().split()]


def test_preloaded_modules_are_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with preloaded(rank_functions.__name__):
        first = run_without_torch(where, 2, env={"EXTRA": "1"})
        (interpreter,) = {each.imported_by for each in first}
        assert interpreter not in {os.getpid(), *(each.pid for each in first)}
        assert [each.extra for each in first] == ["1", "1"]

        def alone(**env: str) -> Rank:
            (found,) = run_without_torch(where, 1, env=env)
            return found

        # Settings that a fork can't apply need a fresh interpreter, and others do not.
        for env in (
            {"OMP_NUM_THREADS": "2"},
            {"PYTHONWARNINGS": "ignore::UserWarning"},
            {PRELOADED: "/nowhere"},
        ):
            assert alone(**env).imported_by != interpreter
        strict = alone(PYTHONWARNINGS="error")
        assert (strict.imported_by, strict.warnings_raise) == (interpreter, True)
        before = resource.getrlimit(LIMIT)
        lower = (before[0] - 1, before[1])
        resource.setrlimit(LIMIT, lower)
        try:
            limited = alone()
        finally:
            resource.setrlimit(LIMIT, before)
        assert (limited.imported_by == interpreter, limited.limit) == (False, lower)
        monkeypatch.setenv("EXTRA", "2")
        with preloaded(rank_functions.__name__):
            assert alone().imported_by != interpreter
        again = alone()
        assert again[1:] == (interpreter, "2", False, before)
    assert PRELOADED not in os.environ
    assert gone([interpreter])


def test_a_preloaded_interpreter_in_a_long_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket has at most 107 bytes."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with preloaded(rank_functions.__name__):
        assert run_without_torch(rank, 2) == [0, 1]


def test_ranks_run_without_a_preloaded_interpreter_that_failed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with preloaded("no_such_module"):
        assert run_without_torch(rank, 2) == [0, 1]
    assert "No module named 'no_such_module'" in capfd.readouterr().err
    with preloaded(rank_functions.__name__):
        (found,) = run_without_torch(where, 1)
        psutil.Process(found.imported_by).kill()
        assert run_without_torch(rank, 2) == [0, 1]


def test_nothing_is_left_of_forked_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_GRACE_S", 0.5)
    run_without_torch(rank, 1)
    outside = belongings()
    with preloaded("torch", "torch.distributed"):
        run_without_torch(rank, 1)
        before = belongings()
        run_without_torch(partial(leave_a_grandchild_in, tmp_path / "well"), 2)
        wait_until(partial(gone, all_pids(tmp_path / "well")), 5)
        assert belongings() == before
        with pytest.raises(RankFailedError):
            run_without_torch(raise_or_sleep, 2)
        assert belongings() == before
        with Ranks(partial(give_birth, tmp_path / "left"), 2):
            pids = all_pids(tmp_path / "left")
        wait_until(partial(gone, pids), 5)
        assert belongings() == before
        # If a guard or a launcher dies, the ranks end.
        for victim in (1, 2):
            with Ranks(partial(give_birth, tmp_path / f"victim {victim}"), 2) as ranks:
                pids = all_pids(tmp_path / f"victim {victim}")
                os.kill(pids[victim], signal.SIGKILL)
                with pytest.raises(RankFailedError, match="launcher"):
                    ranks.results()
            wait_until(partial(gone, pids[:3] + pids[4:7]), 10)
            if victim == 2:  # without the guard no process ends these two
                for pid in (pids[3], pids[7]):
                    os.kill(pid, signal.SIGKILL)
    assert belongings() == outside


def test_killed_caller_takes_forked_ranks_along(tmp_path: Path, mark: str) -> None:
    body = """
        import sys, time
        from functools import partial
        from pathlib import Path
        from megapg.testing.distributed import Ranks, preloaded
        from rank_functions import give_birth

        if __name__ == "__main__":
            with preloaded("torch"), Ranks(partial(give_birth, Path(sys.argv[1])), 2) as ranks:
                ranks.results()
    """
    with start_script(tmp_path / "script.py", mark, body, str(tmp_path / "pids")) as script:
        pids = all_pids(tmp_path / "pids")
        interpreter = psutil.Process(pids[2]).ppid()
        script.kill()
        wait_until(lambda: gone([*pids, interpreter]), 10)
