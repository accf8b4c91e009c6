"""A loaded scheduler equals the saved one; a refused load leaves the scheduler unchanged."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from resuming import RUN, Training, distributed, published_groups
from torch.optim import lr_scheduler as torch_schedulers

from megapg.checkpoint import scheduler as schedulers
from megapg.errors import CheckpointMismatchError

pytestmark = pytest.mark.contract

SAVED, USED = 5, 8


def megatrons(optimizer, **changed):
    """Return Megatron's scheduler with another learning rate and weight decay at every step."""
    options = {
        "init_lr": 0.0,
        "max_lr": 1e-2,
        "min_lr": 1e-5,
        "lr_warmup_steps": 3,
        "lr_decay_steps": 100,
        "lr_decay_style": "cosine",
        "start_wd": 0.01,
        "end_wd": 0.1,
        "wd_incr_steps": 50,
        "wd_incr_style": "linear",
    }
    return OptimizerParamScheduler(optimizer, **{**options, **changed})


def values(optimizer):
    """Return the group values, without the step that Megatron-core leaves in a loaded group."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "step")}
        for group in optimizer.param_groups
    ]


def state(scheduler):
    return copy.deepcopy(scheduler.state_dict()), values(scheduler.optimizer)


# -- through load_checkpoint -----------------------------------------------------------------------


def job_of(run, pg):
    job = Training(run, pg)
    for group in job.optimizer.param_groups:
        group["min_lr"] = 1e-5  # None with an OptimizerConfig that has no schedule
    return job


def roll_back(root):
    with published_groups() as pg:
        job = job_of(RUN, pg)
        scheduler = megatrons(job.optimizer)
        for step in range(SAVED):
            job.steps(step, step + 1)
            scheduler.step(1)
        job.save(root, SAVED, scheduler=scheduler)
        saved = state(scheduler)

        def used(**changed):
            other = megatrons(job.optimizer, **changed)
            for _ in range(USED):
                other.step(1)
            return other

        for scheduler in (used(), megatrons(job.optimizer)):
            job.load(root, scheduler=scheduler)
            assert scheduler.num_steps == SAVED
            assert state(scheduler) == saved
        # The scheduler's weight decay differs, and so did that of the groups.
        other = used(start_wd=0.0, end_wd=0.0)
        job.load(root, scheduler=other)
        assert state(other) == saved
        # If the scheduler keeps its own learning rate, the optimizer's saved rate is not restored.
        own = used(
            max_lr=5e-3, use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True
        )
        job.load(root, scheduler=own)
        assert (own.num_steps, own.max_lr) == (SAVED, 5e-3)
        assert [g["lr"] for g in job.optimizer.param_groups] == [
            own.get_lr(group) for group in job.optimizer.param_groups
        ]
        # The load is refused by another part, and then by the scheduler itself.
        wider = job_of(replace(RUN, hidden=64), pg)
        scheduler = megatrons(wider.optimizer)
        for _ in range(USED):
            scheduler.step(1)
        before = state(scheduler)
        with pytest.raises(CheckpointMismatchError, match="has shape"):
            wider.load(root, scheduler=scheduler)
        assert state(scheduler) == before
        strict = used(
            end_wd=0.2, wd_incr_steps=70, use_checkpoint_opt_param_scheduler=False
        )  # refused half-way, after the steps were added
        before = state(strict)
        with pytest.raises(CheckpointMismatchError, match="scheduler does not take"):
            job.load(root, scheduler=strict)
        assert state(strict) == before
        job.let_go()
        wider.let_go()


def test_rolling_back_sets_the_scheduler_back(tmp_path):
    distributed(partial(roll_back, str(tmp_path)), 1)


# -- every kind ------------------------------------------------------------------------------------

KINDS = {
    "Megatron's": megatrons,
    "StepLR": partial(torch_schedulers.StepLR, step_size=2, gamma=0.5),
    "MultiStepLR": partial(torch_schedulers.MultiStepLR, milestones=[2, 6]),
    "CosineAnnealingWarmRestarts": partial(
        torch_schedulers.CosineAnnealingWarmRestarts, T_0=4, T_mult=2
    ),
    "OneCycleLR": partial(torch_schedulers.OneCycleLR, max_lr=0.1, total_steps=40),
    "LambdaLR": partial(torch_schedulers.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "SequentialLR": lambda optimizer: torch_schedulers.SequentialLR(
        optimizer,
        [
            torch_schedulers.LinearLR(optimizer, total_iters=4),
            torch_schedulers.ExponentialLR(optimizer, gamma=0.9),
        ],
        milestones=[4],
    ),
}


def made(kind, steps):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(3))], lr=0.05)
    scheduler = KINDS[kind](optimizer)
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1] if kind == "Megatron's" else []))
    return scheduler


def next_rates(scheduler, kind):
    rates = []
    for _ in range(6):
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step(*([1] if kind == "Megatron's" else []))
    return rates


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("used", [0, 3, USED])
def test_the_next_rates_are_those_of_the_uninterrupted_run(kind, used):
    """The rates are right even if the optimizer was not loaded."""
    saved = made(kind, SAVED)
    kept = copy.deepcopy(saved.state_dict())
    resumed = made(kind, used)
    schedulers.check(resumed, kept)
    schedulers.restore(resumed, kept)
    assert schedulers._equal(resumed.state_dict(), kept)
    assert next_rates(resumed, kind) == next_rates(saved, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_changes_nothing(kind):
    scheduler, untouched = made(kind, USED), made(kind, USED)
    kept = made(kind, SAVED).state_dict()
    schedulers.check(scheduler, kept)
    assert state(scheduler) == state(untouched)
    with pytest.raises(CheckpointMismatchError, match="scheduler does not take"):
        schedulers.check(scheduler, dict.fromkeys(kept, Unusable()) | {"_schedulers": Unusable()})
    assert state(scheduler) == state(untouched)
    assert next_rates(scheduler, kind) == next_rates(untouched, kind)


class Unusable:
    """A value that no scheduler state may contain."""

    def __deepcopy__(self, memo):
        raise ValueError("unusable")


class Adding:
    """A scheduler that adds to its own attribute when it loads."""

    def __init__(self, seen=0):
        self.seen = seen

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen += state["seen"]


class Slots:
    """A scheduler without ``__dict__``."""

    __slots__ = ("done",)

    def __init__(self, done):
        self.done = done

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]
        if self.done < 0:
            raise ValueError("negative")


def test_one_that_adds_in_a_way_nobody_knows_is_refused():
    scheduler = Adding(3)
    with pytest.raises(CheckpointMismatchError, match=r"Adding\.load_state_dict adds.*seen"):
        schedulers.check(scheduler, {"seen": 5})
    assert scheduler.seen == 3


class OfSteps:
    """A scheduler in which ``num_steps`` is the total and not part of the state."""

    def __init__(self, optimizer, num_steps):
        self.optimizer, self.num_steps, self.now = optimizer, num_steps, 0

    def state_dict(self):
        return {"now": self.now}

    def load_state_dict(self, state):
        self.now = state["now"]


def test_a_number_of_steps_that_is_no_counter():
    scheduler = OfSteps(None, 100)
    schedulers.check(scheduler, {"now": 5})
    schedulers.restore(scheduler, {"now": 5})
    assert (scheduler.num_steps, scheduler.now) == (100, 5)


class Wrapper:
    """A trainer's scheduler that wraps other schedulers."""

    def __init__(self, *inner, **named):
        self.inner, self.named = list(inner), named

    @property
    def all(self):
        return [*self.inner, *self.named.values()]

    def state_dict(self):
        return {"inner": [each.state_dict() for each in self.all]}

    def load_state_dict(self, state):
        for each, inner in zip(self.all, state["inner"], strict=True):
            each.load_state_dict(inner)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [Wrapper, lambda each: Wrapper(a=Wrapper(each))])
