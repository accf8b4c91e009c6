"""The CPU kit: its patches are undone, and its replacements work."""

import logging
import pkgutil
import types

import pytest
import torch
from megatron.core.tensor_parallel import random as core_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

import megapg.testing
from megapg.testing import megatron_on_cpu
from megapg.testing.cpu import PATCHES

pytestmark = pytest.mark.contract

RNG_LOG = logging.getLogger("megatron.core.tensor_parallel.random")
ALARM = "CPU RNG state changed within GPU RNG context"


def watched():
    owners = {patch.owner for patch in PATCHES}
    owners |= {"torch", "torch.cuda", "torch.autograd", "torch:Tensor", "torch.distributed"}
    return {name: pkgutil.resolve_name(name) for name in sorted(owners)}


def snapshot():
    attributes = {name: dict(vars(owner)) for name, owner in watched().items()}
    filters = [logger.filters[:] for logger in (RNG_LOG, logging.getLogger())]
    modes = torch.overrides._get_current_function_mode_stack()
    return attributes, filters, modes


def assert_undone(before):
    after = snapshot()
    assert after[1:] == before[1:]
    for owner, attributes in after[0].items():
        was = before[0][owner]
        assert was.keys() <= attributes.keys(), owner
        for name, value in attributes.items():
            if name not in was:  # torch loads some submodules on first use
                assert isinstance(value, types.ModuleType), f"{owner}.{name} is new"
            else:
                assert value is was[name], f"{owner}.{name}"


def assert_inside():
    assert torch.cuda.is_available() is False
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.ones(2, device="cuda").device.type == "cpu"
    assert torch.ones(2).cuda().device.type == "cpu"
    assert not RNG_LOG.filter(logging.makeLogRecord({"msg": ALARM}))
    assert RNG_LOG.filter(logging.makeLogRecord({"msg": "anything else"}))


def fail_inside():
    with megatron_on_cpu():
        raise ZeroDivisionError


def test_everything_is_put_back_also_by_nested_blocks_and_after_an_exception():
    before = snapshot()
    with megatron_on_cpu():
        assert vars(torch.cuda)["is_available"] is not before[0]["torch.cuda"]["is_available"]
        outer = snapshot()
        with megatron_on_cpu():
            assert_inside()
        assert_undone(outer)
        with pytest.raises(ZeroDivisionError):
            fail_inside()
        assert_undone(outer)
        assert_inside()
    assert_undone(before)
    assert RNG_LOG.filter(logging.makeLogRecord({"msg": ALARM}))


def test_a_failure_on_the_way_in_is_undone_as_well(monkeypatch):
    before = snapshot()
    monkeypatch.setattr("megapg.testing.cpu._CudaMeansCpu", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), megatron_on_cpu():
        pass
    assert_undone(before)


def test_forking_the_rng_tracker_switches_streams():
    def stream_of(seed):
        torch.manual_seed(seed)
        return torch.rand(8)

    tracker = core_random.get_cuda_rng_tracker()
    states = tracker.get_states()
    try:
        with megatron_on_cpu(), torch.random.fork_rng(devices=[]):
            core_random.model_parallel_cuda_manual_seed(
                1234, tp_rank=1, ep_rank=0, etp_rank=0, force_reset_rng=True
            )
            tracker = core_random.get_cuda_rng_tracker()
            outside = torch.rand(4)
            with tracker.fork():
                inside = torch.rand(4)
            outside = torch.cat([outside, torch.rand(4)])
            with tracker.fork():
                inside = torch.cat([inside, torch.rand(4)])
            # Two independent streams.
            assert torch.equal(outside, stream_of(1234))
            assert torch.equal(inside, stream_of(1234 + 2718 + 1))
    finally:
        tracker.set_states(states)


def test_layer_norm_under_sequence_parallelism():
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    with megatron_on_cpu():
        norm = WrappedTorchNorm(config, 8)
        assert isinstance(norm, torch.nn.LayerNorm)
        # finalize_model_grads sums the gradients of marked parameters.
        assert all(parameter.sequence_parallel for parameter in norm.parameters())
        assert config.sequence_parallel
    with pytest.raises(AssertionError, match="sequence parallel"):
        WrappedTorchNorm(config, 8)


def test_dir_lists_the_names_of_the_testing_package():
    assert {*megapg.testing.__all__} <= {*dir(megapg.testing)}
