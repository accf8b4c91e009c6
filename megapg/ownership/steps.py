"""Steps that all ranks take together. If a step fails on one rank, all ranks fail."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from megapg.errors import OffloadError, TeardownError, UnsupportedOffloadError
from megapg.rendezvous.error_texts import brief, with_note
from megapg.rendezvous.joint_work import OthersFailedError


class NotAllWellError(Exception):
    """A step failed on some rank; the errors are in ``Steps.problems``."""


class Steps:
    """The steps taken so far on this rank.

    Attributes:
        seconds: step -> seconds.
        problems: the errors so far, in order.
        aside: errors that do not stop the work. They are reported with other errors.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.problems: list[Exception] = []
        self.aside: list[BaseException] = []

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a step whose failure stops the work."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextlib.contextmanager
    def attempted(self, name: str) -> Iterator[None]:
        """Time a step, and keep its error for later."""
        with self.timed(name):
            try:
                yield
            except (OffloadError, TeardownError) as error:  # groups of errors
                self.problems += error.exceptions
            except Exception as error:
                self.problems.append(error)

    def report(self) -> str:
        """Return the errors as text, for other ranks; empty if there are none."""
        return "; ".join(map(with_note, self.problems)).rstrip(".")

    def take(self) -> list[Exception]:
        """Return the errors so far, and forget them.

        Use it when raising them. Their tracebacks refer to these steps, and in a reference cycle
        the groups would live until Python's garbage collector runs. On gloo, ranks connected to
        this one would wait as long.
        """
        problems, self.problems = self.problems, []
        return problems

    def compare(self, heard: Mapping[int, str], rank: int) -> None:
        """Raise unless every rank has succeeded so far.

        Args:
            heard: rank -> its :meth:`report`.
            rank: this rank.

        Raises:
            NotAllWellError: a rank has an error.
        """
        others = {other: text for other, text in heard.items() if text and other != rank}
        if others:
            self.problems.append(OthersFailedError(others))
        if self.problems:
            raise NotAllWellError


@contextlib.contextmanager
def together(owner: str, doing: str, rank: int, lose: Callable[[str], None]) -> Iterator[Steps]:
    """Context of steps that all ranks take together: an error on one rank ends the groups on all.

    Args:
        owner: the owner of the groups, for the message.
        doing: what is being done, for the message.
        rank: this rank.
        lose: called with the error as text; notifies the other ranks and aborts the groups.

    Raises:
        UnsupportedOffloadError: raised by the body on every rank, before any change. No group is
            aborted.
        OffloadError: a step failed. Contains all errors.
    """
    steps = Steps()
    try:
        yield steps
    except UnsupportedOffloadError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, NotAllWellError):
            steps.problems.append(error)
        steps.problems += [each for each in steps.aside if isinstance(each, Exception)]
        steps.aside.clear()
        said = steps.report() or brief(error)
        with steps.attempted("abort"):
            lose(said)
        if not isinstance(error, Exception):
            raise
        raise OffloadError(
            f"{owner} has failed in {doing} on rank {rank}: {said}. Its groups were aborted: close "
            "it, and open a new one",
            steps.take(),
        ) from None
