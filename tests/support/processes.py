"""Other processes, for tests that read what they say."""

import subprocess
from functools import partial

captured = partial(subprocess.run, capture_output=True, text=True)
