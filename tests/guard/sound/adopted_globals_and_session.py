"""Groups of the globals are adopted, and a session of another layout trains while published."""

from layouts import globals_of, open_session
from models import TEXT, TINY, train

import megapg
from megapg.megatron import adopt
from megapg.tools.demo import gpt as demo


def program():
    with globals_of(), adopt(), open_session(tp=2) as session:
        with megapg.allow_global_reads():
            assert len(demo.train(TINY, TEXT, None).losses) == 2
        with megapg.published(session.groups):
            assert len(train(session.groups)) == 2
