"""One session is suspended while another trains, and is closed without having been resumed."""

from layouts import open_session
from models import train

import megapg


def program():
    with open_session("actor", tp=2) as actor, open_session("critic") as critic:
        actor.suspend()
        with megapg.published(critic.groups):
            assert len(train(critic.groups)) == 2
