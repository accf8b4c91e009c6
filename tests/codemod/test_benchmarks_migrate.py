"""Test the benchmark of the codemod: its counts, and that it detects damaged output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import migrate as benchmark
from benchmarks.corpora import CORPORA, Checkout, Corpus
from megapg.migrate.config import Config, parse_versions
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Migration, Problem, Rewritten
from megapg.migrate.project import is_test

SOURCE = """\
from megatron.core import parallel_state


def share(total, pg_collection):
    return total / parallel_state.get_tensor_model_parallel_world_size()


def rank():
    return parallel_state.get_tensor_model_parallel_rank()


def end():
    parallel_state.destroy_model_parallel()
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    tree = tmp_path / "project"
    (tree / "tests").mkdir(parents=True)
    (tree / "share.py").write_text(SOURCE)
    (tree / "tests" / "test_share.py").write_text(SOURCE)
    (tree / "old.py").write_text("print 'for Python 2'\n")
    return Corpus(Checkout(tree), "0.16")


def test_uses_of_source_are_counted(corpus: Corpus) -> None:
    found = benchmark.run(corpus)
    assert (found.tree, found.uses, found.rewritten, found.not_resolved) == ("project", 3, 2, 1)
    assert (found.uncompiled, found.second_run, found.problems) == ((), 0, ())
    assert found.seconds > 0
    assert (corpus.wheel.tree() / "share.py").read_text() == SOURCE


def test_damage_is_noticed(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    unwritten = Problem("share.py", 0, "can't be written")

    def write_wrongly(files: Sequence[Rewritten]) -> list[Problem]:
        for file in files:
            file.path.write_text("def f(:\n")
        return [unwritten]

    monkeypatch.setattr(benchmark, "write_files", write_wrongly)
    found = benchmark.run(corpus)
    assert found.uncompiled == ("share.py",)
    assert found.problems == (unwritten,)
    notes = " ".join(benchmark.table([found]).notes)
    assert "project: share.py does not compile." in notes
    assert "project: share.py can't be written." in notes


def test_edits_of_a_second_run_are_counted(corpus: Corpus) -> None:
    tree = corpus.wheel.tree()
    migration = migrate([tree], Config(tree, versions=(16,)))
    nothing = replace(migration, files=[])

    def edits(again: Migration) -> int:
        return benchmark.outcome("project", nothing, [], again, 1.0).second_run

    assert edits(nothing) == 0
    assert edits(migration) >= 3  # the import, and the uses in two functions


def test_a_row_has_the_shares() -> None:
    row = benchmark.Outcome("some tree", 1000, 900, 605, ("a.py",), 4, 1.7).cells
    assert row == ("some tree", "1,000", "90.0 %", "60.5 %", "1", "4", "2")
    assert benchmark.Outcome("no uses", 0, 0, 0, (), 0, 0.0).cells[2:4] == ("-", "-")


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("tests/unit/helpers.py", True),
        ("a/test_b.py", True),
        ("a/conftest.py", True),
        ("a/test/b.py", True),
        ("a/unit_tests/b.py", True),
        ("a/b_test.py", True),
        ("a/testing/b.py", False),
        ("a/latest.py", False),
        ("a/contest.py", False),
        ("a/tests.py", False),
    ],
)
def test_files_of_a_test_suite(file: str, expected: bool) -> None:
    assert is_test(file) is expected


def test_every_corpus_has_a_known_version() -> None:
    for corpus in CORPORA:
        assert parse_versions(corpus.core)
        assert corpus.config(Path("elsewhere")).root == Path("elsewhere")
