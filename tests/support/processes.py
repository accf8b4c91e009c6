"""Run other processes, and capture their output."""

import subprocess
from functools import partial

captured = partial(subprocess.run, capture_output=True, text=True)
