"""Generated modules are passed the groups of one layout, while the globals have another's. What
asks no globals on its way answers as the module did before, with the first layout for its globals.

The fuzzer passes the groups that the globals have, and can't tell the two apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from migrate_fuzzer import passing, run
from migrate_modules import LATER, PACKAGE, make_package
from trees import write

from megapg import ProcessGroupCollection
from megapg.communicators.world import current_world
from megapg.layout import ParallelLayout
from megapg.megatron import globals_policy, guard, published, trace_global_reads
from megapg.migrate.config import Config
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Rewritten
from megapg.ownership.opening import Recipe, Session, fake_session

RANK = 45
OF_THE_GLOBALS = ParallelLayout(tp=4, pp=2, cp=2, ep=4, world_size=64)
PASSED = ParallelLayout(tp=2, pp=4, cp=4, ep=2, world_size=64)
FEW, MANY = (range(LATER, LATER + 20), 1), (range(LATER, LATER + 300), 15)


@dataclass
class Answers:
    """Of functions that were passed a collection and asked no globals.

    Attributes:
        compared: how many there are whose answers tell the layouts apart.
        wrong: those that answer otherwise than before, by seed and expression.
    """

    compared: int = 0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def two_layouts() -> Iterator[tuple[ProcessGroupCollection, ProcessGroupCollection]]:
    """The groups of one rank in both. The guard is off: generated code mixes groups as well."""
    recipe = Recipe("fake", {}, {}, frozenset(), all_gather_groups=False, gloo=frozenset())
    with guard("off"), fake_session(OF_THE_GLOBALS, RANK) as one, globals_policy("silent"):
        world = current_world()
        limit = world.timeout
        other = Session(PASSED, world, recipe, name="other", timeout=0, collective_timeout=limit)
        with other, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what the generated code does
            yield one.groups, other.groups


def answers(
    seeds: Iterable[int], root: Path, change: Callable[[Rewritten], bytes] = lambda file: file.after
) -> Answers:
    """Migrate the packages of some seeds, and pass what takes groups since then those of a layout.

    Args:
        seeds: the packages'.
        root: where they are written.
        change: what is written for a rewritten file.
    """
    found = Answers()
    with two_layouts() as (of_globals, passed), passing(passed):
        for seed in seeds:
            package, at = make_package(seed), root / str(seed)
            if package.overrides:  # of which groups that are passed know nothing
                continue
            write(at / PACKAGE, package.files)
            with published(passed):
                before = run(at, package.drivers)
            with published(of_globals):
                other = run(at, package.drivers)
            for each in migrate([at], Config(at, versions=(16,))).files:
                each.path.write_bytes(change(each))
            with published(of_globals):
                after = run(at, package.drivers)
            for driver, names in after.takes.items():
                new = {*names} - {*before.takes.get(driver, ())}
                if "pg_collection" not in new or before.values[driver] == other.values[driver]:
                    continue
                with published(of_globals), trace_global_reads() as trace:
                    now = run(at, [driver], {driver: ("pg_collection",)}).values[driver]
                if not trace.reads:
                    found.compared += 1
                    if now != before.values[driver]:
                        found.wrong.append(f"{seed}: {driver.expression}")
    return found


@pytest.mark.parametrize(
    ("seeds", "times"), [FEW, pytest.param(*MANY, marks=pytest.mark.slow)], ids=("few", "many")
)
def test_what_is_passed_is_asked_and_nothing_of_the_globals(
    tmp_path: Path, seeds: range, times: int
) -> None:
    found = answers(seeds, tmp_path)
    assert found.wrong == []
    assert found.compared > 20 * times


def test_another_field_is_found(tmp_path: Path) -> None:
    def wrong(file: Rewritten) -> bytes:
        return file.after.replace(b'("tp")', b'("pp")').replace(b"('tp')", b"('pp')")

    found = answers(FEW[0], tmp_path, wrong)
    assert len(found.wrong) > 3


def test_the_globals_in_place_of_what_is_passed_are_found(tmp_path: Path) -> None:
    def wrong(file: Rewritten) -> bytes:
        return file.after.replace(b"resolve(pg_collection)", b"resolve(None)")

    sound = answers(FEW[0], tmp_path / "sound")
    found = answers(FEW[0], tmp_path / "wrong", wrong)
    assert found.compared < sound.compared / 4
