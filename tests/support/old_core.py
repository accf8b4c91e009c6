"""The installed Megatron-core, and an old one without injection, if it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from processes import captured

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.12.0"
_PLACE = ROOT / ".venv" / "cores" / VERSION  # .ci/venv.sh installs it here
OLD_CORE = _PLACE / "megatron" / "core"


def core_folders() -> list[Path]:
    """Return the folders of the installed core and of the old one."""
    found = importlib.util.find_spec("megatron.core")
    installed = [Path(where) for where in (found and found.submodule_search_locations) or ()]
    return [folder for folder in (*installed, OLD_CORE) if folder.exists()]


def run_on_old_core(*arguments: str | Path) -> str:
    """Run an interpreter that can import only the old core; return its output."""
    if not (_PLACE / "megatron").is_dir():
        if list(_PLACE.parents[1].glob(".ready-*")):
            pytest.fail(f"{_PLACE} is missing: .ci/venv.sh could not install it. Try `make setup`.")
        pytest.skip(f"no Megatron-core {VERSION}: `make setup` installs it")
    paths = os.pathsep.join(map(str, (_PLACE, ROOT, ROOT / "tests" / "support")))
    done = captured(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout
