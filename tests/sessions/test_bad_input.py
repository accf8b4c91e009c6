"""Bad input at the start: every rank soon gets a named error, and nothing is left behind."""

import os
import socket
import sys
import textwrap
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from asking import registered
from ports import free_port
from processes import captured
from steps import Steps

import megapg
from megapg.communicators import create, world
from megapg.communicators.options import CommunicatorOptions
from megapg.errors import (
    LaunchError,
    LayoutError,
    LayoutMismatchError,
    MegapgError,
    RankFailedError,
    RendezvousError,
    SessionError,
    StaleGroupError,
    UnknownFieldError,
    UnsupportedOptionError,
)
from megapg.launch import detect
from megapg.megatron import published, to_megatron
from megapg.rendezvous.rendezvous import Rendezvous
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
    for sizes in ({"tp": 3}, {"ep": 3}, {"cp": 8}, {"ep": 8}, {"order": "tp-tp"}, {"vpp": 2}):
        with pytest.raises(LayoutError):
            megapg.session(timeout=SOON, **sizes)
        assert not dist.is_initialized()
    with pytest.raises(UnknownFieldError, match="'tensor' is no field"):
        megapg.session(dedicated=("tensor",), timeout=SOON)
    with pytest.raises(UnsupportedOptionError, match=r"tp.*max_ctas=8 are NCCL settings"):
        megapg.session(options={"tp": CommunicatorOptions(max_ctas=8)}, timeout=SOON)
    with pytest.raises(UnsupportedOptionError, match="takes all_gather_groups=True"):
        megapg.session(dedicated=("dp_cp_ag",), timeout=SOON)
    with pytest.raises(UnsupportedOptionError, match="backend='carrier pigeon'"):
        megapg.session(backend="carrier pigeon", timeout=SOON)
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


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_never_arrives_is_named_and_may_come_later(late):
    assert run_distributed(partial(one_is_late, late), 4) == [True] * 4


def one_dies():
    dist.init_process_group("gloo")
    dist.barrier()
    me = dist.get_rank()
    if me == 2:
        os._exit(3)
    started = time.monotonic()
    with pytest.raises(RendezvousError, match="Missing: rank 2 never arrived"):
        megapg.session(tp=2, timeout=SOON)
    assert time.monotonic() - started < BOUND
    fresh_session_works(ranks=(0, 1, 3))
    return True


def test_a_child_that_dies_during_start_up(monkeypatch):
    # The other ranks outlive this failure, even on a loaded machine.
    monkeypatch.setattr("megapg.testing.distributed._GRACE_S", 40.0)
    with pytest.raises(RankFailedError) as caught:
        run_distributed(one_dies, 4)
    assert set(caught.value.failures) == {2}
    assert caught.value.results == {0: True, 1: True, 3: True}


def dies_in(moment):
    """Rank 1 of 3 dies at a moment of the start-up that only a patch of the internals can hit."""
    me = int(os.environ["RANK"])
    Steps().together()
    if me == 1:
        if moment == "before the verdict":
            Rendezvous._follow = lambda *_: os._exit(3)
        else:
            Rendezvous.confirm = lambda *_, **__: os._exit(3)
    started = time.monotonic()
    with pytest.raises(RendezvousError, match="rank 1") as caught:
        megapg.session(timeout=SOON)
    assert caught.value.missing == (1,)
    assert time.monotonic() - started < BOUND
    assert not dist.is_initialized()
    return True


@pytest.mark.parametrize("moment", ["before the verdict", "before it confirms"])
def test_a_child_that_dies_between_the_steps_of_the_rendezvous(moment, monkeypatch):
    monkeypatch.setattr("megapg.testing.distributed._GRACE_S", 40.0)
    with pytest.raises(RankFailedError) as caught:
        run_distributed(partial(dies_in, moment), 3)
    assert set(caught.value.failures) == {1}
    assert caught.value.results == {0: True, 2: True}


