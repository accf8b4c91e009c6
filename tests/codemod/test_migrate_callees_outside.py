"""Functions of Megatron-core, and of its training loop, that ask the globals for their caller."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import megatron.core as core_package
import pytest
from trees import write

from megapg.migrate.config import Config
from megapg.migrate.engine import migrate
from megapg.migrate.python.methods import parameters
from megapg.migrate.python.scopes import last_name
from megapg.upstream.askers import ASKING
from megapg.upstream.signatures import SIGNATURES

CORE = "megatron.core"
CODE = """\
from megatron.core import mpu, utils
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank as on_this_rank
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training.utils import average_losses_across_data_parallel_group
from megatron.training import print_rank_0


def stages(model, config):
    print_rank_0(1)
    return on_this_rank(config), mpu.get_pipeline_model_parallel_rank()


def offset(model, config, rank):
    rank = mpu.get_pipeline_model_parallel_rank()
    with_it = get_transformer_layer_offset(config, 0, rank)
    return with_it + get_transformer_layer_offset(config, pp_rank=None)


def losses(model, x):
    return average_losses_across_data_parallel_group([x]), mpu.get_data_parallel_world_size()


def asks_about_others(model, x):
    return average_losses_across_data_parallel_group([x]), mpu.get_context_parallel_rank()


def has_none(x):
    return average_losses_across_data_parallel_group([x])


def group(tp_group=None, **kwargs):  # for want of which it is asked
    return utils.get_tensor_model_parallel_group_if_none(tp_group)


def behind(model, given):
    rank = mpu.get_tensor_model_parallel_rank()
    return rank, utils.get_tensor_model_parallel_group_if_none(given), group(given), group()
"""


def test_they_are_named_with_what_to_do(tmp_path: Path) -> None:
    found = migrate([write(tmp_path, {"a.py": CODE})], Config(tmp_path, versions=(16,))).callees
    within = "within megapg.megatron.published(megapg.groups_of(model))"
    losses, offset = "average_losses_across_data_parallel_group", "get_transformer_layer_offset"
    assert [(each.function, each.line, each.callee, each.instead) for each in found] == [
        ("stages", 11, "mtp_on_this_rank", f"call mtp_on_this_rank {within}"),
        (
            *("offset", 17, offset),
            'pass it pp_rank=megapg.groups_of(model, "pp").rank("pp")',
        ),
        ("losses", 21, losses, f"call {losses} {within}"),
        (
            *("behind", 38, "group"),
            'pass it tp_group=megapg.groups_of(model, "tp").tp',
        ),
    ]


BATCHES = """\
from megatron.core import mpu, utils
from megatron.core.pipeline_parallel import p2p_communication as p2p
from megatron.core.pipeline_parallel.p2p_communication import recv_forward
from megatron.training.utils import get_batch_on_this_tp_rank
from megatron.utils import get_batch_on_this_cp_rank


def get_batch(model, data_iterator):
    if not mpu.is_pipeline_first_stage() and mpu.get_context_parallel_rank():
        return None
    batch = get_batch_on_this_tp_rank(data_iterator)
    batch = utils.get_batch_on_this_cp_rank(batch)
    batch = utils.get_batch_on_this_cp_rank(batch, cp_group=batch["group"])
    return get_batch_on_this_cp_rank(batch)


def step(model, batch, config):
    batch["input"] = recv_forward(batch["shape"], config)
    p2p.send_forward(model(batch), config)


def evaluate(model, batches, config):
    for batch in batches:
        step(model, batch, config)
    p2p.send_backward_recv_backward(None, True, (1,), config)
    return mpu.is_pipeline_last_stage()
"""


def test_those_that_older_versions_have_are_named(tmp_path: Path) -> None:
    """Where one that is read has them."""
    tree, model = write(tmp_path, {"a.py": BATCHES}), "megapg.groups_of(model)"

    def named(*versions: int) -> list[tuple[str, str, str]]:
        found = migrate([tree], Config(tmp_path, versions=versions)).callees
        return [(each.function, each.callee, each.instead) for each in found]

    def within(function: str, name: str) -> tuple[str, str, str]:
        return function, name, f"call {name} within megapg.megatron.published({model})"

    tp, cp = "get_batch_on_this_tp_rank", "get_batch_on_this_cp_rank"
    passes_it = ("get_batch", cp, 'pass it cp_group=megapg.groups_of(model, "cp").cp')
    assert named(12, 19) == [
        within("get_batch", tp),
        *[within("get_batch", cp)] * 2,
        within("evaluate", "step"),
        within("evaluate", "send_backward_recv_backward"),
    ]
    assert named(16) == [within("get_batch", tp), passes_it, passes_it]
    assert named(19) == []


def test_those_of_the_project_are_read(tmp_path: Path) -> None:
    own = "def average_losses_across_data_parallel_group(losses):\n    return losses\n"
    files = {"a.py": CODE, "megatron/training/utils.py": own}
    found = migrate([write(tmp_path, files)], Config(tmp_path, versions=(16,))).callees
    assert "losses" not in {each.function for each in found}


@pytest.mark.contract
@pytest.mark.parametrize(
    "name", [each for each in ASKING if any(CORE in package for package in ASKING[each].packages)]
)
def test_those_of_the_core_ask_the_globals(name: str) -> None:
    """And the parameters that are said keep them from that."""
    found, minor = list(_functions(name)), int(version("megatron-core").split(".")[1])
    if not found or minor >= ASKING[name].until:
        pytest.skip("this Megatron-core has none")
    instead = ASKING[name].instead
    for each in found:
        # One that sends has that, or the one of its name, ask.
        behind = {name, "_communicate"} if ASKING[name].until == 15 else set()
        called = {last_name(e.func) for e in ast.walk(each) if isinstance(e, ast.Call)}
        assert called & (SIGNATURES.keys() | behind)
        if instead is not None and minor >= instead.since:
            assert instead.name in {one.arg for one in parameters(each)}


def _functions(name: str) -> Iterator[ast.FunctionDef]:
    """The functions of Megatron-core that have a name."""
    (core,) = core_package.__path__
    for path in Path(core).rglob("*.py"):
        text = path.read_text()
        for node in ast.parse(text).body if f"def {name}(" in text else ():
            if isinstance(node, ast.FunctionDef) and node.name == name:
                yield node


PARTS = """\
from megatron.core import mpu


def layers(config, pg_collection):
    return Block(config, 2)


class Layer:
    def __init__(self, config):
        self.size = config // mpu.get_tensor_model_parallel_world_size()
        self.group = mpu._TENSOR_MODEL_PARALLEL_GROUP_OF_A_FORK


class Block:
    def __init__(self, config, n):
        self.stages = mpu.get_pipeline_model_parallel_world_size()
        self.build(config, n)

    def build(self, config, n):
        self.layers = [Layer(config) for each in range(n)]

    def more(self, config):
        return Layer(config), mpu.get_pipeline_model_parallel_rank()
"""


def test_parts_of_what_is_passed_a_collection_are_named(tmp_path: Path) -> None:
    """Whatever kind of groups they ask about; others only where that is the same."""
    found = migrate([write(tmp_path, {"a.py": PARTS})], Config(tmp_path, versions=(16,))).callees
    assert [(each.function, each.callee, each.what) for each in found] == [
        ("Block.build", "Layer", "tp")
    ]
