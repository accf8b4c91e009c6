"""A program describes, checks and warms up its sessions while it has two layouts."""

from layouts import open_session

import megapg
from megapg.megatron import forbid_global_reads


def program():
    with open_session("actor", tp=2) as actor, open_session("critic") as critic:
        for session in (actor, critic):
            pg = session.groups
            assert pg.describe()["tp"] == list(pg.ranks("tp"))
            assert megapg.resolve(pg, needs=("tp", "dp")) is pg
            assert repr(session)
            session.warm_up()
            with forbid_global_reads():
                pg.require("tp", "pp", "dp_cp")
            assert pg.mesh("dp", "tp").size() == 2
