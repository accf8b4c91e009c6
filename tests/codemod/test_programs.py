"""Test that programs give the same before and after the migration if no groups are passed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from migrate_cases import globals_published, parameters, program_of, runs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def published() -> Iterator[None]:
    with globals_published():
        yield


@pytest.mark.parametrize("text", parameters("programs.txt"))
def test_a_program_gives_the_same(text: str, tmp_path: Path) -> None:
    before, after, migration = runs(tmp_path, program_of(text))
    assert "Error" not in before
    assert after == before
    assert not migration.problems
