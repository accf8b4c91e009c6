"""An actor trains, is suspended while the critic trains, and trains on after resume and rebind."""

from layouts import open_session
from models import run_of
from stepwise import build, step, weights


def program():
    with open_session("actor", tp=2) as actor, open_session("critic", pp=2) as critic:
        sessions = (actor, critic)
        jobs = [build(run_of(each.groups), each.groups) for each in sessions]
        for session, job in zip(sessions, jobs, strict=True):
            session.on_resume(lambda groups, session=session, job=job: session.rebind(job))
        for number in range(2):
            for session, other, job in zip(sessions, sessions[::-1], jobs, strict=True):
                other.suspend()
                step(run_of(session.groups), number, job, session.groups)
                other.resume()
        for session, job in zip(sessions, jobs, strict=True):
            weights(job, session.groups)
