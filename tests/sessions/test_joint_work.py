"""Work in steps over a store: three ranks as threads of one process, on a real TCP store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megapg.errors import LayoutMismatchError
from megapg.rendezvous.joint_work import CancelledError, JointWork, OthersFailedError
from megapg.rendezvous.store import Store, host_of

RANKS = range(3)
PATIENT = 60.0  # seconds, for cases that do not test the time


@pytest.fixture(scope="module")
def host():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(host, request):
    return dist.PrefixStore(request.node.name, host)


def together(store, work, *, timeout=PATIENT, settings=None, name="work", left=None):
    """Return the result or the exception of ``work(team)`` on each rank.

    Every rank releases the semaphore ``left`` at its end.
    """
    connections = [Store(store.clone(), host_of(store, "the test's store")) for _ in RANKS]

    def one(rank):
        team = JointWork(connections[rank], name, rank, RANKS, timeout=timeout)
        try:
            team.begin(settings(rank) if settings else {"what": "a test"})
            with team:
                return work(team)
        except Exception as error:
            return error
        finally:
            if left:
                left.release()

    with ThreadPoolExecutor(len(RANKS)) as pool:
        return list(pool.map(one, RANKS))


def test_reports_reach_the_leader_and_its_word_everyone(store):
    long = bytes(range(256)) * 40_000  # 10 MB: more than the store takes in one message

    def work(team):
        found = team.collect("reports", long + bytes([team.rank]))
        team.agree("heard")
        return found, team.announce("word", long if team.leading else b"")

    reports, *others = together(store, work)
    assert reports == ({rank: long + bytes([rank]) for rank in RANKS}, long)
    assert others == [({}, long)] * 2


def test_whoever_fails_is_heard_everywhere_at_once(store):
    def work(team):
        if team.rank == 1:
            raise ValueError("no ink")
        team.agree("together")

    started = time.monotonic()
    leader, failed, other = together(store, work, timeout=60)
    assert time.monotonic() - started < 30
    assert isinstance(failed, ValueError)
    for error in (leader, other):
        assert isinstance(error, OthersFailedError)
        assert error.problems == {1: "ValueError: no ink"}
        assert error.missing == (1,)


def test_a_busy_rank_hears_of_it_too(store):
    def work(team):
        if team.rank == 1:
            raise ValueError("no ink")
        for _ in range(1000):
            team.progress()
            time.sleep(0.01)

    leader, _, other = together(store, work)
    assert leader.problems == other.problems == {1: "ValueError: no ink"}


@pytest.mark.parametrize("waiting", [(0,), (1,), (1, 2), (0, 2), ()])
def test_ranks_that_need_not_wait_go_on_and_those_that_do_hear_of_all(store, waiting):
    """Some ranks wait at two steps, at which the last rank is late; all wait at the third."""
    late, seen = 0.3, {}
    started = time.monotonic()

    def work(team):
        if team.rank == 2:
            time.sleep(late)
        for topic in ("first", "second"):
            team.agree(topic, wait=team.rank in waiting)
            seen[team.rank, topic] = time.monotonic() - started
        team.agree("last")
        seen[team.rank, "last"] = time.monotonic() - started

    assert together(store, work) == [None] * 3
    for (rank, topic), when in seen.items():
        if rank in waiting or topic == "last":
            assert when >= late, (rank, topic)
    if 1 not in waiting:
        assert seen[1, "second"] < min(seen[rank, "last"] for rank in RANKS)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_rank_is_given_up_and_one_that_works_is_not(store, silent):
    left = threading.Semaphore(0)

    def work(team):
        if team.rank == silent:
            for _ in range(2):
                assert left.acquire(timeout=PATIENT)
            return
        if team.rank == 1:  # longer than the timeout, but with progress reports
            until = time.monotonic() + 5
            while time.monotonic() < until:
                time.sleep(0.05)
                if silent:
                    team.progress()
        team.agree("together")

    told = together(store, work, timeout=4, left=left)
    for rank, error in enumerate(told):
        if rank != silent:
            assert isinstance(error, OthersFailedError)
            assert silent in error.problems
            assert "no sign of life for 4 s" in error.problems[silent]
            assert 1 not in error.problems


def test_what_takes_long_in_one_piece_is_no_silence(store):
    def work(team):
        if team.rank == 1:
            with team.busy():
                time.sleep(5)
        team.agree("together")
        return "well"

    assert together(store, work, timeout=4) == ["well"] * 3


def test_called_off_before_the_last_report_all_stop(store):
    def work(team):
        if team.rank == 2:
            team.cancel()
            team.progress()
        team.collect("written", b"", final=True)
        team.announce("published")

    leader, other, cancelled = together(store, work)
    assert isinstance(cancelled, CancelledError)
    for error in (leader, other):
        assert "called off on rank 2" in error.problems[2]


@pytest.mark.parametrize("in_time", [True, False])
def test_called_off_after_the_last_report_the_leader_decides(store, in_time):
    cancelled, published = threading.Event(), threading.Event()

    def work(team):
        team.collect("written", b"", final=True)
        if team.leading:
            if in_time:
                assert cancelled.wait(PATIENT)
                time.sleep(1)
            team.heed()
            published.set()
            if not in_time:
                assert cancelled.wait(PATIENT)
                time.sleep(1)
        elif team.rank == 2:
            if not in_time:
                assert published.wait(PATIENT)
            team.cancel()
            cancelled.set()
        return team.announce("published", b"yes")

    told = together(store, work)
    if in_time:
        assert all(isinstance(error, OthersFailedError) for error in told)
    else:
        assert told == [b"yes"] * 3


def test_another_piece_of_the_name_may_begin_while_one_goes_on(store):
    first_has_begun, first_may_end = threading.Barrier(4), threading.Event()

    def slow(team):
        first_has_begun.wait(PATIENT)
        first_may_end.wait(PATIENT)
        team.agree("together")
        return "first"

    def quick(team):
        team.agree("together")
        return "second"

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together, store, slow)
        first_has_begun.wait(PATIENT)
        assert together(store, quick) == ["second"] * 3
        first_may_end.set()
        assert first.result() == ["first"] * 3


def test_nothing_grows_in_the_store(store, host):
    def work(team):
        team.collect("reports", b"x" * 1000)
        return team.announce("word")

    def held():
        keys = [key for key in host.list_keys() if "test_nothing_grows" in key]
        return len(keys), sum(len(host.get(key)) for key in keys)

    together(store, work)
    count, size = held()
    for _ in range(20):
        together(store, work)
    again, larger = held()
    assert again == count
    assert larger < size + 50  # later generations and attempts have more digits


@pytest.mark.parametrize("last", RANKS)
def test_ranks_that_do_different_things_are_told_apart(store, last):
    """The last rank to arrive finds the messages of the others."""
    watching = Store(store.clone(), host_of(store, "the test's store"))
    others = [f"megapg/work/hello/{rank}" for rank in RANKS if rank != last]

    def settings(rank):
        while rank == last and not watching.check(others):
            time.sleep(0.01)
        return {"step": str(rank // 2)}

    told = together(store, lambda team: None, settings=settings)
    assert all(isinstance(error, LayoutMismatchError) for error in told)
    assert told[0].differences == {"step": {0: "0", 1: "0", 2: "1"}}
