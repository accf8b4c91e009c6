"""Generated packages come to the same before and after a migration, and the check of that can fail.

More of them by command: ``python tests/support/migrate_fuzzer.py --count 10000 --seed 1``.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import migrate_fuzzer
import pytest
from migrate_fuzzer import Failure, Tally, check, failures, on_layout, same_way, shrunk
from migrate_modules import LATER, PACKAGE, Driver, Package, make_package

from megapg.migrate.migration import Migration, Rewritten

# How many packages, and by how much more there is then of everything. A function that asks the
# globals for anything asks nothing else, so that few packages have much that is explicit.
FEW, MANY = (range(1, 15), 1), (range(1, 65), 4)


@pytest.mark.parametrize(
    ("seeds", "times"), [FEW, pytest.param(*MANY, marks=pytest.mark.slow)], ids=("few", "many")
)
def test_generated_packages_come_to_the_same(seeds: range, times: int) -> None:
    tally = Tally()
    found = [
        f"seed {package.seed}: {failure.kind}: {failure.detail}"
        for package, some in check(seeds, tally)
        for failure in some
    ]
    assert not found, "\n\n".join(found)
    # It is not that nothing was generated, rewritten or compared.
    assert tally.modules > 30 * times
    assert tally.served > 600 * times
    assert tally.compared > 180 * times
    assert tally.raised < tally.compared / 20
    assert tally.explicit > 60 * times
    assert tally.uninitialised > times
    assert tally.left > 0
    assert tally.kept > 0


def test_generated_autograd_functions_come_to_the_same() -> None:
    """Forward and back: what was passed, and the gradients that are returned for it."""
    chosen: list[int] = []
    for seed in itertools.count(LATER):
        text = b"".join(make_package(seed).files.values())
        if len(chosen) < 12 and text.count(b".apply(x") > 1:
            chosen.append(seed)
        elif len(chosen) == 12:
            break
    tally = Tally()
    for seed in chosen:
        found = [each for _, each in check(range(seed, seed + 1), tally)]
        assert not found, f"seed {seed}: {found}"
    assert tally.gradients > 8


@pytest.mark.parametrize("seed", [20261131617])
def test_what_once_failed(seed: int) -> None:
    """By seed: a lambda with a generator in which another lambda asks was a crash."""
    assert not [some for _, some in check(range(seed, seed + 1), Tally()) if some]


def test_every_package_is_python() -> None:
    forms: Counter[str] = Counter()
    for seed in range(120):
        package = make_package(seed)
        assert package == make_package(seed)
        for name, data in package.files.items():
            tree = ast.parse(data, name)
            forms.update(type(node).__name__ for node in ast.walk(tree))
            forms["\r\n"] += b"\r\n" in data
            forms["\t"] += b"\n\t" in data
            forms["\f"] += b"\f" in data
            forms["mark"] += data.startswith(b"\xef\xbb\xbf")
            forms["latin-1"] += b"coding: latin-1" in data
            forms["no newline"] += data[-1:] not in (b"", b"\n")
    # Whatever Python has, somewhere in there.
    wanted = {*_grammar(ast.stmt), *_grammar(ast.expr), *_grammar(ast.pattern)}
    newer = {"TypeAlias", "TemplateStr", "Interpolation"}
    assert {name for name in wanted if not forms[name]} <= newer
    for name in ("\r\n", "\t", "\f", "mark", "latin-1", "no newline"):
        assert forms[name] > 1, name


def _grammar(kind: type[ast.AST]) -> Iterator[str]:
    for each in kind.__subclasses__():
        if each.__module__ == "ast" and each.__name__[0].isupper() and each._fields is not None:
            yield each.__name__


# --- the check can fail ---------------------------------------------------------------------------

SMALL = b"""\
from megatron.core import mpu


def first(a):
    return (a, mpu.get_tensor_model_parallel_rank() + 1)


def second(a):
    # and of the first
    return (mpu.get_data_parallel_world_size(), first(a))


def third(a):
    return a
