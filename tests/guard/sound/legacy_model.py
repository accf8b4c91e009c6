"""A legacy model is built and trained on the globals, inside ``allow_global_reads()``."""

from layouts import session_and_globals
from models import TEXT, run_of, train

import megapg
from megapg.demo import gpt as demo

WORLD = 2


def program():
    with session_and_globals({"pp": 2}, tp=2) as pg:
        run = run_of(pg, tp=1, pp=2, layers=2)
        with megapg.allow_global_reads():
            legacy = demo.train(run, TEXT, None).losses
        with megapg.published(pg):
            assert train(pg) != legacy
