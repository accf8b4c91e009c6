"""Test that a migrated trainer can train two models of different layouts in one process.

The globals have a third layout. The results must equal those of two jobs before the migration.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import trainer_on_globals

import megapg
from megapg.migrate.config import Config
from megapg.migrate.engine import migrate
from megapg.migrate.write import write_files
from megapg.testing import megatron_on_cpu, run_distributed

STEPS = 3
DENSE: Mapping[str, int] = {"tp": 2, "pp": 2}
EXPERTS: Mapping[str, int] = {"tp": 2, "ep": 2}
MODELS = ((DENSE, None), (EXPERTS, 4))


def in_two_jobs() -> list[list[object]]:
    """Train each model alone, on the globals, and return the results of its steps."""
    from megapg.megatron import parallel_state

    policies = importlib.import_module("before.policy")
    found = []
    for sizes, experts in MODELS:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes.get("pp", 1),
            expert_model_parallel_size=sizes.get("ep", 1),
            expert_tensor_parallel_size=sizes["tp"],
            create_gloo_process_groups=False,
        )
        policy = policies.Policy(experts)
        found.append([policy.step(number) for number in range(STEPS)])
        parallel_state.destroy_model_parallel()
    return found


def in_one_process() -> list[list[object]]:
    """Train both models with a session each, in alternating steps, and return the results."""
    from megapg.megatron import parallel_state

    policies = importlib.import_module("after.policy")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    dense = megapg.session(**DENSE, name="dense")
    experts = megapg.session(**EXPERTS, expt_tp=2, name="experts")
    found: list[list[object]] = [[], []]
    with dense, experts, megapg.megatron.globals_policy("error"):
        models = []
        for session, (_, number) in zip((dense, experts), MODELS, strict=True):
            policy = policies.Policy(number, pg_collection=session.groups)
            # Megatron-core keeps one set of random streams per process.
            models.append((policy, session.groups, megapg.capture_rng_state(session.groups)))
        for step in range(STEPS):
            for at, (policy, pg, streams) in enumerate(models):
                megapg.restore_rng_state(streams, pg)
                found[at].append(policy.step(step))
                models[at] = policy, pg, megapg.capture_rng_state(pg)
    parallel_state.destroy_model_parallel()
    return found


def on_a_rank(folder: Path) -> tuple[Any, Any]:
    sys.path.insert(0, str(folder))
    dist.init_process_group("gloo")
    with megatron_on_cpu():
        found = in_two_jobs(), in_one_process()
    dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_two_layouts_in_one_process_learn_what_two_jobs_learn(tmp_path: Path) -> None:
    source = Path(trainer_on_globals.__file__).parent
    for name in ("before", "after"):
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    found = migrate([tmp_path / "after"], Config(tmp_path, versions=(16,)), unsafe=True)
    assert not found.left
    assert not write_files(found.files)
    ranks = run_distributed(
        partial(on_a_rank, tmp_path), 4, deadline=120, preload=("megapg.tools.demo.gpt",)
    )
    for in_jobs, beside in ranks:
        assert beside == in_jobs
    (dense, experts), _ = ranks[0]
    assert dense != experts
    assert dense[0] != dense[-1]
