"""Test generated packages: calls without groups give the same, and calls with groups use these.

A command tests more packages: ``python tests/support/migrate_fuzzer.py --count 1000 --seed 1``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from migrate_fuzzer import Groups, Tally, check, two_layouts
from migrate_generator import make_package

FEW, MANY = range(1, 7), range(100, 160)
SOME = (5, 6)  # for tests that damage the new text


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with two_layouts() as both:
        yield both


@pytest.mark.parametrize(
    "seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=("few", "many")
)
@pytest.mark.timeout(3600)
def test_generated_packages(seeds: range, groups: Groups, tmp_path: Path) -> None:
    tally = Tally()
    for seed in seeds:
        check(make_package(seed), tmp_path / str(seed), groups, tally)
    assert not tally.failures, "\n".join(tally.failures)
    # The packages have uses, and most calls get the groups that they need.
    many = len(seeds)
    assert tally.rewritten > 25 * many > 10 * tally.left
    assert tally.same > 12 * many
    assert tally.right > 4 * many
    assert tally.refused > many


def test_a_seed_gives_the_same_valid_package() -> None:
    for seed in range(30):
        package = make_package(seed)
        assert package == make_package(seed)
        assert all(ast.parse(text) for text in package.files.values() if text)
        assert "«" not in "".join(package.files.values())


def damaged(
    seeds: Iterable[int], old: bytes, new: bytes, root: Path, groups: Groups, *, least: int = 1
) -> Tally:
    """Check packages with ``old`` replaced in all rewritten files, and return the counts."""
    tally, count = Tally(), 0

    def change(data: bytes) -> bytes:
        nonlocal count
        count += len(re.findall(old, data))
        return re.sub(old, new, data)

    for seed in seeds:
        check(make_package(seed), root / str(seed), groups, tally, change)
    assert count >= least
    return tally


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rb'rank\("tp"\)', b'rank("pp")'),  # another field
        (rb"pg_collection=None", b"pg_collection"),  # no default any more
        (rb'size\("tp"\)', b'size("tp") + 1'),
    ],
)
def test_a_change_with_nothing_passed_is_found(
    old: bytes, new: bytes, groups: Groups, tmp_path: Path
) -> None:
    assert damaged([1], old, new, tmp_path, groups).failures


def test_groups_that_are_not_used_are_refused_or_found(groups: Groups, tmp_path: Path) -> None:
    """The guard refuses the globals in place of the groups, unless these are the globals' own."""
    sound = damaged(SOME, rb"$^", b"", tmp_path / "sound", groups, least=0)
    dropped = damaged(SOME, rb", pg_collection=pg\b", b"", tmp_path / "dropped", groups)
    assert dropped.right < sound.right
    assert dropped.refused > sound.refused
    ignored = rb"resolve\(pg_collection\)", b"resolve(None)"
    assert damaged(SOME, *ignored, tmp_path / "other", groups).refused > 3
    of_globals = (groups[1], groups[1])
    same = damaged(SOME, *ignored, tmp_path / "same", of_globals)
    assert (same.failures, same.refused) == ([], 0)
