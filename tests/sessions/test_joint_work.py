"""Work in steps over a store: three ranks as threads of one process, on a real TCP store."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from megapg.rendezvous.joint_work import JointWork
from megapg.rendezvous.store import Store, host_of

RANKS = range(3)
PATIENT = 60.0  # seconds, for cases that do not test the time


@pytest.fixture(scope="module")
def host():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(host, request):
    return dist.PrefixStore(request.node.name, host)


def together(store, work, *, timeout=PATIENT):
    """Return the result or the exception of ``work(team)`` on each rank."""
    connections = [Store(store.clone(), host_of(store, "the test's store")) for _ in RANKS]

    def one(rank):
        team = JointWork(connections[rank], "work", rank, RANKS, timeout=timeout)
        try:
            with team.begin({"what": "a test"}):
                return work(team)
        except Exception as error:
            return error

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


def test_what_takes_long_in_one_piece_is_no_silence(store):
    def work(team):
        if team.rank == 1:
            with team.busy():
                time.sleep(5)
        team.agree("together")
        return "well"

    assert together(store, work, timeout=4) == ["well"] * 3
