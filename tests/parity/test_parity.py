"""``parity`` and ``megapg parity`` as users call them, on real ranks."""

import json
import random
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import parity_proof
import pytest
import torch
import torch.distributed as dist
from parity_faults import build as build_faulty
from processes import captured
from schemas import check_schema
from typer.testing import CliRunner

from megapg.errors import ParityError, ParityInputError
from megapg.layout import ParallelLayout
from megapg.ownership.opening import LayoutSizes
from megapg.testing import parity
from megapg.tools.cli import app
from megapg.tools.parity import parity_report
from megapg.tools.parity.built_in import gpt, next_token
from megapg.tools.parity.cases import SIZES, Stages, parse_layout

SCHEMA = json.loads(Path(parity_report.__file__).with_name("schema.json").read_text())


# -- sound layouts and faults: some here, all in test_parity_proof ---------------------------------

SOUND = ("tp=2 sequence_parallel", "pp=2 vpp=2")
FAULTY = {  # layout -> first check that fails, parameter, axis, part of the text
    "tp=2 fault=output_of_fc2_not_reduced": (
        "loss",
        "decoder.layers.1.mlp.linear_fc2.weight",
        "tp",
        "their sum is the reference: not summed over tp",
    ),
    "tp=2 sequence_parallel fault=norm_lacks_sequence_parallel_mark": (
        "gradients",
        "decoder.layers.1.input_layernorm.weight",
        "tp",
        "ranks 0 and 1 of a tp group hold different values of what they share",
    ),
    "dp=2 fault=gradient_scaled_by_dp": (
        "gradients",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "dp",
        "2 times the reference on all ranks: as if summed over dp once too often",
    ),
    "tp=2 fault=replica_has_tensor_parallel_mark": (
        "gradient norm",
        "decoder.layers.1.mlp.linear_fc2.bias",
        "tp",
        "counted 2 times, over tp",
    ),
    "tp=2 fault=replica_frozen_on_one_rank": (
        "weights",
        "decoder.layers.1.mlp.linear_fc2.bias",
        "tp",
        "those of rank 0 are the reference's",
    ),
    "dp=2 fault=replica_seeded_apart_over_dp": (
        "replicas",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "dp",
        "as built: ranks 0 and 1 of a dp group",
    ),
    # NVIDIA/Megatron-LM #7452, finding 2
    "tp=2 parallel_output=false": ("loss", "", "tp", "larger by log(2), and tp has 2 ranks"),
}


@pytest.fixture(scope="module")
def report():
    lines = []
    found = parity(build_faulty, [*SOUND, *FAULTY], progress=lines.append)
    assert lines[0] == "one rank"
    assert lines[-1] == "tp=2 parallel_output=False: 2 ranks (9 of 9)"
    return found


@pytest.mark.smoke
@pytest.mark.contract
def test_sound_layouts_agree_and_faults_are_named(report):
    assert report.precision == "float64"
    layouts = {each.layout: each for each in report.layouts}
    for layout in SOUND:
        assert layouts[layout].agrees
        assert max(cell.off for cell in layouts[layout].cells) < 1e-12
    for layout, (check, parameter, axis, text) in FAULTY.items():
        first = layouts[layout.replace("false", "False")].wrong[0]
        assert (first.check, first.parameter, first.axis) == (check, parameter, axis)
        assert first.state == "differs"
        assert first.ranks
        assert text in first.text


@pytest.mark.contract
def test_experts_agree_over_ep():
    parity("moe", ["tp=2 ep=2 expt_tp=1 world=2"]).check()


def test_a_report_fails_a_test_with_all_it_found(report):
    with pytest.raises(AssertionError) as raised:
        report.check()
    assert isinstance(raised.value, ParityError)
    lines = str(raised.value).splitlines()
    assert lines[1].split()[:2] == ["tp=2", "sequence_parallel"]
    assert lines[1].endswith("agrees")
    for layout, (check, _, _, text) in FAULTY.items():
        where = layout.replace("false", "False")
        assert any(line.startswith(f"{where}: {check}: ") and text in line for line in lines)
    assert replace(report, layouts=report.layouts[:2]).check() is None


def test_a_report_is_json_that_its_schema_describes(report):
    plain = json.loads(json.dumps(report.as_dict()))
    check_schema(plain, SCHEMA)
    assert plain["agrees"] is False
    with pytest.raises(AssertionError):
        check_schema({**plain, "mood": "fine"}, SCHEMA)


