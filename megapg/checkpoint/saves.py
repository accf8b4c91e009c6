"""Saves that are under way: how many there may be, and who hears of their errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from megapg.checkpoint.names import CheckpointInfo
from megapg.collection import Lease
from megapg.comms.teamwork import CancelledError
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
        self._info: CheckpointInfo | None = None
        self._error: BaseException | None = None
        self._heard = False
        self._over = threading.Event()

    def run(self) -> None:
        """Do it here and now.

        Raises:
            CheckpointSaveError: it failed.
        """
        self._do()
        self.wait()

    def start(self) -> None:
        """Do it in the background."""
        # No daemon: a program that simply ends still gets the checkpoint it asked for.
        threading.Thread(target=self._do, name=f"megapg save {self.iteration}").start()

    def _do(self) -> None:
        work, self._work = self._work, None  # it holds all that is to be written
        try:
            self._info = work() if work is not None else None
        except BaseException as error:
            self._error = error
            logger.error("%s", error)
        finally:
            self._over.set()

    @property
    def done(self) -> bool:
        """Whether it has finished, well or not."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait until the checkpoint is complete on disk.

        Args:
            timeout: seconds; for ever unless given.

        Raises:
            CheckpointSaveError: it failed.
            TimeoutError: it is still under way.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(
                f"the checkpoint of iteration {self.iteration} is not complete after {timeout:g} s."
            )
        self._heard = True
        if self._error is not None:
            raise self._error
        if self._info is None:
            raise CheckpointSaveError("this save was never started.")
        return self._info

    def cancel(self) -> None:
        """Call it off on all ranks; :meth:`wait` then raises. Too late, it does nothing."""
        self._cancel()

    def _settle(self) -> None:
        self._over.wait()
        error = self._unheard_error()
        if error is not None:
            raise error

    def _unheard_error(self) -> BaseException | None:
        if not self.done or self._heard:
            return None
        self._heard = True
        return self._error


class Saves:
    """The background saves of one set of groups."""

    def __init__(self) -> None:
        self._under_way: list[CheckpointSave] = []
        self._started = 0

    @classmethod
    def of(cls, lease: Lease) -> Saves:
        """Those of the groups under this lease; they end before the groups do."""
        found = lease.scratch.get(_SCRATCH)
        if not isinstance(found, cls):
            found = lease.scratch[_SCRATCH] = cls()
            lease.before_end.append(found.finish)
        return found

    def make_room(self, in_flight: int) -> int:
        """Wait until fewer than ``in_flight`` are under way.

        Returns:
            The place, from 0, of the next one: the same on every rank.

        Raises:
            CheckpointSaveError: an earlier one failed, and nobody has heard of it yet.
        """
        while len(self._under_way) >= in_flight:
            self._under_way.pop(0)._settle()
        for save in [save for save in self._under_way if save.done]:
            self._under_way.remove(save)
            save._settle()
        return self._started % in_flight

    def add(self, save: CheckpointSave) -> None:
        """One more is under way."""
        self._started += 1
        self._under_way.append(save)
        save.start()

    def finish(self, error: BaseException | None) -> None:
        """For the owner of the groups, about to close them: wait, or after an error call off.

        Raises:
            CheckpointSaveError: one that nobody has waited for failed.
        """
        saves, self._under_way = self._under_way, []
        running = [save for save in saves if not save.done]
        for save in running:
            if error is None:
                logger.info("waiting for the checkpoint of iteration %d", save.iteration)
                save._over.wait()
            else:
                logger.warning(
                    "calling off the checkpoint of iteration %d, after %r", save.iteration, error
                )
                save.cancel()
                save._over.wait(_CANCEL_WAIT)
        failed = [trouble for save in saves if (trouble := save._unheard_error()) is not None]
        for trouble in failed:
            if not isinstance(trouble.__cause__, CancelledError):
                raise trouble
