"""Compare the table of replacements with the functions of real cores, and with the tracer."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fallbacks import fallbacks, parameters_of
from migrate_cases import sections
from old_core import core_folders

from megapg.layout import FIELDS
from megapg.layout.fields import GROUP_GLOBALS
from megapg.megatron import getters, tables
from megapg.megatron.watching import advice
from megapg.migrate.reasons import REASONS, explain
from megapg.upstream import expressions, mapping
from megapg.upstream.expressions import replacement
from megapg.upstream.helpers import HELPERS_OF_CORE
from megapg.upstream.mapping import Argument, Refusal, Replacement
from megapg.upstream.signatures import SIGNATURES, VERSIONS, functions, signature


def minor_of(core: Path) -> int:
    said = re.search(r"^MINOR = (\d+)", (core / "package_info.py").read_text(), re.MULTILINE)
    assert said
    return int(said[1])


def tree_of(core: Path) -> ast.Module:
    return ast.parse((core / "parallel_state.py").read_text(encoding="utf-8"))


each_core = pytest.mark.parametrize("core", core_folders(), ids=lambda core: f"0.{minor_of(core)}")


def answer(name: str, call: str = "", *versions: int) -> str:
    """Return the replacement of ``name(call)``, or the reason for none."""
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
            assert found.reason != "version", name
        else:
            ast.parse(found.expression, mode="eval")
            assert found.caution in ("", "may-be-none")


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
    assert [name for name in sorted(names) if not expressions.known(name)] == []
    for name in names:
        found = replacement(name)
        assert isinstance(found, Replacement) or found.reason != "version", name


@pytest.mark.contract
@each_core
def test_every_other_function_that_answers_with_the_globals_is_listed(core: Path) -> None:
    if minor_of(core) < 16:
        pytest.skip("the table begins with 0.16")
    found = fallbacks(core)
    # One came with 0.19.
    missing = (
        {"tensor_parallel.layers.param_is_not_gtp_duplicate"} if minor_of(core) < 19 else set()
    )
    assert found == set(HELPERS_OF_CORE) - missing
    for name in found:
        parameters = parameters_of(core, name)
        helper = HELPERS_OF_CORE[name]
        if helper.parameter:
            assert parameters[helper.position] == helper.parameter, name


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


# Names that are refused in source code, but that a trace can replace. A call that Megatron-core
# refuses is treated as if it had the missing argument.
_KNOWN_BY_VALUE = {
    "get_virtual_pipeline_model_parallel_rank": {"vp_stage"},
    "get_context_parallel_global_ranks": {'list(pg.ranks("cp"))'},
    "get_data_parallel_group": {"pg.intra_dp_cp"},
    "get_data_parallel_group_gloo": {'getters.gloo_group(pg, "intra_dp_cp")'},
    "get_data_parallel_rank": {'pg.rank("intra_dp_cp")'},
    "get_data_parallel_world_size": {'pg.size("intra_dp_cp")'},
    "get_hybrid_data_context_parallel_groups": {"getters.hybrid_group(pg, size)"},
}
_IN_REMAT = "(pg, with_context_parallel=True, partial_data_parallel=True)"
_KNOWN_BY_VALUE_ON_19 = {
    **_KNOWN_BY_VALUE,
    "get_data_parallel_group": {"pg.intra_dp_cp", f"getters.data_group{_IN_REMAT}"},
    "get_data_parallel_rank": {'pg.rank("intra_dp_cp")', f"getters.data_rank{_IN_REMAT}"},
    "get_data_parallel_world_size": {'pg.size("intra_dp_cp")', f"getters.data_size{_IN_REMAT}"},
    "get_expert_data_parallel_group": {
        "getters.expert_data_group(pg, partial_expert_data_parallel=True)"
    },
    "get_gtp_weight_remat_global_ranks": {'list(pg.ranks("gtp_remat"))'},
    "get_expert_gtp_weight_remat_global_ranks": {'list(pg.ranks("expt_gtp_remat"))'},
}
_BUFFER = {"get_global_symmetric_memory_buffer": {"a symmetric buffer of your own"}}


@pytest.mark.parametrize(
    ("version", "by_value"),
    [(16, {**_KNOWN_BY_VALUE, **_BUFFER}), (19, _KNOWN_BY_VALUE_ON_19)],
    ids=["0.16", "0.19"],
)
def test_the_tracer_says_the_same_whatever_the_flags(
    version: int, by_value: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "installed_version", lambda: (0, version, 0))
    left: dict[str, set[str]] = {}
    answers = 0
    for name, flags in _calls(version):
        defaults = {p.name: ast.literal_eval(p.default) for p in signature(name, version) or ()}
        theirs = advice.replacement(name, {**defaults, **flags})
        given = {key: repr(value) for key, value in flags.items() if value != defaults[key]}
        if given.get("ignore_virtual") == "False":
            given["vp_stage"] = "vp_stage"
        ours = replacement(name, [Argument(text, key) for key, text in given.items()], [version])
        if isinstance(ours, Refusal):
            left.setdefault(name, set()).update(filter(None, [theirs.write]))
            continue
        answers += 1
        assert theirs.write == ours.expression, (name, flags)
        field = ours.field or ", ".join(ours.needs)
        assert theirs.field == (f"gloo.{field}" if ours.asks == "gloo" else field), (name, flags)
    assert answers > 80
    assert {name: texts for name, texts in left.items() if texts} == by_value


def _calls(version: int) -> Iterator[tuple[str, dict[str, bool]]]:
    """Yield every getter with every choice of its flags."""
    for name in functions(version):
        parameters = signature(name, version) or ()
        flags = [each.name for each in parameters if each.default in ("True", "False")]
        if all(each.default not in ("", "...") for each in parameters):
            for chosen in itertools.product((True, False), repeat=len(flags)):
                yield name, dict(zip(flags, chosen, strict=True))


def test_the_tables_that_both_sides_have_agree() -> None:
    for name, field in GROUP_GLOBALS.items():
        assert tables.GROUP_GLOBALS.get(name, field) == field
    assert set(tables.GROUP_GLOBALS) <= mapping.PRIVATE
    assert set(tables.GLOO_GLOBALS) <= mapping.PRIVATE
    assert advice.COLLECTION_PARAMETER in mapping.COLLECTION_NAMES


def rows(heading: str) -> Iterator[tuple[str, str, tuple[int, ...], *tuple[str, ...]]]:
    """Yield the lines of a section of ``meanings.txt``: ``name(call) | versions | ...``."""
    for line in dict(sections("meanings.txt", Path(__file__).parent))[heading].splitlines():
        if not line.startswith("#"):
            read, versions, *expected = map(str.strip, line.split("|"))
            name, _, call = read.removesuffix(")").partition("(")
            yield name, call, tuple(map(int, versions.split())), *expected


# --- traps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "call", "versions", "expected"), rows("what is written"))
def test_meanings(name: str, call: str, versions: tuple[int, ...], expected: str) -> None:
    assert answer(name, call, *versions) == expected


def test_a_replacement_can_be_written_with_other_names() -> None:
    found = replacement("get_data_parallel_rank", (), [16])
    assert isinstance(found, Replacement)
    assert found.write("self.pg_collection") == 'self.pg_collection.rank("dp")'
    first = replacement("get_pipeline_model_parallel_first_rank")
    assert isinstance(first, Replacement)
    assert first.write(getters="g") == "g.pipeline_first_rank(pg)"


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
        found = replacement(name, [Argument("False")], [16])
        assert isinstance(found, Replacement)
        assert found.caution == "may-be-none"


@pytest.mark.parametrize(
    ("name", "call", "versions", "needs", "takes"),
    rows("what it needs, and from where it may come"),
)
def test_what_a_replacement_needs(
    name: str, call: str, versions: tuple[int, ...], needs: str, takes: str
) -> None:
    arguments = [Argument(text) for text in call.split(", ") if text]
    found = replacement(name, arguments, versions)
    assert isinstance(found, Replacement)
    assert found.needs == tuple(needs.split())
    assert found.takes == takes


def test_what_is_unchecked_reads_the_variable_that_the_view_reads() -> None:
    """Another variable would silently be None in the view, and None means WORLD."""
    read = {field: name for name, field in reversed([*tables.GROUP_GLOBALS.items()])}
    for name in mapping.PRIVATE:
        found = replacement(name)
        if isinstance(found, Replacement) and "getattr(" in found.expression:
            assert read[found.field] == name


def test_every_reason_is_explained() -> None:
    assert {*mapping.REFUSED.values()} <= {*REASONS}


@pytest.mark.parametrize("code", [*REASONS])
def test_every_code_is_explained(code: str) -> None:
    reason = explain(code)
    assert reason.title
    assert reason.why.endswith(".")
    assert reason.instead.endswith(".")
