"""Run jobs of a test module at the same time, as they mostly wait."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from megapg.testing import distributed, run_distributed


@contextlib.contextmanager
def at_once(jobs):
    """Start the jobs, two at a time; the other ranks of a failed rank may live on.

    Args:
        jobs: name -> the function and number of the ranks, or a function to call here.

    Yields:
        name -> the future of the job.
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
