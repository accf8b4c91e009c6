"""The table of replacements: against the functions of real cores, and against the tracer's."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from megapg.layout import FIELDS
from megapg.megatron import getters, replacements, tables
from megapg.migrate import mapping
from megapg.migrate.mapping import Argument, Refusal, Replacement, Takes, replacement
from megapg.migrate.reasons import CAUTIONS, REASONS, explain
from megapg.migrate.signatures import SIGNATURES, VERSIONS, functions, signature

ROOT = Path(__file__).parents[1]
OLD_CORE = ROOT / ".venv" / "cores" / "0.12.0" / "megatron" / "core"


def core_folders() -> list[Path]:
    """The installed core, and the old one where it is there."""
    found = importlib.util.find_spec("megatron.core")
    installed = [Path(where) for where in (found and found.submodule_search_locations) or ()]
    return [folder for folder in (*installed, OLD_CORE) if folder.exists()]


def minor_of(core: Path) -> int:
    said = re.search(r"^MINOR = (\d+)", (core / "package_info.py").read_text(), re.MULTILINE)
    assert said
    return int(said[1])


def tree_of(core: Path) -> ast.Module:
    return ast.parse((core / "parallel_state.py").read_text(encoding="utf-8"))


each_core = pytest.mark.parametrize("core", core_folders(), ids=lambda core: f"0.{minor_of(core)}")


def answer(name: str, call: str = "", *versions: int) -> str:
    """What is written for ``name(call)``, or the reason."""
    node = ast.parse(f"f({call})", mode="eval").body
    assert isinstance(node, ast.Call)
    arguments = [
        *(Argument(ast.unparse(value)) for value in node.args),
        *(
            Argument(ast.unparse(k.value), k.arg)
            if k.arg
            else Argument(f"**{ast.unparse(k.value)}")
            for k in node.keywords
        ),
    ]
    found = replacement(name, arguments, versions or tuple(VERSIONS))
    return found.expression if isinstance(found, Replacement) else found.reason


# --- against the cores ----------------------------------------------------------------------------


@pytest.mark.contract
@each_core
def test_the_table_has_the_functions_of_the_core_and_their_parameters(core: Path) -> None:
    version = minor_of(core)
    real = {
        node.name: [arg.arg for arg in node.args.args]
        for node in tree_of(core).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    ours = {name: signature(name, version) or () for name in functions(version)}
    assert set(real) == set(ours) - {"RankGenerator"}
    for name, parameters in real.items():
        if name != "initialize_model_parallel":
            assert [parameter.name for parameter in ours[name]] == parameters, name


@pytest.mark.contract
@each_core
def test_the_defaults_are_the_cores(core: Path) -> None:
    version = minor_of(core)
    for node in tree_of(core).body:
        if not isinstance(node, ast.FunctionDef) or node.name not in SIGNATURES:
            continue
        if node.name == "initialize_model_parallel":
            continue
        defaults = [ast.unparse(default) for default in node.args.defaults]
        ours = [parameter.default for parameter in signature(node.name, version) or ()]
        assert [default for default in ours if default] == defaults, node.name


@pytest.mark.contract
@each_core
def test_every_function_is_mapped_or_has_a_reason(core: Path) -> None:
    version = minor_of(core)
    for name in functions(version):
        found = replacement(name, (), [version])
        if isinstance(found, Refusal):
            assert found.reason in REASONS
            assert found.reason not in ("unknown-name", "not-in-core", "version"), name
        else:
            ast.parse(found.expression, mode="eval")
            assert found.caution in ("", *CAUTIONS)


@pytest.mark.contract
@each_core
def test_every_private_global_is_known(core: Path) -> None:
    names = {
        target.id
        for node in tree_of(core).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id.startswith("_")
    }
    assert len(names) > 40
    assert [name for name in sorted(names) if not mapping.known(name)] == []
    for name in names:
        found = replacement(name)
        assert isinstance(found, Replacement) or found.reason != "unknown-name", name


# --- against the rest of megapg -------------------------------------------------------------------


def test_the_fields_are_a_collections() -> None:
    for name in (*SIGNATURES, *mapping.PRIVATE):
        for version in VERSIONS:
            found = replacement(name, (), [version])
            if isinstance(found, Replacement) and found.field:
                assert found.field in FIELDS, name


def test_the_functions_written_are_there_and_take_what_is_written() -> None:
    calls = {
        found.expression
        for name in (*SIGNATURES, *mapping.PRIVATE)
        for version in VERSIONS
        for given in ("", "True", "with_context_parallel=flag", "ignore_virtual=False, vp_stage=3")
        if isinstance(found := _found(name, given, version), Replacement) and found.needs_getters
    }
    assert len(calls) > 15
    for written in calls:
        for node in ast.walk(ast.parse(written, mode="eval")):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("getters."):
                function = getattr(getters, ast.unparse(node.func).removeprefix("getters."))
                positional = [object() for _ in node.args]
                inspect.signature(function).bind(*positional, **{k.arg: 0 for k in node.keywords})


def _found(name: str, given: str, version: int) -> Replacement | Refusal:
    keyword, _, text = given.rpartition("=")
    if "," in given:
        arguments = [Argument("False", "ignore_virtual"), Argument("3", "vp_stage")]
    else:
        arguments = [Argument(text, keyword)] if given else []
    return replacement(name, arguments, [version])


def test_the_tracer_says_the_same() -> None:
    """One vocabulary: what differs is where the tracer knows the values and source does not."""
    differ = {}
    for name in functions(16):
        ours = replacement(name, (), [16])
        defaults = {p.name: ast.literal_eval(p.default or "None") for p in signature(name, 16) or ()
                    if p.default != "..."}  # fmt: skip
        try:
            theirs = replacements.replacement(name, defaults).write
        except (KeyError, IndexError):
            continue
        if isinstance(ours, Replacement) and ours.expression.strip("()") != theirs.strip("()"):
            differ[name] = (ours.expression, theirs)
    assert differ == {}


def test_the_tables_that_both_sides_have_agree() -> None:
    for name, field in mapping.GROUP_GLOBALS.items():
        assert tables.GROUP_GLOBALS.get(name, field) == field
    assert set(tables.GROUP_GLOBALS) <= mapping.PRIVATE
    assert set(tables.GLOO_GLOBALS) <= mapping.PRIVATE
    assert replacements.COLLECTION_PARAMETER in mapping.COLLECTION_NAMES


# --- traps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call", "versions", "expected"),
    [
        (
            "is_pipeline_last_stage",
            "",
            (5, 12),
            "getters.is_pipeline_last_stage(pg, ignore_virtual=False)",
        ),
        ("is_pipeline_last_stage", "", (13,), "getters.is_pipeline_last_stage(pg)"),
        ("is_pipeline_last_stage", "", (12, 13), "stage-default"),
        ("is_pipeline_last_stage", "**flags", (12,), "stage-default"),
        ("is_pipeline_last_stage", "**flags", (12, 13), "stage-default"),
        ("is_pipeline_last_stage", "**flags", (13,), "getters.is_pipeline_last_stage(pg, **flags)"),
        ("is_pipeline_last_stage", "*flags", (13,), "arguments"),
        (
            "is_pipeline_first_stage",
            "False, **chunk",
            (16,),
            "getters.is_pipeline_first_stage(pg, ignore_virtual=False, **chunk)",
        ),
        (
            "is_rank_in_embedding_group",
            "ignore_virtual=flag",
            (12, 16),
            "getters.is_rank_in_embedding_group(pg, ignore_virtual=flag)",
        ),
        (
            "is_pipeline_last_stage",
            "ignore_virtual=True",
            (5, 12, 13, 19),
            "getters.is_pipeline_last_stage(pg, ignore_virtual=True)",
        ),
        (
            "is_pipeline_last_stage",
            "ignore_virtual=False",
            (12, 16),
            "getters.is_pipeline_last_stage(pg, ignore_virtual=False)",
        ),
        # The versions that lack the parameter can't run the call.
        (
            "is_pipeline_last_stage",
            "ignore_virtual=False, vp_stage=self.vp_stage",
            (12, 16),
            "getters.is_pipeline_last_stage(pg, ignore_virtual=False, vp_stage=self.vp_stage)",
        ),
        ("get_data_parallel_group", "", (5, 18), "pg.dp"),
        ("get_data_parallel_group", "", (19,), "getters.data_group(pg)"),
        ("get_data_parallel_group", "", (18, 19), "version"),
        ("get_data_parallel_group", "with_gtp_remat=False", (18, 19), "pg.dp"),
        ("get_data_parallel_group", "True, True", (18,), "pg.intra_dp_cp"),
        ("get_data_parallel_group", "True, False", (19,), "pg.dp_cp"),
        ("get_data_parallel_group", "with_context_parallel=True", (19,), "pg.dp_cp_gtp_remat"),
        ("get_data_parallel_group", "partial_data_parallel=True", (16,), "arguments"),
        (
            "get_data_parallel_world_size",
            "with_context_parallel=flag",
            (16,),
            "getters.data_size(pg, with_context_parallel=flag)",
        ),
        ("get_data_parallel_group", "**flags", (16,), "arguments"),
        ("get_data_parallel_group_gloo", "flag", (16,), "run-time-flag"),
        ("get_tensor_and_data_parallel_group", "True", (14,), "pg.tp_dp_cp"),
        ("get_tensor_and_data_parallel_group", "True", (15,), "pg.tp_dp"),
        ("get_tensor_and_data_parallel_group", "True", (14, 15), "version"),
        ("get_amax_reduction_group", "True, True", (16,), "pg.tp_cp"),
        ("get_amax_reduction_group", "tp_only_amax_red=True", (16,), "pg.tp"),
        ("get_expert_data_parallel_rank", "", (16,), 'pg.rank("expt_dp")'),
        ("get_expert_data_parallel_rank", "", (19,), 'pg.rank("expt_dp_gtp_remat")'),
        (
            "get_expert_data_parallel_rank",
            "partial_expert_data_parallel=True",
            (19,),
            "getters.expert_data_group(pg, partial_expert_data_parallel=True).rank()",
        ),
        ("get_tensor_model_parallel_group", "False", (16,), 'getattr(pg, "tp", None)'),
        (
            "get_tensor_model_parallel_group",
            "check_initialized=now",
            (16,),
            'getters.present_group(pg, "tp", check_initialized=now)',
        ),
        (
            "get_tensor_and_data_parallel_group",
            "check_initialized=False, with_context_parallel=flag",
            (16,),
            "unchecked",
        ),
        ("get_context_parallel_global_ranks", "check_initialized=now", (16,), "run-time-flag"),
        ("get_embedding_group", "", (5, 19), 'getters.present_group(pg, "embd")'),
        ("get_embedding_group", "False", (16,), 'getattr(pg, "embd", None)'),
        (
            "get_hierarchical_context_parallel_groups",
            "check_initialized=now",
            (12, 16),
            "getters.hierarchical_groups(pg, check_initialized=now)",
        ),
        ("get_context_parallel_global_ranks", "", (5, 19), 'list(pg.ranks("cp"))'),
        ("is_inside_encoder", "", (9, 19), "getters.is_inside_encoder(pg)"),
        ("is_inside_encoder", "stage", (13,), "getters.is_inside_encoder(pg, rank=stage)"),
        ("is_inside_encoder", "", (14,), "not-in-core"),
        ("get_pipeline_model_parallel_split_rank", "", (5, 13), "getters.pipeline_split_rank(pg)"),
        ("set_pipeline_model_parallel_split_rank", "2", (12,), "encoder-decoder"),
        ("get_amax_reduction_group", "", (7, 9), "pg.tp_dp"),
        ("get_amax_reduction_group", "", (8,), "pg.tp"),
        ("get_amax_reduction_group", "True", (8,), "pg.tp_cp"),
        ("get_amax_reduction_group", "", (8, 9), "version"),
        ("get_context_parallel_global_ranks", "check_initialized=False", (16,), "unchecked"),
        ("get_model_parallel_group", "with_expert_parallel=True", (9,), "no-field"),
        ("get_tensor_and_expert_parallel_group", "", (9,), "no-field"),
        ("get_expert_model_parallel_rank", "", (5,), "no-field"),
        ("get_expert_model_parallel_rank", "", (6, 19), 'pg.rank("ep")'),
        ("get_data_modulo_expert_parallel_group", "", (9,), "no-field"),
        ("get_data_modulo_expert_parallel_group", "True", (9,), "no-field"),
        ("get_data_modulo_expert_parallel_group", "", (13,), "pg.expt_dp"),
        ("is_unitialized", "", (19,), "not-in-core"),
        ("get_pipeline_model_parallel_next_rank", "", (16,), "getters.pipeline_next_rank(pg)"),
        ("get_tensor_model_parallel_src_rank", "", (16,), 'pg.ranks("tp")[0]'),
        ("set_tensor_model_parallel_rank", "0", (16,), "setter"),
        ("get_tensor_parallel_group", "", (16,), "unknown-name"),
        ("_MPU_TENSOR_MODEL_PARALLEL_RANK", "", (16,), "setter"),
        ("_EXPERT_TENSOR_PARALLEL_GROUP", "", (16,), 'getattr(pg, "expt_tp", None)'),
        (
            "_PIPELINE_MODEL_PARALLEL_GROUP",
            "",
            (12,),
            'getters.present_group(pg, "pp", check_initialized=False)',
        ),
    ],
)
def test_meanings(name: str, call: str, versions: tuple[int, ...], expected: str) -> None:
    assert answer(name, call, *versions) == expected


def test_a_replacement_can_be_written_with_other_names() -> None:
    found = replacement("get_data_parallel_rank", (), [16])
    assert isinstance(found, Replacement)
    assert found.write("self.pg_collection") == 'self.pg_collection.rank("dp")'
    assert found.write_narrow("dp_group") == "dp_group.rank()"
    first = replacement("get_pipeline_model_parallel_first_rank")
    assert isinstance(first, Replacement)
    assert first.write(getters="g") == "g.pipeline_first_rank(pg)"
    assert first.write_narrow("pp_group") is None


@pytest.mark.parametrize(
    ("name", "call", "versions", "expected"),
    [
        ("get_pipeline_model_parallel_group", "", (9,), "getters.pipeline_or_pipelines(pg)"),
        ("get_pipeline_model_parallel_group", "", (13, 16), "getters.pipeline_or_pipelines(pg)"),
        ("get_pipeline_model_parallel_group", "", (8,), "pg.pp"),
        ("get_pipeline_model_parallel_group", "", (14, 19), "pg.pp"),
        (
            "get_pipeline_model_parallel_group",
            "False",
            (13,),
            'getters.present_group(pg, "pp", check_initialized=False)',
        ),
        (
            "get_pipeline_model_parallel_last_rank",
            "",
            (12,),
            "getters.pipeline_last_rank_or_ranks(pg)",
        ),
        ("get_pipeline_model_parallel_first_rank", "", (12,), "getters.pipeline_first_rank(pg)"),
        ("get_pipeline_model_parallel_rank", "", (12,), 'pg.rank("pp")'),
    ],
)
def test_code_that_can_do_with_a_list_gets_one(
    name: str, call: str, versions: tuple[int, ...], expected: str
) -> None:
    arguments = [Argument(text) for text in call.split(", ") if text]
    found = replacement(name, arguments, versions, or_several=True)
    assert isinstance(found, Replacement)
    assert found.expression == expected
    assert found.needs == ("pp",)


def test_what_stood_at_a_position_can_stand_at_a_keyword() -> None:
    found = replacement("is_pipeline_last_stage", [Argument("off := False")], [16])
    assert isinstance(found, Replacement)
    ast.parse(found.expression, mode="eval")
    assert "ignore_virtual=(off := False)" in found.expression


def test_groups_that_may_be_none_say_so_where_the_getter_hands_none_on() -> None:
    for name in ("get_embedding_group", "get_inter_distributed_optimizer_instance_group"):
        found = replacement(name, (), [16])
        assert isinstance(found, Replacement)
        assert found.caution == ""
        assert found.write_narrow("embd_group") is None, "a parameter may hold None"
        found = replacement(name, [Argument("False")], [16])
        assert isinstance(found, Replacement)
        assert found.caution == "may-be-none"


@pytest.mark.parametrize(
    ("name", "call", "version", "needs", "takes"),
    [
        ("get_tensor_model_parallel_rank", "", 16, "tp", Takes.COLLECTION),
        ("get_pipeline_model_parallel_next_rank", "", 16, "pp", Takes.COLLECTION),
        ("get_all_ranks", "", 16, "tp dp cp pp ep", Takes.COLLECTION),
        ("get_data_parallel_group", "flag", 16, "dp_cp dp", Takes.COLLECTION),
        ("get_data_parallel_rank", "True, flag", 16, "intra_dp_cp dp_cp", Takes.COLLECTION),
        ("get_data_parallel_group", "", 19, "dp", Takes.COLLECTION),
        ("get_amax_reduction_group", "True, flag", 16, "tp_cp tp_dp_cp", Takes.COLLECTION),
        ("is_pipeline_last_stage", "", 16, "pp", Takes.COLLECTION),
        ("is_pipeline_last_stage", "True", 12, "pp", Takes.COLLECTION),
        ("is_pipeline_last_stage", "", 12, "pp", Takes.JOB),
        ("is_pipeline_last_stage", "flag", 16, "pp", Takes.JOB),
        ("is_pipeline_last_stage", "False, 1", 16, "pp", Takes.JOB),
        ("is_rank_in_embedding_group", "", 16, "embd", Takes.COLLECTION),
        ("is_rank_in_embedding_group", "False, 1", 16, "embd pp", Takes.GLOBALS),
        ("get_virtual_pipeline_model_parallel_world_size", "", 16, "pp", Takes.JOB),
        ("get_global_memory_buffer", "", 16, "tp", Takes.JOB),
        ("get_data_parallel_group_gloo", "", 16, "dp", Takes.JOB),
        ("get_data_parallel_group_gloo", "True", 16, "dp_cp", Takes.JOB),
        ("is_inside_encoder", "", 12, "pp", Takes.JOB),
        ("is_pipeline_stage_at_split", "", 12, "pp", Takes.JOB),
        ("get_pipeline_model_parallel_split_rank", "", 12, "pp", Takes.JOB),
        ("get_pipeline_model_parallel_decoder_start", "", 12, "pp", Takes.JOB),
        ("is_initialized", "", 16, "", Takes.OPTIONAL),
        ("model_parallel_is_initialized", "", 16, "", Takes.OPTIONAL),
        ("get_tensor_model_parallel_group", "False", 16, "tp", Takes.LAZY),
        ("get_tensor_model_parallel_group", "flag", 16, "tp", Takes.LAZY),
        ("_TENSOR_MODEL_PARALLEL_GROUP", "", 16, "tp", Takes.LAZY),
    ],
)
def test_what_a_replacement_needs(
    name: str, call: str, version: int, needs: str, takes: Takes
) -> None:
    arguments = [Argument(text) for text in call.split(", ") if text]
    found = replacement(name, arguments, [version])
    assert isinstance(found, Replacement)
    assert found.needs == tuple(needs.split())
    assert found.takes is takes


def test_what_is_unchecked_reads_the_variable_that_the_view_reads() -> None:
    """Another one would quietly be None in the view, and None is WORLD."""
    read = {field: name for name, field in reversed([*tables.GROUP_GLOBALS.items()])}
    for name in mapping.PRIVATE:
        found = replacement(name)
        if isinstance(found, Replacement) and "getattr(" in found.expression:
            assert read[found.field] == name


@pytest.mark.parametrize("code", [*REASONS, *CAUTIONS])
def test_every_code_is_explained(code: str) -> None:
    reason = explain(code)
    assert reason.title
    assert reason.why.endswith(".")
    assert reason.instead.endswith(".")
