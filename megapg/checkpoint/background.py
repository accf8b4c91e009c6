"""Background saves: their number, and where their errors are raised."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

from typing_extensions import override

from megapg.checkpoint.directory import CheckpointInfo
from megapg.checkpoint.writer import Memory
from megapg.collection import Lease
from megapg.errors import CheckpointSaveError

logger = logging.getLogger(__name__)

_SCRATCH = "checkpoint saves"
# Seconds to wait for a cancelled save when a session closes after an error.
_CANCEL_WAIT = 10.0


class CheckpointSave:
    """A save, running or finished.

    Attributes:
        directory: where the checkpoints are.
        iteration: the iteration that is saved.
    """

    def __init__(
        self,
        directory: Path,
        iteration: int,
        work: Callable[[], CheckpointInfo],
        cancel: Callable[[], None],
    ) -> None:
        self.directory, self.iteration = directory, iteration
        self._work: Callable[[], CheckpointInfo] | None = work
        self._cancel = cancel
        self._result: Future[CheckpointInfo] = Future()
        self._reported = False

    def run(self) -> None:
        """Save in the calling thread.

        Raises:
            CheckpointSaveError: the save failed.
        """
        self._do()
        self.wait()

    def start(self) -> None:
        """Save in a background thread."""

        def work() -> None:
            self._do()
            if (error := self._result.exception()) is not None:
                logger.error("%s", error)

        # Not a daemon: a program that reaches its end still completes its checkpoint.
        threading.Thread(target=work, name=f"megapg save {self.iteration}").start()

    def _do(self) -> None:
        work, self._work = self._work, None  # frees the data after the save
        if work is None:
            return
        try:
            self._result.set_result(work())
        except BaseException as error:
            self._result.set_exception(error)

    @override
    def __repr__(self) -> str:
        state = "under way"
        if self.done:
            error = self._result.exception()
            state = "complete" if error is None else f"failed: {error}"
        return f"<CheckpointSave of step {self.iteration} in {self.directory}: {state}>"

    @property
    def done(self) -> bool:
        """True if the save has finished, with or without an error."""
        return self._result.done()

    def wait(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until the checkpoint is complete on disk.

        Args:
            timeout: seconds. Default: no limit.

        Raises:
            CheckpointSaveError: the save failed.
            TimeoutError: the save is still running.
        """
        if not self.join(timeout):
            raise TimeoutError(
                f"the checkpoint of iteration {self.iteration} is not complete after {timeout:g} s."
            )
        self._reported = True
        return self._result.result()

    def cancel(self) -> None:
        """Cancel the save on all ranks; :meth:`wait` then raises.

        If every rank has written its part already, the checkpoint may still be completed.
        """
        self._cancel()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the save without raising its error. True if it ended within
        ``timeout``.
        """
        return bool(wait_for([self._result], timeout).done)

    def news(self) -> BaseException | None:
        """Return the error of a finished save, once; None if :meth:`wait` has raised it already."""
        if not self.done or self._reported:
            return None
        self._reported = True
        return self._result.exception()


class Saves:
    """The background saves of one set of groups, the oldest first.

    A save may end at different times on different ranks, so a rank must not act on its end alone.
    Errors are raised only where all ranks meet.
    """

    def __init__(self) -> None:
        self._under_way: list[CheckpointSave] = []
        self.memory: list[Memory] = []  # free buffers

    @classmethod
    def of(cls, lease: Lease) -> Saves:
        """Return the saves of the groups under this lease. They end before the groups do."""
        found = lease.scratch.get(_SCRATCH)
        if not isinstance(found, cls):
            found = lease.scratch[_SCRATCH] = cls()
            lease.before_end.append(found.finish)
        return found

    def make_room(self, in_flight: int) -> None:
        """Wait until fewer than ``in_flight`` saves are running."""
        running = [save for save in self._under_way if not save.done]
        for save in running[: max(0, len(running) - in_flight + 1)]:
            save.join()

    def raise_news(self) -> None:
        """Raise the error of an earlier save. All ranks must call it at the same point.

        Raises:
            CheckpointSaveError: an earlier save failed, and its error was not raised yet.
        """
        finished = [save for save in self._under_way if save.done]
        self._under_way = [save for save in self._under_way if save not in finished]
        news = [error for save in finished if (error := save.news()) is not None]
        if news:
            raise CheckpointSaveError(
                f"this one was not begun, as an earlier one failed and nobody had heard of it: "
                f"{news[0]} Call again.",
                getattr(news[0], "problems", None),
            ) from news[0]

    @property
    def newest(self) -> CheckpointSave | None:
        """The save that started last; None if no save is tracked."""
        return self._under_way[-1] if self._under_way else None

    def add(self, save: CheckpointSave) -> None:
        """Start a save and track it."""
        self._under_way.append(save)
        save.start()

    def finish(self, error: BaseException | None) -> None:
        """Wait for all saves, or cancel them after an error. Called before the groups are closed.

        Raises:
            CheckpointSaveError: a save failed, and its error was not raised yet.
        """
        for save in [save for save in self._under_way if not save.done]:
            if error is None:
                logger.info("waiting for the checkpoint of iteration %d", save.iteration)
                save.join()
            else:
                logger.warning(
                    "calling off the checkpoint of iteration %d, after %r", save.iteration, error
                )
                save.cancel()
                save.join(_CANCEL_WAIT)
        self.memory.clear()
        news = [trouble for save in self._under_way if (trouble := save.news()) is not None]
        if error is None and news:
            raise news[0]