"""


def small() -> Package:
    drivers = (
        Driver(f"{PACKAGE}.m0", "second(2)", False),
        Driver(f"{PACKAGE}.m0", "third(1)", True),
    )
    return Package(0, {"__init__.py": b"", "m0.py": SMALL}, drivers, 1, False)


def edited(change: Callable[[Rewritten], Rewritten]) -> Callable[..., Migration]:
    """The migration, with its files changed after it is done."""
    real = migrate_fuzzer.migrate

    def migrate(*arguments: object, **options: object) -> Migration:
        done = real(*arguments, **options)  # type: ignore[arg-type]
        return dataclasses.replace(done, files=tuple(map(change, done.files)))

    return migrate


def in_the_result(old: bytes, new: bytes) -> Callable[[Rewritten], Rewritten]:
    def change(file: Rewritten) -> Rewritten:
        assert re.search(old, file.after), file.after
        return dataclasses.replace(file, after=re.sub(old, new, file.after))

    return change


def found_in(package: Package, root: Path) -> set[str]:
    with on_layout(0):
        return {failure.kind for failure in failures(package, root, Tally())}


def test_a_sound_migration(tmp_path: Path) -> None:
    assert found_in(small(), tmp_path) == set()


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        (rb'"tp"', b'"pp"', {"verifier", "spans", "result", "explicit"}),
        (rb"# and of", b"# and  of", {"verifier", "spans"}),
        (rb"return a\n", b"return a  (\n", {"verifier", "spans", "result", "uninitialised"}),
        (rb"def third\(a\)", b"def third(a, b=3)", {"verifier", "spans"}),
    ],
)
def test_what_is_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes, kinds: set[str]
) -> None:
    monkeypatch.setattr(migrate_fuzzer, "migrate", edited(in_the_result(old, new)))
    found = found_in(small(), tmp_path)
    assert kinds <= found


def test_a_wrong_expression_that_the_verifier_can_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another field is as sound a rewrite; only running it tells."""

    def change(file: Rewritten) -> Rewritten:
        edits = tuple(
            dataclasses.replace(edit, new=edit.new.replace('size("dp")', 'size("tp")'))
            for edit in file.edits
        )
        return dataclasses.replace(
            file, edits=edits, after=file.after.replace(b'size("dp")', b'size("tp")')
        )

    monkeypatch.setattr(migrate_fuzzer, "migrate", edited(change))
    found = found_in(small(), tmp_path)
    assert "result" in found
    assert "spans" not in found
    assert "verifier" not in found


def test_a_site_that_is_lost_and_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = migrate_fuzzer.migrate

    def losing(*arguments: object, **options: object) -> Migration:
        done = real(*arguments, **options)  # type: ignore[arg-type]
        return dataclasses.replace(done, served=done.served[1:])

    def crashing(*arguments: object, **options: object) -> Migration:
        raise IndexError("out of range")

    monkeypatch.setattr(migrate_fuzzer, "migrate", losing)
    assert "count" in found_in(small(), tmp_path / "a")
    monkeypatch.setattr(migrate_fuzzer, "migrate", crashing)
    assert found_in(small(), tmp_path / "b") == {"crash"}


def test_edits_in_a_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Migration] = []
    real = migrate_fuzzer.migrate

    def again(*arguments: object, **options: object) -> Migration:
        kept.append(real(*arguments, **options))  # type: ignore[arg-type]
        return kept[0]

    monkeypatch.setattr(migrate_fuzzer, "migrate", again)
    assert "again" in found_in(small(), tmp_path)


def test_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        migrate_fuzzer, "migrate", edited(in_the_result(rb'rank\("tp"\)', b'rank("pp")'))
    )
    with on_layout(0):
        smallest = shrunk(small(), same_way("result"), seconds=60)
    text = smallest.files["m0.py"].decode()
    assert "def second" not in text or "def third" not in text
    assert "world_size" not in text
    assert "# and of" not in text or "def second" in text
    assert len(smallest.drivers) == 1
    assert "get_tensor_model_parallel_rank" in text


def test_kinds_are_told_apart() -> None:
    one, other = Failure("result", "x\n  1\n  2"), Failure("crash", "y\nValueError: z")
    assert migrate_fuzzer._alike(one) != migrate_fuzzer._alike(other)