def the_host_of_the_store_dies(port):
    me = int(os.environ["RANK"])
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    if me == 0:
        Rendezvous._lead = lambda *_: os._exit(3)
    started = time.monotonic()
    with pytest.raises(RendezvousError, match=r"(?i)rank 0 hosts"):
        megapg.session(timeout=SOON)
    assert time.monotonic() - started < BOUND
    return True


def test_a_store_that_dies_with_its_host_is_named(monkeypatch):
    monkeypatch.setattr("megapg.testing.distributed._GRACE_S", 40.0)
    port = free_port()
    with pytest.raises(RankFailedError) as caught:
        run_distributed(partial(the_host_of_the_store_dies, port), 2)
    assert set(caught.value.failures) == {0}


def only_one_is_wrong(wrong):
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    started = time.monotonic()
    if me == wrong:
        with pytest.raises(LayoutError, match="tp=3"):
            megapg.session(tp=3, timeout=PATIENT)
    else:
        with pytest.raises(RendezvousError, match=rf"rank {wrong} on .* LayoutError.*tp=3"):
            megapg.session(tp=2, timeout=PATIENT)
    assert time.monotonic() - started < BOUND  # long before PATIENT
    dist.barrier()  # else the wrong rank could return with the right layout in time for the others
    fresh_session_works(tp=2)
    return True


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_layout_that_is_wrong_on_one_rank_is_heard_by_all(wrong):
    assert run_distributed(partial(only_one_is_wrong, wrong), 4) == [True] * 4


def cannot_make_groups():
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    if me == 1:
        make, create.make = create.make, None  # as if no descriptors were left
        with pytest.raises(TypeError):
            megapg.session(tp=2, timeout=PATIENT)
        create.make = make
    else:
        with pytest.raises(RendezvousError, match="could open: rank 1: TypeError"):
            megapg.session(tp=2, timeout=PATIENT)
    assert registered() == 1
    fresh_session_works(tp=2)
    return True


def test_groups_that_fail_on_one_rank_are_heard_by_all():
    assert run_distributed(cannot_make_groups, 2) == [True, True]


def behind():
    """A rank without its history would open a generation that the others have already passed."""
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for _ in range(2):
        fresh_session_works(tp=2)
    store = world.current_world().store
    rendezvous = Rendezvous(store, "default", me, (0, 1))
    if me == 0:
        with megapg.session(ranks=(0,), timeout=SOON) as alone:
            assert alone.generation == 3
            dist.barrier()
            dist.barrier()
    else:
        store.delete_key("megapg/default/hello/1")
        dist.barrier()
        with pytest.raises(
            SessionError, match=r"would open generation 1, but rank 0 .* is live in "
        ):
            rendezvous.meet({}, timeout=SOON)
        dist.barrier()
    dist.barrier()  # rank 0 has closed its session
    fresh_session_works(tp=2)
    return True


def test_a_rank_in_an_older_generation_is_told_both_numbers():
    assert run_distributed(behind, 2) == [True, True]


def port_taken(port):
    me = int(os.environ["RANK"])
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    free, os.environ["MASTER_PORT"] = os.environ["MASTER_PORT"], str(port)
    started = time.monotonic()
    doing = "host" if me == 0 else "reach"
    with pytest.raises(RendezvousError, match=rf"could not {doing} the store at 127.0.0.1:{port}"):
        megapg.session(tp=2, timeout=SOON)
    assert time.monotonic() - started < BOUND
    os.environ.update(MASTER_PORT=free, TORCHELASTIC_USE_AGENT_STORE="True")
    fresh_session_works(tp=2)
    return True


def test_a_port_in_use_is_named_on_every_rank():
    with socket.socket() as taken:  # bound but silent: neither a store nor a refusal
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run_distributed(partial(port_taken, port), 2) == [True, True]


