"""SIGTERM and Ctrl-C with an open session: errors on the ranks, clean-up and exit status."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import freezing
import psutil
import pytest
import torch
import torch.distributed as dist
from steps import Steps

import megapg
from megapg.checkpoint.background import CheckpointSave, Saves
from megapg.collection import LeaseState
from megapg.errors import CheckpointSaveError, RankFailedError, RendezvousError, SessionError
from megapg.launch import signals
from megapg.launch.signals import SignalExit
from megapg.rendezvous.rendezvous import Rendezvous
from megapg.testing import distributed, run_distributed


@pytest.fixture
def alone(monkeypatch):
    """Run without a launcher's variables, and check that handlers and threads are restored."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = handlers()
    threads = threading.active_count()
    yield
    assert handlers() == before
    until = time.monotonic() + 30
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert not dist.is_initialized()


def handlers():
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return (*map(signal.getsignal, (signal.SIGTERM, signal.SIGINT)), wakeup)


def kill(number):
    os.kill(os.getpid(), number)
    for _ in range(1000):  # Python runs the handler within the next instructions
        pass


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGTERM, SignalExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_ends_the_body_and_closes_the_session(number, expected):
    before = handlers()
    session = megapg.session(handle_signals=True)
    assert handlers() != before
    lease = session.groups.lease
    seen = []
    lease.before_end.append(seen.append)
    with pytest.raises(expected) as stopped, session:
        kill(number)
    assert session.closed
    assert lease.state is LeaseState.CLOSED
    assert seen == [stopped.value]  # background saves are cancelled, not awaited
    assert handlers() == before
    if expected is SignalExit:
        assert (stopped.value.code, str(stopped.value)) == (143, "stopped by SIGTERM")


class StoppedWhenRead(RuntimeError):
    """An error that the signal of a launcher follows, when closing has begun to explain it."""

    def __str__(self):
        if not self.args:
            self.args = ("read",)
            kill(signal.SIGTERM)
        return "lost"


@pytest.mark.usefixtures("alone")
def test_a_signal_just_after_an_error_takes_no_step_of_closing_away():
    session = megapg.session(handle_signals=True)
    session.before_release(lambda: seen.append("released"))
    session.groups.lease.before_end.append(lambda _: seen.append("ended"))
    seen = []
    with pytest.raises(SignalExit) as stopped, session:
        raise StoppedWhenRead
    assert isinstance(stopped.value.__context__, StoppedWhenRead)
    assert session.closed
    assert sorted(seen) == ["ended", "released"]


@pytest.mark.usefixtures("alone")
def test_a_signal_after_a_failed_collective_names_the_collective():
    session = megapg.session(handle_signals=True)
    with pytest.raises(SignalExit) as stopped, session:
        fail_and_be_stopped(session)
    assert any("in all_reduce on tp" in note for note in stopped.value.__notes__)


def fail_and_be_stopped(session):
    try:
        complex_one = torch.ones(1, dtype=torch.complex64)
        dist.all_reduce(complex_one, dist.ReduceOp.MAX, group=session.groups.tp)
    except ValueError:
        kill(signal.SIGTERM)


@pytest.mark.usefixtures("alone")
def test_a_background_save_is_called_off(tmp_path):
    called_off = threading.Event()

    def work():
        called_off.wait(60)
        raise CheckpointSaveError("called off")

    save = CheckpointSave(tmp_path, 7, work, called_off.set)
    session = megapg.session(handle_signals=True)
    Saves.of(session.groups.lease).add(save)
    with pytest.raises(SignalExit), session:
        kill(signal.SIGTERM)
    assert called_off.is_set()
    assert save.done


