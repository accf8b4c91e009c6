"""The benchmark of the codemod measures what it says, and notices what is wrong."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ground_truth, migrate, migrate_report
from benchmarks.corpora import CORES, CORPORA
from benchmarks.ground_truth import Carrier, Choice, Score
from benchmarks.migrate import Outcome, Uses
from benchmarks.race import Race
from megapg.migrate.config import Config, parse_versions
from megapg.migrate.engine import migrate as codemod
from megapg.migrate.migration import How, Rewritten
from megapg.migrate.python.tree import is_test

SOURCE = """\
from megatron.core import parallel_state


def share(total, pg_collection):
    # café
    return total / parallel_state.get_tensor_model_parallel_world_size()
"""


def rewritten(folder: Path, data: bytes) -> Rewritten:
    """What the codemod makes of a file."""
    (folder / "share.py").write_bytes(data)
    found = codemod([folder], Config(folder, versions=(16,)))
    assert len(found.files) == 1
    return found.files[0]


@pytest.mark.parametrize(
    "data",
    [
        SOURCE.encode(),
        SOURCE.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + SOURCE.encode(),
        b"# -*- coding: latin-1 -*-\n" + SOURCE.encode("latin-1"),
    ],
    ids=["plain", "windows", "bom", "latin-1"],
)
def test_taking_the_edits_back_gives_the_old_bytes(tmp_path: Path, data: bytes) -> None:
    file = rewritten(tmp_path, data)
    assert file.after != data
    assert migrate._undone(file) == (data, 0)


def test_a_byte_that_no_edit_lists_is_noticed(tmp_path: Path) -> None:
    file = rewritten(tmp_path, SOURCE.encode())
    damaged = replace(file, after=file.after.replace("café".encode(), "cafè".encode()))
    undone, outside = migrate._undone(damaged)
    assert undone != file.before
    assert outside == 1
    longer = replace(file, after=file.after + b"# more\n")
    assert migrate._undone(longer) == (file.before + b"# more\n", 7)


def test_an_edit_that_is_not_as_listed_is_noticed(tmp_path: Path) -> None:
    file = rewritten(tmp_path, SOURCE.encode())
    *others, last = file.edits
    wrong = replace(file, edits=(*others, replace(last, new=last.new[:-1] + "!")))
    assert migrate._undone(wrong)[0] != file.before


def test_a_digest_is_of_names_and_new_bytes_in_any_order(tmp_path: Path) -> None:
    file = rewritten(tmp_path, SOURCE.encode())
    other = replace(file, file="other.py")
    digest = migrate.digest_of([file, other])
    assert migrate.digest_of([other, file]) == digest
    assert migrate.digest_of([file, replace(other, after=other.after + b"#\n")]) != digest
    assert migrate.digest_of([file, replace(other, file="third.py")]) != digest
    assert migrate.digest_of([file]) != digest


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tests/unit/helpers.py", True),
        ("a/tests/b.py", True),
        ("a/test_b.py", True),
        ("a/conftest.py", True),
        ("a/test/b.py", True),
        ("a/unit_tests/b.py", True),
        ("a/b_test.py", True),
        ("a/testing/b.py", False),
        ("a/latest.py", False),
        ("a/contest.py", False),
        ("a/contest/b.py", False),
        ("a/tests.py", False),
    ],
)
def test_what_is_a_test(file: str, expected: bool) -> None:
    assert is_test(file) is expected


def test_shares_count_what_is_left_and_leave_shims_out() -> None:
    one = Uses(Counter({How.COLLECTION: 3, How.RESOLVED: 4}), Counter({"setter": 1}), roots=2)
    one = replace(one, whys=Counter({"decorated": 4}))
    other = Uses(Counter({How.MODEL: 2}), Counter(), roots=0)
    both = Uses.together([one, other])
    assert (both.total, both.roots) == (10, 2)
    assert both.whys == {"decorated": 4}
    assert (both.automatic, both.answerable) == (0.9, 1)
    assert both.automatic == pytest.approx(0.9)
    assert both.shimless == pytest.approx(0.5)
    assert both.shimless_or_model == pytest.approx(0.3)


def test_tables_say_what_is_missed() -> None:
    uses = Uses(Counter({How.COLLECTION: 2}), Counter({"setter": 1}), roots=0)
    outcome = Outcome(
        CORPORA[0], uses, uses, 9, 3, (), (), ("a.py",), 0, (), 4, 1.5, ("a.py: class A",)
    )
    tables = migrate_report.corpora_tables([outcome])
    verdicts = {row[0]: row[-1] for row in tables[0].rows}
    assert list(verdicts.values()) == [
        "MISSED",  # 66.7 % of 92 %
        "-",  # all that a collection could answer
        "met",  # 66.7 % of 60 %
        "-",
        "MISSED",  # one file can't be undone
        "met",
        "MISSED",  # four edits of a second run
        "MISSED",  # a class that mixes carriers
    ]
    assert any("a.py" in note for note in tables[-1].notes)


def test_every_corpus_is_of_a_version_that_is_known() -> None:
    for corpus in CORPORA:
        assert parse_versions(corpus.core)
        assert corpus.config(Path("elsewhere")).root == Path("elsewhere")
    assert [int(core.version.split(".")[1]) for core in CORES] == list(range(11, 20))


def test_a_race_is_decided_within_each_repeat() -> None:
    race = Race("these", 2, ours=(1.0, 2.0, 9.0), theirs=(20.0, 20.0, 90.0))
    assert race.ratio == pytest.approx(0.1)
    assert not race.met
    assert replace(race, theirs=(20.0, 40.0, 180.0)).met


# --- the ground truth -----------------------------------------------------------------------------

NEWER = """
class Layer:
    def __init__(self, pg_collection, tp_group=None):
        self.tp_group = pg_collection.expt_tp
        self.pg_collection = pg_collection
        self.size = tp_group.size()

    def forward(self, model):
        pp = getattr(self.pg_collection, "pp", None)
        groups = get_pg_collection(model)
        return self.tp_group.rank(), groups.dp_cp