def nobody_there(port):
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    for address, message in (
        ("127.0.0.1", "nobody listens there"),
        ("no.such.host.invalid", "there is no host called"),
    ):
        os.environ["MASTER_ADDR"] = address
        with pytest.raises(RendezvousError, match=message) as caught:
            megapg.session(timeout=2)
        assert "something listens there" not in str(caught.value)
        assert "see whether rank 0 started" in str(caught.value)
    return True


def test_a_store_that_is_not_there_is_told_from_one_that_is_silent():
    assert run_distributed(partial(nobody_there, free_port()), 1) == [True]


MINUTE = timedelta(minutes=1)
ARGUMENTS = [
    ({"timeout": -1}, "timeout=-1: give the seconds to wait, a finite number above 0"),
    ({"timeout": "5"}, "timeout='5': give the seconds"),
    ({"collective_timeout": 600}, "collective_timeout=600: give a datetime.timedelta"),
    ({"collective_timeout": timedelta(0)}, "give a datetime.timedelta above 0"),
    ({"collective_timeout": {"pp": 5}}, "collective_timeout: pp is 5: give a datetime.timedelta"),
    ({"collective_timeout": {"tensor": MINUTE}}, "'tensor' is no field of this session"),
    ({"collective_timeout": {"dp_cp_ag": MINUTE}}, "that takes all_gather_groups=True"),
    ({"collective_timeout": {"gloo.dp": MINUTE}}, "'gloo.dp' is no field of this session"),
    ({"name": None}, "name=None: give the session a name"),
    ({"name": ""}, "name='': give the session a name"),
    ({"gloo": "dp_cp"}, r"gloo='dp_cp': give the fields in a tuple, ('dp_cp',)"),
    ({"dedicated": "tp"}, r"dedicated='tp': give the fields in a tuple, ('tp',)"),
    ({"options": {"dp_cp": {"max_ctas": 8}}}, "give megapg.CommunicatorOptions(max_ctas=8)"),
    ({"tensor_model_parallel_size": 2}, "session() has no tensor_model_parallel_size; the sizes"),
]


def every_wrong_argument():
    me = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    told = []
    for arguments, message in ARGUMENTS:
        started = time.monotonic()
        # One rank is wrong. The others get the error at once, unless the rank can't report it.
        alone = bool({"timeout", "collective_timeout", "name"} & set(arguments))
        with pytest.raises(MegapgError) as caught:
            megapg.session(**{"timeout": PATIENT, **(arguments if me == 1 or alone else {})})
        assert time.monotonic() - started < BOUND
        told.append(message in str(caught.value))
        dist.barrier()
    fresh_session_works(tp=2)
    dist.destroy_process_group()
    return told


def test_a_wrong_argument_is_named_on_every_rank():
    assert run_distributed(every_wrong_argument, 2) == [[True] * len(ARGUMENTS)] * 2


def one_declines():
    me = int(os.environ["RANK"])
    blamed = []
    for _ in range(5):
        with pytest.raises(MegapgError) as caught:
            megapg.session(tp=3 if me == 2 else 2, timeout=PATIENT)
        if me == 2:
            assert isinstance(caught.value, LayoutError)
            continue
        assert "in time" not in str(caught.value)
        assert "raise timeout" not in str(caught.value)
        assert str(caught.value).count("gave up") == 1
        blamed.append(caught.value.missing)
    return blamed


def test_the_rank_that_declined_is_blamed_and_nobody_else():
    assert run_distributed(one_declines, 4) == [
        [] if rank == 2 else [(2,)] * 5 for rank in range(4)
    ]


def test_without_torch_distributed():
    script = """
        import torch.distributed as dist
        import megapg
        dist.is_available = lambda: False  # as in a torch built without it
        from megapg.errors import SessionError
        try:
            megapg.session()
        except SessionError as error:
            print(error)
    """
    done = captured(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        timeout=60,
    )
    assert "built without torch.distributed" in done.stdout


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
