"""Steps that all ranks take together: each is timed and attempted, and where one fails, all do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from megapg.errors import OffloadError, TeardownError, UnsupportedOffloadError
from megapg.rendezvous.joint_work import OthersFailedError
from megapg.rendezvous.problems import brief


class NotAllWellError(Exception):
    """Something went wrong on some rank; what, is among the steps' problems."""


class Steps:
    """What has been done so far on this rank.

    Attributes:
        seconds: step -> how long it took.
        problems: what went wrong so far, in order.
        aside: what else did, and is no reason to stop; told where something is.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.problems: list[Exception] = []
        self.aside: list[BaseException] = []

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """A step without which there is no going on."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextlib.contextmanager
    def attempted(self, name: str) -> Iterator[None]:
        """A step whose failure is kept for later."""
        with self.timed(name):
            try:
                yield
            except (OffloadError, TeardownError) as error:  # several failures, to be told apart
                self.problems += error.exceptions
            except Exception as error:
                self.problems.append(error)

    def report(self) -> str:
        """What went wrong, for other ranks; empty if nothing did."""
        return "; ".join(map(_told, self.problems)).rstrip(".")

    def take(self) -> list[Exception]:
        """What went wrong so far, and forget it.

        For who raises it: the frames in its tracebacks hold these steps, and in a circle with them
        the groups would live until Python's collector comes by. On gloo, so would the waits of the
        ranks that are connected to this one.
        """
        problems, self.problems = self.problems, []
        return problems

    def compare(self, heard: Mapping[int, str], rank: int) -> None:
        """Go on only if every rank is well.

        Args:
            heard: rank -> its :meth:`report`.
            rank: this rank.

        Raises:
            NotAllWellError: one is not.
        """
        others = {other: text for other, text in heard.items() if text and other != rank}
        if others:
            self.problems.append(OthersFailedError(others))
        if self.problems:
            raise NotAllWellError


@contextlib.contextmanager
def together(owner: str, doing: str, rank: int, lose: Callable[[str], None]) -> Iterator[Steps]:
    """Around what all ranks do in step: whatever goes wrong on any ends the groups on all of them.

    Args:
        owner: whose groups, for the message.
        doing: what is being done, for the message.
        rank: this rank.
        lose: is told what went wrong; tells the other ranks, and aborts the groups.

    Raises:
        UnsupportedOffloadError: from inside, where it is raised on every rank alike, before
            anything was touched; nothing is lost.
        OffloadError: with all that went wrong.
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


def _told(error: Exception) -> str:
    """An error in one line, with the first of its notes, which says where."""
    notes = getattr(error, "__notes__", ())
    return brief(error) + (f" ({notes[0]})" if notes else "")