@pytest.mark.slow
def test_float32_finds_the_same(report):
    layouts = ["tp=2", "dp=2 fault=gradient_scaled_by_dp"]
    sound, faulty = parity(build_faulty, layouts, precision="float32").layouts
    assert sound.agrees
    assert 1e-9 < max(cell.off for cell in sound.cells) < 1e-4
    assert faulty.wrong[0].parameter == FAULTY[layouts[1]][1]


# -- incomparable input ----------------------------------------------------------------------------


def ignores_its_groups(pg):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    return GPTModel(config, get_gpt_layer_local_spec(), 64, 16)


def ignores_its_stage(pg):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
    config = TransformerConfig(
        **sizes, pipeline_model_parallel_size=pg.size("pp"), pipeline_dtype=torch.float64
    )
    return GPTModel(config, get_gpt_layer_local_spec(), 64, 16, pg_collection=pg)


def differs_between_ranks(pg):
    return gpt(pg, num_layers=1 + dist.get_rank())


def differs_in_size(pg):
    return gpt(pg, ffn_hidden_size=64 * (1 + dist.get_rank()))


def raises_on_one_rank(pg):
    if dist.get_rank():
        raise KeyError("no such config")
    return gpt(pg)


def one_chunk_too_few(pg):
    return [gpt(pg, vp_stage=0)]


def no_module(pg):
    return torch.nn.Linear(2, 2)


def sixteen_bits(pg):
    return gpt(pg, bf16=True, params_dtype=torch.bfloat16)


def random_step(model, batch, pg):
    return next_token(model, batch, pg) * (1 + random.random())


def failing_step(model, batch, pg):
    if dist.get_rank():
        raise ZeroDivisionError("only here")
    return next_token(model, batch, pg)


def waiting_step(model, batch, pg):
    if dist.get_rank():
        time.sleep(600)
    return next_token(model, batch, pg)


def dropping_step(model, batch, pg):
    return torch.nn.functional.dropout(next_token(model, batch, pg), 0.5)


BAD = {
    "tp=2": {
        ignores_its_groups: "layout 'tp=2': build ignores the groups it gets",
        raises_on_one_rank: "layout 'tp=2': build raised KeyError on rank 1: 'no such config'",
    },
    "dp=2": {
        differs_between_ranks: "rank 1 has decoder.layers.1.input_layernorm.bias, and rank 0 of "
        "the same stage has not",
        differs_in_size: "decoder.layers.0.mlp.linear_fc1.weight is a part of shape",
    },
    "pp=2": {ignores_its_stage: "build it with pre_process only on the first stage"},
    "pp=2 vpp=2": {one_chunk_too_few: "returned 1 chunks, and 2 are needed"},
    "one rank": {
        no_module: "build returned Linear. Return a Megatron-core module",
        sixteen_bits: "build makes parameters of torch.bfloat16",
    },
}


def test_an_error_in_build_shows_the_last_lines_of_the_users_code():
    with pytest.raises(ParityInputError) as refused:
        parity(raises_on_one_rank, ["tp=2"])
    first, *lines = str(refused.value).splitlines()
    assert first == "layout 'tp=2': build raised KeyError on rank 1: 'no such config'"
    (line,) = lines
    number = raises_on_one_rank.__code__.co_firstlineno + 2
    assert line.strip() == (
        f'{__file__}:{number} in raises_on_one_rank: raise KeyError("no such config")'
    )


def test_other_globals_name_the_reads_that_took_them():
    report = parity("gpt", ["tp=2"], global_sizes={"tp": 1})  # since 0.19 gpt agrees all the same
    (line,) = report.findings()
    assert re.search(r"Took the globals: .*megatron\.core\.[\w.]+:\d+ \(get_\w+\)", line)
    check_schema(json.loads(json.dumps(report.as_dict())), SCHEMA)


def norm_counts_two_replicas(pg):
    made = gpt(pg)
    for name, parameter in made.named_parameters():
        if name.endswith(("layers.1.mlp.linear_fc2.bias", "layers.2.input_layernorm.weight")):
            parameter.tensor_model_parallel = True
    return made


@pytest.mark.contract
def test_a_norm_that_alone_differs_names_the_gradients_that_it_miscounts():
    (layout,) = parity(norm_counts_two_replicas, ["tp=2"]).layouts
    first = layout.wrong[0]
    assert first.check == "gradient norm"
    assert (first.parameter, first.axis) == ("decoder.layers.1.mlp.linear_fc2.bias", "tp")
    assert "counted 2 times, over tp, and 1 more gradients are miscounted" in first.text


