"""``pretrain_gpt.py`` runs unchanged on a new session while another session is open."""

import pretraining
from layouts import open_session

CORES = ("0.19",)


def program():
    with open_session("reference") as reference:
        line = pretraining.words(tensor_model_parallel_size=2, train_iters=1)
        seen = pretraining.run_by_megapg(line)
        assert len(seen.losses) == 1
        assert reference.groups.size("tp") == 1
