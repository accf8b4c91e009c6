"""Old code initialises its layout with megapg's drop-in, beside a session of another layout."""

from layouts import open_session
from models import TEXT, TINY

from megapg.megatron import destroy_model_parallel, initialize_model_parallel
from megapg.tools.demo import gpt as demo


def program():
    with open_session(tp=2):
        initialize_model_parallel(1, create_gloo_process_groups=False)
        try:
            assert len(demo.train(TINY, TEXT, None).losses) == 2
        finally:
            destroy_model_parallel()
