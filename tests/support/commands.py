"""Run ``megapg`` in a process that is forked from one with all modules imported.

A command takes a tenth of the time that a new interpreter takes for the imports.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from megapg.tools.cli import app

_APART = multiprocessing.get_context("forkserver")
# Some versions of typer import the second module when a command runs.
_APART.set_forkserver_preload(["commands", "typer._adapters"])
_COMMAND = get_command(app)


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    returncode: int
    stdout: bytes
    stderr: bytes


def megapg(
    *arguments: object,
    at: Path,
    without_privileges: bool = False,
    timeout: float = 120,
    **environment: str,
) -> Done:
    """Run the command line as ``python -m megapg`` does.

    Args:
        arguments: of the command.
        at: the directory where it runs.
        without_privileges: enforce permission bits for root, too.
        timeout: seconds; only a hanging command takes so long.
        environment: additional variables.
    """
    words = list(map(str, arguments))
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        child = _APART.Process(
            target=_run, args=(words, at, files, {**os.environ, **environment}, without_privileges)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the import of this module
            child.start()
        child.join(timeout)
        if child.exitcode is None:
            child.kill()
            child.join()
            raise subprocess.TimeoutExpired(words, timeout)
        out, err = (Path(file).read_bytes() for file in files)
    return Done(child.exitcode, out, err)


def _run(
    words: Sequence[str],
    at: Path,
    files: Sequence[str],
    environment: dict[str, str],
    without_privileges: bool,
) -> None:
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    # Python's encoding if the output is not a terminal.
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(at)
    if without_privileges:
        _heed_permissions()
    _COMMAND(words, prog_name="megapg")


def _heed_permissions() -> None:
    """Give up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, capabilities 1 and 2."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3 of the call, for this process
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same from 32 on
    if libc.capget(header, sets) == 0:
        sets[0] &= ~0b110
        assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
