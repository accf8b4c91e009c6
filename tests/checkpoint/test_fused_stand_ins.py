"""The stand-ins of the fused optimizers compute what torch's do, and leave nothing behind."""

import contextlib
import importlib
import sys

import pytest
import torch
from fused_adam import ApexFusedAdam, TEFusedAdam, TEFusedAdamOfMain, fused

pytestmark = pytest.mark.contract

KINDS = [TEFusedAdam, TEFusedAdamOfMain, ApexFusedAdam]


def train(make, dtype=torch.float32, steps=4, name="grad"):
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(7, 3).to(dtype))
    optimizer = make([param])
    for _ in range(steps):
        setattr(param, name, torch.randn(7, 3).to(dtype))
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_fused_adam_steps_as_torchs_does(kind, decoupled):
    like = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected, _ = train(lambda params: like(params, lr=0.1, weight_decay=0.1))
    got, optimizer = train(
        lambda params: kind(params, lr=0.1, weight_decay=0.1, adam_w_mode=decoupled)
    )
    torch.testing.assert_close(got, expected)
    assert not isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["step"] == 4
    assert set(optimizer.state[got]) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("kind", KINDS)
def test_which_groups_without_parameters_count_their_steps(kind):
    optimizer = kind([{"params": [torch.nn.Parameter(torch.ones(1))]}, {"params": []}])
    optimizer.step()
    counts = ["step" in group for group in optimizer.param_groups]
    assert counts == [True, kind is TEFusedAdamOfMain]


def test_the_16_bits_below_a_parameter_are_its_main_parameter():
    halves = {"master_weights": True, "use_decoupled_grad": True, "lr": 0.1}
    whole, plain = train(
        lambda params: TEFusedAdam(params, **halves), torch.bfloat16, 9, "decoupled_grad"
    )
    part, split = train(
        lambda params: TEFusedAdam(params, store_param_remainders=True, **halves),
        torch.bfloat16,
        9,
        "decoupled_grad",
    )
    assert torch.equal(whole, part)
    main, low = plain.state[whole]["master_param"], split.state[part]["master_param"]
    assert low.dtype == torch.int16
    assert torch.equal(main.view(torch.int32).to(torch.int16), low)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_states_of_every_type_are_loaded_as_they_were_saved(dtype):
    def make(params):
        master = {"master_weights": True, "master_weight_dtype": torch.float16}
        return TEFusedAdam(params, lr=0.1, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, **master)

    param, optimizer = train(make, torch.bfloat16)
    other, resumed = train(make, torch.bfloat16, steps=0)
    resumed.load_state_dict(optimizer.state_dict())
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        unscaled = optimizer.get_unscaled_state(param, name)
        assert torch.equal(resumed.get_unscaled_state(other, name), unscaled)
    assert resumed.param_groups[0]["step"] == 4


@pytest.mark.parametrize("kind", ["te", "te-main", "apex"])
def test_the_block_is_undone(kind):
    core = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    before = dict(vars(core)), dict(vars(distributed))
    with contextlib.suppress(RuntimeError), fused(kind):
        assert core.Adam is distributed.Adam
        assert issubclass(core.Adam, (TEFusedAdam, ApexFusedAdam))
        assert ("transformer_engine" in sys.modules) == (kind != "apex")
        raise RuntimeError
    assert before == (vars(core), vars(distributed))
    assert "transformer_engine" not in sys.modules
