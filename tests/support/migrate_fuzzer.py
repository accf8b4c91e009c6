"""Generated packages are migrated, and run before and after: both must come to the same.

They run on the real ``parallel_state``, whose globals are published from fake process groups.

    python tests/support/migrate_fuzzer.py --count 10000 --seed 1
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import itertools
import re
import signal
import sys
import tempfile
import time
import tokenize
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist
from megapg.migrate.edit.soundness import verify
from megapg.migrate.find.index import find_sites
from migrate_modules import PACKAGE, Driver, Package, make_package
from trees import write

import megapg
from megapg.migrate.config import Config
from megapg.migrate.engine import migrate
from megapg.migrate.migration import Migration, Rewritten
from megapg.testing import fake_collection

# A middle stage of a pipeline where no two groups have the same size or rank; the last stage of one
# with model chunks; a job of one process.
LAYOUTS: tuple[Mapping[str, int], ...] = (
    {"tp": 2, "cp": 3, "pp": 5, "ep": 6, "expt_tp": 4, "world_size": 120, "rank": 77},
    {"tp": 4, "pp": 2, "cp": 2, "ep": 4, "vpp": 2, "optimizer_instances": 2}
    | {"world_size": 64, "rank": 45},
    {"world_size": 1, "rank": 0},
)
_AT_ONCE = 25  # packages on one layout before the next one is set up
_SECONDS = 20  # of CPU time that a package may take, so that a busy machine is no finding
_VERSION = int(importlib.import_module("megatron.core").__version__.split(".")[1])


@dataclass(frozen=True)
class Failure:
    """What is wrong with the migration of a package.

    Attributes:
        kind: ``crash``, ``verifier``, ``spans``, ``unverified``, ``again``, ``count``, ``result``,
            ``uninitialised``, ``explicit``.
        detail: a line or more about it.
    """

    kind: str
    detail: str


@dataclass
class Tally:
    """What a run came to."""

    packages: int = 0
    modules: int = 0
    changed: int = 0
    served: int = 0
    left: int = 0
    kept: int = 0
    compared: int = 0
    raised: int = 0
    uninitialised: int = 0
    explicit: int = 0
    gradients: int = 0


# -- running a package -----------------------------------------------------------------------------


@dataclass
class Run:
    """What a package comes to.

    Attributes:
        values: of the drivers.
        takes: the keyword-only parameters of the functions that drivers just call.
        imported: the drivers whose module can be imported.
    """

    values: dict[Driver, object] = field(default_factory=dict)
    imported: set[Driver] = field(default_factory=set)
    takes: dict[Driver, tuple[str, ...]] = field(default_factory=dict)


def run(
    root: Path,
    drivers: Iterable[Driver],
    groups: Mapping[Driver, tuple[str, ...]] = MappingProxyType({}),
) -> Run:
    """Evaluate the drivers, with the package under ``root`` imported afresh.

    Args:
        root: the directory of the package.
        drivers: what to evaluate.
        groups: parameters for groups and collections that are passed in addition.
    """
    found = Run()
    with _importable(root):
        for driver in drivers:
            call = ast.parse(driver.expression, mode="eval")
            try:
                names = dict(vars(importlib.import_module(driver.module)))
                found.imported.add(driver)
                if isinstance(call.body, ast.Call) and isinstance(call.body.func, ast.Name):
                    found.takes[driver] = _keywords(names.get(call.body.func.id))
                    for name in groups.get(driver, ()):
                        given = ast.Name(f"passed_as_{name}", ast.Load())
                        call.body.keywords.append(ast.keyword(name, given))
                        names[given.id] = _passed(name)
                code = compile(ast.fix_missing_locations(call), "<driver>", "eval")
                found.values[driver] = _plain(eval(code, names))
            except Exception as error:
                found.values[driver] = ("raised", f"{type(error).__name__}: {error}")
    return found


def _keywords(function: object) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ()
    return tuple(name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY)


def _passed(parameter: str) -> object:
    pg = _published[-1]
    return getattr(pg, parameter.removesuffix("_group")) if parameter.endswith("_group") else pg


@contextlib.contextmanager
def _importable(root: Path) -> Iterator[None]:
    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            del sys.modules[name]

    forget()
    sys.path.insert(0, str(root))
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        sys.path.remove(str(root))
        forget()


def _plain(value: object) -> object:
    """What can be compared: groups by their ranks, and nothing by its address."""
    if isinstance(value, dist.ProcessGroup):
        return "group", tuple(dist.get_process_group_ranks(value))
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return type(value).__qualname__


_published: list[megapg.ProcessGroupCollection] = []


@contextlib.contextmanager
def on_layout(number: int) -> Iterator[None]:
    """Groups of one of the layouts are there, and the globals are not initialised yet."""
    sizes = dict(LAYOUTS[number % len(LAYOUTS)])
    with (
        fake_collection(**sizes) as pg,  # type: ignore[arg-type]
        megapg.megatron.globals_policy("silent"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of what the generated code does, such as `1 is not None`
        with passing(pg):
            yield


@contextlib.contextmanager
def passing(pg: megapg.ProcessGroupCollection) -> Iterator[None]:
    """The groups that are passed in addition are those of a collection."""
    _published.append(pg)
    try:
        yield
    finally:
        _published.pop()


def _initialised() -> contextlib.AbstractContextManager[object]:
    return megapg.published(_published[-1])


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {_SECONDS} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- what must hold --------------------------------------------------------------------------------


def failures(package: Package, root: Path, tally: Tally) -> list[Failure]:
    """What is wrong with the migration of a package, written under ``root`` for it."""
    try:
        with _limited():
            return list(_failures(package, root, tally))
    except Exception:
        return [Failure("crash", traceback.format_exc(limit=-4))]


def _failures(package: Package, root: Path, tally: Tally) -> Iterator[Failure]:
    write(root / PACKAGE, package.files)
    with _initialised():
        before = run(root, package.drivers)
    guarded = [driver for driver in package.drivers if driver.guarded]
    # Where nothing is initialised, what fails then may fail otherwise, and later or sooner.
    without = {
        driver: value for driver, value in run(root, guarded).values.items() if not _raised(value)
    }
    config = Config(root, versions=(_VERSION,))
    found = find_sites([root], config)
    migration = migrate([root], config)
    tally.packages += 1
    tally.modules += package.modules
    tally.changed += len(migration.files)
    tally.served += len(migration.served)
    tally.left += len(migration.left)
    tally.kept += migration.findings.kept
    edits = (edit for each in migration.files for edit in each.edits)
    tally.gradients += sum(edit.what == "gradient" for edit in edits)
    yield from _sound(package, root / PACKAGE, migration)
    counts = len(migration.served), len(migration.left), migration.findings.kept
    if sum(counts) != len(found.sites):
        yield Failure("count", f"{len(found.sites)} sites, (served, left, kept) are {counts}")
    for each in migration.files:
        each.path.write_bytes(each.after)
    again = migrate([root], config)
    if again.files:
        yield Failure("again", "\n".join(_diff(each) for each in again.files))
    # What imports nothing that fails any more, since it needs it no more, can be imported now.
    drivers = [driver for driver in package.drivers if driver in before.imported]
    values = {driver: before.values[driver] for driver in drivers}
    with _initialised():
        after = run(root, drivers)
    tally.compared += len(before.values)
    tally.raised += sum(_raised(value) for value in before.values.values())
    yield from _compared("result", values, after.values)
    if without:
        tally.uninitialised += len(without)
        yield from _compared("uninitialised", without, run(root, without).values)
    new = {
        driver: tuple(name for name in names if name not in before.takes[driver])
        for driver, names in after.takes.items()
        if set(names) - set(before.takes[driver])
    }
    if new and not package.overrides:  # which groups that are passed know nothing of
        tally.explicit += len(new)
        with _initialised():
            explicit = run(root, drivers, new)
        yield from _compared("explicit", values, explicit.values)


def _sound(package: Package, root: Path, migration: Migration) -> Iterator[Failure]:
    for problem in migration.problems:
        yield Failure("unverified", f"{problem.file}:{problem.line}: {problem.message}")
    for each in migration.files:
        if each.before != package.files[each.path.relative_to(root).as_posix()]:
            yield Failure("spans", f"{each.file}: before is not what was there")
        if (said := verify(each)) is not None:
            yield Failure("verifier", f"{each.file}: {said}")
        if (said := _other_bytes(each)) is not None:
            yield Failure("spans", f"{each.file}: {said}\n{_diff(each)}")
        try:
            compile(each.after, each.file, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            yield Failure("verifier", f"{each.file}: {error}\n{_diff(each)}")


def _other_bytes(each: Rewritten) -> str | None:
    """What has changed outside of the edits."""
    encoding = tokenize.detect_encoding(io.BytesIO(each.before).readline)[0]
    text = each.before.decode(encoding)
    mark = b"\xef\xbb\xbf" if encoding == "utf-8-sig" else b""
    if text != each.text:
        return "the text is not that of the bytes"
    new, at = mark.decode("latin-1").encode("latin-1"), 0
    plain = "utf-8" if mark else encoding
    for edit in each.edits:
        if not at <= edit.start <= edit.stop <= len(text):
            return f"edits overlap at {edit.start}"
        new += text[at : edit.start].encode(plain) + edit.new.encode(plain)
        at = edit.stop
    new += text[at:].encode(plain)
    return None if new == each.after else "bytes differ outside of the edits"


def _compared(
    kind: str, before: Mapping[Driver, object], after: Mapping[Driver, object]
) -> Iterator[Failure]:
    for driver, value in before.items():
        now = after[driver]
        if value != now and not (_raised(value) and _raised(now)):
            yield Failure(kind, f"{driver.module}: {driver.expression}\n  {value}\n  {now}")


def _raised(value: object) -> bool:
    return isinstance(value, tuple) and value[0] == "raised"


def _diff(each: Rewritten) -> str:
    import difflib

    encoding = tokenize.detect_encoding(io.BytesIO(each.before).readline)[0]
    old, new = (data.decode(encoding).splitlines() for data in (each.before, each.after))
    return "\n".join(difflib.unified_diff(old, new, each.file, each.file, lineterm="", n=2))


# -- shrinking -------------------------------------------------------------------------------------


def shrunk(package: Package, still: Callable[[Package], bool], seconds: float) -> Package:
    """A smaller package that still fails: what can be left out is left out."""
    end = time.monotonic() + seconds
    steps: tuple[Callable[[Package], Iterator[Package]], ...] = (_one_driver, _what_it_uses)
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for step in (*steps, _smaller):
            for smaller in step(package):
                if time.monotonic() > end:
                    return package
                if still(smaller):
                    package, progress = smaller, True
                    break
        steps = ()
    return package


def _one_driver(package: Package) -> Iterator[Package]:
    for driver in package.drivers:
        yield replace(package, drivers=(driver,))


def _what_it_uses(package: Package) -> Iterator[Package]:
    """Only what the drivers reach, by bare names."""
    trees = {
        name: ast.parse(data) for name, data in package.files.items() if not name.startswith("kit")
    }
    words = {word for each in package.drivers for word in re.findall(r"\w+", each.expression)}
    kept: set[ast.stmt] = set()
    statements = [node for tree in trees.values() for node in tree.body]
    while True:
        more = [
            node
            for node in statements
            if node not in kept and words & set(_words(node, bound=True))
        ]
        if not more:
            break
        kept |= set(more)
        words |= {word for node in more for word in _words(node)}
    files = dict(package.files)
    for name, tree in trees.items():
        lines = files[name].splitlines(keepends=True)
        for node in reversed(tree.body):
            if node not in kept:
                first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
                del lines[first - 1 : node.end_lineno]
        files[name] = b"".join(lines)
    yield replace(package, files=files)


def _words(node: ast.stmt, bound: bool = False) -> Iterator[str]:
    """The names in a statement, or only those that it binds at the top."""
    for each in ast.walk(node):
        if isinstance(each, ast.alias):
            yield (each.asname or each.name).split(".")[0]
            if not bound:
                yield from each.name.split(".")
        elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not bound or each is node or isinstance(node, ast.If | ast.Try):
                yield each.name
        elif isinstance(each, ast.Name):
            if not bound or isinstance(each.ctx, ast.Store):
                yield each.id
        elif isinstance(each, ast.Attribute) and not bound:
            yield each.attr


def _smaller(package: Package) -> Iterator[Package]:
    for name in package.files:
        if not name.endswith("__init__.py"):
            files = {other: data for other, data in package.files.items() if other != name}
            yield replace(package, files=files)
    for name, data in package.files.items():
        if name.startswith("kit"):
            continue
        for smaller in _less(data):
            try:
                compile(smaller, name, "exec", ast.PyCF_ONLY_AST)
            except (SyntaxError, ValueError):
                continue
            yield replace(package, files={**package.files, name: smaller})


def _less(data: bytes) -> Iterator[bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(data)
    lines = data.splitlines(keepends=True)
    statements = [
        (node, alone)
        for parent in ast.walk(tree)
        for name in ("body", "orelse", "finalbody", "handlers", "cases")
        for block in [getattr(parent, name, ())]
        if isinstance(block, list)
        for node in block
        for alone in [len(block) == 1 and name == "body" and not isinstance(parent, ast.Module)]
        if isinstance(node, ast.stmt | ast.ExceptHandler)
    ]
    statements.sort(key=lambda each: each[0].lineno - (each[0].end_lineno or 0))
    for node, alone in statements:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        indent = re.match(rb"\s*", lines[first - 1])
        instead = [(indent[0] if indent else b"") + b"pass\n"] if alone else []
        if not (alone and isinstance(node, ast.Pass)):
            yield b"".join([*lines[: first - 1], *instead, *lines[node.end_lineno :]])
    starts = [0, *itertools.accumulate(map(len, lines))]
    expressions = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    extents = {
        (
            starts[e.lineno - 1] + e.col_offset,
            starts[(e.end_lineno or 0) - 1] + (e.end_col_offset or 0),
        )
        for e in expressions
    }
    ordered = sorted(extents, key=lambda extent: extent[0] - extent[1])
    for begin, end in ordered:
        if data[begin:end] not in (b"1", b""):
            yield data[:begin] + b"1" + data[end:]
        for inner, last in ordered:
            if begin <= inner and last <= end and (inner, last) != (begin, end):
                yield data[:begin] + data[inner:last] + data[end:]
    for begin, end in sorted({_argument(data, extent) for extent in extents}):
        yield data[:begin] + data[end:]
    for number in range(len(lines)):
        yield b"".join(lines[:number] + lines[number + 1 :])


def _argument(data: bytes, extent: tuple[int, int]) -> tuple[int, int]:
    """An expression with the comma behind it, or in front of it."""
    begin, end = extent
    if behind := re.match(rb"\s*,\s*", data[end:]):
        return begin, end + behind.end()
    if before := re.search(rb",\s*\Z", data[:begin]):
        return before.start(), end
    return extent


# -- many ------------------------------------------------------------------------------------------


def check(seeds: Iterable[int], tally: Tally) -> Iterator[tuple[Package, list[Failure]]]:
    """The packages of these seeds that fail, with what is wrong."""
    seeds = iter(seeds)
    number = 0
    while some := list(itertools.islice(seeds, _AT_ONCE)):
        number += 1
        with on_layout(number):
            for seed in some:
                package = make_package(seed)
                with tempfile.TemporaryDirectory() as root:
                    found = failures(package, Path(root), tally)
                if found:
                    yield package, found


def same_way(kind: str) -> Callable[[Package], bool]:
    """Whether a package fails in this way; for :func:`shrunk`."""

    def still(package: Package) -> bool:
        with tempfile.TemporaryDirectory() as root:
            try:
                with _limited():
                    found = _failures(package, Path(root), Tally())
                    return any(failure.kind == kind for failure in found)
            except Exception:
                return kind == "crash"

    return still


def report(package: Package, failure: Failure, seconds: float) -> str:
    """The failure, with the least that shows it written to a directory."""
    smallest = shrunk(package, same_way(failure.kind), seconds)
    root = Path(tempfile.mkdtemp(prefix=f"megapg-fuzz-{package.seed}-{failure.kind}-"))
    write(root / PACKAGE, smallest.files)
    with tempfile.TemporaryDirectory() as again:
        found = [f for f in failures(smallest, Path(again), Tally()) if f.kind == failure.kind]
    detail = (found or [failure])[0].detail
    said = [f"seed {package.seed}: {failure.kind}: {detail}", f"  in {root}"]
    for name, data in smallest.files.items():
        if name != "kit.py" and data.strip():
            said += [f"--- {name}", data.decode("utf-8", errors="replace").rstrip()]
    said += [f"--- {driver.module}: {driver.expression}" for driver in smallest.drivers[:3]]
    return "\n".join(said)


def _alike(failure: Failure) -> str:
    """The same for failures that look as if they had one cause."""
    said = failure.detail if failure.kind == "unverified" else failure.detail.split("\n")[-1]
    return (
        failure.kind + ": " + re.sub(r".*?(\w+(Error|Exception): |would not be sound: )", "", said)
    )


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="how many modules at least")
    parser.add_argument("--seed", type=int, default=1, help="of the first package")
    parser.add_argument("--shrink", type=float, default=60, help="seconds for each sort of failure")
    options = parser.parse_args()
    tally, began = Tally(), time.monotonic()
    seeds_of: dict[str, list[int]] = {}

    def seeds() -> Iterator[int]:
        for seed in itertools.count(options.seed):
            if tally.modules >= options.count:
                return
            if tally.packages % 250 == 249 and sys.stderr.isatty():
                print(f"{tally.modules} modules", file=sys.stderr)
            yield seed

    for package, found in check(seeds(), tally):
        for failure in found:
            alike = re.sub(r"\d+", "#", _alike(failure))
            if alike not in seeds_of:
                print(report(package, failure, options.shrink), flush=True)
            if package.seed not in (some := seeds_of.setdefault(alike, [])):
                some.append(package.seed)
    print(
        f"seeds {options.seed} to {options.seed + tally.packages - 1}, {tally.modules} modules, "
        f"{tally.changed} changed; {tally.served} uses served, {tally.left} left, "
        f"{tally.kept} kept; {tally.compared} results compared ({tally.raised} of them raise), "
        f"{tally.uninitialised} without groups, {tally.explicit} with the groups passed; "
        f"{time.monotonic() - began:.0f} s"
    )
    for alike, some in sorted(seeds_of.items(), key=lambda each: -len(each[1])):
        print(f"{len(some)} fail, {alike}: seeds {', '.join(map(str, some[:8]))}")
    print("failures" if seeds_of else "no failures")
    return 1 if seeds_of else 0


if __name__ == "__main__":
    sys.exit(_main())
