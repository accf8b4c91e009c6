"""Test generated packages: calls without groups give the same, and calls with groups use these.

A command tests more packages: ``python tests/support/migrate_fuzzer.py --count 1000 --seed 1``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from migrate_fuzzer import Groups, Tally, check, two_layouts
from migrate_generator import Package, make_package

FEW, MANY = range(1, 9), range(100, 250)
SOME = range(4, 8)  # for tests that damage the new text


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


def damaged(package: Package, old: bytes, new: bytes, root: Path, groups: Groups) -> Tally:
    """Check a package with ``old`` replaced in all rewritten files, and return the counts."""
    tally, count = Tally(), 0

    def change(data: bytes) -> bytes:
        nonlocal count
        count += len(re.findall(old, data))
        return re.sub(old, new, data)

    check(package, root, groups, tally, change)
    assert count
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
    assert damaged(make_package(1), old, new, tmp_path, groups).failures


def test_groups_that_are_dropped_are_refused_or_found(groups: Groups, tmp_path: Path) -> None:
    """If no call passes the collection on, the guard refuses the reads of the globals."""
    sound, tally = Tally(), Tally()
    for seed in SOME:
        check(make_package(seed), tmp_path / "sound" / str(seed), groups, sound)
        root = tmp_path / "dropped" / str(seed)
        found = damaged(make_package(seed), rb", pg_collection=pg\b", b"", root, groups)
        tally.right += found.right
        tally.refused += found.refused
    assert tally.right < sound.right
    assert tally.refused > sound.refused


def test_the_globals_in_place_of_what_is_passed_are_found(groups: Groups, tmp_path: Path) -> None:
    """Published globals of the right layout hide the mistake; globals of another layout do not."""
    _, passed = groups
    same, other = Tally(), Tally()
    for number, (tally, pair) in enumerate(((same, (passed, passed)), (other, groups))):
        for seed in SOME:
            check(
                make_package(seed),
                tmp_path / str(number) / str(seed),
                pair,
                tally,
                lambda new: new.replace(b"resolve(pg_collection)", b"resolve(None)"),
            )
    assert not same.failures
    assert same.refused == 0
    assert other.refused > 3
