"""A trainer opens a critic for each phase, inside the session of the actor, and publishes both."""

from layouts import open_session
from models import train

import megapg


def phase(number):
    with open_session(f"critic {number}", pp=2) as critic, megapg.published(critic.groups) as pg:
        return train(pg)


def program():
    with open_session("actor", tp=2) as actor:
        for number in range(2):
            phase(number)
            with megapg.published(actor.groups):
                train(actor.groups)
