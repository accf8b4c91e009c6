"""A legacy model is built and trained on the globals, inside ``allow_global_reads()``."""

from models import TEXT, run_of, train

import megapg
from megapg.tools.demo import gpt as demo

LAYOUTS = {"globals": {"pp": 2}, "mine": {"tp": 2}}


def program(pg):
    run = run_of(pg, tp=1, pp=2, layers=2)
    with megapg.allow_global_reads():
        legacy = demo.train(run, TEXT, None).losses
    with megapg.published(pg):
        assert train(pg) != legacy
