"""The host of a store is found without its text, which would cost a slow DNS look-up in torch."""

import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from megapg.rendezvous.store import host_of


@pytest.fixture
def store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def test_no_name_is_looked_up(store, monkeypatch):
    monkeypatch.setattr(dist.TCPStore, "__repr__", lambda store: pytest.fail("asks the DNS"))
    clone = dist.TCPStore(store.host, store.port, is_master=False)
    assert host_of(store, "it").here
    assert host_of(dist.PrefixStore("view", clone), "it").here


def test_a_port_like_it_on_another_host_is_told_apart(store):
    with socket.create_connection(("127.0.0.2", store.port), source_address=("127.0.0.1", 0)):
        assert not host_of(store, "it").here
    assert host_of(store, "it").here


def test_pythons_default_timeout_is_not_set_on_the_stores_sockets(store):
    socket.setdefaulttimeout(5)
    try:
        assert host_of(store, "it").here
    finally:
        socket.setdefaulttimeout(None)
    store.set("still", "blocking")
    assert store.get("still") == b"blocking"


def test_who_only_connects_hosts_nothing(store):
    asks = (
        "import torch.distributed as dist; from megapg.rendezvous.store import host_of\n"
        f"store = dist.TCPStore({store.host!r}, {store.port}, is_master=False)\n"
        "print(host_of(store, 'it').here)"
    )
    said = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True, timeout=60)
    assert said.stdout == "False\n", said.stderr
