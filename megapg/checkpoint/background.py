"""Saves that are under way: how many there may be, and who hears of their errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path

from megapg.checkpoint.directory import CheckpointInfo
from megapg.checkpoint.writer import Memory
from megapg.collection import Lease
from megapg.errors import CheckpointSaveError

logger = logging.getLogger(__name__)

_SCRATCH = "checkpoint saves"
# How long a session that closes after an error waits for a save that it called off. Seconds.
_CANCEL_WAIT = 10.0


class CheckpointSave:
    """A save, under way or finished.

    Attributes:
        directory: where the checkpoints are.
        iteration: which one this is.
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
        self._heard = False

    def run(self) -> None:
        """Do it here and now; CheckpointSaveError: it failed."""
        self._do()
        self.wait()

    def start(self) -> None:
        """Do it in the background."""

        def work() -> None:
            self._do()
            if (error := self._result.exception()) is not None:
                logger.error("%s", error)

        # No daemon: a program that simply ends still gets the checkpoint it asked for.
        threading.Thread(target=work, name=f"megapg save {self.iteration}").start()

    def _do(self) -> None:
        work, self._work = self._work, None  # it holds all that is to be written
        if work is None:
            return
        try:
            self._result.set_result(work())
        except BaseException as error:
            self._result.set_exception(error)

    def __repr__(self) -> str:
        state = "under way"
        if self.done:
            error = self._result.exception()
            state = "complete" if error is None else f"failed: {error}"
        return f"<CheckpointSave of step {self.iteration} in {self.directory}: {state}>"

    @property
    def done(self) -> bool:
        """Whether it has finished, well or not."""
        return self._result.done()

    def wait(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until the checkpoint is complete on disk.

        Args:
            timeout: seconds; for ever unless given.

        Raises:
            CheckpointSaveError: it failed.
            TimeoutError: it is still under way.
        """
        if not self.join(timeout):
            raise TimeoutError(
                f"the checkpoint of iteration {self.iteration} is not complete after {timeout:g} s."
            )
        self._heard = True
        return self._result.result()

    def cancel(self) -> None:
        """Call it off on all ranks; :meth:`wait` then raises. Where every rank has written its part
        already it may be too late, and the checkpoint be completed.
        """
        self._cancel()

    def join(self, timeout: float | None = None) -> bool:
        """Whether it has finished within so many seconds; without a word on how."""
        return bool(wait_for([self._result], timeout).done)

    def news(self) -> BaseException | None:
        """The error of a finished save, if nobody has heard of it yet; then somebody has."""
        if not self.done or self._heard:
            return None
        self._heard = True
        return self._result.exception()


class Saves:
    """The background saves of one set of groups, the oldest first.

    When each of them ends differs between ranks, so nothing here decides what a rank does next:
    errors come out where all ranks are together.
    """

    def __init__(self) -> None:
        self._under_way: list[CheckpointSave] = []
        self.memory: list[Memory] = []  # that nobody uses

    @classmethod
    def of(cls, lease: Lease) -> Saves:
        """Those of the groups under this lease; they end before the groups do."""
        found = lease.scratch.get(_SCRATCH)
        if not isinstance(found, cls):
            found = lease.scratch[_SCRATCH] = cls()
            lease.before_end.append(found.finish)
        return found

    def make_room(self, in_flight: int) -> None:
        """Wait until fewer than ``in_flight`` are under way."""
        running = [save for save in self._under_way if not save.done]
        for save in running[: max(0, len(running) - in_flight + 1)]:
            save.join()

    def raise_news(self) -> None:
        """For a rank that is together with the others.

        Raises:
            CheckpointSaveError: an earlier save failed, and nobody has heard of it yet.
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
        """The one that began last, if any is under way."""
        return self._under_way[-1] if self._under_way else None

    def add(self, save: CheckpointSave) -> None:
        """One more is under way."""
        self._under_way.append(save)
        save.start()

    def finish(self, error: BaseException | None) -> None:
        """For the owner of the groups, about to close them: wait, or after an error call off.

        Raises:
            CheckpointSaveError: one that nobody has waited for failed.
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
