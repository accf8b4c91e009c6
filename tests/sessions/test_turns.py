"""Models of two layouts take turns in one process, and train as each does alone."""

import random
import warnings
from dataclasses import replace

import pytest
import torch
from resuming import sizes
from stepwise import build, distributed, step, weights

import megapg
from megapg.errors import SessionError, WrongGroupError
from megapg.megatron import parallel_state
from megapg.rng import RandomStreams
from megapg.testing import megatron_on_cpu
from megapg.tools.demo.job import GPTRun

ACTOR = GPTRun(tp=2, steps=3, layers=2, hidden=32, seq_length=32, num_microbatches=2, dropout=0.2)
CRITIC = replace(ACTOR, tp=1, pp=2, seed=4321)


class Engine:
    """An engine of a framework: it takes its groups from the globals."""

    def __init__(self, run, name):
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(run.tp, run.pp)
        self.run, self.name = run, name
        self.job = build(run)

    def train(self, number):
        return self._step(number)

    def _step(self, number):
        return step(self.run, number, self.job)

    def per_parameter(self):
        return self._parameters(), self.name

    def _parameters(self):
        for name, parameter in self.job[0][0].named_parameters():
            yield name, tuple(parameter.shape), parallel_state.get_tensor_model_parallel_rank()

    def digest(self):
        return weights(self.job)


def open_session(run, name):
    return megapg.session(name=name, timeout=60, **sizes(run))


def alone(run, name):
    engine = megapg.on_session(Engine, open_session)(run, name)
    with engine.session:
        return [engine.train(number) for number in range(run.steps)], engine.digest()


def size_in_globals(pg):
    return parallel_state.get_tensor_model_parallel_world_size()


def together():
    """Return losses and weights of both models, with a suspension after every step of each."""
    own = megapg.on_session(Engine, open_session)
    actor, critic = engines = own(ACTOR, "actor"), own(CRITIC, "critic")
    with actor.session, critic.session:
        losses = {engine.name: [] for engine in engines}
        for number in range(ACTOR.steps):
            for engine in engines:
                losses[engine.name].append(engine.train(number))
                megapg.suspend(actor.session, critic.session)
                with pytest.raises(SessionError, match="suspended"):
                    actor.train(number)
                megapg.resume(actor.session, critic.session)
                for each in engines:
                    assert each.session.rebind(each).complete
        tensors, name = actor.per_parameter()
        ranks = {rank for *_, rank in tensors}  # no turn is open between two tensors
        assert (ranks, name) == ({actor.session.groups.rank("tp")}, "actor")
        with actor.turn, pytest.raises(WrongGroupError):  # the guard is on
            size_in_globals(critic.session.groups)
        return [(losses[engine.name], engine.digest()) for engine in engines]


def both_ways():
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    with megatron_on_cpu(), megapg.guard("error"):
        return together(), [alone(ACTOR, "first"), alone(CRITIC, "second")]


@pytest.mark.contract
def test_engines_of_two_layouts_train_as_each_does_alone():
    for two, single in distributed(both_ways, 4):
        assert two == single
        assert [len(set(losses)) for losses, _ in two] == [3, 3]


def test_streams_of_one_model_are_not_drawn_by_another():
    def draw():
        return random.random(), torch.rand(1).item()

    with megapg.fork_rng():
        random.seed(7)
        torch.manual_seed(7)
        expected = [draw() for _ in range(2)]
        streams = RandomStreams()
        outside = []
        for number in range(2):
            with streams.in_use():
                if number == 0:
                    random.seed(7)
                    torch.manual_seed(7)
                assert draw() == expected[number]
            outside.append(draw())
        with pytest.raises(ZeroDivisionError), streams.in_use():
            _ = draw()[0] / 0
        outside.append(draw())
        random.seed(7)
        torch.manual_seed(7)
        assert [draw() for _ in range(5)][2:] == outside


class Names:
    def __init__(self, attribute):
        self.attribute = attribute
        setattr(self, attribute, "its own")


@pytest.mark.parametrize("name", ["session", "turn"])
def test_a_class_that_uses_the_names_is_refused(name):
    own = megapg.on_session(Names, lambda _: megapg.session(launch=megapg.Launch.alone()))
    with pytest.raises(SessionError, match=f"Names uses the attribute '{name}' itself"):
        own(name)
    assert not megapg.open_sessions()
    assert own("other").attribute == "other"
