"""Run other processes, and capture their output."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

from ports import free_port

captured = partial(subprocess.run, capture_output=True, text=True)


def run_script(text, folder, ranks, *arguments, awaited=None):
    """Return standard output and error of each rank of a script.

    If ``awaited`` is given, the other ranks are killed when this rank has ended.
    """
    script = folder / "job.py"
    script.write_text(text)
    where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    where["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    jobs = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *arguments],
            env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for rank in range(ranks)
    ]
    if awaited is not None:
        end = jobs[awaited].communicate(timeout=150)
        for job in jobs:
            job.kill()
            job.wait()
        return end
    return [job.communicate(timeout=150) for job in jobs]
