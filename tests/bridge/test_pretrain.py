"""Compare Megatron's ``pretrain`` on globals and on a session, bit for bit."""

import importlib.util
import itertools
import logging
import re
import warnings
from functools import partial
from pathlib import Path

import pytest

from megapg.megatron import core_version
from megapg.testing import run_distributed

GUIDE = Path(__file__).parents[2] / "migration_guide" / "pretrain.md"

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None or core_version() < (0, 19),
        reason="the script is one for megatron.training of 0.19",
    ),
]

TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
VPP = {**PP, "num_virtual_stages_per_pipeline_rank": 2}
EP = {"expert_model_parallel_size": 2, "num_experts": 4}
DISTRIBUTED = {"use_distributed_optimizer": True}
SEQUENCE = {"sequence_parallel": True}
UNTIED = {"untie_embeddings_and_output_weights": True}

# If the experts' group has the ranks of mp, a session has one group for both. Megatron then takes
# one norm of all gradients instead of two, which rounds differently.
ONE_NORM = "tp2 expt_tp1, one norm"

# No case has context parallelism: on a CPU, upstream has no attention for it.
CASES = {
    2: {
        "tp2": {**TP, **SEQUENCE, **DISTRIBUTED},
        "pp2 untied": {**PP, **UNTIED},
        "pp2 vpp2 mtp": {**VPP, "mtp_num_layers": 1},
        "ep2": {**EP, **DISTRIBUTED, "create_all_gather_group": True},
        "dp2 without gloo": {"disable_gloo_process_groups": True},
    },
    4: {
        "tp2 pp2 vpp2": {**TP, **VPP, **SEQUENCE},
        "tp2 pp2 mtp untied": {**TP, **PP, **UNTIED, "mtp_num_layers": 1, **DISTRIBUTED},
        "tp2 ep2": {**TP, **EP, **SEQUENCE, **DISTRIBUTED, "disable_bias_linear": True},
        "tp2 expt_tp1": {**TP, **EP, **SEQUENCE, **DISTRIBUTED, "expert_tensor_parallel_size": 1},
        ONE_NORM: {**TP, **EP, **SEQUENCE, "expert_tensor_parallel_size": 1},
        "pp2 dp2 order": {**PP, **DISTRIBUTED, "use_tp_pp_dp_mapping": True},
        "instances": {**DISTRIBUTED, "num_distributed_optimizer_instances": 2},
    },
}
SAVED = 2  # runs that are resumed save after this step
# Without dropout, as Megatron's random numbers after a load differ on a CPU, on globals too.
TO_RESUME = {"train_iters": 4, "hidden_dropout": 0, "attention_dropout": 0}
RESUMED = {"tp2": {**TO_RESUME, **TP, **DISTRIBUTED}, "ep2": {**TO_RESUME, **EP}}


def lines_of_the_guide():
    """Return the guide's lines that replace a call of ``pretrain``."""
    (block,) = re.findall(r"```python\n( +session = .*?)```", GUIDE.read_text(), re.DOTALL)
    return block


def trained_every_way(cases, lines):
    """Return, by case and way, the training on this rank and the number of groups."""
    warnings.simplefilter("ignore")  # about features that need a GPU
    logging.disable(logging.WARNING)
    from pretraining import on_a_session, on_globals, run_by_megapg, words

    ways = {
        "globals": on_globals,
        "run": run_by_megapg,
        "session": partial(on_a_session, lines=lines),
    }
    found = {}
    for name, case in cases.items():
        seen = {way: train(words(**case)) for way, train in ways.items()}
        found[name] = {way: (one.trained(), one.made, one.left) for way, one in seen.items()}
    return found


@pytest.fixture(scope="module")
def found():
    """Return ``found(world_size)``: the results of each rank, run once for all tests."""
    runs = {}

    def ran(world_size):
        if world_size not in runs:
            runs[world_size] = in_ranks(
                trained_every_way, world_size, CASES[world_size], lines_of_the_guide()
            )
        return runs[world_size]

    return ran


def in_ranks(function, world_size, *arguments):
    return run_distributed(
        partial(function, *arguments),
        world_size,
        deadline=400,
        preload=("megapg.tools.demo.gpt", "megatron.training.training"),
        env={"PYTHONWARNINGS": "ignore"},
    )


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        pytest.param(size, name, id=name, marks=[pytest.mark.slow] if size > 2 else [])
        for size, cases in CASES.items()
        for name in cases
    ],
)
def test_it_trains_the_same_on_a_session_and_leaves_nothing(found, world_size, name):
    losses = []
    for rank, told in enumerate(found(world_size)):
        (on_globals, theirs, left), *ours = told[name].values()
        assert len(on_globals["losses"]) == 3
        assert on_globals["weights"]
        losses += [each["lm loss"] for each in on_globals["losses"] if each]
        if name == ONE_NORM:
            for trained, *_ in told[name].values():
                del trained["weights"]
            on_globals["losses"] = [pytest.approx(each, rel=1e-6) for each in on_globals["losses"]]
        for way, (trained, made, still_there) in zip(("run", "session"), ours, strict=True):
            assert trained == on_globals, (rank, way)
            assert made * 2 < theirs, (rank, way)
            assert still_there == 0, (rank, way)
        assert left > 10  # as the docstring of the drop-in's module says
    assert len(set(losses)) == 3


def test_the_embedding_groups_are_those_that_the_script_chooses(found):
    """The script's stages differ from Megatron's default, which is the first and the last."""
    for name, expected in {"pp2 untied": [[0], None], "pp2 vpp2 mtp": [[0, 1], [0, 1]]}.items():
        chosen = [rank[name]["session"][0]["embedding"] for rank in found(2)]
        assert chosen == expected


# -- checkpoints -----------------------------------------------------------------------------------


def saved_and_resumed(root):
    """Train and save each way; then resume each way from the other's checkpoint."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from pretraining import on_globals, run_by_megapg, words
    from resuming import megatron_saves_alone

    megatron_saves_alone()
    ways = {"globals": on_globals, "run": run_by_megapg}
    found = {name: {} for name in RESUMED}
    for (name, case), (way, train) in itertools.product(RESUMED.items(), ways.items()):
        line = words(**case, save=root / name / way, save_interval=SAVED)
        found[name][way] = train(line).trained()
    for (name, case), (way, train) in itertools.product(RESUMED.items(), ways.items()):
        (other,) = ways.keys() - {way}
        line = words(**case, load=root / name / other, ckpt_step=SAVED)
        found[name][f"{way} from {other}"] = train(line).trained()
    return found


def test_what_one_saves_the_other_resumes(tmp_path):
    """With and without the distributed optimizer."""
    for rank in in_ranks(saved_and_resumed, 2, tmp_path):
        for told in rank.values():
            whole = told["globals"]
            assert told["run"] == whole
            assert len(whole["losses"]) == 4
            for way in ("globals from run", "run from globals"):
                assert told[way]["losses"] == whole["losses"][SAVED:]
                assert told[way]["weights"] == whole["weights"]


# -- a session without a companion -----------------------------------------------------------------


def passed_as_an_argument(lines):
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from pretraining import on_a_session, on_globals, words

    line = words(**TP, **DISTRIBUTED)
    theirs, ours = on_globals(line), on_a_session(line, lines)
    return theirs.trained() == ours.trained(), len(ours.losses), ours.left


def test_pretrain_takes_the_collection_as_an_argument_too():
    (words,) = re.findall(r"also takes `(pg_collection=.*?)`", GUIDE.read_text())
    lines = lines_of_the_guide().replace("forward_step)", f"forward_step, {words})")
    assert words in lines
    assert in_ranks(passed_as_an_argument, 2, lines) == [(True, 3, 0)] * 2