@pytest.mark.slow
@pytest.mark.contract
@pytest.mark.parametrize(
    ("layout", "build"), [(layout, build) for layout, builds in BAD.items() for build in builds]
)
def test_a_build_that_cannot_be_compared_is_named(layout, build):
    with pytest.raises(ParityInputError) as refused:
        parity(build, ["tp=2" if layout == "one rank" else layout])
    assert BAD[layout][build] in str(refused.value)


def test_groups_that_are_ignored_are_refused():
    with pytest.raises(ParityInputError, match="build ignores the groups it gets"):
        parity(ignores_its_groups, ["tp=2"], precision="float64")


@pytest.mark.parametrize("step", [random_step, pytest.param(dropping_step, marks=pytest.mark.slow)])
def test_a_random_choice_in_the_step_is_refused(step):
    with pytest.raises(ParityInputError, match=r"differs from itself.* Turn off what is random"):
        parity("gpt", ["tp=2"], step=step)


@pytest.mark.slow
def test_a_step_that_fails_in_a_layout_is_a_finding():
    layouts = parity("gpt", ["tp=2", "dp=2"], step=failing_step).layouts
    assert [cell.state for cell in layouts[0].cells] == ["failed"] * 6
    text = layouts[0].cells[0].text
    assert text.startswith("rank 1: ZeroDivisionError: only here\n")
    assert 'in failing_step: raise ZeroDivisionError("only here")' in text
    assert not layouts[1].agrees


@pytest.mark.slow
def test_a_step_that_waits_for_ever_ends_with_the_deadline():
    started = time.monotonic()
    (layout,) = parity("gpt", ["tp=2"], step=waiting_step, deadline=30).layouts
    assert time.monotonic() - started < 90
    assert "rank 1: TimeoutError" in layout.cells[0].text
    assert "waiting_step" in layout.cells[0].text


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ([], "give at least one layout"),
        (["tp"], "tp must be a whole number from 1"),
        (["tp=0"], "tp must be a whole number from 1"),
        (["tp=2 tp=4"], "gives tp twice"),
        (["tp="], "'tp=' is no size"),
        (["2"], "'2' is no size"),
        (["tp=2 world=3"], "world_size=3 does not divide"),
        (["pp=1 vpp=2"], "needs pp > 1"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_before_anything_starts(layouts, message):
    with pytest.raises(ParityInputError, match=message):
        parity("gpt", layouts)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("nowhere.py:build", "nowhere.py: no such file"),
        ("gpt2", "names no function"),
        ("train.py", "names no function"),
        (lambda pg: gpt(pg), "other processes"),
    ],
)
def test_a_build_that_is_not_there_is_refused_before_anything_starts(build, message):
    with pytest.raises(ParityInputError, match=message):
        parity(build, ["tp=2"])


# -- the command -----------------------------------------------------------------------------------

MODEL = """
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig


def build(pg, wrong=False):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=pg.size("tp"),
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 256, 16, pg_collection=pg)
    if wrong:
        linear = model.decoder.layers[1].mlp.linear_fc2
        forward = linear.forward

        def over_dp(hidden):
            linear.tp_group = pg.dp
            output = forward(hidden)
            linear.tp_group = pg.tp
            return output

        linear.forward = over_dp
    return model
"""


def test_the_command_exits_with_1_and_names_the_module(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    arguments = ["model.py:build", "--layout", "tp=2", "--layout", "tp=2 wrong", "--json"]
    ended = CliRunner().invoke(app, ["parity", *arguments])
    assert ended.exit_code == 1, ended.output
    shown = json.loads(ended.stdout)
    check_schema(shown, SCHEMA)
    right, wrong = shown["layouts"]
    assert all(cell["state"] == "agrees" for cell in right["cells"])
    assert wrong["cells"][0]["parameter"] == "decoder.layers.1.mlp.linear_fc2.weight"
    assert "not summed over tp" in wrong["cells"][0]["text"]


@pytest.mark.slow
@pytest.mark.contract
def test_the_command_exits_with_0_and_shows_a_table(tmp_path):
    ended = captured([sys.executable, "-m", "megapg", "parity", "gpt"], cwd=tmp_path, timeout=120)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines() if "=2" in line]
    assert [row[:2] for row in rows] == [["tp=2", "2"], ["pp=2", "2"], ["dp=2", "2"]]
    assert "3 of 3 layouts" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere.py:build", "nowhere.py: no such file."),
        ("gpt --layout tp=0", "tp must be a whole number from 1"),
        ("gpt --globals tp=3", "layout 'tp=3 world=2'"),
    ],
)
def test_the_command_exits_with_2_for_bad_input(arguments, message):
    ended = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["parity", *arguments.split()])
    assert ended.exit_code == 2
    assert message in " ".join(ended.output.split())


