"""Jobs of a test module that spend their time waiting: they wait at the same time."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from megapg.testing import distributed, run_distributed


@contextlib.contextmanager
def at_once(jobs):
    """Start them, two at a time; ranks that survive another one live on.

    Args:
        jobs: name -> what each rank calls and how many there are, or what to call here.

    Yields:
        name -> the future of it.
    """
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(distributed, "_GRACE_S", 200.0)
        calls = {
            name: job if callable(job) else partial(run_distributed, *job, deadline=240)
            for name, job in jobs.items()
        }
        try:
            yield {name: pool.submit(call) for name, call in calls.items()}
        finally:
            pool.shutdown(cancel_futures=True)