def test_a_scheduler_inside_another(kind, wrap):
    saved = made(kind, SAVED)
    kept = copy.deepcopy(wrap(saved).state_dict())
    scheduler, untouched = made(kind, USED), made(kind, USED)
    schedulers.check(wrap(scheduler), kept)
    assert state(scheduler) == state(untouched)
    with pytest.raises(CheckpointMismatchError, match="scheduler does not take"):
        schedulers.check(Wrapper(scheduler, Slots(3)), {"inner": [*kept["inner"], {"done": -1}]})
    assert state(scheduler) == state(untouched)
    schedulers.restore(wrap(scheduler), kept)
    assert schedulers._equal(scheduler.state_dict(), saved.state_dict())
    assert next_rates(scheduler, kind) == next_rates(saved, kind)


def test_what_is_put_back_is_the_same_object():
    """Other objects hold references to it: a list of rates, a tensor of a CUDA graph, a wrapper."""

    class Listing(Slots):
        def load_state_dict(self, state):
            self.rates.append(7)
            self.table["x"].fill_(7)
            self.array[:] = 7
            self.rates, self.table = [], {}

    scheduler = Listing(3)
    rates, tensor, array = [1, 2], torch.ones(2), np.ones(2)
    scheduler.rates, scheduler.table, scheduler.array = rates, {"x": tensor}, array
    with pytest.raises(CheckpointMismatchError):
        schedulers.check(scheduler, {"done": 5})
    assert scheduler.rates is rates == [1, 2]
    assert scheduler.table["x"] is tensor
    assert tensor.tolist() == array.tolist() == [1, 1]


def test_one_without_attributes_to_put_back():
    scheduler = Slots(3)
    schedulers.check(scheduler, {"done": 5})
    assert scheduler.done == 3
    with pytest.raises(CheckpointMismatchError, match="negative"):
        schedulers.check(scheduler, {"done": -1})
    assert scheduler.done == 3


def test_a_rate_in_a_tensor_is_filled_in_place():
    scheduler = made("StepLR", USED)
    rate = scheduler.optimizer.param_groups[0]["lr"] = torch.tensor(0.3)
    schedulers.check(scheduler, made("StepLR", SAVED).state_dict())
    assert scheduler.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.3)