@pytest.mark.usefixtures("alone")
def test_earlier_handlers_are_called_first_and_put_back(monkeypatch):
    called = []
    earlier = [signal.signal(n, lambda n, f: called.append(n)) for n in (15, 2)]
    ours = handlers()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            expected = pytest.raises((SignalExit, KeyboardInterrupt))
            with expected, megapg.session(handle_signals=True):
                kill(number)
            assert handlers() == ours
            kill(number)  # the user's handler alone is back
        assert called == [15, 15, 2, 2]

        def resign(number, frame):
            raise RuntimeError("their own way out")

        signal.signal(signal.SIGTERM, resign)
        expected = pytest.raises(RuntimeError, match="their own way out")
        with expected, megapg.session(handle_signals=True) as session:
            kill(signal.SIGTERM)
        assert session.closed
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as nohup does with SIGHUP
        with megapg.session(handle_signals=True):
            kill(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        for number, handler in zip((15, 2), earlier, strict=True):
            signal.signal(number, handler)


@pytest.mark.usefixtures("alone")
def test_a_repeated_signal_is_one_request_and_a_later_one_is_another(monkeypatch):
    monkeypatch.setattr(signals, "_SAME", 0.5)
    came = 0
    with megapg.session(handle_signals=True):
        for _ in range(2):
            try:
                kill(signal.SIGINT)
            except KeyboardInterrupt:
                came += 1
                monkeypatch.setattr(signals, "_SAME", 60.0)
                kill(signal.SIGTERM)  # the launcher passes the signal on while the body cleans up
                kill(signal.SIGINT)
            monkeypatch.setattr(signals, "_SAME", 0.5)
            time.sleep(0.6)
    assert came == 2
    came = 0
    with megapg.session(handle_signals=True):
        for _ in range(12):  # sent by an impatient user without pauses
            try:
                kill(signal.SIGINT)
            except KeyboardInterrupt:
                came += 1
            time.sleep(0.1)
    assert came > 1
    # The launcher's second signal arrives while the session closes for the first. The session must
    # still cancel background work and must keep the first error.
    session = megapg.session(handle_signals=True)
    lease, called_off = session.groups.lease, []
    lease.before_end.append(called_off.append)
    lease.at_end.append(lambda: kill(signal.SIGTERM))
    session.before_release(lambda: kill(signal.SIGTERM))
    holding = signals.Signals.closing

    @contextlib.contextmanager
    def told_once_more(ear):
        with holding(ear):
            kill(signal.SIGTERM)
            yield

    monkeypatch.setattr(signals.Signals, "closing", told_once_more)
    monkeypatch.setattr(signals, "_SAME", 60.0)
    with pytest.raises(KeyboardInterrupt) as stopped, session:
        kill(signal.SIGINT)
    assert called_off == [stopped.value]
    assert session.closed


@pytest.mark.usefixtures("alone")
def test_a_signal_that_comes_while_closing_waits_for_its_end():
    session = megapg.session(handle_signals=True)
    groups = session.groups
    groups.lease.at_end.append(lambda: kill(signal.SIGTERM))
    with pytest.raises(SignalExit):
        session.close()
    assert session.closed
    assert not dist.is_initialized()
    # A signal takes effect at once, even while the session waits for a background save.
    session = megapg.session(handle_signals=True)

    def waiting_for_a_save(error):
        kill(signal.SIGTERM)
        raise AssertionError("went on waiting")

    session.groups.lease.before_end.append(waiting_for_a_save)
    with pytest.raises(SignalExit):
        session.close()
    assert session.closed


def interrupted_while_waiting_to_close(handle_signals):
    """Rank 1 waits for rank 0 to close; Ctrl-C ends the wait and closes everything."""
    steps = Steps()
    session = megapg.session(tp=2, timeout=60, handle_signals=handle_signals)
    reference = weakref.ref(session.groups.tp)
    if session.rank == 0:
        steps.hear("closed", [1])
        with pytest.raises(RendezvousError, match=r"in order: rank 1: KeyboardInterrupt\."):
            session.close()
    else:
        freezing.once_inside(Rendezvous.part, partial(os.kill, os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            session.close()
        steps.say("closed")
    assert session.closed
    assert reference() is None
    assert not dist.is_initialized()
    with megapg.session(tp=2, timeout=60) as again:
        dist.all_reduce(torch.ones(1), group=again.groups.tp)
    return True


@pytest.mark.parametrize("handle_signals", [False, True])
def test_a_wait_while_closing_can_be_cut_short(handle_signals):
    work = partial(interrupted_while_waiting_to_close, handle_signals)
    assert run_distributed(work, 2) == [True, True]


def interrupted_while_the_store_is_slow(host, port):
    """The store answers again after rank 1 has closed, and rank 0 still learns of the Ctrl-C."""
    steps = Steps()
    os.environ["MASTER_PORT"] = str(port)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    session = megapg.session(tp=2, timeout=60)
    if session.rank == 0:
        steps.hear("closed", [1])
        with pytest.raises(RendezvousError, match=r"in order: rank 1: KeyboardInterrupt\."):
            session.close()
        steps.say("heard")
        return

    def freeze_and_interrupt():
        os.kill(host, signal.SIGSTOP)
        freezing.has_stopped(host)
        time.sleep(0.2)  # by then the rank waits for an answer
        os.kill(os.getpid(), signal.SIGINT)

    freezing.once_inside(Rendezvous.part, freeze_and_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.close()
        assert session.closed
    finally:
        os.kill(host, signal.SIGCONT)
        steps.say("closed")
    steps.hear("heard", [0])


def test_a_slow_store_is_told_of_a_wait_cut_short():
    with freezing.hosting() as where:
        run_distributed(partial(interrupted_while_the_store_is_slow, *where), 2)


@pytest.mark.usefixtures("alone")
def test_sessions_share_one_watch_whichever_closes_first():
    before = handlers()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outer = megapg.session(name="outer", handle_signals=True)
    installed = handlers()
    inner = megapg.session(name="inner", handle_signals=True)
    deaf = megapg.session(name="deaf")
    assert handlers() == installed
    outer.close()
    assert handlers() == installed
    with pytest.raises(SignalExit), inner:
        kill(signal.SIGTERM)
    assert inner.closed
    assert not deaf.closed
    assert handlers() == before
    deaf.close()
    # A later handler of the user stays installed, and megapg's handler below it passes signals on.
    called = []
    below = signal.signal(signal.SIGTERM, lambda n, f: called.append("below"))
    session = megapg.session(handle_signals=True)
    ours = signal.getsignal(signal.SIGTERM)

    def on_top(number, frame):
        called.append("top")
        ours(number, frame)

    signal.signal(signal.SIGTERM, on_top)
    session.close()
    assert signal.getsignal(signal.SIGTERM) is on_top
    kill(signal.SIGTERM)
    assert called == ["top", "below"]
    # its pipe may reuse the descriptors of the previous session
    with megapg.session(handle_signals=True):
        wakeup = handlers()[2]
        ours(signal.SIGTERM, None)
        assert called == ["top", "below", "below"]
        assert handlers()[2] == wakeup
    signal.signal(signal.SIGTERM, below)
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_failed_start_puts_the_handlers_back(monkeypatch):
    before = handlers()
    with pytest.raises(megapg.MegapgError):
        megapg.session(tp=3, handle_signals=True)
    assert handlers() == before
    monkeypatch.setattr(megapg.ownership.opening, "create_world", lambda **_: kill(signal.SIGTERM))
    with pytest.raises(SignalExit):
        megapg.session(handle_signals=True)
    assert handlers() == before


@pytest.mark.usefixtures("alone")
def test_a_handler_that_could_not_be_put_back_is_refused(monkeypatch):
    """Python does not know a handler that the embedding program installed."""
    known = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda n: None if n == signal.SIGTERM else known(n))
    with pytest.raises(SessionError, match=r"SIGTERM has a handler .* could not be put back"):
        megapg.session(handle_signals=True)
    monkeypatch.undo()


def close_there(closer):
    closer.start()
    time.sleep(30)


@pytest.mark.usefixtures("alone")
def test_only_the_main_thread_can():
    raised = []

    def elsewhere():
        try:
            megapg.session(handle_signals=True)
        except SessionError as error:
            raised.append(str(error))

    thread = threading.Thread(target=elsewhere, name="trainer")
    thread.start()
    thread.join()
    assert len(raised) == 1
    assert "in the main thread, and this is 'trainer'" in raised[0]
    # A session can close in another thread; the main thread restores the handlers later.
    session = megapg.session(handle_signals=True)
    closer = threading.Thread(target=session.close)
    closer.start()
    closer.join()
    assert session.closed
    with pytest.raises(KeyboardInterrupt):
        kill(signal.SIGINT)
    # A signal during such a close is delivered to the main thread.
    session = megapg.session(handle_signals=True)
    session.groups.lease.at_end.append(lambda: (kill(signal.SIGINT), time.sleep(0.5)))
    closer = threading.Thread(target=session.close)
    with pytest.raises(KeyboardInterrupt):
        close_there(closer)
    closer.join()
    assert session.closed


def terminate_the_worker(worker):
    worker.start()
    time.sleep(0.5)
    worker.terminate()
    worker.join(30)
    return worker.exitcode


@pytest.mark.usefixtures("alone")
def test_a_forked_worker_dies_alone(monkeypatch):
    """SIGTERM stops a data loader's worker, which inherits the pipe of the parent's watcher."""
    monkeypatch.setattr(signals, "_PATIENCE", 0.2)
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        before = signal.set_wakeup_fd(left.fileno())  # as an event loop does
        with megapg.session(handle_signals=True):
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            assert terminate_the_worker(worker) == -signal.SIGTERM
            time.sleep(0.5)  # by now the parent's watcher would have ended the parent
            heard = []
            old = signal.signal(signal.SIGUSR1, lambda n, f: heard.append(n))
            kill(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, old)
            until = time.monotonic() + 30
            told = b""
            while not told and time.monotonic() < until:
                try:
                    told = right.recv(10)
                except BlockingIOError:
                    time.sleep(0.01)
            assert heard == [signal.SIGUSR1]
            assert told == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(before) == left.fileno()


def told_by_one(stuck_in_a_collective):
    """Rank 1 of 2 gets SIGTERM: while its main thread runs Python, or inside a collective."""
    me, steps = int(os.environ["RANK"]), Steps()
    signals._PATIENCE, signals._FREED = 2.0, 1.0
    session = megapg.session(tp=2, timeout=30, handle_signals=me == 1)
    dist.all_reduce(torch.ones(1), group=session.groups.tp)
    if me == 0:
        steps.until_gone(1)  # rank 0 does not know of the signal
        started = time.monotonic()
        try:
            with session:
                dist.all_reduce(torch.ones(1), group=session.groups.tp)
        except RuntimeError as error:
            assert not dist.is_initialized()
            return time.monotonic() - started, [str(error), *getattr(error, "__notes__", ())]
    session.groups.lease.before_end.append(lambda error: print(f"called off: {error}", flush=True))
    where = dist.all_reduce if stuck_in_a_collective else compute
    freezing.once_inside(where, partial(os.kill, os.getpid(), signal.SIGTERM))
    with session:
        if stuck_in_a_collective:
            dist.all_reduce(torch.ones(1), group=session.groups.tp)
        compute()
    return "not stopped"


def compute():
    time.sleep(60)


@pytest.mark.parametrize("stuck", [False, True], ids=["computing", "stuck"])
def test_the_others_hear_of_it(stuck, monkeypatch, capfd):
    monkeypatch.setattr(distributed, "_GRACE_S", 60.0)
    with pytest.raises(RankFailedError) as failed:
        run_distributed(partial(told_by_one, stuck), 2, deadline=120)
    seconds, said = failed.value.results[0]
    assert seconds < 20.0  # a hang would take the session's 30 s
    assert "rank 1: SignalExit: stopped by SIGTERM" in said[-1]
    assert set(failed.value.failures) == {1}
    out, err = capfd.readouterr()
    assert out.count("called off: stopped by SIGTERM") == 1
    gone = str(failed.value.failures[1])
    if stuck:
        assert gone == "exited with code 143 before it returned"
        assert "SIGTERM, but for 2 s the main thread has been inside a call" in err
        assert "in told_by_one\n    dist.all_reduce(" in err
    else:
        assert gone == "SignalExit: stopped by SIGTERM"
        assert "main thread" not in err


JOB = """
import atexit, os, time
import torch, torch.distributed as dist, megapg

rank = int(os.environ.get("RANK", 0))
atexit.register(lambda: print(f"rank {rank} ran its exit handlers", flush=True))
try:
    with megapg.session(timeout=30, handle_signals=True) as session:
        dist.all_reduce(torch.ones(1), group=session.groups.dp)
        open(f"ready{rank}", "w").close()
        time.sleep(100)
except BaseException as error:
    closed = session.closed and not dist.is_initialized()
    print(f"rank {rank}: {error!r}, closed {closed}", flush=True)
    raise
"""


@pytest.fixture
def job(tmp_path):
    """Return a function that starts a script and waits until it runs; kill leftovers at the end."""
    with contextlib.ExitStack() as started:

        def start(launcher, ranks):
            directory = tmp_path / str(len(list(tmp_path.iterdir())))
            directory.mkdir()
            (directory / "job.py").write_text(JOB)
            process = subprocess.Popen(
                [sys.executable, *launcher, "job.py"],
                cwd=directory,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            started.callback(kill_all_of, process)
            until = time.monotonic() + 120
            while not all((directory / f"ready{rank}").exists() for rank in ranks):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < until, "the job did not get going"
                time.sleep(0.05)
            return process

        yield start


def kill_all_of(process):
    if process.poll() is None:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.communicate()


def test_a_sigterm_ends_every_rank_in_order_with_the_status_that_launchers_expect(job):
    """A cluster takes the machine back: torchrun passes SIGTERM on, and kills after 30 s."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    torchrun = job(launcher, range(2))
    expected = {signal.SIGTERM: 143, signal.SIGINT: -2}
    alone = {number: job((), range(1)) for number in expected}
    workers = psutil.Process(torchrun.pid).children(recursive=True)
    assert len(workers) == 2
    torchrun.terminate()
    for number, process in alone.items():
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == expected[number], said
        assert "closed True" in said
        assert "rank 0 ran its exit handlers" in said
    said, _ = torchrun.communicate(timeout=120)
    for rank in (0, 1):
        assert f"rank {rank}: SignalExit(15), closed True" in said
        assert f"rank {rank} ran its exit handlers" in said
    assert psutil.wait_procs(workers, timeout=30)[1] == []