# -- the full proof --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_sound_layout_is_an_alarm():
    verdicts = [*parity_proof.sound_layouts()]
    assert len(verdicts) >= 40
    assert not [each for each in verdicts if not each.expected]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_planted_fault_is_found_and_most_are_named():
    verdicts = [*parity_proof.planted_faults()]
    assert len(verdicts) >= 30
    assert not [each for each in verdicts if each.first is None]
    named = [each for each in verdicts if each.expected]
    assert len(named) >= 0.9 * len(verdicts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_faults_of_megatron_core_are_found():
    verdicts = [*parity_proof.upstream_findings()]
    assert all(each.expected for each in verdicts)


# -- settings of a layout --------------------------------------------------------------------------


def predicting_on_a_stage_of_its_own(pg, tied=True):
    """Build a GPT that predicts two tokens on the middle one of three stages."""
    stages = {}
    if pg.size("pp") > 1:
        middle = ["decoder", "mtp"]
        stages["pipeline_model_parallel_layout"] = [
            ["embedding", "decoder", "decoder", "decoder"],
            middle,
            ["loss"],
        ]
    return gpt(pg, mtp=1, tied=tied, **stages)


@pytest.mark.contract
@pytest.mark.parametrize(("tied", "right"), [(True, "0-1-2"), (False, "0-1")])
def test_copies_of_the_embedding_on_a_stage_in_the_middle(tied, right):
    build = predicting_on_a_stage_of_its_own
    parity(build, [f"pp=3 embedding_ranks={right}"], options={"tied": tied}).check()
    with pytest.raises(ParityInputError) as caught:
        parity(build, ["pp=3"], options={"tied": tied})
    text = str(caught.value)
    assert text.startswith("layout 'pp=3': pipeline stage ")
    assert "the word embedding" in text
    assert "embedding_ranks=lambda pipeline" in text


def first_and_second(pipeline):
    return pipeline[:2]


@pytest.mark.contract
def test_every_setting_of_a_session_is_a_setting_of_a_layout():
    layouts = [
        "dp=4 optimizer_instances=2",
        "tp=2 dp=2 order=dp-tp-cp-ep-pp",
        "tp=2 pp=2 ranks=3-1-0-2",
    ]
    parity("gpt", layouts).check()


def test_settings_are_those_of_a_session():
    layout = parse_layout(
        "pp=2 cp=4 hierarchical_cp=2-2 hybrid_cp embedding_ranks=0 position_embedding_ranks=0-1 x=7"
    )
    assert layout.options == {"x": 7}
    assert layout.layout == ParallelLayout(
        world_size=8,
        pp=2,
        cp=4,
        hierarchical_cp=(2, 2),
        hybrid_cp=True,
        embedding_ranks=Stages((0,)),
        position_embedding_ranks=Stages((0, 1)),
    )
    assert layout.layout.members("embd", 0) == (0,)
    assert layout.layout.members("pos_embd", 4) == (0, 4)
    given = parse_layout({"pp": 3, "embedding_ranks": first_and_second, "ranks": (2, 1, 0)})
    assert given.layout.members("embd", 2) == (2, 1)
    assert "embedding_ranks=first_and_second ranks=2-1-0" in given.text
    assert set(LayoutSizes.__annotations__) <= set(SIZES)
    with pytest.raises(ParityInputError, match="embedding_ranks takes whole numbers joined by -"):
        parse_layout("pp=2 embedding_ranks=first")


def deeper(pg, z=False):
    """Build a model that computes something else with z."""
    return gpt(pg, layernorm_epsilon=1e-1 if z else 1e-5)


def test_a_word_that_changes_the_model_is_named():
    found = parity(deeper, ["dp=2 z"])
    (note,) = found.notes
    assert note.startswith("dp=2 z: z went to build in this layout and not on one rank")
    assert note in found.text()
