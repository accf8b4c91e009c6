"""Errors of Megatron-core and torch get a note with the step of megapg's that is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig

import megapg
from megapg.errors import (
    LayoutError,
    MissingGroupError,
    RankFailedError,
    SessionError,
    UnknownFieldError,
)
from megapg.testing import fake_collection, megatron_on_cpu, run_distributed

pytestmark = pytest.mark.contract


def model(**given: Any) -> GPTModel:
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, masked_softmax_fusion=False
    )
    spec = get_gpt_layer_local_spec()
    return GPTModel(config, spec, vocab_size=32, max_sequence_length=8, **given)


def forward(made: GPTModel) -> object:
    tokens = torch.arange(8)[None]
    return made(tokens, tokens, None, labels=tokens)


def train_unpublished(session: megapg.Session) -> None:
    megapg.seed_all(1, session.groups)
    forward(model(pg_collection=session.groups))


def train_unseeded(session: megapg.Session) -> None:
    get_cuda_rng_tracker().reset()
    model(pg_collection=session.groups)


def read_and_close(session: megapg.Session) -> None:
    try:
        parallel_state.get_tensor_model_parallel_group()
    finally:
        session.close()


def notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", []))


def test_a_read_of_unset_globals_names_the_session_and_published() -> None:
    with (
        megatron_on_cpu(),
        pytest.raises(AssertionError, match="global memory buffer is not initialized") as caught,
        megapg.session() as session,
    ):
        train_unpublished(session)
    assert "session 'default' is open: run this inside `with megapg.published(pg):`" in notes(
        caught.value
    )


def test_two_sessions_of_which_none_is_published_are_both_named() -> None:
    with (
        pytest.raises(AssertionError, match="tensor model parallel group") as caught,
        megapg.session(name="actor"),
        megapg.session(name="critic"),
    ):
        parallel_state.get_tensor_model_parallel_group()
    assert "session 'actor' and session 'critic' are open" in notes(caught.value)
    assert len(caught.value.__notes__) == 1, "not one note for each session that is left"


def test_a_fake_collection_is_named_as_such() -> None:
    with pytest.raises(AssertionError) as caught, fake_collection(tp=2):
        parallel_state.get_tensor_model_parallel_group()
    assert "fake_collection() is open" in notes(caught.value)
    assert "session '" not in notes(caught.value)


def test_a_session_closed_in_finally_explains_as_a_with_block_does() -> None:
    with pytest.raises(AssertionError) as caught:
        read_and_close(megapg.session())
    assert "megapg.published(pg)" in notes(caught.value)


def test_inside_published_the_note_does_not_say_to_publish() -> None:
    with (
        pytest.raises(AssertionError, match="not initialized") as caught,
        fake_collection(pp=4, rank=1) as pg,
        megapg.published(pg),
    ):
        parallel_state.get_embedding_group()
    assert "fake_collection() is published here" in notes(caught.value)
    assert "run this inside" not in notes(caught.value)


def test_other_errors_get_no_note() -> None:
    with pytest.raises(AssertionError) as caught, megapg.session():
        raise AssertionError("my cache is not initialized")
    assert notes(caught.value) == ""


def test_without_a_seed_the_note_names_seed_all() -> None:
    with (
        megatron_on_cpu(),
        pytest.raises(Exception, match="model-parallel-rng is not added") as caught,
        megapg.session() as session,
    ):
        train_unseeded(session)
    assert "megapg.seed_all(seed, pg)" in notes(caught.value)


def read_without_closing() -> None:
    session = megapg.session()
    parallel_state.get_tensor_model_parallel_group()
    session.close()


def test_run_distributed_explains_with_sessions_that_were_left_open() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_distributed(read_without_closing, 1, deadline=60)
    assert "megapg.published(pg)" in notes(caught.value.failures[0])


def test_a_script_that_never_closes_its_session_logs_the_note(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import megapg\nfrom megatron.core import parallel_state\n"
        "session = megapg.session()\nparallel_state.get_tensor_model_parallel_group()\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "session 'default' is open: run this inside" in ended.stderr


def test_a_session_in_place_of_its_collection_names_session_groups() -> None:
    with (
        megatron_on_cpu(),
        pytest.raises(MissingGroupError, match=r"Session has no 'cp'.*session\.groups"),
        megapg.session() as session,
    ):
        model(pg_collection=session)
    assert not hasattr(session, "cp")
    with pytest.raises(AttributeError, match="object has no attribute 'nothing'"):
        _ = session.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "use",
    [
        lambda pg: dist.all_reduce(torch.ones(1), group=pg),
        lambda pg: dist.barrier(group=pg),
        lambda pg: dist.all_gather_object([None], 1, group=pg),
        lambda pg: dist.get_rank(pg),
        lambda pg: dist.get_world_size(pg),
    ],
)
@pytest.mark.parametrize("of", ["groups", "session"])
def test_a_collection_in_place_of_a_group_names_a_field(
    use: Callable[[object], object], of: str
) -> None:
    with pytest.raises(Exception, match="") as caught, megapg.session() as session:
        use(session.groups if of == "groups" else session)
    told = str(caught.value) + notes(caught.value)
    assert "group=pg.tp" in told or (of == "session" and "session.groups" in told)


@pytest.mark.parametrize("given", [2, {"tp": 2}])
def test_session_refuses_what_is_no_layout(given: Any) -> None:
    with pytest.raises(SessionError, match=r"ParallelLayout.*session\(tp=2\)"):
        megapg.session(given)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("dpcp", "dp_cp"),
        ("tensor", "tp"),
        ("tensor_model_parallel_group", "tp"),
        ("pipeline", "pp"),
        ("data_parallel", "dp"),
        ("context", "cp"),
        ("model_parallel", "mp"),
        ("expert", "ep"),
        ("expert_data_parallel", "expt_dp"),
    ],
)
def test_names_near_a_field_are_answered_with_the_field(name: Any, meant: str) -> None:
    with fake_collection() as pg:
        with pytest.raises(AttributeError, match=f"did you mean {meant!r}"):
            getattr(pg, name)
        with pytest.raises(
            UnknownFieldError, match=f"'{name}' is no field; did you mean {meant!r}"
        ):
            pg.rank(name)
        assert not hasattr(pg, name)


def test_users_without_experts_are_not_told_about_them() -> None:
    with pytest.raises(LayoutError, match=r"or tp=1\.$"):
        megapg.ParallelLayout(world_size=1, tp=3)
