"""run_distributed: results, every way a rank can fail, and that nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from megapg.errors import MegapgError, RankFailedError
from megapg.testing import distributed
from megapg.testing.distributed import Ranks, run_distributed

MARK = "MEGAPG_TEST_MARK"
ROOT = Path(__file__).parents[1]
BUFFERED = {"PYTHONUNBUFFERED": ""}


def rank() -> int:
    return int(os.environ["RANK"])


# What the ranks run ------------------------------------------------------------------------------


def total(start: int) -> tuple[int, int]:
    dist.init_process_group("gloo")
    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), int(value)


def surroundings() -> dict[str, str]:
    return {**os.environ, "cwd": os.getcwd(), "stdin": sys.stdin.read(), "pid": str(os.getpid())}


def raise_in_one_while_others_wait() -> None:
    dist.init_process_group("gloo")
    if rank() == 1:
        raise LookupError("no such thing", 7)
    dist.barrier()


def raise_or_sleep() -> None:
    if rank() == 1:
        raise LookupError("no such thing")
    sleep_long()


def sleep_long() -> None:
    time.sleep(300)


def hang_in_a_collective() -> str:
    if rank() == 2:
        return "finished"
    dist.init_process_group("gloo", rank=rank(), world_size=2)
    if rank() == 1:
        sleep_long()
    dist.barrier()
    return "never"


def die_each_in_its_way() -> int:
    if rank() == 1:
        print("last words")
        os._exit(3)
    if rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 3:
        os.abort()
    if rank() == 4:
        os._exit(0)
    return rank()


class Picky(Exception):
    """Pickles and then fails to load, as many exceptions do."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def leave_unpicklable() -> object:
    if rank() == 0:
        return threading.Lock()
    if rank() == 1:
        raise Picky(1, 2)
    if rank() == 2:
        sys.exit(4)
    return "fine"


def leave_a_grandchild() -> int:
    # A session of its own: killing the process group of the ranks would not reach it.
    return subprocess.Popen(["sleep", "300"], start_new_session=True).pid


def large() -> bytes:
    print("unfinished line", end=";")
    ctypes.CDLL(None).printf(b"line of C;")
    return bytes(3_000_000)


# Helpers -----------------------------------------------------------------------------------------


def marked(mark: str) -> list[psutil.Process]:
    """The processes of this machine whose environment carries ``mark``."""
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


def belongings() -> tuple[set[int], int, list[str]]:
    """Children (zombies included), threads and descriptors of this process."""
    me = psutil.Process()
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists the directory
            descriptors.append(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
    threads = len(os.listdir("/proc/self/task"))
    return {child.pid for child in me.children(recursive=True)}, threads, sorted(descriptors)


@pytest.fixture
def mark() -> Iterator[str]:
    value = uuid.uuid4().hex
    yield value
    for process in marked(value):  # a failing test must not disturb the next
        process.kill()


def start_script(path: Path, mark: str, body: str, *arguments: str) -> subprocess.Popen[str]:
    path.write_text(textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)},
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


def test_results_come_in_rank_order_and_gloo_works() -> None:
    assert run_distributed(partial(total, 10), 3) == [(0, 33), (1, 33), (2, 33)]


def test_environment_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    seen = run_distributed(surroundings, 2, env={"EXTRA": "1", "RANK": "7"})
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


def test_large_results_and_output_arrive(capfd: pytest.CaptureFixture[str]) -> None:
    assert [len(result) for result in run_distributed(large, 2, env=BUFFERED)] == [3_000_000] * 2
    output = capfd.readouterr().out
    assert (output.count("unfinished line;"), output.count("line of C;")) == (2, 2)


def test_two_runs_at_once() -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run_distributed, partial(total, start), 2) for start in (0, 100)]
        assert [run.result() for run in runs] == [[(0, 1), (1, 1)], [(0, 201), (1, 201)]]


def test_function_of_a_main_script(tmp_path: Path, mark: str) -> None:
    script = start_script(
        tmp_path / "script.py",
        mark,
        """
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
            print(run_distributed(partial(nested, Point(5)), 1, preload=()))
        """,
    )
    out, _ = script.communicate(timeout=60)
    assert (script.returncode, out) == (
        0,
        "[Point(x=5), Point(x=5)]\n[[Point(x=6), Point(x=6)]]\n",
    )


def test_unguarded_main_script_is_refused(tmp_path: Path, mark: str) -> None:
    script = start_script(
        tmp_path / "script.py",
        mark,
        """
        from megapg.testing.distributed import run_distributed

        def one():
            return 1

        run_distributed(one, 1, preload=(), deadline=30)
        """,
    )
    out, _ = script.communicate(timeout=60)
    assert script.returncode == 1
    assert "under if __name__ == '__main__'" in out


def test_function_of_an_interactive_session_is_refused() -> None:
    code = "from megapg.testing.distributed import *\ndef f(): pass\nrun_distributed(f, 1)"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "TypeError" in ran.stderr
    assert "put it in a file" in ran.stderr


# Failures ----------------------------------------------------------------------------------------


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
    assert "Connection" in str(error.failures[0])  # gloo noticed; nobody waited for the deadline
    again = pickle.loads(pickle.dumps(error))
    assert set(again.failures) == {0, 1, 2}