def reduce(x, group):
    if group is None:
        group = parallel_state.get_data_parallel_group()
    return all_reduce(x, group=group)
"""


def uses_of(name: str, *any_group: str) -> dict[str, tuple[set[str], set[Carrier]]]:
    functions = dict(ground_truth._functions(ast.parse(NEWER)))
    return {
        use.text: (set(use.fields), set(use.carriers))
        for use in functions[name].uses(frozenset(any_group))
    }


def test_fields_and_carriers_of_a_body() -> None:
    assert uses_of("Layer.__init__") == {
        "pg_collection.expt_tp": ({"expt_tp"}, {Carrier.COLLECTION}),
        "pg_collection": (set(), {Carrier.COLLECTION}),
        "tp_group": ({"tp", "expt_tp"}, {Carrier.GROUP}),
    }
    assert uses_of("Layer.forward") == {
        "self.pg_collection": ({"pp"}, {Carrier.SELF}),
        "self.tp_group": ({"expt_tp"}, {Carrier.SELF}),  # as the class assigns it
        "groups.dp_cp": ({"dp_cp"}, {Carrier.MODEL}),
    }
    assert uses_of("reduce", "dp")["group"] == ({"dp"}, {Carrier.GROUP})


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("pg.tp", Carrier.COLLECTION),
        ("getters.pipeline_next_rank(pg)", Carrier.COLLECTION),
        ("megapg.resolve(None).rank('tp')", Carrier.GLOBALS),
        ("megapg.groups_of(model, 'tp').tp", Carrier.MODEL),
        ("megapg.groups_of(self, 'tp').tp", Carrier.SELF),
        ("self.tp_group.size()", Carrier.SELF),
        ("tp_group.size()", Carrier.GROUP),
    ],
)
def test_carriers_of_what_the_codemod_writes(written: str, expected: Carrier) -> None:
    source = """
def f(self, model, tp_group, pg_collection=None):
    pg = megapg.resolve(pg_collection, needs=("tp",))
"""
    function = dict(ground_truth._functions(ast.parse(source)))["f"]
    expression = ast.parse(written, mode="eval").body
    assert set(function.carriers_of_ours(expression)) == {expected}


def test_a_score_leaves_out_what_was_changed_and_says_so() -> None:
    agreed = Choice(
        *("0.12.0", "0.13.1", "a.py", "f", "get_x()"),
        fields=frozenset({"tp"}),
        refusal="",
        their_fields=frozenset({"tp", "expt_tp"}),
        carriers=frozenset({Carrier.COLLECTION}),
        their_carriers=frozenset({Carrier.GROUP}),
        changed="",
    )
    wrong = replace(agreed, function="g", fields=frozenset({"dp"}), their_carriers=frozenset())
    score = Score([agreed, wrong, replace(wrong, changed="it does something else now")])
    assert (len(score.scored), score.same_field) == (2, 0.5)
    assert score.same_field_of_all == pytest.approx(1 / 3)
    assert (score.same_carrier, score.same_place) == (0.0, 1.0)
    assert [about for about, _ in score.disagreements()] == ["carrier", "field", "left out"]
