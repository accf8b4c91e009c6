"""A pytest plugin for code that moves from Megatron's globals to explicit groups.

``pytest -p megapg.testing.plugin`` (or ``pytest_plugins = ["megapg.testing.plugin"]`` in the
``conftest.py`` of the root directory) provides

* the fixture :func:`megapg_collection`: a collection of any layout, in one process;
* ``parallel_state`` restored after each test, with the groups that a test left in it closed;
* an error of the test that leaves WORLD or a session open, which is closed before the next test;
* tracebacks without megapg's own frames, if megapg raised one of its errors (``--full-trace``);
* a summary of the code that read Megatron's globals, with the replacements;
* ``--megapg-forbid-globals``, which turns every such read into an error.

It imports neither torch nor Megatron-core. It does not see reads in other processes,
such as the ranks of ``run_distributed``.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from megapg.collection import ProcessGroupCollection
    from megapg.megatron.watching.trace import Trace

_PARALLEL_STATE = "megatron.core.parallel_state"
_DEFAULT_ALLOWED = ("megatron.core",)
_REPORT = "megapg"  # the attribute of a test's report
_TRACE = pytest.StashKey["Trace"]()
_LEFT = pytest.StashKey[str]()
# These modules read a global before they replace it for a test, to restore it.
_PATCHERS = ("_pytest", "unittest.mock")

_HELP_FORBID = """\
Fail each test that reads Megatron's globals (megatron.core.parallel_state): getters, private \
variables, and functions that fall back to them. The error stands at the read and says what to \
write instead. Megatron-core itself may read; see --megapg-allow-globals. Imports Megatron-core \
before the first test, so that no read comes earlier."""
_HELP_ALLOW = """\
Let this module, and all below it, go on reading the globals, as megatron.core may anyway. May be \
given several times. Where a migration stands: \
--megapg-forbid-globals with one --megapg-allow-globals for each part that has not moved yet."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megapg", "Megatron's global process groups (megapg)")
    group.addoption("--megapg-forbid-globals", action="store_true", help=_HELP_FORBID)
    group.addoption("--megapg-allow-globals", action="append", metavar="MODULE", help=_HELP_ALLOW)


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--megapg-forbid-globals"):
        from megapg.errors import UnsupportedVersionError
        from megapg.megatron.core import parallel_state_module

        try:
            parallel_state_module()
        except UnsupportedVersionError as error:
            raise pytest.UsageError(f"--megapg-forbid-globals: {error}") from error


@pytest.fixture
def megapg_collection() -> Iterator[Callable[..., ProcessGroupCollection]]:
    """Makes a collection for a layout: ``pg = megapg_collection(tp=2, pp=2, rank=3)``.

    Arguments, errors and groups are those of :func:`megapg.testing.fake_collection`: this process
    plays one rank, without communication. The groups are closed after the test. A second call
    closes those of the first, because a process plays one rank at a time.
    """
    from megapg.testing.fake import fake_collection

    with contextlib.ExitStack() as opened:

        def make(*args: int, **sizes: object) -> ProcessGroupCollection:
            opened.close()
            return opened.enter_context(fake_collection(*args, **sizes))  # type: ignore[arg-type]

        yield make


# -- between tests ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _megapg_isolation(request: pytest.FixtureRequest) -> Iterator[None]:
    # An autouse fixture of function scope runs after fixtures of wider scopes, whose state is
    # shared among tests, and before those of the test itself.
    before = None
    if "torch.distributed" in sys.modules:
        from megapg.testing.isolation import Before

        before = Before.now()
    yield
    if "torch.distributed" not in sys.modules:
        return
    from megapg.testing.isolation import Before, close_owners, close_world, put_back

    before = before or Before()
    still_open = close_owners(before)
    groups = put_back(before) if _PARALLEL_STATE in sys.modules else ""
    still_open += close_world(before)
    request.node.stash[_LEFT] = " and ".join([*filter(None, [groups]), *still_open])
    if still_open:
        pytest.fail(
            f"{request.node.nodeid} left {' and '.join(still_open)} open; closed now. Open a "
            "session in a `with` block, and destroy a WORLD that the test has made.",
            pytrace=False,
        )


# -- who reads -------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if _PARALLEL_STATE not in sys.modules:
        return (yield)
    from megapg.megatron.watching.forbid import forbid_global_reads
    from megapg.megatron.watching.trace import trace_global_reads

    with contextlib.ExitStack() as watching:
        item.stash[_TRACE] = watching.enter_context(trace_global_reads())
        if item.config.getoption("--megapg-forbid-globals"):
            allowed = (*_allowed(item.config), *_PATCHERS)
            watching.enter_context(forbid_global_reads(allow=allowed))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    except BaseException as error:
        if "torch" in sys.modules:  # the groups of fixtures may still be open
            from megapg.ownership.closing import explain

            explain(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None:
        _hide_frames()
    report = yield
    if call.when == "teardown":
        # Plain data on the report, because only that returns from a worker of xdist.
        trace: Trace | None = item.stash.get(_TRACE, None)
        reads = [asdict(read) for read in trace.reads] if trace else []
        vars(report)[_REPORT] = {"reads": reads, "left": item.stash.get(_LEFT, "")}
    return report


def _hide_frames() -> None:
    """Hide megapg's frames in the traceback of one of its own errors."""
    from megapg.errors import MegapgError

    def of_an_error(excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
        return isinstance(excinfo.value, MegapgError)

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megapg":
            vars(module)["__tracebackhide__"] = of_an_error  # pytest asks the globals of a frame


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seen = [
        (report.nodeid, vars(report)[_REPORT])
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and _REPORT in vars(report)
    ]
    if not any(found["reads"] or found["left"] for _, found in seen):
        return
    from megapg.megatron.watching.forbid import is_below

    names = _allowed(terminalreporter.config)
    places: Counter[tuple[str, int, str, str]] = Counter()
    allowed = 0
    for _, found in seen:
        for read in found["reads"]:
            if is_below(read["module"], names):
                allowed += read["count"]
            elif not is_below(read["module"], _PATCHERS):
                place = (read["module"], read["line"], read["getter"], read["replacement"])
                places[place] += read["count"]
    left = [f"{test} left {found['left']} behind; closed" for test, found in seen if found["left"]]
    terminalreporter.section("Megatron's globals (megapg)")
    for (module, line, getter, instead), count in sorted(places.items()):
        advice = f": write {instead}" if instead else ""
        terminalreporter.line(f"{module}:{line} reads {getter}, {count:,} times{advice}")
    terminalreporter.line(
        f"{places.total():,} reads from {len(places)} places; "
        f"{allowed:,} more in {', '.join(names)}"
    )
    for what in left:
        terminalreporter.line(what)


def _allowed(config: pytest.Config) -> tuple[str, ...]:
    return (*_DEFAULT_ALLOWED, *(config.getoption("--megapg-allow-globals") or ()))
