"""Bad input at the start: every rank soon gets a named error, and nothing is left behind."""

import os
import socket
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from steps import Steps

import megapg
from megapg.communicators import create
from megapg.errors import (
    LaunchError,
    LayoutMismatchError,
    MegapgError,
    RendezvousError,
    SessionError,
    StaleGroupError,
)
from megapg.launch import detect
from megapg.megatron import published, to_megatron
from megapg.testing import run_distributed

SOON = 4.0  # timeout of the failing calls, in seconds
BOUND = SOON + 15.0  # deadline for errors on a loaded machine
PATIENT = 90.0  # timeout that no test may wait for


def fresh_session_works(**sizes):
    with megapg.session(timeout=PATIENT, **sizes) as session:
        total = torch.ones(1)
        dist.all_reduce(total, group=session.groups.intra_dist_opt)
        assert total.item() == len(session.layout.ranks)


def sizes_and_names():
    me = int(os.environ["RANK"])
    with megapg.session(tp=2, timeout=PATIENT) as first:
        with pytest.raises(SessionError, match="'default' is already open in this process"):
            megapg.session(pp=2, timeout=SOON)
        if me < 2:
            with pytest.raises(SessionError, match=r"rank . is not in the layout's ranks"):
                megapg.session(name="other", ranks=(2, 3), timeout=SOON)
        with pytest.raises(SessionError, match=r"ranks \[9\], but WORLD has 4"):
            megapg.session(name="other", ranks=(me, 9), timeout=SOON)
        dist.all_reduce(torch.ones(1), group=first.groups.tp)  # the first session still works
        pg = first.groups
    for boundary in (pg.require, partial(to_megatron, pg), published(pg).__enter__):
        with pytest.raises(StaleGroupError, match=r"session 'default' .* closed"):
            boundary()
    with pytest.raises(SessionError, match="Open a new one"):
        _ = first.groups
    fresh_session_works(tp=4)
    return True


def test_what_one_rank_can_see_alone():
    assert run_distributed(sizes_and_names, 4) == [True] * 4


def other_layouts():
    me = int(os.environ["RANK"])
    for mine, setting in (
        ({"tp": 2 if me == 1 else 1}, "tp"),
        ({"tp": 2, "order": "tp-dp-pp" if me == 2 else "tp-cp-ep-dp-pp"}, "order"),
        ({"dedicated": ("tp",) if me == 3 else ()}, "dedicated"),
        (
            {"pp": 2, "embedding_ranks": (lambda p: p[:1]) if me == 0 else (lambda p: p)},
            "embedding_ranks",
        ),
    ):
        started = time.monotonic()
        with pytest.raises(LayoutMismatchError, match=rf"{setting} is .* on rank") as caught:
            megapg.session(timeout=PATIENT, **mine)
        assert time.monotonic() - started < BOUND
        assert set(caught.value.differences[setting]) == {0, 1, 2, 3}
        assert not dist.is_initialized()
    fresh_session_works(tp=2)
    return True


def test_a_rank_with_another_layout_is_named_on_every_rank():
    assert run_distributed(other_layouts, 4) == [True] * 4


def one_is_late(late):
    me, steps = int(os.environ["RANK"]), Steps()
    others = [rank for rank in range(4) if rank != late]
    steps.together()
    if me == late:
        steps.hear("given up", others)
    else:
        started = time.monotonic()
        with pytest.raises(RendezvousError, match=rf"rank {late} never arrived") as caught:
            megapg.session(timeout=SOON)
        assert caught.value.missing == (late,)
        assert time.monotonic() - started < BOUND
        assert not dist.is_initialized()
        steps.say("given up")
        steps.hear("given up", others)
    fresh_session_works(tp=2)
    return True


def test_a_rank_that_never_arrives_is_named_and_may_come_later():
    assert run_distributed(partial(one_is_late, 0), 4) == [True] * 4


def at(monkeypatch, rank, address, port):
    where = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_in_use_is_named(rank, monkeypatch):
    with socket.socket() as taken:  # bound but silent: neither a store nor a refusal
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        at(monkeypatch, rank, "127.0.0.1", port)
        doing = "reach" if rank else "host"
        with pytest.raises(
            RendezvousError, match=f"could not {doing} the store at 127.0.0.1:{port}"
        ):
            megapg.session(tp=2, timeout=2)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", "nobody listens there"),
        ("no.such.host.invalid", "there is no host called"),
    ],
)
def test_a_store_that_is_not_there_is_told_from_one_that_is_silent(address, said, monkeypatch):
    at(monkeypatch, 1, address, free_port())
    with pytest.raises(RendezvousError, match=said) as caught:
        megapg.session(timeout=2)
    assert "something listens there" not in str(caught.value)
    assert "see whether rank 0 started" in str(caught.value)


def test_without_torch_distributed(monkeypatch):
    monkeypatch.setattr(dist, "is_available", lambda: False)  # as in a torch built without it
    with pytest.raises(SessionError, match=r"built without torch\.distributed"):
        megapg.session()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "two"}, "RANK='two' is no whole number"),
        ({"RANK": "4"}, "RANK=4 is not within WORLD_SIZE=4"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is no whole number"),
    ],
)
def test_an_environment_that_does_not_add_up(environment, message):
    whole = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    given = environment if message.startswith("has") else {**whole, **environment}
    with pytest.raises(LaunchError, match=message):
        detect(given)


def test_every_error_has_the_one_base():
    from megapg import errors

    classes = [
        c for c in vars(errors).values() if isinstance(c, type) and c.__module__ == errors.__name__
    ]
    assert len(classes) > 10
    assert all(issubclass(c, (MegapgError, Warning)) for c in classes)


def fails_late_then_retries():
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo")  # creating WORLD again would give the others time
    with pytest.MonkeyPatch.context() as patch:
        if me == 2:

            def cannot(*_, **__):
                time.sleep(1.5)  # by now the others poll rarely and notice late
                raise OSError("no sockets left")

            patch.setattr(create, "make", cannot)
        with pytest.raises((OSError, RendezvousError), match="no sockets left"):
            megapg.session(tp=1, timeout=PATIENT)
    fresh_session_works()  # at once: no rank may count as still open
    dist.destroy_process_group()
    return True


def test_a_retry_right_after_a_rank_failed_to_open():
    assert run_distributed(fails_late_then_retries, 3) == [True] * 3