def test_others_are_stopped_after_a_grace_period(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_GRACE_S", 1.0)
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 first") as caught:
        run_distributed(raise_or_sleep, 2, deadline=250)
    assert time.monotonic() - started < 60
    stopped = caught.value.failures[0]
    assert isinstance(stopped, TimeoutError)
    assert str(stopped).startswith("stopped 1 s after rank 1 failed, in sleep_long (")
    assert "in raise_or_sleep" in stopped.__notes__[0]


def test_ranks_that_die(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(die_each_in_its_way, 6, env=BUFFERED)
    failures = caught.value.failures
    assert {type(failure) for failure in failures.values()} == {ChildProcessError}
    assert str(failures[1]) == "exited with code 3 before it returned"
    assert str(failures[2]) == "killed by SIGKILL"
    assert str(failures[3]).startswith("killed by SIGABRT, in die_each_in_its_way (")
    assert str(failures[4]) == "exited with code 0 before it returned"
    assert caught.value.results == {0: 0, 5: 5}
    assert capfd.readouterr().out == "last words\n"


def test_deadline_tells_where_each_rank_stood() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(hang_in_a_collective, 3, deadline=8)
    error = caught.value
    assert error.results == {2: "finished"}
    assert set(error.failures) == {0, 1}
    for number, function in ((0, "barrier"), (1, "sleep_long")):
        failure = error.failures[number]
        assert isinstance(failure, TimeoutError)
        assert str(failure).startswith(f"not finished at the deadline of 8 s, in {function} (")
        assert "in hang_in_a_collective" in failure.__notes__[0]
        assert f"rank {number}: TimeoutError: not finished" in str(error)
    assert "first" not in str(error)


def test_deadline_before_the_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(300)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankFailedError) as caught:
        run_distributed(rank, 2, deadline=2, preload=["slow_to_import"])
    assert "not yet started (preload=['slow_to_import'])" in str(caught.value.failures[1])
    assert "slow_to_import.py" in caught.value.failures[0].__notes__[0]


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


def rank_of(lock: object) -> int:
    return rank()


def test_results_and_exceptions_that_cannot_be_pickled() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(leave_unpicklable, 4)
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


# What is left ------------------------------------------------------------------------------------


def test_nothing_is_left_in_the_caller(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_GRACE_S", 0.5)
    run_distributed(rank, 1)  # torch keeps a pipe of its own from the first store on
    before = belongings()
    run_distributed(partial(total, 0), 2, env={MARK: mark})
    assert (belongings(), marked(mark)) == (before, [])
    with pytest.raises(RankFailedError):
        run_distributed(raise_or_sleep, 2, env={MARK: mark})
    assert (belongings(), marked(mark)) == (before, [])
    with pytest.raises(InterruptedError):
        raise_in_the_block(mark)
    assert (belongings(), marked(mark)) == (before, [])


def raise_in_the_block(mark: str) -> None:
    with Ranks(sleep_long, 2, env={MARK: mark}):
        wait_until(lambda: len(marked(mark)) == 4, 60)
        raise InterruptedError


def test_grandchildren_are_killed(mark: str) -> None:
    pids = run_distributed(leave_a_grandchild, 2, env={MARK: mark})
    assert len(set(pids)) == 2
    assert marked(mark) == []
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_ctrl_c_leaves_no_process(tmp_path: Path, mark: str) -> None:
    script = start_script(tmp_path / "script.py", mark, SLEEPING_SCRIPT)
    wait_until(lambda: len(marked(mark)) == SLEEPING_PROCESSES, 60)
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    out, _ = script.communicate(timeout=30)
    assert (script.returncode, out) == (9, "interrupted\n")
    assert marked(mark) == []


def test_killed_caller_leaves_no_process(tmp_path: Path, mark: str) -> None:
    script = start_script(tmp_path / "script.py", mark, SLEEPING_SCRIPT)
    wait_until(lambda: len(marked(mark)) == SLEEPING_PROCESSES, 60)
    script.kill()
    script.communicate(timeout=30)  # end of file: nobody holds the script's output any more
    wait_until(lambda: marked(mark) == [], 10)


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
        with Ranks(sleep_long, 2, env={MARK: mark}) as ranks:
            wait_until(lambda: len(marked(mark)) == 4, 60)
            guard = next(p for p in marked(mark) if p.ppid() == os.getpid())
            (guard if victim == "guard" else guard.children()[0]).kill()
            with pytest.raises(RankFailedError, match="launcher"):
                ranks.results()
        wait_until(lambda: marked(mark) == [], 10)


# The handle --------------------------------------------------------------------------------------


def wait_for(path: Path) -> int:
    while rank() and not path.exists():
        time.sleep(0.01)
    return rank()


def test_handle_follows_the_ranks(tmp_path: Path) -> None:
    ranks = Ranks(partial(wait_for, tmp_path / "go"), 3)
    with pytest.raises(RuntimeError, match="with block"):
        ranks.done()
    with ranks:
        assert not ranks.done()
        assert ranks.running == {0, 1, 2}
        wait_until(lambda: ranks.done(timeout=0.05) or ranks.running == {1, 2}, 60)
        assert not ranks.done(timeout=0.2)
        (tmp_path / "go").touch()
        assert ranks.done(timeout=60)
        assert ranks.running == frozenset()
    assert ranks.results() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="make another"), ranks:
        pass


def test_handle_left_early_has_no_results(mark: str) -> None:
    with Ranks(sleep_long, 2, env={MARK: mark}) as ranks:
        pass
    assert marked(mark) == []
    with pytest.raises(RuntimeError, match="with block"):
        ranks.results()
