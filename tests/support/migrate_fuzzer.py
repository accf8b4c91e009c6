"""Run generated packages before and after the migration, without and with groups passed.

python tests/support/migrate_fuzzer.py --count 500 --seed 1
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from migrate_cases import importable, migrated
from migrate_generator import Driver, Package, make_package
from trees import write

from megapg import ProcessGroupCollection
from megapg.communicators.world import current_world
from megapg.errors import MegapgError
from megapg.layout import ParallelLayout
from megapg.megatron import globals_policy, published
from megapg.migrate.migration import Migration
from megapg.ownership.opening import Recipe, Session, fake_session

Groups: TypeAlias = tuple[ProcessGroupCollection, ProcessGroupCollection]
"""The collection of the globals, and the one that is passed."""

RANK = 46
OF_THE_GLOBALS = ParallelLayout(tp=4, pp=2, cp=2, ep=4, world_size=64)
PASSED = ParallelLayout(tp=2, pp=4, cp=4, ep=2, world_size=64)


class Model(torch.nn.Module):
    """A model with or without groups."""

    def __init__(self, pg_collection: ProcessGroupCollection | None) -> None:
        super().__init__()
        self.pg_collection = pg_collection


@dataclass
class Tally:
    """Counts of a run, and its failures."""

    packages: int = 0
    rewritten: int = 0
    left: int = 0
    same: int = 0  # drivers that give the same with nothing passed
    right: int = 0  # drivers that give the answers of the groups that they are passed
    refused: int = 0  # drivers that then raise an error of megapg
    failures: list[str] = field(default_factory=list)


@contextlib.contextmanager
def two_layouts() -> Iterator[Groups]:
    """Open two sessions of one rank; yield the collections for the globals and for passing."""
    recipe = Recipe("fake", {}, {}, frozenset(), all_gather_groups=False, gloo=frozenset())
    with fake_session(OF_THE_GLOBALS, RANK) as one, globals_policy("silent"):
        world = current_world()
        limit = world.timeout
        other = Session(PASSED, world, recipe, name="other", timeout=0, collective_timeout=limit)
        with other, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield one.groups, other.groups


def check(
    package: Package,
    root: Path,
    groups: Groups,
    tally: Tally,
    change: Callable[[bytes], bytes] = bytes,
) -> Migration:
    """Migrate a package below ``root``, and compare the answers of its drivers.

    Args:
        package: the package.
        root: an empty folder.
        groups: the collections of :func:`two_layouts`.
        tally: gets the counts and failures.
        change: applied to each new file; tests damage files to prove that the check can fail.
    """
    of_globals, passed = groups
    write(root, package.files)
    nothing: dict[str, object] = {"model": Model(None), "pg": None, "tp": of_globals.tp}
    given: dict[str, object] = {"model": Model(passed), "pg": passed, "tp": passed.tp}
    with published(of_globals):
        before = _run(root, package.drivers, nothing)
    with published(passed):
        wanted = _run(root, package.drivers, {**nothing, "tp": passed.tp})
    migration = migrated(root)
    for each in migration.files:
        each.path.write_bytes(change(each.after))
    with published(of_globals):
        after = _run(root, package.drivers, nothing)
        answers = _run(root, package.drivers, given)
    tally.packages += 1
    tally.rewritten += len(migration.served)
    tally.left += len(migration.left)
    for problem in migration.problems:
        tally.failures.append(f"{package.seed}: {problem.file}: {problem.message}")
    for driver in package.drivers:
        where = f"{package.seed}: {driver.module}: {driver.expression}"
        if after[driver] != before[driver]:
            tally.failures.append(f"{where}\n  was {before[driver]}\n  is  {after[driver]}")
        else:
            tally.same += 1
        answer = answers[driver]
        if answer is None:
            continue  # nothing can be passed
        if answer == wanted[driver]:
            tally.right += 1
        elif isinstance(answer, MegapgError):
            tally.refused += 1
        elif not driver.why_wrong:
            tally.failures.append(f"{where}\n  wanted {wanted[driver]}\n  passed {answer}")
    return migration


def _run(
    root: Path, drivers: tuple[Driver, ...], variables: Mapping[str, object]
) -> dict[Driver, object]:
    """Return the results; with a collection in ``variables``, None if a driver takes nothing."""
    found: dict[Driver, object] = {}
    with importable(root):
        for driver in drivers:
            try:
                names = {**vars(importlib.import_module(driver.module)), **variables}
                call = ast.parse(driver.expression, mode="eval")
                if variables["pg"] is not None and not _passes(call, names):
                    found[driver] = None
                    continue
                code = compile(ast.fix_missing_locations(call), "<driver>", "eval")
                found[driver] = repr(eval(code, names))
            except MegapgError as error:
                found[driver] = error if variables["pg"] is not None else type(error)
            except Exception as error:
                found[driver] = f"raised {type(error).__name__}: {error}"
    return found


def _passes(driver: ast.Expression, names: Mapping[str, object]) -> bool:
    """Pass the collection in the innermost call of a driver; return True if groups are passed."""
    if any(isinstance(e, ast.Name) and e.id in ("model", "pg", "tp") for e in ast.walk(driver)):
        passes = True
    else:
        passes = False
    for node in ast.walk(driver):
        if not isinstance(node, ast.Call):
            continue
        with contextlib.suppress(TypeError, ValueError, NameError):
            code = compile(ast.Expression(node.func), "<callee>", "eval")
            if isinstance(node.func, ast.Name) or ast.unparse(node.func).count("(") == 0:
                callee = eval(code, dict(names))
                if "pg_collection" in inspect.signature(callee).parameters:
                    if "pg" not in ast.unparse(node):
                        node.keywords.append(
                            ast.keyword("pg_collection", ast.Name("pg", ast.Load()))
                        )
                    passes = True
    return passes


def main() -> int:
    """Run seeds until the count is reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    tally = Tally()
    with two_layouts() as groups:
        for seed in range(options.seed, options.seed + options.count):
            with tempfile.TemporaryDirectory() as folder:
                done = len(tally.failures)
                try:
                    check(make_package(seed), Path(folder).resolve(), groups, tally)
                except Exception as error:
                    tally.failures.append(f"{seed}: crash {type(error).__name__}: {error}")
                print(
                    *tally.failures[done:],
                    sep="\n",
                    end="\n" * (len(tally.failures) > done),
                    flush=True,
                )
    failures = len(tally.failures)
    tally.failures = []
    print(tally, f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
